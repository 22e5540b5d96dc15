//! Many threads on one pool: no byte has two owners, nobody starves, and the pool is whole at the end.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, Waker};
use std::thread;

use common::{heap_pool, soon, until_waiting};
use posthorse_buffer::{ManagedBuffer, Pool};
use posthorse_core::ErrorKind;

const THREADS: u64 = if cfg!(miri) { 3 } else { 10 };
const ROUNDS: u64 = if cfg!(miri) { 10 } else { 1000 };

/// Marks the buffer as this owner's, gives others a chance to interfere, and looks whether one did.
fn own(mut buffer: ManagedBuffer, mark: u8) {
    buffer.bytes_mut().unwrap().fill(mark);
    thread::yield_now();
    assert!(buffer.bytes().unwrap().iter().all(|&byte| byte == mark));
}

fn one_round(pool: &Pool, thread: u64, round: u64) {
    let mark = thread as u8 + 1;
    let len = 1 + (thread * 7919 + round * 104_729) % 2048;
    match round % 5 {
        0 => match pool.try_alloc(len) {
            Ok(buffer) => own(buffer, mark),
            Err(error) => assert_eq!(error.kind(), ErrorKind::PoolFull),
        },
        1 => own(pool.alloc(len, soon()).unwrap(), mark),
        2 => {
            // Polled once and dropped: in the queue, served in between, or served at once.
            let mut request = pool.alloc_async(len);
            if let Poll::Ready(buffer) = Pin::new(&mut request).poll(&mut Context::from_waker(Waker::noop()))
            {
                own(buffer.unwrap(), mark);
            }
        }
        3 => {
            let mut slot = pool.alloc(len, soon()).unwrap().into_slot();
            let grant = slot.grant(None).unwrap();
            drop(slot);
            pool.fenced(grant.generation).unwrap();
        }
        _ => {
            let shared = pool.alloc(len, soon()).unwrap().freeze();
            let clone = shared.clone();
            drop(shared);
            assert_eq!(clone.bytes().unwrap().len() as u64, len);
        }
    }
}

#[test]
fn the_pool_is_whole_after_everything() {
    let pool = heap_pool(8192);
    thread::scope(|scope| {
        for thread in 0..THREADS {
            let pool = &pool;
            scope.spawn(move || (0..ROUNDS).for_each(|round| one_round(pool, thread, round)));
        }
    });
    let stats = pool.stats();
    assert!(stats.is_whole(), "{stats:?}");
    assert_eq!((stats.waiting, stats.granted_slots, stats.timed_out), (0, 0, 0));
}

/// Small requests that always take the next buffer before they return the last would keep the pool from ever being
/// empty. They pass the large request until as many bytes have passed as it asked for, and then its turn comes.
#[test]
fn small_requests_pass_a_large_one_and_do_not_starve_it() {
    let pool = heap_pool(4096);
    let mut held = pool.try_alloc(1).unwrap();
    thread::scope(|scope| {
        let large = scope.spawn(|| pool.alloc(4096, soon()));
        until_waiting(&pool, 1);
        for _ in 0..4096 / 64 {
            held = pool.alloc(1, soon()).unwrap();
        }
        assert_eq!(pool.try_alloc(1).unwrap_err().kind(), ErrorKind::PoolFull);
        let small = scope.spawn(|| pool.alloc(1, soon()));
        until_waiting(&pool, 2);
        drop(held);
        let large = large.join().unwrap().unwrap();
        assert_eq!(pool.stats().waiting, 1);
        drop(large);
        assert!(small.join().unwrap().is_ok());
    });
    assert!(pool.stats().is_whole());
}
