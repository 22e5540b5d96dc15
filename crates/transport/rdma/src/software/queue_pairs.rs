//! Queue pairs of software devices.

use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;
use std::time::Instant;

use parking_lot::{Mutex, RwLock};
use posthorse_core::{Error, ErrorKind, Result};

use super::device::Core;
use super::memory::taken;
use crate::gid::Gid;
use crate::verbs::{Link, PostError, QueuePairs, QueueSize, Remote, Status, WorkCompletion, WorkRequest};

/// Whether a queue pair takes part, and with whom.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Phase {
    Reset,
    Ready { gid: Gid, number: u32 },
    Failed,
}

/// A request that was posted.
#[derive(Debug)]
pub(super) struct Posted {
    pub(super) request: WorkRequest,
    /// The bytes, where they were taken at once.
    pub(super) inline: Option<Vec<u8>>,
}

/// One queue pair.
#[derive(Debug)]
pub(super) struct QueuePair {
    pub(super) number: u32,
    /// Read while a peer touches this side's memory by it, written when that is to end.
    pub(super) phase: RwLock<Phase>,
    pub(super) sends: Mutex<VecDeque<Posted>>,
    pub(super) receives: Mutex<VecDeque<u64>>,
    pub(super) completions: Arc<Completions>,
    /// Held while its first request is carried out.
    pub(super) carrying: Mutex<()>,
    /// Since when its first request meets with silence.
    pub(super) silent_since: Mutex<Option<Instant>>,
}

/// A completion queue.
#[derive(Debug)]
pub(super) struct Completions {
    pub(super) key: u64,
    state: Mutex<CompletionState>,
}

#[derive(Debug, Default)]
struct CompletionState {
    waiting: VecDeque<WorkCompletion>,
    armed: bool,
}

impl Completions {
    /// Adds one. Says whether somebody asked to be told.
    pub(super) fn push(&self, completion: WorkCompletion) -> bool {
        let mut state = self.state.lock();
        state.waiting.push_back(completion);
        std::mem::take(&mut state.armed)
    }
}

impl QueuePair {
    /// Ends everything that was posted. Says whether somebody asked to be told.
    pub(super) fn flush(&self) -> bool {
        let sends = std::mem::take(&mut *self.sends.lock());
        let receives = std::mem::take(&mut *self.receives.lock());
        let ids = sends.into_iter().map(|posted| posted.request.id).chain(receives);
        let mut told = false;
        for id in ids {
            told |= self.completions.push(WorkCompletion {
                id,
                status: Status::Flushed,
                ..WorkCompletion::EMPTY
            });
        }
        told
    }
}

/// See [`QueuePairs`].
pub(super) struct SoftQueuePairs {
    device: Arc<Core>,
    size: QueueSize,
    pairs: Vec<Arc<QueuePair>>,
    numbers: Vec<u32>,
    completions: Arc<Completions>,
}

impl SoftQueuePairs {
    pub(super) fn new(device: Arc<Core>, count: usize, size: QueueSize, key: u64) -> Result<Self> {
        let limits = device.limits();
        let wanted = u64::from(size.sends + size.receives) * count as u64;
        if size.sends.max(size.receives) > limits.work_requests || wanted > limits.completions.into() {
            let text = format!(
                "{count} queue pairs of {} sends and {} receives; the device takes {} a queue, and {} completions",
                size.sends, size.receives, limits.work_requests, limits.completions
            );
            return Err(Error::new(ErrorKind::LimitReached, text).with_device(device.name()));
        }
        let completions = Arc::new(Completions { key, state: Mutex::default() });
        let pairs: Vec<_> = (0..count)
            .map(|_| {
                Arc::new(QueuePair {
                    number: device.net().number(),
                    phase: RwLock::new(Phase::Reset),
                    sends: Mutex::default(),
                    receives: Mutex::default(),
                    completions: Arc::clone(&completions),
                    carrying: Mutex::default(),
                    silent_since: Mutex::default(),
                })
            })
            .collect();
        device.add_queue_pairs(&pairs)?;
        let numbers = pairs.iter().map(|pair| pair.number).collect();
        Ok(Self { device, size, pairs, numbers, completions })
    }

    fn pair(&self, queue: usize) -> Result<&Arc<QueuePair>> {
        self.pairs.get(queue).ok_or_else(|| {
            Error::invalid_argument("the queue pair", queue, &format!("0 to {}", self.pairs.len() - 1))
        })
    }
}

impl QueuePairs for SoftQueuePairs {
    fn numbers(&self) -> &[u32] {
        &self.numbers
    }

    fn max_inline(&self) -> u32 {
        self.size.inline_bytes
    }

    fn connect(&self, queue: usize, _link: &Link, remote: &Remote) -> Result<()> {
        let pair = self.pair(queue)?;
        pair.flush();
        *pair.silent_since.lock() = None;
        *pair.phase.write() = Phase::Ready { gid: remote.gid, number: remote.number };
        Ok(())
    }

    fn fail(&self) -> Result<()> {
        let mut told = false;
        for pair in &self.pairs {
            *pair.phase.write() = Phase::Failed;
            drop(pair.carrying.lock());
            told |= pair.flush();
        }
        self.device.tell(told, self.completions.key);
        Ok(())
    }

    unsafe fn post(&self, queue: usize, requests: &[WorkRequest]) -> Result<(), PostError> {
        let pair = self.pair(queue).map_err(|error| PostError { posted: 0, error })?;
        let mut sends = pair.sends.lock();
        for (posted, request) in requests.iter().enumerate() {
            if sends.len() >= self.size.sends as usize {
                let error = Error::new(ErrorKind::QueueFull, "the send queue is full");
                return Err(PostError { posted, error });
            }
            // SAFETY: the caller's promise.
            let inline = request.inline.then(|| unsafe { taken(request) });
            sends.push_back(Posted { request: *request, inline });
        }
        drop(sends);
        self.device.look();
        Ok(())
    }

    fn post_receives(&self, queue: usize, ids: &[u64]) -> Result<(), PostError> {
        let pair = self.pair(queue).map_err(|error| PostError { posted: 0, error })?;
        let mut receives = pair.receives.lock();
        let room = (self.size.receives as usize).saturating_sub(receives.len());
        receives.extend(ids.iter().take(room));
        if ids.len() > room {
            let error = Error::new(ErrorKind::QueueFull, "the receive queue is full");
            return Err(PostError { posted: room, error });
        }
        Ok(())
    }

    fn poll(&self, into: &mut [WorkCompletion]) -> Result<usize> {
        let mut state = self.completions.state.lock();
        let count = into.len().min(state.waiting.len());
        for (place, completion) in into.iter_mut().zip(state.waiting.drain(..count)) {
            *place = completion;
        }
        Ok(count)
    }

    fn arm(&self) -> Result<()> {
        self.completions.state.lock().armed = true;
        Ok(())
    }
}

impl Drop for SoftQueuePairs {
    fn drop(&mut self) {
        self.device.remove_queue_pairs(&self.numbers);
        for pair in &self.pairs {
            *pair.phase.write() = Phase::Failed;
            drop(pair.carrying.lock());
            pair.sends.lock().clear();
        }
    }
}

impl fmt::Debug for SoftQueuePairs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SoftQueuePairs").field("numbers", &self.numbers).finish_non_exhaustive()
    }
}
