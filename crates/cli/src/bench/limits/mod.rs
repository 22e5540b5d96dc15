//! What this host's memory and network can reach at best, measured by bare loops.
//!
//! Nothing in here uses any crate of Posthorse: what is compared with the product shares no code with it.

mod memory;
mod nontemporal;
mod stream;

use super::meter::Meter;

pub(crate) use memory::{Areas, MemoryLimit};
pub(crate) use stream::{StreamLimit, serve};

/// The best of what was tried.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Limit {
    /// How the highest rate was reached.
    pub(crate) name: String,
    /// The highest of the median rates.
    pub(crate) gb_per_s: f64,
    /// The lowest of the median latencies of a batch.
    pub(crate) p50_us: f64,
}

impl Limit {
    fn best<'a>(candidates: impl Iterator<Item = (String, &'a Meter)>) -> Self {
        let mut best = Self { name: String::new(), gb_per_s: 0.0, p50_us: f64::INFINITY };
        for (name, meter) in candidates {
            if meter.gb_per_s() > best.gb_per_s {
                best.gb_per_s = meter.gb_per_s();
                best.name = name;
            }
            let p50_us = meter.quantile_us(0.5);
            if p50_us > 0.0 {
                best.p50_us = best.p50_us.min(p50_us);
            }
        }
        if best.p50_us.is_infinite() {
            best.p50_us = 0.0;
        }
        best
    }
}
