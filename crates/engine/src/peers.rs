//! The peers that are open, by number and by name.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use parking_lot::RwLock;
use posthorse_core::SegmentId;

use crate::peer::Peer;

/// The segment that was numbered last. One engine's number means nothing to another.
static LAST: AtomicU64 = AtomicU64::new(SegmentId::LOCAL.0);

#[derive(Debug, Default)]
pub(crate) struct Peers {
    inner: RwLock<Known>,
}

#[derive(Debug, Default)]
struct Known {
    by_id: HashMap<SegmentId, Arc<Peer>>,
    /// Lives that are over, for as long as somebody holds their segment: requests against them are told why.
    over: HashMap<SegmentId, Weak<Peer>>,
    /// The newest life of each name.
    by_name: HashMap<String, SegmentId>,
    /// How many were left when those that are gone were looked for.
    left: usize,
}

impl Known {
    /// A peer is known no more: nor is its name, unless a newer life has that.
    fn forget_name(&mut self, peer: &Peer) {
        if self.by_name.get(&peer.name) == Some(&peer.id) {
            self.by_name.remove(&peer.name);
        }
    }
}

/// Whether nobody needs a peer of the table. Under its lock nobody can come to hold one that only the table holds.
fn is_gone(peer: &Arc<Peer>) -> bool {
    peer.id != SegmentId::LOCAL && Arc::strong_count(peer) == 1 && !peer.is_reached()
}

/// See [`Peers::asking`].
#[derive(Debug, Clone, Copy)]
pub(crate) struct Asked(u64);

impl Peers {
    pub(crate) fn by_id(&self, id: SegmentId) -> Option<Arc<Peer>> {
        let known = self.inner.read();
        known.by_id.get(&id).cloned().or_else(|| known.over.get(&id)?.upgrade())
    }

    pub(crate) fn by_name(&self, name: &str) -> Option<Arc<Peer>> {
        let known = self.inner.read();
        known.by_id.get(known.by_name.get(name)?).cloned()
    }

    /// The moment before a question to the directory: what is adopted hereafter may be newer than the answer.
    pub(crate) fn asking() -> Asked {
        Asked(LAST.load(Ordering::Relaxed))
    }

    /// The peer of this name, if it is the `same`, else a new one; then the one that it replaces is returned too. `None`
    /// where another was adopted since the directory was `asked`: which of the two lives is newer, nobody can say. What is
    /// made knows the transports of the time when it is made: no uninstall passes between that and its being found.
    pub(crate) fn adopt(
        &self,
        name: &str,
        asked: Asked,
        same: impl FnOnce(&Peer) -> bool,
        make: impl FnOnce(SegmentId) -> Peer,
    ) -> Option<(Arc<Peer>, Option<Arc<Peer>>)> {
        let mut known = self.inner.write();
        let id = known.by_name.get(name).copied();
        let there = id.and_then(|id| known.by_id.get(&id)).cloned();
        if let Some(there) = there.as_ref().filter(|there| same(there)) {
            return Some((Arc::clone(there), None));
        }
        if there.as_ref().is_some_and(|there| there.id.0 > asked.0) {
            return None;
        }
        if let Some(there) = &there {
            known.by_id.remove(&there.id);
            known.over.retain(|_, peer| peer.strong_count() > 0);
            known.over.insert(there.id, Arc::downgrade(there));
        }
        let id = SegmentId(LAST.fetch_add(1, Ordering::Relaxed) + 1);
        let peer = Arc::new(make(id));
        known.by_id.insert(id, Arc::clone(&peer));
        known.by_name.insert(name.to_owned(), id);
        Some((peer, there))
    }

    /// The engine's own segment, which is found by its number alone.
    pub(crate) fn insert_local(&self, make: impl FnOnce() -> Peer) -> Arc<Peer> {
        Arc::clone(self.inner.write().by_id.entry(SegmentId::LOCAL).or_insert_with(|| Arc::new(make())))
    }

    pub(crate) fn remove(&self, id: SegmentId) -> Option<Arc<Peer>> {
        let mut known = self.inner.write();
        let peer = known.by_id.remove(&id)?;
        known.forget_name(&peer);
        Some(peer)
    }

    /// Whether it was opened here.
    pub(crate) fn contains(&self, peer: &Arc<Peer>) -> bool {
        self.by_id(peer.id).is_some_and(|known| Arc::ptr_eq(&known, peer))
    }

    /// Forgets the peers to which no path is up or being made, and whose segments nobody holds, now and then: when there
    /// are twice as many as were left before. They are returned, to be dropped without the lock.
    #[must_use]
    pub(crate) fn forget_gone(&self) -> Vec<Arc<Peer>> {
        let mut known = self.inner.write();
        if known.by_id.len() < 2 * known.left {
            return Vec::new();
        }
        let gone: Vec<_> = known.by_id.extract_if(|_, peer| is_gone(peer)).map(|(_, peer)| peer).collect();
        gone.iter().for_each(|peer| known.forget_name(peer));
        known.left = known.by_id.len();
        gone
    }

    /// As [`Peers::forget_gone`], for one.
    #[must_use]
    pub(crate) fn forget_if_gone(&self, id: SegmentId) -> Option<Arc<Peer>> {
        let mut known = self.inner.write();
        known.by_id.get(&id).filter(|peer| is_gone(peer))?;
        let peer = known.by_id.remove(&id)?;
        known.forget_name(&peer);
        Some(peer)
    }

    pub(crate) fn all(&self) -> Vec<Arc<Peer>> {
        self.inner.read().by_id.values().cloned().collect()
    }
}

#[cfg(test)]
mod tests {
    use posthorse_core::{Attributes, Incarnation, SegmentDesc};

    use super::*;

    #[test]
    fn lives_that_are_over_are_known_for_as_long_as_their_segments_are_held() {
        let peers = Peers::default();
        let adopt = |life: u64| {
            let desc = SegmentDesc {
                name: "b".to_owned(),
                incarnation: Some(Incarnation(life)),
                hello: None,
                transports: Attributes::new(),
                buffers: Vec::new(),
            };
            let same = |there: &Peer| there.is_same_life(&desc);
            let (peer, _) =
                peers.adopt("b", Peers::asking(), same, |id| Peer::new(id, desc.clone(), &[])).unwrap();
            peer
        };
        let held = adopt(0);
        assert_eq!(adopt(0).id, held.id, "the same life is the same peer");
        for life in 1..100 {
            adopt(life);
        }
        assert_eq!(peers.by_id(held.id).unwrap().incarnation, Some(Incarnation(0)));
        let known = peers.inner.read();
        assert_eq!((known.by_id.len(), known.by_name.len()), (1, 1));
        assert!(known.over.len() <= 2, "{} lives are kept", known.over.len());
    }

    #[test]
    fn peers_that_are_gone_are_forgotten_before_they_are_more_than_those_that_are_held() {
        let peers = Peers::default();
        let adopt = |name: String| {
            let desc = SegmentDesc {
                name: name.clone(),
                incarnation: Some(Incarnation(1)),
                hello: None,
                transports: Attributes::new(),
                buffers: Vec::new(),
            };
            peers.adopt(&name, Peers::asking(), |_| false, |id| Peer::new(id, desc, &[])).unwrap().0
        };
        let held: Vec<_> = (0..10).map(|number| adopt(format!("held {number}"))).collect();
        for number in 0..100 {
            let id = adopt(format!("gone {number}")).id;
            drop(peers.forget_gone());
            let known = peers.inner.read();
            assert!(known.by_id.len() < 2 * held.len() + 1, "{} are known", known.by_id.len());
            assert_eq!(known.by_id.len(), known.by_name.len());
            drop(known);
            if number % 7 == 0
                && let Some(peer) = peers.forget_if_gone(id)
            {
                assert!(peers.by_name(&peer.name).is_none() && peers.by_id(id).is_none());
            }
        }
        assert!(held.iter().all(|peer| peers.contains(peer) && peers.forget_if_gone(peer.id).is_none()));
    }
}
