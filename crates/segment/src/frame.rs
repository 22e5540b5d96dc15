//! The frames of the handshake port, as Mooncake Transfer Engine sends them: a length of 8 bytes, little-endian,
//! that counts what follows; a byte of type; the body. No I/O happens here.
//!
//! A first byte above 3 (and below 0x80, as the other side compares it as a signed number) means a peer of the
//! protocol's first release, which sends no type byte: the whole payload is the body of a connection request.
//! Posthorse's own type is one that such a body cannot begin with, so that foreign peers close on it.

use posthorse_core::{Error, ErrorKind, Result};

/// The longest payload that both sides accept unless they were told otherwise, in bytes.
pub const DEFAULT_PAYLOAD: usize = 1 << 20;

/// The longest payload that can be allowed, in bytes.
pub const MAX_PAYLOAD: usize = 128 << 20;

const LENGTH_BYTES: usize = 8;

/// What the first allocation for a payload is, at the most: more follows as bytes arrive.
const FIRST_ALLOCATION: usize = 64 << 10;

/// What a frame is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum FrameType {
    /// An RDMA connection is asked for.
    Connection,
    /// The peer's segment descriptor is asked for.
    Metadata,
    /// A message for the application.
    Notify,
    /// Is anybody there?
    Probe,
    /// A connection request of the protocol's first release, without a type byte.
    Untyped,
    /// A [control message](crate::handshake) between Posthorse peers.
    Control,
}

impl FrameType {
    const fn byte(self) -> Option<u8> {
        match self {
            Self::Connection => Some(0),
            Self::Metadata => Some(1),
            Self::Notify => Some(2),
            Self::Probe => Some(3),
            Self::Control => Some(0x50),
            Self::Untyped => None,
        }
    }

    fn of_byte(byte: u8) -> Result<Self> {
        match byte {
            0 => Ok(Self::Connection),
            1 => Ok(Self::Metadata),
            2 => Ok(Self::Notify),
            3 => Ok(Self::Probe),
            0x50 => Ok(Self::Control),
            4..=0x7f => Ok(Self::Untyped),
            0x80.. => Err(malformed(format!("its type is {byte:#x}; known: 0 to 3, 0x50"))),
        }
    }
}

/// A frame as it was received.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Frame {
    /// What it is about.
    pub frame_type: FrameType,
    /// What it says.
    pub body: Vec<u8>,
}

/// The bytes of a frame, whose payload may have at most `limit` bytes.
///
/// # Errors
/// `TooLarge`, naming size and limit; `InvalidArgument` for an untyped body that would be taken for a typed one.
pub fn encode(frame_type: FrameType, body: &[u8], limit: usize) -> Result<Vec<u8>> {
    let byte = frame_type.byte();
    let first = body.first().map(|first| FrameType::of_byte(*first));
    if byte.is_none() && !matches!(first, Some(Ok(FrameType::Untyped))) {
        return Err(Error::invalid_argument(
            "first byte of an untyped frame",
            format_args!("{:?}", body.first()),
            "JSON",
        ));
    }
    let payload = body.len() + usize::from(byte.is_some());
    if payload > limit {
        return Err(Error::new(
            ErrorKind::TooLarge,
            format!("a handshake frame of {payload} bytes exceeds the limit of {limit}"),
        )
        .with_advice("raise the limit of handshake frames on both sides"));
    }
    let mut bytes = Vec::with_capacity(LENGTH_BYTES + payload);
    bytes.extend_from_slice(&(payload as u64).to_le_bytes());
    bytes.extend(byte);
    bytes.extend_from_slice(body);
    Ok(bytes)
}

/// Makes frames of the bytes of a stream, however they are cut.
#[derive(Debug)]
pub struct FrameDecoder {
    limit: usize,
    length: [u8; LENGTH_BYTES],
    /// How much of the length is there.
    have: usize,
    /// The type, and how long the body will be.
    begun: Option<(FrameType, usize)>,
    body: Vec<u8>,
}

impl FrameDecoder {
    /// A decoder that refuses payloads of more than `limit` bytes.
    pub const fn new(limit: usize) -> Self {
        Self { limit, length: [0; LENGTH_BYTES], have: 0, begun: None, body: Vec::new() }
    }

    /// Takes bytes from the front of `input`, and returns a frame as soon as one is complete. Bytes behind it
    /// stay in `input`; `None` has taken everything.
    ///
    /// # Errors
    /// `Malformed` for a length or type that is not accepted; the stream cannot be used any more.
    pub fn decode(&mut self, input: &mut &[u8]) -> Result<Option<Frame>> {
        self.have += take(input, &mut self.length[self.have..]);
        if self.have < LENGTH_BYTES {
            return Ok(None);
        }
        let announced = u64::from_le_bytes(self.length);
        let len = usize::try_from(announced)
            .ok()
            .filter(|len| (1..=self.limit).contains(len))
            .ok_or_else(|| malformed(format!("its length is {announced}; accepted: 1 to {}", self.limit)))?;
        let (frame_type, len) = match self.begun {
            Some(begun) => begun,
            None => {
                let Some((first, rest)) = input.split_first() else { return Ok(None) };
                let frame_type = FrameType::of_byte(*first)?;
                let mut body = len;
                if frame_type != FrameType::Untyped {
                    *input = rest;
                    body -= 1;
                }
                self.body.reserve(body.min(FIRST_ALLOCATION));
                *self.begun.insert((frame_type, body))
            }
        };
        let (now, later) = input.split_at(input.len().min(len - self.body.len()));
        self.body.extend_from_slice(now);
        *input = later;
        if self.body.len() < len {
            return Ok(None);
        }
        self.have = 0;
        self.begun = None;
        Ok(Some(Frame { frame_type, body: std::mem::take(&mut self.body) }))
    }

    /// Whether a frame has begun that is not complete.
    pub const fn is_within_frame(&self) -> bool {
        self.have > 0
    }
}

/// Moves as many bytes as there are and fit, and returns how many.
fn take(input: &mut &[u8], to: &mut [u8]) -> usize {
    let (now, later) = input.split_at(input.len().min(to.len()));
    to[..now.len()].copy_from_slice(now);
    *input = later;
    now.len()
}

fn malformed(why: String) -> Error {
    Error::new(ErrorKind::Malformed, format!("a handshake frame: {why}"))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const METADATA: &[u8] = include_bytes!("../testdata/metadata.frame");
    const NOTIFY: &[u8] = include_bytes!("../testdata/notify.frame");
    const PROBE: &[u8] = include_bytes!("../testdata/probe.frame");

    fn only(mut bytes: &[u8]) -> Frame {
        let frame = FrameDecoder::new(DEFAULT_PAYLOAD).decode(&mut bytes).unwrap().unwrap();
        assert!(bytes.is_empty());
        frame
    }

    #[test]
    fn captured_frames_are_read_and_written() {
        let json = include_bytes!("../testdata/mooncake-tcp.json");
        for (bytes, frame_type, body) in [
            (METADATA, FrameType::Metadata, &json[..]),
            (NOTIFY, FrameType::Notify, b"{\"name\":\"n\",\"notify_msg\":\"m\"}\n"),
            (PROBE, FrameType::Probe, b"{}\n"),
        ] {
            assert_eq!(only(bytes), Frame { frame_type, body: body.to_vec() });
            assert_eq!(encode(frame_type, body, DEFAULT_PAYLOAD).unwrap(), bytes);
        }
        assert_eq!((METADATA[0], METADATA[8], NOTIFY[0], PROBE[0]), (255, 1, 31, 4));
    }

    #[test]
    fn a_payload_without_type_is_a_connection_request_of_the_first_release() {
        let body = b"{\"local_nic_path\":\"a@b\"}";
        let bytes = encode(FrameType::Untyped, body, DEFAULT_PAYLOAD).unwrap();
        assert_eq!(only(&bytes), Frame { frame_type: FrameType::Untyped, body: body.to_vec() });
        assert_eq!(only(&[1, 0, 0, 0, 0, 0, 0, 0, 4]).frame_type, FrameType::Untyped);
        for body in [&b""[..], b"\x01", b"Px", b"\xff"] {
            assert!(encode(FrameType::Untyped, body, 100).is_err());
        }
    }

    #[test]
    fn lengths_and_types_are_refused_before_anything_is_allocated() {
        let decode = |limit, bytes: &[u8]| {
            let mut decoder = FrameDecoder::new(limit);
            let result = decoder.decode(&mut &*bytes);
            assert!(decoder.body.capacity() <= FIRST_ALLOCATION);
            result
        };
        for length in [0, 101, u64::MAX, 1 << 63] {
            let error = decode(100, &length.to_le_bytes()).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Malformed);
            assert!(error.to_string().contains(&format!("{length}; accepted: 1 to 100")), "{error}");
        }
        let mut bytes = 5_u64.to_le_bytes().to_vec();
        bytes.push(0xfe);
        assert!(decode(100, &bytes).unwrap_err().to_string().contains("0xfe"));
        let mut bytes = (MAX_PAYLOAD as u64).to_le_bytes().to_vec();
        bytes.extend([1, 2, 3]);
        assert_eq!(decode(MAX_PAYLOAD, &bytes).unwrap(), None);
        let error = encode(FrameType::Metadata, &[0; 100], 100).unwrap_err();
        assert!(error.kind() == ErrorKind::TooLarge && error.to_string().contains("101"), "{error}");
    }

    proptest! {
        #[test]
        fn frames_survive_any_cutting(
            frames in proptest::collection::vec((0..5_usize, proptest::collection::vec(any::<u8>(), 0..40)), 1..5),
            cuts in proptest::collection::vec(1..30_usize, 1..50),
        ) {
            const TYPES: [FrameType; 5] = [
                FrameType::Connection, FrameType::Metadata, FrameType::Notify, FrameType::Probe, FrameType::Control,
            ];
            let frames: Vec<_> =
                frames.into_iter().map(|(n, body)| Frame { frame_type: TYPES[n], body }).collect();
            let bytes: Vec<u8> =
                frames.iter().flat_map(|frame| encode(frame.frame_type, &frame.body, 100).unwrap()).collect();
            let mut decoder = FrameDecoder::new(100);
            let (mut decoded, mut rest, mut cuts) = (Vec::new(), &bytes[..], cuts.iter().cycle());
            while !rest.is_empty() {
                let (mut now, later) = rest.split_at(rest.len().min(*cuts.next().unwrap()));
                rest = later;
                while let Some(frame) = decoder.decode(&mut now).unwrap() {
                    decoded.push(frame);
                }
                prop_assert!(now.is_empty());
            }
            prop_assert!(!decoder.is_within_frame());
            prop_assert_eq!(decoded, frames);
        }

        #[test]
        fn arbitrary_bytes_never_panic_and_are_always_taken(bytes: Vec<u8>, short: bool) {
            let mut bytes = bytes;
            if short {
                // Lengths that are accepted.
                bytes.iter_mut().skip(1).step_by(2).take(7).for_each(|byte| *byte = 0);
                bytes.splice(0..0, [9, 0, 0, 0, 0, 0, 0, 0]);
            }
            let (mut decoder, mut rest) = (FrameDecoder::new(64), &bytes[..]);
            while let Ok(Some(_)) = decoder.decode(&mut rest) {}
        }
    }
}
