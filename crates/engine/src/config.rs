//! How an engine is set up.

use std::net::{IpAddr, Ipv4Addr, UdpSocket};
use std::time::Duration;

use posthorse_core::{Error, Result};
use posthorse_segment::HandshakeConfig;
use serde::{Deserialize, Serialize};

/// The configuration of an engine. Every field has a default; an unknown key is an error that names it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct EngineConfig {
    /// The transports, best first. Those that are not named here come after, in the order of installation.
    pub transport_order: Vec<String>,
    /// Which transport requests take that name none: `auto`, `prefer:NAME` or `require:NAME`.
    pub transport: String,
    /// Where requests are cut, in bytes; 0 leaves it to the transports.
    pub slice_bytes: u64,
    /// How often a slice is sent before its failure stands, at least 1.
    pub max_attempts: u32,
    /// How long a transport may take to connect to a peer.
    pub connect_timeout_ms: u64,
    /// How long a transport that failed to connect is left alone.
    pub retry_after_ms: u64,
    /// How long transfers that were called off may go on before their path is fenced.
    pub cancel_grace_ms: u64,
    /// How long a wait spins before it parks; 0 parks at once. A wake-up costs more than a small transfer.
    pub spin_us: u64,
    /// How many notifications of peers wait to be fetched before more are refused.
    pub max_notifications: usize,
    /// How many bytes they may have together.
    pub max_notification_bytes: usize,
    /// How long memory that is given up in the background is waited for before it is only held back.
    pub fence_timeout_ms: u64,
    /// What the application wants all peers to agree on, such as a hash of model and layout.
    pub fingerprint: Option<String>,
    /// The host that peers are told, as the first half of this engine's name; empty finds one that is routable.
    pub advertise: String,
    /// The handshake, where peers ask for what this engine publishes.
    pub handshake: HandshakeConfig,
    /// The transport `tcp`; null leaves it out.
    #[cfg(feature = "tcp")]
    pub tcp: Option<posthorse_tcp::TcpConfig>,
    /// The transport `shm`; null leaves it out.
    #[cfg(feature = "shm")]
    pub shm: Option<posthorse_shm::ShmConfig>,
}

impl Default for EngineConfig {
    fn default() -> Self {
        Self {
            transport_order: ["local", "shm", "rdma", "tcp"].map(str::to_owned).to_vec(),
            transport: "auto".to_owned(),
            slice_bytes: 0,
            max_attempts: 3,
            connect_timeout_ms: 3000,
            retry_after_ms: 200,
            cancel_grace_ms: 200,
            spin_us: 20,
            max_notifications: 65_536,
            max_notification_bytes: 64 << 20,
            fence_timeout_ms: 3000,
            fingerprint: None,
            advertise: String::new(),
            handshake: HandshakeConfig::default(),
            #[cfg(feature = "tcp")]
            tcp: Some(posthorse_tcp::TcpConfig::default()),
            #[cfg(feature = "shm")]
            shm: Some(posthorse_shm::ShmConfig::default()),
        }
    }
}

/// What [`EngineConfig::transport`] says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Preference {
    Auto,
    Prefer(String),
    Require(String),
}

impl EngineConfig {
    /// Checks every value.
    ///
    /// # Errors
    /// `InvalidConfig`, naming the key, the value and what is accepted.
    pub fn validate(&self) -> Result<()> {
        self.preference()?;
        if self.max_attempts == 0 || self.max_attempts > 60 {
            return Err(Error::invalid_config("max_attempts", self.max_attempts, "1 to 60"));
        }
        if self.connect_timeout_ms == 0 {
            return Err(Error::invalid_config("connect_timeout_ms", 0, "at least 1"));
        }
        if self.slice_bytes != 0 && self.slice_bytes < 4096 {
            return Err(Error::invalid_config("slice_bytes", self.slice_bytes, "0, or at least 4096"));
        }
        Ok(())
    }

    pub(crate) fn preference(&self) -> Result<Preference> {
        let named = |name: &str| (!name.is_empty()).then(|| name.to_owned());
        let preference = match self.transport.split_once(':') {
            None if self.transport == "auto" => Some(Preference::Auto),
            Some(("prefer", name)) => named(name).map(Preference::Prefer),
            Some(("require", name)) => named(name).map(Preference::Require),
            _ => None,
        };
        preference.ok_or_else(|| {
            Error::invalid_config(
                "transport",
                format_args!("{:?}", self.transport),
                "auto, prefer:NAME, require:NAME",
            )
        })
    }

    /// The host in this engine's name: as configured, else a bound address that is specific, else where packets to
    /// the world leave from, else loopback.
    pub(crate) fn advertised_host(&self) -> String {
        if !self.advertise.is_empty() {
            return self.advertise.clone();
        }
        let specific = self.handshake.bind.iter().find(|address| !address.is_unspecified()).copied();
        specific.or_else(default_source).unwrap_or(IpAddr::V4(Ipv4Addr::LOCALHOST)).to_string()
    }

    pub(crate) const fn connect_timeout(&self) -> Duration {
        Duration::from_millis(self.connect_timeout_ms)
    }

    pub(crate) const fn retry_after(&self) -> Duration {
        Duration::from_millis(self.retry_after_ms)
    }

    pub(crate) const fn cancel_grace(&self) -> Duration {
        Duration::from_millis(self.cancel_grace_ms)
    }

    pub(crate) const fn spin(&self) -> Duration {
        Duration::from_micros(self.spin_us)
    }

    pub(crate) const fn fence_timeout(&self) -> Duration {
        Duration::from_millis(self.fence_timeout_ms)
    }
}

/// The address that packets to the world leave from. Nothing is sent: connecting a datagram socket only consults the
/// routing table. The destination is of a documentation range (RFC 5737).
fn default_source() -> Option<IpAddr> {
    let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)).ok()?;
    socket.connect((Ipv4Addr::new(198, 51, 100, 1), 9)).ok()?;
    socket.local_addr().ok().map(|address| address.ip())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_defaults_are_valid_and_an_unknown_key_is_named() {
        EngineConfig::default().validate().unwrap();
        let parsed: EngineConfig = serde_json::from_str(r#"{"spin_us": 0}"#).unwrap();
        assert_eq!(parsed, EngineConfig { spin_us: 0, ..EngineConfig::default() });
        let error = serde_json::from_str::<EngineConfig>(r#"{"spin_ms": 1}"#).unwrap_err().to_string();
        assert!(error.contains("spin_ms") && error.contains("spin_us"), "{error}");
    }

    #[test]
    fn preferences_are_read_or_refused() {
        let preference =
            |text: &str| EngineConfig { transport: text.to_owned(), ..Default::default() }.preference();
        assert_eq!(preference("auto").unwrap(), Preference::Auto);
        assert_eq!(preference("prefer:tcp").unwrap(), Preference::Prefer("tcp".to_owned()));
        assert_eq!(preference("require:shm").unwrap(), Preference::Require("shm".to_owned()));
        for bad in ["", "tcp", "prefer:", "require", "insist:tcp"] {
            let error = preference(bad).unwrap_err().to_string();
            assert!(error.contains("transport") && error.contains(&format!("{bad:?}")), "{error}");
        }
    }
}
