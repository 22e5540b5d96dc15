//! The transport as the engine sees it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::RwLock;
use posthorse_core::{
    Capabilities, Deadline, Ending, Error, ErrorKind, Grant, GrantToken, Grants, Level, Path, PathId,
    PathState, RegionId, RegisteredRegion, RemoteKey, Result, SegmentDesc, Slice, Transport,
    TransportContext,
};
use posthorse_memory::ForkGuard;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::config::{Pairing, RdmaConfig};
use crate::connection::{Connection, Target};
use crate::devices;
use crate::gid::Gid;
use crate::handshake::{CLOSE, CONNECT, NOTIFY};
use crate::pairing::pairs;
use crate::rail::{Rail, RailDesc};
use crate::regions::{MAX_SLICE, Regions};
use crate::served::Served;
use crate::shared::{Shared, stopped};
use crate::verbs::Verbs;
use crate::watch;
use crate::workers::Workers;

/// The name under which this transport publishes.
pub(crate) const NAME: &str = "rdma";

/// The longest notification, in bytes.
const NOTIFY_BYTES: usize = 64 << 10;

/// Moves bytes by one-sided verbs. See the crate's documentation.
#[derive(Debug)]
pub struct RdmaTransport {
    config: RdmaConfig,
    verbs: Arc<dyn Verbs>,
    running: RwLock<Option<Running>>,
    ending: Ending,
    fork: ForkGuard,
}

#[derive(Debug)]
struct Running {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

/// What is published of this transport.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct Published {
    devices: Vec<RailDesc>,
}

impl RdmaTransport {
    /// A transport over the devices of this host.
    ///
    /// # Errors
    /// `Unsupported` where there is no library for them; as [`RdmaTransport::with_verbs`].
    #[cfg(feature = "rdma")]
    pub fn new(config: RdmaConfig) -> Result<Self> {
        config.validate()?;
        Self::with_verbs(config, Arc::new(crate::system::SystemVerbs::new()?))
    }

    /// A transport over these devices. It does nothing before it is started.
    ///
    /// # Errors
    /// `InvalidConfig`, naming the key, the value and what is accepted; `LimitReached` when the system gives no memory.
    pub fn with_verbs(config: RdmaConfig, verbs: Arc<dyn Verbs>) -> Result<Self> {
        config.validate()?;
        let (running, ending) = (RwLock::new(None), Ending::default());
        Ok(Self { config, verbs, running, ending, fork: ForkGuard::new()? })
    }

    pub(crate) fn shared(&self) -> Result<Arc<Shared>> {
        self.fork.check()?;
        self.running.read().as_ref().map(|running| Arc::clone(&running.shared)).ok_or_else(stopped)
    }

    fn connection(&self, path: PathId) -> Result<(Arc<Shared>, Arc<Connection>)> {
        let shared = self.shared()?;
        let connection = shared.connection(path.0).ok_or_else(|| {
            Error::new(ErrorKind::NotFound, format!("transport rdma has no path {path}")).with_device(NAME)
        })?;
        Ok((shared, connection))
    }

    /// How many connections of peers reach this process's memory.
    pub fn served(&self) -> usize {
        self.shared().map_or(0, |shared| shared.served.len())
    }
}

impl Transport for RdmaTransport {
    fn name(&self) -> &str {
        NAME
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            same_host_only: false,
            device_memory: false,
            grants: Grants::Keyed,
            notify: true,
            checksum: false,
            level: Level::Visible,
            max_slice: MAX_SLICE,
            preferred_slice: self.config.slice_bytes.min(MAX_SLICE),
        }
    }

    fn start(&self, context: TransportContext) -> Result<Value> {
        self.fork.check()?;
        let mut running = self.running.write();
        if running.is_some() {
            return Err(Error::new(ErrorKind::Busy, "transport rdma was started already"));
        }
        let rails = devices::open(&*self.verbs, &self.config)?;
        let described = rails.iter().map(|rail| rail.desc(&self.config)).collect::<Result<Vec<_>>>()?;
        let shared = Arc::new(Shared {
            config: self.config.clone(),
            context,
            rails,
            regions: Regions::default(),
            connections: RwLock::default(),
            served: Served::default(),
            workers: Workers::new(),
            next_number: AtomicU64::new(1),
            stopped: AtomicBool::new(false),
        });
        answer(&shared);
        let mut started = Running { shared: Arc::clone(&shared), threads: Vec::new() };
        for rail in &shared.rails {
            match watch::start(&shared, rail) {
                Ok(thread) => started.threads.push(thread),
                Err(error) => {
                    started.stop();
                    return Err(error);
                }
            }
        }
        watch::look_again(&shared);
        *running = Some(started);
        serde_json::to_value(Published { devices: described })
            .map_err(|error| Error::new(ErrorKind::Internal, format!("publishing transport rdma: {error}")))
    }

    fn stop(&self) {
        if self.fork.is_forked() {
            // Threads and devices are the parent's.
            return;
        }
        let Some(_duty) = self.ending.begin() else { return };
        let running = self.running.write().take();
        if let Some(running) = running {
            running.stop();
        }
    }

    fn register(&self, region: &RegisteredRegion) -> Result<Value> {
        let shared = self.shared()?;
        shared.regions.register(&shared.rails, region, self.config.relaxed_ordering)?;
        Ok(Value::Null)
    }

    fn unregister(&self, region: RegionId, deadline: Deadline) -> Result<()> {
        let shared = self.shared()?;
        let mut pause = Duration::from_micros(10);
        loop {
            if !shared.all_connections().iter().any(|connection| connection.holds(region)) {
                shared.regions.forget(region);
                return Ok(());
            }
            if deadline.is_past(Instant::now()) {
                return Err(Deadline::exceeded(&format!("the slices of region {region} to end")));
            }
            std::thread::sleep(pause);
            pause = (pause * 2).min(Duration::from_millis(1));
        }
    }

    fn grant(&self, grant: &Grant<'_>) -> Result<Value> {
        let shared = self.shared()?;
        shared.regions.grant(&shared.rails, grant.desc, self.config.relaxed_ordering)
    }

    fn revoke(&self, token: GrantToken, _deadline: Deadline) -> Result<()> {
        self.shared()?.regions.revoke(token);
        Ok(())
    }

    fn connect(&self, peer: &SegmentDesc, deadline: Deadline) -> Result<Vec<Path>> {
        let shared = self.shared()?;
        let targets = targets(&shared, peer).map_err(|error| error.with_peer(&*peer.name))?;
        let connections: Vec<_> =
            targets.into_iter().map(|(rail, target)| Connection::new(&shared, &rail, target)).collect();
        {
            let mut known = shared.connections.write();
            known.extend(connections.iter().map(|connection| (connection.number, Arc::clone(connection))));
        }
        let open = |connection: &Arc<Connection>| {
            let _ = connection.open(&shared, deadline);
        };
        match &*connections {
            [only] => open(only),
            // Each waits for its own device and the peer's.
            several => std::thread::scope(|scope| {
                several.iter().for_each(|connection| drop(scope.spawn(|| open(connection))));
            }),
        }
        let paths: Vec<Path> = connections.iter().map(|connection| connection.describe(&shared)).collect();
        let is_up = |path: &Path| matches!(path.state, PathState::Up);
        if paths.iter().any(is_up) {
            // Those that are down may come up beside those that are not.
            connections.iter().for_each(|connection| connection.try_again_if_down(&shared));
        }
        if shared.is_stopped() {
            // Whoever stopped it may not have found them.
            connections.iter().for_each(|connection| connection.stop(&shared, &stopped()));
        }
        Ok(paths)
    }

    fn disconnect(&self, path: PathId) {
        if let Ok((shared, connection)) = self.connection(path) {
            connection.give_up(&shared, &Error::new(ErrorKind::Flushed, "the path was disconnected"));
            connection.leave(&shared);
        }
    }

    fn import(&self, path: PathId, attributes: &Value) -> Result<RemoteKey> {
        let (_, connection) = self.connection(path)?;
        connection.import(attributes).map(RemoteKey)
    }

    unsafe fn submit(&self, path: PathId, slices: &[Slice]) -> Result<usize> {
        let (shared, connection) = self.connection(path)?;
        // SAFETY: the caller's promise.
        unsafe { connection.submit(&shared, slices) }
    }

    fn help(&self) -> bool {
        let Ok(shared) = self.shared() else { return false };
        let busy: Vec<_> =
            shared.connections.read().values().filter(|connection| connection.is_busy()).cloned().collect();
        busy.iter().fold(false, |any, connection| connection.progress(&shared, false) | any)
    }

    fn notify(&self, path: PathId, token: u64, data: &[u8]) -> Result<()> {
        if data.len() > NOTIFY_BYTES {
            let text = format!("a notification of {} bytes; accepted: up to {NOTIFY_BYTES}", data.len());
            return Err(Error::new(ErrorKind::TooLarge, text));
        }
        let (shared, connection) = self.connection(path)?;
        connection.notify(&shared, token, data)
    }

    fn cancel(&self, path: PathId, which: &mut dyn FnMut(u64) -> bool) {
        if let Ok((shared, connection)) = self.connection(path) {
            connection.cancel(&shared, which);
        }
    }

    fn fence(&self, path: PathId) {
        if let Ok((shared, connection)) = self.connection(path) {
            connection.give_up(&shared, &Error::new(ErrorKind::Flushed, "the path was fenced"));
        }
    }
}

impl Drop for RdmaTransport {
    fn drop(&mut self) {
        self.stop();
        if self.fork.is_forked() {
            // As in `stop`; no lock is taken, as a thread that is not here may have held it.
            std::mem::forget(self.running.get_mut().take());
        }
    }
}

impl Running {
    fn stop(self) {
        let shared = &self.shared;
        shared.stopped.store(true, Ordering::Release);
        // First what peers reach, then what reaches them.
        shared.served.clear();
        for connection in shared.all_connections() {
            connection.stop(shared, &stopped());
        }
        shared.workers.stop();
        shared.rails.iter().for_each(|rail| rail.device.wake());
        for thread in self.threads {
            // Called from an event, a device's thread cannot wait for itself; it ends when the event returns.
            if thread.thread().id() != std::thread::current().id() {
                let _ = thread.join();
            }
        }
        shared.served.clear();
        shared.connections.write().clear();
        shared.regions.clear();
    }
}

/// What is answered to a peer of this name, which sent this.
type Answer = fn(&Arc<Shared>, &str, &[u8]) -> Result<Vec<u8>>;

/// Answers peers.
fn answer(shared: &Arc<Shared>) {
    let answer = |topic, handle: Answer| {
        let there = Arc::downgrade(shared);
        let handler = move |from: &str, body: &[u8]| match there.upgrade() {
            Some(shared) if !shared.is_stopped() => handle(&shared, from, body),
            _ => Err(stopped().with_fault(posthorse_core::Fault::Peer)),
        };
        shared.context.control.on_request(topic, Arc::new(handler));
    };
    answer(CONNECT, |shared, _, body| shared.served.connect(shared, body));
    answer(CLOSE, |shared, _, body| shared.served.close(body));
    answer(NOTIFY, |shared, from, body| shared.served.notified(shared, from, body));
}

/// The pairs of devices by which a peer is reached.
///
/// # Errors
/// `Unsupported` for a peer that has no such transport; `Malformed`; why the two do not agree.
fn targets(shared: &Shared, peer: &SegmentDesc) -> Result<Vec<(Arc<Rail>, Target)>> {
    let Some(theirs) = &peer.hello else {
        let text = "the peer is not a Posthorse engine, and this release reaches no other over RDMA";
        return Err(Error::new(ErrorKind::Unsupported, text));
    };
    let published = peer
        .transports
        .get(NAME)
        .ok_or_else(|| Error::new(ErrorKind::Unsupported, "the peer publishes no transport rdma"))?;
    shared.context.hello.agree(theirs)?;
    let malformed = |why: String| {
        Error::new(ErrorKind::Malformed, format!("what the peer publishes for transport rdma: {why}"))
    };
    let published = Published::deserialize(published).map_err(|error| malformed(error.to_string()))?;
    if published.devices.is_empty() {
        return Err(malformed("it has no devices".to_owned()));
    }
    let gids =
        published.devices.iter().map(|device| device.gid.parse::<Gid>()).collect::<Result<Vec<_>>>()?;
    let ours: Vec<Gid> = shared.rails.iter().map(|rail| rail.gid()).collect();
    let chosen = match shared.config.pairing {
        Pairing::Matched => pairs(&ours, &gids),
        Pairing::All => {
            (0..ours.len()).flat_map(|our| (0..gids.len()).map(move |their| (our, their))).collect()
        }
    };
    let name: Arc<str> = peer.name.as_str().into();
    let target = |(our, their): (usize, usize)| {
        let (rail, device) = (shared.rails.get(our)?, published.devices.get(their)?);
        let target = Target {
            peer: Arc::clone(&name),
            incarnation: peer.incarnation,
            device: device.clone(),
            index: their,
        };
        Some((Arc::clone(rail), target))
    };
    Ok(chosen.into_iter().filter_map(target).collect())
}
