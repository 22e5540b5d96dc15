//! Regions for the tests of the registry.

use std::sync::Arc;

use posthorse_core::{Access, Claim, DeviceView, GrantDesc, GrantToken, Location, Region, View};

/// Memory of a device that does not exist: it can be registered and granted, and nobody can touch it.
#[derive(Debug)]
pub(crate) struct Imagined {
    address: u64,
    len: u64,
    writable: bool,
}

// SAFETY: the range never changes, and is no host memory; no device has it, so none is asked to touch it.
unsafe impl Region for Imagined {
    fn view(&self) -> View {
        View::Device(DeviceView { device: Location::Cuda(0), address: self.address, len: self.len })
    }

    fn location(&self) -> Location {
        Location::Cuda(0)
    }

    fn writable(&self) -> bool {
        self.writable
    }
}

pub(crate) fn region(address: u64, len: u64) -> Arc<dyn Region> {
    Arc::new(Imagined { address, len, writable: true })
}

pub(crate) fn read_only(address: u64, len: u64) -> Arc<dyn Region> {
    Arc::new(Imagined { address, len, writable: false })
}

pub(crate) fn claim(token: Option<GrantToken>, address: u64, len: u64, access: Access) -> Claim<'static> {
    Claim { peer: "b:1", token, address, len, access }
}

pub(crate) fn claim_all(grant: &GrantDesc) -> Claim<'static> {
    claim(Some(grant.token), grant.address, grant.len, grant.access)
}
