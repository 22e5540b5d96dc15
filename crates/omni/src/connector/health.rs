//! How a connector is doing.

use std::sync::atomic::{AtomicU64, Ordering};

use posthorse_buffer::PoolStats;
use serde_json::{Value, json};

use super::{Connector, Inner};
use crate::offer::OfferStats;

/// How a connector is doing: counters since its start, and what it holds now.
#[derive(Debug, Clone)]
pub struct Health {
    /// Whether it is open.
    pub open: bool,
    /// Payloads offered.
    pub puts: u64,
    /// Payloads received.
    pub gets: u64,
    /// Bytes of payloads offered and received.
    pub bytes: u64,
    /// Gets that failed, except for those whose deadline passed.
    pub errors: u64,
    /// Gets whose deadline passed.
    pub timeouts: u64,
    /// Gets of consumers that were served: by a write, or by their own read.
    pub served: u64,
    /// Pulls of consumers that failed.
    pub serve_errors: u64,
    /// The pool.
    pub pool: PoolStats,
    /// The table of offers.
    pub offers: OfferStats,
    /// Streams that are sent: open, or ended and not yet received to their end.
    pub streams: usize,
    /// Slots and grants that are held back, since somebody may still touch them.
    pub withheld: usize,
}

#[derive(Debug, Default)]
pub(super) struct Counters {
    puts: AtomicU64,
    gets: AtomicU64,
    bytes: AtomicU64,
    errors: AtomicU64,
    timeouts: AtomicU64,
    served: AtomicU64,
    serve_errors: AtomicU64,
}

impl Counters {
    pub(super) fn put(&self, bytes: u64) {
        self.puts.fetch_add(1, Ordering::Relaxed);
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    pub(super) fn got<T>(&self, outcome: &posthorse_core::Result<T>, bytes: impl Fn(&T) -> u64) {
        match outcome {
            Ok(got) => {
                self.gets.fetch_add(1, Ordering::Relaxed);
                self.bytes.fetch_add(bytes(got), Ordering::Relaxed);
            }
            Err(error) if error.kind() == posthorse_core::ErrorKind::DeadlineExceeded => {
                self.timeouts.fetch_add(1, Ordering::Relaxed);
            }
            Err(_) => {
                self.errors.fetch_add(1, Ordering::Relaxed);
            }
        }
    }

    pub(super) fn serve(&self, served: bool) {
        let counter = if served { &self.served } else { &self.serve_errors };
        counter.fetch_add(1, Ordering::Relaxed);
    }
}

impl Connector {
    /// How the connector is doing. In a child process it is not open and holds nothing.
    pub fn health(&self) -> Health {
        self.inner().health()
    }
}

impl Inner {
    pub(super) fn health(&self) -> Health {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let (pool, offers, streams, withheld) = if self.is_forked() {
            (PoolStats::default(), OfferStats::default(), 0, 0)
        } else {
            let withheld = self.fencing.lock().len() + self.engine.withheld();
            (self.pool.stats(), self.state.lock().offers.stats(), self.streams.len(), withheld)
        };
        Health {
            open: self.check_open().is_ok(),
            puts: read(&self.counters.puts),
            gets: read(&self.counters.gets),
            bytes: read(&self.counters.bytes),
            errors: read(&self.counters.errors),
            timeouts: read(&self.counters.timeouts),
            served: read(&self.counters.served),
            serve_errors: read(&self.counters.serve_errors),
            pool,
            offers,
            streams,
            withheld,
        }
    }
}

impl Health {
    /// The same as JSON, for peers that ask.
    pub(super) fn to_json(&self) -> Value {
        json!({
            "status": if self.open { "healthy" } else { "closed" },
            "puts": self.puts,
            "gets": self.gets,
            "bytes": self.bytes,
            "errors": self.errors,
            "timeouts": self.timeouts,
            "served": self.served,
            "serve_errors": self.serve_errors,
            "pool_capacity": self.pool.capacity,
            "pool_used": self.pool.used,
            "offers": self.offers.offers,
            "parked": self.offers.parked,
            "streams": self.streams,
            "withheld": self.withheld,
        })
    }
}
