//! What a lane has to do and has been promised, without sockets, clock or threads.
//!
//! Slices wait in three queues by priority, move to `flight` when their first piece is cut, and leave it when
//! they are answered. The owner handles a lane's requests in order, so answers come in order: `flight` is a
//! queue whose ids are consecutive.

use std::collections::{HashSet, VecDeque};
use std::sync::Arc;

use posthorse_core::{
    Checksum, Completion, Error, ErrorKind, FarEnd, GrantToken, HostView, Level, Opcode, Priority, RegionId,
    Result, Slice, SliceError,
};

use crate::config::TcpConfig;
use crate::wire::MAX_PIECE;

/// What a lane carries.
#[derive(Debug, Clone)]
enum Work {
    Slice {
        slice: Slice,
        memory: HostView,
    },
    Notify {
        token: u64,
        data: Arc<[u8]>,
    },
    /// What is left of a notification that was given up: its id.
    Nothing,
}

#[derive(Debug)]
struct Flight {
    work: Work,
    /// Bytes of a READ that have come, or have been announced.
    received: u64,
    /// Why it has failed already, though its answer is still due.
    failed: Option<Error>,
}

/// What goes out next.
#[derive(Debug, Clone)]
pub(crate) enum Piece {
    Write {
        id: u64,
        address: u64,
        token: Option<GrantToken>,
        memory: HostView,
        checksum: Checksum,
        last: bool,
    },
    Read {
        id: u64,
        address: u64,
        len: u64,
        token: Option<GrantToken>,
        checksum: Checksum,
    },
    Notify {
        id: u64,
        data: Arc<[u8]>,
    },
}

/// How many slices a lane holds at most, and how many it sends ahead of their answers.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Limits {
    pub(crate) queue: usize,
    pub(crate) window: usize,
    pub(crate) notify: usize,
}

impl Limits {
    pub(crate) const fn of(config: &TcpConfig) -> Self {
        Self { queue: config.queue_slots, window: config.window_slots, notify: config.notify_slots }
    }
}

/// See the module's documentation.
#[derive(Debug)]
pub(crate) struct LaneState {
    limits: Limits,
    waiting: [VecDeque<Work>; 3],
    flight: VecDeque<Flight>,
    /// The id of the first in flight.
    first: u64,
    /// How many in flight have been cut wholly on this connection.
    cut: usize,
    /// Bytes cut of the one after those.
    offset: u64,
    /// Ids below this have been cut on some connection, so the owner may know them.
    begun: u64,
    notifies: usize,
    bytes: u64,
    /// Which of the queues were found full.
    starved: [bool; 3],
    ended: Option<Error>,
}

impl LaneState {
    pub(crate) fn new(limits: Limits) -> Self {
        Self {
            limits,
            waiting: std::array::from_fn(|_| VecDeque::with_capacity(limits.queue)),
            flight: VecDeque::with_capacity(limits.window),
            first: 1,
            cut: 0,
            offset: 0,
            begun: 0,
            notifies: 0,
            bytes: 0,
            starved: [false; 3],
            ended: None,
        }
    }

    /// Takes a slice of host memory, or says that there is no room now; then [`LaneState::take_writable`] will say
    /// when there is.
    ///
    /// # Errors
    /// The reason why the lane has ended.
    pub(crate) fn push(&mut self, slice: &Slice, memory: HostView) -> Result<bool> {
        if let Some(error) = &self.ended {
            return Err(error.clone());
        }
        let rank = rank(slice.priority);
        let queue = &mut self.waiting[rank];
        if queue.len() >= self.limits.queue {
            self.starved[rank] = true;
            return Ok(false);
        }
        queue.push_back(Work::Slice { slice: *slice, memory });
        self.bytes += memory.len() as u64;
        Ok(true)
    }

    /// Takes a notification.
    ///
    /// # Errors
    /// `QueueFull`, or the reason why the lane has ended.
    pub(crate) fn push_notify(&mut self, token: u64, data: &[u8]) -> Result<()> {
        if let Some(error) = &self.ended {
            return Err(error.clone());
        }
        // Notifications have an order among themselves, so they share one queue, and room is kept for them.
        let queue = &mut self.waiting[rank(Priority::High)];
        if self.notifies >= self.limits.notify || queue.len() >= self.limits.queue {
            return Err(Error::new(
                ErrorKind::QueueFull,
                format!(
                    "{} notifications are not yet acknowledged; accepted: {}",
                    self.notifies, self.limits.notify
                ),
            ));
        }
        queue.push_back(Work::Notify { token, data: data.into() });
        self.notifies += 1;
        Ok(())
    }

    /// Bytes that wait or are in flight.
    pub(crate) const fn load(&self) -> u64 {
        self.bytes
    }

    /// Whether the peer owes an answer.
    pub(crate) fn owed(&self) -> bool {
        !self.flight.is_empty()
    }

    /// Whether a slice of the region is waiting or in flight.
    pub(crate) fn holds(&self, region: RegionId) -> bool {
        let of_region =
            |work: &Work| matches!(work, Work::Slice { slice, .. } if slice.local_region == region);
        self.flight.iter().any(|flight| of_region(&flight.work))
            || self.waiting.iter().flatten().any(of_region)
    }

    /// Cuts pieces to send, up to `count` of them and about `bytes` bytes.
    pub(crate) fn cut(&mut self, pieces: &mut Vec<Piece>, count: usize, bytes: usize) {
        let mut cut_bytes = 0;
        while pieces.len() < count && cut_bytes < bytes {
            if self.cut == self.flight.len() {
                let full = self.flight.len() >= self.limits.window;
                let next = if full { None } else { self.waiting.iter_mut().find_map(VecDeque::pop_front) };
                let Some(work) = next else { return };
                self.flight.push_back(Flight { work, received: 0, failed: None });
            }
            let id = self.first + self.cut as u64;
            let (piece, whole) = self.flight[self.cut].work.piece(id, self.offset);
            self.begun = self.begun.max(id + 1);
            if let Some(Piece::Write { memory, .. }) = &piece {
                cut_bytes += memory.len();
                self.offset += memory.len() as u64;
            }
            if whole {
                self.cut += 1;
                self.offset = 0;
            }
            pieces.extend(piece);
        }
    }

    /// Everything up to `id` that was not refused is done.
    ///
    /// # Errors
    /// `Malformed` when it cannot be: it was not sent, or bytes of a READ are missing.
    pub(crate) fn acknowledge(&mut self, id: u64, done: &mut Vec<Completion>) -> Result<()> {
        // One that is cut in part cannot be done.
        if id >= self.first + self.cut as u64 {
            return Err(Error::new(
                ErrorKind::Malformed,
                format!("the peer acknowledges {id}, which was not sent"),
            ));
        }
        while self.first <= id {
            let Some(flight) = self.flight.front_mut() else { break };
            let failed = flight.failed.take();
            let missing = flight.work.wants() - flight.received;
            if failed.is_none() && missing > 0 {
                return Err(Error::new(
                    ErrorKind::Malformed,
                    format!("the peer acknowledges a READ of which {missing} bytes are missing"),
                ));
            }
            let completion = self.pop_front(failed);
            done.extend(completion);
        }
        Ok(())
    }

    /// `id` was refused, and everything before it that was not is done.
    ///
    /// # Errors
    /// As [`LaneState::acknowledge`].
    pub(crate) fn refuse(&mut self, id: u64, error: Error, done: &mut Vec<Completion>) -> Result<()> {
        let at =
            id.checked_sub(self.first).and_then(|at| usize::try_from(at).ok()).filter(|at| *at < self.cut);
        let Some(flight) = at.and_then(|at| self.flight.get_mut(at)) else {
            return Err(Error::new(
                ErrorKind::Malformed,
                format!("the peer refuses {id}, which was not sent"),
            ));
        };
        flight.failed = Some(error);
        self.acknowledge(id, done)
    }

    /// Where the next `len` bytes of READ `id` belong.
    ///
    /// # Errors
    /// `Malformed` when `id` is no READ in flight, or does not have so many bytes left.
    pub(crate) fn receive(&mut self, id: u64, len: u64) -> Result<HostView> {
        let at =
            id.checked_sub(self.first).and_then(|at| usize::try_from(at).ok()).filter(|at| *at < self.cut);
        let flight = at.and_then(|at| self.flight.get_mut(at));
        let Some(Flight { work: Work::Slice { slice, memory }, received, .. }) = flight else {
            return Err(Error::new(
                ErrorKind::Malformed,
                format!("the peer sends data for {id}, which is not in flight"),
            ));
        };
        if slice.opcode != Opcode::Read || len > memory.len() as u64 - *received {
            return Err(Error::new(
                ErrorKind::Malformed,
                format!(
                    "the peer sends {len} bytes for {id}, of which {received} of {} have come",
                    memory.len()
                ),
            ));
        }
        let place = memory.slice(*received as usize, len as usize)?;
        *received += len;
        Ok(place)
    }

    /// READ `id` has failed, though its answer is still due.
    pub(crate) fn spoil(&mut self, id: u64, error: Error) {
        let at = id.checked_sub(self.first).and_then(|at| usize::try_from(at).ok());
        if let Some(flight) = at.and_then(|at| self.flight.get_mut(at)) {
            flight.failed = Some(error);
        }
    }

    /// The lane has a new connection: everything in flight is to be sent again, once more from its beginning.
    /// Notifications that the peer may have delivered and cannot remember are given up.
    pub(crate) fn relink(&mut self, peer_remembers: bool, done: &mut Vec<Completion>) {
        self.cut = 0;
        self.offset = 0;
        let (first, begun) = (self.first, self.begun);
        for (at, flight) in self.flight.iter_mut().enumerate() {
            flight.received = 0;
            let sent = first + (at as u64) < begun;
            if let (Work::Notify { token, .. }, true, false) = (&flight.work, sent, peer_remembers) {
                let error = Error::new(
                    ErrorKind::PathFailed,
                    "the connection broke, and the peer does not remember whether it delivered the notification",
                );
                done.push(failed(*token, error, FarEnd::Unconfirmed));
                self.notifies -= 1;
                flight.work = Work::Nothing;
            }
        }
    }

    /// Ends the lane: it takes nothing more, and everything it holds fails with `error`, except WRITEs and
    /// notifications that the peer may know of when `keep_sent` says so.
    pub(crate) fn end(&mut self, error: &Error, keep_sent: bool, done: &mut Vec<Completion>) {
        self.ended.get_or_insert_with(|| error.clone());
        let mut kept = VecDeque::new();
        let (first, begun) = (self.first, self.begun);
        for (at, flight) in std::mem::take(&mut self.flight).into_iter().enumerate() {
            let far_end = match &flight.work {
                Work::Slice { slice, .. } if slice.opcode == Opcode::Read => FarEnd::Quiet,
                _ if first + (at as u64) < begun => FarEnd::Unconfirmed,
                _ => FarEnd::Quiet,
            };
            if keep_sent && far_end == FarEnd::Unconfirmed {
                kept.push_back(flight);
                continue;
            }
            self.forget(&flight.work);
            done.extend(flight.work.token().map(|token| failed(token, error.clone(), far_end)));
        }
        self.flight = kept;
        for queue in 0..self.waiting.len() {
            for work in std::mem::take(&mut self.waiting[queue]) {
                self.forget(&work);
                done.extend(work.token().map(|token| failed(token, error.clone(), FarEnd::Quiet)));
            }
        }
    }

    /// Ends what [`LaneState::end`] kept: the peer has confirmed that its end is quiet. That says of a notification only
    /// that it will not be delivered any more; it may have been.
    pub(crate) fn end_quiet(&mut self, error: &Error, done: &mut Vec<Completion>) {
        for flight in std::mem::take(&mut self.flight) {
            self.forget(&flight.work);
            let far_end = match &flight.work {
                Work::Notify { .. } => FarEnd::Unconfirmed,
                Work::Slice { .. } | Work::Nothing => FarEnd::Quiet,
            };
            done.extend(flight.work.token().map(|token| failed(token, error.clone(), far_end)));
        }
    }

    /// The tokens of the slices that wait.
    pub(crate) fn waiting_tokens(&self) -> Vec<u64> {
        let slices = self.waiting.iter().flatten();
        slices
            .filter_map(|work| if let Work::Slice { slice, .. } = work { Some(slice.token) } else { None })
            .collect()
    }

    /// Drops the waiting slices with these tokens.
    pub(crate) fn cancel(&mut self, tokens: &HashSet<u64>, done: &mut Vec<Completion>) {
        let mut dropped = 0;
        for queue in &mut self.waiting {
            queue.retain(|work| match work {
                Work::Slice { slice, memory } if tokens.contains(&slice.token) => {
                    let error =
                        Error::new(ErrorKind::Cancelled, "the slice was cancelled before it was sent");
                    done.push(failed(slice.token, error, FarEnd::Quiet));
                    dropped += memory.len() as u64;
                    false
                }
                _ => true,
            });
        }
        self.bytes -= dropped;
    }

    /// Whether a queue that was found full has room again.
    pub(crate) fn is_writable(&self) -> bool {
        (0..self.waiting.len()).any(|rank| self.starved[rank] && self.has_room(rank))
    }

    /// As [`LaneState::is_writable`], once after each time that a queue was found full.
    pub(crate) fn take_writable(&mut self) -> bool {
        let writable = self.is_writable();
        for rank in 0..self.waiting.len() {
            self.starved[rank] &= !self.has_room(rank);
        }
        writable
    }

    fn has_room(&self, rank: usize) -> bool {
        self.waiting[rank].len() <= self.limits.queue / 2
    }

    fn pop_front(&mut self, error: Option<Error>) -> Option<Completion> {
        let flight = self.flight.pop_front()?;
        self.first += 1;
        self.cut -= 1;
        self.forget(&flight.work);
        let result = match error {
            Some(error) => Err(SliceError { error, far_end: FarEnd::Quiet }),
            None => Ok(Level::Visible),
        };
        flight.work.token().map(|token| Completion { token, result })
    }

    fn forget(&mut self, work: &Work) {
        match work {
            Work::Slice { memory, .. } => self.bytes -= memory.len() as u64,
            Work::Notify { .. } => self.notifies -= 1,
            Work::Nothing => {}
        }
    }
}

impl Work {
    const fn token(&self) -> Option<u64> {
        match self {
            Self::Slice { slice, .. } => Some(slice.token),
            Self::Notify { token, .. } => Some(*token),
            Self::Nothing => None,
        }
    }

    /// Bytes that have to be received before it can be done.
    const fn wants(&self) -> u64 {
        match self {
            Self::Slice { slice: Slice { opcode: Opcode::Read, .. }, memory } => memory.len() as u64,
            _ => 0,
        }
    }

    /// What of it goes out next, after `offset` bytes, and whether that is its end.
    fn piece(&self, id: u64, offset: u64) -> (Option<Piece>, bool) {
        match self {
            Self::Nothing => (None, true),
            Self::Notify { data, .. } => (Some(Piece::Notify { id, data: Arc::clone(data) }), true),
            Self::Slice { slice, memory } => {
                let (address, token, checksum) = (slice.remote_address, slice.grant, slice.checksum);
                if slice.opcode == Opcode::Read {
                    let len = memory.len() as u64;
                    return (Some(Piece::Read { id, address, len, token, checksum }), true);
                }
                let left = memory.len() as u64 - offset;
                let len = left.min(MAX_PIECE);
                let last = len == left;
                // Wrapping: the owner refuses an address that leaves its region.
                let address = address.wrapping_add(offset);
                let piece = memory.slice(offset as usize, len as usize).ok().map(|memory| Piece::Write {
                    id,
                    address,
                    token,
                    memory,
                    checksum,
                    last,
                });
                (piece, last)
            }
        }
    }
}

const fn rank(priority: Priority) -> usize {
    match priority {
        Priority::High => 0,
        Priority::Medium => 1,
        Priority::Low => 2,
    }
}

fn failed(token: u64, error: Error, far_end: FarEnd) -> Completion {
    Completion { token, result: Err(SliceError { error, far_end }) }
}

#[cfg(test)]
mod tests {
    use posthorse_core::{RemoteKey, View};
    use proptest::prelude::*;

    use super::*;

    const LIMITS: Limits = Limits { queue: 16, window: 8, notify: 4 };

    fn slice(token: u64, opcode: Opcode, priority: Priority, len: usize) -> (Slice, HostView) {
        // Never looked through: the state only counts.
        let memory = HostView::new(std::ptr::NonNull::dangling(), len);
        let slice = Slice {
            token,
            opcode,
            priority,
            checksum: Checksum::Off,
            level: Level::Visible,
            local: View::Host(memory),
            local_region: RegionId(1),
            remote_address: 0x1000,
            grant: None,
            remote_key: RemoteKey::NONE,
            ready: None,
        };
        (slice, memory)
    }

    fn push(state: &mut LaneState, token: u64, opcode: Opcode, len: usize) -> bool {
        let (slice, memory) = slice(token, opcode, Priority::Medium, len);
        state.push(&slice, memory).unwrap()
    }

    fn cut_all(state: &mut LaneState) -> Vec<Piece> {
        let mut pieces = Vec::new();
        state.cut(&mut pieces, usize::MAX, usize::MAX);
        pieces
    }

    fn outcome(done: &[Completion]) -> Vec<(u64, Option<(ErrorKind, FarEnd)>)> {
        let why = |error: &SliceError| (error.error.kind(), error.far_end);
        done.iter().map(|completion| (completion.token, completion.result.as_ref().err().map(why))).collect()
    }

    #[test]
    fn a_long_write_is_cut_into_pieces_of_which_only_the_last_ends_it() {
        let mut state = LaneState::new(LIMITS);
        push(&mut state, 7, Opcode::Write, 2 * MAX_PIECE as usize + 5);
        let lens: Vec<_> = cut_all(&mut state)
            .iter()
            .map(|piece| match piece {
                Piece::Write { address, memory, last, .. } => (*address, memory.len() as u64, *last),
                other => panic!("{other:?}"),
            })
            .collect();
        let start = 0x1000;
        assert_eq!(
            lens,
            [
                (start, MAX_PIECE, false),
                (start + MAX_PIECE, MAX_PIECE, false),
                (start + 2 * MAX_PIECE, 5, true)
            ]
        );
        let mut done = Vec::new();
        state.acknowledge(1, &mut done).unwrap();
        assert_eq!((outcome(&done), state.load()), (vec![(7, None)], 0));
    }

    #[test]
    fn urgent_slices_go_before_those_that_wait() {
        let mut state = LaneState::new(LIMITS);
        for (token, priority) in [(1, Priority::Low), (2, Priority::Medium), (3, Priority::High)] {
            let (slice, memory) = slice(token, Opcode::Write, priority, 1);
            state.push(&slice, memory).unwrap();
        }
        cut_all(&mut state);
        let mut done = Vec::new();
        state.acknowledge(3, &mut done).unwrap();
        assert_eq!(outcome(&done), [(3, None), (2, None), (1, None)]);
    }

    #[test]
    fn a_full_queue_has_room_again_whatever_the_other_queues_hold() {
        let mut state = LaneState::new(LIMITS);
        for priority in [Priority::Low, Priority::High] {
            let filled = (1..).take_while(|token| {
                let (slice, memory) = slice(*token, Opcode::Write, priority, 1);
                state.push(&slice, memory).unwrap()
            });
            assert_eq!(filled.count(), LIMITS.queue);
        }
        let (mut rooms, mut done) = (Vec::new(), Vec::new());
        for first in [1, 9, 17, 25] {
            assert!(!state.is_writable() && !state.take_writable());
            cut_all(&mut state);
            state.acknowledge(first + 7, &mut done).unwrap();
            rooms.push(state.is_writable());
            assert_eq!(state.take_writable(), rooms[rooms.len() - 1]);
        }
        assert_eq!(rooms, [true, false, true, false], "once for High, and once for Low");
    }

    #[test]
    fn what_cannot_be_is_malformed_and_completes_nothing() {
        let mut state = LaneState::new(LIMITS);
        let mut done = Vec::new();
        push(&mut state, 1, Opcode::Read, 10);
        assert!(state.acknowledge(1, &mut done).is_err(), "not sent");
        cut_all(&mut state);
        assert!(state.acknowledge(2, &mut done).is_err(), "never existed");
        assert!(state.acknowledge(1, &mut done).is_err(), "its bytes have not come");
        assert!(state.receive(1, 11).is_err() && state.receive(2, 1).is_err());
        assert_eq!(state.receive(1, 4).unwrap().len(), 4);
        assert!(state.receive(1, 7).is_err());
        state.receive(1, 6).unwrap();
        assert!(done.is_empty());
        state.acknowledge(1, &mut done).unwrap();
        assert_eq!(outcome(&done), [(1, None)]);
        assert!(state.refuse(1, Error::new(ErrorKind::AccessDenied, ""), &mut done).is_err(), "it is over");
    }

    #[test]
    fn a_refusal_says_that_what_came_before_is_done() {
        let mut state = LaneState::new(LIMITS);
        for token in 1..=3 {
            push(&mut state, token, Opcode::Write, 1);
        }
        cut_all(&mut state);
        let mut done = Vec::new();
        state.refuse(2, Error::new(ErrorKind::AccessDenied, "no"), &mut done).unwrap();
        assert_eq!(outcome(&done), [(1, None), (2, Some((ErrorKind::AccessDenied, FarEnd::Quiet)))]);
        assert!(state.owed());
    }

    #[test]
    fn a_new_connection_sends_everything_again_that_was_not_answered() {
        let mut state = LaneState::new(LIMITS);
        push(&mut state, 1, Opcode::Write, 1);
        push(&mut state, 2, Opcode::Read, 8);
        assert_eq!(cut_all(&mut state).len(), 2);
        state.push_notify(3, b"x").unwrap();
        assert_eq!(cut_all(&mut state).len(), 1);
        state.receive(2, 4).unwrap();
        let mut done = Vec::new();
        state.relink(true, &mut done);
        assert!(done.is_empty());
        assert_eq!(cut_all(&mut state).len(), 3);
        assert!(state.acknowledge(2, &mut done).is_err(), "the bytes have to come again");
        assert_eq!(outcome(&done), [(1, None)]);
        done.clear();
        state.relink(false, &mut done);
        assert_eq!(outcome(&done), [(3, Some((ErrorKind::PathFailed, FarEnd::Unconfirmed)))]);
        assert_eq!(cut_all(&mut state).len(), 1, "the notification may have been delivered");
    }

    #[test]
    fn the_end_says_of_each_slice_whether_the_far_end_is_quiet() {
        let mut state = LaneState::new(LIMITS);
        push(&mut state, 1, Opcode::Write, 1);
        push(&mut state, 2, Opcode::Read, 1);
        cut_all(&mut state);
        push(&mut state, 3, Opcode::Write, 1);
        let error = Error::new(ErrorKind::Flushed, "fenced");
        let mut done = Vec::new();
        state.end(&error, true, &mut done);
        let quiet = Some((ErrorKind::Flushed, FarEnd::Quiet));
        assert_eq!(outcome(&done), [(2, quiet), (3, quiet)]);
        assert!(state.owed());
        let (slice, memory) = slice(4, Opcode::Write, Priority::Low, 1);
        assert_eq!(state.push(&slice, memory).unwrap_err().kind(), ErrorKind::Flushed);
        done.clear();
        state.end(&error, false, &mut done);
        assert_eq!(outcome(&done), [(1, Some((ErrorKind::Flushed, FarEnd::Unconfirmed)))]);
        assert!(!state.owed() && state.load() == 0);
    }

    #[test]
    fn a_peer_that_is_quiet_may_have_delivered_what_was_sent() {
        let mut state = LaneState::new(LIMITS);
        push(&mut state, 1, Opcode::Write, 1);
        cut_all(&mut state);
        state.push_notify(2, b"x").unwrap();
        cut_all(&mut state);
        state.push_notify(3, b"x").unwrap();
        let error = Error::new(ErrorKind::Flushed, "fenced");
        let mut done = Vec::new();
        state.end(&error, true, &mut done);
        state.end_quiet(&error, &mut done);
        let flushed = |far_end| Some((ErrorKind::Flushed, far_end));
        assert_eq!(
            outcome(&done),
            [(3, flushed(FarEnd::Quiet)), (1, flushed(FarEnd::Quiet)), (2, flushed(FarEnd::Unconfirmed))]
        );
        assert_eq!(state.notifies, 0);
    }

    #[test]
    fn only_what_waits_is_cancelled() {
        let mut state = LaneState::new(LIMITS);
        push(&mut state, 1, Opcode::Write, 3);
        cut_all(&mut state);
        push(&mut state, 2, Opcode::Write, 5);
        push(&mut state, 3, Opcode::Write, 7);
        assert_eq!(state.waiting_tokens(), [2, 3]);
        let mut done = Vec::new();
        state.cancel(&HashSet::from([1, 3]), &mut done);
        assert_eq!(outcome(&done), [(3, Some((ErrorKind::Cancelled, FarEnd::Quiet)))]);
        assert_eq!(state.load(), 8);
        assert!(state.holds(RegionId(1)) && !state.holds(RegionId(2)));
    }

    proptest! {
        /// Whatever happens in whatever order, each slice taken is completed exactly once, nothing is lost, and
        /// whoever was turned away is told when there is room.
        #[test]
        fn every_slice_is_completed_exactly_once(steps in proptest::collection::vec((0_u8..8, 1_usize..40), 1..200)) {
            let mut state = LaneState::new(LIMITS);
            let (mut token, mut taken) = (0, 0);
            let (mut turned_away, mut writable) = (false, true);
            let mut done: Vec<Completion> = Vec::new();
            for (step, n) in steps {
                match step {
                    0..=2 => {
                        token += 1;
                        if push(&mut state, token, Opcode::Write, n) {
                            taken += 1;
                        } else {
                            turned_away = true;
                            writable = false;
                        }
                    }
                    3 => {
                        token += 1;
                        taken += usize::from(state.push_notify(token, b"x").is_ok());
                    }
                    4 => state.cut(&mut Vec::new(), n, 1 << 20),
                    5 => {
                        let last = state.first + state.cut as u64 - 1;
                        state.acknowledge(last, &mut done).unwrap();
                    }
                    6 => {
                        let id = state.first;
                        let error = Error::new(ErrorKind::AccessDenied, "");
                        let sent = state.cut > 0;
                        prop_assert_eq!(state.refuse(id, error, &mut done).is_ok(), sent);
                    }
                    _ => state.relink(true, &mut done),
                }
                writable |= state.take_writable();
            }
            state.end(&Error::new(ErrorKind::Closed, ""), false, &mut done);
            writable |= state.take_writable();
            prop_assert!(writable || !turned_away);
            let mut tokens: Vec<_> = done.iter().map(|completion| completion.token).collect();
            tokens.sort_unstable();
            tokens.dedup();
            prop_assert_eq!(tokens.len(), taken);
            prop_assert_eq!(done.len(), taken);
            prop_assert_eq!((state.load(), state.notifies), (0, 0));
        }
    }
}
