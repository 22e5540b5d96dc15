//! Registered memory and grants, as values that give themselves up.

use std::collections::HashSet;
use std::sync::Arc;

use posthorse_core::{
    Access, Deadline, Error, ErrorKind, GrantDesc, GrantToken, LocalRange, RegionId, RegisteredRegion,
    Result, Transport, TransportId, View,
};
use serde_json::Value;

use crate::engine::Inner;
use crate::transports::Slot;

/// Memory that transfers may use.
///
/// Dropping it unregisters it: no transfer or grant may begin any more, and the memory is held until nothing touches
/// it: until its grants are fenced, and the transfers under way have ended. [`RegisteredMemory::unregister`] does the same and says when that is.
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
        // SAFETY: whoever made the region sees to it that safe code has no references into it. No other engine has a region
        // of this number.
        unsafe { LocalRange::new(self.region.id, offset) }
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
        self.engine.fork.check()?;
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
            self.engine.fork.check()?;
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
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
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
        // From here on a failure gives the region up again.
        let memory = RegisteredMemory::new(Arc::clone(self), region.clone());
        self.regions.insert(&region);
        for Slot { id, transport, .. } in self.transports.installed() {
            self.register_with(&region, id, &transport)?;
        }
        Ok(memory)
    }

    /// Registers the regions there are with a transport that was installed after them.
    pub(crate) fn register_regions(&self, id: TransportId, transport: &Arc<dyn Transport>) -> Result<()> {
        for region in self.regions.all() {
            match self.register_with(&region, id, transport) {
                // It was unregistered meanwhile.
                Err(error) if error.kind() == ErrorKind::NotRegistered => {}
                outcome => outcome?,
            }
        }
        Ok(())
    }

    /// Registers a region with one transport, unless that was done.
    fn register_with(
        &self,
        region: &RegisteredRegion,
        id: TransportId,
        transport: &Arc<dyn Transport>,
    ) -> Result<()> {
        if !self.regions.claim(region.id, id) {
            return Ok(());
        }
        let named = |error: Error| error.context(format_args!("transport {}", transport.name()));
        let mut published = match transport.register(region) {
            // A transport that cannot move this kind of memory leaves it to the others.
            Err(error) if error.kind() == ErrorKind::Unsupported => {
                tracing::info!(region = region.id.0, transport = transport.name(), %error, "not registered");
                return Ok(());
            }
            outcome => outcome.map_err(named)?,
        };
        if let Some(standing) = self.registry.standing_grant(region.id)? {
            let grant = posthorse_core::Grant { desc: &standing, peer: None };
            let value = transport.grant(&grant).map_err(named)?;
            if published.is_null() {
                published = value;
            }
        }
        let attributes = match published {
            Value::Null => posthorse_core::Attributes::new(),
            value => posthorse_core::Attributes::from_iter([(transport.name().to_owned(), value)]),
        };
        if !self.regions.note(region.id, attributes) {
            // Whoever unregistered it meanwhile may have asked the transport too early.
            let now = Deadline::at(std::time::Instant::now());
            ignore_unknown(transport.unregister(region.id, now))?;
        }
        Ok(())
    }

    /// Asks every transport to prepare a grant, and adds what they want its holder to know.
    fn prepare_grant(&self, desc: &mut GrantDesc, peer: Option<&str>) -> Result<()> {
        for installed in self.transports.installed() {
            let value = installed.transport.grant(&posthorse_core::Grant { desc, peer })?;
            if !value.is_null() {
                desc.attributes.insert(installed.name, value);
            }
        }
        Ok(())
    }

    /// Ends a grant everywhere. What has ended already stays so when this is asked again. The registry comes last: it
    /// gives the grant's place to another as soon as it has ended there.
    pub(crate) fn revoke(&self, token: GrantToken, deadline: Deadline) -> Result<()> {
        for installed in self.transports.installed() {
            ignore_unknown(installed.transport.revoke(token, deadline))?;
        }
        ignore_unknown(self.registry.revoke(token, deadline))
    }

    /// Unregisters a region everywhere. It is closed first, so that nothing begins any more, and leaves the registry
    /// last as in [`Inner::revoke`].
    pub(crate) fn unregister(self: &Arc<Self>, id: RegionId, deadline: Deadline) -> Result<()> {
        ignore_unknown(self.registry.close(id))?;
        if self.regions.remove(id).is_some_and(|region| region.access != Access::None) {
            self.publish_soon();
        }
        for installed in self.transports.installed() {
            ignore_unknown(installed.transport.unregister(id, deadline))?;
        }
        ignore_unknown(self.registry.unregister(id, deadline))
    }

    /// Ends in the background what cannot be waited for here.
    pub(crate) fn withhold(self: &Arc<Self>, what: Withheld) {
        // In a forked child the locks may be held for ever, by threads that are not there.
        if self.fork.is_forked() || self.try_end(what) {
            return;
        }
        self.withheld.lock().push(what);
        self.ticker.arm();
    }

    /// Tries once more to end what is held back. Says how much is left.
    pub(crate) fn retry_withheld(self: &Arc<Self>) -> usize {
        // What is tried still counts as held back.
        let waiting = self.withheld.lock().clone();
        let ended: HashSet<_> = waiting.into_iter().filter(|what| self.try_end(*what)).collect();
        let mut withheld = self.withheld.lock();
        withheld.retain(|what| !ended.contains(what));
        withheld.len()
    }

    fn try_end(self: &Arc<Self>, what: Withheld) -> bool {
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
