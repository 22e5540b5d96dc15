//! The verbs of real devices: soft-RoCE in the VM of `cargo xtask vm --hosts 2 --rails 2`. Links are cut on rail 1
//! alone, so that tests which run at the same time do not meet.
#![cfg(feature = "rdma")]
#![allow(clippy::unwrap_used, clippy::panic)]

mod failure;
mod pair;
mod transfer;
