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
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;

use posthorse_core::HostView;
use posthorse_memory::{HostMemory, MemoryOptions};
use rustix::pipe::PipeFlags;

use crate::slots::Slot;
use crate::sys::{self, SEND_MOST};
use crate::wire::TAKEN_EVERY;

/// Less than this is not worth a block.
pub(crate) const SHORTEST: usize = 96 << 10;
/// How many blocks.
pub(crate) const BLOCKS: usize = 6;
/// The peer has said something before the blocks are all filled, however little is in each.
const _: () = assert!(BLOCKS * SHORTEST > TAKEN_EVERY as usize);
/// A huge page, which holds all the blocks.
const MEMORY: usize = 2 << 20;
const _: () = assert!(BLOCKS * SEND_MOST <= MEMORY);
/// The size of the pipe: a user has 64 MiB in all, without privileges.
const PIPE_BYTES: usize = 256 << 10;
/// How many stages there are at once.
const MAX_STAGES: usize = 32;

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
    _slot: Slot,
}

impl Stage {
    /// None when so many are `open` already that there shall be no more, or the system does not give what it takes.
    pub(crate) fn open(open: &Arc<AtomicUsize>) -> Option<Self> {
        let slot = Slot::take(open, MAX_STAGES)?;
        let memory = MemoryOptions::new(MEMORY).allocate().ok()?;
        let (read, write) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK).ok()?;
        rustix::pipe::fcntl_setpipe_size(&write, PIPE_BYTES).ok()?;
        Some(Self {
            memory,
            pipe: Some((read, write)),
            filled: VecDeque::with_capacity(BLOCKS),
            next: 0,
            rest: HostView::empty(),
            piped: 0,
            _slot: slot,
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
        let Ok(block) = self.memory.host_view().slice(self.next * SEND_MOST, SEND_MOST) else { return 0 };
        let mut len = 0;
        for view in views {
            let Ok(room) = block.slice(len, SEND_MOST - len) else { break };
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

    /// Sends what is pending, and returns how many bytes of it went.
    ///
    /// # Errors
    /// `WouldBlock` when the socket takes nothing now; whatever else the socket says.
    pub(crate) fn flush(&mut self, socket: BorrowedFd<'_>) -> io::Result<usize> {
        let mut went = 0;
        while self.pending() > 0 {
            match self.send(socket) {
                Ok(sent) => {
                    went += sent;
                    self.rest = self.rest.slice(sent, self.rest.len() - sent).unwrap_or(HostView::empty());
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock && went > 0 => break,
                Err(error) if error.kind() != io::ErrorKind::WouldBlock && self.pipe.is_some() => {
                    // Not every sandbox has these calls; if it is the connection, the next call says so too.
                    tracing::debug!(%error, "sending by reference failed; sending by copy");
                    self.pipe = None;
                }
                Err(error) => return Err(error),
            }
        }
        Ok(went)
    }

    fn send(&mut self, socket: BorrowedFd<'_>) -> io::Result<usize> {
        let Some((read, write)) = &self.pipe else {
            // SAFETY: of a block, which is ours.
            return unsafe { sys::send_from(socket, &[self.rest]) };
        };
        if self.piped == 0 {
            // SAFETY: the block is allocated. It is filled anew only when the peer has taken these bytes.
            self.piped = unsafe { sys::refer(write.as_fd(), self.rest) }?;
        }
        let sent = sys::splice(read.as_fd(), socket, self.piped)?;
        self.piped -= sent;
        Ok(sent)
    }

    /// The peer has taken the stream up to `position`.
    pub(crate) fn taken(&mut self, position: u64) {
        while self.filled.front().is_some_and(|end| *end <= position) {
            self.filled.pop_front();
        }
    }
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

    fn stage() -> Stage {
        Stage::open(&Arc::default()).unwrap()
    }

    fn fill(stage: &mut Stage, position: u64, byte: u8, len: usize) -> usize {
        // SAFETY: the vector lives through the call.
        unsafe { stage.fill(position, &[HostView::of(&vec![byte; len])]) }
    }

    #[test]
    fn a_block_is_filled_anew_only_when_the_peer_has_taken_it() {
        let (a, mut b) = pair();
        let mut stage = stage();
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
        let mut stage = stage();
        let reader = std::thread::spawn(move || b.read_exact(&mut vec![0; SEND_MOST]).unwrap());
        assert_eq!(fill(&mut stage, 0, 1, SEND_MOST + 1), SEND_MOST);
        while stage.pending() > 0 {
            if let Err(error) = stage.flush(a.as_fd()) {
                assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
            }
        }
        reader.join().unwrap();
    }

    #[test]
    fn without_the_pipe_everything_goes_on_by_copy() {
        let (a, mut b) = pair();
        let mut stage = stage();
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
    fn the_number_of_stages_is_bounded() {
        let open = Arc::default();
        let mut stages: Vec<_> = (0..).map_while(|_| Stage::open(&open)).collect();
        assert_eq!(stages.len(), MAX_STAGES);
        stages.pop();
        assert!(Stage::open(&open).is_some());
    }
}
