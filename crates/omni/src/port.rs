//! The port arithmetic of vLLM-Omni, for pipelines whose stages find each other by it.
//!
//! Where nothing depends on it, bind port 0 and advertise what the system chose instead: these sums collide
//! and overflow as a deployment grows, which here is an error that names every term.

use posthorse_core::{Error, ErrorKind, Result};

/// Where a stage's ports start unless configured otherwise.
pub const DEFAULT_BASE_PORT: u16 = 50051;
/// Added for the orchestrator's connector.
pub const ORCHESTRATOR_OFFSET: u64 = 200;
/// Between the replicas of a stage.
pub const REPLICA_STRIDE: u64 = 1024;
/// Between the tensor-parallel ranks of a stage.
pub const RANK_STRIDE: u64 = 16;

/// What a connector is used for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Purpose {
    /// Requests from stage to stage.
    RequestForwarding,
    /// KV caches.
    KvTransfer,
}

impl Purpose {
    /// What is added to the base port.
    pub const fn offset(self) -> u64 {
        match self {
            Self::RequestForwarding => 0,
            Self::KvTransfer => 100,
        }
    }
}

/// The number of a stage in port sums: stages whose name is no number count as zero.
pub fn stage_number(stage: &str) -> u64 {
    stage.parse().unwrap_or(0)
}

/// The KV sender's port: `base + 100 + replica * 1024 + rank * 16 + from_stage`.
///
/// # Errors
/// `InvalidConfig` above 65535.
pub fn kv_transfer(base: u16, replica: u32, tp_rank: u32, from_stage: &str) -> Result<u16> {
    sum(&[
        ("base", base.into()),
        ("KV transfer", Purpose::KvTransfer.offset()),
        ("replica * 1024", u64::from(replica) * REPLICA_STRIDE),
        ("rank * 16", u64::from(tp_rank) * RANK_STRIDE),
        ("stage", stage_number(from_stage)),
    ])
}

/// The port of any sender: `base + purpose + from_stage + local_rank * 16`.
///
/// # Errors
/// `InvalidConfig` above 65535.
pub fn sender(base: u16, purpose: Purpose, from_stage: &str, local_rank: u32) -> Result<u16> {
    sum(&[
        ("base", base.into()),
        ("purpose", purpose.offset()),
        ("stage", stage_number(from_stage)),
        ("rank * 16", u64::from(local_rank) * RANK_STRIDE),
    ])
}

/// The orchestrator's port: `base + 200 + stage`.
///
/// # Errors
/// `InvalidConfig` above 65535.
pub fn orchestrator(base: u16, stage: &str) -> Result<u16> {
    sum(&[("base", base.into()), ("orchestrator", ORCHESTRATOR_OFFSET), ("stage", stage_number(stage))])
}

/// Where a receiver finds the sender of a rank, from the port of the sender's rank 0: `port + rank * 16`.
///
/// # Errors
/// `InvalidConfig` above 65535.
pub fn of_sender_rank(rank_0_port: u16, rank: u32) -> Result<u16> {
    sum(&[("rank 0", rank_0_port.into()), ("rank * 16", u64::from(rank) * RANK_STRIDE)])
}

/// The formula of the older documents, for data-parallel deployments that follow them:
/// `base + purpose + stage + dp_index * tp_size + tp_rank`.
///
/// # Errors
/// `InvalidConfig` above 65535, `InvalidArgument` when `tp_rank` is not below `tp_size`.
pub fn data_parallel(
    base: u16,
    purpose: Purpose,
    stage: &str,
    dp_index: u32,
    tp_size: u32,
    tp_rank: u32,
) -> Result<u16> {
    if tp_rank >= tp_size {
        return Err(Error::invalid_argument("tp_rank", tp_rank, &format!("0 to tp_size - 1, of {tp_size}")));
    }
    sum(&[
        ("base", base.into()),
        ("purpose", purpose.offset()),
        ("stage", stage_number(stage)),
        ("dp index * tp size", u64::from(dp_index) * u64::from(tp_size)),
        ("rank", tp_rank.into()),
    ])
}

fn sum(terms: &[(&str, u64)]) -> Result<u16> {
    let total = terms.iter().fold(0_u64, |sum, &(_, value)| sum.saturating_add(value));
    u16::try_from(total).map_err(|_| {
        let terms: Vec<String> = terms.iter().map(|(name, value)| format!("{value} ({name})")).collect();
        Error::new(
            ErrorKind::InvalidConfig,
            format!("the port {} = {total} is above 65535", terms.join(" + ")),
        )
        .with_advice("choose a lower base port, or bind port 0 and advertise what the system chose")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn documented_examples() {
        for (replica, rank, stage, port) in [(0, 0, "0", 50151), (0, 1, "0", 50167), (1, 0, "0", 51175)] {
            assert_eq!(kv_transfer(DEFAULT_BASE_PORT, replica, rank, stage).unwrap(), port);
        }
        assert_eq!(kv_transfer(50051, 15, 0, "0").unwrap(), 65511);
        assert_eq!(sender(50051, Purpose::RequestForwarding, "2", 1).unwrap(), 50069);
        assert_eq!(sender(50051, Purpose::KvTransfer, "thinker", 0).unwrap(), 50151);
        assert_eq!(orchestrator(50051, "3").unwrap(), 50254);
        assert_eq!(of_sender_rank(50151, 1).unwrap(), 50167);
        assert_eq!(data_parallel(50051, Purpose::KvTransfer, "1", 2, 4, 3).unwrap(), 50163);
    }

    #[test]
    fn a_port_above_65535_names_every_term() {
        let error = kv_transfer(50051, 15, 2, "0").unwrap_err().to_string();
        for part in ["50051 (base)", "15360 (replica * 1024)", "32 (rank * 16)", "0 (stage)", "65543"] {
            assert!(error.contains(part), "{part} is missing in {error}");
        }
        assert!(kv_transfer(u16::MAX, u32::MAX, u32::MAX, &u64::MAX.to_string()).is_err());
        assert!(data_parallel(50051, Purpose::KvTransfer, "1", 0, 4, 4).is_err());
    }
}
