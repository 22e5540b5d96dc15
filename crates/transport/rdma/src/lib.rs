#![doc = include_str!("../README.md")]

mod config;
mod connection;
mod devices;
mod gid;
mod handshake;
mod notices;
mod pairing;
mod queue;
mod rail;
mod regions;
mod served;
mod shared;
pub mod software;
pub mod sysfs;
#[cfg(feature = "rdma")]
mod system;
pub mod topology;
mod transport;
pub mod verbs;
mod watch;
mod workers;

pub use config::{Pairing, RdmaConfig};
pub use gid::{Gid, GidKind};
#[cfg(feature = "rdma")]
pub use system::SystemVerbs;
pub use transport::RdmaTransport;
