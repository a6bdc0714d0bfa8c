//! Sampling: the choice of a token by logits.

pub(crate) mod chooser;
pub(crate) mod grammar;
pub(crate) mod logprobs;
pub(crate) mod shaping;

use std::sync::Arc;

use terrace_scheduler::Token;
use xxhash_rust::xxh3::xxh3_64_with_seed;

use logprobs::{by_likelihood, likeliest_of};
use shaping::Shaping;

/// Parameters by which the tokens of an answer are chosen, and the information to return with them.
#[derive(Clone, Debug, PartialEq)]
pub struct Choosing {
    /// Sampling parameters.
    pub sampling: Sampling,
    /// Changes to the logits before sampling.
    pub shaping: Shaping,
    /// Tokens that end the answer; they are suppressed below the minimum length.
    pub ends: Arc<[Token]>,
    /// The prompt, if a repetition penalty applies; empty otherwise.
    pub prompt: Vec<Token>,
    /// Reports the log-probability of each token, and of this number of the likeliest alternatives.
    pub logprobs: Option<u32>,
    /// Returns the logits.
    pub logits: bool,
}

impl Choosing {
    /// Returns whether logits are changed before sampling.
    fn shapes(&self) -> bool {
        self.shaping != Shaping::default()
    }
}

/// Sampling parameters.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampling {
    /// Temperature; 0 takes the likeliest token.
    pub temperature: f32,
    /// Number of likeliest tokens to sample from; 0 for all.
    pub top_k: u32,
    /// Samples from the likeliest of these tokens up to this total probability.
    pub top_p: f32,
    /// Excludes tokens below this share of the likeliest token's probability.
    pub min_p: f32,
    /// Seed. The n-th token of a request is a function of the seed, n and the logits alone.
    pub seed: u64,
}

impl Sampling {
    /// Always takes the likeliest token; the lowest id of equals.
    pub const GREEDY: Sampling =
        Sampling { temperature: 0.0, top_k: 0, top_p: 1.0, min_p: 0.0, seed: 0 };
}

/// A token sampler that keeps its buffers.
#[derive(Debug, Default)]
pub struct Sampler {
    candidates: Vec<(f32, Token)>,
}

impl Sampler {
    /// Chooses the `index`-th new token of a request.
    ///
    /// # Panics
    /// Panics if there are no logits.
    pub fn choose(&mut self, logits: &[f32], sampling: &Sampling, index: u32) -> Token {
        let likeliest = likeliest(logits);
        if sampling.temperature <= 0.0 || !logits[likeliest as usize].is_finite() {
            return likeliest;
        }
        self.weigh(logits, logits[likeliest as usize], sampling);
        if sampling.top_p < 1.0 {
            let share = f64::from(sampling.top_p) * self.total();
            let kept = self.reach(share, |left| left <= 0.0);
            self.candidates.truncate(kept.max(1));
        }
        let drawn = uniform(sampling.seed, index) * self.total();
        let place = match sampling.top_k > 0 || sampling.top_p < 1.0 {
            true => self.reach(drawn, |left| left < 0.0),
            // Without limits any order of candidates is valid, and token order needs no sort.
            false => walk(&self.candidates, drawn, |left| left < 0.0),
        };
        // Rounding may leave a small remainder.
        self.candidates.get(place.wrapping_sub(1)).map_or(likeliest, |&(_, token)| token)
    }

    /// Collects the tokens with a positive weight; the likeliest has weight 1. If only some of the
    /// likeliest are considered, these come in order.
    fn weigh(&mut self, logits: &[f32], highest: f32, sampling: &Sampling) {
        let weight = |logit: f32| ((logit - highest) / sampling.temperature).exp();
        let is_possible = |weight: f32| weight > 0.0 && weight >= sampling.min_p;
        let top_k = sampling.top_k as usize;
        if (1..logits.len()).contains(&top_k) {
            likeliest_of(logits, top_k, &mut self.candidates);
            self.candidates.iter_mut().for_each(|(logit, _)| *logit = weight(*logit));
            self.candidates.retain(|&(weight, _)| is_possible(weight));
            return;
        }
        self.candidates.clear();
        let weighed = logits.iter().zip(0..).map(|(&logit, token)| (weight(logit), token));
        self.candidates.extend(weighed.filter(|&(weight, _)| is_possible(weight)));
    }

    fn total(&self) -> f64 {
        self.candidates.iter().map(|&(weight, _)| f64::from(weight)).sum()
    }

    /// Returns the number of likeliest candidates whose weight satisfies `is_enough`, and moves
    /// them to the front. Usually few are enough. Only a small number is sorted in any case.
    fn reach(&mut self, weight: f64, is_enough: impl Fn(f64) -> bool) -> usize {
        const ORDERED_MAX: usize = 64;
        let (mut left, mut more, mut is_within) = (weight, ORDERED_MAX, false);
        let (mut first, mut end) = (0, self.candidates.len());
        // All candidates before `first` are needed, and none from `end` on.
        while end - first > ORDERED_MAX {
            let half = (end - first) / 2;
            let count = if is_within { half } else { more.min(half) };
            let rest = &mut self.candidates[first..end];
            rest.select_nth_unstable_by(count - 1, by_likelihood);
            let sum: f64 = rest[..count].iter().map(|&(weight, _)| f64::from(weight)).sum();
            if is_enough(left - sum) {
                (end, is_within) = (first + count, true);
            } else {
                (first, left, more) = (first + count, left - sum, more * 4);
            }
        }
        let rest = &mut self.candidates[first..end];
        rest.sort_unstable_by(by_likelihood);
        let count = walk(rest, left, is_enough);
        // Rounding must not select a candidate outside the range.
        if is_within { (first + count).min(end) } else { first + count }
    }
}

/// Returns the number of candidates, in order, whose weight satisfies `is_enough` when it is
/// subtracted.
fn walk(candidates: &[(f32, Token)], weight: f64, is_enough: impl Fn(f64) -> bool) -> usize {
    let mut left = weight;
    let reaches = |&(weight, _): &(f32, Token)| {
        left -= f64::from(weight);
        is_enough(left)
    };
    candidates.iter().position(reaches).map_or(candidates.len() + 1, |place| place + 1)
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

/// Returns a pseudo-random number in [0, 1).
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
    fn greedy_takes_the_lowest_id_of_the_likeliest() {
        let mut sampler = Sampler::default();
        assert_eq!(sampler.choose(&[0.0, 3.0, -1.0, 3.0], &Sampling::GREEDY, 0), 1);
        assert_eq!(sampler.choose(&[f32::NAN, -2.0], &Sampling::GREEDY, 0), 1);
    }

    #[test]
    fn draws_follow_the_probabilities() {
        let counts = counts(&[0.0, (3.0f32).ln(), f32::NEG_INFINITY], 1.0, 1.0);
        assert_eq!(counts[2], 0);
        let share = counts[1] as f64 / 10_000.0;
        assert!((0.73..0.77).contains(&share), "{share} of the draws, three quarters expected");
    }

    #[test]
    fn temperature_flattens_or_sharpens() {
        let logits = [0.0, 1.0];
        let (low, plain, high) =
            (counts(&logits, 0.2, 1.0), counts(&logits, 1.0, 1.0), counts(&logits, 5.0, 1.0));
        assert!(low[0] < plain[0] && plain[0] < high[0], "{low:?} {plain:?} {high:?}");
    }

    #[test]
    fn top_p_excludes_unlikely_tokens() {
        // Probabilities of about 0.64, 0.24, 0.09, 0.03.
        let logits = [3.0, 2.0, 1.0, 0.0];
        assert_eq!(counts(&logits, 1.0, 0.5)[1..], [0, 0, 0]);
        let two = counts(&logits, 1.0, 0.8);
        assert!(two[1] > 0 && two[2] == 0, "{two:?}");
        assert_eq!(counts(&logits, 1.0, 0.0)[0], 10_000, "the likeliest always stays");
    }

    #[test]
    fn draws_depend_on_the_seed() {
        let logits: Vec<f32> = (0..50).map(|token| (token % 7) as f32 / 3.0).collect();
        let draw = |seed| -> Vec<Token> {
            let mut sampler = Sampler::default();
            let sampling = Sampling { temperature: 1.0, seed, ..Sampling::GREEDY };
            (0..32).map(|index| sampler.choose(&logits, &sampling, index)).collect()
        };
        assert_eq!(draw(1), draw(1));
        assert_ne!(draw(1), draw(2));
    }

    /// Counts the draws of each token.
    fn drawn(logits: &[f32], sampling: Sampling) -> Vec<usize> {
        let mut sampler = Sampler::default();
        let mut counts = vec![0; logits.len()];
        for index in 0..5_000 {
            counts[sampler.choose(logits, &sampling, index) as usize] += 1;
        }
        counts
    }

    #[test]
    fn top_k_keeps_k_tokens() {
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
    fn top_p_applies_after_top_k() {
        // Two tokens remain with a probability of one half each, so the first alone covers 0.45,
        // though it has only a quarter of all four.
        let sampling = Sampling { temperature: 1.0, top_k: 2, top_p: 0.45, ..Sampling::GREEDY };
        assert_eq!(drawn(&[1.0; 4], sampling), [5_000, 0, 0, 0]);
    }

    #[test]
    fn min_p_is_relative_to_the_likeliest() {
        let sampling = Sampling { temperature: 1.0, min_p: 0.4, ..Sampling::GREEDY };
        let counts = drawn(&[0.0, (0.5f32).ln(), (0.3f32).ln()], sampling);
        assert!(counts[0] > 0 && counts[1] > 0, "{counts:?}");
        assert_eq!(counts[2], 0);
    }

    #[test]
    fn top_p_of_many_equals_sorts_few() {
        let logits = [0.0; 1_000];
        let sampling = Sampling { temperature: 1.0, top_p: 0.25, ..Sampling::GREEDY };
        let counts = drawn(&logits, sampling);
        assert!(counts[250..].iter().all(|count| *count == 0), "the lowest 250 have the share");
        assert!(counts[..250].iter().all(|count| *count > 0));
    }

    /// Chooses a token with all candidates sorted.
    fn drawn_in_order(logits: &[f32], sampling: &Sampling, index: u32) -> Token {
        let highest = logits.iter().copied().fold(f32::MIN, f32::max);
        let weight = |logit: f32| ((logit - highest) / sampling.temperature).exp();
        let mut all: Vec<(f32, Token)> =
            logits.iter().zip(0..).map(|(&logit, token)| (weight(logit), token)).collect();
        all.sort_by(by_likelihood);
        if sampling.top_k > 0 {
            all.truncate(sampling.top_k as usize);
        }
        let total = |all: &[(f32, Token)]| all.iter().map(|it| f64::from(it.0)).sum::<f64>();
        let kept = walk(&all, f64::from(sampling.top_p) * total(&all), |left| left <= 0.0);
        all.truncate(kept);
        let place = walk(&all, uniform(sampling.seed, index) * total(&all), |left| left < 0.0);
        all[place - 1].1
    }

    #[test]
    fn partial_sort_draws_the_same_tokens() {
        let mut sampler = Sampler::default();
        for (seed, vocabulary) in [(1, 10), (2, 65), (3, 700), (4, 3_000)] {
            // A peaked distribution, and a nearly flat one.
            for spread in [8.0, 0.5] {
                let logits: Vec<f32> =
                    (0..vocabulary).map(|token| (uniform(seed, token) * spread) as f32).collect();
                for (top_k, top_p) in [(0, 0.3), (0, 0.95), (0, 0.999), (50, 1.0), (300, 0.9)] {
                    let sampling = Sampling { temperature: 0.8, top_k, top_p, min_p: 0.0, seed: 9 };
                    for index in 0..16 {
                        let drawn = sampler.choose(&logits, &sampling, index);
                        let expected = drawn_in_order(&logits, &sampling, index);
                        assert_eq!(drawn, expected, "{sampling:?} of {vocabulary} at {index}");
                    }
                }
            }
        }
    }
}
