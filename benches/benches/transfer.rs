//! Writes between two engines of one process, by each transport.
#![allow(missing_docs, clippy::unwrap_used)]

use std::sync::Arc;
use std::time::Duration;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use posthorse_core::{Access, Deadline, Opcode, Priority, RemoteRange, Route, TransferRequest};
use posthorse_engine::{EngineConfig, SubmitOptions, TransferEngine};
use posthorse_memory::MemoryOptions;

const REGION: usize = 64 << 20;

fn engine() -> TransferEngine {
    let config = EngineConfig { advertise: "127.0.0.1".to_owned(), ..EngineConfig::default() };
    TransferEngine::builder().config(config).build().unwrap()
}

fn writes(criterion: &mut Criterion) {
    let (a, b) = (engine(), engine());
    let memory = || Arc::new(MemoryOptions::new(REGION).shared(true).allocate().unwrap());
    let source = a.register(memory(), Access::None).unwrap();
    let target = b.register(memory(), Access::ReadWrite).unwrap();
    let peer = a.open(b.name(), Deadline::after(Duration::from_secs(10))).unwrap();
    let mut group = criterion.benchmark_group("write");
    for transport in ["shm", "tcp"] {
        let route = Route::Require(a.transport_id(transport).unwrap());
        for (len, count) in [(4096_u64, 1_u64), (4096, 64), (1 << 20, 1), (16 << 20, 1)] {
            let requests: Vec<_> = (0..count)
                .map(|index| TransferRequest {
                    opcode: Opcode::Write,
                    local: source.at(index * len),
                    remote: RemoteRange {
                        segment: peer.id(),
                        address: target.address() + index * len,
                        token: None,
                    },
                    len,
                    priority: Priority::Medium,
                    route,
                    group: 0,
                })
                .collect();
            let plan = a.plan(&requests).unwrap();
            group.throughput(Throughput::Bytes(len * count));
            group.bench_function(BenchmarkId::new(transport, format!("{count} x {len}")), |bencher| {
                bencher.iter(|| {
                    let mut batch = a.batch();
                    batch.post(&plan, SubmitOptions::default()).unwrap();
                    batch.wait(Deadline::NEVER).unwrap();
                });
            });
        }
    }
    group.finish();
}

criterion_group! {
    name = benches;
    config = Criterion::default().sample_size(20);
    targets = writes
}
criterion_main!(benches);
