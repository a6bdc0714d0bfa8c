//! Log-probabilities: how likely a model thought a token.

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
pub(crate) struct Scorer {
    candidates: Vec<(f32, Token)>,
}

impl Scorer {
    /// How likely `token` was, and the `top` likeliest ones.
    pub(crate) fn score(&mut self, logits: &[f32], token: Token, top: u32) -> Logprobs {
        let (highest, total) = log_sum_exp(logits);
        let logprob = |logit: f32| (f64::from(logit) - highest - total) as f32;
        let top = (top as usize).min(logits.len());
        self.candidates.clear();
        if top > 0 {
            self.candidates.extend(logits.iter().copied().zip(0..));
            keep_likeliest(&mut self.candidates, top);
        }
        Logprobs {
            token,
            logprob: logprob(logits[token as usize]),
            top: self.candidates.iter().map(|&(logit, token)| (token, logprob(logit))).collect(),
        }
    }
}

/// Keeps the `count` likeliest candidates, in order; `count` is not zero.
pub(super) fn keep_likeliest(candidates: &mut Vec<(f32, Token)>, count: usize) {
    if count < candidates.len() {
        candidates.select_nth_unstable_by(count - 1, by_likelihood);
        candidates.truncate(count);
    }
    candidates.sort_unstable_by(by_likelihood);
}

/// Likelier ones first; of equals, the lower token. What is not a number comes last.
pub(super) fn by_likelihood(a: &(f32, Token), b: &(f32, Token)) -> std::cmp::Ordering {
    let key = |weight: f32| if weight.is_nan() { f32::NEG_INFINITY } else { weight };
    key(b.0).total_cmp(&key(a.0)).then(a.1.cmp(&b.1))
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
    top: u32,
    /// Of the tokens from the second on: nothing comes before the first.
    scores: Vec<Logprobs>,
}

impl PromptScores {
    pub(crate) fn new(prompt: Vec<Token>, top: u32) -> Self {
        let scores = Vec::with_capacity(prompt.len().saturating_sub(1));
        Self { prompt, top, scores }
    }

    /// The positions from `start` on are computed, perhaps again.
    pub(crate) fn begin(&mut self, start: u32) {
        assert!(start as usize <= self.scores.len(), "a prompt that is scored is computed whole");
        self.scores.truncate(start as usize);
    }

    /// Takes the logits of the next position.
    pub(crate) fn take(&mut self, scorer: &mut Scorer, logits: &[f32]) {
        if let Some(&next) = self.prompt.get(self.scores.len() + 1) {
            self.scores.push(scorer.score(logits, next, self.top));
        }
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
    fn a_prompt_is_scored_from_its_second_token_and_again_where_a_step_failed() {
        let mut scorer = Scorer::default();
        let mut scores = PromptScores::new(vec![0, 1, 1], 0);
        let rows = [[0.0, 1.0], [0.0, 2.0], [0.0, 3.0]];
        scores.begin(0);
        rows[..2].iter().for_each(|row| scores.take(&mut scorer, row));
        scores.begin(1);
        rows[1..].iter().for_each(|row| scores.take(&mut scorer, row));
        let expected = rows[..2].iter().map(|row| scorer.score(row, 1, 0)).collect::<Vec<_>>();
        assert_eq!(scores.into_scores(), expected);
    }
}
