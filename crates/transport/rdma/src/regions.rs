//! Memory that the devices know: regions for our own transfers, and grants for those of peers.

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::RwLock;
use posthorse_core::{
    Access as Rights, Error, ErrorKind, GrantDesc, GrantToken, HostView, Region, RegionId, RegisteredRegion,
    Result,
};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::rail::Rail;
use crate::verbs::{Access, Memory, MemoryRegion};

/// The longest slice: where memory is longer than a device takes, it is registered in pieces that overlap by so much, so
/// that every slice lies in one.
pub(crate) const MAX_SLICE: u64 = 8 << 20;

/// From here on the devices register a region side by side.
const PARALLEL_BYTES: u64 = 1 << 20;

/// See the module's documentation.
#[derive(Debug, Default)]
pub(crate) struct Regions {
    regions: RwLock<HashMap<RegionId, Arc<Known>>>,
    grants: RwLock<HashMap<GrantToken, Granted>>,
}

/// A region, for local ends of work requests.
#[derive(Debug)]
pub(crate) struct Known {
    // The order matters: the devices forget the memory before it may go.
    keys: Keys,
    region: Arc<dyn Region>,
}

#[derive(Debug)]
struct Granted {
    // As above.
    _keys: Keys,
    region: RegionId,
    _memory: Arc<dyn Region>,
}

/// The same memory as each device knows it, in pieces where it is longer than a device takes: one begins every `step`.
#[derive(Debug)]
struct Keys {
    address: u64,
    step: u64,
    devices: Vec<Vec<Arc<dyn MemoryRegion>>>,
}

/// What is published of a grant: the keys of each device, in the order of the published devices, piece by piece.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct GrantKeys {
    pub(crate) keys: Vec<Vec<u32>>,
    /// Where the first piece begins, and how far from each the next; absent where there is but one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) pieces: Option<(u64, u64)>,
}

impl Regions {
    /// # Errors
    /// `Unsupported` for memory that is not the host's; what a device says.
    pub(crate) fn register(
        &self,
        rails: &[Arc<Rail>],
        region: &RegisteredRegion,
        relaxed: bool,
    ) -> Result<()> {
        let access =
            Access { local_write: region.region.writable(), relaxed_ordering: relaxed, ..Access::default() };
        let view = host(&*region.region)?;
        // SAFETY: the region is held beside the keys, and dropped after them.
        let keys = unsafe { Keys::new(rails, view.address(), view.len() as u64, access) }?;
        let known = Known { keys, region: Arc::clone(&region.region) };
        self.regions.write().insert(region.id, Arc::new(known));
        Ok(())
    }

    pub(crate) fn get(&self, id: RegionId) -> Option<Arc<Known>> {
        self.regions.read().get(&id).cloned()
    }

    /// Has the devices forget a region, and every grant of it.
    pub(crate) fn forget(&self, id: RegionId) {
        let known = self.regions.write().remove(&id);
        let grants: Vec<Granted> = self
            .grants
            .write()
            .extract_if(|_, granted| granted.region == id)
            .map(|(_, granted)| granted)
            .collect();
        drop((grants, known));
    }

    pub(crate) fn grant(&self, rails: &[Arc<Rail>], grant: &GrantDesc, relaxed: bool) -> Result<Value> {
        let known = self.get(grant.region).ok_or_else(|| {
            Error::new(ErrorKind::NotRegistered, format!("transport rdma knows no region {}", grant.region))
        })?;
        let access = Access {
            local_write: known.region.writable() && grant.access.allows(Rights::Write),
            remote_read: grant.access.allows(Rights::Read),
            remote_write: grant.access.allows(Rights::Write),
            relaxed_ordering: relaxed,
        };
        if !access.remote_read && !access.remote_write {
            return Ok(Value::Null);
        }
        let view = host(&*known.region)?;
        let inside = grant.address.checked_sub(view.address()).and_then(|at| at.checked_add(grant.len));
        if inside.is_none_or(|end| end > view.len() as u64) {
            let text = format!("{} bytes at {:#x} leave region {}", grant.len, grant.address, grant.region);
            return Err(Error::new(ErrorKind::OutOfBounds, text));
        }
        // SAFETY: as in `register`.
        let keys = unsafe { Keys::new(rails, grant.address, grant.len, access) }?;
        let published = keys.published();
        let granted = Granted { _keys: keys, region: grant.region, _memory: Arc::clone(&known.region) };
        self.grants.write().insert(grant.token, granted);
        serde_json::to_value(published)
            .map_err(|error| Error::new(ErrorKind::Internal, format!("publishing a grant: {error}")))
    }

    /// Has the devices forget a grant: when this returns, nobody reaches the memory by it.
    pub(crate) fn revoke(&self, token: GrantToken) {
        let granted = self.grants.write().remove(&token);
        drop(granted);
    }

    pub(crate) fn clear(&self) {
        let grants = std::mem::take(&mut *self.grants.write());
        let regions = std::mem::take(&mut *self.regions.write());
        drop((grants, regions));
    }
}

impl Known {
    /// The key of a range at a device.
    pub(crate) fn key(&self, device: usize, address: u64) -> Option<u32> {
        let pieces = self.keys.devices.get(device)?;
        Some(pieces.get(piece_of(self.keys.address, self.keys.step, address)?)?.local_key())
    }
}

impl GrantKeys {
    /// The key of a slice that begins at `address`, at a device.
    pub(crate) fn key(&self, device: usize, address: u64) -> Option<u32> {
        let keys = self.keys.get(device)?;
        let piece = match self.pieces {
            None => 0,
            Some((start, step)) => piece_of(start, step, address)?,
        };
        keys.get(piece).copied()
    }
}

/// The last piece that begins before an address: a slice from there lies in it.
fn piece_of(start: u64, step: u64, address: u64) -> Option<usize> {
    usize::try_from(address.checked_sub(start)?.checked_div(step)?).ok()
}

/// How far from each other the pieces of `len` bytes begin, at devices that take `limit` bytes.
fn step_of(len: u64, limit: u64) -> Result<u64> {
    if len <= limit {
        return Ok(len.max(1));
    }
    // Whole pages, which the devices pin.
    match limit.checked_sub(MAX_SLICE).map(|step| step & !4095) {
        Some(step) if step > 0 => Ok(step),
        _ => {
            let text = format!("the device takes regions of {limit} bytes; needed: more than {MAX_SLICE}");
            Err(Error::new(ErrorKind::LimitReached, text))
        }
    }
}

impl Keys {
    /// # Safety
    /// The memory stays allocated until this is dropped.
    unsafe fn new(rails: &[Arc<Rail>], address: u64, len: u64, access: Access) -> Result<Self> {
        let limit = rails.iter().map(|rail| rail.device.limits().region_bytes).min().unwrap_or(u64::MAX);
        let step = step_of(len, limit)?;
        let register = |rail: &Rail| -> Result<Vec<Arc<dyn MemoryRegion>>> {
            let mut regions = Vec::new();
            for at in (0..len).step_by(usize::try_from(step).unwrap_or(usize::MAX)) {
                let piece = step.saturating_add(MAX_SLICE).min(len - at);
                let memory = Memory::Host { address: address + at, len: piece };
                // SAFETY: the caller's promise.
                let region = unsafe { rail.device.register(memory, access) };
                regions.push(region.map_err(|error| error.with_device(rail.name()))?);
            }
            Ok(regions)
        };
        let devices = if rails.len() > 1 && len >= PARALLEL_BYTES {
            std::thread::scope(|scope| {
                let work: Vec<_> = rails.iter().map(|rail| scope.spawn(|| register(rail))).collect();
                let join = |work: std::thread::ScopedJoinHandle<'_, _>| {
                    let panicked = |_| Err(Error::new(ErrorKind::Internal, "registering memory panicked"));
                    work.join().unwrap_or_else(panicked)
                };
                work.into_iter().map(join).collect::<Result<Vec<_>>>()
            })
        } else {
            rails.iter().map(|rail| register(rail)).collect()
        };
        Ok(Self { address, step, devices: devices? })
    }

    fn published(&self) -> GrantKeys {
        let keys = |regions: &Vec<Arc<dyn MemoryRegion>>| -> Vec<u32> {
            regions.iter().map(|region| region.remote_key()).collect()
        };
        let keys: Vec<Vec<u32>> = self.devices.iter().map(keys).collect();
        let split = keys.iter().any(|keys| keys.len() > 1);
        GrantKeys { keys, pieces: split.then_some((self.address, self.step)) }
    }
}

fn host(region: &dyn Region) -> Result<HostView> {
    region.view().host().ok_or_else(|| {
        Error::new(ErrorKind::Unsupported, "transport rdma moves host memory only").with_device("rdma")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_slice_lies_in_the_piece_that_is_found_for_it() {
        let (start, limit, len) = (1 << 30, 20 << 20, 100 << 20);
        let step = step_of(len, limit).unwrap();
        for at in [0, 1, step - 1, step, step + 1, 3 * step - 1, len - 1] {
            let piece = piece_of(start, step, start + at).unwrap() as u64;
            let slice_end = (at + MAX_SLICE).min(len);
            let piece_end = (piece * step + step + MAX_SLICE).min(len);
            assert!(piece * step <= at && slice_end <= piece_end, "{at}");
            assert!(piece_end - piece * step <= limit);
        }
        assert_eq!(piece_of(start, step, start - 1), None);
        assert_eq!(piece_of(0, 0, 5), None, "a peer may publish nonsense");
        assert_eq!(step_of(limit, limit).unwrap(), limit, "one piece");
        assert!(step_of(1 << 30, MAX_SLICE).unwrap_err().to_string().contains("8388608"));
    }

    #[test]
    fn keys_are_found_by_device_and_piece() {
        let one = GrantKeys { keys: vec![vec![1], vec![2]], pieces: None };
        assert_eq!((one.key(1, 77), one.key(2, 77)), (Some(2), None));
        let split = GrantKeys { keys: vec![vec![1, 2]], pieces: Some((1000, 100)) };
        assert_eq!((split.key(0, 1150), split.key(0, 1250), split.key(0, 999)), (Some(2), None, None));
    }
}
