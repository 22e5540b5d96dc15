//! Where the engines of one process find each other.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard};

use posthorse_core::{Error, ErrorKind, Result, SegmentDesc, TransportContext};

use super::MemoryTransport;

/// Slices and notifications that a path holds, unless another number is asked for.
const QUEUE: usize = 256;

/// Connects [`MemoryTransport`]s: those of one hub reach each other by segment name.
#[derive(Debug, Clone)]
pub struct MemoryHub {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    id: u64,
    endpoints: Mutex<HashMap<Arc<str>, Arc<Endpoint>>>,
}

/// A transport that serves.
#[derive(Debug)]
pub(super) struct Endpoint {
    pub(super) context: TransportContext,
    serves: RwLock<bool>,
}

impl MemoryHub {
    /// A hub without engines.
    pub fn new() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let id = NEXT.fetch_add(1, Ordering::Relaxed);
        Self { shared: Arc::new(Shared { id, endpoints: Mutex::default() }) }
    }

    /// A transport on this hub.
    pub fn transport(&self) -> Arc<MemoryTransport> {
        self.transport_with_queue(QUEUE)
    }

    /// A transport on this hub whose paths hold `queue` slices and notifications, at least one.
    pub fn transport_with_queue(&self, queue: usize) -> Arc<MemoryTransport> {
        Arc::new(MemoryTransport::new(self.clone(), queue.max(1)))
    }

    pub(super) fn id(&self) -> u64 {
        self.shared.id
    }

    pub(super) fn attach(&self, endpoint: Arc<Endpoint>) {
        self.endpoints().insert(Arc::clone(&endpoint.context.name), endpoint);
    }

    pub(super) fn detach(&self, endpoint: &Arc<Endpoint>) {
        // Waits for whoever copies a piece at this moment.
        *endpoint.serves.write().unwrap_or_else(PoisonError::into_inner) = false;
        let mut endpoints = self.endpoints();
        // A successor may have come under the same name.
        if endpoints.get(&endpoint.context.name).is_some_and(|there| Arc::ptr_eq(there, endpoint)) {
            endpoints.remove(&endpoint.context.name);
        }
    }

    pub(super) fn find(&self, peer: &SegmentDesc) -> Result<Arc<Endpoint>> {
        let endpoint = self.endpoints().get(&*peer.name).cloned().ok_or_else(|| {
            Error::new(ErrorKind::PeerUnreachable, "nobody of this name is on the hub").with_peer(&*peer.name)
        })?;
        match peer.incarnation {
            Some(expected) if expected != endpoint.context.incarnation => {
                let what = "the peer has been started again since it was described";
                Err(Error::new(ErrorKind::PeerRestarted, what).with_peer(&*peer.name))
            }
            _ => Ok(endpoint),
        }
    }

    fn endpoints(&self) -> MutexGuard<'_, HashMap<Arc<str>, Arc<Endpoint>>> {
        self.shared.endpoints.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Default for MemoryHub {
    fn default() -> Self {
        Self::new()
    }
}

impl Endpoint {
    pub(super) const fn new(context: TransportContext) -> Self {
        Self { context, serves: RwLock::new(true) }
    }

    /// Keeps it serving for as long as the guard is held: for one piece.
    pub(super) fn visit(&self) -> Result<RwLockReadGuard<'_, bool>> {
        let serves = self.serves.read().unwrap_or_else(PoisonError::into_inner);
        if !*serves {
            return Err(
                Error::new(ErrorKind::PeerGone, "the peer has stopped").with_peer(&*self.context.name)
            );
        }
        Ok(serves)
    }
}
