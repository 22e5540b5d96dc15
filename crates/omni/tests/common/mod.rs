//! What tests of the connector share.
#![allow(dead_code, reason = "each test binary uses a part")]

use std::thread;
use std::time::{Duration, Instant};

use posthorse_core::{Deadline, Result};
use posthorse_omni::config::Role;
use posthorse_omni::{Connector, ConnectorConfig, Edge, GetOptions, PutOptions, Received};

pub(crate) const POOL: u64 = 64 << 20;

pub(crate) fn soon() -> Deadline {
    Deadline::after(Duration::from_secs(20))
}

pub(crate) fn config(role: Role) -> ConnectorConfig {
    ConnectorConfig {
        role,
        host: "127.0.0.1".to_owned(),
        advertise_host: Some("127.0.0.1".to_owned()),
        zmq_port: 0,
        memory_pool_size: POOL,
        ..ConnectorConfig::default()
    }
}

pub(crate) fn build(config: ConnectorConfig) -> Connector {
    Connector::builder().config(config).build().unwrap()
}

pub(crate) fn edge() -> Edge {
    Edge::new(0, 1)
}

pub(crate) fn require(config: &mut ConnectorConfig, transport: &str) {
    config.transport = format!("require:{transport}").parse().unwrap();
}

/// Waits for what comes about in the background.
pub(crate) fn eventually(what: &str, mut is_so: impl FnMut() -> bool) {
    let until = Instant::now() + Duration::from_secs(15);
    while !is_so() {
        assert!(Instant::now() < until, "{what} did not come about");
        thread::park_timeout(Duration::from_millis(1));
    }
}

/// The pool is whole and nothing is held back, now or soon.
pub(crate) fn assert_whole(connector: &Connector) {
    let mut last = None;
    let until = Instant::now() + Duration::from_secs(15);
    while Instant::now() < until {
        let health = connector.health();
        if health.pool.is_whole() && health.withheld == 0 {
            return;
        }
        last = Some(health);
        thread::park_timeout(Duration::from_millis(1));
    }
    panic!("not whole: {last:?}");
}

/// A producer and a consumer of one process, joined by the named transport.
pub(crate) struct Pair {
    pub(crate) sender: Connector,
    pub(crate) receiver: Connector,
}

impl Pair {
    pub(crate) fn by(transport: &str) -> Self {
        Self::with(|config| require(config, transport))
    }

    pub(crate) fn with(change: impl Fn(&mut ConnectorConfig)) -> Self {
        let mut sender = config(Role::Sender);
        change(&mut sender);
        let sender = build(sender);
        let (host, port) = sender.address().unwrap();
        let mut receiver = config(Role::Receiver);
        receiver.sender_host = Some(host);
        receiver.sender_zmq_port = Some(port);
        change(&mut receiver);
        Self { sender, receiver: build(receiver) }
    }

    pub(crate) fn put(&self, key: &str, bytes: &[u8]) {
        self.sender.put(&edge(), key, bytes, PutOptions::default()).unwrap();
    }

    pub(crate) fn get(&self, key: &str) -> Result<Received> {
        self.receiver.get(&edge(), key, GetOptions::until(soon()))
    }

    /// Both pools are whole: waits for what is given back in the background.
    pub(crate) fn assert_whole(&self) {
        assert_whole(&self.sender);
        assert_whole(&self.receiver);
    }
}
