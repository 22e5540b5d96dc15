//! Waking tasks that belong to somebody else.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::task::Waker;

/// Wakes each of them. A waker is code of an executor's, and this may be any thread, a transport's among them: one that
/// panics, of which the panic hook tells, takes neither the thread along nor the wake-ups of the others.
pub fn wake_all(wakers: impl IntoIterator<Item = Waker>) {
    for waker in wakers {
        let _ = catch_unwind(AssertUnwindSafe(|| waker.wake()));
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::task::Wake;

    use super::*;

    struct Panics(AtomicUsize);

    impl Wake for Panics {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::Relaxed);
            panic!("the waker of a test, which panics");
        }
    }

    #[test]
    fn a_waker_that_panics_keeps_no_other_from_being_called() {
        let panics = Arc::new(Panics(AtomicUsize::new(0)));
        wake_all([Waker::from(Arc::clone(&panics)), Waker::from(Arc::clone(&panics))]);
        assert_eq!(panics.0.load(Ordering::Relaxed), 2);
    }
}
