//! How a producer answers its consumers.

use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use posthorse_core::{
    Access, Deadline, Error, ErrorKind, Features, GrantDesc, Hello, Opcode, Priority, RemoteRange, Result,
    Route, TransferRequest,
};
use posthorse_engine::{Batch, SubmitOptions};

use super::get::closed;
use super::stored::Home;
use super::{Inner, State, Stored};
use crate::control::{Peer, Responder, Service};
use crate::message::{
    Cancel, Close, Offered, Outcome, Pull, PullExtra, Query, QueryExtra, Refusal, Renew, Reply, Request, Want,
};
use crate::offer::{Action, Actions, Cancelled, Claimed, Found, Offers, PullId};

/// Answers requests for a connector, as long as it lives.
pub(super) struct Server {
    pub(super) inner: Weak<Inner>,
}

impl Service for Server {
    fn handle(&self, peer: &Peer, request: Request, responder: Responder) {
        let Some(inner) = self.inner.upgrade() else { return responder.refuse(&closed()) };
        match request {
            Request::Query(query) => inner.answer_query(query, responder),
            Request::Pull(pull) => inner.answer_pull(peer, pull, responder),
            Request::Cancel(cancel) => inner.answer_cancel(&cancel, responder),
            Request::Close(close) => inner.answer_close(&close, responder),
            Request::Renew(renew) => inner.answer_renew(&renew, responder),
            Request::Ping => responder.reply(&Reply::Ok),
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
        let now = Instant::now();
        let (result, next) = {
            let mut state = self.state.lock();
            let State { offers, actions, .. } = &mut *state;
            (change(offers, now, actions), offers.next_due())
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
                    None => self.end_claim(&pull, Outcome::Failed),
                }
            }
            Action::Refuse(pull, error) => {
                let parked = self.state.lock().parked.remove(&pull);
                if let Some((responder, _)) = parked {
                    responder.reply(&Reply::NoOffer(Refusal::from(&error)));
                }
            }
            Action::Overdue(pull) => self.end_read(&pull, Outcome::Failed),
        }
    }

    fn end_claim(&self, pull: &PullId, outcome: Outcome) {
        let ended = self.with_offers(|offers, now, out| offers.end(pull, outcome, now, out));
        if let Err(error) = ended {
            tracing::debug!(%error, "a get ended that was not known");
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
                Err(error) => {
                    self.end_claim(pull, Outcome::Failed);
                    return responder.refuse(&error);
                }
            },
        };
        if responder.is_closed() {
            return self.end_read(pull, Outcome::Failed);
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
    fn grant_read(&self, pull: &PullId, stored: &Stored) -> Result<Option<GrantDesc>> {
        let Home::Block(block) = &stored.home else {
            self.with_offers(|offers, now, _| offers.reserve(pull, now));
            return Ok(None);
        };
        let memory = self.memory.lock();
        let memory = memory.as_ref().ok_or_else(closed)?;
        let grant = memory.grant(block.offset(), stored.len, Access::Read, Some(&pull.consumer))?;
        let desc = grant.desc().clone();
        self.state.lock().reads.insert(pull.clone(), grant);
        Ok(Some(desc))
    }

    /// Ends a read: its claim ends when the consumer cannot touch the payload any more.
    fn end_read(&self, pull: &PullId, outcome: Outcome) {
        let grant = self.state.lock().reads.remove(pull).or_else(|| {
            // It was ended before, and could not be yet: what the consumer says of it now stands.
            let mut ending = self.ending_reads.lock();
            let index = ending.iter().position(|(known, ..)| known == pull)?;
            Some(ending.swap_remove(index).1)
        });
        let Some(mut grant) = grant else { return self.end_claim(pull, outcome) };
        match grant.revoke(Deadline::after(Duration::ZERO)) {
            Ok(()) => self.end_claim(pull, outcome),
            Err(_) => {
                // The consumer is stopped, or still at it: asked again by the timer.
                self.ending_reads.lock().push((pull.clone(), grant, outcome));
                self.timer.arm(Instant::now() + RETRY);
            }
        }
    }

    fn answer_pull(self: &Arc<Self>, peer: &Peer, pull: Pull, responder: Responder) {
        let id = match &pull.extra {
            Some(extra) => pull_id(&extra.consumer, extra.incarnation, extra.pull),
            // A connection of a foreign consumer carries one request at a time.
            None => {
                pull_id(&format!("foreign {}", peer.address), posthorse_core::Incarnation(0), peer.connection)
            }
        };
        if let Some(extra) = &pull.extra
            && let Err(error) = self.hello().agree(&extra.hello)
        {
            return responder.refuse(&error);
        }
        let generation = pull.extra.as_ref().and_then(|extra| extra.generation);
        let found = self.with_offers(|offers, now, _| offers.begin(&pull.request_id, &id, generation, now));
        let found = match found {
            Ok(found) => found,
            Err(error) => return responder.refuse(&error),
        };
        let (inner, task) = (Arc::clone(self), id.clone());
        let responder = Arc::new(Mutex::new(Some(responder)));
        let answer = Arc::clone(&responder);
        let submitted = self.workers.submit(move || match inner.write(&task, &pull, &found.payload) {
            Ok(batch) => {
                // The worker is free again; the payload stays pinned by its claim until the bytes have arrived.
                let waiting = Arc::clone(&inner);
                inner.plane.spawn(async move {
                    let outcome = batch.done().await;
                    waiting.state.lock().writes.remove(&task);
                    waiting.finish_pull(&task, outcome.map(|()| found.payload.len), &answer);
                });
            }
            Err(error) => inner.finish_pull(&task, Err(error), &answer),
        });
        if let Err(error) = submitted {
            self.finish_pull(&id, Err(error), &responder);
        }
    }

    /// Begins to write a payload into a consumer's slot.
    fn write(&self, id: &PullId, pull: &Pull, stored: &Stored) -> Result<Arc<Batch>> {
        let PullExtra { consumer, incarnation, grant, deadline_ms, checksum, .. } = pull
            .extra
            .as_ref()
            .ok_or_else(|| Error::new(ErrorKind::Unsupported, "pulls of foreign consumers are not served"))?;
        if grant.len < stored.len {
            return Err(Error::new(
                ErrorKind::OutOfBounds,
                format!("the slot holds {} bytes, the payload has {}", grant.len, stored.len),
            ));
        }
        let longest = Deadline::after(PULL_TIME);
        let deadline =
            deadline_ms.map_or(longest, |ms| longest.min(Deadline::after(Duration::from_millis(ms))));
        let connect = deadline.min(Deadline::after(Duration::from_millis(self.config.liveness_ms)));
        let segment = self.engine.open_life(consumer, *incarnation, connect)?;
        let mut address = grant.address;
        let request = |(local, len)| {
            let remote = RemoteRange { segment: segment.id(), address, token: Some(grant.token) };
            address += len;
            let (priority, route) = (Priority::Medium, Route::Auto);
            TransferRequest { opcode: Opcode::Write, local, remote, len, priority, route, group: 0 }
        };
        let requests: Vec<_> = stored.ranges(self.pool_range).into_iter().map(request).collect();
        let mut batch = self.engine.batch();
        batch.submit(&requests, SubmitOptions { deadline, checksum: *checksum })?;
        let batch = Arc::new(batch);
        self.state.lock().writes.insert(id.clone(), Arc::clone(&batch));
        Ok(batch)
    }

    fn finish_pull(&self, id: &PullId, outcome: Result<u64>, responder: &Mutex<Option<Responder>>) {
        self.counters.serve(outcome.is_ok());
        let done = if outcome.is_ok() { Outcome::Done } else { Outcome::Failed };
        // The offer first: a consumer that hears that it is done, or failed, finds it so.
        self.end_claim(id, done);
        let Some(responder) = responder.lock().take() else { return };
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
        for pull in gone {
            // One that found its payload meanwhile finds that nobody is there.
            self.with_offers(|offers, now, out| offers.cancel(&pull, now, out));
            let parked = self.state.lock().parked.remove(&pull);
            drop(parked);
        }
    }

    fn answer_cancel(&self, cancel: &Cancel, responder: Responder) {
        let pull = pull_id(&cancel.consumer, cancel.incarnation, cancel.pull);
        let parked = self.state.lock().parked.remove(&pull);
        if let Some((parked, _)) = parked {
            parked.refuse(&Error::new(ErrorKind::Cancelled, "the consumer cancelled the get"));
        }
        match self.with_offers(|offers, now, out| offers.cancel(&pull, now, out)) {
            Cancelled::InFlight => {
                let batch = self.state.lock().writes.get(&pull).cloned();
                match batch {
                    Some(batch) => batch.cancel(),
                    None => self.end_read(&pull, Outcome::Failed),
                }
            }
            Cancelled::Forgotten | Cancelled::Unknown => {}
        }
        responder.reply(&Reply::Ok);
    }

    fn answer_close(&self, close: &Close, responder: Responder) {
        let pull = pull_id(&close.consumer, close.incarnation, close.pull);
        self.end_read(&pull, close.outcome);
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
        let ending = std::mem::take(&mut *self.ending_reads.lock());
        for (pull, mut grant, outcome) in ending {
            match grant.revoke(Deadline::after(Duration::ZERO)) {
                Ok(()) => self.end_claim(&pull, outcome),
                Err(_) => self.ending_reads.lock().push((pull, grant, outcome)),
            }
        }
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
        let held = !self.ending_reads.lock().is_empty() || !self.fencing.lock().is_empty();
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
