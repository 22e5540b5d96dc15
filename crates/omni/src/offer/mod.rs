//! The table of offers at a producer: which payload stands under which key, who pulls it, who waits for it.
//!
//! It is pure: every call brings the time and takes the actions that follow; nothing in it waits, locks or
//! looks at a clock. The rules:
//!
//! * A `put` offers a payload under a new generation of its key. It is served to as many consumers as it was
//!   declared for, one by default, then given up; its time to live, [`Offers::cleanup`] and another `put` of the
//!   key end it too.
//! * A payload is pinned from the moment a consumer has a claim to it until that claim ends. Whatever ends an offer
//!   takes effect when the last claim does, and nobody new is admitted meanwhile.
//! * A claim that ends without success gives its place back: the offer stays, and another get may succeed.
//! * A get that finds nothing, or every place claimed, may wait (bounded in number) and is served in the order of
//!   arrival. A get of a key that was served, expired or cleaned up is told so at once.

mod parked;
mod timers;
mod tombstones;

use std::collections::HashMap;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::{Duration, Instant};

use posthorse_core::{Error, ErrorKind, Incarnation, Result};

use crate::message::{Outcome, Want};
use parked::Parking;
use timers::{TimerId, Timers};
use tombstones::{Ending, Tombstones};

/// Bounds and times of the table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OfferLimits {
    /// The most offers, those that wait for an older one of their key to end included.
    pub max_offers: usize,
    /// The most gets that wait.
    pub max_parked: usize,
    /// The most gets of one consumer that wait.
    pub max_parked_per_consumer: usize,
    /// Of how many keys the end is remembered.
    pub max_endings: usize,
    /// How long a consumer that was told of an offer may take to pull it before its place is given away.
    pub reservation: Duration,
    /// How long a consumer that reads, or was written to, may be silent.
    pub lease: Duration,
}

impl Default for OfferLimits {
    fn default() -> Self {
        Self {
            max_offers: 65_536,
            max_parked: 4096,
            max_parked_per_consumer: 1024,
            max_endings: 4096,
            reservation: Duration::from_secs(3),
            lease: Duration::from_secs(3),
        }
    }
}

/// For how many consumers and how long a payload is offered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Terms {
    /// How many consumers it is served to.
    pub consumers: NonZeroU32,
    /// How long it is offered; `None` without end.
    pub ttl: Option<Duration>,
}

impl Default for Terms {
    /// One consumer, without end.
    fn default() -> Self {
        Self { consumers: NonZeroU32::MIN, ttl: None }
    }
}

/// One get of one consumer.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PullId {
    /// The consumer: its segment name, or whatever tells foreign ones apart.
    pub consumer: Arc<str>,
    /// Which life of it.
    pub incarnation: Incarnation,
    /// The number of the get.
    pub pull: u64,
}

/// An offer as a consumer is told of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Found<P> {
    /// The payload.
    pub payload: P,
    /// Which put it is; generations of a table grow and are never used twice.
    pub generation: u64,
    /// How many consumers it is still to be served to.
    pub consumers_left: u32,
    /// When it ends.
    pub expires: Option<Instant>,
}

/// What a get comes to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Claimed<P> {
    /// It has a claim to this.
    Found(Found<P>),
    /// It waits: an [`Action::Found`] or [`Action::Refuse`] follows.
    Parked,
}

/// What follows from a call.
#[derive(Debug)]
pub enum Action<P> {
    /// The table holds this payload no more, and nobody has a claim to it: return it to its pool.
    Release(P),
    /// A get that waited has a claim to this: answer it.
    Found(PullId, Found<P>),
    /// A get that waited gets nothing: answer it.
    Refuse(PullId, Error),
    /// A consumer that reads, or was written to, has not renewed its lease: make sure that it cannot touch the payload
    /// any more, then call [`Offers::end`]. Until then the payload stays pinned.
    Overdue(PullId),
}

/// What a consumer called off.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cancelled {
    /// A get that waited, or had not begun to pull. It is forgotten.
    Forgotten,
    /// A pull or read in flight: stop it, then call [`Offers::end`].
    InFlight,
    /// Nothing: it has ended, or never was.
    Unknown,
}

/// How full the table is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct OfferStats {
    /// Offers.
    pub offers: usize,
    /// Puts that wait for an older offer of their key to end.
    pub superseding: usize,
    /// Claims: reserved and in flight.
    pub claims: usize,
    /// Gets that wait.
    pub parked: usize,
}

/// The table. `P` is a handle to a payload, such as an `Arc`.
#[derive(Debug)]
pub struct Offers<P> {
    limits: OfferLimits,
    offers: HashMap<Arc<str>, Offer<P>>,
    claims: HashMap<PullId, Claim>,
    parking: Parking,
    endings: Tombstones,
    timers: Timers<Timer>,
    generation: u64,
    superseding: usize,
    closed: bool,
}

#[derive(Debug)]
struct Offer<P> {
    payload: P,
    generation: u64,
    /// Consumers still to be served; those with a claim are among them.
    left: u32,
    claims: u32,
    expires: Option<TimerId>,
    /// Set when it ends with its last claim, and why.
    ending: Option<Ending>,
    next: Option<Next<P>>,
}

#[derive(Debug)]
struct Next<P> {
    payload: P,
    generation: u64,
    terms: Terms,
}

#[derive(Debug)]
struct Claim {
    key: Arc<str>,
    in_flight: bool,
    /// The end of the reservation or lease; a write has none until all is written.
    due: Option<TimerId>,
}

#[derive(Debug, Clone)]
enum Timer {
    Expiry(Arc<str>),
    Claim(PullId),
    Parked(PullId),
}

/// What follows from calls, in order.
pub type Actions<P> = Vec<Action<P>>;

impl<P: Clone> Offers<P> {
    /// An empty table.
    pub fn new(limits: OfferLimits) -> Self {
        Self {
            endings: Tombstones::new(limits.max_endings),
            parking: Parking::new(limits.max_parked, limits.max_parked_per_consumer),
            limits,
            offers: HashMap::new(),
            claims: HashMap::new(),
            timers: Timers::new(),
            generation: 0,
            superseding: 0,
            closed: false,
        }
    }

    /// Offers a payload, and returns its generation. While an older offer of the key has claims, the new one waits
    /// for the last of them to end.
    ///
    /// # Errors
    /// `QueueFull` or `Closed`; the payload comes back as [`Action::Release`].
    pub fn put(
        &mut self,
        key: &str,
        payload: P,
        terms: Terms,
        now: Instant,
        out: &mut Actions<P>,
    ) -> Result<u64> {
        let refusal = if self.closed {
            Some(Error::new(ErrorKind::Closed, "the connector is closed"))
        } else if self.offers.len() + self.superseding >= self.limits.max_offers && self.is_growth(key) {
            let message = format!("{} payloads are offered; accepted: max_offers", self.limits.max_offers);
            Some(Error::new(ErrorKind::QueueFull, message))
        } else {
            None
        };
        if let Some(error) = refusal {
            out.push(Action::Release(payload));
            return Err(error);
        }
        self.generation += 1;
        let next = Next { payload, generation: self.generation, terms };
        match self.offers.get_mut(key) {
            None => self.install(key.into(), next, now),
            Some(offer) => {
                offer.ending = Some(Ending::Replaced);
                match offer.next.replace(next) {
                    Some(older) => out.push(Action::Release(older.payload)),
                    None => self.superseding += 1,
                }
            }
        }
        self.settle(key, now, out);
        Ok(self.generation)
    }

    /// What is offered under a key, without a claim to it: for peers that only ask.
    ///
    /// # Errors
    /// `NotFound`, `Expired` with how it ended, `Busy` while it is being replaced, or `Closed`.
    pub fn find(&self, key: &str) -> Result<Found<P>> {
        match self.offers.get(key) {
            Some(offer) if offer.ending.is_none() => Ok(offer.found()),
            _ => Err(self.absence(key)),
        }
    }

    /// Claims a place among the consumers of an offer, or waits for one until `wait`. A get that wants to write
    /// keeps its place for the time of a reservation, until [`Offers::begin`]; one that wants to read is in
    /// flight at once, for the time of a lease. Asking again with the same id gets the same answer.
    ///
    /// # Errors
    /// For a get that does not wait: `NotFound`, or `Busy` when every place is claimed. In any case `Expired` with
    /// how the offer ended, `QueueFull` when too many wait, `Closed`.
    pub fn claim(
        &mut self,
        key: &str,
        pull: PullId,
        want: Want,
        wait: Option<Instant>,
        now: Instant,
    ) -> Result<Claimed<P>> {
        if let Some(claim) = self.claims.get(&pull) {
            return match self.offers.get(key) {
                Some(offer) if *claim.key == *key => Ok(Claimed::Found(offer.found())),
                _ => Err(used_twice(&pull)),
            };
        }
        if self.parking.contains(&pull) {
            return Err(used_twice(&pull));
        }
        if let Some(found) = self.admit(key, pull.clone(), want, now) {
            return Ok(Claimed::Found(found));
        }
        let refusal = self.absence(key);
        let may_come = matches!(refusal.kind(), ErrorKind::NotFound | ErrorKind::Busy);
        match wait.filter(|at| may_come && *at > now) {
            None => Err(refusal),
            Some(at) => {
                self.parking.room(&pull)?;
                let timer = self.timers.add(at, Timer::Parked(pull.clone()));
                self.parking.park(key, pull, want, timer);
                Ok(Claimed::Parked)
            }
        }
    }

    /// Begins a write to a consumer: with the claim that it has, or for peers that do not claim, with a new one.
    ///
    /// # Errors
    /// As [`Offers::claim`] without waiting; `Expired` when `generation` is not what is offered now; `Busy` when
    /// this get is in flight already.
    pub fn begin(
        &mut self,
        key: &str,
        pull: &PullId,
        generation: Option<u64>,
        now: Instant,
    ) -> Result<Found<P>> {
        let claimed = match self.claims.get(pull) {
            Some(claim) if claim.in_flight => {
                return Err(Error::new(ErrorKind::Busy, format!("get {} is in flight already", pull.pull)));
            }
            Some(claim) if *claim.key != *key => return Err(used_twice(pull)),
            None if self.parking.contains(pull) => return Err(used_twice(pull)),
            claim => claim.is_some(),
        };
        let current = self.offers.get(key).map(|offer| offer.generation);
        if let (Some(wanted), Some(current)) = (generation, current)
            && wanted != current
        {
            let message = format!("generation {wanted} of {key:?} has ended; offered now: {current}");
            return Err(Error::new(ErrorKind::Expired, message));
        }
        if !claimed && self.admit(key, pull.clone(), Want::Write, now).is_none() {
            return Err(self.absence(key));
        }
        if let Some(claim) = self.claims.get_mut(pull) {
            claim.in_flight = true;
            if let Some(due) = claim.due.take() {
                self.timers.remove(due);
            }
        }
        self.offers.get(key).map(Offer::found).ok_or_else(|| self.absence(key))
    }

    /// Makes of a claim to read one to be written to, which keeps its place until [`Offers::begin`].
    pub fn reserve(&mut self, pull: &PullId, now: Instant) {
        let Some(claim) = self.claims.get_mut(pull) else { return };
        claim.in_flight = false;
        self.set_due(pull, now + self.limits.reservation);
    }

    /// All is written for a claim. Its consumer has to say that it has it, or that it is still there: what it says may be
    /// lost, or the consumer be gone.
    pub fn written(&mut self, pull: &PullId, now: Instant) {
        self.set_due(pull, now + self.limits.lease);
    }

    /// Ends a claim: nothing touches the payload for it any more. `Done` counts as served; `Failed` gives the place
    /// back.
    ///
    /// # Errors
    /// `NotFound` when there is no such claim: it has ended, or never was.
    pub fn end(&mut self, pull: &PullId, outcome: Outcome, now: Instant, out: &mut Actions<P>) -> Result<()> {
        let claim = self.claims.remove(pull).ok_or_else(|| {
            let message =
                format!("get {} of {} has no claim: it has ended, or never was", pull.pull, pull.consumer);
            Error::new(ErrorKind::NotFound, message)
        })?;
        if let Some(due) = claim.due {
            self.timers.remove(due);
        }
        if let Some(offer) = self.offers.get_mut(&claim.key) {
            offer.claims -= 1;
            if outcome == Outcome::Done {
                // Saturating: `release` may have given up the place meanwhile.
                offer.left = offer.left.saturating_sub(1);
            }
        }
        self.settle(&claim.key, now, out);
        Ok(())
    }

    /// Says that a consumer is still at it. Returns whether it has such a claim.
    pub fn renew(&mut self, pull: &PullId, now: Instant) -> bool {
        let Some(claim) = self.claims.get(pull) else { return false };
        if claim.due.is_some() {
            let span = if claim.in_flight { self.limits.lease } else { self.limits.reservation };
            self.set_due(pull, now + span);
        }
        true
    }

    /// Whether a get has a claim that is in flight.
    pub fn is_in_flight(&self, pull: &PullId) -> bool {
        self.claims.get(pull).is_some_and(|claim| claim.in_flight)
    }

    /// Calls a get off.
    pub fn cancel(&mut self, pull: &PullId, now: Instant, out: &mut Actions<P>) -> Cancelled {
        if let Some(timer) = self.parking.remove(pull) {
            self.timers.remove(timer);
            return Cancelled::Forgotten;
        }
        match self.claims.get(pull) {
            None => Cancelled::Unknown,
            Some(claim) if claim.in_flight => Cancelled::InFlight,
            Some(_) => {
                // The claim is there: it ends.
                let _ = self.end(pull, Outcome::Failed, now, out);
                Cancelled::Forgotten
            }
        }
    }

    /// Serves an offer to `more` further consumers, and returns how many are left.
    ///
    /// # Errors
    /// As [`Offers::find`].
    pub fn retain(&mut self, key: &str, more: u32, now: Instant, out: &mut Actions<P>) -> Result<u32> {
        let offer = match self.offers.get_mut(key) {
            Some(offer) if offer.ending.is_none() => offer,
            _ => return Err(self.absence(key)),
        };
        offer.left = offer.left.saturating_add(more);
        let left = offer.left;
        self.settle(key, now, out);
        Ok(left)
    }

    /// Gives up `fewer` of the consumers an offer waits for, and returns how many are left. With none left, it ends as
    /// served when its last claim does.
    ///
    /// # Errors
    /// As [`Offers::find`].
    pub fn release(&mut self, key: &str, fewer: u32, now: Instant, out: &mut Actions<P>) -> Result<u32> {
        let offer = match self.offers.get_mut(key) {
            Some(offer) if offer.ending.is_none() => offer,
            _ => return Err(self.absence(key)),
        };
        offer.left = offer.left.saturating_sub(fewer);
        let left = offer.left;
        self.settle(key, now, out);
        Ok(left)
    }

    /// Ends the offer of a key, and a put that waits for it. Returns whether there was one.
    pub fn cleanup(&mut self, key: &str, now: Instant, out: &mut Actions<P>) -> bool {
        self.withdraw(key, Ending::CleanedUp, now, out)
    }

    /// Forgets how offers ended whose keys are to be used anew.
    pub fn forget_endings(&mut self, which: impl Fn(&str) -> bool) {
        self.endings.forget_all(which);
    }

    /// Carries out what is due by now: offers expire, reservations lapse, leases are overdue, waiting ends.
    pub fn tick(&mut self, now: Instant, out: &mut Actions<P>) {
        while let Some(timer) = self.timers.pop_due(now) {
            match timer {
                Timer::Expiry(key) => {
                    if let Some(offer) = self.offers.get_mut(&key) {
                        offer.expires = None;
                        // A put that waits for this offer to end is a new offer: it stays.
                        offer.ending.get_or_insert(Ending::Expired);
                    }
                    self.settle(&key, now, out);
                }
                Timer::Claim(pull) => {
                    let Some(claim) = self.claims.get_mut(&pull) else { continue };
                    claim.due = None;
                    if claim.in_flight {
                        out.push(Action::Overdue(pull));
                    } else {
                        let _ = self.end(&pull, Outcome::Failed, now, out);
                    }
                }
                Timer::Parked(pull) => {
                    if let Some(key) = self.parking.key_of(&pull) {
                        let error = self.absence(&key).context("the wait for an offer ended");
                        self.parking.remove(&pull);
                        out.push(Action::Refuse(pull, error));
                    }
                }
            }
        }
    }

    /// When [`Offers::tick`] has something to do next.
    pub fn next_due(&self) -> Option<Instant> {
        self.timers.next_due()
    }

    /// Ends every offer and refuses everything from now on. What has claims ends with them. Idempotent.
    pub fn close(&mut self, now: Instant, out: &mut Actions<P>) {
        self.closed = true;
        // First: who waits behind a claim is told of the close, not of the end of that offer.
        for (pull, timer) in self.parking.drain() {
            self.timers.remove(timer);
            out.push(Action::Refuse(pull, Error::new(ErrorKind::Closed, "the connector is closed")));
        }
        let mut keys: Vec<Arc<str>> = self.offers.keys().cloned().collect();
        keys.sort();
        for key in keys {
            self.withdraw(&key, Ending::CleanedUp, now, out);
        }
        let mut reserved: Vec<PullId> =
            self.claims.iter().filter(|(_, claim)| !claim.in_flight).map(|(pull, _)| pull.clone()).collect();
        reserved.sort();
        for pull in reserved {
            let _ = self.end(&pull, Outcome::Failed, now, out);
        }
    }

    /// How full the table is.
    pub fn stats(&self) -> OfferStats {
        OfferStats {
            offers: self.offers.len(),
            superseding: self.superseding,
            claims: self.claims.len(),
            parked: self.parking.len(),
        }
    }

    /// Whether a put of this key takes a place more: all but those that take another's.
    fn is_growth(&self, key: &str) -> bool {
        self.offers.get(key).is_none_or(|offer| offer.claims > 0 && offer.next.is_none())
    }

    /// Gives a get its claim, where there is a place.
    fn admit(&mut self, key: &str, pull: PullId, want: Want, now: Instant) -> Option<Found<P>> {
        let key = Arc::clone(self.offers.get_key_value(key)?.0);
        let offer = self.offers.get_mut(&key).filter(|offer| offer.has_place())?;
        offer.claims += 1;
        let found = offer.found();
        let in_flight = want == Want::Read;
        let span = if in_flight { self.limits.lease } else { self.limits.reservation };
        let due = Some(self.timers.add(now + span, Timer::Claim(pull.clone())));
        self.claims.insert(pull, Claim { key, in_flight, due });
        Some(found)
    }

    fn set_due(&mut self, pull: &PullId, at: Instant) {
        let Some(claim) = self.claims.get_mut(pull) else { return };
        let due = self.timers.add(at, Timer::Claim(pull.clone()));
        if let Some(earlier) = claim.due.replace(due) {
            self.timers.remove(earlier);
        }
    }

    fn install(&mut self, key: Arc<str>, next: Next<P>, now: Instant) {
        let Next { payload, generation, terms } = next;
        let expires = terms
            .ttl
            .and_then(|ttl| now.checked_add(ttl))
            .map(|at| self.timers.add(at, Timer::Expiry(Arc::clone(&key))));
        self.endings.forget(&key);
        let left = terms.consumers.get();
        self.offers
            .insert(key, Offer { payload, generation, left, claims: 0, expires, ending: None, next: None });
    }

    fn withdraw(&mut self, key: &str, ending: Ending, now: Instant, out: &mut Actions<P>) -> bool {
        let Some(offer) = self.offers.get_mut(key) else { return false };
        offer.ending = Some(ending);
        if let Some(next) = offer.next.take() {
            self.superseding -= 1;
            out.push(Action::Release(next.payload));
        }
        self.settle(key, now, out);
        true
    }

    /// Brings an offer to where nothing follows from its state any more: ended, replaced, or with a claim for each
    /// get that waits and has a place.
    fn settle(&mut self, key: &str, now: Instant, out: &mut Actions<P>) {
        while let Some(offer) = self.offers.get(key) {
            if offer.claims == 0 && (offer.left == 0 || offer.ending.is_some()) {
                let Some((key, mut offer)) = self.offers.remove_entry(key) else { return };
                if let Some(timer) = offer.expires {
                    self.timers.remove(timer);
                }
                out.push(Action::Release(offer.payload));
                if let Some(next) = offer.next.take() {
                    self.superseding -= 1;
                    self.install(key, next, now);
                    continue;
                }
                let ending = offer.ending.unwrap_or(Ending::Served);
                self.endings.remember(&key, ending);
                for (pull, timer) in self.parking.drain_key(&key) {
                    self.timers.remove(timer);
                    out.push(Action::Refuse(pull, ending.error(&key)));
                }
            } else if offer.has_place()
                && let Some((pull, want, timer)) = self.parking.pop(key)
            {
                self.timers.remove(timer);
                if let Some(found) = self.admit(key, pull.clone(), want, now) {
                    out.push(Action::Found(pull, found));
                }
            } else {
                return;
            }
        }
    }

    /// Why there is no place under a key.
    fn absence(&self, key: &str) -> Error {
        if self.closed {
            return Error::new(ErrorKind::Closed, "the connector is closed");
        }
        match self.offers.get(key) {
            Some(offer) if offer.next.is_some() => {
                let message = format!("a newer payload of {key:?} waits for the pulls of the older to end");
                Error::new(ErrorKind::Busy, message)
            }
            Some(Offer { ending: Some(ending), .. }) => ending.error(key),
            Some(offer) => {
                let message =
                    format!("each of the {} places of {key:?} is claimed by a consumer", offer.claims);
                Error::new(ErrorKind::Busy, message).with_advice(
                    "wait: a failed pull gives its place back; or declare more consumers at the put",
                )
            }
            None => match self.endings.of(key) {
                Some(ending) => ending.error(key),
                None => Error::new(ErrorKind::NotFound, format!("nothing was offered under {key:?}")),
            },
        }
    }
}

impl<P: Clone> Offer<P> {
    fn found(&self) -> Found<P> {
        Found {
            payload: self.payload.clone(),
            generation: self.generation,
            consumers_left: self.left,
            expires: self.expires.map(TimerId::at),
        }
    }

    const fn has_place(&self) -> bool {
        self.ending.is_none() && self.claims < self.left
    }
}

fn used_twice(pull: &PullId) -> Error {
    let (number, consumer) = (pull.pull, &pull.consumer);
    Error::new(ErrorKind::InvalidArgument, format!("the number {number} of a get of {consumer} is in use"))
}

#[cfg(test)]
mod tests;
