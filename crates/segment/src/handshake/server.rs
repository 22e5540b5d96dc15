//! The serving side of the handshake port.

use std::collections::VecDeque;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, Shutdown, SocketAddr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime};
use std::{fmt, io, net};

use posthorse_core::{Error, ErrorKind, Result, SegmentDesc};
use socket2::{Domain, Protocol, SockRef, Socket, Type};
use tokio::io::AsyncWriteExt as _;
use tokio::net::tcp::OwnedWriteHalf;
use tokio::net::{TcpListener, TcpStream};
use tokio::runtime::Handle;
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::timeout;

use super::client::HandshakeClient;
use super::config::HandshakeConfig;
use super::control::P2pControl;
use super::local::{HandshakeEvents, Identity, Local};
use super::message::{ALIVE, Notice, to_json};
use super::serve_control;
use super::stream::{FrameReader, write};
use crate::frame::{Frame, FrameType, encode};
use crate::{descriptor, descriptors};

/// Connections that the system keeps for us until they are accepted.
const BACKLOG: i32 = 1024;

/// How often a port of the system's choice is tried that is taken at another of the addresses.
const ATTEMPTS: usize = 16;

/// How long nothing is accepted after the system refused to accept, as when file descriptors have run out.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// How often it is looked whether there is room.
const ROOM_PAUSE: Duration = Duration::from_millis(5);

/// The handshake port, taken and not yet served: the name of a segment contains the port.
#[derive(Debug)]
pub struct HandshakeListener {
    config: HandshakeConfig,
    port: u16,
    sockets: Vec<net::TcpListener>,
}

impl HandshakeListener {
    /// Takes a port.
    ///
    /// # Errors
    /// `InvalidConfig`; `Io`, naming the address, when it cannot be listened on or no port of the range is free.
    pub fn bind(config: HandshakeConfig) -> Result<Self> {
        config.validate()?;
        let (min, max) = (config.port_min, config.port_max);
        let ports: Vec<u16> = if min == 0 { vec![0; ATTEMPTS] } else { (min..=max).collect() };
        let mut last = (any(min), io::ErrorKind::AddrInUse.into());
        for port in ports {
            match bind_all(&config.bind, port) {
                Ok((port, sockets)) => return Ok(Self { config, port, sockets }),
                Err(failed) if failed.1.kind() == io::ErrorKind::AddrInUse => last = failed,
                Err((address, error)) => return Err(Error::os(&format!("listening on {address}"), &error)),
            }
        }
        let (address, error) = last;
        Err(Error::os(&format!("listening on {address} (ports {min} to {max} were tried)"), &error)
            .with_advice("configure another port or range, or end the process that listens there"))
    }

    /// The port.
    pub const fn port(&self) -> u16 {
        self.port
    }

    /// Begins to serve, on a runtime whose I/O and timers are enabled.
    ///
    /// # Errors
    /// `Io` when the runtime cannot take the sockets.
    pub fn start(
        self,
        runtime: &Handle,
        identity: Identity,
        events: Arc<dyn HandshakeEvents>,
    ) -> Result<Handshake> {
        let _context = runtime.enter();
        let local = Arc::new(Local::new(self.config, identity, events));
        let mut accepting = Vec::new();
        for socket in self.sockets {
            let listener = TcpListener::from_std(socket)
                .map_err(|error| Error::os("handing the handshake's socket to the runtime", &error))?;
            accepting.push(runtime.spawn(accept(Port(listener), Arc::clone(&local))).abort_handle());
        }
        Ok(Handshake { runtime: runtime.clone(), port: self.port, local, accepting })
    }
}

/// A handshake port that is served until this is dropped.
pub struct Handshake {
    runtime: Handle,
    port: u16,
    local: Arc<Local>,
    accepting: Vec<AbortHandle>,
}

impl Handshake {
    /// The port.
    pub const fn port(&self) -> u16 {
        self.port
    }

    /// The segment's name.
    pub fn name(&self) -> &str {
        &self.local.greeting.name
    }

    /// Answers with this descriptor from now on.
    ///
    /// # Errors
    /// `InvalidArgument` for a descriptor that other peers would refuse, or of another name; `TooLarge` when it
    /// does not fit a frame.
    pub fn publish(&self, desc: &SegmentDesc) -> Result<()> {
        if desc.name != self.name() {
            return Err(Error::invalid_argument("name of the descriptor", &desc.name, self.name()));
        }
        let json = descriptor::encode(desc, SystemTime::now())?;
        let frame = encode(FrameType::Metadata, &json, self.local.config.frame_bytes)
            .map_err(|error| error.context(format_args!("publishing {} buffers", desc.buffers.len())))?;
        self.local.set_descriptor(Some(frame.into()));
        Ok(())
    }

    /// Answers with no descriptor any more.
    pub fn withdraw(&self) {
        self.local.set_descriptor(None);
    }

    /// Calls peers, for what Mooncake's handshake offers.
    pub fn client(&self) -> HandshakeClient {
        let hello = self.local.greeting.hello.clone();
        HandshakeClient::new(self.runtime.clone(), self.local.config.clone(), hello)
    }

    /// Requests to and from Posthorse peers. All that are made of one handshake answer by the same handlers.
    pub fn control(&self) -> P2pControl {
        P2pControl::new(self.runtime.clone(), Arc::clone(&self.local))
    }

    /// Closes the port and every connection that peers hold to it, as soon as the runtime gets to it.
    pub fn stop(&self) {
        self.accepting.iter().for_each(AbortHandle::abort);
    }
}

impl Drop for Handshake {
    fn drop(&mut self) {
        self.stop();
    }
}

impl fmt::Debug for Handshake {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Handshake({} on port {})", self.name(), self.port)
    }
}

type BindError = (SocketAddr, io::Error);

fn bind_all(addresses: &[IpAddr], port: u16) -> Result<(u16, Vec<net::TcpListener>), BindError> {
    let Some((first, rest)) = addresses.split_first() else {
        // One socket for both; on a host without IPv6, IPv4 alone.
        let socket = bind(any(port), true).or_else(|error| match error.1.kind() {
            io::ErrorKind::AddrInUse => Err(error),
            _ => bind((Ipv4Addr::UNSPECIFIED, port).into(), false),
        })?;
        return Ok((port_of(&socket), vec![socket]));
    };
    let first = bind((*first, port).into(), false)?;
    let port = port_of(&first);
    let mut sockets = vec![first];
    for address in rest {
        sockets.push(bind((*address, port).into(), false)?);
    }
    Ok((port, sockets))
}

fn any(port: u16) -> SocketAddr {
    (Ipv6Addr::UNSPECIFIED, port).into()
}

fn port_of(socket: &net::TcpListener) -> u16 {
    socket.local_addr().map_or(0, |address| address.port())
}

fn bind(address: SocketAddr, dual_stack: bool) -> Result<net::TcpListener, BindError> {
    let listen = || {
        let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
        if address.is_ipv6() {
            socket.set_only_v6(!dual_stack)?;
        }
        // A port whose last connections are still winding down can be taken again.
        socket.set_reuse_address(true)?;
        socket.set_nonblocking(true)?;
        socket.bind(&address.into())?;
        socket.listen(BACKLOG)?;
        Ok(socket.into())
    };
    listen().map_err(|error| (address, error))
}

/// A socket that listens. Where a forked child holds it too, closing alone would leave the port taken, and peers waiting.
struct Port(TcpListener);

impl Drop for Port {
    fn drop(&mut self) {
        let _ = SockRef::from(&self.0).shutdown(Shutdown::Both);
    }
}

/// How far a connection has come, for whoever needs its place.
#[derive(Debug)]
pub(crate) struct Progress(Mutex<Stage>);

#[derive(Debug, Clone, Copy)]
enum Stage {
    /// It has not asked for anything, and gives way once it has had its time.
    Silent { since: Instant },
    /// We work at what it asked for: it keeps its place.
    Asked,
    /// Only its taking of the answer is outstanding, for which it alone sets the pace: it gives way once it has had its
    /// time.
    Answering { since: Instant },
    /// It has its answer, and gives way at once.
    Answered,
    /// It is no newcomer any more.
    Settled,
    /// It has had to give way.
    Ended,
}

impl Stage {
    /// When it gives way to another, if it does.
    fn gives_way_in(self, config: &HandshakeConfig) -> Option<Duration> {
        match self {
            Self::Silent { since } => Some(config.grace().saturating_sub(since.elapsed())),
            Self::Answering { since } => Some(config.io_timeout().saturating_sub(since.elapsed())),
            Self::Answered => Some(Duration::ZERO),
            Self::Asked | Self::Settled | Self::Ended => None,
        }
    }
}

impl Progress {
    fn new() -> Self {
        Self(Mutex::new(Stage::Silent { since: Instant::now() }))
    }

    /// It has asked. False when it has had to give way.
    fn ask(&self) -> bool {
        self.go_on(Stage::Asked)
    }

    /// What it asked for is done: its answer goes out from now on. It cannot have had to give way meanwhile.
    pub(crate) fn answer(&self) {
        self.go_on(Stage::Answering { since: Instant::now() });
    }

    /// It has its answer, and was to have nothing else.
    fn answered(&self) {
        self.go_on(Stage::Answered);
    }

    /// The connection stays. False when it has had to give way.
    pub(crate) fn settle(&self) -> bool {
        self.go_on(Stage::Settled)
    }

    fn stage(&self) -> MutexGuard<'_, Stage> {
        // Each change is one store: what a panicking holder left is as good.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn go_on(&self, next: Stage) -> bool {
        let mut stage = self.stage();
        if matches!(*stage, Stage::Ended) {
            return false;
        }
        *stage = next;
        true
    }

    /// Whether it needs no place among the newcomers any more.
    fn is_over(&self) -> bool {
        matches!(*self.stage(), Stage::Settled | Stage::Ended)
    }

    fn gives_way_in(&self, config: &HandshakeConfig) -> Option<Duration> {
        self.stage().gives_way_in(config)
    }

    /// Has it give way, unless it has gone on since it was to.
    fn end(&self, config: &HandshakeConfig) -> bool {
        let mut stage = self.stage();
        let ends = stage.gives_way_in(config).is_some_and(|left| left.is_zero());
        if ends {
            *stage = Stage::Ended;
        }
        ends
    }
}

/// A connection that may be at its first request.
struct Newcomer {
    task: AbortHandle,
    progress: Arc<Progress>,
}

/// Waits until there are fewer than `most` newcomers: until one has settled or ended, or gives way. Meanwhile, the system
/// keeps others.
async fn make_room(newcomers: &mut VecDeque<Newcomer>, most: usize, config: &HandshakeConfig) {
    loop {
        newcomers.retain(|newcomer| !newcomer.progress.is_over() && !newcomer.task.is_finished());
        if newcomers.len() < most {
            return;
        }
        let next =
            newcomers.iter().filter_map(|newcomer| Some((newcomer.progress.gives_way_in(config)?, newcomer)));
        match next.min_by_key(|(left, _)| *left) {
            Some((left, newcomer)) if left.is_zero() => {
                if newcomer.progress.end(config) {
                    newcomer.task.abort();
                }
            }
            Some((left, _)) => tokio::time::sleep(left.min(ROOM_PAUSE)).await,
            None => tokio::time::sleep(ROOM_PAUSE).await,
        }
    }
}

async fn accept(port: Port, local: Arc<Local>) {
    // Dropped with this task: stopping it ends every connection.
    let mut connections = JoinSet::new();
    let mut newcomers: VecDeque<Newcomer> = VecDeque::new();
    let most = descriptors::connections(local.config.newcomers, 1);
    loop {
        let Ok((stream, address)) = port.0.accept().await else {
            tokio::time::sleep(ACCEPT_PAUSE).await;
            continue;
        };
        while connections.try_join_next().is_some() {}
        make_room(&mut newcomers, most, &local.config).await;
        let progress = Arc::new(Progress::new());
        let serving = serve(stream, Arc::clone(&local), Arc::clone(&progress));
        let task = connections.spawn(async move {
            if let Err(error) = serving.await {
                tracing::debug!(%address, %error, "a handshake connection was given up");
            }
        });
        newcomers.push_back(Newcomer { task, progress });
    }
}

async fn serve(stream: TcpStream, local: Arc<Local>, progress: Arc<Progress>) -> Result<()> {
    // Small answers should not wait for more; that it cannot be set costs time alone.
    let _ = stream.set_nodelay(true);
    let (read, mut socket) = stream.into_split();
    let mut reader = FrameReader::new(read, local.config.frame_bytes);
    let patience = local.config.io_timeout();
    let Ok(frame) = timeout(patience, reader.next()).await else {
        return Err(Error::new(ErrorKind::DeadlineExceeded, format!("no whole request within {patience:?}")));
    };
    let Some(Frame { frame_type, body }) = frame? else { return Ok(()) };
    if !progress.ask() {
        return Ok(());
    }
    if frame_type == FrameType::Control {
        return serve_control::serve(reader, socket, body, local, &progress).await;
    }
    // Where nobody wants its place it keeps it until it is answered: so that is bounded, however slowly it reads.
    let limit = local.config.answer_timeout();
    timeout(limit, reply(&mut socket, frame_type, body, &local, &progress)).await.map_err(|_| {
        Error::new(ErrorKind::DeadlineExceeded, format!("the answer was not taken within {limit:?}"))
    })??;
    progress.answered();
    // As foreign servers do: say that this was all, then wait for the client to close.
    let _ = socket.shutdown().await;
    let _ = timeout(patience, reader.drain()).await;
    Ok(())
}

async fn reply(
    socket: &mut OwnedWriteHalf,
    frame_type: FrameType,
    body: Vec<u8>,
    local: &Arc<Local>,
    progress: &Progress,
) -> Result<()> {
    let answer = if frame_type == FrameType::Metadata {
        local.descriptor().ok_or_else(|| {
            Error::new(ErrorKind::NotFound, "a peer asked for the descriptor, and none is published")
        })?
    } else {
        let json = answer(frame_type, body, local).await?;
        encode(frame_type, &json, local.config.frame_bytes)?.into()
    };
    progress.answer();
    write(socket, &answer, local.config.io_timeout()).await
}

async fn answer(frame_type: FrameType, body: Vec<u8>, local: &Arc<Local>) -> Result<Vec<u8>> {
    let events = Arc::clone(&local.events);
    match frame_type {
        FrameType::Probe => Ok(ALIVE.to_vec()),
        FrameType::Notify => {
            let Notice { name, notify_msg } = serde_json::from_slice(&body)
                .map_err(|error| Error::new(ErrorKind::Malformed, format!("a notification: {error}")))?;
            let taken = local.handle(move || events.notified(&name, &notify_msg)).await;
            let notify_msg = if taken.is_ok() { "success" } else { "" };
            to_json(&Notice { name: String::new(), notify_msg: notify_msg.to_owned() })
        }
        _ => local.handle(move || events.connection(&body)).await,
    }
}
