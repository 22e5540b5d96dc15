//! A complete transport within one process: copies between the memory of several engines.
//!
//! It is what the engine's tests run on, and the shortest example of a [`Transport`]: everything here is what
//! the contract asks for, and nothing is there for speed.

mod copy;
mod hub;
mod worker;

use std::sync::Arc;

use posthorse_core::{
    Capabilities, Deadline, Error, ErrorKind, Grants, Level, Path, PathId, PathState, RegionId,
    RegisteredRegion, Result, SegmentDesc, Slice, Transport, TransportContext,
};
use serde_json::{Value, json};

use hub::Endpoint;
pub use hub::MemoryHub;
use worker::{Job, Worker};

/// Copies between engines that share a [`MemoryHub`].
///
/// A worker thread of its own, `memory-worker`, carries slices out in order, so that queues fill, cancelling
/// finds something to cancel, and fencing something to fence.
#[derive(Debug)]
pub struct MemoryTransport {
    hub: MemoryHub,
    worker: Worker,
}

impl MemoryTransport {
    /// The name under which it is installed unless another is asked for.
    pub const NAME: &'static str = "memory";

    /// The longest notification, in bytes.
    pub const MAX_NOTIFICATION: usize = 64 << 10;

    pub(crate) fn new(hub: MemoryHub, queue: usize) -> Self {
        Self { hub, worker: Worker::new(queue) }
    }
}

impl Transport for MemoryTransport {
    fn name(&self) -> &str {
        Self::NAME
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            same_host_only: true,
            device_memory: false,
            grants: Grants::Checked,
            notify: true,
            checksum: true,
            level: Level::Visible,
            max_slice: 1 << 30,
            preferred_slice: 1 << 20,
        }
    }

    fn start(&self, context: TransportContext) -> Result<Value> {
        let endpoint = Arc::new(Endpoint::new(context));
        self.worker.start(Arc::clone(&endpoint))?;
        self.hub.attach(endpoint);
        Ok(json!({ "hub": self.hub.id() }))
    }

    fn stop(&self) {
        if let Some(endpoint) = self.worker.stop() {
            self.hub.detach(&endpoint);
        }
    }

    fn register(&self, region: &RegisteredRegion) -> Result<Value> {
        // Nothing to prepare: what peers may touch is the gate's to say, at each access.
        match region.region.view().host() {
            Some(_) => Ok(Value::Null),
            None => Err(Error::new(ErrorKind::Unsupported, "only host memory can be copied")),
        }
    }

    fn unregister(&self, _: RegionId, _: Deadline) -> Result<()> {
        // Peers are kept out by the gate, which waits for those inside; local ends are whoever submitted's.
        Ok(())
    }

    fn connect(&self, peer: &SegmentDesc, _: Deadline) -> Result<Vec<Path>> {
        let published = peer.transports.get(self.name()).ok_or_else(|| {
            Error::new(ErrorKind::NoPath, "the peer does not have this transport").with_peer(&*peer.name)
        })?;
        let hub = published.get("hub").and_then(Value::as_u64).ok_or_else(|| {
            let what = format!("the peer publishes {published}; accepted: {{\"hub\": N}}");
            Error::new(ErrorKind::Malformed, what).with_peer(&*peer.name)
        })?;
        if hub != self.hub.id() {
            let what = format!("the peer is on hub {hub}, we are on {}", self.hub.id());
            return Err(Error::new(ErrorKind::PeerUnreachable, what).with_peer(&*peer.name));
        }
        let endpoint = self.hub.find(peer)?;
        let own = self.worker.endpoint()?;
        own.context.hello.agree(&endpoint.context.hello).map_err(|error| error.with_peer(&*peer.name))?;
        Ok(vec![Path {
            id: self.worker.connect(endpoint)?,
            local_device: own.context.name.to_string(),
            remote_device: peer.name.clone(),
            numa_node: None,
            bandwidth: 0,
            state: PathState::Up,
        }])
    }

    fn disconnect(&self, path: PathId) {
        self.worker.fence(path);
        self.worker.forget(path);
    }

    unsafe fn submit(&self, path: PathId, slices: &[Slice]) -> Result<usize> {
        // The caller's promise about the local memory goes with each job to its end.
        self.worker.enqueue(path, slices.iter().map(|slice| Job::Slice(*slice)))
    }

    fn notify(&self, path: PathId, token: u64, data: &[u8]) -> Result<()> {
        if data.len() > Self::MAX_NOTIFICATION {
            let what =
                format!("a notification of {} bytes; accepted: {}", data.len(), Self::MAX_NOTIFICATION);
            return Err(Error::new(ErrorKind::TooLarge, what));
        }
        match self.worker.enqueue(path, [Job::Notification(token, data.into())])? {
            0 => Err(Error::new(ErrorKind::QueueFull, "the path's queue is full")),
            _ => Ok(()),
        }
    }

    fn cancel(&self, path: PathId, which: &mut dyn FnMut(u64) -> bool) {
        self.worker.cancel(path, which);
    }

    fn fence(&self, path: PathId) {
        self.worker.fence(path);
    }
}

impl Drop for MemoryTransport {
    fn drop(&mut self) {
        self.stop();
    }
}
