//! What `fuzz/` and the replay of its corpus hand bytes to: decoding never panics, and what decodes survives being
//! encoded again.

use crate::hello::{Answer, Call};
use crate::wire::{OPENING_BYTES, REQUEST_BYTES, RESPONSE_BYTES, Request, Response, opening_len};

/// A request's header, or a response's, from the front of `bytes`.
///
/// # Panics
/// When the decoder is wrong.
pub fn wire(bytes: &[u8]) {
    if let Some(header) = bytes.first_chunk::<REQUEST_BYTES>()
        && let Ok(request) = Request::decode(header)
    {
        assert_eq!(Request::decode(&request.encode()).ok(), Some(request));
    }
    if let Some(header) = bytes.first_chunk::<RESPONSE_BYTES>()
        && let Ok(response) = Response::decode(header)
    {
        assert_eq!(Response::decode(&response.encode()).ok(), Some(response));
    }
}

/// The opening of a connection, from either side.
///
/// # Panics
/// When the decoder is wrong.
pub fn opening(bytes: &[u8]) {
    let Ok(Some(len)) = opening_len(bytes) else { return };
    let Some(body) = bytes.get(OPENING_BYTES..len) else { return };
    if let Ok(call) = Call::decode(body)
        && let Ok(bytes) = call.encode()
    {
        assert_eq!(opening_len(&bytes).ok(), Some(Some(bytes.len())));
        assert_eq!(Call::decode(&bytes[OPENING_BYTES..]).ok(), Some(call));
    }
    if let Ok(answer) = Answer::decode(body)
        && let Ok(bytes) = answer.encode()
    {
        assert_eq!(opening_len(&bytes).ok(), Some(Some(bytes.len())));
        assert_eq!(Answer::decode(&bytes[OPENING_BYTES..]).ok(), Some(answer));
    }
}

#[cfg(test)]
mod tests {
    use posthorse_core::{Error, ErrorKind, Features, Hello, Incarnation};
    use posthorse_testkit::CountingAllocator;
    use posthorse_testkit::corpus::{Memory, Target};

    use crate::hello::{Answer, Call, LaneClass, LaneKey};

    #[global_allocator]
    static ALLOCATOR: CountingAllocator = CountingAllocator;

    /// The frames of the golden file, by name.
    fn frames() -> Vec<(&'static str, Vec<u8>)> {
        let byte = |hex: &str| u8::from_str_radix(hex, 16).unwrap();
        include_str!("../testdata/frames.hex")
            .lines()
            .map(|line| {
                let (name, hex) = line.split_once(' ').unwrap();
                (name, (0..hex.len()).step_by(2).map(|at| byte(&hex[at..at + 2])).collect())
            })
            .collect()
    }

    #[test]
    fn headers_stand_any_damage() {
        let mut seeds = frames();
        seeds.retain(|(name, _)| *name != "opening");
        let memory = Memory { base: 1024, per_byte: 0 };
        Target { name: "tcp_wire", check: super::wire, memory }.replay(ALLOCATOR, &seeds, 20_000);
    }

    #[test]
    fn openings_stand_any_damage() {
        let call = Call {
            hello: Hello::new(Features(5), Some("model-a".to_owned())),
            name: "10.0.0.1:15001".to_owned(),
            key: LaneKey { session: [1, u64::MAX], lane: 2 },
            class: LaneClass::Express,
            liveness_ms: 3000,
            tells_taken: true,
        };
        let welcome = Answer::Welcome {
            hello: Hello::new(Features(3), None),
            incarnation: Incarnation(u64::MAX),
            known: true,
            tells_taken: true,
        };
        let refused = Answer::refusal(&Error::new(ErrorKind::VersionMismatch, "versions 1 to 1, not 2"));
        let mut seeds = frames();
        seeds.retain(|(name, _)| *name == "opening");
        seeds.push(("call", call.encode().unwrap()));
        seeds.push(("welcome", welcome.encode().unwrap()));
        seeds.push(("refused", refused.encode().unwrap()));
        let memory = Memory { base: 4096, per_byte: 16 };
        Target { name: "tcp_opening", check: super::opening, memory }.replay(ALLOCATOR, &seeds, 20_000);
    }
}
