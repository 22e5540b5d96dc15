//! Measures the transport between two processes, interleaved with what the machine can do: `memcpy` and the copy
//! engine into a mapping of the same memory.
//!
//! Run with `cargo run --release -p posthorse-shm --example shm_bench`.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

use std::io::{BufRead, BufReader, Write};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

#[path = "../tests/common/mod.rs"]
mod common;

use common::{Node, Registered, from_json, slice, to_json};
use posthorse_core::{Access, GrantDesc, HostView, Opcode, PathId, Slice, Transport};
use posthorse_memory::{CopyPool, HostMemory, MemoryOptions};
use posthorse_shm::ShmConfig;
use serde_json::{Value, json};

const ROLE: &str = "POSTHORSE_SHM_BENCH_OWNER";
const GIB: usize = 1 << 30;
/// Large blocks rotate through this much, well above any cache.
const ROTATE: usize = GIB;

fn main() {
    if std::env::var_os(ROLE).is_some() {
        return owner();
    }
    let mut child = Command::new(std::env::current_exe().unwrap())
        .env(ROLE, "1")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut said = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut said).unwrap();
    bench(&serde_json::from_str(&said).unwrap());
    drop(child.stdin.take());
    child.wait().unwrap();
}

/// Serves a GiB until the parent has had enough.
fn owner() {
    let node = Node::with("owner:1", ShmConfig::default(), None);
    let region = node.shared(ROTATE);
    let private = node.private(64 << 20);
    let grants = [&region, &private].map(|region: &Registered| node.grant_all(region, Access::ReadWrite));
    println!("{}", json!({ "peer": to_json(&node.desc), "shared": grants[0], "private": grants[1] }));
    std::io::stdout().flush().unwrap();
    let _ = std::io::stdin().read_line(&mut String::new());
}

struct Bench {
    node: Node,
    path: PathId,
    grant: GrantDesc,
    local: HostMemory,
    /// The same memory as the owner's, as the bare copies see it.
    bare: HostMemory,
    pool: CopyPool,
}

fn bench(served: &Value) {
    let grant = |which: &str| -> GrantDesc { serde_json::from_value(served[which].clone()).unwrap() };
    let node = Node::with("bench:1", ShmConfig::default(), None);
    let started = Instant::now();
    let (path, state) = node.try_connect(&from_json(&served["peer"]));
    println!("connect: {state:?} in {:.0} us", micros(started.elapsed()));

    let started = Instant::now();
    let lease = node.transport.lease(path, &grant("shared")).unwrap();
    let view = lease.view().host().unwrap();
    let mapped = started.elapsed();
    let mut sum = 0_u64;
    for at in (0..view.len()).step_by(4096) {
        // SAFETY: the lease holds the memory, and nobody writes to it now.
        sum += u64::from(unsafe { view.as_ptr().add(at).read() });
    }
    println!(
        "lease of 1 GiB: granted in {:.2} ms, every page read after {:.2} ms ({sum})",
        millis(mapped),
        millis(started.elapsed())
    );
    drop(lease);
    let started = Instant::now();
    drop(node.transport.lease(path, &grant("shared")).unwrap());
    println!("a second lease: {:.1} us", micros(started.elapsed()));

    let shared = |len| MemoryOptions::new(len).shared(true).allocate().unwrap();
    let bench = Bench {
        node,
        path,
        grant: grant("shared"),
        local: shared(ROTATE),
        bare: shared(ROTATE),
        pool: CopyPool::new(1).unwrap(),
    };
    // The first write maps the region.
    bench.write(&[bench.slice(0, Opcode::Write, 4096, 0)]);
    println!("| what | transport p50 us | GB/s | memcpy p50 us | GB/s | copy engine p50 us | GB/s |");
    println!("|---|---|---|---|---|---|---|");
    for opcode in [Opcode::Write, Opcode::Read] {
        bench.row(opcode, 4096, 1, 4096);
        bench.row(opcode, 4096, 64, 64 * 4096);
        for (len, rotate) in
            [(65_536, 65_536), (1 << 20, 1 << 20), (1 << 20, ROTATE), (16 << 20, ROTATE), (256 << 20, ROTATE)]
        {
            bench.row(opcode, len, 1, rotate);
        }
        bench.row(opcode, 1 << 20, 128, ROTATE);
    }
    for len in [4096, 1 << 20, 16 << 20] {
        let write = Slice {
            remote_address: grant("private").address,
            grant: Some(grant("private").token),
            ..bench.slice(0, Opcode::Write, len, 0)
        };
        let time = median((0..40).map(|_| timed(|| bench.write(&[write]))).collect());
        println!("process_vm write {len}: {:.2} us, {:.2} GB/s", micros(time), rate(len, time));
    }
    bench.node.transport.disconnect(path);
}

impl Bench {
    fn slice(&self, token: u64, opcode: Opcode, len: usize, at: usize) -> Slice {
        let local = self.local.host_view().slice(at, len).unwrap();
        slice(token, opcode, local, &self.grant, at as u64)
    }

    /// Submits, and waits; what was copied inline has ended already.
    fn write(&self, slices: &[Slice]) {
        let expected = self.node.events.completed() + slices.len();
        self.node.submit(self.path, slices).unwrap();
        self.node.events.wait(|seen| (seen.completions.len() >= expected).then_some(()));
    }

    fn row(&self, opcode: Opcode, len: usize, batch: usize, rotate: usize) {
        let total = len * batch;
        let rounds = (4 * GIB / total).clamp(12, 4000);
        let mut times = [const { Vec::new() }; 3];
        let mut at = 0;
        for _ in 0..rounds {
            let slices: Vec<Slice> =
                (0..batch).map(|n| self.slice(n as u64, opcode, len, (at + n * len) % rotate)).collect();
            let pairs: Vec<(HostView, HostView)> = (0..batch)
                .map(|n| {
                    let place = (at + n * len) % rotate;
                    let (local, bare) = (self.local.host_view(), self.bare.host_view());
                    let (local, bare) = (local.slice(place, len).unwrap(), bare.slice(place, len).unwrap());
                    if opcode == Opcode::Write { (local, bare) } else { (bare, local) }
                })
                .collect();
            times[0].push(timed(|| self.write(&slices)));
            times[1].push(timed(|| {
                for (from, to) in &pairs {
                    // SAFETY: both are alive, do not overlap, and nobody else uses them.
                    unsafe { libc::memcpy(to.as_ptr().cast(), from.as_ptr().cast(), from.len()) };
                }
            }));
            times[2].push(timed(|| {
                for (from, to) in &pairs {
                    // SAFETY: as above.
                    unsafe { self.pool.copy(*from, *to) }.unwrap();
                }
            }));
            at = (at + total) % rotate;
            self.node.events.forget();
        }
        let medians = times.map(median);
        let cold = if rotate > 64 << 20 { "cold" } else { "in cache" };
        print!("| {opcode:?} {batch} x {len} {cold} |");
        for time in medians {
            print!(" {:.2} | {:.2} |", micros(time), rate(total, time));
        }
        println!();
    }
}

fn timed(act: impl FnOnce()) -> Duration {
    let started = Instant::now();
    act();
    started.elapsed()
}

fn median(mut times: Vec<Duration>) -> Duration {
    times.sort_unstable();
    times[times.len() / 2]
}

fn micros(time: Duration) -> f64 {
    time.as_secs_f64() * 1e6
}

fn millis(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

fn rate(bytes: usize, time: Duration) -> f64 {
    bytes as f64 / time.as_secs_f64() / 1e9
}
