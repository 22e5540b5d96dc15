//! What can be chosen.

use std::path::PathBuf;
use std::time::Duration;

use posthorse_core::{Error, Result};
use serde::{Deserialize, Serialize};

use crate::rendezvous::socket::check_path;

/// The variable that overrides [`ShmConfig::host_id`].
pub const HOST_ID_VARIABLE: &str = "POSTHORSE_HOST_ID";

/// The configuration of a [`ShmTransport`](crate::ShmTransport). Every key has a default; unknown keys are refused.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ShmConfig {
    /// Peers whose host id differs are kept apart as if they were on another host; `None` is an id of its own.
    /// `POSTHORSE_HOST_ID` overrides it.
    pub host_id: Option<String>,
    /// Where the rendezvous socket lies. `None`: in the abstract namespace, which leaves nothing behind and is
    /// shared by the processes of one network namespace. An absolute path: in that folder, which must belong to this
    /// user alone and is shared by whoever mounts it.
    pub folder: Option<PathBuf>,
    /// How many grants can be live at once, standing ones of published regions included.
    pub max_grants: u32,
    /// How many peers may be connected to this process at once, those included that hold memory although they have
    /// gone; half of them from one process. At most a 24th as many as the process may have descriptors (`RLIMIT_NOFILE`), of which a peer may cost
    /// three. Whoever has said nothing yet makes room for one more.
    pub max_peers: u32,
    /// How many bytes one call of `submit` copies by itself; whatever is beyond goes to the copy threads.
    pub inline_bytes: usize,
    /// The largest pieces in which slices are copied, in bytes: a cancelled slice ends after the piece under way.
    pub piece_bytes: usize,
    /// How many copy threads there are, and how many threads copy at once, those that help while they wait among them.
    /// 0: half as many as there are processors, but 2 to 4.
    pub copy_threads: u32,
    /// How long a copy thread that has nothing left to do looks for more before it sleeps, in microseconds: a
    /// wake-up takes about as long.
    pub spin_us: u64,
    /// How many slices of each priority a path queues before it pushes back.
    pub queue_slices: u32,
    /// How long a peer may leave a question of the rendezvous unanswered, in milliseconds.
    pub liveness_ms: u64,
    /// Whether memory without a shareable file is reached by `process_vm_readv/writev`.
    pub process_vm: bool,
}

impl Default for ShmConfig {
    fn default() -> Self {
        Self {
            host_id: None,
            folder: None,
            max_grants: 1 << 16,
            max_peers: 1024,
            inline_bytes: 256 << 10,
            piece_bytes: 1 << 20,
            copy_threads: 0,
            spin_us: 50,
            queue_slices: 4096,
            liveness_ms: 3000,
            process_vm: true,
        }
    }
}

impl ShmConfig {
    /// The configuration as the environment overrides it.
    ///
    /// # Errors
    /// `InvalidConfig` when a value is out of its range.
    pub(crate) fn checked(mut self) -> Result<Self> {
        if let Some(id) = std::env::var_os(HOST_ID_VARIABLE) {
            let id = id.into_string().map_err(|id| {
                Error::invalid_config(HOST_ID_VARIABLE, format_args!("{id:?}"), "text in UTF-8")
            })?;
            self.host_id = (!id.is_empty()).then_some(id);
        }
        if let Some(id) = &self.host_id {
            in_range("host_id's length", id.len() as u64, 1, 256)?;
        }
        if let Some(folder) = &self.folder {
            check_path(folder)?;
        }
        in_range("max_grants", self.max_grants.into(), 1, 1 << 24)?;
        in_range("max_peers", self.max_peers.into(), 1, 1 << 16)?;
        in_range("inline_bytes", self.inline_bytes as u64, 0, 1 << 30)?;
        in_range("piece_bytes", self.piece_bytes as u64, 64 << 10, 1 << 30)?;
        in_range("copy_threads", self.copy_threads.into(), 0, 64)?;
        in_range("spin_us", self.spin_us, 0, 1_000_000)?;
        in_range("queue_slices", self.queue_slices.into(), 1, 1 << 20)?;
        in_range("liveness_ms", self.liveness_ms, 1, 3_600_000)?;
        Ok(self)
    }

    /// As configured, or: half of the processors, as the rest of the process wants some; at least 2, since one thread
    /// alone does not use up the memory's bandwidth; at most 4, since few do.
    pub(crate) fn copy_threads(&self) -> u32 {
        match self.copy_threads {
            0 => std::thread::available_parallelism().map_or(2, |all| (all.get() / 2).clamp(2, 4) as u32),
            threads => threads,
        }
    }

    pub(crate) const fn spin(&self) -> Duration {
        Duration::from_micros(self.spin_us)
    }

    pub(crate) const fn liveness(&self) -> Duration {
        Duration::from_millis(self.liveness_ms)
    }
}

fn in_range(key: &str, value: u64, min: u64, max: u64) -> Result<()> {
    if (min..=max).contains(&value) {
        return Ok(());
    }
    Err(Error::invalid_config(key, value, &format!("{min} to {max}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unknown_key_is_refused_by_name() {
        let error = serde_json::from_str::<ShmConfig>(r#"{"copy_thread": 1}"#).unwrap_err();
        assert!(error.to_string().contains("copy_thread"), "{error}");
        let config: ShmConfig = serde_json::from_str(r#"{"copy_threads": 1}"#).unwrap();
        assert_eq!(config, ShmConfig { copy_threads: 1, ..ShmConfig::default() });
    }

    #[test]
    fn a_value_out_of_range_is_refused_with_what_is_accepted() {
        let error = ShmConfig { copy_threads: 65, ..ShmConfig::default() }.checked().unwrap_err();
        assert!(error.to_string().contains("copy_threads is 65; accepted: 0 to 64"), "{error}");
    }
}
