//! How peers are opened and their transports connected.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use posthorse_core::{
    Deadline, Error, ErrorKind, Incarnation, Path, PathState, Result, Route, SegmentDesc, SegmentId,
    TransportId,
};

use crate::engine::Inner;
use crate::path::{PathEntry, Run};
use crate::peer::{Decision, Peer, Segment};
use crate::peers::{Asked, Peers};
use crate::submission::Doom;

/// How long a path is down before it is given up: it may come up again.
const STAYS_DOWN: Duration = Duration::from_secs(1);

impl Inner {
    /// Opens a segment: finds its descriptor, and a first path to it.
    pub(crate) fn open(
        self: &Arc<Self>,
        name: &str,
        known: Option<Incarnation>,
        deadline: Deadline,
    ) -> Result<Segment> {
        self.check_open()?;
        if name == &*self.name {
            return self.local_segment();
        }
        if let (Some(peer), Some(_)) = (self.peers.by_name(name), known)
            && peer.incarnation == known
            && peer.ended().is_none()
        {
            return self.reach(&peer, Route::Auto, deadline).map(|_| Segment { peer });
        }
        let peer = loop {
            let asked = Peers::asking();
            let desc = self.directory.lookup(name, deadline)?;
            if let (Some(wanted), Some(found)) = (known, desc.incarnation)
                && wanted != found
            {
                return Err(Error::new(
                    ErrorKind::PeerRestarted,
                    format!("the peer's life {wanted} is over; under its name lives {found} now"),
                )
                .with_peer(name));
            }
            // The answer may be of a life that is over, and came late: then it is asked again.
            if let Some(peer) = self.adopt(desc, asked)? {
                break peer;
            }
        };
        self.reach(&peer, Route::Auto, deadline).map(|_| Segment { peer })
    }

    /// A life of a peer to which a path is up.
    pub(crate) fn opened(&self, name: &str, incarnation: Incarnation) -> Option<Segment> {
        self.check_open().ok()?;
        let known =
            if name == &*self.name { self.peers.by_id(SegmentId::LOCAL) } else { self.peers.by_name(name) };
        let peer = known.filter(|peer| peer.incarnation == Some(incarnation))?;
        match peer.choose(self.route(Route::Auto), |_, _| false) {
            Decision::Use(..) => Some(Segment { peer }),
            Decision::Connect(_) | Decision::None => None,
        }
    }

    /// The peer of a descriptor: the one we know, if it is the same life of it, else a new one. `None` where the answer
    /// of the directory, which was `asked`, may be older than what is known.
    fn adopt(self: &Arc<Self>, desc: SegmentDesc, asked: Asked) -> Result<Option<Arc<Peer>>> {
        if let Some(theirs) = &desc.hello {
            self.hello.agree(theirs).map_err(|error| error.with_peer(desc.name.as_str()))?;
        }
        let adopted = self.peers.adopt(
            &desc.name,
            asked,
            |there| there.is_same_life(&desc),
            |id| Peer::new(id, desc.clone(), &self.transports.names()),
        );
        let Some((peer, old)) = adopted else { return Ok(None) };
        peer.update(&desc, || self.transports.names());
        if let Some(old) = old {
            // Requests against the old life must not reach the new one, whose memory holds something else.
            let error = Error::new(ErrorKind::PeerRestarted, "the peer restarted under its name");
            self.end_peer(&old, error.with_peer(desc.name));
        }
        // Those that were held when their paths were given up.
        self.forgotten(self.peers.forget_gone());
        Ok(Some(peer))
    }

    /// Ends a life of a peer: what waits for it fails, and its paths are given up.
    pub(crate) fn end_peer(self: &Arc<Self>, peer: &Arc<Peer>, error: Error) {
        peer.end(error.clone());
        for path in peer.take_paths() {
            self.give_up(&path, &error);
        }
        for run in peer.take_waiting(|_| true) {
            self.end_run(&run, &error);
        }
    }

    /// Gives up what paths are left to peers that were forgotten: some that were never up, say.
    fn forgotten(self: &Arc<Self>, peers: impl IntoIterator<Item = Arc<Peer>>) {
        for path in peers.into_iter().flat_map(|peer| peer.take_paths()) {
            self.give_up(&path, &path.down_error());
        }
    }

    /// Fences a path and forgets it, unless that was done before.
    fn give_up(self: &Arc<Self>, path: &Arc<PathEntry>, reason: &Error) {
        let stranded = path.take_down(reason);
        // Before the transport may use its number again.
        if self.paths.remove(path) {
            path.transport.disconnect(path.info.id);
        }
        self.relaunch(stranded);
    }

    /// Gives up a path that went down, if it stays so and its transport has no other to the peer, and forgets the peer if
    /// nobody needs it: most that are gone never come back, and what is kept for them would only grow.
    pub(crate) fn watch(self: &Arc<Self>, path: &Arc<PathEntry>) {
        if path.watched.swap(true, Ordering::SeqCst) {
            return;
        }
        let (engine, path) = (Arc::downgrade(self), Arc::clone(path));
        self.runtime.spawn(async move {
            loop {
                tokio::time::sleep(STAYS_DOWN).await;
                // Given up otherwise, what was under way along it is counted no more.
                if engine.upgrade().is_none_or(|engine| engine.paths.get(path.number).is_none()) {
                    return;
                }
                if path.is_up() {
                    path.watched.store(false, Ordering::SeqCst);
                    // Whoever took it down again just now may have found it watched.
                    if path.is_up() || path.watched.swap(true, Ordering::SeqCst) {
                        return;
                    }
                } else if path.under_way() == 0
                    && engine.upgrade().is_some_and(|engine| !engine.has_sibling(&path))
                {
                    break;
                }
            }
            let Some(engine) = engine.upgrade() else { return };
            let here = Arc::clone(&engine);
            engine.control(move || {
                here.give_up(&path, &path.down_error());
                here.forgotten(here.peers.forget_if_gone(path.peer));
            });
        });
    }

    /// Whether the transport of a path that is down reaches its peer by another: then nobody connects it anew, and the
    /// path is kept for when it comes up again.
    fn has_sibling(&self, path: &PathEntry) -> bool {
        self.peers.by_id(path.peer).is_some_and(|peer| peer.is_up_by(path.transport_id))
    }

    /// Waits until there is a path to the peer for requests with this route. What failed before is tried again.
    pub(crate) fn reach(
        self: &Arc<Self>,
        peer: &Arc<Peer>,
        route: Route,
        deadline: Deadline,
    ) -> Result<Arc<PathEntry>> {
        let started = Instant::now();
        let route = self.route(route);
        loop {
            // Where the engine is shut down meanwhile, nobody connects any more.
            self.check_open()?;
            match peer.choose(route, |_, failed| failed < started) {
                Decision::Use(path, _) => return Ok(path),
                Decision::None => return Err(self.no_path(peer, route)),
                Decision::Connect(transport) => {
                    self.connect(peer, transport);
                    let settled = || !peer.is_connecting(transport) || peer.ended().is_some();
                    if !peer.signal.wait(Duration::ZERO, deadline, settled) {
                        return Err(Deadline::exceeded("a path to the peer").with_peer(peer.name.as_str()));
                    }
                }
            }
        }
    }

    /// Connects a transport to a peer, in the background. What waits for a path is sent when that is settled.
    pub(crate) fn connect(self: &Arc<Self>, peer: &Arc<Peer>, transport: TransportId) {
        match peer.begin_connecting(transport) {
            Some(old) => {
                let (engine, peer) = (Arc::clone(self), Arc::clone(peer));
                let is_own = peer.id == SegmentId::LOCAL;
                let connect = move || engine.connect_now(&peer, transport, old);
                // The engine itself always answers.
                if is_own { self.control(connect) } else { self.control_in_turn(connect) }
            }
            // Somebody else is at it, or it was settled meanwhile: then what waits can go.
            None if !peer.is_connecting(transport) => self.relaunch(peer.take_waiting(|_| true)),
            None => {}
        }
        self.end_if_closed(peer);
    }

    fn connect_now(self: &Arc<Self>, peer: &Arc<Peer>, id: TransportId, old: Vec<Arc<PathEntry>>) {
        let reconnecting = !old.is_empty();
        for path in old {
            let reason = path.down_error();
            self.give_up(&path, &reason);
        }
        let outcome = self.connect_transport(peer, id, reconnecting);
        if let Err(error) = &outcome {
            let (peer, transport) = (peer.name.as_str(), self.transports.name(id));
            match error.kind() {
                // Each engine has transports that do not reach every peer.
                ErrorKind::Unsupported | ErrorKind::NoPath => {
                    tracing::debug!(peer, transport, %error, "no path by this transport");
                }
                _ => tracing::info!(peer, transport, %error, "no path by this transport"),
            }
        }
        let restarted =
            outcome.as_ref().err().filter(|error| error.kind() == ErrorKind::PeerRestarted).cloned();
        for path in peer.connected(id, outcome) {
            self.give_up(&path, &Error::new(ErrorKind::PathFailed, "the transport was uninstalled"));
        }
        // Whoever ended the peer meanwhile did not find these paths.
        if let Some(error) = restarted.or_else(|| peer.ended().cloned()) {
            self.end_peer(peer, error);
        }
        for run in peer.take_waiting(|_| true) {
            self.launch(run);
        }
    }

    fn connect_transport(
        self: &Arc<Self>,
        peer: &Arc<Peer>,
        id: TransportId,
        reconnecting: bool,
    ) -> Result<Vec<Arc<PathEntry>>> {
        self.check_open()?;
        let deadline = Deadline::after(self.config.connect_timeout());
        let transport = self
            .transports
            .get(id)
            .ok_or_else(|| Error::new(ErrorKind::NoPath, "the transport was uninstalled"))?;
        if reconnecting {
            self.check_life(peer, deadline)?;
        }
        let started = Instant::now();
        let paths = transport.connect(&peer.desc(), deadline)?;
        tracing::debug!(
            peer = peer.name.as_str(),
            transport = transport.name(),
            paths = paths.len(),
            took_us = started.elapsed().as_micros() as u64,
            "connected"
        );
        if let Some(error) = all_down(&paths) {
            // Nothing will ever go over them, and each attempt makes new ones.
            paths.iter().for_each(|path| transport.disconnect(path.id));
            return Err(error);
        }
        let several = paths.len() > 1;
        let entries = paths.into_iter().map(|info| {
            let transport = Arc::clone(&transport);
            self.paths.insert(|number| PathEntry::new(number, peer.id, id, transport, info, several))
        });
        Ok(entries.collect())
    }

    /// Makes sure, before a path is made again, that the peer is still the one we opened.
    fn check_life(&self, peer: &Peer, deadline: Deadline) -> Result<()> {
        let Some(known) = peer.incarnation else { return Ok(()) };
        let now = self.directory.lookup(&peer.name, deadline)?;
        if now.incarnation == Some(known) {
            return Ok(());
        }
        Err(Error::new(ErrorKind::PeerRestarted, "the peer restarted under its name")
            .with_peer(peer.name.as_str()))
    }

    /// The engine's own segment, as a peer.
    pub(crate) fn local_segment(self: &Arc<Self>) -> Result<Segment> {
        let desc = self.descriptor();
        let peer = match self.peers.by_id(SegmentId::LOCAL) {
            Some(peer) => {
                peer.update(&desc, || self.transports.names());
                peer
            }
            None => {
                let make = || Peer::new(SegmentId::LOCAL, desc, &self.transports.names());
                self.peers.insert_local(make)
            }
        };
        self.reach(&peer, Route::Auto, Deadline::after(self.config.connect_timeout()))
            .map(|_| Segment { peer })
    }

    /// Ends the runs of submissions that are being called off, wherever they wait.
    pub(crate) fn sweep(self: &Arc<Self>) {
        let doomed = |run: &Run| run.submission.doomed().is_some();
        let mut runs: Vec<Run> = self.later.lock().extract_if(.., |run| doomed(run)).collect();
        for path in self.paths.all() {
            runs.extend(path.take_doomed());
        }
        for peer in self.peers.all() {
            runs.extend(peer.take_waiting(doomed));
        }
        for run in runs {
            if let Some(doom) = run.submission.doomed() {
                self.end_run(&run, &doom.error());
            }
        }
    }

    /// After the shutdown nothing is connected or sent any more, and nobody looks at what waits. So whoever has
    /// something wait looks afterwards whether the engine was shut down, and the shutdown looks at what waits at its
    /// end: by the locks of the queues, one of the two finds it.
    pub(crate) fn end_if_closed(self: &Arc<Self>, peer: &Peer) {
        if self.is_closed() {
            let runs = peer.take_waiting(|_| true).into_iter().chain(self.take_queued());
            for run in runs {
                self.end_run(&run, &Doom::Closed.error());
            }
        }
    }

    /// Everything that waits anywhere.
    pub(crate) fn take_queued(&self) -> Vec<Run> {
        let mut runs = std::mem::take(&mut *self.again.lock());
        runs.append(&mut self.later.lock());
        for path in self.paths.all() {
            runs.extend(path.take_all());
        }
        for peer in self.peers.all() {
            runs.extend(peer.take_waiting(|_| true));
        }
        runs
    }

    /// Whether requests try a transport again that could not be connected.
    pub(crate) fn worth_again(&self, error: &Error, failed: Instant) -> bool {
        error.retryable() && failed.elapsed() >= self.config.retry_after()
    }

    /// The error of a request that no transport can carry.
    pub(crate) fn no_path(&self, peer: &Peer, route: Route) -> Error {
        match self.transports.unreachable(route) {
            Some(error) if peer.ended().is_none() => error.with_peer(peer.name.as_str()),
            _ => peer.no_path(route),
        }
    }

    /// The route of requests that leave it open.
    pub(crate) fn default_route(&self) -> Route {
        self.transports.route()
    }
}

/// The reason why none of these paths can be used, if so.
fn all_down(paths: &[Path]) -> Option<Error> {
    let mut reason = Error::new(ErrorKind::NoPath, "no path was found");
    for path in paths {
        match &path.state {
            PathState::Up => return None,
            PathState::Down(error) => reason = error.clone(),
        }
    }
    Some(reason)
}
