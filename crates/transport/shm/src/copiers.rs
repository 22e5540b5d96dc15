//! The copy threads, and the queue they work from.

use std::collections::HashSet;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use posthorse_core::{AtWork, Error, ErrorKind, PathId, RegionId, Result, Slice, TransportEvents};

use crate::config::ShmConfig;
use crate::copy::copy_piece;
use crate::events::note_own_thread;
use crate::jobs::{Jobs, Piece, Push, Reports};
use crate::link::Link;
use crate::remote::RemoteRegion;
use crate::rendezvous::wire::{MapRequest, RegionReply};

/// Small slices are copied several in one turn of a thread, up to this many.
const PIECES: usize = 64;
/// After as many bytes a thread that helps looks whether it still has to, even if nothing has ended.
const HELP_BYTES: u64 = 1 << 20;

/// What became of a request for a region, for a copy thread to see to.
#[derive(Debug)]
pub(crate) struct Arrival {
    pub(crate) link: Arc<Link>,
    pub(crate) request: MapRequest,
    /// By its number.
    pub(crate) question: u64,
    /// What arrived, or why nothing will.
    pub(crate) lent: Result<Lent>,
}

/// A region's file that arrived, to be mapped.
#[derive(Debug)]
pub(crate) struct Lent {
    pub(crate) reply: RegionReply,
    pub(crate) offset: u64,
    pub(crate) file: OwnedFd,
}

#[derive(Debug)]
struct State {
    jobs: Jobs<Arc<Link>>,
    arrivals: Vec<Arrival>,
    /// What threads that helped worked with, for the next.
    spare: Vec<Turn>,
    /// Threads that copy right now, those that help among them.
    copying: u32,
    /// Threads of our own among them.
    own: u32,
    /// Threads of our own that will look for work before they sleep: that copy or report, or look already.
    up: u32,
    /// Threads of our own that sleep and were not notified.
    asleep: u32,
    /// Whether one of them looks for work without sleeping: the next finds it sooner than a wake-up takes.
    spinning: bool,
    stopping: bool,
}

/// See the module's documentation.
#[derive(Debug)]
pub(crate) struct Copiers {
    state: Mutex<State>,
    /// Whether there may be something to do: what a thread without the lock looks at.
    available: Arc<AtomicBool>,
    /// How many threads copy at once.
    most: u32,
    spin: Duration,
    work: Condvar,
    idle: Condvar,
    events: Arc<dyn TransportEvents>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

/// What a thread works with, turn by turn.
#[derive(Debug, Default)]
struct Turn {
    pieces: Vec<Piece<Arc<Link>>>,
    /// Those of the turn before, until no lock is held.
    done: Vec<Piece<Arc<Link>>>,
    results: Vec<Result<()>>,
    reports: Reports,
}

/// Who copies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Role {
    /// A thread of our own.
    Own,
    /// One that waits for a completion, and comes back as long as it does.
    Helper,
}

/// What a thread of our own does next.
enum Next {
    Map(Arrival),
    Copy,
    Stop,
}

impl Copiers {
    /// Starts as many threads as configured.
    /// `available` says from then on whether there may be something to do.
    pub(crate) fn start(
        config: &ShmConfig,
        events: Arc<dyn TransportEvents>,
        available: Arc<AtomicBool>,
    ) -> Result<Arc<Self>> {
        let this = Arc::new(Self {
            state: Mutex::new(State {
                jobs: Jobs::new(config.piece_bytes, config.copy_threads(), config.queue_slices),
                arrivals: Vec::new(),
                spare: Vec::new(),
                copying: 0,
                own: 0,
                up: config.copy_threads(),
                asleep: 0,
                spinning: false,
                stopping: false,
            }),
            available,
            most: config.copy_threads(),
            spin: config.spin(),
            work: Condvar::new(),
            idle: Condvar::new(),
            events,
            threads: Mutex::default(),
        });
        for number in 0..this.most {
            let name = format!("shm-copy-{number}");
            let body = {
                let this = Arc::clone(&this);
                move || this.run()
            };
            match thread::Builder::new().name(name.clone()).spawn(body) {
                Ok(thread) => this.threads.lock().push(thread),
                Err(error) => {
                    this.stop();
                    return Err(Error::os(&format!("starting the thread {name}"), &error));
                }
            }
        }
        Ok(this)
    }

    /// Ends the threads. Every path has been closed.
    pub(crate) fn stop(&self) {
        {
            let mut state = self.state.lock();
            state.stopping = true;
            state.up += std::mem::take(&mut state.asleep);
        }
        self.available.store(true, Ordering::Release);
        self.work.notify_all();
        let threads = std::mem::take(&mut *self.threads.lock());
        for thread in threads {
            if thread.thread().id() != thread::current().id() {
                let _ = thread.join();
            }
        }
        self.available.store(false, Ordering::Release);
        let arrivals = std::mem::take(&mut self.state.lock().arrivals);
        drop(arrivals);
    }

    pub(crate) fn open(&self, path: PathId) {
        self.state.lock().jobs.open(path);
    }

    /// Offers a slice; one that waits for its region is begun by [`Copiers::release`].
    pub(crate) fn push(&self, link: &Arc<Link>, slice: &Slice, waiting_for: Option<MapRequest>) -> Push {
        self.change(|state| state.jobs.push(link.id, slice, Arc::clone(link), waiting_for))
    }

    /// Leaves it to a copy thread: to map a file takes longer than the rendezvous should wait, and whoever finds out that
    /// a slice fails may be where nothing can be reported.
    pub(crate) fn arrived(&self, arrival: Arrival) {
        self.change(|state| state.arrivals.push(arrival));
    }

    pub(crate) fn release(&self, path: PathId, region: RegionId, writable: bool) {
        self.change(|state| state.jobs.release(path, region, writable));
    }

    /// Ends what waits for a region, and returns what the caller [delivers](Copiers::deliver) once it holds no lock.
    pub(crate) fn fail(&self, path: PathId, request: MapRequest, error: &Error) -> Reports {
        let mut reports = Reports::default();
        self.change(|state| state.jobs.fail(path, request, error, &mut reports));
        reports
    }

    /// Calls off the slices for whose token `which` says so.
    pub(crate) fn cancel(&self, path: PathId, which: &mut dyn FnMut(u64) -> bool) {
        let mut tokens = self.state.lock().jobs.tokens(path);
        // Not under the lock.
        tokens.retain(|token| which(*token));
        let tokens: HashSet<u64> = tokens.into_iter().collect();
        if !tokens.is_empty() {
            let error = Error::new(ErrorKind::Cancelled, "the slice was cancelled");
            self.report(|jobs, reports| jobs.cancel(path, &tokens, &error, reports));
        }
    }

    pub(crate) fn close(&self, path: PathId, error: &Error) {
        self.report(|jobs, reports| jobs.close(path, error, reports));
    }

    /// Waits until nothing of a closed path is being copied, and every end of a slice of it is reported. A thread that
    /// is at work does not wait for reports: they may be its own, or of one that waits for it.
    pub(crate) fn await_idle(&self, path: PathId) {
        let over: fn(&Jobs<_>, _) -> _ = if AtWork::is_now() { Jobs::is_quiet } else { Jobs::is_idle };
        let mut state = self.state.lock();
        while !over(&state.jobs, path) {
            self.idle.wait(&mut state);
        }
    }

    /// Copies a part of what waits, if there is any (see `available`) and not enough threads copy already. Says whether it did.
    pub(crate) fn help(&self) -> bool {
        let taken = self.change(|state| {
            let mut turn = state.spare.pop().unwrap_or_default();
            if state.copying < self.most && state.begin(&mut turn, Role::Helper) {
                return Some(turn);
            }
            state.spare.push(turn);
            None
        });
        let Some(mut turn) = taken else { return false };
        self.copy(&mut turn, Role::Helper);
        let mut state = self.state.lock();
        state.jobs.reported(&mut turn.reports);
        state.spare.push(turn);
        drop(state);
        self.idle.notify_all();
        true
    }

    fn report(&self, act: impl FnOnce(&mut Jobs<Arc<Link>>, &mut Reports)) {
        let mut reports = Reports::default();
        self.change(|state| act(&mut state.jobs, &mut reports));
        self.deliver(reports);
    }

    pub(crate) fn deliver(&self, mut reports: Reports) {
        self.send(&mut reports);
        self.sent(&mut reports);
    }

    /// Changes the state, and wakes a thread if there is work that nobody would see otherwise.
    fn change<T>(&self, change: impl FnOnce(&mut State) -> T) -> T {
        let (result, wake) = {
            let mut state = self.state.lock();
            let result = change(&mut state);
            (result, self.settle(&mut state))
        };
        if wake {
            self.work.notify_one();
        }
        result
    }

    /// Says whether a sleeping thread has to be woken, which then counts as up.
    ///
    /// Not for copies while another is up: where somebody waits and helps, one more would only take the processor from
    /// either of the two. A thread that goes on from piece to piece wakes the next if there is still room for it.
    fn settle(&self, state: &mut State) -> bool {
        let copies = state.jobs.has_ready();
        self.available.store(copies || !state.arrivals.is_empty() || state.stopping, Ordering::Release);
        let work = if state.arrivals.is_empty() {
            state.up == 0 && copies && state.copying < self.most
        } else {
            !state.spinning
        };
        work && state.wake()
    }

    fn send(&self, reports: &mut Reports) {
        if !reports.completions.is_empty() {
            self.events.completed(&reports.completions);
            reports.completions.clear();
        }
        for path in reports.writable.drain(..) {
            self.events.writable(path);
        }
    }

    /// What was sent counts as unreported no longer.
    fn sent(&self, reports: &mut Reports) {
        self.state.lock().jobs.reported(reports);
        self.idle.notify_all();
    }

    fn run(&self) {
        note_own_thread();
        let (mut turn, mut copied) = (Turn::default(), false);
        loop {
            let next = self.next(&mut turn, copied);
            copied = matches!(next, Next::Copy);
            match next {
                Next::Stop => return,
                Next::Map(Arrival { link, request, question, lent }) => {
                    let map = |lent: Lent| RemoteRegion::map(&lent.reply, lent.offset, lent.file);
                    link.arrived(request, question, lent.and_then(map));
                    self.state.lock().up += 1;
                }
                Next::Copy => {
                    self.copy(&mut turn, Role::Own);
                    self.sent(&mut turn.reports);
                }
            }
        }
    }

    /// Waits for something to do. `copied` is whether this thread did something just now.
    fn next(&self, turn: &mut Turn, copied: bool) -> Next {
        let (mut has_spun, mut goes_on) = (false, copied);
        let mut state = self.state.lock();
        loop {
            let next = if let Some(arrival) = state.arrivals.pop() {
                state.up -= 1;
                Some(Next::Map(arrival))
            } else if state.copying < self.most && state.begin(turn, Role::Own) {
                Some(Next::Copy)
            } else if state.stopping {
                Some(Next::Stop)
            } else {
                None
            };
            if let Some(next) = next {
                let more = goes_on && matches!(next, Next::Copy) && self.is_room_for_more(&state);
                let wake = self.settle(&mut state) || (more && state.wake());
                drop(state);
                if wake {
                    self.work.notify_one();
                }
                return next;
            }
            goes_on = false;
            if !has_spun
                && !state.spinning
                && state.copying < self.most
                && !state.jobs.has_ready()
                && !self.spin.is_zero()
            {
                has_spun = true;
                state.spinning = true;
                self.available.store(false, Ordering::Release);
                drop(state);
                self.spin();
                state = self.state.lock();
                state.spinning = false;
            } else {
                state.up -= 1;
                state.asleep += 1;
                self.work.wait(&mut state);
                has_spun = false;
            }
        }
    }

    /// Whether there is work for one more thread, and none that is up will take it.
    fn is_room_for_more(&self, state: &State) -> bool {
        state.copying < self.most && state.up == state.own && state.jobs.has_ready()
    }

    /// Looks for work for a while.
    fn spin(&self) {
        let until = Instant::now() + self.spin;
        while !self.available.load(Ordering::Acquire) && Instant::now() < until {
            for _ in 0..32 {
                std::hint::spin_loop();
            }
            // Whoever is to bring work, or copies it while he waits, may need this core.
            thread::yield_now();
        }
    }

    /// Copies the pieces of a turn and then others, until something has ended by that, which it reports: then this thread
    /// touches nothing any more, and nobody waits for it who might be called. The caller then notes that they were sent.
    /// A thread that helps goes on for [`HELP_BYTES`] at most.
    fn copy(&self, turn: &mut Turn, role: Role) {
        let mut copied = 0;
        loop {
            let Turn { pieces, done, results, reports } = &mut *turn;
            // SAFETY: whoever submitted the slice keeps its local memory until the completion, which follows.
            results.extend(
                pieces
                    .iter()
                    .map(|piece| unsafe { copy_piece(&piece.link, &piece.slice, piece.offset, piece.len) }),
            );
            copied += pieces.iter().map(|piece| piece.len).sum::<u64>();
            let (goes_on, wake) = {
                let mut state = self.state.lock();
                for (piece, result) in pieces.iter().zip(results.drain(..)) {
                    state.jobs.finish(piece, result, reports);
                }
                std::mem::swap(pieces, done);
                state.end(role);
                let due = match role {
                    Role::Own => !state.arrivals.is_empty() || state.stopping,
                    Role::Helper => copied >= HELP_BYTES,
                };
                let goes_on = reports.is_empty() && !due && state.begin(turn, role);
                let more = goes_on && role == Role::Own && self.is_room_for_more(&state);
                let wake = self.settle(&mut state) || (more && state.wake());
                (goes_on, wake)
            };
            if wake {
                self.work.notify_one();
            }
            self.idle.notify_all();
            turn.done.clear();
            if !goes_on {
                break;
            }
        }
        self.send(&mut turn.reports);
    }

    /// Wakes a thread if there is work that more could do. Asked now and then, since those that are up may be held up by whom
    /// they report to.
    pub(crate) fn rouse(&self) {
        let wake = {
            let mut state = self.state.lock();
            state.copying < self.most && state.jobs.has_ready() && state.wake()
        };
        if wake {
            self.work.notify_one();
        }
    }
}

impl State {
    /// Takes what one thread copies in one turn. Says whether there is anything.
    fn begin(&mut self, turn: &mut Turn, role: Role) -> bool {
        let most = if role == Role::Own { PIECES } else { 1 };
        self.jobs.take(&mut turn.pieces, most, turn.done.last());
        let begins = !turn.pieces.is_empty();
        self.copying += u32::from(begins);
        self.own += u32::from(begins && role == Role::Own);
        begins
    }

    /// A thread's turn is over.
    fn end(&mut self, role: Role) {
        self.copying -= 1;
        self.own -= u32::from(role == Role::Own);
    }

    /// Says whether a thread sleeps, which then counts as woken.
    fn wake(&mut self) -> bool {
        let wakes = self.asleep > 0;
        self.asleep -= u32::from(wakes);
        self.up += u32::from(wakes);
        wakes
    }
}
