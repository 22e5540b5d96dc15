//! Receive slots: what a peer may write to is nobody else's until its writes are known to have stopped.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread;

use common::{Heap, heap_pool, soon, until_waiting};
use posthorse_buffer::{Pool, PoolConfig, ReceiveSlot, SlotGrant, SlotState};
use posthorse_core::{ErrorKind, GrantToken};

/// Tokens differ in their secret.
const fn token(secret: u64) -> Option<GrantToken> {
    Some(GrantToken { handle: 1, secret })
}

/// Writes as a peer or a transport does: through the view, past all references.
fn peer_writes(slot: &ReceiveSlot, byte: u8) {
    let view = slot.view().host().unwrap();
    // SAFETY: the slot is granted, so it is alive and nobody looks into it.
    unsafe { view.bytes_mut() }.fill(byte);
}

#[test]
fn a_granted_slot_is_read_after_the_peer_has_reported() {
    let pool = heap_pool(1024);
    let mut slot = pool.try_alloc(100).unwrap().into_slot();
    assert_eq!(slot.state(), SlotState::Allocated);
    let grant = slot.grant(token(0xFEED)).unwrap();
    assert_eq!(slot.state(), SlotState::Granted(grant));
    assert_eq!((grant.token, pool.stats().granted_slots), (token(0xFEED), 1));
    peer_writes(&slot, 5);
    slot.fill(grant).unwrap();
    assert_eq!(pool.stats().granted_slots, 0);
    let buffer = slot.into_buffer().unwrap();
    assert_eq!(buffer.bytes().unwrap(), [5; 100]);
    drop(buffer);
    assert!(pool.stats().is_whole());
}

#[test]
fn a_report_under_another_grant_changes_nothing() {
    let pool = heap_pool(1024);
    let mut older = pool.try_alloc(64).unwrap().into_slot();
    let old = older.grant(token(1)).unwrap();
    older.fill(old).unwrap();
    drop(older);

    let mut slot = pool.try_alloc(64).unwrap().into_slot();
    let grant = slot.grant(token(1)).unwrap();
    assert_ne!(grant.generation, old.generation, "the same memory and token, and still another grant");
    for wrong in [old, SlotGrant { token: token(2), ..grant }] {
        assert_eq!(slot.fill(wrong).unwrap_err().kind(), ErrorKind::AccessDenied);
    }
    assert_eq!(slot.grant(token(1)).unwrap_err().kind(), ErrorKind::Busy);
    assert_eq!(pool.stats().granted_slots, 1);
    slot.fill(grant).unwrap();
    assert_eq!(slot.fill(grant).unwrap_err().kind(), ErrorKind::Expired, "a report is taken once");
}

#[test]
fn a_slot_that_is_given_up_early_is_held_until_its_fence() {
    let pool = heap_pool(1024);
    let give_up: [fn(ReceiveSlot); 3] = [
        drop,
        |slot| assert!(slot.withdraw().is_ok()),
        |slot| assert_eq!(slot.into_buffer().unwrap_err().kind(), ErrorKind::Busy),
    ];
    for give_up in give_up {
        let mut slot = pool.try_alloc(1000).unwrap().into_slot();
        let grant = slot.grant(token(9)).unwrap();
        give_up(slot);

        let stats = pool.stats();
        assert_eq!((stats.granted_slots, stats.fencing_slots, stats.fencing, stats.used), (0, 1, 1024, 1024));
        assert!(!stats.is_whole());
        let shown = pool.fencing();
        assert_eq!((shown[0].grant, shown[0].offset, shown[0].len), (grant, 0, 1000));
        assert_eq!(pool.try_alloc(1).unwrap_err().kind(), ErrorKind::PoolFull, "it is never handed out");

        assert_eq!(pool.fenced(grant.generation + 1).unwrap_err().kind(), ErrorKind::BadFree);
        pool.fenced(grant.generation).unwrap();
        assert!(pool.stats().is_whole());
        assert_eq!(pool.fenced(grant.generation).unwrap_err().kind(), ErrorKind::BadFree);
    }
}

#[test]
fn a_slot_that_no_peer_may_write_to_simply_returns() {
    let pool = heap_pool(1024);
    drop(pool.try_alloc(64).unwrap().into_slot());
    assert!(pool.try_alloc(64).unwrap().into_slot().into_buffer().is_ok());
    assert_eq!(
        pool.try_alloc(64).unwrap().into_slot().withdraw().unwrap_err().kind(),
        ErrorKind::InvalidArgument
    );
    let mut filled = pool.try_alloc(64).unwrap().into_slot();
    let grant = filled.grant(token(1)).unwrap();
    filled.fill(grant).unwrap();
    drop(filled);
    assert!(pool.stats().is_whole());
}

#[test]
fn a_fence_serves_who_waits() {
    let pool = heap_pool(1024);
    let grants = [(); 2].map(|()| {
        let mut slot = pool.try_alloc(512).unwrap().into_slot();
        slot.grant(None).unwrap();
        slot.withdraw().unwrap()
    });
    thread::scope(|scope| {
        let waiter = scope.spawn(|| pool.alloc(512, soon()));
        until_waiting(&pool, 1);
        pool.fenced(grants[0].generation).unwrap();
        assert!(waiter.join().unwrap().is_ok());

        let waiter = scope.spawn(|| pool.alloc(1024, soon()));
        until_waiting(&pool, 1);
        assert_eq!(pool.all_fenced(), 1);
        assert!(waiter.join().unwrap().is_ok());
    });
    assert!(pool.stats().is_whole());
}

#[test]
fn closing_does_not_free_what_a_peer_may_write_to() {
    let pool = heap_pool(1024);
    let mut slot = pool.try_alloc(64).unwrap().into_slot();
    let grant = slot.grant(None).unwrap();
    pool.close();
    drop(slot);
    assert_eq!(pool.stats().fencing_slots, 1);
    pool.fenced(grant.generation).unwrap();
    assert!(pool.stats().is_whole());
}

#[test]
#[cfg_attr(miri, ignore = "it leaks on purpose")]
fn memory_that_a_peer_may_write_to_is_leaked_rather_than_freed() {
    let region = Heap::new(1024);
    let freed = Arc::clone(&region.freed);
    let pool = Pool::new(region, &PoolConfig::default()).unwrap();
    let mut slot = pool.try_alloc(64).unwrap().into_slot();
    slot.grant(None).unwrap();
    drop((pool, slot));
    assert!(!freed.load(Ordering::SeqCst));
}
