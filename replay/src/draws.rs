//! What made-up requests and failures draw, computed without the system's mathematics: it is the same on every
//! machine.

use terrace_kit::Dice;

pub(crate) trait Draws {
    /// True in this share of cases. Nothing is drawn where there is nothing to decide.
    fn happens(&mut self, rate: f64) -> bool;
    /// True in so many of a hundred cases.
    fn percent(&mut self, chance: u64) -> bool;
    /// Times between events that know nothing of each other.
    fn exponential(&mut self, mean: f64) -> f64;
    /// Lengths and times as they are in practice: half are below the median, and a few are far above.
    /// `spread` is the standard deviation of the logarithm.
    fn skewed(&mut self, median: f64, spread: f64) -> f64;
    /// The same as a number of tokens within limits.
    fn skewed_tokens(&mut self, median: u32, spread: f64, most: u32) -> u32;
    /// A number from 1 on with this mean, each further one as likely as the one before.
    fn geometric(&mut self, mean: f64) -> u32;
    /// A place below `count`; the first are the most popular, the n-th about 1/n as much.
    fn popular(&mut self, count: u64) -> u64;
}

/// Above 0, and at most 1.
fn unit(dice: &mut Dice) -> f64 {
    ((dice.word() >> 11) + 1) as f64 / (1u64 << 53) as f64
}

impl Draws for Dice {
    fn happens(&mut self, rate: f64) -> bool {
        rate > 0.0 && self.share() < rate
    }

    fn percent(&mut self, chance: u64) -> bool {
        self.below(100) < chance
    }

    fn exponential(&mut self, mean: f64) -> f64 {
        -libm::log(unit(self)) * mean
    }

    fn skewed(&mut self, median: f64, spread: f64) -> f64 {
        let radius = libm::sqrt(-2.0 * libm::log(unit(self)));
        let normal = radius * libm::cos(2.0 * std::f64::consts::PI * unit(self));
        median * libm::exp(spread * normal)
    }

    fn skewed_tokens(&mut self, median: u32, spread: f64, most: u32) -> u32 {
        (self.skewed(median.into(), spread) as u32).clamp(1, most)
    }

    fn geometric(&mut self, mean: f64) -> u32 {
        let stop = 1.0 / mean;
        let mut count = 1;
        while count < 1000 && unit(self) > stop {
            count += 1;
        }
        count
    }

    fn popular(&mut self, count: u64) -> u64 {
        let place = libm::exp(unit(self) * libm::log(count as f64 + 1.0)) as u64;
        place.clamp(1, count) - 1
    }
}
