//! The copy engine beside libc's memcpy (`copy_from_slice`), on buffers that are used in turn, so that large ones come
//! from memory.
#![allow(missing_docs, clippy::unwrap_used)]

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use posthorse_memory::CopyPool;

/// Bytes of each side, all buffers together.
const FOOTPRINT: usize = 1 << 29;

fn copies(criterion: &mut Criterion) {
    let source = vec![1_u8; FOOTPRINT];
    let mut target = vec![0_u8; FOOTPRINT];
    let pool = CopyPool::new(CopyPool::default_helpers()).unwrap();
    let mut group = criterion.benchmark_group("copy");
    for len in [4 << 10, 64 << 10, 1 << 20, 16 << 20, 256 << 20] {
        group.throughput(Throughput::Bytes(len as u64));
        let count = FOOTPRINT / len;
        let mut turn = 0;
        let mut next = move || {
            turn = (turn + 1) % count;
            turn * len..(turn + 1) * len
        };
        group.bench_function(BenchmarkId::new("libc", len), |bencher| {
            bencher.iter(|| {
                let part = next();
                target[part.clone()].copy_from_slice(&source[part]);
            });
        });
        group.bench_function(BenchmarkId::new("engine", len), |bencher| {
            bencher.iter(|| {
                let part = next();
                pool.copy_slice(&source[part.clone()], &mut target[part]).unwrap();
            });
        });
    }
    group.finish();
}

criterion_group! {
    name = benches;
    config = Criterion::default().sample_size(20);
    targets = copies
}
criterion_main!(benches);
