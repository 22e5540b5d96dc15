#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]

mod address;
pub mod descriptor;
pub mod frame;
mod grants;
pub mod handshake;
mod registry;
mod timestamp;

pub use address::SegmentAddress;
pub use descriptor::{DescriptorLimits, TcpAttributes};
pub use handshake::{
    Handshake, HandshakeClient, HandshakeConfig, HandshakeEvents, HandshakeListener, Identity, P2pControl,
};
pub use registry::{Registry, RegistryLimits, RegistryStats};
