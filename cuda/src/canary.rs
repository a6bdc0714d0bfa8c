//! Canaries: pages that are compared on both sides after a copy.

/// The share of pages that is compared. The copy thread computes the host side at a few GB/s.
/// Comparing every page is worth that cost in debugging; comparing a few is always affordable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CanaryConfig {
    /// Sampling interval: one of this many copied pages is compared, counted over all copies of a
    /// direction. 1 compares every page.
    pub one_page_in: u32,
}

/// Selects the pages of copies to compare.
#[derive(Debug)]
pub(crate) struct Sampler {
    one_in: usize,
    /// Pages until the next that is compared.
    left: usize,
}

impl Sampler {
    pub(crate) fn new(config: CanaryConfig) -> Self {
        Self { one_in: config.one_page_in.max(1) as usize, left: 0 }
    }

    /// Returns the largest number of pages of a copy that are compared.
    pub(crate) fn samples_max(&self, pages: usize) -> usize {
        pages.div_ceil(self.one_in)
    }

    /// Returns the pages of a copy to compare.
    pub(crate) fn next(&mut self, pages: usize) -> Vec<usize> {
        let samples: Vec<usize> = (self.left..pages).step_by(self.one_in).collect();
        self.left = match samples.last() {
            Some(last) => last + self.one_in - pages,
            None => self.left - pages,
        };
        samples
    }
}

/// Returns the checksum of a page, which the device computes as well (`checksums` in `copy.cu`). It
/// is the sum of a mix of each 8-byte word and its place, so it can be computed in any order and
/// detects moved words.
#[must_use]
pub fn checksum(page: &[u8]) -> u64 {
    let (words, rest) = page.as_chunks::<8>();
    let mut last = [0; 8];
    last[..rest.len()].copy_from_slice(rest);
    let last = (!rest.is_empty()).then_some(last);
    let words = words.iter().copied().chain(last).map(u64::from_le_bytes);
    words.zip(0..).fold(0, |sum, (word, place)| sum.wrapping_add(mixed(word, place)))
}

fn mixed(word: u64, place: u64) -> u64 {
    const MULTIPLIER: u64 = 0xd6e8_feb8_6659_fd93;
    let place = (place + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let mix = (word ^ place).wrapping_mul(MULTIPLIER);
    let mix = (mix ^ mix >> 32).wrapping_mul(MULTIPLIER);
    mix ^ mix >> 32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_at_the_configured_interval_across_copies() {
        let mut sampler = Sampler::new(CanaryConfig { one_page_in: 4 });
        let sampled: Vec<_> = [1, 2, 6, 3, 0, 9].map(|pages| sampler.next(pages)).into();
        assert_eq!(sampled, [vec![0], vec![], vec![1, 5], vec![], vec![], vec![0, 4, 8]]);
        assert_eq!(Sampler::new(CanaryConfig { one_page_in: 1 }).next(3), [0, 1, 2]);
        assert_eq!(Sampler::new(CanaryConfig { one_page_in: 0 }).next(2), [0, 1], "as with 1");
    }

    #[test]
    fn checksum_depends_on_bytes_and_places() {
        let page: Vec<u8> = (0..1001_u32).map(|at| (at * 7 % 251) as u8).collect();
        let sum = checksum(&page);
        for at in [0, 7, 8, 500, 999, 1000] {
            let mut other = page.clone();
            other[at] ^= 1;
            assert_ne!(checksum(&other), sum, "byte {at}");
        }
        let mut swapped = page;
        swapped[0..16].rotate_left(8);
        assert_ne!(checksum(&swapped), sum, "words that have changed places");
        // Computed independently in Python.
        assert_eq!(checksum(&[]), 0);
        assert_eq!(checksum(&[1]), 0x5d94_54d9_f995_10a2);
        assert_eq!(checksum(&[0; 8]), 0x873e_6848_2833_18eb);
        assert_eq!(sum, 0xc06c_8cb1_e967_a3fa);
    }
}
