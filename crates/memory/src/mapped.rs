//! Memory of another process, mapped.

use std::os::fd::{AsFd, OwnedFd};

use posthorse_core::{Error, HostView, Region, Result, View};
use rustix::fs::fstat;

use crate::limits::{huge_page_size, page_size};
use crate::mapping::{Backing, Mapping};
use crate::memfd;
use crate::populate::populate;

/// A part of another process's shared memory (see [`Region::shared_file`]), mapped here until it is dropped.
///
/// Its owner cannot make it shorter, which is checked. The owner and whoever else maps it may write to it at
/// any time, and a file of hugetlbfs can lose pages to a hole that one of them punches: map such a file only
/// where the peer is trusted as much as this process. What the memory holds is to be copied by [`copy`](crate::copy()) or read under an agreement with them. A
/// child of `fork` does not have it, as with [`HostMemory`](crate::HostMemory).
#[derive(Debug)]
pub struct MappedFile {
    mapping: Mapping,
    len: usize,
    writable: bool,
}

impl MappedFile {
    /// Maps `len` bytes at `offset` of the file, to be read or also written. The descriptor is not needed
    /// afterwards and is closed.
    ///
    /// If the file's pages are all present, so they are in the mapping when this returns: about 1 ms for a GiB
    /// on huge pages. A file with holes is left to be populated by use, since to fill them would let its owner
    /// make this process pay for memory that nobody uses.
    ///
    /// # Errors
    /// `InvalidArgument` for a length of zero or an offset that is not a multiple of the file's page size;
    /// `AccessDenied` when the file is not sealed against shrinking; `OutOfBounds` when the range leaves the
    /// file; `Io` when the system refuses, for one thing to map a read-only descriptor writable.
    pub fn map(fd: OwnedFd, offset: u64, len: usize, writable: bool) -> Result<Self> {
        let hugetlb_page = memfd::hugetlb_page_of(&fd);
        let page = hugetlb_page.unwrap_or_else(page_size);
        if len == 0 {
            return Err(Error::invalid_argument("the length", 0, "at least one byte"));
        }
        if !offset.is_multiple_of(page as u64) {
            let accepted = format!("multiples of the file's page size, {page}");
            return Err(Error::invalid_argument("the offset", offset, &accepted));
        }
        let too_long = || Error::invalid_argument("the length", len, "what fits into the address space");
        let end = offset.checked_add(len as u64).ok_or_else(too_long)?;
        memfd::check_sealed(&fd, end)?;
        let mapped_len = len.checked_next_multiple_of(page).ok_or_else(too_long)?;

        let align = hugetlb_page.or_else(huge_page_size).unwrap_or(page).max(page);
        let mapping = Mapping::new(mapped_len, align, Backing::File { fd: fd.as_fd(), offset, writable })?;
        if is_present(&fd)? {
            populate(&mapping, mapped_len, writable, None)?;
        }
        Ok(Self { mapping, len, writable })
    }

    /// The memory.
    pub const fn host_view(&self) -> HostView {
        HostView::new(self.mapping.base(), self.len)
    }
}

// SAFETY: the mapping stays where it is until the value is dropped, is readable throughout, and writable if
// `writable` says so; the file behind it cannot shrink.
unsafe impl Region for MappedFile {
    fn view(&self) -> View {
        View::Host(self.host_view())
    }

    fn writable(&self) -> bool {
        self.writable
    }

    fn is_here(&self) -> bool {
        self.mapping.is_here()
    }
}

/// Whether the file has no holes.
fn is_present(fd: &OwnedFd) -> Result<bool> {
    /// `st_blocks` counts in this unit, whatever the file system's.
    const BLOCK: u64 = 512;
    let stat = fstat(fd).map_err(|error| Error::os("fstat of a shared file", &error.into()))?;
    Ok((stat.st_blocks as u64).saturating_mul(BLOCK) >= stat.st_size as u64)
}
