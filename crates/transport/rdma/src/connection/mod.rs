//! A path: the queue pairs that connect one of our devices to one of a peer's.

mod ending;
mod errors;
mod making;
mod notifying;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use arrayvec::ArrayVec;
use parking_lot::Mutex;
use posthorse_core::{
    Completion, Error, ErrorKind, FarEnd, Incarnation, Level, Path, PathId, PathState, Priority, RegionId,
    Result, Slice, SliceError,
};
use serde_json::Value;

use crate::notices::Notices;
use crate::queue::{CHAIN, Ended, Entry, Flush, SendQueue};
use crate::rail::{Rail, RailDesc};
use crate::regions::GrantKeys;
use crate::shared::Shared;
use crate::verbs::{QueuePairs, WorkCompletion, WorkRequest};
use errors::{path_failed, refused};

/// Completions that are taken at once.
const POLLED: usize = 32;

/// In a work request's id, which queue pair it is of.
const QUEUE_SHIFT: u32 = 56;

/// The id of the work request that shows whether a new connection carries anything.
const PROBE: u64 = u64::MAX;

/// A peer's device, as a connection goes there.
#[derive(Debug, Clone)]
pub(crate) struct Target {
    pub(crate) peer: Arc<str>,
    pub(crate) incarnation: Option<Incarnation>,
    pub(crate) device: RailDesc,
    /// Its place in what the peer publishes.
    pub(crate) index: usize,
}

/// See the module's documentation.
#[derive(Debug)]
pub(crate) struct Connection {
    /// Of the path, the connection and its completion queue alike.
    pub(crate) number: u64,
    pub(crate) rail: Arc<Rail>,
    pub(crate) target: Target,
    state: Mutex<State>,
    /// Held by whoever takes completions.
    polling: Mutex<()>,
    in_flight: AtomicUsize,
    notices: Notices,
}

#[derive(Debug)]
struct State {
    phase: Phase,
    pairs: Option<Arc<dyn QueuePairs>>,
    flush: Flush,
    queues: Vec<SendQueue>,
    /// Where chains are made.
    chain: Vec<WorkRequest>,
    /// Whether somebody was told that there is no room.
    refused: bool,
    /// How often it failed since it last carried anything.
    failures: u32,
    /// The keys of peers' memory that is in pieces.
    split: Vec<Arc<GrantKeys>>,
    /// Whether it is to be forgotten as soon as nothing is left of it.
    leaving: bool,
}

/// How a connection stands.
#[derive(Debug, Clone)]
enum Phase {
    /// It carries slices.
    Ready,
    /// Its queue pairs failed, and are about to be destroyed.
    Failing(Cause),
    /// It is being made, or made again after a refusal.
    Opening,
    /// It is tried again, after it was down for this reason.
    Trying(Error),
    /// It failed, and what was under way on it is being ended. Nobody makes it anew meanwhile: what is ended must not go out
    /// again.
    Ending(Error),
    /// It carries nothing. It is tried again, unless it was given up.
    Down(Error),
    /// Nobody wants it any more.
    Over(Error),
}

/// Why a connection's queue pairs are to go.
#[derive(Debug, Clone)]
enum Cause {
    /// One slice was refused: the others go on over new ones.
    Refusal,
    /// The path failed, for this reason.
    Failed(Error),
    /// It is given up, for this reason.
    GivenUp(Error),
}

/// Completions to be reported, gathered so that none is allocated.
type Ends = ArrayVec<Completion, { 2 * POLLED }>;

impl Connection {
    pub(crate) fn new(shared: &Shared, rail: &Arc<Rail>, target: Target) -> Arc<Self> {
        let number = shared.next_number.fetch_add(1, Ordering::Relaxed);
        let config = &shared.config;
        let state = State {
            phase: Phase::Opening,
            pairs: None,
            flush: Flush { local_address: 0, local_key: 0, remote_address: 0, remote_key: 0 },
            queues: (0..config.queue_pairs).map(|_| SendQueue::new(config.queue_depth)).collect(),
            chain: Vec::with_capacity(CHAIN),
            refused: false,
            failures: 0,
            split: Vec::new(),
            leaving: false,
        };
        Arc::new(Self {
            number,
            rail: Arc::clone(rail),
            target,
            state: Mutex::new(state),
            polling: Mutex::default(),
            in_flight: AtomicUsize::new(0),
            notices: Notices::default(),
        })
    }

    pub(crate) const fn path(&self) -> PathId {
        PathId(self.number)
    }

    /// Whether slices are in flight.
    pub(crate) fn is_busy(&self) -> bool {
        self.in_flight.load(Ordering::Relaxed) > 0
    }

    /// Whether a slice in flight uses this region.
    pub(crate) fn holds(&self, region: RegionId) -> bool {
        self.state.lock().queues.iter().any(|queue| queue.holds(region))
    }

    fn named(&self, error: Error) -> Error {
        let error = if error.peer().is_some() { error } else { error.with_peer(&*self.target.peer) };
        if error.device().is_some() { error } else { error.with_device(self.rail.name()) }
    }

    /// Takes slices, as many as there is room for.
    ///
    /// # Errors
    /// When it is down.
    ///
    /// # Safety
    /// As for [`Transport::submit`](posthorse_core::Transport::submit).
    pub(crate) unsafe fn submit(self: &Arc<Self>, shared: &Arc<Shared>, slices: &[Slice]) -> Result<usize> {
        let mut state = self.state.lock();
        match &state.phase {
            Phase::Ready => {}
            Phase::Failing(Cause::Refusal) | Phase::Opening => {
                state.refused = true;
                return Ok(0);
            }
            Phase::Failing(Cause::Failed(error) | Cause::GivenUp(error))
            | Phase::Trying(error)
            | Phase::Ending(error)
            | Phase::Down(error)
            | Phase::Over(error) => return Err(error.clone()),
        }
        let max_inline = state.pairs.as_ref().map_or(0, |pairs| pairs.max_inline());
        let mut wrong: ArrayVec<Completion, POLLED> = ArrayVec::new();
        let mut taken = 0;
        let mut added = 0;
        for slice in slices {
            let queue = queue_of(slice, state.queues.len());
            if wrong.is_full() || state.queues.get(queue).is_none_or(|queue| queue.room() == 0) {
                break;
            }
            match self.entry(shared, &state, slice, max_inline) {
                Ok(entry) => {
                    if let Some(queue) = state.queues.get_mut(queue) {
                        queue.push(entry);
                    }
                    added += 1;
                }
                Err(error) => {
                    let result = Err(SliceError { error: self.named(error), far_end: FarEnd::Quiet });
                    wrong.push(Completion { token: slice.token, result });
                }
            }
            taken += 1;
        }
        self.in_flight.fetch_add(added, Ordering::Relaxed);
        state.refused |= taken < slices.len();
        // SAFETY: the caller's promise, for the slices there are now and those that wait.
        let failed = unsafe { self.post(&mut state) };
        drop(state);
        shared.report(&wrong);
        if failed {
            self.settle_soon(shared);
        }
        Ok(taken)
    }

    fn entry(&self, shared: &Shared, state: &State, slice: &Slice, max_inline: u32) -> Result<Entry> {
        let view = slice
            .local
            .host()
            .ok_or_else(|| Error::new(ErrorKind::Unsupported, "transport rdma moves host memory only"))?;
        if slice.ready.is_some() {
            return Err(Error::new(ErrorKind::Unsupported, "transport rdma waits for no device events"));
        }
        let len = u32::try_from(view.len()).ok().filter(|len| u64::from(*len) <= crate::regions::MAX_SLICE);
        let len = len.filter(|len| *len > 0).ok_or_else(|| {
            let accepted = format!("1 to {}", crate::regions::MAX_SLICE);
            Error::invalid_argument("the slice's length", view.len(), &accepted)
        })?;
        let local_key = shared
            .regions
            .get(slice.local_region)
            .and_then(|region| region.key(self.rail.index, view.address()))
            .ok_or_else(|| {
                let text = format!("transport rdma knows no region {} there", slice.local_region);
                Error::new(ErrorKind::NotRegistered, text)
            })?;
        let key = slice.remote_key.0;
        let remote_key = if key & SPLIT == 0 {
            (key & KEY != 0).then_some(key as u32)
        } else {
            let keys = state.split.get((key & !SPLIT) as usize);
            keys.and_then(|keys| keys.key(self.target.index, slice.remote_address))
        };
        let remote_key = remote_key.ok_or_else(|| {
            let text = format!("no key of the peer's is known for the memory at {:#x}", slice.remote_address);
            Error::new(ErrorKind::NotRegistered, text)
        })?;
        Ok(Entry {
            token: slice.token,
            opcode: slice.opcode,
            level: slice.level,
            region: slice.local_region,
            local_address: view.address(),
            len,
            local_key,
            remote_address: slice.remote_address,
            remote_key,
            inline: slice.opcode == posthorse_core::Opcode::Write && len <= max_inline,
        })
    }

    /// What is to be named in slices for what the peer published.
    ///
    /// # Errors
    /// `Malformed`.
    pub(crate) fn import(&self, attributes: &Value) -> Result<u64> {
        let malformed = |why: String| {
            self.named(Error::new(
                ErrorKind::Malformed,
                format!("what the peer publishes of its memory: {why}"),
            ))
        };
        if attributes.is_null() {
            return Ok(0);
        }
        let keys = <GrantKeys as serde::Deserialize>::deserialize(attributes);
        let keys = keys.map_err(|error| malformed(error.to_string()))?;
        if keys.pieces.is_none() {
            let key = keys.key(self.target.index, 0).ok_or_else(|| {
                malformed(format!("there is no key for its device {}", self.target.device.name))
            })?;
            return Ok(KEY | u64::from(key));
        }
        let mut state = self.state.lock();
        let known = state.split.iter().position(|known| **known == keys);
        let at = known.unwrap_or_else(|| {
            state.split.push(Arc::new(keys));
            state.split.len() - 1
        });
        Ok(SPLIT | at as u64)
    }

    /// Posts what waits. Says whether that failed.
    ///
    /// # Safety
    /// The memory of every entry stays as `Transport::submit` demands.
    unsafe fn post(&self, state: &mut State) -> bool {
        if !matches!(state.phase, Phase::Ready) {
            return false;
        }
        let Some(pairs) = state.pairs.clone() else { return false };
        for at in 0..state.queues.len() {
            let State { queues, chain, flush, .. } = state;
            let Some(queue) = queues.get_mut(at) else { break };
            loop {
                queue.next_chain(flush, chain);
                if chain.is_empty() {
                    break;
                }
                for request in chain.iter_mut() {
                    request.id |= (at as u64) << QUEUE_SHIFT;
                }
                // SAFETY: the caller's promise.
                if let Err(error) = unsafe { pairs.post(at, chain) } {
                    queue.unpost(chain.len() - error.posted);
                    let error = self.named(error.error.context("posting work requests"));
                    self.fail(state, Cause::Failed(error));
                    return true;
                }
            }
        }
        false
    }

    /// Destroys queue pairs that nobody posts to any more: when this returns, they touch nothing.
    fn retire(&self, pairs: Option<Arc<dyn QueuePairs>>) {
        // Whoever takes completions has them too.
        let _polling = self.polling.lock();
        drop(pairs);
    }

    /// Takes completions, as many as there are, and reports what ended. With `arm`, the next is announced.
    pub(crate) fn progress(self: &Arc<Self>, shared: &Arc<Shared>, arm: bool) -> bool {
        let mut anything = false;
        let mut armed = false;
        loop {
            // Whoever is to arm the queue waits for its turn: those who help may stop at any time, and a queue that nobody
            // armed is looked at by nobody.
            let polling = if arm { Some(self.polling.lock()) } else { self.polling.try_lock() };
            let Some(polling) = polling else { return anything };
            let Some(pairs) = self.state.lock().pairs.clone() else { return anything };
            let mut completions = [WorkCompletion::EMPTY; POLLED];
            let count = match pairs.poll(&mut completions) {
                Ok(count) => count,
                Err(error) => {
                    drop(pairs);
                    drop(polling);
                    self.queue_failed(shared, error);
                    return anything;
                }
            };
            let mut ends = Ends::new();
            if count == 0 {
                if !arm || armed {
                    drop(pairs);
                    return anything;
                }
                let outcome = pairs.arm();
                drop(pairs);
                if let Err(error) = outcome {
                    drop(polling);
                    self.queue_failed(shared, error);
                    return anything;
                }
                armed = true;
                continue;
            }
            anything = true;
            let mut state = self.state.lock();
            let current = state.pairs.as_ref().is_some_and(|now| Arc::ptr_eq(now, &pairs));
            let mut overflow = Vec::new();
            let mut failed = false;
            if current {
                for completion in completions.get(..count).unwrap_or_default() {
                    failed |= self.completed(&mut state, completion, &mut ends, &mut overflow);
                }
            }
            // SAFETY: as in `made`.
            failed |= unsafe { self.post(&mut state) };
            let ended = ends.len() + overflow.len();
            let writable =
                ended > 0 && matches!(state.phase, Phase::Ready) && std::mem::take(&mut state.refused);
            drop(state);
            self.in_flight.fetch_sub(ended, Ordering::Relaxed);
            // Before whoever waits to destroy them goes on.
            drop(pairs);
            drop(polling);
            shared.report(&ends);
            shared.report(&overflow);
            if writable {
                shared.writable(self.path());
            }
            if failed {
                self.settle_soon(shared);
            }
        }
    }

    /// Notes one completion. Says whether the queue pairs failed by it.
    fn completed(
        &self,
        state: &mut State,
        completion: &WorkCompletion,
        ends: &mut Ends,
        overflow: &mut Vec<Completion>,
    ) -> bool {
        let queue = (completion.id >> QUEUE_SHIFT) as usize;
        let id = completion.id & ((1 << QUEUE_SHIFT) - 1);
        if !matches!(state.phase, Phase::Ready) {
            return false;
        }
        let Some(send_queue) = state.queues.get_mut(queue) else { return false };
        let failed = send_queue.completed(id, completion.status, |entry, ended| {
            let completion = Completion { token: entry.token, result: self.result(ended) };
            // One completion ends as many entries as a chain has; rarely do several long ones come together.
            if let Err(full) = ends.try_push(completion) {
                overflow.push(full.element());
            }
        });
        if failed {
            let cause = if crate::queue::is_refusal(completion.status) {
                Cause::Refusal
            } else {
                Cause::Failed(self.named(path_failed(completion.status, completion.vendor_error)))
            };
            self.fail(state, cause);
        }
        failed
    }

    fn result(&self, ended: Ended) -> Result<Level, SliceError> {
        match ended {
            Ended::Done(level) => Ok(level),
            Ended::Refused(status) => {
                Err(SliceError { error: self.named(refused(status)), far_end: FarEnd::Quiet })
            }
            Ended::Dropped { stale } => {
                let far_end = if stale { FarEnd::Unconfirmed } else { FarEnd::Quiet };
                let error = self.named(Error::new(ErrorKind::Cancelled, "the slice was called off"));
                Err(SliceError { error, far_end })
            }
        }
    }

    /// The path, as the engine knows it.
    pub(crate) fn describe(&self, shared: &Shared) -> Path {
        let bandwidth = self.rail.port(&shared.config).map_or(0, |port| port.bandwidth);
        let theirs = self.target.device.bandwidth;
        Path {
            id: self.path(),
            local_device: self.rail.name().to_owned(),
            remote_device: format!("{}@{}", self.target.peer, self.target.device.name),
            numa_node: None,
            bandwidth: if bandwidth == 0 || theirs == 0 {
                bandwidth.max(theirs)
            } else {
                bandwidth.min(theirs)
            },
            state: self.down().map_or(PathState::Up, PathState::Down),
        }
    }

    /// Why it is down, if it is.
    pub(crate) fn down(&self) -> Option<Error> {
        match &self.state.lock().phase {
            Phase::Ready | Phase::Opening | Phase::Failing(Cause::Refusal) => None,
            Phase::Down(error)
            | Phase::Ending(error)
            | Phase::Trying(error)
            | Phase::Over(error)
            | Phase::Failing(Cause::Failed(error) | Cause::GivenUp(error)) => Some(error.clone()),
        }
    }
}

/// In a key of a slice: that there is one, and that it is the place of one in pieces.
const KEY: u64 = 1 << 32;
const SPLIT: u64 = 1 << 63;

/// The queue pair of a slice: urgent ones have the first to themselves.
fn queue_of(slice: &Slice, queues: usize) -> usize {
    match (slice.priority, queues) {
        (_, 0 | 1) | (Priority::High, _) => 0,
        (_, 2) => 1,
        // Neighbours go together: they are one message after the other in memory.
        (_, several) => 1 + (slice.remote_address >> 20) as usize % (several - 1),
    }
}

#[cfg(test)]
mod tests;
