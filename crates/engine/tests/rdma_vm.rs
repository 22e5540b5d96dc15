//! Engines over real verbs, in the VM of `cargo xtask vm --hosts 2 --rails 2`: links are cut, and the transfer does not notice.
#![cfg(feature = "rdma")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

#[allow(dead_code, unreachable_pub)]
mod support;

use std::io::Write as _;
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use posthorse_core::{Access, Deadline, Error, ErrorKind, Opcode, Result, Route, TransferRequest};
use posthorse_engine::{EngineConfig, RegisteredMemory, Segment, SubmitOptions, TransferEngine};
use posthorse_rdma::{RdmaConfig, RdmaTransport};
use posthorse_testkit::memory::{self, HeapRegion};
use posthorse_testkit::pattern;
use support::{World, filled, holds, request};

const LEN: usize = 8 << 20;

/// How often it is written in one batch, so that there is a midst of it.
const TIMES: usize = 8;

/// How long it takes at most to notice that nobody acknowledges: seven attempts of 67 ms, doubled by some devices; and
/// what the VM adds.
const DETECTION: Duration = Duration::from_secs(2);

/// Within which a transfer goes on elsewhere when that was noticed.
const FAILOVER: Duration = Duration::from_secs(1);

fn patience() -> Deadline {
    Deadline::after(Duration::from_secs(60))
}

/// The links are everybody's.
fn links() -> Option<MutexGuard<'static, ()>> {
    static LINKS: Mutex<()> = Mutex::new(());
    if std::env::var_os("POSTHORSE_VM").is_none() {
        posthorse_testkit::skip("rdma-devices", "these tests run in the VM of `cargo xtask vm`");
        return None;
    }
    let links = LINKS.lock().unwrap_or_else(PoisonError::into_inner);
    ["a0", "a1", "b0", "b1"].iter().for_each(|link| set(link, "up"));
    Some(links)
}

fn run(program: &str, arguments: &[&str]) {
    let output = Command::new(program).args(arguments).output().unwrap();
    assert!(output.status.success(), "{program} {arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
}

fn set(link: &str, state: &str) {
    run("ip", &["link", "set", link, state]);
}

/// Cuts one rail at this end and the other at the peer's, both at once.
fn cut_both() {
    let mut ip = Command::new("ip").args(["-batch", "-"]).stdin(Stdio::piped()).spawn().unwrap();
    ip.stdin.take().unwrap().write_all(b"link set a0 down\nlink set b1 down\n").unwrap();
    assert!(ip.wait().unwrap().success());
}

/// Two engines, each with the two devices of its host.
struct Hosts {
    a: TransferEngine,
    b: TransferEngine,
    segment: Segment,
    here: (Arc<HeapRegion>, RegisteredMemory),
    there: (Arc<HeapRegion>, RegisteredMemory),
}

impl Hosts {
    fn new(fallback: bool) -> Self {
        let world = World::default();
        let engine = |name: &'static str, devices: [&str; 2]| {
            let devices = devices.map(str::to_owned).to_vec();
            let config = RdmaConfig { devices, slice_bytes: 64 << 10, ..RdmaConfig::default() };
            let builder = TransferEngine::builder()
                .directory(name, Arc::clone(&world.directory) as _, world.control.channel(name))
                .transport(Arc::new(RdmaTransport::new(config).unwrap()))
                .bare()
                .config(EngineConfig { max_attempts: 20, ..EngineConfig::default() });
            let builder = if fallback { builder.transport(world.hub.transport()) } else { builder };
            builder.build().unwrap()
        };
        let (a, b) = (engine("a", ["rxe0", "rxe1"]), engine("b", ["rxe2", "rxe3"]));
        let here = filled(&a, 1, LEN, Access::None);
        let there = filled(&b, 2, LEN, Access::ReadWrite);
        let segment = a.open("b", patience()).unwrap();
        let hosts = Self { a, b, segment, here, there };
        hosts.wait_for_rails(2, Duration::from_secs(20));
        hosts
    }

    fn up(&self) -> usize {
        let explained = self.a.explain(&self.segment);
        let rdma = explained.transports.iter().find(|transport| transport.name == "rdma").unwrap();
        rdma.paths.iter().filter(|path| path.reason.is_none()).count()
    }

    fn wait_for_rails(&self, count: usize, within: Duration) {
        let until = Instant::now() + within;
        while self.up() < count {
            assert!(Instant::now() < until, "{}", self.a.explain(&self.segment));
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    fn request(&self, route: Route) -> TransferRequest {
        let request =
            request(Opcode::Write, self.here.1.at(0), self.segment.id(), self.there.1.address(), LEN as u64);
        TransferRequest { route, ..request }
    }

    /// Writes everything, with `trouble` in the midst of it, and sees that it has arrived. Says how long that took.
    fn write(&self, seed: u64, route: Route, trouble: impl FnOnce()) -> Result<Duration> {
        self.write_so_often(TIMES, seed, route, trouble)
    }

    fn write_so_often(
        &self,
        times: usize,
        seed: u64,
        route: Route,
        trouble: impl FnOnce(),
    ) -> Result<Duration> {
        memory::write(&*self.here.0, 0, &pattern::bytes(seed, LEN));
        let started = Instant::now();
        let mut batch = self.a.batch();
        batch.submit(
            &vec![self.request(route); times],
            SubmitOptions { deadline: patience(), ..SubmitOptions::default() },
        )?;
        // In the midst of it: something has arrived, and something has not.
        let moved = || batch.status().bytes;
        while moved() == 0 && !batch.status().state.is_final() {
            std::thread::yield_now();
        }
        trouble();
        batch.wait(patience())?;
        assert!(holds(&self.there.0, seed, LEN), "the bytes that arrived are others");
        Ok(started.elapsed())
    }

    fn chosen(&self) -> Option<String> {
        self.a.explain(&self.segment).chosen
    }
}

/// Packets that a device has sent.
fn sent(device: &str) -> u64 {
    let path = format!("/sys/class/infiniband/{device}/ports/1/hw_counters/sent_pkts");
    std::fs::read_to_string(path).unwrap().trim().parse().unwrap()
}

#[test]
fn a_link_that_is_cut_at_either_end_is_not_noticed_and_is_used_again() {
    let Some(_links) = links() else { return };
    let hosts = Hosts::new(false);
    let quiet = hosts.write(3, Route::Auto, || ()).unwrap();
    for (seed, link) in [(4, "a0"), (5, "b0"), (6, "a1"), (7, "b1")] {
        let took = hosts.write(seed, Route::Auto, || set(link, "down")).unwrap();
        eprintln!("{link}: {took:?}, without trouble {quiet:?}");
        // One rail does what two did before.
        assert!(took < quiet * 2 + DETECTION + FAILOVER, "{link}: {took:?}; without trouble {quiet:?}");
        set(link, "up");
        hosts.wait_for_rails(2, Duration::from_secs(10));
        let device = if link.ends_with('0') { "rxe0" } else { "rxe1" };
        let before = sent(device);
        hosts.write(seed + 10, Route::Auto, || ()).unwrap();
        assert!(sent(device) > before + 10, "{device} carries nothing");
    }
}

#[test]
fn without_a_link_left_another_transport_finishes_or_the_reason_is_said() {
    let Some(_links) = links() else { return };
    let hosts = Hosts::new(true);
    assert_eq!(hosts.chosen().as_deref(), Some("rdma"));
    // Seconds long, so that the links are cut in the midst of it however long that takes.
    hosts.write_so_often(64, 3, Route::Auto, cut_both).unwrap();
    assert_eq!(hosts.chosen().as_deref(), Some("memory"), "{}", hosts.a.explain(&hosts.segment));
    ["a0", "b1"].iter().for_each(|link| set(link, "up"));
    let until = Instant::now() + Duration::from_secs(10);
    while hosts.chosen().as_deref() != Some("rdma") {
        assert!(Instant::now() < until, "{}", hosts.a.explain(&hosts.segment));
        hosts.write(4, Route::Auto, || ()).unwrap();
    }
    let rdma = Route::Require(hosts.a.transport_id("rdma").unwrap());
    let error: Error = hosts.write_so_often(64, 5, rdma, cut_both).unwrap_err();
    assert!(matches!(error.kind(), ErrorKind::PathFailed | ErrorKind::NoPath), "{error}");
    assert!(error.to_string().contains("rxe"), "no device is named: {error}");
    ["a0", "b1"].iter().for_each(|link| set(link, "up"));
}

#[test]
fn links_that_come_and_go_harm_nothing() {
    const ROUNDS: u64 = 50;
    let Some(_links) = links() else { return };
    let hosts = Hosts::new(true);
    let mut random = 0x9e37_79b9_7f4a_7c15_u64;
    let mut down: Option<&str> = None;
    for round in 0..ROUNDS {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(round | 1);
        let link = ["a0", "b0", "a1", "b1"][(random >> 60) as usize % 4];
        hosts
            .write(round, Route::Auto, || match down.take() {
                Some(link) => set(link, "up"),
                None => {
                    set(link, "down");
                    down = Some(link);
                }
            })
            .unwrap_or_else(|error| panic!("round {round}, {link}: {error}"));
    }
    if let Some(link) = down {
        set(link, "up");
    }
    hosts.wait_for_rails(1, Duration::from_secs(10));
    assert_eq!((hosts.a.in_flight(), hosts.a.withheld(), hosts.b.withheld()), (0, 0, 0));
}

#[test]
fn lost_packets_cost_time_alone() {
    let Some(_links) = links() else { return };
    let hosts = Hosts::new(true);
    for (seed, loss) in [(1, "1%"), (2, "5%")] {
        for link in ["a0", "a1"] {
            run("tc", &["qdisc", "replace", "dev", link, "root", "netem", "loss", loss]);
        }
        let took = hosts.write(seed, Route::Auto, || ()).unwrap();
        eprintln!("{loss}: {took:?}");
    }
    ["a0", "a1"].iter().for_each(|link| run("tc", &["qdisc", "del", "dev", link, "root"]));
}
