//! Numbers that look random, and bf16.

use half::bf16;
use terrace_kit::Dice;

/// Numbers that look random, the same for the same seed.
pub(crate) struct Noise(Dice);

impl Noise {
    pub(crate) fn new(seed: u64) -> Self {
        Self(Dice::new(seed))
    }

    /// Below a bound.
    pub(crate) fn below(&mut self, bound: usize) -> usize {
        self.0.place(bound)
    }

    /// From -1 to 1.
    pub(crate) fn number(&mut self) -> f32 {
        self.0.around_zero()
    }

    pub(crate) fn numbers(&mut self, count: usize, scale: f32) -> Vec<f32> {
        (0..count).map(|_| self.number() * scale).collect()
    }

    /// As bf16.
    pub(crate) fn narrow(&mut self, count: usize, scale: f32) -> Vec<u16> {
        (0..count).map(|_| narrow(self.number() * scale)).collect()
    }

    /// All numbers up to a bound, in any order.
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

/// As it is after it was kept in bf16.
pub(crate) fn rounded(number: f32) -> f32 {
    wide(narrow(number))
}

/// Each number of a kernel is the one expected, but for so much, and for as much of its own size.
#[track_caller]
pub(crate) fn assert_near(found: &[u16], expected: &[f32], tolerance: f32, what: &str) {
    assert_eq!(found.len(), expected.len(), "{what}");
    for (at, (&found, &expected)) in found.iter().zip(expected).enumerate() {
        let found = wide(found);
        let is_near = (found - expected).abs() <= tolerance * expected.abs().max(1.0);
        assert!(is_near, "{what}: number {at} is {found}, not {expected}");
    }
}
