//! The handshake port over loopback: what it serves, what it calls, and what it makes of hostile peers.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod control;
mod exchange;
mod hostile;
mod support;
