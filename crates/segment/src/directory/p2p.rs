//! No directory at all: a segment's name says where its handshake is asked.

use std::sync::Arc;

use posthorse_core::{Deadline, Error, Result, SegmentDesc};

use super::Directory;
use crate::handshake::{Handshake, HandshakeClient};

/// Asks each peer itself, at the `host:port` (or `[IPv6 address]:port`) that is its name, and answers peers
/// through this process's own handshake.
#[derive(Debug)]
pub struct P2pDirectory {
    handshake: Arc<Handshake>,
    client: HandshakeClient,
}

impl P2pDirectory {
    /// Publishes and looks up through this handshake.
    pub fn new(handshake: Arc<Handshake>) -> Self {
        let client = handshake.client();
        Self { handshake, client }
    }
}

impl Directory for P2pDirectory {
    fn publish(&self, desc: &SegmentDesc, _deadline: Deadline) -> Result<()> {
        self.handshake.publish(desc)
    }

    fn withdraw(&self, name: &str, _deadline: Deadline) -> Result<()> {
        if name != self.handshake.name() {
            return Err(Error::invalid_argument("name to withdraw", name, self.handshake.name()));
        }
        self.handshake.withdraw();
        Ok(())
    }

    fn lookup(&self, name: &str, deadline: Deadline) -> Result<SegmentDesc> {
        self.client.metadata(name, deadline)
    }
}
