//! One allocation and free on a pool with 10,000 fragments.
#![allow(missing_docs, clippy::unwrap_used)]

use criterion::{Criterion, criterion_group, criterion_main};
use posthorse_buffer::OffsetAllocator;

/// A pool in which every other block is taken: `fragments` holes that do not merge.
fn fragmented(fragments: u64) -> OffsetAllocator {
    let mut allocator = OffsetAllocator::new(fragments * 2 * 8192 + (1 << 30), 4096).unwrap();
    let blocks: Vec<_> = (0..fragments * 2).map(|_| allocator.alloc(8192).unwrap()).collect();
    for block in blocks.into_iter().step_by(2) {
        allocator.free(block).unwrap();
    }
    allocator
}

fn pairs(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("alloc and free, 10,000 fragments");
    for len in [4096_u64, 8192, 65_536, 1 << 20] {
        let mut allocator = fragmented(10_000);
        group.bench_function(format!("{len} bytes"), |bencher| {
            bencher.iter(|| {
                let block = allocator.alloc(len).unwrap();
                allocator.free(block).unwrap();
            });
        });
    }
    group.finish();
}

criterion_group!(benches, pairs);
criterion_main!(benches);
