//! What `fuzz/` and the replay of its corpus hand bytes to: decoding never panics, and what decodes survives being
//! encoded again.

use std::time::UNIX_EPOCH;

use posthorse_core::ErrorKind;

use crate::descriptor::{self, DescriptorLimits};
use crate::frame::{self, DEFAULT_PAYLOAD, Frame, FrameDecoder};
use crate::handshake::message::{Control, GREETING_BYTES, Notice, to_json};

/// A stream of frames, which the first byte says how to cut: the cuts make no difference.
///
/// # Panics
/// When the decoder is wrong.
pub fn frames(bytes: &[u8]) {
    let Some((cut, stream)) = bytes.split_first() else { return };
    let whole = read(std::iter::once(stream));
    assert_eq!(read(stream.chunks(usize::from(*cut) + 1)), whole);
    for frame in whole.0 {
        let again = frame::encode(frame.frame_type, &frame.body, DEFAULT_PAYLOAD).unwrap_or_default();
        assert_eq!(read(std::iter::once(&*again)), (vec![frame], None));
    }
}

/// The frames in these pieces of a stream, and why no more came.
fn read<'a>(pieces: impl Iterator<Item = &'a [u8]>) -> (Vec<Frame>, Option<ErrorKind>) {
    let (mut decoder, mut frames) = (FrameDecoder::new(DEFAULT_PAYLOAD), Vec::new());
    for mut piece in pieces {
        loop {
            match decoder.decode(&mut piece) {
                Ok(Some(frame)) => frames.push(frame),
                Ok(None) => break,
                Err(error) => return (frames, Some(error.kind())),
            }
        }
        assert!(piece.is_empty(), "{} bytes were not taken", piece.len());
    }
    (frames, None)
}

/// A segment descriptor, Posthorse's or a foreign one.
///
/// # Panics
/// When the decoder is wrong.
pub fn descriptor(json: &[u8]) {
    let limits = DescriptorLimits::default();
    let Ok(desc) = descriptor::decode(json, &limits) else { return };
    // What a transport published is its own to read; of `tcp` the encoder knows more, and may refuse it.
    let Ok(again) = descriptor::encode(&desc, UNIX_EPOCH) else { return };
    assert_eq!(descriptor::decode(&again, &limits).ok(), Some(desc));
}

/// The body of a control frame, or of a foreign notification.
///
/// # Panics
/// When the decoder is wrong.
pub fn handshake(body: &[u8]) {
    if let Ok(control) = Control::decode(body) {
        let again = control.encode().unwrap_or_default();
        // A greeting that left out what it could may have been the longest that is accepted.
        let outgrown = matches!(control, Control::Greeting(_)) && again.len() > GREETING_BYTES;
        assert!(outgrown || Control::decode(&again).is_ok_and(|same| same == control), "{control:?}");
    }
    if let Ok(notice) = serde_json::from_slice::<Notice>(body) {
        let again = to_json(&notice).unwrap_or_default();
        assert_eq!(serde_json::from_slice(&again).ok(), Some(notice));
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use posthorse_core::{Error, Features, Hello, Incarnation};
    use posthorse_testkit::CountingAllocator;
    use posthorse_testkit::corpus::{Memory, Target};

    use super::*;
    use crate::frame::FrameType;
    use crate::handshake::message::{Greeting, Refusal};

    #[global_allocator]
    static ALLOCATOR: CountingAllocator = CountingAllocator;

    const MOONCAKE: &[u8] = include_bytes!("../testdata/mooncake-tcp.json");
    const POSTHORSE: &[u8] = include_bytes!("../testdata/posthorse.json");

    #[test]
    fn streams_of_frames_stand_any_damage() {
        let captured: [(_, &[u8]); 3] = [
            ("metadata", include_bytes!("../testdata/metadata.frame")),
            ("notify", include_bytes!("../testdata/notify.frame")),
            ("probe", include_bytes!("../testdata/probe.frame")),
        ];
        let mut seeds: Vec<_> = captured.map(|(name, frame)| (name, [&[7], frame].concat())).into();
        seeds.push(("several", [&[0][..], captured[1].1, captured[2].1].concat()));
        for (name, kind, body) in [
            ("control", FrameType::Control, &b"\x03"[..]),
            ("untyped", FrameType::Untyped, b"{\"local_nic_path\":\"a@b\"}"),
        ] {
            seeds.push((name, [&[255], &*frame::encode(kind, body, DEFAULT_PAYLOAD).unwrap()].concat()));
        }
        // Above its input, a frame costs the first piece of memory that is taken for it.
        let memory = Memory { base: 80 << 10, per_byte: 32 };
        Target { name: "segment_frame", check: frames, memory }.replay(ALLOCATOR, &seeds, 20_000);
    }

    #[test]
    fn descriptors_stand_any_damage() {
        let seeds = [("mooncake", MOONCAKE.to_vec()), ("posthorse", POSTHORSE.to_vec())];
        // An object of one key costs the parser a node with room for eleven.
        let memory = Memory { base: 16 << 10, per_byte: 400 };
        Target { name: "segment_descriptor", check: descriptor, memory }.replay(ALLOCATOR, &seeds, 20_000);
    }

    #[test]
    fn messages_stand_any_damage() {
        let hello = Hello::new(Features(5), Some("model-a".to_owned()));
        let greeting =
            Greeting { name: "10.0.0.1:15001".to_owned(), incarnation: Incarnation(u64::MAX), hello };
        let refusal = Refusal::of(&Error::new(ErrorKind::NotFound, "nobody serves the topic \"x\""));
        let request = Control::Request {
            id: 7,
            patience: Duration::from_secs(3),
            topic: "grant".to_owned(),
            body: b"{\"region\":3}".to_vec(),
        };
        let notice = Notice { name: "n".to_owned(), notify_msg: "a notice".to_owned() };
        let mut seeds: Vec<_> = [
            ("greeting", Control::Greeting(greeting)),
            ("request", request),
            ("reply", Control::Reply { id: 7, result: Ok(b"{}".to_vec()) }),
            ("refusal", Control::Reply { id: 8, result: Err(refusal) }),
            ("ping", Control::Ping),
            ("pong", Control::Pong),
        ]
        .map(|(name, control)| (name, control.encode().unwrap()))
        .into();
        seeds.push(("notice", to_json(&notice).unwrap()));
        let memory = Memory { base: 16 << 10, per_byte: 16 };
        Target { name: "segment_handshake", check: handshake, memory }.replay(ALLOCATOR, &seeds, 20_000);
    }
}
