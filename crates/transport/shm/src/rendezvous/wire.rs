//! What is said over a rendezvous socket, packet by packet (`SOCK_SEQPACKET`, unix(7)).
//!
//! A packet is a kind byte and a body. Bodies are JSON, apart from notifications, which carry the
//! application's bytes. File descriptors travel beside `Welcome` (grant table, hazard slots) and `Region` (the
//! region's memfd).

use posthorse_core::{Error, ErrorKind, Hello, Incarnation, RegionId, Result};
use serde::{Deserialize, Serialize};

/// The longest notification, in bytes.
pub(crate) const MAX_NOTIFICATION: usize = 64 << 10;
/// The longest packet, in bytes.
pub(crate) const MAX_PACKET: usize = MAX_NOTIFICATION + 1024;
const MAX_NAME: usize = 1024;
const MAX_MESSAGE: usize = 1024;

const JSON: u8 = b'j';
const NOTIFY: u8 = b'n';

/// What a client says.
#[derive(Debug, PartialEq)]
pub(crate) enum ToOwner {
    Request(Request),
    Notify { token: u64, data: Vec<u8> },
}

/// The requests that are JSON.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Request {
    Hello(ClientHello),
    /// Asks for the memory of a region, to be read or also written.
    Map(MapRequest),
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct ClientHello {
    pub(crate) hello: Hello,
    pub(crate) name: String,
    pub(crate) nonce: String,
    pub(crate) host_id: Option<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(crate) struct MapRequest {
    pub(crate) region: RegionId,
    pub(crate) write: bool,
}

/// What an owner answers.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum ToClient {
    /// With the grant table and the hazard slots.
    Welcome(Welcome),
    Refused(Refusal),
    /// With a memfd if `offset` is given.
    Region(RegionReply),
    RegionRefused {
        request: MapRequest,
        refusal: Refusal,
    },
    /// The region was unregistered: its memory need not be kept mapped.
    Withdrawn {
        region: RegionId,
    },
    /// The notification was taken, or why not.
    Notified {
        token: u64,
        refusal: Option<Refusal>,
    },
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Welcome {
    pub(crate) hello: Hello,
    pub(crate) name: String,
    pub(crate) incarnation: Incarnation,
    /// Entries of the grant table.
    pub(crate) grants: u32,
    /// Where in the owner's memory eight bytes with the value `probe_value` lie, to see whether `process_vm`
    /// works.
    pub(crate) probe_address: u64,
    pub(crate) probe_value: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub(crate) struct RegionReply {
    pub(crate) request: MapRequest,
    /// In the owner's address space.
    pub(crate) address: u64,
    pub(crate) len: u64,
    /// Where in the file the region starts; `None` when it has no file.
    pub(crate) offset: Option<u64>,
}

/// An error as it travels.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Refusal {
    code: u16,
    message: String,
}

impl Refusal {
    pub(crate) fn of(error: &Error) -> Self {
        Self { code: error.code(), message: bounded(error.message(), MAX_MESSAGE) }
    }

    /// The error that it stands for, with what the peer wrote bounded and fit for a log.
    pub(crate) fn into_error(self) -> Error {
        let kind = ErrorKind::from_code(self.code).unwrap_or(ErrorKind::PeerRefused);
        Error::new(kind, format!("the peer answered: {}", printable(&self.message, MAX_MESSAGE)))
    }
}

/// Text of the peer, as long as `max` bytes, without control characters.
pub(crate) fn printable(text: &str, max: usize) -> String {
    bounded(text, max).chars().map(|c| if c.is_control() { '\u{fffd}' } else { c }).collect()
}

fn bounded(text: &str, max: usize) -> String {
    text[..text.floor_char_boundary(max)].to_owned()
}

fn encode(body: &impl Serialize) -> Vec<u8> {
    let mut packet = vec![JSON];
    // These types have no maps with odd keys and no fallible fields: they cannot fail to be written, and an
    // empty packet is refused by whoever reads it.
    let _ = serde_json::to_writer(&mut packet, body);
    packet
}

fn decode<'a, T: Deserialize<'a>>(body: &'a [u8]) -> Result<T> {
    serde_json::from_slice(body)
        .map_err(|error| malformed(format!("a rendezvous packet of {} bytes: {error}", body.len())))
}

fn malformed(message: String) -> Error {
    Error::new(ErrorKind::Malformed, message)
}

impl Request {
    pub(crate) fn encode(&self) -> Vec<u8> {
        encode(self)
    }
}

impl ToClient {
    pub(crate) fn encode(&self) -> Vec<u8> {
        encode(self)
    }

    pub(crate) fn decode(packet: &[u8]) -> Result<Self> {
        match packet.split_first() {
            Some((&JSON, body)) => decode(body),
            _ => Err(unknown_kind(packet)),
        }
    }
}

/// A notification as it travels.
pub(crate) fn encode_notify(token: u64, data: &[u8]) -> Vec<u8> {
    let mut packet = Vec::with_capacity(9 + data.len());
    packet.push(NOTIFY);
    packet.extend_from_slice(&token.to_le_bytes());
    packet.extend_from_slice(data);
    packet
}

impl ToOwner {
    pub(crate) fn decode(packet: &[u8]) -> Result<Self> {
        match packet.split_first() {
            Some((&JSON, body)) => {
                let request = decode(body)?;
                if let Request::Hello(ClientHello { name, .. }) = &request
                    && name.len() > MAX_NAME
                {
                    let len = name.len();
                    return Err(malformed(format!("a name of {len} bytes; accepted: up to {MAX_NAME}")));
                }
                Ok(Self::Request(request))
            }
            Some((&NOTIFY, body)) => {
                let (token, data) = body
                    .split_first_chunk()
                    .ok_or_else(|| malformed(format!("a notification of {} bytes", body.len())))?;
                if data.len() > MAX_NOTIFICATION {
                    return Err(malformed(format!("a notification of {} bytes", data.len())));
                }
                Ok(Self::Notify { token: u64::from_le_bytes(*token), data: data.to_vec() })
            }
            _ => Err(unknown_kind(packet)),
        }
    }
}

fn unknown_kind(packet: &[u8]) -> Error {
    malformed(format!("a rendezvous packet of {} bytes and kind {:?}", packet.len(), packet.first()))
}

#[cfg(test)]
mod tests {
    use posthorse_core::Features;
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn packets_survive_the_wire() {
        let request = Request::Hello(ClientHello {
            hello: Hello::new(Features(1), Some("layout".into())),
            name: "a:1".into(),
            nonce: "00".into(),
            host_id: None,
        });
        assert_eq!(ToOwner::decode(&request.encode()).unwrap(), ToOwner::Request(request));
        let reply = ToClient::Region(RegionReply {
            request: MapRequest { region: RegionId(u64::MAX), write: true },
            address: u64::MAX - 1,
            len: 1,
            offset: Some(0),
        });
        assert_eq!(ToClient::decode(&reply.encode()).unwrap(), reply);
    }

    #[test]
    fn a_refusal_keeps_its_kind_and_is_fit_for_a_log() {
        let error = Error::new(ErrorKind::FingerprintMismatch, format!("a\n\u{1b}[31m{}", "ü".repeat(2000)));
        let back = Refusal::of(&error).into_error();
        assert_eq!(back.kind(), ErrorKind::FingerprintMismatch);
        assert!(back.message().len() < 1100 && !back.message().contains(['\n', '\u{1b}']));
        let unknown = Refusal { code: 1, message: String::new() }.into_error();
        assert_eq!(unknown.kind(), ErrorKind::PeerRefused);
    }

    #[test]
    fn a_later_release_may_say_more() {
        let packet = br#"j{"map":{"region":3,"write":false,"later":[1]}}"#;
        let map = MapRequest { region: RegionId(3), write: false };
        assert_eq!(ToOwner::decode(packet).unwrap(), ToOwner::Request(Request::Map(map)));
    }

    proptest! {
        #[test]
        fn notifications_survive_the_wire(token: u64, data in proptest::collection::vec(any::<u8>(), 0..300)) {
            let packet = encode_notify(token, &data);
            prop_assert_eq!(ToOwner::decode(&packet).unwrap(), ToOwner::Notify { token, data });
        }

        #[test]
        fn no_packet_panics(mut packet in proptest::collection::vec(any::<u8>(), 0..300)) {
            let _ = ToOwner::decode(&packet);
            let _ = ToClient::decode(&packet);
            if let Some(kind) = packet.first_mut() {
                *kind = JSON;
                let _ = ToOwner::decode(&packet);
                let _ = ToClient::decode(&packet);
            }
        }
    }
}
