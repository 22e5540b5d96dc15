//! A clock that stands still until the test moves it.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use posthorse_core::Deadline;

/// A clock for state machines that take `now: Instant`: it shows the moment it was made until it is advanced.
#[derive(Debug)]
pub struct Clock {
    start: Instant,
    advanced_ns: AtomicU64,
}

impl Clock {
    /// A clock that stands.
    pub fn new() -> Self {
        Self { start: Instant::now(), advanced_ns: AtomicU64::new(0) }
    }

    /// What it shows.
    pub fn now(&self) -> Instant {
        self.start + Duration::from_nanos(self.advanced_ns.load(Ordering::SeqCst))
    }

    /// Moves it forward, and returns what it shows then. Some 584 years can be had.
    pub fn advance(&self, by: Duration) -> Instant {
        let by = u64::try_from(by.as_nanos()).unwrap_or(u64::MAX);
        self.advanced_ns.fetch_add(by, Ordering::SeqCst);
        self.now()
    }

    /// The deadline that lies `after` what it shows.
    pub fn deadline(&self, after: Duration) -> Deadline {
        Deadline::at(self.now() + after)
    }
}

impl Default for Clock {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_passes_only_when_told_to() {
        let clock = Clock::new();
        let begin = clock.now();
        let deadline = clock.deadline(Duration::from_secs(5));
        assert_eq!(clock.now(), begin);
        assert!(!deadline.is_past(clock.advance(Duration::from_millis(4999))));
        assert!(deadline.is_past(clock.advance(Duration::from_millis(1))));
        assert_eq!(clock.now() - begin, Duration::from_secs(5));
    }
}
