//! ZMTP 3, the protocol between ZeroMQ sockets, as far as requests and replies need it.
//!
//! <https://rfc.zeromq.org/spec/23/> (3.0) and <https://rfc.zeromq.org/spec/37/> (3.1): greeting, the NULL
//! mechanism's READY, messages of frames, PING and PONG. No I/O: bytes go in, events come out. No memory is
//! taken for a length that is announced and not allowed, and none for more frames than a request has.

use bytes::{Buf, Bytes, BytesMut};
use posthorse_core::{Error, ErrorKind, Result};

const GREETING_BYTES: usize = 64;
const MORE: u8 = 1;
const LONG: u8 = 2;
const COMMAND: u8 = 4;
/// The longest command: READY's few properties, PING's context of 16 bytes, with room for unknown ones.
const MAX_COMMAND_BYTES: u64 = 1024;
/// How much memory is taken for bytes that are announced and have not arrived: more follows as they do.
const READ_AHEAD: usize = 64 << 10;
/// The most frames of a message: a request has an empty one and the payload, and may have passed some hops.
const MAX_FRAMES: usize = 16;

/// What a socket says it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SocketType {
    Req,
    Router,
}

impl SocketType {
    const fn name(self) -> &'static str {
        match self {
            Self::Req => "REQ",
            Self::Router => "ROUTER",
        }
    }

    /// The socket types that this one talks to.
    const fn peers(self) -> &'static [&'static str] {
        match self {
            Self::Req => &["ROUTER", "REP"],
            Self::Router => &["REQ", "DEALER"],
        }
    }
}

/// What arrived.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Event {
    /// The handshake is complete.
    Ready,
    /// The last frame of a message: the payload. Those before it are routing.
    Message(Bytes),
    /// A PING, to be answered with this PONG.
    Ping(Vec<u8>),
    /// A PONG, or a command that means nothing here: the peer is alive.
    Alive,
}

#[derive(Debug, PartialEq, Eq)]
enum State {
    Greeting,
    Handshake,
    Traffic,
}

/// The receiving half of a connection.
#[derive(Debug)]
pub(crate) struct Decoder {
    /// Bytes received and not yet understood.
    pub(crate) input: BytesMut,
    own: SocketType,
    max_message: usize,
    state: State,
    minor: u8,
    frames: usize,
    frame_bytes: usize,
}

impl Decoder {
    /// A decoder of what a peer of an `own` socket sends, with messages of at most `max_message` bytes.
    pub(crate) fn new(own: SocketType, max_message: usize) -> Self {
        Self {
            input: BytesMut::new(),
            own,
            max_message,
            state: State::Greeting,
            minor: 0,
            frames: 0,
            frame_bytes: 0,
        }
    }

    /// Whether the peer knows PING, which version 3.1 brought.
    pub(crate) const fn knows_ping(&self) -> bool {
        self.minor >= 1
    }

    /// The next event, or `None` until more bytes have arrived.
    pub(crate) fn next(&mut self) -> Result<Option<Event>> {
        if self.state == State::Greeting {
            if !self.greeting()? {
                return Ok(None);
            }
            self.state = State::Handshake;
        }
        loop {
            let Some((flags, body)) = self.frame()? else { return Ok(None) };
            if flags & COMMAND != 0 {
                return self.command(&body).map(Some);
            }
            if self.state == State::Handshake {
                return Err(malformed("a message came before READY"));
            }
            self.frames += 1;
            self.frame_bytes += body.len();
            if flags & MORE == 0 {
                (self.frames, self.frame_bytes) = (0, 0);
                return Ok(Some(Event::Message(body)));
            }
            if self.frames >= MAX_FRAMES {
                return Err(malformed(format!("a message has more than {MAX_FRAMES} frames")));
            }
        }
    }

    /// Checks as much of the greeting as has arrived, so that a stranger is refused by its first bytes.
    fn greeting(&mut self) -> Result<bool> {
        let input = &self.input;
        let at = |i: usize| input.get(i).copied();
        if at(0).is_some_and(|b| b != 0xff) || at(9).is_some_and(|b| b != 0x7f) {
            return Err(malformed("the peer does not speak ZMTP"));
        }
        if let Some(major) = at(10).filter(|major| *major < 3) {
            return Err(malformed(format!("the peer speaks ZMTP {major}; accepted: 3")));
        }
        if input.len() < GREETING_BYTES {
            return Ok(false);
        }
        if input[12..32] != null_mechanism() {
            let name = String::from_utf8_lossy(&input[12..32]).trim_end_matches('\0').to_owned();
            let name = crate::message::printable(&name);
            return Err(malformed(format!("the peer wants the mechanism {name:?}; accepted: NULL")));
        }
        // A later major version falls back to ours.
        self.minor = if input[10] > 3 { 1 } else { input[11] };
        self.input.advance(GREETING_BYTES);
        Ok(true)
    }

    fn frame(&mut self) -> Result<Option<(u8, Bytes)>> {
        let Some(&flags) = self.input.first() else { return Ok(None) };
        if flags & !(MORE | LONG | COMMAND) != 0 || flags & (COMMAND | MORE) == COMMAND | MORE {
            return Err(malformed(format!("a frame has the flags {flags:#04x}")));
        }
        let (header, len) = if flags & LONG == 0 {
            let Some(&len) = self.input.get(1) else { return Ok(None) };
            (2, u64::from(len))
        } else {
            let Some(len) = self.input.get(1..9).and_then(|bytes| <[u8; 8]>::try_from(bytes).ok()) else {
                return Ok(None);
            };
            (9, u64::from_be_bytes(len))
        };
        let allowed = if flags & COMMAND != 0 || self.state == State::Handshake {
            MAX_COMMAND_BYTES
        } else {
            (self.max_message - self.frame_bytes) as u64
        };
        if len > allowed {
            return Err(Error::new(
                ErrorKind::TooLarge,
                format!("ZMTP: a frame of {len} bytes is announced; accepted here: {allowed}"),
            ));
        }
        let whole = header + len as usize;
        if self.input.len() < whole {
            self.input.reserve((whole - self.input.len()).min(READ_AHEAD));
            return Ok(None);
        }
        self.input.advance(header);
        Ok(Some((flags, self.input.split_to(len as usize).freeze())))
    }

    fn command(&mut self, body: &[u8]) -> Result<Event> {
        let (name, data) = split_short(body).ok_or_else(|| malformed("a command has no name"))?;
        match (name, &self.state) {
            (b"READY", State::Handshake) => {
                self.ready(data)?;
                self.state = State::Traffic;
                Ok(Event::Ready)
            }
            (b"ERROR", _) => {
                let reason = split_short(data).map_or(&b""[..], |(reason, _)| reason);
                let reason = crate::message::printable(&String::from_utf8_lossy(reason));
                let message = format!("ZMTP: the peer refused: {reason:?}");
                Err(if reason.starts_with(ErrorKind::LimitReached.name()) {
                    let advice = "ask again later, or raise max_connections or the descriptor limit there";
                    Error::new(ErrorKind::LimitReached, message).with_advice(advice)
                } else {
                    Error::new(ErrorKind::PeerRefused, message)
                })
            }
            (_, State::Handshake) => Err(malformed("a command came before READY")),
            (b"PING", _) => match data.get(2..) {
                Some(context) if context.len() <= 16 => Ok(Event::Ping(context.to_vec())),
                _ => Err(malformed(format!("a PING of {} bytes", data.len()))),
            },
            _ => Ok(Event::Alive),
        }
    }

    fn ready(&self, mut data: &[u8]) -> Result<()> {
        let mut socket_type = None;
        while !data.is_empty() {
            let property = split_short(data).and_then(|(name, rest)| {
                let (len, rest) = rest.split_first_chunk::<4>()?;
                let (value, rest) = rest.split_at_checked(u32::from_be_bytes(*len) as usize)?;
                Some((name, value, rest))
            });
            let Some((name, value, rest)) = property else {
                return Err(malformed("the properties of READY are cut short"));
            };
            if name.eq_ignore_ascii_case(b"Socket-Type") {
                socket_type = Some(value);
            }
            data = rest;
        }
        let theirs = String::from_utf8_lossy(socket_type.unwrap_or_default()).into_owned();
        let accepted = self.own.peers();
        if accepted.contains(&&*theirs) {
            return Ok(());
        }
        let theirs = crate::message::printable(&theirs);
        Err(malformed(format!("the peer is a socket {theirs:?}; accepted: {}", accepted.join(", "))))
    }
}

/// What both sides send first: signature, version 3.1, mechanism, as-server, filler.
pub(crate) fn greeting() -> [u8; GREETING_BYTES] {
    let mut greeting = [0; GREETING_BYTES];
    greeting[0] = 0xff;
    greeting[8] = 1;
    greeting[9] = 0x7f;
    greeting[10] = 3;
    greeting[11] = 1;
    greeting[12..32].copy_from_slice(&null_mechanism());
    greeting
}

/// The READY of a socket without an identity of its own.
pub(crate) fn ready(own: SocketType) -> Vec<u8> {
    let mut body = b"\x05READY".to_vec();
    for (name, value) in [("Socket-Type", own.name()), ("Identity", "")] {
        body.push(name.len() as u8);
        body.extend_from_slice(name.as_bytes());
        body.extend_from_slice(&(value.len() as u32).to_be_bytes());
        body.extend_from_slice(value.as_bytes());
    }
    let mut out = Vec::new();
    push_frame(&mut out, COMMAND, &body);
    out
}

/// The refusal of a connection, instead of READY: with a reason of at most 255 bytes.
pub(crate) fn error(reason: &str) -> Vec<u8> {
    let reason = reason.as_bytes();
    let reason = &reason[..reason.len().min(255)];
    let mut out = Vec::new();
    push_frame(&mut out, COMMAND, &[b"\x05ERROR", &[reason.len() as u8][..], reason].concat());
    out
}

/// A request or reply: the empty frame of REQ sockets, then the payload.
pub(crate) fn message(payload: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(payload.len() + 11);
    push_frame(&mut out, MORE, b"");
    push_frame(&mut out, 0, payload);
    out
}

/// A PING without context. Its time to live, in tenths of a second, is how long the peer keeps a silent
/// connection: zero, as it likes.
pub(crate) fn ping() -> Vec<u8> {
    let mut out = Vec::new();
    push_frame(&mut out, COMMAND, b"\x04PING\0\0");
    out
}

/// The PONG to a PING with this context.
pub(crate) fn pong(context: &[u8]) -> Vec<u8> {
    let mut out = Vec::new();
    push_frame(&mut out, COMMAND, &[b"\x04PONG", context].concat());
    out
}

fn push_frame(out: &mut Vec<u8>, flags: u8, body: &[u8]) {
    match u8::try_from(body.len()) {
        Ok(len) => out.extend_from_slice(&[flags, len]),
        Err(_) => {
            out.push(flags | LONG);
            out.extend_from_slice(&(body.len() as u64).to_be_bytes());
        }
    }
    out.extend_from_slice(body);
}

fn null_mechanism() -> [u8; 20] {
    let mut name = [0; 20];
    name[..4].copy_from_slice(b"NULL");
    name
}

/// A byte of length, that many bytes, and the rest.
fn split_short(bytes: &[u8]) -> Option<(&[u8], &[u8])> {
    let (&len, rest) = bytes.split_first()?;
    rest.split_at_checked(len.into())
}

fn malformed(why: impl Into<std::borrow::Cow<'static, str>>) -> Error {
    Error::new(ErrorKind::Malformed, why).context("ZMTP")
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const MAX: usize = 1000;

    fn feed(decoder: &mut Decoder, bytes: &[u8]) -> Result<Vec<Event>> {
        decoder.input.extend_from_slice(bytes);
        let mut events = Vec::new();
        while let Some(event) = decoder.next()? {
            events.push(event);
        }
        Ok(events)
    }

    fn connected() -> Decoder {
        let mut decoder = Decoder::new(SocketType::Router, MAX);
        let opening = [&greeting()[..], &ready(SocketType::Req)].concat();
        assert_eq!(feed(&mut decoder, &opening).unwrap(), [Event::Ready]);
        decoder
    }

    fn conversation() -> Vec<u8> {
        let long = vec![7; 300];
        let mut bytes = [&greeting()[..], &ready(SocketType::Req), &message(b"hi"), &ping()].concat();
        push_frame(&mut bytes, COMMAND, b"\x04PONGx");
        // From a DEALER: no empty frame.
        push_frame(&mut bytes, 0, &long);
        bytes
    }

    #[test]
    fn a_conversation_is_understood_however_it_is_cut() {
        let bytes = conversation();
        let wanted = [
            Event::Ready,
            Event::Message(Bytes::from_static(b"hi")),
            Event::Ping(Vec::new()),
            Event::Alive,
            Event::Message(vec![7; 300].into()),
        ];
        for step in [1, 2, 7, 64, bytes.len()] {
            let mut decoder = Decoder::new(SocketType::Router, MAX);
            let events: Vec<Event> =
                bytes.chunks(step).flat_map(|chunk| feed(&mut decoder, chunk).unwrap()).collect();
            assert_eq!(events, wanted, "in pieces of {step}");
            assert!(decoder.knows_ping());
        }
    }

    #[test]
    fn announced_lengths_cost_nothing() {
        for len in [2000, 1 << 34, 1 << 62, u64::MAX] {
            for (flags, prefix) in [(LONG, &b""[..]), (LONG | COMMAND, b""), (LONG, b"\x01\x01x")] {
                let mut decoder = connected();
                feed(&mut decoder, prefix).unwrap();
                let header = [&[flags][..], &len.to_be_bytes()].concat();
                let error = feed(&mut decoder, &header).unwrap_err();
                assert_eq!(error.kind(), ErrorKind::TooLarge);
                assert!(decoder.input.capacity() < 100_000);
            }
            let mut unready = Decoder::new(SocketType::Router, MAX);
            let opening = [&greeting()[..], &[LONG | COMMAND], &len.to_be_bytes()].concat();
            assert!(feed(&mut unready, &opening).is_err());
        }
        let mut decoder = connected();
        let exact = message(&[1; MAX]);
        assert_eq!(feed(&mut decoder, &exact).unwrap(), [Event::Message(vec![1; MAX].into())]);
        assert!(feed(&mut decoder, &message(&[1; MAX + 1])).is_err());
    }

    #[test]
    fn an_announced_message_takes_memory_as_it_arrives() {
        const LARGE: usize = 1 << 20;
        let mut decoder = Decoder::new(SocketType::Router, LARGE);
        let bytes = [&greeting()[..], &ready(SocketType::Req), &message(&vec![3; LARGE])].concat();
        let (begun, rest) = bytes.split_at(200);
        assert_eq!(feed(&mut decoder, begun).unwrap(), [Event::Ready]);
        assert!(decoder.input.capacity() <= 2 * READ_AHEAD, "{}", decoder.input.capacity());
        let events: Vec<_> =
            rest.chunks(READ_AHEAD).flat_map(|part| feed(&mut decoder, part).unwrap()).collect();
        assert_eq!(events, [Event::Message(vec![3; LARGE].into())]);
    }

    #[test]
    fn strangers_are_refused_by_their_first_bytes() {
        let greet = |edit: &dyn Fn(&mut [u8])| {
            let mut bytes = greeting().to_vec();
            edit(&mut bytes);
            bytes
        };
        for (bytes, part) in [
            (b"GET / HTTP/1.1".to_vec(), "does not speak ZMTP"),
            (greet(&|b| b[9] = 0), "does not speak ZMTP"),
            (greet(&|b| b[10] = 2), "ZMTP 2"),
            (greet(&|b| b[12..17].copy_from_slice(b"CURVE")), "CURVE"),
            ([&greeting()[..], &message(b"early")].concat(), "before READY"),
            ([&greeting()[..], &ping()].concat(), "before READY"),
            ([&greeting()[..], &ready(SocketType::Router)].concat(), "\"ROUTER\"; accepted: REQ, DEALER"),
            ([&greeting()[..], b"\x04\x07\x05READY\x09"].concat(), "cut short"),
            ([&greeting()[..], b"\x04\x0c\x05ERROR\x05go\naw"].concat(), "go\\u{fffd}aw"),
            ([&greeting()[..], b"\x08\x00"].concat(), "flags 0x08"),
            ([&greeting()[..], b"\x04\x00"].concat(), "no name"),
        ] {
            let error = feed(&mut Decoder::new(SocketType::Router, MAX), &bytes).unwrap_err().to_string();
            let part = part.replace("\\u{fffd}", "\u{fffd}");
            assert!(error.contains(&part), "{part} is missing in {error}");
        }
    }

    #[test]
    fn endless_frames_of_one_message_are_refused() {
        let mut decoder = connected();
        assert!(feed(&mut decoder, &[MORE, 0].repeat(MAX_FRAMES)).is_err());
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_never_panic_nor_grow(bytes: Vec<u8>, opened: bool) {
            let mut decoder = if opened { connected() } else { Decoder::new(SocketType::Req, MAX) };
            let _ = feed(&mut decoder, &bytes);
            prop_assert!(decoder.input.capacity() < 100_000);
        }

        #[test]
        fn a_damaged_conversation_never_panics(at: prop::sample::Index, byte: u8) {
            let mut bytes = conversation();
            let at = at.index(bytes.len());
            bytes[at] = byte;
            let _ = feed(&mut Decoder::new(SocketType::Router, MAX), &bytes);
        }
    }
}
