//! Requests that were checked and cut once, to be posted as often as wanted.

use std::collections::HashMap;
use std::hash::Hash;
use std::sync::Arc;

use posthorse_core::{
    Attributes, Error, ErrorKind, Opcode, RegionId, Result, SegmentId, TransferRequest, View,
};

use crate::engine::Inner;
use crate::peer::Peer;
use crate::slicing::cut;
use crate::submission::{Prepared, Work};

/// A descriptor list prepared once and posted many times, by [`crate::Batch::post`].
///
/// It holds no memory alive: posting it fails when one of its regions is registered no more.
#[derive(Debug, Clone)]
pub struct Plan {
    work: Arc<Work>,
}

impl Plan {
    pub(crate) fn new(engine: &Inner, requests: &[TransferRequest]) -> Result<Self> {
        engine.fork.check()?;
        let mut builder = Builder::new(engine, requests.len());
        for (index, request) in requests.iter().enumerate() {
            builder.add(request).map_err(|error| error.context(format_args!("request {index}")))?;
        }
        Ok(Self { work: Arc::new(builder.finish()) })
    }

    pub(crate) const fn work(&self) -> &Arc<Work> {
        &self.work
    }

    /// How many requests it holds.
    pub fn len(&self) -> usize {
        self.work.requests.len()
    }

    /// Whether it holds no request.
    pub fn is_empty(&self) -> bool {
        self.work.requests.is_empty()
    }

    /// The bytes of all its requests.
    pub fn bytes(&self) -> u64 {
        self.work.bytes
    }
}

/// Checks requests one after the other.
struct Builder<'a> {
    engine: &'a Inner,
    requests: Vec<Prepared>,
    pieces: Vec<crate::slicing::Piece>,
    peers: Vec<Arc<Peer>>,
    peer_ids: Numbering<SegmentId>,
    keys: Vec<Option<Arc<Attributes>>>,
    groups: Numbering<u32>,
    /// Each region's memory, and whether it can be written.
    regions: Vec<(View, bool)>,
    region_ids: Numbering<RegionId>,
    bytes: u64,
}

impl<'a> Builder<'a> {
    fn new(engine: &'a Inner, requests: usize) -> Self {
        Self {
            engine,
            requests: Vec::with_capacity(requests),
            pieces: Vec::with_capacity(requests),
            peers: Vec::new(),
            peer_ids: Numbering::default(),
            keys: Vec::new(),
            groups: Numbering::default(),
            regions: Vec::new(),
            region_ids: Numbering::default(),
            bytes: 0,
        }
    }

    fn add(&mut self, request: &TransferRequest) -> Result<()> {
        let (local, writable) = self.region(request.local.region())?;
        let local = local.slice(request.local.offset(), request.len)?;
        if request.opcode == Opcode::Read && !writable {
            let region = request.local.region();
            let message = format!("the local region {region} is read-only, so nothing can be read into it");
            // The kind's own advice is meant for a peer's memory.
            return Err(Error::new(ErrorKind::AccessDenied, message)
                .with_advice("read into memory that was registered as writable, or write from this one"));
        }
        let peer = self.peer(request.remote.segment)?;
        if request.remote.address.checked_add(request.len).is_none() {
            return Err(Error::new(
                ErrorKind::OutOfBounds,
                format!("{} bytes at {:#x} leave the address space", request.len, request.remote.address),
            ));
        }
        let (token, keys) = match (request.remote.token, self.peers.get(peer as usize)) {
            (None, Some(peer)) if request.len > 0 => {
                let (token, keys) = peer.published(request.remote.address, request.len)?;
                (token, Some(keys))
            }
            (Some(token), Some(peer)) => (Some(token), peer.held(token)),
            (token, None) | (token @ None, _) => (token, None),
        };
        let keys = self.keys(keys);
        let group = self.groups.number(request.group).0;
        let before = self.pieces.len();
        let index = u32::try_from(self.requests.len())
            .map_err(|_| Error::new(ErrorKind::TooLarge, "a submission holds at most 2^32 requests"))?;
        cut(index, request.len, self.engine.slice_length(), &mut self.pieces);
        if self.pieces.len() >= u32::MAX as usize {
            return Err(Error::new(ErrorKind::TooLarge, "a submission holds at most 2^32 slices"));
        }
        self.requests.push(Prepared {
            opcode: request.opcode,
            local,
            local_region: request.local.region(),
            peer,
            remote_address: request.remote.address,
            token,
            keys,
            priority: request.priority,
            route: request.route,
            group,
            pieces: (self.pieces.len() - before) as u32,
        });
        self.bytes = self.bytes.saturating_add(request.len);
        Ok(())
    }

    fn region(&mut self, id: RegionId) -> Result<(View, bool)> {
        let (number, new) = self.region_ids.number(id);
        if new {
            let registered = self.engine.registry.region(id)?;
            self.regions.push((registered.region.view(), registered.region.writable()));
        }
        let known = self.regions.get(number as usize).copied();
        known.ok_or_else(|| Error::new(ErrorKind::Internal, "a region of the plan has no memory"))
    }

    fn peer(&mut self, id: SegmentId) -> Result<u32> {
        let (number, new) = self.peer_ids.number(id);
        if new {
            let peer = self.engine.peers.by_id(id).ok_or_else(|| {
                Error::invalid_argument("segment", id, "the number of a segment that is open")
            })?;
            if let Some(error) = peer.ended() {
                return Err(error.clone());
            }
            self.peers.push(peer);
        }
        Ok(number)
    }

    /// The number of what was published with a request's remote memory. Neighbours often have the same.
    fn keys(&mut self, keys: Option<Arc<Attributes>>) -> u32 {
        let same = |last: &Option<Arc<Attributes>>| match (last, &keys) {
            (Some(last), Some(keys)) => Arc::ptr_eq(last, keys),
            (last, keys) => last.is_none() && keys.is_none(),
        };
        if !self.keys.last().is_some_and(same) {
            self.keys.push(keys);
        }
        (self.keys.len() - 1) as u32
    }

    fn finish(self) -> Work {
        Work {
            requests: self.requests.into(),
            pieces: self.pieces.into(),
            peers: self.peers.into(),
            keys: self.keys.into(),
            groups: self.groups.keys.into(),
            regions: self.region_ids.keys.into(),
            bytes: self.bytes,
        }
    }
}

/// Numbers different keys in the order in which they come. Neighbours often have the same, and mostly there are few.
#[derive(Debug)]
struct Numbering<K> {
    keys: Vec<K>,
    last: u32,
    /// The numbers of the keys, once there are too many to look at each.
    numbers: HashMap<K, u32>,
}

impl<K> Default for Numbering<K> {
    fn default() -> Self {
        Self { keys: Vec::new(), last: 0, numbers: HashMap::new() }
    }
}

impl<K: Copy + Eq + Hash> Numbering<K> {
    const FEW: usize = 8;

    /// The key's number, and whether it is new.
    fn number(&mut self, key: K) -> (u32, bool) {
        if self.keys.get(self.last as usize) == Some(&key) {
            return (self.last, false);
        }
        let known = if self.keys.len() <= Self::FEW {
            self.keys.iter().position(|known| *known == key).map(|index| index as u32)
        } else {
            self.numbers.get(&key).copied()
        };
        self.last = known.unwrap_or(self.keys.len() as u32);
        if known.is_none() {
            self.keys.push(key);
            if self.keys.len() == Self::FEW + 1 {
                self.numbers = self.keys.iter().copied().zip(0..).collect();
            } else if self.keys.len() > Self::FEW {
                self.numbers.insert(key, self.last);
            }
        }
        (self.last, known.is_none())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn different_keys_get_different_numbers_in_order(keys in prop::collection::vec(0_u32..40, 0..200)) {
            let mut numbering = Numbering::default();
            let mut seen: Vec<u32> = Vec::new();
            for key in keys {
                let before = seen.iter().position(|known| *known == key);
                let expected = (before.unwrap_or(seen.len()) as u32, before.is_none());
                if before.is_none() {
                    seen.push(key);
                }
                prop_assert_eq!(numbering.number(key), expected);
            }
            prop_assert_eq!(numbering.keys, seen);
        }
    }
}
