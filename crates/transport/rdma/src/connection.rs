//! A path: the queue pairs that connect one of our devices to one of a peer's.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use arrayvec::ArrayVec;
use parking_lot::Mutex;
use posthorse_core::{
    Completion, Deadline, Error, ErrorKind, FarEnd, Fault, Incarnation, Level, Path, PathId, PathState,
    Priority, RegionId, Result, Slice, SliceError,
};
use serde_json::Value;

use crate::handshake::{CLOSE, CONNECT, Close, Extension, HandshakeDesc, NOTIFY, decode, encode, nic_path};
use crate::notices::{self, Notices};
use crate::queue::{CHAIN, Ended, Entry, Flush, SendQueue, read_word};
use crate::rail::{Rail, RailDesc};
use crate::regions::GrantKeys;
use crate::shared::Shared;
use crate::verbs::{QueuePairs, QueueSize, Remote, Status, WorkCompletion, WorkRequest};

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
}

/// How a connection stands.
#[derive(Debug, Clone)]
enum Phase {
    /// It carries slices.
    Ready,
    /// Its queue pairs failed, and are about to be destroyed.
    Failing(Cause),
    /// It is being made, or made again.
    Opening,
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

    /// Makes the connection: queue pairs, a handshake, and a first READ to show that it carries something.
    ///
    /// # Errors
    /// Whatever is in the way; then there are no queue pairs.
    fn make(&self, shared: &Shared, deadline: Deadline) -> Result<(Arc<dyn QueuePairs>, Flush)> {
        let config = &shared.config;
        if let Some(down) = self.rail.down(config) {
            return Err(self.named(down));
        }
        let size = QueueSize {
            sends: SendQueue::work_requests(config.queue_depth) as u32,
            receives: 1,
            inline_bytes: config.inline_bytes,
        };
        let named = |error| self.named(error);
        let pairs = self.rail.device.queue_pairs(config.queue_pairs, size, self.number).map_err(named)?;
        let port = self.rail.port(config).map_err(named)?;
        let desc = HandshakeDesc {
            local_nic_path: nic_path(&shared.context.name, self.rail.name()),
            peer_nic_path: nic_path(&self.target.peer, &self.target.device.name),
            local_lid: port.lid,
            local_gid: self.rail.gid().to_string(),
            qp_num: pairs.numbers().to_vec(),
            posthorse: Some(Extension {
                hello: shared.context.hello.clone(),
                incarnation: shared.context.incarnation,
                to: self.target.incarnation,
                connection: self.number,
                mtu: port.mtu.min(config.mtu),
                word: None,
            }),
        };
        let answer = shared.ask(&self.target.peer, CONNECT, &encode(&desc)?, deadline).map_err(named)?;
        let answer: HandshakeDesc = decode(&answer).map_err(named)?;
        let gid = answer.check().map_err(named)?;
        let malformed = |what: &str| {
            named(Error::new(ErrorKind::Malformed, format!("the peer's answer to a handshake {what}")))
        };
        let theirs = answer.posthorse.ok_or_else(|| malformed("is not a Posthorse peer's"))?;
        let word = theirs.word.ok_or_else(|| malformed("names no word to read"))?;
        if answer.qp_num.len() != pairs.numbers().len() {
            return Err(malformed(&format!(
                "has {} queue pairs; expected: {}",
                answer.qp_num.len(),
                pairs.numbers().len()
            )));
        }
        let link = self.rail.link(config, &port, theirs.mtu);
        for (queue, number) in answer.qp_num.iter().enumerate() {
            let remote = Remote { number: *number, gid, lid: answer.local_lid };
            pairs.connect(queue, &link, &remote).map_err(named)?;
        }
        let (local_address, local_key) = self.rail.scratch();
        let flush = Flush { local_address, local_key, remote_address: word.address, remote_key: word.key };
        self.probe(&*pairs, &flush, deadline).map_err(named)?;
        pairs.arm().map_err(named)?;
        Ok((pairs, flush))
    }

    /// Shows that the connection carries something.
    fn probe(&self, pairs: &dyn QueuePairs, flush: &Flush, deadline: Deadline) -> Result<()> {
        // SAFETY: the memory is the rail's, which this connection holds.
        unsafe { pairs.post(0, &[read_word(PROBE, flush)]) }.map_err(|error| error.error)?;
        let mut completions = [WorkCompletion::EMPTY];
        let mut pause = std::time::Duration::from_micros(20);
        loop {
            if pairs.poll(&mut completions)? > 0 {
                return match completions[0].status {
                    Status::Success => Ok(()),
                    status => Err(path_failed(status, completions[0].vendor_error)
                        .context("the first READ of a new connection")),
                };
            }
            if deadline.is_past(Instant::now()) {
                return Err(Deadline::exceeded("the first READ of a new connection"));
            }
            std::thread::sleep(pause);
            pause = (pause * 2).min(std::time::Duration::from_millis(2));
        }
    }

    /// Makes a connection for the first time.
    ///
    /// # Errors
    /// Whatever is in the way. It is down then, and tried again when asked for.
    pub(crate) fn open(self: &Arc<Self>, shared: &Arc<Shared>, deadline: Deadline) -> Result<()> {
        let made = self.make(shared, deadline);
        self.made(shared, made).map(drop)
    }

    /// Takes over what was made. Returns whether somebody waits for room.
    fn made(
        self: &Arc<Self>,
        shared: &Arc<Shared>,
        made: Result<(Arc<dyn QueuePairs>, Flush)>,
    ) -> Result<bool> {
        let mut state = self.state.lock();
        let old = state.pairs.take();
        let outcome = match (made, &state.phase) {
            // Given up meanwhile: nobody needs it.
            (made, Phase::Over(error)) => {
                let error = error.clone();
                drop(state);
                self.retire(old);
                drop(made);
                return Err(error);
            }
            (Ok((pairs, flush)), _) => {
                (state.pairs, state.flush, state.phase) = (Some(pairs), flush, Phase::Ready);
                state.failures = 0;
                state.queues.iter_mut().for_each(SendQueue::rewind);
                Ok(std::mem::take(&mut state.refused))
            }
            (Err(error), _) => {
                state.phase = Phase::Down(error.clone());
                Err(error)
            }
        };
        // SAFETY: whoever submitted the entries keeps their memory until they have ended.
        let failed = unsafe { self.post(&mut state) };
        drop(state);
        self.retire(old);
        if failed {
            self.settle_soon(shared);
        }
        outcome
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

    /// Begins the end of the queue pairs there are. What was posted to them and has not ended by now is posted again to
    /// others, or ends when they are destroyed: it is not waited for. [`Connection::settle_soon`] is to follow.
    fn fail(&self, state: &mut State, cause: Cause) {
        state.phase = Phase::Failing(cause);
        if let Some(pairs) = &state.pairs
            && let Err(error) = pairs.fail()
        {
            tracing::error!(device = self.rail.name(), %error, "queue pairs could not be moved to the error state");
        }
    }

    /// Takes completions, as many as there are, and reports what ended. With `arm`, the next is announced.
    pub(crate) fn progress(self: &Arc<Self>, shared: &Arc<Shared>, arm: bool) -> bool {
        let mut anything = false;
        let mut armed = false;
        loop {
            let Some(polling) = self.polling.try_lock() else { return anything };
            let Some(pairs) = self.state.lock().pairs.clone() else { return anything };
            let mut completions = [WorkCompletion::EMPTY; POLLED];
            let count = pairs.poll(&mut completions).unwrap_or_else(|error| {
                tracing::error!(device = self.rail.name(), %error, "a completion queue could not be read");
                0
            });
            let mut ends = Ends::new();
            if count == 0 {
                if !arm || armed {
                    drop(pairs);
                    return anything;
                }
                if let Err(error) = pairs.arm() {
                    tracing::error!(device = self.rail.name(), %error, "a completion queue could not be armed");
                }
                armed = true;
                drop(pairs);
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

    /// The queue pairs failed: has a thread do what comes then.
    fn settle_soon(self: &Arc<Self>, shared: &Arc<Shared>) {
        let (connection, there) = (Arc::clone(self), Arc::downgrade(shared));
        shared.workers.run(move || {
            if let Some(shared) = there.upgrade() {
                connection.settle(&shared);
            }
        });
    }

    /// Makes the connection again, or ends it, after its queue pairs failed.
    fn settle(self: &Arc<Self>, shared: &Arc<Shared>) {
        let (cause, pairs) = {
            let mut state = self.state.lock();
            let Phase::Failing(cause) = &state.phase else { return };
            let cause = cause.clone();
            state.phase = match &cause {
                Cause::Refusal => Phase::Opening,
                Cause::Failed(error) => Phase::Down(error.clone()),
                Cause::GivenUp(error) => Phase::Over(error.clone()),
            };
            (cause, state.pairs.take())
        };
        self.retire(pairs);
        match cause {
            Cause::Refusal => {
                let deadline = Deadline::after(shared.config.liveness());
                match self.make(shared, deadline) {
                    Err(error) => self.failed(shared, error),
                    made => match self.made(shared, made) {
                        Ok(true) => shared.writable(self.path()),
                        Ok(false) => {}
                        Err(error) => self.end_all(shared, &error),
                    },
                }
            }
            Cause::Failed(error) => self.failed(shared, error),
            Cause::GivenUp(error) => self.end_all(shared, &error),
        }
    }

    /// The path failed: what was under way ends, and it is tried again later.
    fn failed(self: &Arc<Self>, shared: &Arc<Shared>, error: Error) {
        {
            let mut state = self.state.lock();
            if !matches!(state.phase, Phase::Over(_)) {
                state.phase = Phase::Down(error.clone());
            }
        }
        tracing::info!(
            peer = &*self.target.peer,
            device = self.rail.name(),
            remote = self.target.device.name,
            %error,
            "a path failed"
        );
        shared.path_changed(self.path(), &PathState::Down(error.clone()));
        self.end_all(shared, &error);
        self.try_again_later(shared);
    }

    /// Ends what is left under way, when the peer has seen to it that nothing of it arrives any more.
    fn end_all(&self, shared: &Shared, error: &Error) {
        let far_end = self.close_there(shared);
        let (error, far_end) = match far_end {
            Ok(()) => (error.clone(), FarEnd::Quiet),
            // The peer is no more, and so is its memory.
            Err(why) if why.kind() == ErrorKind::PeerRestarted => (self.named(why), FarEnd::Quiet),
            Err(why) => {
                let gone = matches!(why.kind(), ErrorKind::PeerGone | ErrorKind::PeerUnreachable);
                let error = if gone && error.kind() == ErrorKind::PathFailed {
                    let text = format!("{}; and {}", error.message(), why.message());
                    self.named(Error::new(ErrorKind::PeerGone, text))
                } else {
                    error.clone()
                };
                (error, FarEnd::Unconfirmed)
            }
        };
        let mut ends = Vec::new();
        let mut state = self.state.lock();
        for queue in &mut state.queues {
            queue.end_all(|entry, ended| {
                let stale = ended == (Ended::Dropped { stale: true });
                let far_end = if stale { far_end } else { FarEnd::Quiet };
                let error = error.clone();
                ends.push(Completion { token: entry.token, result: Err(SliceError { error, far_end }) });
            });
        }
        drop(state);
        self.in_flight.fetch_sub(ends.len(), Ordering::Relaxed);
        shared.report(&ends);
    }

    /// Has the peer end its side of the connection.
    ///
    /// # Errors
    /// When it does not say that it has.
    fn close_there(&self, shared: &Shared) -> Result<()> {
        let close = Close { incarnation: shared.context.incarnation, connections: vec![self.number] };
        let deadline = Deadline::after(shared.config.liveness());
        shared.ask(&self.target.peer, CLOSE, &encode(&close)?, deadline).map(drop)
    }

    /// Has the path tried again after a while, longer each time.
    fn try_again_later(self: &Arc<Self>, shared: &Arc<Shared>) {
        let failures = {
            let mut state = self.state.lock();
            state.failures = state.failures.saturating_add(1);
            state.failures
        };
        let (connection, there) = (Arc::downgrade(self), Arc::downgrade(shared));
        // At once, the first time: the peer may have ended its side for a reason of its own.
        let at = Instant::now() + shared.pause(failures);
        shared.workers.run_at(at, move || {
            if let (Some(connection), Some(shared)) = (connection.upgrade(), there.upgrade()) {
                connection.try_again(&shared);
            }
        });
    }

    /// Tries to make a path again that is down.
    pub(crate) fn try_again(self: &Arc<Self>, shared: &Arc<Shared>) {
        {
            let mut state = self.state.lock();
            if shared.is_stopped() || !matches!(state.phase, Phase::Down(_)) {
                return;
            }
            state.phase = Phase::Opening;
        }
        // The port may have another address by now.
        if let Err(error) = self.rail.choose_again(&shared.config, &[]) {
            tracing::debug!(device = self.rail.name(), %error, "no address");
        }
        let made = self.make(shared, Deadline::after(shared.config.liveness()));
        match self.made(shared, made) {
            Ok(_) => {
                tracing::info!(peer = &*self.target.peer, device = self.rail.name(), "a path is up again");
                shared.path_changed(self.path(), &PathState::Up);
            }
            Err(error) if error.kind() == ErrorKind::PeerRestarted => {}
            Err(_) => self.try_again_later(shared),
        }
    }

    /// The port is down: nothing more is waited for.
    pub(crate) fn port_failed(self: &Arc<Self>, shared: &Arc<Shared>, error: Error) {
        let mut state = self.state.lock();
        if !matches!(state.phase, Phase::Ready) {
            return;
        }
        self.fail(&mut state, Cause::Failed(self.named(error)));
        drop(state);
        self.settle_soon(shared);
    }

    /// Ends the connection: what is under way ends as flushed, when it is quiet.
    pub(crate) fn give_up(self: &Arc<Self>, shared: &Arc<Shared>, error: &Error) {
        let mut state = self.state.lock();
        let error = self.named(error.clone());
        match &state.phase {
            Phase::Ready => {
                self.fail(&mut state, Cause::GivenUp(error));
                drop(state);
                self.settle_soon(shared);
            }
            // What is about to happen to it happens, for this reason.
            Phase::Failing(Cause::Refusal | Cause::Failed(_)) => {
                state.phase = Phase::Failing(Cause::GivenUp(error));
            }
            Phase::Failing(Cause::GivenUp(_)) | Phase::Over(_) => {}
            Phase::Opening | Phase::Down(_) => {
                state.phase = Phase::Over(error.clone());
                drop(state);
                // Whoever is making it finds it over; what waits in it ends here.
                let (connection, there) = (Arc::clone(self), Arc::downgrade(shared));
                shared.workers.run(move || {
                    if let Some(shared) = there.upgrade() {
                        connection.end_all(&shared, &error);
                    }
                });
            }
        }
    }

    /// Ends everything at once, on the caller's thread: this process will serve nobody any more.
    pub(crate) fn stop(&self, shared: &Shared, error: &Error) {
        let mut state = self.state.lock();
        state.phase = Phase::Over(error.clone());
        let pairs = state.pairs.take();
        drop(state);
        self.retire(pairs);
        let mut ends = Vec::new();
        let mut state = self.state.lock();
        for queue in &mut state.queues {
            queue.end_all(|entry, ended| {
                let stale = ended == (Ended::Dropped { stale: true });
                let far_end = if stale { FarEnd::Unconfirmed } else { FarEnd::Quiet };
                let error = self.named(error.clone());
                ends.push(Completion { token: entry.token, result: Err(SliceError { error, far_end }) });
            });
        }
        drop(state);
        for notice in self.notices.take_all() {
            let result = Err(SliceError { error: self.named(error.clone()), far_end: FarEnd::Quiet });
            ends.push(Completion { token: notice.token, result });
        }
        shared.report(&ends);
    }

    /// Drops what is not yet posted.
    pub(crate) fn cancel(&self, shared: &Shared, which: &mut dyn FnMut(u64) -> bool) {
        let mut ends = Vec::new();
        let mut state = self.state.lock();
        for queue in &mut state.queues {
            queue.cancel(which, |entry, ended| {
                ends.push(Completion { token: entry.token, result: self.result(ended) });
            });
        }
        drop(state);
        self.in_flight.fetch_sub(ends.len(), Ordering::Relaxed);
        shared.report(&ends);
    }

    /// Asks whether the peer is there, where nothing else under way shows it.
    pub(crate) fn look(self: &Arc<Self>, shared: &Arc<Shared>) {
        let mut state = self.state.lock();
        if !matches!(state.phase, Phase::Ready) {
            return;
        }
        let Some(pairs) = state.pairs.clone() else { return };
        let Some(alive) = state.queues.first_mut().and_then(SendQueue::alive) else { return };
        // SAFETY: it names no memory.
        if let Err(error) = unsafe { pairs.post(0, &[alive]) } {
            if let Some(queue) = state.queues.first_mut() {
                queue.unpost(1);
            }
            self.fail(&mut state, Cause::Failed(self.named(error.error)));
            drop(state);
            self.settle_soon(shared);
        }
    }

    /// Has a path that is down tried again after a while.
    pub(crate) fn try_again_if_down(self: &Arc<Self>, shared: &Arc<Shared>) {
        let down = matches!(self.state.lock().phase, Phase::Down(_));
        if down {
            self.try_again_later(shared);
        }
    }

    /// Whether it is over, and nothing is left of it.
    pub(crate) fn has_ended(&self) -> bool {
        let state = self.state.lock();
        matches!(state.phase, Phase::Over(_)) && state.queues.iter().all(SendQueue::is_empty)
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

    /// Sends a notification behind those that wait.
    pub(crate) fn notify(self: &Arc<Self>, shared: &Arc<Shared>, token: u64, data: &[u8]) -> Result<()> {
        if let Some(error) = self.down() {
            return Err(error);
        }
        if self.notices.push(token, data)? {
            let (connection, there) = (Arc::clone(self), Arc::downgrade(shared));
            shared.workers.run(move || {
                while let Some(shared) = there.upgrade()
                    && let Some(notice) = connection.notices.next()
                {
                    let end = connection.deliver(&shared, &notice);
                    shared.report(&[end]);
                }
            });
        }
        Ok(())
    }

    fn deliver(&self, shared: &Shared, notice: &notices::Notice) -> Completion {
        let outcome = match self.down() {
            Some(error) => Err(SliceError { error, far_end: FarEnd::Quiet }),
            None => {
                let body = notices::encode(shared.context.incarnation, self.number, notice);
                let deadline = Deadline::after(shared.config.liveness());
                shared.ask(&self.target.peer, NOTIFY, &body, deadline).map_err(|error| {
                    // What the peer decided it has decided; otherwise it may have it.
                    let decided = matches!(error.kind(), ErrorKind::QueueFull | ErrorKind::PeerUnreachable);
                    let far_end = if decided { FarEnd::Quiet } else { FarEnd::Unconfirmed };
                    SliceError { error: self.named(error), far_end }
                })
            }
        };
        Completion { token: notice.token, result: outcome.map(|_| Level::Visible) }
    }

    /// Why it is down, if it is.
    pub(crate) fn down(&self) -> Option<Error> {
        match &self.state.lock().phase {
            Phase::Ready | Phase::Opening | Phase::Failing(Cause::Refusal) => None,
            Phase::Down(error)
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

/// The error of a slice that the hardware refused.
fn refused(status: Status) -> Error {
    let (kind, fault, text) = match status {
        Status::RemoteAccess => (
            ErrorKind::AccessDenied,
            Fault::Request,
            "the peer's device refused: the memory is not what the key is for",
        ),
        Status::RemoteInvalid => {
            (ErrorKind::AccessDenied, Fault::Request, "the peer's device found the request wrong")
        }
        Status::LocalProtection => (
            ErrorKind::NotRegistered,
            Fault::Local,
            "the device refused: the local memory is not what the key is for",
        ),
        _ => (ErrorKind::InvalidArgument, Fault::Request, "the message is longer than the device takes"),
    };
    Error::new(kind, text).with_fault(fault)
}

/// The error of a path on which work requests end like this.
fn path_failed(status: Status, vendor: u32) -> Error {
    let text = match status {
        Status::RetriesExceeded => "nobody acknowledges what is sent".to_owned(),
        Status::ReceiverNotReady => "the peer takes no messages".to_owned(),
        Status::Flushed => "the queue pair was moved to the error state".to_owned(),
        other => format!("a work request ended with {other:?}, vendor's code {vendor:#x}"),
    };
    Error::new(ErrorKind::PathFailed, text)
}
