//! Requests that were checked and cut once, to be posted as often as wanted.

use std::collections::HashMap;
use std::sync::Arc;

use posthorse_core::{Error, ErrorKind, Opcode, RegionId, Result, SegmentId, TransferRequest, View};

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

/// Checks requests one after the other. What the last request named is remembered, since neighbours often name
/// the same.
struct Builder<'a> {
    engine: &'a Inner,
    requests: Vec<Prepared>,
    pieces: Vec<crate::slicing::Piece>,
    peers: Vec<Arc<Peer>>,
    groups: Vec<u32>,
    group_index: HashMap<u32, u32>,
    regions: Vec<(RegionId, View, bool)>,
    region_index: HashMap<RegionId, usize>,
    last_peer: Option<(SegmentId, u32)>,
    last_region: Option<usize>,
    last_group: Option<(u32, u32)>,
    bytes: u64,
}

impl<'a> Builder<'a> {
    fn new(engine: &'a Inner, requests: usize) -> Self {
        Self {
            engine,
            requests: Vec::with_capacity(requests),
            pieces: Vec::with_capacity(requests),
            peers: Vec::new(),
            groups: Vec::new(),
            group_index: HashMap::new(),
            regions: Vec::new(),
            region_index: HashMap::new(),
            last_peer: None,
            last_region: None,
            last_group: None,
            bytes: 0,
        }
    }

    fn add(&mut self, request: &TransferRequest) -> Result<()> {
        let (local, writable) = self.region(request.local.region)?;
        let local = local.slice(request.local.offset, request.len)?;
        if request.opcode == Opcode::Read && !writable {
            return Err(Error::new(
                ErrorKind::AccessDenied,
                format!("region {} cannot be written, so nothing can be read into it", request.local.region),
            ));
        }
        let peer = self.peer(request.remote.segment)?;
        if request.remote.address.checked_add(request.len).is_none() {
            return Err(Error::new(
                ErrorKind::OutOfBounds,
                format!("{} bytes at {:#x} leave the address space", request.len, request.remote.address),
            ));
        }
        let token = match (request.remote.token, self.peers.get(peer as usize)) {
            (None, Some(peer)) if request.len > 0 => {
                peer.published_token(request.remote.address, request.len)?
            }
            (token, _) => token,
        };
        let group = self.group(request.group);
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
            local_region: request.local.region,
            peer,
            remote_address: request.remote.address,
            token,
            priority: request.priority,
            route: request.route,
            group,
            pieces: (self.pieces.len() - before) as u32,
        });
        self.bytes = self.bytes.saturating_add(request.len);
        Ok(())
    }

    fn region(&mut self, id: RegionId) -> Result<(View, bool)> {
        if let Some((known, view, writable)) = self.last_region.and_then(|index| self.regions.get(index))
            && *known == id
        {
            return Ok((*view, *writable));
        }
        let index = match self.region_index.get(&id) {
            Some(index) => *index,
            None => {
                let registered = self.engine.registry.region(id)?;
                self.regions.push((id, registered.region.view(), registered.region.writable()));
                self.region_index.insert(id, self.regions.len() - 1);
                self.regions.len() - 1
            }
        };
        self.last_region = Some(index);
        let (_, view, writable) = self.regions[index];
        Ok((view, writable))
    }

    fn peer(&mut self, id: SegmentId) -> Result<u32> {
        if let Some((known, index)) = self.last_peer
            && known == id
        {
            return Ok(index);
        }
        let known = self.peers.iter().position(|peer| peer.id == id);
        let index = match known {
            Some(index) => index,
            None => {
                let peer = self.engine.peers.by_id(id).ok_or_else(|| {
                    Error::invalid_argument("segment", id, "the number of a segment that is open")
                })?;
                if let Some(error) = peer.ended() {
                    return Err(error.clone());
                }
                self.peers.push(peer);
                self.peers.len() - 1
            }
        };
        self.last_peer = Some((id, index as u32));
        Ok(index as u32)
    }

    fn group(&mut self, group: u32) -> u32 {
        if let Some((known, index)) = self.last_group
            && known == group
        {
            return index;
        }
        let index = *self.group_index.entry(group).or_insert_with(|| {
            self.groups.push(group);
            self.groups.len() as u32 - 1
        });
        self.last_group = Some((group, index));
        index
    }

    fn finish(self) -> Work {
        Work {
            requests: self.requests.into(),
            pieces: self.pieces.into(),
            peers: self.peers.into(),
            groups: self.groups.into(),
            regions: self.regions.iter().map(|(id, _, _)| *id).collect(),
            bytes: self.bytes,
        }
    }
}
