//! What admitting a claim costs: `cargo run --release -p posthorse-segment --example admit`.
#![allow(clippy::unwrap_used)]

use std::hint::black_box;
use std::sync::Arc;
use std::thread;
use std::time::Instant;

use posthorse_core::{Access, Claim, DeviceView, Gate, Location, Region, View};
use posthorse_segment::Registry;

const GRANTS: u64 = 10_000;
const ROUNDS: u64 = 10_000;
const REPEATS: u64 = 500;

#[derive(Debug)]
struct Imagined;

// SAFETY: no host memory, and no device has it, so none is asked to touch it.
unsafe impl Region for Imagined {
    fn view(&self) -> View {
        View::Device(DeviceView { device: Location::Cuda(0), address: 1 << 32, len: GRANTS * 4096 })
    }
}

fn main() {
    let registry = Registry::new();
    let id = registry.register(Arc::new(Imagined), Access::None).unwrap().id;
    let grants: Vec<_> = (0..GRANTS)
        .map(|n| registry.grant_tokenless(id, n * 4096, 4096, Access::Write, Some("b:1")).unwrap())
        .collect();
    for (name, with_token) in [("with token", true), ("without token", false)] {
        for threads in 1..=2 {
            let one = |thread: u64| {
                let chunks = (0..REPEATS).map(|repeat| {
                    let start = Instant::now();
                    for round in 0..ROUNDS {
                        let grant = &grants[((thread + repeat * ROUNDS + round) * 7919 % GRANTS) as usize];
                        let token = with_token.then_some(grant.token);
                        let claim = Claim {
                            peer: "b:1",
                            token,
                            address: grant.address,
                            len: 4096,
                            access: Access::Write,
                        };
                        let admission = registry.admit(black_box(&claim)).unwrap();
                        drop(black_box(admission.enter()));
                    }
                    start.elapsed().as_nanos() as u64 / ROUNDS
                });
                // Other programs only ever add: the lower quartile of short chunks leaves them out.
                let mut chunks: Vec<_> = chunks.collect();
                chunks.sort_unstable();
                chunks[chunks.len() / 4]
            };
            let one = &one;
            let ns = thread::scope(|scope| {
                let running: Vec<_> = (0..threads).map(|n| scope.spawn(move || one(n * 1234))).collect();
                running.into_iter().map(|thread| thread.join().unwrap()).max().unwrap()
            });
            println!("{name}, {threads} threads: {ns} ns per admit and enter, each thread");
        }
    }
}
