//! The two directions of a connection as streams of bytes: what is sent, and what is taken.

use std::io;
use std::net::{IpAddr, TcpStream};
use std::os::fd::BorrowedFd;

use posthorse_core::{Error, ErrorKind, HostView, Result};
use rustix::net::sockopt::set_tcp_congestion;

use crate::stage::Stage;
use crate::sys;
use crate::warmth::Warmth;
use crate::wire::TAKEN_EVERY;

/// Less than this is sent from where it lies.
const STAGED: usize = 64 << 10;

/// Whether the two ends of a connection have one address, and so are on one host.
fn is_within_a_host(socket: &TcpStream) -> bool {
    let canonical = |address: io::Result<std::net::SocketAddr>| -> Option<IpAddr> {
        address.ok().map(|address| address.ip().to_canonical())
    };
    let own = canonical(socket.local_addr());
    own.is_some() && own == canonical(socket.peer_addr())
}

/// What goes out on a connection.
#[derive(Debug)]
pub(crate) struct Outflow {
    staging: Staging,
    /// Bytes of our opening that are not yet sent: they do not count.
    opening: usize,
    /// How many bytes we took upon us to send, and how many of them the peer has taken.
    position: u64,
    taken: u64,
    warmth: Warmth,
}

#[derive(Debug)]
enum Staging {
    /// Everything is sent from where it lies.
    None,
    /// It begins with the first long call.
    Possible,
    Open(Box<Stage>),
}

impl Outflow {
    /// For a connection on which everything is sent from where it lies.
    pub(crate) fn plain() -> Self {
        Self { staging: Staging::None, opening: 0, position: 0, taken: 0, warmth: Warmth::default() }
    }

    /// For a connection on which so many bytes of our opening are still to be sent.
    pub(crate) fn of(socket: &TcpStream, opening: usize) -> Self {
        if !is_within_a_host(socket) {
            return Self { opening, ..Self::plain() };
        }
        // Nothing is lost within a host. A congestion control that paces what is sent, as BBR does, only costs timers
        // here; this one paces nothing and is there in every Linux. Refused, the default stays.
        let _ = set_tcp_congestion(socket, "reno");
        Self { staging: Staging::Possible, opening, ..Self::plain() }
    }

    /// How many bytes were taken over by [`Outflow::send`] and are still to be sent.
    pub(crate) fn pending(&self) -> usize {
        if let Staging::Open(stage) = &self.staging { stage.pending() } else { 0 }
    }

    /// Whether the next word of the peer of what it has taken would make sending faster.
    pub(crate) fn is_short(&self) -> bool {
        matches!(&self.staging, Staging::Open(stage) if stage.is_short())
    }

    /// Sends from `views` without waiting, behind what is pending. Returns how many bytes it is done with: they may be
    /// changed, though some may still be pending.
    ///
    /// # Errors
    /// `WouldBlock` when the socket takes nothing now; whatever else the socket says.
    ///
    /// # Safety
    /// Every view is allocated during the call.
    pub(crate) unsafe fn send(&mut self, socket: BorrowedFd<'_>, views: &[HostView]) -> io::Result<usize> {
        self.flush(socket)?;
        // SAFETY: the caller's promise.
        let mut done = unsafe { self.stage(views) };
        if done > 0 {
            match self.flush(socket) {
                Err(error) if error.kind() != io::ErrorKind::WouldBlock => return Err(error),
                _ => {}
            }
        } else if !views.is_empty() {
            let mut before = 0;
            for view in views {
                // SAFETY: the caller's promise.
                unsafe { self.warmth.load(before, *view) };
                before += view.len();
            }
            // SAFETY: the caller's promise.
            done = unsafe { sys::send_from(socket, views) }?;
            self.warmth.sent(done);
        }
        let opening = done.min(self.opening);
        self.opening -= opening;
        self.position += (done - opening) as u64;
        Ok(done)
    }

    /// # Safety
    /// As for [`Outflow::send`].
    unsafe fn stage(&mut self, views: &[HostView]) -> usize {
        if self.opening > 0 || views.iter().map(|view| view.len()).sum::<usize>() < STAGED {
            return 0;
        }
        if matches!(self.staging, Staging::Possible) {
            self.staging = Stage::open().map_or(Staging::None, |stage| Staging::Open(Box::new(stage)));
        }
        match &mut self.staging {
            // SAFETY: the caller's promise.
            Staging::Open(stage) => unsafe { stage.fill(self.position, views) },
            Staging::None | Staging::Possible => 0,
        }
    }

    fn flush(&mut self, socket: BorrowedFd<'_>) -> io::Result<()> {
        if let Staging::Open(stage) = &mut self.staging { stage.flush(socket) } else { Ok(()) }
    }

    /// The peer says that it has taken so many bytes.
    ///
    /// # Errors
    /// `Malformed` when they are more than were sent, or fewer than it said before.
    pub(crate) fn taken(&mut self, bytes: u64) -> Result<()> {
        let sent = self.position - self.pending() as u64;
        if !(self.taken..=sent).contains(&bytes) {
            let text = format!("the peer has taken {bytes} bytes; accepted: {} to {sent}", self.taken);
            return Err(Error::new(ErrorKind::Malformed, text));
        }
        self.taken = bytes;
        if let Staging::Open(stage) = &mut self.staging {
            stage.taken(bytes);
        }
        Ok(())
    }
}

/// What comes in on a connection, behind the peer's opening.
#[derive(Debug, Default)]
pub(crate) struct Inflow {
    /// Whether the peer is told what we have taken.
    tells: bool,
    taken: u64,
    told: u64,
}

impl Inflow {
    pub(crate) fn of(socket: &TcpStream) -> Self {
        Self { tells: is_within_a_host(socket), taken: 0, told: 0 }
    }

    /// So many bytes were received.
    pub(crate) const fn received(&mut self, bytes: usize) {
        self.taken += bytes as u64;
    }

    /// Whether it is time to tell the peer.
    pub(crate) const fn is_due(&self) -> bool {
        self.tells && self.taken - self.told >= TAKEN_EVERY
    }

    /// How many bytes were taken, when it is time to tell the peer: that is then done.
    pub(crate) fn tell(&mut self) -> Option<u64> {
        let due = self.is_due();
        if due {
            self.told = self.taken;
        }
        due.then_some(self.taken)
    }
}

#[cfg(test)]
mod tests {
    use std::io::{ErrorKind as IoErrorKind, Read};
    use std::net::{SocketAddr, TcpListener};
    use std::os::fd::AsFd;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::mpsc;

    use socket2::{Domain, SockAddr, Socket, Type};

    use super::*;

    const HERE: [u8; 4] = [127, 0, 0, 1];

    /// A connection between two addresses of this host, whose first end does not block.
    fn pair(from: [u8; 4], to: [u8; 4]) -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind((IpAddr::from(to), 0)).unwrap();
        let a = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
        a.bind(&SockAddr::from(SocketAddr::from((from, 0)))).unwrap();
        a.connect(&listener.local_addr().unwrap().into()).unwrap();
        a.set_nonblocking(true).unwrap();
        (a.into(), listener.accept().unwrap().0)
    }

    /// Part of a stream in which no stretch is like another.
    fn part(at: u64, len: usize) -> Vec<u8> {
        (at..at + len as u64).map(|at| (at.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8).collect()
    }

    /// Sends a stream in calls of many lengths, each from memory that is overwritten right behind it, to a reader that
    /// says what it has taken whenever `tells` says so. Returns how often the sender wanted to know.
    fn stream(tells: impl Fn(u64) -> bool + Send + 'static) -> usize {
        const TOTAL: u64 = 24 << 20;
        let (a, mut b) = pair(HERE, HERE);
        let (tell, told) = mpsc::channel();
        let reader = std::thread::spawn(move || {
            let (mut at, mut buffer) = (0, vec![0; 200_000]);
            while at < TOTAL {
                let len = 1 + (at * 7919) % buffer.len() as u64;
                let got = &mut buffer[..len.min(TOTAL - at) as usize];
                b.read_exact(got).unwrap();
                assert!(*got == part(at, got.len()), "near {at}");
                at += got.len() as u64;
                if tells(at) {
                    tell.send(at).unwrap();
                }
            }
        });
        let mut flow = Outflow::of(&a, 0);
        let (mut at, mut short) = (0, 0);
        while at < TOTAL || flow.pending() > 0 {
            for bytes in told.try_iter() {
                flow.taken(bytes).unwrap();
            }
            short += usize::from(flow.is_short());
            let mut memory = part(at, (1 + (at * 31) % 400_000).min(TOTAL - at) as usize);
            let (head, tail) = memory.split_at(memory.len() / 3);
            // SAFETY: the vector lives through the call.
            match unsafe { flow.send(a.as_fd(), &[HostView::of(head), HostView::of(tail)]) } {
                Ok(done) => at += done as u64,
                Err(error) => assert_eq!(error.kind(), IoErrorKind::WouldBlock),
            }
            memory.fill(0xee);
        }
        reader.join().unwrap();
        assert!(matches!(flow.staging, Staging::Open(_)));
        short
    }

    #[test]
    fn every_byte_arrives_as_it_was_whatever_the_peer_says_it_has_taken_and_when() {
        stream(|_| true);
        stream(|at| at % 5 == 0);
        // A peer that never says anything is sent to all the same.
        assert!(stream(|_| false) > 0);
    }

    #[test]
    fn only_what_was_sent_can_have_been_taken() {
        let (a, _b) = pair(HERE, HERE);
        let mut flow = Outflow::of(&a, 5);
        // SAFETY: the vectors live through the calls.
        let send = |flow: &mut Outflow, len: usize| unsafe {
            flow.send(a.as_fd(), &[HostView::of(&vec![1; len])]).unwrap()
        };
        // The first five bytes are our opening.
        assert_eq!(send(&mut flow, 105), 105);
        flow.taken(60).unwrap();
        flow.taken(100).unwrap();
        for bytes in [0, 99, 101, u64::MAX] {
            let error = flow.taken(bytes).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Malformed);
            assert!(error.message().contains("accepted: 100 to 100"), "{error}");
        }
        // What the socket had no room for yet was not sent.
        while flow.pending() == 0 {
            // Early, so that there is always a block.
            flow.taken(flow.position).unwrap();
            send(&mut flow, 300_000);
        }
        assert!(flow.taken(flow.position).is_err());
        flow.taken(flow.position - flow.pending() as u64).unwrap();
    }

    #[test]
    fn the_peer_is_told_after_so_many_bytes_if_it_is_on_this_host() {
        let (a, b) = pair(HERE, HERE);
        let mut inflow = Inflow::of(&b);
        inflow.received(TAKEN_EVERY as usize - 1);
        assert_eq!(inflow.tell(), None);
        inflow.received(2);
        assert!(inflow.is_due());
        assert_eq!((inflow.tell(), inflow.tell()), (Some(TAKEN_EVERY + 1), None));
        drop((a, b));
        let (a, b) = pair([127, 0, 0, 2], HERE);
        let (mut outflow, mut inflow) = (Outflow::of(&a, 0), Inflow::of(&b));
        inflow.received(2 * TAKEN_EVERY as usize);
        assert_eq!(inflow.tell(), None, "they have two addresses");
        // SAFETY: the vector lives through the call.
        unsafe { outflow.send(a.as_fd(), &[HostView::of(&vec![1; 2 * STAGED])]) }.unwrap();
        assert!(matches!(outflow.staging, Staging::None));
    }

    static SIGNALS: AtomicUsize = AtomicUsize::new(0);

    extern "C" fn count(_: libc::c_int) {
        SIGNALS.fetch_add(1, Ordering::Relaxed);
    }

    #[test]
    fn no_signal_says_that_the_peer_has_closed_the_connection() {
        // SAFETY: the handler does nothing but count, and Rust's own choice is restored.
        let before = unsafe { libc::signal(libc::SIGPIPE, count as *const () as libc::sighandler_t) };
        let (a, b) = pair(HERE, HERE);
        drop(b);
        let mut flow = Outflow::of(&a, 0);
        let memory = vec![1; 2 * STAGED];
        let error = loop {
            // SAFETY: the vector lives through the call.
            match unsafe { flow.send(a.as_fd(), &[HostView::of(&memory)]) } {
                Ok(_) => {}
                Err(error) => break error,
            }
        };
        // SAFETY: as above.
        unsafe { libc::signal(libc::SIGPIPE, before) };
        assert!(matches!(error.kind(), IoErrorKind::BrokenPipe | IoErrorKind::ConnectionReset), "{error}");
        assert_eq!(SIGNALS.load(Ordering::Relaxed), 0);
    }
}
