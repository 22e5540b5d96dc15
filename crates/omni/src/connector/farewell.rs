//! Messages that need no answer, but have to go out before the connector closes: that a get has ended.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::{Condvar, Mutex};
use posthorse_core::Deadline;

use super::Inner;
use super::get::Get;
use crate::message::{Answer, Cancel, Close, Outcome, Request, Want};
use crate::offer::PullId;

/// Counts messages on their way.
#[derive(Debug, Default)]
pub(super) struct Farewells {
    under_way: Mutex<usize>,
    changed: Condvar,
}

/// A message on its way; dropped when it was answered or given up.
#[derive(Debug)]
pub(super) struct Farewell(Arc<Farewells>);

impl Farewells {
    pub(super) fn begin(self: &Arc<Self>) -> Farewell {
        *self.under_way.lock() += 1;
        Farewell(Arc::clone(self))
    }

    /// Waits until none is under way; says whether that is so by the deadline.
    pub(super) fn wait(&self, deadline: Deadline) -> bool {
        let mut under_way = self.under_way.lock();
        while *under_way > 0 {
            match deadline.instant() {
                None => self.changed.wait(&mut under_way),
                Some(at) if self.changed.wait_until(&mut under_way, at).timed_out() => break,
                Some(_) => {}
            }
        }
        *under_way == 0
    }
}

impl Drop for Farewell {
    fn drop(&mut self) {
        *self.0.under_way.lock() -= 1;
        self.0.changed.notify_all();
    }
}

impl Inner {
    /// Tells the producer that a get has ended without its payload. It is told once, and in the background.
    pub(super) fn give_up(&self, get: &Get, want: Want) {
        match want {
            Want::Read => self.close(&get.address, &get.pull, Outcome::Failed),
            Want::Write => {
                let cancel = Cancel {
                    consumer: get.pull.consumer.to_string(),
                    incarnation: get.pull.incarnation,
                    pull: get.pull.pull,
                };
                self.tell(&get.address, &Request::Cancel(cancel));
            }
        }
    }

    /// Tells the producer how a get has ended: its payload is touched no more.
    pub(super) fn close(&self, address: &str, pull: &PullId, outcome: Outcome) {
        self.tell(address, &closing(pull, outcome));
    }

    /// Sends what needs no answer. A producer that does not hear it finds out by the lease. What a forked child drops is
    /// still its parent's, and no producer is told.
    pub(super) fn tell(&self, address: &str, request: &Request) {
        if self.is_forked() {
            return;
        }
        let deadline = Deadline::after(Duration::from_millis(self.config.liveness_ms));
        match request.encode() {
            Ok(bytes) => self.teller.tell(address, bytes, deadline, {
                let farewell = self.farewells.begin();
                move |reply| {
                    let _farewell = farewell;
                    if let Ok(Answer::Refused(refusal)) = reply.and_then(|bytes| Answer::decode(&bytes)) {
                        tracing::debug!(?refusal, "the producer knew nothing of a get that ended");
                    }
                }
            }),
            Err(error) => tracing::error!(%error, "a request could not be written"),
        }
    }
}

/// The message that a get has ended so.
pub(super) fn closing(pull: &PullId, outcome: Outcome) -> Request {
    let PullId { consumer, incarnation, pull } = pull;
    Request::Close(Close { consumer: consumer.to_string(), incarnation: *incarnation, pull: *pull, outcome })
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn waiting_ends_with_the_last_message_or_the_deadline() {
        let farewells = Arc::new(Farewells::default());
        assert!(farewells.wait(Deadline::NEVER));
        let (first, second) = (farewells.begin(), farewells.begin());
        drop(first);
        assert!(!farewells.wait(Deadline::after(Duration::from_millis(1))));
        let other = std::thread::spawn(move || drop(second));
        assert!(farewells.wait(Deadline::NEVER));
        other.join().unwrap();
    }
}
