//! The registry of local memory and grants.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod cases;
mod model;
mod regions;
