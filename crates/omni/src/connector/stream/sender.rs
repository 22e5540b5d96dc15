//! The sending end of a stream.

use std::collections::VecDeque;
use std::fmt;
use std::num::NonZeroU32;
use std::sync::{Arc, Weak};
use std::time::Instant;

use parking_lot::Mutex;
use posthorse_buffer::ManagedBuffer;
use posthorse_core::{Deadline, Error, ErrorKind, Result};
use tokio::sync::watch;

use super::{End, Entry};
use crate::connector::put::{Payload, PutOptions};
use crate::connector::worker::block_on;
use crate::connector::{Connector, Inner, Stored};
use crate::key::{self, Edge};
use crate::message::{Follower, Refusal};
use crate::payload::{Manifest, PayloadKind};
use crate::stream::{ProducerAction, Send, StreamProducer};

/// Room for the end of a stream and its reason, kept from the start: a stream can be ended when the pool is full.
const END_BYTES: u64 = 8192;

/// The sending end of an ordered stream of chunks: [`Connector::open_stream`].
///
/// Dropped without [`StreamSender::end`] or [`StreamSender::fail`], it fails the stream.
pub struct StreamSender {
    inner: Arc<Inner>,
    outgoing: Arc<Outgoing>,
    sent: u64,
    end: Option<ManagedBuffer>,
}

/// What a stream's sender and those who answer its consumer share.
#[derive(Debug)]
pub(super) struct Outgoing {
    edge: Edge,
    request: String,
    name: Arc<str>,
    /// Which stream of its name it is.
    generation: u64,
    /// Locked under the table of offers, never the other way round.
    state: Mutex<State>,
    changed: watch::Sender<()>,
}

#[derive(Debug)]
struct State {
    machine: StreamProducer,
    /// Who follows it, once somebody has.
    follower: Option<Follower>,
    /// When the consumer was heard of last; `None` before it follows.
    heard: Option<Instant>,
    /// The numbers that may not have been taken yet. They are taken in order.
    untaken: VecDeque<(u64, Weak<Stored>)>,
}

impl Outgoing {
    fn new(edge: Edge, request: &str, generation: u64, window: u32) -> Result<Self> {
        // The longest key of a chunk.
        edge.qualify(&key::chunk(request, &edge.from, u64::MAX))?;
        Ok(Self {
            name: edge.qualify(request)?.into(),
            edge,
            request: request.to_owned(),
            generation,
            state: Mutex::new(State {
                machine: StreamProducer::new(window),
                follower: None,
                heard: None,
                untaken: VecDeque::new(),
            }),
            changed: watch::Sender::new(()),
        })
    }

    pub(super) const fn name(&self) -> &Arc<str> {
        &self.name
    }

    pub(super) const fn generation(&self) -> u64 {
        self.generation
    }

    pub(super) fn heard(&self) -> Option<Instant> {
        self.state.lock().heard
    }

    pub(super) fn credit(&self, follower: Option<&Follower>, limit: u64) -> Result<()> {
        {
            let mut state = self.state.lock();
            state.check_follower(follower)?;
            state.machine.credit(limit)?;
            state.heard = Some(Instant::now());
            if let (None, Some(follower)) = (&state.follower, follower) {
                state.follower = Some(follower.clone());
            }
        }
        self.wake();
        Ok(())
    }

    /// Whether this one may say something of the stream, which has one follower.
    ///
    /// # Errors
    /// `Busy` for another than the first.
    pub(super) fn check_follower(&self, follower: Option<&Follower>) -> Result<()> {
        self.state.lock().check_follower(follower)
    }

    /// Its waiters are still to be woken.
    pub(super) fn broken(&self, reason: Error) -> Vec<ProducerAction> {
        self.state.lock().machine.broken(reason)
    }

    pub(super) fn wake(&self) {
        self.changed.send_replace(());
    }

    /// The keys of what may not have been taken yet, each once.
    pub(super) fn take_untaken(&self) -> Vec<String> {
        let untaken = std::mem::take(&mut self.state.lock().untaken);
        let there = untaken.into_iter().filter(|(_, stored)| stored.strong_count() > 0);
        there.filter_map(|(number, _)| self.key(number).ok()).collect()
    }

    fn key(&self, number: u64) -> Result<String> {
        self.edge.qualify(&key::chunk(&self.request, &self.edge.from, number))
    }

    fn is_chunk(&self, key: &str) -> bool {
        let number = key
            .strip_prefix(self.request.as_str())
            .and_then(|key| key.strip_prefix('_')?.strip_prefix(self.edge.from.as_str())?.strip_prefix('_'))
            .and_then(|key| key.split_once('@'))
            .and_then(|(number, _)| number.parse().ok());
        number.is_some_and(|number| self.key(number).is_ok_and(|own| own == key))
    }

    fn may_send(&self) -> Result<bool> {
        self.state.lock().machine.may_send()
    }

    /// Notes what is offered under a number.
    ///
    /// # Errors
    /// The reason when the consumer takes no more: it must not be offered.
    fn offering(&self, number: u64, stored: Weak<Stored>) -> Result<()> {
        let mut state = self.state.lock();
        match state.machine.check() {
            Err(error) if error.kind() != ErrorKind::Closed => Err(error),
            // Open, or ended with this very number.
            _ => {
                while state.untaken.front().is_some_and(|(_, stored)| stored.strong_count() == 0) {
                    state.untaken.pop_front();
                }
                state.untaken.push_back((number, stored));
                Ok(())
            }
        }
    }
}

impl State {
    fn check_follower(&self, follower: Option<&Follower>) -> Result<()> {
        match (&self.follower, follower) {
            (Some(first), Some(other)) if first != other => {
                let text = format!("the stream is followed already, by {:?}", first.consumer);
                Err(Error::new(ErrorKind::Busy, text).with_advice("open a stream for each consumer"))
            }
            _ => Ok(()),
        }
    }
}

impl Connector {
    /// Opens an ordered stream of chunks on an edge, for one consumer, which follows it with
    /// [`Connector::follow_stream`]. It need not do so yet: `stream_window` chunks may be sent before. A name whose
    /// stream has ended can be used again, for consumers that follow from then on.
    ///
    /// # Errors
    /// `AccessDenied` for a connector that only receives; `Busy` while a stream of this name is open or not received
    /// to its end; `LimitReached` at `max_streams`; `InvalidArgument` for a request that cannot be part of a key;
    /// `DeadlineExceeded` when the pool has no room within `put_wait_ms`; `Closed`.
    pub fn open_stream(&self, edge: &Edge, request: &str) -> Result<StreamSender> {
        let inner = self.inner();
        let deadline = inner.may_put(PutOptions::default())?;
        let outgoing = Arc::new(Outgoing::new(
            edge.clone(),
            request,
            inner.next_generation(),
            inner.config.stream_window,
        )?);
        let end = inner.alloc(END_BYTES, deadline)?;
        inner.streams.add(&outgoing, inner.config.max_streams as usize)?;
        // An earlier stream of this name has ended; its chunks are not this one's.
        inner.state.lock().offers.forget_endings(|key| outgoing.is_chunk(key));
        Ok(StreamSender { inner: Arc::clone(inner), outgoing, sent: 0, end: Some(end) })
    }
}

impl StreamSender {
    /// Sends the next chunk, and returns its number: waits for the consumer's credit, then for room in the pool.
    ///
    /// # Errors
    /// `Aborted` with the consumer's reason, or `PeerGone` when it is gone: the stream is over. `DeadlineExceeded`,
    /// `PoolFull`, `TooLarge`, `QueueFull` or `InvalidArgument`: this chunk was not sent, the next one takes its
    /// number; so does `Busy`, within a waker that a connector or an engine calls, where it would have to wait. `Closed`.
    pub fn send<'a>(&mut self, payload: impl Into<Payload<'a>>, deadline: Deadline) -> Result<u64> {
        self.inner.check_open()?;
        let number = loop {
            let sending = self.outgoing.state.lock().machine.send()?;
            match sending {
                Send::Offer(number) => break number,
                Send::Wait => block_on("a chunk", self.ready(deadline))?,
            }
        };
        let options = PutOptions { deadline: Some(deadline), ..PutOptions::default() };
        let stored = self.inner.may_put(options).and_then(|_| self.inner.place(payload.into(), deadline));
        stored.and_then(|stored| self.offer(number, Arc::new(stored))).inspect_err(|_| {
            self.outgoing.state.lock().machine.unsend();
        })?;
        self.sent = number + 1;
        Ok(number)
    }

    /// Waits until a chunk can be sent without waiting for credit.
    ///
    /// # Errors
    /// As [`StreamSender::send`].
    pub async fn ready(&self, deadline: Deadline) -> Result<()> {
        self.inner.check_open()?;
        if self.outgoing.may_send()? {
            return Ok(());
        }
        let outgoing = Arc::clone(&self.outgoing);
        let mut changed = outgoing.changed.subscribe();
        let credit = async move {
            while !outgoing.may_send()? {
                // Its sender is in `outgoing`.
                let _ = changed.changed().await;
            }
            Ok(())
        };
        let name = &self.outgoing.name;
        let what = match self.outgoing.heard() {
            Some(_) => format!("the consumer's credit for the next chunk of stream {name:?}"),
            None => format!("a consumer to follow stream {name:?}, and its credit for the next chunk"),
        };
        self.inner.plane.within(deadline, what, credit).await?
    }

    /// How many chunks were sent.
    pub const fn sent(&self) -> u64 {
        self.sent
    }

    /// Ends the stream behind the last chunk, and returns how many there were. It waits for nobody: the consumer
    /// receives what it has not yet, then the end.
    ///
    /// # Errors
    /// The reason when the consumer takes no more; `QueueFull` when too much is offered: the stream has failed;
    /// `Closed`.
    pub fn end(mut self) -> Result<u64> {
        self.finish(None)
    }

    /// Ends the stream with an error, which the consumer gets behind the last chunk.
    ///
    /// # Errors
    /// As [`StreamSender::end`].
    pub fn fail(mut self, reason: &Error) -> Result<u64> {
        self.finish(Some(reason))
    }

    fn finish(&mut self, reason: Option<&Error>) -> Result<u64> {
        self.inner.plane.check_here()?;
        let Some(mut buffer) = self.end.take() else {
            return Err(Error::new(ErrorKind::Closed, "the stream has ended"));
        };
        // Given up with the end's payload, or here when it cannot be offered: a consumer that asks is told.
        let entry = Entry { inner: Arc::downgrade(&self.inner), outgoing: Arc::clone(&self.outgoing) };
        let number = self.outgoing.state.lock().machine.end()?;
        let bytes = encode_end(reason)?;
        buffer
            .bytes_mut()?
            .get_mut(..bytes.len())
            .ok_or_else(|| Error::new(ErrorKind::TooLarge, "the reason of a stream's end"))?
            .copy_from_slice(&bytes);
        let manifest = Manifest::of(PayloadKind::StreamEnd);
        let mut stored = Stored::sized(buffer, bytes.len() as u64, manifest, false);
        stored.entry = Some(entry);
        // Kept, and the name with it, until nothing of the stream is offered any more.
        let stored = Arc::new(stored);
        self.offer(number, Arc::clone(&stored))
            .inspect_err(|error| self.inner.break_stream(&self.outgoing, error.clone()))?;
        Ok(number)
    }

    fn offer(&self, number: u64, stored: Arc<Stored>) -> Result<()> {
        let key = self.outgoing.key(number)?;
        let noted = Arc::downgrade(&stored);
        let options = PutOptions { consumers: Some(NonZeroU32::MIN), ..PutOptions::default() };
        self.inner.offer(&key, stored, options, || self.outgoing.offering(number, noted))?;
        Ok(())
    }
}

fn encode_end(reason: Option<&Error>) -> Result<Vec<u8>> {
    rmp_serde::to_vec_named(&End { error: reason.map(Refusal::from) })
        .map_err(|error| Error::new(ErrorKind::Internal, format!("encoding a stream's end: {error}")))
}

impl Drop for StreamSender {
    fn drop(&mut self) {
        if self.end.is_none() || self.inner.is_forked() {
            return;
        }
        let reason = Error::new(ErrorKind::Aborted, "the producer dropped the stream before its end");
        if let Err(error) = self.finish(Some(&reason)) {
            tracing::debug!(%error, stream = %self.outgoing.name, "a stream that was dropped was over");
        }
    }
}

impl fmt::Debug for StreamSender {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "StreamSender({:?}, {} sent)", self.outgoing.name, self.sent())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::connector::tests::{Pair, edge, soon};
    use crate::message::{Answer, Request, StreamAbort};

    #[test]
    fn the_chunks_of_a_stream_are_known_by_their_keys() {
        let outgoing = Outgoing::new(Edge::new(0, 1), "r_0", 1, 4).unwrap();
        for (key, is) in [
            ("r_0_0_17@0_1", true),
            ("r_0_0_017@0_1", false),
            ("r_0_17@0_1", false),
            ("r_0_0_17@0_2", false),
            ("r_0_0_@0_1", false),
            ("r_0", false),
        ] {
            assert_eq!(outgoing.is_chunk(key), is, "{key}");
        }
    }

    #[test]
    fn a_chunk_of_a_broken_stream_does_not_take_the_place_of_the_next_streams() {
        let pair = Pair::new(|_| {});
        let mut older = pair.sender.open_stream(&edge(), "r").unwrap();
        let inner = Arc::clone(&older.inner);
        let chunk = |bytes: &[u8]| inner.place(bytes.into(), soon()).unwrap();
        // It is about to offer its first chunk.
        assert_eq!(older.outgoing.state.lock().machine.send().unwrap(), Send::Offer(0));
        let (late, reason) = (chunk(b"older"), "enough".to_owned());
        let abort =
            StreamAbort { stream: older.outgoing.name.to_string(), generation: None, follower: None, reason };
        assert_eq!(pair.tell(&Request::StreamAbort(abort)), Answer::Ok);
        let mut newer = pair.sender.open_stream(&edge(), "r").unwrap();
        newer.send(&b"newer"[..], soon()).unwrap();
        assert_eq!(older.offer(0, Arc::new(late)).unwrap_err().kind(), ErrorKind::Aborted);
        assert_eq!(older.send(&b"older"[..], soon()).unwrap_err().kind(), ErrorKind::Aborted);
        let key = newer.outgoing.key(0).unwrap();
        assert_eq!(inner.state.lock().offers.find(&key).unwrap().payload.len, 5);
        assert_eq!(inner.health().offers.superseding, 0);
    }

    #[test]
    fn the_longest_reason_fits_the_room_that_is_kept() {
        let long = "\u{10ffff}".repeat(100_000);
        let reason = Error::new(ErrorKind::Aborted, long.clone()).with_advice(long);
        assert!(encode_end(Some(&reason)).unwrap().len() as u64 <= END_BYTES);
    }
}
