#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]

mod skip;

pub use skip::skip;
