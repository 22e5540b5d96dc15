//! What happens between fork and exec, and the socket that comes through.

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::process::Command;

use rustix::io::{FdFlags, fcntl_setfd};
use rustix::process::{Signal, getpid, getppid, set_parent_process_death_signal};

/// Lets the child have `socket` under its present number, and kills it when the thread that starts it ends.
pub(super) fn prepare(command: &mut Command, socket: OwnedFd) {
    let parent = getpid();
    let set_up = move || {
        set_parent_process_death_signal(Some(Signal::KILL))?;
        // The parent may have died before the kernel was told.
        if getppid() != Some(parent) {
            return Err(io::Error::from(io::ErrorKind::BrokenPipe));
        }
        fcntl_setfd(&socket, FdFlags::empty())?;
        Ok(())
    };
    // SAFETY: three system calls and a comparison, all of which may be made between fork and exec: they
    // allocate nothing and take no lock.
    unsafe { command.pre_exec(set_up) };
}

/// The socket that came through as `number`; `None` when there is no socket.
pub(super) fn inherited(number: RawFd) -> Option<UnixStream> {
    if number <= 2 {
        return None;
    }
    // SAFETY: whoever started this process has put its socket there (the name of the variable that carries the
    // number is the testkit's own), and `process::child` calls this once in a process's life.
    let socket = unsafe { OwnedFd::from_raw_fd(number) };
    let stream = UnixStream::from(socket);
    // Grandchildren are not meant; what is not a socket is nobody's to close.
    if fcntl_setfd(&stream, FdFlags::CLOEXEC).is_err() || stream.peer_addr().is_err() {
        debug_assert_eq!(std::os::fd::IntoRawFd::into_raw_fd(stream), number);
        return None;
    }
    debug_assert_eq!(stream.as_raw_fd(), number);
    Some(stream)
}
