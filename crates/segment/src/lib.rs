#![doc = include_str!("../README.md")]
#![deny(unsafe_code)]

mod address;
pub mod advertise;
mod cache;
pub mod descriptor;
pub mod descriptors;
mod directory;
pub mod frame;
#[cfg(any(test, feature = "fuzzing"))]
#[doc(hidden)]
pub mod fuzzing;
mod grants;
pub mod handshake;
#[expect(unsafe_code, reason = "getifaddrs(3) is a list of pointers")]
mod interfaces;
mod registry;
mod timestamp;

pub use address::SegmentAddress;
pub use cache::{Freshness, OnChange, SegmentCache, SegmentChanged};
pub use descriptor::{DescriptorLimits, TcpAttributes};
pub use directory::{Directory, MemoryDirectory, P2pDirectory};
pub use handshake::{
    Handshake, HandshakeClient, HandshakeConfig, HandshakeEvents, HandshakeListener, Identity, P2pControl,
};
pub use registry::{Registry, RegistryLimits, RegistryStats};
