//! Requests between Posthorse peers.

use std::io::Write as _;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use posthorse_core::{
    ControlChannel as _, Deadline, Error, ErrorKind, Features, Hello, Incarnation, RequestHandler,
};
use posthorse_segment::frame::{FrameType, encode};
use posthorse_segment::{HandshakeConfig, HandshakeListener, Identity};

use crate::support::{
    LIMIT, Notices, hello, on_loopback, peer, read_frame, runtime, soon, start, start_with,
};

/// Answers with the asker's name and the body.
fn echo() -> RequestHandler {
    Arc::new(|peer, body| Ok([peer.as_bytes(), b"/", body].concat()))
}

/// Answers when it is told to.
fn gated(gate: Receiver<()>) -> RequestHandler {
    let gate = Mutex::new(gate);
    Arc::new(move |_, body| {
        let _ = gate.lock().unwrap().recv();
        Ok(body.to_vec())
    })
}

/// As [`gated`], and says when a request has come.
fn gated_and_heard(gate: Receiver<()>) -> (RequestHandler, Receiver<()>) {
    let (began, begun) = channel();
    let gated = gated(gate);
    let handler = move |peer: &str, body: &[u8]| {
        began.send(()).unwrap();
        gated(peer, body)
    };
    (Arc::new(handler), begun)
}

#[test]
fn requests_from_many_threads_are_answered() {
    let (a, b) = (start(), start());
    let (ours, theirs) = (a.control(), b.control());
    theirs.on_request("echo", echo());
    thread::scope(|scope| {
        for n in 0..8_u8 {
            let (ours, a, b) = (&ours, &a, &b);
            scope.spawn(move || {
                for len in [0, 1, 1000, 300_000] {
                    let body = vec![n; len];
                    let answer = ours.request(b.name(), "echo", &body, soon()).unwrap();
                    assert_eq!(answer, [a.name().as_bytes(), b"/", &body].concat());
                }
            });
        }
    });
}

#[test]
fn the_error_of_a_handler_arrives_as_it_was() {
    let (a, b) = (start(), start());
    let (ours, theirs) = (a.control(), b.control());
    theirs
        .on_request("not found", Arc::new(|_, _| Err(Error::new(ErrorKind::NotFound, "no such queue pair"))));
    theirs.on_request("panic", Arc::new(|_, _| panic!("a handler that panics")));
    theirs.on_request("large", Arc::new(|_, _| Ok(vec![0; LIMIT])));
    let error = |topic: &str, body: &[u8]| ours.request(b.name(), topic, body, soon()).unwrap_err();
    let not_found = error("not found", b"");
    assert_eq!((not_found.kind(), not_found.peer()), (ErrorKind::NotFound, Some(b.name())));
    assert!(not_found.to_string().contains("no such queue pair"));
    assert_eq!(error("panic", b"").kind(), ErrorKind::Internal);
    assert_eq!(error("large", b"").kind(), ErrorKind::TooLarge);
    assert_eq!(error("not found", &vec![0; LIMIT]).kind(), ErrorKind::TooLarge);
    let unknown = error("unheard of", b"");
    assert!(
        unknown.kind() == ErrorKind::Unsupported && unknown.to_string().contains("unheard of"),
        "{unknown}"
    );
    // Not one of them cost the connection more than itself.
    theirs.on_request("not found", echo());
    ours.request(b.name(), "not found", b"", soon()).unwrap();
}

#[test]
fn a_slow_handler_costs_its_own_request_alone() {
    let (a, b) = (start(), start());
    let (ours, theirs) = (a.control(), b.control());
    let (open, gate) = channel();
    theirs.on_request("slow", gated(gate));
    theirs.on_request("echo", echo());
    let error = ours.request(b.name(), "slow", b"", Deadline::after(Duration::from_millis(20))).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::DeadlineExceeded);
    ours.request(b.name(), "echo", b"", soon()).unwrap();
    drop(open);
}

#[test]
fn more_requests_than_a_peer_is_worth_are_refused() {
    let a = start_with(HandshakeConfig { requests_per_peer: 1, ..on_loopback() }, 1, hello()).0;
    let b = start();
    let (ours, theirs) = (a.control(), b.control());
    let (open, gate) = channel();
    let (slow, begun) = gated_and_heard(gate);
    theirs.on_request("slow", slow);
    thread::scope(|scope| {
        let first = scope.spawn(|| ours.request(b.name(), "slow", b"x", soon()));
        begun.recv().unwrap();
        let error = ours.request(b.name(), "slow", b"", soon()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::QueueFull);
        open.send(()).unwrap();
        assert_eq!(first.join().unwrap().unwrap(), b"x");
    });
}

#[test]
fn a_server_refuses_more_connections_and_bytes_than_it_may_hold() {
    let config = HandshakeConfig { control_connections: 1, queue_bytes: 1000, ..on_loopback() };
    let b = start_with(config, 1, hello()).0;
    b.control().on_request("echo", echo());
    let (first, second) = (start(), start());
    let control = first.control();
    let request = |len| control.request(b.name(), "echo", &vec![0; len], soon());
    request(1000).unwrap();
    assert_eq!(request(1001).unwrap_err().kind(), ErrorKind::QueueFull);
    let error = second.control().request(b.name(), "echo", b"", soon()).unwrap_err();
    assert_eq!((error.kind(), error.peer()), (ErrorKind::LimitReached, Some(b.name())));
    request(1000).unwrap();
}

#[test]
fn a_peer_that_cannot_work_with_us_refuses_with_the_difference() {
    let fingerprint = |text: &str| Hello::new(Features::NONE, Some(text.to_owned()));
    let a = start_with(on_loopback(), 1, fingerprint("model-a")).0;
    let b = start_with(on_loopback(), 1, fingerprint("model-b")).0;
    let error = a.control().request(b.name(), "echo", b"", soon()).unwrap_err();
    assert_eq!((error.kind(), error.peer()), (ErrorKind::FingerprintMismatch, Some(b.name())));
    assert!(error.to_string().contains("model-a") && error.to_string().contains("model-b"), "{error}");
}

#[test]
fn after_a_restart_of_the_peer_requests_go_on() {
    let a = start();
    let ours = a.control();
    let first = start();
    let (name, port) = (first.name().to_owned(), first.port());
    first.control().on_request("echo", echo());
    ours.request(&name, "echo", b"1", soon()).unwrap();
    drop(first);
    let config = HandshakeConfig { port_min: port, port_max: port, ..on_loopback() };
    let listener = loop {
        // The runtime closes the old socket in its own time.
        match HandshakeListener::bind(config.clone()) {
            Ok(listener) => break listener,
            Err(error) => assert_eq!(error.kind(), ErrorKind::Io),
        }
        thread::yield_now();
    };
    let identity = Identity { name: name.clone(), incarnation: Incarnation(2), hello: hello() };
    let second = listener.start(runtime(), identity, Arc::new(Notices::default())).unwrap();
    second.control().on_request("echo", echo());
    ours.request(&name, "echo", b"2", soon()).unwrap();
    drop(second);
}

/// A greeting as a server of this release sends it.
fn greeting() -> Vec<u8> {
    let json = br#"{"name":"x:1","incarnation":7,"hello":{"versions":{"min":1,"max":1}}}"#;
    encode(FrameType::Control, &[&b"\x00"[..], json].concat(), LIMIT).unwrap()
}

#[test]
fn a_peer_that_falls_silent_is_gone_within_the_liveness_time() {
    let a = start_with(HandshakeConfig { liveness_ms: 90, ..on_loopback() }, 1, hello()).0;
    let (name, _hold) = peer(1, |socket| {
        read_frame(socket).unwrap();
        socket.write_all(&greeting()).unwrap();
    });
    let asked = Instant::now();
    let error = a.control().request(&name, "echo", b"", Deadline::NEVER).unwrap_err();
    assert_eq!((error.kind(), error.peer()), (ErrorKind::PeerGone, Some(&*name)));
    assert!(error.to_string().contains("silent"), "{error}");
    assert!(asked.elapsed() < Duration::from_secs(30));
}

#[test]
fn a_slow_handler_is_no_silence() {
    let a = start_with(HandshakeConfig { liveness_ms: 60, ..on_loopback() }, 1, hello()).0;
    let b = start();
    b.control().on_request(
        "slow",
        Arc::new(|_, _| {
            // Longer than the liveness time: this is what is tested.
            thread::sleep(Duration::from_millis(200));
            Ok(vec![1])
        }),
    );
    assert_eq!(a.control().request(b.name(), "slow", b"", Deadline::NEVER).unwrap(), [1]);
}

#[test]
fn a_broken_connection_is_made_again_once_for_a_request_that_it_broke() {
    let a = start();
    let connections = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&connections);
    // The first request is answered, the second meets the end of the connection.
    let (name, _hold) = peer(2, move |socket| {
        counted.fetch_add(1, Ordering::Relaxed);
        read_frame(socket).unwrap();
        socket.write_all(&greeting()).unwrap();
        let request = read_frame(socket).unwrap().body;
        let answer = [&[2], &request[1..9], &[0, 0], &b"done"[..]].concat();
        socket.write_all(&encode(FrameType::Control, &answer, LIMIT).unwrap()).unwrap();
        if counted.load(Ordering::Relaxed) == 1 {
            read_frame(socket).unwrap();
            socket.shutdown(std::net::Shutdown::Both).unwrap();
        }
    });
    let control = a.control();
    for _ in 0..2 {
        assert_eq!(control.request(&name, "echo", b"", soon()).unwrap(), b"done");
    }
    assert_eq!(connections.load(Ordering::Relaxed), 2);
}

#[test]
fn hostile_servers_cost_the_request() {
    let a = start();
    for (answer, kind) in [
        (vec![], ErrorKind::PeerGone),
        (vec![255; 20], ErrorKind::Malformed),
        (encode(FrameType::Probe, b"{}", LIMIT).unwrap(), ErrorKind::PeerRefused),
        (encode(FrameType::Control, b"\x03", LIMIT).unwrap(), ErrorKind::Malformed),
        ([greeting(), vec![255; 20]].concat(), ErrorKind::Malformed),
        ([greeting(), encode(FrameType::Control, b"\x02", LIMIT).unwrap()].concat(), ErrorKind::Malformed),
        ([greeting(), greeting()].concat(), ErrorKind::Malformed),
    ] {
        let (name, _hold) = peer(1, move |socket| {
            read_frame(socket).unwrap();
            socket.write_all(&answer).unwrap();
            if answer.is_empty() {
                socket.shutdown(std::net::Shutdown::Both).unwrap();
            }
        });
        assert_eq!(a.control().request(&name, "echo", b"", soon()).unwrap_err().kind(), kind);
    }
}

#[test]
fn stopping_ends_the_connections_that_peers_hold() {
    let (a, b) = (start(), start());
    let (ours, theirs) = (a.control(), b.control());
    let (open, gate) = channel();
    let (slow, begun) = gated_and_heard(gate);
    theirs.on_request("slow", slow);
    thread::scope(|scope| {
        let waiting = scope.spawn(|| ours.request(b.name(), "slow", b"", soon()));
        begun.recv().unwrap();
        b.stop();
        assert_eq!(waiting.join().unwrap().unwrap_err().kind(), ErrorKind::PeerGone);
        drop(open);
    });
}
