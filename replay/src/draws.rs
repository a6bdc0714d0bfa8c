//! Random draws for synthetic requests and failures. They avoid the system's math library, so they
//! are the same on every machine.

use terrace_kit::Dice;

pub(crate) trait Draws {
    /// Returns true with this probability. Rates of 0 and 1 consume no randomness.
    fn happens(&mut self, rate: f64) -> bool;
    /// Returns true with a probability of `chance` percent.
    fn percent(&mut self, chance: u64) -> bool;
    /// Returns an exponentially distributed time.
    fn exponential(&mut self, mean: f64) -> f64;
    /// Returns a log-normal length or time. `spread` is the standard deviation of the logarithm.
    fn skewed(&mut self, median: f64, spread: f64) -> f64;
    /// Returns a log-normal number of tokens within limits.
    fn skewed_tokens(&mut self, median: u32, spread: f64, most: u32) -> u32;
    /// Returns a geometrically distributed number from 1 on.
    fn geometric(&mut self, mean: f64) -> u32;
    /// Returns a Zipf-distributed place below `count`: the n-th has about 1/n of the popularity of
    /// the first.
    fn popular(&mut self, count: u64) -> u64;
}

/// Returns a number above 0 and at most 1.
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
