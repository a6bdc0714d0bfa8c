//! A small pseudo-random generator: the same seed gives the same numbers on every machine.

/// Increment of SplitMix64.
const STRIDE: u64 = 0x9e37_79b9_7f4a_7c15;

/// A seeded generator. Snapshots and published figures depend on its numbers, so they must not
/// change.
#[derive(Clone, Debug)]
pub struct Dice(u64);

impl Dice {
    /// Creates a generator. Seeds are mixed, so that adjacent ones are independent.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0xd134_2543_de82_ef95).wrapping_add(1))
    }

    /// Returns 64 bits.
    pub fn word(&mut self) -> u64 {
        let word = mixed(self.0);
        self.0 = self.0.wrapping_add(STRIDE);
        word
    }

    /// Returns a number below `bound`.
    ///
    /// # Panics
    /// Panics if the bound is 0.
    pub fn below(&mut self, bound: u64) -> u64 {
        self.word() % bound
    }

    /// Returns an index of a list of this length.
    ///
    /// # Panics
    /// Panics if the list is empty.
    pub fn place(&mut self, length: usize) -> usize {
        self.below(length as u64) as usize
    }

    /// Returns true with a probability of one in `bound`.
    ///
    /// # Panics
    /// Panics if the bound is 0.
    pub fn one_in(&mut self, bound: u64) -> bool {
        self.below(bound) == 0
    }

    /// Returns one of the elements.
    ///
    /// # Panics
    /// Panics if there is none.
    pub fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.place(from.len())]
    }

    /// Returns a number in [0, 1).
    pub fn share(&mut self) -> f64 {
        (self.word() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// Returns a number in [-1, 1).
    pub fn around_zero(&mut self) -> f32 {
        (self.word() >> 40) as f32 / (1u32 << 23) as f32 - 1.0
    }

    /// Returns `count` tokens of a vocabulary.
    ///
    /// # Panics
    /// Panics if the vocabulary is empty.
    pub fn tokens(&mut self, count: usize, vocabulary: usize) -> Vec<u32> {
        (0..count).map(|_| self.place(vocabulary) as u32).collect()
    }

    /// Shuffles a list.
    pub fn shuffle<T>(&mut self, items: &mut [T]) {
        for last in (1..items.len()).rev() {
            items.swap(last, self.place(last + 1));
        }
    }
}

/// Returns SplitMix64 at a place of its sequence: numbers of adjacent places are independent.
#[must_use]
pub fn mixed(place: u64) -> u64 {
    let word = place.wrapping_add(STRIDE);
    let word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    word ^ (word >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The first numbers of SplitMix64 from state 0, as its reference implementation prints them.
    #[test]
    fn numbers_are_those_of_splitmix64() {
        let mut dice = Dice(0);
        let words = [(); 3].map(|()| dice.word());
        assert_eq!(words, [0xe220_a839_7b1d_cdaf, 0x6e78_9e6a_a1b9_65f4, 0x06c4_5d18_8009_454f]);
        assert_eq!(mixed(0), words[0]);
    }

    #[test]
    fn draws_stay_within_their_bounds_and_reach_them() {
        let mut dice = Dice::new(7);
        let drawn: Vec<u64> = (0..1000).map(|_| dice.below(10)).collect();
        assert!((0..10).all(|number| drawn.contains(&number)));
        let shares: Vec<f64> = (0..1000).map(|_| dice.share()).collect();
        assert!(shares.iter().all(|share| (0.0..1.0).contains(share)));
        let mean = shares.iter().sum::<f64>() / 1000.0;
        assert!((0.45..0.55).contains(&mean), "{mean}");
        let around_zero: Vec<f32> = (0..1000).map(|_| dice.around_zero()).collect();
        assert!(around_zero.iter().any(|number| *number < -0.9));
        assert!(around_zero.iter().all(|number| (-1.0..1.0).contains(number)));
    }

    #[test]
    fn shuffle_keeps_items() {
        let mut items: Vec<u32> = (0..100).collect();
        Dice::new(1).shuffle(&mut items);
        assert!(!items.is_sorted());
        items.sort_unstable();
        assert!(items.into_iter().eq(0..100));
    }

    #[test]
    fn adjacent_seeds_are_independent() {
        let words = |seed| {
            let mut dice = Dice::new(seed);
            [(); 8].map(|()| dice.word())
        };
        assert!(words(1).iter().all(|word| !words(2).contains(word)));
    }
}
