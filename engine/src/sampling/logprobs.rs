//! Log-probabilities: how likely a model thought a token.

use std::ops::Range;

use terrace_scheduler::Token;

/// A token, and how likely the model thought it: by its logits alone, before temperature, penalties and
/// everything else that changes what is chosen. Logits are the same to the bit whether the KV before them
/// was computed or loaded, and so are these.
#[derive(Clone, Debug, PartialEq)]
pub struct Logprobs {
    /// The token.
    pub token: Token,
    /// The logarithm of its probability.
    pub logprob: f32,
    /// The likeliest tokens in its place, as many as were asked for, likeliest first; of equals the lower
    /// token first.
    pub top: Vec<(Token, f32)>,
}

/// Computes log-probabilities; keeps the memory that it needs for it.
#[derive(Debug, Default)]
pub struct Scorer {
    candidates: Vec<(f32, Token)>,
}

impl Scorer {
    /// How likely `token` was, and the `top` likeliest ones.
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

/// Puts the `count` likeliest of all tokens into `candidates`, in order. Every logit is looked at once, and
/// no more than a few times `count` are ever kept or put in order.
pub(super) fn likeliest_of(logits: &[f32], count: usize, candidates: &mut Vec<(f32, Token)>) {
    const ROOM_MIN: usize = 64;
    candidates.clear();
    if count == 0 {
        return;
    }
    let room = (2 * count).max(ROOM_MIN);
    // Once so many are known: who is not likelier than the last of them is not among them, because of
    // equals the lower token comes first.
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

/// Likelier ones first; of equals, the lower token. What is not a number comes last.
pub(super) fn by_likelihood(a: &(f32, Token), b: &(f32, Token)) -> std::cmp::Ordering {
    number(b.0).total_cmp(&number(a.0)).then(a.1.cmp(&b.1))
}

fn number(weight: f32) -> f32 {
    if weight.is_nan() { f32::NEG_INFINITY } else { weight }
}

/// The highest of all logits, and how much more the logarithm of the sum of their exponentials is, summed
/// up in their order.
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

/// The log-probabilities of a prompt's own tokens, as they are collected step by step.
#[derive(Debug)]
pub(crate) struct PromptScores {
    prompt: Vec<Token>,
    /// Of the tokens from the second on: nothing comes before the first.
    scores: Vec<Logprobs>,
}

impl PromptScores {
    pub(crate) fn new(prompt: Vec<Token>) -> Self {
        let scores = Vec::with_capacity(prompt.len().saturating_sub(1));
        Self { prompt, scores }
    }

    /// The tokens that follow those at some positions.
    pub(crate) fn following(&self, positions: Range<u32>) -> &[Token] {
        let place = |position: u32| (position as usize + 1).min(self.prompt.len());
        &self.prompt[place(positions.start)..place(positions.end)]
    }

    /// Takes how likely the tokens were that follow those from a position on, perhaps not for the first
    /// time.
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
    fn probabilities_are_those_of_the_logits() {
        let logits = [0.0, (3.0f32).ln(), f32::NEG_INFINITY, (4.0f32).ln()];
        let found = Scorer::default().score(&logits, 1, 3);
        let near = |logprob: f32, probability: f32| (logprob.exp() - probability).abs() < 1e-6;
        assert!(near(found.logprob, 0.375), "{found:?}");
        let tokens: Vec<_> = found.top.iter().map(|(token, _)| *token).collect();
        assert_eq!(tokens, [3, 1, 0]);
        assert_eq!(found.top[1].1, found.logprob, "the same number wherever it is told");
        assert!(near(found.top[0].1, 0.5) && near(found.top[2].1, 0.125), "{found:?}");
    }

    #[test]
    fn of_equals_the_lower_token_comes_first_and_no_number_last() {
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
    fn the_likeliest_are_found_whatever_the_order() {
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
    fn a_prompt_is_scored_from_its_second_token_and_again_where_a_step_failed() {
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
