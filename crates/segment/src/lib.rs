#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]

mod grants;
mod registry;

pub use registry::{Registry, RegistryLimits, RegistryStats};
