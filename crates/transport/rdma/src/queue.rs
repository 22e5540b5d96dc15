//! What is under way on one queue pair: a state machine without a device.
//!
//! Slices become work requests, several of them one chain, of which the last alone makes a completion. Those before it
//! have ended when it has: a reliable connection carries out requests in order. Behind WRITEs that are to be visible comes
//! a READ of a word of the peer, which its device answers only when the bytes before it have left for memory (PCI Express
//! orders a read behind the writes before it).

use std::collections::VecDeque;

use posthorse_core::{Level, Opcode, RegionId};

use crate::verbs::{Operation, Status, WorkRequest};

/// How many work requests one chain has at most.
pub(crate) const CHAIN: usize = 32;

/// A slice, as work requests are made of it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Entry {
    pub(crate) token: u64,
    pub(crate) opcode: Opcode,
    pub(crate) level: Level,
    pub(crate) region: RegionId,
    pub(crate) local_address: u64,
    pub(crate) len: u32,
    pub(crate) local_key: u32,
    pub(crate) remote_address: u64,
    pub(crate) remote_key: u32,
    pub(crate) inline: bool,
}

/// Where a flush reads from, and to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Flush {
    pub(crate) local_address: u64,
    pub(crate) local_key: u32,
    pub(crate) remote_address: u64,
    pub(crate) remote_key: u32,
}

/// How an entry stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Standing {
    /// It was not posted, or everything that could come of that is over.
    Waiting,
    /// It was posted.
    Posted,
    /// It was posted to a queue pair that failed: its bytes may still arrive.
    Stale,
    Ended,
}

/// How an entry ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Ended {
    /// At this level.
    Done(Level),
    /// It was refused, by this status.
    Refused(Status),
    /// It was called off; whether it was posted to a queue pair that failed.
    Dropped { stale: bool },
}

/// One work request that was posted.
#[derive(Debug, Clone, Copy)]
struct Posted {
    /// The number of its entry, if it is an entry's.
    entry: Option<u64>,
}

/// See the module's documentation.
#[derive(Debug)]
pub(crate) struct SendQueue {
    depth: usize,
    entries: VecDeque<(Entry, Standing)>,
    /// The number of the first entry.
    first_entry: u64,
    /// How many entries, from the first, were looked at for posting.
    looked_at: usize,
    posted: VecDeque<Posted>,
    /// The number of the first posted work request.
    first_posted: u64,
    failed: bool,
}

impl SendQueue {
    /// A queue of at most `depth` entries. It allocates no more hereafter.
    pub(crate) fn new(depth: usize) -> Self {
        Self {
            depth,
            entries: VecDeque::with_capacity(depth),
            first_entry: 0,
            looked_at: 0,
            posted: VecDeque::with_capacity(Self::work_requests(depth)),
            first_posted: 0,
            failed: false,
        }
    }

    /// How many work requests are posted at once at most, for this many entries: each may be a chain of its own, with a
    /// flush; and one shows that the peer is there.
    pub(crate) const fn work_requests(depth: usize) -> usize {
        2 * depth + 2
    }

    /// How many more entries there is room for.
    pub(crate) fn room(&self) -> usize {
        self.depth - self.entries.len()
    }

    /// Whether nothing is under way.
    pub(crate) fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Whether nothing is posted.
    #[cfg(test)]
    pub(crate) fn is_drained(&self) -> bool {
        self.posted.is_empty()
    }

    /// Whether it failed, so that nothing is posted until it is [rewound](SendQueue::rewind).
    #[cfg(test)]
    pub(crate) const fn has_failed(&self) -> bool {
        self.failed
    }

    /// Whether an entry uses this region.
    pub(crate) fn holds(&self, region: RegionId) -> bool {
        self.entries.iter().any(|(entry, standing)| entry.region == region && *standing != Standing::Ended)
    }

    /// Adds an entry. There must be room.
    pub(crate) fn push(&mut self, entry: Entry) {
        debug_assert!(self.room() > 0);
        self.entries.push_back((entry, Standing::Waiting));
    }

    /// Makes a chain of entries that wait; none when nothing does. Ids are numbers of work requests.
    pub(crate) fn next_chain(&mut self, flush: &Flush, into: &mut Vec<WorkRequest>) {
        into.clear();
        if self.failed {
            return;
        }
        let mut visible = false;
        // One place is the flush's.
        while into.len() < CHAIN - 1 {
            let at = self.looked_at;
            let Some((entry, standing)) = self.entries.get_mut(at) else { break };
            self.looked_at += 1;
            if *standing != Standing::Waiting {
                continue;
            }
            *standing = Standing::Posted;
            visible |= entry.opcode == Opcode::Write && entry.level == Level::Visible;
            into.push(WorkRequest {
                id: self.first_posted + self.posted.len() as u64,
                operation: if entry.opcode == Opcode::Write { Operation::Write } else { Operation::Read },
                local_address: entry.local_address,
                len: entry.len,
                local_key: entry.local_key,
                remote_address: entry.remote_address,
                remote_key: entry.remote_key,
                signalled: false,
                inline: entry.inline,
            });
            self.posted.push_back(Posted { entry: Some(self.first_entry + at as u64) });
        }
        if visible {
            into.push(self.without_entry(|id| read_word(id, flush)));
        }
        if let Some(last) = into.last_mut() {
            last.signalled = true;
        }
    }

    /// A work request that asks whether the peer is there, if nothing else under way shows that.
    pub(crate) fn alive(&mut self) -> Option<WorkRequest> {
        (!self.failed && self.posted.is_empty() && self.entries.is_empty())
            .then(|| self.without_entry(nothing))
    }

    fn without_entry(&mut self, make: impl FnOnce(u64) -> WorkRequest) -> WorkRequest {
        let id = self.first_posted + self.posted.len() as u64;
        self.posted.push_back(Posted { entry: None });
        make(id)
    }

    /// Takes back the last `count` work requests, which the device did not take. It counts as failed from then on.
    pub(crate) fn unpost(&mut self, count: usize) {
        self.failed = true;
        for _ in 0..count {
            if let Some(Posted { entry: Some(entry) }) = self.posted.pop_back() {
                self.set(entry, Standing::Waiting);
            }
        }
    }

    /// Notes a completion. Tells of each entry that ended; says whether the queue pair failed by it.
    pub(crate) fn completed(&mut self, id: u64, status: Status, mut tell: impl FnMut(&Entry, Ended)) -> bool {
        while self.first_posted <= id
            && let Some(posted) = self.posted.pop_front()
        {
            let is_this = self.first_posted == id;
            self.first_posted += 1;
            let Some(number) = posted.entry else { continue };
            let Some((entry, standing)) = self.get(number) else { continue };
            if *standing != Standing::Posted {
                continue;
            }
            let reached = match (entry.opcode, entry.level) {
                // The flush behind it has not ended.
                (Opcode::Write, Level::Visible) if status != Status::Success => None,
                (Opcode::Write, Level::Visible) | (Opcode::Read, _) => Some(Level::Visible),
                (Opcode::Write, _) => Some(Level::Placed),
            };
            let ended = match status {
                Status::Success => reached.map(Ended::Done),
                _ if !is_this => reached.map(Ended::Done),
                _ if is_refusal(status) => Some(Ended::Refused(status)),
                _ => None,
            };
            match ended {
                Some(ended) => {
                    *standing = Standing::Ended;
                    tell(entry, ended);
                }
                None => *standing = Standing::Stale,
            }
        }
        self.failed |= status != Status::Success;
        self.forget_ended();
        status != Status::Success
    }

    /// Posts again what did not end, on a queue pair that took the place of the one that failed. Nothing that was posted
    /// there can arrive any more.
    pub(crate) fn rewind(&mut self) {
        self.first_posted += self.posted.len() as u64;
        self.posted.clear();
        for (_, standing) in &mut self.entries {
            if *standing != Standing::Ended {
                *standing = Standing::Waiting;
            }
        }
        self.looked_at = 0;
        self.failed = false;
    }

    /// Ends what waits, and for whose token `which` says so.
    pub(crate) fn cancel(&mut self, which: &mut dyn FnMut(u64) -> bool, mut tell: impl FnMut(&Entry, Ended)) {
        for (entry, standing) in &mut self.entries {
            if *standing == Standing::Waiting && which(entry.token) {
                *standing = Standing::Ended;
                tell(entry, Ended::Dropped { stale: false });
            }
        }
        self.forget_ended();
    }

    /// Ends everything. What is posted is not waited for: the queue pair is no more.
    pub(crate) fn end_all(&mut self, mut tell: impl FnMut(&Entry, Ended)) {
        self.first_posted += self.posted.len() as u64;
        self.posted.clear();
        for (entry, standing) in &mut self.entries {
            if *standing != Standing::Ended {
                let stale = *standing != Standing::Waiting;
                *standing = Standing::Ended;
                tell(entry, Ended::Dropped { stale });
            }
        }
        self.forget_ended();
        self.failed = true;
    }

    fn get(&mut self, number: u64) -> Option<(&Entry, &mut Standing)> {
        let at = usize::try_from(number.checked_sub(self.first_entry)?).ok()?;
        self.entries.get_mut(at).map(|(entry, standing)| (&*entry, standing))
    }

    fn set(&mut self, number: u64, to: Standing) {
        if let Some((_, standing)) = self.get(number) {
            *standing = to;
        }
    }

    fn forget_ended(&mut self) {
        while let Some((_, Standing::Ended)) = self.entries.front() {
            self.entries.pop_front();
            self.first_entry += 1;
            self.looked_at = self.looked_at.saturating_sub(1);
        }
    }
}

/// Whether a request failed by its own fault, so that others may succeed.
pub(crate) const fn is_refusal(status: Status) -> bool {
    matches!(
        status,
        Status::RemoteAccess | Status::RemoteInvalid | Status::LocalProtection | Status::LocalLength
    )
}

/// A work request that reads the peer's word.
pub(crate) const fn read_word(id: u64, flush: &Flush) -> WorkRequest {
    WorkRequest {
        id,
        operation: Operation::Read,
        local_address: flush.local_address,
        len: 8,
        local_key: flush.local_key,
        remote_address: flush.remote_address,
        remote_key: flush.remote_key,
        signalled: true,
        inline: false,
    }
}

/// A work request that moves nothing: it shows that the peer's queue pair is there.
pub(crate) const fn nothing(id: u64) -> WorkRequest {
    WorkRequest {
        id,
        operation: Operation::Write,
        local_address: 0,
        len: 0,
        local_key: 0,
        remote_address: 0,
        remote_key: 0,
        signalled: true,
        inline: false,
    }
}

#[cfg(test)]
mod tests;
