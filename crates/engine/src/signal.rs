//! Waiting for something that other threads bring about, by a thread or a task.

use std::fmt;
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use posthorse_core::{Deadline, spin, wake_all};

use sync::{AtomicUsize, Condvar, Mutex, Ordering, fence};

#[cfg(not(all(test, loom)))]
mod sync {
    pub(super) use std::sync::atomic::{AtomicUsize, Ordering, fence};

    pub(super) use parking_lot::{Condvar, Mutex};
}

/// A condition's bell: whoever changes the condition rings it, whoever waits looks again.
///
/// Ringing costs a fence and a load while nobody waits.
#[derive(Default)]
pub(crate) struct Signal {
    /// Threads that are parked or about to be, and registered wakers.
    waiting: AtomicUsize,
    wakers: Mutex<Vec<Waker>>,
    parked: Condvar,
}

impl Signal {
    /// Says that the condition may have changed. The change must have happened before the call.
    pub(crate) fn ring(&self) {
        // Orders the caller's change before the load; pairs with the fences in `wait` and `poll`:
        // either we see the waiter, or the waiter sees the change.
        fence(Ordering::SeqCst);
        if self.waiting.load(Ordering::SeqCst) == 0 {
            return;
        }
        let wakers = {
            let mut wakers = self.wakers.lock();
            self.waiting.fetch_sub(wakers.len(), Ordering::SeqCst);
            std::mem::take(&mut *wakers)
        };
        self.parked.notify_all();
        wake_all(wakers);
    }

    /// Waits until `done`: spins for `spin_for`, where that pays, then parks. Says whether it was done by the deadline.
    pub(crate) fn wait(&self, spin_for: Duration, deadline: Deadline, done: impl Fn() -> bool) -> bool {
        if done() {
            return true;
        }
        let begin = Instant::now();
        if !spin_for.is_zero() && spin::pays(begin) {
            let until = begin + spin_for;
            loop {
                for _ in 0..32 {
                    std::hint::spin_loop();
                    if done() {
                        return true;
                    }
                }
                let now = Instant::now();
                if now >= until || deadline.is_past(now) {
                    break;
                }
                // Whoever is to bring it about may need this core.
                spin::give_way();
            }
        }
        self.waiting.fetch_add(1, Ordering::SeqCst);
        // Pairs with the fence in `ring`: what `done` reads must not be older than our being counted.
        fence(Ordering::SeqCst);
        let mut lock = self.wakers.lock();
        let outcome = loop {
            if done() {
                break true;
            }
            match deadline.instant() {
                None => self.parked.wait(&mut lock),
                Some(at) if self.parked.wait_until(&mut lock, at).timed_out() => break done(),
                Some(_) => {}
            }
        };
        drop(lock);
        self.waiting.fetch_sub(1, Ordering::SeqCst);
        outcome
    }

    /// Ready when `done`; else the task is woken when the bell rings next.
    pub(crate) fn poll(&self, context: &mut Context<'_>, done: impl Fn() -> bool) -> Poll<()> {
        if done() {
            return Poll::Ready(());
        }
        let mut wakers = self.wakers.lock();
        if !wakers.iter().any(|waker| waker.will_wake(context.waker())) {
            wakers.push(context.waker().clone());
            self.waiting.fetch_add(1, Ordering::SeqCst);
        }
        drop(wakers);
        // As in `wait`.
        fence(Ordering::SeqCst);
        // A change between the first look and the registration may have found nobody to wake.
        if done() { Poll::Ready(()) } else { Poll::Pending }
    }
}

impl fmt::Debug for Signal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Signal({} waiting)", self.waiting.load(Ordering::Relaxed))
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::AtomicBool;
    use std::thread;

    use super::*;

    #[test]
    fn a_wait_ends_at_its_deadline_when_nothing_happens() {
        let signal = Signal::default();
        let start = Instant::now();
        assert!(!signal.wait(Duration::ZERO, Deadline::after(Duration::from_millis(20)), || false));
        assert!(start.elapsed() >= Duration::from_millis(20));
        assert!(signal.wait(Duration::ZERO, Deadline::at(start), || true), "done wins against past");
    }

    #[test]
    fn no_ring_is_missed() {
        for spin in [Duration::ZERO, Duration::from_micros(5)] {
            for _ in 0..500 {
                let shared = Arc::new((Signal::default(), AtomicBool::new(false)));
                let waiter = thread::spawn({
                    let shared = Arc::clone(&shared);
                    move || shared.0.wait(spin, Deadline::NEVER, || shared.1.load(Ordering::Acquire))
                });
                shared.1.store(true, Ordering::Release);
                shared.0.ring();
                assert!(waiter.join().unwrap());
            }
        }
    }

    #[test]
    fn a_task_is_woken_once_by_the_next_ring() {
        use std::sync::atomic::AtomicUsize;
        use std::task::Wake;

        struct Count(AtomicUsize);
        impl Wake for Count {
            fn wake(self: Arc<Self>) {
                self.0.fetch_add(1, Ordering::SeqCst);
            }
        }

        let (signal, count) = (Signal::default(), Arc::new(Count(AtomicUsize::new(0))));
        let waker = Waker::from(Arc::clone(&count));
        let mut context = Context::from_waker(&waker);
        assert!(signal.poll(&mut context, || false).is_pending());
        assert!(signal.poll(&mut context, || false).is_pending(), "registered only once");
        signal.ring();
        signal.ring();
        assert_eq!(count.0.load(Ordering::SeqCst), 1);
        assert!(signal.poll(&mut context, || true).is_ready());
        assert_eq!(signal.waiting.load(Ordering::SeqCst), 0);
    }
}

/// The model checker's locks, with the interface of those that are used elsewhere. It knows no time.
#[cfg(all(test, loom))]
mod sync {
    use std::ops::{Deref, DerefMut};
    use std::time::Instant;

    pub(super) use loom::sync::atomic::{AtomicUsize, Ordering, fence};
    use parking_lot::WaitTimeoutResult;

    #[derive(Default)]
    pub(super) struct Mutex<T>(loom::sync::Mutex<T>);

    pub(super) struct Guard<'a, T>(Option<loom::sync::MutexGuard<'a, T>>);

    impl<T> Mutex<T> {
        pub(super) fn lock(&self) -> Guard<'_, T> {
            Guard(Some(self.0.lock().unwrap()))
        }
    }

    impl<T> Deref for Guard<'_, T> {
        type Target = T;

        fn deref(&self) -> &T {
            self.0.as_ref().unwrap()
        }
    }

    impl<T> DerefMut for Guard<'_, T> {
        fn deref_mut(&mut self) -> &mut T {
            self.0.as_mut().unwrap()
        }
    }

    #[derive(Default)]
    pub(super) struct Condvar(loom::sync::Condvar);

    impl Condvar {
        pub(super) fn notify_all(&self) {
            self.0.notify_all();
        }

        pub(super) fn wait<T>(&self, guard: &mut Guard<'_, T>) {
            guard.0 = Some(self.0.wait(guard.0.take().unwrap()).unwrap());
        }

        pub(super) fn wait_until<T>(&self, _: &mut Guard<'_, T>, _: Instant) -> WaitTimeoutResult {
            unreachable!("the models wait without a deadline")
        }
    }
}

#[cfg(all(test, loom))]
mod model {
    use std::task::Wake;

    use loom::sync::Arc;
    use loom::sync::atomic::AtomicBool;
    use loom::thread;

    use super::*;

    /// The change is made and looked for with no more order than the engine's counters have.
    fn ring(shared: &(Signal, AtomicBool)) {
        shared.1.store(true, Ordering::Release);
        shared.0.ring();
    }

    #[test]
    fn a_thread_that_waits_misses_no_ring() {
        loom::model(|| {
            let shared = Arc::new((Signal::default(), AtomicBool::new(false)));
            let ringer = thread::spawn({
                let shared = Arc::clone(&shared);
                move || ring(&shared)
            });
            // A missed ring is a deadlock, which the checker reports.
            assert!(shared.0.wait(Duration::ZERO, Deadline::NEVER, || shared.1.load(Ordering::Acquire)));
            ringer.join().unwrap();
        });
    }

    #[test]
    fn a_task_that_is_told_to_wait_is_woken() {
        struct Woken(std::sync::atomic::AtomicBool);
        impl Wake for Woken {
            fn wake(self: std::sync::Arc<Self>) {
                self.0.store(true, std::sync::atomic::Ordering::SeqCst);
            }
        }
        loom::model(|| {
            let shared = Arc::new((Signal::default(), AtomicBool::new(false)));
            let woken = std::sync::Arc::new(Woken(false.into()));
            let ringer = thread::spawn({
                let shared = Arc::clone(&shared);
                move || ring(&shared)
            });
            let waker = Waker::from(std::sync::Arc::clone(&woken));
            let mut context = Context::from_waker(&waker);
            let polled = shared.0.poll(&mut context, || shared.1.load(Ordering::Acquire));
            ringer.join().unwrap();
            assert!(polled.is_ready() || woken.0.load(std::sync::atomic::Ordering::SeqCst));
        });
    }
}
