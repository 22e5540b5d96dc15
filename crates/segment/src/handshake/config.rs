//! What can be configured of the handshake.

use std::net::IpAddr;
use std::time::Duration;

use posthorse_core::{Error, Result};
use serde::{Deserialize, Serialize};

use crate::frame::{DEFAULT_PAYLOAD, MAX_PAYLOAD};

/// What an engine publishes that has registered little has to go into a frame, with the longest fingerprint.
const MIN_FRAME_BYTES: usize = 4096;

/// How the handshake listens and calls. Every field has a default; an unknown one is refused.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct HandshakeConfig {
    /// The addresses to listen on, all on one port. None means all of this host, IPv6 and IPv4.
    pub bind: Vec<IpAddr>,
    /// The lowest port to listen on; zero leaves the choice to the system.
    pub port_min: u16,
    /// The highest port to listen on.
    pub port_max: u16,
    /// The longest frame taken or sent, in bytes. A peer that was not told otherwise takes 1 MiB.
    pub frame_bytes: usize,
    /// How many connections may be at their first request. One that has asked for nothing for `grace_ms`, or has had
    /// `io_timeout_ms` to take its answer, gives way to one more; while we work at what all of them asked for, the next has
    /// to wait.
    pub newcomers: usize,
    /// How long a connection has for its first request before it may have to give way, in milliseconds.
    pub grace_ms: u64,
    /// How many peers may hold a control connection to us.
    pub control_connections: usize,
    /// How many requests are handled at a time; more have to wait.
    pub handlers: usize,
    /// How many bytes of requests may wait for their turn to be handled; more are refused.
    pub queue_bytes: usize,
    /// How many requests to one peer may be under way; more are refused.
    pub requests_per_peer: usize,
    /// How long making a connection may take, in milliseconds.
    pub connect_timeout_ms: u64,
    /// How long a first request may take to arrive, and a piece of an answer to leave, in milliseconds; and how long a peer
    /// has to take its answer before it may have to give way.
    pub io_timeout_ms: u64,
    /// How long a peer may take to answer a foreign message, or to take the answer to its own, in milliseconds. Foreign
    /// servers answer one peer after the other, and each may keep them for some seconds.
    pub answer_timeout_ms: u64,
    /// How long a control connection is kept that nobody uses, in milliseconds.
    pub idle_timeout_ms: u64,
    /// How long a peer may be silent while an answer is owed before it is gone, in milliseconds.
    pub liveness_ms: u64,
    /// The port of a peer whose name has none; without one, such a name is refused.
    pub default_port: Option<u16>,
}

impl Default for HandshakeConfig {
    fn default() -> Self {
        Self {
            bind: Vec::new(),
            port_min: 0,
            port_max: 0,
            frame_bytes: DEFAULT_PAYLOAD,
            newcomers: 256,
            grace_ms: 100,
            control_connections: 1024,
            handlers: 32,
            queue_bytes: 64 << 20,
            requests_per_peer: 256,
            connect_timeout_ms: 5_000,
            io_timeout_ms: 5_000,
            answer_timeout_ms: 60_000,
            idle_timeout_ms: 60_000,
            liveness_ms: 3_000,
            default_port: None,
        }
    }
}

impl HandshakeConfig {
    /// Checks every value.
    ///
    /// # Errors
    /// `InvalidConfig`, naming key, value and what is accepted.
    pub fn validate(&self) -> Result<()> {
        if self.port_max < self.port_min {
            let accepted = format!("{} (port_min) to 65535", self.port_min);
            return Err(Error::invalid_config("port_max", self.port_max, &accepted));
        }
        if self.port_min == 0 && self.port_max != 0 {
            return Err(Error::invalid_config("port_min", 0, "1 to port_max, or zero for both"));
        }
        if !(MIN_FRAME_BYTES..=MAX_PAYLOAD).contains(&self.frame_bytes) {
            return Err(Error::invalid_config(
                "frame_bytes",
                self.frame_bytes,
                &format!("{MIN_FRAME_BYTES} to {MAX_PAYLOAD}"),
            ));
        }
        for (key, value) in [
            ("newcomers", self.newcomers as u64),
            ("grace_ms", self.grace_ms),
            ("control_connections", self.control_connections as u64),
            ("handlers", self.handlers as u64),
            ("queue_bytes", self.queue_bytes as u64),
            ("requests_per_peer", self.requests_per_peer as u64),
            ("connect_timeout_ms", self.connect_timeout_ms),
            ("io_timeout_ms", self.io_timeout_ms),
            ("answer_timeout_ms", self.answer_timeout_ms),
            ("idle_timeout_ms", self.idle_timeout_ms),
            ("liveness_ms", self.liveness_ms),
        ] {
            if !(1..=u64::from(u32::MAX)).contains(&value) {
                return Err(Error::invalid_config(key, value, "1 to 4294967295"));
            }
        }
        if self.default_port == Some(0) {
            return Err(Error::invalid_config("default_port", 0, "1 to 65535"));
        }
        Ok(())
    }

    pub(crate) const fn grace(&self) -> Duration {
        Duration::from_millis(self.grace_ms)
    }

    pub(crate) const fn connect_timeout(&self) -> Duration {
        Duration::from_millis(self.connect_timeout_ms)
    }

    pub(crate) const fn io_timeout(&self) -> Duration {
        Duration::from_millis(self.io_timeout_ms)
    }

    pub(crate) const fn answer_timeout(&self) -> Duration {
        Duration::from_millis(self.answer_timeout_ms)
    }

    pub(crate) const fn idle_timeout(&self) -> Duration {
        Duration::from_millis(self.idle_timeout_ms)
    }

    pub(crate) const fn liveness(&self) -> Duration {
        Duration::from_millis(self.liveness_ms)
    }
}

#[cfg(test)]
mod tests {
    use posthorse_core::ErrorKind;

    use super::*;

    #[test]
    fn bad_values_are_named() {
        HandshakeConfig::default().validate().unwrap();
        let base = HandshakeConfig::default;
        for (config, key) in [
            (HandshakeConfig { port_min: 5, ..base() }, "port_max"),
            (HandshakeConfig { port_max: 5, ..base() }, "port_min"),
            (HandshakeConfig { frame_bytes: MIN_FRAME_BYTES - 1, ..base() }, "frame_bytes"),
            (HandshakeConfig { frame_bytes: MAX_PAYLOAD + 1, ..base() }, "frame_bytes"),
            (HandshakeConfig { handlers: 0, ..base() }, "handlers"),
            (HandshakeConfig { default_port: Some(0), ..base() }, "default_port"),
        ] {
            let error = config.validate().unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidConfig);
            assert!(error.to_string().starts_with(key), "{error}");
        }
    }

    #[test]
    fn an_unknown_key_is_refused_by_name() {
        let error = serde_json::from_str::<HandshakeConfig>(r#"{"port_mni": 1}"#).unwrap_err();
        assert!(error.to_string().contains("port_mni"), "{error}");
        let config: HandshakeConfig = serde_json::from_str(r#"{"bind": ["::1"]}"#).unwrap();
        assert_eq!(config.bind.len(), 1);
    }
}
