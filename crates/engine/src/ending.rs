//! The end of an engine: one thread brings it about, and whoever else asks for it waits until it is over.

use std::cell::Cell;
use std::thread::{self, ThreadId};

use parking_lot::{Condvar, Mutex};

thread_local! {
    static AT_WORK: Cell<u32> = const { Cell::new(0) };
}

/// Marks the time in which this thread does an engine's work. The end of an engine waits for that, so that code which
/// is called from there (such as the waker of a batch) must not wait for the end.
#[derive(Debug)]
pub(crate) struct AtWork(());

impl AtWork {
    pub(crate) fn begin() -> Self {
        AT_WORK.with(|depth| depth.set(depth.get() + 1));
        Self(())
    }

    fn is_now() -> bool {
        AT_WORK.with(Cell::get) > 0
    }
}

impl Drop for AtWork {
    fn drop(&mut self) {
        AT_WORK.with(|depth| depth.set(depth.get() - 1));
    }
}

/// How far the end has come.
#[derive(Debug, Default)]
pub(crate) struct Ending {
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
pub(crate) struct Duty<'a>(&'a Ending);

impl Ending {
    /// The first who asks gets the duty. Whoever asks later waits until the end is over, unless the end may be
    /// waiting for this very thread: one that is at an engine's work, or at the duty itself.
    pub(crate) fn begin(&self) -> Option<Duty<'_>> {
        let mut state = self.state.lock();
        let own = match *state {
            State::NotBegun => {
                *state = State::BroughtAboutBy(thread::current().id());
                return Some(Duty(self));
            }
            State::BroughtAboutBy(thread) => thread == thread::current().id(),
            State::Over => return None,
        };
        if !own && !AtWork::is_now() {
            self.over.wait_while(&mut state, |state| !matches!(state, State::Over));
        }
        None
    }
}

impl Drop for Duty<'_> {
    fn drop(&mut self) {
        *self.0.state.lock() = State::Over;
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
