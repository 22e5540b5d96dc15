//! The transport from outside: over loopback, within one process and between two.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod breaking;
mod forked;
mod grants;
mod hostile;
mod moving;
mod peers;
mod support;
