//! A connection that a peer opened: its requests are handled in order, each access admitted by the gate.

use std::collections::VecDeque;
use std::io;
use std::net::TcpStream;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use posthorse_core::{
    Access, Admission, Checksum, Claim, Error, ErrorKind, GrantToken, HostView, Result, TransportContext,
};
use rustix::event::epoll::EventFlags;

use crate::checksum;
use crate::config::TcpConfig;
use crate::flow::{Inflow, Outflow, Sent};
use crate::hello::{Call, LaneClass, LaneKey, shorten};
use crate::intake::{DIRECT, Intake};
use crate::placement::{Place, Placed, Placement};
use crate::stage;
use crate::sys::{self, SEND_CHUNK};
use crate::watched::Watched;
use crate::wire::{MAX_MESSAGE, MAX_PIECE, REQUEST_BYTES, RESPONSE_BYTES, Request, Response, Sum};

/// How many bytes of answers may wait before no further request is begun.
const OUTPUT: usize = 256 << 10;
/// Up to this many bytes, what a READ asks for is copied behind its header; more is sent from its place.
const COPIED_READ: u64 = 16 << 10;
/// How many bytes are moved in one go before other connections have their turn.
const TURN: usize = 8 << 20;
/// How many bytes are received in one call between payloads.
const RECEIVE: usize = 256 << 10;
/// How many bytes of a long READ the first call sends, so that the consumer begins to copy early.
const SEND_FIRST: usize = stage::SHORTEST;
/// How many READs may wait for the one that is being answered.
const READS: usize = 1024;
/// How many refused notifications of a lane are remembered.
const REMEMBERED: usize = 1024;
/// The longest silence that a peer may claim for itself, in milliseconds.
const MAX_PATIENCE_MS: u64 = 3_600_000;

/// What a lane has delivered, over all its connections.
#[derive(Debug, Default)]
pub(crate) struct Notified {
    last: u64,
    refused: VecDeque<u64>,
}

/// A served connection.
#[derive(Debug)]
pub(crate) struct Serve {
    pub(crate) key: LaneKey,
    socket: Watched<TcpStream>,
    interest: EventFlags,
    peer: String,
    intake: Intake,
    inflow: Inflow,
    outflow: Outflow,
    incoming: Incoming,
    /// Whether long payloads are coming in, so that receiving ahead would only copy them.
    long: bool,
    /// Why the WRITE whose pieces are coming in has failed.
    failed: Option<(u64, Error)>,
    /// The last request that is done and not yet acknowledged.
    due: Option<u64>,
    output: Vec<u8>,
    sent: usize,
    sending: Option<Sending>,
    /// READs that come after it.
    reads: VecDeque<Read>,
    /// Whether the socket took no more when we last tried.
    full: bool,
    /// Whether the turn ended although requests that have come could still be handled.
    stalled: bool,
    heard: Instant,
    /// How many bytes went into the socket, and how many of them the peer's host had acknowledged at the last look.
    went: u64,
    acknowledged: u64,
    /// How long the peer may be silent.
    patience: Duration,
    silent_ticks: u32,
    spoke: bool,
}

#[derive(Debug)]
enum Incoming {
    Header,
    Piece {
        id: u64,
        last: bool,
        placement: Placement,
    },
    Notify {
        id: u64,
        len: usize,
        data: Vec<u8>,
    },
    /// A notification that is longer than we accept, of which so many bytes are to be dropped.
    Excess {
        id: u64,
        len: usize,
        left: usize,
    },
}

/// A long READ that is being answered.
#[derive(Debug)]
struct Sending {
    id: u64,
    checksum: Checksum,
    /// The memory; `None` once its owner has closed it.
    source: Option<(HostView, Admission)>,
    /// Bytes sent, and the end of the piece that was announced.
    done: usize,
    announced: usize,
}

/// A READ that has its turn later.
#[derive(Debug)]
struct Read {
    id: u64,
    address: u64,
    len: u64,
    token: Option<GrantToken>,
    checksum: Checksum,
}

impl Serve {
    /// For `call`, which is answered by `welcome`. What the answer says of it: `tells_taken`.
    pub(crate) fn new(
        call: Call,
        tells_taken: bool,
        socket: Watched<TcpStream>,
        welcome: Vec<u8>,
        config: &TcpConfig,
    ) -> Self {
        Self {
            key: call.key,
            inflow: Inflow::new(tells_taken),
            outflow: Outflow::new(&socket, welcome.len(), tells_taken),
            socket,
            interest: EventFlags::empty(),
            peer: call.name,
            intake: Intake::new(),
            incoming: Incoming::Header,
            long: call.class == LaneClass::Bulk,
            failed: None,
            due: None,
            output: welcome,
            sent: 0,
            sending: None,
            reads: VecDeque::new(),
            full: false,
            stalled: false,
            heard: Instant::now(),
            went: 0,
            acknowledged: 0,
            // It speaks as often as its own setting demands, which may be less often than ours would.
            patience: config.liveness().max(Duration::from_millis(call.liveness_ms.min(MAX_PATIENCE_MS))),
            silent_ticks: 0,
            spoke: true,
        }
    }

    pub(crate) const fn socket(&self) -> &Watched<TcpStream> {
        &self.socket
    }

    /// Moves what can be moved now.
    ///
    /// # Errors
    /// Why the connection has ended.
    pub(crate) fn run(
        &mut self,
        context: &TransportContext,
        notified: &mut Notified,
        config: &TcpConfig,
    ) -> Result<()> {
        self.outflow.prepare();
        let mut turn = 0;
        let mut drained = false;
        loop {
            let idle = self.parse(context, notified, config)?;
            turn += self.flush()?;
            self.stalled = !idle;
            // After a short receipt the socket is most likely empty; if not, the reactor is told again.
            if turn >= TURN || (drained && idle && matches!(self.incoming, Incoming::Header)) {
                return Ok(());
            }
            if !idle && !self.is_blocked() {
                // What the output had no room for has room now.
                continue;
            }
            if self.intake.is_full() {
                return Ok(());
            }
            match self.receive() {
                Ok(0) => return Err(Error::new(ErrorKind::PathFailed, "the peer closed the connection")),
                Ok(received) => {
                    (self.heard, self.silent_ticks) = (Instant::now(), 0);
                    turn += received;
                    self.inflow.received(received);
                    drained = !self.long && received < RECEIVE;
                }
                Err(error) if error.kind() != io::ErrorKind::WouldBlock => return Err(broken(&error)),
                // We stopped sending only to see what the peer has taken. It has not said, so the rest goes by copy.
                Err(_) if self.outflow.is_short() && self.is_blocked() && !self.full => {}
                Err(_) => return Ok(()),
            }
        }
    }

    /// Time has passed: is the peer there, and does it know that we are? When connections are short, it has no more
    /// time than our own liveness gives it, whatever it claims for itself.
    ///
    /// # Errors
    /// `PeerGone` when it is not.
    pub(crate) fn tick(&mut self, config: &TcpConfig, short: bool) -> Result<()> {
        self.give_up_closed();
        // What the peer says may wait behind a full intake until a long READ is answered. That it takes the answer says that
        // it is there.
        if self.is_blocked() && self.has_progressed() {
            (self.heard, self.silent_ticks) = (Instant::now(), 0);
        }
        self.silent_ticks += 1;
        let patience = if short { config.liveness() } else { self.patience };
        if self.silent_ticks > 3 && self.heard.elapsed() >= patience {
            return Err(Error::new(ErrorKind::PeerGone, "the peer was silent past the liveness time"));
        }
        self.outflow.tick();
        // Bytes are coming in and no answer is due yet: the peer shall not take us for dead meanwhile.
        if !self.spoke && !self.is_blocked() && self.silent_ticks == 1 {
            self.output.extend(Response::Pong.encode());
            self.flush()?;
        }
        self.spoke = false;
        Ok(())
    }

    /// Gives memory up that its owner has closed: it would be kept for as long as the peer stops half-way.
    fn give_up_closed(&mut self) {
        if let Incoming::Piece { placement, .. } = &mut self.incoming {
            placement.give_up_closed();
        }
        if let Some(sending) = &mut self.sending {
            sending.source.take_if(|(_, admission)| admission.is_closed());
        }
    }

    /// Whether the peer's host has acknowledged more than at the last look. One whose process takes nothing any more
    /// acknowledges no more than its socket has room for.
    fn has_progressed(&mut self) -> bool {
        let Ok(unsent) = sys::unacknowledged(self.socket.as_fd()) else { return false };
        let acknowledged = self.went.saturating_sub(unsent as u64);
        let more = acknowledged > self.acknowledged;
        self.acknowledged = acknowledged;
        more
    }

    /// What the reactor should watch for, if that has changed.
    pub(crate) fn interest(&mut self) -> Option<EventFlags> {
        let mut interest = EventFlags::empty();
        interest.set(EventFlags::IN, !self.intake.is_full());
        // The socket of a stalled one is writable, so it has its next turn at once.
        interest.set(EventFlags::OUT, self.is_blocked() || self.stalled);
        let changed = interest != self.interest;
        self.interest = interest;
        changed.then_some(interest)
    }

    fn is_blocked(&self) -> bool {
        self.sent < self.output.len() || self.sending.is_some() || self.outflow.pending() > 0
    }

    fn receive(&mut self) -> io::Result<usize> {
        let socket = self.socket.as_fd();
        match &mut self.incoming {
            // SAFETY: the place is admitted memory, which is entered for each touch.
            Incoming::Piece { placement, .. } => unsafe { placement.receive(socket, &mut self.intake) },
            _ => self.intake.receive(socket, if self.long { REQUEST_BYTES } else { RECEIVE }),
        }
    }

    /// Handles what the intake holds. False when the output had no room for more.
    fn parse(
        &mut self,
        context: &TransportContext,
        notified: &mut Notified,
        config: &TcpConfig,
    ) -> Result<bool> {
        loop {
            match std::mem::replace(&mut self.incoming, Incoming::Header) {
                Incoming::Header => {
                    let busy = self.sending.is_some() || self.output.len() >= OUTPUT;
                    if !busy && let Some(read) = self.reads.pop_front() {
                        self.begin_read(&read, context);
                        continue;
                    }
                    let Some(header) = self.intake.peek::<REQUEST_BYTES>() else { return Ok(!busy) };
                    let request = Request::decode(header)?;
                    match request {
                        // What the peer says about a READ comes behind the READs that it has asked for already.
                        Request::Read { id, address, len, token, checksum } if busy => {
                            if self.reads.len() == READS {
                                return Ok(false);
                            }
                            self.reads.push_back(Read { id, address, len, token, checksum });
                            self.intake.take(REQUEST_BYTES);
                        }
                        Request::Write { .. } | Request::Notify { .. } | Request::Ping if busy => {
                            return Ok(false);
                        }
                        request => {
                            self.intake.take(REQUEST_BYTES);
                            self.begin(request, context, config)?;
                        }
                    }
                }
                Incoming::Piece { id, last, mut placement } => {
                    // SAFETY: the place is admitted memory, which is entered for each touch.
                    unsafe { placement.take_from(&mut self.intake) };
                    if placement.left() > 0 {
                        self.incoming = Incoming::Piece { id, last, placement };
                        return Ok(true);
                    }
                    // SAFETY: as above.
                    self.end_piece(id, last, unsafe { placement.finish() });
                }
                Incoming::Notify { id, len, mut data } => {
                    let more = (len - data.len()).min(self.intake.bytes().len());
                    data.extend_from_slice(&self.intake.bytes()[..more]);
                    self.intake.take(more);
                    if data.len() < len {
                        self.incoming = Incoming::Notify { id, len, data };
                        return Ok(true);
                    }
                    self.deliver(id, &data, context, notified);
                }
                Incoming::Excess { id, len, mut left } => {
                    let more = left.min(self.intake.bytes().len());
                    self.intake.take(more);
                    left -= more;
                    if left > 0 {
                        self.incoming = Incoming::Excess { id, len, left };
                        return Ok(true);
                    }
                    let accepted = config.notify_bytes;
                    let text = format!("a notification of {len} bytes; accepted: up to {accepted}");
                    self.refuse(id, &Error::new(ErrorKind::TooLarge, text));
                }
            }
        }
    }

    fn begin(&mut self, request: Request, context: &TransportContext, config: &TcpConfig) -> Result<()> {
        match request {
            Request::Ping => self.output.extend(Response::Pong.encode()),
            // The peer may be configured to say more than we are to hear.
            Request::Notify { id, len } if len > config.notify_bytes => {
                self.incoming = Incoming::Excess { id, len, left: len };
            }
            Request::Notify { id, len } => {
                self.incoming = Incoming::Notify { id, len, data: Vec::with_capacity(len) };
            }
            Request::Write { id, address, len, token, sum, last } => {
                self.long = len as usize >= DIRECT;
                if self.failed.as_ref().is_some_and(|(failed, _)| *failed != id) {
                    let text = "a WRITE began before the last piece of the one before";
                    return Err(Error::new(ErrorKind::Malformed, text));
                }
                let admitted = if self.failed.is_some() {
                    None
                } else {
                    match admit(context, &self.peer, token, address, len, Access::Write) {
                        Ok(admitted) => Some(admitted),
                        Err(error) => {
                            self.failed = Some((id, error));
                            None
                        }
                    }
                };
                let place =
                    admitted.map_or(Place::Nowhere, |(view, admission)| Place::Admitted(view, admission));
                self.incoming =
                    Incoming::Piece { id, last, placement: Placement::new(place, len as usize, sum) };
            }
            Request::Read { id, address, len, token, checksum } => {
                self.begin_read(&Read { id, address, len, token, checksum }, context);
            }
            Request::Taken { bytes } => self.outflow.taken(bytes)?,
        }
        Ok(())
    }

    fn begin_read(&mut self, read: &Read, context: &TransportContext) {
        let Read { id, address, len, token, checksum } = *read;
        match admit(context, &self.peer, token, address, len, Access::Read) {
            Err(error) => self.refuse(id, &error),
            Ok((view, admission)) if len <= COPIED_READ => self.copy_read(id, view, &admission, checksum),
            Ok((view, admission)) => {
                let (source, done, announced) = (Some((view, admission)), 0, 0);
                self.sending = Some(Sending { id, checksum, source, done, announced });
            }
        }
    }

    fn end_piece(&mut self, id: u64, last: bool, placed: Placed) {
        if self.failed.is_none() {
            self.failed = match placed {
                Placed::Whole => None,
                Placed::Dropped => Some((id, revoked())),
                Placed::Corrupt => {
                    let text = "the bytes in place are not those that were sent";
                    Some((id, Error::new(ErrorKind::Corrupt, text)))
                }
            };
        }
        if !last {
            return;
        }
        match self.failed.take() {
            Some((id, error)) => self.refuse(id, &error),
            None => self.due = Some(id),
        }
    }

    fn deliver(&mut self, id: u64, data: &[u8], context: &TransportContext, notified: &mut Notified) {
        let again = id <= notified.last;
        let outcome = if again && notified.refused.contains(&id) {
            Err(Error::new(ErrorKind::QueueFull, "the notification was refused before"))
        } else if again {
            Ok(())
        } else {
            context.events.notified(&self.peer, data)
        };
        notified.last = notified.last.max(id);
        match outcome {
            Ok(()) => self.due = Some(id),
            Err(error) => {
                if !again {
                    if notified.refused.len() == REMEMBERED {
                        notified.refused.pop_front();
                    }
                    notified.refused.push_back(id);
                }
                self.refuse(id, &error);
            }
        }
    }

    fn refuse(&mut self, id: u64, error: &Error) {
        let message = shorten(error.message(), MAX_MESSAGE);
        self.output.extend(Response::Nack { id, code: error.code(), len: message.len() }.encode());
        self.output.extend(message.as_bytes());
        // The refusal says that everything before it is done.
        self.due = None;
    }

    fn copy_read(&mut self, id: u64, view: HostView, admission: &Admission, checksum: Checksum) {
        let before = self.output.len();
        let start = before + RESPONSE_BYTES;
        self.output.resize(start + view.len(), 0);
        let Some(inside) = admission.enter() else {
            self.output.truncate(before);
            return self.refuse(id, &revoked());
        };
        // SAFETY: inside, so the memory is allocated; it is registered for reading by peers.
        unsafe { sys::copy_out(view, &mut self.output[start..]) };
        drop(inside);
        // SAFETY: our own buffer.
        let value = unsafe { checksum::of(HostView::of(&self.output[start..]), checksum) };
        let sum = Sum { mode: checksum, value };
        let header = Response::Data { id, len: view.len() as u64, sum }.encode();
        self.output[before..start].copy_from_slice(&header);
        self.due = Some(id);
    }

    /// Sends what waits, and returns how many bytes went.
    fn flush(&mut self) -> Result<usize> {
        let mut total = 0;
        loop {
            if let Some(id) = self.due.take() {
                self.output.extend(Response::Ack { id }.encode());
            }
            if self.sending.as_ref().is_none_or(|sending| sending.done == sending.announced)
                && let Some(bytes) = self.inflow.tell()
            {
                self.output.extend(Response::Taken { bytes }.encode());
            }
            self.announce();
            let output = HostView::of(&self.output[self.sent..]);
            let sent = match &self.sending {
                None if !self.is_blocked() => return Ok(total),
                // SAFETY: our own buffer.
                None => unsafe { self.outflow.send(self.socket.as_fd(), &[output]) },
                Some(sending) => sending.send(&self.socket, &mut self.outflow, output),
            };
            let Sent { done, went } = match sent {
                Ok(sent) => sent,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    self.full = true;
                    return Ok(total);
                }
                Err(error) => return Err(broken(&error)),
            };
            total += went;
            self.went += went as u64;
            self.spoke = true;
            // There was no room, and now there is: the peer has taken something.
            if went > 0 && std::mem::take(&mut self.full) {
                (self.heard, self.silent_ticks) = (Instant::now(), 0);
            }
            let of_output = done.min(output.len());
            self.sent += of_output;
            if self.sent == self.output.len() {
                self.output.clear();
                self.sent = 0;
            }
            if let Some(sending) = &mut self.sending {
                sending.done += done - of_output;
            }
            if total >= TURN || self.outflow.is_short() {
                return Ok(total);
            }
        }
    }

    /// Announces the next piece of a long READ, or its end.
    fn announce(&mut self) {
        let Some(sending) = &mut self.sending else { return };
        if sending.done < sending.announced {
            return;
        }
        let inside = sending.source.as_ref().and_then(|(view, admission)| Some((*view, admission.enter()?)));
        if let Some((view, _)) = &inside
            && let len = view.len().saturating_sub(sending.done).min(MAX_PIECE as usize)
            && len > 0
            && let Ok(piece) = view.slice(sending.done, len)
        {
            // SAFETY: inside, so the memory is allocated; it is registered for reading by peers.
            let value = unsafe { checksum::of(piece, sending.checksum) };
            let sum = Sum { mode: sending.checksum, value };
            self.output.extend(Response::Data { id: sending.id, len: len as u64, sum }.encode());
            sending.announced += len;
            return;
        }
        let (id, closed) = (sending.id, inside.is_none());
        drop(inside);
        self.sending = None;
        if closed {
            self.refuse(id, &revoked());
        } else {
            self.output.extend(Response::Ack { id }.encode());
        }
    }
}

impl Sending {
    /// Sends `output` and what is announced; filler in its place when the owner has closed the memory meanwhile.
    fn send(&self, socket: &TcpStream, flow: &mut Outflow, output: HostView) -> io::Result<Sent> {
        const FILLER: [u8; 4096] = [0; 4096];
        let most = if self.done == 0 { SEND_FIRST } else { SEND_CHUNK };
        let len = (self.announced - self.done).min(most);
        if let Some((view, admission)) = &self.source
            && let (Ok(piece), Some(_inside)) = (view.slice(self.done, len), admission.enter())
        {
            // SAFETY: the output is our own; inside, the memory is allocated. It is registered for reading by peers:
            // nothing that Rust knows of writes to it.
            return unsafe { flow.send(socket.as_fd(), &[output, piece]) };
        }
        // The end of the READ, which finds the memory closed too, tells the peer that it got filler.
        let filler = HostView::of(&FILLER[..len.min(FILLER.len())]);
        // SAFETY: both are our own.
        unsafe { flow.send(socket.as_fd(), &[output, filler]) }
    }
}

fn admit(
    context: &TransportContext,
    peer: &str,
    token: Option<GrantToken>,
    address: u64,
    len: u64,
    access: Access,
) -> Result<(HostView, Admission)> {
    let admission = context.gate.admit(&Claim { peer, token, address, len, access })?;
    if !admission.access().allows(access) {
        return Err(Error::new(ErrorKind::AccessDenied, format!("the gate did not admit a {access:?}")));
    }
    let view = admission.view().host().filter(|view| view.len() as u64 == len).ok_or_else(|| {
        Error::new(ErrorKind::Unsupported, "the memory is not host memory, which is all that TCP moves")
    })?;
    Ok((view, admission))
}

fn revoked() -> Error {
    Error::new(ErrorKind::AccessDenied, "the grant was revoked while the transfer was under way")
}

fn broken(error: &io::Error) -> Error {
    Error::new(ErrorKind::PathFailed, format!("the connection broke: {error}"))
}
