//! How two sides find out what they can speak with each other.
//!
//! Every Posthorse protocol (handshake, data connection, ZMQ request, Unix rendezvous) begins with a
//! [`Hello`]. Both sides compute the same [`Agreement`] from the two hellos, or the same refusal.

use serde::{Deserialize, Serialize};

use crate::error::{Error, ErrorKind, Result};

/// The protocol versions this release speaks.
pub const VERSIONS: Versions = Versions { min: 1, max: 1 };

/// A range of protocol versions, both ends included.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Versions {
    /// The oldest version spoken.
    pub min: u16,
    /// The newest version spoken.
    pub max: u16,
}

/// Optional abilities, a bit each; unknown bits are ignored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Features(pub u64);

impl Features {
    /// None.
    pub const NONE: Self = Self(0);

    /// Whether every feature of `wanted` is here.
    pub const fn contains(self, wanted: Self) -> bool {
        self.0 & wanted.0 == wanted.0
    }

    /// The features both have.
    #[must_use]
    pub const fn common(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }
}

/// What one side says of itself before anything else.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hello {
    /// The versions it speaks.
    pub versions: Versions,
    /// The features it offers.
    #[serde(default)]
    pub features: Features,
    /// What the application wants both sides to agree on, such as a hash of model and layout. Compared only
    /// when both sides have one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fingerprint: Option<String>,
    /// Room for a proof that the speaker knows a shared key; this release sends and checks none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub proof: Vec<u8>,
}

/// What two sides speak with each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Agreement {
    /// The newest version that both speak.
    pub version: u16,
    /// The features that both offer.
    pub features: Features,
}

impl Hello {
    /// The hello of this release with these features and fingerprint.
    pub const fn new(features: Features, fingerprint: Option<String>) -> Self {
        Self { versions: VERSIONS, features, fingerprint, proof: Vec::new() }
    }

    /// What both sides can speak. Either side computes the same.
    ///
    /// # Errors
    /// `VersionMismatch` or `FingerprintMismatch`, naming both values; not whose they are, since either side may relay the
    /// refusal to the other.
    pub fn agree(&self, other: &Self) -> Result<Agreement> {
        let (ours, theirs) = (self.versions, other.versions);
        let version = ours.max.min(theirs.max);
        if version < ours.min.max(theirs.min) || theirs.min > theirs.max {
            return Err(Error::new(
                ErrorKind::VersionMismatch,
                format!(
                    "one side speaks protocol versions {} to {}, the other {} to {}",
                    ours.min, ours.max, theirs.min, theirs.max
                ),
            ));
        }
        if let (Some(ours), Some(theirs)) = (&self.fingerprint, &other.fingerprint)
            && ours != theirs
        {
            return Err(Error::new(
                ErrorKind::FingerprintMismatch,
                format!("one side has the application fingerprint {ours:?}, the other {theirs:?}"),
            ));
        }
        Ok(Agreement { version, features: self.features.common(other.features) })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn hello(min: u16, max: u16, features: u64, fingerprint: Option<&str>) -> Hello {
        Hello {
            versions: Versions { min, max },
            features: Features(features),
            fingerprint: fingerprint.map(str::to_owned),
            proof: Vec::new(),
        }
    }

    #[test]
    fn the_newest_common_version_and_the_common_features_are_agreed_on() {
        let agreement = hello(1, 3, 0b110, None).agree(&hello(2, 5, 0b011, Some("x"))).unwrap();
        assert_eq!(agreement, Agreement { version: 3, features: Features(0b010) });
    }

    #[test]
    fn a_refusal_names_the_difference() {
        let error = hello(1, 2, 0, None).agree(&hello(3, 4, 0, None)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::VersionMismatch);
        assert!(error.to_string().contains("1 to 2") && error.to_string().contains("3 to 4"), "{error}");
        let error = hello(1, 1, 0, Some("a")).agree(&hello(1, 1, 0, Some("b"))).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::FingerprintMismatch);
        assert!(error.to_string().contains("\"a\"") && error.to_string().contains("\"b\""), "{error}");
    }

    #[test]
    fn a_refusal_reads_right_at_either_end() {
        for (ours, theirs) in [
            (hello(1, 2, 0, None), hello(3, 4, 0, None)),
            (hello(1, 1, 0, Some("a")), hello(1, 1, 0, Some("b"))),
        ] {
            let relayed = ours.agree(&theirs).unwrap_err();
            for word in ["our", "we ", "peer"] {
                assert!(!relayed.message().contains(word), "{word} in {relayed}");
            }
        }
    }

    #[test]
    fn fields_of_later_releases_are_ignored() {
        let text = r#"{"versions":{"min":1,"max":9},"later":[1,2]}"#;
        let hello: Hello = serde_json::from_str(text).unwrap();
        assert_eq!(hello.versions.max, 9);
        assert_eq!(Hello::new(Features::NONE, None).agree(&hello).unwrap().version, 1);
    }

    proptest! {
        #[test]
        fn both_sides_agree_on_the_same(a: (u16, u16, u64), b: (u16, u16, u64)) {
            let ours = hello(a.0.min(a.1), a.0.max(a.1), a.2, None);
            let theirs = hello(b.0.min(b.1), b.0.max(b.1), b.2, None);
            prop_assert_eq!(ours.agree(&theirs).ok(), theirs.agree(&ours).ok());
        }
    }
}
