//! What the holder of a lane's baton does: dial, greet, send, receive, and judge a connection.

use std::io;
use std::net::{SocketAddr, TcpStream};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use posthorse_core::{Completion, Error, ErrorKind, Fault, Result};
use rustix::event::epoll::EventFlags;
use socket2::{Domain, Socket, Type};

use crate::config::TcpConfig;
use crate::flow::{self, Inflow, Outflow};
use crate::hello::{Answer, Call, LaneKey, told_by_peer};
use crate::intake::{DIRECT, Intake};
use crate::lane::{Driver, Lane, want};
use crate::lane_state::Piece;
use crate::outbox::{MAX_FRAMES, Outbox};
use crate::placement::{Place, Placed, Placement};
use crate::sys::{SEND_CHUNK, SEND_MOST};
use crate::watched::Watched;
use crate::wire::{self, OPENING_BYTES, RESPONSE_BYTES, Request, Response};

/// How many bytes are sent or received in one go before other lanes have their turn.
const TURN: usize = 8 << 20;
/// How many bytes a caller of `submit` sends before it leaves the rest to the reactor.
const CALLER_TURN: usize = 1 << 20;
/// How many bytes are received in one call between payloads.
const RECEIVE: usize = 256 << 10;

#[derive(Debug)]
enum Link {
    /// To be dialled.
    None,
    Connecting {
        socket: Watched<TcpStream>,
        until: Instant,
    },
    Greeting {
        socket: Watched<TcpStream>,
        until: Instant,
    },
    Up {
        socket: Watched<TcpStream>,
    },
    Ended,
}

/// The I/O half of a lane.
#[derive(Debug)]
pub(crate) struct LaneIo {
    link: Link,
    interest: EventFlags,
    outbox: Outbox,
    intake: Intake,
    inflow: Inflow,
    /// The READ whose data is coming in, and where it goes.
    placement: Option<(u64, Placement)>,
    /// Whether long payloads are coming in, so that receiving ahead would only copy them.
    long: bool,
    /// The last id that was sent whole on this connection.
    sent: u64,
    pieces: Vec<Piece>,
    done: Vec<Completion>,
    /// Which of the peer's addresses is used.
    address: usize,
    /// Whether the lane was ever up.
    opened: bool,
    /// How often it may be made again before a slice is completed.
    attempts: u32,
    /// Since when the connection is up.
    up_since: Instant,
    heard: Instant,
    silent_ticks: u32,
    spoke: bool,
    /// What a caller met on the connection.
    fault: Option<Error>,
    /// Set while the connection is made once more only to learn that the far end is quiet.
    ending: Option<Error>,
}

impl LaneIo {
    pub(crate) fn new(config: &TcpConfig) -> Self {
        Self {
            link: Link::None,
            interest: EventFlags::empty(),
            outbox: Outbox::new(),
            intake: Intake::new(),
            inflow: Inflow::default(),
            placement: None,
            long: false,
            sent: 0,
            pieces: Vec::with_capacity(MAX_FRAMES),
            done: Vec::with_capacity(config.window_slots),
            address: 0,
            opened: false,
            attempts: config.reconnect_attempts,
            up_since: Instant::now(),
            heard: Instant::now(),
            silent_ticks: 0,
            spoke: false,
            fault: None,
            ending: None,
        }
    }

    /// Does what is wanted. Says whether there is more to send at once.
    pub(crate) fn run(&mut self, lane: &Arc<Lane>, wants: u8, driver: Driver) -> bool {
        if matches!(self.link, Link::Ended) {
            // Something may have been pushed while the lane was ending.
            return false;
        }
        if driver == Driver::Caller {
            return self.send_for_caller(lane);
        }
        if wants & want::END != 0 {
            self.begin_end(lane);
        }
        let mut more = false;
        match self.advance(lane, wants) {
            Ok(yes) => more = yes,
            Err(error) => self.broke(lane, error),
        }
        self.report(lane);
        more
    }

    /// As [`LaneIo::run`] for a caller, who leaves to the reactor whatever there is to report.
    fn send_for_caller(&mut self, lane: &Lane) -> bool {
        if self.fault.is_some() {
            return false;
        }
        match self.send(lane, CALLER_TURN) {
            Ok(more) => more || lane.with_state(|state| state.is_writable()),
            Err(error) => {
                self.fault = Some(error);
                true
            }
        }
    }

    fn advance(&mut self, lane: &Arc<Lane>, wants: u8) -> Result<bool> {
        if let Some(error) = self.fault.take() {
            return Err(error);
        }
        if matches!(self.link, Link::None) {
            let until = Instant::now() + lane.core.config.connect_timeout();
            self.dial(lane, until)?;
        }
        if matches!(self.link, Link::Connecting { .. }) {
            self.finish_connecting(lane)?;
        }
        if matches!(self.link, Link::Greeting { .. }) {
            self.finish_greeting(lane)?;
        }
        match &self.link {
            Link::Up { .. } => {}
            Link::Connecting { until, .. } | Link::Greeting { until, .. } => {
                let connecting = matches!(self.link, Link::Connecting { .. });
                if wants & want::TICK != 0 && Instant::now() >= *until {
                    let what = if connecting { "the connection to be made" } else { "the peer's hello" };
                    return Err(self.silent(what));
                }
                return Ok(false);
            }
            Link::None | Link::Ended => return Ok(false),
        }
        if wants & want::IO != 0 {
            self.receive(lane)?;
        }
        if wants & want::TICK != 0 {
            self.tick(lane)?;
        }
        self.outbox.flow().prepare();
        self.send(lane, TURN)
    }

    fn silent(&self, waiting_for: &str) -> Error {
        if !self.opened {
            let text = format!("the peer did not answer while we waited for {waiting_for}");
            return Error::new(ErrorKind::PeerUnreachable, text);
        }
        let ms = self.heard.elapsed().as_millis();
        Error::new(ErrorKind::PeerGone, format!("the peer was silent for {ms} ms"))
    }

    /// A peer that is there answers a hello, be it with a refusal.
    fn no_hello(&self, why: &str) -> Error {
        let kind = if self.opened { ErrorKind::PeerGone } else { ErrorKind::PeerUnreachable };
        Error::new(kind, format!("the peer did not answer our hello: {why}"))
    }

    fn dial(&mut self, lane: &Arc<Lane>, until: Instant) -> Result<()> {
        let Some(address) = lane.core.addresses.get(self.address).copied() else {
            return Err(Error::new(ErrorKind::PeerUnreachable, "the peer has no address"));
        };
        let mut socket =
            dial(address, &lane.core.config).map_err(|error| unreachable(address, &error, self.opened))?;
        self.interest = EventFlags::IN | EventFlags::OUT;
        socket.watch(&lane.reactor, lane.key, self.interest)?;
        self.link = Link::Connecting { socket, until };
        Ok(())
    }

    fn finish_connecting(&mut self, lane: &Lane) -> Result<()> {
        let Link::Connecting { socket, until } = &self.link else { return Ok(()) };
        let address = lane.core.addresses.get(self.address).copied();
        let failed = |error: &io::Error| {
            let opened = self.opened;
            address
                .map_or_else(|| Error::os("connecting", error), |address| unreachable(address, error, opened))
        };
        if let Some(error) = socket.take_error().map_err(|error| failed(&error))? {
            return Err(failed(&error));
        }
        if socket.peer_addr().is_err() {
            return Ok(());
        }
        let call = Call {
            hello: lane.core.context.hello.clone(),
            name: lane.core.context.name.to_string(),
            key: LaneKey { session: lane.core.session, lane: lane.number },
            class: lane.class,
            liveness_ms: lane.core.config.liveness_ms,
            tells_taken: flow::tells_taken(socket, &lane.core.config),
        };
        let opening = call.encode()?;
        // A fresh socket's buffer has room for an opening.
        let sent = rustix::net::send(&**socket, &opening, rustix::net::SendFlags::NOSIGNAL)
            .map_err(|error| failed(&error.into()))?;
        if sent != opening.len() {
            return Err(Error::new(ErrorKind::PathFailed, "a fresh connection did not take our hello"));
        }
        let until = *until;
        if let Link::Connecting { socket, .. } = std::mem::replace(&mut self.link, Link::None) {
            self.link = Link::Greeting { socket, until };
        }
        self.set_interest(EventFlags::IN)
    }

    fn finish_greeting(&mut self, lane: &Arc<Lane>) -> Result<()> {
        let Link::Greeting { socket, .. } = &self.link else { return Ok(()) };
        let len = loop {
            let known = wire::opening_len(self.intake.bytes())?;
            let have = self.intake.bytes().len();
            let missing = known.unwrap_or(OPENING_BYTES).saturating_sub(have);
            if let (Some(len), 0) = (known, missing) {
                break len;
            }
            match self.intake.receive(socket.as_fd(), missing) {
                Ok(0) => return Err(self.no_hello("the peer closed the connection")),
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(error) => return Err(self.no_hello(&error.to_string())),
            }
        };
        let answer = Answer::decode(&self.intake.bytes()[OPENING_BYTES..len])?;
        self.intake.take(len);
        let (known, tells_taken) = match answer {
            Answer::Refused { code, message } => {
                return Err(told_by_peer(code, &message, ErrorKind::PeerRefused));
            }
            Answer::Welcome { hello, incarnation, known, tells_taken } => {
                lane.core.context.hello.agree(&hello)?;
                if lane.core.incarnation.is_some_and(|expected| expected != incarnation) {
                    return Err(Error::new(
                        ErrorKind::PeerRestarted,
                        "another life of the peer answers at its address than the descriptor describes",
                    ));
                }
                (known, tells_taken)
            }
        };
        if let Some(error) = self.ending.take() {
            // The peer ended the older connection before it answered: nothing of it can arrive any more.
            lane.with_state(|state| state.end_quiet(&error, &mut self.done));
            self.finish(lane);
            return Ok(());
        }
        if let Link::Greeting { socket, .. } = std::mem::replace(&mut self.link, Link::None) {
            let tells_taken = tells_taken && flow::tells_taken(&socket, &lane.core.config);
            self.outbox.reset(Outflow::new(&socket, 0, tells_taken));
            self.inflow = Inflow::new(tells_taken);
            self.link = Link::Up { socket };
        }
        self.up_since = Instant::now();
        (self.heard, self.silent_ticks, self.spoke) = (self.up_since, 0, true);
        lane.with_state(|state| state.relink(known, &mut self.done));
        if !std::mem::replace(&mut self.opened, true) {
            lane.core.lane_opened();
        }
        Ok(())
    }

    fn receive(&mut self, lane: &Lane) -> Result<()> {
        let mut turn = 0;
        while turn < TURN {
            let Link::Up { socket } = &self.link else { return Ok(()) };
            let socket = socket.as_fd();
            let limit = if self.long { RESPONSE_BYTES } else { RECEIVE };
            let received = match &mut self.placement {
                // SAFETY: the slice is still in flight, since only the holder of the baton completes it.
                Some((_, placement)) => unsafe { placement.receive(socket, &mut self.intake) },
                None => self.intake.receive(socket, limit),
            };
            let received = match received {
                Ok(0) => return Err(closed_by_peer()),
                Ok(received) => received,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(error) => return Err(broken(&error)),
            };
            self.heard = Instant::now();
            self.silent_ticks = 0;
            turn += received;
            self.inflow.received(received);
            let done = self.done.len();
            self.parse(lane)?;
            if self.done.len() > done {
                self.attempts = lane.core.config.reconnect_attempts;
            }
            if self.placement.is_none() && !self.long && received < RECEIVE {
                // The socket is most likely empty; if not, the reactor is told again.
                return Ok(());
            }
            if self.inflow.is_due() {
                // The peer is told before more is received.
                return Ok(());
            }
        }
        Ok(())
    }

    fn parse(&mut self, lane: &Lane) -> Result<()> {
        loop {
            if let Some((id, mut placement)) = self.placement.take() {
                // SAFETY: the slice is still in flight, since only the holder of the baton completes it.
                unsafe { placement.take_from(&mut self.intake) };
                if placement.left() > 0 {
                    self.placement = Some((id, placement));
                    return Ok(());
                }
                // SAFETY: as above.
                if unsafe { placement.finish() } != Placed::Whole {
                    let error =
                        Error::new(ErrorKind::Corrupt, "the bytes that arrived are not those that were sent");
                    lane.with_state(|state| state.spoil(id, error));
                }
            }
            let Some(header) = self.intake.peek::<RESPONSE_BYTES>() else { return Ok(()) };
            let response = Response::decode(header)?;
            if let Response::Ack { id } | Response::Nack { id, .. } | Response::Data { id, .. } = response
                && id > self.sent
            {
                let text = format!("the peer answers request {id}, which was not sent");
                return Err(Error::new(ErrorKind::Malformed, text));
            }
            match response {
                Response::Pong => self.intake.take(RESPONSE_BYTES),
                Response::Taken { bytes } => {
                    self.intake.take(RESPONSE_BYTES);
                    self.outbox.flow().taken(bytes)?;
                }
                Response::Ack { id } => {
                    self.intake.take(RESPONSE_BYTES);
                    lane.with_state(|state| state.acknowledge(id, &mut self.done))?;
                }
                Response::Nack { id, code, len } => {
                    let Some(message) = self.intake.bytes().get(RESPONSE_BYTES..RESPONSE_BYTES + len) else {
                        return Ok(());
                    };
                    let message = String::from_utf8_lossy(message);
                    let error = told_by_peer(code, &message, ErrorKind::Aborted).with_peer(&*lane.core.peer);
                    self.intake.take(RESPONSE_BYTES + len);
                    lane.with_state(|state| state.refuse(id, error, &mut self.done))?;
                }
                Response::Data { id, len, sum } => {
                    self.intake.take(RESPONSE_BYTES);
                    let view = lane.with_state(|state| state.receive(id, len))?;
                    self.long = len as usize >= DIRECT;
                    self.placement = Some((id, Placement::new(Place::Own(view), len as usize, sum)));
                }
            }
        }
    }

    /// Sends what there is, about `most` bytes. Says whether there is more to send at once.
    fn send(&mut self, lane: &Lane, most: usize) -> Result<bool> {
        let mut turn = 0;
        loop {
            let Link::Up { socket } = &self.link else { return Ok(false) };
            if self.outbox.wants_frames() {
                if let Some(bytes) = self.inflow.tell() {
                    self.outbox.push_bare(Request::Taken { bytes });
                }
                lane.with_state(|state| state.cut(&mut self.pieces, MAX_FRAMES, SEND_CHUNK));
                for piece in self.pieces.drain(..) {
                    // SAFETY: the slice is in flight until the holder of the baton completes it, who clears the
                    // outbox before, or finds by `sent` that it was sent whole.
                    unsafe { self.outbox.push(piece) };
                }
            }
            if self.outbox.is_empty() {
                self.set_interest(EventFlags::IN)?;
                return Ok(false);
            }
            // Of a flow that is short, the peer's word is looked for before more is sent.
            if turn >= most || (turn > 0 && self.outbox.flow().is_short()) {
                return Ok(true);
            }
            match self.outbox.send(socket.as_fd(), SEND_MOST) {
                Ok((went, ended)) => {
                    turn += went;
                    self.spoke = true;
                    self.sent = ended.unwrap_or(self.sent);
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    self.set_interest(EventFlags::IN | EventFlags::OUT)?;
                    return Ok(false);
                }
                Err(error) => return Err(broken(&error)),
            }
        }
    }

    /// Time has passed: is the peer there, and does it know that we are?
    fn tick(&mut self, lane: &Lane) -> Result<()> {
        let liveness = lane.core.config.liveness();
        // While there is time to make the connection again, half of the liveness time is for that.
        let patience = if self.attempts > 0 { liveness / 2 } else { liveness - lane.core.config.tick() };
        self.silent_ticks += 1;
        // Counted in ticks too: after our own process was stopped, the clock alone would accuse the peer.
        if self.silent_ticks > 2 && self.heard.elapsed() >= patience {
            return Err(self.silent("an answer"));
        }
        // Bytes alone are no progress: a slice begins anew on each connection, and might for ever. Where there is none,
        // a connection that has lasted is.
        if self.up_since.elapsed() >= liveness && !lane.with_state(|state| state.owed()) {
            self.attempts = lane.core.config.reconnect_attempts;
        }
        self.outbox.flow().tick();
        if !self.spoke && self.outbox.is_empty() {
            self.outbox.push_bare(Request::Ping);
        }
        self.spoke = false;
        Ok(())
    }

    /// The connection is of no use any more. Makes it again, or ends the lane and takes the path down.
    fn broke(&mut self, lane: &Arc<Lane>, mut error: Error) {
        loop {
            self.drop_link();
            if let Some(ending) = self.ending.take() {
                lane.with_state(|state| state.end(&ending, false, &mut self.done));
                return self.finish(lane);
            }
            let now = Instant::now();
            let until = if !self.opened && self.address + 1 < lane.core.addresses.len() {
                self.address += 1;
                now + lane.core.config.connect_timeout()
            } else if self.opened && self.attempts > 0 && worth_another(&error) {
                self.attempts -= 1;
                let liveness = lane.core.config.liveness();
                let since = if error.kind() == ErrorKind::PeerGone { self.heard } else { now };
                since + liveness.saturating_sub(lane.core.config.tick())
            } else {
                error = error.with_peer(&*lane.core.peer);
                break;
            };
            tracing::debug!(peer = %lane.core.peer, lane = lane.number, %error, "making a lane again");
            match self.dial(lane, until) {
                Ok(()) => return,
                Err(next) => error = next.context(error.message()),
            }
        }
        // The path's first reason stands; this lane's own slices get this lane's.
        lane.with_state(|state| state.end(&error, false, &mut self.done));
        self.finish(lane);
        lane.core.take_down(&error, false);
    }

    /// The path is down.
    fn begin_end(&mut self, lane: &Arc<Lane>) {
        let Some((error, confirm)) = lane.core.ending() else { return };
        self.drop_link();
        let confirm = confirm && self.opened && self.ending.is_none();
        let owed = lane.with_state(|state| {
            state.end(&error, confirm, &mut self.done);
            state.owed()
        });
        if !owed {
            return self.finish(lane);
        }
        self.ending = Some(error);
        // What can be said at once is said before the peer is asked about the rest.
        self.report(lane);
        let until = Instant::now() + lane.core.config.liveness();
        if let Err(failure) = self.dial(lane, until) {
            self.broke(lane, failure);
        }
    }

    fn finish(&mut self, lane: &Lane) {
        self.drop_link();
        self.link = Link::Ended;
        self.report(lane);
        lane.set_ended();
    }

    /// Closes the connection at once, and forgets what was on its way.
    fn drop_link(&mut self) {
        self.outbox.reset(Outflow::plain());
        self.intake.clear();
        self.placement = None;
        self.sent = 0;
        self.fault = None;
        if let Link::Connecting { socket, .. } | Link::Greeting { socket, .. } | Link::Up { socket } =
            std::mem::replace(&mut self.link, Link::None)
        {
            // Nothing that is still in the socket's buffer is worth sending.
            let _ = socket2::SockRef::from(&*socket).set_linger(Some(Duration::ZERO));
        }
    }

    fn report(&mut self, lane: &Lane) {
        if !self.done.is_empty() {
            lane.core.context.events.completed(&self.done);
            self.done.clear();
        }
        if lane.with_state(|state| state.take_writable()) {
            lane.core.context.events.writable(lane.core.id);
        }
    }

    fn set_interest(&mut self, interest: EventFlags) -> Result<()> {
        if self.interest == interest {
            return Ok(());
        }
        if let Link::Connecting { socket, .. } | Link::Greeting { socket, .. } | Link::Up { socket } =
            &self.link
        {
            socket.rewatch(interest)?;
            self.interest = interest;
        }
        Ok(())
    }
}

fn dial(address: SocketAddr, config: &TcpConfig) -> io::Result<Watched<TcpStream>> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM.nonblocking().cloexec(), None)?;
    tune(&socket, config)?;
    match socket.connect(&address.into()) {
        Ok(()) => {}
        Err(error) if error.raw_os_error() == Some(libc::EINPROGRESS) => {}
        Err(error) => return Err(error),
    }
    Ok(Watched::new(socket.into()))
}

/// What every data connection is set to, at either end.
///
/// # Errors
/// As `setsockopt(2)`.
pub(crate) fn tune(socket: &Socket, config: &TcpConfig) -> io::Result<()> {
    socket.set_tcp_nodelay(true)?;
    if config.socket_buffer_bytes > 0 {
        socket.set_send_buffer_size(config.socket_buffer_bytes)?;
        socket.set_recv_buffer_size(config.socket_buffer_bytes)?;
    }
    Ok(())
}

fn worth_another(error: &Error) -> bool {
    matches!(error.kind(), ErrorKind::PathFailed | ErrorKind::PeerGone)
}

fn closed_by_peer() -> Error {
    Error::new(ErrorKind::PathFailed, "the peer closed the connection")
}

fn broken(error: &io::Error) -> Error {
    Error::new(ErrorKind::PathFailed, format!("the connection broke: {error}"))
}

fn unreachable(address: SocketAddr, error: &io::Error, opened: bool) -> Error {
    // Where a process listened before, a refusal says that it is gone.
    let kind = match (opened, error.kind()) {
        (false, _) => ErrorKind::PeerUnreachable,
        (true, io::ErrorKind::ConnectionRefused) => ErrorKind::PeerGone,
        (true, _) => ErrorKind::PathFailed,
    };
    let local = matches!(error.raw_os_error(), Some(libc::EMFILE | libc::ENFILE | libc::EADDRNOTAVAIL));
    let text = Error::new(kind, format!("connecting to {address}: {error}"));
    if local { text.with_fault(Fault::Local) } else { text }
}
