//! Leases: a peer's memory, read in place.

use std::fmt;
use std::sync::Arc;

use posthorse_core::{Access, GrantDesc, HostView, Location, Region, Result, View};

use crate::link::Link;
use crate::remote::RemoteRegion;
use crate::rendezvous::wire::MapRequest;
use crate::slots::LeaseSlot;

/// A view of a peer's memory under a grant. The owner cannot end the grant until this is dropped, or this
/// process has ended.
pub(crate) struct Lease {
    view: HostView,
    // Dropped in this order: the owner is told before the memory goes, which is the order that is safe.
    /// There until the drop.
    slot: Option<LeaseSlot>,
    region: Arc<RemoteRegion>,
    /// Its socket keeps the owner's side of the slots alive.
    link: Arc<Link>,
}

/// Maps what a grant covers, to be read.
///
/// # Errors
/// `AccessDenied` when the grant has ended or does not let peers read; `Unsupported` for memory that is not a
/// file; `DeadlineExceeded` when the peer does not answer; `Busy` from within an event on one of a transport's own threads,
/// unless the region is mapped already.
pub(crate) fn lease(link: &Arc<Link>, grant: &GrantDesc) -> Result<Arc<dyn Region>> {
    let _inside = link.enter()?;
    let (slot, terms) = LeaseSlot::announce(&link.met.slots, &link.met.table, grant.token, link.met.me)?;
    terms.check(grant.address, grant.len, Access::Read)?;
    let region = link.await_region(MapRequest { region: terms.region, write: false })?;
    let view = region.view(grant.address, grant.len)?;
    Ok(Arc::new(Lease { view, slot: Some(slot), region, link: Arc::clone(link) }))
}

// SAFETY: the mapping stays where it is while the lease holds it, is readable throughout, and the file behind
// it cannot shrink. The owner does not give the memory to others while the slot names the grant.
unsafe impl Region for Lease {
    fn view(&self) -> View {
        View::Host(self.view)
    }

    fn location(&self) -> Location {
        Location::Any
    }

    fn writable(&self) -> bool {
        false
    }

    fn is_here(&self) -> bool {
        self.region.is_here()
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        if !self.is_here() {
            // The slot and the link are the parent's: whatever is done to them here would harm it.
            std::mem::forget((self.slot.take(), Arc::clone(&self.link)));
        }
    }
}

impl fmt::Debug for Lease {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lease").field("view", &self.view).finish_non_exhaustive()
    }
}
