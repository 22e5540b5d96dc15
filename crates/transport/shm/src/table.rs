//! The grant table: what a process lets its peers touch, in memory that they can read and not write.
//!
//! The first line says whether the owner is stopping. An entry is one cache line: state, secret, region, address, length, access, peer. The state word holds the
//! key of the grant while it is live. The table keeps honest peers inside their grants and lets the owner end
//! them; a peer of the same user that means harm could use ptrace as well, so nothing here tries to stop it.

use std::fmt;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::Ordering;

use posthorse_core::{Access, Error, ErrorKind, GrantToken, RegionId, Result};
use posthorse_memory::reopen_read_only;

use crate::protocol;
use crate::words::Words;

const ENTRY_WORDS: usize = 8;
/// In the first line: not zero when the owner's transport is stopping.
const STOPPING: usize = 0;

mod word {
    pub(super) const STATE: usize = 0;
    pub(super) const SECRET: usize = 1;
    pub(super) const REGION: usize = 2;
    pub(super) const ADDRESS: usize = 3;
    pub(super) const LEN: usize = 4;
    pub(super) const ACCESS: usize = 5;
    pub(super) const PEER: usize = 6;
}

/// The key of a grant in state words and hazard slots: its handle plus one, since zero says none.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Key(u64);

impl Key {
    pub(crate) fn of(token: GrantToken) -> Result<Self> {
        token.handle.checked_add(1).map(Self).ok_or_else(|| no_such_grant(token))
    }

    pub(crate) const fn get(self) -> u64 {
        self.0
    }
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Key({:#x})", self.0 - 1)
    }
}

/// The lower half of the handle is the index of the entry.
const fn index_of(token: GrantToken) -> usize {
    (token.handle & 0xffff_ffff) as usize
}

/// Where a word of a token's entry lies, behind the first line.
const fn place_of(token: GrantToken, word: usize) -> usize {
    (1 + index_of(token)) * ENTRY_WORDS + word
}

const fn words(entries: u32) -> usize {
    (1 + entries as usize) * ENTRY_WORDS
}

/// What an entry says of its grant.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Terms {
    pub(crate) region: RegionId,
    pub(crate) address: u64,
    pub(crate) len: u64,
    pub(crate) access: Access,
    /// The only peer that may use it.
    pub(crate) peer: Option<PeerHash>,
}

impl Terms {
    /// Whether the terms allow this access.
    pub(crate) fn check(&self, address: u64, len: u64, access: Access) -> Result<()> {
        if !self.access.allows(access) {
            return Err(Error::new(
                ErrorKind::AccessDenied,
                format!("the grant allows {:?}, not {access:?}", self.access),
            ));
        }
        let inside = address
            .checked_sub(self.address)
            .and_then(|offset| offset.checked_add(len))
            .is_some_and(|end| end <= self.len);
        if !inside {
            return Err(Error::new(
                ErrorKind::OutOfBounds,
                format!(
                    "the range of {len} bytes at {address:#x} leaves the grant of {} bytes at {:#x}",
                    self.len, self.address
                ),
            ));
        }
        Ok(())
    }
}

/// A peer's name in a table: its FNV-1a hash, never zero.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PeerHash(u64);

impl PeerHash {
    pub(crate) fn of(name: &str) -> Self {
        let hash = name.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
        });
        Self(hash.max(1))
    }
}

/// The owner's side.
#[derive(Debug)]
pub(crate) struct Table {
    words: Words,
    read_only: OwnedFd,
}

impl Table {
    pub(crate) fn new(entries: u32) -> Result<Self> {
        let (fd, words) = Words::create("posthorse-grants", words(entries))?;
        Ok(Self { words, read_only: reopen_read_only(fd)? })
    }

    /// The file, as peers get it.
    pub(crate) fn file(&self) -> &OwnedFd {
        &self.read_only
    }

    pub(crate) const fn entries(&self) -> usize {
        self.words.len() / ENTRY_WORDS - 1
    }

    /// Publishes a grant. The caller knows that nobody uses the entry.
    ///
    /// # Errors
    /// `LimitReached` when the table has no such entry.
    pub(crate) fn publish(&self, token: GrantToken, terms: &Terms) -> Result<()> {
        let key = Key::of(token)?;
        let full = || {
            Error::new(
                ErrorKind::LimitReached,
                format!("grant {} does not fit the table of {} entries", index_of(token), self.entries()),
            )
            .with_advice("raise max_grants of the shared-memory transport")
        };
        let word = |word| self.words.get(place_of(token, word)).ok_or_else(full);
        let state = word(word::STATE)?;
        for (at, value) in [
            (word::SECRET, token.secret),
            (word::REGION, terms.region.0),
            (word::ADDRESS, terms.address),
            (word::LEN, terms.len),
            (word::ACCESS, access_to_word(terms.access)),
            (word::PEER, terms.peer.map_or(0, |peer| peer.0)),
        ] {
            word(at)?.store(value, Ordering::Relaxed);
        }
        protocol::publish(state, key.get());
        Ok(())
    }

    /// Tells peers why grants end from now on, or that the owner is back.
    pub(crate) fn set_stopping(&self, stopping: bool) {
        if let Some(word) = self.words.get(STOPPING) {
            word.store(stopping.into(), Ordering::Relaxed);
        }
    }

    /// Ends a grant for whoever has not announced it yet.
    pub(crate) fn retire(&self, token: GrantToken) {
        if let Some(state) = self.words.get(place_of(token, word::STATE)) {
            protocol::retire(state);
        }
    }
}

/// A peer's side: its owner's table, read-only.
#[derive(Debug)]
pub(crate) struct PeerTable {
    words: Words,
}

impl PeerTable {
    pub(crate) fn map(fd: impl AsFd, entries: u32) -> Result<Self> {
        Ok(Self { words: Words::map_read_only(fd, words(entries))? })
    }

    /// Announces a grant in a hazard slot, and reads its terms. Until the slot is cleared the owner waits.
    ///
    /// # Errors
    /// `AccessDenied` when the token fits no live grant, or is for another peer; then the slot is clear.
    pub(crate) fn announce(
        &self,
        slot: &std::sync::atomic::AtomicU64,
        token: GrantToken,
        me: PeerHash,
    ) -> Result<Terms> {
        let key = Key::of(token)?;
        let state = self.words.get(place_of(token, word::STATE)).ok_or_else(|| no_such_grant(token))?;
        if !protocol::announce(slot, state, key.get()) {
            let stopping = self.words.get(STOPPING).is_some_and(|word| word.load(Ordering::Relaxed) != 0);
            return Err(if stopping {
                Error::new(ErrorKind::PeerGone, "the peer's transport is stopping")
            } else {
                no_such_grant(token)
            });
        }
        self.terms(token, me).inspect_err(|_| protocol::clear(slot))
    }

    fn terms(&self, token: GrantToken, me: PeerHash) -> Result<Terms> {
        // Stable while the grant is announced, if the owner is honest; if not, the caller's bounds check
        // against its own mapping still holds, since each word is read once.
        let word = |word: usize| {
            self.words
                .get(place_of(token, word))
                .map(|word| word.load(Ordering::Relaxed))
                .ok_or_else(|| no_such_grant(token))
        };
        if word(word::SECRET)? ^ token.secret != 0 {
            return Err(no_such_grant(token));
        }
        let peer = word(word::PEER)?;
        if peer != 0 && peer != me.0 {
            return Err(Error::new(ErrorKind::AccessDenied, format!("{token:?} was given to another peer")));
        }
        Ok(Terms {
            region: RegionId(word(word::REGION)?),
            address: word(word::ADDRESS)?,
            len: word(word::LEN)?,
            access: access_from_word(word(word::ACCESS)?),
            peer: (peer != 0).then_some(PeerHash(peer)),
        })
    }
}

/// Revoked, never made or another secret: which of them is not said, as it would help to guess.
fn no_such_grant(token: GrantToken) -> Error {
    Error::new(ErrorKind::AccessDenied, format!("{token:?} fits no live grant of the peer"))
}

const fn access_to_word(access: Access) -> u64 {
    match access {
        Access::None => 0,
        Access::Read => 1,
        Access::Write => 2,
        Access::ReadWrite => 3,
    }
}

const fn access_from_word(word: u64) -> Access {
    match word {
        1 => Access::Read,
        2 => Access::Write,
        3 => Access::ReadWrite,
        _ => Access::None,
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU64;

    use proptest::prelude::*;

    use super::*;

    const ME: &str = "us:1";

    fn terms(peer: Option<&str>) -> Terms {
        Terms {
            region: RegionId(3),
            address: 4096,
            len: 100,
            access: Access::Read,
            peer: peer.map(PeerHash::of),
        }
    }

    fn pair() -> (Table, PeerTable) {
        let table = Table::new(16).unwrap();
        let peer = PeerTable::map(table.file(), 16).unwrap();
        (table, peer)
    }

    #[test]
    fn a_published_grant_is_announced_until_it_is_retired() {
        let (table, peer) = pair();
        let slot = AtomicU64::new(0);
        let token = GrantToken { handle: 5 | 9 << 32, secret: 77 };
        table.publish(token, &terms(None)).unwrap();
        assert_eq!(peer.announce(&slot, token, PeerHash::of(ME)).unwrap(), terms(None));
        assert_eq!(slot.load(Ordering::Relaxed), Key::of(token).unwrap().get());
        protocol::clear(&slot);
        table.retire(token);
        let error = peer.announce(&slot, token, PeerHash::of(ME)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::AccessDenied);
        assert_eq!(slot.load(Ordering::Relaxed), protocol::NONE);
    }

    #[test]
    fn what_does_not_fit_is_refused_and_leaves_the_slot_clear() {
        let (table, peer) = pair();
        let slot = AtomicU64::new(0);
        let token = GrantToken { handle: 5, secret: 77 };
        table.publish(token, &terms(Some("them:1"))).unwrap();
        for wrong in [
            token,
            GrantToken { secret: 78, ..token },
            GrantToken { handle: 5 | 1 << 32, ..token },
            GrantToken { handle: 6, ..token },
            GrantToken { handle: 16, ..token },
            GrantToken { handle: u64::MAX, ..token },
        ] {
            let error = peer.announce(&slot, wrong, PeerHash::of(ME)).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::AccessDenied, "{wrong:?}");
            assert!(!error.to_string().contains("77"), "{error}");
            assert_eq!(slot.load(Ordering::Relaxed), protocol::NONE);
        }
        peer.announce(&slot, token, PeerHash::of("them:1")).unwrap();
    }

    #[test]
    fn a_grant_that_ends_with_its_owner_says_so() {
        let (table, peer) = pair();
        let slot = AtomicU64::new(0);
        let token = GrantToken { handle: 15, secret: 77 };
        table.publish(token, &terms(None)).unwrap();
        table.set_stopping(true);
        peer.announce(&slot, token, PeerHash::of(ME)).unwrap();
        table.retire(token);
        assert_eq!(peer.announce(&slot, token, PeerHash::of(ME)).unwrap_err().kind(), ErrorKind::PeerGone);
    }

    #[test]
    fn a_grant_beyond_the_table_is_refused_with_its_limit() {
        let (table, _) = pair();
        let error = table.publish(GrantToken { handle: 16, secret: 1 }, &terms(None)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::LimitReached);
        assert!(error.to_string().contains("max_grants"), "{error}");
    }

    proptest! {
        #[test]
        fn a_range_is_allowed_only_inside_the_grant(address: u64, len: u64, near in 4000_u64..4300, short in 0_u64..200) {
            for (address, len) in [(address, len), (near, short), (near, len), (address, short)] {
                let inside = address >= 4096 && u128::from(address) + u128::from(len) <= 4196;
                prop_assert_eq!(terms(None).check(address, len, Access::Read).is_ok(), inside);
                prop_assert!(terms(None).check(address, len, Access::Write).is_err());
            }
        }
    }
}
