//! The transport as the engine sees it.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::{Mutex, RwLock};
use posthorse_core::{
    Capabilities, Completion, Deadline, Error, ErrorKind, FarEnd, Grants, HostView, Level, Path, PathId,
    PathState, RegionId, RegisteredRegion, Result, SegmentDesc, Slice, SliceError, Transport,
    TransportContext, View,
};
use posthorse_memory::ForkGuard;
use posthorse_segment::TcpAttributes;
use serde::Deserialize;
use serde_json::Value;

use crate::address::{listen, resolve};
use crate::config::TcpConfig;
use crate::hello::LaneClass;
use crate::lane::{Driver, Lane, want};
use crate::path::{PathCore, TcpPath};
use crate::reactor::{Command, Handle, Reactor, Shared};
use crate::wire::MAX_SLICE;

/// The name under which this transport publishes.
const NAME: &str = "tcp";

/// The slice length from which a longer one gains nothing.
const PREFERRED_SLICE: u64 = 4 << 20;

/// Mooncake's data plane in which a WRITE counts only when it is acknowledged. It is not served yet, so such a
/// peer's connection is closed; towards version 1 that would look like success.
const FOREIGN_VERSION: u32 = 2;

/// Moves bytes over TCP. See the crate's documentation.
#[derive(Debug)]
pub struct TcpTransport {
    config: Arc<TcpConfig>,
    running: Mutex<Option<Running>>,
    paths: RwLock<HashMap<PathId, Arc<TcpPath>>>,
    /// Lanes of paths that were disconnected, until they have ended.
    leaving: Mutex<Vec<Arc<Lane>>>,
    next_path: AtomicU64,
    fork: ForkGuard,
}

#[derive(Debug)]
struct Running {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

impl TcpTransport {
    /// A transport with this configuration. It does nothing before it is started.
    ///
    /// # Errors
    /// `InvalidConfig`, naming the key, the value and what is accepted; `LimitReached` when the system gives no memory.
    pub fn new(config: TcpConfig) -> Result<Self> {
        config.validate()?;
        Ok(Self {
            config: Arc::new(config),
            running: Mutex::new(None),
            paths: RwLock::new(HashMap::new()),
            leaving: Mutex::new(Vec::new()),
            next_path: AtomicU64::new(1),
            fork: ForkGuard::new()?,
        })
    }

    /// A path, to the process that made it.
    fn path(&self, id: PathId) -> Result<Arc<TcpPath>> {
        self.fork.check()?;
        self.paths.read().get(&id).cloned().ok_or_else(|| {
            Error::new(ErrorKind::NotFound, format!("transport tcp has no path {id}")).with_device(NAME)
        })
    }

    /// The lanes that have not ended.
    fn lanes(&self) -> Vec<Arc<Lane>> {
        let paths = self.paths.read();
        let mut leaving = self.leaving.lock();
        leaving.retain(|lane| !lane.has_ended());
        paths.values().flat_map(|path| &path.lanes).chain(&*leaving).cloned().collect()
    }

    /// Makes a path and has the reactors open its lanes.
    fn open(&self, peer: &SegmentDesc, addresses: Vec<std::net::SocketAddr>) -> Result<Arc<TcpPath>> {
        let session = [random()?, random()?];
        let running = self.running.lock();
        let shared = &running.as_ref().ok_or_else(not_started)?.shared;
        let config = &self.config;
        let id = PathId(self.next_path.fetch_add(1, Ordering::Relaxed));
        let count = config.express_lanes + config.bulk_lanes();
        let core = Arc::new(PathCore::new(
            id,
            peer.name.clone(),
            addresses,
            peer.incarnation,
            session,
            Arc::clone(config),
            shared.context.clone(),
            count,
        ));
        let lanes: Vec<Arc<Lane>> = (0..count)
            .map(|number| {
                let class = if number < config.express_lanes { LaneClass::Express } else { LaneClass::Bulk };
                let key = shared.next_key.fetch_add(1, Ordering::Relaxed);
                let reactor = &shared.handles[(id.0 as usize + number) % shared.handles.len()];
                Arc::new(Lane::new(key, number as u16, class, Arc::clone(&core), Arc::clone(reactor)))
            })
            .collect();
        let _ = core.lanes.set(lanes.iter().map(Arc::downgrade).collect());
        let path = Arc::new(TcpPath { core, lanes });
        // Under the lock of `running`, so that `stop` finds every path there is.
        self.paths.write().insert(id, Arc::clone(&path));
        for lane in &path.lanes {
            lane.reactor.push(Command::Lane(Arc::clone(lane)));
        }
        Ok(path)
    }
}

impl Transport for TcpTransport {
    fn name(&self) -> &str {
        NAME
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            same_host_only: false,
            device_memory: false,
            grants: Grants::Checked,
            notify: true,
            checksum: true,
            level: Level::Visible,
            max_slice: MAX_SLICE,
            preferred_slice: PREFERRED_SLICE,
        }
    }

    fn start(&self, context: TransportContext) -> Result<Value> {
        self.fork.check()?;
        let mut running = self.running.lock();
        if running.is_some() {
            return Err(Error::new(ErrorKind::Busy, "transport tcp was started already"));
        }
        let listening = listen(&self.config)?;
        let handles = (0..self.config.thread_count())
            .map(|_| Handle::new().map(Arc::new))
            .collect::<Result<Vec<_>>>()?;
        let shared = Arc::new(Shared::new(context, Arc::clone(&self.config), handles));
        let mut started = Running { shared: Arc::clone(&shared), threads: Vec::new() };
        let mut listeners = Some(listening.listeners);
        for (at, handle) in shared.handles.iter().enumerate() {
            let listeners = listeners.take().unwrap_or_default();
            let reactor = Reactor::new(Arc::clone(&shared), Arc::clone(handle), listeners);
            let thread = std::thread::Builder::new().name(format!("tcp-lane-{at}")).spawn(|| reactor.run());
            match thread {
                Ok(thread) => started.threads.push(thread),
                Err(error) => {
                    started.stop();
                    return Err(Error::os("starting a thread of transport tcp", &error));
                }
            }
        }
        *running = Some(started);
        let (host, port) = (Some(listening.host), listening.port);
        let published = TcpAttributes { host, port, foreign_version: FOREIGN_VERSION };
        serde_json::to_value(published)
            .map_err(|error| Error::new(ErrorKind::Internal, format!("publishing transport tcp: {error}")))
    }

    fn stop(&self) {
        if self.fork.is_forked() {
            // Sockets and threads are the parent's: whatever is done to them here would harm it.
            return;
        }
        let Some(running) = self.running.lock().take() else { return };
        let paths: Vec<_> = self.paths.write().drain().map(|(_, path)| path).collect();
        let error = Error::new(ErrorKind::Closed, "transport tcp was stopped");
        for path in &paths {
            path.core.take_down(&error, false);
        }
        // Nor do those that were disconnected wait for a confirmation any more.
        let leaving = self.leaving.lock().clone();
        for lane in leaving {
            lane.core.take_down(&error, false);
        }
        running.stop();
        self.leaving.lock().retain(|lane| !lane.has_ended());
    }

    fn register(&self, region: &RegisteredRegion) -> Result<Value> {
        self.fork.check()?;
        host_memory(region.region.view()).map(|_| Value::Null)
    }

    fn unregister(&self, region: RegionId, deadline: Deadline) -> Result<()> {
        self.fork.check()?;
        let mut pause = Duration::from_micros(10);
        loop {
            if !self.lanes().iter().any(|lane| lane.holds(region)) {
                return Ok(());
            }
            if deadline.is_past(Instant::now()) {
                return Err(Deadline::exceeded(&format!("the slices of region {region} to end")));
            }
            std::thread::sleep(pause);
            pause = (pause * 2).min(Duration::from_millis(1));
        }
    }

    fn connect(&self, peer: &SegmentDesc, deadline: Deadline) -> Result<Vec<Path>> {
        self.fork.check()?;
        if peer.hello.is_none() {
            let text =
                "the peer does not speak Posthorse's data protocol, and this release no other over TCP";
            return Err(Error::new(ErrorKind::Unsupported, text).with_peer(&*peer.name));
        }
        let published = peer.transports.get(NAME).ok_or_else(|| {
            Error::new(ErrorKind::Unsupported, "the peer publishes no transport tcp").with_peer(&*peer.name)
        })?;
        let published = TcpAttributes::deserialize(published).map_err(|error| {
            Error::new(ErrorKind::Malformed, format!("what the peer publishes for transport tcp: {error}"))
                .with_peer(&*peer.name)
        })?;
        let host = published.host.as_deref().unwrap_or_else(|| host_of(&peer.name));
        let addresses =
            resolve(host, published.port, deadline).map_err(|error| error.with_peer(&*peer.name))?;
        let remote_device = format!("{host}:{}", published.port);
        let path = self.open(peer, addresses)?;
        if let Err(error) = path.core.wait_until_open(deadline) {
            self.paths.write().remove(&path.core.id);
            path.core.take_down(&error, false);
            return Err(error);
        }
        Ok(vec![Path {
            id: path.core.id,
            local_device: NAME.to_owned(),
            remote_device,
            numa_node: None,
            bandwidth: 0,
            state: PathState::Up,
        }])
    }

    fn disconnect(&self, path: PathId) {
        if self.fork.is_forked() {
            return;
        }
        let mut paths = self.paths.write();
        let Some(path) = paths.remove(&path) else { return };
        // Before anyone can find it nowhere.
        let mut leaving = self.leaving.lock();
        leaving.retain(|lane| !lane.has_ended());
        leaving.extend(path.lanes.iter().cloned());
        drop((leaving, paths));
        path.core.take_down(&Error::new(ErrorKind::Flushed, "the path was disconnected"), true);
    }

    unsafe fn submit(&self, path: PathId, slices: &[Slice]) -> Result<usize> {
        let path = self.path(path)?;
        let mut refused = Vec::new();
        let mut outcome = Ok(());
        let mut taken = 0;
        let mut used = 0_u64;
        for slice in slices {
            let memory = match acceptable(slice) {
                Ok(memory) => memory,
                Err(error) => {
                    let result = Err(SliceError { error, far_end: FarEnd::Quiet });
                    refused.push(Completion { token: slice.token, result });
                    taken += 1;
                    continue;
                }
            };
            let Some(lane) = path.lane_for(slice, memory.len() as u64) else { break };
            match lane.push(slice, memory) {
                Ok(true) => {
                    used |= 1 << lane.number;
                    taken += 1;
                }
                Ok(false) => break,
                Err(error) => {
                    outcome = Err(error);
                    break;
                }
            }
        }
        if !refused.is_empty() {
            path.core.context.events.completed(&refused);
        }
        for lane in &path.lanes {
            if used & (1 << lane.number) != 0 {
                lane.drive(want::SEND, Driver::Caller);
            }
        }
        // An error says that nothing was taken; otherwise the next call will say it.
        if taken == 0 { outcome.map(|()| 0) } else { Ok(taken) }
    }

    fn notify(&self, path: PathId, token: u64, data: &[u8]) -> Result<()> {
        let limit = self.config.notify_bytes;
        if data.len() > limit {
            let text = format!("a notification of {} bytes; accepted: up to {limit}", data.len());
            return Err(Error::new(ErrorKind::TooLarge, text));
        }
        let path = self.path(path)?;
        let lane = path.notify_lane().ok_or_else(not_started)?;
        lane.with_state(|state| state.push_notify(token, data))?;
        lane.drive(want::SEND, Driver::Caller);
        Ok(())
    }

    fn cancel(&self, path: PathId, which: &mut dyn FnMut(u64) -> bool) {
        let Ok(path) = self.path(path) else { return };
        for lane in &path.lanes {
            lane.cancel(which);
        }
    }

    fn fence(&self, path: PathId) {
        if let Ok(path) = self.path(path) {
            path.core.take_down(&Error::new(ErrorKind::Flushed, "the path was fenced"), true);
        }
    }
}

impl Drop for TcpTransport {
    fn drop(&mut self) {
        self.stop();
        if self.fork.is_forked() {
            // As in `stop`; no lock is taken, as a thread that is not here may have held it.
            std::mem::forget(self.running.get_mut().take());
            self.paths.get_mut().drain().for_each(|(_, path)| std::mem::forget(path));
            self.leaving.get_mut().drain(..).for_each(std::mem::forget);
        }
    }
}

impl Running {
    fn stop(self) {
        for handle in &self.shared.handles {
            handle.push(Command::Stop);
        }
        for thread in self.threads {
            // Called from an event, a reactor cannot wait for itself; it ends when the event returns.
            if thread.thread().id() != std::thread::current().id() {
                let _ = thread.join();
            }
        }
    }
}

/// The memory of a slice that can be taken.
fn acceptable(slice: &Slice) -> Result<HostView> {
    let memory = host_memory(slice.local)?;
    if slice.ready.is_some() {
        return Err(Error::new(ErrorKind::Unsupported, "transport tcp waits for no device events"));
    }
    if memory.is_empty() || memory.len() as u64 > MAX_SLICE {
        return Err(Error::invalid_argument(
            "the slice's length",
            memory.len(),
            &format!("1 to {MAX_SLICE}"),
        ));
    }
    Ok(memory)
}

fn host_memory(view: View) -> Result<HostView> {
    view.host().ok_or_else(|| {
        Error::new(ErrorKind::Unsupported, "transport tcp moves host memory only").with_device(NAME)
    })
}

fn host_of(name: &str) -> &str {
    name.rsplit_once(':').map_or(name, |(host, _)| host)
}

fn not_started() -> Error {
    Error::new(ErrorKind::Closed, "transport tcp is not started, or was stopped")
}

fn random() -> Result<u64> {
    getrandom::u64()
        .map_err(|error| Error::new(ErrorKind::Io, format!("asking the system for random bytes: {error}")))
}
