//! Chunk streams between connectors, in one process and in several.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

mod common;

use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use common::{Pair, assert_whole, build, config, edge, eventually, require, soon};
use posthorse_core::{DType, Deadline, Error, ErrorKind};
use posthorse_omni::config::Role;
use posthorse_omni::{Connector, Edge, FollowOptions, Source, StreamReceiver, TensorSet};
use posthorse_testkit::{Random, pattern, peer};

fn moment() -> Deadline {
    Deadline::after(Duration::from_millis(50))
}

fn follow(pair: &Pair, request: &str) -> StreamReceiver {
    pair.receiver.follow_stream(&edge(), request, FollowOptions::default()).unwrap()
}

fn at(host: &str, port: u16) -> FollowOptions<'_> {
    FollowOptions { source: Source::At(host, port), ..FollowOptions::default() }
}

/// Nothing is left of any stream.
fn assert_over(pair: &Pair) {
    eventually("the end of every stream", || {
        let health = pair.sender.health();
        health.streams + health.offers.offers + health.offers.parked == 0
    });
    pair.assert_whole();
}

#[test]
fn chunks_arrive_in_order_and_then_the_end() {
    for (transport, lease) in [("shm", false), ("shm", true), ("tcp", false)] {
        let pair = Pair::by(transport);
        let options = FollowOptions { lease, ..FollowOptions::default() };
        let mut receiver = pair.receiver.follow_stream(&edge(), "r", options).unwrap();
        let error = receiver.next(moment()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::DeadlineExceeded, "it is not open yet: {error}");
        thread::scope(|scope| {
            scope.spawn(|| {
                let mut sender = pair.sender.open_stream(&edge(), "r").unwrap();
                for number in 0..60 {
                    let len = 1 + Random::new(number).below(200_000) as usize;
                    let chunk = pattern::bytes(number, len);
                    assert_eq!(sender.send(chunk.as_slice(), soon()).unwrap(), number);
                }
                let mut set = TensorSet::new();
                set.push("hidden", DType::U8, &[3], &[1, 2, 3]).unwrap();
                sender.send(&set, soon()).unwrap();
                assert_eq!(sender.end().unwrap(), 61);
            });
            for number in 0..60 {
                let chunk = receiver.next(soon()).unwrap().unwrap();
                assert_eq!(chunk.is_leased(), lease);
                assert_eq!(pattern::check(number, chunk.bytes().unwrap()), None, "{transport} {number}");
            }
            let tensors = receiver.next(soon()).unwrap().unwrap();
            assert_eq!(tensors.tensor("hidden").unwrap().bytes(), [1, 2, 3]);
            drop(tensors);
            assert!(receiver.next(soon()).unwrap().is_none());
            assert!(receiver.next(soon()).unwrap().is_none(), "it stays so");
        });
        drop(receiver);
        assert_over(&pair);
    }
}

#[test]
fn a_second_follower_is_told_so_and_does_not_disturb_the_first() {
    let pair = Pair::by("shm");
    let mut first = follow(&pair, "r");
    let mut sender = pair.sender.open_stream(&edge(), "r").unwrap();
    sender.send(&b"0"[..], soon()).unwrap();
    assert_eq!(first.next(soon()).unwrap().unwrap().bytes().unwrap(), b"0");
    // The first is known by now: its words come before its chunks are fetched anew.
    eventually("the first follower", || {
        let mut second = follow(&pair, "r");
        let error = second.next(soon()).unwrap_err();
        assert!(error.message().contains("stream \"r@0_1\"") || error.kind() == ErrorKind::Busy, "{error}");
        error.kind() == ErrorKind::Busy
    });
    let error = follow(&pair, "r").next(soon()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Busy);
    assert!(error.to_string().contains(pair.receiver.engine().name()), "{error}");
    sender.send(&b"1"[..], soon()).unwrap();
    assert_eq!(first.next(soon()).unwrap().unwrap().bytes().unwrap(), b"1");
    assert_eq!(sender.end().unwrap(), 2);
    assert!(first.next(soon()).unwrap().is_none());
    assert_over(&pair);
}

#[test]
fn a_wait_for_a_stream_says_for_what() {
    let pair = Pair::by("shm");
    let mut receiver = follow(&pair, "r");
    let error = receiver.next(moment()).unwrap_err().to_string();
    assert!(error.contains("\"r@0_1\"") && error.contains("which has not opened it"), "{error}");
    let mut sender = pair.sender.open_stream(&edge(), "other").unwrap();
    let error = loop {
        if let Err(error) = sender.send(&b"x"[..], moment()) {
            break error.to_string();
        }
    };
    assert!(error.contains("\"other@0_1\"") && error.contains("a consumer to follow"), "{error}");
}

#[test]
fn a_slow_consumer_holds_the_producer_back() {
    let pair = Pair::with(|config| config.stream_window = 4);
    let mut sender = pair.sender.open_stream(&edge(), "r").unwrap();
    for number in 0..4_u8 {
        sender.send(&[number][..], soon()).unwrap();
    }
    let error = sender.send(&[99][..], moment()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::DeadlineExceeded, "{error}");
    assert!(error.message().contains("credit"), "{error}");
    let mut receiver = follow(&pair, "r");
    eventually("the prefetch", || pair.sender.health().served + pair.receiver.health().gets >= 4);
    let error = sender.send(&[99][..], moment()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::DeadlineExceeded, "what is fetched is not read: {error}");
    let sent = AtomicU64::new(4);
    thread::scope(|scope| {
        scope.spawn(|| {
            for number in 4..40_u8 {
                sender.send(&[number][..], soon()).unwrap();
                sent.fetch_add(1, Ordering::SeqCst);
            }
            sender.end().unwrap();
        });
        for number in 0..40_u8 {
            let chunk = receiver.next(soon()).unwrap().unwrap();
            assert_eq!(chunk.bytes().unwrap(), [number], "nothing was lost or doubled");
            assert!(sent.load(Ordering::SeqCst) <= u64::from(number) + 1 + 4, "beyond its window");
        }
        assert!(receiver.next(soon()).unwrap().is_none());
    });
    assert_over(&pair);
}

#[test]
fn a_stream_whose_end_is_refused_leaves_nothing_behind() {
    let pair = Pair::with(|config| config.max_offers = 3);
    let mut sender = pair.sender.open_stream(&edge(), "r").unwrap();
    for number in 0..3_u8 {
        sender.send(&[number][..], soon()).unwrap();
    }
    assert_eq!(sender.end().unwrap_err().kind(), ErrorKind::QueueFull);
    assert_eq!(pair.sender.health().offers.offers, 0);
    // The next of its name is not taken for it.
    let mut next = pair.sender.open_stream(&edge(), "r").unwrap();
    next.send(&[9][..], soon()).unwrap();
    let mut receiver = follow(&pair, "r");
    assert_eq!(receiver.next(soon()).unwrap().unwrap().bytes().unwrap(), [9]);
    next.end().unwrap();
    assert!(receiver.next(soon()).unwrap().is_none());
    drop(receiver);
    assert_over(&pair);
}

#[test]
fn a_chunk_that_cannot_be_put_is_an_error_and_no_gap() {
    let pair = Pair::by("tcp");
    let mut receiver = follow(&pair, "r");
    let mut sender = pair.sender.open_stream(&edge(), "r").unwrap();
    sender.send(&b"0"[..], soon()).unwrap();
    let huge = vec![0_u8; 65 << 20];
    assert_eq!(sender.send(huge.as_slice(), soon()).unwrap_err().kind(), ErrorKind::TooLarge);
    assert_eq!(sender.send(&[][..], soon()).unwrap_err().kind(), ErrorKind::InvalidArgument);
    let held = pair.sender.alloc(60 << 20, soon()).unwrap();
    let full = sender.send(&huge[..10 << 20], moment()).unwrap_err();
    assert!(matches!(full.kind(), ErrorKind::DeadlineExceeded | ErrorKind::PoolFull), "{full}");
    // The end has its room, however full the pool is.
    assert_eq!(sender.send(&b"1"[..], soon()).unwrap(), 1);
    let rest = pair.sender.alloc(pair.sender.health().pool.space.largest_free, soon());
    assert_eq!(sender.end().unwrap(), 2);
    for number in [b"0", b"1"] {
        assert_eq!(receiver.next(soon()).unwrap().unwrap().bytes().unwrap(), number);
    }
    assert!(receiver.next(soon()).unwrap().is_none());
    drop((held, rest));
    assert_over(&pair);
}

#[test]
fn a_producers_error_comes_behind_its_chunks() {
    let pair = Pair::by("shm");
    for dropped in [false, true] {
        let mut sender = pair.sender.open_stream(&edge(), "r").unwrap();
        let mut receiver = follow(&pair, "r");
        sender.send(&b"only"[..], soon()).unwrap();
        if dropped {
            drop(sender);
        } else {
            sender
                .fail(&Error::new(ErrorKind::OutOfMemory, "the model ran out").with_advice("shrink"))
                .unwrap();
        }
        assert_eq!(receiver.next(soon()).unwrap().unwrap().bytes().unwrap(), b"only");
        for _ in 0..2 {
            let error = receiver.next(soon()).unwrap_err();
            let (kind, message) = if dropped {
                (ErrorKind::Aborted, "the producer dropped the stream before its end")
            } else {
                (ErrorKind::OutOfMemory, "the model ran out")
            };
            assert_eq!(error.kind(), kind, "{error}");
            assert!(error.message().contains(message), "{error}");
            assert!(error.peer().is_some(), "{error}");
        }
        drop(receiver);
        assert_over(&pair);
    }
}

#[test]
fn an_abort_in_the_middle_reaches_the_producer_and_takes_everything_back() {
    for (transport, dropped) in [("shm", false), ("tcp", false), ("tcp", true)] {
        let pair = Pair::by(transport);
        let mut receiver = follow(&pair, "r");
        let mut sender = pair.sender.open_stream(&edge(), "r").unwrap();
        thread::scope(|scope| {
            let sending = scope.spawn(|| {
                loop {
                    if let Err(error) = sender.send(&[7; 100_000][..], soon()) {
                        return error;
                    }
                }
            });
            for _ in 0..10 {
                receiver.next(soon()).unwrap().unwrap();
            }
            if dropped {
                drop(receiver)
            } else {
                receiver.abort("heard enough")
            }
            let error = sending.join().unwrap();
            assert_eq!(error.kind(), ErrorKind::Aborted, "{error}");
            let reason = if dropped { "the consumer dropped the stream" } else { "heard enough" };
            assert!(error.message().contains(reason), "{error}");
        });
        assert_eq!(sender.send(&b"x"[..], soon()).unwrap_err().kind(), ErrorKind::Aborted);
        assert_eq!(sender.end().unwrap_err().kind(), ErrorKind::Aborted);
        assert_over(&pair);
        // The name is free again.
        let mut sender = pair.sender.open_stream(&edge(), "r").unwrap();
        let mut receiver = follow(&pair, "r");
        sender.send(&b"again"[..], soon()).unwrap();
        sender.end().unwrap();
        assert_eq!(receiver.next(soon()).unwrap().unwrap().bytes().unwrap(), b"again");
        assert!(receiver.next(soon()).unwrap().is_none());
    }
}

#[test]
fn sixteen_streams_at_once_leave_each_other_and_gets_alone() {
    for transport in ["shm", "tcp"] {
        let pair = &Pair::by(transport);
        thread::scope(|scope| {
            for stream in 0..16_u64 {
                let request = format!("r{stream}");
                let name = request.clone();
                scope.spawn(move || {
                    let mut sender = pair.sender.open_stream(&edge(), &request).unwrap();
                    for number in 0..40 {
                        let len = 1 + Random::new(stream << 8 | number).below(20_000) as usize;
                        sender.send(pattern::bytes(stream << 8 | number, len).as_slice(), soon()).unwrap();
                    }
                    sender.end().unwrap();
                });
                scope.spawn(move || {
                    let mut receiver = follow(pair, &name);
                    let mut number = 0;
                    while let Some(chunk) = receiver.next(soon()).unwrap() {
                        assert_eq!(pattern::check(stream << 8 | number, chunk.bytes().unwrap()), None);
                        number += 1;
                    }
                    assert_eq!(number, 40);
                });
            }
            pair.put("beside", b"them");
            assert_eq!(pair.get("beside").unwrap().bytes().unwrap(), b"them");
        });
        assert_over(pair);
    }
}

#[test]
fn streams_are_bounded_and_have_names_of_their_own() {
    let pair = Pair::with(|config| config.max_streams = 2);
    let first = pair.sender.open_stream(&edge(), "a").unwrap();
    assert_eq!(pair.sender.open_stream(&edge(), "a").unwrap_err().kind(), ErrorKind::Busy);
    let _second = pair.sender.open_stream(&edge(), "b").unwrap();
    let error = pair.sender.open_stream(&edge(), "c").unwrap_err();
    assert_eq!(error.kind(), ErrorKind::LimitReached);
    assert!(error.message().contains("max_streams"), "{error}");
    let receivers = ["a", "b"].map(|name| follow(&pair, name));
    let error = pair.receiver.follow_stream(&edge(), "c", FollowOptions::default()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::LimitReached);
    drop(receivers);
    follow(&pair, "c");
    first.end().unwrap_or(0);
    let long = "r".repeat(1010);
    assert_eq!(pair.sender.open_stream(&edge(), &long).unwrap_err().kind(), ErrorKind::InvalidArgument);
    assert_eq!(pair.receiver.open_stream(&edge(), "r").unwrap_err().kind(), ErrorKind::AccessDenied);
    let error = pair.sender.follow_stream(&edge(), "r", FollowOptions::default()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::AccessDenied);
}

#[test]
fn a_stream_can_be_awaited() {
    let pair = Pair::by("shm");
    let mut receiver = follow(&pair, "r");
    let mut sender = pair.sender.open_stream(&edge(), "r").unwrap();
    pollster::block_on(async {
        sender.ready(soon()).await.unwrap();
        sender.send(&b"x"[..], soon()).unwrap();
        sender.end().unwrap();
        assert_eq!(receiver.next_async(soon()).await.unwrap().unwrap().bytes().unwrap(), b"x");
        assert!(receiver.next_async(soon()).await.unwrap().is_none());
    });
}

#[test]
fn closing_either_side_ends_its_streams() {
    for producer in [true, false] {
        let pair = Pair::with(|config| config.liveness_ms = 600);
        let mut receiver = follow(&pair, "r");
        let mut sender = pair.sender.open_stream(&edge(), "r").unwrap();
        sender.send(&b"x"[..], soon()).unwrap();
        receiver.next(soon()).unwrap().unwrap();
        thread::scope(|scope| {
            let waiting = scope.spawn(move || receiver.next(soon()).unwrap_err());
            if producer {
                pair.sender.close();
                assert_eq!(sender.send(&b"x"[..], soon()).unwrap_err().kind(), ErrorKind::Closed);
                let error = waiting.join().unwrap();
                assert!(matches!(error.kind(), ErrorKind::Closed | ErrorKind::PeerGone), "{error}");
            } else {
                pair.receiver.close();
                assert_eq!(waiting.join().unwrap().kind(), ErrorKind::Closed);
                let error = loop {
                    if let Err(error) = sender.send(&b"x"[..], soon()) {
                        break error;
                    }
                };
                assert!(matches!(error.kind(), ErrorKind::PeerGone | ErrorKind::Aborted), "{error}");
            }
        });
    }
}

/// A stage in a process of its own: a source, a sink, or what lies between.
#[test]
fn peer_stage() {
    let Some(child) = peer::child() else { return };
    let (role, host, port, chunks): (String, String, u16, u64) = child.arguments().unwrap();
    let connector = build(config(Role::Both));
    child.send(&connector.address().unwrap()).unwrap();
    match role.as_str() {
        "thinker" => {
            let mut sender = connector.open_stream(&Edge::new("thinker", "talker"), "r").unwrap();
            for number in 0..chunks {
                sender.send(pattern::bytes(number, 50_000).as_slice(), soon()).unwrap();
            }
            if chunks < 1000 {
                sender.end().unwrap();
            }
            let _ = child.receive::<u64>(Deadline::NEVER);
        }
        "talker" => {
            let mut receiver =
                connector.follow_stream(&Edge::new("thinker", "talker"), "r", at(&host, port)).unwrap();
            let mut sender = connector.open_stream(&Edge::new("talker", "vocoder"), "r").unwrap();
            while let Some(chunk) = receiver.next(soon()).unwrap() {
                // As a model does: something else of about the size.
                let spoken: Vec<u8> = chunk.bytes().unwrap().iter().map(|byte| !byte).collect();
                sender.send(spoken.as_slice(), soon()).unwrap();
            }
            child.send(&sender.end().unwrap()).unwrap();
            let _ = child.receive::<u64>(Deadline::NEVER);
        }
        "listener" => {
            let mut receiver =
                connector.follow_stream(&Edge::new("thinker", "talker"), "r", at(&host, port)).unwrap();
            receiver.next(soon()).unwrap().unwrap();
            child.send(&1_u64).unwrap();
            let _ = child.receive::<u64>(Deadline::NEVER);
        }
        other => panic!("{other}"),
    }
}

fn stage(role: &str, host: &str, port: u16, chunks: u64) -> (peer::Peer, String, u16) {
    let process = peer::spawn("peer_stage", &(role, host, port, chunks)).unwrap();
    let (host, port) = process.receive(soon()).unwrap();
    (process, host, port)
}

#[test]
fn three_stages_in_three_processes() {
    let (_thinker, host, port) = stage("thinker", "", 0, 100);
    let (talker, host, port) = stage("talker", &host, port, 0);
    let vocoder = build(config(Role::Receiver));
    let mut receiver = vocoder.follow_stream(&Edge::new("talker", "vocoder"), "r", at(&host, port)).unwrap();
    let mut number = 0;
    while let Some(chunk) = receiver.next(soon()).unwrap() {
        let heard: Vec<u8> = chunk.bytes().unwrap().iter().map(|byte| !byte).collect();
        assert_eq!(pattern::check(number, &heard), None);
        number += 1;
    }
    assert_eq!((number, talker.receive::<u64>(soon()).unwrap()), (100, 100));
    assert_whole(&vocoder);
}

#[test]
fn a_producer_that_is_killed_or_stopped_ends_the_stream_with_its_reason() {
    for (transport, kill, prefetch) in [("shm", true, 1), ("tcp", true, 4), ("tcp", false, 1)] {
        let mut config = config(Role::Receiver);
        require(&mut config, transport);
        let connector = build(config);
        let (thinker, host, port) = stage("thinker", "", 0, 1_000_000);
        let options = FollowOptions { prefetch, ..at(&host, port) };
        let mut receiver = connector.follow_stream(&Edge::new("thinker", "talker"), "r", options).unwrap();
        for number in 0..20 {
            let chunk = receiver.next(soon()).unwrap().unwrap();
            assert_eq!(pattern::check(number, chunk.bytes().unwrap()), None);
        }
        if kill {
            thinker.kill9()
        } else {
            thinker.stop()
        }
        let start = Instant::now();
        let error = loop {
            match receiver.next(soon()) {
                Ok(chunk) => assert!(chunk.is_some()),
                Err(error) => break error,
            }
        };
        assert!(matches!(error.kind(), ErrorKind::PeerGone | ErrorKind::PeerUnreachable), "{error}");
        assert!(start.elapsed() < Duration::from_secs(10), "{:?}", start.elapsed());
        drop(receiver);
        assert_whole(&connector);
    }
}

#[test]
fn a_consumer_that_is_killed_or_stopped_ends_the_stream_and_the_next_is_served() {
    let sender = build(config(Role::Both));
    let (host, port) = sender.address().unwrap();
    let edge = Edge::new("thinker", "talker");
    for kill in [true, false] {
        let mut stream = sender.open_stream(&edge, "r").unwrap();
        stream.send(&b"0"[..], soon()).unwrap();
        let (listener, ..) = stage("listener", &host, port, 0);
        listener.receive::<u64>(soon()).unwrap();
        if kill {
            listener.kill9()
        } else {
            listener.stop()
        }
        let start = Instant::now();
        let error = loop {
            if let Err(error) = stream.send(&[1; 1000][..], soon()) {
                break error;
            }
        };
        assert_eq!(error.kind(), ErrorKind::PeerGone, "{error}");
        assert!(start.elapsed() < Duration::from_secs(10), "{:?}", start.elapsed());
        drop(stream);
        if !kill {
            listener.cont();
        }
        assert_whole(&sender);
    }
    eventually("what the dead waited for", || sender.health().offers.parked == 0);
    let mut stream = sender.open_stream(&edge, "r").unwrap();
    stream.send(&b"next"[..], soon()).unwrap();
    stream.end().unwrap();
    let consumer: Connector = build(config(Role::Receiver));
    let mut receiver = consumer.follow_stream(&edge, "r", at(&host, port)).unwrap();
    assert_eq!(receiver.next(soon()).unwrap().unwrap().bytes().unwrap(), b"next");
    assert!(receiver.next(soon()).unwrap().is_none());
}
