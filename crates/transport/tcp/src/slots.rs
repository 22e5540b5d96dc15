//! A bounded number of things, counted.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// One of a bounded number, given back when dropped.
#[derive(Debug)]
pub(crate) struct Slot(Arc<AtomicUsize>);

impl Slot {
    /// None when `limit` of them are taken.
    pub(crate) fn take(taken: &Arc<AtomicUsize>, limit: usize) -> Option<Self> {
        // Made first, so that it is given back whichever way this ends.
        let slot = Self(Arc::clone(taken));
        (taken.fetch_add(1, Ordering::Relaxed) < limit).then_some(slot)
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_more_than_the_limit_are_taken_and_a_dropped_one_is_free_again() {
        let taken = Arc::default();
        let mut slots: Vec<_> = (0..5).map_while(|_| Slot::take(&taken, 3)).collect();
        assert_eq!(slots.len(), 3);
        assert!(Slot::take(&taken, 3).is_none());
        slots.pop();
        assert!(Slot::take(&taken, 3).is_some());
        drop(slots);
        assert_eq!(taken.load(Ordering::Relaxed), 0);
    }
}
