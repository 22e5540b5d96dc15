//! A peer's memory, read where it is.

use std::sync::Arc;

use posthorse_core::{Error, ErrorKind, Region, Result};

/// A peer's memory under a grant for reading, lent until this is dropped: until then the peer cannot take it back.
#[derive(Debug)]
pub struct LeasedMemory {
    region: Arc<dyn Region>,
}

impl LeasedMemory {
    /// Takes charge of what a transport lent.
    ///
    /// # Errors
    /// `Unsupported` when it is not host memory.
    pub(crate) fn new(region: Arc<dyn Region>) -> Result<Self> {
        match region.view().host() {
            Some(_) => Ok(Self { region }),
            None => Err(Error::new(ErrorKind::Unsupported, "only host memory can be read in place")),
        }
    }

    /// The bytes.
    ///
    /// Whoever granted them promises not to write to them while they are lent. Peers on this host that can lend memory
    /// are processes of the same user, which could as well write to any other memory of this process.
    ///
    /// # Errors
    /// `Forked` in a child process.
    pub fn bytes(&self) -> Result<&[u8]> {
        if !self.region.is_here() {
            return Err(Error::forked());
        }
        Ok(match self.region.view().host() {
            // SAFETY: the region is alive and mapped while it is held, in this process, as just checked, and is lent
            // for reading: its owner does not write to it until the lease has ended, which borrows outlive not.
            Some(view) => unsafe { view.bytes() },
            None => &[],
        })
    }
}
