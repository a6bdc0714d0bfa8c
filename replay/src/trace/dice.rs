//! Pseudo-random numbers that are the same on every machine.

/// Splitmix64, and distributions that are computed without the system's mathematics.
#[derive(Clone, Debug)]
pub(super) struct Dice(u64);

impl Dice {
    /// Seeds are spread, so that neighbours have nothing in common.
    pub(super) fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0xD134_2543_DE82_EF95).wrapping_add(1))
    }

    fn word(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut word = self.0;
        word = (word ^ (word >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        word = (word ^ (word >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        word ^ (word >> 31)
    }

    /// Above 0, and at most 1.
    fn unit(&mut self) -> f64 {
        ((self.word() >> 11) + 1) as f64 / (1u64 << 53) as f64
    }

    /// A number below `bound`.
    pub(super) fn below(&mut self, bound: u64) -> u64 {
        self.word() % bound
    }

    /// True in so many of a hundred cases.
    pub(super) fn percent(&mut self, chance: u64) -> bool {
        self.below(100) < chance
    }

    /// Times between events that know nothing of each other.
    pub(super) fn exponential(&mut self, mean: f64) -> f64 {
        -libm::log(self.unit()) * mean
    }

    /// Lengths and times as they are in practice: half are below the median, and a few are far above.
    /// `spread` is the standard deviation of the logarithm.
    pub(super) fn skewed(&mut self, median: f64, spread: f64) -> f64 {
        let radius = libm::sqrt(-2.0 * libm::log(self.unit()));
        let normal = radius * libm::cos(2.0 * std::f64::consts::PI * self.unit());
        median * libm::exp(spread * normal)
    }

    /// The same as a number of tokens within limits.
    pub(super) fn tokens(&mut self, median: u32, spread: f64, most: u32) -> u32 {
        (self.skewed(median.into(), spread) as u32).clamp(1, most)
    }

    /// A number from 1 on with this mean, each further one as likely as the one before.
    pub(super) fn geometric(&mut self, mean: f64) -> u32 {
        let stop = 1.0 / mean;
        let mut count = 1;
        while count < 1000 && self.unit() > stop {
            count += 1;
        }
        count
    }

    /// A place below `count`; the first are the most popular, the n-th about 1/n as much.
    pub(super) fn popular(&mut self, count: u64) -> u64 {
        let place = libm::exp(self.unit() * libm::log(count as f64 + 1.0)) as u64;
        place.clamp(1, count) - 1
    }
}
