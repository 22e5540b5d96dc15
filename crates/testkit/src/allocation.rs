//! How much memory a piece of code takes, by a global allocator that counts.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

thread_local! {
    /// Bytes that this thread took and has not given back since it began to count, and the most they have been.
    static TAKEN: Cell<(isize, isize)> = const { Cell::new((0, 0)) };
}

/// The system's allocator, with a count for each thread. A test binary that measures has one as its
/// `#[global_allocator]`.
#[derive(Debug, Clone, Copy, Default)]
pub struct CountingAllocator;

impl CountingAllocator {
    /// The most bytes that this thread held while it ran `work`, beyond those that it held before.
    pub fn peak<T>(&self, work: impl FnOnce() -> T) -> (T, usize) {
        TAKEN.set((0, 0));
        let done = work();
        (done, TAKEN.get().1.unsigned_abs())
    }
}

/// Counts what was taken. It neither allocates nor panics, for it runs within the allocator.
fn count(bytes: isize) {
    // A thread that ends has no count any more.
    let _ = TAKEN.try_with(|taken| {
        let (now, most) = taken.get();
        let now = now.wrapping_add(bytes);
        taken.set((now, most.max(now)));
    });
}

// SAFETY: every call is handed to the system's allocator as it is, whose promises hold; counting touches no memory
// that is handed out.
unsafe impl GlobalAlloc for CountingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as isize);
        // SAFETY: the caller keeps `alloc`'s conditions, and they are the same.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as isize);
        // SAFETY: as above.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        count(-(layout.size() as isize));
        // SAFETY: `memory` came from the system's allocator through `alloc`, with this layout.
        unsafe { System.dealloc(memory, layout) }
    }

    unsafe fn realloc(&self, memory: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count(size as isize - layout.size() as isize);
        // SAFETY: as above, and the caller keeps `realloc`'s conditions.
        unsafe { System.realloc(memory, layout, size) }
    }
}
