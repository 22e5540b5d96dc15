//! The hazard protocol: how a peer in another process touches memory that its owner may withdraw.
//!
//! The owner publishes each grant in a table entry whose state word is live or dead. A peer announces what it
//! is about to touch in a hazard slot, looks whether the grant is still live, touches, and clears the slot.
//! The owner retires the grant and then waits until no slot names it. Store-then-load on both sides with a
//! sequentially consistent fence between them (Dekker's pattern): either the peer sees the grant dead, or the
//! owner sees the slot.
//!
//! A peer that leaves does so the same way: it notes that it has left, and then says goodbye. Its threads look for the
//! note after they have announced. So either such a thread sees the note, or whoever has heard the goodbye sees the slot.
//!
//! Loads of the state are relaxed and followed by a fence, because the peer's mapping of the table is
//! read-only, and relaxed loads are what Rust guarantees to work there.

#[cfg(all(test, loom))]
use loom::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};
#[cfg(not(all(test, loom)))]
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};

/// The word of a free slot, and of an entry that is not live.
pub(crate) const NONE: u64 = 0;

/// Announces `key` in `slot`, and says whether the grant was live after that. If not, the slot is clear again.
pub(crate) fn announce(slot: &AtomicU64, state: &AtomicU64, key: u64) -> bool {
    // Release: the slot may have named another grant, and what was written under that is over.
    slot.store(key, Ordering::Release);
    fence(Ordering::SeqCst);
    let live = state.load(Ordering::Relaxed) == key;
    // What the owner wrote before it published or retired the grant is seen from here on.
    fence(Ordering::Acquire);
    if !live {
        clear(slot);
    }
    live
}

/// Ends what was announced: whatever the peer wrote under it is seen by an owner that finds the slot clear.
pub(crate) fn clear(slot: &AtomicU64) {
    slot.store(NONE, Ordering::Release);
}

/// Notes in `left` that this peer touches nothing from now on that it has not announced before.
pub(crate) fn leave(left: &AtomicBool) {
    left.store(true, Ordering::Release);
    fence(Ordering::SeqCst);
}

/// Whether the peer has left: to be asked after [`announce`], by whose fence a no means that the slot is seen.
pub(crate) fn has_left(left: &AtomicBool) -> bool {
    left.load(Ordering::Relaxed)
}

/// Makes the entry live, with everything that was stored into it before.
pub(crate) fn publish(state: &AtomicU64, key: u64) {
    state.store(key, Ordering::Release);
}

/// Makes the entry dead. Whoever announces from now on finds it so, and sees what was stored before; those who
/// announced earlier are found by [`is_held`].
pub(crate) fn retire(state: &AtomicU64) {
    state.store(NONE, Ordering::Release);
    fence(Ordering::SeqCst);
}

/// Whether `slot` names `key`; after [`retire`], a no is final.
pub(crate) fn is_held(slot: &AtomicU64, key: u64) -> bool {
    slot.load(Ordering::Acquire) == key
}

#[cfg(all(test, loom))]
mod model {
    use loom::cell::UnsafeCell;
    use loom::sync::Arc;
    use loom::thread;

    use super::*;

    struct Shared {
        state: AtomicU64,
        slots: [AtomicU64; 2],
        memory: [UnsafeCell<u64>; 2],
    }

    // SAFETY: the cells are touched under the protocol that the model checks; loom reports a race.
    unsafe impl Sync for Shared {}
    // SAFETY: as above.
    unsafe impl Send for Shared {}

    fn peer(shared: &Shared, me: usize) {
        if announce(&shared.slots[me], &shared.state, 7) {
            // SAFETY: loom checks that nobody else has access.
            shared.memory[me].with_mut(|memory| unsafe { *memory = 1 });
            clear(&shared.slots[me]);
        }
    }

    /// After retiring and finding every slot clear, the owner has the memory to itself.
    #[test]
    fn retired_and_clear_means_quiet() {
        loom::model(|| {
            let shared = Arc::new(Shared {
                state: AtomicU64::new(NONE),
                slots: [AtomicU64::new(NONE), AtomicU64::new(NONE)],
                memory: [UnsafeCell::new(0), UnsafeCell::new(0)],
            });
            // SAFETY: nobody else knows it yet.
            shared.memory[0].with_mut(|memory| unsafe { *memory = 5 });
            publish(&shared.state, 7);
            let peers = [0, 1].map(|me| {
                let shared = Arc::clone(&shared);
                thread::spawn(move || peer(&shared, me))
            });
            retire(&shared.state);
            for (slot, memory) in shared.slots.iter().zip(&shared.memory) {
                while is_held(slot, 7) {
                    thread::yield_now();
                }
                // SAFETY: loom checks that nobody else has access.
                memory.with_mut(|memory| unsafe { *memory = 2 });
            }
            for peer in peers {
                peer.join().unwrap();
            }
        });
    }

    /// After a goodbye and with every slot clear, the peer is forgotten and the memory is the owner's, though the
    /// grant is live.
    #[test]
    fn left_and_clear_means_quiet() {
        loom::model(|| {
            let shared = Arc::new(Shared {
                state: AtomicU64::new(NONE),
                slots: [AtomicU64::new(NONE), AtomicU64::new(NONE)],
                memory: [UnsafeCell::new(0), UnsafeCell::new(0)],
            });
            publish(&shared.state, 7);
            let left = Arc::new((AtomicBool::new(false), AtomicBool::new(false)));
            let copies = thread::spawn({
                let (shared, left) = (Arc::clone(&shared), Arc::clone(&left));
                move || {
                    if announce(&shared.slots[0], &shared.state, 7) {
                        if !has_left(&left.0) {
                            // SAFETY: loom checks that nobody else has access.
                            shared.memory[0].with_mut(|memory| unsafe { *memory = 1 });
                        }
                        clear(&shared.slots[0]);
                    }
                }
            });
            let leaves = thread::spawn({
                let left = Arc::clone(&left);
                move || {
                    leave(&left.0);
                    left.1.store(true, Ordering::Release);
                }
            });
            while !left.1.load(Ordering::Acquire) {
                thread::yield_now();
            }
            while !is_held(&shared.slots[0], NONE) {
                thread::yield_now();
            }
            // SAFETY: loom checks that nobody else has access.
            shared.memory[0].with_mut(|memory| unsafe { *memory = 2 });
            copies.join().unwrap();
            leaves.join().unwrap();
        });
    }

    /// A peer that finds the grant live sees what the owner wrote before publishing it.
    #[test]
    fn live_means_published() {
        loom::model(|| {
            let shared = Arc::new(Shared {
                state: AtomicU64::new(NONE),
                slots: [AtomicU64::new(NONE), AtomicU64::new(NONE)],
                memory: [UnsafeCell::new(0), UnsafeCell::new(0)],
            });
            let other = thread::spawn({
                let shared = Arc::clone(&shared);
                move || {
                    if announce(&shared.slots[0], &shared.state, 7) {
                        // SAFETY: loom checks that nobody else has access.
                        assert_eq!(shared.memory[0].with(|memory| unsafe { *memory }), 5);
                        clear(&shared.slots[0]);
                    }
                }
            });
            // SAFETY: not published yet.
            shared.memory[0].with_mut(|memory| unsafe { *memory = 5 });
            publish(&shared.state, 7);
            other.join().unwrap();
        });
    }
}
