//! Which faults happen, and when: data that can be printed, kept and played again.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

use posthorse_core::{Error, ErrorKind, FarEnd};
use serde::{Deserialize, Serialize};

use crate::random::Random;

/// The faults of one run. Its text is one line of JSON, and the same text gives the same faults again.
///
/// Slices and calls of `submit` are counted from zero over all paths, steps from the first call of
/// [`FaultTransport::step`](crate::FaultTransport::step), which is step 1.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Plan {
    /// What happens to slices, by their number.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub slices: BTreeMap<u64, Fault>,
    /// How many slices calls of `submit` take at the most, by the calls' number.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub calls: BTreeMap<u64, usize>,
    /// What happens at steps.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub steps: BTreeMap<u64, Disturbance>,
}

/// What happens to one slice.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Fault {
    /// It is moved, and its completion is held back for this many steps; later slices overtake it.
    Delay(u64),
    /// It is moved, and its completion is lost: nothing is heard of it until the path is fenced.
    LoseCompletion,
    /// It is lost before it moves anything: nothing is heard of it until the path is fenced.
    Lose,
    /// It is refused at once, and moves nothing.
    Refuse(Failure),
    /// It is moved, and is then reported as failed.
    FailAfter(Failure),
}

/// A failure to report.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failure {
    /// The kind of error.
    #[serde(with = "kind_name")]
    pub kind: ErrorKind,
    /// What is said of the far end: whether it is quiet.
    pub quiet: bool,
}

/// What happens to a whole transport or path for some time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Disturbance {
    /// No slice is taken and no completion comes for this many steps.
    Stall(u64),
    /// The path that was connected as this one in order (from zero) goes down: its slices fail, no more are taken.
    /// It comes up again after this many steps, unless it has been fenced.
    Down {
        /// Which path.
        path: usize,
        /// Steps until it is up again.
        steps: u64,
    },
}

/// How often faults happen in a random plan, in a thousand.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct FaultRates {
    /// Slices that are delayed, by 1 to 8 steps.
    pub delay: u16,
    /// Slices whose completion is lost.
    pub lose_completion: u16,
    /// Slices that are lost.
    pub lose: u16,
    /// Slices that are refused, with a path's, peer's or local error.
    pub refuse: u16,
    /// Slices that fail after they moved.
    pub fail_after: u16,
    /// Calls of `submit` that take only 0 to 3 slices.
    pub partial: u16,
    /// Steps at which everything stalls, for 1 to 8 steps.
    pub stall: u16,
    /// Steps at which one of the first four paths goes down, for 1 to 8 steps.
    pub down: u16,
}

impl Plan {
    /// A plan without faults.
    pub fn none() -> Self {
        Self::default()
    }

    /// The plan that `seed` stands for: faults among the first `count` slices, calls and steps.
    pub fn random(seed: u64, rates: FaultRates, count: u64) -> Self {
        let mut random = Random::new(seed);
        let mut plan = Self::none();
        for number in 0..count {
            if let Some(fault) = Fault::random(&mut random, rates) {
                plan.slices.insert(number, fault);
            }
            if random.per_mille(rates.partial) {
                plan.calls.insert(number, random.below(4) as usize);
            }
            let steps = 1 + random.below(8);
            if random.per_mille(rates.stall) {
                plan.steps.insert(number, Disturbance::Stall(steps));
            } else if random.per_mille(rates.down) {
                plan.steps.insert(number, Disturbance::Down { path: random.below(4) as usize, steps });
            }
        }
        plan
    }
}

impl Fault {
    fn random(random: &mut Random, rates: FaultRates) -> Option<Self> {
        // Drawn whether or not they are used, so that one rate can be changed and the rest of the plan stays.
        let (steps, failure) = (1 + random.below(8), Failure::random(random));
        let mut at = random.below(1000);
        for (rate, fault) in [
            (rates.delay, Self::Delay(steps)),
            (rates.lose_completion, Self::LoseCompletion),
            (rates.lose, Self::Lose),
            (rates.refuse, Self::Refuse(Failure { quiet: true, ..failure })),
            (rates.fail_after, Self::FailAfter(failure)),
        ] {
            if at < u64::from(rate) {
                return Some(fault);
            }
            at -= u64::from(rate);
        }
        None
    }
}

impl Failure {
    fn random(random: &mut Random) -> Self {
        const KINDS: [ErrorKind; 4] =
            [ErrorKind::PathFailed, ErrorKind::PeerGone, ErrorKind::LimitReached, ErrorKind::Corrupt];
        let kind = KINDS[random.below(KINDS.len() as u64) as usize];
        Self { kind, quiet: random.per_mille(500) }
    }

    pub(super) fn error(self) -> Error {
        Error::new(self.kind, "a fault of the plan")
    }

    pub(super) const fn far_end(self) -> FarEnd {
        if self.quiet { FarEnd::Quiet } else { FarEnd::Unconfirmed }
    }
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&serde_json::to_string(self).map_err(|_| fmt::Error)?)
    }
}

impl FromStr for Plan {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        serde_json::from_str(text).map_err(|error| {
            Error::invalid_argument("plan", format_args!("{text:?} ({error})"), "the text of a Plan")
        })
    }
}

mod kind_name {
    use posthorse_core::ErrorKind;
    use serde::{Deserialize, Deserializer, Serializer, de::Error as _};

    pub(super) fn serialize<S: Serializer>(kind: &ErrorKind, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(kind.name())
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<ErrorKind, D::Error> {
        let name = String::deserialize(deserializer)?;
        let kind = ErrorKind::ALL.iter().copied().find(|kind| kind.name() == name);
        kind.ok_or_else(|| D::Error::custom(format!("{name:?} is no kind of error")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RATES: FaultRates = FaultRates {
        delay: 100,
        lose_completion: 50,
        lose: 50,
        refuse: 50,
        fail_after: 50,
        partial: 100,
        stall: 20,
        down: 20,
    };

    #[test]
    fn a_seed_is_a_plan_and_its_text_is_the_plan_again() {
        let plan = Plan::random(42, RATES, 500);
        assert_eq!(plan, Plan::random(42, RATES, 500));
        assert_ne!(plan, Plan::random(43, RATES, 500));
        assert!(plan.slices.len() > 100 && plan.calls.len() > 20 && plan.steps.len() > 5, "{plan}");
        assert_eq!(plan.to_string().parse::<Plan>().unwrap(), plan);
        assert_eq!(Plan::none().to_string(), "{}");
    }

    #[test]
    fn every_kind_of_fault_occurs() {
        let plan = Plan::random(1, RATES, 1000);
        let is = |wanted: fn(&Fault) -> bool| plan.slices.values().any(wanted);
        assert!(is(|fault| matches!(fault, Fault::Delay(1..=8))));
        assert!(is(|fault| matches!(fault, Fault::LoseCompletion)));
        assert!(is(|fault| matches!(fault, Fault::Lose)));
        assert!(is(|fault| matches!(fault, Fault::Refuse(Failure { quiet: true, .. }))));
        assert!(is(|fault| matches!(fault, Fault::FailAfter(Failure { quiet: false, .. }))));
        assert_eq!(Plan::random(1, FaultRates::default(), 1000), Plan::none());
    }

    #[test]
    fn a_text_that_is_no_plan_is_refused_by_name() {
        for text in
            ["", "{\"slice\":{}}", "{\"slices\":{\"0\":{\"refuse\":{\"kind\":\"Odd\",\"quiet\":true}}}}"]
        {
            assert!(text.parse::<Plan>().unwrap_err().to_string().contains("plan is"), "{text}");
        }
    }
}
