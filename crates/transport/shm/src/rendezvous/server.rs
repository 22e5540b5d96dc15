//! The owner's end of the rendezvous: lets clients in, and gives them what they may map.

use std::collections::{HashMap, HashSet, VecDeque};
use std::fmt;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use posthorse_core::{Error, ErrorKind, Hello, Incarnation, RegionId, Result, TransportEvents};
use rustix::io::Errno;

use super::reactor::{ProcessWatch, Reactor, Source, SourceId};
use super::socket::{Listener, Packet, PacketBuffer, check_user, send};
use super::wire::{
    ClientHello, MapRequest, Refusal, RegionReply, Request, ToClient, ToOwner, Welcome, printable,
};
use super::{Published, check_host_ids};
use crate::owner::{Client, Owner};
use crate::slots::ClientSlots;
use crate::sys::{peer_credentials, peer_pidfd};

/// Answers that wait for a client to read them; a client that leaves more unread is let go.
const OUTBOX: usize = 4096;
/// Packets of one client that are handled before others have their turn.
const TURN: usize = 16;
const MAX_NAME_SHOWN: usize = 256;

/// Who serves.
#[derive(Debug)]
pub(crate) struct Identity {
    pub(crate) name: Arc<str>,
    pub(crate) incarnation: Incarnation,
    pub(crate) hello: Hello,
    pub(crate) nonce: String,
    pub(crate) host_id: Option<String>,
}

/// See the module's documentation.
#[derive(Debug)]
pub(crate) struct Server {
    listener: Listener,
    id: SourceId,
    identity: Identity,
    /// Read by clients to see whether `process_vm` works.
    probe: Box<u64>,
    owner: Arc<Owner>,
    events: Arc<dyn TransportEvents>,
    reactor: Arc<Reactor>,
    liveness: Duration,
    max_peers: usize,
    connections: Mutex<HashMap<SourceId, Arc<Connection>>>,
    /// Clients that said goodbye while they held a lease: what still watches them, too.
    lingering: Mutex<Vec<(Arc<Client>, SourceId)>>,
}

/// What bounds a server.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Limits {
    pub(crate) liveness: Duration,
    pub(crate) max_peers: u32,
}

impl Server {
    pub(crate) fn start(
        listener: Listener,
        identity: Identity,
        owner: Arc<Owner>,
        events: Arc<dyn TransportEvents>,
        reactor: &Arc<Reactor>,
        limits: Limits,
    ) -> Result<Arc<Self>> {
        let mut probe = [0; 8];
        getrandom::fill(&mut probe)
            .map_err(|error| Error::new(ErrorKind::Io, format!("drawing random numbers: {error}")))?;
        let this = Arc::new(Self {
            listener,
            id: reactor.number(),
            identity,
            probe: Box::new(u64::from_ne_bytes(probe)),
            owner,
            events,
            reactor: Arc::clone(reactor),
            liveness: limits.liveness,
            max_peers: limits.max_peers as usize,
            connections: Mutex::default(),
            lingering: Mutex::default(),
        });
        reactor.add(this.id, Arc::clone(&this) as Arc<dyn Source>)?;
        Ok(this)
    }

    pub(crate) fn published(&self) -> Published {
        Published {
            socket: self.listener.address().to_owned(),
            host_id: self.identity.host_id.clone(),
            nonce: self.identity.nonce.clone(),
        }
    }

    /// Tells the clients that mapped a region that they need not keep it.
    pub(crate) fn withdraw(&self, region: RegionId) {
        let connections: Vec<_> = self.connections.lock().values().cloned().collect();
        for connection in connections {
            let had_it = match &mut *connection.phase.lock() {
                Phase::Serving(serving) => serving.mapped.remove(&region),
                Phase::Greeting | Phase::Over => false,
            };
            if had_it {
                connection.post(&ToClient::Withdrawn { region }, Vec::new());
            }
        }
    }

    /// Ends every conversation. The reactor has stopped.
    pub(crate) fn close(&self) {
        let connections = std::mem::take(&mut *self.connections.lock());
        for connection in connections.into_values() {
            *connection.phase.lock() = Phase::Over;
        }
        self.lingering.lock().clear();
    }

    fn accept(self: &Arc<Self>, socket: OwnedFd) -> Result<()> {
        let refuse = |error: Error| {
            let _ = send(&socket, &ToClient::Refused(Refusal::of(&error)).encode(), &[]);
            error
        };
        check_user(peer_credentials(&socket)?).map_err(refuse)?;
        if self.connections.lock().len() >= self.max_peers {
            let full = format!("{} peers are connected already", self.max_peers);
            return Err(refuse(Error::new(ErrorKind::LimitReached, full)));
        }
        let id = self.reactor.number();
        let connection = Arc::new(Connection {
            id,
            socket,
            server: Arc::clone(self),
            since: Instant::now(),
            phase: Mutex::new(Phase::Greeting),
            outbox: Mutex::default(),
        });
        self.connections.lock().insert(id, Arc::clone(&connection));
        self.reactor.add(id, connection)
    }

    fn forget(&self, client: &Arc<Client>, watch: SourceId) {
        self.owner.remove_client(client);
        self.reactor.remove(watch);
    }
}

/// The listener as a source, which has to hand out its `Arc`.
impl Source for Server {
    fn fd(&self) -> BorrowedFd<'_> {
        self.listener.as_fd()
    }

    fn ready(self: Arc<Self>, _: &mut PacketBuffer) {
        for _ in 0..TURN {
            match self.listener.accept() {
                Ok(None) => break,
                Ok(Some(socket)) => {
                    if let Err(error) = self.accept(socket) {
                        tracing::warn!(%error, "a shared-memory client was refused");
                    }
                }
                Err(error) => {
                    // Out of descriptors, most likely: the next tick tries again.
                    tracing::error!(error = %std::io::Error::from(error), "accepting a shared-memory client");
                    self.reactor.await_room(self.id, self.listener.as_fd(), true);
                    break;
                }
            }
        }
    }

    fn tick(self: Arc<Self>) {
        self.reactor.await_room(self.id, self.listener.as_fd(), false);
        let quiet: Vec<_> = self.lingering.lock().extract_if(.., |(client, _)| client.is_quiet()).collect();
        for (client, watch) in quiet {
            self.forget(&client, watch);
        }
    }
}

struct Connection {
    id: SourceId,
    socket: OwnedFd,
    server: Arc<Server>,
    since: Instant,
    phase: Mutex<Phase>,
    outbox: Mutex<VecDeque<(Vec<u8>, Vec<OwnedFd>)>>,
}

#[derive(Debug)]
enum Phase {
    Greeting,
    Serving(Serving),
    Over,
}

#[derive(Debug)]
struct Serving {
    name: Arc<str>,
    client: Arc<Client>,
    watch: SourceId,
    mapped: HashSet<RegionId>,
}

impl Connection {
    /// Leaves an answer to be sent by the reactor's thread, in order.
    fn post(&self, message: &ToClient, fds: Vec<OwnedFd>) {
        let mut outbox = self.outbox.lock();
        outbox.push_back((message.encode(), fds));
        // Under the lock, so that it cannot cross with the reactor's thread emptying the box.
        self.server.reactor.await_room(self.id, self.socket.as_fd(), true);
    }

    /// Sends what is left to be sent. False when the client is to be let go.
    fn flush(&self) -> bool {
        let mut outbox = self.outbox.lock();
        while let Some((packet, fds)) = outbox.front() {
            let borrowed: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
            match send(&self.socket, packet, &borrowed) {
                Ok(()) => drop(outbox.pop_front()),
                Err(Errno::AGAIN) => return outbox.len() <= OUTBOX,
                Err(_) => return false,
            }
        }
        self.server.reactor.await_room(self.id, self.socket.as_fd(), false);
        true
    }

    /// Handles one packet. An error ends the conversation.
    fn handle(self: &Arc<Self>, packet: &Packet<'_>) -> Result<()> {
        match ToOwner::decode(packet.bytes)? {
            ToOwner::Request(Request::Hello(hello)) => self.greet(&hello),
            ToOwner::Request(Request::Map(request)) => self.map(request),
            ToOwner::Notify { token, data } => {
                let Some(name) = self.serving(|serving| Arc::clone(&serving.name)) else {
                    return Err(too_early());
                };
                let refusal =
                    self.server.events.notified(&name, &data).err().map(|error| Refusal::of(&error));
                self.post(&ToClient::Notified { token, refusal }, Vec::new());
                Ok(())
            }
        }
    }

    fn serving<T>(&self, with: impl FnOnce(&mut Serving) -> T) -> Option<T> {
        match &mut *self.phase.lock() {
            Phase::Serving(serving) => Some(with(serving)),
            Phase::Greeting | Phase::Over => None,
        }
    }

    fn greet(self: &Arc<Self>, theirs: &ClientHello) -> Result<()> {
        let result = self.admit(theirs);
        if let Err(error) = &result {
            // At once, since the conversation ends here.
            let _ = send(&self.socket, &ToClient::Refused(Refusal::of(error)).encode(), &[]);
        }
        result
    }

    fn admit(self: &Arc<Self>, theirs: &ClientHello) -> Result<()> {
        let server = &self.server;
        let identity = &server.identity;
        if !matches!(*self.phase.lock(), Phase::Greeting) {
            return Err(Error::new(ErrorKind::Malformed, "a second hello on one rendezvous"));
        }
        if theirs.nonce != identity.nonce {
            return Err(Error::new(
                ErrorKind::PeerRefused,
                "the nonce is not the one that was published here",
            ));
        }
        check_host_ids(identity.host_id.as_deref(), theirs.host_id.as_deref())?;
        identity.hello.agree(&theirs.hello)?;

        let (slots_file, slots) = ClientSlots::new()?;
        let client = Client::new(slots);
        let watch = server.reactor.number();
        let pidfd = peer_pidfd(&self.socket, peer_credentials(&self.socket)?)?;
        let died = {
            let (this, client) = (Arc::downgrade(self), Arc::clone(&client));
            let server = Arc::downgrade(server);
            move || {
                client.has_died();
                if let Some(server) = server.upgrade() {
                    server.forget(&client, watch);
                }
                if let Some(this) = this.upgrade() {
                    this.end();
                }
            }
        };
        let grants = server.owner.table().entries() as u32;
        let table =
            server.owner.table().file().try_clone().map_err(|error| Error::os("dup of a memfd", &error))?;
        let welcome = Welcome {
            hello: identity.hello.clone(),
            name: identity.name.to_string(),
            incarnation: identity.incarnation,
            grants,
            probe_address: std::ptr::from_ref(&*server.probe).addr() as u64,
            probe_value: *server.probe,
        };
        server.reactor.add(watch, Arc::new(ProcessWatch::new(pidfd, died)))?;
        server.owner.add_client(&client);
        let name = printable(&theirs.name, MAX_NAME_SHOWN).into();
        *self.phase.lock() = Phase::Serving(Serving { name, client, watch, mapped: HashSet::new() });
        self.post(&ToClient::Welcome(welcome), vec![table, slots_file]);
        Ok(())
    }

    fn map(&self, request: MapRequest) -> Result<()> {
        // In one go with counting it as mapped, so that a withdrawal meanwhile is told to the client afterwards.
        self.serving(|serving| {
            serving.mapped.insert(request.region);
            self.lend(request);
        })
        .ok_or_else(too_early)
    }

    fn lend(&self, request: MapRequest) {
        let (message, fds) = match self.server.owner.lend(request.region, request.write) {
            Err(error) => (ToClient::RegionRefused { request, refusal: Refusal::of(&error) }, Vec::new()),
            Ok(lent) => {
                let (file, offset) = lent.file.unzip();
                let reply = RegionReply {
                    request,
                    address: lent.view.address(),
                    len: lent.view.len() as u64,
                    offset,
                };
                (ToClient::Region(reply), file.into_iter().collect())
            }
        };
        self.post(&message, fds);
    }

    /// Ends the conversation. What the client still touches counts until it is over, or the client is.
    fn end(&self) {
        let server = &self.server;
        server.reactor.remove(self.id);
        server.connections.lock().remove(&self.id);
        let before = std::mem::replace(&mut *self.phase.lock(), Phase::Over);
        if let Phase::Serving(Serving { client, watch, .. }) = before {
            if client.is_quiet() {
                server.forget(&client, watch);
            } else {
                server.lingering.lock().push((client, watch));
            }
        }
    }
}

fn too_early() -> Error {
    Error::new(ErrorKind::Malformed, "a rendezvous begins with a hello")
}

impl Source for Connection {
    fn fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    fn ready(self: Arc<Self>, buffer: &mut PacketBuffer) {
        for _ in 0..TURN {
            if !self.outbox.lock().is_empty() {
                // A client that does not read its answers is not asked for more.
                break;
            }
            let over = match buffer.receive(&self.socket) {
                Ok(None) => break,
                Ok(Some(packet)) if packet.bytes.is_empty() => Ok(true),
                Ok(Some(packet)) => self.handle(&packet).map(|()| false),
                Err(error) => Err(error),
            };
            match over {
                Ok(false) => {}
                Ok(true) => return self.end(),
                Err(error) => {
                    tracing::warn!(%error, "a shared-memory client was let go");
                    return self.end();
                }
            }
            // Answer by answer, so that the box is empty again when the client reads.
            if !self.flush() {
                return self.end();
            }
        }
        if !self.flush() {
            self.end();
        }
    }

    fn tick(self: Arc<Self>) {
        let greeting = matches!(*self.phase.lock(), Phase::Greeting);
        if greeting && self.since.elapsed() > self.server.liveness {
            self.end();
        }
    }
}

impl fmt::Debug for Connection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Connection").field("id", &self.id).field("phase", &self.phase).finish_non_exhaustive()
    }
}
