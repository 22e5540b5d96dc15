//! The threads that move bytes: each owns an epoll instance, some lanes and some served connections.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io;
use std::net::{TcpListener, TcpStream};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use posthorse_core::{Error, ErrorKind, Result, TransportContext, spin};
use posthorse_segment::descriptors;
use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::event::{EventfdFlags, Timespec, eventfd};

use crate::config::TcpConfig;
use crate::flow;
use crate::greeting::{Greeting, Step};
use crate::hello::{Answer, Call, LaneKey};
use crate::lane::{Driver, Lane, want};
use crate::lane_io::tune;
use crate::serve::{Notified, Serve};
use crate::slots::Slot;
use crate::watched::Watched;

/// The key of the wake-up; listeners come next, then everything else.
const WAKE: u64 = 0;
/// How many connections may be open whose peer has not said who it is, if not half of all.
const MIN_GREETINGS: usize = 256;
/// How many lanes without a connection are remembered, for the notifications that they delivered.
const MAX_REMEMBERED: usize = 4096;
/// How many connections are accepted in one go.
const ACCEPTS: usize = 64;

/// What a reactor is told from outside.
#[derive(Debug)]
pub(crate) enum Command {
    /// Look after a new lane.
    Lane(Arc<Lane>),
    /// A lane has something to do.
    Drive(Arc<Lane>),
    /// Serve a connection whose peer has said who it is.
    Serve(Box<Arrival>),
    /// End.
    Stop,
}

/// A connection on its way to the reactor that serves its lane.
#[derive(Debug)]
pub(crate) struct Arrival {
    call: Call,
    socket: Watched<TcpStream>,
    slot: Slot,
}

/// How other threads reach a reactor.
#[derive(Debug)]
pub(crate) struct Handle {
    epoll: OwnedFd,
    wake: OwnedFd,
    inbox: Mutex<Inbox>,
    parked: AtomicBool,
}

#[derive(Debug, Default)]
struct Inbox {
    commands: Vec<Command>,
    closed: bool,
}

impl Handle {
    /// # Errors
    /// `Io` or `LimitReached` when the system has no more descriptors.
    pub(crate) fn new() -> Result<Self> {
        let refused = |error: rustix::io::Errno| Error::os("making a reactor", &error.into());
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(refused)?;
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map_err(refused)?;
        epoll::add(&epoll, &wake, EventData::new_u64(WAKE), EventFlags::IN).map_err(refused)?;
        Ok(Self { epoll, wake, inbox: Mutex::new(Inbox::default()), parked: AtomicBool::new(false) })
    }

    /// Tells the reactor something. The inbox is bounded by the lanes and connections there are.
    pub(crate) fn push(&self, command: Command) {
        let mut inbox = self.inbox.lock();
        if inbox.closed {
            return;
        }
        inbox.commands.push(command);
        drop(inbox);
        if self.parked.swap(false, Ordering::SeqCst) {
            // The counter cannot overflow: it is emptied at each wake-up.
            let _ = rustix::io::write(&self.wake, &1_u64.to_ne_bytes());
        }
    }

    /// # Errors
    /// As `epoll_ctl(2)`.
    pub(crate) fn watch(&self, fd: BorrowedFd<'_>, key: u64, interest: EventFlags) -> Result<()> {
        epoll::add(&self.epoll, fd, EventData::new_u64(key), interest)
            .map_err(|error| Error::os("watching a socket", &error.into()))
    }

    /// # Errors
    /// As `epoll_ctl(2)`.
    pub(crate) fn rewatch(&self, fd: BorrowedFd<'_>, key: u64, interest: EventFlags) -> Result<()> {
        epoll::modify(&self.epoll, fd, EventData::new_u64(key), interest)
            .map_err(|error| Error::os("watching a socket", &error.into()))
    }

    pub(crate) fn unwatch(&self, fd: BorrowedFd<'_>) {
        let _ = epoll::delete(&self.epoll, fd);
    }

    /// The keys of what is ready, for tests.
    #[cfg(test)]
    pub(crate) fn wait(&self, timeout: Duration) -> Vec<u64> {
        let mut events: Vec<epoll::Event> = Vec::with_capacity(16);
        let timeout = Timespec::try_from(timeout).unwrap();
        epoll::wait(&self.epoll, rustix::buffer::spare_capacity(&mut events), Some(&timeout)).unwrap();
        events.iter().map(|event| event.data.u64()).collect()
    }
}

/// What all reactors of a transport share.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) context: TransportContext,
    pub(crate) config: Arc<TcpConfig>,
    pub(crate) handles: Vec<Arc<Handle>>,
    /// The next key of a lane or connection.
    pub(crate) next_key: AtomicU64,
    connections: Arc<AtomicUsize>,
    /// How many of them were greetings at the last tick.
    greetings: AtomicUsize,
    /// How many there may be.
    limit: usize,
    /// When the system had no descriptor for one more.
    exhausted: Mutex<Option<Instant>>,
}

impl Shared {
    pub(crate) fn new(context: TransportContext, config: Arc<TcpConfig>, handles: Vec<Arc<Handle>>) -> Self {
        // Keys below belong to the wake-up and the listeners.
        let next_key = AtomicU64::new(1 << 16);
        let connections = Arc::new(AtomicUsize::new(0));
        let limit = descriptors::connections(config.max_connections, 3);
        let (greetings, exhausted) = (AtomicUsize::new(0), Mutex::default());
        Self { context, config, handles, next_key, connections, greetings, limit, exhausted }
    }

    /// Whether there is no room for one more peer, but for those that make it.
    fn is_short(&self) -> bool {
        // Whoever listens does so anew at a tick: the next after that still has to know.
        let lately = 3 * self.config.tick();
        self.known() >= self.limit || self.exhausted.lock().is_some_and(|at| at.elapsed() < lately)
    }

    /// How many connections are not greetings: these make room for others whenever it is wanted.
    fn known(&self) -> usize {
        let all = self.connections.load(Ordering::Relaxed);
        all.saturating_sub(self.greetings.load(Ordering::Relaxed))
    }

    fn key(&self) -> u64 {
        self.next_key.fetch_add(1, Ordering::Relaxed)
    }
}

#[derive(Debug, Default)]
struct Session {
    connection: Option<u64>,
    notified: Notified,
}

/// A thread's own state.
#[derive(Debug)]
pub(crate) struct Reactor {
    shared: Arc<Shared>,
    handle: Arc<Handle>,
    listeners: Vec<Watched<TcpListener>>,
    listening: bool,
    lanes: HashMap<u64, Arc<Lane>>,
    greetings: BTreeMap<u64, (Greeting, Slot)>,
    served: HashMap<u64, (Serve, Slot)>,
    sessions: HashMap<LaneKey, Session>,
    /// Sessions in the order in which they lost their connection.
    forgettable: VecDeque<LaneKey>,
    stopping: bool,
}

impl Reactor {
    pub(crate) fn new(shared: Arc<Shared>, handle: Arc<Handle>, listeners: Vec<TcpListener>) -> Self {
        Self {
            shared,
            handle,
            listeners: listeners.into_iter().map(Watched::new).collect(),
            listening: false,
            lanes: HashMap::new(),
            greetings: BTreeMap::new(),
            served: HashMap::new(),
            sessions: HashMap::new(),
            forgettable: VecDeque::new(),
            stopping: false,
        }
    }

    /// Works until told to stop and every lane has ended.
    pub(crate) fn run(mut self) {
        let spin_for = Duration::from_micros(self.shared.config.spin_us);
        let tick = self.shared.config.tick();
        let mut events: Vec<epoll::Event> = Vec::with_capacity(256);
        let mut next_tick = Instant::now() + tick;
        let mut spin_until = Instant::now();
        self.listen();
        loop {
            let busy = self.take_inbox();
            if self.stopping && self.lanes.is_empty() {
                break;
            }
            let now = Instant::now();
            if now >= next_tick {
                self.tick();
                next_tick = now + tick;
            }
            let polling = busy || self.stopping || (now < spin_until && spin::pays(now));
            let timeout = if polling { Some(Duration::ZERO) } else { self.patience(next_tick - now) };
            if !polling {
                self.handle.parked.store(true, Ordering::SeqCst);
                if !self.handle.inbox.lock().commands.is_empty() {
                    self.handle.parked.store(false, Ordering::SeqCst);
                    continue;
                }
            }
            events.clear();
            let timeout = timeout.and_then(|timeout| Timespec::try_from(timeout).ok());
            let waited = epoll::wait(
                &self.handle.epoll,
                rustix::buffer::spare_capacity(&mut events),
                timeout.as_ref(),
            );
            self.handle.parked.store(false, Ordering::SeqCst);
            if let Err(error) = waited
                && error != rustix::io::Errno::INTR
            {
                tracing::error!(%error, "waiting for sockets");
                std::thread::sleep(Duration::from_millis(1));
            }
            let mut moved = busy;
            for event in &events {
                moved |= self.ready(event.data.u64());
            }
            if moved {
                spin_until = Instant::now() + spin_for;
            } else if polling {
                // Whoever waits for what we just reported may need this core.
                spin::give_way();
            }
        }
        let mut inbox = self.handle.inbox.lock();
        inbox.closed = true;
        let left = std::mem::take(&mut inbox.commands);
        drop(inbox);
        drop(left);
    }

    /// How long to sleep: until the next tick, or for ever when nobody needs one.
    fn patience(&self, until_tick: Duration) -> Option<Duration> {
        let idle = self.lanes.is_empty()
            && self.greetings.is_empty()
            && self.served.is_empty()
            && (self.listening || self.listeners.is_empty());
        if idle { None } else { Some(until_tick) }
    }

    fn take_inbox(&mut self) -> bool {
        let commands = std::mem::take(&mut self.handle.inbox.lock().commands);
        let busy = !commands.is_empty();
        for command in commands {
            match command {
                Command::Lane(lane) => {
                    self.lanes.insert(lane.key, Arc::clone(&lane));
                    self.drive(&lane, want::IO);
                }
                Command::Drive(lane) => {
                    lane.taken();
                    self.drive(&lane, want::SEND);
                }
                Command::Serve(arrival) => self.serve(*arrival),
                Command::Stop => self.stop(),
            }
        }
        busy
    }

    fn drive(&mut self, lane: &Arc<Lane>, wants: u8) -> bool {
        let driven = lane.drive(wants, Driver::Reactor);
        if lane.has_ended() {
            self.lanes.remove(&lane.key);
        }
        driven
    }

    fn ready(&mut self, key: u64) -> bool {
        if key == WAKE {
            let mut counter = [0_u8; 8];
            let _ = rustix::io::read(&self.handle.wake, &mut counter);
            return true;
        }
        if key <= self.listeners.len() as u64 {
            self.accept(key as usize - 1);
            return true;
        }
        if let Some(lane) = self.lanes.get(&key).cloned() {
            return self.drive(&lane, want::IO);
        }
        if self.served.contains_key(&key) {
            self.serve_ready(key);
            return true;
        }
        if self.greetings.contains_key(&key) {
            self.greet(key);
            return true;
        }
        // It ended while we handled an event before this one.
        false
    }

    fn listen(&mut self) {
        self.listening = true;
        for (at, listener) in self.listeners.iter_mut().enumerate() {
            if let Err(error) = listener.watch(&self.handle, at as u64 + 1, EventFlags::IN) {
                tracing::warn!(%error, "listening");
                self.listening = false;
            }
        }
    }

    fn stop_listening(&mut self) {
        self.listening = false;
        self.listeners.iter_mut().for_each(Watched::unwatch);
    }

    fn accept(&mut self, at: usize) {
        for _ in 0..ACCEPTS {
            let Some(listener) = self.listeners.get(at) else { return };
            match listener.accept() {
                Ok((socket, _)) => self.welcome(Watched::new(socket)),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => {}
                Err(error) => {
                    // Out of descriptors, most likely: one that says nothing does not keep others out. Without such,
                    // trying again at once would only burn the core.
                    if self.push_out(&Error::os("accepting another connection", &error)) {
                        continue;
                    }
                    tracing::warn!(%error, "accepting a connection; trying again later");
                    *self.shared.exhausted.lock() = Some(Instant::now());
                    return self.stop_listening();
                }
            }
        }
    }

    fn welcome(&mut self, mut socket: Watched<TcpStream>) {
        let limit = self.shared.limit;
        // Whoever opens connections and says nothing pushes out its own kind, not those who are known.
        let most = MIN_GREETINGS.max(limit / 2);
        if self.greetings.len() >= most {
            let text = format!("{most} connections have not said who they are; accepted: as many");
            self.push_out(&Error::new(ErrorKind::LimitReached, text));
        }
        let slot = loop {
            let slot = Slot::take(&self.shared.connections, limit);
            if slot.is_some() || !self.push_out(&too_many(limit)) {
                break slot;
            }
        };
        let Some(slot) = slot else {
            tracing::warn!(limit, "a connection was refused: max_connections is reached");
            return refuse(&socket, &too_many(limit));
        };
        let raw = socket2::SockRef::from(&*socket);
        if raw.set_nonblocking(true).and_then(|()| tune(&raw, &self.shared.config)).is_err() {
            return;
        }
        let key = self.shared.key();
        if socket.watch(&self.handle, key, EventFlags::IN).is_ok() {
            self.greetings.insert(key, (Greeting::new(socket), slot));
        }
    }

    /// Ends the oldest greeting of those whose peer has not said by now who it is. False when there is none.
    fn push_out(&mut self, why: &Error) -> bool {
        while let Some(key) = self.greetings.keys().next().copied() {
            // Its hello may have come, only not its turn.
            self.greet(key);
            if let Some((greeting, _)) = self.greetings.remove(&key) {
                refuse(&greeting.into_socket(), why);
                return true;
            }
        }
        false
    }

    fn greet(&mut self, key: u64) {
        let Some((greeting, _)) = self.greetings.get_mut(&key) else { return };
        let outcome = match greeting.step() {
            Ok(Step::More) => return,
            Ok(Step::Call(call)) => Ok(call),
            Err(error) => Err(error),
        };
        let Some((greeting, slot)) = self.greetings.remove(&key) else { return };
        let mut socket = greeting.into_socket();
        socket.unwatch();
        let agreed = outcome.and_then(|call| self.shared.context.hello.agree(&call.hello).map(|_| call));
        match agreed {
            Ok(call) => {
                // All connections of a lane meet at one reactor, so that a new one can end the old one first.
                let mut hasher = DefaultHasher::new();
                call.key.hash(&mut hasher);
                let handles = &self.shared.handles;
                let at = (hasher.finish() % handles.len() as u64) as usize;
                let arrival = Arrival { call: *call, socket, slot };
                if Arc::ptr_eq(&handles[at], &self.handle) {
                    self.serve(arrival);
                } else {
                    handles[at].push(Command::Serve(Box::new(arrival)));
                }
            }
            Err(error) => {
                tracing::debug!(%error, "a connection was refused");
                if error.kind() != ErrorKind::Malformed {
                    refuse(&socket, &error);
                }
            }
        }
    }

    fn serve(&mut self, arrival: Arrival) {
        let Arrival { call, mut socket, slot } = arrival;
        if self.stopping {
            return;
        }
        let known = self.sessions.contains_key(&call.key);
        let hello = self.shared.context.hello.clone();
        let incarnation = self.shared.context.incarnation;
        let tells_taken = call.tells_taken && flow::tells_taken(&socket, &self.shared.config);
        let welcome = Answer::Welcome { hello, incarnation, known, tells_taken };
        let Ok(welcome) = welcome.encode() else { return };
        let key = self.shared.key();
        if socket.watch(&self.handle, key, EventFlags::empty()).is_err() {
            return;
        }
        let session = self.sessions.entry(call.key).or_default();
        // The older connection ends before the answer: nothing of it touches memory after that.
        if let Some(old) = session.connection.take() {
            self.served.remove(&old);
        }
        session.connection = Some(key);
        self.served.insert(key, (Serve::new(call, tells_taken, socket, welcome, &self.shared.config), slot));
        self.serve_ready(key);
    }

    fn serve_ready(&mut self, key: u64) {
        let Some((serve, _)) = self.served.get_mut(&key) else { return };
        let Some(session) = self.sessions.get_mut(&serve.key) else { return };
        let shared = &self.shared;
        let outcome = serve.run(&shared.context, &mut session.notified, &shared.config).and_then(|()| {
            let interest = serve.interest();
            interest.map_or(Ok(()), |interest| serve.socket().rewatch(interest))
        });
        if let Err(error) = outcome {
            self.drop_served(key, &error);
        }
    }

    fn drop_served(&mut self, key: u64, error: &Error) {
        tracing::debug!(%error, "a peer's connection has ended");
        let Some((serve, _)) = self.served.remove(&key) else { return };
        if let Some(session) = self.sessions.get_mut(&serve.key) {
            session.connection = None;
        }
        self.forgettable.push_back(serve.key);
        if self.forgettable.len() > MAX_REMEMBERED
            && let Some(oldest) = self.forgettable.pop_front()
            && self.sessions.get(&oldest).is_some_and(|session| session.connection.is_none())
        {
            self.sessions.remove(&oldest);
        }
    }

    fn tick(&mut self) {
        for lane in self.lanes.values().cloned().collect::<Vec<_>>() {
            self.drive(&lane, want::IO | want::TICK);
        }
        let timeout = self.shared.config.connect_timeout();
        self.greetings.retain(|_, (greeting, _)| greeting.age() < timeout);
        if !self.listeners.is_empty() {
            self.shared.greetings.store(self.greetings.len(), Ordering::Relaxed);
        }
        let config = &self.shared.config;
        let short = self.shared.is_short();
        let judged: Vec<(u64, Error)> = self
            .served
            .iter_mut()
            .filter_map(|(key, (serve, _))| serve.tick(config, short).err().map(|error| (*key, error)))
            .collect();
        for (key, error) in judged {
            self.drop_served(key, &error);
        }
        if !self.listening && !self.stopping && !self.listeners.is_empty() {
            self.listen();
        }
    }

    fn stop(&mut self) {
        self.stopping = true;
        self.stop_listening();
        self.listeners.clear();
        self.greetings.clear();
        self.served.clear();
        self.sessions.clear();
    }
}

fn too_many(limit: usize) -> Error {
    let text = format!(
        "{limit} connections are open; accepted: max_connections, if descriptors suffice (ulimit -n)"
    );
    Error::new(ErrorKind::LimitReached, text)
}

/// Tells a peer why it is not served. Best effort: a fresh socket's buffer has room for it.
fn refuse(socket: &TcpStream, error: &Error) {
    if let Ok(answer) = Answer::refusal(error).encode() {
        let _ = rustix::net::send(socket, &answer, rustix::net::SendFlags::NOSIGNAL);
    }
}
