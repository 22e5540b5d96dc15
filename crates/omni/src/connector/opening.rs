//! Paths to producers that awaited gets are to take: one attempt for all gets that want the same.
//!
//! A producer that answers on its control port and cannot be reached otherwise costs as much time as a connection may
//! take, on a thread that other gets may need.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use posthorse_core::{Deadline, Error, Incarnation, Result};
use posthorse_engine::Segment;
use tokio::sync::Mutex as Turn;

use super::Inner;
use super::reach::not_reached;

/// Lives of producers beyond which those that nobody opens are forgotten.
const MOST: usize = 64;
/// What a get waits for that waits for another's attempt.
const WHAT: &str = "a path to the producer";

/// One life of a producer.
type Life = (String, Incarnation);

/// The producers that are being opened.
#[derive(Debug, Default)]
pub(super) struct Openings(Mutex<HashMap<Life, Arc<Turn<Last>>>>);

/// When the last attempt failed, and of what.
type Last = Option<(Instant, Error)>;

impl Openings {
    fn turn(&self, life: &Life) -> Arc<Turn<Last>> {
        let mut turns = self.0.lock();
        if turns.len() >= MOST {
            turns.retain(|_, turn| Arc::strong_count(turn) > 1);
        }
        Arc::clone(turns.entry(life.clone()).or_default())
    }
}

impl Inner {
    /// A producer's segment, opened on a thread that may block. Gets that waited while it failed fail of the same.
    pub(super) async fn open_elsewhere(
        self: &Arc<Self>,
        name: &str,
        incarnation: Incarnation,
        deadline: Deadline,
    ) -> Result<Segment> {
        let (since, inner, life) = (Instant::now(), Arc::clone(self), (name.to_owned(), incarnation));
        let turn = self.openings.turn(&life);
        // One task: a get that is not polled must not keep its turn from the others.
        let open = async move {
            let mut last = turn.lock_owned().await;
            if let Some(segment) = inner.engine.opened(&life.0, life.1) {
                return Ok(segment);
            }
            match &*last {
                Some((failed, error)) if *failed >= since => return Err(error.clone()),
                _ => {}
            }
            let plane = inner.plane.clone();
            let open = move || {
                // Not the time that this get has left: it is not the only one.
                let by = Deadline::after(Duration::from_millis(inner.config.liveness_ms));
                let started = Instant::now();
                let outcome = inner.engine.open_life(&life.0, life.1, by);
                let outcome = outcome.map_err(|error| not_reached(error, started));
                *last = outcome.as_ref().err().map(|error| (Instant::now(), error.clone()));
                outcome
            };
            plane.run_blocking(deadline, WHAT, open).await?
        };
        self.plane.within(deadline, WHAT, open).await?
    }
}

#[cfg(test)]
mod tests {
    use std::future::Future;
    use std::sync::mpsc;
    use std::task::{Context, Waker};

    use pollster::block_on;
    use posthorse_core::{ErrorKind, SegmentDesc};
    use posthorse_engine::TransferEngine;
    use posthorse_segment::{Directory, MemoryDirectory};
    use posthorse_testkit::{ControlHub, MemoryHub};

    use super::*;
    use crate::connector::tests::{Pair, edge, eventually, soon};
    use crate::connector::{GetOptions, PutOptions};
    use crate::control::BLOCKING_TURNS;

    /// Knows nobody, which it says when it may.
    #[derive(Debug)]
    struct Slow(Mutex<mpsc::Receiver<()>>);

    impl Directory for Slow {
        fn publish(&self, _: &SegmentDesc, _: Deadline) -> Result<()> {
            Ok(())
        }

        fn withdraw(&self, _: &str, _: Deadline) -> Result<()> {
            Ok(())
        }

        fn lookup(&self, _: &str, _: Deadline) -> Result<SegmentDesc> {
            let _ = self.0.lock().recv();
            Err(Error::new(ErrorKind::PeerUnreachable, "the test says so"))
        }
    }

    #[test]
    fn gets_of_a_producer_that_cannot_be_reached_share_one_attempt() {
        let (hub, control) = (MemoryHub::default(), ControlHub::default());
        let engine = |name: &str, directory: Arc<dyn Directory>| {
            let builder = TransferEngine::builder().directory(name, directory, control.channel(name));
            builder.transport(hub.transport()).bare().build().unwrap()
        };
        let (go, may_go) = mpsc::channel();
        let of_sender = engine("sender", Arc::new(MemoryDirectory::default()));
        let of_receiver = engine("receiver", Arc::new(Slow(Mutex::new(may_go))));
        let pair = Pair::with_engines(|_| {}, Some(of_sender), Some(of_receiver));
        let (inner, edge) = (pair.receiver.inner(), edge());
        let all = 2 * BLOCKING_TURNS;
        let options =
            PutOptions { consumers: std::num::NonZeroU32::new(all as u32), ..PutOptions::default() };
        pair.sender.put(&edge, "k", &b"x"[..], options).unwrap();
        let mut gets: Vec<_> = (0..all)
            .map(|_| Box::pin(pair.receiver.get_async(&edge, "k", GetOptions::until(soon()))))
            .collect();
        let mut context = Context::from_waker(Waker::noop());
        eventually("the claims of all", || {
            gets.iter_mut().for_each(|get| assert!(get.as_mut().poll(&mut context).is_pending()));
            pair.sender.health().offers.claims == all
        });
        // All are at the same point as soon as each was polled once more.
        gets.iter_mut().for_each(|get| assert!(get.as_mut().poll(&mut context).is_pending()));
        eventually("the attempt", || inner.plane.turns_in_use() > 0);
        // What the others have begun on the control plane's thread is done by then.
        block_on(inner.plane.within(soon(), "the plane", async {})).unwrap();
        assert_eq!(inner.plane.turns_in_use(), 1);
        drop(go);
        for get in gets {
            let error = block_on(get).unwrap_err();
            assert!(error.message().contains("the test says so"), "{error}");
        }
        pair.assert_idle();
    }
}
