#![doc = include_str!("../README.md")]

mod address;
mod checksum;
mod config;
mod flow;
#[cfg(any(test, feature = "fuzzing"))]
#[doc(hidden)]
pub mod fuzzing;
mod greeting;
mod hello;
mod intake;
mod lane;
mod lane_io;
mod lane_state;
mod outbox;
mod path;
mod placement;
mod reactor;
mod serve;
mod slots;
mod stage;
mod sys;
mod transport;
mod warmth;
mod watched;
mod wire;

pub use config::TcpConfig;
pub use transport::TcpTransport;
