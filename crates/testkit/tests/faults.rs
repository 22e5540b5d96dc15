//! The faults that a plan asks for happen, and nothing else does.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::sync::Arc;
use std::time::Duration;

use posthorse_core::{
    Access, Checksum, Deadline, ErrorKind, FarEnd, Features, GrantToken, Hello, Incarnation, Level, Opcode,
    PathId, PathState, Priority, Region, RemoteKey, SegmentDesc, Slice, Transport, TransportContext,
};
use posthorse_segment::Registry;
use posthorse_testkit::conformance::Subject;
use posthorse_testkit::memory::{self, HeapRegion};
use posthorse_testkit::{
    ControlHub, Disturbance, Events, Failure, Fault, FaultRates, FaultTransport, MemoryHub, Plan, pattern,
};
use proptest::prelude::*;

posthorse_testkit::conformance!({
    // Without faults it is its inner transport.
    let hub = MemoryHub::new();
    Subject::new(move || FaultTransport::new(hub.transport(), Plan::none()))
});

const SIZE: usize = 64;
const COUNT: usize = 40;

fn soon() -> Deadline {
    Deadline::after(Duration::from_secs(30))
}

/// A fault transport with a path to a peer, and memory at both ends.
struct Rig {
    transport: Arc<FaultTransport>,
    peer: Arc<dyn Transport>,
    events: Arc<Events>,
    path: PathId,
    local: Arc<HeapRegion>,
    remote: Arc<HeapRegion>,
    token: GrantToken,
}

fn start(
    transport: &dyn Transport,
    name: &str,
    registry: &Arc<Registry>,
    events: &Arc<Events>,
) -> SegmentDesc {
    let context = TransportContext {
        name: name.into(),
        incarnation: Incarnation(1),
        hello: Hello::new(Features::NONE, None),
        gate: Arc::clone(registry) as _,
        events: Arc::clone(events) as _,
        control: ControlHub::new().channel(name),
    };
    let published = transport.start(context.clone()).unwrap();
    SegmentDesc {
        name: name.to_owned(),
        incarnation: Some(context.incarnation),
        hello: Some(context.hello),
        transports: [(transport.name().to_owned(), published)].into(),
        buffers: Vec::new(),
    }
}

impl Rig {
    fn new(plan: Plan) -> Self {
        let hub = MemoryHub::new();
        let transport = FaultTransport::new(hub.transport(), plan);
        let peer: Arc<dyn Transport> = hub.transport();
        let (events, registry) = (Arc::new(Events::new()), Arc::new(Registry::new()));
        start(&*transport, "a", &Arc::new(Registry::new()), &events);
        let desc = start(&*peer, "b", &registry, &Arc::new(Events::new()));
        let (local, remote) = (HeapRegion::new(COUNT * SIZE), HeapRegion::new(COUNT * SIZE));
        memory::write(&*local, 0, &pattern::bytes(1, COUNT * SIZE));
        let region = registry.register(Arc::clone(&remote) as _, Access::None).unwrap();
        let len = (COUNT * SIZE) as u64;
        let token = registry.grant(region.id, 0, len, Access::Write, None).unwrap().token;
        let path = transport.connect(&desc, soon()).unwrap()[0].id;
        Self { transport, peer, events, path, local, remote, token }
    }

    fn slice(&self, token: u64) -> Slice {
        let at = token * SIZE as u64;
        Slice {
            token,
            opcode: Opcode::Write,
            priority: Priority::Medium,
            checksum: Checksum::Off,
            level: Level::Visible,
            local: self.local.view().slice(at, SIZE as u64).unwrap(),
            local_region: posthorse_core::RegionId(1),
            remote_address: self.remote.view().address() + at,
            grant: Some(self.token),
            remote_key: RemoteKey::NONE,
            ready: None,
        }
    }

    fn submit(&self, tokens: std::ops::Range<u64>) -> posthorse_core::Result<usize> {
        let slices: Vec<_> = tokens.map(|token| self.slice(token)).collect();
        // SAFETY: the rig holds the memory until the transport has been stopped, and touches it atomically only.
        unsafe { self.transport.submit(self.path, &slices) }
    }

    fn result(&self, token: u64) -> Result<Level, (ErrorKind, FarEnd)> {
        let end = self.events.wait_for(token, soon()).unwrap();
        end.result.map_err(|why| (why.error.kind(), why.far_end))
    }

    fn has_moved(&self, token: u64) -> bool {
        let at = token as usize * SIZE;
        memory::read(&*self.remote, at, SIZE) == memory::read(&*self.local, at, SIZE)
    }

    /// Waits until everything before has been carried out, by one more that is.
    fn settle(&self, token: u64) {
        assert_eq!(self.submit(token..token + 1).unwrap(), 1);
        self.result(token).unwrap();
    }
}

impl Drop for Rig {
    fn drop(&mut self) {
        self.transport.stop();
        self.peer.stop();
    }
}

fn plan(slices: impl IntoIterator<Item = (u64, Fault)>) -> Plan {
    Plan { slices: slices.into_iter().collect(), ..Plan::none() }
}

const BROKEN: Failure = Failure { kind: ErrorKind::PathFailed, quiet: false };

#[test]
fn a_delayed_completion_is_overtaken_and_comes_at_its_step() {
    let rig = Rig::new(plan([(0, Fault::Delay(2))]));
    assert_eq!(rig.submit(0..2).unwrap(), 2);
    rig.result(1).unwrap();
    assert!(rig.has_moved(0));
    rig.transport.step();
    assert!(rig.events.completion(0).is_none());
    rig.transport.step();
    assert_eq!(rig.events.completion(0).unwrap().result.unwrap(), Level::Visible);
}

#[test]
fn what_is_lost_is_heard_of_when_the_path_is_fenced() {
    let rig = Rig::new(plan([(0, Fault::Lose), (1, Fault::LoseCompletion)]));
    assert_eq!(rig.submit(0..2).unwrap(), 2);
    rig.settle(2);
    (0..20).for_each(|_| rig.transport.step());
    assert_eq!(rig.events.completed_count(), 1);
    assert!(!rig.has_moved(0) && rig.has_moved(1));
    rig.transport.fence(rig.path);
    for token in 0..2 {
        assert_eq!(rig.result(token), Err((ErrorKind::Flushed, FarEnd::Quiet)));
    }
    assert_eq!(rig.transport.violations(), [""; 0]);
}

#[test]
fn failures_are_those_of_the_plan() {
    let refused = Failure { kind: ErrorKind::PeerGone, quiet: true };
    let rig = Rig::new(plan([(0, Fault::Refuse(refused)), (1, Fault::FailAfter(BROKEN))]));
    assert_eq!(rig.submit(0..3).unwrap(), 3);
    assert_eq!(rig.result(0), Err((ErrorKind::PeerGone, FarEnd::Quiet)));
    assert_eq!(rig.result(1), Err((ErrorKind::PathFailed, FarEnd::Unconfirmed)));
    rig.result(2).unwrap();
    assert!(!rig.has_moved(0) && rig.has_moved(1));
}

#[test]
fn a_call_takes_what_the_plan_lets_it_and_room_is_announced_at_the_next_step() {
    let rig = Rig::new(Plan { calls: [(0, 3), (1, 0)].into(), ..Plan::none() });
    assert_eq!(rig.submit(0..8).unwrap(), 3);
    assert_eq!(rig.submit(3..8).unwrap(), 0);
    assert_eq!(rig.events.writable_count(rig.path), 0);
    rig.transport.step();
    assert_eq!(rig.events.writable_count(rig.path), 1);
    assert_eq!(rig.submit(3..8).unwrap(), 5);
    rig.events.wait_for_all(0..8, soon()).unwrap();
}

#[test]
fn a_stall_holds_everything_back() {
    let rig = Rig::new(Plan { steps: [(1, Disturbance::Stall(2))].into(), ..Plan::none() });
    rig.transport.step();
    assert_eq!(rig.submit(0..2).unwrap(), 0);
    rig.transport.step();
    assert_eq!(rig.events.writable_count(rig.path), 0);
    rig.transport.step();
    assert_eq!(rig.events.writable_count(rig.path), 1);
    rig.settle(0);
}

#[test]
fn a_path_goes_down_with_its_slices_and_comes_up_again() {
    let mut plan = plan([(0, Fault::LoseCompletion)]);
    plan.steps.insert(1, Disturbance::Down { path: 0, steps: 2 });
    let rig = Rig::new(plan);
    assert_eq!(rig.submit(0..1).unwrap(), 1);
    rig.settle(1);
    rig.transport.step();
    assert_eq!(rig.result(0), Err((ErrorKind::PathFailed, FarEnd::Unconfirmed)));
    assert_eq!(rig.submit(2..3).unwrap_err().kind(), ErrorKind::PathFailed);
    assert_eq!(rig.transport.notify(rig.path, 9, b"x").unwrap_err().kind(), ErrorKind::PathFailed);
    rig.transport.step();
    rig.transport.step();
    let states: Vec<_> = rig.events.path_changes().into_iter().map(|(_, state)| state).collect();
    assert!(matches!(states[..], [PathState::Down(_), PathState::Up]), "{states:?}");
    rig.settle(2);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Whatever the plan: each slice that was taken ends exactly once, what is reported done has moved, and nothing
    /// is left when the path has been fenced.
    #[test]
    fn every_slice_ends_once_under_every_plan(seed: u64) {
        let rates = FaultRates {
            delay: 150, lose_completion: 80, lose: 80, refuse: 80, fail_after: 80, partial: 200, stall: 60, down: 40,
        };
        let plan = Plan::random(seed, rates, COUNT as u64);
        let rig = Rig::new(plan.clone());
        let mut next = 0;
        for _ in 0..200 {
            match rig.submit(next..COUNT as u64) {
                Ok(taken) => next += taken as u64,
                Err(down) => prop_assert_eq!(down.kind(), ErrorKind::PathFailed),
            }
            rig.transport.step();
        }
        prop_assert_eq!(next, COUNT as u64, "{}", plan);
        rig.transport.fence(rig.path);
        let ends = rig.events.wait_for_all(0..next, soon()).unwrap();
        for end in ends.iter().filter(|end| end.result.is_ok()) {
            prop_assert!(rig.has_moved(end.token), "{} of {}", end.token, plan);
        }
        prop_assert_eq!(rig.events.repeated(), [0; 0]);
        prop_assert_eq!(rig.transport.violations(), [""; 0]);
    }
}
