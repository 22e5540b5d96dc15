//! Pseudo-random bytes that can be made again from their seed, to fill memory with and to check it by.

/// Fills `bytes` with those of `seed`. Equal seeds give equal bytes, whatever the length.
pub(crate) fn fill(seed: u64, bytes: &mut [u8]) {
    let (words, rest) = bytes.as_chunks_mut::<8>();
    for (index, to) in words.iter_mut().enumerate() {
        *to = word(seed, index as u64);
    }
    rest.copy_from_slice(&word(seed, words.len() as u64)[..rest.len()]);
}

/// The offset of the first byte that is not what [`fill`] wrote, or `None` when all are.
pub(crate) fn difference(seed: u64, bytes: &[u8]) -> Option<usize> {
    let first = |a: &[u8], b: &[u8]| a.iter().zip(b).position(|(a, b)| a != b);
    let (words, rest) = bytes.as_chunks::<8>();
    for (index, got) in words.iter().enumerate() {
        if let Some(at) = first(got, &word(seed, index as u64)) {
            return Some(index * 8 + at);
        }
    }
    first(rest, &word(seed, words.len() as u64)).map(|at| words.len() * 8 + at)
}

/// Eight bytes: the output of SplitMix64 (Steele, Lea and Flood, 2014) at `index`.
#[inline]
const fn word(seed: u64, index: u64) -> [u8; 8] {
    let mut z = seed.wrapping_add((index + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    (z ^ (z >> 31)).to_le_bytes()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_words_are_those_of_splitmix64() {
        // The first two outputs for seed 0 in its published reference implementation.
        let mut bytes = [0; 16];
        fill(0, &mut bytes);
        assert_eq!(bytes[..8], 0xe220_a839_7b1d_cdaf_u64.to_le_bytes());
        assert_eq!(bytes[8..], 0x6e78_9e6a_a1b9_65f4_u64.to_le_bytes());
    }

    proptest! {
        #[test]
        fn one_wrong_byte_is_found_where_it_is(seed: u64, len in 1_usize..200, at: usize, flip in 1_u8..) {
            let mut bytes = vec![0; len];
            fill(seed, &mut bytes);
            prop_assert_eq!(difference(seed, &bytes), None);
            bytes[at % len] ^= flip;
            prop_assert_eq!(difference(seed, &bytes), Some(at % len));
        }
    }
}
