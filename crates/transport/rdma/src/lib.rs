#![doc = include_str!("../README.md")]

#[cfg_attr(not(test), expect(dead_code, reason = "what chooses comes with the endpoints"))]
mod gid;
#[cfg(feature = "rdma")]
mod system;
pub mod verbs;

pub use gid::{Gid, GidKind};
#[cfg(feature = "rdma")]
pub use system::SystemVerbs;
