//! Sends pieces out: along the chosen path at once where there is room, else when there is.
//!
//! Nothing here holds a lock while it calls a transport.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use arrayvec::ArrayVec;
use posthorse_core::{
    Error, ErrorKind, FarEnd, Level, Priority, RemoteKey, Route, Slice, SliceError, TransportId,
};

use crate::engine::Inner;
use crate::path::{CHUNK, Full, PathEntry, Run};
use crate::peer::Decision;
use crate::rails::{Rail, best};
use crate::submission::{Doom, Prepared, Submission};

/// Into how many parts for each rail a run is divided.
const PARTS: usize = 8;

impl Inner {
    /// Sends pieces of a submission, each run of one peer and route along the best path.
    pub(crate) fn launch(self: &Arc<Self>, run: Run) {
        if self.is_closed() {
            return self.end_run(&run, &Doom::Closed.error());
        }
        let Run { submission, pieces } = run;
        let work = &submission.work;
        let keyed = self.transports.keyed();
        let mut start = pieces.start;
        while start < pieces.end {
            if start == submission.data_pieces() {
                self.launch_notice(&submission);
                return;
            }
            let request = |piece: u32| {
                let request = work.pieces.get(piece as usize)?.request;
                work.requests.get(request as usize)
            };
            let Some(first) = request(start) else { return };
            // A transport whose peers' devices check keys carries nothing without one.
            let lacks = |request: &Prepared, (_, name): &(TransportId, String)| {
                work.keys_of(request).is_none_or(|keys| !keys.contains_key(name))
            };
            let same = |piece: u32| {
                request(piece).is_some_and(|other| {
                    (other.peer, other.route, other.priority) == (first.peer, first.route, first.priority)
                        && (other.keys == first.keys
                            || keyed.iter().all(|keyed| lacks(first, keyed) == lacks(other, keyed)))
                })
            };
            let end = (start + 1..pieces.end).find(|piece| !same(*piece)).unwrap_or(pieces.end);
            let Some(peer) = work.peers.get(first.peer as usize) else { return };
            let run = Run { submission: Arc::clone(&submission), pieces: start..end };
            let route = self.route(first.route);
            let able = |id| !keyed.iter().any(|transport| transport.0 == id && lacks(first, transport));
            match peer.choose_of(route, able, |error, failed| self.worth_again(error, failed)) {
                Decision::Use(path, again) => {
                    if let Some(transport) = again {
                        self.connect(peer, transport);
                    }
                    if path.is_rail() {
                        self.spread(&peer.rails(path.transport_id), &path, first.priority, run);
                    } else {
                        self.offer(&path, first.priority, run);
                    }
                }
                Decision::Connect(transport) => {
                    peer.wait_for_path(run);
                    self.connect(peer, transport);
                }
                Decision::None => self.end_run(&run, &self.no_path(peer, route)),
            }
            start = end;
        }
    }

    /// The route of a request, with the engine's own where the request leaves it open.
    pub(crate) fn route(&self, route: Route) -> Route {
        if route == Route::Auto { self.default_route() } else { route }
    }

    /// Divides a run among rails, each part to the one that is expected to be done with it first. `chosen` is one of them.
    fn spread(
        self: &Arc<Self>,
        rails: &[Arc<PathEntry>],
        chosen: &Arc<PathEntry>,
        priority: Priority,
        run: Run,
    ) {
        let now = Instant::now();
        let mut standing: Vec<Rail> = rails.iter().map(|rail| rail.standing(now)).collect();
        let Run { submission, mut pieces } = run;
        // Parts that are small against the whole, and not too many.
        let most = (pieces.len() / (PARTS * rails.len().max(1))).clamp(1, CHUNK) as u32;
        while !pieces.is_empty() {
            let end = pieces.end.min(pieces.start + most);
            let part = Run { submission: Arc::clone(&submission), pieces: pieces.start..end };
            pieces.start = end;
            let bytes = part.bytes();
            let at = best(&standing, bytes);
            if let Some(rail) = standing.get_mut(at) {
                rail.loaded += bytes;
            }
            self.offer(rails.get(at).unwrap_or(chosen), priority, part);
        }
    }

    /// Gives a rail on which something has arrived more to do: what waits for it, else what waits for another.
    pub(crate) fn keep_busy(self: &Arc<Self>, path: &Arc<PathEntry>) {
        if path.has_queue() {
            return self.pump(path);
        }
        if path.under_way() > 0 || !path.is_up() {
            return;
        }
        let Some(peer) = self.peers.by_id(path.peer) else { return };
        let rails = peer.rails(path.transport_id);
        let others = rails.iter().filter(|other| other.number != path.number && other.has_queue());
        let Some(other) = others.max_by_key(|other| other.queued_bytes()) else { return };
        if let Some((place, run)) = other.take(Full::default())
            && let Some(rest) = self.send(path, run, || true)
        {
            other.put_back(place, rest, &mut Full::default());
            self.pump(other);
        }
    }

    /// Sends a run along a path, and queues what finds no room.
    fn offer(self: &Arc<Self>, path: &Arc<PathEntry>, priority: Priority, run: Run) {
        if let Some(rest) = self.send(path, run, || !path.has_queue() && path.has_window()) {
            path.queue(priority, &rest);
            self.pump(path);
        }
    }

    /// Sends what waits for a path, as far as there is room. One thread does it at a time; whoever comes meanwhile
    /// rings, and is heard.
    pub(crate) fn pump(self: &Arc<Self>, path: &Arc<PathEntry>) {
        // The rings, the queue's length and who pumps are sequentially consistent: of two threads, one that has queued
        // and looks for rings, one that has rung and looks for a queue, at least one sees the other.
        path.rings.fetch_add(1, Ordering::SeqCst);
        while path.has_queue() && !path.pumping.swap(true, Ordering::SeqCst) {
            let heard = path.rings.load(Ordering::SeqCst);
            let mut full = Full::default();
            while path.has_window()
                && let Some((place, run)) = path.take(full)
            {
                if let Some(rest) = self.send(path, run, || true) {
                    path.put_back(place, rest, &mut full);
                }
            }
            // A swap, to see the ring of whoever found us pumping. Whoever took the path down while we held a run
            // has not found that run: we go on, to send it elsewhere.
            path.pumping.swap(false, Ordering::SeqCst);
            if self.is_closed() {
                // As in `end_if_closed`.
                let stranded = path.take_all();
                stranded.iter().for_each(|run| self.end_run(run, &Doom::Closed.error()));
            }
            if path.is_up() && path.rings.load(Ordering::SeqCst) == heard {
                return;
            }
        }
    }

    /// Sends a run for as long as `goes_on` says so and the transport has room. Returns what is left of it.
    #[must_use]
    fn send(
        self: &Arc<Self>,
        path: &Arc<PathEntry>,
        mut run: Run,
        goes_on: impl Fn() -> bool,
    ) -> Option<Run> {
        while !run.pieces.is_empty() {
            if !goes_on() || !self.send_some(path, &mut run) {
                return Some(run);
            }
        }
        None
    }

    /// Offers the first pieces of a run to the transport, and takes off the run what it accepted or what has ended.
    /// Says whether there may be room for more, of which there may be some left in either case.
    fn send_some(self: &Arc<Self>, path: &Arc<PathEntry>, run: &mut Run) -> bool {
        let submission = Arc::clone(&run.submission);
        if let Some(doom) = submission.doomed() {
            let doomed = Run { submission, pieces: run.pieces.clone() };
            run.pieces.start = run.pieces.end;
            self.end_run(&doomed, &doom.error());
            return true;
        }
        if !path.is_up() {
            // It went down after it was chosen: choose again.
            let moved = Run { submission, pieces: run.pieces.clone() };
            run.pieces.start = run.pieces.end;
            self.relaunch(vec![moved]);
            return true;
        }
        let mut slices: ArrayVec<Slice, CHUNK> = ArrayVec::new();
        let mut bytes = 0;
        let mut keys = Imported::default();
        for piece in run.pieces.clone().take(CHUNK) {
            match slice(&submission, piece) {
                Some(mut slice) if !submission.is_lost(piece) => {
                    match keys.key(path, &submission, piece) {
                        Ok(key) => slice.remote_key = key,
                        Err(error) if slices.is_empty() => {
                            run.pieces.start = piece + 1;
                            self.end_piece(&submission, piece, Err(error));
                            return true;
                        }
                        Err(_) => break,
                    }
                    submission.post(piece, path.number);
                    bytes += slice.local.len();
                    slices.push(slice);
                }
                _ if slices.is_empty() => {
                    // Another piece of its request failed: this one need not go.
                    run.pieces.start = piece + 1;
                    self.end_piece(&submission, piece, Err(lost()));
                    return true;
                }
                _ => break,
            }
        }
        path.departed(bytes);
        submission.batch.carried_by(path.transport_id);
        // SAFETY: the submission's pins keep every local region alive and registered until its last piece has
        // ended, and a piece that was posted ends only after its completion. That no Rust reference is in the
        // way is the promise which `LocalRange` carries.
        let accepted = unsafe { path.transport.submit(path.info.id, &slices) };
        let accepted = match accepted {
            Ok(accepted) => accepted.min(slices.len()),
            Err(error) => {
                self.path_down(path, &error);
                let error = SliceError { error, far_end: FarEnd::Quiet };
                slices.iter().for_each(|slice| {
                    let along = &mut Some(Arc::clone(path));
                    self.slice_ended(&submission, slice.token as u32, Err(&error), along);
                });
                run.pieces.start += slices.len() as u32;
                return true;
            }
        };
        for slice in slices.get(accepted..).unwrap_or_default() {
            path.ended(slice.local.len(), false);
            submission.unpost(slice.token as u32);
        }
        run.pieces.start += accepted as u32;
        accepted == slices.len()
    }

    /// Ends the pieces of a run that are not in flight.
    pub(crate) fn end_run(self: &Arc<Self>, run: &Run, error: &Error) {
        for piece in run.pieces.clone() {
            self.end_piece(&run.submission, piece, Err(error.clone()));
        }
    }

    /// Ends a piece that is not in flight, and whatever that brings about.
    pub(crate) fn end_piece(
        self: &Arc<Self>,
        submission: &Arc<Submission>,
        piece: u32,
        outcome: Result<(), Error>,
    ) {
        let progress = submission.end(piece, outcome);
        if progress.all_ended {
            self.end_submission(submission);
        } else if progress.notice_due {
            let notice = submission.data_pieces();
            self.relaunch(vec![Run { submission: Arc::clone(submission), pieces: notice..notice + 1 }]);
        }
        if progress.group_ended {
            submission.batch.signal.ring();
        }
    }

    /// Forgets a submission whose tasks have ended.
    pub(crate) fn end_submission(&self, submission: &Arc<Submission>) {
        self.table.remove(submission.key);
        submission.release_pins();
        submission.batch.submission_ended();
    }
}

/// The last key that was made of what a peer published: neighbours often have the same.
#[derive(Debug, Default)]
struct Imported(Option<(u32, RemoteKey)>);

impl Imported {
    fn key(&mut self, path: &PathEntry, submission: &Submission, piece: u32) -> Result<RemoteKey, Error> {
        let work = &submission.work;
        let cut = work.pieces.get(piece as usize);
        let request = cut.and_then(|cut| work.requests.get(cut.request as usize));
        let Some(request) = request.filter(|_| path.keyed) else { return Ok(RemoteKey::NONE) };
        if let Some((keys, key)) = self.0
            && keys == request.keys
        {
            return Ok(key);
        }
        let published = work.keys_of(request).and_then(|keys| keys.get(path.transport.name()));
        let key = path.transport.import(path.info.id, published.unwrap_or(&serde_json::Value::Null))?;
        self.0 = Some((request.keys, key));
        Ok(key)
    }
}

/// The slice of a piece.
fn slice(submission: &Submission, piece: u32) -> Option<Slice> {
    let cut = submission.work.pieces.get(piece as usize)?;
    let request = submission.work.requests.get(cut.request as usize)?;
    Some(Slice {
        token: submission.token(piece),
        opcode: request.opcode,
        priority: request.priority,
        checksum: submission.checksum,
        level: Level::Visible,
        local: request.local.slice(cut.offset, cut.len).ok()?,
        local_region: request.local_region,
        remote_address: request.remote_address.checked_add(cut.offset)?,
        grant: request.token,
        remote_key: RemoteKey::NONE,
        ready: None,
    })
}

/// The error of a piece that was not sent since another piece of its request failed. The task keeps the first error.
fn lost() -> Error {
    Error::new(ErrorKind::Flushed, "another slice of the request failed")
}
