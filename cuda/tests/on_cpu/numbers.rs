//! Pseudo-random numbers, and bf16.

use half::bf16;
use terrace_kit::Dice;

/// A generator of pseudo-random numbers.
pub(crate) struct Noise(Dice);

impl Noise {
    pub(crate) fn new(seed: u64) -> Self {
        Self(Dice::new(seed))
    }

    /// Returns a number below a bound.
    pub(crate) fn below(&mut self, bound: usize) -> usize {
        self.0.place(bound)
    }

    /// Returns a number from -1 to 1.
    pub(crate) fn number(&mut self) -> f32 {
        self.0.around_zero()
    }

    pub(crate) fn numbers(&mut self, count: usize, scale: f32) -> Vec<f32> {
        (0..count).map(|_| self.number() * scale).collect()
    }

    /// Returns numbers as bf16.
    pub(crate) fn narrow(&mut self, count: usize, scale: f32) -> Vec<u16> {
        (0..count).map(|_| narrow(self.number() * scale)).collect()
    }

    /// Returns all numbers below a bound, shuffled.
    pub(crate) fn shuffled(&mut self, count: usize) -> Vec<u32> {
        let mut all: Vec<u32> = (0..count as u32).collect();
        self.0.shuffle(&mut all);
        all
    }
}

pub(crate) fn narrow(number: f32) -> u16 {
    bf16::from_f32(number).to_bits()
}

pub(crate) fn wide(number: u16) -> f32 {
    bf16::from_bits(number).to_f32()
}

/// Rounds a number to bf16 and back.
pub(crate) fn rounded(number: f32) -> f32 {
    wide(narrow(number))
}

/// Asserts that each number of a kernel is near the expected one, within an absolute and a relative
/// tolerance.
#[track_caller]
pub(crate) fn assert_near(found: &[u16], expected: &[f32], tolerance: f32, what: &str) {
    assert_eq!(found.len(), expected.len(), "{what}");
    for (at, (&found, &expected)) in found.iter().zip(expected).enumerate() {
        let found = wide(found);
        let is_near = (found - expected).abs() <= tolerance * expected.abs().max(1.0);
        assert!(is_near, "{what}: number {at} is {found}, not {expected}");
    }
}
