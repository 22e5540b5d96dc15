//! Damage to messages, the same each time.

use crate::Random;

/// The longest input that is made.
const MAX_BYTES: usize = 1 << 16;

/// A mutation of `seed`: up to four of the things that go wrong, or are made to, with bytes on their way. `other` is
/// what pieces are taken from.
pub(super) fn mutate(random: &mut Random, seed: &[u8], other: &[u8]) -> Vec<u8> {
    let mut bytes = seed.to_vec();
    for _ in 0..=random.below(4) {
        match random.below(8) {
            0 => flip(random, &mut bytes),
            1 => overwrite(random, &mut bytes),
            2 | 3 => announce(random, &mut bytes),
            4 => bytes.truncate(index(random, bytes.len() + 1)),
            5 => remove(random, &mut bytes),
            6 => repeat(random, &mut bytes),
            _ => splice(random, &mut bytes, other),
        }
        bytes.truncate(MAX_BYTES);
    }
    bytes
}

fn flip(random: &mut Random, bytes: &mut [u8]) {
    let at = index(random, bytes.len());
    if let Some(byte) = bytes.get_mut(at) {
        *byte ^= 1 << random.below(8);
    }
}

fn overwrite(random: &mut Random, bytes: &mut [u8]) {
    let at = index(random, bytes.len());
    if let Some(byte) = bytes.get_mut(at) {
        *byte = random.next_u64() as u8;
    }
}

/// Writes a number that a length field might hold, of any width and order, over whatever stands there.
fn announce(random: &mut Random, bytes: &mut [u8]) {
    let width = 1 << random.below(4);
    let len = bytes.len() as u64;
    let near =
        [0, 1, len, len.wrapping_add(1), len.wrapping_sub(1), 1 << 16, 1 << 20, 1 << 24, 1 << 31, 1 << 32];
    let far = [u64::MAX, u64::MAX >> 1, 1 << 63, 1 << 40, random.next_u64() >> random.below(64)];
    let choice = index(random, near.len() + far.len());
    let value = near.iter().chain(&far).nth(choice).copied().unwrap_or_default();
    let at = index(random, bytes.len().saturating_sub(width) + 1);
    let Some(field) = bytes.get_mut(at..at + width) else { return };
    if random.per_mille(500) {
        field.copy_from_slice(&value.to_le_bytes()[..width]);
    } else {
        field.copy_from_slice(&value.to_be_bytes()[8 - width..]);
    }
}

fn remove(random: &mut Random, bytes: &mut Vec<u8>) {
    let (from, to) = range(random, bytes.len());
    bytes.drain(from..to);
}

fn repeat(random: &mut Random, bytes: &mut Vec<u8>) {
    let (from, to) = range(random, bytes.len());
    let piece = bytes[from..to].repeat(1 + index(random, 8));
    bytes.splice(to..to, piece);
}

/// Puts a piece of `other` in, before what stood there or instead of it.
fn splice(random: &mut Random, bytes: &mut Vec<u8>, other: &[u8]) {
    let (from, to) = range(random, other.len());
    let (start, end) = range(random, bytes.len());
    let end = if random.per_mille(500) { start } else { end };
    bytes.splice(start..end, other[from..to].iter().copied());
}

fn range(random: &mut Random, len: usize) -> (usize, usize) {
    let (a, b) = (index(random, len + 1), index(random, len + 1));
    (a.min(b), a.max(b))
}

fn index(random: &mut Random, len: usize) -> usize {
    random.below(len as u64) as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_seed_gives_the_same_damage_and_another_seed_another() {
        let all = |seed| {
            let mut random = Random::new(seed);
            (0..100).map(|_| mutate(&mut random, b"a message of 23 bytes..", b"another")).collect::<Vec<_>>()
        };
        assert_eq!(all(1), all(1));
        assert_ne!(all(1), all(2));
    }

    #[test]
    fn inputs_shrink_and_grow_within_bounds_and_need_no_bytes() {
        let mut random = Random::new(3);
        let made: Vec<_> = (0..2000).map(|_| mutate(&mut random, &[7; 1 << 15], &[])).collect();
        assert!(made.iter().any(|bytes| bytes.len() < 1 << 15));
        assert!(made.iter().any(|bytes| bytes.len() > 1 << 15));
        assert!(made.iter().all(|bytes| bytes.len() <= MAX_BYTES));
        for _ in 0..2000 {
            mutate(&mut random, &[], &[]);
        }
    }
}
