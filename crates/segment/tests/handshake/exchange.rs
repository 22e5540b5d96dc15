//! What Mooncake's handshake offers.

use std::io::{Read as _, Write as _};
use std::net::{IpAddr, Shutdown, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use posthorse_core::{Deadline, ErrorKind, Features, Hello, Incarnation};
use posthorse_segment::frame::{FrameType, encode};
use posthorse_segment::{
    Directory as _, Freshness, HandshakeConfig, HandshakeListener, Identity, P2pDirectory, SegmentCache,
};

use crate::support::{
    LIMIT, Notices, ask, desc, dial, hello, on_loopback, peer, read_frame, runtime, soon, start, start_with,
};

#[test]
fn a_published_descriptor_is_looked_up_until_it_is_withdrawn() {
    let (a, b) = (start(), start());
    let (ours, theirs) = (P2pDirectory::new(Arc::clone(&a)), P2pDirectory::new(Arc::clone(&b)));
    let lookup = || ours.lookup(b.name(), soon());
    assert_eq!(lookup().unwrap_err().kind(), ErrorKind::PeerRefused);
    theirs.publish(&desc(b.name(), 1), soon()).unwrap();
    assert_eq!(lookup().unwrap(), desc(b.name(), 1));
    assert_eq!(theirs.lookup(b.name(), soon()).unwrap(), desc(b.name(), 1), "of itself, too");
    assert_eq!(theirs.publish(&desc("c:1", 1), soon()).unwrap_err().kind(), ErrorKind::InvalidArgument);
    theirs.withdraw(b.name(), soon()).unwrap();
    let error = lookup().unwrap_err();
    assert_eq!((error.kind(), error.peer()), (ErrorKind::PeerRefused, Some(b.name())));
}

#[test]
fn a_foreign_client_gets_what_it_expects() {
    let (handshake, notices) = start_with(on_loopback(), 1, hello());
    handshake.publish(&desc(handshake.name(), 1)).unwrap();
    // The captured request of a Mooncake initiator, in two pieces.
    let request = include_bytes!("../../testdata/metadata.frame");
    let mut socket = dial(&handshake);
    socket.write_all(&request[..11]).unwrap();
    socket.write_all(&request[11..]).unwrap();
    let answer = read_frame(&mut socket).unwrap();
    assert_eq!(answer.frame_type, FrameType::Metadata);
    assert!(answer.body.ends_with(b"\n"));
    let json: serde_json::Value = serde_json::from_slice(&answer.body).unwrap();
    assert_eq!((&json["protocol"], &json["tcp_data_port"]), (&"tcp".into(), &0.into()));
    assert_eq!(json["buffers"][0]["name"], handshake.name());
    assert_eq!(socket.read(&mut [0]).unwrap(), 0, "one answer, then the end");

    let answer = ask(&handshake, FrameType::Notify, b"{\"name\":\"n\",\"notify_msg\":\"m\"}\n").unwrap();
    assert_eq!(answer.body, b"{\"name\":\"\",\"notify_msg\":\"success\"}\n");
    assert_eq!(*notices.0.lock().unwrap(), [("n".to_owned(), "m".to_owned())]);
    let answer = ask(&handshake, FrameType::Probe, b"{}").unwrap();
    assert_eq!(answer.body, b"{\"status\":\"success\"}\n");
    for frame_type in [FrameType::Connection, FrameType::Untyped] {
        let answer = ask(&handshake, frame_type, b"{\"local_nic_path\":\"a@b\"}").unwrap();
        assert_eq!(answer.frame_type, frame_type);
        assert!(answer.body.starts_with(b"{\"local_gid\":\"\",\"local_lid\":0,"));
    }
}

#[test]
fn notifications_and_probes_reach_the_peer() {
    let (a, (b, notices)) = (start(), start_with(on_loopback(), 1, hello()));
    let client = a.client();
    client.probe(b.name(), soon()).unwrap();
    client.notify(b.name(), a.name(), "layer 3 is there", soon()).unwrap();
    assert_eq!(*notices.0.lock().unwrap(), [(a.name().to_owned(), "layer 3 is there".to_owned())]);
    let error = client.notify(b.name(), a.name(), "refuse me", soon()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::PeerRefused);
}

#[test]
fn each_way_to_fail_has_its_reason() {
    let a = start();
    let client = a.client();
    let kind = |name: &str, deadline| {
        let error = client.metadata(name, deadline).unwrap_err();
        assert!(error.peer() == Some(name) || error.kind() == ErrorKind::InvalidArgument, "{error}");
        error.kind()
    };
    assert_eq!(kind("node-without-port", soon()), ErrorKind::InvalidArgument);
    assert_eq!(kind("no-such-host.invalid:1", soon()), ErrorKind::PeerUnreachable);
    let free = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
    assert_eq!(kind(&free, soon()), ErrorKind::PeerUnreachable);

    let (name, _hold) = peer(1, |socket| {
        read_frame(socket).unwrap();
        socket.shutdown(Shutdown::Write).unwrap();
    });
    assert_eq!(kind(&name, soon()), ErrorKind::PeerRefused);
    let (name, _hold) = peer(1, |socket| {
        read_frame(socket).unwrap();
        socket.write_all(&[200, 0, 0, 0, 0, 0, 0, 0, 1, b'{']).unwrap();
        socket.shutdown(Shutdown::Write).unwrap();
    });
    assert_eq!(kind(&name, soon()), ErrorKind::PeerGone);
    for answer in [
        vec![255; 64],
        encode(FrameType::Probe, b"{}", LIMIT).unwrap(),
        encode(FrameType::Metadata, b"{\"name\":", LIMIT).unwrap(),
    ] {
        let (name, _hold) = peer(1, move |socket| {
            read_frame(socket).unwrap();
            socket.write_all(&answer).unwrap();
        });
        assert_eq!(kind(&name, soon()), ErrorKind::Malformed);
    }
    let (name, _hold) = peer(1, |_| {});
    assert_eq!(kind(&name, Deadline::after(Duration::from_millis(30))), ErrorKind::DeadlineExceeded);
    let impatient = start_with(HandshakeConfig { answer_timeout_ms: 30, ..on_loopback() }, 1, hello()).0;
    let (name, _hold) = peer(1, |_| {});
    assert_eq!(impatient.client().metadata(&name, Deadline::NEVER).unwrap_err().kind(), ErrorKind::PeerGone);
}

#[test]
fn a_peer_that_cannot_work_with_us_is_refused_with_the_difference() {
    let fingerprint = |text: &str| Hello::new(Features::NONE, Some(text.to_owned()));
    let a = start_with(on_loopback(), 1, fingerprint("model-a")).0;
    let b = start();
    let mut other = desc(b.name(), 1);
    other.hello = Some(fingerprint("model-b"));
    b.publish(&other).unwrap();
    let error = a.client().metadata(b.name(), soon()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::FingerprintMismatch);
    assert!(error.to_string().contains("model-a") && error.to_string().contains("model-b"), "{error}");
}

#[test]
fn a_port_that_is_taken_is_named_and_a_range_is_searched() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port();
    let config = HandshakeConfig { port_min: port, port_max: port, ..on_loopback() };
    let error = HandshakeListener::bind(config).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Io);
    assert!(error.to_string().contains(&format!("127.0.0.1:{port}")), "{error}");
    let config = HandshakeConfig { port_min: port, port_max: port.saturating_add(200), ..on_loopback() };
    let listener = HandshakeListener::bind(config).unwrap();
    assert!(listener.port() > port);
}

#[test]
fn a_port_is_free_when_its_handshake_has_ended_although_a_forked_child_lives_on() {
    let handshake = start();
    let port = handshake.port();
    let _child = posthorse_testkit::IdleChild::fork();
    drop(handshake);
    let began = Instant::now();
    // As soon as the runtime gets to it.
    while TcpStream::connect(("127.0.0.1", port)).is_ok() {
        assert!(began.elapsed() < Duration::from_secs(10), "somebody still listens");
    }
    HandshakeListener::bind(HandshakeConfig { port_min: port, port_max: port, ..on_loopback() }).unwrap();
}

#[test]
fn one_port_serves_both_families() {
    let a = start();
    let serve = |bind: Vec<IpAddr>, name: &str| {
        let listener = HandshakeListener::bind(HandshakeConfig { bind, ..HandshakeConfig::default() })?;
        let name = format!("{name}:{}", listener.port());
        let identity = Identity { name, incarnation: Incarnation(1), hello: hello() };
        listener.start(runtime(), identity, Arc::new(Notices::default()))
    };
    let both = serve(vec![], "127.0.0.1").unwrap();
    a.client().probe(both.name(), soon()).unwrap();
    if TcpListener::bind("[::1]:0").is_err() {
        posthorse_testkit::skip("no-ipv6", "this host has no IPv6 loopback address");
        return;
    }
    a.client().probe(&format!("[::1]:{}", both.port()), soon()).unwrap();
    let six = serve(vec!["::1".parse().unwrap()], "[::1]").unwrap();
    a.client().probe(six.name(), soon()).unwrap();
    let listed = serve(vec!["127.0.0.1".parse().unwrap(), "::1".parse().unwrap()], "127.0.0.1").unwrap();
    a.client().probe(listed.name(), soon()).unwrap();
    a.client().probe(&format!("[::1]:{}", listed.port()), soon()).unwrap();
}

#[test]
fn a_descriptor_too_large_for_a_frame_is_not_published() {
    let a = start_with(HandshakeConfig { frame_bytes: 4096, ..on_loopback() }, 1, hello()).0;
    let mut desc = desc(a.name(), 1);
    desc.buffers = vec![desc.buffers[0].clone(); 100];
    let error = a.publish(&desc).unwrap_err();
    assert!(error.kind() == ErrorKind::TooLarge && error.to_string().contains("100 buffers"), "{error}");
}

#[test]
fn a_restarted_peer_is_noticed_and_never_served_from_before() {
    let a = start();
    let first = start();
    let (name, port) = (first.name().to_owned(), first.port());
    first.publish(&desc(&name, 1)).unwrap();
    let changes = Arc::new(Mutex::new(Vec::new()));
    let on_change = {
        let changes = Arc::clone(&changes);
        Box::new(move |change: &posthorse_segment::SegmentChanged| {
            changes.lock().unwrap().push(change.clone())
        })
    };
    let cache = SegmentCache::new(Arc::new(P2pDirectory::new(a)), 16, on_change);
    let life = |freshness| cache.get(&name, freshness, soon()).map(|desc| desc.incarnation);
    assert_eq!(life(Freshness::Cached).unwrap(), Some(Incarnation(1)));
    drop(first);
    // Whether it is gone or back, the old descriptor serves only those who accept any.
    let config = HandshakeConfig { port_min: port, port_max: port, ..on_loopback() };
    let listener = loop {
        // The runtime closes the old socket in its own time.
        match HandshakeListener::bind(config.clone()) {
            Ok(listener) => break listener,
            Err(error) => assert_eq!(error.kind(), ErrorKind::Io),
        }
        std::thread::yield_now();
    };
    let identity = Identity { name: name.clone(), incarnation: Incarnation(2), hello: hello() };
    let second = listener.start(runtime(), identity, Arc::new(Notices::default())).unwrap();
    second.publish(&desc(&name, 2)).unwrap();
    assert_eq!(life(Freshness::Cached).unwrap(), Some(Incarnation(1)));
    cache.invalidate(&name);
    assert_eq!(life(Freshness::Cached).unwrap(), Some(Incarnation(2)));
    let changes = changes.lock().unwrap();
    let [change] = &changes[..] else { panic!("{changes:?}") };
    assert_eq!((change.before, change.after), (Some(Incarnation(1)), Some(Incarnation(2))));
}
