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
/// When spinning is tried again, in microseconds after the start.
static AGAIN: AtomicU64 = AtomicU64::new(0);

/// Whether a thread of this process that waits should spin now.
pub fn pays(now: Instant) -> bool {
    micros(now) >= AGAIN.load(Ordering::Relaxed)
}

/// Yields, for a thread that spins. When that takes long, no thread of this process should spin for a while.
pub fn give_way() {
    let before = Instant::now();
    thread::yield_now();
    let after = Instant::now();
    if after.duration_since(before) >= LONG {
        AGAIN.fetch_max(micros(after + PAUSE), Ordering::Relaxed);
    }
}

fn micros(at: Instant) -> u64 {
    at.saturating_duration_since(*START).as_micros() as u64
}
