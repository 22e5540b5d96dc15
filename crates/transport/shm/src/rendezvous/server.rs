//! The owner's end of the rendezvous: lets clients in, and gives them what they may map.

use std::collections::{HashMap, HashSet, VecDeque};
use std::fmt;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use posthorse_core::{Error, ErrorKind, Hello, Incarnation, RegionId, Result, TransportEvents};
use posthorse_segment::descriptors;
use rustix::io::Errno;

use super::reactor::{Reactor, Source, SourceId};
use super::socket::{Listener, Packet, PacketBuffer, check_user, send};
use super::wire::{
    ClientHello, MapRequest, Refusal, RegionReply, Request, ToClient, ToOwner, Welcome, printable,
};
use super::{Published, check_host_ids};
use crate::client::{Client, ClientProcess};
use crate::owner::{Lent, Owner, not_registered};
use crate::slots::ClientSlots;
use crate::sys::peer_credentials;

/// Answers that wait for a client to read them; a client that leaves more unread is let go.
const OUTBOX: usize = 4096;
/// Packets of one client that are handled before others have their turn.
const TURN: usize = 16;
const MAX_NAME_SHOWN: usize = 256;
/// The most descriptors that one peer costs: its socket, its process' pidfd, and a region's while it does not read.
const DESCRIPTORS: usize = 3;

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
    /// As configured, or as many as an eighth of the descriptors suffices for.
    max_peers: usize,
    connections: Mutex<HashMap<SourceId, Arc<Connection>>>,
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
            max_peers: descriptors::connections(limits.max_peers as usize * DESCRIPTORS, 1)
                .div_ceil(DESCRIPTORS),
            connections: Mutex::default(),
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
            connection.withdraw(region);
        }
    }

    /// Ends every conversation. The reactor has stopped.
    pub(crate) fn close(&self) {
        let connections = std::mem::take(&mut *self.connections.lock());
        for connection in connections.into_values() {
            connection.end();
        }
    }

    fn accept(self: &Arc<Self>, socket: OwnedFd, buffer: &mut PacketBuffer) -> Result<()> {
        let refuse = |error: Error| {
            refuse(&socket, &error);
            error
        };
        check_user(peer_credentials(&socket)?).map_err(refuse)?;
        while self.is_full() {
            let full = format!(
                "{} peers are connected already; accepted: max_peers, if descriptors suffice (ulimit -n)",
                self.max_peers
            );
            let full = Error::new(ErrorKind::LimitReached, full);
            // Where those that were let go are as many, room is made by none but them.
            if self.owner.let_go().len() >= self.max_peers || !self.push_out(&full, buffer) {
                return Err(refuse(full));
            }
        }
        let id = self.reactor.number();
        let connection = Arc::new(Connection {
            id,
            socket: Arc::new(socket),
            server: Arc::clone(self),
            since: Instant::now(),
            phase: Mutex::new(Phase::Greeting),
            outbox: Mutex::default(),
        });
        self.connections.lock().insert(id, Arc::clone(&connection));
        self.reactor.add(id, connection).inspect_err(|_| {
            self.connections.lock().remove(&id);
        })
    }

    fn is_full(&self) -> bool {
        // Those that were let go count until they are gone, or whoever does not go could come again and again.
        self.connections.lock().len() + self.owner.let_go().len() >= self.max_peers
    }

    /// Ends the oldest conversation of those that have not begun with a hello, unless that has come by now. False when
    /// there is none.
    fn push_out(&self, why: &Error, buffer: &mut PacketBuffer) -> bool {
        let greeting = |connection: &&Arc<Connection>| connection.is_greeting();
        let oldest =
            self.connections.lock().values().filter(greeting).min_by_key(|greeting| greeting.id).cloned();
        let Some(oldest) = oldest else { return false };
        // Its hello may be there, only not its turn.
        Arc::clone(&oldest).ready(buffer);
        if oldest.is_greeting() {
            refuse(&oldest.socket, why);
            oldest.end();
        }
        true
    }
}

/// Says to a client why the conversation ends.
fn refuse(socket: &OwnedFd, why: &Error) {
    let _ = send(socket, &ToClient::Refused(Refusal::of(why)).encode(), &[]);
}

/// The listener as a source, which has to hand out its `Arc`.
impl Source for Server {
    fn fd(&self) -> BorrowedFd<'_> {
        self.listener.as_fd()
    }

    fn ready(self: Arc<Self>, buffer: &mut PacketBuffer) {
        for _ in 0..TURN {
            match self.listener.accept() {
                Ok(None) => break,
                Ok(Some(socket)) => {
                    if let Err(error) = self.accept(socket, buffer) {
                        tracing::warn!(%error, "a shared-memory client was refused");
                    }
                }
                Err(error) => {
                    // Out of descriptors, most likely.
                    let error = Error::os("accepting a shared-memory client", &error.into());
                    if self.push_out(&error, buffer) {
                        continue;
                    }
                    tracing::error!(%error, "trying again later");
                    self.reactor.await_room(self.id, self.listener.as_fd(), true);
                    break;
                }
            }
        }
    }

    fn tick(self: Arc<Self>) {
        self.reactor.await_room(self.id, self.listener.as_fd(), false);
        self.owner.forget_gone();
    }
}

struct Connection {
    id: SourceId,
    socket: Arc<OwnedFd>,
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
    mapped: HashSet<RegionId>,
}

impl Connection {
    /// Leaves an answer to be sent by the reactor's thread, in order. Whoever is another thread has to wake it.
    fn post(&self, message: &ToClient, fds: Vec<OwnedFd>) {
        self.outbox.lock().push_back((message.encode(), fds));
    }

    fn withdraw(&self, region: RegionId) {
        let had_it = self.serving(|serving| {
            let had_it = serving.mapped.remove(&region);
            if had_it {
                // In one go, so that the client is lent the region before it hears of this, or not at all.
                self.post(&ToClient::Withdrawn { region }, Vec::new());
            }
            had_it
        });
        if had_it == Some(true) {
            self.server.reactor.await_room(self.id, self.socket.as_fd(), true);
        }
    }

    /// Sends what is left to be sent, on the reactor's thread. False when the client is to be let go.
    fn flush(&self) -> bool {
        loop {
            while let Some((packet, fds)) = self.next_to_send() {
                let borrowed: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
                match send(&self.socket, &packet, &borrowed) {
                    Ok(()) => {}
                    Err(Errno::AGAIN) => {
                        let mut outbox = self.outbox.lock();
                        outbox.push_front((packet, fds));
                        let bearable = outbox.len() <= OUTBOX;
                        drop(outbox);
                        self.server.reactor.await_room(self.id, self.socket.as_fd(), true);
                        return bearable;
                    }
                    Err(_) => return false,
                }
            }
            self.server.reactor.await_room(self.id, self.socket.as_fd(), false);
            // Who left something meanwhile may have woken us before that.
            if self.outbox.lock().is_empty() {
                return true;
            }
        }
    }

    fn next_to_send(&self) -> Option<(Vec<u8>, Vec<OwnedFd>)> {
        self.outbox.lock().pop_front()
    }

    /// Handles one packet. An error ends the conversation.
    fn handle(&self, packet: &Packet<'_>) -> Result<()> {
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

    fn is_greeting(&self) -> bool {
        matches!(*self.phase.lock(), Phase::Greeting)
    }

    fn serving<T>(&self, with: impl FnOnce(&mut Serving) -> T) -> Option<T> {
        match &mut *self.phase.lock() {
            Phase::Serving(serving) => Some(with(serving)),
            Phase::Greeting | Phase::Over => None,
        }
    }

    fn greet(&self, theirs: &ClientHello) -> Result<()> {
        let result = self.admit(theirs);
        if let Err(error) = &result {
            // At once, since the conversation ends here.
            refuse(&self.socket, error);
        }
        result
    }

    fn admit(&self, theirs: &ClientHello) -> Result<()> {
        let server = &self.server;
        let identity = &server.identity;
        if !self.is_greeting() {
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

        let (process, others) = server.owner.share_process(ClientProcess::of(&self.socket)?);
        let most = server.max_peers.div_ceil(2);
        if others >= most {
            let full =
                format!("this process has {others} connections here; accepted: {most}, half of all places");
            return Err(Error::new(ErrorKind::LimitReached, full));
        }
        let (slots_file, slots) = ClientSlots::new()?;
        let client = Client::new(slots, Arc::clone(&self.socket), process);
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
        server.owner.add_client(&client);
        let name = printable(&theirs.name, MAX_NAME_SHOWN).into();
        *self.phase.lock() = Phase::Serving(Serving { name, client, mapped: HashSet::new() });
        self.post(&ToClient::Welcome(welcome), vec![table, slots_file]);
        Ok(())
    }

    fn map(&self, request: MapRequest) -> Result<()> {
        let region = request.region;
        // Before it is lent, so that it is seen if it is withdrawn meanwhile.
        let new = self.serving(|serving| serving.mapped.insert(region)).ok_or_else(too_early)?;
        let lent = self.server.owner.lend(region, request.write);
        self.serving(|serving| match lent {
            Ok(Lent { view, file }) if serving.mapped.contains(&region) => {
                let (file, offset) = file.unzip();
                let (address, len) = (view.address(), view.len() as u64);
                let reply = RegionReply { request, address, len, offset };
                self.post(&ToClient::Region(reply), file.into_iter().collect());
            }
            // It was withdrawn: the client is refused what it would have to give up at once.
            Ok(_) => self.refuse(request, &not_registered(region)),
            Err(error) => {
                // Or a client that asks for what there is not would have us remember all of it.
                if new {
                    serving.mapped.remove(&region);
                }
                self.refuse(request, &error);
            }
        })
        .ok_or_else(too_early)
    }

    fn refuse(&self, request: MapRequest, error: &Error) {
        self.post(&ToClient::RegionRefused { request, refusal: Refusal::of(error) }, Vec::new());
    }

    /// Ends the conversation. The client counts until it is over.
    fn end(&self) {
        let server = &self.server;
        server.reactor.remove(self.id);
        server.connections.lock().remove(&self.id);
        let before = std::mem::replace(&mut *self.phase.lock(), Phase::Over);
        if let Phase::Serving(Serving { client, .. }) = before {
            client.let_go();
            server.owner.forget_gone();
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
        let client = self.serving(|serving| Arc::clone(&serving.client));
        let over = match client {
            None => self.since.elapsed() > self.server.liveness,
            // Its socket may be open still, in a child of it.
            Some(client) => client.has_died(),
        };
        if over {
            self.end();
        }
    }
}

impl fmt::Debug for Connection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Connection").field("id", &self.id).field("phase", &self.phase).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use posthorse_core::{
        Access, Completion, Deadline, Features, Grant, GrantDesc, GrantToken, Location, PathId, PathState,
        Region, RegisteredRegion, SharedFile, View,
    };
    use posthorse_memory::{HostMemory, MemoryOptions};
    use posthorse_testkit::peer;
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

    use super::*;
    use crate::rendezvous::socket::connect_to;
    use crate::slots::Slots;
    use crate::table::{PeerHash, PeerTable};

    const ME: &str = "client:1";
    const TOKEN: GrantToken = GrantToken { handle: 0, secret: 5 };

    #[derive(Debug)]
    struct Unheard;

    impl TransportEvents for Unheard {
        fn completed(&self, _: &[Completion]) {}
        fn writable(&self, _: PathId) {}
        fn path_changed(&self, _: PathId, _: &PathState) {}
        fn notified(&self, _: &str, _: &[u8]) -> Result<()> {
            Ok(())
        }
    }

    /// A server whose owner has granted a region for reading.
    struct Served {
        owner: Arc<Owner>,
        reactor: Arc<Reactor>,
        server: Arc<Server>,
    }

    fn soon() -> Deadline {
        Deadline::after(Duration::from_secs(30))
    }

    impl Served {
        fn new(max_peers: u32) -> Self {
            let owner = Arc::new(Owner::new(4).unwrap());
            let region = Arc::new(MemoryOptions::new(4096).shared(true).allocate().unwrap());
            let registered = RegisteredRegion { id: RegionId(1), region, access: Access::None };
            owner.register(&registered).unwrap();
            let address = registered.region.view().host().unwrap().address();
            let (access, attributes) = (Access::Read, BTreeMap::new());
            let desc =
                GrantDesc { region: RegionId(1), address, len: 4096, access, token: TOKEN, attributes };
            owner.grant(&Grant { desc: &desc, peer: None }).unwrap();
            let reactor = Reactor::start(Duration::from_millis(5)).unwrap();
            let identity = Identity {
                name: "owner:1".into(),
                incarnation: Incarnation(1),
                hello: Hello::new(Features::NONE, None),
                nonce: "n".to_owned(),
                host_id: None,
            };
            let listener = Listener::bind(None).unwrap();
            let limits = Limits { liveness: Duration::from_secs(60), max_peers };
            let server =
                Server::start(listener, identity, Arc::clone(&owner), Arc::new(Unheard), &reactor, limits);
            Self { owner, reactor, server: server.unwrap() }
        }

        /// Whether the grant can be ended at once.
        fn is_quiet(&self) -> bool {
            self.owner.revoke(TOKEN, Deadline::after(Duration::from_millis(20))).is_ok()
        }

        fn await_no_clients(&self) {
            crate::owner::wait_until(soon(), "the clients to be forgotten", || self.owner.clients() == 0)
                .unwrap();
        }
    }

    impl Drop for Served {
        fn drop(&mut self) {
            self.reactor.stop();
            self.server.close();
        }
    }

    /// A client whose threads know nothing of what its socket hears.
    struct Deaf {
        socket: OwnedFd,
        buffer: PacketBuffer,
        table: PeerTable,
        slots: Arc<Slots>,
    }

    impl Deaf {
        fn connect(served: &Served) -> Result<Self> {
            Self::meet(served.server.published())
        }

        fn meet(published: Published) -> Result<Self> {
            let socket = connect_to(&published.socket, soon())?;
            let hello = ClientHello {
                hello: Hello::new(Features::NONE, None),
                name: ME.to_owned(),
                nonce: published.nonce,
                host_id: None,
            };
            let _ = send(&socket, &Request::Hello(hello).encode(), &[]);
            let mut buffer = PacketBuffer::new();
            let Packet { bytes, fds } = buffer.receive_by(&socket, soon())?;
            let welcome = match ToClient::decode(bytes)? {
                ToClient::Welcome(welcome) => welcome,
                ToClient::Refused(refusal) => return Err(refusal.into_error()),
                other => panic!("{other:?}"),
            };
            let [table, slots] = fds.try_into().unwrap();
            let (table, slots) = (PeerTable::map(table, welcome.grants)?, Arc::new(Slots::map(slots)?));
            Ok(Self { socket, buffer, table, slots })
        }

        /// Waits until the owner has ended the conversation.
        fn await_end(&mut self) {
            assert!(self.buffer.receive_by(&self.socket, soon()).unwrap().bytes.is_empty());
        }
    }

    #[test]
    fn a_client_that_was_let_go_counts_until_it_has_left() {
        let served = Served::new(1);
        let mut client = Deaf::connect(&served).unwrap();
        send(&client.socket, b"?", &[]).unwrap();
        client.await_end();
        // It has not heard of it yet.
        let slot = client.slots.claim();
        slot.announce(&client.table, TOKEN, PeerHash::of(ME)).unwrap();
        assert!(!served.is_quiet(), "it is inside");
        assert_eq!(Deaf::connect(&served).err().map(|error| error.kind()), Some(ErrorKind::LimitReached));
        drop(slot);
        assert!(served.is_quiet());
        assert_eq!(served.owner.clients(), 1, "it may come back");
        drop(client);
        served.await_no_clients();
        Deaf::connect(&served).unwrap();
    }

    #[test]
    fn a_client_that_has_left_counts_while_it_holds_something() {
        let served = Served::new(2);
        let client = Deaf::connect(&served).unwrap();
        let slot = client.slots.claim();
        slot.announce(&client.table, TOKEN, PeerHash::of(ME)).unwrap();
        drop(client.socket);
        let end = || served.owner.let_go().len() == 1;
        crate::owner::wait_until(soon(), "the owner to hear of it", end).unwrap();
        assert!(!served.is_quiet(), "it is inside");
        drop(slot);
        served.await_no_clients();
        assert!(served.is_quiet());
    }

    #[test]
    fn clients_of_a_server_that_closed_count_until_they_have_left() {
        let served = Served::new(2);
        let mut client = Deaf::connect(&served).unwrap();
        served.reactor.stop();
        served.server.close();
        client.await_end();
        let slot = client.slots.claim();
        slot.announce(&client.table, TOKEN, PeerHash::of(ME)).unwrap();
        assert!(!served.is_quiet(), "it is inside");
        drop(slot);
        served.owner.begin();
        assert_eq!(served.owner.clients(), 1, "it may come back");
        drop(client);
        served.owner.begin();
        assert_eq!(served.owner.clients(), 0);
    }

    #[test]
    fn those_who_say_nothing_give_way_and_are_told() {
        let served = Served::new(6);
        let published = served.server.published();
        let _client = Deaf::connect(&served).unwrap();
        let silent: Vec<_> = (0..9).map(|_| connect_to(&published.socket, soon()).unwrap()).collect();
        let mut buffer = PacketBuffer::new();
        for socket in &silent[..4] {
            let Packet { bytes, .. } = buffer.receive_by(socket, soon()).unwrap();
            let ToClient::Refused(refusal) = ToClient::decode(bytes).unwrap() else { panic!("it is let in") };
            assert_eq!(refusal.into_error().kind(), ErrorKind::LimitReached);
            assert!(buffer.receive_by(socket, soon()).unwrap().bytes.is_empty());
        }
        let clients: Vec<_> = (0..2).map(|_| Deaf::connect(&served).unwrap()).collect();
        assert_eq!((served.owner.clients(), clients.len()), (3, 2));
    }

    #[test]
    fn one_process_takes_half_of_the_places_whether_it_is_there_or_holds_on() {
        const NAME: &str =
            "rendezvous::server::tests::one_process_takes_half_of_the_places_whether_it_is_there_or_holds_on";
        if let Some(peer) = peer::child() {
            let published: Vec<String> = peer.receive(soon()).unwrap();
            let [socket, nonce] = published.try_into().unwrap();
            let published = Published { socket, host_id: None, nonce };
            let clients: Vec<_> = (0..2).map(|_| Deaf::meet(published.clone()).map(drop)).collect();
            peer.send(&clients.iter().filter(|client| client.is_ok()).count()).unwrap();
            return;
        }
        let served = Served::new(4);
        let _here = Deaf::connect(&served).unwrap();
        let left = Deaf::connect(&served).unwrap();
        let slot = left.slots.claim();
        slot.announce(&left.table, TOKEN, PeerHash::of(ME)).unwrap();
        drop(left.socket);
        let end = || served.owner.let_go().len() == 1;
        crate::owner::wait_until(soon(), "the owner to hear of it", end).unwrap();
        let error = Deaf::connect(&served).err().unwrap();
        assert_eq!(error.kind(), ErrorKind::LimitReached, "{error}");
        assert!(error.message().contains("this process has 2 connections"), "{error}");
        let other = peer::spawn(NAME, &()).unwrap();
        let Published { socket, nonce, .. } = served.server.published();
        other.send(&[socket, nonce]).unwrap();
        assert_eq!(other.receive::<usize>(soon()).unwrap(), 2);
        drop(slot);
        crate::owner::wait_until(soon(), "the place to be free", || Deaf::connect(&served).is_ok()).unwrap();
    }

    #[test]
    fn clients_that_left_and_hold_on_keep_no_descriptors() {
        let Some(peer) = peer::child() else {
            // In a process of its own, since other tests open descriptors meanwhile.
            let name = "rendezvous::server::tests::clients_that_left_and_hold_on_keep_no_descriptors";
            let peer = peer::spawn(name, &()).unwrap();
            assert_eq!(peer.receive::<String>(soon()).unwrap(), "");
            return;
        };
        let descriptors = || std::fs::read_dir("/proc/self/fd").unwrap().count();
        let served = Served::new(100);
        let before = descriptors();
        let mut held = Vec::new();
        for _ in 0..40 {
            let client = Deaf::connect(&served).unwrap();
            let slot = client.slots.claim();
            slot.announce(&client.table, TOKEN, PeerHash::of(ME)).unwrap();
            // It stays announced.
            std::mem::forget(slot);
            held.push((client.table, client.slots));
        }
        let one_pidfd = || descriptors() == before + 1;
        let waited = crate::owner::wait_until(
            Deadline::after(Duration::from_secs(10)),
            "the descriptors to be given up",
            one_pidfd,
        );
        assert!(!served.is_quiet(), "they are inside");
        let said = waited.map_err(|error| format!("{error}: {} before, {}", before, descriptors()));
        peer.send(&said.err().unwrap_or_default()).unwrap();
    }

    #[test]
    fn peers_take_no_more_than_an_eighth_of_the_descriptors() {
        let Some(peer) = peer::child() else {
            // The limit is a process's: a process of its own has it.
            let name = "rendezvous::server::tests::peers_take_no_more_than_an_eighth_of_the_descriptors";
            let peer = peer::spawn(name, &()).unwrap();
            // Half of them from one process.
            assert_eq!(peer.receive::<(usize, usize)>(soon()).unwrap(), (5, 10));
            return;
        };
        let before = getrlimit(Resource::Nofile);
        setrlimit(Resource::Nofile, Rlimit { current: Some(240), ..before }).unwrap();
        let served = Served::new(1024);
        let published = served.server.published();
        let silent: Vec<_> = (0..40).map(|_| connect_to(&published.socket, soon()).unwrap()).collect();
        // It is let in when all those have been.
        let mut clients = vec![Deaf::connect(&served).unwrap()];
        let open = served.server.connections.lock().len();
        clients.extend(std::iter::from_fn(|| Deaf::connect(&served).ok()).take(40));
        drop(silent);
        peer.send(&(clients.len(), open)).unwrap();
    }

    /// A region that is withdrawn while its file is asked for.
    #[derive(Debug)]
    struct Withdrawing {
        memory: HostMemory,
        server: Arc<Server>,
    }

    // SAFETY: the memory is what it says.
    unsafe impl Region for Withdrawing {
        fn view(&self) -> View {
            self.memory.view()
        }

        fn location(&self) -> Location {
            self.memory.location()
        }

        fn writable(&self) -> bool {
            true
        }

        fn shared_file(&self) -> Option<SharedFile<'_>> {
            self.server.withdraw(RegionId(2));
            self.memory.shared_file()
        }
    }

    #[test]
    fn a_region_that_is_withdrawn_while_it_is_lent_is_refused() {
        let served = Served::new(1);
        let memory = MemoryOptions::new(4096).shared(true).allocate().unwrap();
        let region = Arc::new(Withdrawing { memory, server: Arc::clone(&served.server) });
        served.owner.register(&RegisteredRegion { id: RegionId(2), region, access: Access::Read }).unwrap();
        let mut client = Deaf::connect(&served).unwrap();
        let request = MapRequest { region: RegionId(2), write: false };
        let ask = |what: Vec<u8>| send(&client.socket, &what, &[]).unwrap();
        ask(Request::Map(request).encode());
        ask(crate::rendezvous::wire::encode_notify(7, b"x"));
        let mut hear = || {
            let packet = client.buffer.receive_by(&client.socket, soon()).unwrap();
            ToClient::decode(packet.bytes).unwrap()
        };
        let refusal = Refusal::of(&not_registered(RegionId(2)));
        assert_eq!(hear(), ToClient::Withdrawn { region: RegionId(2) });
        assert_eq!(hear(), ToClient::RegionRefused { request, refusal }, "it is not lent after that");
        assert_eq!(hear(), ToClient::Notified { token: 7, refusal: None });
        served.owner.unregister(RegionId(2), soon()).unwrap();
    }

    #[test]
    fn regions_that_were_refused_are_not_remembered_and_those_that_were_lent_are() {
        let served = Served::new(1);
        let memory = MemoryOptions::new(4096).shared(true).allocate().unwrap();
        let registered = RegisteredRegion { id: RegionId(2), region: Arc::new(memory), access: Access::Read };
        served.owner.register(&registered).unwrap();
        let mut client = Deaf::connect(&served).unwrap();
        let mut is_lent = |region, write| {
            let request = Request::Map(MapRequest { region: RegionId(region), write });
            send(&client.socket, &request.encode(), &[]).unwrap();
            let packet = client.buffer.receive_by(&client.socket, soon()).unwrap();
            match ToClient::decode(packet.bytes).unwrap() {
                ToClient::Region(_) => true,
                ToClient::RegionRefused { .. } => false,
                other => panic!("{other:?}"),
            }
        };
        assert!(is_lent(2, false));
        for region in [2, 3, 4, 5] {
            assert!(!is_lent(region, true), "it is for reading, or there is none");
        }
        let connections: Vec<_> = served.server.connections.lock().values().cloned().collect();
        let mapped =
            connections.iter().map(|client| client.serving(|serving| serving.mapped.clone()).unwrap());
        assert_eq!(mapped.collect::<Vec<_>>(), [HashSet::from([RegionId(2)])]);
    }

    #[test]
    fn a_connection_that_cannot_be_watched_does_not_count() {
        let served = Served::new(1);
        served.reactor.stop();
        let (one, _other) = rustix::net::socketpair(
            rustix::net::AddressFamily::UNIX,
            rustix::net::SocketType::SEQPACKET,
            rustix::net::SocketFlags::CLOEXEC,
            None,
        )
        .unwrap();
        let error = served.server.accept(one, &mut PacketBuffer::new()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Closed, "{error}");
        assert!(served.server.connections.lock().is_empty());
    }
}
