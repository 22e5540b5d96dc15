//! The pool's registration, which is the one thing in this crate that Rust cannot check.

use posthorse_buffer::Pool;
use posthorse_core::{Access, Result};
use posthorse_engine::{RegisteredMemory, TransferEngine};

/// Registers the pool's memory for transfers of this connector; peers get grants of single blocks.
///
/// # Errors
/// As [`TransferEngine::register`].
pub(super) fn register(engine: &TransferEngine, pool: &Pool) -> Result<RegisteredMemory> {
    // SAFETY: the handle stays inside of the connector, and ranges can be made from nothing else. Bytes go only to slots
    // that are being received into, whose buffer is handed out when the transfer has ended, and come only from frozen
    // buffers, which the table of offers holds until the transfer has ended. The same holds for grants.
    engine.register(unsafe { pool.region() }, Access::None)
}
