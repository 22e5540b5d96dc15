//! Segment descriptors as JSON: the form of Mooncake Transfer Engine for protocol `tcp`, with what only Posthorse
//! peers read in one object beside it, under the key `posthorse`, which other peers ignore.
//!
//! A descriptor without that key is a foreign one: it has no incarnation and no hello, its buffers have no
//! region, token or attributes, and whoever reaches them may read and write.

use std::time::SystemTime;

use posthorse_core::{
    Access, Attributes, BufferDesc, Error, ErrorKind, GrantToken, Hello, Incarnation, Location, RegionId,
    Result, SegmentDesc,
};
use serde::{Deserialize, Serialize};

use crate::address::{host_of, shown};
use crate::timestamp::timestamp;

/// How large a descriptor from outside may be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DescriptorLimits {
    /// Bytes of JSON.
    pub bytes: usize,
    /// Buffers.
    pub buffers: usize,
    /// Bytes of each name.
    pub name_bytes: usize,
    /// Transports, and transports with attributes of one buffer.
    pub transports: usize,
}

impl Default for DescriptorLimits {
    fn default() -> Self {
        Self { bytes: 128 << 20, buffers: 1 << 20, name_bytes: 4096, transports: 64 }
    }
}

/// What the transport named `tcp` publishes in a segment descriptor's `transports`. Other peers find the same in
/// the fields `tcp_data_host`, `tcp_data_port` and `tcp_proto_version`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TcpAttributes {
    /// Where its data port listens; `None` is the host in the segment's name.
    pub host: Option<String>,
    /// Its data port.
    pub port: u16,
    /// Which version of Mooncake's data plane it serves: 2 acknowledges writes, 1 does not.
    #[serde(default = "foreign_version_1")]
    pub foreign_version: u32,
}

const fn foreign_version_1() -> u32 {
    1
}

/// The name under which [`TcpAttributes`] are published.
pub const TCP: &str = "tcp";

#[derive(Serialize, Deserialize)]
struct Wire {
    #[serde(default)]
    buffers: Vec<WireBuffer>,
    name: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    posthorse: Option<Own>,
    protocol: Protocol,
    #[serde(default)]
    rdma_server_name: String,
    #[serde(default)]
    tcp_data_host: String,
    /// An engine without TCP publishes whatever its memory held.
    #[serde(default)]
    tcp_data_port: i64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    tcp_proto_version: Option<i64>,
    #[serde(default)]
    timestamp: String,
}

/// Builds with several protocols write an array.
#[derive(Serialize, Deserialize)]
#[serde(untagged)]
enum Protocol {
    One(String),
    Several(Vec<String>),
}

#[derive(Serialize, Deserialize)]
struct WireBuffer {
    addr: u64,
    length: u64,
    /// The segment's name for TCP, the buffer's location for RDMA.
    #[serde(default)]
    name: String,
}

/// What only Posthorse peers read.
#[derive(Serialize, Deserialize)]
struct Own {
    /// In the order of the buffers beside it.
    buffers: Vec<OwnBuffer>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    hello: Option<Hello>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    incarnation: Option<Incarnation>,
    #[serde(default)]
    transports: Attributes,
}

#[derive(Serialize, Deserialize)]
struct OwnBuffer {
    access: Access,
    #[serde(default, skip_serializing_if = "Attributes::is_empty")]
    attributes: Attributes,
    /// A kind of memory that a later release knows is memory all the same.
    #[serde(default)]
    location: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    region: Option<RegionId>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    token: Option<GrantToken>,
}

/// A descriptor as JSON in one line, as other peers accept it too. `published` becomes its time stamp.
///
/// # Errors
/// `InvalidArgument` for a descriptor without a name, for a buffer without bytes or at address zero (other
/// peers would refuse the whole descriptor), and for `tcp` attributes that are no [`TcpAttributes`].
pub fn encode(desc: &SegmentDesc, published: SystemTime) -> Result<Vec<u8>> {
    if desc.name.is_empty() {
        return Err(Error::invalid_argument("name of the descriptor", "empty", "a segment's name"));
    }
    let tcp = match desc.transports.get(TCP) {
        None => None,
        Some(value) => Some(TcpAttributes::deserialize(value).map_err(|error| {
            Error::invalid_argument("what transport tcp published", error, "host, port and foreign_version")
        })?),
    };
    let mut buffers = Vec::with_capacity(desc.buffers.len());
    for BufferDesc { address, len, .. } in &desc.buffers {
        if *address == 0 || *len == 0 {
            let value = format_args!("{len} bytes at {address:#x}");
            return Err(Error::invalid_argument("buffer", value, "at least one byte, not at address zero"));
        }
        buffers.push(WireBuffer { addr: *address, length: *len, name: desc.name.clone() });
    }
    let own = Own {
        buffers: desc.buffers.iter().map(OwnBuffer::of).collect(),
        hello: desc.hello.clone(),
        incarnation: desc.incarnation,
        transports: desc.transports.clone(),
    };
    let wire = Wire {
        buffers,
        name: desc.name.clone(),
        posthorse: Some(own),
        protocol: Protocol::One(TCP.to_owned()),
        rdma_server_name: String::new(),
        tcp_data_host: tcp.as_ref().and_then(|tcp| tcp.host.clone()).unwrap_or_default(),
        tcp_data_port: tcp.as_ref().map_or(0, |tcp| tcp.port.into()),
        tcp_proto_version: tcp.as_ref().map(|tcp| tcp.foreign_version.into()),
        timestamp: timestamp(published),
    };
    let mut json = serde_json::to_vec(&wire)
        .map_err(|error| Error::new(ErrorKind::Internal, format!("writing a segment descriptor: {error}")))?;
    json.push(b'\n');
    Ok(json)
}

/// The descriptor in this JSON.
///
/// # Errors
/// `Malformed`, naming what is wrong or which limit it exceeds.
pub fn decode(json: &[u8], limits: &DescriptorLimits) -> Result<SegmentDesc> {
    within("the descriptor's size in bytes", json.len(), limits.bytes)?;
    let wire: Wire = serde_json::from_slice(json).map_err(|error| malformed(error.to_string()))?;
    within("the number of its buffers", wire.buffers.len(), limits.buffers)?;
    within("the length of its name", wire.name.len(), limits.name_bytes)?;
    within("the length of its TCP host", wire.tcp_data_host.len(), limits.name_bytes)?;
    if wire.name.is_empty() {
        return Err(malformed("its name is empty".to_owned()));
    }
    for buffer in &wire.buffers {
        within("the length of a buffer's name", buffer.name.len(), limits.name_bytes)?;
        if buffer.addr == 0 || buffer.length == 0 || buffer.addr.checked_add(buffer.length).is_none() {
            let WireBuffer { addr, length, .. } = buffer;
            return Err(malformed(format!("it has a buffer of {length} bytes at {addr:#x}")));
        }
    }
    match wire.posthorse {
        Some(_) => own(wire, limits),
        None => Ok(foreign(wire)),
    }
}

fn own(wire: Wire, limits: &DescriptorLimits) -> Result<SegmentDesc> {
    let Wire { name, buffers, posthorse, .. } = wire;
    let Some(own) = posthorse else { return Err(malformed("it has no object \"posthorse\"".to_owned())) };
    if own.buffers.len() != buffers.len() {
        let (ours, all) = (own.buffers.len(), buffers.len());
        return Err(malformed(format!("it has {all} buffers, and under \"posthorse\" {ours}")));
    }
    let fingerprint = own.hello.as_ref().and_then(|hello| hello.fingerprint.as_ref());
    within("the length of its fingerprint", fingerprint.map_or(0, String::len), limits.name_bytes)?;
    check_attributes(&own.transports, limits)?;
    for buffer in &own.buffers {
        check_attributes(&buffer.attributes, limits)?;
    }
    let buffers = buffers.into_iter().zip(own.buffers).map(|(wire, own)| own.with(&wire)).collect();
    Ok(SegmentDesc {
        name,
        incarnation: own.incarnation,
        hello: own.hello,
        transports: own.transports,
        buffers,
    })
}

fn foreign(wire: Wire) -> SegmentDesc {
    let speaks_tcp = match &wire.protocol {
        Protocol::One(protocol) => protocol == TCP,
        Protocol::Several(protocols) => protocols.iter().any(|protocol| protocol == TCP),
    };
    let mut transports = Attributes::new();
    if let Ok(port @ 1..) = u16::try_from(wire.tcp_data_port)
        && speaks_tcp
    {
        let host = Some(wire.tcp_data_host).filter(|host| !host.is_empty());
        let host = host.unwrap_or_else(|| host_of(&wire.name).to_owned());
        let version = wire.tcp_proto_version.unwrap_or(1).max(1);
        transports.insert(
            TCP.to_owned(),
            serde_json::json!({"host": host, "port": port, "foreign_version": u32::try_from(version).unwrap_or(u32::MAX)}),
        );
    }
    let buffers = wire.buffers.into_iter().map(|buffer| BufferDesc {
        region: None,
        location: buffer.name.parse().unwrap_or_default(),
        address: buffer.addr,
        len: buffer.length,
        access: Access::ReadWrite,
        token: None,
        attributes: Attributes::new(),
    });
    SegmentDesc { buffers: buffers.collect(), name: wire.name, incarnation: None, hello: None, transports }
}

impl OwnBuffer {
    fn of(buffer: &BufferDesc) -> Self {
        Self {
            access: buffer.access,
            attributes: buffer.attributes.clone(),
            location: buffer.location.to_string(),
            region: buffer.region,
            token: buffer.token,
        }
    }

    fn with(self, wire: &WireBuffer) -> BufferDesc {
        BufferDesc {
            region: self.region,
            location: self.location.parse::<Location>().unwrap_or_default(),
            address: wire.addr,
            len: wire.length,
            access: self.access,
            token: self.token,
            attributes: self.attributes,
        }
    }
}

fn check_attributes(attributes: &Attributes, limits: &DescriptorLimits) -> Result<()> {
    within("the number of its transports", attributes.len(), limits.transports)?;
    attributes
        .keys()
        .try_for_each(|name| within("the length of a transport's name", name.len(), limits.name_bytes))
}

fn within(what: &str, value: usize, limit: usize) -> Result<()> {
    if value > limit {
        return Err(malformed(format!("{what} is {value}, more than the limit of {limit}")));
    }
    Ok(())
}

fn malformed(why: String) -> Error {
    // The parser repeats what it met, so this too is text from outside.
    let why = if why.len() > 300 { shown(&why) } else { why };
    Error::new(ErrorKind::Malformed, format!("a segment descriptor: {why}"))
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, UNIX_EPOCH};

    use posthorse_core::{Features, Versions};
    use proptest::prelude::*;
    use serde_json::{Value, json};

    use super::*;

    const MOONCAKE: &[u8] = include_bytes!("../testdata/mooncake-tcp.json");
    const POSTHORSE: &[u8] = include_bytes!("../testdata/posthorse.json");

    fn sample() -> SegmentDesc {
        SegmentDesc {
            name: "10.0.0.1:15001".to_owned(),
            incarnation: Some(Incarnation(u64::MAX)),
            hello: Some(Hello::new(Features(5), Some("model-a".to_owned()))),
            transports: [
                (TCP.to_owned(), json!({"host": null, "port": 15002, "foreign_version": 2})),
                ("shm".to_owned(), json!({"socket": "x", "nonce": 7})),
            ]
            .into(),
            buffers: vec![BufferDesc {
                region: Some(RegionId(3)),
                location: Location::Cpu(0),
                address: 0x7f00_0000_0000,
                len: 4096,
                access: Access::Read,
                token: Some(GrantToken { handle: 1 << 32, secret: u64::MAX - 1 }),
                attributes: [("shm".to_owned(), json!({"offset": 64}))].into(),
            }],
        }
    }

    fn decoded(json: &[u8]) -> Result<SegmentDesc> {
        decode(json, &DescriptorLimits::default())
    }

    fn refusal(json: &[u8]) -> String {
        let error = decoded(json).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Malformed);
        error.to_string()
    }

    #[test]
    fn the_form_on_the_wire_is_the_golden_one() {
        let published = UNIX_EPOCH + Duration::new(1_795_953_364, 458_931_000);
        let json = encode(&sample(), published).unwrap();
        assert_eq!(String::from_utf8(json).unwrap(), std::str::from_utf8(POSTHORSE).unwrap());
        assert_eq!(decoded(POSTHORSE).unwrap(), sample());
    }

    #[test]
    fn a_captured_foreign_descriptor_is_understood() {
        let desc = decoded(MOONCAKE).unwrap();
        assert_eq!(desc.name, "127.0.0.1:16570");
        assert!(desc.incarnation.is_none() && desc.hello.is_none());
        let tcp = TcpAttributes::deserialize(&desc.transports[TCP]).unwrap();
        let expected = TcpAttributes { host: Some("127.0.0.1".to_owned()), port: 15795, foreign_version: 2 };
        assert_eq!(tcp, expected);
        let [buffer] = &desc.buffers[..] else { panic!("{desc:?}") };
        assert_eq!((buffer.address, buffer.len), (94_250_491_016_256, 4096));
        assert_eq!((buffer.access, buffer.token, buffer.region), (Access::ReadWrite, None, None));
    }

    #[test]
    fn other_peers_find_their_own_fields() {
        let value: Value = serde_json::from_slice(&encode(&sample(), UNIX_EPOCH).unwrap()).unwrap();
        assert_eq!(value["protocol"], "tcp");
        assert_eq!((&value["tcp_data_port"], &value["tcp_proto_version"]), (&json!(15002), &json!(2)));
        assert_eq!((&value["tcp_data_host"], &value["rdma_server_name"]), (&json!(""), &json!("")));
        let buffer = &value["buffers"][0];
        assert_eq!(*buffer, json!({"name": "10.0.0.1:15001", "addr": 0x7f00_0000_0000_u64, "length": 4096}));

        let without_tcp = SegmentDesc { transports: Attributes::new(), ..sample() };
        let value: Value = serde_json::from_slice(&encode(&without_tcp, UNIX_EPOCH).unwrap()).unwrap();
        assert_eq!(value["tcp_data_port"], 0);
        assert_eq!(value.get("tcp_proto_version"), None);
    }

    #[test]
    fn foreign_variants_are_understood() {
        let head = r#"{"name":"node-3:15001","protocol":"tcp","tcp_data_port":16000"#;
        let tcp =
            |rest: &str| decoded(format!("{head}{rest}}}").as_bytes()).unwrap().transports.get(TCP).cloned();
        assert_eq!(tcp(""), Some(json!({"host": "node-3", "port": 16000, "foreign_version": 1})));
        let expected = Some(json!({"host": "::1", "port": 16000, "foreign_version": 3}));
        assert_eq!(tcp(r#","tcp_data_host":"::1","tcp_proto_version":3,"later":[{}]"#), expected);
        // Without TCP the port is whatever the memory held.
        for json in [
            r#"{"name":"a:1","protocol":"rdma","tcp_data_port":-559038737,"buffers":[{"name":"cpu:1","addr":1,"length":2,"rkey":[1],"lkey":[1]}]}"#,
            r#"{"name":"a:1","protocol":["tcp","rdma"],"tcp_data_port":0,"buffers":[{"name":"cpu:1","addr":1,"length":2}]}"#,
        ] {
            let desc = decoded(json.as_bytes()).unwrap();
            assert!(desc.transports.is_empty());
            assert_eq!(desc.buffers[0].location, Location::Cpu(1));
        }
    }

    #[test]
    fn what_other_peers_would_refuse_is_not_written() {
        let mut desc = sample();
        desc.buffers[0].len = 0;
        assert_eq!(encode(&desc, UNIX_EPOCH).unwrap_err().kind(), ErrorKind::InvalidArgument);
        let mut desc = sample();
        desc.transports.insert(TCP.to_owned(), json!({"port": 70000}));
        assert_eq!(encode(&desc, UNIX_EPOCH).unwrap_err().kind(), ErrorKind::InvalidArgument);
        let desc = SegmentDesc { name: String::new(), ..sample() };
        assert_eq!(encode(&desc, UNIX_EPOCH).unwrap_err().kind(), ErrorKind::InvalidArgument);
    }

    #[test]
    fn a_malformed_descriptor_is_refused_with_its_reason() {
        let head = r#"{"name":"a:1","protocol":"tcp","buffers":["#;
        for (rest, part) in [
            (r#"{"addr":0,"length":1}]}"#, "0x0"),
            (r#"{"addr":1,"length":0}]}"#, "0 bytes"),
            (r#"{"addr":18446744073709551615,"length":2}]}"#, "0xffff"),
            (r#"{"addr":18446744073709551616,"length":2}]}"#, "addr"),
            (r#"{"addr":-1,"length":2}]}"#, "-1"),
            (r#"{"length":2}]}"#, "addr"),
            (r#"],"posthorse":{"buffers":[{"access":"read"}]}}"#, "under \"posthorse\" 1"),
            (r#"],"posthorse":{"buffers":[],"hello":7}}"#, "Hello"),
            (r#"],"posthorse":7}"#, "posthorse"),
        ] {
            let text = refusal(format!("{head}{rest}").as_bytes());
            assert!(text.contains(part) || text.contains("invalid type"), "{part} is missing in {text}");
        }
        for json in ["", "{}", "[]", "null", r#"{"name":"","protocol":"tcp"}"#, "\u{0}", &"[".repeat(100_000)]
        {
            refusal(json.as_bytes());
        }
    }

    #[test]
    fn limits_are_named() {
        let limits = DescriptorLimits { bytes: 10_000, buffers: 2, name_bytes: 100, transports: 3 };
        let refusal = |desc: &SegmentDesc| {
            let json = encode(desc, UNIX_EPOCH).unwrap();
            decode(&json, &limits).unwrap_err().to_string()
        };
        let mut desc = sample();
        desc.buffers = vec![desc.buffers[0].clone(); 3];
        assert!(refusal(&desc).contains("buffers is 3, more than the limit of 2"));
        let desc = SegmentDesc { name: "n".repeat(101), ..sample() };
        assert!(refusal(&desc).contains("name is 101, more than the limit of 100"));
        let desc = SegmentDesc { name: "n".repeat(10_000), ..sample() };
        assert!(refusal(&desc).contains("more than the limit of 10000"));
        let mut desc = sample();
        desc.transports = (0..4).map(|n| (format!("t{n}"), json!(n))).collect();
        assert!(refusal(&desc).contains("transports is 4"));
    }

    fn attributes() -> impl Strategy<Value = Attributes> {
        let value = prop_oneof![
            any::<u64>().prop_map(|n| json!({"n": n})),
            any::<String>().prop_map(|s| json!([s, null, true])),
        ];
        proptest::collection::btree_map("[a-z]{1,8}x", value, 0..4)
    }

    prop_compose! {
        fn buffer()(
            region in proptest::option::of(any::<u64>().prop_map(RegionId)),
            location in prop_oneof![Just(Location::Any), any::<u16>().prop_map(Location::Cpu)],
            address in 1..u64::MAX / 2,
            len in 1..u64::MAX / 2,
            access in prop_oneof![Just(Access::None), Just(Access::Read), Just(Access::Write), Just(Access::ReadWrite)],
            token in proptest::option::of(any::<(u64, u64)>()),
            attributes in attributes(),
        ) -> BufferDesc {
            let token = token.map(|(handle, secret)| GrantToken { handle, secret });
            BufferDesc { region, location, address, len, access, token, attributes }
        }
    }

    prop_compose! {
        fn desc()(
            name in ".{1,40}",
            incarnation in proptest::option::of(any::<u64>().prop_map(Incarnation)),
            hello in proptest::option::of((any::<u16>(), any::<u16>(), any::<u64>(), proptest::option::of(".{0,20}"))),
            transports in attributes(),
            tcp in proptest::option::of((proptest::option::of(".{0,20}"), any::<u16>(), any::<u32>())),
            buffers in proptest::collection::vec(buffer(), 0..5),
        ) -> SegmentDesc {
            let hello = hello.map(|(min, max, features, fingerprint)| Hello {
                versions: Versions { min, max }, features: Features(features), fingerprint, proof: vec![],
            });
            let mut transports = transports;
            if let Some((host, port, version)) = tcp {
                transports.insert(TCP.to_owned(), json!({"host": host, "port": port, "foreign_version": version}));
            }
            SegmentDesc { name, incarnation, hello, transports, buffers }
        }
    }

    proptest! {
        #[test]
        fn descriptors_survive_the_wire(desc in desc()) {
            prop_assert_eq!(decoded(&encode(&desc, UNIX_EPOCH).unwrap()).unwrap(), desc);
        }

        #[test]
        fn arbitrary_bytes_never_panic(bytes: Vec<u8>, at in 0..POSTHORSE.len(), byte: u8) {
            let _ = decoded(&bytes);
            let mut damaged = POSTHORSE.to_vec();
            damaged[at] = byte;
            let _ = decoded(&damaged);
            let _ = decoded(&POSTHORSE[..at]);
        }
    }
}
