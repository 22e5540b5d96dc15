//! What an engine does when all goes well, and what it refuses.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

#[allow(dead_code, unreachable_pub)]
mod support;

use std::future::IntoFuture;
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::thread::{self, Thread};

use posthorse_core::{
    Access, Deadline, ErrorKind, Opcode, RemoteRange, Route, SegmentId, TransferRequest, TransferState,
    TransportId,
};
use posthorse_engine::{EngineConfig, SubmitOptions, TaskId};
use posthorse_memory::ForeignMemory;
use posthorse_testkit::memory::{self, HeapRegion};
use posthorse_testkit::pattern;
use support::{Pair, SEED, World, filled, holds, request, soon};

const OPTIONS: SubmitOptions =
    SubmitOptions { deadline: Deadline::NEVER, checksum: posthorse_core::Checksum::Off };

#[test]
fn a_write_and_a_read_of_every_size_arrive() {
    let pair = Pair::new(3 << 20);
    for len in [1_u64, 2, 63, 4096, 65_537, 3 << 20] {
        memory::write(&*pair.target_region, 0, &vec![0; 3 << 20]);
        let mut batch = pair.a.batch();
        let task = batch.submit(&[pair.write(0, len)], OPTIONS).unwrap();
        batch.wait(soon()).unwrap();
        assert!(pair.arrived(len as usize), "{len} bytes written");
        let status = batch.task(task).unwrap();
        assert_eq!((status.state, status.bytes), (TransferState::Completed, len));

        memory::write(&*pair.source_region, 0, &vec![0; 3 << 20]);
        memory::write(&*pair.target_region, 0, &pattern::bytes(SEED, 3 << 20));
        let mut batch = pair.a.batch();
        batch.submit(&[pair.read(0, len)], OPTIONS).unwrap();
        batch.wait(soon()).unwrap();
        assert!(holds(&pair.source_region, SEED, len as usize), "{len} bytes read");
        memory::write(&*pair.source_region, 0, &pattern::bytes(SEED, 3 << 20));
    }
}

#[test]
fn a_batch_takes_many_requests_and_more_than_one_submission() {
    const PIECE: u64 = 64;
    const COUNT: u64 = 20_000;
    let pair = Pair::new((PIECE * COUNT) as usize);
    let requests: Vec<_> = (0..COUNT).map(|index| pair.write(index * PIECE, PIECE)).collect();
    let mut batch = pair.a.batch();
    let first = batch.submit(&requests[..5], OPTIONS).unwrap();
    let second = batch.submit(&requests[5..], OPTIONS).unwrap();
    assert_eq!((first, second, batch.len()), (TaskId(0), TaskId(5), COUNT as usize));
    batch.wait(soon()).unwrap();
    assert!(pair.arrived((PIECE * COUNT) as usize));
    let status = batch.status();
    assert_eq!(
        (status.state, status.bytes, status.tasks),
        (TransferState::Completed, PIECE * COUNT, COUNT as usize)
    );
    assert!(batch.task(TaskId(COUNT as usize)).is_none());
    assert_eq!(pair.a.in_flight(), 0);
}

#[test]
fn an_empty_request_and_an_empty_batch_are_done_at_once() {
    let pair = Pair::new(64);
    let mut batch = pair.a.batch();
    assert!(batch.is_done() && batch.is_empty());
    batch.submit(&[pair.write(0, 0)], OPTIONS).unwrap();
    batch.submit(&[], OPTIONS).unwrap();
    assert_eq!(batch.task(TaskId(0)).unwrap().state, TransferState::Completed);
    batch.wait(Deadline::NEVER).unwrap();
}

#[test]
fn what_is_of_another_engine_is_refused() {
    let (pair, other) = (Pair::new(4096), Pair::new(4096));
    let mut batch = other.a.batch();
    // Its local memory, its peer, both.
    let local = TransferRequest { local: pair.write(0, 1).local, ..other.write(0, 1) };
    assert_eq!(batch.submit(&[local], OPTIONS).unwrap_err().kind(), ErrorKind::NotRegistered);
    let remote = TransferRequest { remote: pair.write(0, 1).remote, ..other.write(0, 1) };
    assert_eq!(batch.submit(&[remote], OPTIONS).unwrap_err().kind(), ErrorKind::InvalidArgument);
    let plan = pair.a.plan(&[pair.write(0, 1)]).unwrap();
    let notice = batch.submit_with_notice(&[], &pair.to_b, b"hi", OPTIONS).unwrap_err();
    for error in [batch.post(&plan, OPTIONS).unwrap_err(), notice] {
        assert_eq!(error.kind(), ErrorKind::InvalidArgument);
        assert!(error.to_string().contains("another engine"), "{error}");
    }
    assert!(batch.is_empty());
    let grant = pair.target.grant(0, 64, Access::Read, None).unwrap();
    let error = other.a.lease(&pair.to_b, Route::Auto, grant.desc()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{error}");
}

#[test]
fn a_plan_is_posted_many_times() {
    let pair = Pair::new(1 << 16);
    let plan = pair.a.plan(&[pair.write(0, 1 << 15), pair.write(1 << 15, 1 << 15)]).unwrap();
    assert_eq!((plan.len(), plan.bytes()), (2, 1 << 16));
    for round in 0..50 {
        memory::write(&*pair.source_region, 0, &pattern::bytes(round, 1 << 16));
        let mut batch = pair.a.batch();
        batch.post(&plan, OPTIONS).unwrap();
        batch.wait(soon()).unwrap();
        assert!(holds(&pair.target_region, round, 1 << 16), "round {round}");
    }
    pair.source.unregister(soon()).unwrap();
    let error = pair.a.batch().post(&plan, OPTIONS).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotRegistered);
}

#[test]
fn groups_complete_separately() {
    let pair = Pair::new(4096);
    let requests: Vec<_> = (0..8)
        .map(|index| TransferRequest { group: index as u32 / 2 + 10, ..pair.write(index * 512, 512) })
        .collect();
    let mut batch = pair.a.batch();
    batch.submit(&requests, OPTIONS).unwrap();
    for group in [13, 12, 11, 10] {
        batch.wait_group(group, soon()).unwrap();
    }
    batch.wait_group(99, Deadline::NEVER).unwrap();
    assert!(pair.arrived(4096));
}

#[test]
fn a_failed_group_does_not_taint_the_others() {
    let pair = Pair::new(4096);
    let grant = pair.target.grant(0, 512, Access::Read, None).unwrap();
    let denied = TransferRequest {
        remote: RemoteRange { token: Some(grant.desc().token), ..pair.write(0, 512).remote },
        group: 1,
        ..pair.write(0, 512)
    };
    let mut batch = pair.a.batch();
    let first = batch.submit(&[denied, pair.write(512, 512)], OPTIONS).unwrap();
    assert_eq!(batch.wait_group(1, soon()).unwrap_err().kind(), ErrorKind::AccessDenied);
    batch.wait_group(0, soon()).unwrap();
    let error = batch.wait(soon()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::AccessDenied);
    assert_eq!(batch.task(first).unwrap().state, TransferState::Failed);
    assert_eq!(batch.task(TaskId(1)).unwrap().state, TransferState::Completed);
    assert_eq!(batch.status().state, TransferState::Failed);
}

#[test]
fn a_batch_can_be_awaited() {
    struct Unpark(Thread);
    impl Wake for Unpark {
        fn wake(self: Arc<Self>) {
            self.0.unpark();
        }
    }
    let pair = Pair::new(1 << 20);
    let mut batch = pair.a.batch();
    batch.submit(&[pair.write(0, 1 << 20)], OPTIONS).unwrap();
    let waker = Waker::from(Arc::new(Unpark(thread::current())));
    let mut future = pin!((&batch).into_future());
    loop {
        match future.as_mut().poll(&mut Context::from_waker(&waker)) {
            Poll::Ready(outcome) => break outcome.unwrap(),
            Poll::Pending => thread::park(),
        }
    }
    assert!(pair.arrived(1 << 20));
}

#[test]
fn a_notice_comes_after_the_bytes_it_speaks_of() {
    let pair = Pair::new(1 << 16);
    for round in 0..100_u64 {
        memory::write(&*pair.source_region, 0, &pattern::bytes(round, 1 << 16));
        let mut batch = pair.a.batch();
        let requests: Vec<_> = (0..16).map(|index| pair.write(index << 12, 1 << 12)).collect();
        let first = batch.submit_with_notice(&requests, &pair.to_b, &round.to_le_bytes(), OPTIONS).unwrap();
        let notice = pair.b.next_notification(soon()).unwrap();
        assert_eq!((notice.peer.as_str(), notice.data.as_slice()), ("a", &round.to_le_bytes()[..]));
        assert!(holds(&pair.target_region, round, 1 << 16), "round {round}");
        batch.wait(soon()).unwrap();
        assert_eq!(batch.task(TaskId(first.0 + 16)).unwrap().state, TransferState::Completed);
    }
    pair.a.notify(&pair.to_b, b"alone", soon()).unwrap();
    assert_eq!(pair.b.notifications().len(), 1);
}

#[test]
fn a_notice_is_not_sent_when_a_transfer_before_it_failed() {
    let pair = Pair::new(4096);
    let grant = pair.target.grant(0, 4096, Access::Read, None).unwrap();
    let mut denied = pair.write(0, 4096);
    denied.remote.token = Some(grant.desc().token);
    let mut batch = pair.a.batch();
    batch.submit_with_notice(&[denied], &pair.to_b, b"x", OPTIONS).unwrap();
    assert_eq!(batch.wait(soon()).unwrap_err().kind(), ErrorKind::AccessDenied);
    assert!(pair.b.notifications().is_empty());
}

#[test]
fn a_request_that_cannot_be_carried_out_is_named_and_nothing_is_sent() {
    let pair = Pair::new(4096);
    let good = pair.write(0, 4096);
    let region = HeapRegion::new(16);
    let unregistered = {
        let memory = pair.a.register(region, Access::None).unwrap();
        let at = memory.at(0);
        memory.unregister(soon()).unwrap();
        at
    };
    for (bad, kind, told) in [
        (TransferRequest { local: unregistered, ..good }, ErrorKind::NotRegistered, "request 1"),
        (pair.write(1, 4096), ErrorKind::OutOfBounds, "request 1"),
        (
            request(Opcode::Write, pair.source.at(0), pair.to_b.id(), pair.target.address() + 1, 4096),
            ErrorKind::OutOfBounds,
            "request 1",
        ),
        (
            request(Opcode::Write, pair.source.at(0), pair.to_b.id(), u64::MAX, 2),
            ErrorKind::OutOfBounds,
            "address space",
        ),
        (
            request(Opcode::Write, pair.source.at(0), SegmentId(99), pair.target.address(), 1),
            ErrorKind::InvalidArgument,
            "segment is 99",
        ),
    ] {
        let mut batch = pair.a.batch();
        let error = batch.submit(&[good, bad], OPTIONS).unwrap_err();
        assert_eq!(error.kind(), kind, "{error}");
        assert!(error.to_string().contains(told), "{error}");
        assert!(batch.is_done() && batch.is_empty());
    }
    assert!(holds(&pair.target_region, 0, 4096), "nothing was written");
}

#[test]
fn grants_bound_what_a_peer_may_touch_until_they_are_revoked() {
    let world = World::default();
    let (a, b) = (world.engine("a"), world.engine("b"));
    let (_, source) = filled(&a, SEED, 8192, Access::None);
    let (target_region, target) = filled(&b, 0, 8192, Access::None);
    let to_b = a.open("b", soon()).unwrap();
    let mut grant = target.grant(1024, 1024, Access::Write, Some("a")).unwrap();
    let write = |offset: u64, len: u64| {
        let mut request =
            request(Opcode::Write, source.at(offset), to_b.id(), target.address() + offset, len);
        request.remote.token = Some(grant.desc().token);
        let mut batch = a.batch();
        batch.submit(&[request], OPTIONS).unwrap();
        batch.wait(soon()).map_err(|error| error.kind())
    };
    assert_eq!(write(1024, 1024), Ok(()));
    assert_eq!(write(1023, 1024), Err(ErrorKind::OutOfBounds));
    assert_eq!(write(0, 8192), Err(ErrorKind::OutOfBounds));
    let bytes = memory::read(&*target_region, 0, 8192);
    assert!(bytes[1024..2048] == pattern::bytes(SEED, 8192)[1024..2048]);
    assert!(bytes[..1024] == pattern::bytes(0, 8192)[..1024], "not a byte outside the grant");
    grant.revoke(soon()).unwrap();
    grant.revoke(soon()).unwrap();
    let mut request = request(Opcode::Write, source.at(0), to_b.id(), target.address() + 1024, 1);
    request.remote.token = Some(grant.desc().token);
    let mut batch = a.batch();
    batch.submit(&[request], OPTIONS).unwrap();
    assert_eq!(batch.wait(soon()).unwrap_err().kind(), ErrorKind::AccessDenied);
    // Of several, it is said which.
    let empty = TransferRequest { len: 0, ..request };
    let mut batch = a.batch();
    batch.submit(&[empty, request, empty], OPTIONS).unwrap();
    let error = batch.wait(soon()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::AccessDenied);
    assert!(error.message().starts_with("request 1: "), "{error}");
}

#[test]
fn a_read_into_memory_that_cannot_be_written_is_refused_with_advice_that_helps() {
    let pair = Pair::new(4096);
    let constant = ForeignMemory::shared(vec![0; 64].into());
    let constant = pair.a.register(Arc::new(constant), Access::None).unwrap();
    let read = TransferRequest { local: constant.at(0), ..pair.read(0, 64) };
    let error = pair.a.batch().submit(&[read], OPTIONS).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::AccessDenied);
    assert!(error.message().contains("local region") && error.message().contains("read-only"), "{error}");
    assert!(error.advice().is_some_and(|advice| !advice.contains("grant")), "{error}");
}

#[test]
fn the_own_segment_is_reached_by_copies_within_the_process() {
    let world = World::default();
    let a = world.engine("a");
    let (_, source) = filled(&a, SEED, 4096, Access::None);
    let (target_region, target) = filled(&a, 0, 4096, Access::ReadWrite);
    let own = a.local().unwrap();
    assert_eq!(own.id(), SegmentId::LOCAL);
    let mut batch = a.batch();
    batch.submit(&[request(Opcode::Write, source.at(0), own.id(), target.address(), 4096)], OPTIONS).unwrap();
    batch.wait(soon()).unwrap();
    assert!(holds(&target_region, SEED, 4096));
    assert_eq!(a.explain(&own).chosen.as_deref(), Some("local"));
}

#[test]
fn a_route_is_required_or_preferred_and_explained() {
    let pair = Pair::new(4096);
    let memory = pair.a.transport_id("memory").unwrap();
    let absent = TransportId(77);
    for (route, outcome) in [
        (Route::Require(memory), Ok(())),
        (Route::Prefer(absent), Ok(())),
        (Route::Require(absent), Err(ErrorKind::NoPath)),
    ] {
        let mut batch = pair.a.batch();
        batch.submit(&[TransferRequest { route, ..pair.write(0, 4096) }], OPTIONS).unwrap();
        assert_eq!(batch.wait(soon()).map_err(|error| error.kind()), outcome, "{route:?}");
    }
    let explanation = pair.a.explain(&pair.to_b);
    assert_eq!(explanation.chosen.as_deref(), Some("memory"));
    assert!(explanation.to_string().contains("by memory"), "{explanation}");
    let error = pair.a.transport_id("pigeon").unwrap_err().to_string();
    assert!(error.contains("pigeon") && error.contains("memory"), "{error}");
}

#[test]
fn an_engine_that_requires_a_transport_reaches_nobody_by_another() {
    let world = World::default();
    let config = EngineConfig { transport: "require:pigeon".parse().unwrap(), ..EngineConfig::default() };
    let a = world.engine_by("a", world.hub.transport(), config);
    let _b = world.engine("b");
    let error = a.open("b", soon()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NoPath);
    let expected = "transport is require:pigeon, which is not installed; installed: local, memory";
    assert_eq!((error.message(), error.peer()), (expected, Some("b")));
}

#[test]
fn a_transport_is_installed_and_uninstalled_by_name() {
    let pair = Pair::new(4096);
    assert_eq!(pair.a.install(pair.world.hub.transport()).unwrap_err().kind(), ErrorKind::Busy);
    pair.a.uninstall("memory").unwrap();
    assert_eq!(pair.a.uninstall("memory").unwrap_err().kind(), ErrorKind::NotFound);
    let mut batch = pair.a.batch();
    batch.submit(&[pair.write(0, 16)], OPTIONS).unwrap();
    assert!(batch.wait(soon()).is_err());
    pair.a.install(pair.world.hub.transport()).unwrap();
    let names: Vec<_> = pair.a.transports().into_iter().map(|(name, _)| name).collect();
    assert_eq!(names, ["local", "memory"]);
}

#[test]
fn after_a_shutdown_every_call_says_closed() {
    let pair = Pair::new(4096);
    pair.a.shutdown();
    pair.a.shutdown();
    let mut batch = pair.a.batch();
    assert_eq!(batch.submit(&[pair.write(0, 1)], OPTIONS).unwrap_err().kind(), ErrorKind::Closed);
    assert_eq!(pair.a.open("b", soon()).unwrap_err().kind(), ErrorKind::Closed);
    assert_eq!(pair.b.open("a", soon()).unwrap_err().kind(), ErrorKind::NotFound, "the name was withdrawn");
}

#[test]
fn threads_share_an_engine() {
    let pair = Pair::new(16 << 12);
    thread::scope(|scope| {
        for index in 0..16_u64 {
            let pair = &pair;
            scope.spawn(move || {
                for _ in 0..50 {
                    let mut batch = pair.a.batch();
                    batch.submit(&[pair.write(index << 12, 1 << 12)], OPTIONS).unwrap();
                    batch.wait(soon()).unwrap();
                }
            });
        }
    });
    assert!(pair.arrived(16 << 12));
}
