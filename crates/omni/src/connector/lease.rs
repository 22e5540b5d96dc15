//! A payload read where the producer keeps it.

use std::fmt;
use std::sync::Arc;
use std::time::Instant;

use posthorse_engine::LeasedMemory;

use super::Inner;
use crate::message::Outcome;
use crate::offer::PullId;

/// As long as this lives, the producer is told that a get goes on: its claim to the payload does not lapse.
pub(super) struct Renewal {
    inner: Arc<Inner>,
    address: String,
    pull: PullId,
}

impl Renewal {
    pub(super) fn new(inner: &Arc<Inner>, address: &str, pull: &PullId) -> Self {
        inner.renewals.lock().insert(pull.clone(), address.to_owned());
        inner.timer.arm(Instant::now() + inner.renewal());
        Self { inner: Arc::clone(inner), address: address.to_owned(), pull: pull.clone() }
    }
}

impl Drop for Renewal {
    fn drop(&mut self) {
        self.inner.renewals.lock().remove(&self.pull);
    }
}

/// A read-only view of a producer's buffer. The producer keeps the buffer until this is dropped, or this process
/// is gone.
pub struct Lease {
    memory: Option<LeasedMemory>,
    renewal: Renewal,
}

impl Lease {
    pub(super) const fn new(memory: LeasedMemory, renewal: Renewal) -> Self {
        Self { memory: Some(memory), renewal }
    }

    pub(super) fn bytes(&self) -> &[u8] {
        self.memory.as_ref().map_or(&[], LeasedMemory::bytes)
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        // The view goes first: what the producer hears next is true.
        self.memory = None;
        let Renewal { inner, address, pull } = &self.renewal;
        inner.close_read(address, pull, Outcome::Done);
    }
}

impl fmt::Debug for Lease {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Lease(get {} of {})", self.renewal.pull.pull, self.renewal.address)
    }
}
