//! The handshake port: what a peer's descriptor is asked for on, in the framing of Mooncake Transfer Engine, and
//! on which Posthorse peers keep control connections to each other.
//!
//! [`HandshakeListener::bind`] takes the port, which is part of the segment's name in peer-to-peer use;
//! [`HandshakeListener::start`] serves it. Everything runs on a Tokio runtime of the caller's; whoever calls a
//! peer waits on a plain thread.

mod blocking;
mod client;
mod config;
mod control;
mod link;
mod local;
pub(crate) mod message;
mod serve_control;
mod server;
mod stream;

pub use client::HandshakeClient;
pub use config::HandshakeConfig;
pub use control::P2pControl;
pub use local::{HandshakeEvents, Identity};
pub use server::{Handshake, HandshakeListener};
