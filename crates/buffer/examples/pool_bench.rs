//! Measures a pool: a buffer taken and returned, by one thread and by two; and how soon a thread that
//! waits has the buffer that another returns, for several spans of spinning.
//!
//! `cargo run --release -p posthorse-buffer --example pool_bench`

use std::thread;
use std::time::{Duration, Instant};

use posthorse_buffer::{Pool, PoolConfig};
use posthorse_core::{Deadline, DeviceView, Location, Region, Result, View};

/// Addresses only: a pool touches no memory by itself.
#[derive(Debug)]
struct Addresses(u64);

// SAFETY: a device view cannot be dereferenced, and nothing here gives it to a driver.
unsafe impl Region for Addresses {
    fn view(&self) -> View {
        View::Device(DeviceView { device: Location::Any, address: 1 << 40, len: self.0 })
    }
}

fn take_and_return(threads: u32) -> Result<()> {
    const PAIRS: u32 = 1_000_000;
    let pool = Pool::new(Addresses(1 << 30), &PoolConfig::default())?;
    let start = Instant::now();
    thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| (0..PAIRS / threads).try_for_each(|_| pool.try_alloc(4096).map(drop)));
        }
    });
    println!("taken and returned, {threads} threads: {:.0} ns a pair", nanoseconds(start) / f64::from(PAIRS));
    Ok(())
}

/// From the moment one thread returns a buffer to the moment the thread that waits for it has it.
fn hand_over(spin: Duration) -> Result<()> {
    const HANDS: usize = 2000;
    let pool = Pool::new(Addresses(4096), &PoolConfig { spin, ..PoolConfig::default() })?;
    let mut held = pool.try_alloc(4096)?;
    let mut latencies = Vec::with_capacity(HANDS);
    for _ in 0..HANDS {
        let (returned, received) = thread::scope(|scope| {
            let taker = scope.spawn(|| (pool.alloc(4096, Deadline::NEVER), Instant::now()));
            while pool.stats().waiting == 0 {
                thread::yield_now();
            }
            let returned = Instant::now();
            drop(held);
            (returned, taker.join())
        });
        let Ok((buffer, at)) = received else { break };
        held = buffer?;
        latencies.push((at - returned).as_nanos() as f64 / 1000.0);
    }
    latencies.sort_by(f64::total_cmp);
    let at = |share: usize| latencies.get(latencies.len() * share / 100).copied().unwrap_or_default();
    println!("to a waiting thread, spinning {spin:?}: p50 {:.1} µs, p99 {:.1} µs", at(50), at(99));
    Ok(())
}

fn nanoseconds(start: Instant) -> f64 {
    start.elapsed().as_nanos() as f64
}

fn main() -> Result<()> {
    take_and_return(1)?;
    take_and_return(2)?;
    [0, 5, 20, 50, 100].into_iter().try_for_each(|spin| hand_over(Duration::from_micros(spin)))
}
