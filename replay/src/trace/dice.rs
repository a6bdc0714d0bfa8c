//! What made-up requests draw, computed without the system's mathematics.

use crate::dice::Dice;

impl Dice {
    /// Above 0, and at most 1.
    fn unit(&mut self) -> f64 {
        ((self.word() >> 11) + 1) as f64 / (1u64 << 53) as f64
    }

    /// A place among `count`.
    pub(super) fn one_of(&mut self, count: u64) -> u64 {
        self.word() % count
    }

    /// True in so many of a hundred cases.
    pub(super) fn percent(&mut self, chance: u64) -> bool {
        self.one_of(100) < chance
    }

    /// Times between events that know nothing of each other.
    pub(crate) fn exponential(&mut self, mean: f64) -> f64 {
        -libm::log(self.unit()) * mean
    }

    /// Lengths and times as they are in practice: half are below the median, and a few are far above.
    /// `spread` is the standard deviation of the logarithm.
    pub(crate) fn skewed(&mut self, median: f64, spread: f64) -> f64 {
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
