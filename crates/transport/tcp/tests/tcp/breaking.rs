//! Connections break, peers fall silent, and paths are ended: each slice says what became of it.

use std::net::TcpListener;
use std::sync::Arc;
use std::time::{Duration, Instant};

use posthorse_core::*;
use posthorse_tcp::TcpConfig;

use crate::support::*;

fn lively(ms: u64) -> TcpConfig {
    TcpConfig { liveness_ms: ms, ..local() }
}

/// Cut again and again, before a byte has come in between.
fn persistent() -> TcpConfig {
    TcpConfig { reconnect_attempts: 16, ..local() }
}

fn hello() -> Hello {
    Hello::new(Features::NONE, None)
}

/// A path of the first node to memory of the second, which hears nothing from now on.
fn path_to_silence(liveness_ms: u64) -> ([Node; 2], Relay, PathId, Memory, GrantToken) {
    let here = Node::with("here:1", lively(liveness_ms), hello());
    let there = Node::new("there:1");
    let relay = Relay::to(there.port());
    let path = here.connect(&relay.instead_of(&there.desc));
    let memory = Memory::new(4096);
    let (_, token) = there.publish(memory, Access::ReadWrite);
    relay.silence_for_ever();
    ([here, there], relay, path, memory, token)
}

/// A WRITE of the first node that the second does not hear of, and its path.
fn written_to_silence() -> ([Node; 2], Relay, PathId, Slice) {
    let ([here, there], relay, path, memory, token) = path_to_silence(300);
    let slice = write(memory.part(0, 64), memory.address(), token);
    here.submit_all(path, &[slice]);
    ([here, there], relay, path, slice)
}

#[test]
fn connections_reset_in_the_middle_are_made_again_and_nothing_is_lost() {
    let (here, there) = (Node::with("here:1", persistent(), hello()), Node::new("there:1"));
    let relay = Relay::to(there.port());
    let path = here.connect(&relay.instead_of(&there.desc));
    let (len, long) = (4096, 24 << 20);
    let source = Memory::patterned(long, 1);
    let (target, back) = (Memory::new(long), Memory::new(long));
    let (_, token) = there.publish(target, Access::ReadWrite);
    for round in 0..3 {
        target.bytes_mut().fill(0);
        back.bytes_mut().fill(0);
        let mut slices: Vec<Slice> = (0..1000)
            .map(|n| write(source.part(n * len, len), target.address() + (n * len) as u64, token))
            .collect();
        slices.push(write(
            source.part(1000 * len, long - 1000 * len),
            target.address() + 1000 * len as u64,
            token,
        ));
        here.submit_all(path, &slices);
        relay.forwarded(1 << 20);
        relay.cut();
        let done = here.events.completions(slices.len());
        assert!(done.values().all(|done| done.result.is_ok()), "round {round}: {done:?}");
        assert!(target.bytes() == source.bytes());
        let slice = read(back.part(0, long), target.address(), token);
        here.submit_all(path, &[slice]);
        relay.forwarded(1 << 20);
        relay.cut();
        here.events.completion(slice.token).unwrap();
        assert!(back.bytes() == source.bytes());
    }
    assert!(!here.events.is_down());
}

#[test]
fn a_notification_is_delivered_once_although_its_connection_breaks() {
    let (here, there) = (Node::with("here:1", persistent(), hello()), Node::new("there:1"));
    let relay = Relay::to(there.port());
    let path = here.connect(&relay.instead_of(&there.desc));
    for round in 0..10_u64 {
        for n in 0..10 {
            here.transport.notify(path, next_token(), &(round * 10 + n).to_le_bytes()).unwrap();
        }
        relay.cut();
        let done = here.events.completions(10);
        assert!(done.values().all(|done| done.result.is_ok()), "round {round}: {done:?}");
    }
    let got: Vec<Vec<u8>> = there.events.notified(100).into_iter().map(|(_, data)| data).collect();
    assert_eq!(got, (0..100_u64).map(|n| n.to_le_bytes().to_vec()).collect::<Vec<_>>());
}

#[test]
fn a_notification_longer_than_the_peer_accepts_fails_and_nothing_else_does() {
    let here = Node::with("here:1", TcpConfig { notify_bytes: 1 << 20, ..local() }, hello());
    let there = Node::new("there:1");
    let path = here.connect(&there.desc);
    let tokens: Vec<u64> = [10, 1 << 20, 64 << 10, (64 << 10) + 1, 20]
        .map(|len| {
            let token = next_token();
            here.transport.notify(path, token, &vec![7; len]).unwrap();
            token
        })
        .into();
    for (n, token) in tokens.iter().enumerate() {
        let outcome = here.events.completion(*token);
        if n % 2 == 0 {
            outcome.unwrap();
            continue;
        }
        let failed = outcome.unwrap_err();
        assert_eq!((failed.error.kind(), failed.far_end), (ErrorKind::TooLarge, FarEnd::Quiet));
        assert!(failed.error.message().contains("accepted: up to 65536"), "{}", failed.error);
    }
    let lens: Vec<usize> = there.events.notified(3).iter().map(|(_, data)| data.len()).collect();
    assert_eq!(lens, [10, 64 << 10, 20]);
    assert!(!here.events.is_down());
}

#[test]
fn an_idle_path_stays_up_longer_than_the_liveness_time() {
    let here = Node::with("here:1", lively(150), hello());
    let there = Node::with("there:1", lively(150), hello());
    let path = here.connect(&there.desc);
    // Time itself is what is tested here.
    std::thread::sleep(Duration::from_millis(600));
    let (source, target) = (Memory::patterned(4096, 1), Memory::new(4096));
    let (_, token) = there.publish(target, Access::Write);
    here.transfer(path, write(source.part(0, 4096), target.address(), token)).unwrap();
    assert!(!here.events.is_down());
}

#[test]
fn an_idle_connection_that_was_dropped_silently_does_not_fail_the_next_request() {
    let here = Node::with("here:1", lively(600), hello());
    let there = Node::with("there:1", lively(600), hello());
    let relay = Relay::to(there.port());
    let path = here.connect(&relay.instead_of(&there.desc));
    let (source, target) = (Memory::patterned(1 << 20, 1), Memory::new(1 << 20));
    let (_, token) = there.publish(target, Access::Write);
    relay.silence();
    for len in [4096, 1 << 20] {
        here.transfer(path, write(source.part(0, len), target.address(), token)).unwrap();
    }
    assert!(target.bytes() == source.bytes());
    assert!(!here.events.is_down());
}

#[test]
fn a_silent_peer_is_gone_within_the_liveness_time() {
    let ([here, there], _relay, path, memory, token) = path_to_silence(600);
    let began = Instant::now();
    let (writing, reading) = (
        write(memory.part(0, 64), memory.address(), token),
        read(memory.part(0, 64), memory.address(), token),
    );
    here.submit_all(path, &[writing, reading]);
    assert_eq!(here.events.error(writing.token), (ErrorKind::PeerGone, FarEnd::Unconfirmed));
    assert_eq!(here.events.error(reading.token), (ErrorKind::PeerGone, FarEnd::Quiet));
    let took = began.elapsed();
    assert!(took < Duration::from_millis(1500), "it took {took:?}");
    let down = here.events.down();
    assert_eq!(down.kind(), ErrorKind::PeerGone);
    assert!(down.to_string().contains("silent for") && down.peer() == Some("there:1"), "{down}");
    assert_eq!(here.submit(path, &[writing]).unwrap_err().kind(), ErrorKind::PeerGone);
    // It comes back under the same name.
    let again = here.connect(&there.desc);
    here.transfer(again, write(memory.part(0, 64), memory.address(), token)).unwrap();
}

#[test]
fn a_slow_link_carries_what_is_long_both_ways_at_once() {
    std::thread::scope(|scope| {
        for by_reference in [false, true] {
            scope.spawn(move || {
                // Longer than the liveness time, the owner's socket is full and what comes next waits in its intake.
                let (liveness_ms, socket_buffer_bytes) = (600, 1 << 20);
                let config = TcpConfig {
                    liveness_ms,
                    socket_buffer_bytes,
                    by_reference,
                    bulk_lanes: 1,
                    reconnect_attempts: 0,
                    ..local()
                };
                let here = Node::with("here:1", config.clone(), hello());
                let there = Node::with("there:1", config, hello());
                let relay = Relay::slow(there.port(), 500_000);
                let path = here.connect(&relay.instead_of(&there.desc));
                let (down, up) = (3 << 20, 1 << 20);
                let (source, target) = (Memory::patterned(down, 1), Memory::new(up));
                let (back, local) = (Memory::new(down), Memory::patterned(up, 2));
                let (_, from) = there.publish(source, Access::Read);
                let (_, to) = there.publish(target, Access::Write);
                let slices = [
                    read(back.part(0, down), source.address(), from),
                    write(local.part(0, up), target.address(), to),
                ];
                here.submit_all(path, &slices);
                for slice in &slices {
                    here.events.completion(slice.token).unwrap();
                }
                assert!(back.bytes() == source.bytes() && target.bytes() == local.bytes());
            });
        }
    });
}

#[test]
fn a_fence_ends_every_slice_and_confirms_the_far_end() {
    let (here, there) = (Node::new("here:1"), Node::new("there:1"));
    let path = here.connect(&there.desc);
    let len = 32 << 20;
    let (source, target) = (Memory::patterned(len, 1), Memory::new(len));
    let (_, token) = there.publish(target, Access::ReadWrite);
    let mut slices: Vec<Slice> =
        (0..6).map(|_| write(source.part(0, len), target.address(), token)).collect();
    slices.extend((0..6).map(|_| read(source.part(0, len), target.address(), token)));
    here.submit_all(path, &slices);
    here.events.completion(slices[0].token).unwrap();
    here.transport.fence(path);
    let mut flushed = 0;
    for slice in &slices[1..] {
        if let Err(error) = here.events.completion(slice.token) {
            assert_eq!((error.error.kind(), error.far_end), (ErrorKind::Flushed, FarEnd::Quiet));
            flushed += 1;
        }
    }
    assert!(flushed > 0);
    // Quiet it said: what is changed now stays.
    target.bytes_mut().fill(9);
    assert_eq!(here.events.down().kind(), ErrorKind::Flushed);
    assert_eq!(here.submit(path, &slices).unwrap_err().kind(), ErrorKind::Flushed);
    let again = here.connect(&there.desc);
    here.transport.notify(again, 1 << 40, b"x").unwrap();
    here.events.completion(1 << 40).unwrap();
    assert!(target.bytes().iter().all(|byte| *byte == 9));
    here.transport.disconnect(path);
    here.transport.disconnect(again);
    assert_eq!(here.transport.notify(again, 1 << 41, b"x").unwrap_err().kind(), ErrorKind::NotFound);
}

#[test]
fn a_fence_that_the_peer_does_not_confirm_says_so() {
    let ([here, _there], _relay, path, slice) = written_to_silence();
    here.transport.fence(path);
    assert_eq!(here.events.error(slice.token), (ErrorKind::Flushed, FarEnd::Unconfirmed));
}

#[test]
fn memory_is_held_until_the_lanes_of_a_disconnected_path_have_ended() {
    let ([here, _there], _relay, path, slice) = written_to_silence();
    here.transport.disconnect(path);
    let held = here.transport.unregister(slice.local_region, Deadline::after(Duration::ZERO)).unwrap_err();
    assert_eq!(held.kind(), ErrorKind::DeadlineExceeded);
    assert_eq!(here.events.error(slice.token), (ErrorKind::Flushed, FarEnd::Unconfirmed));
    here.transport.unregister(slice.local_region, Deadline::after(PATIENCE)).unwrap();
}

#[test]
fn stopping_waits_for_no_confirmation_that_a_disconnected_path_wanted() {
    // Neither end gives up within the time of this test.
    let patient = TcpConfig { connect_timeout_ms: 3_600_000, ..lively(3_600_000) };
    let there = Node::with("there:1", patient.clone(), hello());
    let here = Node::with("here:1", patient, hello());
    let relay = Relay::to(there.port());
    let path = here.connect(&relay.instead_of(&there.desc));
    let memory = Memory::new(64);
    let (_, token) = there.publish(memory, Access::ReadWrite);
    relay.silence_for_ever();
    let slice = write(memory.part(0, 64), memory.address(), token);
    here.submit_all(path, &[slice]);
    here.transport.disconnect(path);
    let (tell, told) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        here.transport.stop();
        tell.send(here.events.error(slice.token)).unwrap();
    });
    let error = told.recv_timeout(PATIENCE).expect("a transport that stops");
    assert_eq!(error, (ErrorKind::Flushed, FarEnd::Unconfirmed));
}

#[test]
fn paths_that_were_disconnected_are_forgotten() {
    let (here, there) = (Node::new("here:1"), Node::new("there:1"));
    let come_and_go = || here.transport.disconnect(here.connect(&there.desc));
    let before = Arc::strong_count(&here.events);
    (0..50).for_each(|_| come_and_go());
    let until = Instant::now() + PATIENCE;
    // Each path has its own handle to the events.
    while Arc::strong_count(&here.events) > before + 25 {
        assert!(Instant::now() < until, "{} are left", Arc::strong_count(&here.events) - before);
        come_and_go();
    }
}

#[test]
fn cancel_drops_what_is_not_yet_sent_and_nothing_else() {
    let config = TcpConfig { window_slots: 16, ..local() };
    let here = Node::with("here:1", config, hello());
    let there = Node::new("there:1");
    let path = here.connect(&there.desc);
    let len = 4 << 20;
    let (source, target) = (Memory::patterned(len, 1), Memory::new(len));
    let (_, token) = there.publish(target, Access::Write);
    let slices: Vec<Slice> = (0..200).map(|_| write(source.part(0, len), target.address(), token)).collect();
    here.submit_all(path, &slices);
    let odd = |token: u64| token % 2 == 1;
    here.transport.cancel(path, &mut |token| odd(token));
    let done = here.events.completions(200);
    let (mut cancelled, mut kept) = (0, 0);
    for (token, completion) in done {
        match completion.result {
            Ok(_) => kept += 1,
            Err(error) => {
                assert!(odd(token));
                assert_eq!((error.error.kind(), error.far_end), (ErrorKind::Cancelled, FarEnd::Quiet));
                cancelled += 1;
            }
        }
    }
    assert!(cancelled > 0 && kept >= 100, "{cancelled} cancelled, {kept} kept");
}

#[test]
fn stop_ends_everything_at_once_and_may_be_repeated() {
    let (here, there) = (Node::new("here:1"), Node::new("there:1"));
    let path = here.connect(&there.desc);
    let len = 16 << 20;
    let (source, target) = (Memory::patterned(len, 1), Memory::new(len));
    let (_, token) = there.publish(target, Access::Write);
    let slices: Vec<Slice> = (0..64).map(|_| write(source.part(0, len), target.address(), token)).collect();
    here.submit_all(path, &slices);
    here.transport.stop();
    assert_eq!(here.events.order().len(), 64, "each slice has had its completion when stop returns");
    here.transport.stop();
    assert!(here.submit(path, &slices).is_err());
    let error = here.transport.connect(&there.desc, Deadline::NEVER).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Closed);
    // The other side serves the next one.
    let next = Node::new("next:1");
    let path = next.connect(&there.desc);
    next.transfer(path, write(source.part(0, 64), target.address(), token)).unwrap();
    there.transport.stop();
}

#[test]
fn whoever_cannot_be_connected_to_is_named_with_the_reason() {
    let here = Node::with("here:1", TcpConfig { connect_timeout_ms: 200, ..local() }, hello());
    let there = Node::new("there:1");
    let refused = |desc: &SegmentDesc| here.transport.connect(desc, Deadline::after(PATIENCE)).unwrap_err();
    let at = |port: u16| {
        let mut desc = there.desc.clone();
        desc.transports.insert("tcp".into(), serde_json::json!({"host": "127.0.0.1", "port": port}));
        desc
    };
    let free = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = free.local_addr().unwrap().port();
    // It listens, and never answers.
    let mute = refused(&at(port));
    assert_eq!(mute.kind(), ErrorKind::PeerUnreachable, "{mute}");
    drop(free);
    let dead = refused(&at(port));
    assert_eq!((dead.kind(), dead.peer()), (ErrorKind::PeerUnreachable, Some("there:1")), "{dead}");
    assert!(dead.to_string().contains("refused"), "{dead}");
    let without = SegmentDesc { transports: Attributes::new(), ..there.desc.clone() };
    assert_eq!(refused(&without).kind(), ErrorKind::Unsupported);
    let foreign = SegmentDesc { hello: None, ..there.desc.clone() };
    assert_eq!(refused(&foreign).kind(), ErrorKind::Unsupported);
    let restarted = SegmentDesc { incarnation: Some(Incarnation(1)), ..there.desc.clone() };
    assert_eq!(refused(&restarted).kind(), ErrorKind::PeerRestarted);
    let fingerprint = |text: &str| Hello::new(Features::NONE, Some(text.to_owned()));
    let (a, b) = (Node::with("a:1", local(), fingerprint("a")), Node::with("b:1", local(), fingerprint("b")));
    let error = a.transport.connect(&b.desc, Deadline::after(PATIENCE)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::FingerprintMismatch);
    assert!(error.to_string().contains("\"a\"") && error.to_string().contains("\"b\""), "{error}");
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let desc = at(silent.local_addr().unwrap().port());
    let late = here.transport.connect(&desc, Deadline::after(Duration::ZERO)).unwrap_err();
    assert_eq!(late.kind(), ErrorKind::DeadlineExceeded);
}
