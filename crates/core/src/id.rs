//! The numbers by which things are known.

use std::fmt;

use serde::{Deserialize, Serialize};

macro_rules! id {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
        #[serde(transparent)]
        pub struct $name(pub u64);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{}", self.0)
            }
        }
    };
}

id! {
    /// A registered region, unique within its engine's incarnation and never used twice.
    RegionId
}
id! {
    /// A segment that was opened: a peer, as its engine numbers it. Zero is the engine itself.
    SegmentId
}
id! {
    /// A path of a transport, unique within that transport and never used twice.
    PathId
}
id! {
    /// One life of an engine: drawn at random when it starts, so that a restart under the same name shows.
    Incarnation
}

impl SegmentId {
    /// The engine's own segment.
    pub const LOCAL: Self = Self(0);
}

/// What proves that a peer may touch memory: which grant it is, and a secret that only its holders know.
///
/// The handle holds a table index and the index's generation, so a token of a revoked grant never fits
/// the grant that took its place.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct GrantToken {
    /// Which grant: index in the lower half, generation in the upper.
    pub handle: u64,
    /// Drawn at random when the grant was made.
    pub secret: u64,
}

impl GrantToken {
    /// Bytes of a token on the wire.
    pub const WIRE_BYTES: usize = 16;

    /// The token as it goes over the wire: handle and secret, little-endian.
    pub fn to_wire(self) -> [u8; Self::WIRE_BYTES] {
        let mut bytes = [0; Self::WIRE_BYTES];
        bytes[..8].copy_from_slice(&self.handle.to_le_bytes());
        bytes[8..].copy_from_slice(&self.secret.to_le_bytes());
        bytes
    }

    /// The token in these bytes of the wire.
    pub const fn from_wire(bytes: [u8; Self::WIRE_BYTES]) -> Self {
        // Both halves of a little-endian pair at once.
        let both = u128::from_le_bytes(bytes);
        Self { handle: both as u64, secret: (both >> 64) as u64 }
    }
}

impl fmt::Debug for GrantToken {
    /// The secret stays secret, in logs too.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "GrantToken({:#x})", self.handle)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_survives_the_wire_and_hides_its_secret_in_logs() {
        let token = GrantToken { handle: 0x0102_0304_0506_0708, secret: 0xdead_beef };
        assert_eq!(GrantToken::from_wire(token.to_wire()), token);
        assert_eq!(token.to_wire()[0], 8);
        assert!(!format!("{token:?}").contains("dead"));
    }
}
