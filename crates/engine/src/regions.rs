//! The regions of an engine as its transports know them.

use std::collections::HashMap;

use parking_lot::RwLock;
use posthorse_core::{Attributes, BufferDesc, RegionId, RegisteredRegion, TransportId};

/// See the module's documentation.
#[derive(Debug, Default)]
pub(crate) struct Regions {
    known: RwLock<HashMap<RegionId, Known>>,
}

#[derive(Debug)]
struct Known {
    region: RegisteredRegion,
    /// The transports that were asked to register it.
    with: Vec<TransportId>,
    /// What they publish for it.
    attributes: Attributes,
}

impl Regions {
    pub(crate) fn insert(&self, region: &RegisteredRegion) {
        let known = Known { region: region.clone(), with: Vec::new(), attributes: Attributes::new() };
        self.known.write().insert(region.id, known);
    }

    /// Forgets a region, and returns what it was; `None` when that was done before.
    pub(crate) fn remove(&self, id: RegionId) -> Option<RegisteredRegion> {
        self.known.write().remove(&id).map(|known| known.region)
    }

    /// Whether the caller is to register a region with a transport: not when somebody else does, or has.
    pub(crate) fn claim(&self, id: RegionId, transport: TransportId) -> bool {
        let mut known = self.known.write();
        let Some(known) = known.get_mut(&id).filter(|known| !known.with.contains(&transport)) else {
            return false;
        };
        known.with.push(transport);
        true
    }

    /// Notes what a transport publishes for a region. Says whether the region is still known.
    pub(crate) fn note(&self, id: RegionId, attributes: Attributes) -> bool {
        let mut known = self.known.write();
        let Some(known) = known.get_mut(&id) else { return false };
        known.attributes.extend(attributes);
        true
    }

    pub(crate) fn all(&self) -> Vec<RegisteredRegion> {
        self.known.read().values().map(|known| known.region.clone()).collect()
    }

    /// Adds to descriptions of regions what the transports publish for them.
    pub(crate) fn fill_in(&self, buffers: &mut [BufferDesc]) {
        let known = self.known.read();
        for buffer in buffers {
            if let Some(known) = buffer.region.and_then(|region| known.get(&region)) {
                buffer.attributes.clone_from(&known.attributes);
            }
        }
    }
}
