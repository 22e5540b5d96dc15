//! What the control plane allows its peers.

use std::time::Duration;

use posthorse_core::{Error, Result};

use crate::message::MAX_MESSAGE_BYTES;

/// Bounds and times of the control plane.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ControlLimits {
    /// The longest message read from a peer, in bytes.
    pub max_message_bytes: usize,
    /// How many bytes of messages that are not complete a listener holds of all its peers together, and at least one
    /// message's. Who sends more of a long one meanwhile loses its connection.
    pub max_partial_bytes: usize,
    /// The most connections that a listener serves, and at most one for every four descriptors that the process may have.
    /// For a further one, the oldest that has never asked anything makes room, else the one that has been idle longest,
    /// past the liveness time; without any, it is refused with `LimitReached`.
    pub max_connections: usize,
    /// The most connections that a listener keeps in their handshake; a further one ends the oldest.
    pub max_handshakes: usize,
    /// The most requests of one connection that may be unanswered; further ones are refused.
    pub max_outstanding: usize,
    /// The most connections that a dialer has to one address, unless it was made for more; further exchanges wait.
    pub max_connections_per_address: usize,
    /// How long a connection may take to be made, handshake included.
    pub connect_timeout: Duration,
    /// How long a peer may take to read what it is sent, and a listener's to send the rest of a message that it has begun.
    pub send_timeout: Duration,
    /// How long a listener keeps a silent connection: without requests, or of a peer that cannot be asked whether it is
    /// there.
    pub idle_timeout: Duration,
    /// How long a dialer keeps a connection without requests: shorter than any listener's time.
    pub cache_timeout: Duration,
    /// After which silence of a peer that is waited for it counts as gone.
    pub liveness: Duration,
}

impl Default for ControlLimits {
    fn default() -> Self {
        Self {
            max_message_bytes: MAX_MESSAGE_BYTES,
            max_partial_bytes: 64 << 20,
            max_connections: 4096,
            max_handshakes: 1024,
            max_outstanding: 64,
            max_connections_per_address: 64,
            connect_timeout: Duration::from_secs(2),
            send_timeout: Duration::from_secs(3),
            idle_timeout: Duration::from_secs(600),
            cache_timeout: Duration::from_secs(30),
            liveness: Duration::from_secs(3),
        }
    }
}

impl ControlLimits {
    pub(super) fn check(&self) -> Result<()> {
        let counts = [
            ("max_message_bytes", self.max_message_bytes),
            ("max_partial_bytes", self.max_partial_bytes),
            ("max_connections", self.max_connections),
            ("max_handshakes", self.max_handshakes),
            ("max_outstanding", self.max_outstanding),
            ("max_connections_per_address", self.max_connections_per_address),
        ];
        if let Some((name, _)) = counts.into_iter().find(|(_, count)| *count == 0) {
            return Err(Error::invalid_config(name, 0, "at least 1"));
        }
        let times = [
            ("connect_timeout", self.connect_timeout),
            ("send_timeout", self.send_timeout),
            ("idle_timeout", self.idle_timeout),
            ("cache_timeout", self.cache_timeout),
            ("liveness", self.liveness),
        ];
        // Times are added to the clock, which must not overflow.
        const LONGEST: Duration = Duration::from_secs(100 * 365 * 86400);
        if let Some((name, time)) = times.into_iter().find(|(_, time)| time.is_zero() || *time > LONGEST) {
            return Err(Error::invalid_config(
                name,
                format_args!("{time:?}"),
                "above zero, at most 100 years",
            ));
        }
        Ok(())
    }
}
