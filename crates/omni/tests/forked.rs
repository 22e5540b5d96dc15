//! Connectors in a forked child, which has none of their threads and not their memory.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

mod common;

use std::future::Future;
use std::num::NonZeroU32;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Waker};
use std::thread;
use std::time::Duration;

use common::{Pair, build, config, edge, eventually, soon};
use posthorse_buffer::ManagedBuffer;
use posthorse_core::{Deadline, Error, ErrorKind, Result};
use posthorse_omni::config::Role;
use posthorse_omni::control::{ControlLimits, ControlPlane, Peer, Responder, Service};
use posthorse_omni::message::Request;
use posthorse_omni::{
    Connector, FollowOptions, GetOptions, PutOptions, Received, Source, StreamReceiver, StreamSender,
};
use posthorse_testkit::{IdleChild, assert_in_forked_child};

/// Each fork finds the other threads somewhere else.
const FORKS: usize = 4;

/// A producer and a consumer on one host, and everything that they give out.
struct World {
    pair: Pair,
    buffer: ManagedBuffer,
    own: Received,
    leased: Received,
    value: Received,
    sending: StreamSender,
    receiving: StreamReceiver,
}

impl World {
    fn new() -> Self {
        let pair = Pair::with(|config| {
            common::require(config, "shm");
            config.memory_pool_size = 4 << 20;
        });
        pair.put("own", b"own");
        pair.put("leased", b"leased");
        pair.sender.put_value(&edge(), "value", &7, PutOptions::default()).unwrap();
        let lease = GetOptions { lease: true, ..GetOptions::until(soon()) };
        let mut sending = pair.sender.open_stream(&edge(), "stream").unwrap();
        sending.send(&b"first"[..], soon()).unwrap();
        let mut receiving = pair.receiver.follow_stream(&edge(), "stream", FollowOptions::default()).unwrap();
        assert_eq!(receiving.next(soon()).unwrap().unwrap().bytes().unwrap(), b"first");
        Self {
            buffer: pair.sender.alloc(100, soon()).unwrap(),
            own: pair.get("own").unwrap(),
            leased: pair.receiver.get(&edge(), "leased", lease).unwrap(),
            value: pair.get("value").unwrap(),
            sending,
            receiving,
            pair,
        }
    }

    /// All of it still works here.
    fn assert_well(mut self) {
        self.buffer.copy_from_slice(&[1; 100]).unwrap();
        self.pair.sender.put(&edge(), "buffer", self.buffer, PutOptions::default()).unwrap();
        assert_eq!(self.pair.get("buffer").unwrap().bytes().unwrap(), [1; 100]);
        assert_eq!((self.own.bytes().unwrap(), self.leased.bytes().unwrap()), (&b"own"[..], &b"leased"[..]));
        assert_eq!(self.value.value::<i32>().unwrap(), 7);
        self.sending.send(&b"last"[..], soon()).unwrap();
        self.sending.end().unwrap();
        assert_eq!(self.receiving.next(soon()).unwrap().unwrap().bytes().unwrap(), b"last");
        assert!(self.receiving.next(soon()).unwrap().is_none());
        drop((self.own, self.leased, self.value, self.receiving));
        self.pair.assert_whole();
    }
}

/// Threads that keep a producer and its own consumers busy, until this is dropped.
struct Busy {
    stop: Arc<AtomicBool>,
    threads: Vec<thread::JoinHandle<()>>,
}

impl Busy {
    fn with(producer: &Connector) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let options = PutOptions { consumers: NonZeroU32::new(u32::MAX), ..PutOptions::default() };
        // The ticket is all they have of the producer, so that the last handle is whoever drops it.
        let ticket = producer.put(&edge(), "busy", &[9; 5000][..], options).unwrap();
        let threads = [false, true].map(|lease| {
            let (stop, ticket) = (Arc::clone(&stop), ticket.clone());
            thread::spawn(move || {
                let consumer = build(config(Role::Receiver));
                while !stop.load(Ordering::Relaxed) {
                    let source = Source::Ticket(&ticket);
                    let got = consumer.get(
                        &edge(),
                        "busy",
                        GetOptions { source, lease, ..GetOptions::until(soon()) },
                    );
                    assert_eq!(got.unwrap().bytes().unwrap(), [9; 5000]);
                }
            })
        });
        eventually("a get", || producer.health().offers.offers > 0);
        Self { stop, threads: threads.into() }
    }

    fn stop(self) {
        self.stop.store(true, Ordering::Relaxed);
        self.threads.into_iter().for_each(|thread| thread.join().unwrap());
    }
}

fn forked<T>(outcome: Result<T>) -> bool {
    outcome.is_err_and(|error| error.kind() == ErrorKind::Forked)
}

/// For what a child that waited would wait for in vain.
fn until() -> GetOptions<'static> {
    GetOptions::until(Deadline::NEVER)
}

fn polls_forked<T>(future: impl Future<Output = Result<T>>) -> bool {
    match pin!(future).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(outcome) => forked(outcome),
        Poll::Pending => false,
    }
}

#[test]
fn every_call_of_a_forked_child_answers_forked() {
    type Call = (&'static str, fn(&mut World) -> bool);
    let calls: [Call; 24] = [
        ("alloc", |w| forked(w.pair.sender.alloc(10, Deadline::NEVER))),
        ("fill", |w| forked(w.buffer.bytes_mut().map(|bytes| bytes.fill(1)))),
        ("bytes of a buffer", |w| forked(w.buffer.bytes())),
        ("put", |w| forked(w.pair.sender.put(&edge(), "x", &b"x"[..], PutOptions::default()))),
        ("put_value", |w| forked(w.pair.sender.put_value(&edge(), "x", &1, PutOptions::default()))),
        ("retain", |w| forked(w.pair.sender.retain(&edge(), "busy", 1))),
        ("cleanup", |w| forked(w.pair.sender.cleanup(&edge(), "busy"))),
        ("address", |w| forked(w.pair.sender.address())),
        ("get", |w| forked(w.pair.receiver.get(&edge(), "busy", until()))),
        ("try_get", |w| forked(w.pair.receiver.try_get(&edge(), "busy", until()))),
        ("get_async", |w| polls_forked(w.pair.receiver.get_async(&edge(), "busy", until()))),
        ("bytes of what was got", |w| forked(w.own.bytes())),
        ("bytes of what is leased", |w| forked(w.leased.bytes())),
        ("value", |w| forked(w.value.value::<i32>())),
        ("open_stream", |w| forked(w.pair.sender.open_stream(&edge(), "other"))),
        ("send", |w| forked(w.sending.send(&b"x"[..], Deadline::NEVER)) && w.sending.sent() == 1),
        ("ready", |w| polls_forked(w.sending.ready(Deadline::NEVER))),
        ("follow_stream", |w| {
            forked(w.pair.receiver.follow_stream(&edge(), "other", FollowOptions::default()))
        }),
        ("next", |w| forked(w.receiving.next(Deadline::NEVER))),
        ("next_async", |w| polls_forked(w.receiving.next_async(Deadline::NEVER))),
        ("health", |w| {
            let health = w.pair.sender.health();
            !health.open && health.offers.offers == 0 && health.withheld == 0
        }),
        ("engine", |w| {
            let engine = w.pair.receiver.engine();
            forked(engine.open(w.pair.sender.engine().name(), Deadline::NEVER)) && forked(engine.local())
        }),
        ("close", |w| {
            w.pair.sender.close();
            w.pair.receiver.close();
            forked(w.pair.sender.alloc(10, Deadline::NEVER))
        }),
        ("Debug", |w| !format!("{:?} {:?} {:?}", w.pair.sender, w.sending, w.leased).is_empty()),
    ];
    let mut world = World::new();
    let busy = Busy::with(&world.pair.sender);
    for (name, call) in calls {
        println!("{name}");
        for _ in 0..FORKS {
            // SAFETY: the connector answers before it takes any lock, which is what is tested.
            unsafe { assert_in_forked_child(|| call(&mut world)) };
        }
    }
    busy.stop();
    world.pair.sender.cleanup(&edge(), "busy").unwrap();
    world.assert_well();
}

#[test]
fn what_a_forked_child_drops_does_nothing() {
    type Drops = (&'static str, fn(World));
    let drops: [Drops; 3] = [
        ("the connectors last", |world| {
            let World { pair, buffer, own, leased, value, sending, receiving } = world;
            drop((buffer, own, leased, value, sending, receiving));
            drop(pair);
        }),
        ("the connectors first", |world| {
            let World { pair, buffer, own, leased, value, sending, receiving } = world;
            drop(pair);
            drop((receiving, sending, value, leased, own, buffer));
        }),
        ("by calls", |world| {
            world.pair.sender.close();
            drop(world.sending.fail(&Error::new(ErrorKind::Aborted, "in a child")));
            world.receiving.abort("in a child");
            world.leased.release();
            world.own.release();
            world.buffer.release();
        }),
    ];
    let world = World::new();
    let busy = Busy::with(&world.pair.sender);
    // Taken by the child, which drops it; the parent keeps its own.
    let mut held = Some(world);
    for (name, drops) in drops {
        println!("{name}");
        for _ in 0..FORKS {
            let child = || held.take().map(drops).is_some();
            // SAFETY: what is dropped takes no lock, which is what is tested.
            unsafe { assert_in_forked_child(child) };
        }
    }
    busy.stop();
    let world = held.unwrap();
    world.pair.sender.cleanup(&edge(), "busy").unwrap();
    world.assert_well();
}

#[test]
fn what_a_parent_awaits_answers_forked_in_its_child() {
    let (world, edge) = (World::new(), edge());
    let busy = Busy::with(&world.pair.sender);
    let mut receiving = world.pair.receiver.follow_stream(&edge, "never", FollowOptions::default()).unwrap();
    let mut context = Context::from_waker(Waker::noop());
    {
        let mut futures = Some((
            Box::pin(world.pair.receiver.get_async(&edge, "never", until())),
            Box::pin(receiving.next_async(Deadline::NEVER)),
        ));
        let (get, next) = futures.as_mut().unwrap();
        assert!(get.as_mut().poll(&mut context).is_pending());
        assert!(next.as_mut().poll(&mut context).is_pending());
        for polls in [true, false] {
            let child = || {
                let Some((get, next)) = futures.take() else { return false };
                !polls || (polls_forked(get) & polls_forked(next))
            };
            // SAFETY: the futures answer, and are dropped, before they take any lock, which is what is tested.
            unsafe { assert_in_forked_child(child) };
        }
    }
    drop(receiving);
    busy.stop();
    world.pair.sender.cleanup(&edge, "busy").unwrap();
    world.assert_well();
}

#[test]
fn a_control_plane_is_left_alone_by_a_forked_child() {
    /// Keeps what it is asked, and never answers.
    #[derive(Default)]
    struct Silent(parking_lot::Mutex<Vec<Responder>>);

    impl Service for Silent {
        fn handle(&self, _: &Peer, request: Request, responder: Responder) {
            match request {
                Request::Health => self.0.lock().push(responder),
                _ => responder.refuse(&Error::new(ErrorKind::Unsupported, "not here")),
            }
        }
    }

    let plane = ControlPlane::start(ControlLimits::default()).unwrap();
    let silent = Arc::new(Silent::default());
    let listener = plane.listen("127.0.0.1:0", Arc::clone(&silent) as Arc<dyn Service>).unwrap();
    let (dialer, address) = (plane.dialer(), listener.local_address().to_string());
    let ping = || Request::Ping.encode().unwrap();
    dialer.request_blocking(&address, ping(), soon()).unwrap();
    let exchange = dialer.request(&address, Request::Health.encode().unwrap(), soon());
    eventually("a request", || !silent.0.lock().is_empty());
    let responder = silent.0.lock().pop().unwrap();
    let mut held = Some((plane, listener, dialer, exchange, responder));
    let child = || {
        let Some((plane, listener, dialer, mut exchange, responder)) = held.take() else { return false };
        let well = forked(plane.listen("127.0.0.1:0", Arc::clone(&silent) as Arc<dyn Service>))
            && forked(dialer.request_blocking(&address, ping(), Deadline::NEVER))
            && polls_forked(&mut exchange)
            && forked(plane.close(Deadline::NEVER));
        responder.refuse(&Error::new(ErrorKind::Unsupported, "of the child"));
        listener.close();
        drop((exchange, listener, dialer, plane));
        well
    };
    // SAFETY: what is called and dropped takes no lock, which is what is tested.
    unsafe { assert_in_forked_child(child) };
    let (_plane, _listener, dialer, exchange, responder) = held.unwrap();
    dialer.request_blocking(&address, ping(), soon()).unwrap();
    responder.refuse(&Error::new(ErrorKind::Unsupported, "of the parent"));
    let until = std::time::Instant::now() + Duration::from_secs(20);
    let mut exchange = pin!(exchange);
    let reply = loop {
        if let Poll::Ready(reply) = exchange.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
            break reply.unwrap();
        }
        assert!(std::time::Instant::now() < until);
        thread::yield_now();
    };
    assert!(String::from_utf8_lossy(&reply).contains("of the parent"));
}

#[test]
fn what_a_child_holds_keeps_no_port_bound_and_nobody_waiting() {
    let pair = Pair::with(|config| {
        common::require(config, "tcp");
        config.memory_pool_size = 4 << 20;
        // Nobody finds out by silence in the time of this test.
        config.liveness_ms = 600_000;
    });
    let (_, port) = pair.sender.address().unwrap();
    let waiting = thread::spawn({
        let receiver = pair.receiver.clone();
        move || receiver.get(&edge(), "never", GetOptions::until(soon()))
    });
    eventually("the wait", || pair.sender.health().offers.parked == 1);
    let _child = IdleChild::fork();
    pair.sender.close();
    assert_eq!(waiting.join().unwrap().unwrap_err().kind(), ErrorKind::PeerGone);
    assert_eq!(pair.get("new").unwrap_err().kind(), ErrorKind::PeerUnreachable);
    let again = build(posthorse_omni::ConnectorConfig {
        zmq_port: port,
        memory_pool_size: 4 << 20,
        ..config(Role::Sender)
    });
    again.put(&edge(), "new", &b"x"[..], PutOptions::default()).unwrap();
    assert_eq!(again.address().unwrap().1, port);
}
