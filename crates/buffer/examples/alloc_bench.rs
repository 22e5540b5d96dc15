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

/// A moment, by the clock and by what this thread has run until then. The second does not count the time in
/// which other programs had the processor.
struct Moment(Instant, Option<f64>);

impl Moment {
    fn now() -> Self {
        // Documentation/scheduler/sched-stats.rst of the kernel: the first field is the time on the processor, in nanoseconds.
        let schedstat = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap_or_default();
        Self(Instant::now(), schedstat.split(' ').next().and_then(|field| field.parse().ok()))
    }

    fn report(&self, what: &str, allocator: &OffsetAllocator) {
        let now = Self::now();
        let a_pair = |ns: f64| ns / PAIRS as f64;
        let wall = a_pair((now.0 - self.0).as_nanos() as f64);
        let run = self.1.zip(now.1).map_or_else(|| "?".to_owned(), |(a, b)| format!("{:.0}", a_pair(b - a)));
        let fragments = allocator.stats().free_blocks;
        println!("{what:<50} {wall:6.0} ns a pair, {run:>5} ns of them running; {fragments} fragments");
    }
}

fn main() -> Result<()> {
    for (name, most) in [("4 KiB", 4096), ("up to 1 MiB", 1 << 20), ("up to 64 MiB", 64 << 20)] {
        let mut random = Random(1);
        let (mut allocator, mut kept) = fragmented(&mut random, most)?;

        let start = Moment::now();
        for _ in 0..PAIRS {
            let block = black_box(allocator.alloc(random.size(most))?);
            allocator.free(block)?;
        }
        start.report(&format!("{name}: allocate, free the same"), &allocator);

        let start = Moment::now();
        for _ in 0..PAIRS {
            let block = allocator.alloc(random.size(most))?;
            let victim = random.next() as usize % kept.len();
            allocator.free(std::mem::replace(&mut kept[victim], block))?;
        }
        start.report(&format!("{name}: allocate, free a random one of 10,000"), &allocator);
    }
    Ok(())
}
