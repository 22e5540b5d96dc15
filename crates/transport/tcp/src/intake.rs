//! Received bytes that are not yet understood.

use std::io;
use std::os::fd::BorrowedFd;

use posthorse_core::HostView;

use crate::sys;

/// How much is received in one call at most, beside what goes straight to its place.
const BUFFER: usize = 256 << 10;
/// A payload of at least this many bytes is received straight into its place; a shorter one is copied there,
/// which costs less than a call of its own.
pub(crate) const DIRECT: usize = 32 << 10;
/// The most bytes that one call receives straight into their place.
pub(crate) const CHUNK: usize = 256 << 10;

/// A buffer between a socket and a parser.
#[derive(Debug)]
pub(crate) struct Intake {
    buffer: Box<[u8]>,
    start: usize,
    end: usize,
}

impl Intake {
    pub(crate) fn new() -> Self {
        Self { buffer: vec![0; BUFFER].into_boxed_slice(), start: 0, end: 0 }
    }

    pub(crate) fn clear(&mut self) {
        (self.start, self.end) = (0, 0);
    }

    /// What was received and not yet taken.
    pub(crate) fn bytes(&self) -> &[u8] {
        &self.buffer[self.start..self.end]
    }

    /// The next `N` bytes, if they are there.
    pub(crate) fn peek<const N: usize>(&self) -> Option<&[u8; N]> {
        self.bytes().first_chunk()
    }

    pub(crate) fn take(&mut self, len: usize) {
        self.start = (self.start + len).min(self.end);
        if self.start == self.end {
            self.clear();
        }
    }

    /// Whether nothing more can be received before something is taken.
    pub(crate) fn is_full(&self) -> bool {
        self.end - self.start == self.buffer.len()
    }

    /// Receives at most `limit` bytes without waiting. Zero is the end of the stream.
    ///
    /// # Errors
    /// As `recvmsg(2)`.
    pub(crate) fn receive(&mut self, socket: BorrowedFd<'_>, limit: usize) -> io::Result<usize> {
        let room = self.room(limit);
        // SAFETY: the view is of our own buffer, which is borrowed for the call.
        let received = unsafe { sys::receive_into(socket, &[room]) }?;
        self.end += received;
        Ok(received)
    }

    /// As [`Intake::receive`], but first into `place`. Returns how many bytes went there, and how many came here.
    ///
    /// # Errors
    /// As `recvmsg(2)`.
    ///
    /// # Safety
    /// `place` is allocated during the call, and nothing that Rust knows of refers to its bytes.
    pub(crate) unsafe fn receive_past(
        &mut self,
        socket: BorrowedFd<'_>,
        place: HostView,
        limit: usize,
    ) -> io::Result<(usize, usize)> {
        let room = self.room(limit);
        // SAFETY: the caller's promise for `place`; the other view is of our own buffer.
        let received = unsafe { sys::receive_into(socket, &[place, room]) }?;
        let placed = received.min(place.len());
        self.end += received - placed;
        Ok((placed, received - placed))
    }

    fn room(&mut self, limit: usize) -> HostView {
        if self.start > 0 && self.buffer.len() - self.end < limit {
            self.buffer.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
        }
        let len = limit.min(self.buffer.len() - self.end);
        HostView::of_mut(&mut self.buffer[self.end..self.end + len])
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn bytes_come_in_order_however_they_are_cut() {
        let (mut a, b) = UnixStream::pair().unwrap();
        let mut intake = Intake::new();
        a.write_all(b"0123456789").unwrap();
        assert_eq!(intake.receive(b.as_fd(), 4).unwrap(), 4);
        intake.take(3);
        assert_eq!(intake.bytes(), b"3");
        assert_eq!(intake.peek::<2>(), None);
        assert_eq!(intake.receive(b.as_fd(), BUFFER).unwrap(), 6);
        assert_eq!(intake.bytes(), b"3456789");
        intake.take(7);
        a.write_all(b"abcdef").unwrap();
        let mut place = [0; 4];
        // SAFETY: the array lives and is not otherwise used during the call.
        let got = unsafe { intake.receive_past(b.as_fd(), HostView::of_mut(&mut place), 64) }.unwrap();
        assert_eq!((got, &place, intake.bytes()), ((4, 2), b"abcd", &b"ef"[..]));
    }

    #[test]
    fn a_full_intake_says_so_and_takes_no_more() {
        let (mut a, b) = UnixStream::pair().unwrap();
        let mut intake = Intake::new();
        while !intake.is_full() {
            a.write_all(&[7; 4096]).unwrap();
            intake.receive(b.as_fd(), BUFFER).unwrap();
        }
        assert_eq!(intake.bytes().len(), BUFFER);
        intake.take(1);
        a.write_all(&[8]).unwrap();
        assert_eq!(intake.receive(b.as_fd(), BUFFER).unwrap(), 1);
        assert_eq!(intake.bytes().last(), Some(&8));
    }
}
