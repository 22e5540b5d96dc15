//! What the parts of a running transport share.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::RwLock;
use posthorse_core::{
    AtWork, Completion, Deadline, Error, ErrorKind, PathId, PathState, Result, TransportContext,
};

use crate::config::RdmaConfig;
use crate::connection::Connection;
use crate::rail::Rail;
use crate::regions::Regions;
use crate::served::Served;
use crate::workers::Workers;

/// See the module's documentation.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) config: RdmaConfig,
    pub(crate) context: TransportContext,
    pub(crate) rails: Vec<Arc<Rail>>,
    pub(crate) regions: Regions,
    /// By the key of their completion queues, which is the number of their paths.
    pub(crate) connections: RwLock<HashMap<u64, Arc<Connection>>>,
    pub(crate) served: Served,
    pub(crate) workers: Workers,
    pub(crate) next_number: AtomicU64,
    pub(crate) stopped: AtomicBool,
}

impl Shared {
    /// Passes an event on. Whatever is called from within one finds its thread at work.
    pub(crate) fn report(&self, completions: &[Completion]) {
        if !completions.is_empty() {
            let _at_work = AtWork::begin();
            self.context.events.completed(completions);
        }
    }

    pub(crate) fn writable(&self, path: PathId) {
        let _at_work = AtWork::begin();
        self.context.events.writable(path);
    }

    pub(crate) fn path_changed(&self, path: PathId, state: &PathState) {
        let _at_work = AtWork::begin();
        self.context.events.path_changed(path, state);
    }

    pub(crate) fn notified(&self, from: &str, data: &[u8]) -> Result<()> {
        let _at_work = AtWork::begin();
        self.context.events.notified(from, data)
    }

    pub(crate) fn connection(&self, key: u64) -> Option<Arc<Connection>> {
        self.connections.read().get(&key).cloned()
    }

    pub(crate) fn all_connections(&self) -> Vec<Arc<Connection>> {
        self.connections.read().values().cloned().collect()
    }

    pub(crate) fn forget(&self, key: u64) {
        self.connections.write().remove(&key);
    }

    pub(crate) fn is_stopped(&self) -> bool {
        self.stopped.load(Ordering::Acquire)
    }

    /// Asks a peer, for no longer than it may be silent.
    pub(crate) fn ask(&self, peer: &str, topic: &str, body: &[u8], deadline: Deadline) -> Result<Vec<u8>> {
        let deadline = deadline.min(Deadline::after(self.config.liveness()));
        self.context.control.request(peer, topic, body, deadline)
    }

    /// When a rail that failed so often is tried again.
    pub(crate) fn pause(&self, failures: u32) -> Duration {
        self.config.retry_after() * (1 << failures.saturating_sub(1).min(4))
    }
}

pub(crate) fn stopped() -> Error {
    Error::new(ErrorKind::Closed, "transport rdma is not started, or was stopped")
}
