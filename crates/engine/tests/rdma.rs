//! Engines over RDMA, on software devices: keys go with grants, rails fail, and the transfer does not notice.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

#[allow(dead_code, unreachable_pub)]
mod support;

use std::sync::Arc;
use std::time::Duration;

use posthorse_core::{Access, ErrorKind, Opcode, RemoteRange, Route, TransferRequest};
use posthorse_engine::{EngineConfig, SubmitOptions, TransferEngine};
use posthorse_rdma::software::Fabric;
use posthorse_rdma::{RdmaConfig, RdmaTransport};
use posthorse_testkit::memory;
use support::{World, filled, holds, request, soon};

const LEN: usize = 8 << 20;

/// Two engines that reach each other by RDMA, and by the testkit's transport where that is wanted.
struct Hosts {
    fabric: Fabric,
    a: TransferEngine,
    b: TransferEngine,
}

impl Hosts {
    fn new(rails: usize, fallback: bool) -> Self {
        let (fabric, world) = (Fabric::new(), World::default());
        let engine = |name: &'static str| {
            let devices: Vec<String> = (0..rails).map(|rail| format!("{name}{rail}")).collect();
            let devices: Vec<&str> = devices.iter().map(String::as_str).collect();
            let config = RdmaConfig { slice_bytes: 64 << 10, ..RdmaConfig::default() };
            let rdma = RdmaTransport::with_verbs(config, fabric.host(&devices)).unwrap();
            let mut builder = TransferEngine::builder()
                .directory(name, Arc::clone(&world.directory) as _, world.control.channel(name))
                .transport(Arc::new(rdma))
                .bare()
                .config(EngineConfig { max_attempts: 10, ..EngineConfig::default() });
            if fallback {
                builder = builder.transport(world.hub.transport());
            }
            builder.build().unwrap()
        };
        let (a, b) = (engine("a"), engine("b"));
        Self { fabric, a, b }
    }

    /// Which transport requests take.
    fn chosen(&self) -> Option<String> {
        self.a.explain(&self.a.open("b", soon()).unwrap()).chosen
    }
}

#[test]
fn published_memory_is_moved_both_ways() {
    let hosts = Hosts::new(2, false);
    let (here, ours) = filled(&hosts.a, 1, LEN, Access::None);
    let (there, theirs) = filled(&hosts.b, 2, LEN, Access::ReadWrite);
    let b = hosts.a.open("b", soon()).unwrap();
    for (opcode, seed) in [(Opcode::Write, 1), (Opcode::Read, 3)] {
        if opcode == Opcode::Read {
            memory::write(&*there, 0, &posthorse_testkit::pattern::bytes(3, LEN));
        }
        let mut batch = hosts.a.batch();
        let request = request(opcode, ours.at(0), b.id(), theirs.address(), LEN as u64);
        batch.submit(&[request], SubmitOptions::default()).unwrap();
        batch.wait(soon()).unwrap();
        assert!(holds(if opcode == Opcode::Write { &there } else { &here }, seed, LEN), "{opcode:?}");
    }
    assert_eq!(hosts.chosen().as_deref(), Some("rdma"));
}

fn write_under_grant(hosts: &Hosts, hold: bool, route: Route) -> posthorse_core::Result<bool> {
    let (_here, ours) = filled(&hosts.a, 1, LEN, Access::None);
    let (there, theirs) = filled(&hosts.b, 2, LEN, Access::None);
    let grant = theirs.grant(0, LEN as u64, Access::Write, Some("a")).unwrap();
    let b = hosts.a.open("b", soon()).unwrap();
    let held = hold.then(|| hosts.a.hold(&b, grant.desc()));
    let remote =
        RemoteRange { segment: b.id(), address: grant.desc().address, token: Some(grant.desc().token) };
    let request =
        TransferRequest { remote, route, ..request(Opcode::Write, ours.at(0), b.id(), 0, LEN as u64) };
    let mut batch = hosts.a.batch();
    batch.submit(&[request], SubmitOptions { deadline: soon(), ..SubmitOptions::default() })?;
    drop(held);
    batch.wait(soon())?;
    Ok(holds(&there, 1, LEN))
}

#[test]
fn a_grant_that_is_held_goes_by_rdma_and_one_that_is_not_by_what_needs_no_key() {
    let hosts = Hosts::new(1, true);
    let rdma = Route::Require(hosts.a.transport_id("rdma").unwrap());
    assert!(write_under_grant(&hosts, true, rdma).unwrap());
    assert!(write_under_grant(&hosts, false, Route::Auto).unwrap());
    let error = write_under_grant(&hosts, false, rdma).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NoPath, "{error}");
}

/// Writes over and over while `trouble` goes on, and sees that every byte arrives.
fn write_through(hosts: &Hosts, mut trouble: impl FnMut(usize)) {
    let (here, ours) = filled(&hosts.a, 1, LEN, Access::None);
    let (there, theirs) = filled(&hosts.b, 2, LEN, Access::Write);
    let b = hosts.a.open("b", soon()).unwrap();
    for round in 0..8 {
        let seed = 10 + round as u64;
        memory::write(&*here, 0, &posthorse_testkit::pattern::bytes(seed, LEN));
        let mut batch = hosts.a.batch();
        let request = request(Opcode::Write, ours.at(0), b.id(), theirs.address(), LEN as u64);
        batch.submit(&[request], SubmitOptions { deadline: soon(), ..SubmitOptions::default() }).unwrap();
        trouble(round);
        batch.wait(soon()).unwrap();
        assert!(holds(&there, seed, LEN), "round {round}");
    }
}

#[test]
fn a_rail_that_fails_is_not_noticed_and_comes_back() {
    let hosts = Hosts::new(2, false);
    write_through(&hosts, |round| match round % 4 {
        0 => hosts.fabric.cut("a0"),
        1 => hosts.fabric.restore("a0"),
        2 => hosts.fabric.cut("b1"),
        _ => hosts.fabric.restore("b1"),
    });
    // Both carry traffic again before long.
    let deadline = std::time::Instant::now() + Duration::from_secs(20);
    let b = hosts.a.open("b", soon()).unwrap();
    loop {
        let explained = hosts.a.explain(&b);
        let rdma = explained.transports.iter().find(|transport| transport.name == "rdma").unwrap();
        if rdma.paths.len() == 2 && rdma.paths.iter().all(|path| path.reason.is_none()) {
            break;
        }
        assert!(std::time::Instant::now() < deadline, "{explained}");
        std::thread::yield_now();
    }
}

#[test]
fn without_a_rail_left_another_transport_finishes() {
    let hosts = Hosts::new(2, true);
    assert_eq!(hosts.chosen().as_deref(), Some("rdma"));
    write_through(&hosts, |round| {
        if round == 1 {
            hosts.fabric.cut("a0");
            hosts.fabric.cut("a1");
        }
    });
    assert_eq!(hosts.chosen().as_deref(), Some("memory"));
}

#[test]
fn where_rdma_is_required_the_reason_is_said() {
    let hosts = Hosts::new(1, true);
    let rdma = Route::Require(hosts.a.transport_id("rdma").unwrap());
    assert!(write_under_grant(&hosts, true, rdma).unwrap());
    hosts.fabric.cut("b0");
    let error = write_under_grant(&hosts, true, rdma).unwrap_err();
    assert!(matches!(error.kind(), ErrorKind::PathFailed | ErrorKind::NoPath), "{error}");
    assert!(error.to_string().contains("acknowledge") || error.to_string().contains("down"), "{error}");
}

/// Writes so many times, and says how many bytes each of host a's rails has carried since the test began.
fn spread(hosts: &Hosts, rounds: usize) -> Vec<u64> {
    let (_here, ours) = filled(&hosts.a, 1, LEN, Access::None);
    let (there, theirs) = filled(&hosts.b, 2, LEN, Access::Write);
    let b = hosts.a.open("b", soon()).unwrap();
    for _ in 0..rounds {
        let mut batch = hosts.a.batch();
        let request = request(Opcode::Write, ours.at(0), b.id(), theirs.address(), LEN as u64);
        batch.submit(&[request], SubmitOptions { deadline: soon(), ..SubmitOptions::default() }).unwrap();
        batch.wait(soon()).unwrap();
    }
    assert!(holds(&there, 1, LEN));
    ["a0", "a1"].iter().map(|device| hosts.fabric.carried(device)).collect()
}

#[test]
fn rails_carry_what_they_can() {
    let hosts = Hosts::new(2, false);
    for (rates, expected) in [([40 << 20, 40 << 20], 0.5), ([40 << 20, 20 << 20], 2.0 / 3.0)] {
        for (device, rate) in ["a0", "a1"].into_iter().zip(rates) {
            hosts.fabric.set_rate(device, rate);
        }
        // What was measured before is forgotten meanwhile.
        let before = spread(&hosts, 2);
        let after = spread(&hosts, 4);
        let carried: Vec<f64> =
            after.iter().zip(&before).map(|(after, before)| (after - before) as f64).collect();
        let share = carried[0] / (carried[0] + carried[1]);
        assert!(
            (share / expected - 1.0).abs() < 0.15,
            "{rates:?}: {share} of {carried:?}; expected: {expected}"
        );
    }
}
