//! The configuration of this transport.

use std::time::Duration;

use posthorse_core::{Error, Result};
use serde::{Deserialize, Serialize};

/// How the transport uses the devices of this host. Every field has a default.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RdmaConfig {
    /// The devices to use, such as `mlx5_0`; none named means all that have an active port.
    pub devices: Vec<String>,
    /// The port of each device.
    pub port: u8,
    /// The place of this side's address in the port's GID table; none means the best (RoCE version 2 before 1, routable
    /// before link-local).
    pub gid_index: Option<u8>,
    /// The place of the partition key in the port's table.
    pub pkey_index: u16,
    /// The longest packet, in bytes: 256, 512, 1024, 2048 or 4096. Never longer than both ports carry.
    pub mtu: u32,
    /// Queue pairs for each pair of devices, 1 to 8. Urgent slices have the first for themselves where there are several.
    pub queue_pairs: usize,
    /// Slices in flight on one queue pair, 1 to 4096.
    pub queue_depth: usize,
    /// READs outstanding on one queue pair, 1 to 128, as far as the device can.
    pub reads: u8,
    /// WRITEs of up to so many bytes travel in their work requests.
    pub inline_bytes: u32,
    /// The service level, 0 to 15.
    pub service_level: u8,
    /// The traffic class of packets: DSCP and ECN bits.
    pub traffic_class: u8,
    /// How many routers a packet may pass.
    pub hop_limit: u8,
    /// How long an acknowledgement may take: 4.096 µs × 2 to this power, 1 to 31. The default is 67 ms.
    pub ack_timeout: u8,
    /// How often a packet that nobody acknowledges is sent again, 0 to 6.
    pub retries: u8,
    /// Where a request is cut into slices, in bytes.
    pub slice_bytes: u64,
    /// For how long a device's thread looks for completions without sleeping after the last, in microseconds. Zero sleeps
    /// at once: a completion is then noticed some microseconds later, and no processor is kept busy.
    pub spin_us: u64,
    /// How long a peer may be silent before it counts as gone, in milliseconds.
    pub liveness_ms: u64,
    /// How long a rail that failed is left alone before it is tried again, in milliseconds; each time in vain doubles it,
    /// up to 16 times. A port that comes up is tried at once.
    pub retry_after_ms: u64,
    /// How many pairs of devices peers may have connected to this process.
    pub max_served: usize,
    /// Whether devices may write in another order than bytes came, where they can.
    pub relaxed_ordering: bool,
    /// Which of the peer's devices each of ours is connected to: its match (in the same subnet, else at the same place in
    /// the lists), or all.
    pub pairing: Pairing,
}

/// Which pairs of devices are connected.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Pairing {
    /// Each with its match.
    Matched,
    /// Each with each.
    All,
}

impl Default for RdmaConfig {
    fn default() -> Self {
        Self {
            devices: Vec::new(),
            port: 1,
            gid_index: None,
            pkey_index: 0,
            mtu: 4096,
            queue_pairs: 2,
            queue_depth: 128,
            reads: 16,
            inline_bytes: 64,
            service_level: 0,
            traffic_class: 0,
            hop_limit: 16,
            ack_timeout: 14,
            retries: 6,
            slice_bytes: 256 << 10,
            spin_us: 0,
            liveness_ms: 3000,
            retry_after_ms: 250,
            max_served: 4096,
            relaxed_ordering: true,
            pairing: Pairing::Matched,
        }
    }
}

impl RdmaConfig {
    /// # Errors
    /// `InvalidConfig`, naming the key, the value and what is accepted.
    pub fn validate(&self) -> Result<()> {
        let within = |key: &str, value: u64, low: u64, high: u64| {
            if (low..=high).contains(&value) {
                return Ok(());
            }
            Err(Error::invalid_config(key, value, &format!("{low} to {high}")))
        };
        within("port", self.port.into(), 1, 255)?;
        if ![256, 512, 1024, 2048, 4096].contains(&self.mtu) {
            return Err(Error::invalid_config("mtu", self.mtu, "256, 512, 1024, 2048 or 4096"));
        }
        within("queue_pairs", self.queue_pairs as u64, 1, 8)?;
        within("queue_depth", self.queue_depth as u64, 1, 4096)?;
        within("reads", self.reads.into(), 1, 128)?;
        within("inline_bytes", self.inline_bytes.into(), 0, 1024)?;
        within("service_level", self.service_level.into(), 0, 15)?;
        within("ack_timeout", self.ack_timeout.into(), 1, 31)?;
        within("retries", self.retries.into(), 0, 6)?;
        within("slice_bytes", self.slice_bytes, 4096, 1 << 30)?;
        within("spin_us", self.spin_us, 0, 1_000_000)?;
        within("liveness_ms", self.liveness_ms, 100, 3_600_000)?;
        within("retry_after_ms", self.retry_after_ms, 10, 60_000)?;
        within("max_served", self.max_served as u64, 1, 1 << 20)?;
        if let Some(empty) = self.devices.iter().find(|name| name.is_empty()) {
            return Err(Error::invalid_config("devices", format_args!("{empty:?}"), "names of devices"));
        }
        Ok(())
    }

    pub(crate) const fn liveness(&self) -> Duration {
        Duration::from_millis(self.liveness_ms)
    }

    pub(crate) const fn retry_after(&self) -> Duration {
        Duration::from_millis(self.retry_after_ms)
    }

    pub(crate) const fn spin(&self) -> Duration {
        Duration::from_micros(self.spin_us)
    }
}

#[cfg(test)]
mod tests {
    use posthorse_core::ErrorKind;
    use serde_json::json;

    use super::*;

    #[test]
    fn what_cannot_be_is_named_with_what_can() {
        RdmaConfig::default().validate().unwrap();
        for (key, value) in [
            ("port", json!(0)),
            ("mtu", json!(1500)),
            ("queue_pairs", json!(9)),
            ("queue_depth", json!(0)),
            ("reads", json!(0)),
            ("inline_bytes", json!(1025)),
            ("service_level", json!(16)),
            ("ack_timeout", json!(0)),
            ("retries", json!(7)),
            ("slice_bytes", json!(1)),
            ("spin_us", json!(1_000_001)),
            ("liveness_ms", json!(1)),
            ("retry_after_ms", json!(1)),
            ("max_served", json!(0)),
            ("devices", json!([""])),
        ] {
            let mut all = serde_json::to_value(RdmaConfig::default()).unwrap();
            all[key] = value;
            let config: RdmaConfig = serde_json::from_value(all).unwrap();
            let error = config.validate().unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidConfig);
            assert!(error.to_string().starts_with(&format!("{key} is ")), "{error}");
        }
        assert!(serde_json::from_value::<RdmaConfig>(json!({ "quue_depth": 1 })).is_err());
    }
}
