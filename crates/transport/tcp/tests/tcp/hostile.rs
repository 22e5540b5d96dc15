//! Whoever sends what it should not loses its connection, and nobody else notices.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{Sender, channel};

use posthorse_core::*;
use posthorse_tcp::TcpConfig;

use crate::support::*;

pub(crate) fn opening(lane: u16) -> Vec<u8> {
    claiming(lane, 600)
}

pub(crate) fn claiming(lane: u16, liveness_ms: u64) -> Vec<u8> {
    let body = serde_json::json!({
        "hello": Hello::new(Features::NONE, None), "name": "hostile:1", "session": [1, 2], "lane": lane,
        "class": "bulk", "liveness_ms": liveness_ms,
    })
    .to_string();
    let mut bytes = b"PSTHORSE".to_vec();
    bytes.extend((body.len() as u32).to_le_bytes());
    bytes.extend(body.as_bytes());
    bytes
}

/// Sends `bytes`, and reads until the other side closes.
fn say(port: u16, bytes: &[u8]) {
    let mut socket = TcpStream::connect(("127.0.0.1", port)).unwrap();
    socket.set_read_timeout(Some(PATIENCE)).unwrap();
    // The other side may close before it has read everything.
    let _ = socket.write_all(bytes);
    let mut answer = Vec::new();
    match socket.read_to_end(&mut answer) {
        Ok(_) => {}
        Err(error) => assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset, "{error}"),
    }
}

fn header(kind: u8, flags: u8, len: u64) -> Vec<u8> {
    let mut bytes = vec![0; 64];
    (bytes[0], bytes[1], bytes[8]) = (kind, flags, 1);
    bytes[24..32].copy_from_slice(&len.to_le_bytes());
    bytes
}

#[test]
fn hostile_bytes_cost_their_connection_and_nothing_else() {
    let there = Node::with(
        "there:1",
        TcpConfig { connect_timeout_ms: 300, liveness_ms: 600, ..local() },
        Hello::new(Features::NONE, None),
    );
    let here = Node::new("here:1");
    let path = here.connect(&there.desc);
    let (source, target) = (Memory::patterned(4096, 1), Memory::new(4096));
    let (_, token) = there.publish(target, Access::ReadWrite);
    let port = there.port();
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut count = 0;
            while !stop.load(Ordering::Acquire) || count < 10 {
                here.transfer(path, write(source.part(0, 4096), target.address(), token)).unwrap();
                count += 1;
            }
        });
        let mut state = 1_u64;
        for len in [0, 1, 8, 12, 64, 1000, 100_000] {
            let random: Vec<u8> = (0..len)
                .map(|_| {
                    state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                    (state >> 56) as u8
                })
                .collect();
            if !random.is_empty() {
                say(port, &[b"PSTHORSE", &random[..]].concat());
                say(port, &random);
                say(port, &[opening(3), random].concat());
            }
        }
        say(port, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n");
        say(port, b"PSTHORSE\xff\xff\xff\xff");
        say(port, b"PSTHORSE\x02\x00\x00\x00{}");
        let whole = opening(4);
        say(port, &whole[..whole.len() - 1]);
        for frame in [
            header(9, 0, 1),
            header(1, 0, u64::MAX),
            header(1, 0, (1 << 20) + 1),
            header(1, 3, 8),
            header(2, 0, u64::MAX),
            header(2, 0, 0),
            header(3, 0, 1 << 21),
            header(3, 0, (64 << 10) + 1),
            header(5, 0, 1),
            [header(1, 0, 8), vec![0; 8], header(1, 0, 8), vec![0; 8]].concat(),
            // Half a payload and then nothing.
            [header(1, 8, 1000), vec![0; 10]].concat(),
        ] {
            let last_is_another_id = frame.len() == 144;
            let mut bytes = [opening(5), frame].concat();
            if last_is_another_id {
                let at = bytes.len() - 72 + 8;
                bytes[at] = 2;
            }
            say(port, &bytes);
        }
        stop.store(true, Ordering::Release);
    });
    assert!(target.bytes() == source.bytes());
    assert!(!here.events.is_down());
}

#[test]
fn a_thousand_half_open_connections_do_not_keep_honest_ones_out() {
    let there = Node::new("there:1");
    let half_open: Vec<TcpStream> = (0..1000)
        .map(|n| {
            let mut socket = TcpStream::connect(("127.0.0.1", there.port())).unwrap();
            if n % 2 == 0 {
                socket.write_all(b"PSTHORSE").unwrap();
            }
            socket
        })
        .collect();
    let here = Node::new("here:1");
    let path = here.connect(&there.desc);
    let (source, target) = (Memory::patterned(4096, 1), Memory::new(4096));
    let (_, token) = there.publish(target, Access::Write);
    here.transfer(path, write(source.part(0, 4096), target.address(), token)).unwrap();
    drop(half_open);
}

#[test]
fn those_who_say_late_who_they_are_are_all_welcome_as_long_as_there_are_places() {
    let there = Node::new("there:1");
    let connect = |lane| (lane, TcpStream::connect(("127.0.0.1", there.port())).unwrap());
    let mut sockets: Vec<(u16, TcpStream)> = (0..400).map(connect).collect();
    // Whoever comes after them is welcome: so they have been accepted.
    Node::new("here:1").connect(&there.desc);
    for (lane, socket) in &mut sockets {
        socket.write_all(&opening(*lane)).unwrap();
    }
    for (lane, socket) in &mut sockets {
        socket.set_read_timeout(Some(PATIENCE)).unwrap();
        let got = socket.read(&mut [0; 8]);
        assert!(matches!(got, Ok(1..)), "connection {lane}: {got:?}");
    }
}

#[test]
fn those_who_do_not_say_who_they_are_make_room_for_those_who_do() {
    let there =
        Node::with("there:1", TcpConfig { max_connections: 3, ..local() }, Hello::new(Features::NONE, None));
    let silent = [(); 3].map(|()| TcpStream::connect(("127.0.0.1", there.port())).unwrap());
    let config = TcpConfig { bulk_lanes: 1, ..local() };
    let here = Node::with("here:1", config, Hello::new(Features::NONE, None));
    here.connect(&there.desc);
    let mut answer = String::new();
    let _ = (&silent[0]).read_to_string(&mut answer);
    assert!(answer.contains("max_connections"), "it is told why: {answer:?}");
}

#[test]
fn the_number_of_connections_is_bounded() {
    let config = TcpConfig { max_connections: 3, ..local() };
    let there = Node::with("there:1", config, Hello::new(Features::NONE, None));
    let here = Node::new("here:1");
    here.connect(&there.desc);
    let next = Node::with(
        "next:1",
        TcpConfig { connect_timeout_ms: 300, ..local() },
        Hello::new(Features::NONE, None),
    );
    assert!(next.transport.connect(&there.desc, Deadline::after(PATIENCE)).is_err());
    here.transport.stop();
    // Its places are given back as soon as the other side has seen it go.
    let until = std::time::Instant::now() + PATIENCE;
    while next.transport.connect(&there.desc, Deadline::after(PATIENCE)).is_err() {
        assert!(std::time::Instant::now() < until);
    }
}

#[test]
fn silent_connections_make_room_however_long_a_silence_they_claim() {
    let config = TcpConfig { max_connections: 8, liveness_ms: 400, ..local() };
    let there = Node::with("there:1", config, Hello::new(Features::NONE, None));
    let mut sockets: Vec<_> = (0..8)
        .map(|lane| {
            let mut socket = TcpStream::connect(("127.0.0.1", there.port())).unwrap();
            socket.set_read_timeout(Some(PATIENCE)).unwrap();
            socket.write_all(&claiming(lane, 3_600_000)).unwrap();
            socket
        })
        .collect();
    for socket in &mut sockets {
        assert!(socket.read(&mut [0; 64]).unwrap() > 0, "it was welcomed");
    }
    let here = Node::new("here:1");
    let until = std::time::Instant::now() + PATIENCE;
    while let Err(error) = here.transport.connect(&there.desc, Deadline::after(PATIENCE)) {
        assert_eq!(error.kind(), ErrorKind::LimitReached, "{error}");
        assert!(std::time::Instant::now() < until);
    }
}

#[test]
fn a_peer_that_answers_what_it_was_not_asked_loses_its_path() {
    let (mut acknowledged, mut taken) = ([0; 32], [0; 32]);
    (acknowledged[0], acknowledged[8]) = (0x81, 77);
    (taken[0], taken[8]) = (0x85, 1);
    for answer in [acknowledged, taken] {
        a_liar_loses_its_path(answer);
    }
}

fn a_liar_loses_its_path(answer: [u8; 32]) {
    let here = Node::new("here:1");
    let error = why_it_went_down(&here, move |mut socket| {
        welcome(&mut socket, &answer);
        let _ = socket.read_to_end(&mut Vec::new());
    });
    assert_eq!(error.kind(), ErrorKind::Malformed, "{error}");
}

#[test]
fn an_owner_that_welcomes_and_says_something_and_leaves_is_not_called_for_ever() {
    let config = TcpConfig { reconnect_attempts: 3, bulk_lanes: 1, ..local() };
    let here = Node::with("here:1", config, Hello::new(Features::NONE, None));
    let calls = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&calls);
    let error = why_it_went_down(&here, move |mut socket| {
        counted.fetch_add(1, Ordering::SeqCst);
        let mut pong = [0; 32];
        pong[0] = 0x84;
        welcome(&mut socket, &pong);
    });
    assert_eq!(error.kind(), ErrorKind::PathFailed, "{error}");
    let calls = calls.load(Ordering::SeqCst);
    assert!((4..=8).contains(&calls), "{calls} calls of two lanes");
}

/// Why a path to an owner that does so with each connection went down.
fn why_it_went_down(here: &Node, serve: impl Fn(TcpStream) + Clone + Send + 'static) -> Error {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let mut desc = here.desc.clone();
    (desc.name, desc.incarnation) = ("liar:1".to_owned(), None);
    desc.transports.insert("tcp".into(), serde_json::json!({"host": "127.0.0.1", "port": port}));
    // Detached: how many lanes get as far as dialling depends on when the first is found out.
    std::thread::spawn(move || {
        for socket in listener.incoming() {
            let serve = serve.clone();
            std::thread::spawn(move || serve(socket.unwrap()));
        }
    });
    // It may have gone down before `connect` returned.
    match here.transport.connect(&desc, Deadline::after(PATIENCE)) {
        Ok(_) => here.events.down(),
        Err(error) => error,
    }
}

/// Welcomes whoever calls, and says something more.
pub(crate) fn welcome(socket: &mut TcpStream, more: &[u8]) {
    let mut start = [0; 12];
    socket.read_exact(&mut start).unwrap();
    let mut body = vec![0; u32::from_le_bytes([start[8], start[9], start[10], start[11]]) as usize];
    socket.read_exact(&mut body).unwrap();
    let welcome = serde_json::json!({"welcome":
        {"hello": Hello::new(Features::NONE, None), "incarnation": 1, "known": false}})
    .to_string();
    let mut answer = b"PSTHORSE".to_vec();
    answer.extend((welcome.len() as u32).to_le_bytes());
    answer.extend(welcome.as_bytes());
    answer.extend(more);
    let _ = socket.write_all(&answer);
}

/// Memory that says when nobody keeps it any more.
#[derive(Debug)]
struct Told(Memory, Sender<()>);

// SAFETY: as for `Memory`.
unsafe impl Region for Told {
    fn view(&self) -> View {
        self.0.view()
    }
}

impl Drop for Told {
    fn drop(&mut self) {
        // Nobody listens any more when the test has failed.
        let _ = self.1.send(());
    }
}

#[test]
fn a_peer_that_stops_half_way_keeps_no_memory_that_was_withdrawn() {
    const LEN: usize = 16 << 20;
    let config = TcpConfig { liveness_ms: 600, socket_buffer_bytes: 64 << 10, ..local() };
    let there = Node::with("there:1", config, Hello::new(Features::NONE, None));
    let memory = Memory::new(LEN);
    // A READ whose answer is not taken, and a WRITE of which but the first byte is sent.
    for (kind, flags, len, more) in [(2, 0b100, LEN as u64, &[][..]), (1, 0b1100, 1000, &[7][..])] {
        let (tell, told) = channel();
        let region = there.registry.register(Arc::new(Told(memory, tell)), Access::ReadWrite).unwrap();
        there.transport.register(&region).unwrap();
        let token = there.registry.standing_grant(region.id).unwrap().unwrap().token;
        let id = region.id;
        drop(region);
        let mut request = header(kind, flags, len);
        request[16..24].copy_from_slice(&memory.address().to_le_bytes());
        request[32..48].copy_from_slice(&token.to_wire());
        let mut socket = TcpStream::connect(("127.0.0.1", there.port())).unwrap();
        socket.set_read_timeout(Some(PATIENCE)).unwrap();
        socket.write_all(&[claiming(kind.into(), 3_600_000), request, more.to_vec()].concat()).unwrap();
        if kind == 2 {
            // Longer than a welcome.
            socket.read_exact(&mut [0; 4096]).unwrap();
        } else {
            while posthorse_testkit::memory::read(&memory, 0, 1) != more {
                std::thread::yield_now();
            }
        }
        let deadline = Deadline::after(PATIENCE);
        there.transport.unregister(id, deadline).unwrap();
        there.registry.unregister(id, deadline).unwrap();
        told.recv_timeout(PATIENCE).expect("the memory is free");
        drop(socket);
    }
}
