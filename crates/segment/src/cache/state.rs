//! What the cache knows, and what it decides: no clock, no I/O, no waiting.
//!
//! Time is counted twice: in instants, for how old a descriptor may be, and in steps, for what came before what.
//! A descriptor is as old as the beginning of the lookup that brought it.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use posthorse_core::{Error, ErrorKind, Incarnation, Result, SegmentDesc};

/// How old a descriptor may be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Freshness {
    /// Whatever is cached will do.
    Cached,
    /// The peer said so at most this long ago.
    NotOlderThan(Duration),
    /// The peer says so now.
    Fresh,
}

/// A peer's segment came back as another: what was known of its earlier life is void.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SegmentChanged {
    /// The segment's name.
    pub name: String,
    /// The life that was known; `None` was a foreign engine.
    pub before: Option<Incarnation>,
    /// The life there is now; `None` is a foreign engine.
    pub after: Option<Incarnation>,
}

/// A step: larger is later.
type Step = u64;

/// What a caller asks for.
#[derive(Debug, Clone, Copy)]
pub(super) struct Ask {
    freshness: Freshness,
    /// When it asked.
    step: Step,
}

/// What the caller has to do.
#[derive(Debug)]
pub(super) enum Decision {
    /// Take this outcome.
    Take(Result<Arc<SegmentDesc>>),
    /// Look the name up, then say how it ended under this step.
    Lookup(Step),
    /// Ask again when a lookup has ended.
    Wait,
}

#[derive(Debug, Default)]
struct Entry {
    desc: Option<Cached>,
    /// The life last seen, invalidated or not; `None` until one was.
    life: Option<Option<Incarnation>>,
    /// The lookup under way, and when it began.
    lookup: Option<(Step, Instant)>,
    failure: Option<Failure>,
    /// Only lookups from this step on count.
    valid_from: Step,
    used: Step,
}

#[derive(Debug)]
struct Cached {
    desc: Arc<SegmentDesc>,
    began: (Step, Instant),
}

/// A lookup that failed, for those who waited for it.
#[derive(Debug)]
struct Failure {
    error: Error,
    began: Step,
    ended: Step,
}

/// See the module.
#[derive(Debug)]
pub(super) struct State {
    limit: usize,
    step: Step,
    entries: HashMap<String, Entry>,
}

impl State {
    pub(super) fn new(limit: usize) -> Self {
        Self { limit, step: 0, entries: HashMap::new() }
    }

    pub(super) fn ask(&mut self, freshness: Freshness) -> Ask {
        Ask { freshness, step: self.advance() }
    }

    pub(super) fn decide(&mut self, name: &str, ask: Ask, now: Instant) -> Decision {
        let step = self.advance();
        if !self.entries.contains_key(name) && !self.make_room() {
            let why = format!("{} segments are being looked up already", self.limit);
            return Decision::Take(Err(Error::new(ErrorKind::LimitReached, why)));
        }
        let entry = self.entries.entry(name.to_owned()).or_default();
        entry.used = step;
        // A lookup that began earlier is not what this caller asked for.
        let from = match ask.freshness {
            Freshness::Fresh => entry.valid_from.max(ask.step),
            Freshness::Cached | Freshness::NotOlderThan(_) => entry.valid_from,
        };
        let enough = |began: (Step, Instant)| {
            let old = now.saturating_duration_since(began.1);
            began.0 >= from && !matches!(ask.freshness, Freshness::NotOlderThan(limit) if old > limit)
        };
        if let Some(cached) = &entry.desc
            && enough(cached.began)
        {
            return Decision::Take(Ok(Arc::clone(&cached.desc)));
        }
        if let Some(failure) = &entry.failure
            && failure.ended > ask.step
            && failure.began >= from
        {
            return Decision::Take(Err(failure.error.clone()));
        }
        if entry.lookup.is_some() {
            return Decision::Wait;
        }
        entry.lookup = Some((step, now));
        Decision::Lookup(step)
    }

    /// How a lookup ended. The outcome is for whoever did it; the notice for everybody.
    pub(super) fn ended(
        &mut self,
        name: &str,
        lookup: Step,
        outcome: Result<SegmentDesc>,
    ) -> (Result<Arc<SegmentDesc>>, Option<SegmentChanged>) {
        let step = self.advance();
        let outcome = outcome.map(Arc::new);
        let Some(entry) = self.entries.get_mut(name) else { return (outcome, None) };
        let Some(began) = entry.lookup.take_if(|(began, _)| *began == lookup) else { return (outcome, None) };
        let mut changed = None;
        match &outcome {
            Ok(desc) => {
                entry.failure = None;
                // Invalidated meanwhile: those who asked before may have it, nobody else.
                if lookup >= entry.valid_from {
                    entry.desc = Some(Cached { desc: Arc::clone(desc), began });
                }
                let after = desc.incarnation;
                if let Some(before) = entry.life.replace(after)
                    && before != after
                {
                    changed = Some(SegmentChanged { name: name.to_owned(), before, after });
                }
            }
            // A deadline is its owner's alone: whoever waits longer looks for themselves.
            Err(error) if error.kind() == ErrorKind::DeadlineExceeded => {}
            Err(error) => {
                entry.failure = Some(Failure { error: error.clone(), began: lookup, ended: step });
            }
        }
        (outcome, changed)
    }

    pub(super) fn invalidate(&mut self, name: &str) {
        let step = self.advance();
        if let Some(entry) = self.entries.get_mut(name) {
            entry.valid_from = step;
            entry.desc = None;
        }
    }

    pub(super) fn len(&self) -> usize {
        self.entries.len()
    }

    fn advance(&mut self) -> Step {
        self.step += 1;
        self.step
    }

    /// Forgets the entry that was used least recently, where there is no room for another.
    fn make_room(&mut self) -> bool {
        if self.entries.len() < self.limit {
            return true;
        }
        let idle = self.entries.iter().filter(|(_, entry)| entry.lookup.is_none());
        let oldest = idle.min_by_key(|(_, entry)| entry.used).map(|(name, _)| name.clone());
        oldest.is_some_and(|name| self.entries.remove(&name).is_some())
    }
}

#[cfg(test)]
mod tests {
    use posthorse_core::Attributes;
    use proptest::prelude::*;

    use super::*;

    fn desc(name: &str, life: u64) -> SegmentDesc {
        SegmentDesc {
            name: name.to_owned(),
            incarnation: Some(Incarnation(life)),
            hello: None,
            transports: Attributes::new(),
            buffers: Vec::new(),
        }
    }

    fn gone() -> Error {
        Error::new(ErrorKind::PeerGone, "gone")
    }

    struct Test {
        state: State,
        now: Instant,
    }

    impl Test {
        fn new(limit: usize) -> Self {
            Self { state: State::new(limit), now: Instant::now() }
        }

        fn get(&mut self, name: &str, freshness: Freshness) -> Decision {
            let ask = self.state.ask(freshness);
            self.state.decide(name, ask, self.now)
        }

        fn lookup(&mut self, name: &str, freshness: Freshness) -> Step {
            match self.get(name, freshness) {
                Decision::Lookup(step) => step,
                other => panic!("{other:?}"),
            }
        }

        fn fill(&mut self, name: &str, life: u64) -> Option<SegmentChanged> {
            let step = self.lookup(name, Freshness::Fresh);
            self.state.ended(name, step, Ok(desc(name, life))).1
        }
    }

    fn life(decision: Decision) -> u64 {
        match decision {
            Decision::Take(Ok(desc)) => desc.incarnation.unwrap().0,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn freshness_is_what_was_asked_for() {
        let mut test = Test::new(4);
        test.fill("a", 1);
        test.now += Duration::from_secs(10);
        assert_eq!(life(test.get("a", Freshness::Cached)), 1);
        assert_eq!(life(test.get("a", Freshness::NotOlderThan(Duration::from_secs(10)))), 1);
        let step = test.lookup("a", Freshness::NotOlderThan(Duration::from_secs(9)));
        assert_eq!(life(test.get("a", Freshness::Cached)), 1);
        test.state.ended("a", step, Ok(desc("a", 1))).0.unwrap();
        test.lookup("a", Freshness::Fresh);
    }

    #[test]
    fn one_lookup_serves_all_who_asked_meanwhile_and_fresh_only_who_asked_before() {
        let mut test = Test::new(4);
        let cached = test.state.ask(Freshness::Cached);
        let fresh = test.state.ask(Freshness::Fresh);
        let step = test.lookup("a", Freshness::Cached);
        assert!(matches!(test.state.decide("a", cached, test.now), Decision::Wait));
        let late = test.state.ask(Freshness::Fresh);
        assert!(matches!(test.state.decide("a", late, test.now), Decision::Wait));
        test.state.ended("a", step, Ok(desc("a", 1))).0.unwrap();
        assert_eq!(life(test.state.decide("a", cached, test.now)), 1);
        assert_eq!(life(test.state.decide("a", fresh, test.now)), 1);
        assert!(matches!(test.state.decide("a", late, test.now), Decision::Lookup(_)));
    }

    #[test]
    fn what_was_invalidated_is_never_served_to_a_later_asker() {
        let mut test = Test::new(4);
        test.fill("a", 1);
        test.state.invalidate("a");
        let step = test.lookup("a", Freshness::Cached);
        // Again, while the lookup is under way: its outcome may be from before.
        test.state.invalidate("a");
        let later = test.state.ask(Freshness::Cached);
        assert!(matches!(test.state.decide("a", later, test.now), Decision::Wait));
        let (outcome, _) = test.state.ended("a", step, Ok(desc("a", 1)));
        outcome.unwrap();
        assert!(matches!(test.state.decide("a", later, test.now), Decision::Lookup(_)));
    }

    #[test]
    fn a_failure_is_shared_by_those_who_waited_alone_and_a_deadline_by_nobody() {
        let mut test = Test::new(4);
        let step = test.lookup("a", Freshness::Cached);
        let waiting = test.state.ask(Freshness::Cached);
        assert!(matches!(test.state.decide("a", waiting, test.now), Decision::Wait));
        test.state.ended("a", step, Err(gone())).0.unwrap_err();
        assert!(matches!(test.state.decide("a", waiting, test.now), Decision::Take(Err(_))));
        let step = test.lookup("a", Freshness::Cached);
        let waiting = test.state.ask(Freshness::Cached);
        test.state.ended("a", step, Err(posthorse_core::Deadline::exceeded("x"))).0.unwrap_err();
        assert!(matches!(test.state.decide("a", waiting, test.now), Decision::Lookup(_)));
    }

    #[test]
    fn another_life_is_noticed_even_after_an_invalidation() {
        let mut test = Test::new(4);
        assert_eq!(test.fill("a", 1), None);
        assert_eq!(test.fill("a", 1), None);
        test.state.invalidate("a");
        let changed = test.fill("a", 2).unwrap();
        assert_eq!((changed.before, changed.after), (Some(Incarnation(1)), Some(Incarnation(2))));
    }

    #[test]
    fn the_entry_used_least_recently_gives_way() {
        let mut test = Test::new(2);
        test.fill("a", 1);
        test.fill("b", 2);
        life(test.get("a", Freshness::Cached));
        let step = test.lookup("c", Freshness::Cached);
        assert_eq!(life(test.get("a", Freshness::Cached)), 1);
        test.lookup("b", Freshness::Cached);
        // Both are being looked up: there is room for nobody else.
        assert!(matches!(test.get("a", Freshness::Cached), Decision::Take(Err(_))));
        test.state.ended("c", step, Err(gone())).0.unwrap_err();
        test.lookup("a", Freshness::Cached);
        assert_eq!(test.state.len(), 2);
    }

    proptest! {
        /// Peers restart, lookups end in any order and late: no asker gets less than it asked for.
        #[test]
        fn nobody_is_served_an_older_answer_than_asked_for(steps in proptest::collection::vec((0..6_u8, 0..3_usize), 1..200)) {
            const NAMES: [&str; 3] = ["a", "b", "c"];
            let mut test = Test::new(2);
            // The peer's life now; the life that each running lookup has seen; the least that may be served.
            let mut lives = [1_u64; 3];
            let mut running: Vec<(usize, Step, u64)> = Vec::new();
            let mut floor = [0_u64; 3];
            for (action, n) in steps {
                let name = NAMES[n];
                match action {
                    0 => lives[n] += 1,
                    1 => {
                        test.state.invalidate(name);
                        floor[n] = lives[n];
                    }
                    2 | 3 => {
                        let freshness = if action == 2 { Freshness::Cached } else { Freshness::Fresh };
                        match test.get(name, freshness) {
                            Decision::Take(Ok(desc)) => {
                                let least = if action == 2 { floor[n] } else { lives[n] };
                                prop_assert!(desc.incarnation.unwrap().0 >= least);
                            }
                            Decision::Lookup(step) => {
                                prop_assert!(!running.iter().any(|(other, ..)| *other == n), "two lookups of one name");
                                running.push((n, step, lives[n]));
                            }
                            Decision::Wait => prop_assert!(running.iter().any(|(other, ..)| *other == n)),
                            Decision::Take(Err(error)) => prop_assert_eq!(error.kind(), ErrorKind::LimitReached),
                        }
                    }
                    _ if running.is_empty() => {}
                    _ => {
                        let (n, step, life) = running.remove(n % running.len());
                        let outcome = if action == 4 { Ok(desc(NAMES[n], life)) } else { Err(gone()) };
                        let _ = test.state.ended(NAMES[n], step, outcome);
                    }
                }
                prop_assert!(test.state.len() <= 2);
            }
        }
    }
}
