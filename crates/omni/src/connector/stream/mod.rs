//! Chunk streams: the state machines of [`crate::stream`], carried out over offers and gets.
//!
//! A chunk is an offer like any other, under a key with its number; so is the end, as a small payload that says how
//! the stream ended. The consumer gets one number after the other, ahead of its reader, and tells the producer how
//! far it may go. It repeats that while it lives: so each side notices when the other is gone.

mod receiver;
mod sender;

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use posthorse_core::{Error, ErrorKind, Result};
use serde::{Deserialize, Serialize};

use super::Inner;
use crate::control::Responder;
use crate::message::{Refusal, Reply, StreamAbort, StreamCredit};
use crate::stream::ProducerAction;
use sender::Outgoing;

pub use receiver::{FollowOptions, StreamReceiver};
pub use sender::StreamSender;

/// How a stream ended, as it travels in the payload behind the last chunk.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct End {
    /// The producer's error; without one every chunk was sent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) error: Option<Refusal>,
}

/// The streams that are sent, by name.
#[derive(Debug, Default)]
pub(super) struct Streams {
    by_name: Mutex<HashMap<Arc<str>, Arc<Outgoing>>>,
}

impl Streams {
    pub(super) fn len(&self) -> usize {
        self.by_name.lock().len()
    }

    fn add(&self, outgoing: &Arc<Outgoing>, most: usize) -> Result<()> {
        let mut by_name = self.by_name.lock();
        let name = outgoing.name();
        if by_name.contains_key(name) {
            let message = format!("stream {name:?} is open, or was not received to its end");
            return Err(Error::new(ErrorKind::Busy, message));
        }
        if by_name.len() >= most {
            return Err(too_many("sent", most));
        }
        by_name.insert(Arc::clone(name), Arc::clone(outgoing));
        Ok(())
    }

    fn find(&self, name: &str) -> Result<Arc<Outgoing>> {
        let found = self.by_name.lock().get(name).cloned();
        found.ok_or_else(|| Error::new(ErrorKind::NotFound, "there is no such stream"))
    }

    /// Removes this stream, not another that has its name.
    fn remove(&self, outgoing: &Arc<Outgoing>) {
        let mut by_name = self.by_name.lock();
        if by_name.get(outgoing.name()).is_some_and(|known| Arc::ptr_eq(known, outgoing)) {
            by_name.remove(outgoing.name());
        }
    }

    fn all(&self) -> Vec<Arc<Outgoing>> {
        self.by_name.lock().values().cloned().collect()
    }
}

/// A stream's place among those of its connector, given up when this is dropped.
pub(super) struct Entry {
    inner: Weak<Inner>,
    outgoing: Arc<Outgoing>,
}

impl Drop for Entry {
    fn drop(&mut self) {
        if let Some(inner) = self.inner.upgrade() {
            inner.streams.remove(&self.outgoing);
        }
    }
}

impl fmt::Debug for Entry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Entry({:?})", self.outgoing.name())
    }
}

impl Inner {
    pub(super) fn answer_credit(&self, credit: &StreamCredit, responder: Responder) {
        let given = self.streams.find(&credit.stream).and_then(|outgoing| outgoing.credit(credit.limit));
        match given {
            Ok(()) => {
                self.timer.arm(Instant::now() + self.liveness());
                responder.reply(&Reply::Ok);
            }
            Err(error) => responder.refuse(&error),
        }
    }

    pub(super) fn answer_abort(&self, abort: &StreamAbort, responder: Responder) {
        match self.streams.find(&abort.stream) {
            Ok(outgoing) => {
                let message = format!("the consumer aborted the stream: {}", abort.reason);
                self.break_stream(
                    &outgoing,
                    Error::new(ErrorKind::Aborted, crate::message::printable(&message)),
                );
                responder.reply(&Reply::Ok);
            }
            Err(error) => responder.refuse(&error),
        }
    }

    /// Ends the streams of consumers that have been silent for too long, and returns when to look again.
    pub(super) fn check_streams(&self, now: Instant) -> Option<Instant> {
        let liveness = self.liveness();
        let mut next: Option<Instant> = None;
        for outgoing in self.streams.all() {
            let Some(end) = outgoing.heard().map(|heard| heard + liveness) else { continue };
            if end <= now {
                let message = format!("the stream's consumer was silent for {} ms", liveness.as_millis());
                self.break_stream(&outgoing, Error::new(ErrorKind::PeerGone, message));
            } else {
                next = Some(next.map_or(end, |next| next.min(end)));
            }
        }
        next
    }

    fn break_stream(&self, outgoing: &Arc<Outgoing>, reason: Error) {
        self.streams.remove(outgoing);
        for action in outgoing.broken(reason) {
            match action {
                ProducerAction::Withdraw => self.withdraw_chunks(outgoing),
                // Whoever waits was woken with the change.
                ProducerAction::Wake => {}
            }
        }
    }

    /// Takes back what was offered and not taken.
    fn withdraw_chunks(&self, outgoing: &Outgoing) {
        for key in outgoing.take_untaken() {
            self.with_offers(|offers, now, out| offers.cleanup(&key, now, out));
        }
    }

    fn liveness(&self) -> Duration {
        Duration::from_millis(self.config.liveness_ms)
    }
}

fn too_many(what: &str, most: usize) -> Error {
    let message = format!("{most} streams are {what}; accepted: max_streams");
    Error::new(ErrorKind::LimitReached, message)
}
