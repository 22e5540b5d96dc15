//! What `fuzz/` and the replay of its corpus hand bytes to: decoding never panics, and what decodes survives being
//! encoded again.

use crate::rendezvous::wire::{ToClient, ToOwner, encode_notify};

/// A packet of the rendezvous, as the owner reads it and as a client does.
///
/// # Panics
/// When the decoder is wrong.
pub fn rendezvous(packet: &[u8]) {
    if let Ok(said) = ToOwner::decode(packet) {
        let again = match &said {
            ToOwner::Request(request) => request.encode(),
            ToOwner::Notify { token, data } => encode_notify(*token, data),
        };
        assert_eq!(ToOwner::decode(&again).ok(), Some(said));
    }
    if let Ok(said) = ToClient::decode(packet) {
        assert_eq!(ToClient::decode(&said.encode()).ok(), Some(said));
    }
}

#[cfg(test)]
mod tests {
    use posthorse_core::{Error, ErrorKind, Features, Hello, Incarnation, RegionId};
    use posthorse_testkit::CountingAllocator;
    use posthorse_testkit::corpus::{Memory, Target};

    use crate::rendezvous::wire::{
        ClientHello, MapRequest, Refusal, RegionReply, Request, ToClient, Welcome, encode_notify,
    };

    #[global_allocator]
    static ALLOCATOR: CountingAllocator = CountingAllocator;

    #[test]
    fn packets_stand_any_damage() {
        let hello = Hello::new(Features(1), Some("model-a".to_owned()));
        let client = ClientHello {
            hello: hello.clone(),
            name: "10.0.0.1:15001".to_owned(),
            nonce: "0f1e2d3c".to_owned(),
            host_id: Some("a".to_owned()),
        };
        let welcome = Welcome {
            hello,
            name: "10.0.0.1:15002".to_owned(),
            incarnation: Incarnation(u64::MAX),
            grants: 4096,
            probe_address: 0x7f00_0000_0000,
            probe_value: u64::MAX - 1,
        };
        let request = MapRequest { region: RegionId(3), write: true };
        let region = RegionReply { request, address: 0x7f00_0000_1000, len: 1 << 20, offset: Some(4096) };
        let refusal = || Refusal::of(&Error::new(ErrorKind::NotFound, "region 3 is not registered"));
        let seeds = [
            ("hello", Request::Hello(client).encode()),
            ("map", Request::Map(request).encode()),
            ("notify", encode_notify(7, b"a notice")),
            ("welcome", ToClient::Welcome(welcome).encode()),
            ("refused", ToClient::Refused(refusal()).encode()),
            ("region", ToClient::Region(region).encode()),
            ("region_refused", ToClient::RegionRefused { request, refusal: refusal() }.encode()),
            ("withdrawn", ToClient::Withdrawn { region: RegionId(3) }.encode()),
            ("notified", ToClient::Notified { token: 7, refusal: Some(refusal()) }.encode()),
        ];
        let memory = Memory { base: 4096, per_byte: 16 };
        Target { name: "shm_rendezvous", check: super::rendezvous, memory }.replay(ALLOCATOR, &seeds, 20_000);
    }
}
