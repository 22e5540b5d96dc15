//! Memory as the transports see it: regions and the views into them.
//!
//! A view is an address and a length, no more: it can be copied, sent and compared, and holds nothing
//! alive. Only host memory can be dereferenced, and only through an `unsafe` call whose caller knows
//! that the region is alive. No host pointer is ever made from a device address: the types keep them apart.

use std::fmt;
use std::os::fd::BorrowedFd;
use std::ptr::NonNull;

use serde::{Deserialize, Serialize};

use crate::error::{Error, ErrorKind, Result};
use crate::location::Location;

/// What a peer may do with memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Access {
    /// Peers may not touch it: it serves as the local end of transfers alone.
    #[default]
    None,
    /// Peers may read.
    Read,
    /// Peers may write.
    Write,
    /// Peers may read and write.
    ReadWrite,
}

impl Access {
    /// Whether everything that `wanted` asks for is allowed.
    pub const fn allows(self, wanted: Self) -> bool {
        (self.bits() & wanted.bits()) == wanted.bits()
    }

    const fn bits(self) -> u8 {
        match self {
            Self::None => 0,
            Self::Read => 1,
            Self::Write => 2,
            Self::ReadWrite => 3,
        }
    }
}

/// A range of host memory: where it starts and how long it is.
///
/// Making one is safe, since it is only two numbers; looking through it is not.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct HostView {
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: a view is an address and a length; every dereference is an unsafe call that has to show that
// the memory is alive and not aliased, on whichever thread.
unsafe impl Send for HostView {}
// SAFETY: as above.
unsafe impl Sync for HostView {}

impl HostView {
    /// The range of `len` bytes that starts at `base`.
    pub const fn new(base: NonNull<u8>, len: usize) -> Self {
        Self { base, len }
    }

    /// An empty range, which can be looked through at any time.
    pub const fn empty() -> Self {
        Self { base: NonNull::dangling(), len: 0 }
    }

    /// The range of a slice. The view does not keep the slice alive.
    pub const fn of(bytes: &[u8]) -> Self {
        // A slice's pointer is never null.
        let base = NonNull::from_ref(bytes).cast::<u8>();
        Self { base, len: bytes.len() }
    }

    /// The range of a slice that may be written. The view does not keep the slice alive.
    pub const fn of_mut(bytes: &mut [u8]) -> Self {
        let len = bytes.len();
        Self { base: NonNull::from_mut(bytes).cast::<u8>(), len }
    }

    /// The first byte's pointer.
    pub const fn as_ptr(self) -> *mut u8 {
        self.base.as_ptr()
    }

    /// The first byte's address.
    pub fn address(self) -> u64 {
        self.base.as_ptr().addr() as u64
    }

    /// Bytes.
    pub const fn len(self) -> usize {
        self.len
    }

    /// Whether there are no bytes.
    pub const fn is_empty(self) -> bool {
        self.len == 0
    }

    /// The `len` bytes that start `offset` into this view.
    ///
    /// # Errors
    /// `OutOfBounds` when they leave it.
    pub fn slice(self, offset: usize, len: usize) -> Result<Self> {
        let outside = || out_of_bounds(offset as u64, len as u64, self.len as u64);
        if offset.checked_add(len).is_none_or(|end| end > self.len) {
            return Err(outside());
        }
        // Wrapping, since nothing says that a view's range is one allocation until it is looked through.
        let base = NonNull::new(self.base.as_ptr().wrapping_add(offset)).ok_or_else(outside)?;
        Ok(Self { base, len })
    }

    /// The bytes, to be read.
    ///
    /// # Safety
    /// For `'a` the memory is alive, and nobody in this process or outside it writes to it.
    pub const unsafe fn bytes<'a>(self) -> &'a [u8] {
        // SAFETY: the caller's promise; the pointer is not null.
        unsafe { std::slice::from_raw_parts(self.base.as_ptr(), self.len) }
    }

    /// The bytes, to be written.
    ///
    /// # Safety
    /// For `'a` the memory is alive, and nobody else in this process or outside it reads or writes it.
    pub const unsafe fn bytes_mut<'a>(self) -> &'a mut [u8] {
        // SAFETY: the caller's promise; the pointer is not null.
        unsafe { std::slice::from_raw_parts_mut(self.base.as_ptr(), self.len) }
    }
}

impl fmt::Debug for HostView {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HostView({:#x}, {} bytes)", self.address(), self.len)
    }
}

/// A range of a device's memory. It cannot be dereferenced by the host; its driver copies it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct DeviceView {
    /// The device.
    pub device: Location,
    /// The address in the device's address space.
    pub address: u64,
    /// Bytes.
    pub len: u64,
}

/// A range of memory of either kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum View {
    /// Host memory.
    Host(HostView),
    /// A device's memory.
    Device(DeviceView),
}

impl View {
    /// The first byte's address, in the address space of the host or the device.
    pub fn address(self) -> u64 {
        match self {
            Self::Host(view) => view.address(),
            Self::Device(view) => view.address,
        }
    }

    /// Bytes.
    pub fn len(self) -> u64 {
        match self {
            Self::Host(view) => view.len() as u64,
            Self::Device(view) => view.len,
        }
    }

    /// Whether there are no bytes.
    pub fn is_empty(self) -> bool {
        self.len() == 0
    }

    /// The host memory, if it is that.
    pub const fn host(self) -> Option<HostView> {
        match self {
            Self::Host(view) => Some(view),
            Self::Device(_) => None,
        }
    }

    /// The `len` bytes that start `offset` into this view.
    ///
    /// # Errors
    /// `OutOfBounds` when they leave it.
    pub fn slice(self, offset: u64, len: u64) -> Result<Self> {
        match self {
            Self::Host(view) => {
                let outside = || out_of_bounds(offset, len, view.len() as u64);
                let offset = usize::try_from(offset).map_err(|_| outside())?;
                let len = usize::try_from(len).map_err(|_| outside())?;
                view.slice(offset, len).map(Self::Host)
            }
            Self::Device(view) => {
                if offset.checked_add(len).is_none_or(|end| end > view.len) {
                    return Err(out_of_bounds(offset, len, view.len));
                }
                Ok(Self::Device(DeviceView { device: view.device, address: view.address + offset, len }))
            }
        }
    }
}

fn out_of_bounds(offset: u64, len: u64, limit: u64) -> Error {
    Error::new(
        ErrorKind::OutOfBounds,
        format!("the range of {len} bytes at offset {offset} leaves its region of {limit} bytes"),
    )
}

/// The file behind a region, by which another process on this host may map the same pages.
#[derive(Debug, Clone, Copy)]
pub struct SharedFile<'a> {
    /// A memfd that is sealed against resizing.
    pub fd: BorrowedFd<'a>,
    /// Where in the file the region starts, in bytes.
    pub offset: u64,
}

/// A contiguous piece of memory with an owner.
///
/// Registering a region with an engine or transport hands over an `Arc` of it, so the memory outlives
/// every transfer that may touch it.
///
/// # Safety
/// While the value lives, [`Region::view`] returns the same range at each call, and that range is
/// allocated and may be read (and, if [`Region::writable`], written) by transports of this process (unless it is a
/// forked child that has it not: [`Region::is_here`]) and, where granted, by peers. Safe code gets no Rust reference
/// into the range, except shared ones where it is not [`Region::writable`]: whoever has the value may register it, and
/// then have transfers go anywhere in it. Transfers that overlap copy raw bytes, like a device would, and leave there
/// what one or the other wrote.
pub unsafe trait Region: fmt::Debug + Send + Sync + 'static {
    /// The memory.
    fn view(&self) -> View;

    /// Where it lies, if that is known.
    fn location(&self) -> Location {
        Location::Any
    }

    /// Whether transfers may write to it.
    fn writable(&self) -> bool {
        true
    }

    /// Whether this process has the memory: a child of `fork` has the value, and not always what its parent keeps from
    /// it. Whoever looks through the view where this is false ends the child.
    fn is_here(&self) -> bool {
        true
    }

    /// The file behind it, if other processes may map it.
    fn shared_file(&self) -> Option<SharedFile<'_>> {
        None
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn access_allows_what_it_contains() {
        use Access::{None, Read, ReadWrite, Write};
        for (have, wanted, allowed) in [
            (None, None, true),
            (None, Read, false),
            (Read, Read, true),
            (Read, Write, false),
            (Read, ReadWrite, false),
            (ReadWrite, Write, true),
            (ReadWrite, ReadWrite, true),
        ] {
            assert_eq!(have.allows(wanted), allowed, "{have:?} {wanted:?}");
        }
    }

    #[test]
    fn a_view_can_be_read_and_written_through() {
        let mut bytes = [1, 2, 3, 4];
        let view = HostView::of_mut(&mut bytes).slice(1, 2).unwrap();
        // SAFETY: `bytes` is alive and borrowed by nobody else here.
        unsafe { view.bytes_mut() }.fill(9);
        // SAFETY: as above, and the mutable borrow has ended.
        assert_eq!(unsafe { view.bytes() }, [9, 9]);
        assert_eq!(bytes, [1, 9, 9, 4]);
    }

    proptest! {
        #[test]
        fn a_slice_of_a_view_stays_inside_it(len in 0_u64..4096, offset: u64, part: u64) {
            let memory = vec![0_u8; len as usize];
            for view in [
                View::Host(HostView::of(&memory)),
                View::Device(DeviceView { device: Location::Cuda(0), address: 1 << 40, len }),
            ] {
                for (offset, part) in [(offset, part), (offset % 5000, part % 5000)] {
                    let fits = offset.checked_add(part).is_some_and(|end| end <= len);
                    match view.slice(offset, part) {
                        Ok(inner) => {
                            prop_assert!(fits);
                            prop_assert_eq!(inner.address(), view.address() + offset);
                            prop_assert_eq!(inner.len(), part);
                        }
                        Err(error) => {
                            prop_assert!(!fits);
                            prop_assert_eq!(error.kind(), ErrorKind::OutOfBounds);
                        }
                    }
                }
            }
        }
    }
}
