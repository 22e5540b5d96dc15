//! How a connection fails, and how what was under way on it ends.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use posthorse_core::{Completion, Deadline, Error, ErrorKind, FarEnd, PathState, Result, SliceError};

use super::{Cause, Connection, Phase, State};
use crate::handshake::{CLOSE, Close, encode};
use crate::queue::{Ended, SendQueue};
use crate::shared::Shared;

impl Connection {
    /// Begins the end of the queue pairs there are. What was posted to them and has not ended by now is posted again to
    /// others, or ends when they are destroyed: it is not waited for. [`Connection::settle_soon`] is to follow.
    pub(super) fn fail(&self, state: &mut State, cause: Cause) {
        state.phase = Phase::Failing(cause);
        if let Some(pairs) = &state.pairs
            && let Err(error) = pairs.fail()
        {
            tracing::error!(device = self.rail.name(), %error, "queue pairs could not be moved to the error state");
        }
    }

    /// The queue pairs failed: has a thread do what comes then.
    pub(super) fn settle_soon(self: &Arc<Self>, shared: &Arc<Shared>) {
        let (connection, there) = (Arc::clone(self), Arc::downgrade(shared));
        shared.workers.run(move || {
            if let Some(shared) = there.upgrade() {
                connection.settle(&shared);
            }
        });
    }

    /// Makes the connection again, or ends it, after its queue pairs failed.
    pub(super) fn settle(self: &Arc<Self>, shared: &Arc<Shared>) {
        let (cause, pairs) = {
            let mut state = self.state.lock();
            let Phase::Failing(cause) = &state.phase else { return };
            let cause = cause.clone();
            state.phase = match &cause {
                Cause::Refusal => Phase::Opening,
                Cause::Failed(error) => Phase::Ending(error.clone()),
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
    pub(super) fn failed(self: &Arc<Self>, shared: &Arc<Shared>, error: Error) {
        {
            let mut state = self.state.lock();
            if !matches!(state.phase, Phase::Over(_)) {
                state.phase = Phase::Ending(error.clone());
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
        {
            let mut state = self.state.lock();
            if matches!(state.phase, Phase::Ending(_)) {
                state.phase = Phase::Down(error);
            }
        }
        self.try_again_later(shared);
    }

    /// Ends what is left under way, when the peer has seen to it that nothing of it arrives any more.
    pub(super) fn end_all(&self, shared: &Shared, error: &Error) {
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
        shared.report(&self.end_entries(&error, far_end));
        self.leave_if_ended(shared);
    }

    /// Ends what is left under way. `stale` is what is known of the far end of what was posted.
    fn end_entries(&self, error: &Error, stale: FarEnd) -> Vec<Completion> {
        let mut ends = Vec::new();
        let mut state = self.state.lock();
        for queue in &mut state.queues {
            queue.end_all(|entry, ended| {
                let was_posted = ended == (Ended::Dropped { stale: true });
                let far_end = if was_posted { stale } else { FarEnd::Quiet };
                let error = error.clone();
                ends.push(Completion { token: entry.token, result: Err(SliceError { error, far_end }) });
            });
        }
        drop(state);
        self.in_flight.fetch_sub(ends.len(), Ordering::Relaxed);
        ends
    }

    /// Has a connection that was given up forgotten: now, or when nothing is left of it. Until then its completions are to
    /// be found.
    pub(crate) fn leave(&self, shared: &Shared) {
        self.state.lock().leaving = true;
        self.leave_if_ended(shared);
    }

    fn leave_if_ended(&self, shared: &Shared) {
        let ended = {
            let state = self.state.lock();
            let over = matches!(state.phase, Phase::Over(_));
            state.leaving && over && state.queues.iter().all(SendQueue::is_empty)
        };
        if ended {
            shared.forget(self.number);
        }
    }

    /// Has the peer end its side of the connection.
    ///
    /// # Errors
    /// When it does not say that it has.
    pub(super) fn close_there(&self, shared: &Shared) -> Result<()> {
        let close = Close { incarnation: shared.context.incarnation, connections: vec![self.number] };
        let deadline = Deadline::after(shared.config.liveness());
        shared.ask(&self.target.peer, CLOSE, &encode(&close)?, deadline).map(drop)
    }

    /// The completion queue is beyond use: what it has is lost, and so are its queue pairs.
    pub(super) fn queue_failed(self: &Arc<Self>, shared: &Arc<Shared>, error: Error) {
        let error = Error::new(ErrorKind::PathFailed, error.message().to_owned());
        self.port_failed(shared, error);
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
            // As above, by whoever is at it.
            Phase::Ending(_) => state.phase = Phase::Over(error),
            Phase::Failing(Cause::GivenUp(_)) | Phase::Over(_) => {}
            Phase::Opening | Phase::Trying(_) | Phase::Down(_) => {
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
        let error = self.named(error.clone());
        let mut ends = self.end_entries(&error, FarEnd::Unconfirmed);
        for notice in self.notices.take_all() {
            let result = Err(SliceError { error: error.clone(), far_end: FarEnd::Quiet });
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
}
