//! Bytes that say where they belong.

use crate::random::mix;

/// Fills `bytes` with the pattern of `seed`. Each position has its own value, and each seed its own pattern, so
/// bytes that were moved, torn or left out show.
pub fn fill(seed: u64, bytes: &mut [u8]) {
    let base = mix(seed);
    let mut chunks = bytes.chunks_exact_mut(8);
    let mut index = 0;
    for chunk in chunks.by_ref() {
        chunk.copy_from_slice(&word(base, index));
        index += 1;
    }
    let rest = chunks.into_remainder();
    rest.copy_from_slice(&word(base, index)[..rest.len()]);
}

/// The pattern of `seed`, `len` bytes of it.
pub fn bytes(seed: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    fill(seed, &mut bytes);
    bytes
}

/// The offset of the first byte that is not the pattern's, or `None` when all are.
pub fn check(seed: u64, bytes: &[u8]) -> Option<usize> {
    let base = mix(seed);
    let mut chunks = bytes.chunks_exact(8);
    let mut index = 0;
    for chunk in chunks.by_ref() {
        if chunk != word(base, index) {
            return first_difference(chunk, &word(base, index)).map(|at| index as usize * 8 + at);
        }
        index += 1;
    }
    first_difference(chunks.remainder(), &word(base, index)).map(|at| index as usize * 8 + at)
}

/// The eight bytes at word `index`.
#[inline]
const fn word(base: u64, index: u64) -> [u8; 8] {
    let number = base.wrapping_add(index).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (number ^ (number >> 32)).to_le_bytes()
}

fn first_difference(a: &[u8], b: &[u8]) -> Option<usize> {
    a.iter().zip(b).position(|(a, b)| a != b)
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn one_wrong_byte_is_found_where_it_is(seed: u64, len in 1_usize..300, at: usize, flip in 1_u8..) {
            let mut bytes = bytes(seed, len);
            prop_assert_eq!(check(seed, &bytes), None);
            bytes[at % len] ^= flip;
            prop_assert_eq!(check(seed, &bytes), Some(at % len));
        }
    }

    #[test]
    fn a_pattern_moved_or_of_another_seed_is_wrong_at_once() {
        let bytes = bytes(1, 4096);
        assert!(check(2, &bytes).is_some_and(|at| at < 8));
        for shift in 1..64 {
            assert!(check(1, &bytes[shift..]).is_some_and(|at| at < 8), "shifted by {shift}");
        }
        assert_eq!(check(1, &[]), None);
    }

    /// The suites move gigabytes: a pattern that is slow to make would be most of their time.
    #[test]
    fn patterns_are_made_and_checked_fast() {
        let mut bytes = vec![0; 16 << 20];
        fill(0, &mut bytes);
        let rate = |work: &mut dyn FnMut()| {
            let times = (0..5).map(|_| {
                let begin = Instant::now();
                work();
                begin.elapsed().as_secs_f64()
            });
            let best = times.fold(f64::INFINITY, f64::min);
            (16 << 20) as f64 / best / 1e9
        };
        let made = rate(&mut || fill(3, &mut bytes));
        let checked = rate(&mut || assert_eq!(check(3, std::hint::black_box(&bytes)), None));
        println!("fill {made:.1} GB/s, check {checked:.1} GB/s");
        // A fifth of what a quiet machine shows: it fails on a slow loop, not on a busy neighbour.
        assert!(made > 0.4 && checked > 0.4, "fill {made:.2} GB/s, check {checked:.2} GB/s");
    }
}
