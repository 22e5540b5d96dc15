use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use posthorse_core::{Attributes, Deadline, Features, Hello, SegmentDesc, Transport as _, TransportContext};
use posthorse_segment::Registry;
use posthorse_testkit::{ControlHub, Events};

use super::*;
use crate::software::Fabric;
use crate::{RdmaConfig, RdmaTransport};

/// Two transports, and the first one's connection to the second.
struct Pair {
    left: RdmaTransport,
    _right: RdmaTransport,
    shared: Arc<Shared>,
    connection: Arc<Connection>,
}

impl Pair {
    fn new() -> Self {
        let (fabric, control) = (Fabric::new(), ControlHub::new());
        let hello = Hello::new(Features::NONE, None);
        let start = |name: &str, life| {
            let host = fabric.host(&["soft0"]);
            let transport = RdmaTransport::with_verbs(RdmaConfig::default(), host).unwrap();
            let context = TransportContext {
                name: name.into(),
                incarnation: Incarnation(life),
                hello: hello.clone(),
                gate: Arc::new(Registry::new()),
                events: Arc::new(Events::new()),
                control: control.channel(name),
            };
            let published = transport.start(context).unwrap();
            let desc = SegmentDesc {
                name: name.to_owned(),
                incarnation: Some(Incarnation(life)),
                hello: Some(hello.clone()),
                transports: Attributes::from([("rdma".to_owned(), published)]),
                buffers: Vec::new(),
            };
            (transport, desc)
        };
        let ((left, _), (right, desc)) = (start("left.test:1", 1), start("right.test:1", 2));
        let paths = left.connect(&desc, Deadline::after(Duration::from_secs(20))).unwrap();
        let shared = left.shared().unwrap();
        let connection = shared.connection(paths[0].id.0).unwrap();
        Self { left, _right: right, shared, connection }
    }

    fn set(&self, phase: Phase) {
        self.connection.state.lock().phase = phase;
    }
}

fn failed() -> Error {
    Error::new(ErrorKind::PathFailed, "a test")
}

#[test]
fn whoever_is_to_arm_the_queue_waits_for_its_turn() {
    let pair = Pair::new();
    let helping = pair.connection.polling.lock();
    let (tell, told) = mpsc::channel();
    thread::scope(|scope| {
        scope.spawn(|| {
            pair.connection.progress(&pair.shared, true);
            tell.send(()).unwrap();
        });
        let early = told.recv_timeout(Duration::from_millis(50));
        assert!(early.is_err(), "it went away, and nobody is told of the next completion");
        assert!(!pair.connection.progress(&pair.shared, false), "whoever helps does not wait");
        drop(helping);
        told.recv().unwrap();
    });
}

#[test]
fn what_is_being_ended_is_not_made_anew() {
    let pair = Pair::new();
    pair.set(Phase::Ending(failed()));
    pair.connection.try_again(&pair.shared);
    assert!(matches!(pair.connection.state.lock().phase, Phase::Ending(_)));
    pair.set(Phase::Down(failed()));
    pair.connection.try_again(&pair.shared);
    assert!(matches!(pair.connection.state.lock().phase, Phase::Ready));
}

#[test]
fn a_path_that_is_tried_again_says_that_it_is_down() {
    let pair = Pair::new();
    for phase in [Phase::Trying(failed()), Phase::Ending(failed()), Phase::Down(failed())] {
        pair.set(phase);
        // SAFETY: there are no slices.
        let refused = unsafe { pair.connection.submit(&pair.shared, &[]) };
        assert_eq!(refused.unwrap_err().kind(), ErrorKind::PathFailed);
        assert!(pair.connection.down().is_some());
    }
}

#[test]
fn a_completion_queue_that_is_lost_takes_its_path_down_and_not_for_ever() {
    let pair = Pair::new();
    pair.connection.queue_failed(&pair.shared, Error::new(ErrorKind::Io, "completions were lost"));
    let error = pair.connection.down().unwrap();
    assert_eq!((error.kind(), error.message()), (ErrorKind::PathFailed, "completions were lost"));
    until(|| pair.connection.down().is_none());
}

#[test]
fn what_was_disconnected_is_forgotten_when_nothing_is_left_of_it() {
    let pair = Pair::new();
    pair.left.disconnect(pair.connection.path());
    until(|| pair.shared.connection(pair.connection.number).is_none());
}

/// Waits for what other threads bring about.
fn until(done: impl Fn() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(20);
    while !done() {
        assert!(Instant::now() < deadline, "it does not come about");
        thread::yield_now();
    }
}
