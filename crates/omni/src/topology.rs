//! Who sends which heads to whom when the two stages split their tensors over different numbers of ranks.

use std::ops::Range;

use posthorse_core::{Error, Result};
use serde::{Deserialize, Serialize};

use crate::key::{self, Edge};

/// The tensor-parallel sizes of the two ends of an edge. One divides the other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TpTopology {
    from_tp: u32,
    to_tp: u32,
}

/// A key to put or get, and the far rank it concerns; `None` where neither side is split.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RankKey {
    /// The far end's rank: the target of a put, the source of a get.
    pub rank: Option<u32>,
    /// The key, not yet qualified by its stages.
    pub key: String,
}

/// How a sender cut its shard's heads for one target, as it says so in a payload's `tp_head_slice`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HeadSlice {
    /// Whether the cut was made.
    pub applied: bool,
    /// Which side made it: `sender`.
    pub side: String,
    /// The rank it was made for.
    pub target_rank: u32,
    /// The rank that made it.
    pub source_rank: u32,
    /// The sender's tensor-parallel size.
    pub from_tp: u32,
    /// The receiver's.
    pub to_tp: u32,
    /// Which of the slices of the source's shard this is.
    pub offset_in_shard: u32,
    /// How many slices the source's shard is cut into.
    pub num_slices: u32,
}

impl HeadSlice {
    /// The heads of a shard of `heads` that this slice takes.
    ///
    /// # Errors
    /// `InvalidArgument` when the heads do not divide by the number of slices, or the slice lies outside.
    pub fn heads(&self, heads: usize) -> Result<Range<usize>> {
        slice_of(heads, self.offset_in_shard as usize, self.num_slices as usize)
    }
}

impl TpTopology {
    /// A topology of two sizes.
    ///
    /// # Errors
    /// `InvalidArgument` unless both are at least one and one divides the other.
    pub fn new(from_tp: u32, to_tp: u32) -> Result<Self> {
        let (small, large) = (from_tp.min(to_tp), from_tp.max(to_tp));
        if small == 0 || large % small != 0 {
            return Err(Error::invalid_argument(
                "the pair of tensor-parallel sizes",
                format_args!("{from_tp} to {to_tp}"),
                "sizes of at least 1 of which one divides the other",
            ));
        }
        Ok(Self { from_tp, to_tp })
    }

    /// The ranks to which a source rank sends.
    ///
    /// # Errors
    /// `InvalidArgument` for a rank outside the source's size.
    pub fn send_targets(self, source_rank: u32) -> Result<Range<u32>> {
        counterparts(source_rank, self.from_tp, self.to_tp)
    }

    /// The ranks from which a target rank receives, in the order in which their heads are concatenated.
    ///
    /// # Errors
    /// `InvalidArgument` for a rank outside the target's size.
    pub fn recv_sources(self, target_rank: u32) -> Result<Range<u32>> {
        counterparts(target_rank, self.to_tp, self.from_tp)
    }

    /// The KV keys that a source rank puts for a request.
    ///
    /// # Errors
    /// As [`TpTopology::send_targets`].
    pub fn send_keys(self, edge: &Edge, request: &str, source_rank: u32) -> Result<Vec<RankKey>> {
        let targets = self.send_targets(source_rank)?;
        Ok(self.keys(edge, request, targets, |target| (source_rank, target)))
    }

    /// The KV keys that a target rank gets for a request.
    ///
    /// # Errors
    /// As [`TpTopology::recv_sources`].
    pub fn recv_keys(self, edge: &Edge, request: &str, target_rank: u32) -> Result<Vec<RankKey>> {
        let sources = self.recv_sources(target_rank)?;
        Ok(self.keys(edge, request, sources, |source| (source, target_rank)))
    }

    /// How a source rank cuts its heads for a target rank: `None` where it sends its whole shard.
    ///
    /// # Errors
    /// `InvalidArgument` for ranks that exchange nothing.
    pub fn head_slice(self, source_rank: u32, target_rank: u32) -> Result<Option<HeadSlice>> {
        let targets = self.send_targets(source_rank)?;
        if !targets.contains(&target_rank) {
            return Err(Error::invalid_argument(
                "target rank",
                target_rank,
                &format!("{} to {}, the targets of rank {source_rank}", targets.start, targets.end - 1),
            ));
        }
        if self.to_tp <= self.from_tp {
            return Ok(None);
        }
        Ok(Some(HeadSlice {
            applied: true,
            side: "sender".to_owned(),
            target_rank,
            source_rank,
            from_tp: self.from_tp,
            to_tp: self.to_tp,
            offset_in_shard: target_rank - targets.start,
            num_slices: self.to_tp / self.from_tp,
        }))
    }

    fn keys(
        self,
        edge: &Edge,
        request: &str,
        far: Range<u32>,
        ranks: impl Fn(u32) -> (u32, u32),
    ) -> Vec<RankKey> {
        if self.from_tp <= 1 && self.to_tp <= 1 {
            return vec![RankKey { rank: None, key: key::kv_cache(edge, request) }];
        }
        far.map(|rank| {
            let (from, to) = ranks(rank);
            RankKey { rank: Some(rank), key: key::kv_shard(request, &edge.from, 0, from, to) }
        })
        .collect()
    }
}

fn counterparts(rank: u32, own: u32, other: u32) -> Result<Range<u32>> {
    if rank >= own {
        return Err(Error::invalid_argument("rank", rank, &format!("0 to {}", own - 1)));
    }
    Ok(if own >= other {
        let far = rank / (own / other);
        far..far + 1
    } else {
        let ratio = other / own;
        rank * ratio..(rank + 1) * ratio
    })
}

fn slice_of(heads: usize, index: usize, count: usize) -> Result<Range<usize>> {
    if count == 0 || index >= count || !heads.is_multiple_of(count) {
        return Err(Error::invalid_argument(
            "the head slice",
            format_args!("{index} of {count} of {heads} heads"),
            "a number of heads that divides by the number of slices, and an index below that",
        ));
    }
    let len = heads / count;
    Ok(index * len..(index + 1) * len)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn tp(from: u32, to: u32) -> TpTopology {
        TpTopology::new(from, to).unwrap()
    }

    #[test]
    fn a_rank_maps_to_itself_where_the_sizes_are_equal() {
        for (size, rank) in [(2, 0), (2, 1), (4, 3)] {
            assert_eq!(tp(size, size).send_targets(rank).unwrap(), rank..rank + 1);
            assert_eq!(tp(size, size).recv_sources(rank).unwrap(), rank..rank + 1);
        }
    }

    #[test]
    fn fan_in_and_fan_out() {
        assert_eq!(tp(4, 2).recv_sources(0).unwrap(), 0..2);
        assert_eq!(tp(4, 2).recv_sources(1).unwrap(), 2..4);
        assert_eq!(tp(4, 2).send_targets(3).unwrap(), 1..2);
        assert_eq!(tp(2, 4).send_targets(0).unwrap(), 0..2);
        assert_eq!(tp(2, 4).send_targets(1).unwrap(), 2..4);
        assert_eq!(tp(2, 4).recv_sources(2).unwrap(), 1..2);
    }

    #[test]
    fn sizes_that_do_not_divide_and_ranks_outside_are_refused() {
        for (from, to) in [(2, 3), (4, 6), (0, 1), (1, 0)] {
            assert!(TpTopology::new(from, to).is_err(), "{from} {to}");
        }
        assert!(tp(2, 4).send_targets(2).is_err());
        assert!(tp(2, 4).recv_sources(4).is_err());
        assert!(tp(2, 4).head_slice(0, 2).is_err());
    }

    #[test]
    fn keys_of_unsplit_and_split_stages() {
        let edge = Edge::new(0, 1);
        let keys = |keys: Vec<RankKey>| keys.into_iter().map(|k| (k.rank, k.key)).collect::<Vec<_>>();
        assert_eq!(
            keys(tp(1, 1).recv_keys(&edge, "r", 0).unwrap()),
            [(None, "omni_0_to_1_kv_cache_r".to_owned())]
        );
        assert_eq!(
            keys(tp(4, 2).recv_keys(&edge, "r", 1).unwrap()),
            [(Some(2), "r_0_0_2_1".to_owned()), (Some(3), "r_0_0_3_1".to_owned())]
        );
        assert_eq!(
            keys(tp(2, 4).send_keys(&edge, "r", 0).unwrap()),
            [(Some(0), "r_0_0_0_0".to_owned()), (Some(1), "r_0_0_0_1".to_owned())]
        );
    }

    #[test]
    fn a_sender_cuts_heads_only_for_more_targets_than_sources() {
        assert_eq!(tp(4, 2).head_slice(3, 1).unwrap(), None);
        let slice = tp(2, 4).head_slice(1, 3).unwrap().unwrap();
        assert_eq!((slice.offset_in_shard, slice.num_slices), (1, 2));
        assert_eq!(slice.heads(8).unwrap(), 4..8);
        assert!(slice.heads(7).is_err());
        let json = serde_json::to_value(&slice).unwrap();
        assert_eq!(json["side"], "sender");
    }

    proptest! {
        #[test]
        fn what_one_side_sends_the_other_receives(small in 1_u32..9, ratio in 1_u32..9, flip: bool) {
            let (from, to) = if flip { (small * ratio, small) } else { (small, small * ratio) };
            let topology = tp(from, to);
            let mut sent = Vec::new();
            for source in 0..from {
                for target in topology.send_targets(source).unwrap() {
                    sent.push((source, target));
                }
            }
            let mut received = Vec::new();
            for target in 0..to {
                for source in topology.recv_sources(target).unwrap() {
                    received.push((source, target));
                }
            }
            received.sort_unstable();
            prop_assert_eq!(sent, received);
        }
    }
}
