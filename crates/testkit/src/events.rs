//! A recorder of what a transport reports.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use posthorse_core::{Completion, Deadline, Error, PathId, PathState, Result, TransportEvents};

/// Records everything that a transport reports, for a test to wait for. Tokens must not be used twice.
#[derive(Debug, Default)]
pub struct Events {
    record: Mutex<Record>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Record {
    completions: HashMap<u64, Completion>,
    /// Tokens that were completed more than once.
    repeated: Vec<u64>,
    writable: HashMap<PathId, u64>,
    paths: Vec<(PathId, PathState)>,
    notified: Vec<(String, Vec<u8>)>,
    refusal: Option<Error>,
    gate: Option<Receiver<()>>,
}

impl Events {
    /// An empty record.
    pub fn new() -> Self {
        Self::default()
    }

    /// The completion of `token`, waited for.
    ///
    /// # Errors
    /// `DeadlineExceeded`.
    pub fn wait_for(&self, token: u64, deadline: Deadline) -> Result<Completion> {
        self.wait("a completion", deadline, |record| record.completions.get(&token).cloned())
    }

    /// The completions of these tokens, in the tokens' order, waited for.
    ///
    /// # Errors
    /// `DeadlineExceeded`.
    pub fn wait_for_all(&self, tokens: Range<u64>, deadline: Deadline) -> Result<Vec<Completion>> {
        let mut got = Vec::new();
        self.wait("the completions of a batch", deadline, |record| {
            // Goes on where the last look ended: each completion is looked up once, plus once a wake-up.
            while let Some(completion) = record.completions.get(&(tokens.start + got.len() as u64))
                && (got.len() as u64) < tokens.end - tokens.start
            {
                got.push(completion.clone());
            }
            (got.len() as u64 == tokens.end - tokens.start).then_some(())
        })?;
        Ok(got)
    }

    /// The completion of `token`, if it has come.
    pub fn completion(&self, token: u64) -> Option<Completion> {
        self.record().completions.get(&token).cloned()
    }

    /// How many slices and notifications have ended.
    pub fn completed_count(&self) -> usize {
        self.record().completions.len()
    }

    /// Waits until this many slices and notifications have ended.
    ///
    /// # Errors
    /// `DeadlineExceeded`.
    pub fn wait_completed(&self, count: usize, deadline: Deadline) -> Result<()> {
        self.wait("enough completions", deadline, |record| (record.completions.len() >= count).then_some(()))
    }

    /// The tokens that were completed more than once: none, if the transport keeps its contract.
    pub fn repeated(&self) -> Vec<u64> {
        self.record().repeated.clone()
    }

    /// How often `path` was said to be writable. Look before offering slices, and wait for more afterwards.
    pub fn writable_count(&self, path: PathId) -> u64 {
        self.record().writable.get(&path).copied().unwrap_or(0)
    }

    /// Waits until `path` was said to be writable more often than `seen` times.
    ///
    /// # Errors
    /// `DeadlineExceeded`.
    pub fn wait_writable(&self, path: PathId, seen: u64, deadline: Deadline) -> Result<()> {
        self.wait("a path to be writable", deadline, |record| {
            (record.writable.get(&path).copied().unwrap_or(0) > seen).then_some(())
        })
    }

    /// Each change of a path's state, in the order they were reported.
    pub fn path_changes(&self) -> Vec<(PathId, PathState)> {
        self.record().paths.clone()
    }

    /// Waits until `path` was last reported down.
    ///
    /// # Errors
    /// `DeadlineExceeded`.
    pub fn wait_down(&self, path: PathId, deadline: Deadline) -> Result<Error> {
        self.wait("a path to go down", deadline, |record| {
            match record.paths.iter().rev().find(|(id, _)| *id == path) {
                Some((_, PathState::Down(why))) => Some(why.clone()),
                _ => None,
            }
        })
    }

    /// The first `count` notifications, with who sent them, waited for.
    ///
    /// # Errors
    /// `DeadlineExceeded`.
    pub fn wait_notified(&self, count: usize, deadline: Deadline) -> Result<Vec<(String, Vec<u8>)>> {
        self.wait("notifications", deadline, |record| record.notified.get(..count).map(<[_]>::to_vec))
    }

    /// Every notification so far, with who sent it.
    pub fn notified_so_far(&self) -> Vec<(String, Vec<u8>)> {
        self.record().notified.clone()
    }

    /// Refuses notifications from now on with this error, or takes them again.
    pub fn refuse_notifications(&self, refusal: Option<Error>) {
        self.record().refusal = refusal;
    }

    /// Keeps the next notification's transport waiting, once it is recorded, until what is returned is dropped.
    pub fn hold_notification(&self) -> Sender<()> {
        let (open, gate) = channel();
        self.record().gate = Some(gate);
        open
    }

    fn wait<T>(
        &self,
        what: &str,
        deadline: Deadline,
        mut ready: impl FnMut(&Record) -> Option<T>,
    ) -> Result<T> {
        let mut record = self.record();
        loop {
            if let Some(value) = ready(&record) {
                return Ok(value);
            }
            record = match deadline.remaining(Instant::now()) {
                None => self.changed.wait(record).unwrap_or_else(PoisonError::into_inner),
                Some(left) if left.is_zero() => return Err(Deadline::exceeded(what)),
                Some(left) => {
                    self.changed.wait_timeout(record, left).unwrap_or_else(PoisonError::into_inner).0
                }
            };
        }
    }

    fn record(&self) -> MutexGuard<'_, Record> {
        self.record.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn change<T>(&self, change: impl FnOnce(&mut Record) -> T) -> T {
        let outcome = change(&mut self.record());
        self.changed.notify_all();
        outcome
    }
}

impl TransportEvents for Events {
    fn completed(&self, completions: &[Completion]) {
        self.change(|record| {
            for completion in completions {
                if record.completions.insert(completion.token, completion.clone()).is_some() {
                    record.repeated.push(completion.token);
                }
            }
        });
    }

    fn writable(&self, path: PathId) {
        self.change(|record| *record.writable.entry(path).or_default() += 1);
    }

    fn path_changed(&self, path: PathId, state: &PathState) {
        self.change(|record| record.paths.push((path, state.clone())));
    }

    fn notified(&self, peer: &str, data: &[u8]) -> Result<()> {
        let gate = self.change(|record| match &record.refusal {
            Some(refusal) => Err(refusal.clone()),
            None => {
                record.notified.push((peer.to_owned(), data.to_vec()));
                Ok(record.gate.take())
            }
        })?;
        if let Some(gate) = gate {
            // An error says that it was opened.
            let _ = gate.recv();
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use posthorse_core::{ErrorKind, Level};

    use super::*;

    fn done(token: u64) -> Completion {
        Completion { token, result: Ok(Level::Visible) }
    }

    #[test]
    fn completions_are_waited_for_in_whatever_order_they_come() {
        let events = Events::new();
        std::thread::scope(|scope| {
            scope.spawn(|| [2, 0, 1].map(|token| events.completed(&[done(token)])));
            let got = events.wait_for_all(0..3, Deadline::NEVER).unwrap();
            assert_eq!(got.iter().map(|completion| completion.token).collect::<Vec<_>>(), [0, 1, 2]);
        });
        assert_eq!(events.wait_for_all(5..5, Deadline::after(Duration::ZERO)).unwrap().len(), 0);
        let late = events.wait_for(9, Deadline::after(Duration::from_millis(1))).unwrap_err();
        assert_eq!(late.kind(), ErrorKind::DeadlineExceeded);
    }

    #[test]
    fn a_second_completion_of_a_token_is_remembered() {
        let events = Events::new();
        events.completed(&[done(1), done(2), done(1)]);
        assert_eq!((events.completed_count(), events.repeated()), (2, vec![1]));
    }

    #[test]
    fn a_path_that_became_writable_before_the_wait_is_not_missed() {
        let events = Events::new();
        let seen = events.writable_count(PathId(1));
        events.writable(PathId(1));
        events.wait_writable(PathId(1), seen, Deadline::after(Duration::ZERO)).unwrap();
        events.wait_writable(PathId(1), seen + 1, Deadline::after(Duration::ZERO)).unwrap_err();
    }
}
