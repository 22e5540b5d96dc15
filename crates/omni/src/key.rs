//! The names under which payloads are offered, as the Python connector and vLLM-Omni form them.

use std::fmt;

use posthorse_core::{Error, Result};

/// The longest key accepted, in bytes, its stages included.
pub const MAX_KEY_BYTES: usize = 1024;

/// A directed edge of the pipeline: the stage that offers and the stage that pulls.
///
/// Stages are numbers in vLLM-Omni; other names are accepted as long as no two edges share a key: see [`Edge::check`].
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
    /// `InvalidArgument` when `key` is empty or has control characters, the result is longer than [`MAX_KEY_BYTES`], or as
    /// [`Edge::check`].
    pub fn qualify(&self, key: &str) -> Result<String> {
        self.check()?;
        let qualified = format!("{key}@{}_{}", self.from, self.to);
        if key.is_empty() {
            return Err(Error::invalid_argument("key", "empty", "a name of at least one byte"));
        }
        check(&qualified)?;
        Ok(qualified)
    }

    /// Refuses a stage whose name would make the keys of two edges one: `k@0_1_2` is that of stages `0` and `1_2`, and of
    /// `0_1` and `2`.
    ///
    /// # Errors
    /// `InvalidArgument`, naming the stage and what is accepted.
    pub fn check(&self) -> Result<()> {
        for (end, stage) in [("the stage that offers", &self.from), ("the stage that pulls", &self.to)] {
            if stage.is_empty() || stage.contains(['_', '@']) || stage.chars().any(char::is_control) {
                let accepted = "a number, or a name without '_', '@' and control characters, by which keys tell edges \
                                apart";
                return Err(Error::invalid_argument(end, format_args!("{stage:?}"), accepted));
            }
        }
        Ok(())
    }
}

impl fmt::Display for Edge {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}->{}", self.from, self.to)
    }
}

/// Refuses a key that is empty, too long to be kept for a peer, or not fit to be shown in a line of a log.
///
/// # Errors
/// `InvalidArgument`, with what is wrong and what is accepted.
pub fn check(key: &str) -> Result<()> {
    if key.is_empty() || key.len() > MAX_KEY_BYTES {
        let accepted = format!("1 to {MAX_KEY_BYTES} bytes");
        return Err(Error::invalid_argument("key length", format_args!("{} bytes", key.len()), &accepted));
    }
    if key.chars().any(char::is_control) {
        return Err(Error::invalid_argument(
            "key",
            format_args!("{key:?}"),
            "text without control characters",
        ));
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
    fn edges_that_would_share_a_key_are_refused_by_the_stage_that_makes_them() {
        for (from, to, parts) in [
            ("0", "1_2", ["the stage that pulls is \"1_2\"", "without '_'"]),
            ("0_1", "2", ["the stage that offers is \"0_1\"", "without '_'"]),
            ("", "", ["the stage that offers is \"\"", "a number, or a name"]),
            ("a@b", "c", ["the stage that offers is \"a@b\"", "'@'"]),
            ("a", "b\n", ["the stage that pulls is \"b\\n\"", "control characters"]),
        ] {
            let error = Edge::new(from, to).qualify("k").unwrap_err();
            assert_eq!(error.kind(), posthorse_core::ErrorKind::InvalidArgument);
            for part in parts {
                assert!(error.message().contains(part), "{part} is missing in {error}");
            }
        }
        assert_eq!(Edge::new("thinker-1", "talker.0").qualify("a@b_c").unwrap(), "a@b_c@thinker-1_talker.0");
    }

    #[test]
    fn keys_that_no_log_can_show_are_refused() {
        for key in ["a\0b", "a\nb", "\u{1b}[31m"] {
            let error = Edge::new(0, 1).qualify(key).unwrap_err().to_string();
            assert!(error.contains(&format!("{:?}", format!("{key}@0_1"))), "{error}");
        }
    }

    #[test]
    fn a_key_is_that_of_one_edge() {
        let parts = ["", "0", "1", "_", "@"];
        let names: Vec<String> =
            parts.iter().flat_map(|first| parts.map(|second| format!("{first}{second}"))).collect();
        let mut known = std::collections::BTreeMap::new();
        for number in 0..names.len().pow(3) {
            let name = |digit: u32| names[number / names.len().pow(digit) % names.len()].as_str();
            let whose = (name(0), name(1), name(2));
            if let Ok(key) = Edge::new(whose.1, whose.2).qualify(whose.0) {
                let other = known.insert(key, whose).filter(|other| *other != whose);
                assert_eq!(other, None, "{whose:?}");
            }
        }
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
