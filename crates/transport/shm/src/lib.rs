#![doc = include_str!("../README.md")]

// Under the model checker only what synchronises is built, with its atomics.
#[cfg(not(loom))]
mod client;
#[cfg(not(loom))]
mod config;
#[cfg(not(loom))]
mod copiers;
#[cfg(not(loom))]
mod copy;
#[cfg(not(loom))]
mod events;
#[cfg(all(not(loom), any(test, feature = "fuzzing")))]
#[doc(hidden)]
pub mod fuzzing;
#[cfg(not(loom))]
mod jobs;
#[cfg(not(loom))]
mod lease;
#[cfg(not(loom))]
mod link;
#[cfg(not(loom))]
mod owner;
mod parts;
#[cfg_attr(loom, allow(dead_code))]
mod protocol;
#[cfg(not(loom))]
mod remote;
#[cfg(not(loom))]
mod rendezvous;
#[cfg(not(loom))]
mod slots;
#[cfg(not(loom))]
mod sys;
#[cfg(not(loom))]
mod table;
#[cfg(not(loom))]
mod transport;
#[cfg(not(loom))]
mod words;

#[cfg(not(loom))]
pub use config::{HOST_ID_VARIABLE, ShmConfig};
#[cfg(not(loom))]
pub use transport::ShmTransport;
