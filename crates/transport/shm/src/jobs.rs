//! Which slices wait for the copy threads, and which piece is copied next: a state machine without threads.
//!
//! Slices are cut into pieces (see `parts`). Within a priority the slices take turns, a piece each, so that a small one does
//! not wait for all of a large one. A slice whose region is not mapped yet waits apart until it is.

use std::collections::{HashMap, HashSet, VecDeque};

use posthorse_core::{Completion, Error, FarEnd, Level, PathId, Priority, RegionId, Slice, SliceError};

use crate::parts::Parts;
use crate::rendezvous::wire::MapRequest;

/// Small slices are copied several in one turn of a thread, up to so many bytes.
const TURN: u64 = 128 << 10;

/// Part of a slice, to be copied by one thread. `T` is what the slice was pushed with.
#[derive(Debug)]
pub(crate) struct Piece<T> {
    job: usize,
    path: PathId,
    pub(crate) link: T,
    pub(crate) slice: Slice,
    pub(crate) offset: u64,
    pub(crate) len: u64,
}

#[derive(Debug)]
struct Job<T> {
    path: PathId,
    link: T,
    slice: Slice,
    /// What has not been dealt out.
    parts: Parts,
    /// Pieces that are being copied.
    active: u32,
    error: Option<Error>,
    waiting_for: Option<MapRequest>,
}

#[derive(Debug, Default)]
struct Load {
    /// Slices that have not ended, by rank.
    queued: [u32; RANKS],
    /// Pieces that are being copied.
    active: u32,
    /// Slices that have ended and are not reported yet.
    unreported: u32,
    /// Of these ranks fewer slices were taken than offered.
    starved: [bool; RANKS],
    closed: bool,
}

/// What is to be reported once no lock is held.
#[derive(Debug, Default)]
pub(crate) struct Reports {
    pub(crate) completions: Vec<Completion>,
    pub(crate) writable: Vec<PathId>,
    /// How many of the completions are of which path: for [`Jobs::reported`].
    of: Vec<(PathId, u32)>,
}

impl Reports {
    /// Whether there is nothing to report.
    pub(crate) fn is_empty(&self) -> bool {
        self.completions.is_empty() && self.writable.is_empty()
    }
}

/// What became of a slice that was offered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Push {
    Taken,
    Full,
    Closed,
}

/// See the module's documentation.
#[derive(Debug)]
pub(crate) struct Jobs<T> {
    piece_bytes: u64,
    threads: u32,
    limit: u32,
    slab: Vec<Option<Job<T>>>,
    free: Vec<usize>,
    ready: [VecDeque<usize>; RANKS],
    paths: HashMap<PathId, Load>,
}

/// A completion of this slice or notification that says why it failed. Nothing of it is under way any more.
pub(crate) const fn failure(token: u64, error: Error) -> Completion {
    Completion { token, result: Err(SliceError { error, far_end: FarEnd::Quiet }) }
}

/// Copies are visible when they are done.
pub(crate) const fn success(token: u64) -> Completion {
    Completion { token, result: Ok(Level::Visible) }
}

/// How many there are.
const RANKS: usize = 3;

const fn rank(priority: Priority) -> usize {
    match priority {
        Priority::High => 0,
        Priority::Medium => 1,
        Priority::Low => 2,
    }
}

impl<T: Clone> Jobs<T> {
    /// At most `limit` slices of each priority a path, so that the less urgent take no room from the urgent; `threads`
    /// copy at once.
    pub(crate) fn new(piece_bytes: usize, threads: u32, limit: u32) -> Self {
        Self {
            piece_bytes: piece_bytes as u64,
            threads,
            limit,
            slab: Vec::with_capacity(limit as usize),
            free: Vec::with_capacity(limit as usize),
            ready: std::array::from_fn(|_| VecDeque::with_capacity(limit as usize)),
            paths: HashMap::new(),
        }
    }

    /// Takes slices of this path from now on.
    pub(crate) fn open(&mut self, path: PathId) {
        self.paths.insert(path, Load::default());
    }

    /// Offers a slice, which may have to wait until its region is mapped.
    pub(crate) fn push(
        &mut self,
        path: PathId,
        slice: &Slice,
        link: T,
        waiting_for: Option<MapRequest>,
    ) -> Push {
        let Some(load) = self.paths.get_mut(&path).filter(|load| !load.closed) else { return Push::Closed };
        let rank = rank(slice.priority);
        if load.queued[rank] >= self.limit {
            load.starved[rank] = true;
            return Push::Full;
        }
        load.queued[rank] += 1;
        let parts = Parts::new(slice.local.len(), self.threads);
        let job = Job { path, link, slice: *slice, parts, active: 0, error: None, waiting_for };
        let index = self.free.pop().unwrap_or(self.slab.len());
        match self.slab.get_mut(index) {
            Some(place) => *place = Some(job),
            None => self.slab.push(Some(job)),
        }
        if waiting_for.is_none() {
            self.ready[rank].push_back(index);
        }
        Push::Taken
    }

    /// Whether there is a piece that could be copied now.
    pub(crate) fn has_ready(&self) -> bool {
        self.ready.iter().any(|queue| !queue.is_empty())
    }

    /// Hands out what one thread should copy next: one piece of a large slice, or several small slices, `most` in all.
    /// `last` is what it copied last.
    pub(crate) fn take(&mut self, pieces: &mut Vec<Piece<T>>, most: usize, last: Option<&Piece<T>>) {
        let mut bytes = 0;
        for rank in 0..self.ready.len() {
            while bytes < TURN.min(self.piece_bytes) && pieces.len() < most {
                let Some(index) = self.ready[rank].pop_front() else { break };
                let Some(job) = self.slab.get_mut(index).and_then(Option::as_mut) else { continue };
                let after = last.filter(|last| last.job == index).map(|last| last.offset + last.len);
                let (offset, len) = job.parts.take(after, self.piece_bytes);
                let (path, slice) = (job.path, job.slice);
                pieces.push(Piece { job: index, path, link: job.link.clone(), slice, offset, len });
                job.active += 1;
                bytes += len;
                if !job.parts.is_empty() {
                    self.ready[rank].push_back(index);
                }
                if let Some(load) = self.paths.get_mut(&path) {
                    load.active += 1;
                }
                if len < slice.local.len() {
                    return;
                }
            }
        }
    }

    /// A piece was copied, or could not be.
    pub(crate) fn finish(&mut self, piece: &Piece<T>, result: Result<(), Error>, reports: &mut Reports) {
        let Some(job) = self.slab.get_mut(piece.job).and_then(Option::as_mut) else { return };
        job.active -= 1;
        if let Some(load) = self.paths.get_mut(&piece.path) {
            load.active -= 1;
        }
        if let Err(error) = result {
            if !job.parts.is_empty() {
                self.ready[rank(job.slice.priority)].retain(|index| *index != piece.job);
            }
            self.call_off(piece.job, error);
        }
        self.complete_if_over(piece.job, reports);
    }

    /// These completions have been reported.
    pub(crate) fn reported(&mut self, reports: &mut Reports) {
        for (path, count) in reports.of.drain(..) {
            if let Some(load) = self.paths.get_mut(&path) {
                load.unreported -= count;
            }
            self.forget_if_idle(path);
        }
    }

    /// A region was mapped: the slices that waited for it are ready.
    pub(crate) fn release(&mut self, path: PathId, region: RegionId, writable: bool) {
        for (index, job) in self.slab.iter_mut().enumerate() {
            let Some(job) = job.as_mut().filter(|job| job.path == path) else { continue };
            if job.waiting_for.is_some_and(|wanted| wanted.region == region && (writable || !wanted.write)) {
                job.waiting_for = None;
                self.ready[rank(job.slice.priority)].push_back(index);
            }
        }
    }

    /// A region cannot be mapped: the slices that waited for it fail.
    pub(crate) fn fail(&mut self, path: PathId, request: MapRequest, error: &Error, reports: &mut Reports) {
        self.call_off_where(|job| job.path == path && job.waiting_for == Some(request), error, reports);
    }

    /// The tokens of a path's slices that have not ended.
    pub(crate) fn tokens(&self, path: PathId) -> Vec<u64> {
        self.slab.iter().flatten().filter(|job| job.path == path).map(|job| job.slice.token).collect()
    }

    /// Calls slices off; of those under way, what is not being copied right now.
    pub(crate) fn cancel(
        &mut self,
        path: PathId,
        tokens: &HashSet<u64>,
        error: &Error,
        reports: &mut Reports,
    ) {
        self.call_off_where(|job| job.path == path && tokens.contains(&job.slice.token), error, reports);
    }

    /// Calls every slice of a path off, and takes no more.
    pub(crate) fn close(&mut self, path: PathId, error: &Error, reports: &mut Reports) {
        if let Some(load) = self.paths.get_mut(&path) {
            load.closed = true;
            load.starved = [false; RANKS];
        }
        self.call_off_where(|job| job.path == path, error, reports);
        self.forget_if_idle(path);
    }

    /// Whether nothing of a closed path is being copied any more.
    pub(crate) fn is_quiet(&self, path: PathId) -> bool {
        self.paths.get(&path).is_none_or(|load| load.active == 0)
    }

    /// Whether a closed path is quiet, and every end of a slice of it is reported.
    pub(crate) fn is_idle(&self, path: PathId) -> bool {
        self.paths.get(&path).is_none_or(|load| load.active == 0 && load.unreported == 0)
    }

    fn call_off_where(&mut self, which: impl Fn(&Job<T>) -> bool, error: &Error, reports: &mut Reports) {
        let slab = &self.slab;
        for queue in &mut self.ready {
            queue.retain(|index| !slab[*index].as_ref().is_some_and(&which));
        }
        for index in 0..self.slab.len() {
            if self.slab[index].as_ref().is_some_and(&which) {
                self.call_off(index, error.clone());
                self.complete_if_over(index, reports);
            }
        }
    }

    /// No further piece of this job, which is in no queue, is begun; it has failed.
    fn call_off(&mut self, index: usize, error: Error) {
        let Some(job) = self.slab.get_mut(index).and_then(Option::as_mut) else { return };
        job.parts = Parts::default();
        job.waiting_for = None;
        job.error.get_or_insert(error);
    }

    fn complete_if_over(&mut self, index: usize, reports: &mut Reports) {
        let Some(place) = self.slab.get_mut(index) else { return };
        let is_over = |job: &mut Job<T>| job.active == 0 && job.parts.is_empty();
        let Some(job) = place.take_if(is_over) else { return };
        self.free.push(index);
        let token = job.slice.token;
        reports.completions.push(job.error.map_or_else(|| success(token), |error| failure(token, error)));
        if let Some(load) = self.paths.get_mut(&job.path) {
            let rank = rank(job.slice.priority);
            load.queued[rank] -= 1;
            load.unreported += 1;
            if load.starved[rank] && load.queued[rank] <= self.limit / 2 {
                load.starved[rank] = false;
                reports.writable.push(job.path);
            }
        }
        match reports.of.last_mut() {
            Some((path, count)) if *path == job.path => *count += 1,
            _ => reports.of.push((job.path, 1)),
        }
    }

    fn forget_if_idle(&mut self, path: PathId) {
        let is_over = |load: &Load| load.closed && load.queued == [0; RANKS] && load.unreported == 0;
        if self.paths.get(&path).is_some_and(is_over) {
            self.paths.remove(&path);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::ptr::NonNull;

    use posthorse_core::{Checksum, ErrorKind, HostView, Opcode, RemoteKey, View};
    use proptest::prelude::*;

    use super::*;

    const PATH: PathId = PathId(1);
    /// Slices' lengths are given in as many bytes.
    const UNIT: usize = 4096;
    const WANTED: MapRequest = MapRequest { region: RegionId(9), write: true };

    fn slice(token: u64, len: usize, priority: Priority) -> Slice {
        Slice {
            token,
            opcode: Opcode::Write,
            priority,
            checksum: Checksum::Off,
            level: Level::Visible,
            local: View::Host(HostView::new(NonNull::dangling(), len * UNIT)),
            local_region: RegionId(0),
            remote_address: 0,
            grant: None,
            remote_key: RemoteKey::NONE,
            ready: None,
        }
    }

    fn jobs(limit: u32) -> Jobs<()> {
        let mut jobs = Jobs::new(100 * UNIT, 2, limit);
        jobs.open(PATH);
        jobs
    }

    fn take(jobs: &mut Jobs<()>) -> Vec<Piece<()>> {
        let mut pieces = Vec::new();
        jobs.take(&mut pieces, 64, None);
        pieces
    }

    fn brief(pieces: &[Piece<()>]) -> Vec<(u64, u64, u64)> {
        let unit = UNIT as u64;
        pieces.iter().map(|piece| (piece.slice.token, piece.offset / unit, piece.len / unit)).collect()
    }

    fn error(kind: ErrorKind) -> Error {
        Error::new(kind, "why")
    }

    fn kinds(reports: &Reports) -> Vec<(u64, Option<ErrorKind>)> {
        let kind = |done: &Completion| done.result.as_ref().err().map(|error| error.error.kind());
        reports.completions.iter().map(|done| (done.token, kind(done))).collect()
    }

    #[test]
    fn slices_take_turns_and_the_urgent_go_first() {
        let mut jobs = jobs(10);
        jobs.push(PATH, &slice(1, 250, Priority::Medium), (), None);
        jobs.push(PATH, &slice(2, 30, Priority::Medium), (), None);
        jobs.push(PATH, &slice(3, 10, Priority::High), (), None);
        // A thread that takes a piece of a larger slice takes no more.
        assert_eq!(brief(&take(&mut jobs)), [(3, 0, 10), (1, 0, 63)]);
        let second = take(&mut jobs);
        assert_eq!(brief(&second), [(2, 0, 30), (1, 125, 63)]);
        let mut pieces = Vec::new();
        jobs.take(&mut pieces, 64, second.last());
        assert_eq!(brief(&pieces), [(1, 188, 32)], "it goes on where it ended");
        // What others began is taken from its end.
        for piece in [(1, 93, 32), (1, 220, 30), (1, 63, 30)] {
            assert_eq!(brief(&take(&mut jobs)), [piece]);
        }
        assert_eq!(brief(&take(&mut jobs)), []);
    }

    #[test]
    fn a_slice_ends_with_its_last_piece() {
        let mut jobs = jobs(10);
        jobs.push(PATH, &slice(1, 150, Priority::Low), (), None);
        let (first, second) = (take(&mut jobs), take(&mut jobs));
        let mut reports = Reports::default();
        jobs.finish(&second[0], Ok(()), &mut reports);
        assert!(reports.completions.is_empty());
        jobs.finish(&first[0], Err(error(ErrorKind::Corrupt)), &mut reports);
        assert_eq!(kinds(&reports), [(1, Some(ErrorKind::Corrupt))]);
    }

    #[test]
    fn a_full_path_pushes_back_and_says_when_there_is_room() {
        let mut jobs = jobs(2);
        for token in 0..2 {
            assert_eq!(jobs.push(PATH, &slice(token, 1, Priority::Medium), (), None), Push::Taken);
        }
        assert_eq!(jobs.push(PATH, &slice(2, 1, Priority::Medium), (), None), Push::Full);
        let mut reports = Reports::default();
        for piece in take(&mut jobs) {
            jobs.finish(&piece, Ok(()), &mut reports);
        }
        assert_eq!(reports.writable, [PATH]);
        assert_eq!(kinds(&reports), [(0, None), (1, None)]);
    }

    #[test]
    fn the_urgent_have_room_while_others_fill_the_queue() {
        let mut jobs = jobs(2);
        for token in 0..3 {
            jobs.push(PATH, &slice(token, 1, Priority::Low), (), None);
        }
        for (token, push) in [(10, Push::Taken), (11, Push::Taken), (12, Push::Full)] {
            assert_eq!(jobs.push(PATH, &slice(token, 1, Priority::High), (), None), push);
        }
        let mut pieces = Vec::new();
        jobs.take(&mut pieces, 2, None);
        assert_eq!(brief(&pieces), [(10, 0, 1), (11, 0, 1)]);
        let mut reports = Reports::default();
        for (piece, writable) in pieces.iter().zip([&[PATH][..], &[]]) {
            jobs.finish(piece, Ok(()), &mut reports);
            assert_eq!(reports.writable, writable, "there is room for the urgent, whatever else waits");
            reports.writable.clear();
        }
        jobs.push(PATH, &slice(13, 1, Priority::High), (), None);
        for piece in take(&mut jobs) {
            jobs.finish(&piece, Ok(()), &mut reports);
        }
        assert_eq!(reports.writable, [PATH], "there is room for the others");
    }

    #[test]
    fn a_slice_waits_for_its_region() {
        let mut jobs = jobs(4);
        jobs.push(PATH, &slice(1, 1, Priority::Medium), (), Some(WANTED));
        jobs.push(PATH, &slice(2, 1, Priority::Medium), (), Some(MapRequest { write: false, ..WANTED }));
        assert!(take(&mut jobs).is_empty());
        jobs.release(PATH, WANTED.region, false);
        assert_eq!(brief(&take(&mut jobs)), [(2, 0, 1)]);
        let mut reports = Reports::default();
        jobs.fail(PATH, WANTED, &error(ErrorKind::AccessDenied), &mut reports);
        assert_eq!(kinds(&reports), [(1, Some(ErrorKind::AccessDenied))]);
    }

    #[test]
    fn closing_ends_what_waits_and_lets_what_is_copied_end() {
        let mut jobs = jobs(4);
        jobs.push(PATH, &slice(1, 150, Priority::Medium), (), None);
        jobs.push(PATH, &slice(2, 1, Priority::Medium), (), Some(WANTED));
        let first = take(&mut jobs);
        let mut reports = Reports::default();
        jobs.close(PATH, &error(ErrorKind::Flushed), &mut reports);
        assert_eq!(kinds(&reports), [(2, Some(ErrorKind::Flushed))]);
        jobs.reported(&mut reports);
        assert!(!jobs.is_quiet(PATH) && !jobs.is_idle(PATH));
        assert_eq!(jobs.push(PATH, &slice(3, 1, Priority::Medium), (), None), Push::Closed);
        assert!(take(&mut jobs).is_empty());
        jobs.finish(&first[0], Ok(()), &mut reports);
        assert_eq!(kinds(&reports), [(2, Some(ErrorKind::Flushed)), (1, Some(ErrorKind::Flushed))]);
        assert!(jobs.is_quiet(PATH));
        assert!(!jobs.is_idle(PATH), "it is not reported yet");
        jobs.reported(&mut reports);
        assert!(jobs.is_idle(PATH) && jobs.paths.is_empty());
    }

    #[derive(Debug, Clone)]
    enum Step {
        Push(usize, bool),
        Take,
        Finish(usize, bool),
        Release,
        Fail,
        Cancel(u64),
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            4 => (1_usize..350, any::<bool>()).prop_map(|(len, waits)| Step::Push(len, waits)),
            4 => Just(Step::Take),
            4 => (any::<usize>(), any::<bool>()).prop_map(|(which, fails)| Step::Finish(which, fails)),
            1 => Just(Step::Release),
            1 => Just(Step::Fail),
            1 => (0_u64..40).prop_map(Step::Cancel),
        ]
    }

    proptest! {
        /// Whatever happens, each slice taken ends exactly once, after its last piece, and no byte is copied twice.
        #[test]
        fn every_slice_ends_once(steps in proptest::collection::vec(step(), 0..80)) {
            let mut jobs = jobs(8);
            let mut reports = Reports::default();
            let mut out: Vec<Piece<()>> = Vec::new();
            let (mut taken, mut lens) = (0, Vec::new());
            let mut copied: HashMap<u64, u64> = HashMap::new();
            let mut places = HashSet::new();
            for step in steps {
                match step {
                    Step::Push(len, waits) => {
                        let wanted = waits.then_some(WANTED);
                        if jobs.push(PATH, &slice(taken, len, Priority::Medium), (), wanted) == Push::Taken {
                            taken += 1;
                            lens.push((len * UNIT) as u64);
                        }
                    }
                    Step::Take => {
                        let mut pieces = Vec::new();
                        jobs.take(&mut pieces, 64, out.last());
                        for piece in &pieces {
                            for place in (piece.offset..piece.offset + piece.len).step_by(UNIT) {
                                prop_assert!(places.insert((piece.slice.token, place)), "copied twice");
                            }
                            *copied.entry(piece.slice.token).or_default() += piece.len;
                        }
                        out.append(&mut pieces);
                    }
                    Step::Finish(which, fails) if !out.is_empty() => {
                        let piece = out.swap_remove(which % out.len());
                        let result = if fails { Err(error(ErrorKind::Corrupt)) } else { Ok(()) };
                        jobs.finish(&piece, result, &mut reports);
                    }
                    Step::Finish(..) => {}
                    Step::Release => jobs.release(PATH, WANTED.region, true),
                    Step::Fail => jobs.fail(PATH, WANTED, &error(ErrorKind::AccessDenied), &mut reports),
                    Step::Cancel(token) => {
                        jobs.cancel(PATH, &HashSet::from([token]), &error(ErrorKind::Cancelled), &mut reports);
                    }
                }
                for done in &reports.completions {
                    let whole = done.result.is_err() || copied.get(&done.token) == Some(&lens[done.token as usize]);
                    prop_assert!(whole, "ended before all of it was copied");
                    prop_assert!(out.iter().all(|piece| piece.slice.token != done.token), "ended while being copied");
                }
            }
            jobs.close(PATH, &error(ErrorKind::Flushed), &mut reports);
            for piece in out {
                jobs.finish(&piece, Ok(()), &mut reports);
            }
            prop_assert!(jobs.is_quiet(PATH));
            prop_assert_eq!(jobs.is_idle(PATH), taken == 0);
            jobs.reported(&mut reports);
            let mut ended: Vec<_> = reports.completions.iter().map(|done| done.token).collect();
            ended.sort_unstable();
            prop_assert_eq!(ended, (0..taken).collect::<Vec<_>>());
            prop_assert!(jobs.is_idle(PATH) && jobs.paths.is_empty());
        }
    }
}
