//! The system calls that have no safe wrapper elsewhere.

use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::sync::Arc;

use posthorse_core::{Error, ErrorKind, HostView, Result};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::Timespec;
use rustix::process::{Pid, PidfdFlags, pidfd_open};

/// Who is at the other end of a Unix socket, as the kernel says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Credentials {
    /// `None` when its process cannot be seen from this PID namespace.
    pub(crate) pid: Option<Pid>,
    pub(crate) uid: u32,
}

/// The credentials of the peer (`SO_PEERCRED`, unix(7)).
pub(crate) fn peer_credentials(socket: impl AsFd) -> Result<Credentials> {
    let mut found = libc::ucred { pid: 0, uid: 0, gid: 0 };
    let mut len = size_of::<libc::ucred>() as libc::socklen_t;
    // SAFETY: `found` and `len` are as large as said, and outlive the call.
    let status = unsafe {
        libc::getsockopt(
            socket.as_fd().as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut found).cast(),
            &raw mut len,
        )
    };
    if status != 0 {
        return Err(Error::os("getsockopt(SO_PEERCRED)", &io::Error::last_os_error()));
    }
    Ok(Credentials { pid: Pid::from_raw(found.pid), uid: found.uid })
}

/// A pidfd of the peer: by `SO_PEERPIDFD` (Linux 6.5, whatever the PID namespace), else by its process number.
pub(crate) fn peer_pidfd(socket: impl AsFd, credentials: Credentials) -> Result<OwnedFd> {
    let mut fd: libc::c_int = -1;
    let mut len = size_of::<libc::c_int>() as libc::socklen_t;
    // SAFETY: `fd` and `len` are as large as said, and outlive the call.
    let status = unsafe {
        libc::getsockopt(
            socket.as_fd().as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERPIDFD,
            (&raw mut fd).cast(),
            &raw mut len,
        )
    };
    if status == 0 && fd >= 0 {
        // SAFETY: the kernel has just made it for us.
        return Ok(unsafe { OwnedFd::from_raw_fd(fd) });
    }
    let error = io::Error::last_os_error();
    if error.raw_os_error() != Some(libc::ENOPROTOOPT) {
        return Err(Error::os("getsockopt(SO_PEERPIDFD)", &error));
    }
    let pid = credentials.pid.ok_or_else(|| {
        Error::new(ErrorKind::Unsupported, "the peer's process cannot be seen from this PID namespace")
            .with_advice("this needs Linux 6.5 (SO_PEERPIDFD), or both processes in one PID namespace")
    })?;
    // The number may have passed to another process only if the peer is gone; the conversation that follows
    // on the socket shows that it is not.
    pidfd_open(pid, PidfdFlags::empty()).map_err(|error| Error::os("pidfd_open", &error.into()))
}

/// Whether one of these events is there now, or the other end has gone.
pub(crate) fn is_ready(fd: impl AsFd, what: PollFlags) -> bool {
    let mut asked = [PollFd::new(&fd, what)];
    let ready = poll(&mut asked, Some(&Timespec { tv_sec: 0, tv_nsec: 0 }));
    ready.is_ok() && asked.iter().any(|fd| fd.revents().intersects(what | PollFlags::HUP))
}

/// A process: by its number, which may pass to another once it has ended, and by its pidfd, which says whether it has.
#[derive(Debug, Clone)]
pub(crate) struct Process {
    pub(crate) pid: Pid,
    pub(crate) pidfd: Arc<OwnedFd>,
}

/// Which way [`process_vm`] copies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Direction {
    FromPeer,
    ToPeer,
}

/// Copies between this process and another by `process_vm_readv(2)` or `process_vm_writev(2)`, which name the other by
/// its number. That may have passed to a third by the time of the call, if we were stopped for a while. What was read
/// counts only if the process is still there afterwards. What was written cannot be called back: looking before and
/// failing after make it improbable and known, not impossible.
///
/// # Errors
/// `PeerGone` when the process has ended by the end of the copy, although it may have been there for all of it.
///
/// # Safety
/// `local` is alive, and readable or (from the peer) writable; nobody uses it meanwhile in a way that Rust
/// forbids beside this.
pub(crate) unsafe fn process_vm(
    process: &Process,
    local: HostView,
    remote: u64,
    direction: Direction,
) -> Result<()> {
    let pid = process.pid.as_raw_pid();
    while_there(process, local.len(), |done| {
        let ours =
            libc::iovec { iov_base: local.as_ptr().wrapping_add(done).cast(), iov_len: local.len() - done };
        let theirs = libc::iovec {
            iov_base: std::ptr::without_provenance_mut(remote.wrapping_add(done as u64) as usize),
            iov_len: local.len() - done,
        };
        match direction {
            // SAFETY: the caller's promise for our end; the kernel checks the other.
            Direction::FromPeer => unsafe {
                libc::process_vm_readv(pid, &raw const ours, 1, &raw const theirs, 1, 0)
            },
            // SAFETY: as above.
            Direction::ToPeer => unsafe {
                libc::process_vm_writev(pid, &raw const ours, 1, &raw const theirs, 1, 0)
            },
        }
    })
}

/// Has `copy` copy `len` bytes, call by call. It is told how many have been, and returns what the system call does. The
/// process is there before the first call and after each.
fn while_there(process: &Process, len: usize, mut copy: impl FnMut(usize) -> libc::ssize_t) -> Result<()> {
    let check = || if is_ready(&process.pidfd, PollFlags::IN) { Err(process_is_gone()) } else { Ok(()) };
    check()?;
    let mut done = 0;
    while done < len {
        let moved = copy(done);
        let error = io::Error::last_os_error();
        check()?;
        match usize::try_from(moved) {
            Ok(0) => return Err(Error::new(ErrorKind::PathFailed, "process_vm copied nothing")),
            Ok(moved) => done += moved,
            Err(_) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(_) => return Err(process_vm_refusal(&error)),
        }
    }
    Ok(())
}

fn process_is_gone() -> Error {
    Error::new(ErrorKind::PeerGone, "the peer's process is gone")
}

fn process_vm_refusal(error: &io::Error) -> Error {
    match error.raw_os_error() {
        Some(libc::ESRCH) => process_is_gone(),
        Some(libc::EPERM) => Error::new(ErrorKind::Unsupported, "the kernel does not let us copy from the peer's process")
            .with_advice(
                "register memory that is a sealed memfd, or allow ptrace between the two (kernel.yama.ptrace_scope, \
                 CAP_SYS_PTRACE, the container's seccomp profile)",
            ),
        _ => Error::os("process_vm_readv/writev", error),
    }
}

/// Whether two ranges of the same length hold the same bytes; neither is assumed to stand still.
///
/// # Safety
/// Both are alive and readable, and `theirs` is as long as `ours`.
pub(crate) unsafe fn same_bytes(ours: HostView, theirs: HostView) -> bool {
    debug_assert_eq!(ours.len(), theirs.len());
    // SAFETY: the caller's promise. A call into C, which makes no references of what may be changing.
    unsafe { libc::memcmp(ours.as_ptr().cast(), theirs.as_ptr().cast(), ours.len()) == 0 }
}

#[cfg(test)]
mod tests {
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
    use rustix::process::{getpid, getuid};

    use super::*;

    #[test]
    fn the_peer_of_a_socket_pair_is_ourselves() {
        let (one, _other) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
        let credentials = peer_credentials(&one).unwrap();
        assert_eq!(credentials, Credentials { pid: Some(getpid()), uid: getuid().as_raw() });
        peer_pidfd(&one, credentials).unwrap();
    }

    fn ourselves() -> Process {
        let pid = getpid();
        Process { pid, pidfd: pidfd_open(pid, PidfdFlags::empty()).unwrap().into() }
    }

    #[test]
    fn what_is_copied_while_the_process_ends_does_not_count() {
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let pid = Pid::from_child(&child);
        let process = Process { pid, pidfd: pidfd_open(pid, PidfdFlags::empty()).unwrap().into() };
        while_there(&process, 4, |_| 1).unwrap();
        let error = while_there(&process, 4, |_| {
            child.kill().unwrap();
            child.wait().unwrap();
            // Its number is another's by now, and this is of that one.
            4
        });
        assert_eq!(error.unwrap_err().kind(), ErrorKind::PeerGone);
    }

    #[test]
    fn process_vm_reaches_this_process_and_names_one_that_is_gone() {
        let source = [1_u8, 2, 3, 4];
        let mut copy = [0_u8; 4];
        let remote = HostView::of(&source).address();
        let view = HostView::of_mut(&mut copy);
        // SAFETY: the arrays are alive and unused meanwhile.
        unsafe { process_vm(&ourselves(), view, remote, Direction::FromPeer) }.unwrap();
        assert_eq!(copy, source);

        let mut child = std::process::Command::new("true").spawn().unwrap();
        let pid = Pid::from_child(&child);
        let ended = Process { pid, pidfd: pidfd_open(pid, PidfdFlags::empty()).unwrap().into() };
        child.wait().unwrap();
        // Also when its number has passed to another, such as this one.
        for process in [ended.clone(), Process { pid: getpid(), ..ended }] {
            let mut copy = [0_u8; 4];
            let view = HostView::of_mut(&mut copy);
            // SAFETY: as above.
            let error = unsafe { process_vm(&process, view, remote, Direction::FromPeer) }.unwrap_err();
            assert_eq!((error.kind(), copy), (ErrorKind::PeerGone, [0; 4]));
        }
    }
}
