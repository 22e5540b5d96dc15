//! How two processes on one host find each other, and what they say.

pub(crate) mod reactor;
pub(crate) mod server;
pub(crate) mod socket;
pub(crate) mod wire;

use posthorse_core::{Error, ErrorKind, Result};
use serde::{Deserialize, Serialize};

/// What the segment descriptor publishes for this transport.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Published {
    pub(crate) socket: String,
    #[serde(default)]
    pub(crate) host_id: Option<String>,
    /// Shows that who is found at the socket is who published it.
    pub(crate) nonce: String,
}

/// Refuses a peer that is to be kept apart.
pub(crate) fn check_host_ids(ours: Option<&str>, theirs: Option<&str>) -> Result<()> {
    if ours == theirs {
        return Ok(());
    }
    let show = |id: Option<&str>| id.map_or_else(|| "none".to_owned(), |id| format!("{id:?}"));
    Err(Error::new(
        ErrorKind::PeerRefused,
        format!("our host id is {}, the peer's {}: they count as two hosts", show(ours), show(theirs)),
    )
    .with_advice("the key `host_id` and the variable POSTHORSE_HOST_ID have to be the same in both"))
}
