//! Several paths of one transport to one peer: what each carries, and which takes what comes next.
//!
//! What decides are pure functions of what was measured. A slice goes to the rail that is expected to be done with it
//! first, by what is under way there and what it carried of late. So a slow rail gets less, and one that stands still
//! nothing but what it has; and nobody has to say beforehand how fast a rail is.

use std::time::{Duration, Instant};

/// Over which time what a rail carries is averaged.
const MEMORY: Duration = Duration::from_millis(200);

/// What a rail has under way at most is what it carries in this time: the rest waits where another rail can take it.
const WINDOW: Duration = Duration::from_millis(50);

/// It has so much under way in any case, in bytes.
const LEAST_WINDOW: u64 = 2 << 20;

/// What a rail is taken to carry of which nothing is known, in bytes per second.
const UNKNOWN: f64 = 1e9;

/// What a rail carries, as measured by what arrives.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Meter {
    /// Bytes per second; zero while nothing was measured.
    rate: f64,
    /// Since when what arrives counts.
    since: Instant,
}

impl Meter {
    pub(crate) fn new(now: Instant) -> Self {
        Self { rate: 0.0, since: now }
    }

    /// Something departs after nothing was under way.
    pub(crate) fn begin(&mut self, now: Instant) {
        self.since = now;
    }

    /// So much arrived since this was last told.
    pub(crate) fn arrived(&mut self, bytes: u64, now: Instant) {
        let took = now.saturating_duration_since(self.since).as_secs_f64().max(1e-6);
        self.since = now;
        let rate = bytes as f64 / took;
        if self.rate == 0.0 {
            self.rate = rate;
        } else {
            let weight = 1.0 - (-took / MEMORY.as_secs_f64()).exp();
            self.rate += (rate - self.rate) * weight;
        }
    }

    /// How a rail that is `loaded` with so many bytes stands.
    pub(crate) fn rail(&self, loaded: u64, under_way: u64, bandwidth: u64, now: Instant) -> Rail {
        let silent = if under_way == 0 { Duration::ZERO } else { now.saturating_duration_since(self.since) };
        Rail { rate: self.rate, loaded, bandwidth, silent }
    }

    /// Whether more may be under way than this.
    pub(crate) fn has_window(&self, under_way: u64) -> bool {
        under_way < LEAST_WINDOW.max((self.rate * WINDOW.as_secs_f64()) as u64)
    }
}

/// How a rail stands.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Rail {
    /// Bytes per second, as measured; zero when nothing was.
    pub(crate) rate: f64,
    /// Bytes that are under way or wait for it.
    pub(crate) loaded: u64,
    /// What it should carry, in bytes per second; zero when unknown.
    pub(crate) bandwidth: u64,
    /// For how long nothing has arrived of what is under way.
    pub(crate) silent: Duration,
}

/// The rail that is expected to be done first with so many bytes more.
pub(crate) fn best(rails: &[Rail], bytes: u64) -> usize {
    // One of which nothing is known is taken to be as good as the best of the others: so it is tried.
    let known = rails.iter().map(|rail| rail.rate).fold(0.0, f64::max);
    let done_after = |rail: &Rail| {
        let rate = match rail {
            Rail { rate, .. } if *rate > 0.0 => *rate,
            _ if known > 0.0 => known,
            Rail { bandwidth, .. } if *bandwidth > 0 => *bandwidth as f64,
            _ => UNKNOWN,
        };
        (rail.loaded + bytes) as f64 / rate + rail.silent.as_secs_f64()
    };
    let scores = rails.iter().map(done_after).enumerate();
    scores.min_by(|a, b| a.1.total_cmp(&b.1)).map_or(0, |(at, _)| at)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    fn rail(rate: f64, loaded: u64) -> Rail {
        Rail { rate, loaded, bandwidth: 0, silent: Duration::ZERO }
    }

    /// How many of a thousand slices each rail gets.
    fn shares(mut rails: Vec<Rail>) -> Vec<u64> {
        let mut shares = vec![0; rails.len()];
        for _ in 0..1000 {
            let at = best(&rails, 1000);
            rails[at].loaded += 1000;
            shares[at] += 1;
        }
        shares
    }

    #[test]
    fn rails_get_what_they_carry() {
        assert_eq!(shares(vec![rail(1e6, 0), rail(1e6, 0)]), [500, 500]);
        let two_to_one = shares(vec![rail(2e6, 0), rail(1e6, 0)]);
        assert!((660..=674).contains(&two_to_one[0]), "{two_to_one:?}");
        assert_eq!(shares(vec![rail(1e6, 0), rail(0.0, 0)]), [500, 500], "what is not known is tried");
        let loaded = shares(vec![rail(1e6, 500_000), rail(1e6, 0)]);
        assert_eq!(loaded, [250, 750]);
    }

    #[test]
    fn a_rail_that_stands_still_gets_nothing_more() {
        let silent = Rail { silent: 2000 * MS, ..rail(1e6, 10_000) };
        assert_eq!(shares(vec![silent, rail(1e6, 0)]), [0, 1000]);
        let by_name = [Rail { bandwidth: 10, ..rail(0.0, 0) }, Rail { bandwidth: 20, ..rail(0.0, 0) }];
        assert_eq!(best(&by_name, 100), 1, "before anything is measured, by what they are said to carry");
    }

    #[test]
    fn what_is_measured_follows_what_arrives() {
        let start = Instant::now();
        let mut meter = Meter::new(start);
        let mut now = start;
        for _ in 0..100 {
            now += 10 * MS;
            meter.arrived(50_000, now);
        }
        assert!((meter.rate - 5e6).abs() < 1e3, "{meter:?}");
        // Idle time does not count.
        now += 1000 * MS;
        meter.begin(now);
        now += 10 * MS;
        meter.arrived(50_000, now);
        assert!((meter.rate - 5e6).abs() < 1e3, "{meter:?}");
        for _ in 0..100 {
            now += 10 * MS;
            meter.arrived(20_000, now);
        }
        assert!((meter.rate - 2e6).abs() < 1e5, "{meter:?}");
        assert_eq!(meter.rail(7, 0, 0, now + MS).silent, Duration::ZERO);
        assert_eq!(meter.rail(7, 1, 0, now + MS).silent, MS);
        assert!(meter.has_window(LEAST_WINDOW - 1) && !meter.has_window(LEAST_WINDOW));
    }
}
