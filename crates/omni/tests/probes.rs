//! What the reference does wrong when it is probed, and what is right: each row of the table of probes. Rows that a
//! connector does in ordinary use stand in `connector.rs`: the third get after a success, full pools, a dead port,
//! a small get behind large ones, `close` beside live threads. The allocator's row is a benchmark of its crate.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

mod common;

use std::net::IpAddr;
use std::thread;
use std::time::{Duration, Instant};

use common::{Pair, assert_whole, build, config, edge, eventually, require, soon};
use posthorse_buffer::{Pool, PoolConfig};
use posthorse_core::{Access, Checksum, Deadline, ErrorClass, ErrorKind, Features, Hello};
use posthorse_engine::{EngineConfig, TransferEngine};
use posthorse_memory::MemoryOptions;
use posthorse_omni::config::Role;
use posthorse_omni::control::{ControlLimits, ControlPlane};
use posthorse_omni::message::{Pull, PullExtra, PullReply, Query, QueryExtra, QueryReply, Request, Want};
use posthorse_omni::{Connector, ConnectorConfig, GetOptions, PutOptions, Source};
use posthorse_testkit::peer::Spawn;
use posthorse_testkit::{namespace, pattern, peer, skip};

/// Takes some hundred milliseconds to carry over.
const LARGE: u64 = 200 << 20;

fn large(config: &mut ConnectorConfig) {
    config.memory_pool_size = LARGE + (40 << 20);
}

fn at(host: &str, port: u16) -> GetOptions<'_> {
    GetOptions { source: Source::At(host, port), ..GetOptions::until(soon()) }
}

/// A consumer written by hand asks for 2 MiB with a slot of 4096 bytes; it may also lie about the slot's length.
#[test]
fn a_slot_smaller_than_the_payload_is_refused_and_nothing_is_written_outside_it() {
    const PAYLOAD: usize = 2 << 20;
    const SLOT: u64 = 4096;
    let pair = Pair::by("tcp");
    let bytes = pattern::bytes(1, PAYLOAD);
    pair.put("k", &bytes);
    let (host, port) = pair.sender.address().unwrap();
    let address = format!("{host}:{port}");
    let engine = EngineConfig { transport: "require:tcp".parse().unwrap(), ..EngineConfig::default() };
    let engine = TransferEngine::builder().config(engine).build().unwrap();
    let pool = Pool::new(
        MemoryOptions::new(8 << 20).shared(true).allocate().unwrap(),
        &PoolConfig { alignment: 4096, ..PoolConfig::default() },
    )
    .unwrap();
    // SAFETY: the block is looked at when the transfers have ended.
    let memory = engine.register(unsafe { pool.region() }, Access::None).unwrap();
    let mut around = pool.alloc(8 << 20, soon()).unwrap();
    around.bytes_mut().unwrap().fill(0xee);
    let plane = ControlPlane::start(ControlLimits::default()).unwrap();
    let dialer = plane.dialer();
    for (pull, lies) in [(1, false), (2, true)] {
        let hello = Hello::new(Features::NONE, None);
        let query = Request::Query(Query {
            request_id: "k@0_1".to_owned(),
            extra: Some(QueryExtra {
                hello: hello.clone(),
                consumer: engine.name().to_owned(),
                incarnation: engine.incarnation(),
                pull,
                wait_ms: 5000,
                want: Want::Write,
            }),
        });
        let reply = dialer.request_blocking(&address, query.encode().unwrap(), soon()).unwrap();
        let QueryReply::Offer { data_size, offered, .. } = QueryReply::decode("k@0_1", &reply).unwrap()
        else {
            panic!("{pull}: it is not offered")
        };
        assert_eq!(data_size, PAYLOAD as u64);
        let offered = offered.unwrap();
        let mut grant = memory.grant(1 << 20, SLOT, Access::Write, Some(&offered.segment)).unwrap();
        let mut told = grant.desc().clone();
        if lies {
            told.len = data_size;
        }
        let request = Request::Pull(Pull {
            remote_hostname: String::new(),
            remote_port: 0,
            request_id: "k@0_1".to_owned(),
            dst_addrs: vec![told.address],
            lengths: vec![told.len],
            extra: Some(PullExtra {
                hello,
                consumer: engine.name().to_owned(),
                incarnation: engine.incarnation(),
                pull,
                generation: Some(offered.generation),
                grant: told,
                deadline_ms: Some(5000),
                checksum: Checksum::Off,
                transport: None,
            }),
        });
        let reply = dialer.request_blocking(&address, request.encode().unwrap(), soon()).unwrap();
        let PullReply::Refused(refusal) = PullReply::decode(&reply).unwrap() else {
            panic!("{pull}: served")
        };
        let error = refusal.to_error(&address);
        if lies {
            // Our own side refused it: the grant does not reach so far.
            let kinds = [ErrorKind::OutOfBounds, ErrorKind::AccessDenied];
            assert!(kinds.contains(&error.kind()), "{error}");
        } else {
            assert_eq!(error.kind(), ErrorKind::OutOfBounds, "{error}");
            assert!(error.message().contains("4096") && error.message().contains("2097152"), "{error}");
        }
        grant.revoke(soon()).unwrap();
        assert!(around.bytes().unwrap().iter().all(|byte| *byte == 0xee), "{pull}: something was written");
    }
    plane.close(soon()).unwrap();
    // The payload is still there for one with room.
    assert!(pair.get("k").unwrap().bytes().unwrap() == bytes);
    pair.assert_whole();
}

#[test]
fn of_two_receivers_at_one_time_one_is_served_and_the_other_told_why_not() {
    for transport in ["shm", "tcp"] {
        let pair = Pair::by(transport);
        let (host, port) = pair.sender.address().unwrap();
        let mut other = config(Role::Receiver);
        require(&mut other, transport);
        let other = build(other);
        let bytes = pattern::bytes(2, 32 << 20);
        pair.put("k", &bytes);
        let outcomes = thread::scope(|scope| {
            let gets = [&pair.receiver, &other].map(|receiver| {
                let (host, bytes) = (&host, &bytes);
                scope.spawn(move || {
                    let got = receiver.get(&edge(), "k", at(host, port))?;
                    assert!(got.bytes().unwrap() == *bytes, "{transport}");
                    Ok::<_, posthorse_core::Error>(())
                })
            });
            gets.map(|get| get.join().unwrap())
        });
        assert_eq!(outcomes.iter().filter(|outcome| outcome.is_ok()).count(), 1, "{outcomes:?}");
        let error = outcomes.into_iter().find_map(Result::err).unwrap();
        assert_eq!(error.kind(), ErrorKind::Expired, "{transport}: {error}");
        pair.assert_whole();
        assert_whole(&other);
    }
}

/// The old block is not used for anything else before its pull has ended; then the new payload is offered.
#[test]
fn a_put_of_a_key_in_flight_takes_effect_when_its_pull_has_ended() {
    let shm = Pair::by("shm");
    let old = pattern::bytes(3, 30 << 20);
    shm.put("k", &old);
    let leased =
        shm.receiver.get(&edge(), "k", GetOptions { lease: true, ..GetOptions::until(soon()) }).unwrap();
    shm.put("k", b"new");
    // All the memory there is, but for what is read.
    let mut rest = shm.sender.alloc(shm.sender.health().pool.space.largest_free, soon()).unwrap();
    rest.bytes_mut().unwrap().fill(0xff);
    assert!(leased.bytes().unwrap() == old);
    thread::scope(|scope| {
        let next = scope.spawn(|| shm.get("k").unwrap().bytes().unwrap().to_vec());
        eventually("the wait for the new payload", || shm.sender.health().offers.parked == 1);
        assert!(leased.bytes().unwrap() == old);
        leased.release();
        assert_eq!(next.join().unwrap(), b"new");
    });
    drop(rest);
    shm.assert_whole();

    let tcp = Pair::with(|config| {
        require(config, "tcp");
        large(config);
    });
    let old = pattern::bytes(4, LARGE as usize);
    tcp.put("k", &old);
    thread::scope(|scope| {
        let first = scope.spawn(|| tcp.get("k").unwrap().bytes().unwrap() == old);
        eventually("the pull", || tcp.sender.engine().in_flight() > 0);
        tcp.put("k", b"new");
        let mut rest = tcp.sender.alloc(30 << 20, soon()).unwrap();
        rest.bytes_mut().unwrap().fill(0xff);
        assert!(first.join().unwrap(), "it was torn");
    });
    assert_eq!(tcp.get("k").unwrap().bytes().unwrap(), b"new");
    tcp.assert_whole();
}

/// The slot of a receiver that gave up is never written to once it is somebody else's.
#[test]
fn a_receiver_that_gives_up_keeps_no_late_write() {
    for transport in ["shm", "tcp"] {
        let pair = Pair::with(|config| {
            require(config, transport);
            large(config);
        });
        pair.put("small", b"so that they know each other");
        pair.get("small").unwrap();
        // The first time that is too short for this machine.
        let error = [30, 10, 5, 2, 1].into_iter().find_map(|ms| {
            pair.put("k", &pattern::bytes(5, LARGE as usize));
            let options = GetOptions::until(Deadline::after(Duration::from_millis(ms)));
            pair.receiver.get(&edge(), "k", options).err()
        });
        let error = error.expect("a time too short for the payload");
        assert_eq!(error.kind(), ErrorKind::DeadlineExceeded, "{transport}: {error}");
        let mut slot = pair.receiver.alloc(LARGE, soon()).unwrap();
        slot.bytes_mut().unwrap().fill(0x55);
        eventually("the end of the pull", || pair.sender.health().offers.claims == 0);
        eventually("the end of the write", || pair.sender.engine().in_flight() == 0);
        let foreign = slot.bytes().unwrap().iter().filter(|byte| **byte != 0x55).count();
        assert_eq!(foreign, 0, "{transport}: foreign bytes");
        drop(slot);
        // The offer stays for one with more time.
        let got = pair.get("k").unwrap();
        assert_eq!(pattern::check(5, got.bytes().unwrap()), None, "{transport}");
        drop(got);
        pair.assert_whole();
    }
}

#[test]
fn an_extra_map_key_in_a_query_is_accepted() {
    use rmpv::Value;
    let pair = Pair::by("tcp");
    pair.put("k", b"abc");
    let (host, port) = pair.sender.address().unwrap();
    let map = Value::Map(vec![
        ("later".into(), Value::Array(vec![1.into(), "x".into()])),
        ("request_id".into(), "k@0_1".into()),
    ]);
    let mut query = b"query_info".to_vec();
    rmpv::encode::write_value(&mut query, &map).unwrap();
    let plane = ControlPlane::start(ControlLimits::default()).unwrap();
    let reply = plane.dialer().request_blocking(&format!("{host}:{port}"), query, soon()).unwrap();
    let expected = QueryReply::Offer { data_size: 3, is_fast_path: true, offered: None };
    assert_eq!(QueryReply::decode("k@0_1", &reply).unwrap(), expected);
    plane.close(soon()).unwrap();
}

#[test]
fn a_pool_needs_no_cuda_and_one_on_a_device_is_refused_by_name() {
    let on = |device: &str| ConnectorConfig { memory_pool_device: device.to_owned(), ..config(Role::Both) };
    build(on("cpu"));
    for device in ["cuda", "cuda:0", "tpu"] {
        let error = Connector::builder().config(on(device)).build().unwrap_err();
        assert!(matches!(error.kind(), ErrorKind::Unsupported | ErrorKind::InvalidConfig), "{error}");
        assert!(
            error.message().contains("memory_pool_device") && error.message().contains(device),
            "{error}"
        );
    }
}

/// A stage in a process of its own.
#[test]
fn peer_stage() {
    let Some(child) = peer::child() else { return };
    let (role, transport, host, port): (String, String, String, u16) = child.arguments().unwrap();
    let mut config = config(Role::Both);
    require(&mut config, &transport);
    large(&mut config);
    let connector = build(config);
    if role == "producer" {
        connector
            .put(&edge(), "k", pattern::bytes(6, LARGE as usize).as_slice(), PutOptions::default())
            .unwrap();
        child.send(&connector.address().unwrap()).unwrap();
    } else {
        child.send(&()).unwrap();
        // It is killed or stopped in the middle; after a stop, either outcome is as good, if it is true.
        if let Ok(got) = connector.get(&edge(), "k", at(&host, port)) {
            assert_eq!(pattern::check(6, got.bytes().unwrap()), None);
        }
        assert_whole_but_for_offers(&connector);
        child.send(&()).unwrap();
    }
    let _ = child.receive::<u64>(Deadline::NEVER);
}

fn assert_whole_but_for_offers(connector: &Connector) {
    if connector.health().offers.offers == 0 {
        assert_whole(connector);
    }
}

#[test]
fn a_consumer_killed_or_stopped_in_mid_transfer_costs_the_producer_nothing() {
    for (transport, kill) in [("shm", true), ("tcp", true), ("shm", false), ("tcp", false)] {
        let mut own = config(Role::Both);
        require(&mut own, transport);
        large(&mut own);
        let sender = build(own);
        let (host, port) = sender.address().unwrap();
        let bytes = pattern::bytes(6, LARGE as usize);
        sender.put(&edge(), "k", bytes.as_slice(), PutOptions::default()).unwrap();
        let process = peer::spawn("peer_stage", &("consumer", transport, &host, port)).unwrap();
        process.receive::<()>(soon()).unwrap();
        eventually("the transfer", || {
            sender.health().offers.claims == 1 && (transport == "shm" || sender.engine().in_flight() > 0)
        });
        if kill {
            process.kill9()
        } else {
            process.stop()
        }
        // The next peer is served at once, with something else.
        let mut other = config(Role::Receiver);
        require(&mut other, transport);
        large(&mut other);
        let other = build(other);
        sender.put(&edge(), "small", &b"next"[..], PutOptions::default()).unwrap();
        assert_eq!(other.get(&edge(), "small", at(&host, port)).unwrap().bytes().unwrap(), b"next");
        if kill || transport == "tcp" {
            // The transfer ends with its reason, and its payload is had by another.
            let start = Instant::now();
            eventually("the end of the transfer", || sender.health().offers.claims == 0);
            assert!(start.elapsed() < Duration::from_secs(10), "{transport} {kill}: {:?}", start.elapsed());
        } else {
            // A stopped reader is silent, not dead: what it may read is kept until it goes on.
            process.cont();
            process.receive::<()>(soon()).unwrap();
        }
        if sender.health().offers.offers > 0 {
            let got = other.get(&edge(), "k", at(&host, port)).unwrap();
            assert!(got.bytes().unwrap() == bytes, "{transport} {kill}");
        }
        if !kill && transport == "tcp" {
            process.cont();
            process.receive::<()>(soon()).unwrap();
        }
        assert_whole(&sender);
        assert_whole(&other);
    }
}

#[test]
fn a_producer_killed_or_stopped_in_mid_transfer_is_noticed_and_the_next_one_serves() {
    for (transport, kill) in [("shm", true), ("tcp", true), ("shm", false), ("tcp", false)] {
        let mut own = config(Role::Receiver);
        require(&mut own, transport);
        large(&mut own);
        let receiver = build(own);
        let process = peer::spawn("peer_stage", &("producer", transport, "", 0)).unwrap();
        let (host, port): (String, u16) = process.receive(soon()).unwrap();
        let start = Instant::now();
        let outcome = thread::scope(|scope| {
            let get = scope.spawn(|| {
                let got = receiver.get(&edge(), "k", at(&host, port))?;
                assert_eq!(pattern::check(6, got.bytes().unwrap()), None, "{transport}");
                Ok::<_, posthorse_core::Error>(())
            });
            eventually("the transfer", || receiver.health().pool.used > 0 || get.is_finished());
            if kill {
                process.kill9()
            } else {
                process.stop()
            }
            get.join().unwrap()
        });
        assert!(start.elapsed() < Duration::from_secs(12), "{transport} {kill}: {:?}", start.elapsed());
        match outcome {
            // The peer's end or the path's, whichever showed first; never only that time ran out.
            Err(error) => assert!(
                matches!(error.class(), ErrorClass::Peer | ErrorClass::Path),
                "{transport} {kill}: {error}"
            ),
            // On one host the consumer reads for itself what it has mapped; and it was verified.
            Ok(()) => assert_eq!(transport, "shm"),
        }
        assert_whole(&receiver);
        let next = peer::spawn("peer_stage", &("producer", transport, "", 0)).unwrap();
        let (host, port): (String, u16) = next.receive(soon()).unwrap();
        let got = receiver.get(&edge(), "k", at(&host, port)).unwrap();
        assert_eq!(pattern::check(6, got.bytes().unwrap()), None, "{transport}");
        drop(got);
        assert_whole(&receiver);
    }
}

/// One of two stages that share no namespace.
#[test]
fn contained_stage() {
    let Some(child) = peer::child() else { return };
    namespace::loopback_up().unwrap();
    child.send(&()).unwrap();
    let (own, producer): (IpAddr, Option<(String, u16)>) = child.receive(Deadline::NEVER).unwrap();
    let config = ConnectorConfig {
        host: own.to_string(),
        advertise_host: Some(own.to_string()),
        ..config(Role::Both)
    };
    let connector = build(config);
    let Some((host, port)) = producer else {
        connector.put(&edge(), "k", pattern::bytes(7, 9 << 20).as_slice(), PutOptions::default()).unwrap();
        child.send(&(connector.address().unwrap(), connector.engine().name())).unwrap();
        let _ = child.receive::<u64>(Deadline::NEVER);
        return;
    };
    let segment: String = child.receive(Deadline::NEVER).unwrap();
    let got = connector.get(&edge(), "k", at(&host, port)).unwrap();
    assert_eq!(pattern::check(7, got.bytes().unwrap()), None);
    let peer = connector.engine().open(&segment, soon()).unwrap();
    let explanation = connector.engine().explain(&peer);
    let shm = explanation.transports.iter().find(|transport| transport.name == "shm").cloned().unwrap();
    child.send(&(got.transport(), &explanation.chosen, shm.state, &shm.reason)).unwrap();
    let _ = child.receive::<u64>(Deadline::NEVER);
}

#[test]
fn two_containers_exchange_payloads_by_tcp_and_are_told_why_not_by_shm() {
    if let Err(missing) = namespace::link_available() {
        return skip("network-namespaces", &missing.to_string());
    }
    let start = || Spawn::new("contained_stage").separated().spawn().unwrap();
    let (producer, consumer) = (start(), start());
    for stage in [&producer, &consumer] {
        stage.receive::<()>(soon()).unwrap();
    }
    let (there, here) = namespace::link(&producer, &consumer).unwrap();
    producer.send(&(there.v4, None::<(String, u16)>)).unwrap();
    let (address, segment): ((String, u16), String) = producer.receive(soon()).unwrap();
    consumer.send(&(here.v4, Some(address))).unwrap();
    consumer.send(&segment).unwrap();
    let (carried, chosen, state, reason): (String, Option<String>, String, Option<String>) =
        consumer.receive(soon()).unwrap();
    assert_eq!(chosen.as_deref(), Some(carried.as_str()));
    if carried == "tcp" {
        assert_ne!(state, "up");
        let reason = reason.expect("why shared memory is not used");
        assert!(!reason.is_empty());
    } else {
        assert_eq!((carried.as_str(), state.as_str()), ("shm", "up"));
    }
}
