//! Memory for the tests: heap pages, and a device that is not there.

#![allow(dead_code)] // Each test file uses its part.

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use posthorse_buffer::{Pool, PoolConfig};
use posthorse_core::{Deadline, DeviceView, HostView, Location, Region, View};

/// Zeroed heap memory at an address that is a multiple of 4096.
#[derive(Debug)]
pub(crate) struct Heap {
    view: HostView,
    /// Set when the memory is freed.
    pub(crate) freed: Arc<AtomicBool>,
}

impl Heap {
    pub(crate) fn new(len: usize) -> Self {
        // SAFETY: the layout is not empty.
        let base = unsafe { alloc_zeroed(Self::layout(len)) };
        let Some(base) = NonNull::new(base) else { handle_alloc_error(Self::layout(len)) };
        Self { view: HostView::new(base, len), freed: Arc::default() }
    }

    fn layout(len: usize) -> Layout {
        assert!(len > 0);
        Layout::from_size_align(len, 4096).expect("a small heap")
    }
}

impl Drop for Heap {
    fn drop(&mut self) {
        // SAFETY: allocated in `new` with the same layout; whoever looks through the view holds this region.
        unsafe { dealloc(self.view.as_ptr(), Self::layout(self.view.len())) };
        self.freed.store(true, Ordering::SeqCst);
    }
}

// SAFETY: the range is allocated and initialised until the value is dropped.
unsafe impl Region for Heap {
    fn view(&self) -> View {
        View::Host(self.view)
    }
}

/// Addresses of a device's memory.
#[derive(Debug)]
pub(crate) struct Device;

// SAFETY: nothing in these tests asks a device for its memory.
unsafe impl Region for Device {
    fn view(&self) -> View {
        View::Device(DeviceView { device: Location::Cuda(3), address: 1 << 40, len: 1 << 16 })
    }

    fn location(&self) -> Location {
        Location::Cuda(3)
    }
}

/// A pool of `len` bytes of heap in blocks of 64.
pub(crate) fn heap_pool(len: usize) -> Pool {
    Pool::new(Heap::new(len), &PoolConfig::default()).expect("a sound configuration")
}

/// A deadline that no test comes near.
pub(crate) fn soon() -> Deadline {
    Deadline::after(Duration::from_secs(60))
}

/// Waits until so many requests wait in `pool`.
pub(crate) fn until_waiting(pool: &Pool, waiting: usize) {
    let deadline = soon();
    while pool.stats().waiting != waiting {
        assert!(!deadline.is_past(Instant::now()), "{:?}", pool.stats());
        std::thread::yield_now();
    }
}
