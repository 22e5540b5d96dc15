//! Measures allocate-and-free pairs on a pool with 10,000 free fragments.
//!
//! `cargo run --release -p posthorse-buffer --example alloc_bench`

use std::hint::black_box;
use std::time::Instant;

use posthorse_buffer::{Block, OffsetAllocator};
use posthorse_core::Result;

const PAIRS: u64 = 1_000_000;
const FRAGMENTS: usize = 10_000;
const ALIGNMENT: u64 = 4096;

/// SplitMix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014).
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    fn size(&mut self, most: u64) -> u64 {
        1 + self.next() % most
    }
}

/// A pool in which every second block of random sizes was freed.
fn fragmented(random: &mut Random, most: u64) -> Result<(OffsetAllocator, Vec<Block>)> {
    let mut allocator = OffsetAllocator::new(1 << 40, ALIGNMENT)?;
    let blocks =
        (0..2 * FRAGMENTS).map(|_| allocator.alloc(random.size(most))).collect::<Result<Vec<_>>>()?;
    let (mut kept, mut freed) = (Vec::new(), 0);
    for (at, block) in blocks.into_iter().enumerate() {
        if at % 2 == 0 {
            allocator.free(block)?;
            freed += 1;
        } else {
            kept.push(block);
        }
    }
    assert_eq!(allocator.stats().free_blocks, freed + 1);
    Ok((allocator, kept))
}

fn report(what: &str, start: Instant, allocator: &OffsetAllocator) {
    let ns = start.elapsed().as_nanos() as f64 / PAIRS as f64;
    println!("{what:<58} {ns:7.1} ns a pair, {} fragments", allocator.stats().free_blocks);
}

fn main() -> Result<()> {
    for (name, most) in [("4 KiB", 4096), ("up to 1 MiB", 1 << 20), ("up to 64 MiB", 64 << 20)] {
        let mut random = Random(1);
        let (mut allocator, mut kept) = fragmented(&mut random, most)?;

        let start = Instant::now();
        for _ in 0..PAIRS {
            let block = black_box(allocator.alloc(random.size(most))?);
            allocator.free(block)?;
        }
        report(&format!("{name}: allocate, free the same"), start, &allocator);

        let start = Instant::now();
        for _ in 0..PAIRS {
            let block = allocator.alloc(random.size(most))?;
            let victim = random.next() as usize % kept.len();
            allocator.free(std::mem::replace(&mut kept[victim], block))?;
        }
        report(&format!("{name}: allocate, free a random one of 10,000"), start, &allocator);
    }
    Ok(())
}
