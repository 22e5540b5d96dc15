//! What is known of every slice on its way through a [`FaultTransport`](crate::FaultTransport), and what comes of it:
//! no I/O, no threads, no clock.

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};

use posthorse_core::{Completion, Error, ErrorKind, FarEnd, Level, PathId, PathState, SliceError};

use super::plan::{Disturbance, Fault, Plan};

/// What has to be reported, in this order.
#[derive(Debug, Default)]
pub(super) struct Reports {
    pub(super) completions: Vec<Completion>,
    pub(super) paths: Vec<(PathId, PathState)>,
    pub(super) writable: Vec<PathId>,
}

#[derive(Debug, Default)]
pub(super) struct Ledger {
    plan: Plan,
    slices: u64,
    calls: u64,
    step: u64,
    /// Faults of slices that the inner transport had no room for: the next slices get them.
    returned: VecDeque<Option<Fault>>,
    entries: HashMap<u64, Entry>,
    /// Completions held back, by the step at which they are due.
    due: BTreeMap<u64, Vec<u64>>,
    stalled_until: u64,
    /// Completions that came during a stall.
    stalled: Vec<Completion>,
    connected: Vec<PathId>,
    /// Paths that a plan took down, and the step at which they come up again.
    down: HashMap<PathId, u64>,
    fenced: HashSet<PathId>,
    stopped: bool,
    /// Paths that owe a `writable`.
    owed: HashSet<PathId>,
    pub(super) violations: Vec<String>,
}

#[derive(Debug)]
struct Entry {
    path: PathId,
    fault: Option<Fault>,
    stage: Stage,
}

#[derive(Debug)]
enum Stage {
    /// The inner transport has it.
    Inner,
    /// The inner transport has completed it, and nobody has been told.
    Held(Result<Level, SliceError>),
    /// It went nowhere.
    Lost,
}

impl Ledger {
    pub(super) fn new(plan: Plan) -> Self {
        Self { plan, ..Self::default() }
    }

    pub(super) fn connected(&mut self, paths: impl IntoIterator<Item = PathId>) {
        self.connected.extend(paths);
    }

    /// Begins a call of `submit` that offers `count` slices: how many may be taken.
    pub(super) fn begin_call(&mut self, path: PathId, count: usize) -> Result<usize, Error> {
        self.check(path)?;
        let mut limit = self.plan.calls.get(&self.calls).copied().unwrap_or(usize::MAX);
        self.calls += 1;
        if self.is_stalled() {
            limit = 0;
        }
        if limit < count {
            self.owed.insert(path);
        }
        Ok(limit.min(count))
    }

    /// Whether a path can be used, as far as the plan goes.
    pub(super) fn check(&self, path: PathId) -> Result<(), Error> {
        if self.down.contains_key(&path) {
            return Err(Error::new(ErrorKind::PathFailed, "the plan has taken the path down"));
        }
        Ok(())
    }

    /// Whether the next slice goes to the inner transport.
    pub(super) fn next_goes_in(&self) -> bool {
        let planned = || self.plan.slices.get(&self.slices);
        let next = self.returned.front().map_or_else(planned, Option::as_ref);
        !matches!(next, Some(Fault::Refuse(_) | Fault::Lose))
    }

    /// Takes a slice. One that does not go to the inner transport is refused here, or lost.
    pub(super) fn take(&mut self, path: PathId, token: u64, reports: &mut Reports) {
        let fault = self.returned.pop_front().unwrap_or_else(|| {
            self.slices += 1;
            self.plan.slices.get(&(self.slices - 1)).cloned()
        });
        // What is submitted while the path is being fenced may still be taken, and nobody fences it again.
        let over = self.stopped || self.fenced.contains(&path);
        let fault = fault.filter(|fault| !over || !matches!(fault, Fault::Delay(_) | Fault::LoseCompletion));
        let stage = match &fault {
            Some(Fault::Lose) if over => {
                let error = Error::new(ErrorKind::Flushed, "the path was fenced");
                let result = Err(SliceError { error, far_end: FarEnd::Quiet });
                reports.completions.push(Completion { token, result });
                return;
            }
            Some(Fault::Refuse(failure)) => {
                let result = Err(SliceError { error: failure.error(), far_end: failure.far_end() });
                reports.completions.push(Completion { token, result });
                return;
            }
            Some(Fault::Lose) => Stage::Lost,
            _ => Stage::Inner,
        };
        self.insert(token, Entry { path, fault, stage });
    }

    /// Takes a notification, which has no faults of its own.
    pub(super) fn take_notification(&mut self, path: PathId, token: u64) {
        self.insert(token, Entry { path, fault: None, stage: Stage::Inner });
    }

    fn insert(&mut self, token: u64, entry: Entry) {
        if self.entries.insert(token, entry).is_some() {
            self.violations.push(format!("token {token} was submitted again before it was completed"));
        }
    }

    /// The inner transport did not take these, which [`Ledger::take`] sent there.
    pub(super) fn give_back(&mut self, tokens: impl DoubleEndedIterator<Item = u64>) {
        for token in tokens.rev() {
            if let Some(entry) = self.entries.remove(&token) {
                self.returned.push_front(entry.fault);
            }
        }
    }

    /// The inner transport did not take a notification.
    pub(super) fn forget(&mut self, token: u64) {
        self.entries.remove(&token);
    }

    /// The inner transport completes a slice or notification.
    pub(super) fn completed(&mut self, completion: &Completion, reports: &mut Reports) {
        let token = completion.token;
        let Some(entry) = self.entries.get_mut(&token) else {
            self.violations.push(format!("token {token} was completed twice, or never submitted"));
            return;
        };
        if !matches!(entry.stage, Stage::Inner) {
            self.violations.push(format!("token {token} was completed twice"));
            return;
        }
        let result = match (&entry.fault, &completion.result) {
            (Some(Fault::FailAfter(failure)), Ok(_)) => {
                Err(SliceError { error: failure.error(), far_end: failure.far_end() })
            }
            (_, result) => result.clone(),
        };
        match &entry.fault {
            Some(Fault::Delay(steps)) => {
                self.due.entry(self.step + steps).or_default().push(token);
                entry.stage = Stage::Held(result);
            }
            Some(Fault::LoseCompletion) => entry.stage = Stage::Held(result),
            _ => self.finish(token, result, reports),
        }
    }

    /// The inner transport has room on a path again.
    pub(super) fn writable(&mut self, path: PathId, reports: &mut Reports) {
        if self.is_stalled() || self.down.contains_key(&path) {
            self.owed.insert(path);
        } else {
            reports.writable.push(path);
        }
    }

    /// Time goes on.
    pub(super) fn step(&mut self) -> Reports {
        self.step += 1;
        let mut reports = Reports::default();
        match self.plan.steps.get(&self.step).copied() {
            Some(Disturbance::Stall(steps)) => self.stalled_until = self.stalled_until.max(self.step + steps),
            Some(Disturbance::Down { path, steps }) => {
                if let Some(path) =
                    self.connected.get(path).copied().filter(|path| !self.fenced.contains(path))
                {
                    self.take_down(path, steps, &mut reports);
                }
            }
            None => {}
        }
        let risen: Vec<_> =
            self.down.iter().filter(|(_, until)| **until <= self.step).map(|(path, _)| *path).collect();
        for path in risen {
            self.down.remove(&path);
            reports.paths.push((path, PathState::Up));
        }
        if !self.is_stalled() {
            reports.completions.append(&mut self.stalled);
            let later = self.due.split_off(&(self.step + 1));
            for token in std::mem::replace(&mut self.due, later).into_values().flatten() {
                self.release(token, &mut reports);
            }
            let free: Vec<_> =
                self.owed.iter().copied().filter(|path| !self.down.contains_key(path)).collect();
            for path in free {
                self.owed.remove(&path);
                reports.writable.push(path);
            }
        }
        reports
    }

    fn take_down(&mut self, path: PathId, steps: u64, reports: &mut Reports) {
        let error = Error::new(ErrorKind::PathFailed, "the plan has taken the path down");
        self.down.insert(path, self.step + steps);
        for token in self.on_path(path) {
            let Some(entry) = self.entries.get_mut(&token) else { continue };
            match entry.stage {
                // Its near end is not quiet before the inner transport says so.
                Stage::Inner => {
                    let kind = ErrorKind::PathFailed;
                    entry.fault = Some(Fault::FailAfter(super::plan::Failure { kind, quiet: false }));
                }
                Stage::Held(_) => self.fail(token, &error, FarEnd::Unconfirmed, reports),
                Stage::Lost => self.fail(token, &error, FarEnd::Quiet, reports),
            }
        }
        reports.paths.push((path, PathState::Down(error)));
    }

    /// A path is fenced: what the inner transport will not report is reported here.
    pub(super) fn fence(&mut self, path: PathId) -> Reports {
        let mut reports = Reports::default();
        self.fenced.insert(path);
        self.down.remove(&path);
        self.owed.remove(&path);
        self.flush(path, &mut reports);
        reports
    }

    /// Everything has ended: what is left is reported.
    pub(super) fn stop(&mut self) -> Reports {
        let mut reports = Reports::default();
        self.stopped = true;
        self.stalled_until = 0;
        reports.completions.append(&mut self.stalled);
        let paths: HashSet<_> = self.entries.values().map(|entry| entry.path).collect();
        for path in paths {
            self.fenced.insert(path);
            self.flush(path, &mut reports);
        }
        reports
    }

    fn flush(&mut self, path: PathId, reports: &mut Reports) {
        let error = Error::new(ErrorKind::Flushed, "the path was fenced");
        for token in self.on_path(path) {
            let Some(entry) = self.entries.get_mut(&token) else { continue };
            match entry.stage {
                // The inner transport reports it now, and nothing holds that back any more.
                Stage::Inner => {
                    entry.fault.take_if(|fault| matches!(fault, Fault::Delay(_) | Fault::LoseCompletion));
                }
                Stage::Held(_) | Stage::Lost => self.fail(token, &error, FarEnd::Quiet, reports),
            }
        }
    }

    fn on_path(&self, path: PathId) -> Vec<u64> {
        let mut tokens: Vec<_> =
            self.entries.iter().filter(|(_, entry)| entry.path == path).map(|(token, _)| *token).collect();
        tokens.sort_unstable();
        tokens
    }

    fn release(&mut self, token: u64, reports: &mut Reports) {
        // It may have been flushed, and its token used again, since it was held back.
        if let Some(entry) = self.entries.get_mut(&token)
            && matches!(entry.stage, Stage::Held(_))
            && matches!(entry.fault, Some(Fault::Delay(_)))
            && let Some(Entry { stage: Stage::Held(result), .. }) = self.entries.remove(&token)
        {
            reports.completions.push(Completion { token, result });
        }
    }

    fn fail(&mut self, token: u64, error: &Error, far_end: FarEnd, reports: &mut Reports) {
        self.entries.remove(&token);
        let error = error.clone();
        reports.completions.push(Completion { token, result: Err(SliceError { error, far_end }) });
    }

    fn finish(&mut self, token: u64, result: Result<Level, SliceError>, reports: &mut Reports) {
        let path = self.entries.remove(&token).map(|entry| entry.path);
        let completion = Completion { token, result };
        if self.is_stalled() && !path.is_some_and(|path| self.fenced.contains(&path)) {
            self.stalled.push(completion);
        } else {
            reports.completions.push(completion);
        }
    }

    fn is_stalled(&self) -> bool {
        self.step < self.stalled_until
    }
}
