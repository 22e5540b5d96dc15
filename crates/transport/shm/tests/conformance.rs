//! The Transport contract, as the testkit checks it, over each kind of memory and way of copying.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::sync::Arc;

use posthorse_memory::MemoryOptions;
use posthorse_shm::{ShmConfig, ShmTransport};
use posthorse_testkit::conformance::Subject;

fn shm(config: ShmConfig) -> Subject {
    Subject::new(move || Arc::new(ShmTransport::new(config.clone()).unwrap()))
}

mod mapped {
    use super::*;

    posthorse_testkit::conformance!({
        shm(ShmConfig::default())
            .regions(|len| Arc::new(MemoryOptions::new(len).shared(true).allocate().unwrap()))
    });
}

/// Everything goes through the queue, in small pieces.
mod queued {
    use super::*;

    posthorse_testkit::conformance!({
        let config =
            ShmConfig { inline_bytes: 0, piece_bytes: 64 << 10, queue_slices: 16, ..ShmConfig::default() };
        shm(config).regions(|len| Arc::new(MemoryOptions::new(len).shared(true).allocate().unwrap()))
    });
}

/// Heap memory is reached by `process_vm_readv/writev`.
mod unmapped {
    use super::*;

    posthorse_testkit::conformance!(shm(ShmConfig::default()));
}
