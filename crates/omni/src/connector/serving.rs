//! What is done for the claims in flight: reads through grants, and writes.
//!
//! The claim to an offer and what is done for it part in no order of events, since both stand under one lock: a claim
//! that has an entry here ends only together with that, and the entry goes only when nothing touches the payload for it
//! any more. So nobody asks the table of offers itself to end a claim in flight.

use std::sync::Arc;
use std::time::Instant;

use posthorse_core::{Error, ErrorKind, GrantDesc, Result};
use posthorse_engine::{Batch, Grant};

use super::{State, Stored};
use crate::control::Responder;
use crate::message::{Outcome, PullExtra, Query};
use crate::offer::{Cancelled, Found, PullId};

/// What is done for a claim in flight.
#[derive(Debug)]
pub(super) enum Serving {
    /// A grant of the payload is being made. The outcome is there when the read has ended meanwhile.
    Granting(Option<Outcome>),
    /// The consumer may read the payload.
    Lent(Lent),
    /// The read has ended, and the consumer may still touch the payload. `None` while a thread revokes the grant.
    Revoking(Outcome, Option<Lent>),
    /// A worker is to write the payload.
    Queued(Box<Job>),
    /// A worker finds the consumer; whether the pull was called off meanwhile.
    Connecting { called_off: bool },
    /// The payload is being written; how the claim ends if it was called off meanwhile.
    Writing(Arc<Batch>, Option<Outcome>),
    /// It is written, and the consumer has not yet said that it has it.
    Written,
}

/// A grant, and the payload that stays where it is as long as that is not revoked.
#[derive(Debug)]
pub(super) struct Lent {
    pub(super) grant: Grant,
    pub(super) _stored: Arc<Stored>,
}

/// A pull that waits for a worker.
#[derive(Debug)]
pub(super) struct Job {
    pub(super) pull: PullExtra,
    pub(super) stored: Arc<Stored>,
    pub(super) responder: Responder,
}

/// What is left to be done, without the lock, for a claim to end.
#[derive(Debug)]
#[must_use]
pub(super) enum Rest {
    /// Nothing: it has ended, or whoever serves it sees to that.
    Nothing,
    /// Revoke the grant of this get.
    Revoke(PullId),
    /// Cancel its batch.
    Cancel(Arc<Batch>),
    /// Tell the consumer that its pull was called off.
    Refuse(Box<Job>),
}

impl State {
    /// Ends what a consumer asked for, whether it waits, has its place reserved or is in flight.
    pub(super) fn call_off(
        &mut self,
        pull: &PullId,
        outcome: Outcome,
        now: Instant,
    ) -> (Option<(Responder, Query)>, Rest) {
        let parked = self.parked.remove(pull);
        let rest = match self.offers.cancel(pull, now, &mut self.actions) {
            Cancelled::InFlight => self.end(pull, outcome, now),
            Cancelled::Forgotten | Cancelled::Unknown => Rest::Nothing,
        };
        (parked, rest)
    }

    /// Ends a claim, now or when nothing touches the payload for it any more.
    pub(super) fn end(&mut self, pull: &PullId, outcome: Outcome, now: Instant) -> Rest {
        let (serving, rest) = match self.serving.remove(pull) {
            None => {
                self.end_claim(pull, outcome, now);
                return Rest::Nothing;
            }
            Some(Serving::Queued(job)) => {
                self.end_claim(pull, Outcome::Failed, now);
                return Rest::Refuse(job);
            }
            Some(Serving::Granting(_)) => (Serving::Granting(Some(outcome)), Rest::Nothing),
            Some(Serving::Lent(lent)) => (Serving::Revoking(outcome, Some(lent)), Rest::Revoke(pull.clone())),
            Some(Serving::Revoking(ended, lent)) => {
                // A consumer that was taken for gone may still say that it has it all.
                let outcome = if outcome == Outcome::Done { outcome } else { ended };
                (Serving::Revoking(outcome, lent), Rest::Revoke(pull.clone()))
            }
            Some(Serving::Connecting { .. }) => (Serving::Connecting { called_off: true }, Rest::Nothing),
            Some(Serving::Writing(batch, _)) => {
                (Serving::Writing(Arc::clone(&batch), Some(outcome)), Rest::Cancel(batch))
            }
            Some(Serving::Written) => {
                self.end_claim(pull, outcome, now);
                return Rest::Nothing;
            }
        };
        self.serving.insert(pull.clone(), serving);
        rest
    }

    /// Begins to make a grant for a claim to read. A consumer that asks again gets the grant that it has.
    ///
    /// # Errors
    /// `Cancelled` when the claim has ended; `Busy` when it is served already.
    pub(super) fn begin_grant(&mut self, pull: &PullId) -> Result<Option<GrantDesc>> {
        match self.serving.get(pull) {
            Some(Serving::Lent(lent)) => Ok(Some(lent.grant.desc().clone())),
            Some(_) => Err(busy(pull)),
            None if !self.offers.is_in_flight(pull) => Err(called_off()),
            None => {
                self.serving.insert(pull.clone(), Serving::Granting(None));
                Ok(None)
            }
        }
    }

    /// The grant was made, or cannot be.
    ///
    /// # Errors
    /// Why it cannot be, and the claim has ended; `Cancelled` when the read has ended meanwhile, and the grant is to be
    /// revoked.
    pub(super) fn granted(&mut self, pull: &PullId, made: Result<Lent>, now: Instant) -> Result<GrantDesc> {
        let ended = match self.serving.get(pull) {
            Some(Serving::Granting(ended)) => *ended,
            // The connector was closed.
            _ => Some(Outcome::Failed),
        };
        let lent = made.inspect_err(|_| {
            self.serving.remove(pull);
            self.end_claim(pull, ended.unwrap_or(Outcome::Failed), now);
        })?;
        let desc = lent.grant.desc().clone();
        let (serving, granted) = match ended {
            None => (Serving::Lent(lent), Ok(desc)),
            Some(outcome) => (Serving::Revoking(outcome, Some(lent)), Err(called_off())),
        };
        self.serving.insert(pull.clone(), serving);
        granted
    }

    /// Makes of a claim to read one to be written to.
    ///
    /// # Errors
    /// `Busy` when it is served already.
    pub(super) fn reserve(&mut self, pull: &PullId, now: Instant) -> Result<()> {
        if self.serving.contains_key(pull) {
            return Err(busy(pull));
        }
        self.offers.reserve(pull, now);
        Ok(())
    }

    /// A grant to be revoked that no other thread is at. It comes back by [`State::revoked`].
    pub(super) fn take_lent(&mut self, pull: &PullId) -> Option<Lent> {
        match self.serving.get_mut(pull) {
            Some(Serving::Revoking(_, lent)) => lent.take(),
            _ => None,
        }
    }

    /// The gets whose grants are to be revoked.
    pub(super) fn unrevoked(&self) -> Vec<PullId> {
        let waits = |serving: &Serving| matches!(serving, Serving::Revoking(_, Some(_)));
        self.serving.iter().filter(|(_, serving)| waits(serving)).map(|(pull, _)| pull.clone()).collect()
    }

    /// A grant was revoked, and the claim ends in what is returned; or it could not be yet, and is kept. It comes back when
    /// the connector was closed meanwhile.
    pub(super) fn revoked(
        &mut self,
        pull: &PullId,
        kept: Option<Lent>,
        now: Instant,
    ) -> (Option<Outcome>, Option<Lent>) {
        let Some(Serving::Revoking(outcome, lent)) = self.serving.get_mut(pull) else { return (None, kept) };
        if kept.is_some() {
            *lent = kept;
            return (None, None);
        }
        let outcome = *outcome;
        self.serving.remove(pull);
        self.end_claim(pull, outcome, now);
        (Some(outcome), None)
    }

    /// Begins a pull: it waits for a worker.
    ///
    /// # Errors
    /// As [`Offers::begin`](crate::offer::Offers::begin); the responder comes back.
    pub(super) fn queue(
        &mut self,
        id: &PullId,
        key: &str,
        pull: PullExtra,
        responder: Responder,
        now: Instant,
    ) -> Result<(), (Error, Responder)> {
        match self.offers.begin(key, id, pull.generation, now) {
            Ok(Found { payload: stored, .. }) => {
                self.serving.insert(id.clone(), Serving::Queued(Box::new(Job { pull, stored, responder })));
                Ok(())
            }
            Err(error) => Err((error, responder)),
        }
    }

    /// A worker is there for a pull. `None` when that was called off.
    pub(super) fn connecting(&mut self, pull: &PullId) -> Option<Job> {
        let serving = self.serving.get_mut(pull).filter(|serving| matches!(serving, Serving::Queued(_)))?;
        match std::mem::replace(serving, Serving::Connecting { called_off: false }) {
            Serving::Queued(job) => Some(*job),
            _ => None,
        }
    }

    /// The bytes of a pull are under way. Says whether it goes on; else the batch is to be cancelled.
    pub(super) fn writing(&mut self, pull: &PullId, batch: &Arc<Batch>) -> bool {
        let Some(serving) = self.serving.get_mut(pull) else { return false };
        let goes_on = matches!(serving, Serving::Connecting { called_off: false });
        *serving = Serving::Writing(Arc::clone(batch), (!goes_on).then_some(Outcome::Failed));
        goes_on
    }

    /// Nothing of a pull is under way any more. Where all was written, its claim ends when the consumer says that it has
    /// it, or that it gave up before it heard so, or when it is silent for the time of a lease: then the payload is still
    /// offered.
    pub(super) fn written(&mut self, pull: &PullId, outcome: Outcome, now: Instant) {
        match (self.serving.remove(pull), outcome) {
            (None, _) => {}
            (Some(Serving::Writing(_, None)), Outcome::Done) => {
                self.serving.insert(pull.clone(), Serving::Written);
                self.offers.written(pull, now);
            }
            (Some(Serving::Writing(_, Some(called_off))), Outcome::Done) => {
                self.end_claim(pull, called_off, now);
            }
            (Some(_), outcome) => self.end_claim(pull, outcome, now),
        }
    }

    /// Ends every pull: those that wait for a worker, and those that are written, at once; the others when their batches
    /// have ended.
    pub(super) fn end_pulls(&mut self, now: Instant) -> Vec<Rest> {
        let is_pull = |serving: &Serving| match serving {
            Serving::Queued(_) | Serving::Connecting { .. } | Serving::Writing(..) | Serving::Written => true,
            Serving::Granting(_) | Serving::Lent(_) | Serving::Revoking(..) => false,
        };
        let pulls = self.serving.iter().filter(|(_, serving)| is_pull(serving));
        let pulls: Vec<PullId> = pulls.map(|(pull, _)| pull.clone()).collect();
        pulls.iter().map(|pull| self.end(pull, Outcome::Failed, now)).collect()
    }

    /// The batches under way.
    pub(super) fn writes(&self) -> Vec<Arc<Batch>> {
        let batch = |serving: &Serving| match serving {
            Serving::Writing(batch, _) => Some(Arc::clone(batch)),
            _ => None,
        };
        self.serving.values().filter_map(batch).collect()
    }

    /// Ends a claim that nothing is done for.
    fn end_claim(&mut self, pull: &PullId, outcome: Outcome, now: Instant) {
        if let Err(error) = self.offers.end(pull, outcome, now, &mut self.actions) {
            tracing::debug!(%error, "a get ended that was not known");
        }
    }
}

fn busy(pull: &PullId) -> Error {
    Error::new(ErrorKind::Busy, format!("get {} is in flight already", pull.pull))
}

pub(super) fn called_off() -> Error {
    Error::new(ErrorKind::Cancelled, "the consumer called the get off")
}
