//! Registered memory and grants, as values that give themselves up.

use std::sync::Arc;

use posthorse_core::{
    Access, Deadline, Error, ErrorKind, GrantDesc, GrantToken, LocalRange, RegionId, RegisteredRegion,
    Result, View,
};
use serde_json::Value;

use crate::engine::Inner;

/// Memory that transfers may use.
///
/// Dropping it unregisters it: no transfer or grant may begin any more, those under way are fenced, and the memory
/// is held until nothing touches it. [`RegisteredMemory::unregister`] does the same and says when that is.
#[derive(Debug)]
pub struct RegisteredMemory {
    engine: Arc<Inner>,
    region: RegisteredRegion,
    given_up: bool,
}

impl RegisteredMemory {
    pub(crate) const fn new(engine: Arc<Inner>, region: RegisteredRegion) -> Self {
        Self { engine, region, given_up: false }
    }

    /// Its number, for requests.
    pub const fn id(&self) -> RegionId {
        self.region.id
    }

    /// The memory.
    pub fn view(&self) -> View {
        self.region.region.view()
    }

    /// The first byte's address, as peers name it.
    pub fn address(&self) -> u64 {
        self.view().address()
    }

    /// Bytes.
    pub fn len(&self) -> u64 {
        self.view().len()
    }

    /// Whether there are no bytes.
    pub fn is_empty(&self) -> bool {
        self.view().is_empty()
    }

    /// The local end of a request, `offset` bytes from the start.
    pub const fn at(&self, offset: u64) -> LocalRange {
        LocalRange { region: self.region.id, offset }
    }

    /// Lets a peer touch `len` bytes from `offset`: the named peer, or whoever holds the grant's token.
    ///
    /// # Errors
    /// `OutOfBounds`; `InvalidArgument` for an empty range; `LimitReached` when a transport can take no more.
    pub fn grant(&self, offset: u64, len: u64, access: Access, peer: Option<&str>) -> Result<Grant> {
        self.engine.check_open()?;
        let mut desc = self.engine.registry.grant(self.region.id, offset, len, access, peer)?;
        if let Err(error) = self.engine.prepare_grant(&mut desc, peer) {
            self.engine.withhold(Withheld::Grant(desc.token));
            return Err(error);
        }
        Ok(Grant { engine: Arc::clone(&self.engine), desc, revoked: false })
    }

    /// Unregisters the memory, and returns when nothing touches it any more.
    ///
    /// # Errors
    /// `DeadlineExceeded` when a transfer or peer may still touch it: it is then given up in the background, as when
    /// dropped.
    pub fn unregister(mut self, deadline: Deadline) -> Result<()> {
        self.given_up = true;
        self.engine.unregister(self.region.id, deadline).inspect_err(|_| {
            self.engine.withhold(Withheld::Region(self.region.id));
        })
    }
}

impl Drop for RegisteredMemory {
    fn drop(&mut self) {
        if !self.given_up {
            self.engine.withhold(Withheld::Region(self.region.id));
        }
    }
}

/// Leave for a peer to touch a range of registered memory, until it is revoked or dropped.
#[derive(Debug)]
pub struct Grant {
    engine: Arc<Inner>,
    desc: GrantDesc,
    revoked: bool,
}

impl Grant {
    /// What the peer needs to use it.
    pub const fn desc(&self) -> &GrantDesc {
        &self.desc
    }

    /// Ends the grant, and returns when its holder cannot touch the range any more, and does not.
    ///
    /// # Errors
    /// `DeadlineExceeded` when that cannot be shown yet: a stopped process is silent, not dead. The range must not
    /// be used for anything else; ask again, or drop the grant to have that done.
    pub fn revoke(&mut self, deadline: Deadline) -> Result<()> {
        if !self.revoked {
            self.engine.revoke(self.desc.token, deadline)?;
            self.revoked = true;
        }
        Ok(())
    }

    /// Whether [`Grant::revoke`] has succeeded.
    pub const fn is_revoked(&self) -> bool {
        self.revoked
    }
}

impl Drop for Grant {
    fn drop(&mut self) {
        if !self.revoked {
            self.engine.withhold(Withheld::Grant(self.desc.token));
        }
    }
}

/// What was given up, and is held back until nothing touches it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Withheld {
    Grant(GrantToken),
    Region(RegionId),
}

impl Inner {
    /// Registers a region with every transport that can take it.
    pub(crate) fn register(
        self: &Arc<Self>,
        region: Arc<dyn posthorse_core::Region>,
        access: Access,
    ) -> Result<RegisteredMemory> {
        self.check_open()?;
        let region = self.registry.register(region, access)?;
        let memory = RegisteredMemory::new(Arc::clone(self), region.clone());
        let mut attributes = posthorse_core::Attributes::new();
        for installed in self.installed() {
            match installed.transport.register(&region) {
                Ok(Value::Null) => {}
                Ok(value) => {
                    attributes.insert(installed.transport.name().to_owned(), value);
                }
                // A transport that cannot move this kind of memory leaves it to the others.
                Err(error) if error.kind() == ErrorKind::Unsupported => {
                    tracing::info!(region = region.id.0, transport = installed.transport.name(), %error, "not registered");
                }
                Err(error) => {
                    return Err(error.context(format_args!("transport {}", installed.transport.name())));
                }
            }
        }
        if let Some(mut standing) = self.registry.standing_grant(region.id)? {
            self.prepare_grant(&mut standing, None)?;
            for (transport, value) in standing.attributes {
                attributes.entry(transport).or_insert(value);
            }
        }
        self.region_attributes.write().insert(region.id, attributes);
        Ok(memory)
    }

    /// Asks every transport to prepare a grant, and adds what they want its holder to know.
    fn prepare_grant(&self, desc: &mut GrantDesc, peer: Option<&str>) -> Result<()> {
        for installed in self.installed() {
            let value = installed.transport.grant(&posthorse_core::Grant { desc, peer })?;
            if !value.is_null() {
                desc.attributes.insert(installed.transport.name().to_owned(), value);
            }
        }
        Ok(())
    }

    /// Ends a grant everywhere. What has ended already stays so when this is asked again. The registry comes last: it
    /// gives the grant's place to another as soon as it has ended there.
    pub(crate) fn revoke(&self, token: GrantToken, deadline: Deadline) -> Result<()> {
        for installed in self.installed() {
            ignore_unknown(installed.transport.revoke(token, deadline))?;
        }
        ignore_unknown(self.registry.revoke(token, deadline))
    }

    /// Unregisters a region everywhere, the registry last as in [`Inner::revoke`].
    pub(crate) fn unregister(&self, id: RegionId, deadline: Deadline) -> Result<()> {
        self.region_attributes.write().remove(&id);
        for installed in self.installed() {
            ignore_unknown(installed.transport.unregister(id, deadline))?;
        }
        ignore_unknown(self.registry.unregister(id, deadline))
    }

    /// Ends in the background what cannot be waited for here.
    pub(crate) fn withhold(self: &Arc<Self>, what: Withheld) {
        if self.try_end(what) {
            return;
        }
        self.withheld.lock().push(what);
        self.ticker.arm();
    }

    /// Tries once more to end what is held back. Says how much is left.
    pub(crate) fn retry_withheld(&self) -> usize {
        let waiting = std::mem::take(&mut *self.withheld.lock());
        let left: Vec<_> = waiting.into_iter().filter(|what| !self.try_end(*what)).collect();
        let mut withheld = self.withheld.lock();
        withheld.extend(left);
        withheld.len()
    }

    fn try_end(&self, what: Withheld) -> bool {
        let now = Deadline::at(std::time::Instant::now());
        let outcome = match what {
            Withheld::Grant(token) => self.revoke(token, now),
            Withheld::Region(id) => self.unregister(id, now),
        };
        match outcome {
            Ok(()) => true,
            Err(error) if error.kind() == ErrorKind::DeadlineExceeded => false,
            Err(error) => {
                tracing::error!(?what, %error, "memory could not be given up");
                true
            }
        }
    }
}

/// Giving up what is not there (any more) is done already.
fn ignore_unknown(outcome: Result<()>) -> Result<(), Error> {
    match outcome {
        Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotRegistered) => Ok(()),
        other => other,
    }
}
