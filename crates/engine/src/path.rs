//! A path as the engine sees it: the transport's handle, what is under way on it, and what waits for room.

use std::collections::{HashMap, VecDeque};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

use parking_lot::{Mutex, RwLock};
use posthorse_core::{
    Error, ErrorKind, Path, PathId, PathState, Priority, SegmentId, Transport, TransportId,
};

use crate::submission::Submission;

/// Some consecutive pieces of a submission.
#[derive(Debug, Clone)]
pub(crate) struct Run {
    pub(crate) submission: Arc<Submission>,
    pub(crate) pieces: Range<u32>,
}

/// A path to a peer.
#[derive(Debug)]
pub(crate) struct PathEntry {
    /// Its number among all paths the engine ever had.
    pub(crate) number: u64,
    pub(crate) peer: SegmentId,
    pub(crate) transport_id: TransportId,
    pub(crate) transport: Arc<dyn Transport>,
    pub(crate) info: Path,
    down: AtomicBool,
    reason: Mutex<Option<Error>>,
    under_way: AtomicU64,
    queue: Mutex<Queue>,
    queued: AtomicUsize,
    /// How often the transport said that there is room, or somebody queued more.
    pub(crate) rings: AtomicU64,
    pub(crate) pumping: AtomicBool,
}

/// What waits for room on a path, by priority.
#[derive(Debug, Default)]
struct Queue {
    runs: [VecDeque<Run>; 3],
}

impl PathEntry {
    pub(crate) fn new(
        number: u64,
        peer: SegmentId,
        transport_id: TransportId,
        transport: Arc<dyn Transport>,
        info: Path,
    ) -> Self {
        let reason = match &info.state {
            PathState::Up => None,
            PathState::Down(reason) => Some(reason.clone()),
        };
        Self {
            number,
            peer,
            transport_id,
            transport,
            info,
            down: AtomicBool::new(reason.is_some()),
            reason: Mutex::new(reason),
            under_way: AtomicU64::new(0),
            queue: Mutex::default(),
            queued: AtomicUsize::new(0),
            rings: AtomicU64::new(0),
            pumping: AtomicBool::new(false),
        }
    }

    pub(crate) fn is_up(&self) -> bool {
        !self.down.load(Ordering::Acquire)
    }

    /// Why it is down, if it is.
    pub(crate) fn reason(&self) -> Option<Error> {
        self.reason.lock().clone()
    }

    /// Notes that it went down, and gives what was waiting for it.
    pub(crate) fn take_down(&self, reason: &Error) -> Vec<Run> {
        self.reason.lock().get_or_insert_with(|| reason.clone());
        self.down.store(true, Ordering::Release);
        // By the queue's lock, whoever queues a run hereafter finds the path down.
        self.with_queue(Queue::take_all)
    }

    /// Notes that the transport says it can be used again.
    pub(crate) fn come_up(&self) {
        *self.reason.lock() = None;
        self.down.store(false, Ordering::Release);
    }

    /// The error of whatever was to go over it.
    pub(crate) fn down_error(&self) -> Error {
        let reason = self.reason();
        reason.unwrap_or_else(|| Error::new(ErrorKind::PathFailed, "the path is down"))
    }

    pub(crate) fn under_way(&self) -> u64 {
        self.under_way.load(Ordering::Relaxed)
    }

    pub(crate) fn departed(&self, bytes: u64) {
        self.under_way.fetch_add(bytes, Ordering::Relaxed);
    }

    pub(crate) fn arrived(&self, bytes: u64) {
        self.under_way.fetch_sub(bytes, Ordering::Relaxed);
    }

    /// Whether something waits for room, so that newcomers have to wait too.
    pub(crate) fn has_queue(&self) -> bool {
        // Sequentially consistent with the rings: see `Inner::pump`.
        self.queued.load(Ordering::SeqCst) > 0
    }

    /// Queues a run behind those of its priority.
    pub(crate) fn queue(&self, priority: Priority, run: Run) {
        self.with_queue(|queue| queue.of(priority).push_back(run));
    }

    /// Puts back what was taken from the front and found no room.
    pub(crate) fn put_back(&self, priority: Priority, run: Run) {
        self.with_queue(|queue| queue.of(priority).push_front(run));
    }

    /// Takes the most urgent run, at most `most` pieces of it.
    pub(crate) fn take(&self, most: u32) -> Option<(Priority, Run)> {
        self.with_queue(|queue| {
            for priority in [Priority::High, Priority::Medium, Priority::Low] {
                let runs = queue.of(priority);
                let Some(front) = runs.front_mut() else { continue };
                let Range { start, end } = front.pieces;
                if end - start > most {
                    front.pieces.start += most;
                    let submission = Arc::clone(&front.submission);
                    return Some((priority, Run { submission, pieces: start..start + most }));
                }
                return runs.pop_front().map(|run| (priority, run));
            }
            None
        })
    }

    /// Takes every run whose submission is being called off.
    pub(crate) fn take_doomed(&self) -> Vec<Run> {
        if !self.has_queue() {
            return Vec::new();
        }
        let mut taken = Vec::new();
        self.with_queue(|queue| {
            for runs in &mut queue.runs {
                runs.retain(|run| {
                    let take = run.submission.doomed().is_some();
                    if take {
                        taken.push(run.clone());
                    }
                    !take
                });
            }
        });
        taken
    }

    /// Takes everything that waits.
    pub(crate) fn take_all(&self) -> Vec<Run> {
        self.with_queue(Queue::take_all)
    }

    fn with_queue<T>(&self, work: impl FnOnce(&mut Queue) -> T) -> T {
        let mut queue = self.queue.lock();
        let result = work(&mut queue);
        let queued = queue.runs.iter().map(VecDeque::len).sum();
        self.queued.store(queued, Ordering::SeqCst);
        result
    }
}

impl Queue {
    fn take_all(&mut self) -> Vec<Run> {
        self.runs.iter_mut().flat_map(std::mem::take).collect()
    }

    const fn of(&mut self, priority: Priority) -> &mut VecDeque<Run> {
        let [high, medium, low] = &mut self.runs;
        match priority {
            Priority::High => high,
            Priority::Medium => medium,
            Priority::Low => low,
        }
    }
}

/// All paths of an engine.
#[derive(Debug, Default)]
pub(crate) struct Paths {
    known: RwLock<Known>,
}

#[derive(Debug, Default)]
struct Known {
    /// The number of the latest path. Numbers are not used again: a slice may end long after its path was given up.
    last: u64,
    by_number: HashMap<u64, Arc<PathEntry>>,
    by_id: HashMap<(TransportId, PathId), Arc<PathEntry>>,
}

impl Paths {
    pub(crate) fn insert(&self, make: impl FnOnce(u64) -> PathEntry) -> Arc<PathEntry> {
        let mut known = self.known.write();
        known.last += 1;
        let entry = Arc::new(make(known.last));
        known.by_number.insert(entry.number, Arc::clone(&entry));
        known.by_id.insert((entry.transport_id, entry.info.id), Arc::clone(&entry));
        entry
    }

    /// The path of this number, unless it was given up.
    pub(crate) fn get(&self, number: u64) -> Option<Arc<PathEntry>> {
        self.known.read().by_number.get(&number).cloned()
    }

    /// The path that a transport knows under `id`.
    pub(crate) fn find(&self, transport: TransportId, id: PathId) -> Option<Arc<PathEntry>> {
        self.known.read().by_id.get(&(transport, id)).cloned()
    }

    pub(crate) fn remove(&self, entry: &PathEntry) {
        let mut known = self.known.write();
        known.by_number.remove(&entry.number);
        let id = (entry.transport_id, entry.info.id);
        // The transport may have used its own number again.
        if known.by_id.get(&id).is_some_and(|there| there.number == entry.number) {
            known.by_id.remove(&id);
        }
    }

    pub(crate) fn all(&self) -> Vec<Arc<PathEntry>> {
        self.known.read().by_number.values().cloned().collect()
    }
}
