//! The suite against the transport that shows how it is done.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use posthorse_testkit::MemoryHub;
use posthorse_testkit::conformance::Subject;

posthorse_testkit::conformance!({
    let hub = MemoryHub::new();
    Subject::new(move || hub.transport())
});
