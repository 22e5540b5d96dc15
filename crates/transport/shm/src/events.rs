//! Where this transport reports.

use std::cell::Cell;
use std::sync::Arc;

use posthorse_core::{AtWork, Completion, PathId, PathState, Result, TransportEvents};

thread_local! {
    static IS_OWN: Cell<bool> = const { Cell::new(false) };
}

/// Notes that this thread is one of a transport's own: who calls the transport on it does so from within an event.
pub(crate) fn note_own_thread() {
    IS_OWN.set(true);
}

/// Whether this thread is a transport's own, on which nobody may wait for what such threads do.
pub(crate) fn is_own_thread() -> bool {
    IS_OWN.get()
}

/// Passes events on. Whatever is called from within one finds its thread [at work](AtWork), and so does not wait for
/// what is being reported.
#[derive(Debug)]
pub(crate) struct Events(pub(crate) Arc<dyn TransportEvents>);

impl TransportEvents for Events {
    fn completed(&self, completions: &[Completion]) {
        let _at_work = AtWork::begin();
        self.0.completed(completions);
    }

    fn writable(&self, path: PathId) {
        let _at_work = AtWork::begin();
        self.0.writable(path);
    }

    fn path_changed(&self, path: PathId, state: &PathState) {
        let _at_work = AtWork::begin();
        self.0.path_changed(path, state);
    }

    fn notified(&self, peer: &str, data: &[u8]) -> Result<()> {
        let _at_work = AtWork::begin();
        self.0.notified(peer, data)
    }
}
