//! The engine itself: what it is made of, how it starts and ends.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use parking_lot::{Mutex, RwLock};
use posthorse_core::{
    Access, Attributes, Capabilities, ControlChannel, Deadline, Error, ErrorKind, GrantDesc, Hello,
    Incarnation, Region, RegionId, Result, Route, SegmentDesc, SegmentId, Transport, TransportContext,
    TransportId,
};
use posthorse_segment::{Directory, Registry};
use serde_json::Value;

use crate::batch::{Batch, BatchCore, SubmitOptions};
use crate::builder::EngineBuilder;
use crate::config::{EngineConfig, Preference};
use crate::events::Sink;
use crate::explain::{Explanation, PathReport, TransportReport};
use crate::fork::Birth;
use crate::inbox::{Inbox, Notification};
use crate::lease::LeasedMemory;
use crate::memory::{RegisteredMemory, Withheld};
use crate::path::{Paths, Run};
use crate::peer::{Decision, How, Segment};
use crate::peers::Peers;
use crate::plan::Plan;
use crate::slicing::SliceLength;
use crate::submission::{Doom, Notice, Submission, Work};
use crate::table::Table;
use crate::ticker::Ticker;

/// Everything the engine's parts share.
#[derive(Debug)]
pub(crate) struct Inner {
    pub(crate) name: Arc<str>,
    pub(crate) incarnation: Incarnation,
    pub(crate) config: EngineConfig,
    pub(crate) hello: Hello,
    pub(crate) birth: Birth,
    pub(crate) closed: AtomicBool,
    pub(crate) registry: Arc<Registry>,
    pub(crate) region_attributes: RwLock<HashMap<RegionId, Attributes>>,
    pub(crate) transports: RwLock<Vec<Slot>>,
    pub(crate) default_route: RwLock<Route>,
    pub(crate) slice_length: RwLock<SliceLength>,
    pub(crate) directory: Arc<dyn Directory>,
    pub(crate) control_channel: Arc<dyn ControlChannel>,
    pub(crate) runtime: tokio::runtime::Handle,
    pub(crate) peers: Peers,
    pub(crate) paths: Paths,
    pub(crate) table: Table,
    /// Runs that have to be sent again.
    pub(crate) again: Mutex<Vec<Run>>,
    pub(crate) withheld: Mutex<Vec<Withheld>>,
    pub(crate) inbox: Arc<Inbox>,
    pub(crate) ticker: Arc<Ticker>,
}

/// A place for a transport. Numbers are not used again after an uninstall.
#[derive(Debug, Clone)]
pub(crate) struct Slot {
    pub(crate) id: TransportId,
    pub(crate) transport: Arc<dyn Transport>,
    pub(crate) published: Value,
    pub(crate) installed: bool,
}

/// Moves bytes between registered memory of this process and that of its peers, over the best path there is.
///
/// A clone is another handle of the same engine. When the last is dropped, the engine is shut down.
#[derive(Debug, Clone)]
pub struct TransferEngine {
    pub(crate) owner: Arc<Owner>,
}

/// Shuts the engine down when the last handle goes.
#[derive(Debug)]
pub(crate) struct Owner {
    pub(crate) inner: Arc<Inner>,
    pub(crate) runtime: Mutex<Option<tokio::runtime::Runtime>>,
    pub(crate) ticker: Mutex<Option<std::thread::JoinHandle<()>>>,
}

impl TransferEngine {
    /// Begins to set up an engine.
    pub fn builder() -> EngineBuilder {
        EngineBuilder::default()
    }

    fn inner(&self) -> &Arc<Inner> {
        &self.owner.inner
    }

    /// The segment name under which peers find this engine.
    pub fn name(&self) -> &str {
        &self.inner().name
    }

    /// Which life of the name this is.
    pub fn incarnation(&self) -> Incarnation {
        self.inner().incarnation
    }

    /// What peers learn of this engine.
    pub fn descriptor(&self) -> SegmentDesc {
        self.inner().descriptor()
    }

    /// Registers memory. `access` is what every peer that has the descriptor may do with all of it; for anything
    /// narrower register with [`Access::None`] and [grant](RegisteredMemory::grant) ranges.
    ///
    /// # Errors
    /// `Overlap` with memory that is registered; `InvalidArgument` for no bytes, or write access to what cannot be
    /// written; `LimitReached` when the system or a device refuses.
    pub fn register(&self, region: Arc<dyn Region>, access: Access) -> Result<RegisteredMemory> {
        let memory = self.inner().register(region, access)?;
        self.publish(access)?;
        Ok(memory)
    }

    /// As [`TransferEngine::register`], for several regions: all of them or none. They are published at once.
    ///
    /// # Errors
    /// As [`TransferEngine::register`], for the first region that cannot be registered.
    pub fn register_many(
        &self,
        regions: impl IntoIterator<Item = Arc<dyn Region>>,
        access: Access,
    ) -> Result<Vec<RegisteredMemory>> {
        let memories: Result<Vec<_>> =
            regions.into_iter().map(|region| self.inner().register(region, access)).collect();
        self.publish(access)?;
        memories
    }

    /// Tells the directory of memory that was registered, if peers are to know of it.
    fn publish(&self, access: Access) -> Result<()> {
        if access == Access::None { Ok(()) } else { self.inner().publish() }
    }

    /// The registered memory that holds the whole range, for callers that know addresses alone.
    pub fn find(&self, address: u64, len: u64) -> Option<posthorse_core::LocalRange> {
        let (region, offset) = self.inner().registry.find(address, len)?;
        Some(posthorse_core::LocalRange { region, offset })
    }

    /// Opens a peer's segment: asks the directory for its descriptor, and makes a first path.
    ///
    /// # Errors
    /// `NotFound` or `PeerUnreachable` from the directory; `NoPath` with every transport's reason;
    /// `VersionMismatch` or `FingerprintMismatch`; `DeadlineExceeded`.
    pub fn open(&self, name: &str, deadline: Deadline) -> Result<Segment> {
        self.inner().open(name, None, deadline)
    }

    /// Opens this life of a peer, without asking the directory when it is open already.
    ///
    /// # Errors
    /// As [`TransferEngine::open`]; `PeerRestarted` when another life has taken the name.
    pub fn open_life(&self, name: &str, incarnation: Incarnation, deadline: Deadline) -> Result<Segment> {
        self.inner().open(name, Some(incarnation), deadline)
    }

    /// The engine's own segment.
    ///
    /// # Errors
    /// `Closed` or `Forked`.
    pub fn local(&self) -> Result<Segment> {
        self.inner().check_open()?;
        self.inner().local_segment()
    }

    /// Closes a segment: what is under way to it is called off, and its paths are given up.
    pub fn close(&self, segment: Segment) {
        let inner = self.inner();
        if segment.id() != SegmentId::LOCAL && inner.peers.remove(segment.id()).is_some() {
            let error = Error::new(ErrorKind::Closed, "the segment was closed").with_peer(segment.name());
            inner.end_peer(&segment.peer, error);
        }
    }

    /// Begins a batch.
    pub fn batch(&self) -> Batch {
        Batch::new(Arc::clone(self.inner()))
    }

    /// Checks and cuts requests once, to be posted many times.
    ///
    /// # Errors
    /// As [`Batch::submit`].
    pub fn plan(&self, requests: &[posthorse_core::TransferRequest]) -> Result<Plan> {
        Plan::new(self.inner(), requests)
    }

    /// Sends a message to a peer, and waits until it lies in the peer's inbox.
    ///
    /// # Errors
    /// `QueueFull` when the peer does not fetch its messages; the reason when no path carries it; `DeadlineExceeded`.
    pub fn notify(&self, peer: &Segment, data: &[u8], deadline: Deadline) -> Result<()> {
        let mut batch = self.batch();
        let options = SubmitOptions { deadline, ..SubmitOptions::default() };
        batch.submit_with_notice(&[], peer, data, options)?;
        // The submission ends by its own deadline, and what it ends with is the better answer.
        batch.wait(Deadline::NEVER)
    }

    /// The messages of peers that have arrived.
    pub fn notifications(&self) -> Vec<Notification> {
        self.inner().inbox.drain()
    }

    /// Waits for the next message of a peer.
    ///
    /// # Errors
    /// `DeadlineExceeded`.
    pub fn next_notification(&self, deadline: Deadline) -> Result<Notification> {
        self.inner().inbox.next(self.inner().spin(), deadline)
    }

    /// Asks whether a peer is there, and which life of it.
    ///
    /// # Errors
    /// `NotFound`, `PeerUnreachable` or `DeadlineExceeded`.
    pub fn probe(&self, name: &str, deadline: Deadline) -> Result<Option<Incarnation>> {
        self.inner().check_open()?;
        Ok(self.inner().directory.lookup(name, deadline)?.incarnation)
    }

    /// Says by which path a peer is reached, and why not by another.
    pub fn explain(&self, segment: &Segment) -> Explanation {
        self.inner().explain(segment)
    }

    /// The transport that requests without a route take to a peer now, and what it can do.
    pub fn best_transport(&self, segment: &Segment) -> Option<(String, Capabilities)> {
        match segment.peer.choose(self.inner().default_route(), Duration::MAX) {
            Decision::Use(path) => Some((path.transport.name().to_owned(), path.transport.capabilities())),
            Decision::Connect(_) | Decision::None => None,
        }
    }

    /// A peer's memory under a grant, to be read in place, where a path allows that. The peer cannot take it back
    /// until the lease is dropped, or this process is gone.
    ///
    /// # Errors
    /// `Unsupported` when the transport to the peer lends no memory; `AccessDenied` for a grant that has ended;
    /// `NoPath`.
    pub fn lease(&self, segment: &Segment, grant: &GrantDesc) -> Result<LeasedMemory> {
        let inner = self.inner();
        inner.check_open()?;
        match segment.peer.choose(inner.default_route(), Duration::MAX) {
            Decision::Use(path) => LeasedMemory::new(path.transport.lease(path.info.id, grant)?),
            Decision::Connect(_) | Decision::None => Err(segment.peer.no_path(inner.default_route())),
        }
    }

    /// Installs a transport under its name, for peers that are opened from now on.
    ///
    /// # Errors
    /// `Busy` when one of that name is installed; whatever keeps it from starting.
    pub fn install(&self, transport: Arc<dyn Transport>) -> Result<TransportId> {
        let inner = self.inner();
        inner.check_open()?;
        let id = inner.install(transport)?;
        inner.publish()?;
        Ok(id)
    }

    /// Uninstalls a transport: its paths are fenced, and what went along them takes another.
    ///
    /// # Errors
    /// `NotFound`, naming those that are installed.
    pub fn uninstall(&self, name: &str) -> Result<()> {
        let inner = self.inner();
        inner.uninstall(name)?;
        inner.publish()
    }

    /// The number of an installed transport, for a request's route.
    ///
    /// # Errors
    /// `NotFound`, naming those that are installed.
    pub fn transport_id(&self, name: &str) -> Result<TransportId> {
        self.inner().transport_id(name)
    }

    /// An installed transport.
    ///
    /// # Errors
    /// `NotFound`, naming those that are installed.
    pub fn transport(&self, name: &str) -> Result<Arc<dyn Transport>> {
        let id = self.transport_id(name)?;
        self.inner().transport(id).ok_or_else(|| self.inner().no_transport(name))
    }

    /// What the installed transports can do, by name, best first.
    pub fn transports(&self) -> Vec<(String, Capabilities)> {
        let installed = self.inner().installed();
        installed
            .iter()
            .map(|slot| (slot.transport.name().to_owned(), slot.transport.capabilities()))
            .collect()
    }

    /// How much memory is held back since something may still touch it: grants and regions given up in the
    /// background that are not quiet yet.
    pub fn withheld(&self) -> usize {
        self.inner().withheld.lock().len()
    }

    /// Transfers that have not ended, in submissions.
    pub fn in_flight(&self) -> usize {
        self.inner().table.len()
    }

    /// Ends everything: transfers are called off and fenced, transports stopped, the name withdrawn. Idempotent; never
    /// hangs. Every call after it answers `Closed`.
    pub fn shutdown(&self) {
        self.owner.shutdown();
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        self.shutdown();
    }
}

impl Inner {
    /// # Errors
    /// `Closed` after a shutdown, `Forked` in a child process.
    pub(crate) fn check_open(&self) -> Result<()> {
        self.birth.check()?;
        if self.closed.load(Ordering::Acquire) {
            return Err(Error::new(ErrorKind::Closed, "the engine was shut down"));
        }
        Ok(())
    }

    pub(crate) const fn spin(&self) -> Duration {
        self.config.spin()
    }

    pub(crate) fn slice_length(&self) -> SliceLength {
        *self.slice_length.read()
    }

    /// Does something on a control thread; after the shutdown, here.
    pub(crate) fn control(&self, work: impl FnOnce() + Send + 'static) {
        if self.closed.load(Ordering::Acquire) {
            work();
        } else {
            self.runtime.spawn_blocking(work);
        }
    }

    /// The transports that are installed, best first.
    pub(crate) fn installed(&self) -> Vec<Slot> {
        let slots = self.transports.read();
        let mut installed: Vec<Slot> = slots.iter().filter(|slot| slot.installed).cloned().collect();
        drop(slots);
        let order = &self.config.transport_order;
        let rank = |slot: &Slot| order.iter().position(|name| name == slot.transport.name());
        installed.sort_by_key(|slot| rank(slot).unwrap_or(usize::MAX));
        installed
    }

    pub(crate) fn transports_in_order(&self) -> Vec<(TransportId, String)> {
        self.installed().iter().map(|slot| (slot.id, slot.transport.name().to_owned())).collect()
    }

    pub(crate) fn transport(&self, id: TransportId) -> Option<Arc<dyn Transport>> {
        let slots = self.transports.read();
        slots.iter().find(|slot| slot.id == id && slot.installed).map(|slot| Arc::clone(&slot.transport))
    }

    pub(crate) fn transport_id(&self, name: &str) -> Result<TransportId> {
        let found = self.installed().iter().find(|slot| slot.transport.name() == name).map(|slot| slot.id);
        found.ok_or_else(|| self.no_transport(name))
    }

    fn no_transport(&self, name: &str) -> Error {
        let names: Vec<_> = self.transports_in_order().into_iter().map(|(_, name)| name).collect();
        Error::new(
            ErrorKind::NotFound,
            format!("no transport {name:?} is installed; installed: {}", names.join(", ")),
        )
    }

    pub(crate) fn install(self: &Arc<Self>, transport: Arc<dyn Transport>) -> Result<TransportId> {
        let name = transport.name().to_owned();
        if self.transport_id(&name).is_ok() {
            return Err(Error::new(ErrorKind::Busy, format!("a transport {name:?} is installed already")));
        }
        let count = self.transports.read().len();
        let id = u8::try_from(count).map(TransportId).map_err(|_| {
            Error::new(
                ErrorKind::LimitReached,
                "256 transports were installed, which is the most there can be",
            )
        })?;
        let context = TransportContext {
            name: Arc::clone(&self.name),
            incarnation: self.incarnation,
            hello: self.hello.clone(),
            gate: Arc::clone(&self.registry) as _,
            events: Arc::new(Sink { engine: Arc::downgrade(self), transport: id }),
            control: Arc::clone(&self.control_channel),
        };
        let published =
            transport.start(context).map_err(|error| error.context(format_args!("transport {name}")))?;
        self.transports.write().push(Slot { id, transport, published, installed: true });
        self.settle_transports()?;
        Ok(id)
    }

    fn uninstall(self: &Arc<Self>, name: &str) -> Result<()> {
        let id = self.transport_id(name)?;
        let taken = {
            let mut slots = self.transports.write();
            slots.iter_mut().find(|slot| slot.id == id).map(|slot| {
                slot.installed = false;
                Arc::clone(&slot.transport)
            })
        };
        let reason = Error::new(ErrorKind::PathFailed, format!("transport {name:?} was uninstalled"));
        for path in self.paths.all().iter().filter(|path| path.transport_id == id) {
            self.path_down(path, &reason);
        }
        if let Some(transport) = taken {
            transport.stop();
        }
        for path in self.paths.all().iter().filter(|path| path.transport_id == id) {
            self.paths.remove(path.index);
        }
        self.settle_transports()
    }

    /// Recomputes what follows from the set of transports.
    fn settle_transports(&self) -> Result<()> {
        let installed = self.installed();
        let capabilities: Vec<_> = installed.iter().map(|slot| slot.transport.capabilities()).collect();
        let max = capabilities.iter().map(|known| known.max_slice).min().unwrap_or(u64::MAX);
        let preferred = match self.config.slice_bytes {
            0 => capabilities.iter().map(|known| known.preferred_slice).min().unwrap_or(u64::MAX),
            bytes => bytes,
        };
        *self.slice_length.write() = SliceLength { preferred, max };
        *self.default_route.write() = match self.config.preference()? {
            Preference::Auto => Route::Auto,
            Preference::Prefer(name) => self.transport_id(&name).map_or(Route::Auto, Route::Prefer),
            // A transport that is not there (yet) reaches nobody.
            Preference::Require(name) => {
                Route::Require(self.transport_id(&name).unwrap_or(TransportId(u8::MAX)))
            }
        };
        Ok(())
    }

    pub(crate) fn descriptor(&self) -> SegmentDesc {
        let transports = self
            .installed()
            .iter()
            .filter(|slot| !slot.published.is_null())
            .map(|slot| (slot.transport.name().to_owned(), slot.published.clone()))
            .collect();
        let attributes = self.region_attributes.read();
        let mut buffers = self.registry.published();
        for buffer in &mut buffers {
            if let Some(known) = buffer.region.and_then(|region| attributes.get(&region)) {
                buffer.attributes.clone_from(known);
            }
        }
        SegmentDesc {
            name: self.name.to_string(),
            incarnation: Some(self.incarnation),
            hello: Some(self.hello.clone()),
            transports,
            buffers,
        }
    }

    /// Tells the directory what peers are to know now.
    pub(crate) fn publish(&self) -> Result<()> {
        self.directory.publish(&self.descriptor(), Deadline::after(self.config.connect_timeout()))
    }

    /// Submits work to a batch.
    pub(crate) fn post(
        self: &Arc<Self>,
        batch: &Arc<BatchCore>,
        work: &Arc<Work>,
        options: SubmitOptions,
        notice: Option<(&Segment, &[u8])>,
    ) -> Result<Arc<Submission>> {
        self.check_open()?;
        let pins: Result<Vec<_>> = work.regions.iter().map(|region| self.registry.pin(*region)).collect();
        let pins = pins?;
        let notice =
            notice.map(|(segment, data)| Notice { peer: Arc::clone(&segment.peer), data: data.into() });
        let submission = self.table.insert(|key| {
            let work = Arc::clone(work);
            Submission::new(key, work, Arc::clone(batch), options.checksum, options.deadline, notice, pins)
        })?;
        batch.submission_began(&submission);
        let pieces = submission.data_pieces();
        if submission.is_ended() {
            self.end_submission(&submission);
        } else if pieces > 0 {
            self.launch(Run { submission: Arc::clone(&submission), pieces: 0..pieces });
        } else {
            self.launch_notice(&submission);
        }
        if options.deadline.instant().is_some() && !submission.is_ended() {
            self.ticker.arm();
        }
        Ok(submission)
    }

    /// Sends a submission's notice, when everything before it is done.
    pub(crate) fn launch_notice(self: &Arc<Self>, submission: &Arc<Submission>) {
        let Some(notice) = &submission.notice else { return };
        let piece = submission.data_pieces();
        if let Some(doom) = submission.doomed() {
            return self.end_piece(submission, piece, Err(doom.error()));
        }
        if let Some(error) = submission.first_error() {
            let error = error.context("the notice was not sent, since a transfer before it failed");
            return self.end_piece(submission, piece, Err(error));
        }
        let route = self.default_route();
        match notice.peer.choose(route, self.config.retry_after()) {
            Decision::Use(path) => {
                submission.post(piece, path.index);
                if let Err(error) = path.transport.notify(path.info.id, submission.token(piece), &notice.data)
                {
                    let error = posthorse_core::SliceError { error, far_end: posthorse_core::FarEnd::Quiet };
                    self.slice_ended(submission, piece, Err(&error));
                }
            }
            Decision::Connect(transport) => {
                notice
                    .peer
                    .wait_for_path(Run { submission: Arc::clone(submission), pieces: piece..piece + 1 });
                self.connect(&notice.peer, transport);
            }
            Decision::None => self.end_piece(submission, piece, Err(notice.peer.no_path(route))),
        }
    }

    /// Calls submissions off: what is queued ends now, what is under way as soon as its path can end it.
    pub(crate) fn doom(self: &Arc<Self>, submissions: &[Arc<Submission>], doom: Doom) {
        let live: Vec<_> = submissions.iter().filter(|submission| !submission.is_ended()).collect();
        if live.is_empty() {
            return;
        }
        live.iter().for_each(|submission| submission.doom(doom));
        self.sweep();
        for submission in live {
            for path in submission.paths_in_flight().into_iter().filter_map(|index| self.paths.get(index)) {
                path.transport.cancel(path.info.id, &mut |token| (token >> 32) as u32 == submission.key);
            }
        }
        self.ticker.arm();
    }

    fn explain(&self, segment: &Segment) -> Explanation {
        let peer = &segment.peer;
        let mut transports = Vec::new();
        peer.for_each_reach(|name, how| {
            let (state, reason) = match how {
                How::Absent => ("absent", Some("the peer does not offer it".to_owned())),
                How::Untried => ("untried", Some("it was not needed so far".to_owned())),
                How::Connecting => ("connecting", None),
                How::Connected(paths) if paths.iter().any(|path| path.is_up()) => ("up", None),
                How::Connected(paths) => {
                    ("down", paths.iter().find_map(|path| path.reason()).map(|e| e.to_string()))
                }
                How::Failed { error, .. } => ("down", Some(error.to_string())),
            };
            let paths = match how {
                How::Connected(paths) => paths.as_slice(),
                _ => &[],
            };
            let paths = paths
                .iter()
                .map(|path| PathReport {
                    local: path.info.local_device.clone(),
                    remote: path.info.remote_device.clone(),
                    under_way: path.under_way(),
                    reason: path.reason().map(|error| error.to_string()),
                })
                .collect();
            transports.push(TransportReport { name: name.to_owned(), state, reason, paths });
        });
        let chosen = match peer.choose(self.default_route(), Duration::MAX) {
            Decision::Use(path) => Some(path.transport.name().to_owned()),
            _ => None,
        };
        Explanation {
            peer: segment.name().to_owned(),
            incarnation: segment.incarnation(),
            ended: peer.ended().map(ToString::to_string),
            chosen,
            transports,
        }
    }
}

impl Owner {
    fn shutdown(&self) {
        let inner = &self.inner;
        if inner.birth.check().is_err() || inner.closed.swap(true, Ordering::AcqRel) {
            return;
        }
        // From here on nothing new begins. What there is, is called off, and the transports end it.
        inner.doom(&inner.table.live(), Doom::Closed);
        for slot in inner.installed() {
            slot.transport.stop();
        }
        inner.sweep();
        if let Err(error) =
            inner.directory.withdraw(&inner.name, Deadline::after(inner.config.connect_timeout()))
        {
            tracing::warn!(%error, "the segment name could not be withdrawn");
        }
        inner.ticker.stop();
        if let Some(ticker) = self.ticker.lock().take()
            && ticker.thread().id() != std::thread::current().id()
        {
            let _ = ticker.join();
        }
        if let Some(runtime) = self.runtime.lock().take() {
            runtime.shutdown_timeout(inner.config.fence_timeout());
        }
        let left = std::mem::take(&mut *inner.again.lock());
        for run in left {
            inner.end_run(&run, &Doom::Closed.error());
        }
        inner.retry_withheld();
    }
}
