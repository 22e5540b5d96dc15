//! The transports of an engine, and what follows from which there are.

use std::sync::Arc;

use parking_lot::RwLock;
use posthorse_core::{Capabilities, Error, ErrorKind, Grants, Result, Route, Transport, TransportId};
use serde_json::Value;

use crate::config::{EngineConfig, Precedence, TransportChoice};
use crate::slicing::SliceLength;

/// A number that no transport has: what is required of it reaches nobody.
const NOBODY: TransportId = TransportId(u8::MAX);

/// A transport and what it said of itself when it was started.
#[derive(Debug, Clone)]
pub(crate) struct Slot {
    pub(crate) id: TransportId,
    pub(crate) name: String,
    pub(crate) transport: Arc<dyn Transport>,
    pub(crate) published: Value,
    pub(crate) capabilities: Capabilities,
    standing: Standing,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Standing {
    Starting,
    Installed,
    Gone,
}

/// See the module's documentation.
#[derive(Debug)]
pub(crate) struct Transports {
    /// The names in the configured order of preference.
    order: Vec<String>,
    preference: TransportChoice,
    slice_bytes: u64,
    state: RwLock<State>,
}

#[derive(Debug)]
struct State {
    /// By number. Numbers are not used again after an uninstall.
    slots: Vec<Slot>,
    route: Route,
    slice_length: SliceLength,
    /// Those that need what was published with a peer's memory.
    keyed: Arc<[(TransportId, String)]>,
    /// Those that come with Posthorse, and cannot be had on this host.
    lacking: Vec<(String, Error)>,
}

impl Transports {
    pub(crate) fn new(config: &EngineConfig) -> Result<Self> {
        let slice_length = SliceLength { preferred: u64::MAX, max: u64::MAX };
        Ok(Self {
            order: config.transport_order.clone(),
            preference: config.transport.clone(),
            slice_bytes: config.slice_bytes,
            state: RwLock::new(State {
                slots: Vec::new(),
                route: Route::Auto,
                slice_length,
                keyed: Arc::default(),
                lacking: Vec::new(),
            }),
        })
    }

    /// Takes a number for a transport that is about to be started. Until [`Transports::started`] nobody else finds it.
    pub(crate) fn reserve(&self, transport: &Arc<dyn Transport>) -> Result<TransportId> {
        let (name, capabilities) = (transport.name().to_owned(), transport.capabilities());
        let mut state = self.state.write();
        if state.slots.iter().any(|slot| slot.name == name && slot.standing != Standing::Gone) {
            return Err(Error::new(ErrorKind::Busy, format!("a transport {name:?} is installed already")));
        }
        let id = u8::try_from(state.slots.len()).map(TransportId).ok().filter(|id| *id != NOBODY);
        let id = id.ok_or_else(|| {
            let text = "255 transports were installed, which is the most there can be";
            Error::new(ErrorKind::LimitReached, text)
        })?;
        state.slots.push(Slot {
            id,
            name,
            transport: Arc::clone(transport),
            published: Value::Null,
            capabilities,
            standing: Standing::Starting,
        });
        Ok(id)
    }

    /// Notes that a transport which comes with Posthorse cannot be had on this host, and why.
    pub(crate) fn lack(&self, name: &str, error: Error) {
        self.state.write().lacking.push((name.to_owned(), error));
    }

    /// What comes with Posthorse and cannot be had on this host, unless it was installed since.
    pub(crate) fn lacking(&self) -> Vec<(String, Error)> {
        let state = self.state.read();
        let installed = |name: &str| {
            state.slots.iter().any(|slot| slot.name == name && slot.standing == Standing::Installed)
        };
        state.lacking.iter().filter(|(name, _)| !installed(name)).cloned().collect()
    }

    /// The transports that need what was published with a peer's memory.
    pub(crate) fn keyed(&self) -> Arc<[(TransportId, String)]> {
        Arc::clone(&self.state.read().keyed)
    }

    /// Installs a transport that was started.
    pub(crate) fn started(&self, id: TransportId, published: Value) {
        let mut state = self.state.write();
        if let Some(slot) = state.slots.get_mut(usize::from(id.0)) {
            slot.published = published;
            slot.standing = Standing::Installed;
        }
        self.settle(&mut state);
    }

    /// Gives up the number of a transport that was not started, or takes an installed one out: `None` when somebody
    /// else has.
    pub(crate) fn take_out(&self, id: TransportId) -> Option<Arc<dyn Transport>> {
        let mut state = self.state.write();
        let slot = state.slots.get_mut(usize::from(id.0)).filter(|slot| slot.standing != Standing::Gone)?;
        slot.standing = Standing::Gone;
        let transport = Arc::clone(&slot.transport);
        self.settle(&mut state);
        Some(transport)
    }

    /// The transports that are installed, best first.
    pub(crate) fn installed(&self) -> Vec<Slot> {
        let state = self.state.read();
        let installed = state.slots.iter().filter(|slot| slot.standing == Standing::Installed);
        let mut installed: Vec<Slot> = installed.cloned().collect();
        drop(state);
        installed
            .sort_by_key(|slot| self.order.iter().position(|name| *name == slot.name).unwrap_or(usize::MAX));
        installed
    }

    /// The numbers and names of the installed transports, best first.
    pub(crate) fn names(&self) -> Vec<(TransportId, String)> {
        self.installed().into_iter().map(|slot| (slot.id, slot.name)).collect()
    }

    /// What a transport is called, or was before it was uninstalled.
    pub(crate) fn name(&self, id: TransportId) -> String {
        let state = self.state.read();
        state.slots.get(usize::from(id.0)).map(|slot| slot.name.clone()).unwrap_or_default()
    }

    pub(crate) fn get(&self, id: TransportId) -> Option<Arc<dyn Transport>> {
        let state = self.state.read();
        let slot = state.slots.get(usize::from(id.0)).filter(|slot| slot.standing == Standing::Installed)?;
        Some(Arc::clone(&slot.transport))
    }

    /// # Errors
    /// `NotFound`, naming those that are installed.
    pub(crate) fn find(&self, name: &str) -> Result<(TransportId, Arc<dyn Transport>)> {
        let installed = self.installed();
        let found = installed.iter().find(|slot| slot.name == name);
        found.map(|slot| (slot.id, Arc::clone(&slot.transport))).ok_or_else(|| {
            let names: Vec<_> = installed.iter().map(|slot| slot.name.as_str()).collect();
            Error::new(
                ErrorKind::NotFound,
                format!("no transport {name:?} is installed; installed: {}", names.join(", ")),
            )
        })
    }

    /// The names in the configured order that stand for nothing: most likely they are misspelt.
    pub(crate) fn unknown_in_order(&self) -> Vec<&str> {
        // The default order names what may be built in.
        let mut known = EngineConfig::default().transport_order;
        known.extend(self.names().into_iter().map(|(_, name)| name));
        self.order
            .iter()
            .map(String::as_str)
            .filter(|name| !known.iter().any(|known| known == name))
            .collect()
    }

    /// Why requests that leave their route open get none, or not the one that was meant: the configuration names a
    /// transport that is not installed.
    pub(crate) fn missing(&self) -> Option<Error> {
        let (TransportChoice::Prefer(wanted) | TransportChoice::Require(wanted)) = &self.preference else {
            return None;
        };
        let names: Vec<String> = self.installed().into_iter().map(|slot| slot.name).collect();
        if names.contains(wanted) {
            return None;
        }
        let lacking = self.lacking().into_iter().find(|(name, _)| name == wanted);
        let why = lacking.as_ref().map_or_else(String::new, |(_, error)| format!(" ({})", error.message()));
        let message = format!(
            "transport is {}, which is not installed{why}; installed: {}",
            self.preference,
            names.join(", ")
        );
        let error = Error::new(ErrorKind::NoPath, message);
        Some(match lacking.as_ref().and_then(|(_, error)| error.advice()) {
            Some(advice) => error.with_advice(advice.to_owned()),
            None => error,
        })
    }

    /// As [`Transports::missing`], for a request that fails of it.
    pub(crate) fn unreachable(&self, route: Route) -> Option<Error> {
        if route == Route::Require(NOBODY) { self.missing() } else { None }
    }

    /// The route of requests on which a peer has a say, by what it says of itself.
    ///
    /// # Errors
    /// `NoPath` when the two exclude each other; `Malformed` for what is no preference.
    pub(crate) fn route_with(&self, theirs: &str, precedence: Precedence) -> Result<Route> {
        let found = |name: &str| self.find(name).map(|(id, _)| id);
        let cannot = |why: &str| {
            let message = format!("transport is {} here and {theirs} at the peer: {why}", self.preference);
            Error::new(ErrorKind::NoPath, message)
        };
        let parsed = theirs.parse().map_err(|error: Error| {
            let message = format!("what the peer says of its transport: {}", error.message());
            Error::new(ErrorKind::Malformed, message)
        })?;
        match (&self.preference, parsed) {
            (TransportChoice::Require(ours), TransportChoice::Require(theirs)) if *ours != theirs => {
                Err(cannot("no transport is both"))
            }
            (_, TransportChoice::Require(name)) => {
                found(&name).map(Route::Require).map_err(|error| cannot(error.message()))
            }
            (TransportChoice::Prefer(_), TransportChoice::Prefer(_)) if precedence == Precedence::Ours => {
                Ok(Route::Auto)
            }
            (TransportChoice::Auto | TransportChoice::Prefer(_), TransportChoice::Prefer(name)) => {
                Ok(found(&name).map_or(Route::Auto, Route::Prefer))
            }
            _ => Ok(Route::Auto),
        }
    }

    /// What this engine prefers or requires, as [`EngineConfig::transport`](crate::EngineConfig) says it.
    pub(crate) const fn preference(&self) -> &TransportChoice {
        &self.preference
    }

    /// The route of requests that leave it open.
    pub(crate) fn route(&self) -> Route {
        self.state.read().route
    }

    /// Where requests are cut.
    pub(crate) fn slice_length(&self) -> SliceLength {
        self.state.read().slice_length
    }

    /// Recomputes what follows from the set of transports.
    fn settle(&self, state: &mut State) {
        let installed = || state.slots.iter().filter(|slot| slot.standing == Standing::Installed);
        let least = |what: fn(&Capabilities) -> u64| {
            installed().map(|slot| what(&slot.capabilities)).min().unwrap_or(u64::MAX)
        };
        let preferred = match self.slice_bytes {
            0 => least(|known| known.preferred_slice),
            bytes => bytes,
        };
        let slice_length = SliceLength { preferred, max: least(|known| known.max_slice) };
        let keyed = installed().filter(|slot| slot.capabilities.grants == Grants::Keyed);
        let keyed = keyed.map(|slot| (slot.id, slot.name.clone())).collect();
        let named = |name: &str| installed().find(|slot| slot.name == name).map(|slot| slot.id);
        let route = match &self.preference {
            TransportChoice::Auto => Route::Auto,
            TransportChoice::Prefer(name) => named(name).map_or(Route::Auto, Route::Prefer),
            // A transport that is not there (yet) reaches nobody.
            TransportChoice::Require(name) => Route::Require(named(name).unwrap_or(NOBODY)),
        };
        (state.slice_length, state.route, state.keyed) = (slice_length, route, keyed);
    }
}

#[cfg(test)]
mod tests {
    use posthorse_testkit::MemoryHub;

    use super::*;

    #[test]
    fn names_in_the_order_that_stand_for_nothing_are_found() {
        let order = ["smh", "memory", "tcp", "rdma"].map(str::to_owned).to_vec();
        let transports =
            Transports::new(&EngineConfig { transport_order: order, ..EngineConfig::default() }).unwrap();
        assert_eq!(transports.unknown_in_order(), ["smh", "memory"]);
        let memory: Arc<dyn Transport> = MemoryHub::new().transport();
        let id = transports.reserve(&memory).unwrap();
        transports.started(id, Value::Null);
        assert_eq!(transports.unknown_in_order(), ["smh"]);
        transports.take_out(id);
        assert_eq!((transports.name(id).as_str(), transports.name(NOBODY).as_str()), ("memory", ""));
    }
}
