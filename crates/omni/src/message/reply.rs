//! What a producer answers.

use posthorse_core::{Checksum, Error, ErrorKind, GrantDesc, Hello, Incarnation, Result};
use serde::{Deserialize, Serialize};

use super::request::Dialect;
use super::{check_hello, check_name, decode, encode_after, printable};
use crate::payload::Manifest;

const NOT_FOUND: &[u8] = b"info_not_found";
const DONE: &[u8] = b"trans_done";
const ERROR: &[u8] = b"trans_error";

/// A reply to any request, as a producer gives it. [`Reply::encode`] puts it into the peer's dialect.
#[derive(Debug, Clone, PartialEq)]
pub enum Reply {
    /// To a query: this is offered.
    Offer {
        /// The key that was asked for.
        request_id: String,
        /// Bytes.
        data_size: u64,
        /// Whether the payload is raw bytes rather than a serialised object.
        is_fast_path: bool,
        /// What Posthorse adds, for Posthorse consumers.
        offered: Option<Box<Offered>>,
    },
    /// To a query: there is no such offer. A foreign peer gets `info_not_found`.
    NoOffer(Refusal),
    /// To a pull: the bytes are at the consumer.
    Done {
        /// How many.
        bytes: u64,
    },
    /// To a request of Posthorse's own: it was carried out.
    Ok,
    /// To a stream's credit: it was taken, for this stream. An older consumer reads it as [`Reply::Ok`].
    Stream(StreamSent),
    /// To a health request: what the producer says of itself, for people and dashboards.
    Health(serde_json::Value),
    /// To anything: no, and why. A foreign peer gets `trans_error`.
    Refused(Refusal),
}

/// What a Posthorse producer says of an offer beyond its size.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Offered {
    /// What it speaks.
    pub hello: Hello,
    /// Which put of the key this is.
    pub generation: u64,
    /// What the payload is made of.
    pub manifest: Manifest,
    /// The producer's segment name.
    pub segment: String,
    /// Which life of it.
    pub incarnation: Incarnation,
    /// What the consumer may read, if it wanted to read.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub grant: Option<GrantDesc>,
    /// How many consumers the offer still waits for, this one included.
    pub consumers_left: u32,
    /// When the offer ends unless it is pulled, in milliseconds from now; `None` without end.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expires_ms: Option<u64>,
    /// How much the producer compares at the far end.
    #[serde(default)]
    pub checksum: Checksum,
    /// Which transport the producer prefers or requires, if any: `prefer:NAME` or `require:NAME`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub transport: Option<String>,
    /// After which silence of the consumer its place lapses, in milliseconds; an older producer does not say.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub liveness_ms: Option<u64>,
}

/// What a producer says of a stream when it hears the consumer's credit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct StreamSent {
    /// Which stream of its name it is.
    pub generation: u64,
    /// After which silence of the consumer the stream ends, in milliseconds.
    pub liveness_ms: u64,
}

/// A refusal with its reason, as it travels.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Refusal {
    /// The number of the [`ErrorKind`].
    pub code: u16,
    /// What happened.
    pub message: String,
    /// What to do about it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub advice: Option<String>,
    /// When asking again may help, in milliseconds from now.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub retry_after_ms: Option<u64>,
}

impl From<&Error> for Refusal {
    fn from(error: &Error) -> Self {
        Self {
            code: error.code(),
            message: printable(error.message()),
            advice: error.advice().map(printable),
            retry_after_ms: None,
        }
    }
}

impl Refusal {
    /// The error that this refusal is at the consumer; a code of a later release is `PeerRefused`.
    pub fn to_error(&self, peer: &str) -> Error {
        let message = printable(&self.message);
        let error = match ErrorKind::from_code(self.code) {
            // Here, `Closed` is said of our own side.
            Some(ErrorKind::Closed) => {
                Error::new(ErrorKind::PeerGone, message).context("the producer was closed")
            }
            Some(kind) => Error::new(kind, message),
            None => Error::new(ErrorKind::PeerRefused, format!("{message} (the peer's code {})", self.code)),
        };
        let error = error.with_peer(peer);
        match &self.advice {
            Some(advice) => error.with_advice(printable(advice)),
            None => error,
        }
    }
}

/// What Posthorse adds to a reply: a map of one entry, or a string, named after the variant.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Extra {
    Offer(Box<Offered>),
    Done { bytes: u64 },
    Ok,
    Health(serde_json::Value),
    Error(Refusal),
}

/// Every map that is a reply: that of the reference, or `ph` alone, or both.
#[derive(Default, Serialize, Deserialize)]
#[serde(default)]
struct Wire {
    #[serde(skip_serializing_if = "Option::is_none")]
    request_id: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    data_size: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    is_fast_path: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    ph: Option<Extra>,
    /// Beside `ok`.
    #[serde(skip_serializing_if = "Option::is_none")]
    stream: Option<StreamSent>,
}

impl Reply {
    /// A refusal for this reason.
    pub fn refused(error: &Error) -> Self {
        Self::Refused(error.into())
    }

    /// The reply's bytes, as a peer of this dialect reads them.
    ///
    /// # Errors
    /// `TooLarge` above [`super::MAX_MESSAGE_BYTES`].
    pub fn encode(&self, dialect: Dialect) -> Result<Vec<u8>> {
        let posthorse = dialect == Dialect::Posthorse;
        let extra = |extra| encode_after(b"", &Wire { ph: Some(extra), ..Wire::default() });
        match self {
            Self::Offer { request_id, data_size, is_fast_path, offered } => {
                let wire = Wire {
                    request_id: Some(request_id.clone()),
                    data_size: Some(*data_size),
                    is_fast_path: Some(*is_fast_path),
                    ph: offered.clone().filter(|_| posthorse).map(Extra::Offer),
                    stream: None,
                };
                encode_after(b"", &wire)
            }
            Self::NoOffer(_) if !posthorse => Ok(NOT_FOUND.to_vec()),
            Self::Done { .. } if !posthorse => Ok(DONE.to_vec()),
            Self::Refused(_) | Self::Ok | Self::Stream(_) | Self::Health(_) if !posthorse => {
                Ok(ERROR.to_vec())
            }
            Self::NoOffer(refusal) | Self::Refused(refusal) => extra(Extra::Error(refusal.clone())),
            Self::Done { bytes } => extra(Extra::Done { bytes: *bytes }),
            Self::Ok => extra(Extra::Ok),
            Self::Stream(sent) => {
                encode_after(b"", &Wire { ph: Some(Extra::Ok), stream: Some(*sent), ..Wire::default() })
            }
            Self::Health(value) => extra(Extra::Health(value.clone())),
        }
    }

    /// The bytes of the refusal that always fits: for a peer whose request was not understood.
    pub fn plain_error() -> &'static [u8] {
        ERROR
    }
}

/// The answer to a query, as a consumer reads it.
#[derive(Debug, Clone, PartialEq)]
pub enum QueryReply {
    /// This is offered.
    Offer {
        /// Bytes.
        data_size: u64,
        /// Whether the payload is raw bytes rather than a serialised object.
        is_fast_path: bool,
        /// What a Posthorse producer adds.
        offered: Option<Box<Offered>>,
    },
    /// A foreign producer has no such offer, and does not say why.
    NotFound,
    /// A Posthorse producer refuses.
    Refused(Refusal),
}

impl QueryReply {
    /// The answer in these bytes, to a query for `key`.
    ///
    /// # Errors
    /// `Malformed` with what is wrong, another key's answer included; `TooLarge`; `PeerRefused` for
    /// `trans_error`, which the reference answers when it does not understand.
    pub fn decode(key: &str, bytes: &[u8]) -> Result<Self> {
        if bytes == NOT_FOUND {
            return Ok(Self::NotFound);
        }
        if bytes == ERROR {
            return Err(Error::new(ErrorKind::PeerRefused, "the producer did not understand the query"));
        }
        let malformed = |why: String| Error::new(ErrorKind::Malformed, format!("a query reply: {why}"));
        match decode("query reply", bytes)? {
            Wire { ph: Some(Extra::Error(refusal)), .. } => Ok(Self::Refused(refusal)),
            Wire {
                request_id: Some(id), data_size: Some(data_size), is_fast_path: Some(fast), ph, ..
            } => {
                if id != key {
                    return Err(malformed(format!("for key {:?} instead of {key:?}", printable(&id))));
                }
                let offered = match ph {
                    None => None,
                    Some(Extra::Offer(offered)) => {
                        check_hello(&offered.hello)?;
                        check_name("the producer's name", &offered.segment)?;
                        offered
                            .transport
                            .iter()
                            .try_for_each(|it| check_name("the producer's transport", it))?;
                        Some(offered)
                    }
                    Some(_) => return Err(malformed("of another request".to_owned())),
                };
                Ok(Self::Offer { data_size, is_fast_path: fast, offered })
            }
            _ => Err(malformed("without request_id, data_size or is_fast_path".to_owned())),
        }
    }
}

/// The answer to a pull, as a consumer reads it.
#[derive(Debug, Clone, PartialEq)]
pub enum PullReply {
    /// The bytes are here; a Posthorse producer says how many.
    Done(Option<u64>),
    /// A foreign producer failed, and does not say why.
    Failed,
    /// A Posthorse producer refuses or failed.
    Refused(Refusal),
}

impl PullReply {
    /// The answer in these bytes.
    ///
    /// # Errors
    /// `Malformed` or `TooLarge`.
    pub fn decode(bytes: &[u8]) -> Result<Self> {
        match bytes {
            DONE => Ok(Self::Done(None)),
            ERROR => Ok(Self::Failed),
            _ => match decode("pull reply", bytes)? {
                Wire { ph: Some(Extra::Done { bytes }), .. } => Ok(Self::Done(Some(bytes))),
                Wire { ph: Some(Extra::Error(refusal)), .. } => Ok(Self::Refused(refusal)),
                _ => Err(Error::new(ErrorKind::Malformed, "a pull reply: neither done nor an error")),
            },
        }
    }
}

/// The answer to a request of Posthorse's own, as the peer that asked reads it.
#[derive(Debug, Clone, PartialEq)]
pub enum Answer {
    /// It was carried out.
    Ok,
    /// A stream's credit was taken, for this stream.
    Stream(StreamSent),
    /// What the producer says of itself.
    Health(serde_json::Value),
    /// It was not.
    Refused(Refusal),
}

impl Answer {
    /// The answer in these bytes.
    ///
    /// # Errors
    /// `Malformed` or `TooLarge`; `Unsupported` when the peer is foreign.
    pub fn decode(bytes: &[u8]) -> Result<Self> {
        if bytes == ERROR {
            return Err(Error::new(
                ErrorKind::Unsupported,
                "the producer does not speak Posthorse's protocol",
            ));
        }
        match decode("reply", bytes)? {
            Wire { ph: Some(Extra::Ok), stream: Some(sent), .. } => Ok(Self::Stream(sent)),
            Wire { ph: Some(Extra::Ok), .. } => Ok(Self::Ok),
            Wire { ph: Some(Extra::Health(value)), .. } => Ok(Self::Health(value)),
            Wire { ph: Some(Extra::Error(refusal)), .. } => Ok(Self::Refused(refusal)),
            _ => Err(Error::new(ErrorKind::Malformed, "a reply: neither ok, health nor an error")),
        }
    }
}

#[cfg(test)]
mod tests {
    use posthorse_core::{DType, Features};
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;
    use crate::payload::{PayloadKind, TensorDesc};

    fn refusal() -> Refusal {
        let error = Error::new(ErrorKind::Expired, "the offer was consumed").with_advice("put it again");
        Refusal { retry_after_ms: Some(5), ..Refusal::from(&error) }
    }

    fn offered() -> Box<Offered> {
        let tensor =
            TensorDesc { name: "k".to_owned(), dtype: DType::BF16, shape: vec![2, 3], offset: 64, len: 12 };
        Box::new(Offered {
            hello: Hello::new(Features(1), None),
            generation: 3,
            manifest: Manifest { kind: PayloadKind::Tensors, tensors: vec![tensor] },
            segment: "a:1".to_owned(),
            incarnation: Incarnation(u64::MAX),
            grant: None,
            consumers_left: 2,
            expires_ms: Some(300_000),
            checksum: Checksum::Sampled,
            transport: Some("require:tcp".to_owned()),
            liveness_ms: Some(3000),
        })
    }

    fn offer() -> Reply {
        Reply::Offer {
            request_id: "k@0_1".to_owned(),
            data_size: 1 << 20,
            is_fast_path: true,
            offered: Some(offered()),
        }
    }

    fn golden(name: &str) -> Vec<u8> {
        let text = include_str!("../../testdata/messages.txt");
        let line = text.lines().find_map(|line| line.strip_prefix(&format!("{name} "))).unwrap();
        (0..line.len()).step_by(2).map(|i| u8::from_str_radix(&line[i..i + 2], 16).unwrap()).collect()
    }

    #[test]
    fn the_foreign_replies_are_golden_in_both_directions() {
        let foreign = |reply: &Reply| reply.encode(Dialect::Foreign).unwrap();
        assert_eq!(foreign(&offer()), golden("query_reply"));
        assert_eq!(
            QueryReply::decode("k@0_1", &golden("query_reply")).unwrap(),
            QueryReply::Offer { data_size: 1 << 20, is_fast_path: true, offered: None }
        );
        assert_eq!(foreign(&Reply::NoOffer(refusal())), golden("info_not_found"));
        assert_eq!(QueryReply::decode("k", &golden("info_not_found")).unwrap(), QueryReply::NotFound);
        assert_eq!(foreign(&Reply::Done { bytes: 1 }), golden("trans_done"));
        assert_eq!(PullReply::decode(&golden("trans_done")).unwrap(), PullReply::Done(None));
        assert_eq!(foreign(&Reply::Refused(refusal())), golden("trans_error"));
        assert_eq!(PullReply::decode(&golden("trans_error")).unwrap(), PullReply::Failed);
        assert_eq!(Answer::decode(&golden("trans_error")).unwrap_err().kind(), ErrorKind::Unsupported);
    }

    #[test]
    fn posthorse_replies_survive_the_wire() {
        let bytes = |reply: Reply| reply.encode(Dialect::Posthorse).unwrap();
        assert_eq!(
            QueryReply::decode("k@0_1", &bytes(offer())).unwrap(),
            QueryReply::Offer { data_size: 1 << 20, is_fast_path: true, offered: Some(offered()) }
        );
        assert_eq!(
            QueryReply::decode("k", &bytes(Reply::NoOffer(refusal()))).unwrap(),
            QueryReply::Refused(refusal())
        );
        assert_eq!(PullReply::decode(&bytes(Reply::Done { bytes: 7 })).unwrap(), PullReply::Done(Some(7)));
        assert_eq!(
            PullReply::decode(&bytes(Reply::Refused(refusal()))).unwrap(),
            PullReply::Refused(refusal())
        );
        assert_eq!(Answer::decode(&bytes(Reply::Ok)).unwrap(), Answer::Ok);
        let sent = StreamSent { generation: u64::MAX, liveness_ms: 300 };
        assert_eq!(Answer::decode(&bytes(Reply::Stream(sent))).unwrap(), Answer::Stream(sent));
        let foreign = Reply::Stream(sent).encode(Dialect::Foreign).unwrap();
        assert_eq!(Answer::decode(&foreign).unwrap_err().kind(), ErrorKind::Unsupported);
        let health = json!({"status": "healthy", "pool": {"free": 7}});
        assert_eq!(Answer::decode(&bytes(Reply::Health(health.clone()))).unwrap(), Answer::Health(health));
    }

    #[test]
    fn a_refusal_keeps_kind_reason_advice_and_peer() {
        let error = refusal().to_error("a:1");
        assert_eq!(error.kind(), ErrorKind::Expired);
        assert_eq!((error.message(), error.peer()), ("the offer was consumed", Some("a:1")));
        assert_eq!(error.advice(), Some("put it again"));
        let later = Refusal { code: 9999, message: "x\ny".to_owned(), advice: None, retry_after_ms: None };
        let error = later.to_error("a:1");
        assert_eq!(error.kind(), ErrorKind::PeerRefused);
        assert!(error.message().contains("9999") && !error.message().contains('\n'));
        let closed = Refusal::from(&Error::new(ErrorKind::Closed, "its stage ends")).to_error("a:1");
        assert_eq!(
            (closed.kind(), closed.message()),
            (ErrorKind::PeerGone, "the producer was closed: its stage ends")
        );
    }

    #[test]
    fn what_is_kept_of_an_offer_is_bounded() {
        let changed = |change: fn(&mut Offered)| {
            let mut offered = offered();
            change(&mut offered);
            let reply = Reply::Offer {
                request_id: "k".to_owned(),
                data_size: 12,
                is_fast_path: true,
                offered: Some(offered),
            };
            QueryReply::decode("k", &reply.encode(Dialect::Posthorse).unwrap()).unwrap_err().to_string()
        };
        let error = changed(|offered| offered.segment = "x".repeat(1025));
        assert!(error.contains("the producer's name has 1025 bytes; accepted: up to 1024"), "{error}");
        let error = changed(|offered| offered.hello.fingerprint = Some("x".repeat(1025)));
        assert!(error.contains("the fingerprint has 1025 bytes; accepted: up to 1024"), "{error}");
    }

    #[test]
    fn an_answer_to_something_else_is_malformed() {
        let bytes = offer().encode(Dialect::Posthorse).unwrap();
        let error = QueryReply::decode("other", &bytes).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Malformed);
        assert!(error.message().contains("k@0_1") && error.message().contains("other"), "{error}");
        let ok = Reply::Ok.encode(Dialect::Posthorse).unwrap();
        assert!(QueryReply::decode("k", &ok).is_err());
        assert!(PullReply::decode(&ok).is_err());
        assert!(QueryReply::decode("k", ERROR).is_err());
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_never_panic(bytes: Vec<u8>) {
            let _ = QueryReply::decode("k", &bytes);
            let _ = PullReply::decode(&bytes);
            let _ = Answer::decode(&bytes);
        }

        #[test]
        fn damaged_replies_never_panic(at: prop::sample::Index, byte: u8, cut: prop::sample::Index) {
            let mut bytes = offer().encode(Dialect::Posthorse).unwrap();
            let at = at.index(bytes.len());
            bytes[at] = byte;
            bytes.truncate(cut.index(bytes.len()) + 1);
            let _ = QueryReply::decode("k@0_1", &bytes);
        }
    }
}
