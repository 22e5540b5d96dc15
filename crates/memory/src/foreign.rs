//! Memory that was allocated elsewhere.

use std::any::Any;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::NonNull;
use std::sync::Arc;

use bytes::Bytes;
use posthorse_core::{HostView, Location, Region, View};

/// Host memory that somebody else allocated and that is merely registered here, such as a tensor of another
/// library.
pub struct ForeignMemory {
    view: HostView,
    location: Location,
    writable: bool,
    /// Dropped with the region.
    _owner: Owner,
}

/// What keeps memory that somebody else made.
struct Owner(Option<Arc<dyn Any + Send + Sync>>);

impl Drop for Owner {
    fn drop(&mut self) {
        let owner = self.0.take();
        // This may be any thread that was the last to need the memory. What it does besides must not end with it.
        if let Err(panic) = catch_unwind(AssertUnwindSafe(|| drop(owner))) {
            let said = panic.downcast_ref::<String>().map(String::as_str);
            let said = said.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or_default();
            tracing::error!(said, "the owner of registered memory panicked when it was dropped");
        }
    }
}

impl ForeignMemory {
    /// A region of `view`. What `owner` holds is kept until the region is dropped. Should its own drop panic then, that
    /// is logged and goes no further.
    ///
    /// # Safety
    /// Until the region is dropped, the range is allocated and may be read and (unless made
    /// [`read_only`](Self::read_only)) written by any thread, as [`Region`] demands. Either `owner` keeps it
    /// so, or the caller does.
    pub unsafe fn new(view: HostView, owner: Option<Arc<dyn Any + Send + Sync>>) -> Self {
        Self { view, location: Location::Any, writable: true, _owner: Owner(owner) }
    }

    /// A region of shared bytes, which are kept until it is dropped. Transfers may not write to it.
    pub fn shared(bytes: Bytes) -> Self {
        let view = HostView::of(&bytes);
        // SAFETY: the bytes stay where they are, readable by any thread and written by nobody, as long as one handle
        // of them is there, which the region holds; and it is read-only.
        unsafe { Self::new(view, Some(Arc::new(bytes))) }.read_only()
    }

    /// The same region, which transfers may not write to.
    #[must_use]
    pub fn read_only(mut self) -> Self {
        self.writable = false;
        self
    }

    /// The same region, said to lie at `location`.
    #[must_use]
    pub fn at(mut self, location: Location) -> Self {
        self.location = location;
        self
    }
}

// SAFETY: the caller of `ForeignMemory::new` promised it.
unsafe impl Region for ForeignMemory {
    fn view(&self) -> View {
        View::Host(self.view)
    }

    fn location(&self) -> Location {
        self.location
    }

    fn writable(&self) -> bool {
        self.writable
    }
}

impl fmt::Debug for ForeignMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ForeignMemory")
            .field("view", &self.view)
            .field("location", &self.location)
            .field("writable", &self.writable)
            .finish_non_exhaustive()
    }
}

/// Bytes of the heap as a region, for payloads that are at hand in a `Vec<u8>` or `Box<[u8]>`.
pub struct HeapMemory {
    /// A leaked box, so that no reference into the bytes exists while transfers may write to them.
    bytes: NonNull<[u8]>,
}

// SAFETY: it owns its bytes, which any thread may use and free.
unsafe impl Send for HeapMemory {}
// SAFETY: `&HeapMemory` gives out only an address.
unsafe impl Sync for HeapMemory {}

impl HeapMemory {
    /// `size` zero bytes.
    pub fn zeroed(size: usize) -> Self {
        Self::from(vec![0; size])
    }

    /// The bytes back. Whoever holds a view of them has to be done with it.
    pub fn into_boxed_slice(self) -> Box<[u8]> {
        let bytes = self.bytes;
        std::mem::forget(self);
        // SAFETY: a leaked box, not freed, since `self` was forgotten.
        unsafe { Box::from_raw(bytes.as_ptr()) }
    }

    /// The memory.
    pub const fn host_view(&self) -> HostView {
        HostView::new(self.bytes.cast(), self.bytes.len())
    }
}

impl From<Box<[u8]>> for HeapMemory {
    fn from(bytes: Box<[u8]>) -> Self {
        Self { bytes: NonNull::from(Box::leak(bytes)) }
    }
}

impl From<Vec<u8>> for HeapMemory {
    fn from(bytes: Vec<u8>) -> Self {
        Self::from(bytes.into_boxed_slice())
    }
}

// SAFETY: the bytes stay where they are until the value is dropped or turned back, both of which need it by
// value, and are readable and writable throughout.
unsafe impl Region for HeapMemory {
    fn view(&self) -> View {
        View::Host(self.host_view())
    }
}

impl Drop for HeapMemory {
    fn drop(&mut self) {
        // SAFETY: made from a box and freed only here; `into_boxed_slice` forgets the value.
        drop(unsafe { Box::from_raw(self.bytes.as_ptr()) });
    }
}

impl fmt::Debug for HeapMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HeapMemory({:?})", self.host_view())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn heap_memory_is_written_through_its_view_and_given_back() {
        let memory = HeapMemory::from(vec![1, 2, 3]);
        let view = memory.view().host().unwrap();
        // SAFETY: the memory is alive and nobody else uses it.
        unsafe { view.slice(1, 1).unwrap().bytes_mut() }.fill(9);
        assert_eq!(&*memory.into_boxed_slice(), [1, 9, 3]);
        assert!(HeapMemory::zeroed(0).view().is_empty());
        assert_eq!(HeapMemory::zeroed(2).host_view().len(), 2);
    }

    #[test]
    fn foreign_memory_keeps_its_owner_until_it_is_dropped() {
        let owner = Arc::new([5_u8; 8]);
        let view = HostView::of(&*owner);
        // SAFETY: the owner is handed over, and nothing writes to a read-only region.
        let memory =
            unsafe { ForeignMemory::new(view, Some(owner.clone())) }.read_only().at(Location::Cpu(0));
        assert_eq!(Arc::strong_count(&owner), 2);
        assert!(
            !memory.writable() && memory.location() == Location::Cpu(0) && memory.shared_file().is_none()
        );
        assert_eq!(memory.view().len(), 8);
        drop(memory);
        assert_eq!(Arc::strong_count(&owner), 1);
    }

    #[test]
    fn an_owner_that_panics_in_the_end_ends_nothing_else() {
        struct Bomb(&'static str);
        impl AsRef<[u8]> for Bomb {
            fn as_ref(&self) -> &[u8] {
                self.0.as_bytes()
            }
        }
        impl Drop for Bomb {
            fn drop(&mut self) {
                panic!("{}", self.0);
            }
        }
        drop([
            ForeignMemory::shared(Bytes::from_owner(Bomb("a"))),
            ForeignMemory::shared(Bytes::from_owner(Bomb("b"))),
        ]);
    }
}
