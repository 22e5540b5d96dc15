//! One piece of payload on its way into memory, at either end of a connection.

use std::io;
use std::os::fd::BorrowedFd;

use posthorse_core::{Admission, Checksum, HostView};

use crate::checksum;
use crate::intake::{CHUNK, DIRECT, Intake};
use crate::sys;
use crate::wire::{self, Sum};

/// Where the bytes go, and who watches.
#[derive(Debug)]
pub(crate) enum Place {
    /// Memory of our own transfer, which stays allocated until its completion.
    Own(HostView),
    /// Memory that its owner opened to a peer, and may close at any time.
    Admitted(HostView, Admission),
    /// Nowhere: read and dropped.
    Nowhere,
}

/// How a piece ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Placed {
    /// It is in place.
    Whole,
    /// The owner closed the memory before all of it was in place, or it had no place from the beginning.
    Dropped,
    /// It is in place, and is not what was sent.
    Corrupt,
}

/// A piece that is being received.
#[derive(Debug)]
pub(crate) struct Placement {
    place: Place,
    len: usize,
    done: usize,
    sum: Sum,
}

impl Placement {
    pub(crate) const fn new(place: Place, len: usize, sum: Sum) -> Self {
        Self { place, len, done: 0, sum }
    }

    pub(crate) const fn left(&self) -> usize {
        self.len - self.done
    }

    /// Gives memory up that its owner has closed. What is still to come is dropped.
    pub(crate) fn give_up_closed(&mut self) {
        if matches!(&self.place, Place::Admitted(_, admission) if admission.is_closed()) {
            self.place = Place::Nowhere;
        }
    }

    /// Takes what the intake has of the piece.
    ///
    /// # Safety
    /// A place of our own is still allocated.
    pub(crate) unsafe fn take_from(&mut self, intake: &mut Intake) {
        let len = self.left().min(intake.bytes().len());
        let bytes = &intake.bytes()[..len];
        // SAFETY: the caller's promise for our own memory; admitted memory is allocated while inside. Remote
        // memory is registered as such: nobody holds Rust references into it that a transfer would break.
        let whole = self.touch(len, |view| unsafe { sys::copy_in(bytes, view) }).is_some();
        if !whole {
            self.place = Place::Nowhere;
        }
        self.done += len;
        intake.take(len);
    }

    /// Receives straight into place where that pays, else into the intake. Returns how many bytes came.
    ///
    /// # Errors
    /// As `recvmsg(2)`.
    ///
    /// # Safety
    /// A place of our own is still allocated.
    pub(crate) unsafe fn receive(
        &mut self,
        socket: BorrowedFd<'_>,
        intake: &mut Intake,
    ) -> io::Result<usize> {
        if self.len < DIRECT || !intake.bytes().is_empty() {
            return intake.receive(socket, self.left() + CHUNK);
        }
        let len = self.left().min(CHUNK);
        // Behind a long piece there may be another one: only its header comes along.
        let header = if len == self.left() { wire::REQUEST_BYTES } else { 0 };
        // SAFETY: as in `take_from`.
        let received = self.touch(len, |view| unsafe { intake.receive_past(socket, view, header) });
        match received {
            Some(received) => received.map(|(placed, behind)| {
                self.done += placed;
                placed + behind
            }),
            None => {
                self.place = Place::Nowhere;
                intake.receive(socket, len)
            }
        }
    }

    /// Compares what is in place with what was announced.
    ///
    /// # Safety
    /// A place of our own is still allocated.
    pub(crate) unsafe fn finish(mut self) -> Placed {
        self.done = 0;
        let Sum { mode, value } = self.sum;
        // SAFETY: as in `take_from`.
        match self.touch(self.len, |view| unsafe { checksum::of(view, mode) }) {
            Some(found) if mode == Checksum::Off || found == value => Placed::Whole,
            Some(_) => Placed::Corrupt,
            None => Placed::Dropped,
        }
    }

    /// Calls `act` with the next `len` bytes of the place, unless there is none or its owner has closed it.
    fn touch<R>(&self, len: usize, act: impl FnOnce(HostView) -> R) -> Option<R> {
        let (view, admission) = match &self.place {
            Place::Own(view) => (view, None),
            Place::Admitted(view, admission) => (view, Some(admission)),
            Place::Nowhere => return None,
        };
        let view = view.slice(self.done, len).ok()?;
        let _inside = match admission {
            Some(admission) => Some(admission.enter()?),
            None => None,
        };
        Some(act(view))
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixStream;
    use std::sync::Arc;

    use posthorse_core::{Access, Region, Usage, View};

    use super::*;

    #[derive(Debug)]
    struct Leaked(HostView);

    // SAFETY: the memory is leaked, so it stays.
    unsafe impl Region for Leaked {
        fn view(&self) -> View {
            View::Host(self.0)
        }
    }

    fn leaked(len: usize) -> (HostView, Arc<Usage>) {
        let view = HostView::of_mut(vec![0_u8; len].leak());
        (view, Arc::new(Usage::new(Arc::new(Leaked(view)))))
    }

    fn pump(placement: &mut Placement, socket: &UnixStream, intake: &mut Intake) {
        while placement.left() > 0 {
            // SAFETY: all memory of these tests is leaked.
            unsafe {
                placement.receive(socket.as_fd(), intake).unwrap();
                placement.take_from(intake);
            }
        }
    }

    #[test]
    fn a_piece_is_placed_whole_and_what_follows_is_kept() {
        let (mut a, b) = UnixStream::pair().unwrap();
        for len in [1, DIRECT - 1, DIRECT, DIRECT + 1, 100_000] {
            let bytes: Vec<u8> = (0..len).map(|n| n as u8).collect();
            a.write_all(&bytes).unwrap();
            a.write_all(b"next").unwrap();
            let (view, usage) = leaked(len);
            // SAFETY: the vector is alive.
            let value = unsafe { checksum::of(HostView::of(&bytes), Checksum::Full) };
            let place = Place::Admitted(view, Admission::new(usage, 0, len as u64, Access::Write).unwrap());
            let mut placement = Placement::new(place, len, Sum { mode: Checksum::Full, value });
            let mut intake = Intake::new();
            pump(&mut placement, &b, &mut intake);
            // SAFETY: leaked, and written by nobody any more.
            unsafe {
                assert_eq!(placement.finish(), Placed::Whole);
                assert_eq!(view.bytes(), bytes);
            }
            while intake.bytes().len() < 4 {
                intake.receive(b.as_fd(), 4).unwrap();
            }
            assert_eq!(intake.bytes(), b"next");
        }
    }

    #[test]
    fn not_a_byte_is_placed_after_the_owner_closed_the_memory() {
        let (mut a, b) = UnixStream::pair().unwrap();
        let (view, usage) = leaked(100_000);
        let place =
            Place::Admitted(view, Admission::new(Arc::clone(&usage), 0, 100_000, Access::Write).unwrap());
        let mut placement = Placement::new(place, 100_000, Sum::NONE);
        let mut intake = Intake::new();
        a.write_all(&[1; 40_000]).unwrap();
        while placement.left() > 60_000 {
            // SAFETY: leaked.
            unsafe {
                placement.receive(b.as_fd(), &mut intake).unwrap();
                placement.take_from(&mut intake);
            }
        }
        usage.close_and_wait(posthorse_core::Deadline::NEVER).unwrap();
        a.write_all(&[2; 60_000]).unwrap();
        pump(&mut placement, &b, &mut intake);
        // SAFETY: leaked, and written by nobody any more.
        unsafe {
            assert_eq!(placement.finish(), Placed::Dropped);
            assert_eq!(view.bytes().iter().filter(|byte| **byte != 0).count(), 40_000);
        }
    }

    #[test]
    fn other_bytes_than_announced_are_corrupt() {
        let (view, _) = leaked(8);
        for mode in [Checksum::Sampled, Checksum::Full] {
            let placement = Placement::new(Place::Own(view), 8, Sum { mode, value: 1 });
            // SAFETY: leaked.
            assert_eq!(unsafe { placement.finish() }, Placed::Corrupt);
        }
    }
}
