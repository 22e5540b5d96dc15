//! Memory for tests, and a way to look at it that is safe while transfers run.

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};

use posthorse_core::{HostView, Region, View};

const PAGE: usize = 4096;

/// Heap memory, page-aligned and zeroed, as a region.
pub struct HeapRegion {
    base: NonNull<u8>,
    layout: Layout,
}

impl HeapRegion {
    /// A region of `len` bytes.
    ///
    /// # Panics
    /// When `len` is zero, or longer than memory can be.
    pub fn new(len: usize) -> Arc<Self> {
        assert!(len > 0, "a region has at least one byte");
        let layout = Layout::from_size_align(len, PAGE).expect("a length that memory can have");
        // SAFETY: the layout's size is not zero.
        let base = unsafe { alloc_zeroed(layout) };
        let base = NonNull::new(base).unwrap_or_else(|| handle_alloc_error(layout));
        Arc::new(Self { base, layout })
    }
}

// SAFETY: the memory is owned, and only ever touched through views and the atomic accesses below.
unsafe impl Send for HeapRegion {}
// SAFETY: as above.
unsafe impl Sync for HeapRegion {}

// SAFETY: the allocation lives as long as the value; no reference into it is ever handed out.
unsafe impl Region for HeapRegion {
    fn view(&self) -> View {
        View::Host(HostView::new(self.base, self.layout.size()))
    }
}

impl Drop for HeapRegion {
    fn drop(&mut self) {
        // SAFETY: allocated in `new` with this layout.
        unsafe { dealloc(self.base.as_ptr(), self.layout) };
    }
}

impl fmt::Debug for HeapRegion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HeapRegion({} bytes)", self.layout.size())
    }
}

/// Copies `len` bytes at `offset` out of a region of host memory.
///
/// A transport that breaks its promises may be writing there meanwhile: the bytes are read atomically, a word or
/// a byte at a time, so that it shows as a wrong byte and in no stranger way.
///
/// # Panics
/// When the region is not host memory, or the range leaves it.
pub fn read(region: &dyn Region, offset: usize, len: usize) -> Vec<u8> {
    let view = host(region, offset, len);
    let mut bytes = vec![0; len];
    let (head, body) = split(view);
    for (at, byte) in bytes[..head].iter_mut().enumerate() {
        *byte = byte_at(view, at).load(Ordering::Relaxed);
    }
    for (word, to) in bytes[head..head + body * 8].chunks_exact_mut(8).enumerate() {
        to.copy_from_slice(&word_at(view, head + word * 8).load(Ordering::Relaxed).to_ne_bytes());
    }
    for (at, byte) in bytes.iter_mut().enumerate().skip(head + body * 8) {
        *byte = byte_at(view, at).load(Ordering::Relaxed);
    }
    bytes
}

/// Copies `bytes` into a region of host memory at `offset`, atomically as [`read`] does.
///
/// # Panics
/// When the region is not writable host memory, or the range leaves it.
pub fn write(region: &dyn Region, offset: usize, bytes: &[u8]) {
    assert!(region.writable(), "the region may not be written");
    let view = host(region, offset, bytes.len());
    let (head, body) = split(view);
    for (at, byte) in bytes[..head].iter().enumerate() {
        byte_at(view, at).store(*byte, Ordering::Relaxed);
    }
    for (word, from) in bytes[head..head + body * 8].chunks_exact(8).enumerate() {
        let mut number = [0; 8];
        number.copy_from_slice(from);
        word_at(view, head + word * 8).store(u64::from_ne_bytes(number), Ordering::Relaxed);
    }
    for (at, byte) in bytes.iter().enumerate().skip(head + body * 8) {
        byte_at(view, at).store(*byte, Ordering::Relaxed);
    }
}

fn host(region: &dyn Region, offset: usize, len: usize) -> HostView {
    let view = region.view().host().expect("host memory");
    view.slice(offset, len).expect("a range within the region")
}

/// Bytes before the first aligned word, and whole words after them.
fn split(view: HostView) -> (usize, usize) {
    let head = (view.address().wrapping_neg() % 8) as usize;
    let head = head.min(view.len());
    (head, (view.len() - head) / 8)
}

fn byte_at(view: HostView, at: usize) -> &'static AtomicU8 {
    assert!(at < view.len());
    // SAFETY: within a view that `host` made of a live region, which the callers of `read` and `write` borrow
    // for longer than they use this; memory that transfers touch may be touched atomically beside them.
    unsafe { AtomicU8::from_ptr(view.as_ptr().add(at)) }
}

fn word_at(view: HostView, at: usize) -> &'static AtomicU64 {
    assert!(at + 8 <= view.len());
    // SAFETY: as in `byte_at`; `split` makes `at` a place that is aligned for a word.
    unsafe { AtomicU64::from_ptr(view.as_ptr().add(at).cast()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pattern;

    #[test]
    fn what_was_written_anywhere_is_read_there_and_nowhere_else() {
        let region = HeapRegion::new(200);
        for offset in 0..20 {
            for len in 0..40 {
                write(&*region, 0, &[0xee; 200]);
                write(&*region, offset, &pattern::bytes(9, len));
                assert_eq!(pattern::check(9, &read(&*region, offset, len)), None);
                let all = read(&*region, 0, 200);
                assert!(all[..offset].iter().chain(&all[offset + len..]).all(|byte| *byte == 0xee));
            }
        }
    }

    #[test]
    #[should_panic(expected = "a range within the region")]
    fn a_range_outside_is_refused() {
        read(&*HeapRegion::new(8), 1, 8);
    }
}
