//! The listening side: many peers, one service.

use std::collections::VecDeque;
use std::fmt;
use std::mem;
use std::net::{Ipv4Addr, Ipv6Addr, Shutdown, SocketAddr, ToSocketAddrs};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use posthorse_core::{Error, ErrorKind, Result};
use posthorse_memory::ForkGuard;
use rustix::io::Errno;
use socket2::{Domain, SockRef, Socket, Type};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{mpsc, watch};
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::{Instant, sleep_until, timeout};

use super::link::{Link, Pulse};
use super::partial::Partial;
use super::zmtp::{self, SocketType};
use super::{ControlLimits, ControlPlane, FLUSH, Stay, closed, until};
use crate::message::{Dialect, Reply, Request};

/// What answers the peers of a listener.
pub trait Service: Send + Sync + 'static {
    /// Takes a request. Called on the control plane's thread: it must not wait for anything, and may keep the
    /// responder and answer later from any thread.
    fn handle(&self, peer: &Peer, request: Request, responder: Responder);

    /// A connection has ended, for whatever reason. What it asked and did not get is not wanted any more.
    fn disconnected(&self, peer: &Peer) {
        let _ = peer;
    }
}

/// A connection to a listener.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Peer {
    /// Where it comes from.
    pub address: SocketAddr,
    /// Its number, unique within the listener's life and never used twice.
    pub connection: u64,
}

impl fmt::Display for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}#{}", self.address, self.connection)
    }
}

/// The right and duty to answer one request, once. Dropping it answers that the request was dropped, or that the
/// listener was closed.
#[derive(Debug)]
#[must_use = "dropping a responder answers with an error"]
pub struct Responder {
    dialect: Dialect,
    replies: Option<mpsc::UnboundedSender<Vec<u8>>>,
    state: Arc<State>,
}

impl Responder {
    /// Answers, from any thread, without waiting. A peer that is gone by now does not notice. In a child process nothing
    /// is sent.
    pub fn reply(mut self, reply: &Reply) {
        self.send(reply);
    }

    /// Refuses with this reason.
    pub fn refuse(self, error: &Error) {
        self.reply(&Reply::refused(error));
    }

    /// Whether the peer is gone, so that nobody would read the answer.
    pub fn is_closed(&self) -> bool {
        self.replies.as_ref().is_none_or(mpsc::UnboundedSender::is_closed)
    }

    /// Which replies the peer understands.
    pub const fn dialect(&self) -> Dialect {
        self.dialect
    }

    fn send(&mut self, reply: &Reply) {
        let Some(replies) = self.replies.take() else { return };
        if self.state.fork.is_forked() {
            // The answer is the parent's to give; its task would be woken under locks that may be held for ever.
            mem::forget(Arc::clone(&self.state));
            return mem::forget(replies);
        }
        let bytes = reply
            .encode(self.dialect)
            .or_else(|error| Reply::refused(&error).encode(self.dialect))
            .unwrap_or_else(|_| Reply::plain_error().to_vec());
        let _ = replies.send(bytes);
    }
}

impl Drop for Responder {
    fn drop(&mut self) {
        if self.replies.is_some() {
            // A child process sends nothing, and waits for no lock to find out what.
            let error = if !self.state.fork.is_forked() && self.state.is_closing() {
                closed()
            } else {
                Error::new(ErrorKind::Internal, "the request was dropped")
            };
            self.send(&Reply::refused(&error));
        }
    }
}

/// A bound address and its peers. Dropping it closes it.
#[derive(Debug)]
pub struct Listener {
    address: SocketAddr,
    stop: watch::Sender<bool>,
    fork: Arc<ForkGuard>,
}

impl Listener {
    /// The address that was bound, with the port that the system chose.
    pub const fn local_address(&self) -> SocketAddr {
        self.address
    }

    /// Accepts no more and ends the connections; replies given before go out. Does not wait. Does nothing in a child
    /// process.
    pub fn close(&self) {
        if !self.fork.is_forked() {
            self.stop.send_replace(true);
        }
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        self.close();
        if self.fork.is_forked() {
            // It tells whoever waits for it, under locks that may be held for ever by a thread that is not there.
            mem::forget(mem::replace(&mut self.stop, watch::Sender::new(true)));
        }
    }
}

pub(super) fn bind(plane: &ControlPlane, address: &str, service: Arc<dyn Service>) -> Result<Listener> {
    let stay = plane.enter()?;
    // Bound here and now, so that a failure is the caller's.
    let socket = bind_one(address).map_err(|error| refused(address, error))?;
    serve_on(plane, stay, socket, service)
}

pub(super) fn bind_everywhere(
    plane: &ControlPlane,
    port: u16,
    service: Arc<dyn Service>,
) -> Result<Listener> {
    let stay = plane.enter()?;
    let dual = SocketAddr::from((Ipv6Addr::UNSPECIFIED, port));
    let socket = match bind_dual(dual) {
        Ok(socket) => socket,
        // Without IPv6, there is IPv4. A port that is taken is no reason to take it in one of the two.
        Err(error) if error.kind() != std::io::ErrorKind::AddrInUse => {
            let any = SocketAddr::from((Ipv4Addr::UNSPECIFIED, port));
            bind_one(any).map_err(|error| refused(&any.to_string(), error))?
        }
        Err(error) => return Err(refused(&dual.to_string(), error)),
    };
    serve_on(plane, stay, socket, service)
}

/// Connections that wait to be accepted before the system drops more: those of all gets of a consumer may come at once.
const BACKLOG: i32 = 1024;

fn bind_one(address: impl ToSocketAddrs) -> std::io::Result<std::net::TcpListener> {
    let socket = std::net::TcpListener::bind(address)?;
    // The standard library's queue is short.
    SockRef::from(&socket).listen(BACKLOG)?;
    Ok(socket)
}

/// Listens for IPv6 and IPv4 alike, whatever the system's default (`net.ipv6.bindv6only`) is.
fn bind_dual(address: SocketAddr) -> std::io::Result<std::net::TcpListener> {
    let socket = Socket::new(Domain::IPV6, Type::STREAM.cloexec(), None)?;
    socket.set_only_v6(false)?;
    // A port whose former owner has gone is free at once; two live owners are still refused.
    socket.set_reuse_address(true)?;
    socket.bind(&address.into())?;
    socket.listen(BACKLOG)?;
    Ok(socket.into())
}

fn refused(address: &str, error: std::io::Error) -> Error {
    let in_use = error.kind() == std::io::ErrorKind::AddrInUse;
    let error = Error::os(&format!("binding the control address {address}"), &error);
    if in_use {
        error.with_advice("another process or connector listens there: choose another port, or 0 for any")
    } else {
        error
    }
}

fn serve_on(
    plane: &ControlPlane,
    stay: Stay,
    socket: std::net::TcpListener,
    service: Arc<dyn Service>,
) -> Result<Listener> {
    let failed = |error| Error::os("setting up the control socket", &error);
    socket.set_nonblocking(true).map_err(failed)?;
    let address = socket.local_addr().map_err(failed)?;
    let (stop, stopped) = watch::channel(false);
    let socket = {
        let _inside = plane.inner.handle.enter();
        TcpListener::from_std(socket).map_err(failed)?
    };
    let server = Server {
        limits: plane.inner.limits.clone(),
        places: plane.places(),
        partial: Partial::new(plane.inner.limits.max_partial_bytes.max(plane.inner.limits.max_message_bytes)),
        service,
        started: Instant::now(),
        state: Arc::new(State {
            fork: Arc::clone(&plane.inner.fork),
            stopped: [stay.stopped.clone(), stopped.clone()],
        }),
    };
    plane.inner.handle.spawn(accept(socket, Arc::new(server), stay, stopped));
    Ok(Listener { address, stop, fork: Arc::clone(&plane.inner.fork) })
}

struct Server {
    limits: ControlLimits,
    /// How many connections have a place at a time.
    places: usize,
    partial: Arc<Partial>,
    service: Arc<dyn Service>,
    started: Instant,
    state: Arc<State>,
}

/// How the listener stands, for those who answer its peers.
#[derive(Debug)]
struct State {
    fork: Arc<ForkGuard>,
    /// Whether the plane, or the listener, was told to stop.
    stopped: [watch::Receiver<bool>; 2],
}

impl State {
    fn is_closing(&self) -> bool {
        self.stopped.iter().any(|stopped| *stopped.borrow())
    }
}

impl Server {
    /// Milliseconds since the listener began.
    fn now(&self) -> u64 {
        self.started.elapsed().as_millis() as u64
    }
}

/// How a connection stands, as its own task says.
#[derive(Debug, Default)]
struct Standing {
    ready: AtomicBool,
    /// It has asked something.
    asked: AtomicBool,
    /// It waits for an answer.
    waits: AtomicBool,
    /// When it was asked or answered last, by the server's clock.
    used: AtomicU64,
}

/// A connection's place.
#[derive(Debug)]
struct Place {
    since: Instant,
    task: AbortHandle,
    standing: Arc<Standing>,
}

/// How long a connection has for its first request before it may have to make room.
const GRACE: Duration = Duration::from_millis(200);

/// The connections that have places, the oldest first.
#[derive(Debug, Default)]
struct Places(VecDeque<Place>);

impl Places {
    /// Forgets those that have ended.
    fn tidy(&mut self) {
        self.0.retain(|place| !place.task.is_finished());
    }

    /// Ends the oldest in its handshake, if there are as many.
    fn bound_handshakes(&mut self, most: usize) {
        let greets = |place: &&Place| !place.standing.ready.load(Ordering::Relaxed);
        if self.0.iter().filter(greets).count() >= most {
            let oldest = self.0.iter().position(|place| greets(&place));
            self.end(oldest);
        }
    }

    /// Ends one that can be done without: the oldest that has never asked anything; else the one that was used least
    /// lately, and not since `quiet_since`, of those that wait for nothing.
    ///
    /// One that has just come is about to ask: newcomers must not keep putting each other out where most places are in
    /// use. Where most places are of such that never asked, it is them that are too many.
    fn make_room(&mut self, quiet_since: u64) -> bool {
        let is_silent = |place: &Place| !place.standing.asked.load(Ordering::Relaxed);
        let many = 2 * self.0.iter().filter(|place| is_silent(place)).count() > self.0.len();
        let oldest = self.0.iter().position(is_silent);
        let silent = oldest.filter(|at| many || self.0[*at].since.elapsed() >= GRACE);
        let unused = || {
            let used = |place: &Place| place.standing.used.load(Ordering::Relaxed);
            let waits = |place: &Place| place.standing.waits.load(Ordering::Relaxed);
            let places = self.0.iter().enumerate();
            let idle = places.filter(|(_, place)| !waits(place) && used(place) < quiet_since);
            idle.min_by_key(|(_, place)| used(place)).map(|(at, _)| at)
        };
        let chosen = silent.or_else(unused);
        self.end(chosen)
    }

    fn end(&mut self, at: Option<usize>) -> bool {
        let place = at.and_then(|at| self.0.remove(at));
        place.inspect(|place| place.task.abort()).is_some()
    }
}

async fn accept(
    socket: TcpListener,
    server: Arc<Server>,
    mut stay: Stay,
    mut stopped: watch::Receiver<bool>,
) {
    let limits = &server.limits;
    let (end, ended) = watch::channel(false);
    let mut connections = JoinSet::new();
    let mut refusals = JoinSet::new();
    let mut places = Places::default();
    let mut next = 0_u64;
    let mut failing = false;
    loop {
        let accepted = tokio::select! {
            accepted = socket.accept() => accepted,
            Some(_) = connections.join_next(), if !connections.is_empty() => continue,
            Some(_) = refusals.join_next(), if !refusals.is_empty() => continue,
            () = until(&mut stay.stopped) => break,
            () = until(&mut stopped) => break,
        };
        let quiet_since = server.now().saturating_sub(limits.liveness.as_millis() as u64);
        places.tidy();
        let (stream, address) = match accepted {
            Ok(accepted) => accepted,
            Err(error) => {
                // It is said once, not in every round.
                if !failing {
                    tracing::warn!(%error, "accepting control connections fails, and peers wait for it");
                }
                failing = true;
                if is_shortage(&error) && places.make_room(quiet_since) {
                    // Its task has to run once more to give its descriptor back.
                    tokio::task::yield_now().await;
                } else {
                    tokio::time::sleep(Duration::from_millis(20)).await;
                }
                continue;
            }
        };
        if mem::take(&mut failing) {
            tracing::warn!("control connections are accepted again");
        }
        places.bound_handshakes(limits.max_handshakes);
        if places.0.len() >= server.places && !places.make_room(quiet_since) {
            tracing::warn!(%address, limit = server.places, "refusing a control connection");
            if refusals.len() < MOST_REFUSALS {
                refusals.spawn(refuse(stream, server.places));
            }
            continue;
        }
        // An IPv4 peer of a socket for both is shown as what it is.
        let address = SocketAddr::new(address.ip().to_canonical(), address.port());
        let peer = Peer { address, connection: next };
        next += 1;
        let standing = Arc::new(Standing::default());
        let (server, ended) = (Arc::clone(&server), ended.clone());
        let task = connections.spawn(connection(stream, peer, server, Arc::clone(&standing), ended));
        places.0.push_back(Place { since: Instant::now(), task, standing });
    }
    // Where a child process holds the socket too, closing alone would leave the port bound, and peers waiting.
    let _ = SockRef::from(&socket).shutdown(Shutdown::Both);
    drop(socket);
    end.send_replace(true);
    let _ = timeout(FLUSH, async { while connections.join_next().await.is_some() {} }).await;
}

/// Whether descriptors or memory are short, for this process or the system.
fn is_shortage(error: &std::io::Error) -> bool {
    let shortages = [Errno::MFILE, Errno::NFILE, Errno::NOBUFS, Errno::NOMEM];
    shortages.iter().any(|errno| error.raw_os_error() == Some(errno.raw_os_error()))
}

/// The most connections that are being told at a time that there is no room.
const MOST_REFUSALS: usize = 64;

/// Tells a peer that there is no room for it. What it has sent is read, since the system would take back what was said
/// if that were left unread.
async fn refuse(mut stream: TcpStream, limit: usize) {
    let reason = format!("LimitReached: {limit} control connections are served, which is the limit");
    let opening = [&zmtp::greeting()[..], &zmtp::error(&reason)].concat();
    let told = async {
        stream.write_all(&opening).await?;
        stream.shutdown().await?;
        let mut unread = [0; 256];
        while stream.read(&mut unread).await? > 0 {}
        std::io::Result::Ok(())
    };
    let _ = timeout(FLUSH, told).await;
    let _ = SockRef::from(&stream).shutdown(Shutdown::Both);
}

async fn connection(
    stream: TcpStream,
    peer: Peer,
    server: Arc<Server>,
    standing: Arc<Standing>,
    ended: watch::Receiver<bool>,
) {
    let limits = &server.limits;
    let bounds = Some((server.partial.begin(), limits.send_timeout));
    let opened =
        Link::open(stream, SocketType::Router, limits.max_message_bytes, limits.connect_timeout, bounds);
    let mut link = match opened.await {
        Ok(link) => link,
        Err(error) => return tracing::debug!(%peer, %error, "a control connection did not come about"),
    };
    standing.ready.store(true, Ordering::Relaxed);
    // Also when this task is aborted.
    let _farewell = Farewell { peer, server: &server };
    if let Err(error) = serve(&mut link, peer, &server, &standing, ended).await {
        tracing::debug!(%peer, %error, "a control connection ended");
    }
}

struct Farewell<'a> {
    peer: Peer,
    server: &'a Server,
}

impl Drop for Farewell<'_> {
    fn drop(&mut self) {
        self.server.service.disconnected(&self.peer);
    }
}

async fn serve(
    link: &mut Link,
    peer: Peer,
    server: &Server,
    standing: &Standing,
    mut ended: watch::Receiver<bool>,
) -> Result<()> {
    let limits = &server.limits;
    // Bounded by the requests that are unanswered: each takes one place.
    let (tx, mut rx) = mpsc::unbounded_channel::<Vec<u8>>();
    let mut outstanding = 0_usize;
    let mut due = Instant::now() + limits.liveness / 3;
    loop {
        tokio::select! {
            reply = rx.recv() => {
                let Some(reply) = reply else { return Ok(()) };
                outstanding -= 1;
                link.send(&reply, limits.send_timeout).await?;
                standing.used.store(server.now(), Ordering::Relaxed);
            }
            payload = link.message() => {
                let payload = payload?;
                standing.asked.store(true, Ordering::Relaxed);
                standing.used.store(server.now(), Ordering::Relaxed);
                if outstanding == 0 {
                    link.expect();
                }
                if let Some(refusal) = admit(&payload, peer, server, &tx, &mut outstanding) {
                    link.send(&refusal, limits.send_timeout).await?;
                }
                due = due.min(Instant::now() + limits.liveness / 3);
            }
            () = sleep_until(due) => {
                let idle_end = link.heard() + limits.idle_timeout;
                // One that waits and cannot be asked whether it is there may be silent for no longer than an idle one.
                due = if outstanding > 0 && link.can_be_asked() {
                    match link.check(limits.liveness)? {
                        Pulse::Quiet(until) => until,
                        Pulse::Gone => return Err(super::dialer::silent(limits.liveness)),
                    }
                } else if Instant::now() >= idle_end {
                    return Ok(());
                } else {
                    idle_end
                };
            }
            () = until(&mut ended) => {
                // Who has not answered yet does so, or drops the request, which is an answer too.
                drop(tx);
                while outstanding > 0 && let Some(reply) = rx.recv().await {
                    outstanding -= 1;
                    link.send(&reply, FLUSH).await?;
                }
                return Ok(());
            }
        }
        standing.waits.store(outstanding > 0, Ordering::Relaxed);
    }
}

/// Hands a request to the service, or returns the refusal to be sent at once.
fn admit(
    payload: &[u8],
    peer: Peer,
    server: &Server,
    replies: &mpsc::UnboundedSender<Vec<u8>>,
    outstanding: &mut usize,
) -> Option<Vec<u8>> {
    let limit = server.limits.max_outstanding;
    let (dialect, refusal) = match Request::decode(payload) {
        Err(error) => (Request::dialect_of(payload), error),
        Ok(request) if *outstanding >= limit => {
            let message = format!("{limit} requests of this connection are unanswered; accepted: {limit}");
            (request.dialect(), Error::new(ErrorKind::QueueFull, message))
        }
        Ok(request) => {
            *outstanding += 1;
            let (dialect, replies) = (request.dialect(), Some(replies.clone()));
            let responder = Responder { dialect, replies, state: Arc::clone(&server.state) };
            server.service.handle(&peer, request, responder);
            return None;
        }
    };
    tracing::debug!(%peer, %refusal, "refusing a control request");
    Some(Reply::refused(&refusal).encode(dialect).unwrap_or_else(|_| Reply::plain_error().to_vec()))
}
