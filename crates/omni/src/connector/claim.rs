//! What a get holds while it is under way: each gives itself up where the get fails, or is dropped.

use std::sync::Arc;
use std::time::{Duration, Instant};

use posthorse_buffer::{ManagedBuffer, ReceiveSlot, SlotGrant};
use posthorse_core::{Access, Deadline, Error, ErrorKind, Result};
use posthorse_engine::Grant;

use super::Inner;
use super::get::Get;
use super::lease::Renewal;
use crate::message::{Outcome, Want};

/// The place that a producer keeps for a get. Dropped before its end, the producer is told that the get has ended
/// without the payload, which stays for another.
pub(super) struct Claim {
    inner: Arc<Inner>,
    pub(super) get: Arc<Get>,
    pub(super) want: Want,
    at_end: AtEnd,
    renewal: Option<Renewal>,
}

/// What a producer is told when a claim ends.
#[derive(Debug, Clone, Copy)]
enum AtEnd {
    GivenUp,
    Done,
    Nothing,
}

impl Claim {
    /// For a get that is about to ask.
    pub(super) fn new(inner: &Arc<Inner>, get: &Arc<Get>, want: Want) -> Self {
        Self { inner: Arc::clone(inner), get: Arc::clone(get), want, at_end: AtEnd::GivenUp, renewal: None }
    }

    /// Has the producer told that the get goes on, for as long as this lives: a claim that nothing is heard of lapses.
    pub(super) fn renew(&mut self, every: Duration) {
        self.renewal = Some(Renewal::new(&self.inner, &self.get.address, &self.get.pull, every));
    }

    /// The producer keeps no place, or learns from somebody else how the get ends.
    pub(super) fn end(mut self) {
        self.at_end = AtEnd::Nothing;
    }

    /// The payload is there: when this is dropped, the producer may let go of it.
    pub(super) const fn arrived(&mut self) {
        self.at_end = AtEnd::Done;
    }

    /// The payload has arrived: the producer may let go of it.
    pub(super) fn done(mut self) {
        self.arrived();
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        match self.at_end {
            AtEnd::GivenUp => self.inner.give_up(&self.get, self.want),
            AtEnd::Done => self.inner.close(&self.get.address, &self.get.pull, Outcome::Done),
            AtEnd::Nothing => {}
        }
    }
}

/// A block of the pool that a producer may write to. Dropped, it returns to the pool when the producer cannot any more.
pub(super) struct Granted {
    inner: Arc<Inner>,
    parts: Option<(ReceiveSlot, SlotGrant, Grant)>,
}

impl Granted {
    pub(super) fn new(inner: &Arc<Inner>, buffer: ManagedBuffer, producer: &str) -> Result<Self> {
        let mut slot = buffer.into_slot();
        let grant = inner.memory()?.grant(slot.offset(), slot.len(), Access::Write, Some(producer))?;
        let granted = slot.grant(Some(grant.desc().token))?;
        Ok(Self { inner: Arc::clone(inner), parts: Some((slot, granted, grant)) })
    }

    /// Where the block is, and the leave to write there.
    ///
    /// # Errors
    /// `Internal` where they are not there; they are until the end.
    pub(super) fn parts(&self) -> Result<(&ReceiveSlot, &Grant)> {
        self.parts.as_ref().map(|(slot, _, grant)| (slot, grant)).ok_or_else(ended)
    }

    /// Ends the grant, and gives the block, to which nobody writes any more.
    ///
    /// # Errors
    /// `DeadlineExceeded` when the producer may still write after the liveness time.
    pub(super) fn end(mut self) -> Result<ManagedBuffer> {
        self.revoke(Deadline::after(Duration::from_millis(self.inner.config.liveness_ms)))?;
        self.take()
    }

    /// As [`Granted::end`], without waiting. The grant comes back where the producer may still write.
    pub(super) fn end_now(mut self) -> Result<ManagedBuffer, Box<Self>> {
        match self.revoke(Deadline::after(Duration::ZERO)).and_then(|()| self.take()) {
            Ok(buffer) => Ok(buffer),
            Err(_) => Err(Box::new(self)),
        }
    }

    fn revoke(&mut self, fence: Deadline) -> Result<()> {
        self.parts.as_mut().map_or_else(|| Err(ended()), |(_, _, grant)| grant.revoke(fence))
    }

    fn take(&mut self) -> Result<ManagedBuffer> {
        let (mut slot, granted, _) = self.parts.take().ok_or_else(ended)?;
        slot.fill(granted)?;
        slot.into_buffer()
    }
}

impl Drop for Granted {
    fn drop(&mut self) {
        let Some((slot, granted, grant)) = self.parts.take() else { return };
        // The pool keeps it.
        drop(slot);
        if !self.inner.is_forked() {
            self.inner.fencing.lock().push((grant, granted));
            self.inner.timer.arm(Instant::now());
        }
    }
}

fn ended() -> Error {
    Error::new(ErrorKind::Internal, "a grant that has ended")
}
