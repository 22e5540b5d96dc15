//! Engines that find each other by the handshake, over the transports that come with Posthorse.
#![cfg(all(feature = "shm", feature = "tcp"))]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

#[allow(dead_code, unreachable_pub)]
mod support;

use std::sync::Arc;
use std::time::{Duration, Instant};

use posthorse_core::{Access, Checksum, Deadline, ErrorKind, Opcode, Route, TransferRequest};
use posthorse_engine::{EngineConfig, RegisteredMemory, Segment, SubmitOptions, TransferEngine};
use posthorse_memory::{HostMemory, MemoryOptions};
use posthorse_testkit::{assert_in_forked_child, memory, pattern, peer};
use serde::{Deserialize, Serialize};
use support::{request, soon};

fn engine() -> TransferEngine {
    let config = EngineConfig { advertise: "127.0.0.1".to_owned(), ..EngineConfig::default() };
    TransferEngine::builder().config(config).build().unwrap()
}

fn shared(len: usize, seed: u64) -> Arc<HostMemory> {
    let region = Arc::new(MemoryOptions::new(len).shared(true).allocate().unwrap());
    memory::write(&*region, 0, &pattern::bytes(seed, len));
    region
}

fn options(checksum: Checksum) -> SubmitOptions {
    SubmitOptions { deadline: soon(), checksum }
}

const LEN: usize = 8 << 20;

/// What a peer process tells of its memory.
#[derive(Serialize, Deserialize)]
struct Offered {
    name: String,
    address: u64,
}

/// A process that publishes memory and does what it is told.
#[test]
fn peer_serves() {
    let Some(child) = peer::child() else { return };
    let engine = engine();
    let len: usize = child.arguments().unwrap();
    let region = shared(len, 1);
    let registered = engine.register(Arc::clone(&region) as _, Access::ReadWrite).unwrap();
    child.send(&Offered { name: engine.name().to_owned(), address: registered.address() }).unwrap();
    while let Ok(seed) = child.receive::<u64>(Deadline::NEVER) {
        child.send(&pattern::check(seed, &memory::read(&*region, 0, len)).is_none()).unwrap();
    }
}

struct Remote {
    process: peer::Peer,
    engine: TransferEngine,
    segment: Segment,
    address: u64,
    source: RegisteredMemory,
    region: Arc<HostMemory>,
}

impl Remote {
    fn new(len: usize) -> Self {
        let process = peer::spawn("peer_serves", &len).unwrap();
        let offered: Offered = process.receive(soon()).unwrap();
        let engine = engine();
        let segment = engine.open(&offered.name, soon()).unwrap();
        let region = shared(len, 7);
        let source = engine.register(Arc::clone(&region) as _, Access::None).unwrap();
        Self { process, engine, segment, address: offered.address, source, region }
    }

    fn request(&self, opcode: Opcode, route: Route, offset: u64, len: u64) -> TransferRequest {
        let base = request(opcode, self.source.at(offset), self.segment.id(), self.address + offset, len);
        TransferRequest { route, ..base }
    }

    fn run(&self, requests: &[TransferRequest], checksum: Checksum) -> posthorse_core::Result<()> {
        let mut batch = self.engine.batch();
        batch.submit(requests, options(checksum))?;
        batch.wait(soon())
    }
}

#[test]
fn bytes_go_both_ways_by_each_transport_between_processes() {
    let remote = Remote::new(LEN);
    assert_eq!(remote.engine.explain(&remote.segment).chosen.as_deref(), Some("shm"));
    for name in ["shm", "tcp"] {
        let route = Route::Require(remote.engine.transport_id(name).unwrap());
        for checksum in [Checksum::Off, Checksum::Sampled, Checksum::Full] {
            for (seed, len) in [(10, 1), (11, 4097), (12, LEN)] {
                memory::write(&*remote.region, 0, &pattern::bytes(seed, LEN));
                remote.run(&[remote.request(Opcode::Write, route, 0, len as u64)], checksum).unwrap();
                if len == LEN {
                    remote.process.send(&seed).unwrap();
                    assert!(remote.process.receive::<bool>(soon()).unwrap(), "{name} {checksum:?}");
                }
                memory::write(&*remote.region, 0, &vec![0; LEN]);
                remote.run(&[remote.request(Opcode::Read, route, 0, len as u64)], checksum).unwrap();
                assert_eq!(
                    pattern::check(seed, &memory::read(&*remote.region, 0, len)),
                    None,
                    "{name} {len}"
                );
            }
        }
    }
    let explanation = remote.engine.explain(&remote.segment);
    assert!(
        explanation.transports.iter().filter(|transport| transport.state == "up").count() == 2,
        "{explanation}"
    );
}

#[test]
fn a_batch_of_a_hundred_thousand_small_writes_simply_works() {
    const COUNT: u64 = 100_000;
    let len = (COUNT * 4096) as usize / 8;
    let remote = Remote::new(len);
    for name in ["tcp", "shm"] {
        let route = Route::Require(remote.engine.transport_id(name).unwrap());
        // Eight passes over the same memory: 100,000 requests without 400 MB of it.
        let requests: Vec<_> = (0..COUNT)
            .map(|index| remote.request(Opcode::Write, route, (index % (COUNT / 8)) * 4096, 4096))
            .collect();
        let start = Instant::now();
        remote.run(&requests, Checksum::Off).unwrap();
        println!("{name}: 100,000 x 4 KiB in {:?}", start.elapsed());
        remote.process.send(&7_u64).unwrap();
        assert!(remote.process.receive::<bool>(soon()).unwrap(), "{name}");
    }
}

#[test]
fn a_killed_peer_ends_its_transfers_with_a_reason_and_the_next_one_is_served() {
    for name in ["tcp", "shm"] {
        let remote = Remote::new(LEN);
        let route = Route::Require(remote.engine.transport_id(name).unwrap());
        remote.run(&[remote.request(Opcode::Write, route, 0, 4096)], Checksum::Off).unwrap();
        remote.process.kill9();
        remote.process.wait(soon()).unwrap();
        let start = Instant::now();
        let mut error = None;
        // Whatever was sent before the death was noticed may still be reported done by shm: the memory was there.
        while error.is_none() && start.elapsed() < Duration::from_secs(15) {
            error = remote.run(&[remote.request(Opcode::Write, route, 0, LEN as u64)], Checksum::Off).err();
        }
        let error = error.unwrap();
        println!("{name}: {error} after {:?}", start.elapsed());
        assert!(
            matches!(
                error.kind(),
                ErrorKind::PeerGone | ErrorKind::PeerUnreachable | ErrorKind::PathFailed | ErrorKind::NoPath
            ),
            "{name}: {error}"
        );
        assert_eq!(remote.engine.in_flight(), 0);
        let next = peer::spawn("peer_serves", &LEN).unwrap();
        let offered: Offered = next.receive(soon()).unwrap();
        let segment = remote.engine.open(&offered.name, soon()).unwrap();
        let write = request(Opcode::Write, remote.source.at(0), segment.id(), offered.address, LEN as u64);
        remote.run(&[TransferRequest { route, ..write }], Checksum::Off).unwrap();
        next.send(&7_u64).unwrap();
        assert!(next.receive::<bool>(soon()).unwrap());
    }
}

#[test]
fn a_lease_reads_the_peers_memory_in_place() {
    let (owner, reader) = (engine(), engine());
    let region = shared(1 << 20, 3);
    let registered = owner.register(Arc::clone(&region) as _, Access::None).unwrap();
    let mut grant = registered.grant(4096, 8192, Access::Read, Some(reader.name())).unwrap();
    let segment = reader.open(owner.name(), soon()).unwrap();
    let lease = reader.lease(&segment, Route::Auto, grant.desc()).unwrap();
    assert_eq!(lease.bytes().unwrap(), &pattern::bytes(3, 1 << 20)[4096..4096 + 8192]);
    let held = grant.revoke(Deadline::after(Duration::from_millis(50))).unwrap_err();
    assert_eq!(held.kind(), ErrorKind::DeadlineExceeded, "the reader still looks at it");
    drop(lease);
    grant.revoke(soon()).unwrap();
}

#[test]
fn an_engine_and_what_it_lent_are_not_there_in_a_forked_child() {
    let (owner, reader) = (engine(), engine());
    let registered = owner.register(shared(1 << 20, 3) as _, Access::None).unwrap();
    let mut grant = registered.grant(4096, 8192, Access::Read, Some(reader.name())).unwrap();
    let segment = reader.open(owner.name(), soon()).unwrap();
    let unfinished = reader.batch();
    // Taken by the child, which drops it; the parent keeps its own.
    let mut lease = Some(reader.lease(&segment, Route::Auto, grant.desc()).unwrap());
    let child = || {
        fn forked<T>(outcome: posthorse_core::Result<T>) -> bool {
            outcome.is_err_and(|error| error.kind() == ErrorKind::Forked)
        }
        let Some(lease) = lease.take() else { return false };
        let mut well = forked(lease.bytes()) && forked(reader.lease(&segment, Route::Auto, grant.desc()));
        drop(lease);
        well &= forked(reader.next_notification(Deadline::NEVER)) && reader.notifications().is_empty();
        well &=
            forked(reader.plan(&[])) && forked(reader.transport("shm")) && forked(reader.transport_id("shm"));
        well &= forked(reader.register_many([], Access::Read)) && reader.transports().is_empty();
        well &= reader.best_transport(&segment, Route::Auto).is_none()
            && reader.explain(&segment).ended.is_some();
        well &= reader.withheld() == 0 && reader.in_flight() == 0 && owner.descriptor().transports.is_empty();
        // SAFETY: no range comes of it.
        well &= unsafe { owner.find(registered.address(), 1) }.is_none();
        let mut done = std::pin::pin!(unfinished.done());
        let polled = done.as_mut().poll(&mut std::task::Context::from_waker(std::task::Waker::noop()));
        well &= matches!(polled, std::task::Poll::Ready(Err(error)) if error.kind() == ErrorKind::Forked);
        reader.close(segment.clone());
        well
    };
    // SAFETY: the engines answer before they take any lock, which is what is tested.
    unsafe { assert_in_forked_child(child) };
    let lease = lease.unwrap();
    assert_eq!(lease.bytes().unwrap(), &pattern::bytes(3, 1 << 20)[4096..4096 + 8192]);
    let held = grant.revoke(Deadline::after(Duration::from_millis(50))).unwrap_err();
    assert_eq!(held.kind(), ErrorKind::DeadlineExceeded, "the parent still looks at it");
    drop(lease);
    grant.revoke(soon()).unwrap();
}

#[test]
fn a_notification_that_is_too_long_for_tcp_is_refused_with_the_key() {
    let mut config = EngineConfig { advertise: "127.0.0.1".to_owned(), shm: None, ..EngineConfig::default() };
    config.tcp.as_mut().unwrap().notify_bytes = 16;
    let (a, b) = (TransferEngine::builder().config(config).build().unwrap(), engine());
    let segment = a.open(b.name(), soon()).unwrap();
    a.notify(&segment, &[1; 16], soon()).unwrap();
    let error = a.notify(&segment, &[1; 17], soon()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::TooLarge);
    assert!(error.message().contains("17 bytes; accepted: up to 16"), "{error}");
    assert!(error.advice().is_some_and(|advice| advice.contains("notify_bytes")), "{error}");
}

#[test]
fn a_notification_arrives_by_each_transport() {
    let (a, b) = (engine(), engine());
    let segment = a.open(b.name(), soon()).unwrap();
    a.notify(&segment, b"hello", soon()).unwrap();
    let got = b.next_notification(soon()).unwrap();
    assert_eq!((got.peer.as_str(), got.data.as_slice()), (a.name(), &b"hello"[..]));
}

/// Descriptors that this process has open.
fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

#[test]
fn nothing_is_kept_of_peers_that_come_and_go() {
    const PEERS: usize = 100;
    for name in ["tcp", "shm"] {
        let a = engine();
        let source = a.register(shared(4096, 7), Access::None).unwrap();
        let route = Route::Require(a.transport_id(name).unwrap());
        let come_and_go = || {
            let b = engine();
            let target = b.register(shared(4096, 0), Access::ReadWrite).unwrap();
            let segment = a.open(b.name(), soon()).unwrap();
            let write = request(Opcode::Write, source.at(0), segment.id(), target.address(), 4096);
            let mut batch = a.batch();
            batch.submit(&[TransferRequest { route, ..write }], options(Checksum::Off)).unwrap();
            batch.wait(soon()).unwrap();
        };
        let before = descriptors();
        (0..PEERS).for_each(|_| come_and_go());
        let late = Instant::now() + Duration::from_secs(15);
        while descriptors() > before + PEERS / 10 {
            assert!(Instant::now() < late, "{name}: {before} descriptors, and now {}", descriptors());
            std::thread::park_timeout(Duration::from_millis(10));
        }
    }
}
