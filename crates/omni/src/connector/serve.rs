//! How a producer answers its consumers.

use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use posthorse_core::{
    Access, Deadline, Error, ErrorClass, ErrorKind, Features, GrantDesc, Hello, Opcode, Priority,
    RemoteRange, Result, TransferRequest,
};
use posthorse_engine::{Batch, Precedence, Segment, SubmitOptions};

use super::get::closed;
use super::serving::{Job, Lent, Rest, called_off};
use super::stored::Home;
use super::{Inner, State, Stored};
use crate::control::{Peer, Responder, Service};
use crate::message::{
    Cancel, Close, Offered, Outcome, Pull, PullExtra, Query, QueryExtra, Refusal, Renew, Reply, Request, Want,
};
use crate::offer::{Action, Actions, Claimed, Found, Offers, PullId};

/// Answers requests for a connector, as long as it lives.
pub(super) struct Server {
    pub(super) inner: Weak<Inner>,
}

impl Service for Server {
    fn handle(&self, _peer: &Peer, request: Request, responder: Responder) {
        let Some(inner) = self.inner.upgrade() else { return responder.refuse(&closed()) };
        match request {
            Request::Query(query) => inner.answer_query(query, responder),
            Request::Pull(pull) => inner.answer_pull(pull, responder),
            Request::Cancel(cancel) => inner.answer_cancel(&cancel, responder),
            Request::Close(close) => inner.answer_close(&close, responder),
            Request::Renew(renew) => inner.answer_renew(&renew, responder),
            Request::Ping => match inner.check_open() {
                Ok(()) => responder.reply(&Reply::Ok),
                Err(error) => responder.refuse(&error),
            },
            Request::Health => responder.reply(&Reply::Health(inner.health().to_json())),
            Request::StreamCredit(credit) => inner.answer_credit(&credit, responder),
            Request::StreamAbort(abort) => inner.answer_abort(&abort, responder),
        }
    }

    fn disconnected(&self, _: &Peer) {
        if let Some(inner) = self.inner.upgrade() {
            inner.forget_disconnected();
        }
    }
}

impl Inner {
    /// Changes the table of offers, and sees to it that what follows is carried out, in order.
    pub(super) fn with_offers<T>(
        &self,
        change: impl FnOnce(&mut Offers<Arc<Stored>>, Instant, &mut Actions<Arc<Stored>>) -> T,
    ) -> T {
        self.with_state(|state, now| change(&mut state.offers, now, &mut state.actions))
    }

    /// As [`Inner::with_offers`], with what is done for the claims.
    pub(super) fn with_state<T>(&self, change: impl FnOnce(&mut State, Instant) -> T) -> T {
        let now = Instant::now();
        let (result, next) = {
            let mut state = self.state.lock();
            (change(&mut state, now), state.offers.next_due())
        };
        if let Some(next) = next {
            self.timer.arm(next);
        }
        self.carry_out();
        result
    }

    /// Carries out what follows from changes of the table. Much of it changes the table again: that is carried out by
    /// the loop that is at it already, so that a long chain of consequences is no deep recursion.
    fn carry_out(&self) {
        loop {
            let actions = {
                let mut state = self.state.lock();
                if state.carrying_out || state.actions.is_empty() {
                    return;
                }
                state.carrying_out = true;
                std::mem::take(&mut state.actions)
            };
            actions.into_iter().for_each(|action| self.carry_out_one(action));
            self.state.lock().carrying_out = false;
        }
    }

    fn carry_out_one(&self, action: Action<Arc<Stored>>) {
        match action {
            Action::Release(stored) => drop(stored),
            Action::Found(pull, found) => {
                let parked = self.state.lock().parked.remove(&pull);
                match parked {
                    Some((responder, query)) => self.answer_found(&pull, &found, &query, responder),
                    None => self.end(&pull, Outcome::Failed),
                }
            }
            Action::Refuse(pull, error) => {
                let parked = self.state.lock().parked.remove(&pull);
                if let Some((responder, _)) = parked {
                    responder.reply(&Reply::NoOffer(Refusal::from(&error)));
                }
            }
            Action::Overdue(pull) => self.end(&pull, Outcome::Failed),
        }
    }

    /// Ends a claim: at once, or as soon as nothing touches the payload for it any more.
    fn end(&self, pull: &PullId, outcome: Outcome) {
        let rest = self.with_state(|state, now| state.end(pull, outcome, now));
        self.carry_out_rest(rest, &self.told(called_off()));
    }

    /// Ends what a consumer asked for and does not want any more.
    fn call_off(&self, pull: &PullId, outcome: Outcome) {
        let (parked, rest) = self.with_state(|state, now| state.call_off(pull, outcome, now));
        if let Some((parked, _)) = parked {
            parked.refuse(&self.told(called_off()));
        }
        self.carry_out_rest(rest, &self.told(called_off()));
    }

    /// Does what is left for a claim to end. `why` is what the consumer of a pull is told.
    pub(super) fn carry_out_rest(&self, rest: Rest, why: &Error) {
        match rest {
            Rest::Nothing => {}
            Rest::Revoke(pull) => self.revoke(&pull),
            Rest::Cancel(batch) => batch.cancel(),
            Rest::Refuse(job) => {
                self.counters.serve(false);
                job.responder.refuse(why);
            }
        }
    }

    /// Revokes the grant of a read that has ended, if that can be done by now; else the timer has it tried again.
    fn revoke(&self, pull: &PullId) {
        let lent = self.state.lock().take_lent(pull);
        let Some(mut lent) = lent else { return };
        let kept = match lent.grant.revoke(Deadline::after(Duration::ZERO)) {
            Ok(()) => None,
            // The consumer is stopped, or still at it.
            Err(_) => Some(lent),
        };
        let is_kept = kept.is_some();
        let (ended, left) = self.with_state(|state, now| state.revoked(pull, kept, now));
        drop(left);
        if is_kept {
            // Only now that it is back: a tick before would not have found it.
            self.timer.arm(Instant::now() + RETRY);
        }
        // A read that failed may be followed by a pull for the same payload, which is counted by its own end.
        if ended == Some(Outcome::Done) {
            self.counters.serve(true);
        }
    }

    pub(super) fn hello(&self) -> Hello {
        Hello::new(Features::NONE, self.config.fingerprint.clone())
    }

    fn answer_query(&self, query: Query, responder: Responder) {
        let Some(extra) = &query.extra else {
            let found = self.state.lock().offers.find(&query.request_id);
            return responder.reply(&match found {
                Ok(found) => foreign_offer(&query, &found),
                Err(error) => Reply::NoOffer(Refusal::from(&error)),
            });
        };
        if let Err(error) = self.hello().agree(&extra.hello) {
            return responder.refuse(&error);
        }
        let pull = pull_id(&extra.consumer, extra.incarnation, extra.pull);
        let now = Instant::now();
        let wait = (extra.wait_ms > 0)
            .then(|| now.checked_add(Duration::from_millis(extra.wait_ms)).unwrap_or(now + FOREVER));
        let want = extra.want;
        let (claimed, next) = {
            let mut state = self.state.lock();
            let claimed = state.offers.claim(&query.request_id, pull.clone(), want, wait, now);
            if matches!(claimed, Ok(Claimed::Parked)) {
                // Under the same lock, so that a put cannot find the get waiting without its responder.
                state.parked.insert(pull, (responder, query));
                let next = state.offers.next_due();
                drop(state);
                return self.timer.arm(next.unwrap_or(now));
            }
            (claimed, state.offers.next_due())
        };
        self.timer.arm(next.unwrap_or(now));
        match claimed {
            Ok(Claimed::Found(found)) => self.answer_found(&pull, &found, &query, responder),
            Ok(Claimed::Parked) => {}
            Err(error) => responder.reply(&Reply::NoOffer(Refusal::from(&error))),
        }
    }

    /// Answers a query that has a claim: with a grant, where the consumer wants to read for itself.
    fn answer_found(&self, pull: &PullId, found: &Found<Arc<Stored>>, query: &Query, responder: Responder) {
        let want = query.extra.as_ref().map_or(Want::Write, |extra: &QueryExtra| extra.want);
        let grant = match want {
            Want::Write => None,
            Want::Read => match self.grant_read(pull, &found.payload) {
                Ok(grant) => grant,
                Err(error) => return responder.refuse(&self.told(error)),
            },
        };
        if responder.is_closed() {
            return self.end(pull, Outcome::Failed);
        }
        let now = Instant::now();
        let offered = Offered {
            hello: self.hello(),
            generation: found.generation,
            manifest: found.payload.manifest.clone(),
            segment: self.engine.name().to_owned(),
            incarnation: self.engine.incarnation(),
            grant,
            consumers_left: found.consumers_left,
            expires_ms: found.expires.map(|at| at.saturating_duration_since(now).as_millis() as u64),
            checksum: self.config.checksum,
            transport: self.transport_preference(),
            liveness_ms: Some(self.config.liveness_ms),
        };
        responder.reply(&Reply::Offer {
            request_id: query.request_id.clone(),
            data_size: found.payload.len,
            is_fast_path: found.payload.is_fast_path,
            offered: Some(Box::new(offered)),
        });
    }

    /// Leave to read a payload. `None` when it has to be written, since it does not lie in the pool: the claim is
    /// then one to that.
    ///
    /// # Errors
    /// As [`State::granted`]; the claim has ended, or is ending.
    fn grant_read(&self, pull: &PullId, stored: &Arc<Stored>) -> Result<Option<GrantDesc>> {
        let Home::Block(block) = &stored.home else {
            self.with_state(|state, now| state.reserve(pull, now))?;
            return Ok(None);
        };
        let known = self.state.lock().begin_grant(pull)?;
        if known.is_some() {
            return Ok(known);
        }
        let made = self.lend(pull, block.offset(), stored);
        let granted = self.with_state(|state, now| state.granted(pull, made, now));
        if granted.is_err() {
            self.revoke(pull);
        }
        granted.map(Some)
    }

    fn lend(&self, pull: &PullId, offset: u64, stored: &Arc<Stored>) -> Result<Lent> {
        let grant = self.memory()?.grant(offset, stored.len, Access::Read, Some(&pull.consumer))?;
        Ok(Lent { grant, _stored: Arc::clone(stored) })
    }

    fn answer_pull(self: &Arc<Self>, pull: Pull, responder: Responder) {
        let Some(extra) = pull.extra else {
            let message = "pulls of foreign consumers are not served";
            return responder.refuse(&Error::new(ErrorKind::Unsupported, message));
        };
        if let Err(error) = self.hello().agree(&extra.hello) {
            return responder.refuse(&error);
        }
        let id = pull_id(&extra.consumer, extra.incarnation, extra.pull);
        let longest = Deadline::after(PULL_TIME);
        let theirs = extra.deadline_ms.map(|ms| Deadline::after(Duration::from_millis(ms)));
        let deadline = theirs.map_or(longest, |theirs| longest.min(theirs));
        let queued = self.with_state(|state, now| state.queue(&id, &pull.request_id, extra, responder, now));
        if let Err((error, responder)) = queued {
            return responder.refuse(&error);
        }
        let (inner, task) = (Arc::clone(self), id.clone());
        let work = move || match inner.engine.opened(&task.consumer, task.incarnation) {
            Some(segment) => inner.serve_pull(task, deadline, Ok(segment)),
            // No worker waits for that.
            None => inner.reach(task, deadline),
        };
        if let Err(error) = self.workers.submit(work) {
            let rest = self.with_state(|state, now| state.end(&id, Outcome::Failed, now));
            self.carry_out_rest(rest, &error);
        }
    }

    /// Serves a pull that waits, now that its consumer was reached, or could not be. Does not wait for the bytes.
    pub(super) fn serve_pull(self: &Arc<Self>, id: PullId, deadline: Deadline, consumer: Result<Segment>) {
        let job = self.state.lock().connecting(&id);
        let Some(Job { pull, stored, responder }) = job else { return };
        match consumer.and_then(|segment| self.write(&id, &pull, &stored, &segment, deadline)) {
            Ok(batch) => {
                // The worker is free again; the payload stays pinned by its claim until the bytes have arrived.
                let waiting = Arc::clone(self);
                self.plane.spawn(async move {
                    let outcome = batch.done().await;
                    let outcome = outcome.map_err(|error| waiting.not_written(&id, error));
                    waiting.finish_pull(&id, outcome.map(|()| stored.len), responder);
                });
            }
            Err(error) => self.finish_pull(&id, Err(self.not_written(&id, error)), responder),
        }
    }

    /// What a consumer is told of a failure: what ends here because this side is being closed fails of that.
    pub(super) fn told(&self, error: Error) -> Error {
        self.check_open().err().unwrap_or(error)
    }

    /// What a consumer is told of a pull that failed, in words that say who speaks of whom.
    pub(super) fn not_written(&self, pull: &PullId, error: Error) -> Error {
        if let Err(closed) = self.check_open() {
            return closed;
        }
        let about_consumer = matches!(error.class(), ErrorClass::Peer | ErrorClass::Path);
        let error = error.context(format_args!("the producer, writing to this consumer ({})", pull.consumer));
        if about_consumer {
            error.with_advice(
                "see that this process was not stopped, and that the producer's host reaches the address it advertises",
            )
        } else {
            error
        }
    }

    /// Begins to write a payload into a consumer's slot.
    fn write(
        &self,
        id: &PullId,
        pull: &PullExtra,
        stored: &Stored,
        segment: &Segment,
        deadline: Deadline,
    ) -> Result<Arc<Batch>> {
        let PullExtra { grant, checksum, transport, .. } = pull;
        if grant.len < stored.len {
            return Err(Error::new(
                ErrorKind::OutOfBounds,
                format!("the slot holds {} bytes, the payload has {}", grant.len, stored.len),
            ));
        }
        let route = self.route_with(transport.as_deref(), Precedence::Theirs)?;
        let checksum = self.config.checksum.max(*checksum);
        let mut address = grant.address;
        let request = |(local, len)| {
            let remote = RemoteRange { segment: segment.id(), address, token: Some(grant.token) };
            // Wrapping: the consumer refuses an address that leaves what it granted.
            address = address.wrapping_add(len);
            let priority = Priority::Medium;
            TransferRequest { opcode: Opcode::Write, local, remote, len, priority, route, group: 0 }
        };
        let requests: Vec<_> = stored.ranges(self.pool_range).into_iter().map(request).collect();
        let mut batch = self.engine.batch();
        let held = self.engine.hold(segment, grant);
        batch.submit(&requests, SubmitOptions { deadline, checksum })?;
        drop(held);
        let batch = Arc::new(batch);
        let goes_on = self.state.lock().writing(id, &batch);
        if !goes_on {
            batch.cancel();
        }
        Ok(batch)
    }

    fn finish_pull(&self, id: &PullId, outcome: Result<u64>, responder: Responder) {
        self.counters.serve(outcome.is_ok());
        let done = if outcome.is_ok() { Outcome::Done } else { Outcome::Failed };
        // The offer first: a consumer that hears that it is done, or failed, finds it so.
        self.with_state(|state, now| state.written(id, done, now));
        match outcome {
            Ok(bytes) => responder.reply(&Reply::Done { bytes }),
            Err(error) => responder.refuse(&error),
        }
    }

    /// Gets that waited by a connection that has ended would wait for ever.
    fn forget_disconnected(&self) {
        let gone: Vec<PullId> = {
            let state = self.state.lock();
            let closed = state.parked.iter().filter(|(_, (responder, _))| responder.is_closed());
            closed.map(|(pull, _)| pull.clone()).collect()
        };
        // One that found its payload meanwhile is ended too: nobody hears of it.
        gone.iter().for_each(|pull| self.call_off(pull, Outcome::Failed));
    }

    fn answer_cancel(&self, cancel: &Cancel, responder: Responder) {
        self.call_off(&pull_id(&cancel.consumer, cancel.incarnation, cancel.pull), Outcome::Failed);
        responder.reply(&Reply::Ok);
    }

    fn answer_close(&self, close: &Close, responder: Responder) {
        self.call_off(&pull_id(&close.consumer, close.incarnation, close.pull), close.outcome);
        responder.reply(&Reply::Ok);
    }

    fn answer_renew(&self, renew: &Renew, responder: Responder) {
        let pulls = renew.pulls.iter().map(|pull| pull_id(&renew.consumer, renew.incarnation, *pull));
        let known = self.with_offers(|offers, now, _| pulls.filter(|pull| offers.renew(pull, now)).count());
        if known == renew.pulls.len() {
            responder.reply(&Reply::Ok);
        } else {
            let lost = renew.pulls.len() - known;
            responder.refuse(&Error::new(ErrorKind::Expired, format!("{lost} leases have ended")));
        }
    }

    /// Does what is due: offers expire, leases end, memory that was held back is given up.
    pub(super) fn tick(&self) -> Option<Instant> {
        self.with_offers(|offers, now, out| offers.tick(now, out));
        let unrevoked = self.state.lock().unrevoked();
        unrevoked.iter().for_each(|pull| self.revoke(pull));
        let fencing = std::mem::take(&mut *self.fencing.lock());
        for (mut grant, slot) in fencing {
            match grant.revoke(Deadline::after(Duration::ZERO)) {
                Ok(()) => {
                    if let Err(error) = self.pool.fenced(slot.generation) {
                        tracing::error!(%error, "a slot that was held back is not known to its pool");
                    }
                }
                Err(_) => self.fencing.lock().push((grant, slot)),
            }
        }
        let now = Instant::now();
        let renewal = self.renew_leases(now);
        let silent = self.check_streams(now);
        // Grants that could not be revoked have armed the timer themselves.
        let held = !self.fencing.lock().is_empty();
        let retry = held.then(|| now + RETRY);
        let due = self.state.lock().offers.next_due();
        [renewal, retry, due, silent].into_iter().flatten().min()
    }
}

/// How long a write to a consumer may take that does not say how long it waits.
const PULL_TIME: Duration = Duration::from_secs(600);
/// How often what is held back is tried again.
const RETRY: Duration = Duration::from_millis(20);
/// Longer than any wait.
const FOREVER: Duration = Duration::from_secs(86_400 * 365);

fn pull_id(consumer: &str, incarnation: posthorse_core::Incarnation, pull: u64) -> PullId {
    PullId { consumer: consumer.into(), incarnation, pull }
}

fn foreign_offer(query: &Query, found: &Found<Arc<Stored>>) -> Reply {
    Reply::Offer {
        request_id: query.request_id.clone(),
        data_size: found.payload.len,
        is_fast_path: found.payload.is_fast_path,
        offered: None,
    }
}
