#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]

pub mod config;
pub mod control;
pub mod key;
pub mod message;
pub mod offer;
pub mod payload;
pub mod pipeline;
pub mod port;
pub mod stream;
pub mod topology;

pub use key::Edge;
