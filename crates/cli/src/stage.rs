//! What the commands that start two processes on this host share: engines and connectors that listen here alone.

use std::net::IpAddr;

use posthorse_core::{Error, Result};
use posthorse_engine::{EngineConfig, TransferEngine, TransportChoice};
use posthorse_omni::config::Role;
use posthorse_omni::{Connector, ConnectorConfig};
use rustix::time::{ClockId, clock_gettime};

use crate::outcome::{Failure, Outcome};

/// Where the two processes listen.
pub(crate) const HOST: &str = "127.0.0.1";

/// An engine's configuration for one address of this host; all of them when it is unspecified.
pub(crate) fn engine_config(address: IpAddr) -> EngineConfig {
    let mut config = EngineConfig::default();
    if !address.is_unspecified() {
        config.advertise = address.to_string();
        config.handshake.bind = vec![address];
        if let Some(tcp) = &mut config.tcp {
            tcp.bind = vec![address];
        }
    }
    config
}

/// A connector on this host alone. `transport` is `auto` or a transport that is required.
pub(crate) fn connector(
    role: Role,
    transport: &str,
    pool_bytes: u64,
    config: ConnectorConfig,
) -> Result<Connector> {
    let transport = match transport {
        "auto" => TransportChoice::Auto,
        name => TransportChoice::Require(name.to_owned()),
    };
    let address = HOST
        .parse::<IpAddr>()
        .map_err(|_| Error::invalid_argument("host", HOST, "an address of this host"))?;
    let engine = EngineConfig { transport, ..engine_config(address) };
    let config =
        ConnectorConfig { role, host: HOST.to_owned(), zmq_port: 0, memory_pool_size: pool_bytes, ..config };
    Connector::builder().engine(TransferEngine::builder().config(engine).build()?).config(config).build()
}

/// Refuses a size of which this host has no room for `times` as much.
pub(crate) fn check_room(argument: &str, bytes: u64, times: u64) -> Outcome {
    let Some(available) = posthorse_memory::available_memory() else { return Ok(()) };
    let most = available / times;
    if bytes <= most {
        return Ok(());
    }
    Err(Failure::Usage(format!(
        "{argument} is {bytes} bytes; accepted: up to {most}, of which {times} times as much is available now"
    )))
}

/// The processor time that this process has used, in seconds.
pub(crate) fn cpu_seconds() -> f64 {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processor_time_passes() {
        let before = cpu_seconds();
        let mut value = 1_u64;
        while cpu_seconds() <= before {
            value = std::hint::black_box(value.wrapping_mul(3));
        }
    }
}
