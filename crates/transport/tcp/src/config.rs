//! What can be chosen, with what is chosen otherwise.

use std::net::IpAddr;
use std::time::Duration;

use posthorse_core::{Error, Result};
use serde::{Deserialize, Serialize};

use crate::address::Network;

/// The configuration of a [`TcpTransport`](crate::TcpTransport). Every field has a default; an unknown key is
/// refused.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct TcpConfig {
    /// The addresses to listen on. Empty: all of them, IPv6 and IPv4 alike where the host has both.
    pub bind: Vec<IpAddr>,
    /// The network interfaces on whose addresses to listen, by name, in place of `bind`; the first is advertised.
    /// Empty: as `bind` says.
    pub interfaces: Vec<String>,
    /// The first port to try; zero lets the system choose.
    pub port: u16,
    /// How many further ports to try when `port` is in use.
    pub port_range: u16,
    /// The host or address that peers are told. Empty: a bound address, else a routable one of this host.
    pub advertise: String,
    /// Which of this host's addresses are advertised, as networks such as `10.0.0.0/8`, in order of preference.
    pub advertise_networks: Vec<String>,
    /// Threads that move bytes. Zero: two, or one on a host with one core.
    pub threads: usize,
    /// Lanes per path for large slices. Zero: two, or one where the two ends of a lane keep all cores busy.
    pub bulk_lanes: usize,
    /// Lanes per path for small and urgent slices and for notifications.
    pub express_lanes: usize,
    /// The longest slice, in bytes, that counts as small.
    pub small_bytes: u64,
    /// Slices that wait in a lane, in each priority, before it takes no more.
    pub queue_slots: usize,
    /// Slices of a lane that are sent and not yet answered.
    pub window_slots: usize,
    /// Notifications of a path that are not yet acknowledged.
    pub notify_slots: usize,
    /// The longest notification, in bytes.
    pub notify_bytes: usize,
    /// The sockets' send and receive buffers, in bytes; zero leaves them to the system.
    pub socket_buffer_bytes: usize,
    /// Whether long slices go by reference where both ends of a connection have one address.
    pub by_reference: bool,
    /// How long a thread polls after the last activity before it sleeps, in microseconds; zero never polls.
    pub spin_us: u64,
    /// How long a peer may be silent before it counts as gone, in milliseconds.
    pub liveness_ms: u64,
    /// How long making a connection may take, in milliseconds.
    pub connect_timeout_ms: u64,
    /// How often in a row a lane is made again, with no slice completed in between, nor with nothing to do for the
    /// liveness time.
    pub reconnect_attempts: u32,
    /// The most connections accepted from peers: at least as many as a path has lanes, of which each is one.
    pub max_connections: usize,
}

impl Default for TcpConfig {
    fn default() -> Self {
        Self {
            bind: Vec::new(),
            interfaces: Vec::new(),
            port: 0,
            port_range: 0,
            advertise: String::new(),
            advertise_networks: Vec::new(),
            threads: 0,
            bulk_lanes: 0,
            express_lanes: 1,
            small_bytes: 64 << 10,
            queue_slots: 4096,
            window_slots: 1024,
            notify_slots: 256,
            notify_bytes: 64 << 10,
            socket_buffer_bytes: 4 << 20,
            by_reference: true,
            spin_us: 50,
            liveness_ms: 3000,
            connect_timeout_ms: 2000,
            reconnect_attempts: 1,
            max_connections: 1024,
        }
    }
}

impl TcpConfig {
    /// Checks every value.
    ///
    /// # Errors
    /// `InvalidConfig`, naming the key, the value and what is accepted.
    pub fn validate(&self) -> Result<()> {
        within("threads", self.threads as u64, 0, 64)?;
        within("bulk_lanes", self.bulk_lanes as u64, 0, 16)?;
        within("express_lanes", self.express_lanes as u64, 1, 16)?;
        within("small_bytes", self.small_bytes, 1, 1 << 30)?;
        within("queue_slots", self.queue_slots as u64, 16, 1 << 20)?;
        within("window_slots", self.window_slots as u64, 16, 1 << 16)?;
        within("notify_slots", self.notify_slots as u64, 1, 1 << 16)?;
        within("notify_bytes", self.notify_bytes as u64, 1, crate::wire::MAX_NOTIFY as u64)?;
        if self.socket_buffer_bytes != 0 {
            within("socket_buffer_bytes", self.socket_buffer_bytes as u64, 64 << 10, 1 << 30)?;
        }
        within("spin_us", self.spin_us, 0, 1_000_000)?;
        within("liveness_ms", self.liveness_ms, 60, 3_600_000)?;
        within("connect_timeout_ms", self.connect_timeout_ms, 10, 3_600_000)?;
        within("reconnect_attempts", self.reconnect_attempts.into(), 0, 16)?;
        within("max_connections", self.max_connections as u64, self.lanes_of_a_path(), 1 << 20)?;
        if !self.interfaces.is_empty() && !self.bind.is_empty() {
            return Err(Error::invalid_config(
                "interfaces",
                format_args!("{:?}", self.interfaces),
                "none as long as bind names addresses",
            ));
        }
        if self.port == 0 && self.port_range != 0 {
            return Err(Error::invalid_config(
                "port_range",
                self.port_range,
                "0 as long as port is 0, which lets the system choose",
            ));
        }
        if self.port.checked_add(self.port_range).is_none() {
            return Err(Error::invalid_config(
                "port_range",
                self.port_range,
                "port + port_range up to 65535",
            ));
        }
        self.networks().map(drop)
    }

    pub(crate) fn networks(&self) -> Result<Vec<Network>> {
        self.advertise_networks
            .iter()
            .map(|text| {
                Network::parse(text).ok_or_else(|| {
                    Error::invalid_config(
                        "advertise_networks",
                        format_args!("{text:?}"),
                        "an address and a prefix length, such as 10.0.0.0/8 or fd00::/8",
                    )
                })
            })
            .collect()
    }

    pub(crate) fn liveness(&self) -> Duration {
        Duration::from_millis(self.liveness_ms)
    }

    /// How often the lanes and connections are looked at.
    pub(crate) fn tick(&self) -> Duration {
        self.liveness() / 6
    }

    pub(crate) fn connect_timeout(&self) -> Duration {
        Duration::from_millis(self.connect_timeout_ms)
    }

    /// How many lanes a path has for large slices.
    pub(crate) fn bulk_lanes(&self) -> usize {
        match self.bulk_lanes {
            0 => std::thread::available_parallelism().map_or(1, |cores| if cores.get() > 2 { 2 } else { 1 }),
            lanes => lanes,
        }
    }

    /// How many lanes a path has that a peer makes which is configured as this side is, whatever its cores.
    const fn lanes_of_a_path(&self) -> u64 {
        let bulk = if self.bulk_lanes == 0 { 2 } else { self.bulk_lanes };
        (self.express_lanes + bulk) as u64
    }

    pub(crate) fn thread_count(&self) -> usize {
        if self.threads > 0 {
            return self.threads;
        }
        std::thread::available_parallelism().map_or(1, |cores| cores.get().min(2))
    }
}

fn within(key: &str, value: u64, min: u64, max: u64) -> Result<()> {
    if (min..=max).contains(&value) {
        return Ok(());
    }
    Err(Error::invalid_config(key, value, &format!("{min} to {max}")))
}

#[cfg(test)]
mod tests {
    use posthorse_core::ErrorKind;

    use super::*;

    #[test]
    fn the_default_is_valid_and_an_empty_table_is_the_default() {
        let config: TcpConfig = serde_json::from_str("{}").unwrap();
        assert_eq!(config, TcpConfig::default());
        config.validate().unwrap();
    }

    #[test]
    fn an_unknown_key_is_refused_by_name() {
        let error = serde_json::from_str::<TcpConfig>(r#"{"lanse": 3}"#).unwrap_err().to_string();
        assert!(error.contains("lanse") && error.contains("bulk_lanes"), "{error}");
    }

    #[test]
    fn a_bad_value_is_refused_with_key_value_and_what_is_accepted() {
        let base = TcpConfig::default;
        for (config, key, value, accepted) in [
            (TcpConfig { bulk_lanes: 17, ..base() }, "bulk_lanes", "17", "0 to 16"),
            (TcpConfig { max_connections: 2, ..base() }, "max_connections", "2", "3 to 1048576"),
            (
                TcpConfig { express_lanes: 16, bulk_lanes: 4, max_connections: 19, ..base() },
                "max_connections",
                "19",
                "20 to 1048576",
            ),
            (TcpConfig { liveness_ms: 1, ..base() }, "liveness_ms", "1", "60 to"),
            (TcpConfig { socket_buffer_bytes: 100, ..base() }, "socket_buffer_bytes", "100", "65536"),
            (TcpConfig { port: 65535, port_range: 1, ..base() }, "port_range", "1", "65535"),
            (TcpConfig { port_range: 7, ..base() }, "port_range", "7", "0"),
            (
                TcpConfig {
                    interfaces: vec!["lo".into()],
                    bind: vec![std::net::Ipv4Addr::LOCALHOST.into()],
                    ..base()
                },
                "interfaces",
                "\"lo\"",
                "bind",
            ),
            (
                TcpConfig { advertise_networks: vec!["10.0.0.0/33".into()], ..base() },
                "advertise_networks",
                "10.0.0.0/33",
                "fd00::/8",
            ),
        ] {
            let error = config.validate().unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidConfig);
            let text = error.to_string();
            assert!(text.contains(key) && text.contains(value) && text.contains(accepted), "{text}");
        }
    }
}
