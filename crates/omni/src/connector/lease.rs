//! A payload read where the producer keeps it.

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use posthorse_core::Result;
use posthorse_engine::LeasedMemory;

use super::Inner;
use super::claim::Claim;
use crate::offer::PullId;

/// The most often that a producer may want to hear of us: what the shortest liveness time demands.
const OFTEN: Duration = Duration::from_millis(20);

/// How often a producer is told that something goes on: as often as the shorter liveness time demands, ours or its own.
pub(super) fn renewal(own: Duration, theirs_ms: Option<u64>) -> Duration {
    let theirs = theirs_ms.map_or(own, Duration::from_millis);
    (own.min(theirs) / 3).max(OFTEN)
}

/// The gets of which producers are told that they go on.
#[derive(Debug, Default)]
pub(super) struct Renewals {
    held: HashMap<PullId, Held>,
}

#[derive(Debug)]
struct Held {
    /// The producer's control address.
    address: String,
    every: Duration,
    due: Instant,
}

impl Renewals {
    fn add(&mut self, pull: &PullId, address: &str, every: Duration, now: Instant) {
        self.held.insert(pull.clone(), Held { address: address.to_owned(), every, due: now + every });
    }

    /// What is to be renewed by now, for each producer: all of one together, so that it is one message.
    pub(super) fn take_due(&mut self, now: Instant) -> HashMap<String, Vec<u64>> {
        let due = self.held.values().filter(|held| held.due <= now);
        let addresses: HashSet<String> = due.map(|held| held.address.clone()).collect();
        let mut by_address: HashMap<String, Vec<u64>> = HashMap::new();
        for (pull, held) in self.held.iter_mut().filter(|(_, held)| addresses.contains(&held.address)) {
            held.due = now + held.every;
            by_address.entry(held.address.clone()).or_default().push(pull.pull);
        }
        by_address
    }

    pub(super) fn next_due(&self) -> Option<Instant> {
        self.held.values().map(|held| held.due).min()
    }
}

/// As long as this lives, the producer is told that a get goes on: its claim to the payload does not lapse.
pub(super) struct Renewal {
    inner: Arc<Inner>,
    pull: PullId,
}

impl Renewal {
    pub(super) fn new(inner: &Arc<Inner>, address: &str, pull: &PullId, every: Duration) -> Self {
        let now = Instant::now();
        inner.renewals.lock().add(pull, address, every, now);
        inner.timer.arm(now + every);
        Self { inner: Arc::clone(inner), pull: pull.clone() }
    }
}

impl Drop for Renewal {
    fn drop(&mut self) {
        if !self.inner.is_forked() {
            self.inner.renewals.lock().held.remove(&self.pull);
        }
    }
}

/// A read-only view of a producer's buffer. The producer keeps the buffer until this is dropped, or this process
/// is gone.
pub struct Lease {
    /// Dropped first: what the producer hears next is true.
    memory: LeasedMemory,
    claim: Claim,
}

impl Lease {
    pub(super) const fn new(memory: LeasedMemory, mut claim: Claim) -> Self {
        claim.arrived();
        Self { memory, claim }
    }

    /// # Errors
    /// `Forked` in a child process.
    pub(super) fn bytes(&self) -> Result<&[u8]> {
        self.memory.bytes()
    }
}

impl fmt::Debug for Lease {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let get = &self.claim.get;
        write!(f, "Lease(get {} of {})", get.pull.pull, get.address)
    }
}

#[cfg(test)]
mod tests {
    use posthorse_core::Incarnation;

    use super::*;

    #[test]
    fn leases_are_renewed_when_they_are_due_and_those_of_one_producer_together() {
        let (start, second) = (Instant::now(), Duration::from_secs(1));
        let pull = |pull| PullId { consumer: "c".into(), incarnation: Incarnation(1), pull };
        let mut renewals = Renewals::default();
        assert_eq!(renewals.next_due(), None);
        renewals.add(&pull(1), "a", second, start);
        renewals.add(&pull(2), "a", 3 * second, start);
        renewals.add(&pull(3), "b", 3 * second, start);
        let millis = Duration::from_millis;
        assert!(renewals.take_due(start + millis(999)).is_empty(), "nothing is due");
        let mut due = renewals.take_due(start + second);
        due.get_mut("a").unwrap().sort_unstable();
        assert_eq!(due, HashMap::from([("a".to_owned(), vec![1, 2])]));
        // Other things wake the clock far more often.
        for ms in (1000..2000).step_by(20) {
            assert!(renewals.take_due(start + millis(ms)).is_empty(), "renewed after {ms} ms");
        }
        assert_eq!(renewals.next_due(), Some(start + 2 * second));
        assert_eq!(renewals.take_due(start + 3 * second).len(), 2);
    }

    #[test]
    fn the_shorter_liveness_time_says_how_often() {
        let millis = Duration::from_millis;
        assert_eq!(renewal(millis(3000), None), millis(1000), "of a producer that does not say");
        assert_eq!(renewal(millis(3000), Some(300)), millis(100));
        assert_eq!(renewal(millis(300), Some(3000)), millis(100));
        assert_eq!(renewal(millis(300), Some(0)), OFTEN);
    }
}
