//! The copy threads, and the queue they work from.

use std::collections::HashSet;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::thread::{self, JoinHandle};

use parking_lot::{Condvar, Mutex};
use posthorse_core::{Error, ErrorKind, PathId, RegionId, Result, Slice, TransportEvents};

use crate::copy::copy_piece;
use crate::jobs::{Jobs, Piece, Push, Reports};
use crate::link::Link;
use crate::remote::RemoteRegion;
use crate::rendezvous::wire::{MapRequest, RegionReply};

/// A region's file that arrived, to be mapped.
#[derive(Debug)]
pub(crate) struct Arrival {
    pub(crate) link: Arc<Link>,
    pub(crate) reply: RegionReply,
    pub(crate) offset: u64,
    pub(crate) file: OwnedFd,
}

#[derive(Debug)]
struct State {
    jobs: Jobs<Arc<Link>>,
    arrivals: Vec<Arrival>,
    stopping: bool,
}

/// See the module's documentation.
#[derive(Debug)]
pub(crate) struct Copiers {
    state: Mutex<State>,
    work: Condvar,
    idle: Condvar,
    events: Arc<dyn TransportEvents>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

impl Copiers {
    /// Starts `threads` of them.
    pub(crate) fn start(
        threads: u32,
        piece_bytes: usize,
        queue_slices: u32,
        events: Arc<dyn TransportEvents>,
    ) -> Result<Arc<Self>> {
        let jobs = Jobs::new(piece_bytes, queue_slices);
        let this = Arc::new(Self {
            state: Mutex::new(State { jobs, arrivals: Vec::new(), stopping: false }),
            work: Condvar::new(),
            idle: Condvar::new(),
            events,
            threads: Mutex::default(),
        });
        for number in 0..threads {
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
        self.work.notify_all();
        let threads = std::mem::take(&mut *self.threads.lock());
        for thread in threads {
            if thread.thread().id() != thread::current().id() {
                let _ = thread.join();
            }
        }
        self.state.lock().arrivals.clear();
    }

    pub(crate) fn open(&self, path: PathId) {
        self.state.lock().jobs.open(path);
    }

    /// Offers a slice; one that waits for its region is begun by [`Copiers::release`].
    pub(crate) fn push(&self, link: &Arc<Link>, slice: &Slice, waiting_for: Option<MapRequest>) -> Push {
        let push = self.state.lock().jobs.push(link.id, slice, Arc::clone(link), waiting_for);
        if push == Push::Taken && waiting_for.is_none() {
            self.work.notify_one();
        }
        push
    }

    /// Leaves a file to be mapped, which takes longer than the rendezvous should wait.
    pub(crate) fn map(&self, arrival: Arrival) {
        self.state.lock().arrivals.push(arrival);
        self.work.notify_one();
    }

    pub(crate) fn release(&self, path: PathId, region: RegionId, writable: bool) {
        self.state.lock().jobs.release(path, region, writable);
        self.work.notify_all();
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
        self.work.notify_all();
    }

    /// Waits until nothing of a closed path is being copied.
    pub(crate) fn await_idle(&self, path: PathId) {
        let mut state = self.state.lock();
        while !state.jobs.is_idle(path) {
            self.idle.wait(&mut state);
        }
    }

    fn report(&self, act: impl FnOnce(&mut Jobs<Arc<Link>>, &mut Reports)) {
        let mut reports = Reports::default();
        act(&mut self.state.lock().jobs, &mut reports);
        self.send(&mut reports);
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

    fn run(&self) {
        let mut pieces: Vec<Piece<Arc<Link>>> = Vec::new();
        let mut results: Vec<Result<()>> = Vec::new();
        let mut reports = Reports::default();
        loop {
            let arrival = {
                let mut state = self.state.lock();
                loop {
                    let arrival = state.arrivals.pop();
                    if arrival.is_none() {
                        state.jobs.take(&mut pieces);
                    }
                    if arrival.is_some() || !pieces.is_empty() {
                        break arrival;
                    }
                    if state.stopping {
                        return;
                    }
                    self.work.wait(&mut state);
                }
            };
            if let Some(Arrival { link, reply, offset, file }) = arrival {
                link.arrived(reply.request, RemoteRegion::map(&reply, offset, file));
                continue;
            }
            // SAFETY: whoever submitted the slice keeps its local memory until the completion, which follows.
            results.extend(
                pieces
                    .iter()
                    .map(|piece| unsafe { copy_piece(&piece.link, &piece.slice, piece.offset, piece.len) }),
            );
            {
                let mut state = self.state.lock();
                for (piece, result) in pieces.iter().zip(results.drain(..)) {
                    state.jobs.finish(piece, result, &mut reports);
                }
            }
            self.send(&mut reports);
            {
                let mut state = self.state.lock();
                for piece in pieces.drain(..) {
                    state.jobs.reported(&piece);
                }
            }
            self.idle.notify_all();
        }
    }
}
