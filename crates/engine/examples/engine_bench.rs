//! What a transfer costs through the engine: small writes one at a time and in batches, over the transports that come
//! with Posthorse, between two engines of this process.
//!
//! `cargo run --release -p posthorse-engine --example engine_bench [shm] [tcp]`
#![allow(clippy::print_stdout)]

use std::sync::Arc;
use std::time::{Duration, Instant};

use posthorse_core::{
    Access, Deadline, Opcode, Priority, RemoteRange, Result, Route, TransferRequest, TransportId,
};
use posthorse_engine::{EngineConfig, RegisteredMemory, Segment, SubmitOptions, TransferEngine};
use posthorse_memory::MemoryOptions;

const LEN: usize = 400 << 20;

struct Bench {
    engine: TransferEngine,
    _peer: TransferEngine,
    segment: Segment,
    source: RegisteredMemory,
    target: RegisteredMemory,
}

fn engine() -> Result<TransferEngine> {
    let config = EngineConfig { advertise: "127.0.0.1".to_owned(), ..EngineConfig::default() };
    TransferEngine::builder().config(config).build()
}

impl Bench {
    fn new() -> Result<Self> {
        let (engine, peer) = (engine()?, engine()?);
        let memory = || MemoryOptions::new(LEN).shared(true).allocate().map(Arc::new);
        let source = engine.register(memory()?, Access::None)?;
        let target = peer.register(memory()?, Access::ReadWrite)?;
        let segment = engine.open(peer.name(), Deadline::after(Duration::from_secs(5)))?;
        Ok(Self { engine, _peer: peer, segment, source, target })
    }

    fn writes(&self, transport: TransportId, count: usize, len: u64) -> Vec<TransferRequest> {
        let request = |index: usize| TransferRequest {
            opcode: Opcode::Write,
            local: self.source.at(index as u64 * len),
            remote: RemoteRange {
                segment: self.segment.id(),
                address: self.target.address() + index as u64 * len,
                token: None,
            },
            len,
            priority: Priority::Medium,
            route: Route::Require(transport),
            group: 0,
        };
        (0..count).map(request).collect()
    }

    /// Times `rounds` of submitting and waiting: by a plan made once, or checking the requests each time.
    fn time(&self, requests: &[TransferRequest], reuse: bool, rounds: usize) -> Result<Vec<Duration>> {
        let plan = self.engine.plan(requests)?;
        let mut times = Vec::with_capacity(rounds);
        for round in 0..rounds + rounds / 10 + 1 {
            let started = Instant::now();
            let mut batch = self.engine.batch();
            if reuse {
                batch.post(&plan, SubmitOptions::default())?;
            } else {
                batch.submit(requests, SubmitOptions::default())?;
            }
            batch.wait(Deadline::NEVER)?;
            // What comes before is for caches and connections to warm up.
            if round > rounds / 10 {
                times.push(started.elapsed());
            }
        }
        times.sort_unstable();
        Ok(times)
    }

    fn report(&self, name: &str, count: usize, len: u64, rounds: usize) -> Result<()> {
        let requests = self.writes(self.engine.transport_id(name)?, count, len);
        for (what, reuse) in [("plan", true), ("fresh", false)] {
            let times = self.time(&requests, reuse, rounds)?;
            let at = |part: usize| times.get((times.len() * part / 100).min(times.len() - 1)).copied();
            let (p50, p99) = (at(50).unwrap_or_default(), at(99).unwrap_or_default());
            println!(
                "{name} {count:>6} x {len:>6} {what:<5}  p50 {:>9.2} us  p99 {:>9.2} us  {:>7.2} GB/s  {:>6.0} ns a slice",
                p50.as_nanos() as f64 / 1e3,
                p99.as_nanos() as f64 / 1e3,
                (count as u64 * len) as f64 / p50.as_nanos() as f64,
                p50.as_nanos() as f64 / count as f64,
            );
        }
        Ok(())
    }
}

fn main() -> Result<()> {
    let bench = Bench::new()?;
    let chosen: Vec<String> = std::env::args().skip(1).collect();
    for name in ["shm", "tcp"] {
        if !chosen.is_empty() && !chosen.iter().any(|wanted| wanted == name) {
            continue;
        }
        let rounds = if name == "shm" { 100_000 } else { 5_000 };
        bench.report(name, 1, 4096, rounds)?;
        bench.report(name, 64, 4096, rounds / 5)?;
        bench.report(name, 64, 8, rounds / 5)?;
        bench.report(name, 100_000, 4096, 10)?;
    }
    Ok(())
}
