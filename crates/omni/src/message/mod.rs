//! The control messages of the connector.
//!
//! Query, pull and their replies are those of vLLM-Omni's MooncakeTransferEngineConnector, byte for byte:
//! msgpack maps, the query behind an ASCII prefix. What Posthorse peers say beyond that lies under one more
//! map key, `ph`, which foreign peers ignore; its absence is how a foreign peer is recognised. The requests
//! that only Posthorse knows stand behind a prefix of their own, which a foreign sender answers
//! `trans_error`.
//!
//! Decoding takes no more memory than a small multiple of the message, whose size the socket has capped,
//! and refuses deep nesting; it never panics, whatever the bytes.
//!
//! Whoever reaches the control port is heard, so what may be kept for a peer is bounded much closer than what is read
//! of it: each name, and each query and pull as a whole. Reasons and advice are cut for whoever reads them, and kept
//! only so.

mod reply;
mod request;

pub use reply::{Answer, Offered, PullReply, QueryReply, Refusal, Reply, StreamSent};
pub use request::{
    Cancel, Close, Dialect, Follower, Outcome, Pull, PullExtra, Query, QueryExtra, Renew, Request,
    StreamAbort, StreamCredit, Want,
};

use posthorse_core::{Error, ErrorKind, Hello, Result};
use serde::de::{DeserializeOwned, IgnoredAny};
use serde::{Deserialize, Serialize};

/// The largest control message that is written or read, in bytes.
pub const MAX_MESSAGE_BYTES: usize = 1 << 20;

/// The largest query or pull, in bytes: a producer may keep it for as long as the get lasts.
pub const MAX_KEPT_BYTES: usize = 64 << 10;

/// The longest name, in bytes.
pub const MAX_NAME_BYTES: usize = 1024;

/// How deep a message may nest: real ones need less than half of it.
const MAX_DEPTH: usize = 32;

fn encode_after(prefix: &[u8], message: &impl Serialize) -> Result<Vec<u8>> {
    let mut bytes = prefix.to_vec();
    rmp_serde::encode::write_named(&mut bytes, message)
        .map_err(|e| Error::new(ErrorKind::Internal, format!("encoding a control message: {e}")))?;
    within(bytes.len(), MAX_MESSAGE_BYTES)?;
    Ok(bytes)
}

fn decode<T: DeserializeOwned>(what: &str, bytes: &[u8]) -> Result<T> {
    within(bytes.len(), MAX_MESSAGE_BYTES)?;
    from_msgpack(bytes, MAX_DEPTH).map_err(|why| Error::new(ErrorKind::Malformed, format!("a {what}: {why}")))
}

/// The value that is all of `bytes`, or what is wrong with it.
pub(crate) fn from_msgpack<T: DeserializeOwned>(bytes: &[u8], max_depth: usize) -> Result<T, String> {
    use rmp_serde::decode::Error::InvalidMarkerRead;
    let mut decoder = rmp_serde::Deserializer::from_read_ref(bytes);
    decoder.set_max_depth(max_depth);
    let value = T::deserialize(&mut decoder).map_err(|e| printable(&e.to_string()))?;
    match IgnoredAny::deserialize(&mut decoder) {
        Err(InvalidMarkerRead(error)) if error.kind() == std::io::ErrorKind::UnexpectedEof => Ok(value),
        _ => Err("bytes follow its end".to_owned()),
    }
}

fn within(len: usize, most: usize) -> Result<()> {
    if len <= most {
        return Ok(());
    }
    Err(Error::new(ErrorKind::TooLarge, format!("a control message of {len} bytes; accepted: {most} bytes")))
}

/// Refuses a name that is not fit to be kept or shown.
fn check_name(what: &str, name: &str) -> Result<()> {
    if name.len() <= MAX_NAME_BYTES && !name.chars().any(char::is_control) {
        return Ok(());
    }
    let len = name.len();
    let accepted = format!("up to {MAX_NAME_BYTES}, without control characters");
    Err(Error::new(ErrorKind::Malformed, format!("{what} has {len} bytes; accepted: {accepted}")))
}

fn check_hello(hello: &Hello) -> Result<()> {
    let lengths = [
        ("the fingerprint", hello.fingerprint.as_ref().map_or(0, String::len)),
        ("the proof", hello.proof.len()),
    ];
    match lengths.into_iter().find(|(_, len)| *len > MAX_NAME_BYTES) {
        None => Ok(()),
        Some((what, len)) => Err(Error::new(
            ErrorKind::Malformed,
            format!("{what} has {len} bytes; accepted: up to {MAX_NAME_BYTES}"),
        )),
    }
}

/// A peer's text, made fit for logs: at most 512 characters, none of them a control character.
pub(crate) fn printable(text: &str) -> String {
    const MOST: usize = 512;
    let mut out: String =
        text.chars().take(MOST).map(|c| if c.is_control() { '\u{fffd}' } else { c }).collect();
    if text.chars().nth(MOST).is_some() {
        out.push('…');
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_peers_text_is_bounded_and_printable() {
        assert_eq!(printable("a\n\u{1b}[31mb"), "a\u{fffd}\u{fffd}[31mb");
        assert_eq!(printable(&"x".repeat(5000)).chars().count(), 513);
    }
}
