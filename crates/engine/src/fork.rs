//! Notices when this process is the child of a fork.
//!
//! A forked child has the parent's memory and descriptors but none of its threads: every call would hang or do harm.
//! fork(2), pthread_atfork(3).

use std::sync::Once;
use std::sync::atomic::{AtomicU32, Ordering};

use posthorse_core::{Error, ErrorKind, Result};

static FORKS: AtomicU32 = AtomicU32::new(0);
static WATCH: Once = Once::new();

/// Which process this is, counted in forks since the first engine was made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Birth(u32);

impl Birth {
    /// Now, from which on forks are noticed.
    pub(crate) fn now() -> Self {
        WATCH.call_once(|| {
            extern "C" fn child() {
                FORKS.fetch_add(1, Ordering::Relaxed);
            }
            // SAFETY: the handler only increments an atomic, which is safe at any time, and lives as long as the
            // program does. Failure (no memory) leaves forks unnoticed, as without the call.
            unsafe { libc::pthread_atfork(None, None, Some(child)) };
        });
        Self(FORKS.load(Ordering::Relaxed))
    }

    /// # Errors
    /// `Forked` in a child.
    pub(crate) fn check(self) -> Result<()> {
        if FORKS.load(Ordering::Relaxed) == self.0 {
            return Ok(());
        }
        Err(Error::new(ErrorKind::Forked, "this process was forked from the one that made the engine"))
    }
}
