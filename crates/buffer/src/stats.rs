//! What a pool tells about itself.

use std::ops::Deref;

use crate::allocator::AllocatorStats;

/// The state of a [`Pool`](crate::Pool) at one moment. Sizes are in bytes.
///
/// The figures of the space itself ([`AllocatorStats`]) can be read directly: `stats.used`, `stats.free`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PoolStats {
    /// What is given out and what is left. `used` contains the slots that peers may write to and those in
    /// fencing.
    pub space: AllocatorStats,
    /// Slots that a peer may write to now.
    pub granted_slots: usize,
    /// Slots that were withdrawn from a peer and wait for their fence.
    pub fencing_slots: usize,
    /// The bytes of those.
    pub fencing: u64,
    /// Requests that wait for space.
    pub waiting: usize,
    /// Requests that were refused because there was no space, or no room to wait for it.
    pub refused: u64,
    /// Requests whose deadline passed.
    pub timed_out: u64,
}

impl PoolStats {
    /// Whether everything has come back: nothing is out, granted or in fencing, and the space is one piece.
    pub const fn is_whole(&self) -> bool {
        self.space.used == 0 && self.space.largest_free == self.space.capacity && self.fencing_slots == 0
    }
}

impl Deref for PoolStats {
    type Target = AllocatorStats;

    fn deref(&self) -> &AllocatorStats {
        &self.space
    }
}
