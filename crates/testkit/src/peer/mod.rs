//! Other processes, to talk to, stop and kill.
//!
//! A peer is the running test binary once more, at one test. That test asks [`child`] whether it is a peer:
//!
//! ```no_run
//! use std::time::Duration;
//! use posthorse_core::Deadline;
//! use posthorse_testkit::peer;
//!
//! # fn main() {}
//! // #[test]
//! fn a_peer_answers() {
//!     if let Some(peer) = peer::child() {
//!         let number: u32 = peer.receive(Deadline::NEVER).unwrap();
//!         return peer.send(&(number + 1)).unwrap();
//!     }
//!     let peer = peer::spawn("a_peer_answers", &()).unwrap();
//!     peer.send(&41).unwrap();
//!     assert_eq!(peer.receive::<u32>(Deadline::after(Duration::from_secs(10))).unwrap(), 42);
//! }
//! ```

mod channel;
mod process;
mod sys;

pub use channel::Channel;
pub use process::{Child, Peer, Spawn, child, isolated, spawn};
