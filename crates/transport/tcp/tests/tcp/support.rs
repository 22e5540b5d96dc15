//! Two transports with real registries, and what happened to them.

use std::collections::{HashMap, HashSet};
use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use posthorse_core::*;
use posthorse_segment::Registry;
use posthorse_tcp::{TcpConfig, TcpTransport};

/// How long anything may take before a test fails.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// Heap memory that is leaked, so that a defect shows as a wrong byte rather than as a crash.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Memory(HostView);

// SAFETY: the memory is leaked, and the tests touch it only while no transfer does.
unsafe impl Region for Memory {
    fn view(&self) -> View {
        View::Host(self.0)
    }
}

impl Memory {
    pub(crate) fn new(len: usize) -> Self {
        Self(HostView::of_mut(vec![0_u8; len].leak()))
    }

    pub(crate) fn patterned(len: usize, seed: u64) -> Self {
        let memory = Self::new(len);
        memory.fill(seed);
        memory
    }

    pub(crate) fn fill(self, seed: u64) {
        let mut state = seed | 1;
        for byte in self.bytes_mut().chunks_mut(8) {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            byte.copy_from_slice(&(state ^ (state >> 33)).to_le_bytes()[..byte.len()]);
        }
    }

    pub(crate) fn bytes(self) -> &'static [u8] {
        // SAFETY: leaked, and read while no transfer writes to it.
        unsafe { self.0.bytes() }
    }

    pub(crate) fn bytes_mut(self) -> &'static mut [u8] {
        // SAFETY: leaked, and written while no transfer touches it.
        unsafe { self.0.bytes_mut() }
    }

    pub(crate) fn part(self, offset: usize, len: usize) -> View {
        View::Host(self.0.slice(offset, len).unwrap())
    }

    pub(crate) fn address(self) -> u64 {
        self.0.address()
    }
}

#[derive(Debug, Default)]
struct Happened {
    completions: HashMap<u64, Completion>,
    order: Vec<u64>,
    notified: Vec<(String, Vec<u8>)>,
    down: Vec<Error>,
    writable: u64,
    /// The names of the threads that reported completions.
    reporters: HashSet<String>,
    refuse_notifications: bool,
}

/// Collects events, and panics at a second completion of the same token.
#[derive(Debug, Default)]
pub(crate) struct Events {
    happened: Mutex<Happened>,
    changed: Condvar,
}

impl TransportEvents for Events {
    fn completed(&self, completions: &[Completion]) {
        let mut happened = self.happened.lock();
        happened.reporters.insert(std::thread::current().name().unwrap_or_default().to_owned());
        for completion in completions {
            happened.order.push(completion.token);
            let before = happened.completions.insert(completion.token, completion.clone());
            assert!(
                before.is_none(),
                "token {} was completed twice: {before:?}, {completion:?}",
                completion.token
            );
        }
        self.changed.notify_all();
    }

    fn writable(&self, _: PathId) {
        self.happened.lock().writable += 1;
        self.changed.notify_all();
    }

    fn path_changed(&self, _: PathId, state: &PathState) {
        if let PathState::Down(error) = state {
            self.happened.lock().down.push(error.clone());
        }
        self.changed.notify_all();
    }

    fn notified(&self, peer: &str, data: &[u8]) -> Result<()> {
        let mut happened = self.happened.lock();
        if happened.refuse_notifications {
            return Err(Error::new(ErrorKind::QueueFull, "nobody fetches them"));
        }
        happened.notified.push((peer.to_owned(), data.to_vec()));
        self.changed.notify_all();
        Ok(())
    }
}

impl Events {
    fn wait<R>(&self, what: &str, mut look: impl FnMut(&mut Happened) -> Option<R>) -> R {
        let until = Instant::now() + PATIENCE;
        let mut happened = self.happened.lock();
        loop {
            if let Some(found) = look(&mut happened) {
                return found;
            }
            let timeout = self.changed.wait_until(&mut happened, until).timed_out();
            assert!(!timeout, "{what} did not happen; there are {} completions", happened.completions.len());
        }
    }

    /// The completion of `token`, taken.
    pub(crate) fn completion(&self, token: u64) -> Result<Level, SliceError> {
        self.wait(&format!("the completion of {token}"), |happened| happened.completions.remove(&token))
            .result
    }

    pub(crate) fn error(&self, token: u64) -> (ErrorKind, FarEnd) {
        let error = self.completion(token).unwrap_err();
        (error.error.kind(), error.far_end)
    }

    /// Waits until so many completions are there, and takes them.
    pub(crate) fn completions(&self, count: usize) -> HashMap<u64, Completion> {
        self.wait(&format!("{count} completions"), |happened| {
            (happened.completions.len() >= count).then(|| std::mem::take(&mut happened.completions))
        })
    }

    pub(crate) fn reporters(&self) -> HashSet<String> {
        self.happened.lock().reporters.clone()
    }

    pub(crate) fn order(&self) -> Vec<u64> {
        self.happened.lock().order.clone()
    }

    pub(crate) fn notified(&self, count: usize) -> Vec<(String, Vec<u8>)> {
        self.wait(&format!("{count} notifications"), |happened| {
            (happened.notified.len() >= count).then(|| std::mem::take(&mut happened.notified))
        })
    }

    pub(crate) fn refuse_notifications(&self, refuse: bool) {
        self.happened.lock().refuse_notifications = refuse;
    }

    pub(crate) fn down(&self) -> Error {
        self.wait("a path going down", |happened| happened.down.pop())
    }

    pub(crate) fn is_down(&self) -> bool {
        !self.happened.lock().down.is_empty()
    }

    /// Waits until `writable` was reported once more than `seen` times, and returns how often it was.
    pub(crate) fn writable(&self, seen: u64) -> u64 {
        self.wait("writable", |happened| (happened.writable > seen).then_some(happened.writable))
    }

    pub(crate) fn writable_count(&self) -> u64 {
        self.happened.lock().writable
    }
}

impl ControlChannel for Events {
    fn request(&self, peer: &str, _: &str, _: &[u8], _: Deadline) -> Result<Vec<u8>> {
        Err(Error::new(ErrorKind::PeerUnreachable, format!("there is no way to {peer}")))
    }

    fn on_request(&self, _: &str, _: RequestHandler) {}
}

/// One side.
#[derive(Debug)]
pub(crate) struct Node {
    pub(crate) transport: TcpTransport,
    pub(crate) registry: Arc<Registry>,
    pub(crate) events: Arc<Events>,
    pub(crate) desc: SegmentDesc,
}

pub(crate) fn local() -> TcpConfig {
    TcpConfig { bind: vec!["127.0.0.1".parse().unwrap()], ..TcpConfig::default() }
}

impl Node {
    pub(crate) fn new(name: &str) -> Self {
        Self::with(name, local(), Hello::new(Features::NONE, None))
    }

    pub(crate) fn with(name: &str, config: TcpConfig, hello: Hello) -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let transport = TcpTransport::new(config).unwrap();
        let registry = Arc::new(Registry::new());
        let events = Arc::new(Events::default());
        let incarnation =
            Incarnation(NEXT.fetch_add(1, Ordering::Relaxed) | u64::from(std::process::id()) << 32);
        let published = transport
            .start(TransportContext {
                name: name.into(),
                incarnation,
                hello: hello.clone(),
                gate: Arc::clone(&registry) as Arc<dyn Gate>,
                events: Arc::clone(&events) as Arc<dyn TransportEvents>,
                control: Arc::clone(&events) as Arc<dyn ControlChannel>,
            })
            .unwrap();
        let desc = SegmentDesc {
            name: name.to_owned(),
            incarnation: Some(incarnation),
            hello: Some(hello),
            transports: [("tcp".to_owned(), published)].into(),
            buffers: Vec::new(),
        };
        Self { transport, registry, events, desc }
    }

    pub(crate) fn port(&self) -> u16 {
        self.desc.transports["tcp"]["port"].as_u64().unwrap() as u16
    }

    pub(crate) fn connect(&self, peer: &SegmentDesc) -> PathId {
        let paths = self.transport.connect(peer, Deadline::after(PATIENCE)).unwrap();
        assert!(matches!(paths[0].state, PathState::Up));
        paths[0].id
    }

    /// Registers memory for peers, and returns its region and token.
    pub(crate) fn publish(&self, memory: Memory, access: Access) -> (RegionId, GrantToken) {
        let region = self.registry.register(Arc::new(memory), access).unwrap();
        self.transport.register(&region).unwrap();
        let token = self.registry.standing_grant(region.id).unwrap().unwrap().token;
        (region.id, token)
    }

    /// Takes all of the slices, waiting for room where there is none.
    pub(crate) fn submit_all(&self, path: PathId, mut slices: &[Slice]) {
        while !slices.is_empty() {
            let seen = self.events.writable_count();
            let taken = self.submit(path, slices).unwrap();
            slices = &slices[taken..];
            if !slices.is_empty() {
                self.events.writable(seen);
            }
        }
    }

    pub(crate) fn submit(&self, path: PathId, slices: &[Slice]) -> Result<usize> {
        // SAFETY: all memory of these tests is leaked.
        unsafe { self.transport.submit(path, slices) }
    }

    /// One transfer, waited for.
    pub(crate) fn transfer(&self, path: PathId, slice: Slice) -> Result<Level, SliceError> {
        assert_eq!(self.submit(path, &[slice]).unwrap(), 1);
        self.events.completion(slice.token)
    }
}

/// A token that no other slice of this process has.
pub(crate) fn next_token() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

pub(crate) fn slice(opcode: Opcode, local: View, remote_address: u64, grant: GrantToken) -> Slice {
    Slice {
        token: next_token(),
        opcode,
        priority: Priority::Medium,
        checksum: Checksum::Off,
        level: Level::Visible,
        local,
        local_region: RegionId(1),
        remote_address,
        grant: Some(grant),
        remote_key: RemoteKey::NONE,
        ready: None,
    }
}

pub(crate) fn write(local: View, remote_address: u64, grant: GrantToken) -> Slice {
    slice(Opcode::Write, local, remote_address, grant)
}

pub(crate) fn read(local: View, remote_address: u64, grant: GrantToken) -> Slice {
    slice(Opcode::Read, local, remote_address, grant)
}

/// Something between two sides that forwards bytes, until it cuts or swallows them.
#[derive(Debug)]
pub(crate) struct Relay {
    port: u16,
    shared: Arc<Relayed>,
}

#[derive(Debug, Default)]
struct Relayed {
    /// Connections made before this one are silent: what comes in is swallowed.
    silent_below: AtomicU64,
    connections: Mutex<Vec<(TcpStream, TcpStream)>>,
    forwarded: AtomicU64,
    /// How many bytes a second it forwards in each direction, if not all it can.
    rate: Option<u32>,
}

impl Relay {
    pub(crate) fn to(port: u16) -> Self {
        Self::with(port, Relayed::default())
    }

    /// A link that is as slow as that in each direction, and keeps little on its way.
    pub(crate) fn slow(port: u16, bytes_per_second: u32) -> Self {
        Self::with(port, Relayed { rate: Some(bytes_per_second), ..Relayed::default() })
    }

    fn with(port: u16, relayed: Relayed) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let relay = Self { port: listener.local_addr().unwrap().port(), shared: Arc::new(relayed) };
        let shared = Arc::clone(&relay.shared);
        std::thread::spawn(move || {
            for (number, incoming) in (1_u64..).zip(listener.incoming()) {
                let (Ok(a), Ok(b)) = (incoming, TcpStream::connect(("127.0.0.1", port))) else { continue };
                shared.connections.lock().push((a.try_clone().unwrap(), b.try_clone().unwrap()));
                let (a2, b2) = (a.try_clone().unwrap(), b.try_clone().unwrap());
                for (from, to) in [(a, b), (b2, a2)] {
                    let shared = Arc::clone(&shared);
                    std::thread::spawn(move || forward(from, to, number, &shared));
                }
            }
        });
        relay
    }

    /// `desc`, as if its TCP transport were here.
    pub(crate) fn instead_of(&self, desc: &SegmentDesc) -> SegmentDesc {
        let mut desc = desc.clone();
        desc.transports.insert("tcp".into(), serde_json::json!({"host": "127.0.0.1", "port": self.port}));
        desc
    }

    /// Resets every connection there is.
    pub(crate) fn cut(&self) {
        for (a, b) in self.shared.connections.lock().drain(..) {
            for socket in [a, b] {
                let _ = socket2::SockRef::from(&socket).set_linger(Some(Duration::ZERO));
                let _ = socket.shutdown(Shutdown::Both);
            }
        }
    }

    /// Forwards nothing more over the connections there are; new ones work.
    pub(crate) fn silence(&self) {
        self.shared.silent_below.store(self.shared.connections.lock().len() as u64 + 1, Ordering::SeqCst);
    }

    /// Forwards nothing more, over new connections neither.
    pub(crate) fn silence_for_ever(&self) {
        self.shared.silent_below.store(u64::MAX, Ordering::SeqCst);
    }

    /// Waits until so many bytes more have been forwarded.
    pub(crate) fn forwarded(&self, more: u64) {
        let until = Instant::now() + PATIENCE;
        let target = self.shared.forwarded.load(Ordering::SeqCst) + more;
        while self.shared.forwarded.load(Ordering::SeqCst) < target {
            assert!(Instant::now() < until, "the relay forwards nothing");
            std::thread::yield_now();
        }
    }
}

fn forward(mut from: TcpStream, mut to: TcpStream, number: u64, shared: &Relayed) {
    let mut buffer = vec![0; if shared.rate.is_some() { 16 << 10 } else { 64 << 10 }];
    if shared.rate.is_some() {
        socket2::SockRef::from(&from).set_recv_buffer_size(64 << 10).unwrap();
        socket2::SockRef::from(&to).set_send_buffer_size(64 << 10).unwrap();
    }
    while let Ok(len @ 1..) = from.read(&mut buffer) {
        if number < shared.silent_below.load(Ordering::SeqCst) {
            continue;
        }
        if to.write_all(&buffer[..len]).is_err() {
            break;
        }
        shared.forwarded.fetch_add(len as u64, Ordering::SeqCst);
        if let Some(rate) = shared.rate {
            std::thread::sleep(Duration::from_secs(1) * len as u32 / rate);
        }
    }
    let _ = from.shutdown(Shutdown::Both);
    let _ = to.shutdown(Shutdown::Both);
}
