//! What travels in control frames between Posthorse peers, and in the small foreign messages.
//!
//! A control message is a byte that says which it is, then its fields, little-endian. Either side's first message
//! on a connection is a [`Greeting`]; the client's comes first.

use std::time::Duration;

use posthorse_core::{Error, ErrorKind, Hello, Incarnation, Result};
use serde::{Deserialize, Serialize};

/// The longest greeting, in bytes: what it says ends up in logs and errors.
pub(crate) const GREETING_BYTES: usize = 16 << 10;

/// The longest topic, in bytes.
const TOPIC_BYTES: usize = 256;

/// The longest text of an error that is sent or kept, in bytes.
const ERROR_BYTES: usize = 1024;

/// Who speaks, and what it can speak.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Greeting {
    pub(crate) name: String,
    pub(crate) incarnation: Incarnation,
    pub(crate) hello: Hello,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Control {
    Greeting(Greeting),
    /// Asks about a topic, and gives up after so long.
    Request {
        id: u64,
        patience: Duration,
        topic: String,
        body: Vec<u8>,
    },
    /// Answers a request. Refuses a greeting, under identity zero.
    Reply {
        id: u64,
        result: Result<Vec<u8>, Refusal>,
    },
    /// Asks whether anybody is there.
    Ping,
    Pong,
}

/// An error as it crosses the wire.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Refusal {
    pub(crate) code: u16,
    pub(crate) message: String,
}

impl Refusal {
    pub(crate) fn of(error: &Error) -> Self {
        Self { code: error.code(), message: bounded(error.message()) }
    }

    /// The error, as the peer named it. A kind that only later releases know is a refusal.
    pub(crate) fn into_error(self, peer: &str) -> Error {
        let kind = ErrorKind::from_code(self.code).unwrap_or(ErrorKind::PeerRefused);
        let message: String = self.message.chars().filter(|c| !c.is_control()).collect();
        Error::new(kind, message).with_peer(peer)
    }
}

impl Control {
    pub(crate) fn encode(&self) -> Result<Vec<u8>> {
        let mut bytes = Vec::new();
        match self {
            Self::Greeting(greeting) => {
                bytes.push(0);
                serde_json::to_writer(&mut bytes, greeting).map_err(|error| {
                    Error::new(ErrorKind::Internal, format!("writing a greeting: {error}"))
                })?;
            }
            Self::Request { id, patience, topic, body } => {
                if topic.len() > TOPIC_BYTES {
                    let value = format_args!("{} bytes long", topic.len());
                    return Err(Error::invalid_argument("topic", value, "at most 256 bytes"));
                }
                bytes.reserve(15 + topic.len() + body.len());
                bytes.push(1);
                bytes.extend_from_slice(&id.to_le_bytes());
                let patience = u32::try_from(patience.as_millis()).unwrap_or(u32::MAX);
                bytes.extend_from_slice(&patience.to_le_bytes());
                bytes.extend_from_slice(&(topic.len() as u16).to_le_bytes());
                bytes.extend_from_slice(topic.as_bytes());
                bytes.extend_from_slice(body);
            }
            Self::Reply { id, result } => {
                let (code, body) = match result {
                    Ok(body) => (0, body.as_slice()),
                    Err(refusal) => (refusal.code, refusal.message.as_bytes()),
                };
                bytes.reserve(11 + body.len());
                bytes.push(2);
                bytes.extend_from_slice(&id.to_le_bytes());
                bytes.extend_from_slice(&code.to_le_bytes());
                bytes.extend_from_slice(body);
            }
            Self::Ping => bytes.push(3),
            Self::Pong => bytes.push(4),
        }
        Ok(bytes)
    }

    /// # Errors
    /// `Malformed`.
    pub(crate) fn decode(body: &[u8]) -> Result<Self> {
        let mut rest = body;
        match take::<1>(&mut rest)? {
            [0] => {
                if rest.len() > GREETING_BYTES {
                    return Err(malformed("its greeting is longer than 16384 bytes"));
                }
                serde_json::from_slice(rest)
                    .map(Self::Greeting)
                    .map_err(|error| malformed(&format!("its greeting: {error}")))
            }
            [1] => {
                let id = u64::from_le_bytes(take(&mut rest)?);
                let patience = Duration::from_millis(u32::from_le_bytes(take(&mut rest)?).into());
                let len = usize::from(u16::from_le_bytes(take(&mut rest)?));
                let (topic, body) = rest
                    .split_at_checked(len)
                    .filter(|_| len <= TOPIC_BYTES)
                    .ok_or_else(|| malformed("its topic is longer than 256 bytes or than itself"))?;
                let topic = std::str::from_utf8(topic).map_err(|_| malformed("its topic is not UTF-8"))?;
                Ok(Self::Request { id, patience, topic: topic.to_owned(), body: body.to_vec() })
            }
            [2] => {
                let id = u64::from_le_bytes(take(&mut rest)?);
                let result = match u16::from_le_bytes(take(&mut rest)?) {
                    0 => Ok(rest.to_vec()),
                    code => {
                        let text = String::from_utf8_lossy(&rest[..rest.len().min(ERROR_BYTES)]);
                        Err(Refusal { code, message: bounded(&text) })
                    }
                };
                Ok(Self::Reply { id, result })
            }
            [3] => Ok(Self::Ping),
            [4] => Ok(Self::Pong),
            [other] => Err(malformed(&format!("its kind is {other}; known: 0 to 4"))),
        }
    }
}

/// As much of an error's text as is sent or kept. A text that was no UTF-8 is longer once it is made so.
fn bounded(text: &str) -> String {
    text[..text.floor_char_boundary(ERROR_BYTES)].to_owned()
}

fn take<const N: usize>(rest: &mut &[u8]) -> Result<[u8; N]> {
    let (now, later) = rest.split_first_chunk().ok_or_else(|| malformed("it ends too early"))?;
    *rest = later;
    Ok(*now)
}

fn malformed(why: &str) -> Error {
    Error::new(ErrorKind::Malformed, format!("a control message: {why}"))
}

/// A message for the application, in Mooncake's form; with an empty text, the refusal of one.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Notice {
    #[serde(default)]
    pub(crate) name: String,
    #[serde(default)]
    pub(crate) notify_msg: String,
}

/// What an engine without RDMA answers to a request for an RDMA connection.
pub(crate) const NO_CONNECTION: &[u8] = b"{\"local_gid\":\"\",\"local_lid\":0,\"local_nic_path\":\"\",\"payload\":\"\",\"peer_nic_path\":\"\",\"qp_num\":[],\"reply_msg\":\"\"}\n";

/// The answer to a probe.
pub(crate) const ALIVE: &[u8] = b"{\"status\":\"success\"}\n";

/// A request whose content nobody reads.
pub(crate) const EMPTY: &[u8] = b"{}\n";

/// A small foreign message as JSON, with the newline that its own side ends it with.
pub(crate) fn to_json(value: &impl Serialize) -> Result<Vec<u8>> {
    let mut json = serde_json::to_vec(value)
        .map_err(|error| Error::new(ErrorKind::Internal, format!("writing a handshake message: {error}")))?;
    json.push(b'\n');
    Ok(json)
}

#[cfg(test)]
mod tests {
    use posthorse_core::Features;
    use proptest::prelude::*;

    use super::*;

    fn control() -> impl Strategy<Value = Control> {
        prop_oneof![
            (".{0,30}", any::<u64>(), any::<u64>()).prop_map(|(name, incarnation, features)| {
                Control::Greeting(Greeting {
                    name,
                    incarnation: Incarnation(incarnation),
                    hello: Hello::new(Features(features), None),
                })
            }),
            (any::<u64>(), any::<u32>(), ".{0,60}", any::<Vec<u8>>()).prop_map(|(id, ms, topic, body)| {
                Control::Request { id, patience: Duration::from_millis(ms.into()), topic, body }
            }),
            (any::<u64>(), any::<Vec<u8>>()).prop_map(|(id, body)| Control::Reply { id, result: Ok(body) }),
            (any::<u64>(), 1_u16.., ".{0,60}").prop_map(|(id, code, message)| {
                Control::Reply { id, result: Err(Refusal { code, message }) }
            }),
            Just(Control::Ping),
            Just(Control::Pong),
        ]
    }

    proptest! {
        #[test]
        fn messages_survive_the_wire(message in control()) {
            prop_assert_eq!(Control::decode(&message.encode().unwrap()).unwrap(), message);
        }

        #[test]
        fn arbitrary_bytes_never_panic(bytes: Vec<u8>, kind in 0..6_u8) {
            let mut bytes = bytes;
            bytes.insert(0, kind);
            let _ = Control::decode(&bytes);
        }
    }

    #[test]
    fn an_error_keeps_its_kind_and_no_more_of_its_text_than_fits() {
        let error = Error::new(ErrorKind::NotFound, "ä\n".repeat(2000));
        let refusal = Refusal::of(&error);
        assert!(refusal.message.len() <= ERROR_BYTES);
        let back = refusal.into_error("b:1");
        assert_eq!((back.kind(), back.peer()), (ErrorKind::NotFound, Some("b:1")));
        assert!(!back.message().contains('\n'));
        let later = Refusal { code: 65_000, message: "new".to_owned() };
        assert_eq!(later.into_error("b:1").kind(), ErrorKind::PeerRefused);
    }

    #[test]
    fn a_text_that_is_not_utf_8_is_no_longer_than_another() {
        let mut bytes = Control::Reply { id: 1, result: Err(Refusal { code: 7, message: String::new() }) }
            .encode()
            .unwrap();
        bytes.extend([0xff; 2 * ERROR_BYTES]);
        let reply = Control::decode(&bytes).unwrap();
        let Control::Reply { result: Err(refusal), .. } = &reply else { panic!("{reply:?}") };
        assert!(refusal.message.len() <= ERROR_BYTES);
        assert_eq!(Control::decode(&reply.encode().unwrap()).unwrap(), reply);
    }

    #[test]
    fn an_overlong_greeting_is_refused() {
        let hello = Hello::new(Features::NONE, Some("x".repeat(GREETING_BYTES)));
        let greeting = Greeting { name: "a:1".to_owned(), incarnation: Incarnation(1), hello };
        let bytes = Control::Greeting(greeting).encode().unwrap();
        assert_eq!(Control::decode(&bytes).unwrap_err().kind(), ErrorKind::Malformed);
    }

    #[test]
    fn an_overlong_topic_is_refused_on_both_sides() {
        let request =
            |topic: String| Control::Request { id: 1, patience: Duration::ZERO, topic, body: vec![] };
        assert_eq!(request("t".repeat(257)).encode().unwrap_err().kind(), ErrorKind::InvalidArgument);
        let mut bytes = request("t".repeat(256)).encode().unwrap();
        bytes[13..15].copy_from_slice(&257_u16.to_le_bytes());
        bytes.push(b't');
        assert_eq!(Control::decode(&bytes).unwrap_err().kind(), ErrorKind::Malformed);
    }
}
