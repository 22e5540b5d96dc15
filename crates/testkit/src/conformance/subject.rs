//! The transport under test.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use posthorse_core::{Deadline, Region, Transport};

use crate::memory::HeapRegion;

type Make = dyn Fn() -> Arc<dyn Transport> + Send + Sync;
type MakeRegion = dyn Fn(usize) -> Arc<dyn Region> + Send + Sync;

/// How the suite gets the transport it tests, and the memory to test it with.
pub struct Subject {
    make: Box<Make>,
    region: Box<MakeRegion>,
    patience: Duration,
}

impl Subject {
    /// A transport that `make` makes, not yet started. What it makes must reach what it has made.
    pub fn new<T: Transport + 'static>(make: impl Fn() -> Arc<T> + Send + Sync + 'static) -> Self {
        Self {
            make: Box::new(move || make()),
            region: Box::new(|len| HeapRegion::new(len)),
            patience: Duration::from_secs(30),
        }
    }

    /// The memory that this transport needs: writable host memory of a length in bytes, zeroed or not. Without this
    /// it is heap memory.
    #[must_use]
    pub fn regions(mut self, region: impl Fn(usize) -> Arc<dyn Region> + Send + Sync + 'static) -> Self {
        self.region = Box::new(region);
        self
    }

    /// How long anything may take before it counts as hanging. Without this, 30 s.
    #[must_use]
    pub const fn patience(mut self, patience: Duration) -> Self {
        self.patience = patience;
        self
    }

    pub(super) fn transport(&self) -> Arc<dyn Transport> {
        (self.make)()
    }

    pub(super) fn region(&self, len: usize) -> Arc<dyn Region> {
        (self.region)(len)
    }

    pub(super) fn deadline(&self) -> Deadline {
        Deadline::after(self.patience)
    }
}

impl fmt::Debug for Subject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Subject").field("patience", &self.patience).finish_non_exhaustive()
    }
}
