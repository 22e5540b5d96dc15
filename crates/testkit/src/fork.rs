//! What a forked child finds.

use std::sync::mpsc;
use std::thread;
use std::time::Duration;

/// How long a child may take: one that waits for a thread that is not there takes for ever.
const PATIENCE: Duration = Duration::from_secs(20);

/// Forks, and asserts that the child finds `well`. The child ends without dropping anything of the caller's.
///
/// # Panics
/// When the child does not say so in time, and when there is none.
///
/// # Safety
/// The child has this thread alone: `well` must wait for no other thread, and for no lock that one may hold.
pub unsafe fn assert_in_forked_child(well: impl FnOnce() -> bool) {
    // SAFETY: the caller's promise; whatever the closure does, the child goes no further.
    match unsafe { libc::fork() } {
        -1 => panic!("the fork failed: {}", std::io::Error::last_os_error()),
        0 => {
            let failed = i32::from(!well());
            // SAFETY: ends the child at once.
            unsafe { libc::_exit(failed) }
        }
        child => {
            let (ended, has_ended) = mpsc::channel();
            thread::spawn(move || {
                let mut status = 0;
                // SAFETY: the status outlives the call, and the child is ours.
                unsafe { libc::waitpid(child, &raw mut status, 0) };
                let _ = ended.send(status);
            });
            let status = has_ended.recv_timeout(PATIENCE).unwrap_or_else(|_| {
                // SAFETY: the child is ours, and whoever waits for it has not seen it end.
                unsafe { libc::kill(child, libc::SIGKILL) };
                has_ended.recv().unwrap()
            });
            assert!(status == 0, "the child ended with status {status:#x}");
        }
    }
}

/// A forked child that holds a copy of every descriptor and does nothing, until this is dropped.
#[derive(Debug)]
pub struct IdleChild(libc::pid_t);

impl IdleChild {
    /// Forks.
    ///
    /// # Panics
    /// When there is no child.
    pub fn fork() -> Self {
        // SAFETY: the child calls nothing but `pause`, which takes no lock.
        match unsafe { libc::fork() } {
            -1 => panic!("the fork failed: {}", std::io::Error::last_os_error()),
            0 => loop {
                // SAFETY: it waits for a signal.
                unsafe { libc::pause() };
            },
            child => Self(child),
        }
    }
}

impl Drop for IdleChild {
    fn drop(&mut self) {
        // SAFETY: the child is ours, and nobody else waits for it.
        unsafe {
            libc::kill(self.0, libc::SIGKILL);
            libc::waitpid(self.0, std::ptr::null_mut(), 0);
        }
    }
}
