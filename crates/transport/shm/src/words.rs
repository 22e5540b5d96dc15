//! Words in memory that two processes share: the only place where control memory is mapped.

use std::fmt;
use std::os::fd::{AsFd, OwnedFd};
use std::ptr::{NonNull, null_mut};
use std::sync::atomic::AtomicU64;

use posthorse_core::{Error, ErrorKind, Result};
use rustix::fs::{SealFlags, fcntl_get_seals, fstat};
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, munmap};

/// A mapping of 64-bit words, all zero at first. A child of `fork` does not have it.
///
/// Where it was mapped read-only, the words may only be loaded, with relaxed ordering; the types that hold
/// one see to that.
pub(crate) struct Words {
    base: NonNull<AtomicU64>,
    count: usize,
    pid: u32,
}

// SAFETY: the mapping belongs to the process; the words are atomics.
unsafe impl Send for Words {}
// SAFETY: as above.
unsafe impl Sync for Words {}

impl Words {
    /// A new sealed memfd of `count` words, mapped read-write, and its descriptor.
    pub(crate) fn create(name: &str, count: usize) -> Result<(OwnedFd, Self)> {
        let fd = posthorse_memory::sealed_file(name, count * size_of::<u64>())?;
        let words = Self::map_any(&fd, count, ProtFlags::READ | ProtFlags::WRITE)?;
        Ok((fd, words))
    }

    /// Maps a peer's words, which may only be loaded.
    ///
    /// # Errors
    /// `Malformed` when the file is too short, or could be made so.
    pub(crate) fn map_read_only(fd: impl AsFd, count: usize) -> Result<Self> {
        check(&fd, count)?;
        Self::map_any(fd, count, ProtFlags::READ)
    }

    /// Maps a peer's words, to be loaded and stored.
    ///
    /// # Errors
    /// As [`Words::map_read_only`].
    pub(crate) fn map_writable(fd: impl AsFd, count: usize) -> Result<Self> {
        check(&fd, count)?;
        Self::map_any(fd, count, ProtFlags::READ | ProtFlags::WRITE)
    }

    fn map_any(fd: impl AsFd, count: usize, protection: ProtFlags) -> Result<Self> {
        let bytes = count * size_of::<u64>();
        // SAFETY: the kernel chooses where; nothing existing is replaced.
        let base = unsafe { mmap(null_mut(), bytes, protection, MapFlags::SHARED, fd, 0) }
            .map_err(|error| Error::os("mapping control words", &error.into()))?;
        let base = NonNull::new(base.cast())
            .ok_or_else(|| Error::new(ErrorKind::Internal, "the kernel mapped memory at address zero"))?;
        let words = Self { base, count, pid: std::process::id() };
        // SAFETY: the range was mapped above; the advice changes no contents.
        unsafe { madvise(base.as_ptr().cast(), bytes, Advice::LinuxDontFork) }
            .map_err(|error| Error::os("madvise(MADV_DONTFORK)", &error.into()))?;
        Ok(words)
    }

    /// How many there are.
    pub(crate) const fn len(&self) -> usize {
        self.count
    }

    /// One of them.
    pub(crate) fn get(&self, index: usize) -> Option<&AtomicU64> {
        if index >= self.count {
            return None;
        }
        // SAFETY: inside the mapping, page-aligned at its start, and mapped for as long as `self` is; the
        // file behind it cannot shrink. Whatever another process stores there is a valid u64.
        Some(unsafe { self.base.add(index).as_ref() })
    }
}

impl Drop for Words {
    fn drop(&mut self) {
        // A forked child does not have the mapping, and may have another in its place.
        if self.pid == std::process::id() {
            // SAFETY: mapped by `map_any`, and every reference into it borrowed `self`.
            let _ = unsafe { munmap(self.base.as_ptr().cast(), self.count * size_of::<u64>()) };
        }
    }
}

impl fmt::Debug for Words {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Words({})", self.count)
    }
}

/// Refuses a file in which touching the words could end this process (SIGBUS).
fn check(fd: impl AsFd, count: usize) -> Result<()> {
    let fd = fd.as_fd();
    let seals = fcntl_get_seals(fd).unwrap_or(SealFlags::empty());
    let size = fstat(fd).map_err(|error| Error::os("fstat of control words", &error.into()))?.st_size;
    if seals.contains(SealFlags::SHRINK) && size as u64 >= (count * size_of::<u64>()) as u64 {
        return Ok(());
    }
    Err(Error::new(
        ErrorKind::Malformed,
        format!(
            "the peer sent a file of {size} bytes with seals {:#x} as {count} control words; accepted: a memfd of at \
             least that length, sealed against shrinking",
            seals.bits()
        ),
    ))
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering;

    use posthorse_memory::reopen_read_only;
    use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

    use super::*;

    #[test]
    fn what_one_mapping_stores_the_other_loads() {
        let (fd, ours) = Words::create("words", 600).unwrap();
        let theirs = Words::map_read_only(reopen_read_only(&fd).unwrap(), 600).unwrap();
        ours.get(599).unwrap().store(7, Ordering::Relaxed);
        assert_eq!(theirs.get(599).unwrap().load(Ordering::Relaxed), 7);
        assert!(ours.get(600).is_none());
        assert_eq!(theirs.len(), 600);
    }

    #[test]
    fn a_read_only_descriptor_cannot_be_mapped_writable() {
        let (fd, _) = Words::create("words", 8).unwrap();
        let error = Words::map_writable(reopen_read_only(&fd).unwrap(), 8).unwrap_err();
        assert_eq!(error.os_error(), Some(libc::EACCES));
    }

    #[test]
    fn a_file_that_is_short_or_could_shrink_is_refused() {
        let (fd, _) = Words::create("words", 8).unwrap();
        assert_eq!(Words::map_read_only(&fd, 9).unwrap_err().kind(), ErrorKind::Malformed);
        let open = memfd_create("open", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
        ftruncate(&open, 4096).unwrap();
        assert_eq!(Words::map_writable(&open, 8).unwrap_err().kind(), ErrorKind::Malformed);
    }
}
