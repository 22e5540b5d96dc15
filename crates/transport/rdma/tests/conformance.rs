//! The contract of every transport, kept over software devices.
#![allow(clippy::expect_used)]

use std::sync::Arc;

use posthorse_rdma::software::Fabric;
use posthorse_rdma::{RdmaConfig, RdmaTransport};
use posthorse_testkit::conformance::Subject;

mod one_rail {
    use super::*;

    posthorse_testkit::conformance!(over(&["soft0"], RdmaConfig::default()));
}

/// A transport on a host of its own, each time that one is made, all on one fabric.
fn over(devices: &'static [&'static str], config: RdmaConfig) -> Subject {
    let fabric = Fabric::new();
    Subject::new(move || {
        let transport = RdmaTransport::with_verbs(config.clone(), fabric.host(devices));
        Arc::new(transport.expect("a configuration that is accepted"))
    })
}
