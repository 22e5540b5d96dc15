//! What the tests of this crate share: a transport with memory, grants and a record of its events.

#![allow(dead_code)]

use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use posthorse_core::{
    Access, Admission, Checksum, Claim, Completion, ControlChannel, Deadline, Error, ErrorKind, Features,
    Gate, Grant, GrantDesc, GrantToken, Hello, HostView, Incarnation, Level, Opcode, PathId, PathState,
    Priority, Region, RegionId, RegisteredRegion, RemoteKey, RequestHandler, Result, SegmentDesc, Slice,
    Transport, TransportContext, TransportEvents, View,
};
use posthorse_memory::{HeapMemory, MemoryOptions};
use posthorse_shm::{ShmConfig, ShmTransport};
use serde_json::{Value, json};

/// Long enough for anything that is meant to happen, on a busy machine too.
pub(crate) fn soon() -> Deadline {
    Deadline::after(Duration::from_secs(30))
}

/// Records what the transport reports, and waits for it.
#[derive(Debug, Default)]
pub(crate) struct Recorder {
    seen: Mutex<Seen>,
    changed: Condvar,
    refuse_notifications: std::sync::atomic::AtomicBool,
    wakers: Mutex<VecDeque<Waker>>,
}

/// Something to be called from within an event.
struct Waker(Box<dyn FnOnce() + Send>);

impl fmt::Debug for Waker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Waker")
    }
}

#[derive(Debug, Default)]
pub(crate) struct Seen {
    pub(crate) completions: Vec<Completion>,
    pub(crate) writable: Vec<PathId>,
    pub(crate) down: Vec<(PathId, Error)>,
    pub(crate) notifications: Vec<(String, Vec<u8>)>,
}

impl Recorder {
    fn note(&self, with: impl FnOnce(&mut Seen)) {
        with(&mut self.seen.lock().unwrap());
        self.changed.notify_all();
    }

    pub(crate) fn refuse_notifications(&self) {
        self.refuse_notifications.store(true, Ordering::Relaxed);
    }

    /// Has the next report of completions that no other waker is for call `waker`, on whichever thread it comes.
    pub(crate) fn wake(&self, waker: impl FnOnce() + Send + 'static) {
        self.wakers.lock().unwrap().push_back(Waker(Box::new(waker)));
    }

    /// Waits until `what` finds something.
    pub(crate) fn wait<T>(&self, mut what: impl FnMut(&mut Seen) -> Option<T>) -> T {
        let until = Instant::now() + Duration::from_secs(60);
        let mut seen = self.seen.lock().unwrap();
        loop {
            if let Some(found) = what(&mut seen) {
                return found;
            }
            let left = until.checked_duration_since(Instant::now()).expect("it did not happen in 60 s");
            seen = self.changed.wait_timeout(seen, left).unwrap().0;
        }
    }

    /// Waits for the completion of `token`, and takes it.
    pub(crate) fn completion(&self, token: u64) -> Completion {
        self.wait(|seen| {
            let at = seen.completions.iter().position(|done| done.token == token)?;
            Some(seen.completions.swap_remove(at))
        })
    }

    pub(crate) fn completed(&self) -> usize {
        self.seen.lock().unwrap().completions.len()
    }

    /// Forgets what was completed.
    pub(crate) fn forget(&self) {
        self.seen.lock().unwrap().completions.clear();
    }
}

impl TransportEvents for Recorder {
    fn completed(&self, completions: &[Completion]) {
        // Before, as whoever sees these completions may have a waker for the next.
        let waker = self.wakers.lock().unwrap().pop_front();
        self.note(|seen| seen.completions.extend_from_slice(completions));
        if let Some(Waker(waker)) = waker {
            waker();
        }
    }

    fn writable(&self, path: PathId) {
        self.note(|seen| seen.writable.push(path));
    }

    fn path_changed(&self, path: PathId, state: &PathState) {
        if let PathState::Down(error) = state {
            self.note(|seen| seen.down.push((path, error.clone())));
        }
    }

    fn notified(&self, peer: &str, data: &[u8]) -> Result<()> {
        if self.refuse_notifications.load(Ordering::Relaxed) {
            return Err(Error::new(ErrorKind::QueueFull, "nobody fetches them"));
        }
        self.note(|seen| seen.notifications.push((peer.to_owned(), data.to_vec())));
        Ok(())
    }
}

/// Shared memory asks no gate and needs no control channel.
#[derive(Debug)]
struct Unused;

impl Gate for Unused {
    fn admit(&self, _: &Claim<'_>) -> Result<Admission> {
        Err(Error::new(ErrorKind::Unsupported, "not asked"))
    }
}

impl ControlChannel for Unused {
    fn request(&self, _: &str, _: &str, _: &[u8], _: Deadline) -> Result<Vec<u8>> {
        Err(Error::new(ErrorKind::Unsupported, "not asked"))
    }

    fn on_request(&self, _: &str, _: RequestHandler) {}
}

/// A transport that was started.
#[derive(Debug)]
pub(crate) struct Node {
    pub(crate) transport: ShmTransport,
    pub(crate) events: Arc<Recorder>,
    pub(crate) desc: SegmentDesc,
    next: AtomicU64,
}

/// A region that was registered.
#[derive(Debug)]
pub(crate) struct Registered {
    pub(crate) id: RegionId,
    pub(crate) view: HostView,
}

impl Registered {
    pub(crate) fn address(&self) -> u64 {
        self.view.address()
    }

    /// A copy of what it holds.
    pub(crate) fn bytes(&self) -> Vec<u8> {
        let mut copy = vec![0; self.view.len()];
        // SAFETY: the region is registered, so alive; copied as raw bytes, whoever writes to it meanwhile.
        unsafe { posthorse_memory::copy(self.view, HostView::of_mut(&mut copy)) }.unwrap();
        copy
    }

    /// Waits until a peer that writes another value to the first byte again and again has just done so.
    pub(crate) fn await_change(&self) {
        let mut first = [0_u8];
        let mut look = || {
            let byte = self.view.slice(0, 1).unwrap();
            // SAFETY: as above.
            unsafe { posthorse_memory::copy(byte, HostView::of_mut(&mut first)) }.unwrap();
            std::hint::black_box(first)[0]
        };
        let before = look();
        while look() == before {
            std::hint::spin_loop();
        }
    }

    pub(crate) fn fill(&self, bytes: &[u8]) {
        let part = self.view.slice(0, bytes.len()).unwrap();
        // SAFETY: as above.
        unsafe { posthorse_memory::copy(HostView::of(bytes), part) }.unwrap();
    }
}

pub(crate) fn config() -> ShmConfig {
    ShmConfig { liveness_ms: 2000, ..ShmConfig::default() }
}

fn context(name: &str, incarnation: Incarnation, hello: &Hello, events: &Arc<Recorder>) -> TransportContext {
    TransportContext {
        name: name.into(),
        incarnation,
        hello: hello.clone(),
        gate: Arc::new(Unused),
        events: Arc::clone(events) as Arc<dyn TransportEvents>,
        control: Arc::new(Unused),
    }
}

impl Node {
    pub(crate) fn new(name: &str) -> Self {
        Self::with(name, config(), None)
    }

    pub(crate) fn with(name: &str, config: ShmConfig, fingerprint: Option<&str>) -> Self {
        let transport = ShmTransport::new(config).unwrap();
        let events = Arc::new(Recorder::default());
        let hello = Hello::new(Features::NONE, fingerprint.map(str::to_owned));
        let incarnation = Incarnation(u64::from(std::process::id()));
        let published = transport.start(context(name, incarnation, &hello, &events)).unwrap();
        let desc = SegmentDesc {
            name: name.into(),
            incarnation: Some(incarnation),
            hello: Some(hello),
            transports: BTreeMap::from([("shm".to_owned(), published)]),
            buffers: Vec::new(),
        };
        Self { transport, events, desc, next: AtomicU64::new(0) }
    }

    /// Starts what was stopped. The descriptor is that of the life before.
    pub(crate) fn start_again(&self) -> Result<Value> {
        let (name, hello) = (&self.desc.name, self.desc.hello.as_ref().unwrap());
        self.transport.start(context(name, self.desc.incarnation.unwrap(), hello, &self.events))
    }

    /// Registers `len` bytes that peers may map.
    pub(crate) fn shared(&self, len: usize) -> Registered {
        self.register(Arc::new(MemoryOptions::new(len).shared(true).allocate().unwrap()))
    }

    /// Registers `len` bytes that have no file.
    pub(crate) fn private(&self, len: usize) -> Registered {
        self.register(Arc::new(HeapMemory::zeroed(len)))
    }

    fn register(&self, region: Arc<dyn Region>) -> Registered {
        let id = RegionId(self.next.fetch_add(1, Ordering::Relaxed));
        let view = region.view().host().unwrap();
        self.transport.register(&RegisteredRegion { id, region, access: Access::None }).unwrap();
        Registered { id, view }
    }

    /// Grants part of a region under a fresh token.
    pub(crate) fn grant(
        &self,
        region: &Registered,
        offset: u64,
        len: u64,
        access: Access,
        peer: Option<&str>,
    ) -> GrantDesc {
        // Each grant has an index of its own; the secret needs no randomness here.
        let handle = self.next.fetch_add(1, Ordering::Relaxed);
        let desc = GrantDesc {
            region: region.id,
            address: region.address() + offset,
            len,
            access,
            token: GrantToken { handle, secret: handle.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1 },
            attributes: BTreeMap::new(),
        };
        self.transport.grant(&Grant { desc: &desc, peer }).unwrap();
        desc
    }

    pub(crate) fn grant_all(&self, region: &Registered, access: Access) -> GrantDesc {
        self.grant(region, 0, region.view.len() as u64, access, None)
    }

    /// Connects; the path must be up.
    pub(crate) fn connect(&self, peer: &Self) -> PathId {
        let (path, state) = self.try_connect(&peer.desc);
        match state {
            PathState::Up => path,
            PathState::Down(error) => panic!("{error}"),
        }
    }

    pub(crate) fn try_connect(&self, peer: &SegmentDesc) -> (PathId, PathState) {
        let paths = self.transport.connect(peer, soon()).unwrap();
        assert_eq!(paths.len(), 1);
        (paths[0].id, paths[0].state.clone())
    }

    pub(crate) fn refusal(&self, peer: &SegmentDesc) -> Error {
        match self.try_connect(peer).1 {
            PathState::Up => panic!("the path is up"),
            PathState::Down(error) => error,
        }
    }

    /// Submits slices until all are taken, waiting for room in between.
    pub(crate) fn submit(&self, path: PathId, slices: &[Slice]) -> Result<()> {
        let mut rest = slices;
        while !rest.is_empty() {
            // SAFETY: the tests keep their memory registered until the completions.
            let taken = unsafe { self.transport.submit(path, rest) }?;
            rest = &rest[taken..];
            if !rest.is_empty() {
                self.events.wait(|seen| seen.writable.pop());
            }
        }
        Ok(())
    }

    /// Submits one slice and waits for its end.
    pub(crate) fn run(&self, path: PathId, slice: Slice) -> Result<Level> {
        self.submit(path, &[slice])?;
        self.events.completion(slice.token).result.map_err(|error| error.error)
    }
}

pub(crate) fn slice(token: u64, opcode: Opcode, local: HostView, grant: &GrantDesc, offset: u64) -> Slice {
    Slice {
        token,
        opcode,
        priority: Priority::Medium,
        checksum: Checksum::Off,
        level: Level::Visible,
        local: View::Host(local),
        local_region: RegionId(0),
        remote_address: grant.address + offset,
        grant: Some(grant.token),
        remote_key: RemoteKey::NONE,
        ready: None,
    }
}

/// Bytes that differ from place to place.
pub(crate) fn pattern(len: usize, seed: u64) -> Vec<u8> {
    let mut state = seed | 1;
    (0..len)
        .map(|_| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 56) as u8
        })
        .collect()
}

/// A descriptor as text, for another process.
pub(crate) fn to_json(desc: &SegmentDesc) -> Value {
    json!({ "name": desc.name, "incarnation": desc.incarnation, "transports": desc.transports })
}

pub(crate) fn from_json(value: &Value) -> SegmentDesc {
    SegmentDesc {
        name: value["name"].as_str().unwrap().to_owned(),
        incarnation: serde_json::from_value(value["incarnation"].clone()).unwrap(),
        hello: None,
        transports: serde_json::from_value(value["transports"].clone()).unwrap(),
        buffers: Vec::new(),
    }
}
