//! Who does which chunk of a shared copy, and when all of them are done.

#[cfg(loom)]
use loom::{
    hint::spin_loop,
    sync::atomic::{AtomicUsize, Ordering},
    thread::{self, Thread},
};
#[cfg(not(loom))]
use std::{
    hint::spin_loop,
    sync::atomic::{AtomicUsize, Ordering},
    thread::{self, Thread},
};

/// Looks at the count this often before the owner parks. A helper is in the midst of its last chunk then,
/// which takes some tens of microseconds; a wake-up takes about as long again.
#[cfg(not(loom))]
const SPINS: usize = 4096;
#[cfg(loom)]
const SPINS: usize = 1;

/// Chunks `0..total`, each claimed by one thread; whoever made this value, its owner, waits for them all.
#[derive(Debug)]
pub(super) struct Claims {
    total: usize,
    next: AtomicUsize,
    done: AtomicUsize,
    owner: Thread,
}

impl Claims {
    /// `total` chunks, owned by the calling thread.
    pub(super) fn new(total: usize) -> Self {
        Self { total, next: AtomicUsize::new(0), done: AtomicUsize::new(0), owner: thread::current() }
    }

    /// A chunk that nobody else has; `None` when none is left.
    pub(super) fn claim(&self) -> Option<usize> {
        // Relaxed: a claim only has to be unique. What is copied was published with the job itself.
        let index = self.next.fetch_add(1, Ordering::Relaxed);
        (index < self.total).then_some(index)
    }

    /// Says that a claimed chunk is done.
    pub(super) fn finish(&self) {
        // Release: what was copied is visible to the owner when it sees the count.
        if self.done.fetch_add(1, Ordering::AcqRel) + 1 == self.total
            && thread::current().id() != self.owner.id()
        {
            self.owner.unpark();
        }
    }

    /// Waits until every chunk is done. Called by the owner when no chunk is left to claim, so the wait is for
    /// copies that are running already, and lasts no longer than they do.
    pub(super) fn wait(&self) {
        for _ in 0..SPINS {
            if self.is_done() {
                return;
            }
            spin_loop();
        }
        while !self.is_done() {
            thread::park();
        }
    }

    fn is_done(&self) -> bool {
        self.done.load(Ordering::Acquire) == self.total
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn each_chunk_is_claimed_once() {
        let claims = Claims::new(3);
        assert_eq!([claims.claim(), claims.claim(), claims.claim()], [Some(0), Some(1), Some(2)]);
        assert_eq!([claims.claim(), claims.claim()], [None, None]);
    }

    #[test]
    fn the_owner_waits_for_a_helper_that_has_a_chunk() {
        let claims = Claims::new(2);
        let helper_has_one = std::sync::Barrier::new(2);
        let copied = std::sync::atomic::AtomicBool::new(false);
        thread::scope(|scope| {
            scope.spawn(|| {
                assert!(claims.claim().is_some());
                helper_has_one.wait();
                copied.store(true, Ordering::Relaxed);
                claims.finish();
            });
            helper_has_one.wait();
            assert!(claims.claim().is_some());
            claims.finish();
            claims.wait();
            assert!(copied.load(Ordering::Relaxed));
        });
    }
}

#[cfg(all(test, loom))]
mod loom_tests {
    use loom::cell::UnsafeCell;
    use loom::sync::Arc;

    use super::*;

    struct Shared {
        claims: Claims,
        chunks: Vec<UnsafeCell<usize>>,
    }

    impl Shared {
        fn run(&self) {
            while let Some(index) = self.claims.claim() {
                // SAFETY: the claim is unique; loom checks that no other access overlaps.
                self.chunks[index].with_mut(|chunk| unsafe { *chunk += 1 });
                self.claims.finish();
            }
        }
    }

    #[test]
    fn the_owner_sees_every_chunk_copied_once() {
        for (helpers, chunks) in [(1, 1), (1, 3), (2, 2)] {
            loom::model(move || {
                let shared = Arc::new(Shared {
                    claims: Claims::new(chunks),
                    chunks: (0..chunks).map(|_| UnsafeCell::new(0)).collect(),
                });
                let helpers: Vec<_> = (0..helpers)
                    .map(|_| {
                        let shared = shared.clone();
                        thread::spawn(move || shared.run())
                    })
                    .collect();
                shared.run();
                shared.claims.wait();
                for chunk in &shared.chunks {
                    // SAFETY: every chunk is done; loom checks that it is so.
                    assert_eq!(chunk.with(|chunk| unsafe { *chunk }), 1);
                }
                for helper in helpers {
                    helper.join().unwrap();
                }
            });
        }
    }
}
