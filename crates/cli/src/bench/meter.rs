//! What is measured, round by round.

use std::time::{Duration, Instant};

use hdrhistogram::Histogram;

/// The longest batch that a histogram tells apart from longer ones.
const LONGEST_NANOS: u64 = 3_600_000_000_000;

/// Rates by round and latencies by batch, of one subject.
#[derive(Debug, Clone)]
pub(crate) struct Meter {
    rates: Vec<f64>,
    latencies: Latencies,
}

/// The time of each batch, in nanoseconds, to three digits.
#[derive(Debug, Clone)]
pub(crate) struct Latencies(Histogram<u64>);

/// What one round came to.
#[derive(Debug, Clone)]
pub(crate) struct Round {
    /// Bytes moved.
    pub(crate) bytes: u64,
    /// From the start of the first batch to the end of the last.
    pub(crate) elapsed: Duration,
    /// Of its batches.
    pub(crate) latencies: Latencies,
}

/// What one thread did in a round.
#[derive(Debug, Clone)]
pub(crate) struct Span {
    pub(crate) begin: Instant,
    pub(crate) end: Instant,
    /// Bytes moved.
    pub(crate) bytes: u64,
    pub(crate) latencies: Latencies,
}

impl Round {
    /// A round of threads that worked side by side.
    pub(crate) fn of(spans: impl IntoIterator<Item = Span>) -> Self {
        let mut round = Self { bytes: 0, elapsed: Duration::ZERO, latencies: Latencies::new() };
        let mut ends: Option<(Instant, Instant)> = None;
        for span in spans {
            round.bytes += span.bytes;
            round.latencies.merge(&span.latencies);
            let (begin, end) = ends.unwrap_or((span.begin, span.end));
            ends = Some((begin.min(span.begin), end.max(span.end)));
        }
        if let Some((begin, end)) = ends {
            round.elapsed = end.duration_since(begin);
        }
        round
    }
}

impl Meter {
    /// Without any rounds yet.
    pub(crate) fn new() -> Self {
        Self { rates: Vec::new(), latencies: Latencies::new() }
    }

    /// Adds a round.
    pub(crate) fn add(&mut self, round: &Round) {
        let seconds = round.elapsed.as_secs_f64();
        if seconds > 0.0 {
            self.rates.push(round.bytes as f64 / seconds / 1e9);
        }
        self.latencies.merge(&round.latencies);
    }

    /// The median of the rounds' rates, in GB/s; zero before the first.
    pub(crate) fn gb_per_s(&self) -> f64 {
        median(&self.rates)
    }

    /// The time below which `share` of the batches stayed, in microseconds; zero before the first.
    pub(crate) fn quantile_us(&self, share: f64) -> f64 {
        self.latencies.0.value_at_quantile(share) as f64 / 1000.0
    }
}

impl Latencies {
    #[expect(clippy::expect_used, reason = "these bounds are constants that hdrhistogram accepts")]
    pub(crate) fn new() -> Self {
        Self(Histogram::new_with_bounds(1, LONGEST_NANOS, 3).expect("bounds of a histogram"))
    }

    /// Adds a batch.
    pub(crate) fn record(&mut self, elapsed: Duration) {
        self.0.saturating_record(u64::try_from(elapsed.as_nanos()).unwrap_or(u64::MAX));
    }

    /// Adds the batches of another.
    pub(crate) fn merge(&mut self, other: &Self) {
        // Both have the same bounds, so nothing is out of range.
        let _ = self.0.add(&other.0);
    }
}

fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    match (sorted.get(sorted.len() / 2), sorted.len() % 2) {
        (None, _) => 0.0,
        (Some(upper), 1) => *upper,
        (Some(upper), _) => (sorted[sorted.len() / 2 - 1] + upper) / 2.0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn round(bytes: u64, millis: u64) -> Round {
        let mut latencies = Latencies::new();
        latencies.record(Duration::from_millis(millis));
        Round { bytes, elapsed: Duration::from_millis(millis), latencies }
    }

    #[test]
    fn a_meter_gives_medians() {
        let mut meter = Meter::new();
        assert_eq!((meter.gb_per_s(), meter.quantile_us(0.5)), (0.0, 0.0));
        for millis in [1, 100, 2] {
            meter.add(&round(4_000_000, millis));
        }
        assert!((meter.gb_per_s() - 2.0).abs() < 1e-9);
        assert!((meter.quantile_us(0.5) / 2000.0 - 1.0).abs() < 0.01);
        assert!((meter.quantile_us(0.99) / 100_000.0 - 1.0).abs() < 0.01);
        meter.add(&round(4_000_000, 4));
        assert!((meter.gb_per_s() - 1.5).abs() < 1e-9);
    }

    #[test]
    fn nothing_measured_is_too_long_or_too_short() {
        let mut latencies = Latencies::new();
        latencies.record(Duration::ZERO);
        latencies.record(Duration::MAX);
        assert_eq!(latencies.0.len(), 2);
    }
}
