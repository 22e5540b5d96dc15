//! What is put and got: both processes know it without telling each other.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::pattern;

/// A run's parameters.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Plan {
    /// From which everything else follows.
    pub(super) seed: u64,
    /// Threads that put, and as many that get.
    pub(super) threads: u64,
    /// The largest payload, in bytes.
    pub(super) max_bytes: u64,
    /// How long any one put or get may take.
    pub(super) patience: Duration,
}

/// How a payload is put and got.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Form {
    Buffer,
    Bytes,
    Tensors,
    /// A buffer, read in place where that is possible.
    Lease,
}

/// One payload.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Item {
    pub(super) key: String,
    pub(super) form: Form,
    pub(super) bytes: u64,
    /// Of its pattern.
    pub(super) seed: u64,
}

impl Plan {
    /// Payload number `index` of a thread. Sizes are spread evenly over the powers of two.
    pub(super) fn item(&self, thread: u64, index: u64) -> Item {
        let mut random = [0; 24];
        pattern::fill(
            self.seed ^ thread.rotate_left(32) ^ index.wrapping_mul(0x9e37_79b9_7f4a_7c15),
            &mut random,
        );
        let (words, _) = random.as_chunks::<8>();
        let [size, form, seed] = [0, 1, 2].map(|at| u64::from_le_bytes(words[at]));
        let octaves = u64::from(self.max_bytes.max(1).ilog2());
        let octave = 1_u64 << (size % (octaves + 1));
        let bytes = (octave + (size >> 8) % octave).min(self.max_bytes.max(1));
        let form = [Form::Buffer, Form::Bytes, Form::Tensors, Form::Lease][form as usize % 4];
        Item { key: format!("{thread}-{index}"), form, bytes, seed }
    }
}

/// The lengths of the tensors into which a payload of this size is cut: none is empty.
pub(super) fn tensors(bytes: u64) -> Vec<u64> {
    match bytes {
        0..=2 => vec![bytes],
        _ => vec![1, bytes / 3, bytes - 1 - bytes / 3],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan(max_bytes: u64) -> Plan {
        Plan { seed: 7, threads: 16, max_bytes, patience: Duration::from_secs(1) }
    }

    #[test]
    fn sizes_cover_the_range_and_never_leave_it() {
        for max in [1, 2, 100, 64 << 20] {
            let sizes: Vec<u64> = (0..4000).map(|index| plan(max).item(3, index).bytes).collect();
            assert!(sizes.iter().all(|size| (1..=max).contains(size)));
            assert!(sizes.contains(&1) && sizes.iter().any(|size| *size > max / 2), "{max}");
        }
    }

    #[test]
    fn both_processes_plan_the_same_and_every_form_occurs() {
        let item = plan(1000).item(1, 2);
        assert_eq!(item, plan(1000).item(1, 2));
        assert_ne!(item.seed, plan(1000).item(2, 1).seed);
        for form in [Form::Buffer, Form::Bytes, Form::Tensors, Form::Lease] {
            assert!((0..100).any(|index| plan(1000).item(0, index).form == form));
        }
    }

    #[test]
    fn tensors_add_up() {
        for bytes in 1..200 {
            let parts = tensors(bytes);
            assert!(parts.iter().sum::<u64>() == bytes && !parts.contains(&0), "{parts:?}");
        }
    }
}
