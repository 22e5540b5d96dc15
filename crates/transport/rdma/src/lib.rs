#![doc = include_str!("../README.md")]

#[cfg_attr(not(test), expect(dead_code, reason = "what chooses comes with the endpoints"))]
mod gid;
pub mod verbs;

pub use gid::{Gid, GidKind};
