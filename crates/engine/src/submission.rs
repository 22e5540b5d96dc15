//! What was submitted in one call, and how far each piece of it has come.
//!
//! The work is immutable and can be shared by many submissions (a plan posted many times); the states beside
//! it are atomics, so completions from several transports need no lock.

use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use parking_lot::Mutex;
use posthorse_core::{
    Attributes, Checksum, Deadline, Error, ErrorClass, ErrorKind, GrantToken, Opcode, Pin, Priority,
    RegionId, Route, TransferState, TransferStatus, View,
};

use crate::batch::BatchCore;
use crate::peer::Peer;
use crate::slicing::Piece;

/// A request that was checked: everything a slice needs.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Prepared {
    pub(crate) opcode: Opcode,
    pub(crate) local: View,
    pub(crate) local_region: RegionId,
    /// Index into [`Work::peers`].
    pub(crate) peer: u32,
    pub(crate) remote_address: u64,
    pub(crate) token: Option<GrantToken>,
    /// Index into [`Work::keys`].
    pub(crate) keys: u32,
    pub(crate) priority: Priority,
    pub(crate) route: Route,
    /// Index into [`Work::groups`].
    pub(crate) group: u32,
    /// Into how many pieces it was cut.
    pub(crate) pieces: u32,
}

/// Checked requests and the pieces they were cut into.
#[derive(Debug)]
pub(crate) struct Work {
    pub(crate) requests: Box<[Prepared]>,
    pub(crate) pieces: Box<[Piece]>,
    pub(crate) peers: Box<[Arc<Peer>]>,
    /// What peers published with the remote memory, as far as that is known: keys, for the transports that need them.
    pub(crate) keys: Box<[Option<Arc<Attributes>>]>,
    /// The groups that occur, each once.
    pub(crate) groups: Box<[u32]>,
    /// The local regions that occur, each once.
    pub(crate) regions: Box<[RegionId]>,
    pub(crate) bytes: u64,
}

/// A message that follows the work to one of its peers.
#[derive(Debug)]
pub(crate) struct Notice {
    pub(crate) peer: Arc<Peer>,
    pub(crate) data: Box<[u8]>,
}

/// One call of `submit` or `post`.
#[derive(Debug)]
pub(crate) struct Submission {
    /// Upper half of the tokens of its pieces.
    pub(crate) key: u32,
    pub(crate) work: Arc<Work>,
    pub(crate) batch: Arc<BatchCore>,
    pub(crate) checksum: Checksum,
    pub(crate) deadline: Deadline,
    pub(crate) notice: Option<Notice>,
    tasks: Box<[Task]>,
    /// One more than the work has when a notice follows it.
    pieces: Box<[PieceCell]>,
    tasks_left: AtomicU32,
    groups_left: Box<[AtomicU32]>,
    doom: AtomicU8,
    /// Keeps the local memory alive and registered until the last piece has ended.
    pins: Mutex<Vec<Pin>>,
}

/// Why a submission is being called off.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Doom {
    Cancelled = 1,
    Expired = 2,
    Closed = 3,
}

impl Doom {
    pub(crate) fn error(self) -> Error {
        match self {
            Self::Cancelled => Error::new(ErrorKind::Cancelled, "the caller cancelled the transfer"),
            Self::Expired => Deadline::exceeded("the transfer"),
            Self::Closed => Error::new(ErrorKind::Closed, "the engine was shut down"),
        }
    }
}

#[derive(Debug)]
struct Task {
    left: AtomicU32,
    bytes: AtomicU64,
    error: OnceLock<Error>,
}

/// A piece's state, attempts and path in one word.
#[derive(Debug)]
struct PieceCell(AtomicU64);

const QUEUED: u64 = 0;
const POSTED: u64 = 1;
const ENDED: u64 = 2;
const STATE: u64 = 0b11;
const ATTEMPT: u64 = 0b100;
const ATTEMPTS: u64 = 0xfc;
const PATH_SHIFT: u32 = 8;

/// A posted piece that has just ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Ended {
    /// The engine's number of the path it was posted to.
    pub(crate) path: u64,
    /// How often it was posted.
    pub(crate) attempts: u32,
}

/// What the end of a piece brought about.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Progress {
    /// A group of the submission is complete: somebody may be waiting for it.
    pub(crate) group_ended: bool,
    /// All tasks but the notice have ended: it is its turn.
    pub(crate) notice_due: bool,
    /// All tasks have ended.
    pub(crate) all_ended: bool,
}

impl Work {
    /// What was published with a request's remote memory.
    pub(crate) fn keys_of(&self, request: &Prepared) -> Option<&Attributes> {
        self.keys.get(request.keys as usize)?.as_deref()
    }
}

impl Submission {
    pub(crate) fn new(
        key: u32,
        work: Arc<Work>,
        batch: Arc<BatchCore>,
        checksum: Checksum,
        deadline: Deadline,
        notice: Option<Notice>,
        pins: Vec<Pin>,
    ) -> Self {
        let groups_left: Box<[AtomicU32]> = work.groups.iter().map(|_| AtomicU32::new(0)).collect();
        let mut tasks_left = 0;
        let mut tasks: Vec<Task> = Vec::with_capacity(work.requests.len() + 1);
        for request in &work.requests {
            // An empty request has no pieces and is complete from the start.
            if request.pieces > 0 {
                tasks_left += 1;
                if let Some(group) = groups_left.get(request.group as usize) {
                    group.fetch_add(1, Ordering::Relaxed);
                }
            }
            tasks.push(Task::new(request.pieces));
        }
        let mut pieces: Vec<PieceCell> = work.pieces.iter().map(|_| PieceCell::default()).collect();
        if notice.is_some() {
            tasks_left += 1;
            tasks.push(Task::new(1));
            pieces.push(PieceCell::default());
        }
        Self {
            key,
            work,
            batch,
            checksum,
            deadline,
            notice,
            tasks: tasks.into(),
            pieces: pieces.into(),
            tasks_left: AtomicU32::new(tasks_left),
            groups_left,
            doom: AtomicU8::new(0),
            pins: Mutex::new(pins),
        }
    }

    /// The token under which a piece is posted.
    pub(crate) fn token(&self, piece: u32) -> u64 {
        (u64::from(self.key) << 32) | u64::from(piece)
    }

    /// How many pieces carry data. A notice, if there is one, is the piece after the last.
    pub(crate) fn data_pieces(&self) -> u32 {
        self.work.pieces.len() as u32
    }

    /// How many tasks there are: one a request, and one for the notice.
    pub(crate) fn task_count(&self) -> usize {
        self.tasks.len()
    }

    /// Whether every task has ended.
    pub(crate) fn is_ended(&self) -> bool {
        self.tasks_left.load(Ordering::Acquire) == 0
    }

    /// How many tasks of a group have not ended; `None` for a group that does not occur.
    pub(crate) fn group_left(&self, group: u32) -> Option<&AtomicU32> {
        let index = self.work.groups.iter().position(|known| *known == group)?;
        self.groups_left.get(index)
    }

    /// The first error of a group's tasks.
    pub(crate) fn group_error(&self, group: u32) -> Option<Error> {
        let index = self.work.groups.iter().position(|known| *known == group)? as u32;
        let requests = self.work.requests.iter().zip(&self.tasks);
        requests.filter(|(request, _)| request.group == index).find_map(|(_, task)| task.error.get()).cloned()
    }

    /// The task's state.
    pub(crate) fn status(&self, task: usize) -> Option<TransferStatus> {
        let task = self.tasks.get(task)?;
        let bytes = task.bytes.load(Ordering::Acquire);
        if task.left.load(Ordering::Acquire) > 0 {
            let state = if bytes == 0 { TransferState::Waiting } else { TransferState::Pending };
            return Some(TransferStatus { state, bytes, error: None });
        }
        let error = task.error.get().cloned();
        let state = error.as_ref().map_or(TransferState::Completed, TransferState::of_error);
        Some(TransferStatus { state, bytes, error })
    }

    /// Bytes of its tasks that have arrived.
    pub(crate) fn bytes_done(&self) -> u64 {
        self.tasks.iter().map(|task| task.bytes.load(Ordering::Relaxed)).sum()
    }

    /// Calls it off. The first reason stands.
    pub(crate) fn doom(&self, doom: Doom) {
        let _ = self.doom.compare_exchange(0, doom as u8, Ordering::AcqRel, Ordering::Acquire);
    }

    /// Why it is being called off, if it is.
    pub(crate) fn doomed(&self) -> Option<Doom> {
        match self.doom.load(Ordering::Acquire) {
            0 => None,
            1 => Some(Doom::Cancelled),
            2 => Some(Doom::Expired),
            _ => Some(Doom::Closed),
        }
    }

    /// Notes that a piece is being posted to a path.
    pub(crate) fn post(&self, piece: u32, path: u64) {
        let Some(PieceCell(cell)) = self.pieces.get(piece as usize) else { return };
        let attempts = cell.load(Ordering::Relaxed) & ATTEMPTS;
        let attempts = (attempts + ATTEMPT).min(ATTEMPTS);
        cell.store(POSTED | attempts | (path << PATH_SHIFT), Ordering::Release);
    }

    /// Takes a posting back that the transport did not accept.
    pub(crate) fn unpost(&self, piece: u32) {
        let Some(PieceCell(cell)) = self.pieces.get(piece as usize) else { return };
        let attempts = (cell.load(Ordering::Relaxed) & ATTEMPTS).saturating_sub(ATTEMPT);
        cell.store(QUEUED | attempts, Ordering::Release);
    }

    /// Takes a posted piece out of flight; `None` when it is not in flight: a transport completed it twice.
    pub(crate) fn land(&self, piece: u32) -> Option<Ended> {
        let PieceCell(cell) = self.pieces.get(piece as usize)?;
        let before = cell.fetch_update(Ordering::AcqRel, Ordering::Acquire, |word| {
            (word & STATE == POSTED).then_some((word & ATTEMPTS) | QUEUED)
        });
        before
            .ok()
            .map(|word| Ended { path: word >> PATH_SHIFT, attempts: ((word & ATTEMPTS) / ATTEMPT) as u32 })
    }

    /// The paths on which pieces are in flight, each once.
    pub(crate) fn paths_in_flight(&self) -> Vec<u64> {
        let words = self.pieces.iter().map(|PieceCell(cell)| cell.load(Ordering::Acquire));
        let mut paths: Vec<u64> =
            words.filter(|word| word & STATE == POSTED).map(|word| word >> PATH_SHIFT).collect();
        paths.sort_unstable();
        paths.dedup();
        paths
    }

    /// Ends a piece that is not in flight, for good.
    pub(crate) fn end(&self, piece: u32, outcome: Result<(), Error>) -> Progress {
        let Some(PieceCell(cell)) = self.pieces.get(piece as usize) else { return Progress::default() };
        let before = cell.fetch_or(ENDED, Ordering::AcqRel);
        debug_assert_eq!(before & STATE, QUEUED, "a piece ends once, and not while it is in flight");
        if before & STATE != QUEUED {
            return Progress::default();
        }
        let (index, len, group) = match self.work.pieces.get(piece as usize) {
            Some(piece) => {
                let group = self.work.requests.get(piece.request as usize).map(|request| request.group);
                (piece.request as usize, piece.len, group)
            }
            None => (self.tasks.len() - 1, 0, None),
        };
        let Some(task) = self.tasks.get(index) else { return Progress::default() };
        match outcome {
            Ok(()) => {
                task.bytes.fetch_add(len, Ordering::AcqRel);
            }
            Err(error) => {
                let error = if group.is_some() { self.of_request(index, error) } else { error };
                self.batch.note_failure(&error);
                let _ = task.error.set(error);
            }
        }
        if task.left.fetch_sub(1, Ordering::AcqRel) != 1 {
            return Progress::default();
        }
        let group_ended = group
            .and_then(|group| self.groups_left.get(group as usize))
            .is_some_and(|left| left.fetch_sub(1, Ordering::AcqRel) == 1);
        let left = self.tasks_left.fetch_sub(1, Ordering::AcqRel) - 1;
        Progress { group_ended, notice_due: left == 1 && self.notice.is_some(), all_ended: left == 0 }
    }

    /// Says which of several requests it was, as of those that are refused at once. What befalls a peer, a path or the
    /// engine is not one request's alone.
    fn of_request(&self, index: usize, error: Error) -> Error {
        let own = matches!(error.class(), ErrorClass::Misuse | ErrorClass::Data);
        if own && error.kind() != ErrorKind::Closed && self.work.requests.len() > 1 {
            error.context(format_args!("request {index}"))
        } else {
            error
        }
    }

    /// Whether the task of a piece has failed already, so that the rest of it need not go out.
    pub(crate) fn is_lost(&self, piece: u32) -> bool {
        let request = self.work.pieces.get(piece as usize).map(|piece| piece.request as usize);
        request.and_then(|request| self.tasks.get(request)).is_some_and(|task| task.error.get().is_some())
    }

    /// The first error of any task.
    pub(crate) fn first_error(&self) -> Option<Error> {
        self.tasks.iter().find_map(|task| task.error.get()).cloned()
    }

    /// Lets go of the local memory.
    pub(crate) fn release_pins(&self) {
        let pins = std::mem::take(&mut *self.pins.lock());
        drop(pins);
    }
}

impl Task {
    const fn new(pieces: u32) -> Self {
        Self { left: AtomicU32::new(pieces), bytes: AtomicU64::new(0), error: OnceLock::new() }
    }
}

impl Default for PieceCell {
    fn default() -> Self {
        Self(AtomicU64::new(QUEUED))
    }
}
