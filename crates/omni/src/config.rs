//! The connector's configuration.
//!
//! The keys of vLLM-Omni's `extra` section are accepted as they are; the others are Posthorse's own. It is read
//! from YAML, TOML or JSON through `serde`; an unknown key or a bad value is an error that names the key, the
//! value and what is accepted.

use std::fmt;
use std::io;
use std::net::IpAddr;
use std::str::FromStr;
use std::time::Duration;

use posthorse_core::{Checksum, Error, ErrorKind, Result};
pub use posthorse_engine::TransportChoice;
use posthorse_engine::environment::{self, Environment};
use posthorse_engine::{EngineConfig, MAX_FINGERPRINT_BYTES, is_host};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::control::ControlLimits;
use crate::offer::OfferLimits;
use crate::stream::MAX_WINDOW;

/// What a connector does on its edge.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    /// It offers: it binds a listener.
    Sender,
    /// It pulls.
    Receiver,
    /// Both.
    #[serde(alias = "dual")]
    Both,
}

impl Role {
    /// Whether it offers.
    pub const fn sends(self) -> bool {
        matches!(self, Self::Sender | Self::Both)
    }

    /// Whether it pulls.
    pub const fn receives(self) -> bool {
        matches!(self, Self::Receiver | Self::Both)
    }
}

/// The protocol that carries the bytes, in the words of the reference.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Protocol {
    /// As `transport` says.
    #[default]
    Auto,
    /// TCP and nothing else.
    Tcp,
    /// Shared memory and nothing else.
    Shm,
    /// RDMA and nothing else. It needs the feature `rdma`.
    Rdma,
}

impl fmt::Display for Protocol {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Auto => "auto",
            Self::Tcp => "tcp",
            Self::Shm => "shm",
            Self::Rdma => "rdma",
        })
    }
}

/// What a key that takes certain words is, by its word.
fn by_word<T: for<'a> Deserialize<'a>>(key: &str, text: &str) -> Result<T> {
    serde_json::from_value(Value::from(text)).map_err(|_| {
        let accepted = ConnectorConfig::accepted(key).unwrap_or_default();
        Error::invalid_config(key, format_args!("{text:?}"), accepted)
    })
}

impl FromStr for Role {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        by_word("role", text)
    }
}

impl FromStr for Protocol {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        by_word("protocol", text)
    }
}

/// The part of the configuration that this is, in the names of the variables that override it.
pub(crate) const PART: &str = "connector";

macro_rules! config {
    ($($(#[$doc:meta])* $key:ident: $type:ty = $default:expr, $accepted:literal;)*) => {
        /// The configuration of a connector. See the module's documentation.
        #[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
        #[serde(into = "Map<String, Value>", try_from = "Map<String, Value>")]
        pub struct ConnectorConfig { $($(#[$doc])* pub $key: $type,)* }

        impl Default for ConnectorConfig {
            fn default() -> Self {
                Self { $($key: $default,)* }
            }
        }

        impl ConnectorConfig {
            /// Every key.
            pub const KEYS: &'static [&'static str] = &[$(stringify!($key)),*];

            /// What a key accepts, in words.
            pub fn accepted(key: &str) -> Option<&'static str> {
                match key {
                    $(stringify!($key) => Some($accepted),)*
                    _ => None,
                }
            }

            fn set(&mut self, key: &str, value: Value) -> Result<()> {
                match key {
                    $(stringify!($key) => {
                        let shown = value.to_string();
                        self.$key = serde_json::from_value(value).map_err(|error| {
                            let refusal = error.to_string();
                            // A type that says itself what it accepts may know more of this value.
                            Error::invalid_config(key, shown, environment::accepted_by(&refusal).unwrap_or($accepted))
                        })?;
                    })*
                    _ => {
                        let message = format!("the key {key:?} is unknown; accepted: {}", Self::KEYS.join(", "));
                        return Err(Error::new(ErrorKind::InvalidConfig, message));
                    }
                }
                Ok(())
            }
        }

        impl From<ConnectorConfig> for Map<String, Value> {
            fn from(config: ConnectorConfig) -> Self {
                // Plain values all: none of them fails to serialise.
                [$((stringify!($key).to_owned(), serde_json::to_value(config.$key).unwrap_or_default())),*]
                    .into_iter()
                    .collect()
            }
        }
    };
}

config! {
    /// What the connector does. Pipelines inject it; it need not be written.
    role: Role = Role::Both, "sender, receiver, both";
    /// The address to bind; `auto` binds all interfaces, and advertises a routable one. An IP address is the only one that the
    /// connector's engine listens on, too; a host name is the control port's alone.
    host: String = "auto".to_owned(), "a host name or address, or auto";
    /// The address that peers are told, where it differs from the one that is bound.
    advertise_host: Option<String> = None, "a host name or address";
    /// The control port; 0 lets the system choose.
    zmq_port: u16 = crate::port::DEFAULT_BASE_PORT, "0 to 65535";
    /// The producer's host, for a receiver that is not told otherwise; `auto` is not known yet.
    sender_host: Option<String> = None, "a host name or address";
    /// The producer's control port.
    sender_zmq_port: Option<u16> = None, "1 to 65535";
    /// The protocol that carries the bytes, as the reference names it; rdma is not built in.
    protocol: Protocol = Protocol::Auto, "auto, tcp, shm, rdma";
    /// Which transport carries the bytes. What either end requires holds; else what one prefers, the consumer before the
    /// producer.
    transport: TransportChoice = TransportChoice::Auto, "auto, prefer:NAME, require:NAME";
    /// The network interfaces that TCP listens on, separated by commas; all by default.
    device_name: String = String::new(), "names separated by commas";
    /// The memory pool, in bytes.
    memory_pool_size: u64 = 1 << 30, "bytes, at least 4096";
    /// Where the pool lies: cpu, cpu:N or cuda:N.
    memory_pool_device: String = "cpu".to_owned(), "cpu, cpu:N, cuda, cuda:N";
    /// How long an offer stays without being pulled, in seconds; 0 or less without end.
    buffer_ttl_seconds: f64 = 300.0, "seconds";
    /// How many consumers an offer is for unless its put says otherwise.
    consumers: u32 = 1, "at least 1";
    /// How long a put waits for room in the pool, in milliseconds.
    put_wait_ms: u64 = 30_000, "milliseconds";
    /// How long a get waits that names no deadline, in milliseconds.
    get_wait_ms: u64 = 30_000, "milliseconds";
    /// How much is compared at the far end: off, sampled or full.
    checksum: Checksum = Checksum::Off, "off, sampled, full";
    /// What both sides have to agree on, such as a hash of model and layout.
    fingerprint: Option<String> = None, "text of up to 1024 bytes";
    /// After which silence a peer counts as gone, in milliseconds.
    liveness_ms: u64 = 3000, "60 to 3600000 milliseconds";
    /// How long making a control connection may take, in milliseconds.
    connect_ms: u64 = 2000, "1 to 3600000 milliseconds";
    /// Threads that carry out pulls.
    workers: u32 = 4, "1 to 256";
    /// The most offers.
    max_offers: u32 = 65_536, "at least 1";
    /// The most gets that wait at a producer, and at most half as many as it serves control connections.
    max_parked: u32 = 4096, "at least 0";
    /// The most gets of one consumer that wait at a producer, and of this connector that are sent there to wait.
    max_parked_per_consumer: u32 = 1024, "at least 0";
    /// The most control connections that a producer serves.
    max_connections: u32 = 4096, "at least 8";
    /// How many chunks of a stream may be under way: the producer's holds until the consumer says what its own is.
    stream_window: u32 = 16, "1 to 65536";
    /// The most streams that are sent, and the most that are received.
    max_streams: u32 = 1024, "at least 1";
}

impl ConnectorConfig {
    /// Checks what no type says.
    ///
    /// # Errors
    /// `InvalidConfig`, naming the key, the value and what is accepted.
    pub fn check(&self) -> Result<()> {
        let hour = 3_600_000;
        let ranges = [
            ("memory_pool_size", self.memory_pool_size, 4096, u64::MAX),
            ("consumers", self.consumers.into(), 1, u32::MAX.into()),
            ("liveness_ms", self.liveness_ms, 60, hour),
            ("connect_ms", self.connect_ms, 1, hour),
            ("workers", self.workers.into(), 1, 256),
            ("max_offers", self.max_offers.into(), 1, u32::MAX.into()),
            // One consumer that gets, waits and follows a stream has five at a time.
            ("max_connections", self.max_connections.into(), 8, u32::MAX.into()),
            ("stream_window", self.stream_window.into(), 1, MAX_WINDOW.into()),
            ("max_streams", self.max_streams.into(), 1, u32::MAX.into()),
        ];
        for (key, value, least, most) in ranges {
            if value < least || value > most {
                return Err(Error::invalid_config(key, value, &format!("{least} to {most}")));
            }
        }
        if !self.buffer_ttl_seconds.is_finite() {
            return Err(Error::invalid_config("buffer_ttl_seconds", self.buffer_ttl_seconds, "seconds"));
        }
        let fingerprint = self.fingerprint.as_ref().map_or(0, String::len);
        if fingerprint > MAX_FINGERPRINT_BYTES {
            let accepted = format!("text of up to {MAX_FINGERPRINT_BYTES} bytes");
            return Err(Error::invalid_config(
                "fingerprint",
                format_args!("{fingerprint} bytes long"),
                &accepted,
            ));
        }
        let hosts = [
            ("host", Some(&self.host), true),
            // Peers are told it as it is.
            ("advertise_host", self.advertise_host.as_ref(), false),
            ("sender_host", self.sender_host.as_ref(), true),
        ];
        for (key, host, may_be_auto) in hosts {
            let Some(host) = host else { continue };
            let is_known = if is_auto(host) { may_be_auto && !host.is_empty() } else { is_host(host) };
            if !is_known {
                let accepted = Self::accepted(key).unwrap_or_default();
                return Err(Error::invalid_config(key, format_args!("{host:?}"), accepted));
            }
        }
        let device =
            self.memory_pool_device.split_once(':').map_or(&*self.memory_pool_device, |(kind, _)| kind);
        if !matches!(device, "cpu" | "cuda") {
            return Err(self.no_such_device());
        }
        if self.sender_zmq_port == Some(0) {
            return Err(Error::invalid_config("sender_zmq_port", 0, "1 to 65535"));
        }
        Ok(())
    }

    pub(crate) fn no_such_device(&self) -> Error {
        let accepted = Self::accepted("memory_pool_device").unwrap_or_default();
        Error::invalid_config("memory_pool_device", format_args!("{:?}", self.memory_pool_device), accepted)
    }

    /// Checks that a producer is named whole or not at all: its two keys may come from different places.
    ///
    /// # Errors
    /// `InvalidConfig`, naming both: the one that is set first, so that the variable it may come from is named too.
    pub(crate) fn check_sender(&self) -> Result<()> {
        match self.sender_host.as_deref() {
            Some(host) if !is_auto(host) && self.sender_zmq_port.is_none() && self.role.receives() => {
                let accepted = "a host together with sender_zmq_port, 1 to 65535, which is not set";
                Err(Error::invalid_config("sender_host", format_args!("{host:?}"), accepted))
            }
            _ => Ok(()),
        }
    }

    /// The variables of the environment that override a key.
    pub fn variables() -> Vec<String> {
        Self::KEYS.iter().map(|key| environment::variable(PART, key)).collect()
    }

    /// The configuration as the environment overrides it.
    ///
    /// # Errors
    /// `InvalidConfig`, naming the variable, the value and what is accepted.
    pub fn overridden_by(self, environment: &Environment) -> Result<Self> {
        environment.apply(PART, self, Self::try_from, Self::accepted, Self::check)
    }

    /// The configuration of an engine that does what this one says.
    ///
    /// # Errors
    /// `InvalidConfig` when keys contradict each other; `Unsupported` for a protocol or device that is not built in.
    pub(crate) fn engine_config(&self) -> Result<EngineConfig> {
        let config = EngineConfig {
            transport: self.carrier()?,
            fingerprint: self.fingerprint.clone(),
            advertise: self.advertise_host.clone().unwrap_or_default(),
            ..EngineConfig::default()
        };
        let mut config = config.liveness_ms(self.liveness_ms);
        let devices: Vec<String> = self.devices().map(str::to_owned).collect();
        if let Ok(address) = self.host.trim_matches(['[', ']']).parse::<IpAddr>()
            && !address.is_unspecified()
        {
            if devices.is_empty() {
                config = config.bind(address);
            } else {
                // Where tcp listens, the devices say.
                config.handshake.bind = vec![address];
            }
        }
        if devices.is_empty() {
            return Ok(config);
        }
        if self.protocol == Protocol::Shm {
            let accepted = "empty, as protocol shm uses no network device";
            return Err(Error::invalid_config(
                "device_name",
                format_args!("{:?}", self.device_name),
                accepted,
            ));
        }
        #[cfg(feature = "rdma")]
        if self.protocol == Protocol::Rdma {
            if let Some(rdma) = &mut config.rdma {
                rdma.devices = devices;
            }
            return Ok(config);
        }
        config.interfaces(devices)
    }

    /// Checks that nothing is asked for that only an engine of the connector's own would do.
    ///
    /// # Errors
    /// `InvalidConfig`, naming the key, the value and what is accepted.
    pub(crate) fn check_with_engine(&self) -> Result<()> {
        let refused = |key: &str, value: &dyn fmt::Display, accepted: &str, part: &str, engine_key: &str| {
            let accepted = format!("{accepted}, as the engine that was handed over decides");
            let variable = environment::variable(part, engine_key);
            Err(Error::invalid_config(key, value, &accepted)
                .with_advice(format!("set {engine_key} in the engine's configuration, or {variable}")))
        };
        if self.transport != TransportChoice::Auto {
            return refused("transport", &self.transport, "auto", "engine", "transport");
        }
        if self.protocol != Protocol::Auto {
            return refused("protocol", &self.protocol, "auto", "engine", "transport");
        }
        if self.devices().next().is_some() {
            let device = format_args!("{:?}", self.device_name);
            return refused("device_name", &device, "empty", "tcp", "interfaces");
        }
        Ok(())
    }

    /// Checks that the transport which is preferred or required is one of an engine's.
    ///
    /// # Errors
    /// `InvalidConfig`, naming those that there are.
    pub(crate) fn check_carrier(&self, installed: &[&str]) -> Result<()> {
        let carrier = self.carrier()?;
        match &carrier {
            TransportChoice::Prefer(name) | TransportChoice::Require(name)
                if !installed.contains(&name.as_str()) =>
            {
                let key = if self.protocol == Protocol::Auto { "transport" } else { "protocol" };
                let accepted =
                    format!("auto, prefer:NAME, require:NAME, NAME one of {}", installed.join(", "));
                Err(Error::invalid_config(key, &carrier, &accepted))
            }
            _ => Ok(()),
        }
    }

    /// Which transport carries the bytes, as `transport` and `protocol` say together.
    fn carrier(&self) -> Result<TransportChoice> {
        let required = match self.protocol {
            Protocol::Auto => return Ok(self.transport.clone()),
            Protocol::Rdma if !cfg!(feature = "rdma") => {
                return Err(Error::new(ErrorKind::Unsupported, "protocol is rdma: RDMA is not built in")
                    .with_advice("build with the feature rdma, or take auto, tcp or shm"));
            }
            Protocol::Tcp | Protocol::Shm | Protocol::Rdma => {
                TransportChoice::Require(self.protocol.to_string())
            }
        };
        if self.transport == TransportChoice::Auto || self.transport == required {
            return Ok(required);
        }
        let accepted = format!("auto, as transport is {}", self.transport);
        Err(Error::invalid_config("protocol", self.protocol, &accepted))
    }

    fn devices(&self) -> impl Iterator<Item = &str> {
        self.device_name.split(',').map(str::trim).filter(|name| !name.is_empty())
    }

    /// How long an offer stays; `None` without end.
    pub fn ttl(&self) -> Option<Duration> {
        Duration::try_from_secs_f64(self.buffer_ttl_seconds).ok().filter(|ttl| !ttl.is_zero())
    }

    /// The producer's control address, where it is known.
    pub fn sender_address(&self) -> Option<String> {
        let host = self.sender_host.as_deref().filter(|host| !is_auto(host))?;
        Some(join(host, self.sender_zmq_port?))
    }

    /// The control address to bind; `None` binds all of this host, IPv6 and IPv4.
    pub fn bind_address(&self) -> Option<String> {
        (!is_auto(&self.host)).then(|| join(&self.host, self.zmq_port))
    }

    /// Names the keys that help where the control port is somebody else's.
    pub(crate) fn taken(&self, error: Error) -> Error {
        if why(&error) != Some(io::ErrorKind::AddrInUse) {
            return error;
        }
        error.with_advice(format!(
            "another process or connector listens there: set zmq_port, which is {}, to another port, or to 0 for any; \
             with role: receiver a connector that only gets listens nowhere",
            self.zmq_port
        ))
    }

    /// Names the key because of which the control address could not be bound: a port may be somebody else's, and is
    /// named with its address already.
    pub(crate) fn not_bound(&self, error: Error) -> Error {
        // A name without an address comes without a number of the system.
        let of_host = matches!(why(&error), None | Some(io::ErrorKind::AddrNotAvailable));
        if !of_host || error.kind() != ErrorKind::Io {
            return error;
        }
        let host = format!("{:?} ({})", self.host, error.message());
        Error::invalid_config("host", host, "auto, or a name or an address that this host has")
    }

    /// How long a get waits that names no deadline.
    pub const fn get_wait(&self) -> Duration {
        Duration::from_millis(self.get_wait_ms)
    }

    /// The limits of the control plane.
    pub fn control_limits(&self) -> ControlLimits {
        ControlLimits {
            max_connections: self.max_connections as usize,
            connect_timeout: Duration::from_millis(self.connect_ms),
            liveness: Duration::from_millis(self.liveness_ms),
            ..ControlLimits::default()
        }
    }

    /// The limits of the table of offers.
    pub fn offer_limits(&self) -> OfferLimits {
        let liveness = Duration::from_millis(self.liveness_ms);
        OfferLimits {
            max_offers: self.max_offers as usize,
            max_parked: self.max_parked as usize,
            max_parked_per_consumer: self.max_parked_per_consumer as usize,
            reservation: liveness,
            lease: liveness,
            ..OfferLimits::default()
        }
    }
}

impl TryFrom<Map<String, Value>> for ConnectorConfig {
    type Error = Error;

    fn try_from(map: Map<String, Value>) -> Result<Self> {
        let mut config = Self::default();
        for (key, value) in map {
            config.set(&key, value)?;
        }
        config.check()?;
        Ok(config)
    }
}

/// What the system said, if it is behind an error.
fn why(error: &Error) -> Option<io::ErrorKind> {
    error.os_error().map(|number| io::Error::from_raw_os_error(number).kind())
}

/// Whether a host is one that stands for another, to be found out.
pub(crate) fn is_auto(host: &str) -> bool {
    matches!(host, "" | "auto" | "*" | "0.0.0.0" | "::" | "[::]")
}

fn join(host: &str, port: u16) -> String {
    let bare = host.contains(':') && !host.starts_with('[');
    if bare { format!("[{host}]:{port}") } else { format!("{host}:{port}") }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn read(value: Value) -> Result<ConnectorConfig> {
        let Value::Object(map) = value else { panic!("not a map") };
        ConnectorConfig::try_from(map)
    }

    #[test]
    fn the_keys_of_the_reference_are_accepted_as_they_are() {
        let config = read(json!({
            "host": "10.0.0.1", "zmq_port": 0, "protocol": "tcp", "device_name": "mlx5_0,mlx5_1",
            "memory_pool_size": 4_294_967_296_u64, "memory_pool_device": "cpu", "buffer_ttl_seconds": 60,
            "role": "dual", "sender_host": "fe80::1", "sender_zmq_port": 50151,
        }))
        .unwrap();
        assert_eq!((config.role, config.ttl()), (Role::Both, Some(Duration::from_secs(60))));
        assert_eq!(config.bind_address().unwrap(), "10.0.0.1:0");
        assert_eq!(config.sender_address().unwrap(), "[fe80::1]:50151");
    }

    #[test]
    fn an_address_binds_the_engine_too_and_what_is_advertised_reaches_it() {
        let engine = |config| read(config).unwrap().engine_config().unwrap();
        for (host, bound) in [("10.0.0.1", "10.0.0.1"), ("[fe80::1]", "fe80::1")] {
            assert_eq!(
                engine(json!({"host": host})).handshake.bind,
                [bound.parse::<IpAddr>().unwrap()],
                "{host}"
            );
        }
        for host in ["auto", "0.0.0.0", "::", "node-3"] {
            assert_eq!(
                engine(json!({"host": host})).handshake.bind,
                EngineConfig::default().handshake.bind,
                "{host}"
            );
        }
        assert_eq!(engine(json!({"advertise_host": "10.8.0.1"})).advertise, "10.8.0.1");
    }

    #[test]
    fn a_producer_that_a_variable_names_by_half_is_refused_with_the_variable() {
        let variable = "POSTHORSE_CONNECTOR_SENDER_HOST".to_owned();
        let environment = Environment::from_iter([(variable.clone(), "10.0.0.1")]);
        let receiver = ConnectorConfig { role: Role::Receiver, ..ConnectorConfig::default() };
        let config = receiver.overridden_by(&environment).unwrap();
        let error = environment.named(PART, config.check_sender().unwrap_err());
        for part in [&*variable, "sender_host is \"10.0.0.1\"", "sender_zmq_port, 1 to 65535"] {
            assert!(error.message().contains(part), "{part} is missing in {error}");
        }
    }

    #[test]
    fn an_unknown_key_is_refused_with_what_is_accepted() {
        let error = read(json!({"memory_pool_sise": 1})).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidConfig);
        for part in ["memory_pool_sise", "memory_pool_size", "stream_window"] {
            assert!(error.message().contains(part), "{part} is missing in {error}");
        }
    }

    #[test]
    fn a_bad_value_is_named_with_its_key_and_what_is_accepted() {
        for (value, parts) in [
            (json!({"zmq_port": 70_000}), ["zmq_port is 70000", "0 to 65535"]),
            (json!({"role": "middle"}), ["role is \"middle\"", "sender, receiver, both"]),
            (json!({"transport": "require:"}), ["transport is \"require:\"", "prefer:NAME"]),
            (json!({"transport": "shm"}), ["transport is \"shm\"", "require:NAME, such as require:shm"]),
            (json!({"workers": 0}), ["workers is 0", "1 to 256"]),
            (json!({"protocol": "ib"}), ["protocol is \"ib\"", "auto, tcp, shm"]),
            (json!({"liveness_ms": -1}), ["liveness_ms is -1", "milliseconds"]),
            (json!({"max_connections": 7}), ["max_connections is 7", "8 to 4294967295"]),
            (json!({"liveness_ms": 59}), ["liveness_ms is 59", "60 to 3600000"]),
            (json!({"sender_zmq_port": 0}), ["sender_zmq_port is 0", "1 to 65535"]),
            (json!({"host": "a b"}), ["host is \"a b\"", "a host name or address, or auto"]),
            (json!({"host": ""}), ["host is \"\"", "a host name or address, or auto"]),
            (json!({"sender_host": ""}), ["sender_host is \"\"", "a host name or address"]),
            (json!({"memory_pool_device": "gpu"}), ["memory_pool_device is \"gpu\"", "cpu, cpu:N, cuda"]),
            (json!({"advertise_host": ""}), ["advertise_host is \"\"", "accepted: a host name or address"]),
            (
                json!({"advertise_host": "0.0.0.0"}),
                ["advertise_host is \"0.0.0.0\"", "a host name or address"],
            ),
            (json!({"advertise_host": "bad host!\n"}), ["advertise_host is \"bad host!\\n\"", "a host name"]),
            (json!({"sender_host": "tcp://10.0.0.1"}), ["sender_host is \"tcp://10.0.0.1\"", "a host name"]),
            (
                json!({"fingerprint": "f".repeat(1025)}),
                ["fingerprint is 1025 bytes long", "up to 1024 bytes"],
            ),
        ] {
            let error = read(value).unwrap_err();
            for part in parts {
                assert!(error.message().contains(part), "{part} is missing in {error}");
            }
        }
    }

    #[test]
    fn roles_and_protocols_are_read_from_their_words() {
        assert_eq!("dual".parse::<Role>().unwrap(), Role::Both);
        for protocol in [Protocol::Auto, Protocol::Tcp, Protocol::Shm, Protocol::Rdma] {
            assert_eq!(protocol.to_string().parse::<Protocol>().unwrap(), protocol);
        }
        let error = "ib".parse::<Protocol>().unwrap_err();
        assert_eq!(error.message(), "protocol is \"ib\"; accepted: auto, tcp, shm, rdma");
    }

    #[test]
    fn the_keys_that_an_engine_carries_out_reach_it() {
        let engine = |config| ConnectorConfig::engine_config(&read(config).unwrap());
        let config = engine(json!({"liveness_ms": 700, "fingerprint": "f", "advertise_host": "h"})).unwrap();
        assert_eq!((config.fingerprint.as_deref(), config.advertise.as_str()), (Some("f"), "h"));
        assert_eq!(
            config,
            EngineConfig {
                fingerprint: Some("f".to_owned()),
                advertise: "h".to_owned(),
                ..EngineConfig::default().liveness_ms(700)
            }
        );
        for (keys, transport) in [
            (json!({}), "auto"),
            (json!({"transport": "prefer:shm"}), "prefer:shm"),
            (json!({"protocol": "auto", "transport": "require:tcp"}), "require:tcp"),
            (json!({"protocol": "tcp"}), "require:tcp"),
            (json!({"protocol": "shm"}), "require:shm"),
            (json!({"protocol": "tcp", "transport": "require:tcp"}), "require:tcp"),
        ] {
            assert_eq!(engine(keys.clone()).unwrap().transport.to_string(), transport, "{keys}");
        }
        for (keys, kind, part) in [
            (json!({"protocol": "rdma"}), ErrorKind::Unsupported, "protocol is rdma"),
            (
                json!({"protocol": "tcp", "transport": "prefer:shm"}),
                ErrorKind::InvalidConfig,
                "protocol is tcp; accepted: auto, as transport is prefer:shm",
            ),
            (
                json!({"protocol": "shm", "device_name": "eth0"}),
                ErrorKind::InvalidConfig,
                "device_name is \"eth0\"; accepted: empty",
            ),
        ] {
            let error = engine(keys).unwrap_err();
            assert_eq!(error.kind(), kind);
            assert!(error.message().contains(part), "{part} is missing in {error}");
        }
    }

    #[test]
    #[cfg(feature = "tcp")]
    fn the_devices_reach_tcp() {
        let config = read(json!({"device_name": "eth0, eth1"})).unwrap().engine_config().unwrap();
        assert_eq!(config, EngineConfig::default().interfaces(vec!["eth0".into(), "eth1".into()]).unwrap());
    }

    #[test]
    fn with_an_engine_handed_over_its_keys_are_refused() {
        read(json!({"fingerprint": "f", "liveness_ms": 700})).unwrap().check_with_engine().unwrap();
        for (key, value, instead) in [
            ("transport", "require:tcp", "POSTHORSE_ENGINE_TRANSPORT"),
            ("protocol", "tcp", "POSTHORSE_ENGINE_TRANSPORT"),
            ("protocol", "rdma", "POSTHORSE_ENGINE_TRANSPORT"),
            ("device_name", "lo", "POSTHORSE_TCP_INTERFACES"),
        ] {
            let error = read(json!({key: value})).unwrap().check_with_engine().unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidConfig);
            assert!(error.message().contains(key) && error.message().contains("the engine"), "{error}");
            assert!(error.advice().unwrap().ends_with(instead), "{error}");
        }
    }

    #[test]
    fn each_key_is_overridden_by_its_variable_and_by_no_other() {
        let defaults = Map::from(ConnectorConfig::default());
        for (key, name) in ConnectorConfig::KEYS.iter().zip(ConnectorConfig::variables()) {
            let text = match (*key, &defaults[*key]) {
                ("role", _) => "sender".to_owned(),
                ("transport", _) => "prefer:tcp".to_owned(),
                ("protocol", _) => "shm".to_owned(),
                ("checksum", _) => "full".to_owned(),
                ("memory_pool_device", _) => "cpu:17".to_owned(),
                (_, Value::Number(number)) => (number.as_f64().unwrap() + 1.0).to_string(),
                _ => "17".to_owned(),
            };
            let config =
                ConnectorConfig::default().overridden_by(&[(name.clone(), text)].into_iter().collect());
            let after = Map::from(config.unwrap());
            for (other, value) in &defaults {
                assert_eq!(*value != after[other], other == key, "{name}: {other} is {}", after[other]);
            }
        }
    }

    #[test]
    fn a_bad_variable_is_refused_with_its_value_and_what_is_accepted() {
        for (name, value, accepted) in [
            ("POSTHORSE_CONNECTOR_WORKERS", "0", "1 to 256"),
            ("POSTHORSE_CONNECTOR_ROLE", "middle", "sender, receiver, both"),
            ("POSTHORSE_CONNECTOR_ZMQ_PORT", "", "0 to 65535"),
            ("POSTHORSE_CONNECTOR_TRANSPORT", "shm", "auto, prefer:NAME, require:NAME, such as require:shm"),
        ] {
            let environment = [(name.to_owned(), value)].into_iter().collect();
            let error = ConnectorConfig::default().overridden_by(&environment).unwrap_err();
            let expected = format!("{name} is {value:?}; accepted: {accepted}");
            assert_eq!((error.kind(), error.message()), (ErrorKind::InvalidConfig, expected.as_str()));
        }
    }

    #[test]
    fn the_defaults_survive_and_auto_is_not_an_address() {
        let config = ConnectorConfig::default();
        let json = serde_json::to_string(&config).unwrap();
        assert_eq!(serde_json::from_str::<ConnectorConfig>(&json).unwrap(), config);
        assert_eq!(config.bind_address(), None);
        assert_eq!(config.sender_address(), None);
        let auto =
            read(json!({"sender_host": "auto", "sender_zmq_port": 1, "buffer_ttl_seconds": -1})).unwrap();
        assert_eq!((auto.sender_address(), auto.ttl()), (None, None));
        assert_eq!(
            "prefer:shm".parse::<TransportChoice>().unwrap(),
            TransportChoice::Prefer("shm".to_owned())
        );
    }
}
