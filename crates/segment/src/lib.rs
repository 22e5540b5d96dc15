#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]

mod address;
mod cache;
pub mod descriptor;
mod directory;
pub mod frame;
mod grants;
pub mod handshake;
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
