//! A directory within one process.

use std::collections::HashMap;
use std::sync::{PoisonError, RwLock};

use posthorse_core::{Deadline, Error, ErrorKind, Result, SegmentDesc};

use super::Directory;

/// A map of descriptors, for tests and for stages that share one process.
#[derive(Debug, Default)]
pub struct MemoryDirectory {
    descs: RwLock<HashMap<String, SegmentDesc>>,
}

impl MemoryDirectory {
    /// An empty directory.
    pub fn new() -> Self {
        Self::default()
    }
}

impl Directory for MemoryDirectory {
    fn publish(&self, desc: &SegmentDesc, _deadline: Deadline) -> Result<()> {
        if desc.name.is_empty() {
            return Err(Error::invalid_argument("name of the descriptor", "empty", "a segment's name"));
        }
        let mut descs = self.descs.write().unwrap_or_else(PoisonError::into_inner);
        descs.insert(desc.name.clone(), desc.clone());
        Ok(())
    }

    fn withdraw(&self, name: &str, _deadline: Deadline) -> Result<()> {
        self.descs.write().unwrap_or_else(PoisonError::into_inner).remove(name);
        Ok(())
    }

    fn lookup(&self, name: &str, _deadline: Deadline) -> Result<SegmentDesc> {
        let descs = self.descs.read().unwrap_or_else(PoisonError::into_inner);
        descs.get(name).cloned().ok_or_else(|| {
            Error::new(ErrorKind::NotFound, "no segment of this name is published").with_peer(name)
        })
    }
}
