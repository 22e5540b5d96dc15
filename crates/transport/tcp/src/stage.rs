//! Memory that goes to a socket by reference, for a connection within one host.
//!
//! Within one host the kernel copies every byte twice: into its own pages for the sender, out of them for the
//! receiver. Here the first of these copies is our own, into a block of a few hundred kilobytes that the socket then
//! refers to (`vmsplice(2)`, `splice(2)`). Our copy fetches memory that is in no cache much faster than the kernel's,
//! and the blocks stay in the caches that both processes share. A block is filled anew only when the peer has taken
//! what it held. One that says so too early spoils only what it is itself sent: the blocks of a connection hold
//! nothing else.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicUsize, Ordering};

use posthorse_core::HostView;
use posthorse_memory::{HostMemory, MemoryOptions};
use rustix::pipe::PipeFlags;

use crate::sys::{self, SEND_CHUNK};

/// Bytes of a block: what one call sends.
const BLOCK: usize = SEND_CHUNK + (64 << 10);
/// How many blocks: together with their neighbours they fit a huge page.
const BLOCKS: usize = 6;
/// The size of the pipe, with room for the pages of a block.
const PIPE_BYTES: usize = 512 << 10;
/// How many stages a process has at most: each takes 2 MiB, and of the pipes that a user may have.
const MAX_STAGES: usize = 64;

static STAGES: AtomicUsize = AtomicUsize::new(0);

/// A place among the stages of the process, given back when dropped.
#[derive(Debug)]
struct Place;

impl Place {
    fn take() -> Option<Self> {
        // Made first, so that it is given back whichever way this ends.
        let place = Self;
        (STAGES.fetch_add(1, Ordering::Relaxed) < MAX_STAGES).then_some(place)
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        STAGES.fetch_sub(1, Ordering::Relaxed);
    }
}

/// The blocks of one direction of one connection.
#[derive(Debug)]
pub(crate) struct Stage {
    memory: HostMemory,
    /// Its ends for reading and writing, as long as the system plays along.
    pipe: Option<(OwnedFd, OwnedFd)>,
    /// Where in the stream the bytes of each filled block end, the oldest first.
    filled: VecDeque<u64>,
    /// The block that is filled next.
    next: usize,
    /// What is not yet sent of the block that was filled last, and how many of these bytes are in the pipe.
    rest: HostView,
    piped: usize,
    _place: Place,
}

impl Stage {
    /// None when there are too many, or the system does not give what it takes.
    pub(crate) fn open() -> Option<Self> {
        let place = Place::take()?;
        let memory = MemoryOptions::new(BLOCK * BLOCKS).allocate().ok()?;
        let (read, write) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK).ok()?;
        rustix::pipe::fcntl_setpipe_size(&write, PIPE_BYTES).ok()?;
        Some(Self {
            memory,
            pipe: Some((read, write)),
            filled: VecDeque::with_capacity(BLOCKS),
            next: 0,
            rest: HostView::empty(),
            piped: 0,
            _place: place,
        })
    }

    /// How many bytes are filled in and not yet sent.
    pub(crate) const fn pending(&self) -> usize {
        self.rest.len()
    }

    /// Whether a block is free only once the peer has taken more.
    pub(crate) fn is_short(&self) -> bool {
        self.pipe.is_some() && self.filled.len() == BLOCKS
    }

    /// Fills a block from the start of `views`, which begin at `position` of the stream, and returns how many bytes it
    /// took: none when no block is free or the one before is not yet sent.
    ///
    /// # Safety
    /// Every view is allocated during the call, and nothing that Rust knows of writes to it.
    pub(crate) unsafe fn fill(&mut self, position: u64, views: &[HostView]) -> usize {
        if self.pipe.is_none() || self.pending() > 0 || self.filled.len() == BLOCKS {
            return 0;
        }
        let Ok(block) = self.memory.host_view().slice(self.next * BLOCK, BLOCK) else { return 0 };
        let mut len = 0;
        for view in views {
            let Ok(room) = block.slice(len, BLOCK - len) else { break };
            // SAFETY: the caller's promise for the view; the block is ours and apart from it, and is never borrowed.
            len += unsafe { sys::copy(*view, room) };
        }
        if let Ok(rest) = block.slice(0, len) {
            self.rest = rest;
            self.filled.push_back(position + len as u64);
            self.next = (self.next + 1) % BLOCKS;
        }
        self.pending()
    }

    /// Sends what is pending.
    ///
    /// # Errors
    /// `WouldBlock` when the socket does not take all of it now; whatever else the socket says.
    pub(crate) fn flush(&mut self, socket: BorrowedFd<'_>) -> io::Result<()> {
        while self.pending() > 0 {
            let sent = match &self.pipe {
                Some((read, write)) => match splice(&mut self.piped, self.rest, read, write, socket) {
                    Err(error) if error.kind() != io::ErrorKind::WouldBlock => {
                        // Not every sandbox has these calls; if it is the connection, the next call says so too.
                        tracing::debug!(%error, "sending by reference failed; sending by copy");
                        self.pipe = None;
                        continue;
                    }
                    outcome => outcome?,
                },
                // SAFETY: of a block, which is ours.
                None => unsafe { sys::send_from(socket, &[self.rest]) }?,
            };
            self.rest = self.rest.slice(sent, self.rest.len() - sent).unwrap_or(HostView::empty());
        }
        Ok(())
    }

    /// The peer has taken the stream up to `position`.
    pub(crate) fn taken(&mut self, position: u64) {
        while self.filled.front().is_some_and(|end| *end <= position) {
            self.filled.pop_front();
        }
    }
}

fn splice(
    piped: &mut usize,
    rest: HostView,
    read: &OwnedFd,
    write: &OwnedFd,
    socket: BorrowedFd<'_>,
) -> io::Result<usize> {
    if *piped == 0 {
        // SAFETY: the block is allocated. It is filled anew only when the peer has taken these bytes.
        *piped = unsafe { sys::refer(write.as_fd(), rest) }?;
    }
    let sent = sys::splice(read.as_fd(), socket, *piped)?;
    *piped -= sent;
    Ok(sent)
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::net::{TcpListener, TcpStream};

    use super::*;

    fn pair() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let a = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let b = listener.accept().unwrap().0;
        a.set_nonblocking(true).unwrap();
        (a, b)
    }

    fn fill(stage: &mut Stage, position: u64, byte: u8, len: usize) -> usize {
        // SAFETY: the vector lives through the call.
        unsafe { stage.fill(position, &[HostView::of(&vec![byte; len])]) }
    }

    #[test]
    fn a_block_is_filled_anew_only_when_the_peer_has_taken_it() {
        let (a, mut b) = pair();
        let mut stage = Stage::open().unwrap();
        for n in 0..BLOCKS {
            assert!(!stage.is_short());
            assert_eq!(fill(&mut stage, 1000 * n as u64, n as u8, 1000), 1000);
            assert_eq!(fill(&mut stage, 0, 99, 1), 0, "the one before is not yet sent");
            stage.flush(a.as_fd()).unwrap();
        }
        assert!(stage.is_short());
        assert_eq!(fill(&mut stage, 6000, 99, 1000), 0);
        stage.taken(999);
        assert!(stage.is_short());
        stage.taken(2000);
        for byte in [6, 7] {
            assert_eq!(fill(&mut stage, 1000 * u64::from(byte), byte, 1000), 1000);
            stage.flush(a.as_fd()).unwrap();
        }
        assert!(stage.is_short());
        let mut got = vec![0; 8000];
        b.read_exact(&mut got).unwrap();
        // The first two blocks were overwritten before we took them, whatever was said: that spoils what is read here,
        // and nothing else.
        for (n, part) in got.chunks(1000).enumerate().skip(2) {
            assert!(part.iter().all(|byte| usize::from(*byte) == n), "{n}");
        }
    }

    #[test]
    fn what_is_too_long_for_a_block_is_cut() {
        let (a, mut b) = pair();
        let mut stage = Stage::open().unwrap();
        let reader = std::thread::spawn(move || b.read_exact(&mut vec![0; BLOCK]).unwrap());
        assert_eq!(fill(&mut stage, 0, 1, BLOCK + 1), BLOCK);
        while let Err(error) = stage.flush(a.as_fd()) {
            assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
        }
        reader.join().unwrap();
    }

    #[test]
    fn without_the_pipe_everything_goes_on_by_copy() {
        let (a, mut b) = pair();
        let mut stage = Stage::open().unwrap();
        fill(&mut stage, 0, 5, 1000);
        // As in a sandbox that knows the one call and not the other.
        let (_, write) = stage.pipe.take().unwrap();
        let file = std::fs::File::open("/dev/null").unwrap();
        stage.pipe = Some((file.into(), write));
        stage.flush(a.as_fd()).unwrap();
        assert!(stage.pipe.is_none() && !stage.is_short());
        assert_eq!(fill(&mut stage, 1000, 6, 1000), 0);
        let mut got = [0; 1000];
        b.read_exact(&mut got).unwrap();
        assert_eq!(got, [5; 1000]);
    }

    #[test]
    fn the_stages_of_a_process_are_bounded_and_given_back() {
        let mut stages: Vec<_> = std::iter::from_fn(Stage::open).collect();
        // Others of this process may be at work too.
        assert!(stages.len() <= MAX_STAGES);
        stages.pop();
        assert!(Stage::open().is_some());
    }
}
