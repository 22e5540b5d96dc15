//! The shell around an inner transport: it asks the ledger, and does what that says.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use posthorse_core::{
    Capabilities, Completion, Deadline, Grant, GrantDesc, GrantToken, Path, PathId, PathState, Region,
    RegionId, RegisteredRegion, RemoteKey, Result, SegmentDesc, Slice, Transport, TransportContext,
    TransportEvents,
};
use serde_json::Value;

use super::ledger::{Ledger, Reports};
use super::plan::Plan;

/// Wraps a transport, and injects the faults of a [`Plan`]: delays, loss, reordering, failures, partial acceptance,
/// stalls, paths that go down and up. It goes by the inner transport's name.
///
/// Time is counted in steps, which the test drives by [`FaultTransport::step`]; nothing waits. What the contract
/// promises holds for everything that is reported: the near end of a failed slice is quiet, since the failure is
/// reported after the inner transport has ended the slice. The wrapper also watches that the inner transport
/// completes each slice exactly once: see [`FaultTransport::violations`].
#[derive(Debug)]
pub struct FaultTransport {
    inner: Arc<dyn Transport>,
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    ledger: Mutex<Ledger>,
    events: Mutex<Option<Arc<dyn TransportEvents>>>,
}

impl FaultTransport {
    /// `inner`, with the faults of `plan`.
    pub fn new(inner: Arc<dyn Transport>, plan: Plan) -> Arc<Self> {
        let shared = Shared { ledger: Mutex::new(Ledger::new(plan)), events: Mutex::new(None) };
        Arc::new(Self { inner, shared: Arc::new(shared) })
    }

    /// Time goes on by one step: what is due is reported, on this thread.
    pub fn step(&self) {
        let reports = self.shared.ledger().step();
        self.shared.report(reports);
    }

    /// What the inner transport (or its caller) did against the contract, so far: completions of slices that were not
    /// submitted or had been completed, tokens used twice at a time.
    pub fn violations(&self) -> Vec<String> {
        self.shared.ledger().violations.clone()
    }
}

impl Shared {
    fn ledger(&self) -> MutexGuard<'_, Ledger> {
        self.ledger.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reports, without any lock held.
    fn report(&self, reports: Reports) {
        let events = self.events.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let Some(events) = events else { return };
        if !reports.completions.is_empty() {
            events.completed(&reports.completions);
        }
        for (path, state) in &reports.paths {
            events.path_changed(*path, state);
        }
        for path in reports.writable {
            events.writable(path);
        }
    }
}

impl Transport for FaultTransport {
    fn name(&self) -> &str {
        self.inner.name()
    }

    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities()
    }

    fn start(&self, mut context: TransportContext) -> Result<Value> {
        *self.shared.events.lock().unwrap_or_else(PoisonError::into_inner) =
            Some(Arc::clone(&context.events));
        context.events = Arc::new(Intercept { shared: Arc::clone(&self.shared), events: context.events });
        self.inner.start(context)
    }

    fn stop(&self) {
        self.inner.stop();
        let reports = self.shared.ledger().stop();
        self.shared.report(reports);
    }

    fn register(&self, region: &RegisteredRegion) -> Result<Value> {
        self.inner.register(region)
    }

    fn unregister(&self, region: RegionId, deadline: Deadline) -> Result<()> {
        self.inner.unregister(region, deadline)
    }

    fn grant(&self, grant: &Grant<'_>) -> Result<Value> {
        self.inner.grant(grant)
    }

    fn revoke(&self, token: GrantToken, deadline: Deadline) -> Result<()> {
        self.inner.revoke(token, deadline)
    }

    fn connect(&self, peer: &SegmentDesc, deadline: Deadline) -> Result<Vec<Path>> {
        let paths = self.inner.connect(peer, deadline)?;
        self.shared.ledger().connected(paths.iter().map(|path| path.id));
        Ok(paths)
    }

    fn disconnect(&self, path: PathId) {
        let reports = self.shared.ledger().fence(path);
        self.inner.disconnect(path);
        self.shared.report(reports);
    }

    fn import(&self, path: PathId, attributes: &Value) -> Result<RemoteKey> {
        self.inner.import(path, attributes)
    }

    fn lease(&self, path: PathId, grant: &GrantDesc) -> Result<Arc<dyn Region>> {
        self.inner.lease(path, grant)
    }

    unsafe fn submit(&self, path: PathId, slices: &[Slice]) -> Result<usize> {
        let mut reports = Reports::default();
        let limit = self.shared.ledger().begin_call(path, slices.len())?;
        let mut taken = 0;
        let mut outcome = Ok(());
        while taken < limit {
            // What goes to the inner transport goes there together, up to the next slice that does not.
            let run = {
                let mut ledger = self.shared.ledger();
                let mut run = 0;
                while taken + run < limit && ledger.next_goes_in() {
                    ledger.take(path, slices[taken + run].token, &mut reports);
                    run += 1;
                }
                if run == 0 {
                    ledger.take(path, slices[taken].token, &mut reports);
                    taken += 1;
                    continue;
                }
                run
            };
            let offered = &slices[taken..taken + run];
            // SAFETY: the caller's promise for these slices, which lasts until the completions that it sees, and
            // those come after the inner transport's.
            let accepted = match unsafe { self.inner.submit(path, offered) } {
                Ok(accepted) => accepted,
                Err(error) => {
                    outcome = Err(error);
                    0
                }
            };
            taken += accepted;
            if accepted < run {
                self.shared.ledger().give_back(offered[accepted..].iter().map(|slice| slice.token));
                break;
            }
        }
        self.shared.report(reports);
        match outcome {
            // What was taken has been taken: the next call tells of the failure.
            Err(error) if taken == 0 => Err(error),
            _ => Ok(taken),
        }
    }

    fn help(&self) -> bool {
        self.inner.help()
    }

    fn notify(&self, path: PathId, token: u64, data: &[u8]) -> Result<()> {
        {
            let mut ledger = self.shared.ledger();
            ledger.check(path)?;
            ledger.take_notification(path, token);
        }
        self.inner.notify(path, token, data).inspect_err(|_| self.shared.ledger().forget(token))
    }

    fn cancel(&self, path: PathId, which: &mut dyn FnMut(u64) -> bool) {
        self.inner.cancel(path, which);
    }

    fn fence(&self, path: PathId) {
        let reports = self.shared.ledger().fence(path);
        self.inner.fence(path);
        self.shared.report(reports);
    }
}

/// Stands between the inner transport and whom it reports to.
#[derive(Debug)]
struct Intercept {
    shared: Arc<Shared>,
    events: Arc<dyn TransportEvents>,
}

impl TransportEvents for Intercept {
    fn completed(&self, completions: &[Completion]) {
        let mut reports = Reports::default();
        {
            let mut ledger = self.shared.ledger();
            for completion in completions {
                ledger.completed(completion, &mut reports);
            }
        }
        self.shared.report(reports);
    }

    fn writable(&self, path: PathId) {
        let mut reports = Reports::default();
        self.shared.ledger().writable(path, &mut reports);
        self.shared.report(reports);
    }

    fn path_changed(&self, path: PathId, state: &PathState) {
        self.events.path_changed(path, state);
    }

    fn notified(&self, peer: &str, data: &[u8]) -> Result<()> {
        self.events.notified(peer, data)
    }
}
