//! The table of grants: slots with generations, so that an old handle never fits what took its place.

use std::sync::Arc;

use posthorse_core::{Access, Claim, Error, ErrorKind, GrantToken, RegionId, Result, Usage, View};

/// One grant. It is being fenced once its usage is closed.
#[derive(Debug)]
pub(crate) struct GrantEntry {
    pub(crate) region: RegionId,
    /// The memory granted, a part of the region.
    pub(crate) view: View,
    pub(crate) access: Access,
    /// The only peer that may use it.
    pub(crate) peer: Option<Box<str>>,
    /// Counts those inside this grant, so that revoking it waits for nobody else.
    pub(crate) usage: Arc<Usage>,
    /// Whether peers whose protocol knows no tokens may use it.
    pub(crate) tokenless: bool,
    pub(crate) secret: u64,
}

impl GrantEntry {
    /// Where in the granted memory the claimed range starts, if it lies within.
    pub(crate) fn offset_of(&self, address: u64, len: u64) -> Option<u64> {
        let offset = address.checked_sub(self.view.address())?;
        (offset.checked_add(len)? <= self.view.len()).then_some(offset)
    }

    /// Whether the peer is one that may use this grant.
    pub(crate) fn is_for(&self, peer: &str) -> bool {
        self.peer.as_deref().is_none_or(|only| only == peer)
    }
}

#[derive(Debug, Default)]
struct Slot {
    /// Of the entry that is here or was last; zero before the first.
    generation: u32,
    entry: Option<GrantEntry>,
}

/// All grants of a registry.
#[derive(Debug, Default)]
pub(crate) struct GrantTable {
    slots: Vec<Slot>,
    free: Vec<u32>,
    live: usize,
    fencing: usize,
}

impl GrantTable {
    /// How many grants there are, those being fenced included.
    pub(crate) const fn live(&self) -> usize {
        self.live
    }

    /// How many grants are closed, and not yet known to be quiet.
    pub(crate) const fn fencing(&self) -> usize {
        self.fencing
    }

    pub(crate) fn insert(&mut self, entry: GrantEntry) -> Result<GrantToken> {
        let index = match self.free.pop() {
            Some(index) => index,
            None => {
                let index = u32::try_from(self.slots.len()).map_err(|_| {
                    Error::new(ErrorKind::LimitReached, "every index of the grant table is taken")
                })?;
                self.slots.push(Slot::default());
                index
            }
        };
        let slot = &mut self.slots[index as usize];
        slot.generation += 1;
        let handle = u64::from(index) | u64::from(slot.generation) << 32;
        let token = GrantToken { handle, secret: entry.secret };
        slot.entry = Some(entry);
        self.live += 1;
        Ok(token)
    }

    /// The grant of a token, open or being fenced.
    pub(crate) fn get(&self, token: GrantToken) -> Option<&GrantEntry> {
        let slot = self.slots.get(token.handle as u32 as usize)?;
        let entry = slot.entry.as_ref()?;
        let current = slot.generation == (token.handle >> 32) as u32;
        // One comparison of one word takes the same time whichever bits differ.
        (current && entry.secret ^ token.secret == 0).then_some(entry)
    }

    /// Refuses further touches under a grant; those under way go on.
    pub(crate) fn close(&mut self, token: GrantToken) -> Option<Arc<Usage>> {
        let usage = Arc::clone(&self.get(token)?.usage);
        if !usage.is_closed() {
            usage.close();
            self.fencing += 1;
        }
        Some(usage)
    }

    /// Takes out a grant that is quiet.
    pub(crate) fn remove(&mut self, token: GrantToken) -> Option<GrantEntry> {
        self.get(token)?;
        let index = token.handle as u32;
        let slot = self.slots.get_mut(index as usize)?;
        let entry = slot.entry.take()?;
        self.live -= 1;
        self.fencing -= usize::from(entry.usage.is_closed());
        // A slot whose generations are used up is left behind, so that no handle ever comes twice.
        if slot.generation < u32::MAX {
            self.free.push(index);
        }
        Some(entry)
    }

    /// The grant that a claim with a token may use, and where in it the claimed range starts.
    ///
    /// No allocation unless refused.
    pub(crate) fn admit(&self, claim: &Claim<'_>, token: GrantToken) -> Result<(&GrantEntry, u64)> {
        let handle = token.handle;
        let Some(entry) = self.get(token) else {
            return Err(denied(
                claim,
                format!("grant {handle:#x} is not held here under this secret, or was revoked"),
            ));
        };
        if entry.usage.is_closed() {
            return Err(denied(claim, format!("grant {handle:#x} is being revoked")));
        }
        if !entry.is_for(claim.peer) {
            return Err(denied(claim, format!("grant {handle:#x} is another peer's")));
        }
        if !entry.access.allows(claim.access) {
            let (has, wanted) = (entry.access, claim.access);
            return Err(denied(
                claim,
                format!("grant {handle:#x} allows {has:?}, the peer wants {wanted:?}"),
            ));
        }
        let offset = entry.offset_of(claim.address, claim.len).ok_or_else(|| {
            outside(claim, format_args!("grant {handle:#x}"), entry.view.address(), entry.view.len())
        })?;
        Ok((entry, offset))
    }
}

/// A refusal of a claim that no range would have saved.
pub(crate) fn denied(claim: &Claim<'_>, why: String) -> Error {
    Error::new(ErrorKind::AccessDenied, why).with_peer(claim.peer)
}

/// A refusal of a claim because its range leaves `what`.
pub(crate) fn outside(claim: &Claim<'_>, what: impl std::fmt::Display, start: u64, len: u64) -> Error {
    let Claim { peer, address, len: wanted, .. } = claim;
    Error::new(
        ErrorKind::OutOfBounds,
        format!("{wanted} bytes at {address:#x} leave {what}, which is {len} bytes at {start:#x}"),
    )
    .with_peer(*peer)
}
