//! The verbs of real devices, by libibverbs.

mod device;
mod events;
mod handles;
mod library;
mod memory;
mod port;
mod queue_pairs;
mod requests;

use std::sync::Arc;

use posthorse_core::Result;

use crate::verbs::{Device, Verbs};
use device::SystemDevice;
use handles::{Context, DeviceList};
use library::{Library, library};

/// The RDMA devices of this host, by way of `libibverbs.so.1`, which is loaded by [`SystemVerbs::new`] and not
/// before.
///
/// In a forked child nothing of it works, and dropping it leaves everything as it is: it belongs to the parent.
#[derive(Debug, Clone, Copy)]
pub struct SystemVerbs {
    library: &'static Library,
}

impl SystemVerbs {
    /// Loads the library.
    ///
    /// # Errors
    /// `Unsupported` where it is not installed; the advice says how to get it.
    pub fn new() -> Result<Self> {
        Ok(Self { library: library()? })
    }
}

impl Verbs for SystemVerbs {
    fn devices(&self) -> Result<Vec<String>> {
        Ok(DeviceList::new(self.library).entries().map(|(name, _)| name).collect())
    }

    fn open(&self, name: &str) -> Result<Arc<dyn Device>> {
        Ok(Arc::new(SystemDevice::new(Context::open(self.library, name)?)?))
    }
}
