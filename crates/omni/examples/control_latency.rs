//! The time of a request and its reply over loopback: `cargo run --release --example control_latency [COUNT]`.

use std::sync::Arc;
use std::time::{Duration, Instant};

use posthorse_core::{Deadline, Result};
use posthorse_omni::control::{ControlLimits, ControlPlane, Peer, Responder, Service};
use posthorse_omni::message::{Reply, Request};

struct Pong;

impl Service for Pong {
    fn handle(&self, _: &Peer, _: Request, responder: Responder) {
        responder.reply(&Reply::Ok);
    }
}

fn main() -> Result<()> {
    let count = std::env::args().nth(1).and_then(|count| count.parse().ok()).unwrap_or(20_000);
    // Two planes, as two processes would have them.
    let (producer, consumer) =
        (ControlPlane::start(ControlLimits::default())?, ControlPlane::start(ControlLimits::default())?);
    let listener = producer.listen("127.0.0.1:0", Arc::new(Pong))?;
    let address = listener.local_address().to_string();
    let dialer = consumer.dialer();
    let request = Request::Ping.encode()?;
    let mut times = Vec::with_capacity(count);
    for _ in 0..count {
        let begin = Instant::now();
        dialer.request_blocking(&address, request.clone(), Deadline::after(Duration::from_secs(5)))?;
        times.push(begin.elapsed());
    }
    times.sort_unstable();
    let at = |percent: usize| times.get(times.len() * percent / 100).copied().unwrap_or_default();
    println!("{count} round trips: p50 {:?}, p90 {:?}, p99 {:?}", at(50), at(90), at(99));
    let deadline = Deadline::after(Duration::from_secs(5));
    consumer.close(deadline)?;
    producer.close(deadline)
}
