//! The control plane against well-behaved, slow, silent and hostile peers.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::pin::Pin;
use std::sync::{Arc, Mutex, mpsc};
use std::task::{Context, Poll, Waker};
use std::thread;
use std::time::{Duration, Instant};

use posthorse_core::{Deadline, Error, ErrorKind};
use posthorse_omni::control::{ControlLimits, ControlPlane, Listener, Peer, Responder, Service};
use posthorse_omni::message::{
    Answer, Cancel, Dialect, PullReply, Query, QueryReply, Reply, Request, StreamAbort,
};

const SOON: Duration = Duration::from_secs(20);

/// Answers queries at once, keeps pings until told, drops health requests.
#[derive(Default)]
struct Echo {
    kept: Mutex<Vec<Responder>>,
    gone: Mutex<Option<mpsc::Sender<Peer>>>,
    seen: Mutex<Option<mpsc::Sender<Request>>>,
}

impl Service for Echo {
    fn handle(&self, _: &Peer, request: Request, responder: Responder) {
        if let Some(seen) = &*self.seen.lock().unwrap() {
            let _ = seen.send(request.clone());
        }
        match request {
            Request::Query(query) => responder.reply(&Reply::Offer {
                data_size: query.request_id.len() as u64,
                request_id: query.request_id,
                is_fast_path: true,
                offered: None,
            }),
            Request::Ping => self.kept.lock().unwrap().push(responder),
            Request::Health => drop(responder),
            Request::StreamAbort(abort) => {
                responder.reply(&Reply::Health(abort.reason.repeat(3 << 18).into()));
            }
            _ => responder.refuse(&Error::new(ErrorKind::Unsupported, "not here")),
        }
    }

    fn disconnected(&self, peer: &Peer) {
        if let Some(gone) = &*self.gone.lock().unwrap() {
            let _ = gone.send(*peer);
        }
    }
}

fn quick() -> ControlLimits {
    ControlLimits {
        connect_timeout: Duration::from_millis(300),
        send_timeout: Duration::from_millis(300),
        liveness: Duration::from_millis(300),
        ..ControlLimits::default()
    }
}

fn serve(limits: ControlLimits) -> (ControlPlane, Listener, Arc<Echo>) {
    let plane = ControlPlane::start(limits).unwrap();
    let service = Arc::new(Echo::default());
    let listener = plane.listen("127.0.0.1:0", Arc::clone(&service) as Arc<dyn Service>).unwrap();
    (plane, listener, service)
}

fn query(key: &str) -> Vec<u8> {
    Request::Query(Query { request_id: key.to_owned(), extra: None }).encode().unwrap()
}

fn ask(plane: &ControlPlane, address: &str, key: &str) {
    let reply = plane.dialer().request_blocking(address, query(key), SOON.into()).unwrap();
    let QueryReply::Offer { data_size, .. } = QueryReply::decode(key, &reply).unwrap() else {
        panic!("no offer")
    };
    assert_eq!(data_size, key.len() as u64);
}

const GREETING: &[u8] = &{
    let mut greeting = [0; 64];
    (greeting[0], greeting[8], greeting[9]) = (0xff, 1, 0x7f);
    (greeting[10], greeting[11]) = (3, 1);
    (greeting[12], greeting[13], greeting[14], greeting[15]) = (b'N', b'U', b'L', b'L');
    greeting
};

/// A raw ZMTP peer of this socket type, its handshake done.
fn raw(stream: &mut TcpStream, socket_type: &str) {
    raw_of(stream, socket_type, 1);
}

/// As [`raw`], of this minor version of ZMTP 3: before 3.1 there is no PING.
fn raw_of(stream: &mut TcpStream, socket_type: &str, minor: u8) {
    let body =
        [b"\x05READY\x0bSocket-Type\0\0\0", &[socket_type.len() as u8][..], socket_type.as_bytes()].concat();
    stream.write_all(&[&GREETING[..11], &[minor], &GREETING[12..]].concat()).unwrap();
    stream.write_all(&[&[4, body.len() as u8][..], &body].concat()).unwrap();
    let mut theirs = [0; 64 + 2];
    stream.read_exact(&mut theirs).unwrap();
    let mut ready = vec![0; theirs[65].into()];
    stream.read_exact(&mut ready).unwrap();
}

#[test]
fn requests_are_answered_over_kept_connections() {
    let (plane, listener, _) = serve(ControlLimits::default());
    let address = listener.local_address().to_string();
    let dialer = plane.dialer();
    for number in 0..50 {
        let key = "k".repeat(number + 1);
        let reply = dialer.request_blocking(&address, query(&key), SOON.into()).unwrap();
        assert!(matches!(QueryReply::decode(&key, &reply).unwrap(), QueryReply::Offer { .. }));
    }
    assert!(format!("{dialer:?}").contains("1 idle"), "{dialer:?}");
    let health = dialer.request_blocking(&address, Request::Health.encode().unwrap(), SOON.into()).unwrap();
    let Answer::Refused(refusal) = Answer::decode(&health).unwrap() else { panic!("not refused") };
    assert!(refusal.message.contains("dropped"));
    plane.close(SOON.into()).unwrap();
}

#[test]
fn many_threads_ask_at_once() {
    let (plane, listener, _) = serve(ControlLimits::default());
    let address = listener.local_address().to_string();
    let dialer = plane.dialer();
    thread::scope(|scope| {
        for thread in 0..8 {
            let (dialer, address) = (dialer.clone(), &address);
            scope.spawn(move || {
                for number in 0..50 {
                    let key = format!("{thread}-{number}");
                    let reply = dialer.request_blocking(address, query(&key), SOON.into()).unwrap();
                    QueryReply::decode(&key, &reply).unwrap();
                }
            });
        }
    });
    plane.close(SOON.into()).unwrap();
}

#[test]
fn an_answer_can_be_given_later_from_another_thread_and_long_past_the_liveness_time() {
    let (plane, listener, service) = serve(quick());
    let address = listener.local_address().to_string();
    let (tx, rx) = mpsc::channel();
    *service.seen.lock().unwrap() = Some(tx);
    let (answered, answer) = mpsc::channel();
    thread::spawn({
        let (plane, address) = (plane.clone(), address.clone());
        let ping = Request::Ping.encode().unwrap();
        move || answered.send(plane.dialer().request_blocking(&address, ping, Deadline::NEVER))
    });
    rx.recv_timeout(SOON).unwrap();
    // An end that comes too early is what is waited for: both sides ask each other by PING meanwhile.
    let early = answer.recv_timeout(quick().liveness * 3);
    assert!(matches!(early, Err(mpsc::RecvTimeoutError::Timeout)), "{early:?}");
    ask(&plane, &address, "others-are-served");
    let responder = service.kept.lock().unwrap().pop().unwrap();
    assert!(!responder.is_closed());
    responder.reply(&Reply::Ok);
    let answer = answer.recv_timeout(SOON).unwrap().unwrap();
    assert_eq!(Answer::decode(&answer).unwrap(), Answer::Ok);
    plane.close(SOON.into()).unwrap();
}

#[test]
fn probe_query_to_a_dead_port_is_answered_with_its_reason_at_once() {
    let plane = ControlPlane::start(ControlLimits::default()).unwrap();
    let address = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
    let begin = Instant::now();
    let error = plane.dialer().request_blocking(&address, query("k"), SOON.into()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::PeerUnreachable);
    assert!(error.message().contains("refused") && error.peer() == Some(&*address), "{error}");
    assert!(begin.elapsed() < Duration::from_secs(2), "{:?}", begin.elapsed());
    plane.close(SOON.into()).unwrap();
}

#[test]
fn a_bind_failure_surfaces_with_its_address() {
    let (plane, listener, _) = serve(ControlLimits::default());
    let address = listener.local_address().to_string();
    let error = plane.listen(&address, Arc::new(Echo::default())).unwrap_err();
    assert!(
        error.message().contains(&address) && error.advice().unwrap().contains("another port"),
        "{error}"
    );
    plane.close(SOON.into()).unwrap();
    // The port is free again, and a closed plane binds none.
    TcpListener::bind(&address).unwrap();
    assert_eq!(plane.listen("127.0.0.1:0", Arc::new(Echo::default())).unwrap_err().kind(), ErrorKind::Closed);
}

#[test]
fn malformed_requests_get_the_foreign_error_and_the_connection_goes_on() {
    let (plane, listener, _) = serve(ControlLimits::default());
    let address = listener.local_address().to_string();
    let dialer = plane.dialer();
    for bytes in [b"".to_vec(), b"query_info\xc1".to_vec(), vec![0xff; 5000]] {
        let reply = dialer.request_blocking(&address, bytes, SOON.into()).unwrap();
        assert_eq!(PullReply::decode(&reply).unwrap(), PullReply::Failed);
    }
    let own = dialer.request_blocking(&address, b"posthorse:\xc1".to_vec(), SOON.into()).unwrap();
    assert!(matches!(Answer::decode(&own).unwrap(), Answer::Refused(_)));
    assert!(format!("{dialer:?}").contains("1 idle"));
    plane.close(SOON.into()).unwrap();
}

#[test]
fn hostile_bytes_harm_nobody_else() {
    let (plane, listener, _) = serve(ControlLimits::default());
    let address = listener.local_address();
    let huge = |flags: u8, len: u64| [&[flags][..], &len.to_be_bytes()].concat();
    for len in [1 << 45, 1 << 62, u64::MAX, 1 << 34] {
        for flags in [2, 3, 6] {
            // Before READY and after it: what makes other implementations abort.
            let mut stream = TcpStream::connect(address).unwrap();
            stream.write_all(&[GREETING, &huge(flags, len)].concat()).unwrap();
            let mut stream = TcpStream::connect(address).unwrap();
            raw(&mut stream, "DEALER");
            stream.write_all(&huge(flags, len)).unwrap();
            let closed = stream.read(&mut [0]);
            assert!(matches!(closed, Ok(0) | Err(_)), "{closed:?}");
        }
    }
    for seed in 0..200_u32 {
        let noise: Vec<u8> = (0..400).map(|i| (seed * 7919 + i * i * 31 + i) as u8).collect();
        let mut stream = TcpStream::connect(address).unwrap();
        let _ = stream.write_all(&[if seed % 2 == 0 { GREETING } else { b"" }, &noise].concat());
    }
    ask(&plane, &address.to_string(), "still-here");
    plane.close(SOON.into()).unwrap();
}

#[test]
fn half_open_connections_do_not_lock_others_out() {
    let (plane, listener, _) = serve(ControlLimits { connect_timeout: SOON, ..ControlLimits::default() });
    let address = listener.local_address();
    let half_open: Vec<TcpStream> = (0..500).map(|_| TcpStream::connect(address).unwrap()).collect();
    ask(&plane, &address.to_string(), "through-the-crowd");
    drop(half_open);
    plane.close(SOON.into()).unwrap();
}

#[test]
fn a_silent_handshake_is_ended() {
    let (plane, listener, _) = serve(quick());
    let mut stream = TcpStream::connect(listener.local_address()).unwrap();
    stream.set_read_timeout(Some(SOON)).unwrap();
    let mut all = Vec::new();
    stream.read_to_end(&mut all).unwrap();
    assert_eq!(all[..64], *GREETING);
    plane.close(SOON.into()).unwrap();
}

#[test]
fn a_peer_that_does_not_read_blocks_nobody_and_is_dropped() {
    let (plane, listener, service) = serve(quick());
    let (tx, rx) = mpsc::channel();
    *service.gone.lock().unwrap() = Some(tx);
    let address = listener.local_address();
    let mut stream = TcpStream::connect(address).unwrap();
    raw(&mut stream, "DEALER");
    // Each asks for some 800 KB; not a byte is read.
    let abort =
        StreamAbort { stream: "s".to_owned(), generation: None, follower: None, reason: "x".to_owned() };
    let body = Request::StreamAbort(abort).encode().unwrap();
    let mut frame = vec![0, body.len() as u8];
    frame.extend_from_slice(&body);
    stream.write_all(&frame.repeat(40)).unwrap();
    ask(&plane, &address.to_string(), "beside-it");
    rx.recv_timeout(SOON).unwrap();
    plane.close(SOON.into()).unwrap();
}

#[test]
fn a_consumer_that_is_stopped_or_gone_is_noticed() {
    let (plane, listener, service) = serve(quick());
    let (gone, gone_rx) = mpsc::channel();
    let (seen, seen_rx) = mpsc::channel();
    *service.gone.lock().unwrap() = Some(gone);
    *service.seen.lock().unwrap() = Some(seen);
    let body = Request::Ping.encode().unwrap();
    let frame = [&[1, 0, 0, body.len() as u8][..], &body].concat();
    for silent in [true, false] {
        let mut stream = TcpStream::connect(listener.local_address()).unwrap();
        raw(&mut stream, "REQ");
        stream.write_all(&frame).unwrap();
        seen_rx.recv_timeout(SOON).unwrap();
        // Silent: it holds the connection, and answers no PING.
        let held = silent.then_some(stream);
        gone_rx.recv_timeout(SOON).unwrap();
        drop(held);
        assert!(service.kept.lock().unwrap().pop().unwrap().is_closed());
    }
    plane.close(SOON.into()).unwrap();
}

#[test]
fn a_consumer_that_cannot_be_asked_does_not_wait_for_ever() {
    let idle_timeout = Duration::from_millis(200);
    let (plane, listener, service) = serve(ControlLimits { idle_timeout, ..quick() });
    let (gone, gone_rx) = mpsc::channel();
    *service.gone.lock().unwrap() = Some(gone);
    let mut stream = TcpStream::connect(listener.local_address()).unwrap();
    raw_of(&mut stream, "REQ", 0);
    let ping = Request::Ping.encode().unwrap();
    stream.write_all(&[&[1, 0, 0, ping.len() as u8][..], &ping].concat()).unwrap();
    gone_rx.recv_timeout(SOON).unwrap();
    assert!(service.kept.lock().unwrap()[0].is_closed(), "its request was kept, and is given up");
    plane.close(SOON.into()).unwrap();
}

#[test]
fn too_many_requests_of_one_connection_are_refused() {
    let (plane, listener, service) = serve(ControlLimits { max_outstanding: 2, ..ControlLimits::default() });
    let mut stream = TcpStream::connect(listener.local_address()).unwrap();
    stream.set_read_timeout(Some(SOON)).unwrap();
    raw(&mut stream, "DEALER");
    let body = Request::Ping.encode().unwrap();
    let frame = [&[0, body.len() as u8][..], &body].concat();
    stream.write_all(&frame.repeat(3)).unwrap();
    let mut header = [0; 4];
    stream.read_exact(&mut header).unwrap();
    assert_eq!(header[..3], [1, 0, 0], "the empty frame of REQ, then the reply");
    let mut reply = vec![0; header[3].into()];
    stream.read_exact(&mut reply).unwrap();
    let Answer::Refused(refusal) = Answer::decode(&reply).unwrap() else { panic!("not refused") };
    assert_eq!(refusal.code, ErrorKind::QueueFull.code());
    assert_eq!(service.kept.lock().unwrap().len(), 2);
    plane.close(SOON.into()).unwrap();
}

/// A listener that does `then` to whoever connects, until it is dropped.
fn hostile(then: impl Fn(TcpStream) + Send + 'static) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    thread::spawn(move || listener.incoming().for_each(|stream| then(stream.unwrap())));
    address
}

#[test]
fn hostile_listeners_are_harmless() {
    let plane = ControlPlane::start(quick()).unwrap();
    let dialer = plane.dialer();
    let ask = |address: &str| {
        let begin = Instant::now();
        let error = dialer.request_blocking(address, query("k"), SOON.into()).unwrap_err();
        assert!(begin.elapsed() < SOON / 2, "{error}: {:?}", begin.elapsed());
        error
    };
    let held = Arc::new(Mutex::new(Vec::new()));
    let silent = hostile({
        let held = Arc::clone(&held);
        move |stream| held.lock().unwrap().push(stream)
    });
    assert_eq!(ask(&silent).kind(), ErrorKind::PeerUnreachable);
    let http = hostile(|mut stream| drop(stream.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n")));
    assert_eq!(ask(&http).kind(), ErrorKind::Malformed);
    let huge = |len: u64| [&[2][..], &len.to_be_bytes()].concat();
    for len in [1 << 45, 1 << 62, u64::MAX] {
        let early = hostile(move |mut stream| drop(stream.write_all(&[GREETING, &huge(len)].concat())));
        assert_eq!(ask(&early).kind(), ErrorKind::TooLarge);
        let late = hostile(move |mut stream| {
            raw(&mut stream, "ROUTER");
            let _ = stream.write_all(&huge(len));
            let _ = stream.read(&mut [0; 100]);
        });
        assert_eq!(ask(&late).kind(), ErrorKind::TooLarge);
    }
    // Takes the request and says nothing more, not even to a PING: it is stopped.
    let stopped = hostile({
        let held = Arc::clone(&held);
        move |mut stream| {
            raw(&mut stream, "ROUTER");
            held.lock().unwrap().push(stream);
        }
    });
    let error = ask(&stopped);
    assert_eq!(error.kind(), ErrorKind::PeerGone);
    assert!(error.message().contains("silent"), "{error}");
    let closing = hostile(|mut stream| raw(&mut stream, "ROUTER"));
    assert_eq!(ask(&closing).kind(), ErrorKind::PeerGone);
    assert!(format!("{dialer:?}").contains("0 idle"), "none of them is kept");
    plane.close(SOON.into()).unwrap();
}

/// Reads one message of a REQ: an empty frame, then a short one.
fn read_request(stream: &mut TcpStream) {
    let mut head = [0; 4];
    stream.read_exact(&mut head).unwrap();
    assert_eq!(head[..3], [1, 0, 0]);
    stream.read_exact(&mut vec![0; head[3].into()]).unwrap();
}

#[test]
fn a_request_whose_kept_connection_ends_without_a_word_is_sent_once_more() {
    const INFO_NOT_FOUND: &[u8] = b"\x01\0\0\x0einfo_not_found";
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let producer = thread::spawn(move || {
        let accept = || {
            let mut stream = listener.accept().unwrap().0;
            raw(&mut stream, "ROUTER");
            read_request(&mut stream);
            stream
        };
        let mut kept = accept();
        kept.write_all(INFO_NOT_FOUND).unwrap();
        // It ends as an idle one, just as it is used.
        read_request(&mut kept);
        drop(kept);
        let mut kept = accept();
        kept.write_all(INFO_NOT_FOUND).unwrap();
        read_request(&mut kept);
        drop(kept);
        // A new connection that ends so is no idle one.
        drop(accept());
    });
    let plane =
        ControlPlane::start(ControlLimits { liveness: 3 * SOON, ..ControlLimits::default() }).unwrap();
    let dialer = plane.dialer();
    for _ in 0..2 {
        let reply = dialer.request_blocking(&address, query("k"), SOON.into()).unwrap();
        assert_eq!(QueryReply::decode("k", &reply).unwrap(), QueryReply::NotFound);
    }
    let error = dialer.request_blocking(&address, query("k"), SOON.into()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::PeerGone, "{error}");
    producer.join().unwrap();
    plane.close(SOON.into()).unwrap();
}

#[test]
fn a_request_that_is_under_way_when_it_is_sent_once_more_fails_of_the_lost_connection() {
    for kind in [ErrorKind::Busy, ErrorKind::InvalidArgument] {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let refusal = Reply::refused(&Error::new(kind, "under way")).encode(Dialect::Posthorse).unwrap();
        let refusal = [b"\x01\0\0", &[refusal.len() as u8][..], &refusal].concat();
        let producer = thread::spawn(move || {
            let answer = || {
                let mut stream = listener.accept().unwrap().0;
                raw(&mut stream, "ROUTER");
                read_request(&mut stream);
                stream.write_all(&refusal).unwrap();
                stream
            };
            let mut kept = answer();
            // It arrives, and its answer never does.
            read_request(&mut kept);
            drop(kept);
            answer()
        });
        let plane =
            ControlPlane::start(ControlLimits { liveness: 3 * SOON, ..ControlLimits::default() }).unwrap();
        let dialer = plane.dialer();
        let reply = dialer.request_blocking(&address, query("k"), SOON.into()).unwrap();
        assert!(matches!(Answer::decode(&reply).unwrap(), Answer::Refused(_)), "it is the first");
        let error = dialer.request_blocking(&address, query("k"), SOON.into()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::PeerGone, "{error}");
        producer.join().unwrap();
        plane.close(SOON.into()).unwrap();
    }
}

#[test]
fn a_restarted_producer_is_reached_again() {
    let dialling = ControlPlane::start(ControlLimits::default()).unwrap();
    let (first, listener, _) = serve(ControlLimits::default());
    let address = listener.local_address().to_string();
    let dialer = dialling.dialer();
    dialer.request_blocking(&address, query("k"), SOON.into()).unwrap();
    first.close(SOON.into()).unwrap();
    let second = ControlPlane::start(ControlLimits::default()).unwrap();
    let _listener = second.listen(&address, Arc::new(Echo::default())).unwrap();
    dialer.request_blocking(&address, query("k"), SOON.into()).unwrap();
    second.close(SOON.into()).unwrap();
    dialling.close(SOON.into()).unwrap();
}

#[test]
fn a_deadline_ends_an_exchange_and_a_dropped_one_is_given_up() {
    let (plane, listener, service) = serve(ControlLimits::default());
    let (gone, gone_rx) = mpsc::channel();
    let (seen, seen_rx) = mpsc::channel();
    *service.gone.lock().unwrap() = Some(gone);
    *service.seen.lock().unwrap() = Some(seen);
    let address = listener.local_address().to_string();
    let ping = Request::Ping.encode().unwrap();
    let dialer = plane.dialer();
    let deadline = Deadline::after(Duration::from_millis(50));
    let error = dialer.request_blocking(&address, ping.clone(), deadline).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::DeadlineExceeded);
    seen_rx.recv_timeout(SOON).unwrap();
    gone_rx.recv_timeout(SOON).unwrap();
    let exchange = dialer.request(&address, ping, Deadline::NEVER);
    seen_rx.recv_timeout(SOON).unwrap();
    drop(exchange);
    gone_rx.recv_timeout(SOON).unwrap();
    plane.close(SOON.into()).unwrap();
}

#[test]
fn a_deadline_that_ends_before_there_is_a_connection_says_so() {
    let (plane, listener, service) =
        serve(ControlLimits { max_connections_per_address: 1, ..Default::default() });
    let (seen, seen_rx) = mpsc::channel();
    *service.seen.lock().unwrap() = Some(seen);
    let address = listener.local_address().to_string();
    let dialer = plane.dialer();
    let waits = dialer.request(&address, Request::Ping.encode().unwrap(), SOON.into());
    seen_rx.recv_timeout(SOON).unwrap();
    let error = dialer.request_blocking(&address, query("k"), Deadline::after(Duration::from_millis(50)));
    let error = error.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::DeadlineExceeded);
    assert!(error.message().contains(&format!("a connection to {address}, and none was made")), "{error}");
    drop(waits);
    plane.close(SOON.into()).unwrap();
}

#[test]
fn closing_is_bounded_idempotent_and_ends_what_waits() {
    let (plane, listener, service) = serve(ControlLimits::default());
    let (seen, seen_rx) = mpsc::channel();
    *service.seen.lock().unwrap() = Some(seen);
    let address = listener.local_address().to_string();
    let dialer = plane.dialer();
    let waiting = thread::spawn({
        let (dialer, address) = (dialer.clone(), address.clone());
        move || dialer.request_blocking(&address, Request::Ping.encode().unwrap(), Deadline::NEVER)
    });
    seen_rx.recv_timeout(SOON).unwrap();
    plane.close(SOON.into()).unwrap();
    plane.close(SOON.into()).unwrap();
    let error = waiting.join().unwrap().unwrap_err();
    assert!(matches!(error.kind(), ErrorKind::Closed | ErrorKind::PeerGone), "{error}");
    assert_eq!(
        dialer.request_blocking(&address, query("k"), SOON.into()).unwrap_err().kind(),
        ErrorKind::Closed
    );
}

#[test]
fn an_exchange_is_a_future_of_any_executor() {
    let (plane, listener, _) = serve(ControlLimits::default());
    let address = listener.local_address().to_string();
    let cancel = Request::Cancel(Cancel {
        consumer: "c".to_owned(),
        incarnation: posthorse_core::Incarnation(1),
        pull: 1,
    });
    let exchange = plane.dialer().request(&address, cancel.encode().unwrap(), SOON.into());
    let reply = tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(exchange).unwrap();
    assert!(matches!(Answer::decode(&reply).unwrap(), Answer::Refused(_)));
    plane.close(SOON.into()).unwrap();
}

/// Sends a request over a raw connection whose handshake is done.
fn send(stream: &mut TcpStream, request: &Request) {
    let body = request.encode().unwrap();
    stream.write_all(&[&[1, 0, 0, body.len() as u8][..], &body].concat()).unwrap();
}

#[test]
fn connections_to_peers_that_are_never_asked_again_are_closed_though_no_other_answers() {
    let cache_timeout = Duration::from_millis(1);
    let plane = ControlPlane::start(ControlLimits { cache_timeout, ..ControlLimits::default() }).unwrap();
    let peer = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = peer.local_addr().unwrap().to_string();
    let answering = thread::spawn(move || {
        let (mut stream, _) = peer.accept().unwrap();
        raw(&mut stream, "ROUTER");
        let mut header = [0; 4];
        stream.read_exact(&mut header).unwrap();
        stream.read_exact(&mut vec![0; header[3].into()]).unwrap();
        stream.write_all(&[1, 0, 0, 2, b'o', b'k']).unwrap();
        stream
    });
    let dialer = plane.dialer();
    let ping = || Request::Ping.encode().unwrap();
    assert_eq!(dialer.request_blocking(&address, ping(), SOON.into()).unwrap(), b"ok");
    let mut stream = answering.join().unwrap();
    stream.set_nonblocking(true).unwrap();
    // Its port is closed: nobody answers there.
    let until = Instant::now() + SOON;
    while stream.read(&mut [0]).is_err() {
        assert!(Instant::now() < until, "the connection is kept");
        dialer.request_blocking(&address, ping(), SOON.into()).unwrap_err();
    }
    plane.close(SOON.into()).unwrap();
}

#[test]
fn unfinished_messages_share_a_bound_and_hold_up_no_other() {
    const LONGEST: usize = 64 << 10;
    let limits =
        ControlLimits { max_message_bytes: LONGEST, max_partial_bytes: LONGEST, ..ControlLimits::default() };
    let (plane, listener, _) = serve(limits);
    let mut begun = [(); 2].map(|()| {
        let mut stream = TcpStream::connect(listener.local_address()).unwrap();
        raw(&mut stream, "REQ");
        let header = [&[2][..], &(LONGEST as u64).to_be_bytes()].concat();
        stream.write_all(&[&header[..], &[0; LONGEST * 2 / 3]].concat()).unwrap();
        stream.set_nonblocking(true).unwrap();
        stream
    });
    let is_open = |stream: &mut TcpStream| match stream.read(&mut [0]) {
        Err(error) => error.kind() == std::io::ErrorKind::WouldBlock,
        Ok(read) => read > 0,
    };
    let until = Instant::now() + SOON;
    while begun.iter_mut().all(is_open) {
        assert!(Instant::now() < until, "both are held");
    }
    let address = listener.local_address().to_string();
    plane.dialer().request_blocking(&address, query("k"), SOON.into()).unwrap();
    assert!(begun.iter_mut().any(is_open), "one of them has its room");
    plane.close(SOON.into()).unwrap();
}

#[test]
fn a_message_that_is_begun_and_not_ended_is_given_up() {
    let (plane, listener, _) = serve(quick());
    let mut stream = TcpStream::connect(listener.local_address()).unwrap();
    stream.set_read_timeout(Some(SOON)).unwrap();
    raw(&mut stream, "REQ");
    // An empty frame, and the begin of a long one: a byte now and then does not keep it.
    stream.write_all(&[1, 0, 2, 0, 0, 0, 0, 0, 1, 0, 0, b'x']).unwrap();
    stream.set_nonblocking(true).unwrap();
    let until = Instant::now() + SOON;
    loop {
        assert!(Instant::now() < until, "it is kept");
        let _ = stream.write(b"x");
        match stream.read(&mut [0; 64]) {
            Ok(0) => break,
            Err(error) if error.kind() != std::io::ErrorKind::WouldBlock => break,
            _ => thread::park_timeout(Duration::from_millis(10)),
        }
    }
    // One without a request, and one that waits for its answer, stay.
    let mut quiet = TcpStream::connect(listener.local_address()).unwrap();
    raw(&mut quiet, "REQ");
    thread::park_timeout(Duration::from_millis(600));
    let ask = query("k");
    quiet.write_all(&[&[1, 0, 0, ask.len() as u8][..], &ask].concat()).unwrap();
    quiet.set_read_timeout(Some(SOON)).unwrap();
    assert!(quiet.read(&mut [0; 64]).unwrap() > 0);
    plane.close(SOON.into()).unwrap();
}

#[test]
fn connections_that_never_ask_give_way_and_who_finds_no_room_is_told() {
    let limits = ControlLimits { max_connections: 3, ..ControlLimits::default() };
    let (plane, listener, service) = serve(limits);
    let (seen, seen_rx) = mpsc::channel();
    *service.seen.lock().unwrap() = Some(seen);
    let address = listener.local_address();
    let connect = || {
        let mut stream = TcpStream::connect(address).unwrap();
        stream.set_read_timeout(Some(SOON)).unwrap();
        raw(&mut stream, "REQ");
        stream
    };
    let mut waiting = connect();
    send(&mut waiting, &Request::Ping);
    seen_rx.recv_timeout(SOON).unwrap();
    let (mut oldest, mut other) = (connect(), connect());
    // The oldest goes that never asked.
    let mut asking = connect();
    assert_eq!(oldest.read(&mut [0]).unwrap(), 0);
    send(&mut asking, &Request::Ping);
    seen_rx.recv_timeout(SOON).unwrap();
    // Then the other, which has its time to ask first.
    let until = Instant::now() + SOON;
    let dialer = plane.dialer();
    let last = 'asked: loop {
        let mut exchange = dialer.request(&address.to_string(), Request::Ping.encode().unwrap(), SOON.into());
        loop {
            assert!(Instant::now() < until);
            if seen_rx.try_recv().is_ok() {
                break 'asked exchange;
            }
            let polled = Pin::new(&mut exchange).poll(&mut Context::from_waker(Waker::noop()));
            if let Poll::Ready(refused) = polled {
                assert_eq!(refused.unwrap_err().kind(), ErrorKind::LimitReached);
                break;
            }
            thread::yield_now();
        }
    };
    assert_eq!(other.read(&mut [0]).unwrap(), 0);
    // All that are there wait for their answers now.
    let error = plane.dialer().request_blocking(&address.to_string(), query("k"), SOON.into()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::LimitReached, "{error}");
    assert!(error.message().contains("3 control connections"), "{error}");
    for responder in service.kept.lock().unwrap().drain(..) {
        assert!(!responder.is_closed());
        responder.reply(&Reply::Ok);
    }
    for stream in [&mut waiting, &mut asking] {
        stream.read_exact(&mut [0; 5]).unwrap();
    }
    let reply = tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(last).unwrap();
    assert_eq!(Answer::decode(&reply).unwrap(), Answer::Ok);
    plane.close(SOON.into()).unwrap();
}

#[test]
fn connections_that_have_long_been_idle_give_way() {
    let limits = ControlLimits { max_connections: 2, liveness: Duration::from_millis(50), ..quick() };
    let (plane, listener, service) = serve(limits);
    let (seen, seen_rx) = mpsc::channel();
    *service.seen.lock().unwrap() = Some(seen);
    let address = listener.local_address();
    let idle: Vec<_> = (0..2)
        .map(|_| {
            let mut stream = TcpStream::connect(address).unwrap();
            raw(&mut stream, "REQ");
            send(
                &mut stream,
                &Request::Cancel(Cancel {
                    consumer: "c".to_owned(),
                    incarnation: posthorse_core::Incarnation(1),
                    pull: 1,
                }),
            );
            seen_rx.recv_timeout(SOON).unwrap();
            stream.read_exact(&mut [0; 5]).unwrap();
            stream
        })
        .collect();
    let until = Instant::now() + SOON;
    let dialer = plane.dialer();
    while let Err(error) = dialer.request_blocking(&address.to_string(), query("k"), SOON.into()) {
        assert!(error.kind() == ErrorKind::LimitReached && Instant::now() < until, "{error}");
    }
    drop(idle);
    plane.close(SOON.into()).unwrap();
}

#[test]
fn a_request_that_is_dropped_while_the_listener_closes_is_told_so() {
    let (plane, listener, service) = serve(ControlLimits::default());
    let (seen, seen_rx) = mpsc::channel();
    *service.seen.lock().unwrap() = Some(seen);
    let address = listener.local_address().to_string();
    let exchange = plane.dialer().request(&address, Request::Ping.encode().unwrap(), SOON.into());
    seen_rx.recv_timeout(SOON).unwrap();
    let kept = loop {
        if let Some(kept) = service.kept.lock().unwrap().pop() {
            break kept;
        }
    };
    listener.close();
    drop(kept);
    let reply = tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(exchange).unwrap();
    let Answer::Refused(refusal) = Answer::decode(&reply).unwrap() else { panic!("not refused") };
    assert_eq!(refusal.code, ErrorKind::Closed.code());
    plane.close(SOON.into()).unwrap();
}
