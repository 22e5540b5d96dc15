//! What is due when.

use std::collections::BTreeMap;
use std::time::Instant;

/// The handle to a timer that has neither fired nor been removed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct TimerId(Instant, u64);

impl TimerId {
    /// When it is due.
    pub(super) const fn at(self) -> Instant {
        self.0
    }
}

/// Timers in order of time, those of the same moment in order of their making.
#[derive(Debug)]
pub(super) struct Timers<T> {
    due: BTreeMap<TimerId, T>,
    made: u64,
}

impl<T> Timers<T> {
    pub(super) const fn new() -> Self {
        Self { due: BTreeMap::new(), made: 0 }
    }

    pub(super) fn add(&mut self, at: Instant, what: T) -> TimerId {
        let id = TimerId(at, self.made);
        self.made += 1;
        self.due.insert(id, what);
        id
    }

    pub(super) fn remove(&mut self, id: TimerId) {
        self.due.remove(&id);
    }

    pub(super) fn pop_due(&mut self, now: Instant) -> Option<T> {
        let first = self.due.first_entry()?;
        (first.key().0 <= now).then(|| first.remove())
    }

    pub(super) fn next_due(&self) -> Option<Instant> {
        self.due.first_key_value().map(|(id, _)| id.0)
    }

    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.due.len()
    }
}
