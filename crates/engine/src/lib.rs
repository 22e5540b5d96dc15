#![doc = include_str!("../README.md")]

// Under the model checker only what synchronises is built, with its atomics and locks.
#[cfg(not(loom))]
mod batch;
#[cfg(not(loom))]
mod builder;
#[cfg(not(loom))]
mod config;
#[cfg(not(loom))]
mod connect;
#[cfg(not(loom))]
mod dispatch;
#[cfg(not(loom))]
#[cfg(not(loom))]
mod engine;
#[cfg(not(loom))]
pub mod environment;
#[cfg(not(loom))]
mod events;
#[cfg(not(loom))]
mod explain;
#[cfg(not(loom))]
mod held;
#[cfg(not(loom))]
mod inbox;
#[cfg(not(loom))]
mod lease;
#[cfg(not(loom))]
mod local;
#[cfg(not(loom))]
mod memory;
#[cfg(not(loom))]
mod path;
#[cfg(not(loom))]
mod peer;
#[cfg(not(loom))]
mod peers;
#[cfg(not(loom))]
mod plan;
#[cfg(not(loom))]
mod rails;
#[cfg(not(loom))]
mod regions;
#[cfg(not(loom))]
mod retry;
#[cfg(not(loom))]
mod runtime;
#[cfg(not(loom))]
mod select;
#[cfg_attr(loom, allow(dead_code))]
mod signal;
#[cfg(not(loom))]
mod slicing;
#[cfg(not(loom))]
mod submission;
#[cfg(not(loom))]
mod table;
#[cfg(not(loom))]
mod ticker;
#[cfg(not(loom))]
mod transports;

#[cfg(not(loom))]
pub use batch::{Batch, BatchStatus, Done, SubmitOptions, TaskId};
#[cfg(not(loom))]
pub use builder::EngineBuilder;
#[cfg(not(loom))]
pub use config::{EngineConfig, MAX_FINGERPRINT_BYTES, Precedence, TransportChoice, is_host};
#[cfg(not(loom))]
pub use engine::TransferEngine;
#[cfg(not(loom))]
pub use explain::{Explanation, PathReport, TransportReport};
#[cfg(not(loom))]
pub use held::HeldGrant;
#[cfg(not(loom))]
pub use inbox::Notification;
#[cfg(not(loom))]
pub use lease::LeasedMemory;
#[cfg(not(loom))]
pub use memory::{Grant, RegisteredMemory};
#[cfg(not(loom))]
pub use peer::Segment;
#[cfg(not(loom))]
pub use plan::Plan;
#[cfg(not(loom))]
#[doc(no_inline)]
pub use posthorse_segment::descriptors;
