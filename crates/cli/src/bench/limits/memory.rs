//! What copying within this host's memory can reach: `memcpy` and non-temporal stores, by one thread and by two.

use std::sync::Barrier;
use std::time::{Duration, Instant};

use super::Limit;
use super::nontemporal;
use crate::bench::meter::{Latencies, Meter, Round, Span};

/// Two areas to copy between, both populated.
#[derive(Debug)]
pub(crate) struct Areas {
    source: Vec<u8>,
    target: Vec<u8>,
}

impl Areas {
    /// Two areas of `len` bytes each.
    pub(crate) fn new(len: usize) -> Self {
        let area = |value: u8| {
            let mut area = vec![0; len];
            nontemporal::prefer_huge_pages(&mut area);
            // Written, since pages that were only read may all be one page of zeros.
            area.fill(value);
            area
        };
        Self { source: area(1), target: area(2) }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    Memcpy,
    NonTemporal,
}

impl Way {
    const fn name(self) -> &'static str {
        match self {
            Self::Memcpy => "memcpy",
            Self::NonTemporal => "non-temporal stores",
        }
    }

    fn copy(self, source: &[u8], target: &mut [u8]) {
        // `copy_from_slice` of a length that is not known to the compiler is a call of libc's memcpy.
        if self == Self::Memcpy || !nontemporal::copy(source, target) {
            target.copy_from_slice(source);
        }
    }
}

/// The limit of one shape of batch.
#[derive(Debug)]
pub(crate) struct MemoryLimit {
    block: usize,
    batch: usize,
    candidates: Vec<Candidate>,
}

#[derive(Debug)]
struct Candidate {
    way: Way,
    /// Where each of its threads goes on, in bytes from the start of the thread's part.
    cursors: Vec<usize>,
    meter: Meter,
}

impl MemoryLimit {
    /// For batches of `batch` blocks of `block` bytes each.
    pub(crate) fn new(block: usize, batch: usize) -> Self {
        let candidate = |(way, threads)| Candidate { way, cursors: vec![0; threads], meter: Meter::new() };
        let ways = [(Way::Memcpy, 1), (Way::NonTemporal, 1), (Way::Memcpy, 2), (Way::NonTemporal, 2)];
        Self { block, batch, candidates: ways.map(candidate).into() }
    }

    /// Measures each candidate for its part of `duration`.
    pub(crate) fn round(&mut self, areas: &mut Areas, duration: Duration) {
        let part = duration / self.candidates.len() as u32;
        for candidate in &mut self.candidates {
            if let Some(round) = candidate.run(areas, self.block, self.batch, part) {
                candidate.meter.add(&round);
            }
        }
    }

    /// The best of the candidates.
    pub(crate) fn best(&self) -> Limit {
        Limit::best(self.candidates.iter().map(|candidate| {
            let threads = match candidate.cursors.len() {
                1 => "1 thread".to_owned(),
                threads => format!("{threads} threads"),
            };
            (format!("{}, {threads}", candidate.way.name()), &candidate.meter)
        }))
    }
}

impl Candidate {
    /// Nothing where a thread's part of the areas does not hold one block.
    fn run(&mut self, areas: &mut Areas, block: usize, batch: usize, duration: Duration) -> Option<Round> {
        let part = areas.source.len() / self.cursors.len();
        if part < block || block == 0 {
            return None;
        }
        let way = self.way;
        let sources = areas.source.chunks_exact(part);
        let targets = areas.target.chunks_exact_mut(part);
        // As with what is measured, the clock starts when all threads are there.
        let barrier = Barrier::new(self.cursors.len());
        let spans: Vec<Span> = std::thread::scope(|scope| {
            let threads: Vec<_> = self
                .cursors
                .iter_mut()
                .zip(sources.zip(targets))
                .map(|(cursor, (source, target))| {
                    let barrier = &barrier;
                    scope.spawn(move || {
                        let mut latencies = Latencies::new();
                        let mut bytes = 0;
                        barrier.wait();
                        let begin = Instant::now();
                        let mut now = begin;
                        while bytes == 0 || now.duration_since(begin) < duration {
                            for _ in 0..batch {
                                if *cursor + block > part {
                                    *cursor = 0;
                                }
                                let range = *cursor..*cursor + block;
                                way.copy(&source[range.clone()], &mut target[range]);
                                *cursor += block.next_multiple_of(64);
                            }
                            bytes += (block * batch) as u64;
                            let after = Instant::now();
                            latencies.record(after.duration_since(now));
                            now = after;
                        }
                        Span { begin, end: now, bytes, latencies }
                    })
                })
                .collect();
            threads.into_iter().filter_map(|thread| thread.join().ok()).collect()
        });
        Some(Round::of(spans))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_best_way_is_named_with_its_figures() {
        let mut areas = Areas::new(1 << 20);
        let mut limit = MemoryLimit::new(4096, 8);
        limit.round(&mut areas, Duration::from_millis(4));
        let best = limit.best();
        assert!(best.gb_per_s > 0.0 && best.p50_us > 0.0, "{best:?}");
        assert!(best.name.contains("thread"), "{best:?}");
        // Every candidate went round the whole areas at least once.
        assert!(areas.target.iter().all(|byte| *byte == 1));
    }

    #[test]
    fn a_block_that_fits_one_thread_alone_is_measured_by_one() {
        let mut areas = Areas::new(1 << 16);
        let mut limit = MemoryLimit::new(1 << 16, 1);
        limit.round(&mut areas, Duration::from_millis(1));
        assert!(limit.best().name.ends_with("1 thread"));
    }
}
