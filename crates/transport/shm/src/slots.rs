//! Hazard slots: where one client says which grants it is touching right now.
//!
//! The owner makes a page of them for each client that connects. Slots for copies lie on cache lines of their
//! own, since threads store to them for every slice; those for leases are held long and lie close together.

use std::fmt;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use parking_lot::Mutex;
use posthorse_core::{Error, ErrorKind, GrantToken, Result};

use crate::protocol;
use crate::table::{Key, PeerHash, PeerTable, Terms};
use crate::words::Words;

/// Threads that can copy at once.
const COPIES: usize = 64;
const COPY_STRIDE: usize = 8;
/// Leases that one client can hold at once.
const LEASES: usize = 4096;
const WORDS: usize = COPIES * COPY_STRIDE + LEASES;

/// The owner's side of one client's slots.
#[derive(Debug)]
pub(crate) struct ClientSlots {
    words: Words,
}

impl ClientSlots {
    /// Slots for a new client, and the file to send to it.
    pub(crate) fn new() -> Result<(OwnedFd, Self)> {
        let (fd, words) = Words::create("posthorse-hazards", WORDS)?;
        Ok((fd, Self { words }))
    }

    fn each(&self) -> impl Iterator<Item = &AtomicU64> {
        (0..COPIES)
            .map(|copy| copy * COPY_STRIDE)
            .chain(COPIES * COPY_STRIDE..WORDS)
            .filter_map(|at| self.words.get(at))
    }

    /// Whether the client is touching this grant.
    pub(crate) fn holds(&self, key: Key) -> bool {
        self.each().any(|slot| protocol::is_held(slot, key.get()))
    }

    /// Whether the client is touching nothing.
    pub(crate) fn are_clear(&self) -> bool {
        self.each().all(|slot| protocol::is_held(slot, protocol::NONE))
    }
}

/// A client's side.
pub(crate) struct Slots {
    words: Words,
    /// Which slots for copies are taken, a bit each.
    copies: AtomicU64,
    free_leases: Mutex<FreeLeases>,
    /// Nothing is announced any more.
    left: AtomicBool,
}

struct FreeLeases {
    given_back: Vec<usize>,
    untouched: usize,
}

impl Slots {
    pub(crate) fn map(fd: impl AsFd) -> Result<Self> {
        Ok(Self {
            words: Words::map_writable(fd, WORDS)?,
            copies: AtomicU64::new(0),
            free_leases: Mutex::new(FreeLeases { given_back: Vec::new(), untouched: 0 }),
            left: AtomicBool::new(false),
        })
    }

    /// Refuses to announce anything from now on. Whoever learns of this sees what was announced before, and may forget
    /// this client once that is clear.
    pub(crate) fn close(&self) {
        protocol::leave(&self.left);
    }

    /// Announces a grant in a word of ours, and reads its terms.
    fn announce(
        &self,
        word: &AtomicU64,
        table: &PeerTable,
        token: GrantToken,
        me: PeerHash,
    ) -> Result<Terms> {
        let terms = table.announce(word, token, me)?;
        if protocol::has_left(&self.left) {
            protocol::clear(word);
            return Err(Error::new(ErrorKind::PathFailed, "the path went down before the grant was used"));
        }
        Ok(terms)
    }

    /// A slot for a copy. All taken means as many threads copying right now, none of which waits for anything.
    pub(crate) fn claim(&self) -> CopySlot<'_> {
        loop {
            if let Some(slot) = self.try_claim() {
                return slot;
            }
            std::thread::yield_now();
        }
    }

    fn try_claim(&self) -> Option<CopySlot<'_>> {
        let mut taken = self.copies.load(Ordering::Relaxed);
        loop {
            let index = (!taken).trailing_zeros() as usize;
            let word = if index < COPIES { self.words.get(index * COPY_STRIDE)? } else { return None };
            // Acquire pairs with the release of whoever gave the slot back.
            match self.copies.compare_exchange_weak(
                taken,
                taken | 1 << index,
                Ordering::Acquire,
                Ordering::Relaxed,
            ) {
                Ok(_) => return Some(CopySlot { slots: self, word, index }),
                Err(now) => taken = now,
            }
        }
    }

    fn lease_slot(&self) -> Result<usize> {
        let mut free = self.free_leases.lock();
        if let Some(index) = free.given_back.pop() {
            return Ok(index);
        }
        if free.untouched == LEASES {
            return Err(Error::new(
                ErrorKind::LimitReached,
                format!("{LEASES} leases of this peer are held already"),
            )
            .with_advice("drop leases that are not needed any more"));
        }
        free.untouched += 1;
        Ok(COPIES * COPY_STRIDE + free.untouched - 1)
    }

    fn word(&self, index: usize) -> Result<&AtomicU64> {
        self.words
            .get(index)
            .ok_or_else(|| Error::new(ErrorKind::Internal, format!("there is no slot {index}")))
    }
}

impl fmt::Debug for Slots {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Slots({:#b})", self.copies.load(Ordering::Relaxed))
    }
}

/// A slot for a copy; it goes back when this is dropped.
#[derive(Debug)]
pub(crate) struct CopySlot<'a> {
    slots: &'a Slots,
    word: &'a AtomicU64,
    index: usize,
}

impl CopySlot<'_> {
    /// Announces a grant, instead of what was announced before, and reads its terms.
    pub(crate) fn announce(&self, table: &PeerTable, token: GrantToken, me: PeerHash) -> Result<Terms> {
        self.slots.announce(self.word, table, token, me)
    }

    /// Ends what was announced.
    pub(crate) fn clear(&self) {
        protocol::clear(self.word);
    }
}

impl Drop for CopySlot<'_> {
    fn drop(&mut self) {
        self.clear();
        self.slots.copies.fetch_and(!(1 << self.index), Ordering::Release);
    }
}

/// A slot that names a grant for as long as this lives.
#[derive(Debug)]
pub(crate) struct LeaseSlot {
    slots: Arc<Slots>,
    index: usize,
}

impl LeaseSlot {
    /// Announces a grant, and reads its terms.
    ///
    /// # Errors
    /// `LimitReached` when the client holds too many; else as [`PeerTable::announce`].
    pub(crate) fn announce(
        slots: &Arc<Slots>,
        table: &PeerTable,
        token: GrantToken,
        me: PeerHash,
    ) -> Result<(Self, Terms)> {
        let index = slots.lease_slot()?;
        let slot = Self { slots: Arc::clone(slots), index };
        let terms = slots.announce(slots.word(index)?, table, token, me)?;
        Ok((slot, terms))
    }
}

impl Drop for LeaseSlot {
    fn drop(&mut self) {
        if let Some(word) = self.slots.words.get(self.index) {
            protocol::clear(word);
        }
        self.slots.free_leases.lock().given_back.push(self.index);
    }
}

#[cfg(test)]
mod tests {
    use posthorse_core::{Access, RegionId};

    use super::*;
    use crate::table::Table;

    const ME: &str = "us:1";

    /// A grant, and both ends of a client's slots.
    struct World {
        _table: Table,
        token: GrantToken,
        theirs: PeerTable,
        owner: ClientSlots,
        slots: Arc<Slots>,
    }

    impl World {
        fn new() -> Self {
            let table = Table::new(4).unwrap();
            let token = GrantToken { handle: 2, secret: 1 };
            let terms = Terms { region: RegionId(1), address: 0, len: 1, access: Access::Read, peer: None };
            table.publish(token, &terms).unwrap();
            let theirs = PeerTable::map(table.file(), 4).unwrap();
            let (fd, owner) = ClientSlots::new().unwrap();
            Self { _table: table, token, theirs, owner, slots: Arc::new(Slots::map(fd).unwrap()) }
        }
    }

    #[test]
    fn the_owner_sees_what_is_held_and_when_it_is_not() {
        let World { _table, token, theirs, owner, slots } = World::new();
        let key = Key::of(token).unwrap();
        let me = PeerHash::of(ME);

        let copy = slots.claim();
        assert!(!owner.holds(key) && owner.are_clear());
        copy.announce(&theirs, token, me).unwrap();
        assert!(owner.holds(key) && !owner.are_clear());
        let (lease, _) = LeaseSlot::announce(&slots, &theirs, token, me).unwrap();
        drop(copy);
        assert!(owner.holds(key));
        drop(lease);
        assert!(!owner.holds(key) && owner.are_clear());
    }

    #[test]
    fn nothing_is_announced_after_the_end_and_what_was_before_is_seen() {
        let World { _table, token, theirs, owner, slots } = World::new();
        let (key, me) = (Key::of(token).unwrap(), PeerHash::of(ME));

        let before = slots.claim();
        before.announce(&theirs, token, me).unwrap();
        slots.close();
        assert!(owner.holds(key));
        let error = slots.claim().announce(&theirs, token, me).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::PathFailed);
        let error = LeaseSlot::announce(&slots, &theirs, token, me).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::PathFailed);
        drop(before);
        assert!(owner.are_clear());
    }

    #[test]
    fn slots_are_bounded_and_given_back() {
        let table = Table::new(4).unwrap();
        let theirs = PeerTable::map(table.file(), 4).unwrap();
        let (fd, _owner) = ClientSlots::new().unwrap();
        let slots = Arc::new(Slots::map(fd).unwrap());
        let held: Vec<_> = std::iter::from_fn(|| slots.try_claim()).collect();
        assert_eq!(held.len(), COPIES);
        drop(held);
        drop(slots.claim());

        let token = GrantToken { handle: 2, secret: 1 };
        let me = PeerHash::of(ME);
        // A refused lease gives its slot back.
        for _ in 0..LEASES + 1 {
            let error = LeaseSlot::announce(&slots, &theirs, token, me).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::AccessDenied);
        }
        let terms = Terms { region: RegionId(1), address: 0, len: 1, access: Access::Read, peer: None };
        table.publish(token, &terms).unwrap();
        let held: Vec<_> =
            (0..LEASES).map(|_| LeaseSlot::announce(&slots, &theirs, token, me).unwrap()).collect();
        let error = LeaseSlot::announce(&slots, &theirs, token, me).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::LimitReached);
        drop(held);
    }
}
