//! The engine itself: what it is made of, how it starts and ends.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use posthorse_core::{
    Access, AtWork, Attributes, Capabilities, ControlChannel, Deadline, Ending, Error, ErrorKind, GrantDesc,
    Hello, Incarnation, Region, Result, Route, SegmentDesc, SegmentId, Transport, TransportContext,
    TransportId,
};
use posthorse_memory::ForkGuard;
use posthorse_segment::{Directory, Registry};
use tokio::sync::Semaphore;

use crate::batch::{Batch, BatchCore, SubmitOptions};
use crate::builder::EngineBuilder;
use crate::config::{EngineConfig, Precedence, of_part};
use crate::events::Sink;
use crate::explain::{Explanation, PathReport, TransportReport};
use crate::held::HeldGrant;
use crate::inbox::{Inbox, Notification};
use crate::lease::LeasedMemory;
use crate::memory::{RegisteredMemory, Withheld};
use crate::path::{Paths, Run};
use crate::peer::{Decision, How, Peer, Segment};
use crate::peers::Peers;
use crate::plan::Plan;
use crate::regions::Regions;
use crate::runtime::ControlRuntime;
use crate::slicing::SliceLength;
use crate::submission::{Doom, Notice, Submission, Work};
use crate::table::Table;
use crate::ticker::Ticker;
use crate::transports::Transports;

/// Everything the engine's parts share.
#[derive(Debug)]
pub(crate) struct Inner {
    pub(crate) name: Arc<str>,
    pub(crate) incarnation: Incarnation,
    pub(crate) config: EngineConfig,
    pub(crate) hello: Hello,
    pub(crate) fork: ForkGuard,
    pub(crate) closed: AtomicBool,
    pub(crate) registry: Arc<Registry>,
    pub(crate) regions: Regions,
    pub(crate) transports: Transports,
    /// How often something changed that peers are to know.
    pub(crate) changes: AtomicU64,
    /// Whether a control thread is about to publish.
    pub(crate) publish_due: AtomicBool,
    pub(crate) directory: Arc<dyn Directory>,
    pub(crate) control_channel: Arc<dyn ControlChannel>,
    pub(crate) runtime: tokio::runtime::Handle,
    /// Of the control threads, for what waits for a peer.
    pub(crate) turns: Arc<Semaphore>,
    pub(crate) peers: Peers,
    pub(crate) paths: Paths,
    pub(crate) table: Table,
    /// Runs that have to be sent again.
    pub(crate) again: Mutex<Vec<Run>>,
    /// Notices that found a queue full: the ticker sends them again.
    pub(crate) later: Mutex<Vec<Run>>,
    pub(crate) withheld: Mutex<Vec<Withheld>>,
    pub(crate) inbox: Arc<Inbox>,
    pub(crate) ticker: Arc<Ticker>,
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
    pub(crate) runtime: ControlRuntime,
    pub(crate) ticker: Mutex<Option<std::thread::JoinHandle<()>>>,
    pub(crate) ending: Ending,
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

    /// What peers learn of this engine. In a child process it knows of no memory and no transports.
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
        // Where one could not be registered, too: what was registered before it may be published already.
        let published = self.publish(access);
        let memories = memories?;
        published.map(|()| memories)
    }

    /// Unregisters several regions, and returns when nothing touches any of them any more. All are given up, also where
    /// one is still touched at the deadline.
    ///
    /// # Errors
    /// As [`RegisteredMemory::unregister`], for the first that fails.
    pub fn unregister_many(
        &self,
        memories: impl IntoIterator<Item = RegisteredMemory>,
        deadline: Deadline,
    ) -> Result<()> {
        memories.into_iter().map(|memory| memory.unregister(deadline)).fold(Ok(()), Result::and)
    }

    /// Tells the directory of memory that was registered, if peers are to know of it.
    fn publish(&self, access: Access) -> Result<()> {
        self.inner().fork.check()?;
        if access == Access::None { Ok(()) } else { self.inner().publish() }
    }

    /// The registered memory that holds the whole range, for callers that know addresses alone.
    ///
    /// # Safety
    /// As for [`LocalRange::new`](posthorse_core::LocalRange::new): an address says nothing of who refers to it.
    pub unsafe fn find(&self, address: u64, len: u64) -> Option<posthorse_core::LocalRange> {
        self.inner().fork.check().ok()?;
        let (region, offset) = self.inner().registry.find(address, len)?;
        // SAFETY: the caller's promise.
        Some(unsafe { posthorse_core::LocalRange::new(region, offset) })
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

    /// This life of a peer, if it is open and a path to it is up. Never waits.
    pub fn opened(&self, name: &str, incarnation: Incarnation) -> Option<Segment> {
        self.inner().opened(name, incarnation)
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
        if inner.fork.is_forked() {
            return;
        }
        if segment.id() != SegmentId::LOCAL && inner.peers.contains(&segment.peer) {
            let error = Error::new(ErrorKind::Closed, "the segment was closed").with_peer(segment.name());
            inner.end_peer(&segment.peer, error);
            inner.peers.remove(segment.id());
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
        if self.inner().fork.is_forked() { Vec::new() } else { self.inner().inbox.drain() }
    }

    /// Waits for the next message of a peer.
    ///
    /// # Errors
    /// `DeadlineExceeded`; `Forked`.
    pub fn next_notification(&self, deadline: Deadline) -> Result<Notification> {
        self.inner().fork.check()?;
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

    /// The transport that requests of this route take to a peer now, or that they would have connected, and what it can
    /// do.
    pub fn best_transport(&self, segment: &Segment, route: Route) -> Option<(String, Capabilities)> {
        let inner = self.inner();
        inner.fork.check().ok()?;
        let transport = match segment.peer.choose(inner.route(route), |_, _| false) {
            Decision::Use(path, _) => Arc::clone(&path.transport),
            Decision::Connect(id) => {
                inner.transports.installed().into_iter().find(|slot| slot.id == id)?.transport
            }
            Decision::None => return None,
        };
        Some((transport.name().to_owned(), transport.capabilities()))
    }

    /// Which transport this engine prefers or requires, in the words of [`EngineConfig::transport`](crate::EngineConfig),
    /// for a peer that takes that into account.
    pub fn transport_preference(&self) -> String {
        self.inner().transports.preference().to_string()
    }

    /// The route that both this engine's configuration and a peer's allow, which `theirs` says in the words of
    /// [`EngineConfig::transport`](crate::EngineConfig). What is required at either end goes before what is preferred;
    /// where both prefer one, `precedence` says whose counts.
    ///
    /// # Errors
    /// `NoPath` when they exclude each other, or the peer requires what is not installed here; `Malformed` for what is no
    /// preference.
    pub fn route_with(&self, theirs: &str, precedence: Precedence) -> Result<Route> {
        self.inner().check_open()?;
        self.inner().transports.route_with(theirs, precedence)
    }

    /// Holds a peer's grant, for requests that are submitted meanwhile.
    pub fn hold(&self, segment: &Segment, grant: &GrantDesc) -> HeldGrant {
        HeldGrant::new(segment, grant)
    }

    /// A peer's memory under a grant, to be read in place, where a path that `route` allows can do that. The peer cannot
    /// take it back until the lease is dropped, or this process is gone.
    ///
    /// # Errors
    /// `Unsupported` when the transport to the peer lends no memory; `AccessDenied` for a grant that has ended;
    /// `NoPath`.
    pub fn lease(&self, segment: &Segment, route: Route, grant: &GrantDesc) -> Result<LeasedMemory> {
        let inner = self.inner();
        inner.check_opened(&segment.peer)?;
        let path = inner.reach(&segment.peer, route, Deadline::after(inner.config.connect_timeout()))?;
        LeasedMemory::new(path.transport.lease(path.info.id, grant)?)
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
        inner.check_open()?;
        inner.take_out(inner.transports.find(name)?.0);
        inner.publish()
    }

    /// The number of an installed transport, for a request's route.
    ///
    /// # Errors
    /// `NotFound`, naming those that are installed.
    pub fn transport_id(&self, name: &str) -> Result<TransportId> {
        self.inner().fork.check()?;
        self.inner().transports.find(name).map(|(id, _)| id)
    }

    /// An installed transport.
    ///
    /// # Errors
    /// `NotFound`, naming those that are installed.
    pub fn transport(&self, name: &str) -> Result<Arc<dyn Transport>> {
        self.inner().fork.check()?;
        self.inner().transports.find(name).map(|(_, transport)| transport)
    }

    /// What the installed transports can do, by name, best first.
    pub fn transports(&self) -> Vec<(String, Capabilities)> {
        if self.inner().fork.is_forked() {
            return Vec::new();
        }
        let installed = self.inner().transports.installed();
        installed.into_iter().map(|slot| (slot.name, slot.capabilities)).collect()
    }

    /// How much memory is held back since something may still touch it: grants and regions given up in the
    /// background that are not quiet yet.
    pub fn withheld(&self) -> usize {
        if self.inner().fork.is_forked() { 0 } else { self.inner().withheld.lock().len() }
    }

    /// Transfers that have not ended, in submissions.
    pub fn in_flight(&self) -> usize {
        if self.inner().fork.is_forked() { 0 } else { self.inner().table.len() }
    }

    /// Ends everything: transfers are called off and fenced, transports stopped, the name withdrawn. Idempotent; never
    /// hangs. When it returns, the engine is down, whichever call brought that about; only one from within the engine's
    /// own work, such as the waker of a batch, may return before. Every call after it answers `Closed`.
    pub fn shutdown(&self) {
        self.owner.shutdown();
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        self.shutdown();
        if self.inner.fork.is_forked() {
            // The threads of the runtime and the transports are the parent's: here, nobody can wait for them.
            self.runtime.forget();
            std::mem::forget(Arc::clone(&self.inner));
        }
    }
}

/// What to do with a message that a transport cannot take.
const LONG_NOTICE: &str = "send less, or write it to the peer's memory and send where it lies; over tcp the limit is the \
                           key `notify_bytes` of tcp, at both ends";

impl Inner {
    pub(crate) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }

    /// # Errors
    /// `Closed` after a shutdown, `Forked` in a child process.
    pub(crate) fn check_open(&self) -> Result<()> {
        self.fork.check()?;
        if self.is_closed() {
            return Err(Error::new(ErrorKind::Closed, "the engine was shut down"));
        }
        Ok(())
    }

    pub(crate) const fn spin(&self) -> Duration {
        self.config.spin()
    }

    pub(crate) fn slice_length(&self) -> SliceLength {
        self.transports.slice_length()
    }

    /// Does something on a control thread; after the shutdown, here. During the shutdown it may be left undone.
    pub(crate) fn control(&self, work: impl FnOnce() + Send + 'static) {
        if self.is_closed() {
            work();
        } else {
            self.runtime.spawn_blocking(|| {
                let _at_work = AtWork::begin();
                work();
            });
        }
    }

    /// As [`Inner::control`], for what waits for a peer: in its turn, so that threads are left for what waits for none.
    pub(crate) fn control_in_turn(self: &Arc<Self>, work: impl FnOnce() + Send + 'static) {
        if self.is_closed() {
            return work();
        }
        let (engine, turns) = (Arc::clone(self), Arc::clone(&self.turns));
        self.runtime.spawn(async move {
            let Ok(turn) = turns.acquire_owned().await else { return };
            engine.control(move || {
                let _turn = turn;
                work();
            });
        });
    }

    pub(crate) fn install(self: &Arc<Self>, transport: Arc<dyn Transport>) -> Result<TransportId> {
        let id = self.transports.reserve(&transport)?;
        let context = TransportContext {
            name: Arc::clone(&self.name),
            incarnation: self.incarnation,
            hello: self.hello.clone(),
            gate: Arc::clone(&self.registry) as _,
            events: Arc::new(Sink { engine: Arc::downgrade(self), transport: id }),
            control: Arc::clone(&self.control_channel),
        };
        let outcome = transport.start(context).and_then(|published| {
            self.transports.started(id, published);
            // A shutdown that did not find it installed has left it running.
            self.check_open()?;
            self.register_regions(id, &transport)
        });
        match outcome {
            Ok(()) => Ok(id),
            Err(error) => {
                self.take_out(id);
                Err(of_part(transport.name(), error))
            }
        }
    }

    /// Stops a transport. What went by it goes another way.
    fn take_out(self: &Arc<Self>, id: TransportId) {
        let Some(transport) = self.transports.take_out(id) else { return };
        let reason =
            Error::new(ErrorKind::PathFailed, format!("transport {:?} was uninstalled", transport.name()));
        // A path that is being made now is given up by whoever makes it.
        let peers = self.peers.all();
        let paths: Vec<_> = peers.iter().flat_map(|peer| peer.forget(id)).collect();
        paths.iter().for_each(|path| self.path_down(path, &reason));
        peers.iter().for_each(|peer| self.relaunch(peer.take_waiting(|_| true)));
        transport.stop();
        for path in paths {
            self.paths.remove(&path);
        }
    }

    pub(crate) fn descriptor(&self) -> SegmentDesc {
        let mut desc = SegmentDesc {
            name: self.name.to_string(),
            incarnation: Some(self.incarnation),
            hello: Some(self.hello.clone()),
            transports: Attributes::new(),
            buffers: Vec::new(),
        };
        if !self.fork.is_forked() {
            let installed = self.transports.installed().into_iter();
            desc.transports = installed
                .filter(|slot| !slot.published.is_null())
                .map(|slot| (slot.name, slot.published))
                .collect();
            desc.buffers = self.registry.published();
            self.regions.fill_in(&mut desc.buffers);
        }
        desc
    }

    /// Tells the directory what peers are to know now. Of several threads that do so, the last to publish has seen
    /// every change.
    pub(crate) fn publish(&self) -> Result<()> {
        let mut seen = self.changes.fetch_add(1, Ordering::AcqRel) + 1;
        loop {
            let deadline = Deadline::after(self.config.connect_timeout());
            self.directory.publish(&self.descriptor(), deadline)?;
            let now = self.changes.load(Ordering::Acquire);
            if now == seen {
                return Ok(());
            }
            seen = now;
        }
    }

    /// As [`Inner::publish`], in the background, and once for several changes.
    pub(crate) fn publish_soon(self: &Arc<Self>) {
        if self.is_closed() || self.publish_due.swap(true, Ordering::AcqRel) {
            return;
        }
        let engine = Arc::clone(self);
        self.control(move || {
            engine.publish_due.store(false, Ordering::Release);
            if let Err(error) = engine.check_open().and_then(|()| engine.publish()) {
                tracing::warn!(%error, "peers were not told that memory was unregistered");
            }
        });
    }

    /// Checks that a peer was opened by this engine, or is closed anyhow.
    pub(crate) fn check_opened(&self, peer: &Arc<Peer>) -> Result<()> {
        self.check_open()?;
        // In this order: a peer is ended before it is removed.
        if self.peers.contains(peer) || peer.ended().is_some() {
            return Ok(());
        }
        Err(Error::invalid_argument(
            "the segment",
            format_args!("{} of another engine", peer.name),
            "one that this engine opened",
        ))
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
        batch.submission_began();
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
        let run = || Run { submission: Arc::clone(submission), pieces: piece..piece + 1 };
        match notice.peer.choose(route, |error, failed| self.worth_again(error, failed)) {
            Decision::Use(path, again) => {
                if let Some(transport) = again {
                    self.connect(&notice.peer, transport);
                }
                submission.post(piece, path.number);
                let outcome = path.transport.notify(path.info.id, submission.token(piece), &notice.data);
                let Err(error) = outcome else { return };
                match error.kind() {
                    ErrorKind::QueueFull => {
                        submission.unpost(piece);
                        self.later.lock().push(run());
                        self.ticker.arm();
                        return self.end_if_closed(&notice.peer);
                    }
                    ErrorKind::TooLarge | ErrorKind::Unsupported => {}
                    // As with slices: the path is down or unknown.
                    _ => self.path_down(&path, &error),
                }
                let error = match error.kind() {
                    ErrorKind::TooLarge => error.with_advice(LONG_NOTICE),
                    _ => error,
                };
                let error = posthorse_core::SliceError { error, far_end: posthorse_core::FarEnd::Quiet };
                self.slice_ended(submission, piece, Err(&error), &mut Some(path));
            }
            Decision::Connect(transport) => {
                notice.peer.wait_for_path(run());
                self.connect(&notice.peer, transport);
            }
            Decision::None => self.end_piece(submission, piece, Err(self.no_path(&notice.peer, route))),
        }
    }

    /// Calls submissions off: what is queued ends now, what is under way as soon as its path can end it.
    pub(crate) fn doom<'a>(
        self: &Arc<Self>,
        submissions: impl IntoIterator<Item = &'a Arc<Submission>>,
        doom: Doom,
    ) {
        // In a forked child the locks may be held for ever, by threads that are not there.
        if self.fork.is_forked() {
            return;
        }
        let live: Vec<_> = submissions.into_iter().filter(|submission| !submission.is_ended()).collect();
        if live.is_empty() {
            return;
        }
        live.iter().for_each(|submission| submission.doom(doom));
        self.sweep();
        for submission in live {
            self.cancel(submission);
        }
        self.ticker.arm();
    }

    /// Drops the slices of a submission that are with a transport and not posted yet.
    pub(crate) fn cancel(&self, submission: &Submission) {
        for path in submission.paths_in_flight().into_iter().filter_map(|number| self.paths.get(number)) {
            path.transport.cancel(path.info.id, &mut |token| (token >> 32) as u32 == submission.key);
        }
    }

    fn explain(&self, segment: &Segment) -> Explanation {
        let peer = &segment.peer;
        if let Err(error) = self.fork.check() {
            return Explanation {
                peer: segment.name().to_owned(),
                incarnation: segment.incarnation(),
                ended: Some(error.to_string()),
                chosen: None,
                transports: Vec::new(),
            };
        }
        let mut transports = Vec::new();
        peer.for_each_reach(|name, how| {
            let (state, reason) = match how {
                How::Absent => ("absent", Some("the peer does not offer it".to_owned())),
                How::Untried => ("untried", Some("it was not needed so far".to_owned())),
                How::Connecting { .. } => ("connecting", None),
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
        for (name, error) in self.transports.lacking() {
            let reason = Some(format!("this host: {error}"));
            transports.push(TransportReport { name, state: "absent", reason, paths: Vec::new() });
        }
        let chosen = match peer.choose(self.default_route(), |_, _| false) {
            Decision::Use(path, _) => Some(path.transport.name().to_owned()),
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
        if inner.fork.is_forked() {
            return;
        }
        let Some(_duty) = self.ending.begin() else { return };
        inner.closed.store(true, Ordering::Release);
        // From here on nothing new begins. What there is, is called off, and the transports end it.
        inner.doom(&inner.table.live(), Doom::Closed);
        for slot in inner.transports.installed() {
            slot.transport.stop();
        }
        for peer in inner.peers.all() {
            peer.end(Doom::Closed.error());
        }
        if let Err(error) =
            inner.directory.withdraw(&inner.name, Deadline::after(inner.config.connect_timeout()))
        {
            tracing::warn!(%error, "the segment name could not be withdrawn");
        }
        inner.ticker.stop();
        let ticker = self.ticker.lock().take();
        if let Some(ticker) = ticker
            && ticker.thread().id() != std::thread::current().id()
        {
            let _ = ticker.join();
        }
        self.runtime.stop(inner.config.fence_timeout());
        // What control threads have left undone: see `Inner::end_if_closed`.
        for run in inner.take_queued() {
            inner.end_run(&run, &Doom::Closed.error());
        }
        inner.retry_withheld();
    }
}
