//! Gets that wait for an offer.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use posthorse_core::{Error, ErrorKind, Incarnation, Result};

use super::PullId;
use super::timers::TimerId;
use crate::message::Want;

/// What to do where no more may wait.
const ADVICE: &str = "ask again later, or raise max_parked and max_parked_per_consumer there, and max_connections and the \
                      descriptor limit (`ulimit -n`), since half of its control connections may wait";

/// The gets that wait, in order of arrival for each key.
#[derive(Debug)]
pub(super) struct Parking {
    most: usize,
    most_per_consumer: usize,
    parked: HashMap<PullId, Parked>,
    queues: HashMap<Arc<str>, VecDeque<PullId>>,
    consumers: HashMap<(Arc<str>, Incarnation), usize>,
}

#[derive(Debug)]
struct Parked {
    key: Arc<str>,
    want: Want,
    timer: TimerId,
}

impl Parking {
    pub(super) fn new(most: usize, most_per_consumer: usize) -> Self {
        Self {
            most,
            most_per_consumer,
            parked: HashMap::new(),
            queues: HashMap::new(),
            consumers: HashMap::new(),
        }
    }

    pub(super) fn len(&self) -> usize {
        self.parked.len()
    }

    pub(super) fn contains(&self, pull: &PullId) -> bool {
        self.parked.contains_key(pull)
    }

    pub(super) fn key_of(&self, pull: &PullId) -> Option<Arc<str>> {
        self.parked.get(pull).map(|parked| Arc::clone(&parked.key))
    }

    /// Whether there is room for one more of this consumer.
    pub(super) fn room(&self, pull: &PullId) -> Result<()> {
        let of_consumer = self.consumers.get(&consumer(pull)).copied().unwrap_or(0);
        if self.parked.len() >= self.most {
            let message = format!("{} gets wait at the producer, which is the most that may", self.most);
            return Err(Error::new(ErrorKind::QueueFull, message).with_advice(ADVICE));
        }
        if of_consumer >= self.most_per_consumer {
            let most = self.most_per_consumer;
            let message = format!(
                "{most} gets of this consumer wait at the producer; accepted: max_parked_per_consumer there, and half \
                 of all that may wait"
            );
            return Err(Error::new(ErrorKind::QueueFull, message).with_advice(ADVICE));
        }
        Ok(())
    }

    pub(super) fn park(&mut self, key: &str, pull: PullId, want: Want, timer: TimerId) {
        let key: Arc<str> = match self.queues.get_key_value(key) {
            Some((key, _)) => Arc::clone(key),
            None => key.into(),
        };
        *self.consumers.entry(consumer(&pull)).or_default() += 1;
        self.queues.entry(Arc::clone(&key)).or_default().push_back(pull.clone());
        self.parked.insert(pull, Parked { key, want, timer });
    }

    /// The first that waits for a key.
    pub(super) fn pop(&mut self, key: &str) -> Option<(PullId, Want, TimerId)> {
        let pull = self.queues.get(key)?.front()?.clone();
        let parked = self.take(&pull)?;
        Some((pull, parked.want, parked.timer))
    }

    pub(super) fn remove(&mut self, pull: &PullId) -> Option<TimerId> {
        self.take(pull).map(|parked| parked.timer)
    }

    /// All that wait for a key, in order.
    pub(super) fn drain_key(&mut self, key: &str) -> Vec<(PullId, TimerId)> {
        let mut drained = Vec::new();
        while let Some((pull, _, timer)) = self.pop(key) {
            drained.push((pull, timer));
        }
        drained
    }

    /// All that wait.
    pub(super) fn drain(&mut self) -> Vec<(PullId, TimerId)> {
        let mut keys: Vec<Arc<str>> = self.queues.keys().cloned().collect();
        keys.sort();
        keys.iter().flat_map(|key| self.drain_key(key)).collect()
    }

    fn take(&mut self, pull: &PullId) -> Option<Parked> {
        let parked = self.parked.remove(pull)?;
        if let Some(queue) = self.queues.get_mut(&parked.key) {
            if let Some(at) = queue.iter().position(|waiting| waiting == pull) {
                queue.remove(at);
            }
            if queue.is_empty() {
                self.queues.remove(&parked.key);
            }
        }
        let consumer = consumer(pull);
        if let Some(count) = self.consumers.get_mut(&consumer) {
            *count -= 1;
            if *count == 0 {
                self.consumers.remove(&consumer);
            }
        }
        Some(parked)
    }
}

fn consumer(pull: &PullId) -> (Arc<str>, Incarnation) {
    (Arc::clone(&pull.consumer), pull.incarnation)
}
