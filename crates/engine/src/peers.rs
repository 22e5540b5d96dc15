//! The peers that are open, by number and by name.

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::RwLock;
use posthorse_core::SegmentId;

use crate::peer::Peer;

#[derive(Debug, Default)]
pub(crate) struct Peers {
    inner: RwLock<Known>,
}

#[derive(Debug, Default)]
struct Known {
    last: u64,
    by_id: HashMap<SegmentId, Arc<Peer>>,
    /// The newest life of each name.
    by_name: HashMap<String, SegmentId>,
}

impl Peers {
    pub(crate) fn by_id(&self, id: SegmentId) -> Option<Arc<Peer>> {
        self.inner.read().by_id.get(&id).cloned()
    }

    pub(crate) fn by_name(&self, name: &str) -> Option<Arc<Peer>> {
        let known = self.inner.read();
        known.by_id.get(known.by_name.get(name)?).cloned()
    }

    pub(crate) fn insert(&self, make: impl FnOnce(SegmentId) -> Peer) -> Arc<Peer> {
        let mut known = self.inner.write();
        known.last += 1;
        let id = SegmentId(known.last);
        let peer = Arc::new(make(id));
        known.by_id.insert(id, Arc::clone(&peer));
        known.by_name.insert(peer.name.clone(), id);
        peer
    }

    /// The engine's own segment, which is found by its number alone.
    pub(crate) fn insert_local(&self, peer: Peer) -> Arc<Peer> {
        Arc::clone(self.inner.write().by_id.entry(SegmentId::LOCAL).or_insert_with(|| Arc::new(peer)))
    }

    pub(crate) fn remove(&self, id: SegmentId) -> Option<Arc<Peer>> {
        let mut known = self.inner.write();
        let peer = known.by_id.remove(&id)?;
        if known.by_name.get(&peer.name) == Some(&id) {
            known.by_name.remove(&peer.name);
        }
        Some(peer)
    }

    pub(crate) fn all(&self) -> Vec<Arc<Peer>> {
        self.inner.read().by_id.values().cloned().collect()
    }
}
