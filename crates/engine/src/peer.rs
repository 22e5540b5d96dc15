//! Peers: what is known of them, how each transport reaches them, and what waits for a way to them.

use std::collections::HashMap;
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use parking_lot::{Mutex, RwLock};
use posthorse_core::{
    Attributes, Error, ErrorKind, GrantToken, Incarnation, Route, SegmentDesc, SegmentId, TransportId,
};

use crate::path::{PathEntry, Run};
use crate::select::{Choice, Reach, choose};
use crate::signal::Signal;

/// A peer's segment that was opened: one life of one engine.
#[derive(Debug, Clone)]
pub struct Segment {
    pub(crate) peer: Arc<Peer>,
}

impl Segment {
    /// Its number, for requests, while this or another handle of the segment is held: a peer to which no path is up is
    /// forgotten when nobody holds it.
    pub fn id(&self) -> SegmentId {
        self.peer.id
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.peer.name
    }

    /// Which life of the peer this is; `None` for foreign engines, which do not say.
    pub fn incarnation(&self) -> Option<Incarnation> {
        self.peer.incarnation
    }

    /// What the peer published when it was last opened.
    pub fn descriptor(&self) -> Arc<SegmentDesc> {
        Arc::clone(&self.peer.published.read().desc)
    }
}

/// One life of one peer.
#[derive(Debug)]
pub(crate) struct Peer {
    pub(crate) id: SegmentId,
    pub(crate) name: String,
    pub(crate) incarnation: Option<Incarnation>,
    published: RwLock<Published>,
    /// What it published with grants that are held here.
    held: Mutex<HashMap<GrantToken, Held>>,
    reaches: Mutex<Vec<State>>,
    waiting: Mutex<Vec<Run>>,
    /// Why nothing can reach this life of the peer any more.
    ended: OnceLock<Error>,
    /// Rung when a state changes.
    pub(crate) signal: Signal,
}

/// What the peer published with a grant, and how many hold it.
#[derive(Debug)]
struct Held {
    keys: Arc<Attributes>,
    holders: usize,
}

/// What the peer published, when it was last asked.
#[derive(Debug)]
struct Published {
    desc: Arc<SegmentDesc>,
    /// What it published with each buffer, for the transports that need it.
    keys: Vec<Arc<Attributes>>,
    /// Indices into the descriptor's buffers, by address.
    by_address: Vec<u32>,
}

impl Published {
    fn new(desc: SegmentDesc) -> Self {
        let mut by_address: Vec<u32> = (0..desc.buffers.len() as u32).collect();
        by_address.sort_by_key(|index| desc.buffers[*index as usize].address);
        let keys = desc.buffers.iter().map(|buffer| Arc::new(buffer.attributes.clone())).collect();
        Self { desc: Arc::new(desc), keys, by_address }
    }

    /// The token of the buffer that contains the whole range, and what was published with it.
    fn at(&self, address: u64, len: u64) -> Option<(Option<GrantToken>, &Arc<Attributes>)> {
        let buffers = &self.desc.buffers;
        let behind = self.by_address.partition_point(|index| buffers[*index as usize].address <= address);
        let index = *self.by_address.get(behind.checked_sub(1)?)? as usize;
        let buffer = buffers.get(index).filter(|buffer| buffer.contains(address, len))?;
        Some((buffer.token, self.keys.get(index)?))
    }
}

/// How one transport reaches the peer.
#[derive(Debug)]
struct State {
    transport: TransportId,
    name: String,
    how: How,
}

#[derive(Debug)]
pub(crate) enum How {
    /// The peer or we do not have the transport.
    Absent,
    /// It was not needed so far.
    Untried,
    Connecting {
        /// Whether it was tried before.
        again: bool,
    },
    Connected(Vec<Arc<PathEntry>>),
    Failed {
        error: Error,
        at: Instant,
    },
}

impl Peer {
    /// A peer as its descriptor says; `transports` are those installed here, in order of preference.
    pub(crate) fn new(id: SegmentId, desc: SegmentDesc, transports: &[(TransportId, String)]) -> Self {
        let reaches = states(&desc, transports);
        Self {
            id,
            name: desc.name.clone(),
            incarnation: desc.incarnation,
            published: RwLock::new(Published::new(desc)),
            held: Mutex::default(),
            reaches: Mutex::new(reaches),
            waiting: Mutex::default(),
            ended: OnceLock::new(),
            signal: Signal::default(),
        }
    }

    /// What the peer published when it was last asked.
    pub(crate) fn desc(&self) -> Arc<SegmentDesc> {
        Arc::clone(&self.published.read().desc)
    }

    /// Whether a descriptor is of this life of the peer. Foreign engines do not say which life it is: the same as
    /// long as they are reached in the same way.
    pub(crate) fn is_same_life(&self, desc: &SegmentDesc) -> bool {
        self.ended.get().is_none()
            && self.incarnation == desc.incarnation
            && (self.incarnation.is_some() || self.published.read().desc.transports == desc.transports)
    }

    /// Takes a newer descriptor of the same life, and what is installed here now, in order of preference.
    pub(crate) fn update(&self, desc: &SegmentDesc, transports: impl FnOnce() -> Vec<(TransportId, String)>) {
        let changed = *self.published.read().desc != *desc;
        if changed {
            *self.published.write() = Published::new(desc.clone());
        }
        let mut reaches = self.reaches.lock();
        // Asked under the lock: what is uninstalled hereafter is forgotten after this.
        let transports = transports();
        if !changed && reaches.iter().map(|state| state.transport).eq(transports.iter().map(|(id, _)| *id)) {
            return;
        }
        let mut known = std::mem::take(&mut *reaches);
        *reaches = states(desc, &transports);
        for state in reaches.iter_mut() {
            let before = known.iter_mut().find(|before| before.transport == state.transport);
            if let Some(before) = before.filter(|before| !matches!(before.how, How::Absent)) {
                state.how = std::mem::replace(&mut before.how, How::Absent);
            }
        }
        // What is known here and not installed is being uninstalled: left for whoever does that to forget, or nobody
        // would give up its paths.
        reaches.extend(known.into_iter().filter(|before| !matches!(before.how, How::Absent)));
    }

    /// Forgets a transport that was uninstalled. Its paths are returned, to be given up.
    #[must_use]
    pub(crate) fn forget(&self, transport: TransportId) -> Vec<Arc<PathEntry>> {
        let gone: Vec<State> =
            self.reaches.lock().extract_if(.., |state| state.transport == transport).collect();
        self.signal.ring();
        let paths = gone.into_iter().filter_map(|state| match state.how {
            How::Connected(entries) => Some(entries),
            _ => None,
        });
        paths.flatten().collect()
    }

    /// Keeps what the peer published with a grant, until it is [let go](Peer::let_go) as often.
    pub(crate) fn hold(&self, token: GrantToken, keys: &Attributes) {
        let mut held = self.held.lock();
        held.entry(token).or_insert_with(|| Held { keys: Arc::new(keys.clone()), holders: 0 }).holders += 1;
    }

    pub(crate) fn let_go(&self, token: GrantToken) {
        let mut all = self.held.lock();
        if let Some(held) = all.get_mut(&token) {
            held.holders -= 1;
            if held.holders == 0 {
                all.remove(&token);
            }
        }
    }

    /// What the peer published with a grant that is held.
    pub(crate) fn held(&self, token: GrantToken) -> Option<Arc<Attributes>> {
        self.held.lock().get(&token).map(|held| Arc::clone(&held.keys))
    }

    /// The token for a range that the peer published, and what it published with it.
    pub(crate) fn published(
        &self,
        address: u64,
        len: u64,
    ) -> Result<(Option<GrantToken>, Arc<Attributes>), Error> {
        let published = self.published.read();
        published.at(address, len).map(|(token, keys)| (token, Arc::clone(keys))).ok_or_else(|| {
            let buffers = published.desc.buffers.len();
            Error::new(
                ErrorKind::OutOfBounds,
                format!(
                    "{len} bytes at {address:#x} lie in none of the {buffers} buffers that the peer published"
                ),
            )
            .with_peer(self.name.as_str())
            .with_advice("ask the peer for a grant, or open the segment again if it registered memory since")
        })
    }

    /// Notes that this life of the peer is over.
    pub(crate) fn end(&self, error: Error) {
        let _ = self.ended.set(error);
        self.signal.ring();
    }

    pub(crate) fn ended(&self) -> Option<&Error> {
        self.ended.get()
    }

    /// What to do with requests of this route; `worth_again` says whether to try a transport that failed so, then.
    pub(crate) fn choose(&self, route: Route, worth_again: impl Fn(&Error, Instant) -> bool) -> Decision {
        self.choose_of(route, |_| true, worth_again)
    }

    /// As [`Peer::choose`], of the transports that are `able` to carry the requests.
    pub(crate) fn choose_of(
        &self,
        route: Route,
        able: impl Fn(TransportId) -> bool,
        worth_again: impl Fn(&Error, Instant) -> bool,
    ) -> Decision {
        if self.ended.get().is_some() {
            return Decision::None;
        }
        let reaches = self.reaches.lock();
        let candidates = reaches.iter().map(|state| {
            let reach = match &state.how {
                _ if !able(state.transport) => Reach::Out,
                How::Connected(entries) => {
                    let up = entries.iter().filter(|entry| entry.is_up());
                    // Connected, and all went down since: worth a new connection.
                    up.min_by_key(|entry| entry.under_way()).map_or(Reach::Again, Reach::Up)
                }
                How::Untried | How::Connecting { again: false } => Reach::New,
                How::Connecting { again: true } => Reach::Again,
                How::Failed { error, at } if worth_again(error, *at) => Reach::Again,
                How::Failed { .. } | How::Absent => Reach::Out,
            };
            (state.transport, reach)
        });
        match choose(route, candidates) {
            Choice::Use(path, again) => Decision::Use(Arc::clone(path), again),
            Choice::Connect(transport) => Decision::Connect(transport),
            Choice::None => Decision::None,
        }
    }

    /// The paths of a transport that are up.
    pub(crate) fn rails(&self, transport: TransportId) -> Vec<Arc<PathEntry>> {
        let reaches = self.reaches.lock();
        let state = reaches.iter().find(|state| state.transport == transport);
        let Some(State { how: How::Connected(entries), .. }) = state else { return Vec::new() };
        entries.iter().filter(|entry| entry.is_up()).cloned().collect()
    }

    /// Begins to connect a transport, unless that is under way or done. The paths it had are returned, to be
    /// given up.
    pub(crate) fn begin_connecting(&self, transport: TransportId) -> Option<Vec<Arc<PathEntry>>> {
        let mut reaches = self.reaches.lock();
        let state = reaches.iter_mut().find(|state| state.transport == transport)?;
        match &mut state.how {
            How::Connecting { .. } | How::Absent => None,
            How::Connected(entries) if entries.iter().any(|entry| entry.is_up()) => None,
            How::Connected(entries) => {
                let old = std::mem::take(entries);
                state.how = How::Connecting { again: true };
                Some(old)
            }
            How::Untried | How::Failed { .. } => {
                let again = matches!(state.how, How::Failed { .. });
                state.how = How::Connecting { again };
                Some(Vec::new())
            }
        }
    }

    /// Notes what became of connecting a transport. The paths are returned when it is no more.
    #[must_use]
    pub(crate) fn connected(
        &self,
        transport: TransportId,
        outcome: Result<Vec<Arc<PathEntry>>, Error>,
    ) -> Vec<Arc<PathEntry>> {
        let mut reaches = self.reaches.lock();
        let mut left = Vec::new();
        if let Some(state) = reaches.iter_mut().find(|state| state.transport == transport) {
            state.how = match outcome {
                Ok(entries) => How::Connected(entries),
                Err(error) => How::Failed { error, at: Instant::now() },
            };
        } else {
            left = outcome.unwrap_or_default();
        }
        drop(reaches);
        self.signal.ring();
        left
    }

    /// Whether a transport is being connected.
    pub(crate) fn is_connecting(&self, transport: TransportId) -> bool {
        let reaches = self.reaches.lock();
        reaches
            .iter()
            .any(|state| state.transport == transport && matches!(state.how, How::Connecting { .. }))
    }

    /// Whether a path to it is up or being made.
    pub(crate) fn is_reached(&self) -> bool {
        self.reaches.lock().iter().any(|state| match &state.how {
            How::Connecting { .. } => true,
            How::Connected(entries) => entries.iter().any(|entry| entry.is_up()),
            How::Absent | How::Untried | How::Failed { .. } => false,
        })
    }

    /// Whether one of this transport's paths to it is up.
    pub(crate) fn is_up_by(&self, transport: TransportId) -> bool {
        let reaches = self.reaches.lock();
        reaches.iter().any(|state| match &state.how {
            How::Connected(entries) if state.transport == transport => {
                entries.iter().any(|entry| entry.is_up())
            }
            _ => false,
        })
    }

    /// Has a run wait until a transport was tried.
    pub(crate) fn wait_for_path(&self, run: Run) {
        self.waiting.lock().push(run);
    }

    /// What waits for a path.
    pub(crate) fn take_waiting(&self, which: impl Fn(&Run) -> bool) -> Vec<Run> {
        let mut waiting = self.waiting.lock();
        if waiting.is_empty() {
            return Vec::new();
        }
        let (taken, left) = std::mem::take(&mut *waiting).into_iter().partition(which);
        *waiting = left;
        taken
    }

    /// All paths, for closing.
    pub(crate) fn take_paths(&self) -> Vec<Arc<PathEntry>> {
        let mut reaches = self.reaches.lock();
        let mut paths = Vec::new();
        for state in reaches.iter_mut() {
            if let How::Connected(entries) = &mut state.how {
                paths.append(entries);
                state.how = How::Untried;
            }
        }
        paths
    }

    /// Looks at each transport's name and state, in order of preference.
    pub(crate) fn for_each_reach(&self, mut look: impl FnMut(&str, &How)) {
        for state in self.reaches.lock().iter() {
            look(&state.name, &state.how);
        }
    }

    /// The error of a request that no transport can carry.
    pub(crate) fn no_path(&self, route: Route) -> Error {
        if let Some(error) = self.ended.get() {
            return error.clone();
        }
        let mut reasons = Vec::new();
        let mut worst: Option<Error> = None;
        for state in self.reaches.lock().iter() {
            if matches!(route, Route::Require(required) if required != state.transport) {
                continue;
            }
            match &state.how {
                How::Absent if matches!(route, Route::Require(_)) => {
                    reasons.push(format!("{}: the peer does not offer it", state.name));
                }
                How::Failed { error, .. } => {
                    reasons.push(format!("{}: {}", state.name, error.message()));
                    worst = Some(error.clone());
                }
                How::Connected(entries) => {
                    let down = entries.iter().find_map(|entry| entry.reason());
                    worst = worst.or(down);
                }
                _ => {}
            }
        }
        // A single transport's reason is the reason; several are told together.
        match worst {
            Some(error) if reasons.len() <= 1 => error.with_peer(self.name.as_str()),
            _ => {
                let reasons =
                    if reasons.is_empty() { "no common transport".to_owned() } else { reasons.join("; ") };
                Error::new(ErrorKind::NoPath, format!("no way to the peer: {reasons}"))
                    .with_peer(self.name.as_str())
            }
        }
    }
}

/// The transports installed here, none of which was tried.
fn states(desc: &SegmentDesc, transports: &[(TransportId, String)]) -> Vec<State> {
    let state = |(transport, name): &(TransportId, String)| State {
        transport: *transport,
        name: name.clone(),
        how: if desc.transports.contains_key(name) { How::Untried } else { How::Absent },
    };
    transports.iter().map(state).collect()
}

/// What to do with a run of requests.
#[derive(Debug)]
pub(crate) enum Decision {
    /// Send it along this path; and connect a better transport meanwhile.
    Use(Arc<PathEntry>, Option<TransportId>),
    /// Connect this transport first.
    Connect(TransportId),
    /// There is no way.
    None,
}

#[cfg(test)]
mod tests {
    use posthorse_core::{Attributes, Path, PathId, PathState, Transport};
    use posthorse_testkit::MemoryHub;
    use serde_json::Value;

    use super::*;

    fn desc(transports: &[&str]) -> SegmentDesc {
        let transports: Attributes =
            transports.iter().map(|name| ((*name).to_owned(), Value::Null)).collect();
        SegmentDesc { name: "b".to_owned(), incarnation: None, hello: None, transports, buffers: Vec::new() }
    }

    fn path(transport: TransportId) -> Arc<PathEntry> {
        let info = Path {
            id: PathId(1),
            local_device: String::new(),
            remote_device: String::new(),
            numa_node: None,
            bandwidth: 0,
            state: PathState::Up,
        };
        let memory: Arc<dyn Transport> = MemoryHub::new().transport();
        Arc::new(PathEntry::new(1, SegmentId(1), transport, memory, info, false))
    }

    #[test]
    fn a_transport_that_is_being_uninstalled_when_its_peer_is_opened_again_is_known_until_it_is_forgotten() {
        let (going, staying) = (TransportId(0), TransportId(1));
        let installed = [(going, "going".to_owned()), (staying, "staying".to_owned())];
        for newer in [desc(&["going", "staying"]), desc(&["staying"])] {
            let peer = Peer::new(SegmentId(1), desc(&["going", "staying"]), &installed);
            let path = path(going);
            assert!(peer.begin_connecting(going).is_some_and(|old| old.is_empty()));
            assert!(peer.connected(going, Ok(vec![Arc::clone(&path)])).is_empty());
            // Nobody finds it any more, and whoever uninstalls it has not come to this peer.
            peer.update(&newer, || vec![(staying, "staying".to_owned())]);
            let given_up = peer.forget(going);
            assert!(matches!(&*given_up, [only] if Arc::ptr_eq(only, &path)), "{given_up:?}");
            peer.update(&newer, || vec![(staying, "staying".to_owned())]);
            let mut names = Vec::new();
            peer.for_each_reach(|name, _| names.push(name.to_owned()));
            assert_eq!(names, ["staying"]);
        }
    }
}
