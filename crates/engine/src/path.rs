//! A path as the engine sees it: the transport's handle, what is under way on it, and what waits for room.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::Instant;

use parking_lot::{Mutex, RwLock};
use posthorse_core::{
    Error, ErrorKind, Grants, Path, PathId, PathState, Priority, SegmentId, Transport, TransportId,
};

use crate::rails::{Meter, Rail};
use crate::submission::Submission;

/// Slices per call of a transport.
pub(crate) const CHUNK: usize = 64;

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
    /// Whether slices need what was published with the peer's memory.
    pub(crate) keyed: bool,
    down: AtomicBool,
    /// Whether a task looks whether it stays down.
    pub(crate) watched: AtomicBool,
    reason: Mutex<Option<Error>>,
    under_way: AtomicU64,
    /// Whether it is one of several of its transport to the peer, and what it carries then.
    rail: Option<Metered>,
    queue: Mutex<Queue>,
    queued: AtomicUsize,
    queued_bytes: AtomicU64,
    /// How often the transport said that there is room, or somebody queued more.
    pub(crate) rings: AtomicU64,
    pub(crate) pumping: AtomicBool,
}

/// What a rail carries.
#[derive(Debug)]
struct Metered {
    meter: Mutex<Meter>,
    /// Bytes that arrived and were not yet told to the meter.
    untold: AtomicU64,
}

/// What waits for room on a path.
///
/// A transport may have room for some slices and none for others: a lane of its own for the small ones, say. Where it
/// draws the line is its own business, and it takes none behind the first that it has no room for. So what waits
/// does so by priority and class of length, and each class is offered by itself.
#[derive(Debug, Default)]
struct Queue {
    runs: BTreeMap<(Priority, Class), VecDeque<(u64, Run)>>,
    /// The number of the run that came last.
    last: u64,
}

const PAGE_BITS: u32 = 12;

/// A class of lengths: all up to a page, and from there on those within a factor of two.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Class(u32);

impl Class {
    fn of(len: u64) -> Self {
        Self(u64::BITS - (len.saturating_sub(1) >> PAGE_BITS).leading_zeros())
    }

    /// How many pieces of this class a rail takes at once of what waits: about so many bytes, yet several.
    fn at_once(self) -> u32 {
        const BYTES: u64 = 1 << 20;
        let longest = 1_u64.checked_shl(PAGE_BITS + self.0).unwrap_or(u64::MAX);
        (BYTES / longest).clamp(4, CHUNK as u64) as u32
    }
}

/// The classes that a transport was found to have no room for.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Full(u64);

impl Full {
    const fn has(self, class: Class) -> bool {
        self.0 >> class.0 & 1 == 1
    }
}

/// Where in the queue a run was.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Place {
    priority: Priority,
    class: Class,
    number: u64,
}

impl Run {
    /// The bytes of its pieces.
    pub(crate) fn bytes(&self) -> u64 {
        let Range { start, end } = self.pieces;
        let pieces = self.submission.work.pieces.get(start as usize..end as usize).unwrap_or_default();
        pieces.iter().map(|piece| piece.len).sum()
    }
}

impl PathEntry {
    pub(crate) fn new(
        number: u64,
        peer: SegmentId,
        transport_id: TransportId,
        transport: Arc<dyn Transport>,
        info: Path,
        is_rail: bool,
    ) -> Self {
        let reason = match &info.state {
            PathState::Up => None,
            PathState::Down(reason) => Some(reason.clone()),
        };
        Self {
            number,
            peer,
            transport_id,
            keyed: transport.capabilities().grants == Grants::Keyed,
            transport,
            info,
            down: AtomicBool::new(reason.is_some()),
            watched: AtomicBool::new(false),
            reason: Mutex::new(reason),
            under_way: AtomicU64::new(0),
            rail: is_rail.then(|| Metered {
                meter: Mutex::new(Meter::new(Instant::now())),
                untold: AtomicU64::new(0),
            }),
            queue: Mutex::default(),
            queued: AtomicUsize::new(0),
            queued_bytes: AtomicU64::new(0),
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
        self.take_all()
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
        let before = self.under_way.fetch_add(bytes, Ordering::Relaxed);
        if before == 0
            && let Some(rail) = &self.rail
        {
            rail.meter.lock().begin(Instant::now());
        }
    }

    /// Bytes that were under way are so no more; whether they arrived, a rail's meter wants to know.
    pub(crate) fn ended(&self, bytes: u64, arrived: bool) {
        self.under_way.fetch_sub(bytes, Ordering::Relaxed);
        if arrived && let Some(rail) = &self.rail {
            rail.untold.fetch_add(bytes, Ordering::Relaxed);
        }
    }

    /// Whether it is one of several of its transport to the peer.
    pub(crate) const fn is_rail(&self) -> bool {
        self.rail.is_some()
    }

    /// Tells a rail's meter what has arrived.
    pub(crate) fn measure(&self) {
        if let Some(rail) = &self.rail {
            let mut meter = rail.meter.lock();
            let bytes = rail.untold.swap(0, Ordering::Relaxed);
            if bytes > 0 {
                meter.arrived(bytes, Instant::now());
            }
        }
    }

    /// How it stands as one of several rails.
    pub(crate) fn standing(&self, now: Instant) -> Rail {
        let under_way = self.under_way();
        let loaded = under_way + self.queued_bytes.load(Ordering::Relaxed);
        let meter = self.rail.as_ref().map_or_else(|| Meter::new(now), |rail| *rail.meter.lock());
        meter.rail(loaded, under_way, self.info.bandwidth, now)
    }

    /// Whether more may be sent along it now. Of several rails none has so much under way that it could not be had back
    /// soon. What waits for one that is down is sent another way.
    pub(crate) fn has_window(&self) -> bool {
        let has = |rail: &Metered| rail.meter.lock().has_window(self.under_way());
        !self.is_up() || self.rail.as_ref().is_none_or(has)
    }

    /// Bytes that wait for it.
    pub(crate) fn queued_bytes(&self) -> u64 {
        self.queued_bytes.load(Ordering::Relaxed)
    }

    /// Whether something waits for room, so that newcomers have to queue too.
    pub(crate) fn has_queue(&self) -> bool {
        // Sequentially consistent with the rings: see `Inner::pump`.
        self.queued.load(Ordering::SeqCst) > 0
    }

    /// Queues a run behind those of its priority, its pieces each in their class.
    pub(crate) fn queue(&self, priority: Priority, run: &Run) {
        let runs = by_class(run);
        self.queued_bytes.fetch_add(run.bytes(), Ordering::Relaxed);
        self.with_queue(|queue| {
            for (class, run) in runs {
                queue.last += 1;
                queue.runs.entry((priority, class)).or_default().push_back((queue.last, run));
            }
        });
    }

    /// Puts back what is left of a run that was taken, since there is no room for its class.
    pub(crate) fn put_back(&self, place: Place, run: Run, full: &mut Full) {
        let Place { priority, class, number } = place;
        full.0 |= 1 << class.0;
        self.queued_bytes.fetch_add(run.bytes(), Ordering::Relaxed);
        self.with_queue(|queue| {
            queue.runs.entry((priority, class)).or_default().push_front((number, run));
        });
    }

    /// Takes the most urgent run of a class that is not full, the first of several: of several rails no more than one
    /// may well take at once, for what it does not take another may.
    pub(crate) fn take(&self, full: Full) -> Option<(Place, Run)> {
        let taken = self.with_queue(|queue| {
            let waiting = queue.runs.iter().filter(|((_, class), _)| !full.has(*class));
            let numbers = waiting.filter_map(|(key, runs)| Some((key.0, runs.front()?.0, key.1)));
            let (priority, number, class) = numbers.min()?;
            let runs = queue.runs.get_mut(&(priority, class))?;
            let most = if self.is_rail() { class.at_once() } else { CHUNK as u32 };
            let (_, front) = runs.front_mut()?;
            let Range { start, end } = front.pieces;
            let run = if end - start > most {
                front.pieces.start += most;
                Run { submission: Arc::clone(&front.submission), pieces: start..start + most }
            } else {
                runs.pop_front()?.1
            };
            Some((Place { priority, class, number }, run))
        });
        taken.inspect(|(_, run)| self.no_longer_queued(std::slice::from_ref(run)))
    }

    fn no_longer_queued(&self, runs: &[Run]) {
        let bytes = runs.iter().map(Run::bytes).sum();
        self.queued_bytes.fetch_sub(bytes, Ordering::Relaxed);
    }

    /// Takes every run whose submission is being called off.
    pub(crate) fn take_doomed(&self) -> Vec<Run> {
        if !self.has_queue() {
            return Vec::new();
        }
        let mut taken = Vec::new();
        self.with_queue(|queue| {
            for runs in queue.runs.values_mut() {
                runs.retain(|(_, run)| {
                    let take = run.submission.doomed().is_some();
                    if take {
                        taken.push(run.clone());
                    }
                    !take
                });
            }
        });
        self.no_longer_queued(&taken);
        taken
    }

    /// Takes everything that waits.
    pub(crate) fn take_all(&self) -> Vec<Run> {
        let taken = self.with_queue(Queue::take_all);
        self.no_longer_queued(&taken);
        taken
    }

    fn with_queue<T>(&self, work: impl FnOnce(&mut Queue) -> T) -> T {
        let mut queue = self.queue.lock();
        let result = work(&mut queue);
        let queued = queue.runs.values().map(VecDeque::len).sum();
        self.queued.store(queued, Ordering::SeqCst);
        result
    }
}

impl Queue {
    fn take_all(&mut self) -> Vec<Run> {
        self.runs.values_mut().flat_map(std::mem::take).map(|(_, run)| run).collect()
    }
}

/// A run's pieces, those that follow each other in one class together.
fn by_class(run: &Run) -> Vec<(Class, Run)> {
    let cut = &run.submission.work.pieces;
    let class = |piece: u32| Class::of(cut.get(piece as usize).map_or(0, |piece| piece.len));
    let mut runs: Vec<(Class, Run)> = Vec::new();
    for piece in run.pieces.clone() {
        match runs.last_mut() {
            Some((last, run)) if *last == class(piece) => run.pieces.end = piece + 1,
            _ => {
                let run = Run { submission: Arc::clone(&run.submission), pieces: piece..piece + 1 };
                runs.push((class(piece), run));
            }
        }
    }
    runs
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

    /// Forgets a path. Says whether it was known.
    pub(crate) fn remove(&self, entry: &PathEntry) -> bool {
        let mut known = self.known.write();
        if known.by_number.remove(&entry.number).is_none() {
            return false;
        }
        let id = (entry.transport_id, entry.info.id);
        // The transport may have used its own number again.
        if known.by_id.get(&id).is_some_and(|there| there.number == entry.number) {
            known.by_id.remove(&id);
        }
        true
    }

    pub(crate) fn all(&self) -> Vec<Arc<PathEntry>> {
        self.known.read().by_number.values().cloned().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lengths_within_a_factor_of_two_are_of_one_class_and_powers_of_two_end_one() {
        assert_eq!(Class::of(0), Class::of(4096));
        for len in (13..64).map(|bits| 1_u64 << bits) {
            assert!(Class::of(len / 2) < Class::of(len / 2 + 1), "{len}");
            assert_eq!(Class::of(len / 2 + 1), Class::of(len), "{len}");
        }
        assert!(Class::of(u64::MAX).0 < u64::BITS, "one of the bits of `Full`");
        assert_eq!([1, 64 << 10, 1 << 20, u64::MAX].map(|len| Class::of(len).at_once()), [64, 16, 4, 4]);
    }
}
