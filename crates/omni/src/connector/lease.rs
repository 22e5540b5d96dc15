//! A payload read where the producer keeps it.

use std::fmt;
use std::sync::Arc;
use std::time::Instant;

use posthorse_engine::LeasedMemory;

use super::Inner;
use crate::message::Outcome;
use crate::offer::PullId;

/// A read-only view of a producer's buffer. The producer keeps the buffer until this is dropped, or this process
/// is gone.
pub struct Lease {
    memory: Option<LeasedMemory>,
    inner: Arc<Inner>,
    address: String,
    pull: PullId,
}

impl Lease {
    pub(super) fn new(memory: LeasedMemory, inner: Arc<Inner>, address: String, pull: PullId) -> Self {
        inner.renewals.lock().insert(pull.clone(), address.clone());
        inner.timer.arm(Instant::now() + inner.renewal());
        Self { memory: Some(memory), inner, address, pull }
    }

    pub(super) fn bytes(&self) -> &[u8] {
        self.memory.as_ref().map_or(&[], LeasedMemory::bytes)
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        // The view goes first: what the producer hears next is true.
        self.memory = None;
        self.inner.renewals.lock().remove(&self.pull);
        self.inner.close_read(&self.address, &self.pull, Outcome::Done);
    }
}

impl fmt::Debug for Lease {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Lease(get {} of {})", self.pull.pull, self.address)
    }
}
