//! How offers ended that are no more.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use posthorse_core::{Error, ErrorKind};

/// How an offer ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Ending {
    Served,
    Expired,
    CleanedUp,
    Replaced,
}

impl Ending {
    /// What a consumer is told who comes too late.
    pub(super) fn error(self, key: &str) -> Error {
        let how = match self {
            Self::Served => "was served to every consumer it was declared for",
            Self::Expired => "was not pulled within its time to live",
            Self::CleanedUp => "was cleaned up by its producer",
            Self::Replaced => "was replaced by another put of its key",
        };
        let error = Error::new(ErrorKind::Expired, format!("the offer of {key:?} {how}"));
        match self {
            Self::Served => error.with_advice("declare more consumers at the put, or retain the offer"),
            _ => error,
        }
    }
}

/// The endings of the last so many keys.
#[derive(Debug)]
pub(super) struct Tombstones {
    most: usize,
    endings: HashMap<Arc<str>, (Ending, u64)>,
    /// In the order of their making; one whose number is not its key's any more is stale.
    order: VecDeque<(Arc<str>, u64)>,
    made: u64,
}

impl Tombstones {
    pub(super) fn new(most: usize) -> Self {
        Self { most, endings: HashMap::new(), order: VecDeque::new(), made: 0 }
    }

    pub(super) fn remember(&mut self, key: &Arc<str>, ending: Ending) {
        self.made += 1;
        self.endings.insert(Arc::clone(key), (ending, self.made));
        self.order.push_back((Arc::clone(key), self.made));
        while self.order.len() > self.most {
            let Some((oldest, made)) = self.order.pop_front() else { break };
            if self.endings.get(&oldest).is_some_and(|(_, current)| *current == made) {
                self.endings.remove(&oldest);
            }
        }
    }

    pub(super) fn forget(&mut self, key: &str) {
        self.endings.remove(key);
    }

    pub(super) fn forget_all(&mut self, which: impl Fn(&str) -> bool) {
        self.endings.retain(|key, _| !which(key));
    }

    pub(super) fn of(&self, key: &str) -> Option<Ending> {
        self.endings.get(key).map(|(ending, _)| *ending)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_last_endings_are_remembered() {
        let mut tombstones = Tombstones::new(2);
        let keys: Vec<Arc<str>> = ["a", "b", "c"].map(Arc::from).to_vec();
        tombstones.remember(&keys[0], Ending::Served);
        tombstones.remember(&keys[1], Ending::Expired);
        tombstones.remember(&keys[0], Ending::CleanedUp);
        assert_eq!(tombstones.of("a"), Some(Ending::CleanedUp));
        tombstones.remember(&keys[2], Ending::Replaced);
        assert_eq!((tombstones.of("a"), tombstones.of("b")), (Some(Ending::CleanedUp), None));
        tombstones.forget("a");
        assert_eq!(tombstones.of("a"), None);
        for _ in 0..100 {
            tombstones.remember(&keys[2], Ending::Served);
        }
        tombstones.forget_all(|key| key == "c");
        assert_eq!(tombstones.of("c"), None);
        assert!(tombstones.order.len() <= 2 && tombstones.endings.len() <= 2);
    }
}
