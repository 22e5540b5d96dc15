//! A pool in a forked child, which has not its memory.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use std::future::Future;
use std::pin::pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Waker};
use std::thread;

use common::soon;
use posthorse_buffer::{ManagedBuffer, Pool, PoolConfig, PoolStats};
use posthorse_core::{Deadline, ErrorKind, Result};
use posthorse_memory::MemoryOptions;
use posthorse_testkit::assert_in_forked_child;

/// Each fork finds the other threads somewhere else, now and then with the pool's lock.
const FORKS: usize = 40;

fn pool() -> Pool {
    Pool::new(MemoryOptions::new(1 << 20).allocate().unwrap(), &PoolConfig::default()).unwrap()
}

/// Forks again and again while other threads take and return buffers.
fn assert_in_children_of_busy_threads(pool: &Pool, mut well: impl FnMut() -> bool) {
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        // Also when a child fails the test.
        let _stop = StopAtEnd(&stop);
        for _ in 0..2 {
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    drop(pool.alloc(100, soon()).unwrap());
                }
            });
        }
        for _ in 0..FORKS {
            // SAFETY: the pool answers before it takes any lock, which is what is tested.
            unsafe { assert_in_forked_child(&mut well) };
        }
    });
}

struct StopAtEnd<'a>(&'a AtomicBool);

impl Drop for StopAtEnd<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

fn forked<T>(outcome: Result<T>) -> bool {
    outcome.is_err_and(|error| error.kind() == ErrorKind::Forked)
}

#[test]
fn every_request_of_a_forked_child_answers_forked() {
    let pool = pool();
    let mut buffer = pool.try_alloc(64).unwrap();
    let mut slot = pool.try_alloc(64).unwrap().into_slot();
    let mut granted = pool.try_alloc(64).unwrap().into_slot();
    let grant = granted.grant(None).unwrap();
    let raw = pool.try_alloc(64).unwrap().into_block();
    assert_in_children_of_busy_threads(&pool, || {
        let polled = pin!(pool.alloc_async(64)).poll(&mut Context::from_waker(Waker::noop()));
        forked(pool.try_alloc(64))
            && forked(pool.alloc(64, Deadline::NEVER))
            && matches!(polled, Poll::Ready(Err(error)) if error.kind() == ErrorKind::Forked)
            && forked(buffer.bytes())
            && forked(buffer.bytes_mut())
            && forked(buffer.copy_from_slice(&[0; 64]))
            && forked(buffer.typed::<u8>())
            && forked(slot.grant(None))
            && forked(granted.fill(grant))
            && forked(pool.reclaim(raw))
            && forked(pool.fenced(1))
            && pool.all_fenced() == 0
            && pool.fencing().is_empty()
            && pool.stats() == PoolStats::default()
    });
    buffer.copy_from_slice(&[5; 64]).unwrap();
    assert_eq!(buffer.bytes().unwrap(), [5; 64]);
    granted.fill(grant).unwrap();
    drop((buffer, slot, granted, pool.reclaim(raw).unwrap()));
    assert!(pool.stats().is_whole());
}

#[test]
fn what_a_forked_child_drops_goes_nowhere() {
    let pool = pool();
    let take = || pool.try_alloc(64).unwrap();
    let mut granted = take().into_slot();
    granted.grant(None).unwrap();
    let full = self::pool();
    let all = full.try_alloc(1 << 20).unwrap();
    let mut waiting = Box::pin(full.alloc_async(64));
    assert!(waiting.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
    // Taken by the child, which drops it; the parent keeps its own.
    let mut held = Some((take(), take().freeze(), take().into_slot(), granted, waiting, take()));
    assert_in_children_of_busy_threads(&pool, || {
        let Some((buffer, shared, slot, granted, waiting, raw)) = held.take() else { return false };
        drop((buffer, shared, slot, granted, waiting));
        ManagedBuffer::into_block(raw);
        pool.close();
        true
    });
    assert_eq!(pool.stats().blocks, 5);
    assert_eq!(full.stats().waiting, 1);
    drop((held, all));
    assert_eq!(pool.all_fenced(), 1);
    assert!(pool.stats().is_whole() && full.stats().is_whole());
    pool.try_alloc(1 << 20).unwrap();
}
