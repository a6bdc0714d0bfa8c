//! A small generator of pseudo-random numbers: the same seed gives the same failures and the same
//! made-up requests, on every machine.

/// Splitmix64.
#[derive(Clone, Debug)]
pub(crate) struct Dice(u64);

impl Dice {
    /// Seeds are spread, so that neighbours have nothing in common.
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0xD134_2543_DE82_EF95).wrapping_add(1))
    }

    pub(crate) fn word(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut word = self.0;
        word = (word ^ (word >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        word = (word ^ (word >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        word ^ (word >> 31)
    }

    /// A number below `bound`.
    pub(crate) fn below(&mut self, bound: u32) -> u32 {
        ((u128::from(self.word()) * u128::from(bound)) >> 64) as u32
    }

    /// True in this share of cases. Nothing is drawn where there is nothing to decide.
    pub(crate) fn happens(&mut self, rate: f64) -> bool {
        rate > 0.0 && (self.word() >> 11) as f64 / ((1u64 << 53) as f64) < rate
    }
}
