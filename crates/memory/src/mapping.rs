//! The one place that maps memory: an owned range of the address space.

use std::fmt;
use std::io;
use std::os::fd::BorrowedFd;
use std::ptr::{NonNull, null_mut};

use posthorse_core::{Error, ErrorKind, Result};
use rustix::mm::{MapFlags, ProtFlags, mmap, mmap_anonymous, munmap};

use crate::fork::ForkGuard;
use crate::numa;

/// What lies behind a mapping.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Backing<'a> {
    /// Private, zeroed pages.
    Anonymous,
    /// Private, zeroed pages out of the reserve of hugetlbfs.
    HugeTlb,
    /// A file, shared with everyone who maps it.
    File {
        fd: BorrowedFd<'a>,
        /// In bytes; a multiple of the page size.
        offset: u64,
        writable: bool,
    },
}

/// Advice that never changes what the memory holds (`madvise(2)`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Advice {
    HugePages,
    NoHugePages,
    PopulateRead,
    PopulateWrite,
    Collapse,
}

/// A mapped range, unmapped on drop.
///
/// A child of `fork` does not inherit it (`MADV_DONTFORK`): a child that kept it would share every later
/// write, or, for private memory, could move the parent's pages away from under a device that is writing to
/// them. Touching it in a child ends that child alone.
pub(crate) struct Mapping {
    base: NonNull<u8>,
    len: usize,
    fork: ForkGuard,
}

// SAFETY: a mapping belongs to the process and not to a thread; nothing here depends on which one uses it.
unsafe impl Send for Mapping {}
// SAFETY: `&Mapping` gives out an address and advice that leaves the contents alone.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps `len` bytes, not yet populated, such that the start is a multiple of `align` (for a file: lies as
    /// its offset does within `align`, so that a huge page of the file fits a huge page here).
    ///
    /// `len` and `align` are multiples of the page size, `align` a power of two.
    pub(crate) fn new(len: usize, align: usize, backing: Backing<'_>) -> Result<Self> {
        let refused = |error: rustix::io::Errno| {
            let kind = if error == rustix::io::Errno::NOMEM { ErrorKind::OutOfMemory } else { ErrorKind::Io };
            Error::new(kind, format!("mapping {len} bytes: {}", io::Error::from(error)))
        };
        let Some(span) = len.checked_add(align).filter(|&span| isize::try_from(span).is_ok()) else {
            return Err(Error::invalid_argument("the size", len, "what fits into the address space"));
        };
        let phase = match backing {
            Backing::File { offset, .. } => (offset % align as u64) as usize,
            Backing::Anonymous | Backing::HugeTlb => 0,
        };
        let fork = ForkGuard::new()?;
        // SAFETY: the kernel chooses where; nothing existing is replaced.
        let start = unsafe {
            mmap_anonymous(null_mut(), span, ProtFlags::empty(), MapFlags::PRIVATE | MapFlags::NORESERVE)
        }
        .map_err(refused)?;
        let start = NonNull::new(start.cast::<u8>())
            .ok_or_else(|| Error::new(ErrorKind::Internal, "the kernel mapped memory at address zero"))?;
        let reservation = Self { base: start, len: span, fork };

        let gap = (phase.wrapping_sub(start.as_ptr().addr())) & (align - 1);
        // SAFETY: the gap is smaller than `align`, so it stays inside the reservation.
        let base = unsafe { start.add(gap) };
        let write = ProtFlags::READ | ProtFlags::WRITE;
        let at = base.as_ptr().cast();
        match backing {
            // SAFETY: replaces a part of the reservation made above, which nobody else knows.
            Backing::Anonymous => unsafe {
                mmap_anonymous(at, len, write, MapFlags::PRIVATE | MapFlags::FIXED)
            },
            // SAFETY: as above.
            Backing::HugeTlb => unsafe {
                mmap_anonymous(at, len, write, MapFlags::PRIVATE | MapFlags::FIXED | MapFlags::HUGETLB)
            },
            Backing::File { fd, offset, writable } => {
                let access = if writable { write } else { ProtFlags::READ };
                // SAFETY: as above.
                unsafe { mmap(at, len, access, MapFlags::SHARED | MapFlags::FIXED, fd, offset) }
            }
        }
        .map_err(refused)?;
        let mapping = reservation.shrink_to(base, len);
        mapping
            .madvise(0, len, libc::MADV_DONTFORK)
            .map_err(|error| Error::os("madvise(MADV_DONTFORK)", &error))?;
        Ok(mapping)
    }

    /// Gives back what lies around `base..base + len`, which is inside.
    fn shrink_to(mut self, base: NonNull<u8>, len: usize) -> Self {
        let before = base.as_ptr().addr() - self.base.as_ptr().addr();
        let after = self.len - before - len;
        let start = std::mem::replace(&mut self.base, base);
        self.len = len;
        if before > 0 {
            // SAFETY: this part is ours and no longer belongs to any `Mapping`.
            let _ = unsafe { munmap(start.as_ptr().cast(), before) };
        }
        if after > 0 {
            // SAFETY: as above; `base + len` is where the part after begins.
            let _ = unsafe { munmap(base.as_ptr().add(len).cast(), after) };
        }
        self
    }

    /// Whether this process has the range: a forked child has not.
    pub(crate) fn is_here(&self) -> bool {
        !self.fork.is_forked()
    }

    /// Where the range starts.
    pub(crate) const fn base(&self) -> NonNull<u8> {
        self.base
    }

    /// Bytes.
    pub(crate) const fn len(&self) -> usize {
        self.len
    }

    /// Advises the kernel on `len` bytes at `offset`, which must lie inside.
    pub(crate) fn advise(&self, offset: usize, len: usize, advice: Advice) -> io::Result<()> {
        /// Since Linux 6.1; some C libraries do not name it yet.
        const MADV_COLLAPSE: libc::c_int = 25;
        let advice = match advice {
            Advice::HugePages => libc::MADV_HUGEPAGE,
            Advice::NoHugePages => libc::MADV_NOHUGEPAGE,
            Advice::PopulateRead => libc::MADV_POPULATE_READ,
            Advice::PopulateWrite => libc::MADV_POPULATE_WRITE,
            Advice::Collapse => MADV_COLLAPSE,
        };
        self.madvise(offset, len, advice)
    }

    fn madvise(&self, offset: usize, len: usize, advice: libc::c_int) -> io::Result<()> {
        self.check(offset, len)?;
        // SAFETY: the range is ours, as just checked, and the advice (see `Advice`) changes no contents.
        match unsafe { libc::madvise(self.base.as_ptr().add(offset).cast(), len, advice) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// Reads one byte of each page, for kernels that cannot populate on advice (before Linux 5.14).
    pub(crate) fn touch(&self, offset: usize, len: usize, page: usize) -> io::Result<()> {
        self.check(offset, len)?;
        for at in (offset..offset + len).step_by(page) {
            // SAFETY: inside the mapping, which is readable; volatile, since a peer may be writing there.
            unsafe { self.base.as_ptr().add(at).read_volatile() };
        }
        Ok(())
    }

    /// Locks the whole range into memory (`mlock(2)`).
    pub(crate) fn lock(&self) -> io::Result<()> {
        // SAFETY: the range is ours; locking changes no contents.
        Ok(unsafe { rustix::mm::mlock(self.base.as_ptr().cast(), self.len) }?)
    }

    /// Takes the pages of the range, when they are made, from `node` alone (`mbind(2)`).
    pub(crate) fn bind(&self, node: u16) -> io::Result<()> {
        let mask = numa::node_mask(node);
        // The kernel counts one bit more than it reads.
        let bits = mask.len() * libc::c_ulong::BITS as usize + 1;
        // SAFETY: the range is ours and the mask as long as said; the call changes no contents.
        let status = unsafe {
            libc::syscall(
                libc::SYS_mbind,
                self.base.as_ptr(),
                self.len,
                libc::MPOL_BIND,
                mask.as_ptr(),
                bits,
                0,
            )
        };
        if status == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }

    fn check(&self, offset: usize, len: usize) -> io::Result<()> {
        let inside = offset.checked_add(len).is_some_and(|end| end <= self.len);
        if inside { Ok(()) } else { Err(io::ErrorKind::InvalidInput.into()) }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // In a forked child the range is not mapped, or belongs to something else by now.
        if self.is_here() {
            // SAFETY: the range is ours alone; the owner of the `Mapping` has given up every view of it.
            let _ = unsafe { munmap(self.base.as_ptr().cast(), self.len) };
        }
    }
}

impl fmt::Debug for Mapping {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Mapping({:#x}, {} bytes)", self.base.as_ptr().addr(), self.len)
    }
}
