//! The contract of every transport, kept over the devices of this host: in a VM that has some, by `cargo xtask vm`.
#![cfg(feature = "rdma")]
#![allow(clippy::unwrap_used)]

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use posthorse_rdma::verbs::Verbs as _;
use posthorse_rdma::{RdmaConfig, RdmaTransport, SystemVerbs};
use posthorse_testkit::conformance::{self, Subject};

/// The devices of this host, and those of the other host that it plays: the first half and the second.
fn hosts() -> Option<[Vec<String>; 2]> {
    let devices = SystemVerbs::new().ok()?.devices().ok()?;
    let (ours, theirs) = devices.split_at(devices.len() / 2);
    (!ours.is_empty()).then(|| [ours.to_vec(), theirs.to_vec()])
}

#[test]
fn the_contract_is_kept() {
    let Some(hosts) = hosts() else {
        return posthorse_testkit::skip("rdma-devices", "this host has no two RDMA devices");
    };
    let made = AtomicUsize::new(0);
    let subject = Subject::new(move || {
        let devices = hosts[made.fetch_add(1, Ordering::Relaxed) % 2].clone();
        let config = RdmaConfig { devices, ..RdmaConfig::default() };
        let verbs = Arc::new(SystemVerbs::new().unwrap());
        Arc::new(RdmaTransport::with_verbs(config, verbs).unwrap())
    });
    conformance::check(&subject.patience(Duration::from_secs(60)));
}
