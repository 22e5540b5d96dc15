//! The Transport contract, as the testkit checks it.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::sync::Arc;

use posthorse_tcp::{TcpConfig, TcpTransport};
use posthorse_testkit::conformance::Subject;

fn tcp(config: TcpConfig) -> Subject {
    let config = TcpConfig { advertise: "127.0.0.1".to_owned(), ..config };
    Subject::new(move || Arc::new(TcpTransport::new(config.clone()).unwrap()))
}

mod usual {
    use super::*;

    posthorse_testkit::conformance!(tcp(TcpConfig::default()));
}

/// As between two hosts.
mod by_copy {
    use super::*;

    posthorse_testkit::conformance!(tcp(TcpConfig { by_reference: false, ..TcpConfig::default() }));
}

/// One lane for everything, on one thread, with short queues and nothing sent by the caller.
mod narrow {
    use super::*;

    posthorse_testkit::conformance!(tcp(TcpConfig {
        bulk_lanes: 1,
        express_lanes: 1,
        threads: 1,
        queue_slots: 16,
        window_slots: 16,
        ..TcpConfig::default()
    }));
}
