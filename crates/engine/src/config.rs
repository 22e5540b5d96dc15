//! How an engine is set up.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::str::FromStr;
use std::time::Duration;

use posthorse_core::{Error, ErrorKind, Result};
use posthorse_segment::{HandshakeConfig, advertise};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::environment::{self, Environment};

/// The configuration of an engine. Every field has a default; an unknown key is an error that names it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct EngineConfig {
    /// The transports, best first. Those that are not named here come after, in the order of installation.
    pub transport_order: Vec<String>,
    /// Which transport requests take that name none.
    pub transport: TransportChoice,
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
    /// How long a shutdown waits for control work that is under way.
    pub fence_timeout_ms: u64,
    /// What the application wants all peers to agree on, such as a hash of model and layout. A side without one agrees
    /// with every other.
    pub fingerprint: Option<String>,
    /// The host that peers are told, as the first half of this engine's name, and as that of the transport `tcp`, unless
    /// it has keys of its own for that; empty finds one that is routable.
    pub advertise: String,
    /// The handshake, where peers ask for what this engine publishes.
    pub handshake: HandshakeConfig,
    /// The transport `tcp`; null leaves it out.
    #[cfg(feature = "tcp")]
    pub tcp: Option<posthorse_tcp::TcpConfig>,
    /// The transport `shm`; null leaves it out.
    #[cfg(feature = "shm")]
    pub shm: Option<posthorse_shm::ShmConfig>,
    /// The transport `rdma`; null leaves it out. Where the host has no RDMA device, or no library for them, the engine goes
    /// on without, and says so.
    #[cfg(feature = "rdma")]
    pub rdma: Option<posthorse_rdma::RdmaConfig>,
}

impl Default for EngineConfig {
    fn default() -> Self {
        Self {
            transport_order: ["local", "shm", "rdma", "tcp"].map(str::to_owned).to_vec(),
            transport: TransportChoice::Auto,
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
            #[cfg(feature = "rdma")]
            rdma: Some(posthorse_rdma::RdmaConfig::default()),
        }
    }
}

/// The parts of the configuration, as the names of the variables that override them say.
const ENGINE: &str = "engine";
const HANDSHAKE: &str = "handshake";
#[cfg(feature = "tcp")]
const TCP: &str = "tcp";
#[cfg(feature = "shm")]
const SHM: &str = "shm";
#[cfg(feature = "rdma")]
const RDMA: &str = "rdma";

/// The keys of an engine that hold a part of their own.
const NESTED: [&str; 4] = [HANDSHAKE, "tcp", "shm", "rdma"];

/// One part of the configuration as the environment overrides it.
fn part<T: Serialize + DeserializeOwned + Default>(
    environment: &Environment,
    part: &str,
    config: T,
    check: impl Fn(&T) -> Result<()>,
) -> Result<T> {
    let read = |map: Map<String, Value>| {
        serde_json::from_value(Value::Object(map))
            .map_err(|error| Error::new(ErrorKind::InvalidConfig, error.to_string()))
    };
    environment.apply(part, config, read, |_| None, check)
}

/// A part's own error does not know where the part stands: several have a key of that name.
pub(crate) fn of_part(part: &str, error: Error) -> Error {
    match error.kind() {
        ErrorKind::InvalidConfig => {
            Error::new(ErrorKind::InvalidConfig, format!("{part}.{}", error.message()))
        }
        _ => error.context(format_args!("transport {part}")),
    }
}

#[cfg(feature = "shm")]
fn check_shm(shm: &posthorse_shm::ShmConfig) -> Result<()> {
    posthorse_shm::ShmTransport::new(shm.clone()).map(drop)
}

/// The longest fingerprint, in bytes: peers refuse longer ones.
pub const MAX_FINGERPRINT_BYTES: usize = 1024;

/// Whether a text may be a host's name or address. It need not be known here: it may be meant for peers.
pub fn is_host(text: &str) -> bool {
    const LONGEST: usize = 255;
    let in_names = |c: char| c.is_ascii_alphanumeric() || "-._:%[]".contains(c);
    (1..=LONGEST).contains(&text.len()) && text.chars().all(in_names)
}

/// Whose preference of a transport counts where two peers have one each.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Precedence {
    /// This engine's.
    Ours,
    /// The peer's.
    Theirs,
}

/// Which transport carries the bytes. Written `auto`, `prefer:NAME` or `require:NAME`.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum TransportChoice {
    /// The best that there is.
    #[default]
    Auto,
    /// This one where it can be had, else the best.
    Prefer(String),
    /// This one, or an error that says why not.
    Require(String),
}

impl FromStr for TransportChoice {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        /// The transports that one might name alone.
        const KNOWN: [&str; 4] = ["local", "shm", "rdma", "tcp"];
        match text.split_once(':') {
            None if text == "auto" => Ok(Self::Auto),
            Some(("prefer", name)) if !name.is_empty() => Ok(Self::Prefer(name.to_owned())),
            Some(("require", name)) if !name.is_empty() => Ok(Self::Require(name.to_owned())),
            _ => {
                let accepted = "auto, prefer:NAME, require:NAME";
                // The name alone does not say which of the two is meant.
                let accepted = match KNOWN.contains(&text) {
                    true => format!("{accepted}, such as require:{text}"),
                    false => accepted.to_owned(),
                };
                Err(Error::invalid_config("transport", format_args!("{text:?}"), &accepted))
            }
        }
    }
}

impl TryFrom<String> for TransportChoice {
    type Error = Error;

    fn try_from(text: String) -> Result<Self> {
        text.parse()
    }
}

impl fmt::Display for TransportChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => f.write_str("auto"),
            Self::Prefer(name) => write!(f, "prefer:{name}"),
            Self::Require(name) => write!(f, "require:{name}"),
        }
    }
}

impl From<TransportChoice> for String {
    fn from(choice: TransportChoice) -> Self {
        choice.to_string()
    }
}

impl EngineConfig {
    /// Checks every value.
    ///
    /// # Errors
    /// `InvalidConfig`, naming the key, the value and what is accepted; a key of the handshake or of a transport with its
    /// part, such as `tcp.liveness_ms`.
    pub fn validate(&self) -> Result<()> {
        self.check_own()?;
        self.handshake.validate().map_err(|error| of_part(HANDSHAKE, error))?;
        #[cfg(feature = "tcp")]
        if let Some(tcp) = &self.tcp {
            tcp.validate().map_err(|error| of_part(TCP, error))?;
        }
        #[cfg(feature = "shm")]
        if let Some(shm) = &self.shm {
            check_shm(shm).map_err(|error| of_part(SHM, error))?;
        }
        #[cfg(feature = "rdma")]
        if let Some(rdma) = &self.rdma {
            rdma.validate().map_err(|error| of_part(RDMA, error))?;
        }
        Ok(())
    }

    /// Checks the engine's own values, and not those of its parts.
    fn check_own(&self) -> Result<()> {
        let fingerprint = self.fingerprint.as_ref().map_or(0, String::len);
        if fingerprint > MAX_FINGERPRINT_BYTES {
            let accepted = format!("text of up to {MAX_FINGERPRINT_BYTES} bytes");
            return Err(Error::invalid_config(
                "fingerprint",
                format_args!("{fingerprint} bytes long"),
                &accepted,
            ));
        }
        if !self.advertise.is_empty() && !is_host(&self.advertise) {
            let accepted = "a host name or address, or nothing to find a routable one";
            return Err(Error::invalid_config("advertise", format_args!("{:?}", self.advertise), accepted));
        }
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

    /// Sets how long a peer may be silent before it counts as gone, in milliseconds: for the handshake and for each
    /// transport that comes with Posthorse.
    #[must_use]
    pub const fn liveness_ms(mut self, liveness_ms: u64) -> Self {
        self.handshake.liveness_ms = liveness_ms;
        #[cfg(feature = "tcp")]
        if let Some(tcp) = &mut self.tcp {
            tcp.liveness_ms = liveness_ms;
        }
        #[cfg(feature = "shm")]
        if let Some(shm) = &mut self.shm {
            shm.liveness_ms = liveness_ms;
        }
        #[cfg(feature = "rdma")]
        if let Some(rdma) = &mut self.rdma {
            rdma.liveness_ms = liveness_ms;
        }
        self
    }

    /// Has the transports that use the network do so by these interfaces of the host alone.
    ///
    /// # Errors
    /// `Unsupported` when none is built in, or it is left out.
    #[cfg_attr(not(feature = "tcp"), expect(unused_mut))]
    pub fn interfaces(mut self, names: Vec<String>) -> Result<Self> {
        #[cfg(feature = "tcp")]
        if let Some(tcp) = &mut self.tcp {
            tcp.interfaces = names;
            return Ok(self);
        }
        let message =
            format!("the interfaces {names:?} cannot be used: there is no transport of the network");
        Err(Error::new(ErrorKind::Unsupported, message))
    }

    /// Has the handshake, and the transports that use the network, listen on this address of the host alone.
    #[must_use]
    pub fn bind(mut self, address: IpAddr) -> Self {
        self.handshake.bind = vec![address];
        #[cfg(feature = "tcp")]
        if let Some(tcp) = &mut self.tcp {
            tcp.bind = vec![address];
        }
        self
    }

    /// The transport `tcp`'s: peers are told the engine's host, where it has nothing of its own to tell them.
    #[cfg(feature = "tcp")]
    pub(crate) fn tcp(&self) -> Option<posthorse_tcp::TcpConfig> {
        let mut tcp = self.tcp.clone()?;
        let where_the_engine_listens = tcp.bind.is_empty() || tcp.bind == self.handshake.bind;
        if where_the_engine_listens
            && tcp.interfaces.is_empty()
            && tcp.advertise.is_empty()
            && tcp.advertise_networks.is_empty()
        {
            tcp.advertise.clone_from(&self.advertise);
        }
        Some(tcp)
    }

    /// The variables of the environment that override a key of the engine, the handshake or a transport.
    ///
    /// # Errors
    /// None that a caller can bring about.
    pub fn variables() -> Result<Vec<String>> {
        let mut variables = environment::variables::<Self>(ENGINE)?;
        variables.retain(|name| !NESTED.iter().any(|key| *name == environment::variable(ENGINE, key)));
        variables.extend(environment::variables::<HandshakeConfig>(HANDSHAKE)?);
        #[cfg(feature = "tcp")]
        variables.extend(environment::variables::<posthorse_tcp::TcpConfig>(TCP)?);
        #[cfg(feature = "shm")]
        variables.extend(environment::variables::<posthorse_shm::ShmConfig>(SHM)?);
        #[cfg(feature = "rdma")]
        variables.extend(environment::variables::<posthorse_rdma::RdmaConfig>(RDMA)?);
        Ok(variables)
    }

    /// The configuration as the environment overrides it. A transport that is left out stays out.
    ///
    /// # Errors
    /// `InvalidConfig`, naming the variable, the value and what is accepted.
    pub fn overridden_by(self, environment: &Environment) -> Result<Self> {
        let mut config = part(environment, ENGINE, self, Self::check_own)?;
        config.handshake = part(environment, HANDSHAKE, config.handshake, HandshakeConfig::validate)?;
        #[cfg(feature = "tcp")]
        if let Some(tcp) = config.tcp.take() {
            config.tcp = Some(part(environment, TCP, tcp, posthorse_tcp::TcpConfig::validate)?);
        }
        #[cfg(feature = "shm")]
        if let Some(shm) = config.shm.take() {
            config.shm = Some(part(environment, SHM, shm, check_shm)?);
        }
        #[cfg(feature = "rdma")]
        if let Some(rdma) = config.rdma.take() {
            config.rdma = Some(part(environment, RDMA, rdma, posthorse_rdma::RdmaConfig::validate)?);
        }
        Ok(config)
    }

    /// The host in this engine's name: as configured, else an address at which the handshake can be reached.
    pub(crate) fn advertised_host(&self) -> Result<String> {
        if !self.advertise.is_empty() {
            return Ok(self.advertise.clone());
        }
        let everywhere = [IpAddr::from(Ipv6Addr::UNSPECIFIED)];
        let bound = if self.handshake.bind.is_empty() { &everywhere[..] } else { &self.handshake.bind };
        let chosen = advertise::choose(bound, &[], &advertise::interfaces()?);
        Ok(chosen.unwrap_or(IpAddr::V4(Ipv4Addr::LOCALHOST)).to_string())
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
    fn what_peers_would_not_take_is_refused() {
        let refused = |config: EngineConfig| config.validate().unwrap_err().to_string();
        let long = EngineConfig { fingerprint: Some("f".repeat(1025)), ..Default::default() };
        assert!(refused(long).contains("fingerprint is 1025 bytes long; accepted: text of up to 1024 bytes"));
        for advertise in ["bad host!\n", " ", "tcp://10.0.0.1", &"h".repeat(256)] {
            let error = refused(EngineConfig { advertise: advertise.to_owned(), ..Default::default() });
            assert!(error.contains(&format!("advertise is {advertise:?}; accepted: a host name")), "{error}");
        }
        for advertise in ["", "node-3.cluster", "10.0.0.1", "fe80::1%eth0", "[::1]"] {
            EngineConfig { advertise: advertise.to_owned(), ..Default::default() }.validate().unwrap();
        }
    }

    #[test]
    fn a_bad_value_of_a_part_is_named_with_the_part() {
        for (config, named) in [
            (r#"{"handshake": {"liveness_ms": 0}}"#, "handshake.liveness_ms is 0; accepted: "),
            #[cfg(feature = "tcp")]
            (r#"{"tcp": {"liveness_ms": 0}}"#, "tcp.liveness_ms is 0; accepted: 60 to 3600000"),
            #[cfg(feature = "shm")]
            (r#"{"shm": {"liveness_ms": 0}}"#, "shm.liveness_ms is 0; accepted: 1 to 3600000"),
        ] {
            let config: EngineConfig = serde_json::from_str(config).unwrap();
            let error = config.validate().unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidConfig);
            assert!(error.message().starts_with(named), "{error}");
            // A variable may mend what the file says.
            let part = named.split('.').next().unwrap();
            let mended = [(environment::variable(part, "liveness_ms"), "100")].into_iter().collect();
            config.overridden_by(&mended).unwrap().validate().unwrap();
        }
    }

    #[test]
    fn the_liveness_reaches_the_handshake_and_each_transport() {
        let config = EngineConfig::default().liveness_ms(700);
        assert_eq!(config.handshake.liveness_ms, 700);
        #[cfg(feature = "tcp")]
        assert_eq!(config.tcp.unwrap().liveness_ms, 700);
        #[cfg(feature = "shm")]
        assert_eq!(config.shm.unwrap().liveness_ms, 700);
    }

    #[test]
    #[cfg(feature = "tcp")]
    fn interfaces_reach_tcp_and_are_refused_without_it() {
        let names = vec!["lo".to_owned()];
        let config = EngineConfig::default().interfaces(names.clone()).unwrap();
        assert_eq!(config.tcp.unwrap().interfaces, names);
        let without = EngineConfig { tcp: None, ..EngineConfig::default() };
        let error = without.interfaces(names).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported);
        assert!(error.message().contains("\"lo\""), "{error}");
    }

    #[test]
    #[cfg(feature = "tcp")]
    fn tcp_advertises_what_the_engine_does_unless_it_is_told_otherwise() {
        use posthorse_tcp::TcpConfig;
        let told = |tcp| {
            let config = EngineConfig { advertise: "node-3".into(), tcp: Some(tcp), ..Default::default() };
            config.tcp().unwrap().advertise
        };
        assert_eq!(told(TcpConfig::default()), "node-3");
        assert_eq!(told(TcpConfig { advertise: "10.0.0.1".into(), ..Default::default() }), "10.0.0.1");
        assert_eq!(
            told(TcpConfig { advertise_networks: vec!["10.0.0.0/8".into()], ..Default::default() }),
            ""
        );
        assert_eq!(told(TcpConfig { interfaces: vec!["eth1".into()], ..Default::default() }), "");
        let elsewhere = vec![IpAddr::from([10, 0, 0, 5])];
        assert_eq!(told(TcpConfig { bind: elsewhere, ..Default::default() }), "");
        assert!(EngineConfig { tcp: None, ..Default::default() }.tcp().is_none());
    }

    #[test]
    fn one_address_binds_all_that_listens() {
        let address = IpAddr::V4(Ipv4Addr::LOCALHOST);
        let config = EngineConfig::default().bind(address);
        assert_eq!(config.handshake.bind, [address]);
        #[cfg(feature = "tcp")]
        assert_eq!(config.tcp.unwrap().bind, [address]);
    }

    #[test]
    fn the_advertised_host_is_as_configured_or_a_bound_address() {
        let host = |advertise: &str, bind: &[&str]| {
            let bind = bind.iter().map(|address| address.parse().unwrap()).collect();
            let handshake = HandshakeConfig { bind, ..HandshakeConfig::default() };
            let config = EngineConfig { advertise: advertise.to_owned(), handshake, ..Default::default() };
            config.advertised_host().unwrap()
        };
        assert_eq!(host("node-3", &["127.0.0.1"]), "node-3");
        assert_eq!(host("", &["127.0.0.1"]), "127.0.0.1");
        assert_eq!(host("", &["0.0.0.0", "::1"]), "::1");
        for bind in [&[][..], &["0.0.0.0"]] {
            let known = advertise::interfaces().unwrap();
            assert!(known.iter().any(|i| i.address.to_string() == host("", bind)), "{bind:?}");
        }
    }

    #[test]
    fn preferences_are_read_or_refused() {
        let preference = str::parse::<TransportChoice>;
        assert_eq!(preference("auto").unwrap(), TransportChoice::Auto);
        assert_eq!(preference("prefer:tcp").unwrap(), TransportChoice::Prefer("tcp".to_owned()));
        assert_eq!(preference("require:shm").unwrap(), TransportChoice::Require("shm".to_owned()));
        for bad in ["", "tcp", "shm", "bogus", "prefer:", "require", "insist:tcp"] {
            let error = preference(bad).unwrap_err().to_string();
            assert!(error.contains("transport") && error.contains(&format!("{bad:?}")), "{error}");
            assert_eq!(
                error.contains(&format!("such as require:{bad}")),
                matches!(bad, "tcp" | "shm"),
                "{error}"
            );
        }
    }
}
