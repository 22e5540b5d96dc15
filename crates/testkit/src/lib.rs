#![doc = include_str!("../README.md")]
// A helper of tests says what went wrong by panicking: that is how a test fails.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

pub mod conformance;
pub mod corpus;
pub mod memory;
pub mod namespace;
pub mod pattern;
pub mod peer;

mod allocation;
mod clock;
mod control;
mod events;
mod fault;
mod fork;
mod leak;
mod memory_transport;
mod random;
mod skip;

pub use allocation::CountingAllocator;
pub use clock::Clock;
pub use control::ControlHub;
pub use events::Events;
pub use fault::{Disturbance, Failure, Fault, FaultRates, FaultTransport, Plan};
pub use fork::{IdleChild, assert_in_forked_child};
pub use leak::LeakCheck;
pub use memory_transport::{MemoryHub, MemoryTransport};
pub use random::Random;
pub use skip::skip;
