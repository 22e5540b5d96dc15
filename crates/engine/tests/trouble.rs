//! What an engine does when things go wrong: each transfer ends, with its reason, and nothing is touched after.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

#[allow(dead_code, unreachable_pub)]
mod support;

use std::sync::Arc;
use std::time::Duration;

use posthorse_core::{Access, Checksum, Deadline, ErrorKind, TransferState};
use posthorse_engine::{EngineConfig, SubmitOptions};
use posthorse_testkit::{FaultRates, FaultTransport, Plan};
use support::{Pair, World, filled, request, soon};

fn until(deadline: Deadline) -> SubmitOptions {
    SubmitOptions { deadline, checksum: Checksum::Off }
}

#[test]
fn a_peer_that_restarted_is_noticed_and_its_new_life_is_not_touched() {
    let pair = Pair::new(4096);
    let name = pair.b.name().to_owned();
    let old = pair.write(0, 4096);
    let life = pair.to_b.incarnation().unwrap();
    pair.b.shutdown();
    let again = pair.world.engine(&name);
    let (region, memory) = filled(&again, 0, 4096, Access::ReadWrite);
    let fresh = pair.a.open(&name, soon()).unwrap();
    assert_ne!(fresh.incarnation(), Some(life));
    let mut batch = pair.a.batch();
    let error = batch.submit(&[old], until(soon())).and_then(|_| batch.wait(soon())).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::PeerRestarted, "{error}");
    assert_eq!(error.peer(), Some("b"));
    let error = pair.a.open_life(&name, life, soon()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::PeerRestarted);
    let mut batch = pair.a.batch();
    let write = request(posthorse_core::Opcode::Write, pair.source.at(0), fresh.id(), memory.address(), 4096);
    batch.submit(&[write], until(soon())).unwrap();
    batch.wait(soon()).unwrap();
    assert!(support::holds(&region, support::SEED, 4096));
}

#[test]
fn an_unknown_peer_and_a_dead_one_are_told_apart() {
    let world = World::default();
    let a = world.engine("a");
    assert_eq!(a.open("nobody", soon()).unwrap_err().kind(), ErrorKind::NotFound);
    assert_eq!(a.probe("nobody", soon()).unwrap_err().kind(), ErrorKind::NotFound);
    assert_eq!(a.probe("a", soon()).unwrap(), Some(a.incarnation()));
}

#[test]
fn fingerprints_that_differ_are_refused_by_name() {
    let world = World::default();
    let with = |name: &str, fingerprint: &str| {
        let config = EngineConfig { fingerprint: Some(fingerprint.to_owned()), ..EngineConfig::default() };
        world.engine_by(name, world.hub.transport(), config)
    };
    let (a, _b) = (with("a", "llama"), with("b", "qwen"));
    let error = a.open("b", soon()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::FingerprintMismatch);
    assert!(error.to_string().contains("llama") && error.to_string().contains("qwen"), "{error}");
}

/// A transport under which nothing ever completes until it is fenced.
fn black_hole(world: &World) -> Arc<FaultTransport> {
    FaultTransport::new(
        world.hub.transport(),
        Plan::random(1, FaultRates { lose: 1000, ..FaultRates::default() }, 10_000),
    )
}

#[test]
fn a_deadline_ends_a_transfer_that_hangs_and_fences_it() {
    let world = World::default();
    let faulty = black_hole(&world);
    let pair = Pair::over(world, Arc::clone(&faulty) as _, 1 << 16, EngineConfig::default());
    let mut batch = pair.a.batch();
    let task =
        batch.submit(&[pair.write(0, 1 << 16)], until(Deadline::after(Duration::from_millis(50)))).unwrap();
    let early = batch.wait(Deadline::after(Duration::ZERO)).unwrap_err();
    assert_eq!(early.kind(), ErrorKind::DeadlineExceeded);
    assert!(!batch.is_done(), "the wait ended, the transfer did not");
    let error = batch.wait(soon()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::DeadlineExceeded, "{error}");
    assert_eq!(batch.task(task).unwrap().state, TransferState::Timeout);
    assert_eq!(pair.a.in_flight(), 0);
    assert_eq!(faulty.violations(), Vec::<String>::new());
}

#[test]
fn a_cancel_and_a_dropped_batch_end_what_hangs() {
    let world = World::default();
    let faulty = black_hole(&world);
    let pair = Pair::over(world, Arc::clone(&faulty) as _, 1 << 16, EngineConfig::default());
    let mut batch = pair.a.batch();
    let task = batch.submit(&[pair.write(0, 1 << 16)], until(Deadline::NEVER)).unwrap();
    batch.cancel();
    let error = batch.wait(soon()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Cancelled);
    assert_eq!(batch.task(task).unwrap().state, TransferState::Canceled);

    let mut batch = pair.a.batch();
    batch.submit(&[pair.write(0, 1 << 16)], until(Deadline::NEVER)).unwrap();
    drop(batch);
    // The memory is pinned by the transfer: it can be given up only when that has ended.
    pair.source.unregister(soon()).unwrap();
    assert_eq!(pair.a.in_flight(), 0);
}

#[test]
fn a_shutdown_ends_what_hangs() {
    let world = World::default();
    let faulty = black_hole(&world);
    let pair = Pair::over(world, faulty, 1 << 16, EngineConfig::default());
    let mut batch = pair.a.batch();
    batch.submit(&[pair.write(0, 1 << 16)], until(Deadline::NEVER)).unwrap();
    pair.a.shutdown();
    let error = batch.wait(soon()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Closed, "{error}");
}
