//! What an engine tells the world about itself.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::hello::Hello;
use crate::id::{GrantToken, Incarnation, RegionId};
use crate::location::Location;
use crate::memory::Access;

/// What each transport publishes, by the transport's name. Only that transport reads its value.
pub type Attributes = BTreeMap<String, Value>;

/// An engine's memory as its peers see it: who it is, how it is reached, which buffers it publishes.
///
/// The forms on the wire are `posthorse-segment`'s.
#[derive(Debug, Clone, PartialEq)]
pub struct SegmentDesc {
    /// The segment's name; with the peer-to-peer directory this is `host:port` of the handshake.
    pub name: String,
    /// Which life of the engine this describes; `None` from foreign engines.
    pub incarnation: Option<Incarnation>,
    /// What the engine speaks; `None` from foreign engines.
    pub hello: Option<Hello>,
    /// How each of its transports is reached.
    pub transports: Attributes,
    /// The memory that peers may address.
    pub buffers: Vec<BufferDesc>,
}

/// One published region.
#[derive(Debug, Clone, PartialEq)]
pub struct BufferDesc {
    /// The region's number; `None` from foreign engines.
    pub region: Option<RegionId>,
    /// Where it lies.
    pub location: Location,
    /// The first byte's address in the owner's address space.
    pub address: u64,
    /// Bytes.
    pub len: u64,
    /// What holders of this descriptor may do.
    pub access: Access,
    /// The token of that grant; `None` from foreign engines.
    pub token: Option<GrantToken>,
    /// What each transport published for this region.
    pub attributes: Attributes,
}

/// A grant as it travels to the peer that may use it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct GrantDesc {
    /// The region it lies in.
    pub region: RegionId,
    /// The first byte's address in the owner's address space.
    pub address: u64,
    /// Bytes.
    pub len: u64,
    /// What its holder may do.
    pub access: Access,
    /// The proof.
    pub token: GrantToken,
    /// What each transport published for this grant.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub attributes: Attributes,
}

impl SegmentDesc {
    /// The published buffer that contains the whole range, if one does.
    pub fn buffer_at(&self, address: u64, len: u64) -> Option<&BufferDesc> {
        self.buffers.iter().find(|buffer| buffer.contains(address, len))
    }
}

impl BufferDesc {
    /// Whether the whole range lies in this buffer.
    pub fn contains(&self, address: u64, len: u64) -> bool {
        contains(self.address, self.len, address, len)
    }
}

impl GrantDesc {
    /// Whether the whole range lies in this grant.
    pub fn contains(&self, address: u64, len: u64) -> bool {
        contains(self.address, self.len, address, len)
    }
}

/// Whether `len` bytes at `address` lie within `outer_len` bytes at `outer`, however large the numbers are.
fn contains(outer: u64, outer_len: u64, address: u64, len: u64) -> bool {
    address.checked_sub(outer).and_then(|offset| offset.checked_add(len)).is_some_and(|end| end <= outer_len)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_is_contained_without_overflow() {
        for (outer, outer_len, address, len, inside) in [
            (100, 50, 100, 50, true),
            (100, 50, 150, 0, true),
            (100, 50, 149, 2, false),
            (100, 50, 99, 1, false),
            (100, 50, 101, u64::MAX, false),
            (100, 50, u64::MAX, 2, false),
            (u64::MAX - 9, 10, u64::MAX, 0, true),
            (u64::MAX - 9, 10, u64::MAX, 2, false),
        ] {
            assert_eq!(contains(outer, outer_len, address, len), inside, "{address} {len}");
        }
    }
}
