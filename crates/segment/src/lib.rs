#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]

mod address;
pub mod descriptor;
mod grants;
mod registry;
mod timestamp;

pub use address::SegmentAddress;
pub use descriptor::{DescriptorLimits, TcpAttributes};
pub use registry::{Registry, RegistryLimits, RegistryStats};
