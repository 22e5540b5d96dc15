//! Two transports that know each other, and the engine's part between them.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use posthorse_core::{
    Access, Attributes, Capabilities, Checksum, Completion, Deadline, Features, Grant, GrantDesc, GrantToken,
    Hello, Incarnation, Opcode, PathId, PathState, Priority, Region, RegionId, RemoteKey, Result,
    SegmentDesc, Slice, Transport, TransportContext,
};
use posthorse_segment::Registry;
use serde_json::Value;

use super::Subject;
use crate::{ControlHub, Events, memory, pattern};

/// A process's worth: a transport, its memory and its record of events.
pub(super) struct Side<'a> {
    pub(super) subject: &'a Subject,
    pub(super) name: String,
    pub(super) transport: Arc<dyn Transport>,
    pub(super) registry: Arc<Registry>,
    pub(super) events: Arc<Events>,
    incarnation: Incarnation,
    hello: Hello,
    published: Value,
    buffers: Mutex<BTreeMap<RegionId, Value>>,
    next_token: AtomicU64,
}

/// A registered region.
pub(super) struct Memory {
    pub(super) id: RegionId,
    pub(super) region: Arc<dyn Region>,
    attributes: Value,
}

/// Memory of a peer, as a slice names it.
#[derive(Debug, Clone, Copy)]
pub(super) struct Target {
    pub(super) address: u64,
    pub(super) token: GrantToken,
    pub(super) key: RemoteKey,
}

impl<'a> Side<'a> {
    pub(super) fn start(subject: &'a Subject, control: &ControlHub, name: &str, print: Option<&str>) -> Self {
        static LIVES: AtomicU64 = AtomicU64::new(1);
        let transport = subject.transport();
        let (registry, events) = (Arc::new(Registry::new()), Arc::new(Events::new()));
        let incarnation = Incarnation(LIVES.fetch_add(1, Ordering::Relaxed));
        let hello = Hello::new(Features::NONE, print.map(str::to_owned));
        let context = TransportContext {
            name: name.into(),
            incarnation,
            hello: hello.clone(),
            gate: Arc::clone(&registry) as _,
            events: Arc::clone(&events) as _,
            control: control.channel(name),
        };
        let published = transport.start(context).expect("a transport that starts");
        Self {
            subject,
            name: name.to_owned(),
            transport,
            registry,
            events,
            incarnation,
            hello,
            published,
            buffers: Mutex::default(),
            next_token: AtomicU64::new(1),
        }
    }

    pub(super) fn capabilities(&self) -> Capabilities {
        self.transport.capabilities()
    }

    pub(super) fn describe(&self) -> SegmentDesc {
        let known = self.buffers.lock().unwrap_or_else(PoisonError::into_inner);
        let mut buffers = self.registry.published();
        for buffer in &mut buffers {
            if let Some(value) = buffer.region.and_then(|region| known.get(&region)) {
                buffer.attributes = Attributes::from([(self.transport.name().to_owned(), value.clone())]);
            }
        }
        SegmentDesc {
            name: self.name.clone(),
            incarnation: Some(self.incarnation),
            hello: Some(self.hello.clone()),
            transports: Attributes::from([(self.transport.name().to_owned(), self.published.clone())]),
            buffers,
        }
    }

    /// Registers a region of `len` bytes that shows the pattern of `seed`.
    pub(super) fn register(&self, len: usize, access: Access, seed: u64) -> Memory {
        let region = self.subject.region(len);
        memory::write(&*region, 0, &pattern::bytes(seed, len));
        let registered = self.registry.register(Arc::clone(&region), access).expect("a region to register");
        let attributes = self.transport.register(&registered).expect("a region that the transport takes");
        self.buffers.lock().unwrap_or_else(PoisonError::into_inner).insert(registered.id, attributes.clone());
        if let Some(standing) = self.registry.standing_grant(registered.id).expect("a registered region") {
            self.prepare(standing, None);
        }
        Memory { id: registered.id, region, attributes }
    }

    /// Grants a part of a region.
    pub(super) fn grant(
        &self,
        memory: &Memory,
        range: Range<u64>,
        access: Access,
        peer: Option<&str>,
    ) -> GrantDesc {
        let grant = self.registry.grant(memory.id, range.start, range.end - range.start, access, peer);
        self.prepare(grant.expect("a range to grant"), peer)
    }

    fn prepare(&self, mut desc: GrantDesc, peer: Option<&str>) -> GrantDesc {
        let value = self.transport.grant(&Grant { desc: &desc, peer }).expect("a grant that can be prepared");
        desc.attributes = Attributes::from([(self.transport.name().to_owned(), value)]);
        desc
    }

    pub(super) fn revoke(&self, token: GrantToken) -> Result<()> {
        // The transport first: the registry forgets what it has revoked, and may use the number again.
        self.transport.revoke(token, self.deadline())?;
        self.registry.revoke(token, self.deadline())
    }

    pub(super) fn unregister(&self, region: RegionId) -> Result<()> {
        self.transport.unregister(region, self.deadline())?;
        self.registry.unregister(region, self.deadline())?;
        self.buffers.lock().unwrap_or_else(PoisonError::into_inner).remove(&region);
        Ok(())
    }

    /// The first usable path to a peer.
    pub(super) fn connect(&self, peer: &SegmentDesc) -> PathId {
        let paths = self.transport.connect(peer, self.deadline()).expect("a peer that can be reached");
        let up = paths.iter().find(|path| matches!(path.state, PathState::Up));
        up.unwrap_or_else(|| panic!("no path is up: {paths:?}")).id
    }

    /// Tokens that were never used before.
    pub(super) fn tokens(&self, count: u64) -> Range<u64> {
        let first = self.next_token.fetch_add(count, Ordering::Relaxed);
        first..first + count
    }

    /// Offers slices until all are taken.
    pub(super) fn submit_all(&self, path: PathId, slices: &[Slice]) -> Result<()> {
        let mut taken = 0;
        while taken < slices.len() {
            let seen = self.events.writable_count(path);
            // SAFETY: the suite holds every `Memory` until its slices have been completed, or its transport has
            // been stopped, and touches it meanwhile by atomic accesses only.
            taken += unsafe { self.transport.submit(path, &slices[taken..]) }?;
            assert!(taken <= slices.len(), "more slices were taken than offered");
            if taken < slices.len() {
                self.events.wait_writable(path, seen, self.deadline())?;
            }
        }
        Ok(())
    }

    /// Moves slices (whose tokens follow each other) to their ends.
    pub(super) fn carry_out(&self, path: PathId, slices: &[Slice]) -> Vec<Completion> {
        self.submit_all(path, slices).expect("a path that takes slices");
        self.ends_of(slices)
    }

    /// The ends of slices that were submitted, whose tokens follow each other.
    pub(super) fn ends_of(&self, slices: &[Slice]) -> Vec<Completion> {
        let Some(first) = slices.first() else { return Vec::new() };
        let tokens = first.token..first.token + slices.len() as u64;
        self.events.wait_for_all(tokens, self.deadline()).expect("every slice to end")
    }

    pub(super) fn deadline(&self) -> Deadline {
        self.subject.deadline()
    }
}

impl Drop for Side<'_> {
    fn drop(&mut self) {
        self.transport.stop();
        if !std::thread::panicking() {
            assert_eq!(self.events.repeated(), [0; 0], "tokens that were completed more than once");
        }
    }
}

impl Memory {
    pub(super) fn bytes(&self) -> Vec<u8> {
        memory::read(&*self.region, 0, self.region.view().len() as usize)
    }

    pub(super) fn read(&self, offset: usize, len: usize) -> Vec<u8> {
        memory::read(&*self.region, offset, len)
    }

    pub(super) fn fill(&self, seed: u64) {
        self.write(0, &pattern::bytes(seed, self.region.view().len() as usize));
    }

    pub(super) fn write(&self, offset: usize, bytes: &[u8]) {
        memory::write(&*self.region, offset, bytes);
    }

    /// A slice between `len` bytes at `offset` here and the same number at `at` bytes into a target.
    pub(super) fn slice(&self, opcode: Opcode, offset: usize, len: usize, target: &Target, at: u64) -> Slice {
        Slice {
            token: 0,
            opcode,
            priority: Priority::Medium,
            checksum: Checksum::Off,
            level: posthorse_core::Level::Sent,
            local: self.region.view().slice(offset as u64, len as u64).expect("a range of the region"),
            local_region: self.id,
            remote_address: target.address.wrapping_add(at),
            grant: Some(target.token),
            remote_key: target.key,
            ready: None,
        }
    }
}

/// Two sides, and a path from the left one to the right one.
pub(super) struct Pair<'a> {
    pub(super) left: Side<'a>,
    pub(super) right: Side<'a>,
    pub(super) path: PathId,
    pub(super) control: ControlHub,
}

/// Names of engines that nobody else in this process has.
pub(super) fn names() -> (String, String) {
    static PAIRS: AtomicU64 = AtomicU64::new(1);
    let number = PAIRS.fetch_add(1, Ordering::Relaxed);
    (format!("left-{number}.test:7"), format!("right-{number}.test:7"))
}

impl<'a> Pair<'a> {
    pub(super) fn new(subject: &'a Subject) -> Self {
        let control = ControlHub::new();
        let (left, right) = names();
        let left = Side::start(subject, &control, &left, None);
        let right = Side::start(subject, &control, &right, None);
        let path = left.connect(&right.describe());
        Self { left, right, path, control }
    }

    /// What a grant of the right side's memory is to the left one.
    pub(super) fn target(&self, grant: &GrantDesc, memory: &Memory) -> Target {
        target(&self.left, self.path, grant, memory)
    }

    /// Registers memory at the right side, and grants all of it to the left one.
    pub(super) fn lend(&self, len: usize, access: Access, seed: u64) -> (Memory, Target) {
        self.lend_over(self.path, len, access, seed)
    }

    /// As [`Pair::lend`], for slices of this path.
    pub(super) fn lend_over(&self, path: PathId, len: usize, access: Access, seed: u64) -> (Memory, Target) {
        let memory = self.right.register(len, Access::None, seed);
        let grant = self.right.grant(&memory, 0..len as u64, access, Some(&self.left.name));
        let target = target(&self.left, path, &grant, &memory);
        (memory, target)
    }

    /// Gives the slices tokens that follow each other, and the furthest level there is.
    pub(super) fn number(&self, mut slices: Vec<Slice>) -> Vec<Slice> {
        let level = self.left.capabilities().level;
        let tokens = self.left.tokens(slices.len() as u64);
        for (slice, token) in slices.iter_mut().zip(tokens) {
            slice.token = token;
            slice.level = level;
        }
        slices
    }

    /// Moves slices, all of which must succeed.
    pub(super) fn carry_out(&self, slices: Vec<Slice>) {
        let slices = self.number(slices);
        for (slice, done) in slices.iter().zip(self.left.carry_out(self.path, &slices)) {
            let level = done.result.unwrap_or_else(|why| panic!("{slice:?} failed: {why:?}"));
            assert!(level >= slice.level, "{level:?} was reached, {:?} asked for", slice.level);
        }
    }

    /// Shows that the path still moves bytes both ways.
    pub(super) fn assert_usable(&self) {
        assert_usable(&self.left, self.path, &self.right);
    }
}

/// What a grant of a peer's memory is to `side`. Where nothing was published with the grant, what was published
/// with the region is the key.
pub(super) fn target(side: &Side<'_>, path: PathId, grant: &GrantDesc, memory: &Memory) -> Target {
    let own = grant.attributes.get(side.transport.name()).filter(|value| !value.is_null());
    let key = side.transport.import(path, own.unwrap_or(&memory.attributes)).expect("attributes of a key");
    Target { address: grant.address, token: grant.token, key }
}

/// Shows that a path from one side to the other moves bytes both ways.
pub(super) fn assert_usable(from: &Side<'_>, path: PathId, to: &Side<'_>) {
    const LEN: usize = 10_000;
    let (local, remote) = (from.register(LEN, Access::None, 1), to.register(LEN, Access::None, 2));
    let grant = to.grant(&remote, 0..LEN as u64, Access::ReadWrite, Some(&from.name));
    let target = target(from, path, &grant, &remote);
    for (opcode, shown) in [(Opcode::Read, 2), (Opcode::Write, 3)] {
        if opcode == Opcode::Write {
            local.fill(shown);
        }
        let mut slice = local.slice(opcode, 0, LEN, &target, 0);
        slice.token = from.tokens(1).start;
        slice.level = from.capabilities().level;
        let end = from.carry_out(path, &[slice]).remove(0);
        end.result.unwrap_or_else(|why| panic!("the path cannot be used: {why:?}"));
        let arrived = if opcode == Opcode::Read { &local } else { &remote };
        assert_eq!(pattern::check(shown, &arrived.bytes()), None, "{opcode:?}");
    }
    to.revoke(grant.token).expect("a grant to revoke");
    to.unregister(remote.id).expect("a region to unregister");
    from.unregister(local.id).expect("a region to unregister");
}
