//! The two directions of a connection as streams of bytes: what is sent, and what is taken.

use std::io;
use std::net::{SocketAddr, TcpStream};
use std::os::fd::BorrowedFd;
use std::sync::atomic::AtomicUsize;
use std::sync::{Arc, LazyLock};

use posthorse_core::{Error, ErrorKind, HostView, Result};
use rustix::net::sockopt::set_tcp_congestion;

use crate::config::TcpConfig;
use crate::stage::{SHORTEST, Stage};
use crate::sys;
use crate::warmth::Warmth;
use crate::wire::TAKEN_EVERY;

/// After how many ticks of the clock without a byte a stage is given back.
const IDLE_TICKS: u8 = 20;

/// How many stages this process has.
static STAGES: LazyLock<Arc<AtomicUsize>> = LazyLock::new(Arc::default);

/// Whether this end of a connection would say what it has taken, so that the other may send by reference: both have one
/// address, as the ends of a connection within a host do. The other end has to find that too, since a translator of
/// addresses can make it look so to one of them.
pub(crate) fn tells_taken(socket: &TcpStream, config: &TcpConfig) -> bool {
    let ip = |address: io::Result<SocketAddr>| address.ok().map(|address| address.ip().to_canonical());
    let own = ip(socket.local_addr());
    config.by_reference && own.is_some() && own == ip(socket.peer_addr())
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
    /// Where we were at the last tick, and how many ticks before that.
    rested: u64,
    idle_ticks: u8,
}

#[derive(Debug)]
enum Staging {
    /// Everything is sent from where it lies.
    Never,
    /// There was nothing long to send yet, or not for some time.
    Possible,
    /// There was.
    Wanted,
    /// The system did not give it.
    Refused,
    Open(Box<Stage>),
}

/// What a call of [`Outflow::send`] came to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Sent {
    /// How many bytes of the views may be changed now: they are sent, or pending.
    pub(crate) done: usize,
    /// How many bytes the socket took, be they of the views or pending before.
    pub(crate) went: usize,
}

impl Outflow {
    /// For a connection on which everything is sent from where it lies.
    pub(crate) fn plain() -> Self {
        Self {
            staging: Staging::Never,
            opening: 0,
            position: 0,
            taken: 0,
            warmth: Warmth::default(),
            rested: 0,
            idle_ticks: 0,
        }
    }

    /// For a connection on which so many bytes of our opening are still to be sent, and whose ends both say what they
    /// have taken or neither.
    pub(crate) fn new(socket: &TcpStream, opening: usize, tells_taken: bool) -> Self {
        if !tells_taken {
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

    /// Makes what sending needs and takes a while to make. Not for the threads of callers.
    pub(crate) fn prepare(&mut self) {
        if matches!(self.staging, Staging::Wanted) {
            self.staging =
                Stage::open(&STAGES).map_or(Staging::Refused, |stage| Staging::Open(Box::new(stage)));
        }
    }

    /// Time has passed: gives back what was not used, and tries again for what was refused.
    pub(crate) fn tick(&mut self) {
        let idle = self.position == self.rested && self.pending() == 0;
        self.rested = self.position;
        self.idle_ticks = if idle { self.idle_ticks.saturating_add(1) } else { 0 };
        match self.staging {
            Staging::Refused => self.staging = Staging::Possible,
            Staging::Open(_) if self.idle_ticks >= IDLE_TICKS => self.staging = Staging::Possible,
            _ => {}
        }
    }

    /// Sends from `views` without waiting, behind what is pending.
    ///
    /// # Errors
    /// `WouldBlock` when the socket takes nothing now; whatever else the socket says.
    ///
    /// # Safety
    /// Every view is allocated during the call, and nothing that Rust knows of writes to it.
    pub(crate) unsafe fn send(&mut self, socket: BorrowedFd<'_>, views: &[HostView]) -> io::Result<Sent> {
        let went = self.flush(socket)?;
        let len = views.iter().map(|view| view.len()).sum::<usize>();
        if self.pending() > 0 || len == 0 {
            return Ok(Sent { done: 0, went });
        }
        // SAFETY: the caller's promise.
        let staged = if len >= SHORTEST { unsafe { self.stage(views) } } else { 0 };
        let sent = if staged > 0 {
            self.count(staged);
            self.flush(socket)
        } else {
            // SAFETY: the caller's promise.
            unsafe { self.copy(socket, views) }.inspect(|copied| self.count(*copied))
        };
        match sent {
            Ok(now) => Ok(Sent { done: if staged > 0 { staged } else { now }, went: went + now }),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock && staged + went > 0 => {
                Ok(Sent { done: staged, went })
            }
            Err(error) => Err(error),
        }
    }

    /// # Safety
    /// As for [`Outflow::send`].
    unsafe fn stage(&mut self, views: &[HostView]) -> usize {
        match &mut self.staging {
            // SAFETY: the caller's promise.
            Staging::Open(stage) if self.opening == 0 => unsafe { stage.fill(self.position, views) },
            Staging::Possible => {
                self.staging = Staging::Wanted;
                0
            }
            _ => 0,
        }
    }

    /// # Safety
    /// As for [`Outflow::send`].
    unsafe fn copy(&mut self, socket: BorrowedFd<'_>, views: &[HostView]) -> io::Result<usize> {
        let mut before = 0;
        for view in views {
            // SAFETY: the caller's promise.
            unsafe { self.warmth.load(before, *view) };
            before += view.len();
        }
        // SAFETY: the caller's promise.
        unsafe { sys::send_from(socket, views) }
    }

    fn count(&mut self, done: usize) {
        let opening = done.min(self.opening);
        self.opening -= opening;
        self.position += (done - opening) as u64;
        self.warmth.sent(done);
    }

    fn flush(&mut self, socket: BorrowedFd<'_>) -> io::Result<usize> {
        if let Staging::Open(stage) = &mut self.staging { stage.flush(socket) } else { Ok(0) }
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
    /// For a connection whose ends both say what they have taken or neither.
    pub(crate) const fn new(tells_taken: bool) -> Self {
        Self { tells: tells_taken, taken: 0, told: 0 }
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
    use std::net::{IpAddr, SocketAddr, TcpListener};
    use std::os::fd::AsFd;
    use std::sync::atomic::Ordering;
    use std::sync::mpsc;

    use socket2::{Domain, SockAddr, Socket, Type};

    use super::*;
    use crate::stage::BLOCKS;

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
    /// says what it has taken whenever `tells` says so. Returns how many calls went by reference.
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
        let mut flow = Outflow::new(&a, 0, true);
        let (mut at, mut referred) = (0, 0);
        while at < TOTAL || flow.pending() > 0 {
            flow.prepare();
            for bytes in told.try_iter() {
                flow.taken(bytes).unwrap();
            }
            let by_reference = matches!(flow.staging, Staging::Open(_)) && !flow.is_short();
            let mut memory = part(at, (1 + (at * 31) % 400_000).min(TOTAL - at) as usize);
            let (head, tail) = memory.split_at(memory.len() / 3);
            // SAFETY: the vector lives through the call.
            match unsafe { flow.send(a.as_fd(), &[HostView::of(head), HostView::of(tail)]) } {
                Ok(sent) => {
                    at += sent.done as u64;
                    referred += usize::from(by_reference && sent.done > 0 && memory.len() >= SHORTEST);
                }
                Err(error) => assert_eq!(error.kind(), IoErrorKind::WouldBlock),
            }
            memory.fill(0xee);
        }
        reader.join().unwrap();
        referred
    }

    #[test]
    fn every_byte_arrives_as_it_was_whatever_the_peer_says_it_has_taken_and_when() {
        assert!(stream(|_| true) > BLOCKS);
        stream(|at| at % 5 == 0);
        // A peer that never says anything is sent to all the same, though each block is filled only once.
        assert_eq!(stream(|_| false), BLOCKS);
    }

    #[test]
    fn only_what_was_sent_can_have_been_taken() {
        let (a, _b) = pair(HERE, HERE);
        let mut flow = Outflow::new(&a, 5, true);
        // SAFETY: the vectors live through the calls.
        let send = |flow: &mut Outflow, len: usize| unsafe {
            flow.prepare();
            flow.send(a.as_fd(), &[HostView::of(&vec![1; len])]).unwrap().done
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
    fn the_peer_is_told_after_so_many_bytes_if_that_was_agreed() {
        let mut inflow = Inflow::new(true);
        inflow.received(TAKEN_EVERY as usize - 1);
        assert_eq!(inflow.tell(), None);
        inflow.received(2);
        assert!(inflow.is_due());
        assert_eq!((inflow.tell(), inflow.tell()), (Some(TAKEN_EVERY + 1), None));
        let mut inflow = Inflow::new(false);
        inflow.received(2 * TAKEN_EVERY as usize);
        assert_eq!(inflow.tell(), None);
    }

    #[test]
    fn it_is_agreed_between_two_ends_with_one_address_unless_it_is_not_wanted() {
        let config = TcpConfig::default();
        let (a, b) = pair(HERE, HERE);
        assert!(tells_taken(&a, &config) && tells_taken(&b, &config));
        assert!(!tells_taken(&a, &TcpConfig { by_reference: false, ..config.clone() }));
        let (a, b) = pair([127, 0, 0, 2], HERE);
        assert!(!tells_taken(&a, &config) && !tells_taken(&b, &config));
        let mut flow = Outflow::new(&a, 0, false);
        for _ in 0..2 {
            flow.prepare();
            // SAFETY: the vector lives through the call.
            unsafe { flow.send(a.as_fd(), &[HostView::of(&vec![1; SHORTEST])]) }.unwrap();
        }
        assert!(matches!(flow.staging, Staging::Never));
    }

    #[test]
    fn a_stage_is_opened_for_what_is_long_and_given_back_when_it_is_idle() {
        let (a, _b) = pair(HERE, HERE);
        let mut flow = Outflow::new(&a, 0, true);
        let send = |flow: &mut Outflow, len: usize| {
            // SAFETY: the vector lives through the call.
            unsafe { flow.send(a.as_fd(), &[HostView::of(&vec![1; len])]) }.unwrap();
            flow.prepare();
        };
        send(&mut flow, SHORTEST - 1);
        assert!(matches!(flow.staging, Staging::Possible));
        send(&mut flow, SHORTEST);
        assert!(matches!(flow.staging, Staging::Open(_)));
        for _ in 0..IDLE_TICKS {
            flow.tick();
        }
        assert!(
            matches!(flow.staging, Staging::Open(_)),
            "the first of these ticks ended a time that was not idle"
        );
        flow.tick();
        assert!(matches!(flow.staging, Staging::Possible));
        flow.staging = Staging::Refused;
        send(&mut flow, SHORTEST);
        assert!(matches!(flow.staging, Staging::Refused));
        flow.tick();
        send(&mut flow, SHORTEST);
        assert!(matches!(flow.staging, Staging::Open(_)));
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
        let mut flow = Outflow::new(&a, 0, true);
        flow.staging = Staging::Wanted;
        flow.prepare();
        assert!(matches!(flow.staging, Staging::Open(_)));
        drop(b);
        let memory = vec![1; 2 * SHORTEST];
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
