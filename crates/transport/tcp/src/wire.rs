//! The frames of a data connection, as pure functions on bytes. All numbers are little-endian.
//!
//! A connection begins with an opening from each side: the magic, a length, and that many bytes of JSON
//! (`hello.rs`). The magic, read as the size field of a Mooncake header, is no size that a Mooncake peer would
//! send: so the first eight bytes tell the protocols apart.
//!
//! Then the initiator sends requests (64 bytes each, a payload behind WRITE and NOTIFY), and the owner of the
//! memory answers with responses (32 bytes each, a payload behind DATA and NACK). Requests are handled in
//! order. A slice of any length travels as pieces of at most [`MAX_PIECE`] bytes under one id.
//!
//! Where both openings say so, each end says by TAKEN, about every [`TAKEN_EVERY`] bytes but between two pieces of its
//! own, how many bytes it has taken from the connection, those of the opening not counted: the other may then use its
//! memory anew.
//!
//! ```text
//! request     0 kind  1 flags  2 zero[6]   8 id  16 address  24 length  32 token[16]  48 checksum  56 zero[8]
//! response    0 kind  1 flags  2 code[2]  4 length[4]  8 id  16 checksum  24 zero[8]
//! ```

use posthorse_core::{Checksum, Error, ErrorKind, GrantToken, Result};

/// What every Posthorse data connection begins with.
pub(crate) const MAGIC: [u8; 8] = *b"PSTHORSE";
/// Bytes of an opening before its body: the magic and the length.
pub(crate) const OPENING_BYTES: usize = 12;
/// The longest body of an opening.
pub(crate) const MAX_OPENING: usize = 16 << 10;
/// Bytes of a request's header.
pub(crate) const REQUEST_BYTES: usize = 64;
/// Bytes of a response's header.
pub(crate) const RESPONSE_BYTES: usize = 32;
/// The longest payload of a WRITE or DATA frame.
pub(crate) const MAX_PIECE: u64 = 1 << 20;
/// The longest payload of a NOTIFY frame.
pub(crate) const MAX_NOTIFY: usize = 1 << 20;
/// The longest slice that a READ may ask for.
pub(crate) const MAX_SLICE: u64 = 1 << 40;
/// The longest message of a NACK.
pub(crate) const MAX_MESSAGE: usize = 512;
/// After how many bytes an end says what it has taken, as soon as it can.
pub(crate) const TAKEN_EVERY: u64 = 512 << 10;

const WRITE: u8 = 1;
const READ: u8 = 2;
const NOTIFY: u8 = 3;
const PING: u8 = 4;
const TAKEN_BY_INITIATOR: u8 = 5;
const ACK: u8 = 0x81;
const NACK: u8 = 0x82;
const DATA: u8 = 0x83;
const PONG: u8 = 0x84;
const TAKEN_BY_OWNER: u8 = 0x85;

const CHECKSUM_MASK: u8 = 0b11;
const TOKEN: u8 = 0b100;
const LAST: u8 = 0b1000;

/// How much of a piece its checksum covers, and its value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Sum {
    pub(crate) mode: Checksum,
    pub(crate) value: u64,
}

#[cfg(test)]
impl Sum {
    pub(crate) const NONE: Self = Self { mode: Checksum::Off, value: 0 };
}

/// What the initiator asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Request {
    /// `len` bytes follow, for `address`. The last piece of an id is answered by ACK or NACK.
    Write { id: u64, address: u64, len: u64, token: Option<GrantToken>, sum: Sum, last: bool },
    /// Answered by DATA pieces and an ACK, or by a NACK.
    Read { id: u64, address: u64, len: u64, token: Option<GrantToken>, checksum: Checksum },
    /// `len` bytes follow. Answered by ACK or NACK.
    Notify { id: u64, len: usize },
    /// Answered by PONG.
    Ping,
    /// So many bytes of responses were taken from the connection. Not answered.
    Taken { bytes: u64 },
}

/// What the owner of the memory answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Response {
    /// Every request up to `id` that was not refused is done.
    Ack { id: u64 },
    /// Request `id` is refused or failed; `len` bytes of message follow.
    Nack { id: u64, code: u16, len: usize },
    /// `len` bytes of what READ `id` asked for follow.
    Data { id: u64, len: u64, sum: Sum },
    /// The owner is there.
    Pong,
    /// So many bytes of requests were taken from the connection.
    Taken { bytes: u64 },
}

impl Request {
    pub(crate) fn encode(&self) -> [u8; REQUEST_BYTES] {
        let mut bytes = [0; REQUEST_BYTES];
        let (kind, flags, id, address, len, token, checksum) = match *self {
            Self::Write { id, address, len, token, sum, last } => {
                let flags = mode_bits(sum.mode) | if last { LAST } else { 0 };
                (WRITE, flags, id, address, len, token, sum.value)
            }
            Self::Read { id, address, len, token, checksum } => {
                (READ, mode_bits(checksum), id, address, len, token, 0)
            }
            Self::Notify { id, len } => (NOTIFY, 0, id, 0, len as u64, None, 0),
            Self::Ping => (PING, 0, 0, 0, 0, None, 0),
            Self::Taken { bytes } => (TAKEN_BY_INITIATOR, 0, 0, 0, bytes, None, 0),
        };
        bytes[0] = kind;
        bytes[1] = flags | if token.is_some() { TOKEN } else { 0 };
        put(&mut bytes, 8, id);
        put(&mut bytes, 16, address);
        put(&mut bytes, 24, len);
        if let Some(token) = token {
            bytes[32..48].copy_from_slice(&token.to_wire());
        }
        put(&mut bytes, 48, checksum);
        bytes
    }

    /// # Errors
    /// `Malformed`, naming the field.
    pub(crate) fn decode(bytes: &[u8; REQUEST_BYTES]) -> Result<Self> {
        let [kind, flags, ..] = *bytes;
        let (id, address, len) = (get(bytes, 8), get(bytes, 16), get(bytes, 24));
        if bytes[2..8].iter().chain(&bytes[56..]).any(|byte| *byte != 0) {
            return Err(malformed("a reserved byte of a request", 1, "0"));
        }
        let token = (flags & TOKEN != 0).then(|| {
            let mut token = [0; GrantToken::WIRE_BYTES];
            token.copy_from_slice(&bytes[32..48]);
            GrantToken::from_wire(token)
        });
        let mode = bits_mode(flags)?;
        match kind {
            WRITE => {
                bounded("the length of a WRITE piece", len, 1, MAX_PIECE)?;
                let sum = Sum { mode, value: get(bytes, 48) };
                Ok(Self::Write { id, address, len, token, sum, last: flags & LAST != 0 })
            }
            READ => {
                bounded("the length of a READ", len, 1, MAX_SLICE)?;
                Ok(Self::Read { id, address, len, token, checksum: mode })
            }
            NOTIFY => {
                bounded("the length of a NOTIFY", len, 0, MAX_NOTIFY as u64)?;
                Ok(Self::Notify { id, len: len as usize })
            }
            PING => Ok(Self::Ping),
            TAKEN_BY_INITIATOR => Ok(Self::Taken { bytes: len }),
            other => Err(malformed("the kind of a request", other.into(), "1 to 5")),
        }
    }
}

impl Response {
    pub(crate) fn encode(&self) -> [u8; RESPONSE_BYTES] {
        let mut bytes = [0; RESPONSE_BYTES];
        let (kind, flags, code, len, id, checksum) = match *self {
            Self::Ack { id } => (ACK, 0, 0, 0, id, 0),
            Self::Nack { id, code, len } => (NACK, 0, code, len as u32, id, 0),
            Self::Data { id, len, sum } => (DATA, mode_bits(sum.mode), 0, len as u32, id, sum.value),
            Self::Pong => (PONG, 0, 0, 0, 0, 0),
            Self::Taken { bytes } => (TAKEN_BY_OWNER, 0, 0, 0, bytes, 0),
        };
        bytes[0] = kind;
        bytes[1] = flags;
        bytes[2..4].copy_from_slice(&code.to_le_bytes());
        bytes[4..8].copy_from_slice(&len.to_le_bytes());
        put(&mut bytes, 8, id);
        put(&mut bytes, 16, checksum);
        bytes
    }

    /// # Errors
    /// `Malformed`, naming the field.
    pub(crate) fn decode(bytes: &[u8; RESPONSE_BYTES]) -> Result<Self> {
        let [kind, flags, code0, code1, len0, len1, len2, len3, ..] = *bytes;
        let len = u64::from(u32::from_le_bytes([len0, len1, len2, len3]));
        let id = get(bytes, 8);
        if bytes[24..].iter().any(|byte| *byte != 0) {
            return Err(malformed("a reserved byte of a response", 1, "0"));
        }
        match kind {
            ACK => Ok(Self::Ack { id }),
            NACK => {
                bounded("the length of a NACK's message", len, 0, MAX_MESSAGE as u64)?;
                Ok(Self::Nack { id, code: u16::from_le_bytes([code0, code1]), len: len as usize })
            }
            DATA => {
                bounded("the length of a DATA piece", len, 1, MAX_PIECE)?;
                let sum = Sum { mode: bits_mode(flags)?, value: get(bytes, 16) };
                Ok(Self::Data { id, len, sum })
            }
            PONG => Ok(Self::Pong),
            TAKEN_BY_OWNER => Ok(Self::Taken { bytes: id }),
            other => Err(malformed("the kind of a response", other.into(), "129 to 133")),
        }
    }
}

/// An opening with this body.
///
/// # Errors
/// `TooLarge` for a body that the other side would refuse.
pub(crate) fn opening(body: &[u8]) -> Result<Vec<u8>> {
    if body.len() > MAX_OPENING {
        return Err(Error::new(
            ErrorKind::TooLarge,
            format!("an opening of {} bytes; accepted: up to {MAX_OPENING}", body.len()),
        ));
    }
    let mut bytes = Vec::with_capacity(OPENING_BYTES + body.len());
    bytes.extend_from_slice(&MAGIC);
    bytes.extend_from_slice(&(body.len() as u32).to_le_bytes());
    bytes.extend_from_slice(body);
    Ok(bytes)
}

/// How many bytes an opening that begins like this has in all, as soon as that is known.
///
/// # Errors
/// `Malformed` when it is not ours or its length is out of bounds.
pub(crate) fn opening_len(bytes: &[u8]) -> Result<Option<usize>> {
    let shared = bytes.len().min(MAGIC.len());
    if bytes[..shared] != MAGIC[..shared] {
        return Err(Error::new(ErrorKind::Malformed, "the connection does not begin with PSTHORSE"));
    }
    let Some(&[a, b, c, d]) = bytes.get(8..OPENING_BYTES).and_then(|len| len.as_array()) else {
        return Ok(None);
    };
    let len = u32::from_le_bytes([a, b, c, d]);
    bounded("the length of an opening", len.into(), 2, MAX_OPENING as u64)?;
    Ok(Some(OPENING_BYTES + len as usize))
}

fn mode_bits(mode: Checksum) -> u8 {
    match mode {
        Checksum::Off => 0,
        Checksum::Sampled => 1,
        Checksum::Full => 2,
    }
}

fn bits_mode(flags: u8) -> Result<Checksum> {
    match flags & CHECKSUM_MASK {
        0 => Ok(Checksum::Off),
        1 => Ok(Checksum::Sampled),
        2 => Ok(Checksum::Full),
        other => Err(malformed("the checksum mode", other.into(), "0 to 2")),
    }
}

fn put(bytes: &mut [u8], at: usize, value: u64) {
    bytes[at..at + 8].copy_from_slice(&value.to_le_bytes());
}

fn get(bytes: &[u8], at: usize) -> u64 {
    let mut value = [0; 8];
    value.copy_from_slice(&bytes[at..at + 8]);
    u64::from_le_bytes(value)
}

fn bounded(what: &str, value: u64, min: u64, max: u64) -> Result<()> {
    if (min..=max).contains(&value) {
        Ok(())
    } else {
        Err(malformed(what, value, &format!("{min} to {max}")))
    }
}

fn malformed(what: &str, value: u64, accepted: &str) -> Error {
    Error::new(ErrorKind::Malformed, format!("{what} is {value}; accepted: {accepted}"))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const TOKEN: GrantToken = GrantToken { handle: 0x0102_0304_0506_0708, secret: 0x1112_1314_1516_1718 };

    fn checksum() -> impl Strategy<Value = Checksum> {
        prop_oneof![Just(Checksum::Off), Just(Checksum::Sampled), Just(Checksum::Full)]
    }

    fn token() -> impl Strategy<Value = Option<GrantToken>> {
        proptest::option::of(any::<(u64, u64)>().prop_map(|(handle, secret)| GrantToken { handle, secret }))
    }

    fn request() -> impl Strategy<Value = Request> {
        let sum = (checksum(), any::<u64>()).prop_map(|(mode, value)| Sum { mode, value });
        prop_oneof![
            (any::<(u64, u64)>(), 1..=MAX_PIECE, token(), sum, any::<bool>()).prop_map(
                |((id, address), len, token, sum, last)| Request::Write {
                    id,
                    address,
                    len,
                    token,
                    sum,
                    last
                }
            ),
            (any::<(u64, u64)>(), 1..=MAX_SLICE, token(), checksum()).prop_map(
                |((id, address), len, token, checksum)| Request::Read { id, address, len, token, checksum }
            ),
            (any::<u64>(), 0..=MAX_NOTIFY).prop_map(|(id, len)| Request::Notify { id, len }),
            Just(Request::Ping),
            any::<u64>().prop_map(|bytes| Request::Taken { bytes }),
        ]
    }

    fn response() -> impl Strategy<Value = Response> {
        let sum = (checksum(), any::<u64>()).prop_map(|(mode, value)| Sum { mode, value });
        prop_oneof![
            any::<u64>().prop_map(|id| Response::Ack { id }),
            (any::<(u64, u16)>(), 0..=MAX_MESSAGE).prop_map(|((id, code), len)| Response::Nack {
                id,
                code,
                len
            }),
            (any::<u64>(), 1..=MAX_PIECE, sum).prop_map(|(id, len, sum)| Response::Data { id, len, sum }),
            Just(Response::Pong),
            any::<u64>().prop_map(|bytes| Response::Taken { bytes }),
        ]
    }

    proptest! {
        #[test]
        fn requests_round_trip(request in request()) {
            prop_assert_eq!(Request::decode(&request.encode()).unwrap(), request);
        }

        #[test]
        fn responses_round_trip(response in response()) {
            prop_assert_eq!(Response::decode(&response.encode()).unwrap(), response);
        }

        #[test]
        fn a_reserved_byte_that_is_not_zero_is_refused(
            request in request(),
            response in response(),
            of_request in prop_oneof![2_usize..8, 56..REQUEST_BYTES],
            of_response in 24..RESPONSE_BYTES,
        ) {
            let (mut request, mut response) = (request.encode(), response.encode());
            (request[of_request], response[of_response]) = (1, 1);
            prop_assert_eq!(Request::decode(&request).unwrap_err().kind(), ErrorKind::Malformed);
            prop_assert_eq!(Response::decode(&response).unwrap_err().kind(), ErrorKind::Malformed);
        }

        #[test]
        fn arbitrary_bytes_are_decoded_within_bounds_or_refused(bytes: [u8; REQUEST_BYTES]) {
            if let Ok(Request::Write { len, .. }) = Request::decode(&bytes) {
                prop_assert!(len <= MAX_PIECE);
            }
            let mut half = [0; RESPONSE_BYTES];
            half.copy_from_slice(&bytes[..RESPONSE_BYTES]);
            if let Ok(Response::Data { len, .. }) = Response::decode(&half) {
                prop_assert!(len <= MAX_PIECE);
            }
            if let Ok(Some(len)) = opening_len(&bytes) {
                prop_assert!(len <= OPENING_BYTES + MAX_OPENING);
            }
        }
    }

    /// The bytes on the wire, as `testdata/frames.hex` has them: a release must not change them unawares.
    #[test]
    fn the_frames_are_those_of_the_golden_file() {
        let sum = Sum { mode: Checksum::Full, value: 0xa1a2_a3a4_a5a6_a7a8 };
        let frames: [(&str, Vec<u8>); 11] = [
            ("opening", opening(b"{}").unwrap()),
            (
                "write",
                Request::Write {
                    id: 7,
                    address: 0x7f00_1234,
                    len: 4096,
                    token: Some(TOKEN),
                    sum,
                    last: true,
                }
                .encode()
                .to_vec(),
            ),
            (
                "read",
                Request::Read {
                    id: 8,
                    address: 1 << 47,
                    len: 1 << 30,
                    token: None,
                    checksum: Checksum::Sampled,
                }
                .encode()
                .to_vec(),
            ),
            ("notify", Request::Notify { id: 9, len: 5 }.encode().to_vec()),
            ("ping", Request::Ping.encode().to_vec()),
            ("ack", Response::Ack { id: 7 }.encode().to_vec()),
            ("nack", Response::Nack { id: 8, code: 105, len: 3 }.encode().to_vec()),
            ("data", Response::Data { id: 8, len: MAX_PIECE, sum }.encode().to_vec()),
            ("pong", Response::Pong.encode().to_vec()),
            ("taken_by_initiator", Request::Taken { bytes: 1 << 33 }.encode().to_vec()),
            ("taken_by_owner", Response::Taken { bytes: 1 << 33 }.encode().to_vec()),
        ];
        let text: String = frames
            .iter()
            .map(|(name, bytes)| {
                let hex: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
                format!("{name} {hex}\n")
            })
            .collect();
        assert_eq!(text, include_str!("../testdata/frames.hex"));
    }

    #[test]
    fn a_refusal_names_the_field_and_what_is_accepted() {
        let mut bytes =
            Request::Write { id: 0, address: 0, len: 1, token: None, sum: Sum::NONE, last: true }.encode();
        bytes[24..32].copy_from_slice(&(MAX_PIECE + 1).to_le_bytes());
        let error = Request::decode(&bytes).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Malformed);
        assert!(error.to_string().contains("WRITE piece is 1048577"), "{error}");
        assert!(opening_len(b"GET / HTTP/1.1\r\n").is_err());
        assert!(opening_len(b"PSTHORSE\xff\xff\xff\xff").is_err());
        assert_eq!(opening_len(b"PSTH").unwrap(), None);
    }
}
