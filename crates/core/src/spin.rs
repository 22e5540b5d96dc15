//! Whether waiting by looking again and again is worth it.
//!
//! A thread that spins and yields finds what it waits for sooner than one that sleeps and is woken, as long as there is
//! a processor for it. Where others want them all, each yield costs a time slice of theirs, some milliseconds, and a
//! thread that sleeps is put back at once.

use std::sync::LazyLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// A yield that takes as long has let others go before us.
const LONG: Duration = Duration::from_micros(300);
/// How long nobody spins after that.
const PAUSE: Duration = Duration::from_millis(200);

static START: LazyLock<Instant> = LazyLock::new(Instant::now);
static SPINNING: Spinning = Spinning(AtomicU64::new(0));

/// When spinning is tried again, in microseconds after the start.
struct Spinning(AtomicU64);

impl Spinning {
    fn pays(&self, now: Instant) -> bool {
        micros(now) >= self.0.load(Ordering::Relaxed)
    }

    fn yielded(&self, from: Instant, to: Instant) {
        if to.duration_since(from) >= LONG {
            self.0.fetch_max(micros(to + PAUSE), Ordering::Relaxed);
        }
    }
}

/// Whether a thread of this process that waits should spin now.
pub fn pays(now: Instant) -> bool {
    SPINNING.pays(now)
}

/// Yields, for a thread that spins. When that takes long, no thread of this process should spin for a while.
pub fn give_way() {
    let before = Instant::now();
    thread::yield_now();
    SPINNING.yielded(before, Instant::now());
}

fn micros(at: Instant) -> u64 {
    at.saturating_duration_since(*START).as_micros() as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spinning_pauses_for_a_while_after_a_long_yield() {
        let (spinning, from) = (Spinning(AtomicU64::new(0)), *START);
        let to = from + LONG - Duration::from_micros(1);
        spinning.yielded(from, to);
        assert!(spinning.pays(to));
        let to = from + LONG;
        spinning.yielded(from, to);
        // One that ended earlier shortens nothing.
        spinning.yielded(from, from + LONG);
        assert!(!spinning.pays(to) && !spinning.pays(to + PAUSE - Duration::from_micros(1)));
        assert!(spinning.pays(to + PAUSE));
    }
}
