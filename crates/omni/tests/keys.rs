//! Keys of the configuration whose effect shows only in a connector that runs.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

mod common;

use std::net::{Ipv6Addr, TcpListener};
use std::time::{Duration, Instant};

use common::{Pair, build, config, edge, soon};
use posthorse_core::ErrorKind;
use posthorse_engine::{EngineConfig, TransferEngine};
use posthorse_omni::config::{Protocol, Role};
use posthorse_omni::{Connector, ConnectorConfig, GetOptions, PutOptions, Source};
use posthorse_testkit::skip;

#[test]
fn get_wait_ms_ends_a_get_without_a_deadline() {
    let pair = Pair::with(|config| config.get_wait_ms = 80);
    let begin = Instant::now();
    let error = pair.receiver.get(&edge(), "never", GetOptions::default()).unwrap_err();
    assert!(matches!(error.kind(), ErrorKind::NotFound | ErrorKind::DeadlineExceeded), "{error}");
    assert!(begin.elapsed() >= Duration::from_millis(50));
    // A deadline of its own goes first, whatever the key says.
    let pair = Pair::with(|config| config.get_wait_ms = 0);
    pair.put("k", b"payload");
    assert_eq!(pair.get("k").unwrap().bytes().unwrap(), b"payload");
}

#[test]
fn protocol_chooses_what_carries_the_bytes() {
    for (protocol, name) in [(Protocol::Tcp, "tcp"), (Protocol::Shm, "shm"), (Protocol::Auto, "shm")] {
        let pair = Pair::with(|config| config.protocol = protocol);
        pair.put("k", b"payload");
        assert_eq!(pair.get("k").unwrap().transport(), name);
    }
    let error = Connector::builder()
        .config(ConnectorConfig { protocol: Protocol::Rdma, ..config(Role::Both) })
        .build();
    let error = error.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    assert!(error.message().contains("protocol is rdma"), "{error}");
}

#[test]
fn a_transport_that_there_is_not_is_refused_with_those_that_there_are() {
    for choice in ["require:foo", "prefer:foo"] {
        let config = ConnectorConfig { transport: choice.parse().unwrap(), ..config(Role::Both) };
        let error = Connector::builder().config(config).build().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidConfig);
        for part in [format!("transport is {choice}"), "accepted: auto, ".to_owned(), "shm, tcp".to_owned()] {
            assert!(error.message().contains(&part), "{part} is missing in {error}");
        }
    }
}

#[test]
fn memory_pool_device_is_a_node_of_this_host() {
    for device in ["cpu:99999999", "cpu:4095", "cpu:"] {
        let config = ConnectorConfig { memory_pool_device: device.to_owned(), ..config(Role::Both) };
        let error = Connector::builder().config(config).build().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidConfig);
        for part in [&format!("memory_pool_device is {device:?}"), "a NUMA node of this host: cpu:0"] {
            assert!(error.message().contains(part), "{part} is missing in {error}");
        }
    }
}

#[test]
fn of_a_pool_that_is_too_large_the_key_is_named() {
    let config = ConnectorConfig { memory_pool_size: 1 << 50, ..config(Role::Both) };
    let error = Connector::builder().config(config).build().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::OutOfMemory);
    assert!(error.message().starts_with("memory_pool_size is 1125899906842624: "), "{error}");
}

#[test]
fn a_producer_is_named_whole_where_one_is_needed() {
    let named = |role| ConnectorConfig { sender_host: Some("127.0.0.1".to_owned()), ..config(role) };
    let error = Connector::builder().config(named(Role::Receiver)).build().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidConfig);
    for part in ["sender_host is \"127.0.0.1\"", "sender_zmq_port, 1 to 65535, which is not set"] {
        assert!(error.message().contains(part), "{part} is missing in {error}");
    }
    // A stage that only offers shares the settings of its edge.
    Connector::builder().config(named(Role::Sender)).build().unwrap().close();
}

#[test]
fn of_a_port_that_is_taken_the_keys_that_help_are_named() {
    let first = build(ConnectorConfig { zmq_port: 0, ..config(Role::Sender) });
    let (_, port) = first.address().unwrap();
    let error = Connector::builder().config(ConnectorConfig { zmq_port: port, ..config(Role::Both) }).build();
    let error = error.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Io);
    for part in [&format!("zmq_port, which is {port}"), "role: receiver"] {
        assert!(error.advice().unwrap().contains(part), "{part} is missing in {error}");
    }
}

#[test]
fn host_is_one_that_this_host_has() {
    // An address for documentation, and a name that never has one.
    for host in ["192.0.2.1", "nobody.invalid"] {
        let config = ConnectorConfig { host: host.to_owned(), ..config(Role::Sender) };
        let error = Connector::builder().config(config).build().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidConfig, "{error}");
        for part in [&format!("host is {host:?}"), "accepted: auto, or a name or an address"] {
            assert!(error.message().contains(part), "{part} is missing in {error}");
        }
    }
}

#[test]
fn device_name_chooses_where_tcp_listens() {
    let published = |device: &str| {
        let config = ConnectorConfig { device_name: device.to_owned(), ..config(Role::Both) };
        let connector = Connector::builder().config(config).build()?;
        Ok::<_, posthorse_core::Error>(connector.engine().descriptor().transports["tcp"]["host"].clone())
    };
    assert_eq!(published("lo").unwrap(), "127.0.0.1");
    let error = published("lo,mlx5_0").unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidConfig);
    for part in ["device_name is \"lo,mlx5_0\"", "\"mlx5_0\"", "accepted", "lo"] {
        assert!(error.message().contains(part), "{part} is missing in {error}");
    }
}

#[test]
fn host_auto_is_reached_by_ipv4_and_by_ipv6() {
    let sender = build(ConnectorConfig { host: "auto".to_owned(), ..config(Role::Sender) });
    let (_, port) = sender.address().unwrap();
    let receiver = build(config(Role::Receiver));
    let mut hosts = vec!["127.0.0.1"];
    if TcpListener::bind((Ipv6Addr::LOCALHOST, 0)).is_ok() {
        hosts.push("::1");
    } else {
        skip("ipv6", "this host has no IPv6 loopback address");
    }
    for host in hosts {
        sender.put(&edge(), host, &b"payload"[..], PutOptions::default()).unwrap();
        let options = GetOptions { source: Source::At(host, port), ..GetOptions::until(soon()) };
        assert_eq!(receiver.get(&edge(), host, options).unwrap().bytes().unwrap(), b"payload", "{host}");
    }
    // The port is taken whole: nobody else gets half of it.
    let again = ConnectorConfig { host: "auto".to_owned(), zmq_port: port, ..config(Role::Sender) };
    let error = Connector::builder().config(again).build().unwrap_err();
    assert!(error.message().contains(&format!(":{port}")), "{error}");
}

#[test]
fn what_an_engine_that_is_handed_over_decides_is_refused() {
    let engine = EngineConfig { advertise: "127.0.0.1".to_owned(), ..EngineConfig::default() };
    let engine = TransferEngine::builder().config(engine).build().unwrap();
    let with = |config| Connector::builder().engine(engine.clone()).config(config).build();
    with(config(Role::Receiver)).unwrap();
    let error = with(ConnectorConfig { protocol: Protocol::Tcp, ..config(Role::Receiver) }).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidConfig);
    assert!(error.message().contains("protocol is tcp"), "{error}");
}
