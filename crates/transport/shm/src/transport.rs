//! The transport itself: what the engine calls.

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::{Mutex, RwLock};
use posthorse_core::{
    Capabilities, Deadline, Ending, Error, ErrorKind, Grant, GrantDesc, GrantToken, Grants, HostView, Level,
    Path, PathId, PathState, Region, RegionId, RegisteredRegion, Result, SegmentDesc, Slice, Transport,
    TransportContext, TransportEvents,
};
use posthorse_memory::ForkGuard;
use rustix::io::Errno;
use serde_json::{Value, json};

use crate::config::ShmConfig;
use crate::copiers::Copiers;
use crate::copy;
use crate::events::Events;
use crate::lease::lease;
use crate::link::{Link, Met, Surroundings};
use crate::owner::Owner;
use crate::rendezvous::reactor::Reactor;
use crate::rendezvous::server::{Identity, Limits, Server};
use crate::rendezvous::socket::{Listener, Packet, PacketBuffer, check_user, connect_to, random_name, send};
use crate::rendezvous::wire::{ClientHello, Request, ToClient, Welcome};
use crate::rendezvous::{Published, check_host_ids};
use crate::slots::Slots;
use crate::sys::{Credentials, Direction, Process, peer_credentials, peer_pidfd, process_vm};
use crate::table::{PeerHash, PeerTable};

const NAME: &str = "shm";
/// Nominal, for lack of a device that says: what one core copies.
const BANDWIDTH: u64 = 10_000_000_000;
const PREFERRED_SLICE: u64 = 64 << 20;
const MAX_SLICE: u64 = 1 << 40;
/// The most entries of a peer's grant table that are mapped here.
const MAX_PEER_GRANTS: u32 = 1 << 24;

/// Moves bytes between processes of one user on one host, by mapping the peer's memory and copying.
///
/// See the crate's documentation, and [`ShmConfig`].
#[derive(Debug)]
pub struct ShmTransport {
    config: ShmConfig,
    fork: ForkGuard,
    owner: Arc<Owner>,
    running: Mutex<Option<Arc<Running>>>,
    /// Of what was started last.
    ending: Mutex<Arc<Ending>>,
    /// Held by whoever starts or stops the transport, and never waited for: a baton.
    changing: Mutex<()>,
    /// Whether there may be something to copy.
    available: Arc<AtomicBool>,
    links: RwLock<HashMap<PathId, Arc<Link>>>,
    next_path: AtomicU64,
}

#[derive(Debug)]
struct Running {
    context: TransportContext,
    server: Arc<Server>,
    around: Surroundings,
}

impl ShmTransport {
    /// A transport that serves nobody until it is started.
    ///
    /// # Errors
    /// `InvalidConfig` names the key, its value and what is accepted; `Io` when the system gives no memory for
    /// the grant table.
    pub fn new(config: ShmConfig) -> Result<Self> {
        let config = config.checked()?;
        Ok(Self {
            fork: ForkGuard::new()?,
            owner: Arc::new(Owner::new(config.max_grants)?),
            config,
            running: Mutex::default(),
            ending: Mutex::default(),
            changing: Mutex::default(),
            available: Arc::default(),
            links: RwLock::default(),
            next_path: AtomicU64::new(1),
        })
    }

    fn running(&self) -> Result<Arc<Running>> {
        self.fork.check()?;
        self.running
            .lock()
            .clone()
            .ok_or_else(|| Error::new(ErrorKind::Closed, "the shared-memory transport is not started"))
    }

    fn link(&self, path: PathId) -> Result<Arc<Link>> {
        self.fork.check()?;
        self.links.read().get(&path).cloned().ok_or_else(|| {
            Error::new(
                ErrorKind::PathFailed,
                format!("path {path} of the shared-memory transport is down or unknown"),
            )
        })
    }

    /// Goes through the rendezvous with a peer. Also returns the pidfd of its process.
    fn meet(
        &self,
        running: &Running,
        peer: &SegmentDesc,
        published: &Published,
        deadline: Deadline,
    ) -> Result<(Met, OwnedFd)> {
        check_host_ids(self.config.host_id.as_deref(), published.host_id.as_deref())?;
        let socket = connect_to(&published.socket, deadline)?;
        let credentials = peer_credentials(&socket)?;
        check_user(credentials)?;
        let pidfd = peer_pidfd(&socket, credentials)?;
        let hello = Request::Hello(ClientHello {
            hello: running.context.hello.clone(),
            name: running.context.name.to_string(),
            nonce: published.nonce.clone(),
            host_id: self.config.host_id.clone(),
        });
        match send(&socket, &hello.encode(), &[]) {
            // Refused before it was sent, as the answer says.
            Ok(()) | Err(Errno::PIPE) => {}
            Err(error) => return Err(Error::os("sending on the rendezvous socket", &error.into())),
        }
        let mut buffer = PacketBuffer::new();
        let Packet { bytes, fds } = buffer.receive_by(&socket, deadline)?;
        if bytes.is_empty() {
            return Err(Error::new(ErrorKind::PeerGone, "the peer closed the rendezvous without an answer"));
        }
        let welcome = match ToClient::decode(bytes)? {
            ToClient::Welcome(welcome) => welcome,
            ToClient::Refused(refusal) => return Err(refusal.into_error()),
            _ => {
                return Err(Error::new(
                    ErrorKind::Malformed,
                    "the peer answered a hello with something else",
                ));
            }
        };
        running.context.hello.agree(&welcome.hello)?;
        if peer.incarnation.is_some_and(|incarnation| incarnation != welcome.incarnation) {
            return Err(Error::new(
                ErrorKind::PeerRestarted,
                "the peer has restarted since its descriptor was made",
            ));
        }
        let mut fds = fds.into_iter();
        let (Some(table), Some(slots)) = (fds.next(), fds.next()) else {
            return Err(Error::new(ErrorKind::Malformed, "the peer's welcome came without its descriptors"));
        };
        if welcome.grants == 0 || welcome.grants > MAX_PEER_GRANTS {
            return Err(Error::new(
                ErrorKind::Malformed,
                format!(
                    "the peer's grant table has {} entries; accepted: 1 to {MAX_PEER_GRANTS}",
                    welcome.grants
                ),
            ));
        }
        let met = Met {
            peer: peer.name.as_str().into(),
            me: PeerHash::of(&running.context.name),
            table: PeerTable::map(table, welcome.grants)?,
            slots: Arc::new(Slots::map(slots)?),
            process: self.probe(credentials, &pidfd, &welcome),
            socket,
        };
        Ok((met, pidfd))
    }

    /// Makes a path of a rendezvous, unless the transport was stopped meanwhile.
    fn open(&self, running: &Arc<Running>, id: PathId, met: Met, pidfd: OwnedFd) -> Result<()> {
        let link = Link::new(id, met, running.around.clone());
        let opened = self.list(running, &link).and_then(|()| link.watch(pidfd));
        opened.inspect_err(|error| {
            self.links.write().remove(&id);
            link.close(error);
        })
    }

    /// Lists a path before it is watched, so that a peer that is lost at once is found when that is reported.
    fn list(&self, running: &Arc<Running>, link: &Arc<Link>) -> Result<()> {
        // Under the lock of `running`, so that `stop` finds every path there is.
        let now = self.running.lock();
        if !now.as_ref().is_some_and(|now| Arc::ptr_eq(now, running)) {
            return Err(Error::new(ErrorKind::Closed, "the shared-memory transport was stopped"));
        }
        self.links.write().insert(link.id, Arc::clone(link));
        Ok(())
    }

    /// Whether the peer's memory can be reached by `process_vm`: tried, as no rule says it for sure.
    fn probe(&self, credentials: Credentials, pidfd: &OwnedFd, welcome: &Welcome) -> Result<Process> {
        let unsupported = |why: &str| Error::new(ErrorKind::Unsupported, why.to_owned());
        if !self.config.process_vm {
            return Err(unsupported("process_vm_readv/writev is turned off by the configuration"));
        }
        let pid = credentials.pid.ok_or_else(|| {
            unsupported("the peer is in another PID namespace, so that process_vm cannot name it")
        })?;
        let pidfd = pidfd.try_clone().map_err(|error| Error::os("dup of a pidfd", &error))?;
        let process = Process { pid, pidfd: Arc::new(pidfd) };
        let mut found = [0_u8; 8];
        let view = HostView::of_mut(&mut found);
        // SAFETY: the array outlives the call and has no other user.
        unsafe { process_vm(&process, view, welcome.probe_address, Direction::FromPeer) }?;
        if u64::from_ne_bytes(found) != welcome.probe_value {
            return Err(unsupported("the process that process_vm reached is not the peer"));
        }
        Ok(process)
    }

    fn give_up(&self, path: PathId, error: &Error) {
        let link = self.links.write().remove(&path);
        if let Some(link) = link {
            link.close(error);
            link.await_quiet();
        }
    }
}

impl Transport for ShmTransport {
    fn name(&self) -> &str {
        NAME
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            same_host_only: true,
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
        let changing = self.changing.try_lock();
        if changing.is_none() || self.running.lock().is_some() {
            return Err(Error::new(ErrorKind::Busy, "the shared-memory transport is started already"));
        }
        let config = &self.config;
        self.owner.begin();
        let listener = Listener::bind(config.folder.as_deref())?;
        let identity = Identity {
            name: Arc::clone(&context.name),
            incarnation: context.incarnation,
            hello: context.hello.clone(),
            nonce: random_name()?,
            host_id: config.host_id.clone(),
        };
        let events: Arc<dyn TransportEvents> = Arc::new(Events(Arc::clone(&context.events)));
        let copiers = Copiers::start(config, Arc::clone(&events), Arc::clone(&self.available))?;
        let tick = (config.liveness() / 4).clamp(Duration::from_millis(5), Duration::from_millis(500));
        let reactor = Reactor::start(tick).inspect_err(|_| copiers.stop())?;
        let limits = Limits { liveness: config.liveness(), max_peers: config.max_peers };
        let server =
            Server::start(listener, identity, Arc::clone(&self.owner), Arc::clone(&events), &reactor, limits)
                .inspect_err(|_| {
                    copiers.stop();
                    reactor.stop();
                })?;
        let published = server.published();
        let around = Surroundings { reactor, copiers, events, liveness: config.liveness() };
        *self.running.lock() = Some(Arc::new(Running { context, server, around }));
        // After that, or a stop in between would use up the end of this life without having found it.
        *self.ending.lock() = Arc::default();
        Ok(json!(published))
    }

    fn stop(&self) {
        if self.fork.is_forked() {
            // Sockets and threads are the parent's: whatever is done to them here would harm it.
            return;
        }
        let ending = Arc::clone(&self.ending.lock());
        let Some(_duty) = ending.begin() else { return };
        // Until the end, so that nothing is started in the midst of it.
        let _changing = self.changing.try_lock();
        let running = self.running.lock().take();
        let Some(running) = running else { return };
        let closed = Error::new(ErrorKind::Closed, "the shared-memory transport was stopped");
        let paths: Vec<_> = self.links.read().keys().copied().collect();
        for path in paths {
            self.give_up(path, &closed);
        }
        // Peers may be copying under grants that were not revoked. One that holds on is not waited for longer:
        // its mapping keeps the memory alive.
        if let Err(error) = self.owner.end(Deadline::after(self.config.liveness())) {
            tracing::warn!(%error, "the shared-memory transport stops while a peer still holds memory");
        }
        running.around.reactor.stop();
        running.server.close();
        running.around.copiers.stop();
    }

    fn register(&self, region: &RegisteredRegion) -> Result<Value> {
        self.fork.check()?;
        self.owner.register(region)?;
        Ok(json!({ "mappable": region.region.shared_file().is_some() }))
    }

    fn unregister(&self, region: RegionId, deadline: Deadline) -> Result<()> {
        self.fork.check()?;
        self.owner.unregister(region, deadline)?;
        if let Ok(running) = self.running() {
            running.server.withdraw(region);
        }
        Ok(())
    }

    fn grant(&self, grant: &Grant<'_>) -> Result<Value> {
        self.fork.check()?;
        self.owner.grant(grant)?;
        Ok(Value::Null)
    }

    fn revoke(&self, token: GrantToken, deadline: Deadline) -> Result<()> {
        self.fork.check()?;
        self.owner.revoke(token, deadline)
    }

    fn connect(&self, peer: &SegmentDesc, deadline: Deadline) -> Result<Vec<Path>> {
        let running = self.running()?;
        let attributes = peer.transports.get(NAME).ok_or_else(|| {
            Error::new(ErrorKind::Unsupported, "the peer publishes no shared-memory transport")
                .with_peer(&*peer.name)
        })?;
        let published: Published = serde_json::from_value(attributes.clone()).map_err(|error| {
            Error::new(ErrorKind::Malformed, format!("what the peer publishes for shared memory: {error}"))
                .with_peer(&*peer.name)
        })?;
        let id = PathId(self.next_path.fetch_add(1, Ordering::Relaxed));
        let met = self.meet(&running, peer, &published, deadline);
        let state = match met.and_then(|(met, pidfd)| self.open(&running, id, met, pidfd)) {
            Ok(()) => PathState::Up,
            Err(error) => PathState::Down(error.with_peer(&*peer.name).with_device(NAME)),
        };
        Ok(vec![Path {
            id,
            local_device: NAME.to_owned(),
            remote_device: published.socket,
            numa_node: None,
            bandwidth: BANDWIDTH,
            state,
        }])
    }

    fn disconnect(&self, path: PathId) {
        if !self.fork.is_forked() {
            self.give_up(path, &Error::new(ErrorKind::Flushed, "the path was disconnected"));
        }
    }

    fn lease(&self, path: PathId, grant: &GrantDesc) -> Result<Arc<dyn Region>> {
        lease(&self.link(path)?, grant)
    }

    unsafe fn submit(&self, path: PathId, slices: &[Slice]) -> Result<usize> {
        let link = self.link(path)?;
        // SAFETY: the caller's promise.
        unsafe { copy::submit(&link, slices, self.config.inline_bytes) }
    }

    fn help(&self) -> bool {
        // Asked over and over, mostly in vain.
        if !self.available.load(Ordering::Acquire) || self.fork.is_forked() {
            return false;
        }
        let copiers = self.running.lock().as_ref().map(|running| Arc::clone(&running.around.copiers));
        copiers.is_some_and(|copiers| copiers.help())
    }

    fn notify(&self, path: PathId, token: u64, data: &[u8]) -> Result<()> {
        self.link(path)?.notify(token, data)
    }

    fn cancel(&self, path: PathId, which: &mut dyn FnMut(u64) -> bool) {
        if let Ok(running) = self.running() {
            running.around.copiers.cancel(path, which);
        }
    }

    fn fence(&self, path: PathId) {
        if !self.fork.is_forked() {
            self.give_up(path, &Error::new(ErrorKind::Flushed, "the path was fenced"));
        }
    }
}

impl Drop for ShmTransport {
    fn drop(&mut self) {
        self.stop();
        if self.fork.is_forked() {
            // As in `stop`; no lock is taken, as a thread that is not here may have held it.
            std::mem::forget(self.running.get_mut().take());
            self.links.get_mut().drain().for_each(|(_, link)| std::mem::forget(link));
        }
    }
}
