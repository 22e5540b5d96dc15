//! Memory that software devices know.

use std::fmt;
use std::sync::{Arc, Weak};

use parking_lot::RwLock;

use super::device::Core;
use crate::verbs::{Access, MemoryRegion, WorkRequest};

/// What a device knows of a region.
#[derive(Debug)]
pub(super) struct Known {
    address: u64,
    len: u64,
    access: Access,
    /// Whether it is still there: read while it is touched, written when it goes.
    alive: RwLock<bool>,
}

/// What work wants with memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Want {
    LocalRead,
    LocalWrite,
    RemoteRead,
    RemoteWrite,
}

impl Known {
    pub(super) const fn new(address: u64, len: u64, access: Access) -> Self {
        Self { address, len, access, alive: RwLock::new(true) }
    }

    /// Whether the region allows this with that range.
    pub(super) fn allows(&self, want: Want, address: u64, len: u32) -> bool {
        let inside = address
            .checked_sub(self.address)
            .and_then(|offset| offset.checked_add(len.into()))
            .is_some_and(|end| end <= self.len);
        inside
            && match want {
                Want::LocalRead => true,
                Want::LocalWrite => self.access.local_write,
                Want::RemoteRead => self.access.remote_read,
                Want::RemoteWrite => self.access.remote_write,
            }
    }

    /// Does something with the memory while it is there.
    pub(super) fn touch<T>(&self, work: impl FnOnce() -> T) -> Option<T> {
        let alive = self.alive.read();
        alive.then(work)
    }
}

/// Copies what a request names from one end to the other: both are memory of this process.
///
/// # Safety
/// Both ranges are allocated, and whoever registered them answers for their use.
pub(super) unsafe fn copy(from: u64, to: u64, len: u32) {
    let (from, to) = (from as *const u8, to as *mut u8);
    // SAFETY: the caller's promise; the ranges may overlap.
    unsafe { std::ptr::copy(from, to, len as usize) }
}

/// The bytes that a request carries with it.
///
/// # Safety
/// As for [`QueuePairs::post`](crate::verbs::QueuePairs::post).
pub(super) unsafe fn taken(request: &WorkRequest) -> Vec<u8> {
    let mut bytes = vec![0; request.len as usize];
    // SAFETY: the caller's promise for the source; the target was just made.
    unsafe { copy(request.local_address, bytes.as_mut_ptr().expose_provenance() as u64, request.len) };
    bytes
}

/// A registration: it goes when this is dropped.
pub(super) struct SoftRegion {
    pub(super) key: u32,
    pub(super) known: Arc<Known>,
    pub(super) device: Weak<Core>,
}

impl MemoryRegion for SoftRegion {
    fn local_key(&self) -> u32 {
        self.key
    }

    fn remote_key(&self) -> u32 {
        self.key
    }
}

impl Drop for SoftRegion {
    fn drop(&mut self) {
        if let Some(device) = self.device.upgrade() {
            device.forget_region(self.key);
        }
        *self.known.alive.write() = false;
    }
}

impl fmt::Debug for SoftRegion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SoftRegion").field("key", &self.key).field("known", &self.known).finish()
    }
}
