//! Random faults under two engines: whatever happens, each task ends once, and says the truth.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

#[allow(dead_code, unreachable_pub)]
mod support;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use posthorse_core::{Access, Checksum, Deadline, Opcode, Priority, TransferRequest, TransferState};
use posthorse_engine::{Batch, EngineConfig, SubmitOptions, TaskId};
use posthorse_testkit::memory::{self, HeapRegion};
use posthorse_testkit::{FaultRates, FaultTransport, Plan, pattern};
use support::{Pair, World, filled, soon};

const RATES: FaultRates = FaultRates {
    delay: 60,
    lose_completion: 8,
    lose: 8,
    refuse: 40,
    fail_after: 40,
    partial: 200,
    stall: 30,
    down: 60,
};

const TASKS: usize = 24;
const LEN: usize = 3000;
/// Bytes of the region of one batch.
const AREA: usize = TASKS * LEN;

/// Deadlines that some batches get, which the faults that lose slices make the rest of them need.
const DEADLINE: Duration = Duration::from_millis(150);

fn config() -> EngineConfig {
    // Slices of 4 KiB are the shortest: some requests have several.
    EngineConfig {
        slice_bytes: 4096,
        cancel_grace_ms: 20,
        retry_after_ms: 1,
        spin_us: 0,
        ..EngineConfig::default()
    }
}

/// A batch of reads and writes between the areas of both sides, each task its own stretch.
fn submit(pair: &Pair, batch: &mut Batch, seed: u64) -> Vec<TransferRequest> {
    let requests: Vec<_> = (0..TASKS)
        .map(|index| {
            let offset = (index * LEN) as u64;
            // Every fifth takes up its neighbour's stretch as well, which then has nothing of its own.
            let len = match index % 5 {
                3 => 2 * LEN,
                4 => 0,
                _ => LEN,
            } as u64;
            let opcode = if (seed + index as u64).is_multiple_of(3) { Opcode::Read } else { Opcode::Write };
            let priority = [Priority::High, Priority::Medium, Priority::Low][index % 3];
            let group = index as u32 / 8;
            TransferRequest { opcode, priority, group, ..pair.write(offset, len.min(AREA as u64 - offset)) }
        })
        .collect();
    let options = SubmitOptions { deadline: Deadline::after(DEADLINE), checksum: Checksum::Off };
    let (first, rest) = requests.split_at(TASKS / 2);
    batch.submit(first, options).unwrap();
    batch.submit_with_notice(rest, &pair.to_b, &seed.to_le_bytes(), options).unwrap();
    requests
}

/// What each task says is true.
fn check(pair: &Pair, batch: &Batch, requests: &[TransferRequest], seed: u64) {
    let mut failed = false;
    for task in 0..=TASKS {
        let status = batch.task(TaskId(task)).unwrap();
        assert!(status.state.is_final(), "seed {seed}: task {task} is {}", status.state);
        failed |= status.state != TransferState::Completed;
        assert_eq!(
            status.error.is_none(),
            status.state == TransferState::Completed,
            "seed {seed}: task {task}: {status:?}"
        );
        let Some(request) = requests.get(task) else { continue };
        if status.state == TransferState::Completed {
            let (offset, len) = (request.local.offset() as usize, request.len as usize);
            assert_eq!(status.bytes, request.len, "seed {seed}: task {task}");
            let ours = memory::read(&*pair.source_region, offset, len);
            let theirs = memory::read(&*pair.target_region, offset, len);
            assert!(ours == theirs, "seed {seed}: task {task} is completed and its bytes differ");
        }
    }
    assert_eq!(failed, batch.status().error.is_some(), "seed {seed}");
    assert_eq!(failed, batch.wait(soon()).is_err(), "seed {seed}");
    let notices = pair.b.notifications();
    let told = batch.task(TaskId(TASKS)).unwrap().state == TransferState::Completed;
    // A notice whose completion was lost on the way may have arrived; one that is done has, once.
    assert!(notices.len() <= 1 && (!told || notices.len() == 1), "seed {seed}: {} notices", notices.len());
    assert!(notices.iter().all(|notice| notice.data == seed.to_le_bytes()), "seed {seed}");
}

fn run(seed: u64) {
    let world = World::default();
    let plan = Plan::random(seed, RATES, 400);
    let faulty = FaultTransport::new(world.hub.transport_with_queue(8), plan);
    let pair = Pair::over(world, Arc::clone(&faulty) as _, AREA, config());
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                faulty.step();
                thread::yield_now();
            }
        });
        let mut batch = pair.a.batch();
        let requests = submit(&pair, &mut batch, seed);
        match seed % 4 {
            0 => batch.cancel(),
            1 => {
                let _ = batch.wait_group(1, soon());
            }
            _ => {}
        }
        let outcome = batch.wait(soon());
        assert!(batch.is_done(), "seed {seed}: {outcome:?}\n{}", pair.a.explain(&pair.to_b));
        check(&pair, &batch, &requests, seed);
        assert_eq!(pair.a.in_flight(), 0, "seed {seed}");
        assert_eq!(faulty.violations(), Vec::<String>::new(), "seed {seed}");
        let Pair { a, source, target, .. } = pair;
        source.unregister(soon()).unwrap();
        target.unregister(soon()).unwrap();
        assert_eq!(a.withheld(), 0);
        stop.store(true, Ordering::Relaxed);
    });
}

#[test]
fn whatever_the_faults_each_task_ends_once_and_tells_the_truth() {
    let threads = 8;
    thread::scope(|scope| {
        for first in 0..threads {
            scope.spawn(move || (first..200).step_by(threads as usize).for_each(run));
        }
    });
}

#[test]
fn a_shutdown_amid_faults_and_submissions_ends_everything() {
    for seed in 0..40 {
        let world = World::default();
        let faulty = FaultTransport::new(world.hub.transport_with_queue(8), Plan::random(seed, RATES, 4000));
        let pair = Pair::over(world, Arc::clone(&faulty) as _, AREA, config());
        let options = SubmitOptions { deadline: Deadline::NEVER, checksum: Checksum::Off };
        let submissions = AtomicU64::new(0);
        thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    loop {
                        let mut batch = pair.a.batch();
                        let requests: Vec<_> = (0..8).map(|i| pair.write(i * 4096, 4096)).collect();
                        let submitted = batch.submit_with_notice(&requests, &pair.to_b, b"x", options);
                        if let Err(error) = submitted {
                            // The faults may have made the engine think that the peer is gone for good.
                            assert!(error.kind() == posthorse_core::ErrorKind::Closed, "{error}");
                            return;
                        }
                        submissions.fetch_add(1, Ordering::Relaxed);
                        if pair.a.in_flight() > 20 {
                            let _ = batch.wait(Deadline::after(Duration::from_millis(1)));
                        }
                        drop(batch);
                        pair.b.notifications();
                    }
                });
            }
            scope.spawn(|| {
                while submissions.load(Ordering::Relaxed) < 20 + seed {
                    faulty.step();
                    thread::yield_now();
                }
                pair.a.shutdown();
            });
        });
        assert_eq!(pair.a.in_flight(), 0, "seed {seed}");
        assert_eq!(faulty.violations(), Vec::<String>::new(), "seed {seed}");
        pair.source.unregister(soon()).unwrap();
    }
}

#[test]
fn threads_that_open_close_install_uninstall_and_submit_do_not_disturb_each_other() {
    let pair = Pair::new(AREA);
    let (_region, small) = filled(&pair.a, 1, 4096, Access::Read);
    let options = SubmitOptions { deadline: soon(), checksum: Checksum::Off };
    let stop = AtomicBool::new(false);
    let running = || !stop.load(Ordering::Relaxed);
    thread::scope(|scope| {
        let openers = [0, 4096].map(|offset| {
            let pair = &pair;
            scope.spawn(move || {
                for _ in 0..300 {
                    let Ok(to_b) = pair.a.open("b", soon()) else { continue };
                    let mut request = pair.write(offset, 4096);
                    request.remote.segment = to_b.id();
                    let mut batch = pair.a.batch();
                    if batch.submit(&[request], options).is_ok() {
                        let _ = batch.wait(soon());
                        assert!(batch.is_done());
                    }
                }
            })
        });
        scope.spawn(|| {
            while running() {
                if let Ok(to_b) = pair.a.open("b", soon()) {
                    pair.a.close(to_b);
                }
            }
        });
        scope.spawn(|| {
            while running() {
                pair.a.uninstall("memory").unwrap();
                pair.a.install(pair.world.hub.transport()).unwrap();
                if pair.a.transports().is_empty() || pair.a.transport_id("memory").unwrap().0 > 240 {
                    return;
                }
            }
        });
        scope.spawn(|| {
            while running() {
                let region = HeapRegion::new(512);
                memory::write(&*region, 0, &pattern::bytes(3, 512));
                let memory = pair.a.register(region, Access::Read).unwrap();
                let grant = memory.grant(0, 512, Access::Read, None).unwrap();
                drop(memory);
                drop(grant);
            }
        });
        // Whatever became of them, the others end.
        let outcomes = openers.map(thread::ScopedJoinHandle::join);
        stop.store(true, Ordering::Relaxed);
        assert!(outcomes.iter().all(Result::is_ok), "a thread that opened the segment panicked");
    });
    assert_eq!(pair.a.in_flight(), 0);
    small.unregister(soon()).unwrap();
    pair.a.shutdown();
    assert_eq!(pair.a.withheld(), 0);
}
