//! The end of something that has threads: one thread brings it about, and whoever else asks waits until it is over.

use std::cell::Cell;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, ThreadId};

thread_local! {
    static AT_WORK: Cell<u32> = const { Cell::new(0) };
}

/// Marks the time in which this thread does the work of something whose [`Ending`] waits for that work. Code that is
/// called from there (such as the waker of a batch) does not wait for the end.
#[derive(Debug)]
pub struct AtWork(std::marker::PhantomData<*const ()>);

impl AtWork {
    /// From here until this is dropped, on this thread.
    #[must_use]
    pub fn begin() -> Self {
        AT_WORK.with(|depth| depth.set(depth.get() + 1));
        Self(std::marker::PhantomData)
    }

    /// Whether this thread is at work. Then it must not wait for the work of others either, as they may wait for it.
    #[must_use]
    pub fn is_now() -> bool {
        AT_WORK.with(Cell::get) > 0
    }
}

impl Drop for AtWork {
    fn drop(&mut self) {
        AT_WORK.with(|depth| depth.set(depth.get() - 1));
    }
}

/// Sees to it that an end is brought about once, and that everyone who asks for it sees it done.
#[derive(Debug, Default)]
pub struct Ending {
    state: Mutex<State>,
    over: Condvar,
}

#[derive(Debug, Default)]
enum State {
    #[default]
    NotBegun,
    BroughtAboutBy(ThreadId),
    Over,
}

/// The duty to bring the end about. It is over when this is dropped.
#[derive(Debug)]
pub struct EndingDuty<'a>(&'a Ending);

impl Ending {
    /// The first who asks gets the duty. Whoever asks later waits until the end is over, unless the end may be
    /// waiting for this very thread: one that is [at work](AtWork), or at the duty itself.
    pub fn begin(&self) -> Option<EndingDuty<'_>> {
        let mut state = self.state();
        let own = match *state {
            State::NotBegun => {
                *state = State::BroughtAboutBy(thread::current().id());
                return Some(EndingDuty(self));
            }
            State::BroughtAboutBy(thread) => thread == thread::current().id(),
            State::Over => return None,
        };
        if !own && !AtWork::is_now() {
            let over = self.over.wait_while(state, |state| !matches!(state, State::Over));
            drop(over.unwrap_or_else(PoisonError::into_inner));
        }
        None
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // Each change is one assignment, so a panic leaves nothing half done.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for EndingDuty<'_> {
    fn drop(&mut self) {
        *self.0.state() = State::Over;
        self.0.over.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;

    #[test]
    fn one_brings_the_end_about_and_the_others_return_when_it_is_over() {
        let (ending, over) = (Ending::default(), AtomicBool::new(false));
        thread::scope(|scope| {
            let duty = ending.begin().unwrap();
            assert!(ending.begin().is_none(), "whoever is at it does not wait for itself");
            for _ in 0..4 {
                scope.spawn(|| {
                    assert!(ending.begin().is_none());
                    assert!(over.load(Ordering::SeqCst));
                });
            }
            // Those at work do not wait, and are so done before the end is over.
            let at_work = scope.spawn(|| {
                let _outer = AtWork::begin();
                drop(AtWork::begin());
                ending.begin().is_none()
            });
            assert!(at_work.join().unwrap());
            over.store(true, Ordering::SeqCst);
            drop(duty);
        });
        assert!(ending.begin().is_none());
        assert!(!AtWork::is_now());
    }
}
