//! What only shows from within.

use std::thread;

use super::*;
use crate::config::Role;
use crate::key::Edge;
use crate::message::{Answer, StreamAbort, StreamCredit, StreamSent};

pub(super) fn soon() -> Deadline {
    Deadline::after(Duration::from_secs(20))
}

pub(super) fn edge() -> Edge {
    Edge::new(0, 1)
}

fn config(role: Role) -> ConnectorConfig {
    ConnectorConfig {
        role,
        host: "127.0.0.1".to_owned(),
        advertise_host: Some("127.0.0.1".to_owned()),
        zmq_port: 0,
        memory_pool_size: 16 << 20,
        ..ConnectorConfig::default()
    }
}

/// Waits for what comes about in the background.
fn eventually(what: &str, mut is_so: impl FnMut() -> bool) {
    let until = Instant::now() + Duration::from_secs(15);
    while !is_so() {
        assert!(Instant::now() < until, "{what} did not come about");
        thread::park_timeout(Duration::from_millis(1));
    }
}

pub(super) struct Pair {
    pub(super) sender: Connector,
    receiver: Connector,
    address: String,
}

impl Pair {
    pub(super) fn new(change: impl Fn(&mut ConnectorConfig)) -> Self {
        let mut of_sender = config(Role::Sender);
        change(&mut of_sender);
        let sender = Connector::builder().config(of_sender).build().unwrap();
        let (host, port) = sender.address().unwrap();
        let mut of_receiver = config(Role::Receiver);
        change(&mut of_receiver);
        (of_receiver.sender_host, of_receiver.sender_zmq_port) = (Some(host), Some(port));
        let receiver = Connector::builder().config(of_receiver).build().unwrap();
        Self { sender, receiver, address: format!("127.0.0.1:{port}") }
    }

    /// The producer answers a request of the consumer's.
    fn ask(&self, request: &Request) -> Vec<u8> {
        let request = request.encode().unwrap();
        self.receiver.inner().dialer.request_blocking(&self.address, request, soon()).unwrap()
    }

    pub(super) fn tell(&self, request: &Request) -> Answer {
        Answer::decode(&self.ask(request)).unwrap()
    }

    fn put(&self, key: &str, payload: &[u8]) {
        self.sender.put(&edge(), key, payload, PutOptions::default()).unwrap();
    }

    fn get(&self, key: &str) -> Result<Received> {
        self.receiver.get(&edge(), key, GetOptions::until(soon()))
    }

    fn assert_whole(&self) {
        for connector in [&self.sender, &self.receiver] {
            eventually("a whole pool", || {
                let health = connector.health();
                health.pool.is_whole() && health.withheld == 0
            });
        }
    }
}

#[test]
fn what_is_said_of_an_older_stream_does_not_concern_the_next_of_its_name() {
    let pair = Pair::new(|_| {});
    let stream = edge().qualify("r").unwrap();
    let credit = |generation, limit| {
        let stream = stream.clone();
        pair.tell(&Request::StreamCredit(StreamCredit { stream, generation, limit }))
    };
    let abort = |generation| {
        let (stream, reason) = (stream.clone(), "enough".to_owned());
        pair.tell(&Request::StreamAbort(StreamAbort { stream, generation, reason }))
    };
    let generation = |answer| match answer {
        Answer::Stream(StreamSent { generation, .. }) => Some(generation),
        answer => panic!("no stream: {answer:?}"),
    };
    let is_unknown =
        |answer| matches!(answer, Answer::Refused(why) if why.code == ErrorKind::NotFound as u16);
    let mut older = pair.sender.open_stream(&edge(), "r").unwrap();
    let first = generation(credit(None, 1));
    assert_eq!(abort(first), Answer::Ok);
    assert_eq!(older.send(&b"x"[..], soon()).unwrap_err().kind(), ErrorKind::Aborted);
    let mut newer = pair.sender.open_stream(&edge(), "r").unwrap();
    assert!(is_unknown(credit(first, 1)) && is_unknown(abort(first)));
    newer.send(&b"x"[..], soon()).unwrap();
    let second = generation(credit(None, 1));
    assert_ne!(first, second);
    assert_eq!(generation(credit(second, 2)), second);
    // An older consumer names none.
    assert_eq!(abort(None), Answer::Ok);
    assert_eq!(newer.send(&b"x"[..], soon()).unwrap_err().kind(), ErrorKind::Aborted);
    drop((older, newer));
    pair.assert_whole();
}

#[test]
fn a_consumer_speaks_as_often_as_its_producer_demands() {
    let pair = Pair::new(|config| {
        config.liveness_ms = if config.role == Role::Sender { 300 } else { 60_000 };
    });
    pair.put("k", &vec![1; 8 << 20]);
    let full = pair.receiver.alloc(12 << 20, soon()).unwrap();
    let mut followed = pair.receiver.follow_stream(&edge(), "r", FollowOptions::default()).unwrap();
    let mut stream = pair.sender.open_stream(&edge(), "r").unwrap();
    stream.send(&b"x"[..], soon()).unwrap();
    drop(followed.next(soon()).unwrap().unwrap());
    thread::scope(|scope| {
        let getter = scope.spawn(|| pair.get("k").unwrap().len());
        eventually("the wait for room", || pair.receiver.health().pool.waiting == 1);
        let until = Instant::now() + Duration::from_millis(1200);
        while Instant::now() < until {
            assert_eq!(pair.sender.health().offers.claims, 1, "its place was given away");
            thread::park_timeout(Duration::from_millis(20));
        }
        drop(full);
        assert_eq!(getter.join().unwrap(), 8 << 20);
    });
    stream.send(&b"x"[..], soon()).unwrap();
    drop(followed.next(soon()).unwrap().unwrap());
    drop((stream, followed));
    pair.assert_whole();
}
