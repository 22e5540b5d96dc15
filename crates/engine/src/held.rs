//! Grants of peers that are held here.

use std::sync::Arc;

use posthorse_core::{GrantDesc, GrantToken};

use crate::peer::{Peer, Segment};

/// What a peer published with a grant: requests that name the grant's token go also by transports whose devices check keys,
/// as RDMA's do, when they are submitted while this is held. Without it they go by the others.
#[derive(Debug)]
#[must_use = "the grant is held until this is dropped"]
pub struct HeldGrant {
    peer: Arc<Peer>,
    token: GrantToken,
}

impl HeldGrant {
    pub(crate) fn new(segment: &Segment, grant: &GrantDesc) -> Self {
        segment.peer.hold(grant.token, &grant.attributes);
        Self { peer: Arc::clone(&segment.peer), token: grant.token }
    }

    /// The token, for requests.
    pub const fn token(&self) -> GrantToken {
        self.token
    }
}

impl Drop for HeldGrant {
    fn drop(&mut self) {
        self.peer.let_go(self.token);
    }
}
