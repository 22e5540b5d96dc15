//! Raw memory towards and from sockets: the system calls.
//!
//! The memory that is moved may be written at the same time by a program that misuses it, so no Rust
//! reference to it is ever made: the kernel gets addresses, and everything else goes through copies of a few
//! kilobytes.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, BorrowedFd};

use posthorse_core::HostView;
use rustix::pipe::SpliceFlags;

/// How many views one call takes at most (`IOV_MAX` of Linux).
pub(crate) const MAX_VIEWS: usize = 1024;
/// About how many bytes one call sends at most: what one end has just copied is still in the caches when the other
/// copies it.
pub(crate) const SEND_CHUNK: usize = 256 << 10;
/// The most bytes that one call sends: the headers come along, so that no piece leaves a tail for another call.
pub(crate) const SEND_MOST: usize = SEND_CHUNK + (64 << 10);

/// Sends from `views` without waiting, and returns how many bytes went (`sendmsg(2)`).
///
/// # Errors
/// `WouldBlock` when the socket takes nothing now; whatever else the socket says.
///
/// # Safety
/// Every view is allocated during the call.
pub(crate) unsafe fn send_from(socket: BorrowedFd<'_>, views: &[HostView]) -> io::Result<usize> {
    with_vectors(views, |vectors, count| {
        // SAFETY: all fields of a message header may be zero.
        let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
        message.msg_iov = vectors;
        message.msg_iovlen = count;
        // SAFETY: the message has `count` initialised vectors, whose memory is allocated by the caller's promise,
        // and no name or control data.
        unsafe {
            libc::sendmsg(socket.as_raw_fd(), &raw const message, libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL)
        }
    })
}

/// Receives into `views` in order without waiting, and returns how many bytes came; zero is the end of the
/// stream (`recvmsg(2)`).
///
/// # Errors
/// `WouldBlock` when there is nothing now; whatever else the socket says.
///
/// # Safety
/// Every view is allocated during the call, and nothing that Rust knows of refers to its bytes.
pub(crate) unsafe fn receive_into(socket: BorrowedFd<'_>, views: &[HostView]) -> io::Result<usize> {
    with_vectors(views, |vectors, count| {
        // SAFETY: all fields of a message header may be zero.
        let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
        message.msg_iov = vectors;
        message.msg_iovlen = count;
        // SAFETY: as in `send_from`; the caller promises that the memory may be written.
        unsafe { libc::recvmsg(socket.as_raw_fd(), &raw mut message, libc::MSG_DONTWAIT) }
    })
}

/// How many bytes a socket has taken that the peer's host has not acknowledged (`SIOCOUTQ`).
///
/// # Errors
/// As `ioctl(2)`.
pub(crate) fn unacknowledged(socket: BorrowedFd<'_>) -> io::Result<usize> {
    let mut bytes: libc::c_int = 0;
    // SAFETY: the request, which has the terminals' name too, writes an integer and nothing else.
    let outcome = unsafe { libc::ioctl(socket.as_raw_fd(), libc::TIOCOUTQ, &raw mut bytes) };
    if outcome < 0 { Err(io::Error::last_os_error()) } else { Ok(usize::try_from(bytes).unwrap_or(0)) }
}

/// Has a pipe refer to the bytes of `view`, as many as it has room for, and returns how many (`vmsplice(2)`).
///
/// # Errors
/// `WouldBlock` when it has room for none; whatever else the system says.
///
/// # Safety
/// The view is allocated during the call.
pub(crate) unsafe fn refer(pipe: BorrowedFd<'_>, view: HostView) -> io::Result<usize> {
    let vector = libc::iovec { iov_base: view.as_ptr().cast(), iov_len: view.len() };
    // SAFETY: the caller's promise; the system holds on to the pages, not to the addresses.
    let referred = unsafe { libc::vmsplice(pipe.as_raw_fd(), &raw const vector, 1, libc::SPLICE_F_NONBLOCK) };
    usize::try_from(referred).map_err(|_| io::Error::last_os_error())
}

/// Moves at most `len` bytes from a pipe into a socket that does not block, by reference where the system can
/// (`splice(2)`). As with [`send_from`], no signal says that the peer has closed the connection.
///
/// # Errors
/// `WouldBlock` when the socket takes nothing now; whatever else the pipe or the socket says.
pub(crate) fn splice(pipe: BorrowedFd<'_>, socket: BorrowedFd<'_>, len: usize) -> io::Result<usize> {
    let flags = SpliceFlags::NONBLOCK;
    without_sigpipe(|| rustix::pipe::splice(pipe, None, socket, None, len, flags).map_err(io::Error::from))
}

/// Calls `act` and takes the `SIGPIPE` that may come of it: `splice(2)` has no flag that keeps it away, and it would end
/// a program that neither ignores nor handles it.
fn without_sigpipe<R>(act: impl FnOnce() -> R) -> R {
    // SAFETY: any bytes are a set of signals. One of these is emptied before it is used, the others are filled by the
    // system.
    let [mut only, mut pending, mut before] = unsafe { std::mem::zeroed::<[libc::sigset_t; 3]>() };
    // SAFETY: the sets are our own. The mask is this thread's, and is as before when the call returns.
    unsafe {
        libc::sigemptyset(&raw mut only);
        libc::sigaddset(&raw mut only, libc::SIGPIPE);
        libc::sigpending(&raw mut pending);
        libc::pthread_sigmask(libc::SIG_BLOCK, &raw const only, &raw mut before);
        let outcome = act();
        // One that was there before is not ours. Ours may be there even if part of the bytes went.
        if libc::sigismember(&raw const pending, libc::SIGPIPE) != 1 {
            let at_once = libc::timespec { tv_sec: 0, tv_nsec: 0 };
            libc::sigtimedwait(&raw const only, std::ptr::null_mut(), &raw const at_once);
        }
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const before, std::ptr::null_mut());
        outcome
    }
}

/// Copies the start of `from` to the start of `to`, as much as both have, and returns how much.
///
/// # Safety
/// Both are allocated during the call, and apart. Nothing that Rust knows of refers to the bytes of `to`, and nothing
/// that Rust knows of writes to `from`.
pub(crate) unsafe fn copy(from: HostView, to: HostView) -> usize {
    let len = from.len().min(to.len());
    // SAFETY: the caller's promise.
    unsafe { std::ptr::copy_nonoverlapping(from.as_ptr().cast_const(), to.as_ptr(), len) };
    len
}

/// Copies `bytes` to the start of `to`, as far as they fit.
///
/// # Safety
/// `to` is allocated during the call, and nothing that Rust knows of refers to its bytes.
pub(crate) unsafe fn copy_in(bytes: &[u8], to: HostView) {
    let len = bytes.len().min(to.len());
    // SAFETY: `to` is allocated and apart from `bytes`, which is a reference that Rust knows of.
    unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to.as_ptr(), len) };
}

/// Copies the start of `from` to `bytes`, as far as it fits.
///
/// # Safety
/// `from` is allocated during the call, and nothing that Rust knows of writes to it.
pub(crate) unsafe fn copy_out(from: HostView, bytes: &mut [u8]) {
    let len = bytes.len().min(from.len());
    // SAFETY: `from` is allocated and apart from `bytes`, which is a reference that Rust knows of.
    unsafe { std::ptr::copy_nonoverlapping(from.as_ptr().cast_const(), bytes.as_mut_ptr(), len) };
}

fn with_vectors(
    views: &[HostView],
    call: impl FnOnce(*mut libc::iovec, usize) -> libc::ssize_t,
) -> io::Result<usize> {
    let mut vectors = [MaybeUninit::<libc::iovec>::uninit(); MAX_VIEWS];
    let count = views.len().min(MAX_VIEWS);
    for (vector, view) in vectors.iter_mut().zip(views) {
        vector.write(libc::iovec { iov_base: view.as_ptr().cast(), iov_len: view.len() });
    }
    usize::try_from(call(vectors.as_mut_ptr().cast(), count)).map_err(|_| io::Error::last_os_error())
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn bytes_go_from_views_into_views() {
        let (a, b) = UnixStream::pair().unwrap();
        let (first, second) = ([1_u8, 2], [3_u8]);
        // SAFETY: both arrays live through the call.
        let sent = unsafe { send_from(a.as_fd(), &[HostView::of(&first), HostView::of(&second)]) }.unwrap();
        assert_eq!(sent, 3);
        let (mut left, mut right) = ([0_u8; 1], [0_u8; 4]);
        let views = [HostView::of_mut(&mut left), HostView::of_mut(&mut right)];
        // SAFETY: both arrays live through the call and are not otherwise used during it.
        assert_eq!(unsafe { receive_into(b.as_fd(), &views) }.unwrap(), 3);
        assert_eq!((left, right), ([1], [2, 3, 0, 0]));
        // SAFETY: as above.
        let nothing = unsafe { receive_into(b.as_fd(), &views) }.unwrap_err();
        assert_eq!(nothing.kind(), io::ErrorKind::WouldBlock);
        drop(a);
        // SAFETY: as above.
        assert_eq!(unsafe { receive_into(b.as_fd(), &views) }.unwrap(), 0);
    }

    #[test]
    fn copies_are_cut_to_the_shorter_side() {
        let mut memory = [0_u8; 3];
        let view = HostView::of_mut(&mut memory);
        let mut out = [9_u8; 2];
        // SAFETY: the array lives and is not otherwise used during the calls.
        unsafe {
            copy_in(&[1, 2, 3, 4], view);
            copy_out(view, &mut out);
        }
        assert_eq!((memory, out), ([1, 2, 3], [1, 2]));
    }
}
