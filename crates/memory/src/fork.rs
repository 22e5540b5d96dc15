//! Notices when this process is the child of a fork.
//!
//! A forked child has the parent's memory and descriptors but none of its threads: what needs them would hang there or
//! do harm.

use std::ptr::{NonNull, null_mut};
use std::sync::atomic::{AtomicU32, Ordering};

use posthorse_core::{Error, ErrorKind, Result};
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};

/// Tells whether this is still the process that made it: a page that the kernel clears in a forked child.
#[derive(Debug)]
pub struct ForkGuard {
    word: NonNull<AtomicU32>,
}

const GUARD_BYTES: usize = 4096;

// SAFETY: an atomic word in a mapping of our own.
unsafe impl Send for ForkGuard {}
// SAFETY: as above.
unsafe impl Sync for ForkGuard {}

impl ForkGuard {
    /// A guard of this process.
    ///
    /// # Errors
    /// `Io` or `LimitReached` when the kernel gives no such page.
    pub fn new() -> Result<Self> {
        let refused =
            |error: rustix::io::Errno| Error::os("mapping a page that is cleared on fork", &error.into());
        // SAFETY: the kernel chooses where; nothing existing is replaced.
        let base = unsafe {
            mmap_anonymous(null_mut(), GUARD_BYTES, ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE)
        }
        .map_err(refused)?;
        let word = NonNull::new(base.cast::<AtomicU32>())
            .ok_or_else(|| Error::new(ErrorKind::Internal, "the kernel mapped memory at address zero"))?;
        let guard = Self { word };
        // Miri knows neither the advice nor fork.
        if !cfg!(miri) {
            // SAFETY: the page was mapped above; the advice changes nothing in this process.
            unsafe { madvise(base, GUARD_BYTES, Advice::LinuxWipeOnFork) }.map_err(refused)?;
        }
        guard.word().store(1, Ordering::Relaxed);
        Ok(guard)
    }

    const fn word(&self) -> &AtomicU32 {
        // SAFETY: mapped, zero at first, and unmapped only on drop.
        unsafe { self.word.as_ref() }
    }

    /// Whether this process is a forked child of the one that made the guard.
    pub fn is_forked(&self) -> bool {
        self.word().load(Ordering::Relaxed) == 0
    }

    /// # Errors
    /// `Forked` in a forked child.
    pub fn check(&self) -> Result<()> {
        if self.is_forked() { Err(Error::forked()) } else { Ok(()) }
    }
}

impl Drop for ForkGuard {
    fn drop(&mut self) {
        // SAFETY: mapped in `new`, in this process or inherited from it, and borrowed by nobody any more.
        let _ = unsafe { munmap(self.word.as_ptr().cast(), GUARD_BYTES) };
    }
}

#[cfg(all(test, not(miri)))]
mod tests {
    use super::*;

    #[test]
    fn the_guard_is_clear_in_the_process_that_made_it_and_not_in_a_child() {
        let guard = ForkGuard::new().unwrap();
        guard.check().unwrap();
        // SAFETY: the child looks at a word of memory, and leaves by _exit.
        match unsafe { libc::fork() } {
            // SAFETY: ends the child at once.
            0 => unsafe { libc::_exit(i32::from(!guard.is_forked())) },
            child => {
                let mut status = 0;
                // SAFETY: the status outlives the call, and the child is ours.
                assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
                assert_eq!(status, 0);
            }
        }
        guard.check().unwrap();
    }
}
