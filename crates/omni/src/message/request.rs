//! What a consumer asks of a producer.

use posthorse_core::{Checksum, Error, ErrorKind, GrantDesc, Hello, Incarnation, Result};
use serde::{Deserialize, Serialize};

use super::{MAX_KEPT_BYTES, MAX_MESSAGE_BYTES, check_hello, check_name, decode, encode_after, within};
use crate::key;

const QUERY_PREFIX: &[u8] = b"query_info";
const POSTHORSE_PREFIX: &[u8] = b"posthorse:";

/// The most addresses of one pull.
const MAX_ADDRESSES: usize = 1024;

/// Whether a peer knows Posthorse's fields.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Dialect {
    /// It does not: it gets the plain replies.
    Foreign,
    /// It does: every refusal carries its reason.
    Posthorse,
}

/// A request to a producer.
#[derive(Debug, Clone, PartialEq)]
pub enum Request {
    /// What is offered under a key?
    Query(Query),
    /// Write it to my memory.
    Pull(Pull),
    /// I no longer want this.
    Cancel(Cancel),
    /// I have read it, or could not.
    Close(Close),
    /// I am still reading.
    Renew(Renew),
    /// I can take more chunks.
    StreamCredit(StreamCredit),
    /// I take no more chunks.
    StreamAbort(StreamAbort),
    /// Are you there?
    Ping,
    /// How are you?
    Health,
}

/// Asks what is offered under a key.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Query {
    /// The key, qualified by its stages.
    pub request_id: String,
    /// What Posthorse adds.
    #[serde(rename = "ph", default, skip_serializing_if = "Option::is_none")]
    pub extra: Option<QueryExtra>,
}

/// What a Posthorse consumer adds to a query.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct QueryExtra {
    /// What it speaks.
    pub hello: Hello,
    /// Its segment name.
    pub consumer: String,
    /// Which life of it.
    pub incarnation: Incarnation,
    /// The number of its get, unique within its life.
    pub pull: u64,
    /// How long it waits for an offer that is not there yet, in milliseconds.
    #[serde(default)]
    pub wait_ms: u64,
    /// How it wants the bytes.
    #[serde(default)]
    pub want: Want,
}

/// How a consumer wants the bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Want {
    /// The producer writes them: a pull follows.
    #[default]
    Write,
    /// The consumer reads them through a grant, and closes when it has.
    Read,
}

/// Asks the producer to write a payload to the consumer's memory.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Pull {
    /// The host of the consumer's engine.
    pub remote_hostname: String,
    /// The port of the consumer's engine.
    pub remote_port: u16,
    /// The key, qualified by its stages.
    pub request_id: String,
    /// The addresses to write to, in the consumer's address space.
    pub dst_addrs: Vec<u64>,
    /// How many bytes may be written at each.
    pub lengths: Vec<u64>,
    /// What Posthorse adds.
    #[serde(rename = "ph", default, skip_serializing_if = "Option::is_none")]
    pub extra: Option<PullExtra>,
}

/// What a Posthorse consumer adds to a pull.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PullExtra {
    /// What it speaks.
    pub hello: Hello,
    /// Its segment name.
    pub consumer: String,
    /// Which life of it.
    pub incarnation: Incarnation,
    /// The number of its get.
    pub pull: u64,
    /// The generation it was told of; `None` takes whatever is offered now.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub generation: Option<u64>,
    /// What the producer may write to.
    pub grant: GrantDesc,
    /// How long the consumer still waits, in milliseconds; `None` without end.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub deadline_ms: Option<u64>,
    /// How much is compared at the far end.
    #[serde(default)]
    pub checksum: Checksum,
    /// Which transport the consumer prefers or requires, if any: `prefer:NAME` or `require:NAME`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub transport: Option<String>,
}

/// Calls a get off, whether it is parked, reserved or in flight.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cancel {
    /// The consumer's segment name.
    pub consumer: String,
    /// Which life of it.
    pub incarnation: Incarnation,
    /// The number of its get.
    pub pull: u64,
}

/// Ends a read through a grant.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Close {
    /// The consumer's segment name.
    pub consumer: String,
    /// Which life of it.
    pub incarnation: Incarnation,
    /// The number of its get.
    pub pull: u64,
    /// How it ended.
    pub outcome: Outcome,
}

/// How a get ended at the consumer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// It has the payload: it counts as served.
    Done,
    /// It has not: the offer stays.
    Failed,
}

/// Says that reads through grants go on.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Renew {
    /// The consumer's segment name.
    pub consumer: String,
    /// Which life of it.
    pub incarnation: Incarnation,
    /// The numbers of its gets.
    pub pulls: Vec<u64>,
}

/// Who follows a chunk stream.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Follower {
    /// The consumer's segment name.
    pub consumer: String,
    /// Which life of it.
    pub incarnation: Incarnation,
    /// Which of its followers.
    pub number: u64,
}

/// Says how far the producer of a chunk stream may go.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StreamCredit {
    /// The stream's key, qualified by its stages.
    pub stream: String,
    /// Which stream of that name, once the producer has said so; `None` means the one that there is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub generation: Option<u64>,
    /// Who follows the stream: nobody else can.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub follower: Option<Follower>,
    /// The sequence number of the first chunk that may not be sent yet.
    pub limit: u64,
}

/// Ends a chunk stream from the consumer's side.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StreamAbort {
    /// The stream's key, qualified by its stages.
    pub stream: String,
    /// Which stream of that name, as in [`StreamCredit`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub generation: Option<u64>,
    /// Who follows it, as in [`StreamCredit`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub follower: Option<Follower>,
    /// Why.
    pub reason: String,
}

/// The requests that only Posthorse knows, as they travel behind their prefix: a map of one entry, or a
/// string, named after the variant.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Own {
    Cancel(Cancel),
    Close(Close),
    Renew(Renew),
    StreamCredit(StreamCredit),
    StreamAbort(StreamAbort),
    Ping,
    Health,
}

impl Request {
    /// The request's bytes.
    ///
    /// # Errors
    /// `TooLarge` above [`MAX_MESSAGE_BYTES`], for a query or pull above [`MAX_KEPT_BYTES`].
    pub fn encode(&self) -> Result<Vec<u8>> {
        let own = |own| encode_after(POSTHORSE_PREFIX, &own);
        let bytes = match self {
            Self::Query(query) => encode_after(QUERY_PREFIX, query),
            Self::Pull(pull) => encode_after(b"", pull),
            Self::Cancel(cancel) => own(Own::Cancel(cancel.clone())),
            Self::Close(close) => own(Own::Close(close.clone())),
            Self::Renew(renew) => own(Own::Renew(renew.clone())),
            Self::StreamCredit(credit) => own(Own::StreamCredit(credit.clone())),
            Self::StreamAbort(abort) => own(Own::StreamAbort(abort.clone())),
            Self::Ping => own(Own::Ping),
            Self::Health => own(Own::Health),
        }?;
        within(bytes.len(), most(&bytes))?;
        Ok(bytes)
    }

    /// The request in these bytes.
    ///
    /// # Errors
    /// `Malformed` with what is wrong, `TooLarge`, or `InvalidArgument` for a key that cannot be one.
    pub fn decode(bytes: &[u8]) -> Result<Self> {
        within(bytes.len(), most(bytes))?;
        let request = if let Some(rest) = bytes.strip_prefix(QUERY_PREFIX) {
            Self::Query(decode("query", rest)?)
        } else if let Some(rest) = bytes.strip_prefix(POSTHORSE_PREFIX) {
            match decode("request", rest)? {
                Own::Cancel(cancel) => Self::Cancel(cancel),
                Own::Close(close) => Self::Close(close),
                Own::Renew(renew) => Self::Renew(renew),
                Own::StreamCredit(credit) => Self::StreamCredit(credit),
                Own::StreamAbort(abort) => Self::StreamAbort(abort),
                Own::Ping => Self::Ping,
                Own::Health => Self::Health,
            }
        } else {
            Self::Pull(decode("pull", bytes)?)
        };
        request.check()?;
        Ok(request)
    }

    /// Which replies the peer that asks understands, as far as its bytes show, decodable or not.
    pub fn dialect_of(bytes: &[u8]) -> Dialect {
        match Self::decode(bytes) {
            Ok(request) => request.dialect(),
            Err(_) if bytes.starts_with(POSTHORSE_PREFIX) => Dialect::Posthorse,
            Err(_) => Dialect::Foreign,
        }
    }

    /// Which replies the peer that asks understands.
    pub const fn dialect(&self) -> Dialect {
        match self {
            Self::Query(Query { extra: None, .. }) | Self::Pull(Pull { extra: None, .. }) => Dialect::Foreign,
            _ => Dialect::Posthorse,
        }
    }

    fn check(&self) -> Result<()> {
        match self {
            Self::Query(query) => {
                key::check(&query.request_id)?;
                query.extra.as_ref().map_or(Ok(()), |extra| check_speaker(&extra.hello, &extra.consumer))
            }
            Self::Pull(pull) => pull.check(),
            Self::Cancel(Cancel { consumer, .. })
            | Self::Close(Close { consumer, .. })
            | Self::Renew(Renew { consumer, .. }) => check_consumer(consumer),
            Self::StreamCredit(StreamCredit { stream, follower, .. })
            | Self::StreamAbort(StreamAbort { stream, follower, .. }) => {
                key::check(stream)?;
                follower.as_ref().map_or(Ok(()), |follower| check_consumer(&follower.consumer))
            }
            Self::Ping | Self::Health => Ok(()),
        }
    }
}

impl Pull {
    fn check(&self) -> Result<()> {
        key::check(&self.request_id)?;
        check_name("the host of a pull", &self.remote_hostname)?;
        let (addresses, lengths) = (self.dst_addrs.len(), self.lengths.len());
        if addresses != lengths || !(1..=MAX_ADDRESSES).contains(&addresses) {
            return Err(Error::new(
                ErrorKind::Malformed,
                format!(
                    "a pull with {addresses} addresses and {lengths} lengths; accepted: as many of both, 1 to \
                     {MAX_ADDRESSES}"
                ),
            ));
        }
        let Some(extra) = &self.extra else { return Ok(()) };
        extra.transport.iter().try_for_each(|it| check_name("the consumer's transport", it))?;
        check_speaker(&extra.hello, &extra.consumer)
    }
}

fn check_speaker(hello: &Hello, consumer: &str) -> Result<()> {
    check_hello(hello)?;
    check_consumer(consumer)
}

fn check_consumer(consumer: &str) -> Result<()> {
    check_name("the consumer's name", consumer)
}

/// How long a request may be that begins like this.
fn most(bytes: &[u8]) -> usize {
    if bytes.starts_with(POSTHORSE_PREFIX) { MAX_MESSAGE_BYTES } else { MAX_KEPT_BYTES }
}

#[cfg(test)]
mod tests {
    use posthorse_core::{Access, Features, GrantToken, RegionId};
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;
    use crate::message::MAX_NAME_BYTES;

    fn hello() -> Hello {
        Hello::new(Features(5), Some("model".to_owned()))
    }

    fn extra() -> PullExtra {
        let attributes = [("tcp".to_owned(), json!({"port": 1, "deep": [null, -1, u64::MAX, "x", 0.5]}))];
        PullExtra {
            hello: hello(),
            consumer: "b:1".to_owned(),
            incarnation: Incarnation(7),
            pull: 9,
            generation: Some(u64::MAX),
            grant: GrantDesc {
                region: RegionId(1),
                address: 1 << 47,
                len: 1 << 20,
                access: Access::Write,
                token: GrantToken { handle: 1, secret: u64::MAX },
                attributes: attributes.into_iter().collect(),
            },
            deadline_ms: None,
            checksum: Checksum::Full,
            transport: Some("require:tcp".to_owned()),
        }
    }

    pub(crate) fn pull(extra: Option<PullExtra>) -> Pull {
        Pull {
            remote_hostname: "127.0.0.1".to_owned(),
            remote_port: 15242,
            request_id: "k@0_1".to_owned(),
            dst_addrs: vec![0x7f12_0000_0000],
            lengths: vec![1 << 20],
            extra,
        }
    }

    fn all() -> Vec<Request> {
        let (consumer, incarnation, pull_id) = ("b:1".to_owned(), Incarnation(7), 9);
        let query = QueryExtra {
            hello: hello(),
            consumer: consumer.clone(),
            incarnation,
            pull: pull_id,
            wait_ms: 3,
            want: Want::Read,
        };
        vec![
            Request::Query(Query { request_id: "k@0_1".to_owned(), extra: None }),
            Request::Query(Query { request_id: "k@0_1".to_owned(), extra: Some(query) }),
            Request::Pull(pull(None)),
            Request::Pull(pull(Some(extra()))),
            Request::Cancel(Cancel { consumer: consumer.clone(), incarnation, pull: pull_id }),
            Request::Close(Close {
                consumer: consumer.clone(),
                incarnation,
                pull: pull_id,
                outcome: Outcome::Failed,
            }),
            Request::Renew(Renew { consumer, incarnation, pulls: vec![1, 2] }),
            Request::StreamCredit(StreamCredit {
                stream: "s".to_owned(),
                generation: Some(u64::MAX),
                follower: None,
                limit: 8,
            }),
            Request::StreamAbort(StreamAbort {
                stream: "s".to_owned(),
                generation: None,
                follower: Some(Follower {
                    consumer: "10.0.0.1:15001".to_owned(),
                    incarnation: Incarnation(7),
                    number: u64::MAX,
                }),
                reason: "enough".to_owned(),
            }),
            Request::Ping,
            Request::Health,
        ]
    }

    #[test]
    fn every_request_survives_the_wire() {
        for request in all() {
            let bytes = request.encode().unwrap();
            assert_eq!(Request::decode(&bytes).unwrap(), request);
            assert_eq!(Request::dialect_of(&bytes), request.dialect());
        }
    }

    #[test]
    fn the_foreign_messages_are_golden_in_both_directions() {
        let golden = include_str!("../../testdata/messages.txt");
        let hex = |name: &str| {
            let line = golden.lines().find_map(|line| line.strip_prefix(&format!("{name} "))).unwrap();
            (0..line.len()).step_by(2).map(|i| u8::from_str_radix(&line[i..i + 2], 16).unwrap()).collect()
        };
        let query = Request::Query(Query { request_id: "k@0_1".to_owned(), extra: None });
        for (name, request) in [("query", query), ("pull", Request::Pull(pull(None)))] {
            let bytes: Vec<u8> = hex(name);
            assert_eq!(request.encode().unwrap(), bytes, "{name}");
            assert_eq!(Request::decode(&bytes).unwrap(), request, "{name}");
        }
    }

    #[test]
    fn a_foreign_peer_finds_its_own_fields_first_and_one_more_key() {
        let bytes = Request::Pull(pull(Some(extra()))).encode().unwrap();
        let foreign = Request::Pull(pull(None)).encode().unwrap();
        assert_eq!(bytes[0], 0x86);
        assert_eq!(bytes[1..foreign.len()], foreign[1..]);
        assert_eq!(bytes[foreign.len()..foreign.len() + 3], [0xa2, b'p', b'h']);
    }

    #[test]
    fn unknown_keys_and_any_order_are_accepted() {
        // {"later": [1], "request_id": "k"}
        let mut bytes = QUERY_PREFIX.to_vec();
        bytes.extend_from_slice(b"\x82\xa5later\x91\x01\xaarequest_id\xa1k");
        let Request::Query(query) = Request::decode(&bytes).unwrap() else { panic!("not a query") };
        assert_eq!(query.request_id, "k");
    }

    #[test]
    fn malformed_requests_say_why() {
        let mut trailing = Request::Ping.encode().unwrap();
        trailing.push(0);
        let mut unequal = pull(None);
        unequal.lengths.push(1);
        let no_key = Request::Query(Query { request_id: String::new(), extra: None });
        for (bytes, part) in [
            (b"".to_vec(), "pull"),
            (b"query_info\x80".to_vec(), "request_id"),
            (b"posthorse:\xa5later".to_vec(), "later"),
            (trailing, "bytes follow its end"),
            (Request::Pull(unequal).encode().unwrap(), "1 addresses and 2 lengths"),
            (no_key.encode().unwrap(), "key length is 0"),
        ] {
            let error = Request::decode(&bytes).unwrap_err().to_string();
            assert!(error.contains(part), "{part} is missing in {error}");
        }
    }

    #[test]
    fn what_is_kept_for_a_peer_is_bounded() {
        let long = || "x".repeat(MAX_NAME_BYTES + 1);
        let query = |change: fn(&mut QueryExtra, String)| {
            let mut request = all().remove(1);
            let Request::Query(Query { extra: Some(extra), .. }) = &mut request else { panic!("no query") };
            change(extra, long());
            request
        };
        let pulled = |change: fn(&mut Pull, &mut PullExtra, String)| {
            let (mut changed, mut more) = (pull(None), extra());
            change(&mut changed, &mut more, long());
            Request::Pull(Pull { extra: Some(more), ..changed })
        };
        let (incarnation, pull) = (Incarnation(7), 9);
        for (request, part) in [
            (query(|extra, long| extra.consumer = long), "the consumer's name has 1025 bytes"),
            (query(|extra, _| extra.consumer = "a\nb".to_owned()), "without control characters"),
            (query(|extra, long| extra.hello.fingerprint = Some(long)), "the fingerprint has 1025 bytes"),
            (query(|extra, long| extra.hello.proof = long.into()), "the proof has 1025 bytes"),
            (pulled(|_, extra, long| extra.consumer = long), "the consumer's name has 1025 bytes"),
            (pulled(|_, extra, long| extra.hello.fingerprint = Some(long)), "the fingerprint has 1025 bytes"),
            (pulled(|pull, _, long| pull.remote_hostname = long), "the host of a pull has 1025 bytes"),
            (
                pulled(|pull, _, long| {
                    pull.dst_addrs = vec![0; long.len()];
                    pull.lengths = vec![0; long.len()];
                }),
                "1025 addresses",
            ),
            (
                Request::Cancel(Cancel { consumer: long(), incarnation, pull }),
                "the consumer's name has 1025 bytes",
            ),
            (
                Request::Close(Close { consumer: long(), incarnation, pull, outcome: Outcome::Done }),
                "the consumer's name has 1025 bytes",
            ),
            (
                Request::Renew(Renew { consumer: long(), incarnation, pulls: vec![] }),
                "the consumer's name has 1025 bytes",
            ),
        ] {
            let error = Request::decode(&request.encode().unwrap()).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Malformed, "{error}");
            assert!(error.message().contains(part), "{part} is missing in {error}");
        }
        let fits = query(|extra, mut long| {
            long.pop();
            extra.hello.fingerprint = Some(long.clone());
            extra.consumer = long;
        });
        assert_eq!(Request::decode(&fits.encode().unwrap()).unwrap(), fits);
    }

    #[test]
    fn a_query_or_pull_is_bounded_with_all_that_is_in_it() {
        let mut more = extra();
        more.grant.attributes.insert("tcp".to_owned(), "x".repeat(MAX_KEPT_BYTES).into());
        let error = Request::Pull(pull(Some(more))).encode().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::TooLarge);
        // {"request_id": "k", "x": "xxx..."}
        let mut bytes = b"query_info\x82\xaarequest_id\xa1k\xa1x\xdb\x00\x01\x00\x00".to_vec();
        bytes.extend(std::iter::repeat_n(b'x', 1 << 16));
        assert_eq!(Request::decode(&bytes).unwrap_err().kind(), ErrorKind::TooLarge);
        // What is not kept may be longer: many reads that go on.
        let renew =
            Renew { consumer: "b:1".to_owned(), incarnation: Incarnation(7), pulls: vec![u64::MAX; 9000] };
        let renew = Request::Renew(renew);
        assert_eq!(Request::decode(&renew.encode().unwrap()).unwrap(), renew);
    }

    #[test]
    fn deep_nesting_and_announced_lengths_cost_nothing() {
        let mut deep = b"query_info\x82\xaarequest_id\xa1k\xa1x".to_vec();
        deep.extend(std::iter::repeat_n(0x91, 100_000));
        assert!(Request::decode(&deep).is_err());
        // An array of addresses that announces four thousand million elements.
        let mut long = b"\x81\xa9dst_addrs\xdd".to_vec();
        long.extend_from_slice(&[0xff; 4]);
        assert!(Request::decode(&long).is_err());
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_never_panic(bytes: Vec<u8>, prefix in 0_usize..3) {
            let mut whole = [&b""[..], QUERY_PREFIX, POSTHORSE_PREFIX][prefix].to_vec();
            whole.extend_from_slice(&bytes);
            let _ = Request::decode(&whole);
        }

        #[test]
        fn damaged_requests_never_panic(which in 0_usize..11, at: prop::sample::Index, byte: u8, cut: prop::sample::Index) {
            let mut bytes = all()[which].encode().unwrap();
            let at = at.index(bytes.len());
            bytes[at] = byte;
            bytes.truncate(cut.index(bytes.len()) + 1);
            let _ = Request::decode(&bytes);
        }
    }
}
