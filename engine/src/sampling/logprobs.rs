//! Log-probabilities of tokens.

use std::ops::Range;

use terrace_scheduler::Token;

/// Log-probability of a token by the raw logits, before temperature, penalties and all other
/// changes. Logits are equal to the bit whether the KV before them was computed or loaded, and so
/// are these values.
#[derive(Clone, Debug, PartialEq)]
pub struct Logprobs {
    /// The token.
    pub token: Token,
    /// Natural logarithm of the probability.
    pub logprob: f32,
    /// The requested number of likeliest tokens, likeliest first; of equals, the lowest id first.
    pub top: Vec<(Token, f32)>,
}

/// Computes log-probabilities, and keeps its buffers.
#[derive(Debug, Default)]
pub struct Scorer {
    candidates: Vec<(f32, Token)>,
}

impl Scorer {
    /// Returns the log-probability of `token`, and the `top` likeliest tokens.
    pub fn score(&mut self, logits: &[f32], token: Token, top: u32) -> Logprobs {
        let (highest, total) = log_sum_exp(logits);
        let logprob = |logit: f32| (f64::from(logit) - highest - total) as f32;
        likeliest_of(logits, (top as usize).min(logits.len()), &mut self.candidates);
        Logprobs {
            token,
            logprob: logprob(logits[token as usize]),
            top: self.candidates.iter().map(|&(logit, token)| (token, logprob(logit))).collect(),
        }
    }
}

/// Collects the `count` likeliest tokens in order in `candidates`. It reads each logit once, and
/// stores and sorts at most a small multiple of `count`.
pub(super) fn likeliest_of(logits: &[f32], count: usize, candidates: &mut Vec<(f32, Token)>) {
    const ROOM_MIN: usize = 64;
    candidates.clear();
    if count == 0 {
        return;
    }
    let room = (2 * count).max(ROOM_MIN);
    // With `count` candidates, a token that is not likelier than the last is excluded: of equals,
    // the lower id comes first.
    let mut last = None;
    for (&logit, token) in logits.iter().zip(0..) {
        if last.is_some_and(|last| logit <= last || logit.is_nan()) {
            continue;
        }
        candidates.push((logit, token));
        if candidates.len() == room {
            candidates.select_nth_unstable_by(count - 1, by_likelihood);
            candidates.truncate(count);
            last = candidates.last().map(|&(logit, _)| number(logit));
        }
    }
    if count < candidates.len() {
        candidates.select_nth_unstable_by(count - 1, by_likelihood);
        candidates.truncate(count);
    }
    candidates.sort_unstable_by(by_likelihood);
}

/// Orders likelier tokens first, lower ids first among equals, and NaN last.
pub(super) fn by_likelihood(a: &(f32, Token), b: &(f32, Token)) -> std::cmp::Ordering {
    number(b.0).total_cmp(&number(a.0)).then(a.1.cmp(&b.1))
}

fn number(weight: f32) -> f32 {
    if weight.is_nan() { f32::NEG_INFINITY } else { weight }
}

/// Returns the highest logit, and the difference of the log-sum-exp to it, summed in token order.
fn log_sum_exp(logits: &[f32]) -> (f64, f64) {
    let highest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let highest = f64::from(highest);
    let sum: f64 = logits
        .iter()
        .map(|&logit| (f64::from(logit) - highest).exp())
        .filter(|weight| weight.is_finite())
        .sum();
    (highest, sum.ln())
}

/// Log-probabilities of a prompt's tokens, collected step by step.
#[derive(Debug)]
pub(crate) struct PromptScores {
    prompt: Vec<Token>,
    /// Scores of the tokens from the second on; the first has no predecessor.
    scores: Vec<Logprobs>,
}

impl PromptScores {
    pub(crate) fn new(prompt: Vec<Token>) -> Self {
        let scores = Vec::with_capacity(prompt.len().saturating_sub(1));
        Self { prompt, scores }
    }

    /// Returns the successors of the tokens at some positions.
    pub(crate) fn following(&self, positions: Range<u32>) -> &[Token] {
        let place = |position: u32| (position as usize + 1).min(self.prompt.len());
        &self.prompt[place(positions.start)..place(positions.end)]
    }

    /// Stores scores of the tokens behind the positions from `start` on, possibly again.
    pub(crate) fn take(&mut self, start: u32, scores: Vec<Logprobs>) {
        assert!(start as usize <= self.scores.len(), "a prompt that is scored is computed whole");
        self.scores.truncate(start as usize);
        self.scores.extend(scores);
    }

    pub(crate) fn into_scores(self) -> Vec<Logprobs> {
        self.scores
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn logprobs_match_the_logits() {
        let logits = [0.0, (3.0f32).ln(), f32::NEG_INFINITY, (4.0f32).ln()];
        let found = Scorer::default().score(&logits, 1, 3);
        let near = |logprob: f32, probability: f32| (logprob.exp() - probability).abs() < 1e-6;
        assert!(near(found.logprob, 0.375), "{found:?}");
        let tokens: Vec<_> = found.top.iter().map(|(token, _)| *token).collect();
        assert_eq!(tokens, [3, 1, 0]);
        assert_eq!(found.top[1].1, found.logprob, "both report the same number");
        assert!(near(found.top[0].1, 0.5) && near(found.top[2].1, 0.125), "{found:?}");
    }

    #[test]
    fn orders_equals_by_id_and_nan_last() {
        let logits = [1.0, f32::NAN, 2.0, 1.0, 2.0];
        let top = |count| {
            let found = Scorer::default().score(&logits, 0, count);
            found.top.into_iter().map(|(token, _)| token).collect::<Vec<_>>()
        };
        assert_eq!(top(3), [2, 4, 0]);
        assert_eq!(top(9), [2, 4, 0, 3, 1]);
        assert_eq!(top(0), [0; 0]);
    }

    #[test]
    fn huge_logits_do_not_overflow() {
        let found = Scorer::default().score(&[3e38, 3e38, -3e38], 2, 1);
        assert!((found.top[0].1 - (0.5f32).ln()).abs() < 1e-6);
        assert!(found.logprob < -1e38);
    }

    #[test]
    fn finds_the_likeliest_in_any_order() {
        let logits: Vec<f32> = (0..1_000_u32)
            .map(|token| match token % 101 {
                0 => f32::NAN,
                1 => f32::NEG_INFINITY,
                _ => (token.wrapping_mul(2_654_435_761) >> 26) as f32,
            })
            .collect();
        let mut all: Vec<(f32, Token)> = logits.iter().copied().zip(0..).collect();
        all.sort_by(by_likelihood);
        let tokens = |candidates: &[(f32, Token)]| -> Vec<Token> {
            candidates.iter().map(|(_, token)| *token).collect()
        };
        let mut found = Vec::new();
        for count in [0, 1, 2, 31, 32, 33, 100, 499, 500, 501, 990, 1_000] {
            likeliest_of(&logits, count, &mut found);
            assert_eq!(tokens(&found), tokens(&all[..count]), "{count} of them");
        }
    }

    #[test]
    fn scores_a_prompt_from_its_second_token_and_after_retries() {
        let mut scorer = Scorer::default();
        let mut scores = PromptScores::new(vec![0, 1, 1]);
        let rows = [[0.0, 1.0], [0.0, 2.0]].map(|row| scorer.score(&row, 1, 0));
        assert_eq!(scores.following(0..2), [1, 1]);
        scores.take(0, rows.to_vec());
        assert_eq!(scores.following(1..3), [1], "nothing follows the last");
        scores.take(1, rows[1..].to_vec());
        assert_eq!(scores.into_scores(), rows);
    }
}
