//! Two connectors that exchange payloads, in one process and in two.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

mod common;

use std::num::NonZeroU32;
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Waker};
use std::thread;
use std::time::{Duration, Instant};

use bytes::Bytes;
use common::{Pair, assert_whole, build, config, edge, eventually, soon};
use posthorse_core::{Checksum, DType, Deadline, ErrorKind};
use posthorse_omni::config::Role;
use posthorse_omni::payload::MAX_TENSORS;
use posthorse_omni::{Connector, ConnectorConfig, GetOptions, PutOptions, Source, TensorSet, TensorSpec};
use posthorse_testkit::{Random, pattern, peer};
use serde::{Deserialize, Serialize};

#[test]
fn bytes_buffers_tensors_and_values_arrive_by_each_transport() {
    for transport in ["shm", "tcp"] {
        let pair = Pair::by(transport);
        for (round, len) in [1_usize, 4096, 65_537, 9 << 20].into_iter().enumerate() {
            let bytes = pattern::bytes(round as u64, len);
            pair.put("bytes", &bytes);
            let got = pair.get("bytes").unwrap();
            assert_eq!(got.transport(), transport);
            assert!(got.bytes().unwrap() == bytes, "{transport} {len}");

            let mut buffer = pair.sender.alloc(len as u64, soon()).unwrap();
            buffer.copy_from_slice(&bytes).unwrap();
            pair.sender.put(&edge(), "buffer", buffer, PutOptions::default()).unwrap();
            assert!(pair.get("buffer").unwrap().bytes().unwrap() == bytes, "{transport} {len}");
        }
        let keys: Vec<f32> = (0..6).map(|i| i as f32).collect();
        let keys: Vec<u8> = keys.iter().flat_map(|x| x.to_le_bytes()).collect();
        let mut set = TensorSet::new();
        set.push("key_cache_0", DType::F32, &[2, 3], &keys).unwrap();
        set.push("scale", DType::BF16, &[], &[1, 2]).unwrap();
        pair.sender.put(&edge(), "tensors", &set, PutOptions::default()).unwrap();
        let got = pair.get("tensors").unwrap();
        assert_eq!(
            got.tensors().iter().map(|t| t.name.as_str()).collect::<Vec<_>>(),
            ["key_cache_0", "scale"]
        );
        let tensor = got.tensor("key_cache_0").unwrap();
        assert_eq!((tensor.desc().dtype, tensor.desc().shape.as_slice()), (DType::F32, &[2, 3][..]));
        assert_eq!(tensor.elements::<f32>().unwrap(), [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]);
        assert_eq!(tensor.elements::<u16>().unwrap_err().kind(), ErrorKind::TypeMismatch);
        assert!(got.tensor("values").unwrap_err().to_string().contains("key_cache_0"));
        drop(got);

        #[derive(Serialize, Deserialize, PartialEq, Debug)]
        struct Prompt {
            ids: Vec<u32>,
            text: String,
        }
        let prompt = Prompt { ids: vec![1, 2, 3], text: "hello".to_owned() };
        pair.sender.put_value(&edge(), "value", &prompt, PutOptions::default()).unwrap();
        assert_eq!(pair.get("value").unwrap().value::<Prompt>().unwrap(), prompt);
        pair.assert_whole();
    }
}

#[test]
fn a_lease_reads_in_place_and_gives_the_buffer_back() {
    let pair = Pair::by("shm");
    let bytes = pattern::bytes(5, 1 << 20);
    pair.put("k", &bytes);
    let options = GetOptions { lease: true, ..GetOptions::until(soon()) };
    let leased = pair.receiver.get(&edge(), "k", options).unwrap();
    assert!(leased.is_leased());
    assert!(leased.bytes().unwrap() == bytes);
    assert_eq!(pair.receiver.health().pool.used, 0, "nothing was copied");
    assert!(!pair.sender.health().pool.is_whole(), "the producer keeps it");
    // Longer than the lease would last without being renewed.
    let kept = Instant::now() + Duration::from_millis(3500);
    while Instant::now() < kept {
        thread::park_timeout(Duration::from_millis(100));
    }
    assert!(leased.bytes().unwrap() == bytes);
    leased.release();
    pair.assert_whole();
    assert_eq!(pair.get("k").unwrap_err().kind(), ErrorKind::Expired, "it was served");
}

#[test]
fn a_get_waits_for_its_put_and_a_try_does_not() {
    for transport in ["shm", "tcp"] {
        let pair = Pair::by(transport);
        assert!(pair.receiver.try_get(&edge(), "late", GetOptions::until(soon())).unwrap().is_none());
        thread::scope(|scope| {
            let getter = scope.spawn(|| pair.get("late").unwrap().bytes().unwrap().to_vec());
            while pair.sender.health().offers.parked == 0 {
                thread::yield_now();
            }
            pair.put("late", b"worth the wait");
            assert_eq!(getter.join().unwrap(), b"worth the wait");
        });
        let late = pair.receiver.get(
            &edge(),
            "never",
            GetOptions::until(Deadline::after(Duration::from_millis(80))),
        );
        let error = late.unwrap_err();
        assert!(matches!(error.kind(), ErrorKind::NotFound | ErrorKind::DeadlineExceeded), "{error}");
        // Whichever it is, it says what of whom was waited for.
        let (host, port) = pair.sender.address().unwrap();
        assert!(error.message().contains("\"never@"), "{error}");
        assert_eq!(error.peer(), Some(format!("{host}:{port}").as_str()), "{error}");
        pair.assert_whole();
    }
}

#[test]
fn a_ticket_says_where_a_payload_is() {
    let sender = build(config(Role::Sender));
    let receiver = build(config(Role::Receiver));
    let ticket = sender.put(&edge(), "k", &b"abc"[..], PutOptions::default()).unwrap();
    let error = receiver.get(&edge(), "k", GetOptions::until(soon())).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidConfig, "no producer is configured");
    let options = GetOptions { source: Source::Ticket(&ticket), ..GetOptions::until(soon()) };
    assert_eq!(receiver.get(&edge(), "k", options).unwrap().bytes().unwrap(), b"abc");
    let json = serde_json::to_value(&ticket).unwrap();
    assert_eq!(json["data_size"], 3);
    assert_eq!(json["is_fast_path"], true);
}

#[test]
fn each_declared_consumer_is_served_and_the_next_is_told_why_not() {
    for transport in ["shm", "tcp"] {
        let pair = Pair::by(transport);
        let bytes = pattern::bytes(9, 3 << 20);
        let options = PutOptions { consumers: NonZeroU32::new(3), ..PutOptions::default() };
        pair.sender.put(&edge(), "fan", bytes.as_slice(), options).unwrap();
        thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| assert!(pair.get("fan").unwrap().bytes().unwrap() == bytes));
            }
        });
        let error = pair.get("fan").unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Expired, "{transport}: {error}");
        pair.assert_whole();
    }
}

#[test]
fn a_full_pool_waits_for_room_until_the_deadline() {
    let pair = Pair::by("shm");
    let big = vec![7_u8; 40 << 20];
    pair.put("first", &big);
    let options =
        PutOptions { deadline: Some(Deadline::after(Duration::from_millis(50))), ..PutOptions::default() };
    let error = pair.sender.put(&edge(), "second", big.as_slice(), options).unwrap_err();
    assert!(matches!(error.kind(), ErrorKind::DeadlineExceeded | ErrorKind::PoolFull), "{error}");
    thread::scope(|scope| {
        let putter = scope.spawn(|| {
            let options = PutOptions { deadline: Some(soon()), ..PutOptions::default() };
            pair.sender.put(&edge(), "second", big.as_slice(), options).unwrap();
        });
        drop(pair.get("first").unwrap());
        putter.join().unwrap();
    });
    drop(pair.get("second").unwrap());
    let error =
        pair.sender.put(&edge(), "huge", vec![0_u8; 65 << 20].as_slice(), PutOptions::default()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::TooLarge);
    pair.assert_whole();
}

#[test]
fn a_dead_port_is_answered_with_its_reason_in_time() {
    let receiver = build(config(Role::Receiver));
    let port = {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        listener.local_addr().unwrap().port()
    };
    let start = Instant::now();
    let options = GetOptions { source: Source::At("127.0.0.1", port), ..GetOptions::until(soon()) };
    let error = receiver.get(&edge(), "k", options).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::PeerUnreachable, "{error}");
    assert!(error.message().contains("\"k@"), "{error}");
    assert!(start.elapsed() < Duration::from_secs(3));
    assert_eq!(receiver.health().errors, 1);
}

#[test]
fn a_small_get_is_not_stuck_behind_large_ones() {
    let pair = Pair::with(|config| {
        config.transport = "require:tcp".parse().unwrap();
        config.memory_pool_size = 512 << 20;
    });
    let big = vec![1_u8; 100 << 20];
    for index in 0..4 {
        pair.put(&format!("big{index}"), &big);
    }
    pair.put("small", b"x");
    let done = &AtomicBool::new(false);
    thread::scope(|scope| {
        let getters: Vec<_> = (0..4)
            .map(|index| {
                let pair = &pair;
                scope.spawn(move || {
                    let got = pair.get(&format!("big{index}")).unwrap();
                    assert!(done.load(Ordering::SeqCst) || got.len() == 100 << 20);
                    Instant::now()
                })
            })
            .collect();
        while pair.sender.health().offers.claims < 4 {
            thread::yield_now();
        }
        assert_eq!(pair.get("small").unwrap().bytes().unwrap(), b"x");
        let small = Instant::now();
        done.store(true, Ordering::SeqCst);
        let last = getters.into_iter().map(|getter| getter.join().unwrap()).max().unwrap();
        assert!(small < last, "the small one came while large ones were under way");
    });
    pair.assert_whole();
}

#[test]
fn closing_never_hangs_and_says_closed_afterwards() {
    let pair = Pair::by("tcp");
    pair.put("k", &[1; 1000]);
    thread::scope(|scope| {
        // A thread that has used the connector and lives on, and one that waits.
        let waiting = scope.spawn(|| pair.get("never"));
        while pair.sender.health().offers.parked == 0 {
            thread::yield_now();
        }
        let start = Instant::now();
        pair.sender.close();
        pair.receiver.close();
        pair.receiver.close();
        assert!(start.elapsed() < Duration::from_secs(10));
        assert!(waiting.join().unwrap().is_err());
    });
    assert_eq!(pair.get("k").unwrap_err().kind(), ErrorKind::Closed);
    let put = pair.sender.put(&edge(), "k", &b"x"[..], PutOptions::default());
    assert_eq!(put.unwrap_err().kind(), ErrorKind::Closed);
}

#[test]
fn every_close_returns_when_the_connector_is_closed() {
    for _ in 0..20 {
        let sender = build(config(Role::Sender));
        let (_, port) = sender.address().unwrap();
        let barrier = Barrier::new(4);
        thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    barrier.wait();
                    sender.close();
                    // Nobody listens any more. Not bound again: the other threads look too.
                    let refused = std::net::TcpStream::connect(("127.0.0.1", port)).unwrap_err();
                    assert_eq!(refused.kind(), std::io::ErrorKind::ConnectionRefused);
                });
            }
        });
    }
}

#[test]
fn a_consumer_that_closes_at_once_still_tells_that_its_get_has_ended() {
    for transport in ["shm", "tcp"] {
        for _ in 0..10 {
            let pair = Pair::by(transport);
            pair.put("k", b"x");
            drop(pair.get("k").unwrap());
            pair.receiver.close();
            pair.assert_whole();
        }
    }
}

#[test]
fn a_bind_failure_surfaces_in_the_builder() {
    let taken = build(config(Role::Sender));
    let (_, port) = taken.address().unwrap();
    let error =
        Connector::builder().config(ConnectorConfig { zmq_port: port, ..config(Role::Sender) }).build();
    let error = error.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Io);
    assert!(error.to_string().contains(&port.to_string()), "{error}");
}

#[test]
fn roles_are_kept() {
    let pair = Pair::by("tcp");
    let put = pair.receiver.put(&edge(), "k", &b"x"[..], PutOptions::default());
    assert_eq!(put.unwrap_err().kind(), ErrorKind::AccessDenied);
    let get = pair.sender.get(&edge(), "k", GetOptions::until(soon()));
    assert_eq!(get.unwrap_err().kind(), ErrorKind::AccessDenied);
}

#[test]
fn a_get_can_be_awaited() {
    for (transport, lease) in [("shm", false), ("shm", true), ("tcp", false)] {
        let pair = Pair::by(transport);
        pair.put("k", b"async");
        let (edge, options) = (edge(), GetOptions { lease, ..GetOptions::until(soon()) });
        let got = pollster::block_on(pair.receiver.get_async(&edge, "k", options)).unwrap();
        assert_eq!(got.bytes().unwrap(), b"async");
        drop(got);
        eventually("the end of the offer", || pair.sender.health().offers.offers == 0);
        pair.assert_whole();
    }
}

#[test]
fn checksums_are_compared_at_the_far_end() {
    for transport in ["shm", "tcp"] {
        let pair = Pair::with(|config| {
            config.transport = format!("require:{transport}").parse().unwrap();
            config.checksum = Checksum::Full;
        });
        let bytes = pattern::bytes(3, 5 << 20);
        pair.put("k", &bytes);
        assert!(pair.get("k").unwrap().bytes().unwrap() == bytes);
    }
}

#[test]
fn many_threads_put_and_get_and_the_pools_are_whole_at_the_end() {
    for transport in ["shm", "tcp"] {
        let pair = Pair::by(transport);
        thread::scope(|scope| {
            for thread in 0..8_u64 {
                let pair = &pair;
                scope.spawn(move || {
                    let mut random = Random::new(thread);
                    for round in 0..30_u64 {
                        let seed = thread << 32 | round;
                        let len = 1 + random.below(300_000) as usize;
                        let key = format!("{thread}/{round}");
                        pair.put(&key, &pattern::bytes(seed, len));
                        let got = pair.get(&key).unwrap();
                        assert_eq!(pattern::check(seed, got.bytes().unwrap()), None);
                    }
                });
            }
        });
        pair.assert_whole();
    }
}

#[test]
fn nothing_is_lost_whenever_a_deadline_passes() {
    for transport in ["tcp", "shm"] {
        let pair = Pair::by(transport);
        let (bytes, mut random) = (pattern::bytes(1, 1 << 20), Random::new(7));
        for n in 0..200 {
            let key = format!("k{n}");
            pair.put(&key, &bytes);
            let got = loop {
                let deadline = Deadline::after(Duration::from_micros(200 + random.below(3000)));
                match pair.receiver.get(&edge(), &key, GetOptions::until(deadline)) {
                    Ok(got) => break got,
                    // The get before is still coming to its end.
                    Err(error) if error.kind() == ErrorKind::Busy => {}
                    Err(error) => assert_eq!(error.kind(), ErrorKind::DeadlineExceeded, "{error}"),
                }
            };
            assert_eq!(pattern::check(1, got.bytes().unwrap()), None);
        }
        pair.assert_whole();
    }
}

#[test]
fn tensors_made_in_the_pool_go_out_without_a_copy() {
    for transport in ["shm", "tcp"] {
        let pair = Pair::by(transport);
        let specs = [
            TensorSpec { name: "keys", dtype: DType::BF16, shape: &[512, 4, 128] },
            TensorSpec { name: "step", dtype: DType::I64, shape: &[] },
        ];
        let laid = |connector: &Connector| {
            let mut laid = connector.alloc_tensors(&specs, soon()).unwrap();
            assert_eq!(laid.tensors().len(), 2);
            laid.tensor_mut("keys").unwrap().copy_from_slice(&pattern::bytes(5, 512 * 4 * 128 * 2));
            laid.tensor_mut("step").unwrap().copy_from_slice(&7_i64.to_le_bytes());
            let error = laid.tensor_mut("values").unwrap_err();
            assert!(
                error.message().contains("\"values\"; accepted: one of the 2 there are: keys, step"),
                "{error}"
            );
            laid
        };
        for lease in [false, true] {
            let buffer = laid(&pair.sender);
            let used = pair.sender.health().pool.used;
            pair.sender.put(&edge(), "k", buffer, PutOptions::default()).unwrap();
            assert_eq!(pair.sender.health().pool.used, used);
            let got =
                pair.receiver.get(&edge(), "k", GetOptions { lease, ..GetOptions::until(soon()) }).unwrap();
            assert_eq!(got.is_leased(), lease && transport == "shm");
            assert_eq!(pattern::check(5, got.tensor("keys").unwrap().bytes()), None);
            assert_eq!(got.tensor("step").unwrap().elements::<i64>().unwrap(), [7]);
        }
        // A buffer of another pool is copied.
        pair.sender.put(&edge(), "k", laid(&pair.receiver), PutOptions::default()).unwrap();
        assert_eq!(pair.get("k").unwrap().tensor("step").unwrap().elements::<i64>().unwrap(), [7]);
        pair.assert_whole();
    }
    let pair = Pair::by("shm");
    let twice = [TensorSpec { name: "a", dtype: DType::U8, shape: &[1] }; 2];
    let error = pair.sender.alloc_tensors(&twice, soon()).unwrap_err();
    assert!(error.message().contains("\"a\" for the second time"), "{error}");
    pair.assert_whole();
}

#[test]
fn many_gets_that_wait_hold_up_no_other() {
    // As many as may wait where a process may have 1,024 descriptors.
    let keys: Vec<String> = (0..64).map(|n| format!("later{n}")).collect();
    for transport in ["shm", "tcp"] {
        let (pair, edge) = (Pair::by(transport), edge());
        let long = GetOptions::until(Deadline::after(Duration::from_secs(120)));
        let wait = |key| Box::pin(pair.receiver.get_async(&edge, key, long));
        let mut gets: Vec<_> = keys.iter().map(|key| wait(key)).collect();
        let mut context = Context::from_waker(Waker::noop());
        for get in &mut gets {
            assert!(get.as_mut().poll(&mut context).is_pending());
        }
        eventually("all the waits", || pair.sender.health().offers.parked == keys.len());
        pair.put("now", b"x");
        assert_eq!(pair.get("now").unwrap().bytes().unwrap(), b"x");
        let nothing = pair.receiver.try_get(&edge, "nothing", GetOptions::until(soon())).unwrap();
        assert!(nothing.is_none());
        for (get, key) in gets.into_iter().zip(&keys) {
            pair.put(key, key.as_bytes());
            assert_eq!(pollster::block_on(get).unwrap().bytes().unwrap(), key.as_bytes());
        }
        pair.assert_whole();
    }
}

#[test]
fn as_many_tensors_as_can_be_put_can_be_got() {
    let names: Vec<String> = (0..MAX_TENSORS).map(|n| format!("model.layers.{n}.weight")).collect();
    let bytes: Vec<[u8; 4]> = (0..MAX_TENSORS as u32).map(u32::to_le_bytes).collect();
    for transport in ["shm", "tcp"] {
        let pair = Pair::by(transport);
        for lease in [false, true] {
            for count in [0, 1, 1000, MAX_TENSORS] {
                let mut set = TensorSet::new();
                for (name, bytes) in names.iter().zip(&bytes).take(count) {
                    set.push(name, DType::U32, &[1], bytes).unwrap();
                }
                pair.sender.put(&edge(), "k", &set, PutOptions::default()).unwrap();
                let options = GetOptions { lease, ..GetOptions::until(soon()) };
                let got = pair.receiver.get(&edge(), "k", options).unwrap();
                assert!(got.tensors().iter().map(|desc| &desc.name).eq(names.iter().take(count)));
                let Some(last) = count.checked_sub(1) else { continue };
                assert_eq!(got.tensor(&names[last]).unwrap().bytes(), bytes[last]);
            }
        }
        pair.assert_whole();
    }
}

#[test]
fn a_lease_of_ones_own_payload_is_a_copy() {
    let connector = build(config(Role::Both));
    let (host, port) = connector.address().unwrap();
    connector.put(&edge(), "k", &b"x"[..], PutOptions::default()).unwrap();
    let source = Source::At(&host, port);
    let options = GetOptions { lease: true, source, ..GetOptions::until(soon()) };
    let got = connector.get(&edge(), "k", options).unwrap();
    assert!(!got.is_leased());
    assert_eq!(got.bytes().unwrap(), b"x");
    drop(got);
    assert_whole(&connector);
}

#[test]
fn a_ticket_is_of_one_put() {
    let pair = Pair::by("shm");
    let put = |bytes: &[u8]| pair.sender.put(&edge(), "k", bytes, PutOptions::default()).unwrap();
    let first = put(b"first");
    let second = put(b"second!");
    for lease in [false, true] {
        let source = Source::Ticket(&first);
        let error = pair
            .receiver
            .get(&edge(), "k", GetOptions { lease, source, deadline: Some(soon()) })
            .unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Expired);
        assert!(error.message().contains("replaced by a later put"), "{error}");
    }
    // What was asked for in vain is there still, for whoever means it.
    let source = Source::Ticket(&second);
    let got = pair.receiver.get(&edge(), "k", GetOptions { source, ..GetOptions::until(soon()) }).unwrap();
    assert_eq!(got.bytes().unwrap(), b"second!");
    drop(got);
    pair.assert_whole();
}

#[test]
fn a_view_of_another_kind_says_which_it_is() {
    let pair = Pair::by("shm");
    pair.put("bytes", b"x");
    let bytes = pair.get("bytes").unwrap();
    pair.sender.put_value(&edge(), "value", &"text", PutOptions::default()).unwrap();
    let value = pair.get("value").unwrap();
    let mut set = TensorSet::new();
    set.push("a", DType::U8, &[1], &[1]).unwrap();
    pair.sender.put(&edge(), "set", &set, PutOptions::default()).unwrap();
    let set = pair.get("set").unwrap();
    for (error, kind, text) in [
        (bytes.tensor("a").unwrap_err(), ErrorKind::TypeMismatch, "raw bytes, not tensors"),
        (bytes.value::<String>().unwrap_err(), ErrorKind::TypeMismatch, "raw bytes, not a value"),
        (value.tensor("a").unwrap_err(), ErrorKind::TypeMismatch, "a value, not tensors"),
        (value.value::<Vec<u64>>().unwrap_err(), ErrorKind::TypeMismatch, "no alloc::vec::Vec<u64>"),
        (
            set.value::<String>().unwrap_err(),
            ErrorKind::TypeMismatch,
            "the payload is tensors, and no alloc::string::String",
        ),
        (
            set.tensor("a").unwrap().elements::<u32>().unwrap_err(),
            ErrorKind::TypeMismatch,
            "tensor \"a\" as u32: its elements are uint8 of 1 bytes, u32 has 4",
        ),
        (
            set.tensor("b").unwrap_err(),
            ErrorKind::InvalidArgument,
            "\"b\"; accepted: one of the 1 there are: a",
        ),
    ] {
        assert_eq!(error.kind(), kind, "{error}");
        assert!(error.message().contains(text) && !error.retryable(), "{error}");
    }
    assert!(set.value::<String>().unwrap_err().to_string().contains("tensor(name)"));
}

#[test]
fn a_payload_whose_end_panics_ends_nothing_else() {
    struct Bomb(Vec<u8>);
    impl AsRef<[u8]> for Bomb {
        fn as_ref(&self) -> &[u8] {
            &self.0
        }
    }
    impl Drop for Bomb {
        fn drop(&mut self) {
            panic!("a payload's own end");
        }
    }
    let bomb = || Bytes::from_owner(Bomb(vec![1; 4 << 20]));
    let pair = Pair::by("shm");
    pair.sender.put(&edge(), "bomb", bomb(), PutOptions::default()).unwrap();
    assert!(pair.sender.cleanup(&edge(), "bomb").unwrap());
    let mut set = TensorSet::new();
    for name in ["a", "b"] {
        set.push_shared(name, DType::U8, &[4 << 20], bomb()).unwrap();
    }
    pair.sender.put(&edge(), "bombs", &set, PutOptions::default()).unwrap();
    drop(set);
    pair.get("bombs").unwrap();
    pair.put("k", b"x");
    assert_eq!(pair.get("k").unwrap().bytes().unwrap(), b"x");
    pair.assert_whole();
    // Nobody gets this one: it ends when the connector is closed.
    pair.sender.put(&edge(), "last", bomb(), PutOptions::default()).unwrap();
    pair.sender.close();
}

#[test]
fn what_either_end_requires_of_the_transport_holds() {
    let expected = [
        ("auto", "auto", Ok("shm")),
        ("require:tcp", "auto", Ok("tcp")),
        ("prefer:tcp", "auto", Ok("tcp")),
        ("auto", "require:tcp", Ok("tcp")),
        ("prefer:tcp", "require:shm", Ok("shm")),
        ("require:shm", "prefer:tcp", Ok("shm")),
        ("require:tcp", "prefer:shm", Ok("tcp")),
        ("prefer:tcp", "prefer:shm", Ok("shm")),
        ("prefer:shm", "prefer:tcp", Ok("tcp")),
        ("require:shm", "auto", Ok("shm")),
        ("require:tcp", "require:shm", Err(ErrorKind::NoPath)),
        ("require:shm", "require:tcp", Err(ErrorKind::NoPath)),
    ];
    for (producer, consumer, expected) in expected {
        let pair = Pair::with(|config| {
            let transport = if config.role == Role::Sender { producer } else { consumer };
            config.transport = transport.parse().unwrap();
        });
        for lease in [false, true] {
            pair.put("k", &pattern::bytes(1, 200_000));
            let got = pair.receiver.get(&edge(), "k", GetOptions { lease, ..GetOptions::until(soon()) });
            let ends = format!("{producer} {consumer} {lease} {got:?}");
            match expected {
                Ok(transport) => {
                    let got = got.unwrap();
                    assert_eq!(got.transport(), transport, "{ends}");
                    assert_eq!(pattern::check(1, got.bytes().unwrap()), None);
                }
                Err(kind) => {
                    let error = got.unwrap_err();
                    assert_eq!(error.kind(), kind, "{error}");
                    assert!(error.peer().is_some(), "{error}");
                    assert!(
                        [producer, consumer].iter().all(|end| error.to_string().contains(end)),
                        "{error}"
                    );
                }
            }
        }
        pair.sender.cleanup(&edge(), "k").unwrap();
        pair.assert_whole();
        let served = if expected.is_ok() { 2 } else { 0 };
        assert_eq!(pair.sender.health().served, served, "{producer} {consumer}");
    }
}

/// A process that offers or gets as it is told.
#[test]
fn peer_stage() {
    let Some(child) = peer::child() else { return };
    let (role, host, port): (String, String, u16) = child.arguments().unwrap();
    if role == "sender" {
        let sender = build(config(Role::Sender));
        sender.put(&edge(), "k", pattern::bytes(1, 32 << 20).as_slice(), PutOptions::default()).unwrap();
        child.send(&sender.address().unwrap()).unwrap();
        let _ = child.receive::<u64>(Deadline::NEVER);
    } else {
        let receiver = build(config(Role::Receiver));
        let options = GetOptions {
            source: Source::At(&host, port),
            lease: role == "leaser",
            ..GetOptions::until(soon())
        };
        let got = receiver.get(&edge(), "k", options);
        child.send(&got.is_ok()).unwrap();
        let _ = child.receive::<u64>(Deadline::NEVER);
    }
}

#[test]
fn a_killed_producer_ends_gets_with_a_reason_and_the_next_one_serves() {
    for transport in ["shm", "tcp"] {
        let receiver = build(ConnectorConfig {
            transport: format!("require:{transport}").parse().unwrap(),
            ..config(Role::Receiver)
        });
        for kill in [true, false] {
            let process = peer::spawn("peer_stage", &("sender", "", 0)).unwrap();
            let (host, port): (String, u16) = process.receive(soon()).unwrap();
            let options = GetOptions { source: Source::At(&host, port), ..GetOptions::until(soon()) };
            if kill {
                process.kill9();
                process.wait(soon()).unwrap();
                let start = Instant::now();
                let error = receiver.get(&edge(), "k", options).unwrap_err();
                assert!(matches!(error.kind(), ErrorKind::PeerUnreachable | ErrorKind::PeerGone), "{error}");
                assert!(start.elapsed() < Duration::from_secs(10));
            } else {
                let got = receiver.get(&edge(), "k", options).unwrap();
                assert_eq!(pattern::check(1, got.bytes().unwrap()), None);
            }
        }
        assert!(receiver.health().pool.is_whole());
    }
}

#[test]
fn a_killed_leaser_gives_the_payload_back() {
    let sender = build(config(Role::Sender));
    let (host, port) = sender.address().unwrap();
    sender.put(&edge(), "k", pattern::bytes(1, 1 << 20).as_slice(), PutOptions::default()).unwrap();
    let process = peer::spawn("peer_stage", &("leaser", host, port)).unwrap();
    assert!(process.receive::<bool>(soon()).unwrap());
    process.kill9();
    process.wait(soon()).unwrap();
    // Its place is given back when its lease has run out: then somebody else is served.
    let receiver = build(config(Role::Receiver));
    let (host, port) = sender.address().unwrap();
    let options = GetOptions { source: Source::At(&host, port), ..GetOptions::until(soon()) };
    let got = receiver.get(&edge(), "k", options).unwrap();
    assert_eq!(pattern::check(1, got.bytes().unwrap()), None);
}

#[test]
fn a_get_that_waits_for_room_longer_than_the_liveness_time_keeps_its_place() {
    for transport in ["shm", "tcp"] {
        let pair = Pair::with(|config| {
            config.transport = format!("require:{transport}").parse().unwrap();
            config.liveness_ms = 300;
        });
        let bytes = pattern::bytes(4, 20 << 20);
        pair.put("k", &bytes);
        let full = pair.receiver.alloc(60 << 20, soon()).unwrap();
        thread::scope(|scope| {
            let getter = scope.spawn(|| pair.get("k").unwrap().bytes().unwrap() == bytes);
            eventually("the wait for room", || pair.receiver.health().pool.waiting == 1);
            let until = Instant::now() + Duration::from_millis(1000);
            while Instant::now() < until {
                thread::park_timeout(Duration::from_millis(50));
            }
            assert_eq!(pair.sender.health().offers.claims, 1, "{transport}: its place was given away");
            drop(full);
            assert!(getter.join().unwrap(), "{transport}");
        });
        pair.assert_whole();
    }
}

#[test]
fn a_consumer_that_vanishes_while_it_waits_is_forgotten() {
    let sender = build(config(Role::Sender));
    let (host, port) = sender.address().unwrap();
    let process = peer::spawn("peer_stage", &("waiter", host, port)).unwrap();
    eventually("the wait", || sender.health().offers.parked == 1);
    process.kill9();
    eventually("the end of the wait", || sender.health().offers.parked == 0);
    sender.put(&edge(), "k", &b"x"[..], PutOptions::default()).unwrap();
    assert_eq!(sender.health().offers.claims, 0);
}

#[test]
fn a_buffer_of_no_bytes_is_refused() {
    let sender = build(config(Role::Sender));
    let error = sender.alloc(0, soon()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidArgument);
    assert!(error.message().contains("0 bytes; accepted: at least one byte"), "{error}");
}
