//! What the two sides of a connection say of themselves, inside the opening of `wire.rs`.

use posthorse_core::{Error, ErrorKind, Hello, Incarnation, Result};
use serde::{Deserialize, Serialize};

use crate::wire;

/// The longest name of a segment that is accepted.
const MAX_NAME: usize = 1024;

/// Which lane of which path a connection carries. A later connection of the same lane ends the earlier one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(crate) struct LaneKey {
    /// Drawn at random by the initiator for each path.
    pub(crate) session: [u64; 2],
    /// The lane's number within the path.
    pub(crate) lane: u16,
}

/// What a lane is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum LaneClass {
    /// Small and urgent slices, and notifications.
    Express,
    /// The rest.
    Bulk,
}

/// The initiator's opening.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Call {
    pub(crate) hello: Hello,
    pub(crate) name: String,
    #[serde(flatten)]
    pub(crate) key: LaneKey,
    pub(crate) class: LaneClass,
    /// After how long the initiator takes the owner for gone, in milliseconds: it speaks more often than that.
    pub(crate) liveness_ms: u64,
    /// Whether the initiator would say what it has taken from the connection.
    #[serde(default)]
    pub(crate) tells_taken: bool,
}

/// The owner's opening.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Answer {
    /// The lane is open, and an older connection of it has ended.
    Welcome {
        hello: Hello,
        incarnation: Incarnation,
        /// Whether the lane was open before in this life of the owner, so that it knows what it has delivered.
        known: bool,
        /// Whether both ends say what they have taken from the connection: the initiator would, and the owner does.
        #[serde(default)]
        tells_taken: bool,
    },
    /// It is not, and why.
    Refused { code: u16, message: String },
}

impl Call {
    /// # Errors
    /// `TooLarge` when the name or fingerprint is too long to be sent.
    pub(crate) fn encode(&self) -> Result<Vec<u8>> {
        encode(self)
    }

    /// The call in the body of an opening.
    ///
    /// # Errors
    /// `Malformed`, with what is wrong.
    pub(crate) fn decode(body: &[u8]) -> Result<Self> {
        let call: Self = decode(body)?;
        if call.name.len() > MAX_NAME || call.name.chars().any(char::is_control) {
            let len = call.name.len();
            return Err(Error::new(
                ErrorKind::Malformed,
                format!(
                    "the caller's name has {len} bytes; accepted: up to {MAX_NAME}, without control characters"
                ),
            ));
        }
        Ok(call)
    }
}

impl Answer {
    pub(crate) fn refusal(error: &Error) -> Self {
        Self::Refused { code: error.code(), message: shorten(error.message(), wire::MAX_MESSAGE).to_owned() }
    }

    /// # Errors
    /// `TooLarge` when the fingerprint is too long to be sent.
    pub(crate) fn encode(&self) -> Result<Vec<u8>> {
        encode(self)
    }

    /// The answer in the body of an opening.
    ///
    /// # Errors
    /// `Malformed`, with what is wrong.
    pub(crate) fn decode(body: &[u8]) -> Result<Self> {
        decode(body)
    }
}

/// An error that the peer sent as code and message. What it says is theirs, so it is shortened and cleaned.
pub(crate) fn told_by_peer(code: u16, message: &str, otherwise: ErrorKind) -> Error {
    let kind = ErrorKind::from_code(code).unwrap_or(otherwise);
    let message: String =
        shorten(message, wire::MAX_MESSAGE).chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
    Error::new(kind, format!("the peer says: {message}"))
}

/// The longest start of `text` that has at most `max` bytes.
pub(crate) fn shorten(text: &str, max: usize) -> &str {
    &text[..text.floor_char_boundary(max)]
}

fn encode(value: &impl Serialize) -> Result<Vec<u8>> {
    let body = serde_json::to_vec(value)
        .map_err(|error| Error::new(ErrorKind::Internal, format!("writing an opening: {error}")))?;
    wire::opening(&body)
}

fn decode<T: for<'de> Deserialize<'de>>(body: &[u8]) -> Result<T> {
    serde_json::from_slice(body)
        .map_err(|error| Error::new(ErrorKind::Malformed, format!("reading an opening: {error}")))
}

#[cfg(test)]
mod tests {
    use posthorse_core::Features;
    use proptest::prelude::*;

    use super::*;

    fn call(name: &str) -> Call {
        Call {
            hello: Hello::new(Features::NONE, None),
            name: name.to_owned(),
            key: LaneKey { session: [1, u64::MAX], lane: 2 },
            class: LaneClass::Bulk,
            liveness_ms: 3000,
            tells_taken: true,
        }
    }

    #[test]
    fn both_openings_round_trip() {
        let bytes = call("a:1").encode().unwrap();
        assert_eq!(wire::opening_len(&bytes).unwrap(), Some(bytes.len()));
        assert_eq!(Call::decode(&bytes[wire::OPENING_BYTES..]).unwrap(), call("a:1"));
        for answer in [
            Answer::Welcome {
                hello: Hello::new(Features(3), Some("x".into())),
                incarnation: Incarnation(u64::MAX),
                known: true,
                tells_taken: true,
            },
            Answer::refusal(&Error::new(ErrorKind::VersionMismatch, "no")),
        ] {
            let bytes = answer.encode().unwrap();
            assert_eq!(Answer::decode(&bytes[wire::OPENING_BYTES..]).unwrap(), answer);
        }
    }

    #[test]
    fn a_name_is_bounded_and_clean() {
        for name in ["x".repeat(MAX_NAME + 1), "a\nb".to_owned()] {
            let bytes = call(&name).encode().unwrap();
            assert_eq!(Call::decode(&bytes[wire::OPENING_BYTES..]).unwrap_err().kind(), ErrorKind::Malformed);
        }
    }

    #[test]
    fn what_a_peer_says_is_shortened_and_cleaned() {
        let error = told_by_peer(9999, &format!("a\x1b[2J{}", "é".repeat(600)), ErrorKind::PeerRefused);
        assert_eq!(error.kind(), ErrorKind::PeerRefused);
        assert!(error.message().len() < 540 && !error.message().contains('\x1b'), "{error}");
    }

    proptest! {
        #[test]
        fn arbitrary_bodies_never_panic(body: Vec<u8>) {
            let _ = Call::decode(&body);
            let _ = Answer::decode(&body);
        }
    }
}
