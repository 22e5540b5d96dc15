//! The thread that copies, and the queues it works on.

use std::collections::{BTreeMap, VecDeque};
use std::mem;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};

use posthorse_core::{
    Completion, Error, ErrorKind, FarEnd, Level, PathId, PathState, Result, Slice, SliceError,
};

use super::copy::{carry_out, flushed};
use super::hub::Endpoint;

/// What a path is asked to do.
#[derive(Debug)]
pub(super) enum Job {
    Slice(Slice),
    Notification(u64, Box<[u8]>),
}

impl Job {
    const fn token(&self) -> u64 {
        match self {
            Self::Slice(slice) => slice.token,
            Self::Notification(token, _) => *token,
        }
    }
}

/// The queues of every path of one transport, and the thread that empties them.
#[derive(Debug)]
pub(super) struct Worker {
    shared: Arc<Shared>,
    /// How many jobs a path holds.
    queue: usize,
    thread: Mutex<Option<JoinHandle<()>>>,
}

#[derive(Debug, Default)]
struct Shared {
    state: Mutex<State>,
    work: Condvar,
}

#[derive(Debug, Default)]
struct State {
    /// Present from start to stop.
    endpoint: Option<Arc<Endpoint>>,
    stopped: bool,
    paths: BTreeMap<PathId, Line>,
    /// The number of the latest path.
    last: u64,
    /// The number of the path that was served last: the next one has its turn.
    served: u64,
}

/// One path.
#[derive(Debug)]
struct Line {
    peer: Arc<Endpoint>,
    jobs: VecDeque<Job>,
    /// Set by fencing; looked at by the worker between pieces.
    down: Arc<AtomicBool>,
    /// Whether somebody was sent away and waits for room.
    refused: bool,
}

impl Worker {
    pub(super) fn new(queue: usize) -> Self {
        Self { shared: Arc::default(), queue, thread: Mutex::default() }
    }

    pub(super) fn start(&self, endpoint: Arc<Endpoint>) -> Result<()> {
        let mut state = self.shared.state();
        if state.stopped || state.endpoint.is_some() {
            return Err(Error::new(ErrorKind::Closed, "a transport is started once"));
        }
        state.endpoint = Some(endpoint);
        let shared = Arc::clone(&self.shared);
        let thread = thread::Builder::new().name("memory-worker".into()).spawn(move || shared.work());
        let thread = thread.map_err(|error| Error::os("starting memory-worker", &error))?;
        *self.thread.lock().unwrap_or_else(PoisonError::into_inner) = Some(thread);
        Ok(())
    }

    /// Ends every path, and waits for the thread unless this is it.
    pub(super) fn stop(&self) -> Option<Arc<Endpoint>> {
        let (endpoint, paths) = {
            let mut state = self.shared.state();
            state.stopped = true;
            (state.endpoint.take(), mem::take(&mut state.paths))
        };
        self.shared.work.notify_all();
        for line in paths.into_values() {
            line.down.store(true, Ordering::SeqCst);
            report(endpoint.as_deref(), line.jobs, &flushed());
        }
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(thread) = thread
            && thread.thread().id() != thread::current().id()
        {
            // A panic there has been printed already.
            drop(thread.join());
        }
        endpoint
    }

    pub(super) fn endpoint(&self) -> Result<Arc<Endpoint>> {
        self.shared.state().endpoint.clone().ok_or_else(closed)
    }

    pub(super) fn connect(&self, peer: Arc<Endpoint>) -> Result<PathId> {
        let mut state = self.shared.state();
        if state.endpoint.is_none() {
            return Err(closed());
        }
        state.last += 1;
        let path = PathId(state.last);
        let down = Arc::default();
        state
            .paths
            .insert(path, Line { peer, jobs: VecDeque::with_capacity(self.queue), down, refused: false });
        Ok(path)
    }

    /// Takes as many of the jobs as there is room for.
    pub(super) fn enqueue(&self, path: PathId, jobs: impl IntoIterator<Item = Job>) -> Result<usize> {
        let mut state = self.shared.state();
        if state.endpoint.is_none() {
            return Err(closed());
        }
        let line = state.paths.get_mut(&path).ok_or_else(|| unknown(path))?;
        if line.down.load(Ordering::SeqCst) {
            return Err(Error::new(ErrorKind::PathFailed, "the path is down"));
        }
        drop(line.peer.visit()?);
        let mut taken = 0;
        for job in jobs {
            if line.jobs.len() == self.queue {
                line.refused = true;
                break;
            }
            line.jobs.push_back(job);
            taken += 1;
        }
        drop(state);
        self.shared.work.notify_all();
        Ok(taken)
    }

    pub(super) fn cancel(&self, path: PathId, which: &mut dyn FnMut(u64) -> bool) {
        let (endpoint, dropped, room) = {
            let mut state = self.shared.state();
            let endpoint = state.endpoint.clone();
            let Some(line) = state.paths.get_mut(&path) else { return };
            let (mut kept, mut dropped) = (VecDeque::with_capacity(self.queue), VecDeque::new());
            for job in line.jobs.drain(..) {
                // Notifications are not slices: they stay.
                let drop = matches!(&job, Job::Slice(slice) if which(slice.token));
                if drop { &mut dropped } else { &mut kept }.push_back(job);
            }
            line.jobs = kept;
            (endpoint, dropped, mem::take(&mut line.refused))
        };
        report(
            endpoint.as_deref(),
            dropped,
            &Error::new(ErrorKind::Cancelled, "cancelled before it was posted"),
        );
        if let Some(endpoint) = endpoint.filter(|_| room) {
            endpoint.context.events.writable(path);
        }
    }

    /// Takes a path down. What the worker has begun of it ends at the next piece, and is reported there.
    pub(super) fn fence(&self, path: PathId) {
        let (endpoint, jobs) = {
            let mut state = self.shared.state();
            let endpoint = state.endpoint.clone();
            let Some(line) = state.paths.get_mut(&path) else { return };
            line.down.store(true, Ordering::SeqCst);
            (endpoint, mem::take(&mut line.jobs))
        };
        report(endpoint.as_deref(), jobs, &flushed());
    }

    pub(super) fn forget(&self, path: PathId) {
        self.shared.state().paths.remove(&path);
    }
}

/// What the worker does next.
struct Turn {
    own: Arc<Endpoint>,
    path: PathId,
    peer: Arc<Endpoint>,
    down: Arc<AtomicBool>,
    job: Job,
    room: bool,
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn work(&self) {
        while let Some(turn) = self.next() {
            let events = &turn.own.context.events;
            if turn.room {
                events.writable(turn.path);
            }
            let result = match &turn.job {
                Job::Slice(slice) => carry_out(slice, &turn.own, &turn.peer, &turn.down),
                Job::Notification(_, data) => {
                    let from = &turn.own.context.name;
                    let there = turn.peer.visit().map(drop);
                    there
                        .and_then(|()| turn.peer.context.events.notified(from, data))
                        .map(|()| Level::Visible)
                }
            };
            let gone = result.as_ref().err().filter(|error| error.kind() == ErrorKind::PeerGone).cloned();
            // The copy is this thread's own and has ended: both ends are quiet, whatever came of it.
            let result = result.map_err(|error| SliceError { error, far_end: FarEnd::Quiet });
            events.completed(&[Completion { token: turn.job.token(), result }]);
            if let Some(error) = gone
                && !turn.down.swap(true, Ordering::SeqCst)
            {
                let jobs = self.state().paths.get_mut(&turn.path).map(|line| mem::take(&mut line.jobs));
                report(Some(&turn.own), jobs.unwrap_or_default(), &error);
                events.path_changed(turn.path, &PathState::Down(error));
            }
        }
    }

    /// The next job of the next path that has one; waits for it; `None` after the stop.
    fn next(&self) -> Option<Turn> {
        let mut state = self.state();
        loop {
            let own = state.endpoint.clone()?;
            let after = state.served + 1;
            let State { paths, served, .. } = &mut *state;
            let path = {
                let has_jobs = |(path, line): (&PathId, &Line)| (!line.jobs.is_empty()).then_some(*path);
                let later = paths.range(PathId(after)..).find_map(has_jobs);
                later.or_else(|| paths.iter().find_map(has_jobs))
            };
            if let Some(path) = path
                && let Some(line) = paths.get_mut(&path)
                && let Some(job) = line.jobs.pop_front()
            {
                *served = path.0;
                return Some(Turn {
                    own,
                    path,
                    peer: Arc::clone(&line.peer),
                    down: Arc::clone(&line.down),
                    job,
                    room: mem::take(&mut line.refused),
                });
            }
            state = self.work.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

/// Reports that these jobs were never begun.
fn report(endpoint: Option<&Endpoint>, jobs: VecDeque<Job>, error: &Error) {
    let Some(endpoint) = endpoint.filter(|_| !jobs.is_empty()) else { return };
    let failed = |job: Job| Completion {
        token: job.token(),
        result: Err(SliceError { error: error.clone(), far_end: FarEnd::Quiet }),
    };
    endpoint.context.events.completed(&jobs.into_iter().map(failed).collect::<Vec<_>>());
}

fn closed() -> Error {
    Error::new(ErrorKind::Closed, "the transport does not run")
}

fn unknown(path: PathId) -> Error {
    Error::new(ErrorKind::NotFound, format!("there is no path {path}"))
}
