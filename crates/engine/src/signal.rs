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
    wakers: Mutex<Wakers>,
    parked: Condvar,
}

/// One waker for each future that waits, under the number of its place.
#[derive(Default)]
struct Wakers {
    places: u64,
    registered: Vec<(u64, Waker)>,
}

impl Wakers {
    /// Registers a future's waker. The one that it replaces is returned.
    fn register(&mut self, place: &mut Place, waker: Waker) -> Option<Waker> {
        let number = *place.0.get_or_insert_with(|| {
            self.places += 1;
            self.places
        });
        if let Some((_, known)) = self.registered.iter_mut().find(|(owner, _)| *owner == number) {
            return Some(std::mem::replace(known, waker));
        }
        self.registered.push((number, waker));
        None
    }

    fn remove(&mut self, place: &Place) -> Option<Waker> {
        let index = self.registered.iter().position(|(owner, _)| Some(*owner) == place.0)?;
        Some(self.registered.swap_remove(index).1)
    }
}

/// Where one future's waker is kept. A future has one of its own, whatever tasks poll it, so that what is kept is bounded
/// by the futures there are; it gives it back with [`Signal::leave`].
#[derive(Debug, Default)]
pub(crate) struct Place(Option<u64>);

impl Place {
    /// Of a future that was not polled yet.
    pub(crate) const NONE: Self = Self(None);
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
            self.waiting.fetch_sub(wakers.registered.len(), Ordering::SeqCst);
            std::mem::take(&mut wakers.registered)
        };
        self.parked.notify_all();
        wake_all(wakers.into_iter().map(|(_, waker)| waker));
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
    pub(crate) fn poll(
        &self,
        place: &mut Place,
        context: &mut Context<'_>,
        done: impl Fn() -> bool,
    ) -> Poll<()> {
        if done() {
            return Poll::Ready(());
        }
        // Cloned and dropped without the lock: a waker's code is not ours.
        let waker = context.waker().clone();
        let replaced = {
            let mut wakers = self.wakers.lock();
            let replaced = wakers.register(place, waker);
            self.waiting.fetch_add(usize::from(replaced.is_none()), Ordering::SeqCst);
            replaced
        };
        drop(replaced);
        // As in `wait`.
        fence(Ordering::SeqCst);
        // A change between the first look and the registration may have found nobody to wake.
        if done() { Poll::Ready(()) } else { Poll::Pending }
    }

    /// Forgets the waker of a future that is dropped.
    pub(crate) fn leave(&self, place: &Place) {
        if place.0.is_none() {
            return;
        }
        let waker = {
            let mut wakers = self.wakers.lock();
            let waker = wakers.remove(place);
            self.waiting.fetch_sub(usize::from(waker.is_some()), Ordering::SeqCst);
            waker
        };
        drop(waker);
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
    use std::task::Wake;
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

    #[derive(Default)]
    struct Count(AtomicUsize);

    impl Wake for Count {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::SeqCst);
        }
    }

    #[test]
    fn a_task_is_woken_once_by_the_next_ring() {
        let (signal, count) = (Signal::default(), Arc::new(Count::default()));
        let waker = Waker::from(Arc::clone(&count));
        let (mut context, mut place) = (Context::from_waker(&waker), Place::NONE);
        assert!(signal.poll(&mut place, &mut context, || false).is_pending());
        assert!(signal.poll(&mut place, &mut context, || false).is_pending(), "registered only once");
        signal.ring();
        signal.ring();
        assert_eq!(count.0.load(Ordering::SeqCst), 1);
        assert!(signal.poll(&mut place, &mut context, || true).is_ready());
        assert_eq!(signal.waiting.load(Ordering::SeqCst), 0);
    }

    #[test]
    fn a_future_keeps_one_waker_whoever_polls_it_and_none_when_it_is_gone() {
        let (signal, mut place) = (Signal::default(), Place::NONE);
        let counts: Vec<Arc<Count>> = (0..100).map(|_| Arc::default()).collect();
        for count in &counts {
            let waker = Waker::from(Arc::clone(count));
            assert!(signal.poll(&mut place, &mut Context::from_waker(&waker), || false).is_pending());
        }
        assert_eq!(signal.waiting.load(Ordering::SeqCst), 1);
        let kept = counts.iter().filter(|count| Arc::strong_count(count) > 1).count();
        assert_eq!(kept, 1, "only whoever polled last is woken");

        // Two futures of one task are two: the end of one must not silence the other.
        let (count, mut other) = (Arc::new(Count::default()), Place::NONE);
        let waker = Waker::from(Arc::clone(&count));
        assert!(signal.poll(&mut other, &mut Context::from_waker(&waker), || false).is_pending());
        assert!(signal.poll(&mut place, &mut Context::from_waker(&waker), || false).is_pending());
        signal.leave(&place);
        signal.leave(&place);
        assert_eq!(signal.waiting.load(Ordering::SeqCst), 1);
        signal.ring();
        assert_eq!(count.0.load(Ordering::SeqCst), 1);
        signal.leave(&other);
        assert_eq!(signal.waiting.load(Ordering::SeqCst), 0);
        assert!(counts.iter().all(|count| Arc::strong_count(count) == 1));
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
            let (mut context, mut place) = (Context::from_waker(&waker), Place::NONE);
            let polled = shared.0.poll(&mut place, &mut context, || shared.1.load(Ordering::Acquire));
            ringer.join().unwrap();
            assert!(polled.is_ready() || woken.0.load(std::sync::atomic::Ordering::SeqCst));
        });
    }
}
