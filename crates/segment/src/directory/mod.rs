//! Where segment descriptors are found by name.

mod memory;
mod p2p;

use std::fmt;

use posthorse_core::{Deadline, Result, SegmentDesc};

pub use memory::MemoryDirectory;
pub use p2p::P2pDirectory;

/// Finds segments by name. Its methods wait on the calling thread, which must not be one that drives an
/// asynchronous runtime.
pub trait Directory: fmt::Debug + Send + Sync {
    /// Makes a descriptor known under its name, in place of an earlier one.
    ///
    /// # Errors
    /// `InvalidArgument` for a descriptor that cannot be published here; whatever keeps the directory from being
    /// reached; `DeadlineExceeded`.
    fn publish(&self, desc: &SegmentDesc, deadline: Deadline) -> Result<()>;

    /// Makes a name unknown. Nothing happens when it was not known.
    ///
    /// # Errors
    /// Whatever keeps the directory from being reached; `DeadlineExceeded`.
    fn withdraw(&self, name: &str, deadline: Deadline) -> Result<()>;

    /// The descriptor that is known under a name now. Asks; caches nothing.
    ///
    /// # Errors
    /// `NotFound`; `PeerUnreachable`, `PeerGone` or `PeerRefused` where the peer itself is asked; `Malformed`;
    /// `VersionMismatch` and `FingerprintMismatch`; `DeadlineExceeded`.
    fn lookup(&self, name: &str, deadline: Deadline) -> Result<SegmentDesc>;
}
