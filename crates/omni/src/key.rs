//! The names under which payloads are offered, as the Python connector and vLLM-Omni form them.

use std::fmt;

use posthorse_core::{Error, Result};

/// The longest key accepted, in bytes, its stages included.
pub const MAX_KEY_BYTES: usize = 1024;

/// A directed edge of the pipeline: the stage that offers and the stage that pulls.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Edge {
    /// The stage that offers.
    pub from: String,
    /// The stage that pulls.
    pub to: String,
}

impl Edge {
    /// The edge between two stages.
    pub fn new(from: impl fmt::Display, to: impl fmt::Display) -> Self {
        Self { from: from.to_string(), to: to.to_string() }
    }

    /// The key as it travels: `{key}@{from}_{to}`.
    ///
    /// # Errors
    /// `InvalidArgument` when `key` is empty, or the result is longer than [`MAX_KEY_BYTES`].
    pub fn qualify(&self, key: &str) -> Result<String> {
        let qualified = format!("{key}@{}_{}", self.from, self.to);
        if key.is_empty() {
            return Err(Error::invalid_argument("key", "empty", "a name of at least one byte"));
        }
        check(&qualified)?;
        Ok(qualified)
    }
}

impl fmt::Display for Edge {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}->{}", self.from, self.to)
    }
}

/// Refuses a key that is empty or too long to be kept for a peer.
///
/// # Errors
/// `InvalidArgument`, with the length and what is accepted.
pub fn check(key: &str) -> Result<()> {
    if key.is_empty() || key.len() > MAX_KEY_BYTES {
        let accepted = format!("1 to {MAX_KEY_BYTES} bytes");
        return Err(Error::invalid_argument("key length", format_args!("{} bytes", key.len()), &accepted));
    }
    Ok(())
}

/// The key of a chunk of a request's stream: `{request}_{stage}_{chunk}`; chunks count from zero.
pub fn chunk(request: &str, producer_stage: impl fmt::Display, chunk: u64) -> String {
    format!("{request}_{producer_stage}_{chunk}")
}

/// The key of a request's KV cache where neither side is split over ranks: `omni_{from}_to_{to}_kv_cache_{request}`.
pub fn kv_cache(edge: &Edge, request: &str) -> String {
    format!("omni_{}_to_{}_kv_cache_{request}", edge.from, edge.to)
}

/// The key of one shard of a request's KV cache: `{request}_{from_stage}_{chunk}_{from_rank}_{to_rank}`.
pub fn kv_shard(
    request: &str,
    from_stage: impl fmt::Display,
    chunk: u64,
    from_rank: u32,
    to_rank: u32,
) -> String {
    format!("{request}_{from_stage}_{chunk}_{from_rank}_{to_rank}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn documented_examples() {
        let edge = Edge::new(0, 1);
        assert_eq!(edge.qualify("req1").unwrap(), "req1@0_1");
        assert_eq!(chunk("req1", 0, 7), "req1_0_7");
        assert_eq!(kv_cache(&edge, "req1"), "omni_0_to_1_kv_cache_req1");
        assert_eq!(kv_shard("req1", 0, 0, 2, 1), "req1_0_0_2_1");
        assert_eq!(
            edge.qualify(&kv_cache(&edge, "req1__cfg_text")).unwrap(),
            "omni_0_to_1_kv_cache_req1__cfg_text@0_1"
        );
        assert_eq!(edge.to_string(), "0->1");
    }

    #[test]
    fn empty_and_overlong_keys_are_refused_with_the_limit() {
        let edge = Edge::new(0, 1);
        assert!(edge.qualify("").is_err());
        assert!(edge.qualify(&"k".repeat(MAX_KEY_BYTES - 4)).is_ok());
        let error = edge.qualify(&"k".repeat(MAX_KEY_BYTES - 3)).unwrap_err().to_string();
        assert!(error.contains("1025 bytes") && error.contains("1024"), "{error}");
    }
}
