//! Numbers that look random and are the same each time.

/// A deterministic source of numbers: SplitMix64 (Steele, Lea and Flood, OOPSLA 2014). The same seed gives the
/// same numbers on every machine and in every release.
#[derive(Debug, Clone)]
pub struct Random(u64);

impl Random {
    /// The source that this seed stands for.
    pub const fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// The next number, any of the 2^64.
    pub const fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.0)
    }

    /// The next number, below `limit`; zero when that is zero.
    pub const fn below(&mut self, limit: u64) -> u64 {
        // The upper half of the product spreads evenly enough for limits far below 2^64.
        ((self.next_u64() as u128 * limit as u128) >> 64) as u64
    }

    /// Whether something happens that happens this many times in a thousand.
    pub const fn per_mille(&mut self, times: u16) -> bool {
        self.below(1000) < times as u64
    }
}

/// Spreads the bits of a number over all of it.
pub(crate) const fn mix(number: u64) -> u64 {
    let number = (number ^ (number >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let number = (number ^ (number >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    number ^ (number >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_numbers_are_those_of_the_published_generator() {
        let mut random = Random::new(1_234_567);
        assert_eq!(random.next_u64(), 6_457_827_717_110_365_317);
        assert_eq!(random.next_u64(), 3_203_168_211_198_807_973);
    }

    #[test]
    fn numbers_stay_below_their_limit_and_reach_everything_below_it() {
        let mut random = Random::new(7);
        let mut seen = [false; 10];
        for _ in 0..1000 {
            seen[random.below(10) as usize] = true;
        }
        assert_eq!(seen, [true; 10]);
        assert_eq!(random.below(0), 0);
        assert!((0..1000).all(|_| random.per_mille(1000)));
        assert!(!(0..1000).any(|_| random.per_mille(0)));
    }
}
