//! Peers that mean no good, or are broken, cost their own connection.

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use posthorse_core::{Incarnation, Result};
use posthorse_segment::frame::{FrameType, encode};
use posthorse_segment::{Handshake, HandshakeConfig, HandshakeEvents, HandshakeListener, Identity};

use crate::support::{LIMIT, ask, desc, dial, hello, on_loopback, runtime, soon, start, start_with};

/// Whether the server ended the connection without an answer.
fn closed_without_answer(mut socket: TcpStream) -> bool {
    !matches!(socket.read(&mut [0; 64]), Ok(1..))
}

#[test]
fn malformed_requests_cost_their_connection_alone() {
    let (a, b) = (start(), start());
    b.publish(&desc(b.name(), 1)).unwrap();
    let control = |body: &[u8]| encode(FrameType::Control, body, LIMIT).unwrap();
    for bytes in [
        vec![0; 8],
        vec![255; 32],
        (LIMIT as u64 + 1).to_le_bytes().to_vec(),
        vec![3, 0, 0, 0, 0, 0, 0, 0, 0x80, 1, 2],
        encode(FrameType::Notify, b"not json", LIMIT).unwrap(),
        control(b""),
        control(b"\x00{}"),
        control(b"\x01"),
        control(b"\x03"),
        control(b"\xff"),
    ] {
        let mut socket = dial(&b);
        socket.write_all(&bytes).unwrap();
        assert!(closed_without_answer(socket), "{bytes:?}");
        a.client().metadata(b.name(), soon()).unwrap();
    }
}

#[test]
fn hundreds_of_half_open_connections_keep_nobody_out() {
    let a = start();
    // The time-out is an hour: only making room lets anybody in.
    let config = HandshakeConfig { newcomers: 8, io_timeout_ms: 3_600_000, ..on_loopback() };
    let b = start_with(config, 1, hello()).0;
    b.publish(&desc(b.name(), 1)).unwrap();
    let mut kept = Vec::new();
    for round in 0..300 {
        let mut socket = dial(&b);
        socket.write_all(&[200, 0, 0, 0][..round % 5 % 4]).unwrap();
        kept.push(socket);
        if round % 20 == 0 {
            a.client().metadata(b.name(), soon()).unwrap();
        }
    }
    assert!(closed_without_answer(kept.swap_remove(0)), "the oldest gave way");
}

#[test]
fn those_who_ask_a_little_late_are_all_answered() {
    let config = HandshakeConfig { newcomers: 8, grace_ms: 3_600_000, ..on_loopback() };
    let b = start_with(config, 1, hello()).0;
    let mut sockets: Vec<_> = (0..40).map(|_| dial(&b)).collect();
    for socket in &mut sockets {
        // Refused only if it was put out already, which the answer will tell.
        let _ = socket.write_all(&encode(FrameType::Probe, b"{}", LIMIT).unwrap());
    }
    for (number, socket) in sockets.into_iter().enumerate() {
        assert!(!closed_without_answer(socket), "connection {number}");
    }
}

/// Says when a message has come, and takes it when it is told to.
#[derive(Debug)]
struct Gated {
    came: Mutex<Sender<()>>,
    gate: Mutex<Receiver<()>>,
}

impl HandshakeEvents for Gated {
    fn notified(&self, _: &str, _: &str) -> Result<()> {
        self.came.lock().unwrap().send(()).unwrap();
        let _ = self.gate.lock().unwrap().recv();
        Ok(())
    }
}

fn start_events(config: HandshakeConfig, events: Arc<dyn HandshakeEvents>) -> Handshake {
    let listener = HandshakeListener::bind(config).unwrap();
    let name = format!("127.0.0.1:{}", listener.port());
    let identity = Identity { name, incarnation: Incarnation(1), hello: hello() };
    listener.start(runtime(), identity, events).unwrap()
}

/// A handshake with such events, and a connection whose message is being handled until what is returned is dropped.
fn start_busy(config: HandshakeConfig) -> (Handshake, TcpStream, Sender<()>) {
    let ((came, begun), (open, gate)) = (channel(), channel());
    let b = start_events(config, Arc::new(Gated { came: Mutex::new(came), gate: Mutex::new(gate) }));
    let mut busy = dial(&b);
    let message = b"{\"name\":\"n\",\"notify_msg\":\"m\"}";
    busy.write_all(&encode(FrameType::Notify, message, LIMIT).unwrap()).unwrap();
    begun.recv().unwrap();
    (b, busy, open)
}

#[test]
fn whoever_has_asked_keeps_its_place_until_it_is_answered() {
    let (b, busy, open) = start_busy(HandshakeConfig { newcomers: 2, grace_ms: 1, ..on_loopback() });
    let silent = dial(&b);
    // There is room for this one only once another has given way.
    ask(&b, FrameType::Probe, b"{}").unwrap();
    assert!(closed_without_answer(silent));
    drop(open);
    assert!(!closed_without_answer(busy), "its message was delivered");
}

#[test]
fn an_answer_that_takes_too_long_gives_its_place_up() {
    let config = HandshakeConfig { newcomers: 1, grace_ms: 1, answer_timeout_ms: 50, ..on_loopback() };
    let (b, busy, open) = start_busy(config);
    ask(&b, FrameType::Probe, b"{}").unwrap();
    assert!(closed_without_answer(busy));
    drop(open);
}

/// Answers with more than sockets keep for a peer that does not read.
#[derive(Debug)]
struct Verbose;

impl HandshakeEvents for Verbose {
    fn notified(&self, _: &str, _: &str) -> Result<()> {
        Ok(())
    }

    fn connection(&self, _: &[u8]) -> Result<Vec<u8>> {
        Ok(vec![b' '; LONG])
    }
}

/// The length of such an answer.
const LONG: usize = 64 << 20;

#[test]
fn whoever_takes_its_answer_slowly_gives_way() {
    // Only making room ends such a connection early: it takes some of its answer again and again.
    let config = HandshakeConfig {
        newcomers: 1,
        grace_ms: 1,
        io_timeout_ms: 1_000,
        answer_timeout_ms: 3_600_000,
        frame_bytes: LONG + 1,
        ..on_loopback()
    };
    let b = start_events(config, Arc::new(Verbose));
    let mut slow = dial(&b);
    slow.write_all(&encode(FrameType::Connection, b"{}", LIMIT).unwrap()).unwrap();
    slow.read_exact(&mut [0; 9]).unwrap();
    let mut other = dial(&b);
    other.write_all(&encode(FrameType::Probe, b"{}", LIMIT).unwrap()).unwrap();
    other.set_read_timeout(Some(Duration::from_millis(5))).unwrap();
    let (mut taken, mut piece) = (0, vec![0; 128 << 10]);
    while other.read(&mut [0]).is_err() {
        taken += slow.read(&mut piece).unwrap_or_default();
    }
    // The sockets may still hold some of what was sent.
    while let Ok(more @ 1..) = slow.read(&mut piece) {
        taken += more;
    }
    assert!(taken < LONG, "the other was let in only once the answer was taken");
}

#[test]
fn a_request_that_never_ends_is_given_up() {
    let b = start_with(HandshakeConfig { io_timeout_ms: 50, ..on_loopback() }, 1, hello()).0;
    let mut socket = dial(&b);
    socket.write_all(&[200, 0, 0, 0, 0, 0, 0, 0, 1, b'{']).unwrap();
    assert!(closed_without_answer(socket));
}

#[test]
fn a_client_that_never_reads_blocks_nobody() {
    let (a, b) = (start(), start());
    let mut large = desc(b.name(), 1);
    large.buffers = (1..4000)
        .map(|n| {
            let mut buffer = large.buffers[0].clone();
            buffer.address = n << 12;
            buffer
        })
        .collect();
    b.publish(&large).unwrap();
    let request = encode(FrameType::Metadata, b"{}", LIMIT).unwrap();
    let kept: Vec<_> = (0..50)
        .map(|_| {
            let mut socket = dial(&b);
            socket.write_all(&request).unwrap();
            socket
        })
        .collect();
    assert_eq!(a.client().metadata(b.name(), soon()).unwrap().buffers.len(), 3999);
    drop(kept);
}
