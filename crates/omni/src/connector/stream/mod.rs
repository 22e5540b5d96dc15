//! Chunk streams: the state machines of [`crate::stream`], carried out over offers and gets.
//!
//! A chunk is an offer like any other, under a key with its number; so is the end, as a small payload that says how
//! the stream ended. The consumer gets one number after the other, ahead of its reader, and tells the producer how
//! far it may go. It repeats that while it lives: so each side notices when the other is gone.

mod receiver;
mod sender;

use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use posthorse_core::{Error, ErrorKind, Result};
use serde::{Deserialize, Serialize};

use super::Inner;
use crate::control::Responder;
use crate::message::{Refusal, Reply, StreamAbort, StreamCredit, StreamSent};
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
    /// How many there were.
    opened: AtomicU64,
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

    /// The stream of this name, if it is the one that the consumer means.
    fn find(&self, name: &str, generation: Option<u64>) -> Result<Arc<Outgoing>> {
        let found = self.by_name.lock().get(name).cloned();
        found
            .filter(|outgoing| generation.is_none_or(|generation| generation == outgoing.generation()))
            .ok_or_else(|| Error::new(ErrorKind::NotFound, "there is no such stream"))
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
        let found = self.streams.find(&credit.stream, credit.generation);
        let given = found.and_then(|outgoing| {
            outgoing.credit(credit.follower.as_ref(), credit.limit)?;
            Ok(outgoing.generation())
        });
        match given {
            Ok(generation) => {
                self.timer.arm(Instant::now() + self.liveness());
                let liveness_ms = self.config.liveness_ms;
                responder.reply(&Reply::Stream(StreamSent { generation, liveness_ms }));
            }
            Err(error) => responder.refuse(&error),
        }
    }

    pub(super) fn answer_abort(&self, abort: &StreamAbort, responder: Responder) {
        let found = self.streams.find(&abort.stream, abort.generation);
        let own = found.and_then(|outgoing| {
            outgoing.check_follower(abort.follower.as_ref())?;
            Ok(outgoing)
        });
        match own {
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

    /// Ends a stream, and takes back what was offered and not taken. All of it at one moment, as the table of offers
    /// sees it: when the name is free for another stream, nothing of this one is offered any more, or will be.
    fn break_stream(&self, outgoing: &Arc<Outgoing>, reason: Error) {
        self.with_offers(|offers, now, out| {
            self.streams.remove(outgoing);
            for action in outgoing.broken(reason) {
                match action {
                    ProducerAction::Withdraw => {
                        for key in outgoing.take_untaken() {
                            offers.cleanup(&key, now, out);
                        }
                    }
                    // Whoever waits is woken when it is done.
                    ProducerAction::Wake => {}
                }
            }
        });
        outgoing.wake();
    }

    /// The number of a stream, which no other has, of this life of the producer or another.
    fn next_generation(&self) -> u64 {
        let opened = self.streams.opened.fetch_add(1, Ordering::Relaxed);
        self.engine.incarnation().0.wrapping_add(opened)
    }

    fn liveness(&self) -> Duration {
        Duration::from_millis(self.config.liveness_ms)
    }
}

fn too_many(what: &str, most: usize) -> Error {
    let message = format!("{most} streams are {what}; accepted: max_streams");
    Error::new(ErrorKind::LimitReached, message)
}
