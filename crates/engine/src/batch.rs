//! Batches: what was submitted together, as a value that can be waited for and cannot be misused.

use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll};
use std::time::Instant;

use posthorse_core::{
    Checksum, Deadline, Error, Result, TransferRequest, TransferState, TransferStatus, TransportId,
};

use crate::engine::Inner;
use crate::peer::Segment;
use crate::plan::Plan;
use crate::signal::{Place, Signal};
use crate::submission::{Doom, Submission};

/// What the batch and its submissions share. The submissions hold it, so it does not hold them.
#[derive(Debug, Default)]
pub(crate) struct BatchCore {
    pub(crate) signal: Signal,
    /// Submissions that have not ended.
    live: AtomicUsize,
    failure: OnceLock<Error>,
    /// The transports that have carried some of it, a bit each by their numbers, as far as there are bits.
    carriers: AtomicU64,
}

impl BatchCore {
    pub(crate) fn note_failure(&self, error: &Error) {
        if self.failure.get().is_none() {
            let _ = self.failure.set(error.clone());
        }
    }

    /// Notes that a transport carries some of it.
    pub(crate) fn carried_by(&self, transport: TransportId) {
        let bit = 1_u64.checked_shl(transport.0.into()).unwrap_or(0);
        if self.carriers.load(Ordering::Relaxed) & bit != bit {
            self.carriers.fetch_or(bit, Ordering::Relaxed);
        }
    }

    fn carriers(&self) -> impl Iterator<Item = TransportId> + use<> {
        let carriers = self.carriers.load(Ordering::Relaxed);
        (0..64).filter(move |number| carriers >> number & 1 == 1).map(TransportId)
    }

    pub(crate) fn submission_began(&self) {
        self.live.fetch_add(1, Ordering::AcqRel);
    }

    pub(crate) fn submission_ended(&self) {
        self.live.fetch_sub(1, Ordering::AcqRel);
        self.signal.ring();
    }

    fn is_ended(&self) -> bool {
        self.live.load(Ordering::Acquire) == 0
    }

    fn outcome(&self) -> Result<()> {
        self.failure.get().map_or(Ok(()), |error| Err(error.clone()))
    }
}

/// How a submission is to be carried out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SubmitOptions {
    /// When what is not done is called off, and ends as timed out, which may take a moment more. What is done by then
    /// stays done: a small transfer may be done before anybody looks at its deadline, even one that has passed already.
    pub deadline: Deadline,
    /// How much is compared at the far end before a transfer is called done.
    pub checksum: Checksum,
}

impl Default for SubmitOptions {
    /// No deadline, no checksum. A peer that vanishes still ends its transfers.
    fn default() -> Self {
        Self { deadline: Deadline::NEVER, checksum: Checksum::Off }
    }
}

/// A task of a batch: one request, in the order of submission.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TaskId(pub usize);

/// A number of transfers that are waited for together.
///
/// More can be submitted at any time. Dropping a batch calls off what has not ended; the memory involved stays
/// registered and alive until nothing touches it any more.
#[derive(Debug)]
pub struct Batch {
    engine: Arc<Inner>,
    core: Arc<BatchCore>,
    /// The submissions and the number of their first task.
    submitted: Vec<(usize, Arc<Submission>)>,
    tasks: usize,
}

/// How far a batch has come.
#[derive(Debug, Clone)]
pub struct BatchStatus {
    /// Completed when every task is; failed, timed out or canceled when every task has ended and one did so.
    pub state: TransferState,
    /// Bytes that have arrived.
    pub bytes: u64,
    /// How many tasks were submitted.
    pub tasks: usize,
    /// The first failure.
    pub error: Option<Error>,
}

impl Batch {
    pub(crate) fn new(engine: Arc<Inner>) -> Self {
        Self { engine, core: Arc::default(), submitted: Vec::new(), tasks: 0 }
    }

    /// Submits requests, all of them or, with an error, none. The tasks are numbered in order, and the number of
    /// the first is returned.
    ///
    /// # Errors
    /// The first request that cannot be carried out, by its index: memory that is not registered, a range outside
    /// of it, an unknown segment, a route that no transport serves; `QueueFull` when the engine's limit of
    /// submissions in flight is reached.
    pub fn submit(&mut self, requests: &[TransferRequest], options: SubmitOptions) -> Result<TaskId> {
        let plan = Plan::new(&self.engine, requests)?;
        let submission = self.engine.post(&self.core, plan.work(), options, None)?;
        Ok(self.note(submission))
    }

    /// As [`Batch::submit`], followed by a message to a peer that is delivered when all the requests are done.
    /// The message is a task of its own, after those of the requests; if one of them fails it is not sent. The number
    /// of the first task is returned: of the first request, or of the message where there are no requests.
    ///
    /// # Errors
    /// As [`Batch::submit`].
    pub fn submit_with_notice(
        &mut self,
        requests: &[TransferRequest],
        peer: &Segment,
        data: &[u8],
        options: SubmitOptions,
    ) -> Result<TaskId> {
        let plan = Plan::new(&self.engine, requests)?;
        self.engine.check_opened(&peer.peer)?;
        let submission = self.engine.post(&self.core, plan.work(), options, Some((peer, data)))?;
        Ok(self.note(submission))
    }

    /// Submits a plan's requests once more.
    ///
    /// # Errors
    /// `NotRegistered` when a region of the plan is registered no more; `InvalidArgument` for a plan of another engine;
    /// `QueueFull` as [`Batch::submit`].
    pub fn post(&mut self, plan: &Plan, options: SubmitOptions) -> Result<TaskId> {
        plan.work().peers.iter().try_for_each(|peer| self.engine.check_opened(peer))?;
        let submission = self.engine.post(&self.core, plan.work(), options, None)?;
        Ok(self.note(submission))
    }

    fn note(&mut self, submission: Arc<Submission>) -> TaskId {
        let first = TaskId(self.tasks);
        self.tasks += submission.task_count();
        self.submitted.push((first.0, submission));
        first
    }

    /// How many tasks were submitted.
    pub const fn len(&self) -> usize {
        self.tasks
    }

    /// Whether nothing was submitted.
    pub const fn is_empty(&self) -> bool {
        self.tasks == 0
    }

    /// Whether every task has ended.
    pub fn is_done(&self) -> bool {
        self.core.is_ended()
    }

    /// How far a task has come; `None` when there is no such task.
    pub fn task(&self, task: TaskId) -> Option<TransferStatus> {
        let index = self.submitted.partition_point(|(first, _)| *first <= task.0).checked_sub(1)?;
        let (first, submission) = self.submitted.get(index)?;
        submission.status(task.0 - first)
    }

    /// How far the batch has come.
    pub fn status(&self) -> BatchStatus {
        let ended = self.core.is_ended();
        let error = self.core.failure.get().cloned();
        let bytes = self.submitted.iter().map(|(_, submission)| submission.bytes_done()).sum();
        let state = match &error {
            _ if !ended && bytes == 0 => TransferState::Waiting,
            _ if !ended => TransferState::Pending,
            Some(error) => TransferState::of_error(error),
            None => TransferState::Completed,
        };
        BatchStatus { state, bytes, tasks: self.tasks, error }
    }

    /// Waits until every task has ended.
    ///
    /// # Errors
    /// The first failure of a task; `DeadlineExceeded` when `deadline` comes first: then the transfers go on, and
    /// can be waited for again or cancelled.
    pub fn wait(&self, deadline: Deadline) -> Result<()> {
        self.engine.fork.check()?;
        if !self.wait_until(deadline, || self.core.is_ended()) {
            return Err(Deadline::exceeded("a batch of transfers, which goes on"));
        }
        self.core.outcome()
    }

    /// Waits until the tasks of one group have ended, whatever the others do. A group without requests has ended.
    ///
    /// # Errors
    /// As [`Batch::wait`], for the tasks of the group.
    pub fn wait_group(&self, group: u32, deadline: Deadline) -> Result<()> {
        self.engine.fork.check()?;
        let tasks_left: Vec<_> =
            self.submitted.iter().filter_map(|(_, submission)| submission.group_left(group)).collect();
        let ended = || tasks_left.iter().all(|left| left.load(Ordering::Acquire) == 0);
        if !self.wait_until(deadline, ended) {
            return Err(Deadline::exceeded("a group of transfers, which goes on"));
        }
        let errors = self.submitted.iter().find_map(|(_, submission)| submission.group_error(group));
        errors.map_or(Ok(()), Err)
    }

    /// Waits, and lends a hand to the transports as long as they have work that needs one.
    fn wait_until(&self, deadline: Deadline, ended: impl Fn() -> bool) -> bool {
        let help = || {
            let mut carriers = self.core.carriers().filter_map(|id| self.engine.transports.get(id));
            carriers.any(|transport| transport.help())
        };
        // The engine looks at deadlines now and then; whoever is here anyway can be exact.
        let mut first =
            self.submitted.iter().fold(Deadline::NEVER, |first, (_, next)| first.min(next.deadline));
        while !ended() && help() {
            let now = Instant::now();
            if deadline.is_past(now) {
                break;
            }
            if first.is_past(now) {
                let submissions = self.submitted.iter().map(|(_, submission)| submission);
                let expired = submissions.filter(|submission| submission.deadline.is_past(now));
                self.engine.doom(expired, Doom::Expired);
                first = Deadline::NEVER;
            }
        }
        self.core.signal.wait(self.engine.spin(), deadline, ended)
    }

    /// A future of [`Batch::wait`] without a deadline; the submissions' own deadlines hold.
    pub const fn done(&self) -> Done<'_> {
        Done { batch: self, place: Place::NONE }
    }

    /// Calls off what has not ended. What is under way already may still complete; wait for the batch to know.
    pub fn cancel(&self) {
        self.engine.doom(self.submitted.iter().map(|(_, submission)| submission), Doom::Cancelled);
    }
}

impl Drop for Batch {
    fn drop(&mut self) {
        if !self.core.is_ended() {
            self.cancel();
        }
    }
}

/// See [`Batch::done`].
#[derive(Debug)]
pub struct Done<'a> {
    batch: &'a Batch,
    place: Place,
}

impl Future for Done<'_> {
    type Output = Result<()>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let Self { batch, place } = &mut *self;
        batch.engine.fork.check()?;
        let core = &batch.core;
        core.signal.poll(place, context, || core.is_ended()).map(|()| core.outcome())
    }
}

impl Drop for Done<'_> {
    fn drop(&mut self) {
        // In a forked child the lock may be that of a thread that is not there.
        if self.batch.engine.fork.check().is_ok() {
            self.batch.core.signal.leave(&self.place);
        }
    }
}

impl<'a> IntoFuture for &'a Batch {
    type Output = Result<()>;
    type IntoFuture = Done<'a>;

    fn into_future(self) -> Self::IntoFuture {
        self.done()
    }
}

#[cfg(test)]
mod tests {
    use std::task::{Wake, Waker};

    use posthorse_core::{Access, Opcode, Priority, RemoteRange, Route};
    use posthorse_segment::MemoryDirectory;
    use posthorse_testkit::ControlHub;
    use posthorse_testkit::memory::HeapRegion;

    use super::*;
    use crate::TransferEngine;

    #[test]
    fn nothing_of_a_batch_outlives_it() {
        let directory = Arc::new(MemoryDirectory::default());
        let engine = TransferEngine::builder()
            .directory("a", directory, ControlHub::new().channel("a"))
            .bare()
            .build()
            .unwrap();
        let (source, target) = (HeapRegion::new(64), HeapRegion::new(64));
        let source = engine.register(source, Access::None).unwrap();
        let target = engine.register(target, Access::ReadWrite).unwrap();
        let remote =
            RemoteRange { segment: engine.local().unwrap().id(), address: target.address(), token: None };
        let request = TransferRequest {
            opcode: Opcode::Write,
            local: source.at(0),
            remote,
            len: 64,
            priority: Priority::Medium,
            route: Route::Auto,
            group: 0,
        };
        let mut batch = engine.batch();
        batch.submit(&[request], SubmitOptions::default()).unwrap();
        batch.wait(Deadline::NEVER).unwrap();
        let core = Arc::downgrade(&batch.core);
        drop(batch);
        assert!(core.upgrade().is_none(), "the batch and its submissions hold each other");
    }

    #[test]
    fn a_future_that_is_dropped_leaves_no_waker() {
        let engine = TransferEngine::builder().bare().build().unwrap();
        let batch = engine.batch();
        // As if something were under way.
        batch.core.submission_began();
        let task = Arc::new(Nobody);
        for _ in 0..10 {
            let waker = Waker::from(Arc::clone(&task));
            let polled = Pin::new(&mut batch.done()).poll(&mut Context::from_waker(&waker));
            assert!(polled.is_pending());
        }
        assert_eq!(Arc::strong_count(&task), 1, "wakers are kept for futures that are gone");
        batch.core.submission_ended();
    }

    struct Nobody;

    impl Wake for Nobody {
        fn wake(self: Arc<Self>) {}
    }
}
