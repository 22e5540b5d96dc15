//! When waiting has to end.

use std::time::{Duration, Instant};

use crate::error::{Error, ErrorKind};

/// The moment by which a wait ends, or [`Deadline::NEVER`].
///
/// A deadline is absolute, so it can be handed through several layers without growing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Deadline(Option<Instant>);

impl Deadline {
    /// No deadline: the wait ends only with its outcome. Liveness checks still end it when a peer is gone.
    pub const NEVER: Self = Self(None);

    /// `duration` from now; a duration too long to represent is [`Deadline::NEVER`].
    pub fn after(duration: Duration) -> Self {
        Self(Instant::now().checked_add(duration))
    }

    /// At `instant`.
    pub const fn at(instant: Instant) -> Self {
        Self(Some(instant))
    }

    /// The instant, unless this is [`Deadline::NEVER`].
    pub const fn instant(self) -> Option<Instant> {
        self.0
    }

    /// Whether the deadline has passed at `now`.
    pub fn is_past(self, now: Instant) -> bool {
        self.0.is_some_and(|at| at <= now)
    }

    /// What is left at `now`: zero when past, `None` when there is no deadline.
    pub fn remaining(self, now: Instant) -> Option<Duration> {
        self.0.map(|at| at.saturating_duration_since(now))
    }

    /// The earlier of two deadlines.
    #[must_use]
    pub fn min(self, other: Self) -> Self {
        match (self.0, other.0) {
            (Some(a), Some(b)) => Self(Some(a.min(b))),
            (a, b) => Self(a.or(b)),
        }
    }

    /// The error of a wait for `what` that this deadline ended.
    pub fn exceeded(what: &str) -> Error {
        Error::new(ErrorKind::DeadlineExceeded, format!("the deadline passed while waiting for {what}"))
    }
}

impl From<Duration> for Deadline {
    fn from(duration: Duration) -> Self {
        Self::after(duration)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn never_is_never_past_and_loses_against_any_other() {
        let now = Instant::now();
        assert!(!Deadline::NEVER.is_past(now + Duration::from_secs(1 << 30)));
        assert_eq!(Deadline::NEVER.remaining(now), None);
        let soon = Deadline::at(now);
        assert_eq!(Deadline::NEVER.min(soon), soon);
        assert_eq!(soon.min(Deadline::NEVER), soon);
        assert_eq!(soon.min(Deadline::at(now + Duration::from_secs(1))), soon);
    }

    #[test]
    fn a_deadline_is_past_at_its_own_instant() {
        let now = Instant::now();
        assert!(Deadline::at(now).is_past(now));
        assert_eq!(Deadline::at(now).remaining(now + Duration::from_secs(1)), Some(Duration::ZERO));
        assert_eq!(Deadline::after(Duration::MAX), Deadline::NEVER);
    }
}
