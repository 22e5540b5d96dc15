//! w
mod allocator;
mod bins;
pub use allocator::{AllocatorStats, Block, DEFAULT_ALIGNMENT, OffsetAllocator};
