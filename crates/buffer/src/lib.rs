#![doc = include_str!("../README.md")]

mod allocator;
mod bins;
mod buffer;
mod pool;
mod queue;
mod receive;
mod slot;
mod stats;
mod typed;
mod wait;

pub use allocator::{AllocatorStats, Block, DEFAULT_ALIGNMENT, OffsetAllocator};
pub use buffer::{ManagedBuffer, SharedBuffer};
pub use pool::{FencingSlot, Pool, PoolConfig};
pub use receive::ReceiveSlot;
pub use slot::{SlotEvent, SlotGrant, SlotState};
pub use stats::PoolStats;
pub use typed::TensorView;
pub use wait::Alloc;
