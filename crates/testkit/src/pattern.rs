//! Bytes that say where they belong.

use crate::random::mix;

/// Fills `bytes` with the pattern of `seed`. Each position has its own value, and each seed its own pattern, so
/// bytes that were moved, torn or left out show.
pub fn fill(seed: u64, bytes: &mut [u8]) {
    let base = mix(seed);
    let (words, rest) = bytes.as_chunks_mut();
    for (index, to) in words.iter_mut().enumerate() {
        *to = word(base, index);
    }
    rest.copy_from_slice(&word(base, words.len())[..rest.len()]);
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
    let (words, rest) = bytes.as_chunks();
    for (index, got) in words.iter().enumerate() {
        if *got != word(base, index) {
            return first_difference(got, &word(base, index)).map(|at| index * 8 + at);
        }
    }
    first_difference(rest, &word(base, words.len())).map(|at| words.len() * 8 + at)
}

/// The eight bytes at word `index`.
#[inline]
const fn word(base: u64, index: usize) -> [u8; 8] {
    let number = base.wrapping_add(index as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (number ^ (number >> 32)).to_le_bytes()
}

fn first_difference(a: &[u8], b: &[u8]) -> Option<usize> {
    a.iter().zip(b).position(|(a, b)| a != b)
}

#[cfg(test)]
mod tests {
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
}
