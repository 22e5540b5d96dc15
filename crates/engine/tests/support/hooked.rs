//! A transport that a test can stop in the middle of a call, or make fail there.

use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

use posthorse_core::{
    Capabilities, Deadline, Grant, GrantToken, Path, PathId, RegionId, RegisteredRegion, Result, SegmentDesc,
    Slice, Transport, TransportContext, TransportEvents,
};
use posthorse_testkit::MemoryTransport;
use serde_json::Value;

/// What a hook does in place of the call, if anything. Calls are counted from zero.
type Hook<T> = Box<dyn Fn(usize, PathId, &dyn TransportEvents) -> Option<Result<T>> + Send + Sync>;

/// As [`Hook`], with the slices that are submitted.
type SubmitHook =
    Box<dyn Fn(usize, PathId, &[Slice], &dyn TransportEvents) -> Option<Result<usize>> + Send + Sync>;

/// What is done in place of a cancel.
type CancelHook = Box<dyn Fn(&mut dyn FnMut(u64) -> bool, &dyn TransportEvents) + Send + Sync>;

/// A memory transport under a name of its own, with hooks.
pub struct Hooked {
    inner: Arc<MemoryTransport>,
    name: String,
    context: OnceLock<TransportContext>,
    pub connect: Option<Hook<Vec<Path>>>,
    pub submit: Option<SubmitHook>,
    pub notify: Option<Hook<()>>,
    pub help: Option<Box<dyn Fn() -> bool + Send + Sync>>,
    pub cancel: Option<CancelHook>,
    /// Called before the transport stops.
    pub stop: Option<Box<dyn Fn() + Send + Sync>>,
    connects: AtomicUsize,
    submits: AtomicUsize,
    notifies: AtomicUsize,
    pub connected: AtomicUsize,
    pub disconnected: AtomicUsize,
    pub regions: Mutex<Vec<RegionId>>,
}

impl Hooked {
    pub fn new(inner: Arc<MemoryTransport>, name: &str) -> Self {
        Self {
            inner,
            name: name.to_owned(),
            context: OnceLock::new(),
            connect: None,
            submit: None,
            notify: None,
            help: None,
            cancel: None,
            stop: None,
            connects: AtomicUsize::new(0),
            submits: AtomicUsize::new(0),
            notifies: AtomicUsize::new(0),
            connected: AtomicUsize::new(0),
            disconnected: AtomicUsize::new(0),
            regions: Mutex::default(),
        }
    }

    fn hook<T>(&self, hook: Option<&Hook<T>>, calls: &AtomicUsize, path: PathId) -> Option<Result<T>> {
        let call = calls.fetch_add(1, Ordering::SeqCst);
        hook.and_then(|hook| hook(call, path, self.events()))
    }

    /// Where it reports, once it was started.
    pub fn events(&self) -> &dyn TransportEvents {
        &*self.context.get().unwrap().events
    }
}

impl fmt::Debug for Hooked {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Hooked({})", self.name)
    }
}

impl Transport for Hooked {
    fn name(&self) -> &str {
        &self.name
    }

    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities()
    }

    fn start(&self, context: TransportContext) -> Result<Value> {
        self.context.set(context.clone()).unwrap();
        self.inner.start(context)
    }

    fn stop(&self) {
        self.stop.iter().for_each(|hook| hook());
        self.inner.stop();
    }

    fn register(&self, region: &RegisteredRegion) -> Result<Value> {
        self.regions.lock().unwrap().push(region.id);
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
        let instead = self.hook(self.connect.as_ref(), &self.connects, PathId(0));
        let paths = instead.unwrap_or_else(|| {
            let mut peer = peer.clone();
            let published = peer.transports.get(&self.name).cloned().unwrap_or_default();
            peer.transports.insert(MemoryTransport::NAME.to_owned(), published);
            self.inner.connect(&peer, deadline)
        });
        self.connected.fetch_add(paths.as_ref().map_or(0, Vec::len), Ordering::SeqCst);
        paths
    }

    fn disconnect(&self, path: PathId) {
        self.disconnected.fetch_add(1, Ordering::SeqCst);
        self.inner.disconnect(path);
    }

    unsafe fn submit(&self, path: PathId, slices: &[Slice]) -> Result<usize> {
        let call = self.submits.fetch_add(1, Ordering::SeqCst);
        let instead = self.submit.as_ref().and_then(|hook| hook(call, path, slices, self.events()));
        // SAFETY: the caller's promise.
        instead.unwrap_or_else(|| unsafe { self.inner.submit(path, slices) })
    }

    fn help(&self) -> bool {
        self.help.as_ref().map_or_else(|| self.inner.help(), |hook| hook())
    }

    fn notify(&self, path: PathId, token: u64, data: &[u8]) -> Result<()> {
        let instead = self.hook(self.notify.as_ref(), &self.notifies, path);
        instead.unwrap_or_else(|| self.inner.notify(path, token, data))
    }

    fn cancel(&self, path: PathId, which: &mut dyn FnMut(u64) -> bool) {
        match &self.cancel {
            Some(hook) => hook(which, self.events()),
            None => self.inner.cancel(path, which),
        }
    }

    fn fence(&self, path: PathId) {
        self.inner.fence(path);
    }
}
