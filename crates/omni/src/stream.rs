//! An ordered stream of chunks between two stages, as two state machines.
//!
//! Chunks are numbered from zero and offered one by one; the consumer fetches several at once and delivers them in
//! order. The producer may be at most a window ahead of what was delivered: the consumer's credit says how far. A
//! stream ends once: by its end mark, by an error of the producer, by an abort of the consumer, or because one
//! side is gone. Both are pure: an event and the state give the actions.

use std::collections::BTreeMap;

use posthorse_core::{Error, ErrorKind, Result};

/// The most chunks that a stream may have under way.
pub const MAX_WINDOW: u32 = 65_536;

/// The producer's half.
#[derive(Debug)]
pub struct StreamProducer {
    /// The number of the next chunk.
    next: u64,
    /// The first number that may not be sent yet.
    limit: u64,
    state: ProducerState,
}

#[derive(Debug)]
enum ProducerState {
    Open,
    /// The end or error was sent as this number.
    Ended,
    /// The consumer will take no more.
    Broken(Error),
}

/// What the producer's side is to do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ProducerAction {
    /// Wake whoever waits to send: it may, or learns why not.
    Wake,
    /// Withdraw every chunk that was offered and not taken.
    Withdraw,
}

/// What a send comes to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Send {
    /// Offer it as the chunk of this number.
    Offer(u64),
    /// Wait for credit.
    Wait,
}

impl StreamProducer {
    /// A stream whose consumer has room for `window` chunks.
    pub const fn new(window: u32) -> Self {
        Self { next: 0, limit: window as u64, state: ProducerState::Open }
    }

    /// Takes the next chunk.
    ///
    /// # Errors
    /// `Closed` behind the end; the reason when the consumer takes no more.
    pub fn send(&mut self) -> Result<Send> {
        if !self.may_send()? {
            return Ok(Send::Wait);
        }
        self.next += 1;
        Ok(Send::Offer(self.next - 1))
    }

    /// Whether a send would be offered now.
    ///
    /// # Errors
    /// As [`StreamProducer::send`].
    pub fn may_send(&self) -> Result<bool> {
        self.check()?;
        Ok(self.next < self.limit)
    }

    /// The chunk that was taken last could not be offered: its number is that of the next.
    pub fn unsend(&mut self) {
        if matches!(self.state, ProducerState::Open) {
            self.next = self.next.saturating_sub(1);
        }
    }

    /// Whether the stream goes on.
    ///
    /// # Errors
    /// As [`StreamProducer::send`].
    pub fn check(&self) -> Result<()> {
        match &self.state {
            ProducerState::Open => Ok(()),
            ProducerState::Ended => Err(Error::new(ErrorKind::Closed, "the stream has ended")),
            ProducerState::Broken(reason) => Err(reason.clone()),
        }
    }

    /// Ends the stream, well or with an error, and returns the number under which the end mark is to be offered. It needs
    /// no credit.
    ///
    /// # Errors
    /// As [`StreamProducer::send`].
    pub fn end(&mut self) -> Result<u64> {
        self.check()?;
        self.state = ProducerState::Ended;
        Ok(self.next)
    }

    /// The consumer's credit: the first number that may not be sent yet. Late and repeated ones change nothing.
    ///
    /// # Errors
    /// `Malformed` when it is for chunks that lie further ahead than [`MAX_WINDOW`] of those sent.
    pub fn credit(&mut self, limit: u64) -> Result<Vec<ProducerAction>> {
        let most = self.next.saturating_add(MAX_WINDOW.into());
        if limit > most {
            let sent = self.next;
            let message = format!("credit up to chunk {limit} after {sent} were sent; accepted: {most}");
            return Err(Error::new(ErrorKind::Malformed, message));
        }
        let wakes =
            limit > self.limit && self.next >= self.limit && matches!(self.state, ProducerState::Open);
        self.limit = self.limit.max(limit);
        Ok(if wakes { vec![ProducerAction::Wake] } else { Vec::new() })
    }

    /// The consumer takes no more, or is gone. Also behind the end: what it has not taken is withdrawn.
    pub fn broken(&mut self, reason: Error) -> Vec<ProducerAction> {
        if matches!(self.state, ProducerState::Broken(_)) {
            return Vec::new();
        }
        self.state = ProducerState::Broken(reason);
        vec![ProducerAction::Withdraw, ProducerAction::Wake]
    }

    /// How many chunks were sent.
    pub const fn sent(&self) -> u64 {
        self.next
    }
}

/// The consumer's half. `T` is a chunk.
#[derive(Debug)]
pub struct StreamConsumer<T> {
    window: u64,
    /// The number of the next chunk to be delivered.
    next: u64,
    /// The first number that has not been asked for.
    asked: u64,
    /// The last credit given: the first number that may not be sent.
    credited: u64,
    early: BTreeMap<u64, Item<T>>,
    state: ConsumerState,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ConsumerState {
    Open,
    /// The end, an error or an abort was delivered.
    Over,
}

/// What a number of the stream turned out to be.
#[derive(Debug)]
pub enum Item<T> {
    /// A chunk.
    Chunk(T),
    /// The end mark.
    End,
    /// The producer's error.
    Error(Error),
    /// Why this number could not be fetched.
    Failed(Error),
}

/// What the consumer's side is to do.
#[derive(Debug)]
pub enum ConsumerAction<T> {
    /// Fetch the chunk of this number.
    Fetch(u64),
    /// Hand this to the reader; the number is the chunk's.
    Deliver(u64, T),
    /// The reader has everything: there were so many chunks.
    Ended(u64),
    /// The reader gets this after what was delivered, and no more.
    Failed(Error),
    /// Tell the producer that it may send up to this number, exclusive.
    Credit(u64),
    /// Tell the producer that no more is wanted.
    Abort(Error),
    /// Give up the fetches from this number up to that, exclusive.
    Cancel(u64, u64),
    /// Return this chunk unread.
    Discard(T),
}

impl<T> StreamConsumer<T> {
    /// A stream of which `window` chunks are fetched ahead of the reader, and the fetches to begin with.
    pub fn new(window: u32) -> (Self, Vec<ConsumerAction<T>>) {
        let window = u64::from(window.max(1));
        let mut this = Self {
            window,
            next: 0,
            asked: 0,
            credited: window,
            early: BTreeMap::new(),
            state: ConsumerState::Open,
        };
        let mut out = Vec::new();
        this.fetch(&mut out);
        (this, out)
    }

    /// A fetch has ended. What was not asked for, or has come before, is discarded.
    pub fn arrived(&mut self, number: u64, item: Item<T>) -> Vec<ConsumerAction<T>> {
        let mut out = Vec::new();
        let expected = self.state == ConsumerState::Open && (self.next..self.asked).contains(&number);
        if !expected || self.early.contains_key(&number) {
            if let Item::Chunk(chunk) = item {
                out.push(ConsumerAction::Discard(chunk));
            }
            return out;
        }
        self.early.insert(number, item);
        while let Some(item) = self.early.remove(&self.next) {
            match item {
                Item::Chunk(chunk) => {
                    out.push(ConsumerAction::Deliver(self.next, chunk));
                    self.next += 1;
                }
                Item::End => {
                    out.push(ConsumerAction::Ended(self.next));
                    self.finish(&mut out);
                    // Nothing lies behind an end; if something does, it is not the stream's.
                    return out;
                }
                Item::Error(error) => {
                    // Its producer knows, and may have opened another stream of the name by now.
                    out.push(ConsumerAction::Failed(error));
                    self.finish(&mut out);
                    return out;
                }
                Item::Failed(error) => {
                    out.push(ConsumerAction::Abort(error.clone()));
                    out.push(ConsumerAction::Failed(error));
                    self.finish(&mut out);
                    return out;
                }
            }
        }
        out
    }

    /// The reader is done with every chunk below `number`: their room is free again.
    pub fn taken(&mut self, number: u64) -> Vec<ConsumerAction<T>> {
        let mut out = Vec::new();
        if self.state == ConsumerState::Over {
            return out;
        }
        let limit = number.min(self.next) + self.window;
        // Half a window at a time: one message for several chunks.
        if limit >= self.credited + self.window.div_ceil(2) {
            self.credited = limit;
            out.push(ConsumerAction::Credit(limit));
            self.fetch(&mut out);
        }
        out
    }

    /// The reader wants no more.
    pub fn abort(&mut self, reason: Error) -> Vec<ConsumerAction<T>> {
        let mut out = Vec::new();
        if self.state == ConsumerState::Open {
            out.push(ConsumerAction::Abort(reason));
            self.finish(&mut out);
        }
        out
    }

    /// The producer is gone: what has arrived in order was delivered, the rest never comes.
    pub fn producer_gone(&mut self, reason: Error) -> Vec<ConsumerAction<T>> {
        let mut out = Vec::new();
        if self.state == ConsumerState::Open {
            out.push(ConsumerAction::Failed(reason));
            self.finish(&mut out);
        }
        out
    }

    /// Whether the stream has ended, in whatever way.
    pub fn is_over(&self) -> bool {
        self.state == ConsumerState::Over
    }

    fn fetch(&mut self, out: &mut Vec<ConsumerAction<T>>) {
        out.extend((self.asked..self.credited).map(ConsumerAction::Fetch));
        self.asked = self.asked.max(self.credited);
    }

    fn finish(&mut self, out: &mut Vec<ConsumerAction<T>>) {
        self.state = ConsumerState::Over;
        // Numbers that have arrived are not fetched any more; cancelling those does nothing.
        if self.next < self.asked {
            out.push(ConsumerAction::Cancel(self.next, self.asked));
        }
        for item in std::mem::take(&mut self.early).into_values() {
            if let Item::Chunk(chunk) = item {
                out.push(ConsumerAction::Discard(chunk));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    fn words(actions: Vec<ConsumerAction<u64>>) -> Vec<String> {
        let word = |action| match action {
            ConsumerAction::Fetch(n) => format!("fetch {n}"),
            ConsumerAction::Deliver(n, chunk) => format!("deliver {n}={chunk}"),
            ConsumerAction::Ended(n) => format!("ended {n}"),
            ConsumerAction::Failed(error) => format!("failed {}", error.kind()),
            ConsumerAction::Credit(n) => format!("credit {n}"),
            ConsumerAction::Abort(error) => format!("abort {}", error.kind()),
            ConsumerAction::Cancel(a, b) => format!("cancel {a}..{b}"),
            ConsumerAction::Discard(chunk) => format!("discard {chunk}"),
        };
        actions.into_iter().map(word).collect()
    }

    fn error(kind: ErrorKind) -> Error {
        Error::new(kind, "x")
    }

    #[test]
    fn a_producer_stops_at_its_window_and_goes_on_by_credit() {
        let mut producer = StreamProducer::new(2);
        assert_eq!(producer.send().unwrap(), Send::Offer(0));
        assert_eq!(producer.credit(3).unwrap(), [], "nobody waits yet");
        assert_eq!(producer.send().unwrap(), Send::Offer(1));
        assert_eq!(producer.send().unwrap(), Send::Offer(2));
        assert_eq!(producer.send().unwrap(), Send::Wait);
        assert_eq!(producer.credit(2).unwrap(), [], "late");
        assert_eq!(producer.credit(4).unwrap(), [ProducerAction::Wake]);
        assert_eq!(producer.send().unwrap(), Send::Offer(3));
        assert!(producer.credit(u64::MAX).is_err());
        assert_eq!(producer.end().unwrap(), 4, "without credit");
        assert_eq!(producer.send().unwrap_err().kind(), ErrorKind::Closed);
        assert_eq!(producer.end().unwrap_err().kind(), ErrorKind::Closed);
        assert_eq!(producer.sent(), 4);
    }

    #[test]
    fn a_chunk_that_could_not_be_offered_leaves_no_gap() {
        let mut producer = StreamProducer::new(1);
        assert_eq!(producer.send().unwrap(), Send::Offer(0));
        producer.unsend();
        assert_eq!(producer.send().unwrap(), Send::Offer(0));
        assert_eq!((producer.end().unwrap(), producer.sent()), (1, 1));
        producer.unsend();
        assert_eq!(producer.sent(), 1, "it has ended");
    }

    #[test]
    fn a_producer_whose_consumer_takes_no_more_learns_why() {
        for ended in [false, true] {
            let mut producer = StreamProducer::new(1);
            producer.send().unwrap();
            if ended {
                producer.end().unwrap();
            }
            let actions = producer.broken(error(ErrorKind::PeerGone));
            assert_eq!(actions, [ProducerAction::Withdraw, ProducerAction::Wake]);
            assert_eq!(producer.broken(error(ErrorKind::Aborted)), []);
            assert_eq!(producer.send().unwrap_err().kind(), ErrorKind::PeerGone);
            assert_eq!(producer.credit(2).unwrap(), []);
        }
    }

    #[test]
    fn chunks_out_of_order_and_twice_are_delivered_once_in_order() {
        let (mut consumer, first) = StreamConsumer::new(3);
        assert_eq!(words(first), ["fetch 0", "fetch 1", "fetch 2"]);
        assert_eq!(words(consumer.arrived(1, Item::Chunk(11))), [""; 0]);
        assert_eq!(words(consumer.arrived(1, Item::Chunk(12))), ["discard 12"]);
        assert_eq!(words(consumer.arrived(0, Item::Chunk(10))), ["deliver 0=10", "deliver 1=11"]);
        assert_eq!(words(consumer.arrived(0, Item::Chunk(13))), ["discard 13"]);
        assert_eq!(words(consumer.arrived(9, Item::Chunk(14))), ["discard 14"], "never asked for");
        assert_eq!(words(consumer.taken(1)), [""; 0], "less than half a window");
        assert_eq!(words(consumer.taken(2)), ["credit 5", "fetch 3", "fetch 4"]);
        assert_eq!(words(consumer.arrived(3, Item::End)), [""; 0]);
        assert_eq!(words(consumer.arrived(2, Item::Chunk(15))), ["deliver 2=15", "ended 3", "cancel 3..5"]);
        assert!(consumer.is_over());
        assert_eq!(words(consumer.arrived(4, Item::Chunk(16))), ["discard 16"]);
        assert_eq!(words(consumer.taken(3)), [""; 0]);
    }

    #[test]
    fn a_chunk_that_is_lost_fails_the_stream_behind_what_came_before_it() {
        let (mut consumer, _) = StreamConsumer::new(3);
        consumer.arrived(2, Item::Chunk(12));
        consumer.arrived(1, Item::Failed(error(ErrorKind::Expired)));
        assert_eq!(
            words(consumer.arrived(0, Item::Chunk(10))),
            ["deliver 0=10", "abort Expired", "failed Expired", "cancel 1..3", "discard 12"]
        );
    }

    #[test]
    fn a_producer_that_failed_is_not_told_to_stop() {
        let (mut consumer, _) = StreamConsumer::new(2);
        consumer.arrived(1, Item::Error(error(ErrorKind::OutOfMemory)));
        assert_eq!(
            words(consumer.arrived(0, Item::Chunk(10))),
            ["deliver 0=10", "failed OutOfMemory", "cancel 1..2"]
        );
    }

    #[test]
    fn an_abort_and_a_producer_that_is_gone_end_it_once() {
        let (mut consumer, _) = StreamConsumer::<u64>::new(2);
        assert_eq!(words(consumer.abort(error(ErrorKind::Cancelled))), ["abort Cancelled", "cancel 0..2"]);
        assert_eq!(words(consumer.abort(error(ErrorKind::Cancelled))), [""; 0]);
        assert_eq!(words(consumer.producer_gone(error(ErrorKind::PeerGone))), [""; 0]);
        let (mut consumer, _) = StreamConsumer::new(2);
        consumer.arrived(1, Item::Chunk(11));
        assert_eq!(
            words(consumer.producer_gone(error(ErrorKind::PeerGone))),
            ["failed PeerGone", "cancel 0..2", "discard 11"]
        );
    }

    proptest! {
        /// Both halves against a network that delays and reorders fetches and credit: everything comes, in order.
        #[test]
        fn every_chunk_is_delivered_in_order(count in 0_u64..60, window in 1_u32..9, picks: Vec<prop::sample::Index>) {
            let mut producer = StreamProducer::new(window);
            let (mut consumer, first) = StreamConsumer::new(window);
            let (mut fetches, mut credits) = (BTreeSet::new(), Vec::new());
            let (mut delivered, mut ended, mut end_mark) = (0, None, None);
            let mut actions = first;
            let mut picks = picks.into_iter().cycle();
            for step in 0..10_000 {
                for action in std::mem::take(&mut actions) {
                    match action {
                        ConsumerAction::Fetch(n) => { prop_assert!(fetches.insert(n)); }
                        ConsumerAction::Deliver(n, chunk) => {
                            prop_assert_eq!((n, chunk), (delivered, delivered));
                            delivered += 1;
                        }
                        ConsumerAction::Credit(limit) => credits.push(limit),
                        ConsumerAction::Ended(n) => ended = Some(n),
                        ConsumerAction::Cancel(a, b) => fetches.retain(|n| !(a..b).contains(n)),
                        other => prop_assert!(false, "{:?}", other),
                    }
                }
                if ended.is_some() { break; }
                // The producer sends what it may.
                while producer.sent() < count {
                    if producer.send().unwrap() == Send::Wait { break; }
                    prop_assert!(producer.sent() <= delivered + 2 * u64::from(window));
                }
                if producer.sent() == count && end_mark.is_none() { end_mark = Some(producer.end().unwrap()); }
                // One thing happens, whichever is picked.
                let ready: Vec<u64> =
                    fetches.iter().copied().filter(|n| *n < producer.sent() || Some(*n) == end_mark).collect();
                // Every other time the first, so that nothing is put off for ever.
                let pick = picks.next().filter(|_| step % 2 == 0);
                let which = pick.map_or(0, |pick| pick.index(ready.len() + credits.len() + 1));
                if which < ready.len() {
                    let n = ready[which];
                    fetches.remove(&n);
                    let item = if Some(n) == end_mark { Item::End } else { Item::Chunk(n) };
                    actions = consumer.arrived(n, item);
                } else if which < ready.len() + credits.len() {
                    let limit = credits.swap_remove(which - ready.len());
                    producer.credit(limit).unwrap();
                } else {
                    actions = consumer.taken(delivered);
                }
                // The reader goes on, too.
                if actions.is_empty() { actions = consumer.taken(delivered); }
            }
            prop_assert_eq!((delivered, ended), (count, Some(count)));
        }
    }
}
