//! Bytes arrive, exactly, whatever their number; small ones do not wait behind large ones.

use std::sync::Barrier;

use posthorse_core::*;
use posthorse_tcp::TcpConfig;

use crate::support::*;

const GUARD: usize = 64;

#[test]
fn writes_and_reads_of_many_sizes_place_exactly_their_bytes() {
    let (here, there) = (Node::new("here:1"), Node::new("there:1"));
    let path = here.connect(&there.desc);
    let sizes = [
        1,
        2,
        63,
        64,
        4095,
        4096,
        16384,
        16385,
        32767,
        32768,
        65536,
        65537,
        1 << 20,
        (1 << 20) + 1,
        (5 << 20) + 3,
    ];
    for (at, len) in sizes.into_iter().enumerate() {
        for checksum in [Checksum::Off, Checksum::Sampled, Checksum::Full] {
            let offset = GUARD + at % 7;
            let source = Memory::patterned(len + at % 5, at as u64);
            let target = Memory::new(len + 2 * GUARD + 7);
            let (_, token) = there.publish(target, Access::ReadWrite);
            let local = source.part(at % 5, len);
            let outgoing = Slice { checksum, ..write(local, target.address() + offset as u64, token) };
            assert_eq!(here.transfer(path, outgoing).unwrap(), Level::Visible);
            assert_eq!(target.bytes()[offset..offset + len], source.bytes()[at % 5..]);
            assert!(target.bytes()[..offset].iter().all(|byte| *byte == 0), "a byte before {len} bytes");
            assert!(
                target.bytes()[offset + len..].iter().all(|byte| *byte == 0),
                "a byte behind {len} bytes"
            );
            let back = Memory::new(len + 2);
            let incoming =
                Slice { checksum, ..read(back.part(1, len), target.address() + offset as u64, token) };
            assert_eq!(here.transfer(path, incoming).unwrap(), Level::Visible);
            assert_eq!(back.bytes()[1..=len], source.bytes()[at % 5..]);
            assert_eq!((back.bytes()[0], back.bytes()[len + 1]), (0, 0));
        }
    }
}

#[test]
fn a_long_transfer_arrives_both_ways() {
    let (here, there) = (Node::new("here:1"), Node::new("there:1"));
    let path = here.connect(&there.desc);
    let len = (64 << 20) - 3;
    let (source, target, back) = (Memory::patterned(len, 5), Memory::new(len + 1), Memory::new(len));
    let (_, token) = there.publish(target, Access::ReadWrite);
    here.transfer(path, write(source.part(0, len), target.address() + 1, token)).unwrap();
    assert!(target.bytes()[1..] == *source.bytes());
    here.transfer(path, read(back.part(0, len), target.address() + 1, token)).unwrap();
    assert!(back.bytes() == source.bytes());
}

#[test]
fn many_long_reads_go_on_although_each_has_more_than_one_turn() {
    // No ping comes to the rescue of a connection that is forgotten with requests in hand.
    let patient = || TcpConfig { liveness_ms: 3_600_000, ..local() };
    let (here, there) = (Node::with("here:1", patient(), hello()), Node::with("there:1", patient(), hello()));
    let path = here.connect(&there.desc);
    let len = 4 << 20;
    let (target, back) = (Memory::patterned(len, 1), Memory::new(len));
    let (_, token) = there.publish(target, Access::Read);
    let slices: Vec<Slice> = (0..64).map(|_| read(back.part(0, len), target.address(), token)).collect();
    here.submit_all(path, &slices);
    assert!(here.events.completions(64).values().all(|done| done.result.is_ok()));
    assert!(back.bytes() == target.bytes());
}

#[test]
fn a_hundred_thousand_small_writes_complete_with_back_pressure() {
    const COUNT: usize = 100_000;
    const LEN: usize = 4096;
    let (here, there) = (Node::new("here:1"), Node::new("there:1"));
    let path = here.connect(&there.desc);
    // The blocks share 64 places, so that the test needs no 400 MB: what counts is the number of slices.
    let (source, target) = (Memory::patterned(64 * LEN, 3), Memory::new(64 * LEN));
    let (_, token) = there.publish(target, Access::Write);
    let slices: Vec<Slice> = (0..COUNT)
        .map(|n| {
            let offset = n % 64 * LEN;
            write(source.part(offset, LEN), target.address() + offset as u64, token)
        })
        .collect();
    let taken = here.submit(path, &slices).unwrap();
    assert!(taken < COUNT, "there is no bound on what a path takes");
    here.submit_all(path, &slices[taken..]);
    let done = here.events.completions(COUNT);
    assert!(done.values().all(|completion| completion.result.is_ok()));
    assert!(target.bytes() == source.bytes());
}

#[test]
fn many_threads_share_a_path() {
    const THREADS: usize = 8;
    const EACH: usize = 200;
    let (here, there) = (Node::new("here:1"), Node::new("there:1"));
    let path = here.connect(&there.desc);
    let len = 3 * 1024;
    let (source, target) = (Memory::patterned(THREADS * EACH * len, 9), Memory::new(THREADS * EACH * len));
    let (_, token) = there.publish(target, Access::ReadWrite);
    let barrier = Barrier::new(THREADS);
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let (here, barrier) = (&here, &barrier);
            scope.spawn(move || {
                barrier.wait();
                for n in 0..EACH {
                    let offset = (thread * EACH + n) * len;
                    let slice = write(source.part(offset, len), target.address() + offset as u64, token);
                    here.transfer(path, Slice { checksum: Checksum::Full, ..slice }).unwrap();
                }
            });
        }
    });
    assert!(target.bytes() == source.bytes());
    // What an event calls may wait for the reactors (`stop` does), so no other thread may be in the midst of a lane.
    let reporters = here.events.reporters();
    assert!(reporters.iter().all(|name| name.starts_with("tcp-lane-")), "{reporters:?}");
}

#[test]
fn a_small_write_does_not_wait_behind_large_ones() {
    let (here, there) = (Node::new("here:1"), Node::new("there:1"));
    let path = here.connect(&there.desc);
    let large = 32 << 20;
    let (source, target) = (Memory::patterned(large, 1), Memory::new(large));
    let (_, token) = there.publish(target, Access::Write);
    let bulk: Vec<Slice> = (0..8).map(|_| write(source.part(0, large), target.address(), token)).collect();
    here.submit_all(path, &bulk);
    let small = write(source.part(0, 4096), target.address(), token);
    here.transfer(path, small).unwrap();
    let done = here.events.order();
    let last = bulk[7].token;
    assert!(!done.contains(&last), "the small write ended behind 256 MiB: {done:?}");
    here.events.completions(8);
}

#[test]
fn notifications_arrive_once_and_in_order_and_may_be_refused() {
    let (here, there) = (Node::new("here:1"), Node::new("there:1"));
    let path = here.connect(&there.desc);
    for n in 0..100_u64 {
        here.transport.notify(path, next_token(), &n.to_le_bytes()).unwrap();
    }
    let got = there.events.notified(100);
    let expected: Vec<_> = (0..100_u64).map(|n| ("here:1".to_owned(), n.to_le_bytes().to_vec())).collect();
    assert_eq!(got, expected);
    here.events.completions(100);
    there.events.refuse_notifications(true);
    let token = next_token();
    here.transport.notify(path, token, b"x").unwrap();
    assert_eq!(here.events.error(token), (ErrorKind::QueueFull, FarEnd::Quiet));
    there.events.refuse_notifications(false);
    let token = next_token();
    here.transport.notify(path, token, &vec![7; 64 << 10]).unwrap();
    here.events.completion(token).unwrap();
    assert_eq!(there.events.notified(1)[0].1.len(), 64 << 10);
    let error = here.transport.notify(path, token, &vec![7; (64 << 10) + 1]).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::TooLarge);
}

#[test]
fn slices_that_cannot_be_taken_are_completed_with_their_reason() {
    let (here, there) = (Node::new("here:1"), Node::new("there:1"));
    let path = here.connect(&there.desc);
    let memory = Memory::new(64);
    let (_, token) = there.publish(memory, Access::Write);
    let device = View::Device(DeviceView { device: Location::Cuda(0), address: 1 << 40, len: 8 });
    let good = write(memory.part(0, 8), memory.address(), token);
    for (bad, kind) in [
        (write(device, memory.address(), token), ErrorKind::Unsupported),
        (write(memory.part(0, 0), memory.address(), token), ErrorKind::InvalidArgument),
        (Slice { ready: Some(DeviceEvent(1)), token: next_token(), ..good }, ErrorKind::Unsupported),
    ] {
        assert_eq!(here.transfer(path, bad).unwrap_err().error.kind(), kind);
    }
    here.transfer(path, good).unwrap();
    assert_eq!(here.submit(PathId(999), &[good]).unwrap_err().kind(), ErrorKind::NotFound);
}

#[test]
fn ipv4_ipv6_and_both_at_once_are_served() {
    let any = TcpConfig { bind: Vec::new(), ..local() };
    let all = Node::with("all:1", TcpConfig { advertise: "127.0.0.1".into(), ..any.clone() }, hello());
    reaches(&all.desc);
    if std::net::TcpListener::bind("[::1]:0").is_err() {
        return posthorse_testkit::skip("ipv6", "this host has no IPv6 loopback address");
    }
    let six = TcpConfig { bind: vec!["::1".parse().unwrap()], ..local() };
    reaches(&Node::with("six:1", six, hello()).desc);
    let dual = Node::with("dual:1", TcpConfig { advertise: "::1".into(), ..any }, hello());
    reaches(&dual.desc);
    let mut four = dual.desc.clone();
    if let Some(serde_json::Value::Object(published)) = four.transports.get_mut("tcp") {
        published.insert("host".into(), "127.0.0.1".into());
    }
    reaches(&four);
}

#[test]
fn a_forked_child_gets_an_error_and_the_parent_is_unharmed() {
    let (here, there) = (Node::new("here:1"), Node::new("there:1"));
    let path = here.connect(&there.desc);
    let memory = Memory::new(4096);
    let (region, token) = there.publish(memory, Access::ReadWrite);
    let again = || write(memory.part(0, 64), memory.address() + 64, token);
    here.transfer(path, again()).unwrap();
    // Taken by the child, which drops it; the parent keeps its own.
    let mut nodes = Some((here, there));
    let child = || {
        let (here, there) = nodes.take().unwrap();
        let errors = [
            here.submit(path, &[again()]).err(),
            here.transport.notify(path, 1, b"x").err(),
            here.transport.connect(&there.desc, Deadline::NEVER).err(),
            there.transport.unregister(region, Deadline::NEVER).err(),
        ];
        here.transport.cancel(path, &mut |_| true);
        here.transport.fence(path);
        here.transport.disconnect(path);
        here.transport.stop();
        drop((here, there));
        errors.iter().all(|error| error.as_ref().is_some_and(|e| e.kind() == ErrorKind::Forked))
    };
    // SAFETY: the transport answers with an error before it takes any lock.
    unsafe { posthorse_testkit::assert_in_forked_child(child) };
    let (here, _there) = nodes.unwrap();
    here.transfer(path, again()).unwrap();
}

fn hello() -> Hello {
    Hello::new(Features::NONE, None)
}

fn reaches(desc: &SegmentDesc) {
    let here = Node::new("here:1");
    let path = here.connect(desc);
    let token = next_token();
    here.transport.notify(path, token, b"x").unwrap();
    here.events.completion(token).unwrap();
}
