//! The corpus of each target, made of what this release sends, and replayed.

use posthorse_core::{
    Access, Checksum, DType, Error, Features, GrantDesc, GrantToken, Hello, Incarnation, RegionId,
};
use posthorse_testkit::CountingAllocator;
use posthorse_testkit::corpus::{Memory, Target};
use serde_json::json;

use super::*;
use crate::message::{
    Cancel, Close, Follower, Offered, Outcome, Pull, PullExtra, Query, QueryExtra, Refusal, Renew,
    StreamAbort, StreamCredit, StreamSent, Want,
};
use crate::payload::kv::KvLayer;
use crate::payload::{PayloadKind, TensorSet};

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

/// How many damaged inputs each target gets.
const DAMAGED: usize = 10_000;

/// What `serde` takes at the most for a list whose length it was told, before it has seen an element. Lists of lists
/// have several at once.
const TOLD: usize = 1 << 20;

fn replay(name: &'static str, check: fn(&[u8]), memory: Memory, seeds: &[(&str, Vec<u8>)]) {
    Target { name, check, memory }.replay(ALLOCATOR, seeds, DAMAGED);
}

fn hello() -> Hello {
    Hello::new(Features(5), Some("model-a".to_owned()))
}

fn refusal() -> Refusal {
    let error = Error::new(ErrorKind::Expired, "the offer was consumed").with_advice("put it again");
    Refusal { retry_after_ms: Some(5), ..Refusal::from(&error) }
}

fn grant() -> GrantDesc {
    GrantDesc {
        region: RegionId(1),
        address: 1 << 47,
        len: 1 << 20,
        access: Access::Write,
        token: GrantToken { handle: 1, secret: u64::MAX },
        attributes: [("shm".to_owned(), json!({"offset": 64, "deep": [null, -1, "x", 0.5]}))].into(),
    }
}

fn described() -> Manifest {
    let tensor = |name: &str, offset| TensorDesc {
        name: name.to_owned(),
        dtype: DType::BF16,
        shape: vec![2, 3],
        offset,
        len: 12,
    };
    Manifest { kind: PayloadKind::Tensors, tensors: vec![tensor("k", 64), tensor("v", 80)] }
}

#[test]
fn connections_stand_any_damage() {
    let greeting = zmtp::greeting();
    let client = [&greeting[..], &zmtp::ready(SocketType::Req)].concat();
    let server = [&[0x80 | 30][..], &greeting, &zmtp::ready(SocketType::Router)].concat();
    let command = |body: &[u8]| [&[4, body.len() as u8][..], body].concat();
    let ping = command(b"\x04PING\0\x1econtext");
    let seeds = [
        ("request", [&[7][..], &client, &zmtp::message(b"query_info\x80"), &zmtp::ping()].concat()),
        ("long", [&[100][..], &client, &zmtp::message(&[7; 300]), &zmtp::pong(b"x")].concat()),
        ("ping", [&[0][..], &client, &ping, &command(b"\x05LATER")].concat()),
        ("dealer", [&[1][..], &client, b"\0\x03abc"].concat()),
        ("reply", [&server[..], &zmtp::message(b"trans_done")].concat()),
        ("refused", [&[3][..], &greeting, &command(b"\x05ERROR\x04full")].concat()),
    ];
    let memory = Memory { base: 256 << 10, per_byte: 64 };
    replay("omni_zmtp", zmtp, memory, &seeds);
}

#[test]
fn requests_stand_any_damage() {
    let (consumer, incarnation, pull) = ("b:1".to_owned(), Incarnation(7), 9);
    let query = |extra| Request::Query(Query { request_id: KEY.to_owned(), extra });
    let pulled = |extra| {
        Request::Pull(Pull {
            remote_hostname: "127.0.0.1".to_owned(),
            remote_port: 15242,
            request_id: KEY.to_owned(),
            dst_addrs: vec![0x7f12_0000_0000],
            lengths: vec![1 << 20],
            extra,
        })
    };
    let query_extra = QueryExtra {
        hello: hello(),
        consumer: consumer.clone(),
        incarnation,
        pull,
        wait_ms: 3,
        want: Want::Read,
    };
    let pull_extra = PullExtra {
        hello: hello(),
        consumer: consumer.clone(),
        incarnation,
        pull,
        generation: Some(u64::MAX),
        grant: grant(),
        deadline_ms: Some(30_000),
        checksum: Checksum::Full,
        transport: Some("require:tcp".to_owned()),
    };
    let close = Close { consumer: consumer.clone(), incarnation, pull, outcome: Outcome::Failed };
    let (stream, reason) = ("s@0_1".to_owned(), "enough".to_owned());
    let seeds = [
        ("query", query(None)),
        ("query_posthorse", query(Some(query_extra))),
        ("pull", pulled(None)),
        ("pull_posthorse", pulled(Some(pull_extra))),
        ("cancel", Request::Cancel(Cancel { consumer: consumer.clone(), incarnation, pull })),
        ("close", Request::Close(close)),
        ("renew", Request::Renew(Renew { consumer, incarnation, pulls: vec![1, 2, u64::MAX] })),
        (
            "stream_credit",
            Request::StreamCredit(StreamCredit {
                stream: stream.clone(),
                generation: Some(7),
                follower: Some(Follower { consumer: "10.0.0.1:15001".to_owned(), incarnation, number: 9 }),
                limit: 8,
            }),
        ),
        (
            "stream_abort",
            Request::StreamAbort(StreamAbort { stream, generation: Some(7), follower: None, reason }),
        ),
        ("ping", Request::Ping),
        ("health", Request::Health),
    ]
    .map(|(name, request)| (name, request.encode().unwrap()));
    let memory = Memory { base: 3 * TOLD, per_byte: 1024 };
    replay("omni_request", request, memory, &seeds);
}

#[test]
fn replies_stand_any_damage() {
    let offered = Offered {
        hello: hello(),
        generation: 3,
        manifest: described(),
        segment: "a:1".to_owned(),
        incarnation: Incarnation(u64::MAX),
        grant: Some(grant()),
        consumers_left: 2,
        expires_ms: Some(300_000),
        checksum: Checksum::Sampled,
        transport: Some("prefer:shm".to_owned()),
        liveness_ms: Some(3000),
    };
    let offer = Reply::Offer {
        request_id: KEY.to_owned(),
        data_size: 1 << 20,
        is_fast_path: true,
        offered: Some(Box::new(offered)),
    };
    let (own, foreign) = (Dialect::Posthorse, Dialect::Foreign);
    let health = json!({"status": "healthy", "pool": {"free": 7, "share": 0.5}, "peers": ["b:1"]});
    let seeds = [
        ("offer", &offer, own),
        ("offer_foreign", &offer, foreign),
        ("no_offer", &Reply::NoOffer(refusal()), own),
        ("no_offer_foreign", &Reply::NoOffer(refusal()), foreign),
        ("done", &Reply::Done { bytes: 1 << 20 }, own),
        ("done_foreign", &Reply::Done { bytes: 1 << 20 }, foreign),
        ("ok", &Reply::Ok, own),
        ("stream", &Reply::Stream(StreamSent { generation: u64::MAX, liveness_ms: 3000 }), own),
        ("health", &Reply::Health(health), own),
        ("refused", &Reply::Refused(refusal()), own),
        ("refused_foreign", &Reply::Refused(refusal()), foreign),
    ]
    .map(|(name, reply, dialect)| (name, reply.encode(dialect).unwrap()));
    let memory = Memory { base: 3 * TOLD, per_byte: 1024 };
    replay("omni_reply", reply, memory, &seeds);
}

#[test]
fn payloads_stand_any_damage() {
    let mut set = TensorSet::new();
    set.push("hidden_states", DType::F32, &[2, 2], &[7; 16]).unwrap();
    set.push("mask", DType::Bool, &[3], &[1, 0, 1]).unwrap();
    set.push("scale", DType::F64, &[], &[0; 8]).unwrap();
    let layout = set.layout().unwrap();
    let mut own = vec![0; layout.len() as usize];
    set.write(&layout, &mut own, |to, from| to.copy_from_slice(from)).unwrap();
    let foreign = std::collections::BTreeMap::from([("t", tensor())]);
    let seeds = [("set", own), ("foreign", marker::to_vec(&foreign).unwrap()), ("empty", vec![0x80])];
    let memory = Memory { base: 16 << 10, per_byte: 128 };
    replay("omni_envelope", envelope, memory, &seeds);
}

fn tensor() -> Tensor {
    Tensor::new(DType::I16, vec![3], vec![0, 0, 1, 0, 2, 0]).unwrap()
}

#[test]
fn markers_stand_any_damage() {
    let array = NdArray { dtype: "<f4".to_owned(), shape: vec![1, 2], data: vec![0; 8] };
    let image = Image { mode: "RGB".to_owned(), shape: vec![2, 1, 3], data: vec![9; 6] };
    let seeds = [
        ("tensor", marker::to_vec(&tensor()).unwrap()),
        ("array", marker::to_vec(&array).unwrap()),
        ("image", marker::to_vec(&image).unwrap()),
        ("stream_ended", marker::to_vec(&StreamEnd { error: None }).unwrap()),
        ("stream_failed", marker::to_vec(&StreamEnd { error: Some(refusal()) }).unwrap()),
    ];
    let memory = Memory { base: 2 * TOLD, per_byte: 64 };
    replay("omni_marker", marker, memory, &seeds);
}

#[test]
fn manifests_stand_any_damage() {
    let seeds =
        [("tensors", described()), ("bytes", Manifest::of(PayloadKind::Bytes))].map(|(name, manifest)| {
            (name, [&1024_u64.to_le_bytes()[..], &marker::to_vec(&manifest).unwrap()].concat())
        });
    let memory = Memory { base: 3 * TOLD, per_byte: 128 };
    replay("omni_manifest", manifest, memory, &seeds);
}

#[test]
fn kv_blobs_stand_any_damage() {
    let layer = KvLayer { dtype: DType::BF16, shape: &[1, 1, 2], key: b"KKKK", value: b"VVVV" };
    let meta = json!({"block_size": 16, "num_layers": 3, "dtype": "bfloat16", "seq_len": 1, "scale": 0.125});
    let meta = meta.as_object().unwrap();
    let blob = |layers: &[_]| kv::encode("r1", &[3, 4], meta.clone(), layers).unwrap();
    let seeds = [("layers", blob(&[Some(layer), None, Some(layer)])), ("none", blob(&[]))];
    let memory = Memory { base: 16 << 10, per_byte: 512 };
    replay("omni_kv", kv, memory, &seeds);
}

#[test]
fn pipelines_stand_any_damage() {
    let seeds = [
        ("two_stages", include_str!("../../config/two_stages.yaml")),
        ("three_stages", include_str!("../../config/thinker_talker_vocoder.yaml")),
        ("legacy", include_str!("../../config/legacy_runtime.yaml")),
        (
            "variables",
            "{stages: [{stage_id: 0, output_connectors: {to_stage_1: {name: PosthorseConnector, \
             extra: {host: \"${HOST}\", zmq_port: \"${PORT}\"}}}}, {stage_id: 1}]}\n",
        ),
    ]
    .map(|(name, text)| (name, text.as_bytes().to_vec()));
    let memory = Memory { base: 256 << 10, per_byte: 1024 };
    replay("omni_pipeline", pipeline, memory, &seeds);
}

#[test]
fn configurations_stand_any_damage() {
    let all = ConnectorConfig {
        advertise_host: Some("10.0.0.9".to_owned()),
        sender_host: Some("fe80::1".to_owned()),
        sender_zmq_port: Some(50151),
        protocol: crate::config::Protocol::Tcp,
        transport: crate::config::TransportChoice::Prefer("shm".to_owned()),
        buffer_ttl_seconds: 0.25,
        checksum: Checksum::Sampled,
        fingerprint: Some("model-a".to_owned()),
        ..ConnectorConfig::default()
    };
    let some = "host: 10.0.0.1\nrole: dual\nzmq_port: 0\nmemory_pool_size: 4294967296 # bytes\n";
    let seeds = [("all", serde_json::to_vec(&all).unwrap()), ("some", some.as_bytes().to_vec())];
    let memory = Memory { base: 256 << 10, per_byte: 1024 };
    replay("omni_config", config, memory, &seeds);
}
