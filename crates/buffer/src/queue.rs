//! Who waits for space, and in which order they get it. Pure: no lock, no clock, no thread.
//!
//! Order is by arrival. A request that fits may pass earlier ones that do not fit yet, so that small requests
//! do not queue behind large ones; but a waiting request is passed by no more bytes than it asked for itself.
//! After that, freed space stays free until it suffices: a large request is not starved by small ones.

use std::collections::BTreeMap;
use std::task::Waker;

use crate::allocator::{Block, OffsetAllocator};

/// Requests that wait for space, by ticket.
#[derive(Debug)]
pub(crate) struct WaitQueue {
    waiters: BTreeMap<u64, Waiter>,
    next_ticket: u64,
    limit: usize,
    waiting: usize,
}

#[derive(Debug)]
struct Waiter {
    len: u64,
    /// How many bytes of later requests may still pass this one.
    credit: u64,
    progress: Progress,
}

#[derive(Debug)]
enum Progress {
    Waiting(Waker),
    /// Served, and not picked up yet.
    Served(Block),
}

/// What a waiter finds when it looks.
#[derive(Debug)]
pub(crate) enum Look {
    Waiting,
    /// Served: the block is the caller's, and the ticket is gone.
    Served(Block),
    /// No such ticket.
    Gone,
}

impl WaitQueue {
    /// An empty queue for at most `limit` waiters.
    pub(crate) const fn new(limit: usize) -> Self {
        Self { waiters: BTreeMap::new(), next_ticket: 0, limit, waiting: 0 }
    }

    /// How many wait and are not served yet.
    pub(crate) const fn waiting(&self) -> usize {
        self.waiting
    }

    /// Whether no more waiters are taken in.
    pub(crate) fn is_full(&self) -> bool {
        self.waiters.len() >= self.limit
    }

    /// Serves a request that has not waited, if there is space and it may pass all who wait.
    pub(crate) fn take_at_once(&mut self, allocator: &mut OffsetAllocator, len: u64) -> Option<Block> {
        if self.waiting == 0 {
            return allocator.take(len);
        }
        let span = allocator.span_of(len);
        if len > allocator.largest_free() || self.waiting_credits().any(|credit| *credit < span) {
            return None;
        }
        self.waiting_credits().for_each(|credit| *credit -= span);
        allocator.take(len)
    }

    /// Adds a request at the end and returns its ticket. The caller has seen that the queue is not full.
    pub(crate) fn join(&mut self, len: u64, span: u64, waker: Waker) -> u64 {
        let ticket = self.next_ticket;
        self.next_ticket += 1;
        self.waiting += 1;
        self.waiters.insert(ticket, Waiter { len, credit: span, progress: Progress::Waiting(waker) });
        ticket
    }

    /// Looks how the request stands; if it still waits, `waker` is exchanged for the one that is kept, so that
    /// the caller drops that one outside the lock.
    pub(crate) fn look(&mut self, ticket: u64, waker: &mut Waker) -> Look {
        match self.waiters.get_mut(&ticket) {
            Some(Waiter { progress: Progress::Waiting(kept), .. }) => {
                std::mem::swap(kept, waker);
                return Look::Waiting;
            }
            Some(Waiter { progress: Progress::Served(_), .. }) => {}
            None => return Look::Gone,
        }
        match self.waiters.remove(&ticket) {
            Some(Waiter { progress: Progress::Served(block), .. }) => Look::Served(block),
            _ => Look::Gone,
        }
    }

    /// Gives a ticket up. A block that was served for it goes to the caller; a waker is to be dropped
    /// outside the lock.
    pub(crate) fn leave(&mut self, ticket: u64) -> (Option<Block>, Option<Waker>) {
        match self.waiters.remove(&ticket).map(|waiter| waiter.progress) {
            Some(Progress::Waiting(waker)) => {
                self.waiting -= 1;
                (None, Some(waker))
            }
            Some(Progress::Served(block)) => (Some(block), None),
            None => (None, None),
        }
    }

    /// Serves whoever can be served now, in order, and returns whom to wake once the lock is released.
    pub(crate) fn serve(&mut self, allocator: &mut OffsetAllocator) -> Vec<Waker> {
        let mut wakers = Vec::new();
        if self.waiting == 0 {
            return wakers;
        }
        // What those who were skipped so far still allow to pass, and the waiters served behind any of them.
        let mut allowance = u64::MAX;
        let mut passed: Vec<(u64, u64)> = Vec::new();
        for (&ticket, waiter) in &mut self.waiters {
            let Progress::Waiting(waker) = &mut waiter.progress else { continue };
            let span = allocator.span_of(waiter.len);
            if span > allowance || waiter.len > allocator.largest_free() {
                allowance = allowance.min(waiter.credit);
                if allowance == 0 {
                    break;
                }
                continue;
            }
            let Some(block) = allocator.take(waiter.len) else { continue };
            if allowance != u64::MAX {
                allowance -= span;
                passed.push((ticket, span));
            }
            wakers.push(std::mem::replace(waker, Waker::noop().clone()));
            waiter.progress = Progress::Served(block);
        }
        self.waiting -= wakers.len();
        self.charge(&passed);
        wakers
    }

    /// Charges each waiter for those behind it that were served, given as tickets with their bytes.
    fn charge(&mut self, passed: &[(u64, u64)]) {
        let mut behind = passed.iter().rev().peekable();
        let mut bytes = 0;
        let Some(&(last, _)) = passed.last() else { return };
        for (&ticket, waiter) in self.waiters.range_mut(..last).rev() {
            while let Some(&&(_, span)) = behind.peek().filter(|served| served.0 > ticket) {
                bytes += span;
                behind.next();
            }
            if matches!(waiter.progress, Progress::Waiting(_)) {
                waiter.credit -= bytes;
            }
        }
    }

    /// Empties the queue of those who still wait and returns their wakers: the pool is closed.
    pub(crate) fn dismiss(&mut self) -> Vec<Waker> {
        self.waiting = 0;
        self.waiters
            .extract_if(.., |_, waiter| matches!(waiter.progress, Progress::Waiting(_)))
            .filter_map(|(_, waiter)| match waiter.progress {
                Progress::Waiting(waker) => Some(waker),
                Progress::Served(_) => None,
            })
            .collect()
    }

    fn waiting_credits(&mut self) -> impl Iterator<Item = &mut u64> {
        self.waiters
            .values_mut()
            .filter(|waiter| matches!(waiter.progress, Progress::Waiting(_)))
            .map(|waiter| &mut waiter.credit)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn join(queue: &mut WaitQueue, len: u64) -> u64 {
        queue.join(len, len, Waker::noop().clone())
    }

    fn served(queue: &mut WaitQueue, ticket: u64) -> Option<Block> {
        match queue.look(ticket, &mut Waker::noop().clone()) {
            Look::Served(block) => Some(block),
            Look::Waiting => None,
            Look::Gone => panic!("the ticket {ticket} is gone"),
        }
    }

    #[test]
    fn equal_requests_are_served_in_order_of_arrival() {
        let mut pool = OffsetAllocator::new(64, 1).unwrap();
        let mut held = pool.take(64).unwrap();
        let mut queue = WaitQueue::new(8);
        let tickets = [(); 4].map(|()| join(&mut queue, 64));
        for at in 0..4 {
            pool.free(held).unwrap();
            assert_eq!(queue.serve(&mut pool).len(), 1);
            held = served(&mut queue, tickets[at]).unwrap();
            assert!(tickets[at + 1..].iter().all(|&later| served(&mut queue, later).is_none()));
        }
    }

    #[test]
    fn a_small_request_passes_a_large_one_only_up_to_the_size_of_the_large_one() {
        let mut pool = OffsetAllocator::new(100, 1).unwrap();
        let held = pool.take(60).unwrap();
        let mut queue = WaitQueue::new(8);
        let large = join(&mut queue, 80);
        for _ in 0..2 {
            let small =
                queue.take_at_once(&mut pool, 30).expect("there is room, and the large one has credit");
            pool.free(small).unwrap();
            assert!(queue.serve(&mut pool).is_empty(), "the large one does not fit yet");
        }
        assert!(queue.take_at_once(&mut pool, 30).is_none(), "60 of 80 bytes have passed");
        let late = join(&mut queue, 30);
        assert!(queue.serve(&mut pool).is_empty());
        let fits = queue.take_at_once(&mut pool, 20).expect("20 more are allowed");
        assert!(queue.take_at_once(&mut pool, 1).is_none(), "all credit is used up");
        pool.free(fits).unwrap();
        pool.free(held).unwrap();
        assert_eq!(queue.serve(&mut pool).len(), 1);
        let large = served(&mut queue, large).expect("the large one comes first");
        assert!(served(&mut queue, late).is_none());
        pool.free(large).unwrap();
        assert_eq!(queue.serve(&mut pool).len(), 1);
        assert!(served(&mut queue, late).is_some());
    }

    #[test]
    fn leaving_returns_a_served_block_and_lets_those_behind_go_on() {
        let mut pool = OffsetAllocator::new(100, 1).unwrap();
        let held = pool.take(50).unwrap();
        let mut queue = WaitQueue::new(8);
        let (head, behind) = (join(&mut queue, 60), join(&mut queue, 60));
        pool.free(held).unwrap();
        queue.serve(&mut pool);
        let (block, _) = queue.leave(head);
        pool.free(block.expect("it was served")).unwrap();
        assert_eq!(queue.serve(&mut pool).len(), 1);
        assert!(served(&mut queue, behind).is_some());
        assert!(matches!(queue.look(behind, &mut Waker::noop().clone()), Look::Gone));
        assert_eq!(queue.waiting(), 0);
    }

    #[test]
    fn the_queue_is_bounded() {
        let mut queue = WaitQueue::new(2);
        join(&mut queue, 1);
        assert!(!queue.is_full());
        join(&mut queue, 1);
        assert!(queue.is_full());
        assert_eq!(queue.dismiss().len(), 2);
        assert!(!queue.is_full());
    }

    proptest! {
        /// Whatever arrives, leaves and is freed: nobody is passed by more bytes than it asked for, nobody who
        /// could be served is left waiting, and all are served in the end.
        #[test]
        #[cfg_attr(miri, ignore = "no unsafe code runs in it, and it is slow there")]
        fn nobody_starves(steps in proptest::collection::vec((0_u8..3, 1_u64..=100, any::<prop::sample::Index>()), 1..200)) {
            let mut pool = OffsetAllocator::new(100, 1).unwrap();
            let mut queue = WaitQueue::new(16);
            let mut held: Vec<Block> = Vec::new();
            // Who waits: ticket, bytes, and how many bytes of later requests were served meanwhile.
            let mut line: Vec<(u64, u64, u64)> = Vec::new();
            let drain = |queue: &mut WaitQueue, line: &mut Vec<(u64, u64, u64)>, held: &mut Vec<Block>| {
                for at in (0..line.len()).rev() {
                    if let Some(block) = served(queue, line[at].0) {
                        held.push(block);
                        let (_, len, _) = line.remove(at);
                        line[..at].iter_mut().for_each(|earlier| earlier.2 += len);
                    }
                }
            };
            for (what, len, pick) in steps {
                match what {
                    0 => match queue.take_at_once(&mut pool, len) {
                        Some(block) => {
                            held.push(block);
                            line.iter_mut().for_each(|earlier| earlier.2 += len);
                        }
                        None if !queue.is_full() => line.push((join(&mut queue, len), len, 0)),
                        None => {}
                    },
                    1 if !held.is_empty() => {
                        pool.free(held.swap_remove(pick.index(held.len()))).unwrap();
                        queue.serve(&mut pool);
                    }
                    2 if !line.is_empty() => {
                        let (ticket, ..) = line.remove(pick.index(line.len()));
                        prop_assert!(queue.leave(ticket).0.is_none());
                        queue.serve(&mut pool);
                    }
                    _ => {}
                }
                drain(&mut queue, &mut line, &mut held);
                prop_assert!(line.iter().all(|&(_, len, passed)| passed <= len), "{:?}", line);
                prop_assert!(line.first().is_none_or(|head| head.1 > pool.largest_free()));
                prop_assert_eq!(queue.waiting(), line.len());
            }
            while let Some(block) = held.pop() {
                pool.free(block).unwrap();
                queue.serve(&mut pool);
                drain(&mut queue, &mut line, &mut held);
            }
            prop_assert!(line.is_empty());
            prop_assert_eq!(pool.stats().used, 0);
        }
    }
}
