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
use crate::jobs::{Jobs, Piece, Push, Reports};
use crate::link::Link;
use crate::remote::RemoteRegion;
use crate::rendezvous::wire::{MapRequest, RegionReply};

/// Small slices are copied several in one turn of a thread, up to this many.
const PIECES: usize = 64;

/// What became of a request for a region, for a copy thread to see to.
#[derive(Debug)]
pub(crate) struct Arrival {
    pub(crate) link: Arc<Link>,
    pub(crate) request: MapRequest,
    /// What arrived, or why nothing will.
    pub(crate) lent: Result<Lent>,
}

/// A region's file that arrived, to be mapped.
#[derive(Debug)]
pub(crate) struct Lent {
    pub(crate) reply: RegionReply,
    pub(crate) offset: u64,
    pub(crate) file: OwnedFd,
    /// With which answer of the peer.
    pub(crate) answer: u64,
}

#[derive(Debug)]
struct State {
    jobs: Jobs<Arc<Link>>,
    arrivals: Vec<Arrival>,
    /// What threads that helped worked with, for the next.
    spare: Vec<Turn>,
    /// Threads that copy right now, those that help among them.
    copying: u32,
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
    results: Vec<Result<()>>,
    reports: Reports,
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
                jobs: Jobs::new(config.piece_bytes, config.queue_slices),
                arrivals: Vec::new(),
                spare: Vec::new(),
                copying: 0,
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
        self.state.lock().stopping = true;
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

    pub(crate) fn fail(&self, path: PathId, request: MapRequest, error: &Error) {
        self.report(|jobs, reports| jobs.fail(path, request, error, reports));
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

    /// Copies one piece of what waits, if there is one (see `available`) and not enough threads copy already. Says whether it did.
    pub(crate) fn help(&self) -> bool {
        let taken = self.change(|state| {
            let mut turn = state.spare.pop().unwrap_or_default();
            if state.copying < self.most && state.take(&mut turn, 1) {
                return Some(turn);
            }
            state.spare.push(turn);
            None
        });
        let Some(mut turn) = taken else { return false };
        self.copy(&mut turn);
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

    /// Says whether a sleeping thread has to be woken, which is then no longer counted as one.
    fn settle(&self, state: &mut State) -> bool {
        let copies = state.jobs.has_ready();
        self.available.store(copies || !state.arrivals.is_empty() || state.stopping, Ordering::Release);
        let work = !state.arrivals.is_empty() || (copies && state.copying < self.most);
        let wake = work && !state.spinning && state.asleep > 0;
        state.asleep -= u32::from(wake);
        wake
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
        let mut turn = Turn::default();
        loop {
            match self.next(&mut turn) {
                Next::Stop => return,
                Next::Map(Arrival { link, request, lent }) => match lent {
                    Ok(Lent { reply, offset, file, answer }) => {
                        link.arrived(request, answer, RemoteRegion::map(&reply, offset, file));
                    }
                    Err(error) => link.refuse(request, &error),
                },
                Next::Copy => {
                    self.copy(&mut turn);
                    self.sent(&mut turn.reports);
                }
            }
        }
    }

    /// Waits for something to do.
    fn next(&self, turn: &mut Turn) -> Next {
        let mut has_spun = false;
        let mut state = self.state.lock();
        loop {
            let next = if let Some(arrival) = state.arrivals.pop() {
                Some(Next::Map(arrival))
            } else if state.copying < self.most && state.take(turn, PIECES) {
                Some(Next::Copy)
            } else if state.stopping {
                Some(Next::Stop)
            } else {
                None
            };
            if let Some(next) = next {
                let wake = self.settle(&mut state);
                drop(state);
                if wake {
                    self.work.notify_one();
                }
                return next;
            }
            if !has_spun && !state.spinning && !state.jobs.has_ready() && !self.spin.is_zero() {
                has_spun = true;
                state.spinning = true;
                self.available.store(false, Ordering::Release);
                drop(state);
                self.spin();
                state = self.state.lock();
                state.spinning = false;
            } else {
                state.asleep += 1;
                self.work.wait(&mut state);
                has_spun = false;
            }
        }
    }

    /// Looks for work for a while.
    fn spin(&self) {
        let until = Instant::now() + self.spin;
        while !self.available.load(Ordering::Acquire) && Instant::now() < until {
            for _ in 0..32 {
                std::hint::spin_loop();
            }
        }
    }

    /// Copies the pieces of a turn, and reports what has ended by that: then this thread touches nothing any more, and
    /// nobody waits for it who might be called. The caller then notes that they were sent.
    fn copy(&self, turn: &mut Turn) {
        let Turn { pieces, results, reports } = turn;
        // SAFETY: whoever submitted the slice keeps its local memory until the completion, which follows.
        results.extend(
            pieces
                .iter()
                .map(|piece| unsafe { copy_piece(&piece.link, &piece.slice, piece.offset, piece.len) }),
        );
        self.change(|state| {
            state.copying -= 1;
            for (piece, result) in pieces.iter().zip(results.drain(..)) {
                state.jobs.finish(piece, result, reports);
            }
        });
        pieces.clear();
        self.idle.notify_all();
        self.send(reports);
    }
}

impl State {
    /// Takes up to `most` pieces to be copied by one thread. Says whether there are any.
    fn take(&mut self, turn: &mut Turn, most: usize) -> bool {
        self.jobs.take(&mut turn.pieces, most);
        let taken = !turn.pieces.is_empty();
        self.copying += u32::from(taken);
        taken
    }
}
