//! Pools and buffers as their users see them.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll, Wake, Waker};
use std::thread;
use std::time::Instant;

use common::{Device, Heap, heap_pool, soon, until_waiting};
use posthorse_buffer::{Alloc, ManagedBuffer, Pool, PoolConfig};
use posthorse_core::{DType, Deadline, ErrorKind, HostView, Region, Result, View};

#[test]
fn a_buffer_returns_to_the_pool_when_its_scope_ends() {
    let pool = heap_pool(4096);
    let offset = {
        let mut buffer = pool.try_alloc(100).unwrap();
        buffer.copy_from_slice(&[7; 100]).unwrap();
        assert_eq!(buffer.bytes().unwrap(), [7; 100]);
        assert_eq!((buffer.len(), pool.stats().used, pool.stats().blocks), (100, 128, 1));
        buffer.offset()
    };
    assert!(pool.stats().is_whole());
    let again = pool.try_alloc(100).unwrap();
    assert_eq!(again.offset(), offset);
    again.release();
    assert!(pool.stats().is_whole());
    assert_eq!(pool.stats().high_water, 128);
}

#[test]
fn blocks_lie_at_their_offset_in_the_region() {
    let pool =
        Pool::new(Heap::new(3 * 4096), &PoolConfig { alignment: 4096, ..PoolConfig::default() }).unwrap();
    let _first = pool.try_alloc(1).unwrap();
    let second = pool.try_alloc(10).unwrap();
    assert_eq!(second.offset(), 4096);
    assert_eq!(second.address(), pool.view().address() + 4096);
    assert_eq!(second.view(), pool.view().slice(4096, 10).unwrap());
    assert!(second.is_of(&pool));
    assert!(!second.is_of(&heap_pool(64)));
}

#[test]
fn typed_views_see_the_elements() {
    let pool = heap_pool(4096);
    let mut buffer = pool.try_alloc(64).unwrap();
    let source: Vec<f32> = (0..16_u16).map(f32::from).collect();
    buffer.typed_mut::<f32>().unwrap().copy_from_slice(&source);
    assert_eq!(buffer.typed::<f32>().unwrap(), source);
    assert_eq!(buffer.as_tensor::<f32>(&[4, 4]).unwrap(), source);
    assert_eq!(buffer.tensor_view(DType::F32, &[2, 8]).unwrap().elements::<f32>().unwrap(), source);
    for shape in [&[4, 3][..], &[4, 5], &[usize::MAX, usize::MAX], &[0]] {
        assert_eq!(buffer.as_tensor::<f32>(shape).unwrap_err().kind(), ErrorKind::TypeMismatch, "{shape:?}");
    }
    let error = pool.try_alloc(10).unwrap().typed::<u32>().unwrap_err();
    assert!(error.message().contains("10 bytes are no whole number of u32"), "{error}");
}

#[test]
fn a_copy_of_another_length_is_refused() {
    let mut buffer = heap_pool(4096).try_alloc(8).unwrap();
    let error = buffer.copy_from_slice(&[1; 9]).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidArgument);
    assert!(error.message().contains('9') && error.message().contains('8'), "{error}");
}

#[test]
fn a_device_pool_gives_out_ranges_but_no_bytes() {
    let pool = Pool::new(Device, &PoolConfig::default()).unwrap();
    let mut buffer = pool.try_alloc(1000).unwrap();
    assert!(matches!(buffer.view(), View::Device(view) if view.address == 1 << 40 && view.len == 1000));
    for error in [
        buffer.bytes().unwrap_err(),
        buffer.typed::<u8>().unwrap_err(),
        buffer.copy_from_slice(&[0; 1000]).unwrap_err(),
    ] {
        assert_eq!((error.kind(), error.device()), (ErrorKind::Unsupported, Some("cuda:3")));
    }
}

#[test]
fn unsuitable_regions_are_refused() {
    #[derive(Debug)]
    struct Odd(View, bool);
    // SAFETY: nobody looks through these views.
    unsafe impl Region for Odd {
        fn view(&self) -> View {
            self.0
        }
        fn writable(&self) -> bool {
            self.1
        }
    }
    let memory = Heap::new(4096);
    let whole = memory.view();
    for (view, writable, alignment, expected) in [
        (View::Host(HostView::empty()), true, 64, "capacity is 0"),
        (whole, false, 64, "region is read-only"),
        (whole, true, 65, "alignment is 65"),
        (whole.slice(32, 64).unwrap(), true, 64, "the region starts at"),
    ] {
        let config = PoolConfig { alignment, ..PoolConfig::default() };
        let error = Pool::new(Odd(view, writable), &config).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidArgument);
        assert!(error.message().contains(expected), "{error}");
    }
}

#[test]
fn requests_that_can_never_be_met_fail_at_once_even_with_time_to_wait() {
    let pool = heap_pool(1024);
    let _held = pool.try_alloc(1024).unwrap();
    assert_eq!(pool.alloc(1025, Deadline::NEVER).unwrap_err().kind(), ErrorKind::TooLarge);
    assert_eq!(pool.alloc(0, Deadline::NEVER).unwrap_err().kind(), ErrorKind::InvalidArgument);
}

#[test]
fn a_full_pool_refuses_at_once_or_waits_up_to_the_deadline() {
    let pool = heap_pool(1024);
    let _held = pool.try_alloc(1000).unwrap();
    let error = pool.try_alloc(10).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::PoolFull);
    assert!(error.message().contains("10 bytes were asked for; 0 are free"), "{error}");

    for deadline in [Deadline::at(Instant::now()), Deadline::after(std::time::Duration::from_millis(2))] {
        let error = pool.alloc(10, deadline).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::DeadlineExceeded);
        assert!(error.message().contains("10 bytes were asked for"), "{error}");
        assert!(deadline.is_past(Instant::now()));
    }
    let stats = pool.stats();
    assert_eq!((stats.refused, stats.timed_out, stats.waiting), (1, 2, 0));
}

#[test]
fn a_past_deadline_is_no_obstacle_when_there_is_space() {
    assert!(heap_pool(64).alloc(64, Deadline::at(Instant::now())).is_ok());
}

#[test]
fn a_waiting_thread_is_served_by_the_next_return() {
    for spin in [std::time::Duration::ZERO, std::time::Duration::from_secs(60)] {
        let pool = Pool::new(Heap::new(1024), &PoolConfig { spin, ..PoolConfig::default() }).unwrap();
        let held = pool.try_alloc(1024).unwrap();
        thread::scope(|scope| {
            let waiter = scope.spawn(|| pool.alloc(1024, soon()));
            until_waiting(&pool, 1);
            assert!(pool.try_alloc(1).unwrap_err().message().contains("1 requests wait for space already"));
            drop(held);
            assert_eq!(waiter.join().unwrap().unwrap().len(), 1024);
        });
        assert!(pool.stats().is_whole());
    }
}

#[test]
fn closing_ends_the_waiting_and_refuses_the_rest() {
    let pool = heap_pool(1024);
    let held = pool.try_alloc(1024).unwrap();
    thread::scope(|scope| {
        let waiters = [(); 3].map(|()| scope.spawn(|| pool.alloc(10, Deadline::NEVER)));
        until_waiting(&pool, 3);
        pool.close();
        pool.close();
        for waiter in waiters {
            assert_eq!(waiter.join().unwrap().unwrap_err().kind(), ErrorKind::Closed);
        }
    });
    assert_eq!(pool.try_alloc(1).unwrap_err().kind(), ErrorKind::Closed);
    assert_eq!(held.bytes().unwrap().len(), 1024, "a buffer that is out stays valid");
    drop(held);
    assert!(pool.stats().is_whole());
}

#[test]
fn a_buffer_keeps_the_memory_alive_and_the_last_one_frees_it() {
    let region = Heap::new(1024);
    let freed = Arc::clone(&region.freed);
    let pool = Pool::new(region, &PoolConfig::default()).unwrap();
    let mut buffer = pool.try_alloc(10).unwrap();
    drop(pool);
    buffer.bytes_mut().unwrap().fill(1);
    assert!(!freed.load(Ordering::SeqCst));
    drop(buffer);
    assert!(freed.load(Ordering::SeqCst));
}

#[test]
fn a_frozen_buffer_returns_with_its_last_clone() {
    let pool = heap_pool(1024);
    let mut buffer = pool.try_alloc(4).unwrap();
    buffer.copy_from_slice(b"mail").unwrap();
    let shared = buffer.freeze();
    let clone = shared.clone();
    assert_eq!(clone.bytes().unwrap(), b"mail");
    let shared = shared.thaw().expect_err("a clone is still there");
    drop(clone);
    assert!(!pool.stats().is_whole());
    let mut buffer = shared.thaw().expect("the only one");
    buffer.bytes_mut().unwrap()[0] = b'r';
    assert_eq!(buffer.freeze().bytes().unwrap(), b"rail");
    assert!(pool.stats().is_whole());
}

#[test]
fn a_raw_block_is_reclaimed_once_and_a_live_buffer_never() {
    let pool = heap_pool(1024);
    let live = pool.try_alloc(10).unwrap();
    assert_eq!(pool.reclaim_raw(live.offset(), live.len()).unwrap_err().kind(), ErrorKind::BadFree);

    let block = pool.try_alloc(10).unwrap().into_block();
    assert_eq!(pool.stats().blocks, 2);
    assert_eq!(pool.reclaim_raw(block.offset(), 11).unwrap_err().kind(), ErrorKind::BadFree);
    drop(pool.reclaim(block).unwrap());
    assert_eq!(pool.reclaim(block).unwrap_err().kind(), ErrorKind::BadFree);

    let newer = pool.try_alloc(10).unwrap().into_block();
    assert_eq!((newer.offset(), newer.len()), (block.offset(), block.len()));
    assert_eq!(
        pool.reclaim(block).unwrap_err().kind(),
        ErrorKind::BadFree,
        "it belongs to somebody else now"
    );
    drop(pool.reclaim_raw(newer.offset(), newer.len()).unwrap());
    drop(live);
    assert!(pool.stats().is_whole());
}

/// Counts wake-ups, and looks at the pool in each, which would hang if the pool woke under its lock.
struct Counter(Pool, AtomicUsize);

impl Wake for Counter {
    fn wake(self: Arc<Self>) {
        self.0.stats();
        self.1.fetch_add(1, Ordering::SeqCst);
    }
}

fn counter(pool: &Pool) -> (Arc<Counter>, Waker) {
    let counter = Arc::new(Counter(pool.clone(), AtomicUsize::new(0)));
    (Arc::clone(&counter), Waker::from(counter))
}

fn poll(alloc: &mut Alloc, waker: &Waker) -> Poll<Result<ManagedBuffer>> {
    Pin::new(alloc).poll(&mut Context::from_waker(waker))
}

#[test]
fn a_future_is_woken_when_it_is_served() {
    let pool = heap_pool(1024);
    let (count, waker) = counter(&pool);
    let held = pool.try_alloc(1024).unwrap();
    let mut alloc = pool.alloc_async(1024);
    assert_eq!(pool.stats().waiting, 0, "nothing happens before the first poll");
    assert!(poll(&mut alloc, Waker::noop()).is_pending());
    assert!(poll(&mut alloc, &waker).is_pending(), "the latest waker counts");
    drop(held);
    assert_eq!(count.1.load(Ordering::SeqCst), 1);
    let Poll::Ready(Ok(buffer)) = poll(&mut alloc, &waker) else { panic!("it was woken") };
    drop(alloc);
    assert_eq!(pool.stats().used, 1024, "the buffer outlives its request");
    drop(buffer);
    assert!(pool.stats().is_whole());
}

#[test]
fn a_dropped_future_passes_its_turn_on() {
    let pool = heap_pool(1024);
    let (count, waker) = counter(&pool);
    let held = pool.try_alloc(1000).unwrap();
    let mut requests = [(); 3].map(|()| pool.alloc_async(1024));
    for request in &mut requests {
        assert!(poll(request, &waker).is_pending());
    }
    let [queued, served, mut last] = requests;
    drop(queued);
    assert_eq!((pool.stats().waiting, count.1.load(Ordering::SeqCst)), (2, 0));
    drop(held);
    assert_eq!(count.1.load(Ordering::SeqCst), 1, "the second is served now");
    drop(served);
    assert_eq!(count.1.load(Ordering::SeqCst), 2, "its buffer went on to the third");
    let Poll::Ready(Ok(buffer)) = poll(&mut last, &waker) else { panic!("it was woken") };
    drop((last, buffer));
    assert!(pool.stats().is_whole());
}

#[test]
fn those_behind_a_request_that_gives_up_go_on() {
    let pool = heap_pool(1024);
    let (count, waker) = counter(&pool);
    let _held = pool.try_alloc(512).unwrap();
    let mut large = pool.alloc_async(1024);
    assert!(poll(&mut large, Waker::noop()).is_pending());
    (0..2).for_each(|_| drop(pool.try_alloc(512).unwrap()));
    let mut small = pool.alloc_async(64);
    assert!(poll(&mut small, &waker).is_pending(), "1024 bytes have passed the large one");
    drop(large);
    assert_eq!(count.1.load(Ordering::SeqCst), 1);
    assert!(matches!(poll(&mut small, &waker), Poll::Ready(Ok(_))));
}

#[test]
fn closing_ends_futures_but_not_what_was_served_to_them() {
    let pool = heap_pool(1024);
    let (count, waker) = counter(&pool);
    let held = pool.try_alloc(1024).unwrap();
    let (mut served, mut waiting) = (pool.alloc_async(1024), pool.alloc_async(1024));
    assert!(poll(&mut served, &waker).is_pending() && poll(&mut waiting, &waker).is_pending());
    drop(held);
    pool.close();
    assert_eq!(count.1.load(Ordering::SeqCst), 2);
    assert!(matches!(poll(&mut served, &waker), Poll::Ready(Ok(_))));
    let Poll::Ready(Err(error)) = poll(&mut waiting, &waker) else { panic!("the pool is closed") };
    assert_eq!(error.kind(), ErrorKind::Closed);
    drop((served, waiting));
    assert!(pool.stats().is_whole());
}

#[test]
fn only_so_many_may_wait() {
    let pool = Pool::new(Heap::new(64), &PoolConfig { max_waiters: 1, ..PoolConfig::default() }).unwrap();
    let _held = pool.try_alloc(64).unwrap();
    let mut first = pool.alloc_async(64);
    assert!(poll(&mut first, Waker::noop()).is_pending());
    let error = pool.alloc(64, Deadline::NEVER).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::QueueFull);
    assert!(error.message().contains("1 requests wait"), "{error}");
    drop(first);
    assert!(poll(&mut pool.alloc_async(64), Waker::noop()).is_pending(), "there is room to wait again");
}
