//! A path: this process's end of a rendezvous with the owner of the memory.

use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::{Duration, Instant};

use parking_lot::{Mutex, MutexGuard, RwLock};
use posthorse_core::{
    AtWork, Completion, Deadline, Error, ErrorKind, FarEnd, PathId, PathState, RegionId, Result, Slice,
    SliceError, TransportEvents,
};
use rustix::io::Errno;
use rustix::net::{Shutdown, shutdown};

use crate::copiers::{Arrival, Copiers, Lent};
use crate::events::is_own_thread;
use crate::jobs::{Push, failure, success};
use crate::owner::wait_until;
use crate::remote::RemoteRegion;
use crate::rendezvous::reactor::{Reactor, Source, SourceId};
use crate::rendezvous::socket::{Packet, PacketBuffer, send};
use crate::rendezvous::wire::{MAX_NOTIFICATION, MapRequest, RegionReply, Request, ToClient, encode_notify};
use crate::slots::Slots;
use crate::sys::Process;
use crate::table::{PeerHash, PeerTable};

/// What a thread counts for that does nothing but report, in [`Link::inside`].
const REPORTING: u64 = 1 << 32;
/// Notifications that the peer has not acknowledged.
const MAX_UNACKNOWLEDGED: usize = 1024;

/// What a rendezvous brought.
#[derive(Debug)]
pub(crate) struct Met {
    pub(crate) peer: Arc<str>,
    pub(crate) me: PeerHash,
    pub(crate) socket: OwnedFd,
    pub(crate) table: PeerTable,
    pub(crate) slots: Arc<Slots>,
    /// The process, where its memory can be reached by `process_vm`; else why not.
    pub(crate) process: Result<Process>,
}

/// What a path works with.
#[derive(Debug, Clone)]
pub(crate) struct Surroundings {
    pub(crate) reactor: Arc<Reactor>,
    pub(crate) copiers: Arc<Copiers>,
    pub(crate) events: Arc<dyn TransportEvents>,
    pub(crate) liveness: Duration,
}

/// See the module's documentation.
pub(crate) struct Link {
    pub(crate) id: PathId,
    pub(crate) met: Met,
    around: Surroundings,
    socket_id: SourceId,
    process_id: SourceId,
    regions: RwLock<HashMap<RegionId, Arc<RemoteRegion>>>,
    pending: Mutex<Pending>,
    /// Tokens of notifications that the peer has not acknowledged. `None` once closing the path has ended them.
    notifications: Mutex<Option<VecDeque<u64>>>,
    up: AtomicBool,
    /// Threads that are inside, and by [`REPORTING`] those that report what came of it.
    inside: AtomicU64,
}

/// Regions that were asked for and are not here yet.
#[derive(Debug, Default)]
struct Pending {
    asked: HashMap<MapRequest, Asked>,
    /// How many questions were put.
    questions: u64,
    waiters: Vec<(MapRequest, SyncSender<Result<()>>)>,
}

/// A question to the peer that is not answered, or whose answer is being mapped. The same is not put once more before
/// that, so that an answer is always to the one question there is.
#[derive(Debug)]
struct Asked {
    question: u64,
    since: Instant,
    /// How many ticks ago.
    ticks: u32,
    /// Whether it is being mapped.
    answered: bool,
    waiting: Waiting,
}

/// Who waits for the end of a question.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Waiting {
    /// All have given it up.
    Nobody,
    /// Whoever was there when it was put.
    Askers,
    /// Also somebody who came later: what the peer refused by then it may lend now.
    Latecomers,
}

/// A thread inside of `submit` or the like, which may touch memory: closing the path waits for it.
#[derive(Debug)]
pub(crate) struct Inside<'a>(&'a Link);

/// A thread that reports, and touches nothing any more: closing the path waits for it, unless it is done from within
/// an event.
#[derive(Debug)]
pub(crate) struct Reporting<'a>(&'a Link);

impl<'a> Inside<'a> {
    /// Reports from here on.
    pub(crate) fn report(self) -> Reporting<'a> {
        let link = self.0;
        std::mem::forget(self);
        // In one go, so that whoever closes the path never sees neither.
        link.inside.fetch_add(REPORTING - 1, Ordering::SeqCst);
        Reporting(link)
    }
}

impl Drop for Reporting<'_> {
    fn drop(&mut self) {
        self.0.inside.fetch_sub(REPORTING, Ordering::Release);
    }
}

impl Drop for Inside<'_> {
    fn drop(&mut self) {
        self.0.inside.fetch_sub(1, Ordering::Release);
    }
}

impl Link {
    pub(crate) fn new(id: PathId, met: Met, around: Surroundings) -> Arc<Self> {
        let (socket_id, process_id) = (around.reactor.number(), around.reactor.number());
        around.copiers.open(id);
        Arc::new(Self {
            id,
            met,
            around,
            socket_id,
            process_id,
            regions: RwLock::default(),
            pending: Mutex::default(),
            notifications: Mutex::new(Some(VecDeque::new())),
            up: AtomicBool::new(true),
            inside: AtomicU64::new(0),
        })
    }

    /// Begins to listen to the peer.
    pub(crate) fn watch(self: &Arc<Self>, pidfd: OwnedFd) -> Result<()> {
        let this = Arc::downgrade(self);
        let ended = move || {
            if let Some(this) = this.upgrade() {
                this.lost(Error::new(ErrorKind::PeerGone, "the peer's process has ended"));
            }
        };
        let watch = crate::rendezvous::reactor::ProcessWatch::new(pidfd, ended);
        self.around.reactor.add(self.process_id, Arc::new(watch))?;
        self.around.reactor.add(self.socket_id, Arc::clone(self) as Arc<dyn Source>)?;
        if self.up.load(Ordering::SeqCst) {
            return Ok(());
        }
        // Whoever took it down may have been here before it was added.
        self.unwatch();
        Err(self.down())
    }

    fn unwatch(&self) {
        self.around.reactor.remove(self.socket_id);
        self.around.reactor.remove(self.process_id);
    }

    pub(crate) fn events(&self) -> &dyn TransportEvents {
        &*self.around.events
    }

    fn down(&self) -> Error {
        Error::new(ErrorKind::PathFailed, format!("path {} is down", self.id)).with_peer(&*self.met.peer)
    }

    /// # Errors
    /// `PathFailed` when the path is down.
    pub(crate) fn enter(&self) -> Result<Inside<'_>> {
        // Counted before it is looked at, so that whoever takes the path down either sees us or is seen.
        self.inside.fetch_add(1, Ordering::SeqCst);
        let inside = Inside(self);
        if self.up.load(Ordering::SeqCst) { Ok(inside) } else { Err(self.down()) }
    }

    fn report(&self) -> Reporting<'_> {
        self.inside.fetch_add(REPORTING, Ordering::SeqCst);
        Reporting(self)
    }

    /// A region, if it is here, and can be written if `write` says so.
    pub(crate) fn region(&self, wanted: MapRequest) -> Option<Arc<RemoteRegion>> {
        self.regions.read().get(&wanted.region).filter(|region| region.writable() || !wanted.write).cloned()
    }

    /// Leaves a slice to the copy threads, and asks for its region if that is not here yet.
    pub(crate) fn enqueue(self: &Arc<Self>, slice: &Slice, wanted: MapRequest) -> Push {
        if self.region(wanted).is_some() {
            return self.around.copiers.push(self, slice, None);
        }
        let (push, ask) = {
            // Under the lock, or the region could arrive between looking and leaving the slice.
            let mut pending = self.pending.lock();
            if self.region(wanted).is_some() {
                (self.around.copiers.push(self, slice, None), None)
            } else {
                let push = self.around.copiers.push(self, slice, Some(wanted));
                (push, if push == Push::Taken { pending.ask(wanted) } else { None })
            }
        };
        if let Some(question) = ask {
            self.ask(wanted, question);
        }
        push
    }

    /// Waits until a region is here.
    ///
    /// # Errors
    /// `Busy` on a transport's own thread, as the answer is heard by one and mapped by another.
    pub(crate) fn await_region(self: &Arc<Self>, wanted: MapRequest) -> Result<Arc<RemoteRegion>> {
        let (arrived, ask) = {
            let mut pending = self.pending.lock();
            if let Some(region) = self.region(wanted) {
                return Ok(region);
            }
            if is_own_thread() {
                return Err(self.not_here_yet(wanted.region));
            }
            let (tell, arrived): (_, Receiver<Result<()>>) = sync_channel(1);
            pending.waiters.push((wanted, tell));
            (arrived, pending.ask(wanted))
        };
        if let Some(question) = ask {
            self.ask(wanted, question);
        }
        if !self.up.load(Ordering::SeqCst) {
            return Err(self.down());
        }
        // Without a clock of its own: a tick ends it when the answer is late, and closing the path does at once.
        arrived.recv().unwrap_or_else(|_| Err(self.down()))?;
        self.region(wanted).ok_or_else(|| self.withdrawn(wanted.region))
    }

    fn not_here_yet(&self, region: RegionId) -> Error {
        let message =
            format!("the peer's region {region} is not mapped yet, and an event cannot wait for it");
        Error::new(ErrorKind::Busy, message)
            .with_peer(&*self.met.peer)
            .with_advice("take the lease on a thread of your own")
    }

    pub(crate) fn withdrawn(&self, region: RegionId) -> Error {
        Error::new(ErrorKind::NotRegistered, format!("the peer has withdrawn region {region}"))
            .with_peer(&*self.met.peer)
    }

    fn ask(self: &Arc<Self>, request: MapRequest, question: u64) {
        if let Err(error) = send(&self.met.socket, &Request::Map(request).encode(), &[]) {
            // Not reported here: this thread is inside, and may have announced a grant.
            let lent = Err(self.send_error(error));
            self.around.copiers.arrived(Arrival { link: Arc::clone(self), request, question, lent });
        }
    }

    fn send_error(&self, error: Errno) -> Error {
        let error = match error {
            Errno::AGAIN => Error::new(ErrorKind::QueueFull, "the peer does not read what it is sent"),
            Errno::PIPE | Errno::CONNRESET => {
                Error::new(ErrorKind::PeerGone, "the peer has closed the rendezvous")
            }
            other => Error::os("sending on the rendezvous socket", &other.into()),
        };
        error.with_peer(&*self.met.peer)
    }

    /// What came of this question has been mapped, or could not be.
    pub(crate) fn arrived(
        self: &Arc<Self>,
        request: MapRequest,
        question: u64,
        region: Result<RemoteRegion>,
    ) {
        let region = match region {
            Ok(region) => region,
            Err(error) => return self.refuse(request, question, &error.with_peer(&*self.met.peer)),
        };
        let writable = region.writable();
        let (waiters, replaced) = {
            let mut pending = self.pending.lock();
            if !pending.is_open(request, question) {
                // Withdrawn or given up meanwhile.
                return;
            }
            pending.asked.remove(&request);
            let mut regions = self.regions.write();
            // One that can be written is as good for reading as one that cannot.
            let replaced = if writable || !regions.contains_key(&request.region) {
                regions.insert(request.region, Arc::new(region))
            } else {
                None
            };
            drop(regions);
            self.around.copiers.release(self.id, request.region, writable);
            let served = |wanted: &MapRequest| wanted.region == request.region && (writable || !wanted.write);
            (pending.take_waiters(served), replaced)
        };
        // Here, as it may be unmapped by that.
        drop(replaced);
        tell(waiters, &Ok(()));
    }

    /// A region will not be had, which ends this question. If somebody came after it was put, it is put anew.
    fn refuse(self: &Arc<Self>, request: MapRequest, question: u64, error: &Error) {
        let mut pending = self.pending.lock();
        match pending.asked.get(&request).filter(|asked| asked.question == question) {
            // It has ended.
            None => {}
            Some(asked) if asked.waiting == Waiting::Latecomers => {
                let question = pending.put(request);
                drop(pending);
                self.ask(request, question);
            }
            Some(_) => {
                pending.asked.remove(&request);
                self.fail(pending, request, error);
            }
        }
    }

    /// Ends what waits for a region. The caller's lock is held for that, so that nothing is ended that asks from then on.
    fn fail(&self, mut pending: MutexGuard<'_, Pending>, request: MapRequest, error: &Error) {
        let waiters = pending.take_waiters(|wanted| *wanted == request);
        let reports = self.around.copiers.fail(self.id, request, error);
        drop(pending);
        self.around.copiers.deliver(reports);
        tell(waiters, &Err(error.clone()));
    }

    /// Sends a notification.
    pub(crate) fn notify(&self, token: u64, data: &[u8]) -> Result<()> {
        if data.len() > MAX_NOTIFICATION {
            return Err(Error::new(
                ErrorKind::TooLarge,
                format!("the notification has {} bytes; accepted: up to {MAX_NOTIFICATION}", data.len()),
            ));
        }
        let _inside = self.enter()?;
        {
            let mut notifications = self.notifications.lock();
            // Closed since we entered, it would not be looked at again.
            let unacknowledged = notifications.as_mut().ok_or_else(|| self.down())?;
            if unacknowledged.len() >= MAX_UNACKNOWLEDGED {
                return Err(Error::new(
                    ErrorKind::QueueFull,
                    format!("{MAX_UNACKNOWLEDGED} notifications to this peer are not acknowledged yet"),
                )
                .with_peer(&*self.met.peer));
            }
            // Before it is sent, as the answer may be here before we are back.
            unacknowledged.push_back(token);
        }
        match send(&self.met.socket, &encode_notify(token, data), &[]) {
            Ok(()) => Ok(()),
            // If the path went down meanwhile, the token's completion says so.
            Err(error) if self.take_notification(token) => Err(self.send_error(error)),
            Err(_) => Ok(()),
        }
    }

    fn take_notification(&self, token: u64) -> bool {
        let mut notifications = self.notifications.lock();
        let Some(unacknowledged) = notifications.as_mut() else { return false };
        let at = unacknowledged.iter().position(|other| *other == token);
        at.and_then(|at| unacknowledged.remove(at)).is_some()
    }

    /// The peer is gone: ends everything on the path, and says so.
    fn lost(&self, error: Error) {
        let error = error.with_peer(&*self.met.peer);
        if self.close(&error) {
            self.around.events.path_changed(self.id, &PathState::Down(error));
        }
    }

    /// Ends everything on the path for this reason. Pieces that are being copied right now report when they are
    /// done. False when the path was down already.
    pub(crate) fn close(&self, error: &Error) -> bool {
        let _reporting = self.report();
        if !self.up.swap(false, Ordering::SeqCst) {
            return false;
        }
        // Before the peer hears of it, which then waits for what is announced already, and for nothing else.
        self.met.slots.close();
        self.around.copiers.close(self.id, error);
        let tokens = self.notifications.lock().take();
        // The peer may have delivered them, or find them in its socket yet.
        let unconfirmed = |token| {
            let result = Err(SliceError { error: error.clone(), far_end: FarEnd::Unconfirmed });
            Completion { token, result }
        };
        let failed: Vec<Completion> = tokens.into_iter().flatten().map(unconfirmed).collect();
        if !failed.is_empty() {
            self.around.events.completed(&failed);
        }
        let (waiters, regions) = {
            let mut pending = self.pending.lock();
            pending.asked.clear();
            (std::mem::take(&mut pending.waiters), std::mem::take(&mut *self.regions.write()))
        };
        drop(regions);
        tell(waiters.into_iter().map(|(_, tell)| tell).collect(), &Err(error.clone()));
        self.unwatch();
        // The peer hears of it even while a lease keeps the socket open.
        let _ = shutdown(&self.met.socket, Shutdown::Both);
        true
    }

    /// Waits until nothing of a closed path is being copied: at most one piece a thread. Also until what came of it is
    /// reported, unless this thread is at work: see [`Copiers::await_idle`].
    pub(crate) fn await_quiet(&self) {
        self.around.copiers.await_idle(self.id);
        let awaited = if AtWork::is_now() { REPORTING - 1 } else { u64::MAX };
        let left = || self.inside.load(Ordering::SeqCst) & awaited == 0;
        let _ = wait_until(Deadline::NEVER, "submitting threads", left);
    }

    fn handle(self: &Arc<Self>, packet: Packet<'_>) -> Result<()> {
        let Packet { bytes, mut fds } = packet;
        match ToClient::decode(bytes)? {
            ToClient::Region(reply) => {
                let question = self.pending.lock().answer(reply.request);
                if let Some(question) = question {
                    self.region_reply(reply, question, fds.pop());
                }
            }
            ToClient::RegionRefused { request, refusal } => {
                let question = self.pending.lock().answer(request);
                if let Some(question) = question {
                    self.refuse(request, question, &refusal.into_error().with_peer(&*self.met.peer));
                }
            }
            ToClient::Withdrawn { region } => {
                let mapping = self.pending.lock().answered(region);
                for (request, question) in mapping {
                    self.refuse(request, question, &self.withdrawn(region));
                }
                // After that: if one of them was just mapped, it is here.
                let mapped = self.regions.write().remove(&region);
                drop(mapped);
            }
            ToClient::Notified { token, refusal } => {
                let _reporting = self.report();
                if self.take_notification(token) {
                    let done = refusal.map_or_else(
                        || success(token),
                        |refusal| failure(token, refusal.into_error().with_peer(&*self.met.peer)),
                    );
                    self.around.events.completed(&[done]);
                }
            }
            ToClient::Welcome(_) | ToClient::Refused(_) => {
                return Err(Error::new(ErrorKind::Malformed, "a second welcome on one rendezvous"));
            }
        }
        Ok(())
    }

    fn region_reply(self: &Arc<Self>, reply: RegionReply, question: u64, file: Option<OwnedFd>) {
        let request = reply.request;
        match (reply.offset, file, &self.met.process) {
            (Some(offset), Some(file), _) => {
                let lent = Ok(Lent { reply, offset, file });
                self.around.copiers.arrived(Arrival { link: Arc::clone(self), request, question, lent });
            }
            (None, None, Ok(process)) => {
                let region = RemoteRegion::in_process(&reply, process.clone());
                self.arrived(request, question, Ok(region));
            }
            (None, None, Err(error)) => {
                let error = error.clone().context("the peer's region is not a file in memory");
                self.refuse(request, question, &error);
            }
            _ => {
                let error = Error::new(
                    ErrorKind::Malformed,
                    "a region came without its file, or a file without place",
                );
                self.refuse(request, question, &error.with_peer(&*self.met.peer));
            }
        }
    }
}

impl Pending {
    /// Notes that somebody waits for a region. If the question is to be put for that, returns its number.
    fn ask(&mut self, wanted: MapRequest) -> Option<u64> {
        let Some(asked) = self.asked.get_mut(&wanted) else { return Some(self.put(wanted)) };
        if asked.waiting == Waiting::Nobody {
            (asked.since, asked.ticks) = (Instant::now(), 0);
        }
        asked.waiting = Waiting::Latecomers;
        None
    }

    /// Numbers a question that is put now.
    fn put(&mut self, wanted: MapRequest) -> u64 {
        self.questions += 1;
        let question = self.questions;
        let (since, waiting) = (Instant::now(), Waiting::Askers);
        self.asked.insert(wanted, Asked { question, since, ticks: 0, answered: false, waiting });
        question
    }

    /// Whether this question has not ended.
    fn is_open(&self, wanted: MapRequest, question: u64) -> bool {
        self.asked.get(&wanted).is_some_and(|asked| asked.question == question)
    }

    /// An answer is here: returns the number of its question. `None` when nobody waits for it any more, or did.
    fn answer(&mut self, wanted: MapRequest) -> Option<u64> {
        let asked = self.asked.get_mut(&wanted).filter(|asked| !asked.answered)?;
        if asked.waiting == Waiting::Nobody {
            self.asked.remove(&wanted);
            return None;
        }
        asked.answered = true;
        Some(asked.question)
    }

    /// The questions whose answer, a region, is being mapped.
    fn answered(&self, region: RegionId) -> Vec<(MapRequest, u64)> {
        let answered = self.asked.iter().filter(|(wanted, asked)| wanted.region == region && asked.answered);
        answered.map(|(wanted, asked)| (*wanted, asked.question)).collect()
    }

    /// Time has passed: which questions were to be answered by now?
    fn tick(&mut self, now: Instant, liveness: Duration) -> Vec<(MapRequest, u64)> {
        let mut late = Vec::new();
        for (wanted, asked) in &mut self.asked {
            asked.ticks = asked.ticks.saturating_add(1);
            // Counted in ticks too: after our own process was stopped, the clock alone would accuse the peer.
            let is_late = asked.ticks > 2 && now.saturating_duration_since(asked.since) >= liveness;
            if is_late && asked.waiting != Waiting::Nobody {
                late.push((*wanted, asked.question));
            }
        }
        late
    }

    /// Nobody waits for this question any more. False when it has ended.
    fn give_up(&mut self, wanted: MapRequest, question: u64) -> bool {
        match self.asked.get_mut(&wanted).filter(|asked| asked.question == question) {
            None => return false,
            // What is being mapped is dropped.
            Some(asked) if asked.answered => drop(self.asked.remove(&wanted)),
            // The answer is still to come.
            Some(asked) => asked.waiting = Waiting::Nobody,
        }
        true
    }

    fn take_waiters(&mut self, which: impl Fn(&MapRequest) -> bool) -> Vec<SyncSender<Result<()>>> {
        self.waiters.extract_if(.., |(wanted, _)| which(wanted)).map(|(_, tell)| tell).collect()
    }
}

fn tell(waiters: Vec<SyncSender<Result<()>>>, result: &Result<()>) {
    for waiter in waiters {
        // One that no longer waits needs no answer.
        let _ = waiter.try_send(result.clone());
    }
}

impl Source for Link {
    fn fd(&self) -> BorrowedFd<'_> {
        self.met.socket.as_fd()
    }

    fn ready(self: Arc<Self>, buffer: &mut PacketBuffer) {
        loop {
            match buffer.receive(&self.met.socket) {
                Ok(None) => return,
                Ok(Some(packet)) if packet.bytes.is_empty() => {
                    return self.lost(Error::new(ErrorKind::PeerGone, "the peer has closed the rendezvous"));
                }
                Ok(Some(packet)) => {
                    if let Err(error) = self.handle(packet) {
                        return self.lost(error);
                    }
                }
                Err(error) => return self.lost(error),
            }
        }
    }

    fn tick(self: Arc<Self>) {
        let late = self.pending.lock().tick(Instant::now(), self.around.liveness);
        for (wanted, question) in late {
            let mut pending = self.pending.lock();
            if pending.give_up(wanted, question) {
                let error = Deadline::exceeded("the peer to lend a region").with_peer(&*self.met.peer);
                self.fail(pending, wanted, &error);
            }
        }
        self.around.copiers.rouse();
    }
}

impl fmt::Debug for Link {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Link").field("id", &self.id).field("peer", &self.met.peer).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_is_late_only_when_its_answer_was_looked_for() {
        let liveness = Duration::from_secs(3);
        let wanted = MapRequest { region: RegionId(1), write: true };
        let mut pending = Pending::default();
        let question = pending.ask(wanted).unwrap();
        // This process was stopped for a minute.
        let later = Instant::now() + Duration::from_secs(60);
        assert_eq!(pending.tick(later, liveness), []);
        assert_eq!(pending.tick(later, liveness), []);
        assert_eq!(pending.tick(later, liveness), [(wanted, question)]);
    }
}
