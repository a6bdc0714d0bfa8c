//! From logits to a token.

pub(crate) mod grammar;
pub(crate) mod logprobs;
pub(crate) mod shaping;

use terrace_scheduler::Token;
use xxhash_rust::xxh3::xxh3_64_with_seed;

use logprobs::{by_likelihood, keep_likeliest};

/// How the next token is chosen.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampling {
    /// 0 takes the likeliest token; higher is more varied.
    pub temperature: f32,
    /// Only so many of the likeliest tokens are considered; 0 for all.
    pub top_k: u32,
    /// Of those, only the likeliest tokens that together have this probability.
    pub top_p: f32,
    /// Only tokens that have at least this share of the likeliest one's probability are considered.
    pub min_p: f32,
    /// What the draws depend on. The n-th token of a request depends on the seed, n and the logits,
    /// and on nothing else.
    pub seed: u64,
}

impl Sampling {
    /// Always the likeliest token; of equals, the lowest.
    pub const GREEDY: Sampling =
        Sampling { temperature: 0.0, top_k: 0, top_p: 1.0, min_p: 0.0, seed: 0 };
}

/// Chooses tokens; keeps the memory that it needs for it.
#[derive(Debug, Default)]
pub struct Sampler {
    candidates: Vec<(f32, Token)>,
}

impl Sampler {
    /// The `index`-th new token of a request.
    ///
    /// # Panics
    /// When there are no logits.
    pub fn choose(&mut self, logits: &[f32], sampling: &Sampling, index: u32) -> Token {
        let likeliest = likeliest(logits);
        if sampling.temperature <= 0.0 || !logits[likeliest as usize].is_finite() {
            return likeliest;
        }
        self.weigh(logits, logits[likeliest as usize], sampling);
        if sampling.top_k > 0 {
            keep_likeliest(&mut self.candidates, sampling.top_k as usize);
        }
        if sampling.top_p < 1.0 {
            self.keep_share(sampling.top_p);
        }
        let total: f64 = self.candidates.iter().map(|&(weight, _)| f64::from(weight)).sum();
        let mut left = uniform(sampling.seed, index) * total;
        for &(weight, token) in &self.candidates {
            left -= f64::from(weight);
            if left < 0.0 {
                return token;
            }
        }
        likeliest
    }

    /// The tokens that are possible at all, each with its weight; the likeliest has weight 1.
    fn weigh(&mut self, logits: &[f32], highest: f32, sampling: &Sampling) {
        self.candidates.clear();
        let weighed = logits.iter().zip(0..).filter_map(|(&logit, token)| {
            let weight = ((logit - highest) / sampling.temperature).exp();
            (weight > 0.0 && weight >= sampling.min_p).then_some((weight, token))
        });
        self.candidates.extend(weighed);
    }

    /// Keeps the shortest list of likeliest tokens that has the share `top_p` of all weight. Few usually
    /// have it, so no more are put in order than are needed.
    fn keep_share(&mut self, top_p: f32) {
        const AT_FIRST: usize = 64;
        let total: f64 = self.candidates.iter().map(|&(weight, _)| f64::from(weight)).sum();
        let mut left = f64::from(top_p) * total;
        let (mut kept, mut ordered, mut more) = (0, 0, AT_FIRST);
        while left > 0.0 && kept < self.candidates.len() {
            if kept == ordered {
                let rest = &mut self.candidates[ordered..];
                let next = more.min(rest.len());
                if next < rest.len() {
                    rest.select_nth_unstable_by(next - 1, by_likelihood);
                }
                rest[..next].sort_unstable_by(by_likelihood);
                (ordered, more) = (ordered + next, more * 4);
            }
            left -= f64::from(self.candidates[kept].0);
            kept += 1;
        }
        if kept == 0 {
            keep_likeliest(&mut self.candidates, 1);
        } else {
            self.candidates.truncate(kept);
        }
    }
}

fn likeliest(logits: &[f32]) -> Token {
    assert!(!logits.is_empty(), "a model has at least one token");
    let mut best = 0;
    for (place, &logit) in logits.iter().enumerate() {
        if logit > logits[best] || logits[best].is_nan() {
            best = place;
        }
    }
    best as Token
}

/// A number from 0 up to but not including 1.
fn uniform(seed: u64, index: u32) -> f64 {
    let bits = xxh3_64_with_seed(&index.to_le_bytes(), seed);
    (bits >> 11) as f64 / (1u64 << 53) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counts(logits: &[f32], temperature: f32, top_p: f32) -> Vec<usize> {
        let mut sampler = Sampler::default();
        let mut counts = vec![0; logits.len()];
        for index in 0..10_000 {
            let sampling = Sampling { temperature, top_p, seed: 7, ..Sampling::GREEDY };
            counts[sampler.choose(logits, &sampling, index) as usize] += 1;
        }
        counts
    }

    #[test]
    fn greedy_takes_the_first_of_the_likeliest() {
        let mut sampler = Sampler::default();
        assert_eq!(sampler.choose(&[0.0, 3.0, -1.0, 3.0], &Sampling::GREEDY, 0), 1);
        assert_eq!(sampler.choose(&[f32::NAN, -2.0], &Sampling::GREEDY, 0), 1);
    }

    #[test]
    fn tokens_come_as_often_as_their_probability_says() {
        let counts = counts(&[0.0, (3.0f32).ln(), f32::NEG_INFINITY], 1.0, 1.0);
        assert_eq!(counts[2], 0);
        let share = counts[1] as f64 / 10_000.0;
        assert!((0.73..0.77).contains(&share), "{share} of the draws, three quarters expected");
    }

    #[test]
    fn a_high_temperature_levels_and_a_low_one_sharpens() {
        let logits = [0.0, 1.0];
        let (low, plain, high) =
            (counts(&logits, 0.2, 1.0), counts(&logits, 1.0, 1.0), counts(&logits, 5.0, 1.0));
        assert!(low[0] < plain[0] && plain[0] < high[0], "{low:?} {plain:?} {high:?}");
    }

    #[test]
    fn top_p_leaves_the_unlikely_out() {
        // Probabilities of about 0.64, 0.24, 0.09, 0.03.
        let logits = [3.0, 2.0, 1.0, 0.0];
        assert_eq!(counts(&logits, 1.0, 0.5)[1..], [0, 0, 0]);
        let two = counts(&logits, 1.0, 0.8);
        assert!(two[1] > 0 && two[2] == 0, "{two:?}");
        assert_eq!(counts(&logits, 1.0, 0.0)[0], 10_000, "the likeliest always stays");
    }

    #[test]
    fn the_same_seed_draws_the_same_and_another_does_not() {
        let logits: Vec<f32> = (0..50).map(|token| (token % 7) as f32 / 3.0).collect();
        let draw = |seed| -> Vec<Token> {
            let mut sampler = Sampler::default();
            let sampling = Sampling { temperature: 1.0, seed, ..Sampling::GREEDY };
            (0..32).map(|index| sampler.choose(&logits, &sampling, index)).collect()
        };
        assert_eq!(draw(1), draw(1));
        assert_ne!(draw(1), draw(2));
    }

    /// How often each token was drawn.
    fn drawn(logits: &[f32], sampling: Sampling) -> Vec<usize> {
        let mut sampler = Sampler::default();
        let mut counts = vec![0; logits.len()];
        for index in 0..5_000 {
            counts[sampler.choose(logits, &sampling, index) as usize] += 1;
        }
        counts
    }

    #[test]
    fn top_k_leaves_so_many() {
        let sampling = |top_k| Sampling { temperature: 1.0, top_k, ..Sampling::GREEDY };
        let logits = [0.0, 0.3, 0.1, 0.2, 0.3];
        let possible = |top_k| {
            let counts = drawn(&logits, sampling(top_k));
            (0..counts.len()).filter(|token| counts[*token] > 0).collect::<Vec<_>>()
        };
        assert_eq!(possible(1), [1], "of equals the lower");
        assert_eq!(possible(3), [1, 3, 4]);
        assert_eq!(possible(0).len(), 5);
        assert_eq!(possible(99).len(), 5);
    }

    #[test]
    fn top_p_is_a_share_of_what_top_k_left() {
        // Half and half of the two that stay: the first has the share of 0.45, though of all four it has
        // only a quarter.
        let sampling = Sampling { temperature: 1.0, top_k: 2, top_p: 0.45, ..Sampling::GREEDY };
        assert_eq!(drawn(&[1.0; 4], sampling), [5_000, 0, 0, 0]);
    }

    #[test]
    fn min_p_is_a_share_of_the_likeliest() {
        let sampling = Sampling { temperature: 1.0, min_p: 0.4, ..Sampling::GREEDY };
        let counts = drawn(&[0.0, (0.5f32).ln(), (0.3f32).ln()], sampling);
        assert!(counts[0] > 0 && counts[1] > 0, "{counts:?}");
        assert_eq!(counts[2], 0);
    }

    #[test]
    fn a_share_of_many_equals_is_found_without_ordering_all() {
        let logits = [0.0; 1_000];
        let sampling = Sampling { temperature: 1.0, top_p: 0.25, ..Sampling::GREEDY };
        let counts = drawn(&logits, sampling);
        assert!(counts[250..].iter().all(|count| *count == 0), "the lowest 250 have the share");
        assert!(counts[..250].iter().all(|count| *count > 0));
    }
}
