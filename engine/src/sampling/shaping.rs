//! Changes to logits before sampling.

use std::collections::BTreeMap;

use terrace_scheduler::Token;

use super::grammar::GrammarError;
use crate::batch::Choice;

/// Parameters that change the logits of an answer. The default changes nothing.
#[derive(Clone, Debug, PartialEq)]
pub struct Shaping {
    /// Subtracted from the logit of each token that the answer contains.
    pub presence_penalty: f32,
    /// Subtracted from the logit of a token once for each occurrence in the answer.
    pub frequency_penalty: f32,
    /// Divisor of the positive logits, and factor of the negative logits, of tokens in the prompt
    /// or answer.
    pub repetition_penalty: f32,
    /// Additions to the logits of some tokens.
    pub bias: Vec<(Token, f32)>,
    /// Minimum number of tokens in the answer, as far as its grammar allows.
    pub min_tokens: u32,
}

impl Default for Shaping {
    fn default() -> Self {
        Self {
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            repetition_penalty: 1.0,
            bias: Vec::new(),
            min_tokens: 0,
        }
    }
}

impl Shaping {
    /// Returns whether it depends on the answer's tokens.
    pub(crate) fn counts_tokens(&self) -> bool {
        self.presence_penalty != 0.0 || self.frequency_penalty != 0.0 || self.repeats_cost()
    }

    /// Returns whether it depends on the prompt's tokens.
    pub(crate) fn repeats_cost(&self) -> bool {
        self.repetition_penalty != 1.0
    }
}

/// The tokens of an answer, as far as its logits depend on them.
#[derive(Debug, Default)]
pub(crate) struct Seen {
    /// Occurrences of each token in the answer, if they count; 0 for tokens of the prompt only.
    times: BTreeMap<Token, u32>,
    /// Tokens of the answer, if they count.
    produced: Vec<Token>,
}

/// The possible continuation of an answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Continuation {
    /// The answer can go on behind the chosen token.
    Yes,
    /// The grammar is complete, and no stop token may be chosen.
    Complete,
    /// The grammar has exceeded its limits.
    Failed(GrammarError),
}

impl Shaping {
    /// Creates the state after a prompt and the start of an answer.
    pub(crate) fn seen(&self, prompt: &[Token], produced: &[Token]) -> Seen {
        let mut seen = Seen::default();
        if self.repeats_cost() {
            seen.times.extend(prompt.iter().map(|&token| (token, 0)));
        }
        produced.iter().for_each(|&token| seen.push(self, token));
        seen
    }

    /// Changes the logits of the `index`-th token of an answer with the stop tokens `ends`.
    pub(crate) fn apply(
        &self,
        seen: &Seen,
        ends: &[Token],
        choice: &Choice,
        logits: &mut [f32],
    ) -> Continuation {
        if let Some(mask) = &choice.mask
            && let Err(error) = mask.apply(logits)
        {
            return Continuation::Failed(error);
        }
        if choice.index < self.min_tokens {
            let vocabulary = logits.len();
            for &end in ends.iter().filter(|end| (**end as usize) < vocabulary) {
                logits[end as usize] = f32::NEG_INFINITY;
            }
        }
        let is_impossible = |logit: &f32| *logit == f32::NEG_INFINITY;
        if choice.mask.is_some() && logits.iter().all(is_impossible) {
            return Continuation::Complete;
        }
        self.penalise(seen, logits);
        for &(token, bias) in &self.bias {
            if let Some(logit) = logits.get_mut(token as usize) {
                *logit += bias;
            }
        }
        Continuation::Yes
    }

    fn penalise(&self, seen: &Seen, logits: &mut [f32]) {
        let Shaping { presence_penalty, frequency_penalty, repetition_penalty, .. } = *self;
        for (&token, &times) in &seen.times {
            let Some(logit) = logits.get_mut(token as usize) else { continue };
            if self.repeats_cost() {
                *logit = match *logit > 0.0 {
                    true => *logit / repetition_penalty,
                    false => *logit * repetition_penalty,
                };
            }
            if times > 0 {
                *logit -= frequency_penalty * times as f32 + presence_penalty;
            }
        }
    }
}

impl Seen {
    /// Adds a token to the answer.
    pub(crate) fn push(&mut self, shaping: &Shaping, token: Token) {
        if shaping.counts_tokens() {
            *self.times.entry(token).or_default() += 1;
            self.produced.push(token);
        }
    }

    /// Returns the answer's tokens, if they count.
    pub(crate) fn produced(&self) -> &[Token] {
        &self.produced
    }
}

#[cfg(test)]
mod tests {
    use super::super::grammar::Constraint;
    use super::super::grammar::tests::Only;
    use super::*;

    /// An answer whose logits are changed.
    struct Shaper {
        shaping: Shaping,
        ends: Vec<Token>,
        seen: Seen,
        constraint: Option<Constraint>,
        index: u32,
    }

    impl Shaper {
        fn push(&mut self, token: Token) {
            self.seen.push(&self.shaping, token);
            self.constraint.iter().for_each(|constraint| constraint.push(token));
            self.index += 1;
        }

        fn apply(&self, logits: &mut [f32]) -> Continuation {
            let mask = self.constraint.as_ref().map(|constraint| constraint.mask(self.index));
            let choice = Choice { index: self.index, mask };
            self.shaping.apply(&self.seen, &self.ends, &choice, logits)
        }
    }

    fn shaper(shaping: Shaping, prompt: &[Token], ends: &[Token]) -> Shaper {
        let seen = shaping.seen(prompt, &[]);
        Shaper { shaping, ends: ends.to_vec(), seen, constraint: None, index: 0 }
    }

    fn shaped(shaper: &Shaper, logits: &[f32]) -> Vec<f32> {
        let mut logits = logits.to_vec();
        assert_eq!(shaper.apply(&mut logits), Continuation::Yes);
        logits
    }

    #[test]
    fn default_shaping_changes_no_logit() {
        let mut shaper = shaper(Shaping::default(), &[1], &[2]);
        shaper.push(0);
        assert_eq!(shaped(&shaper, &[1.0, 2.0, 3.0]), [1.0, 2.0, 3.0]);
    }

    #[test]
    fn resumes_a_started_answer() {
        let shaping =
            Shaping { repetition_penalty: 2.0, frequency_penalty: 1.0, ..Shaping::default() };
        let mut pushed = shaper(shaping.clone(), &[0], &[]);
        for token in [1, 1, 2] {
            pushed.push(token);
        }
        let seen = shaping.seen(&[0], &[1, 1, 2]);
        let taken_up = Shaper { seen, shaping, ..shaper(Shaping::default(), &[], &[]) };
        let logits = [4.0, 4.0, 4.0, 4.0];
        assert_eq!(shaped(&taken_up, &logits), shaped(&pushed, &logits));
        assert_eq!(shaped(&taken_up, &logits), [2.0, 0.0, 1.0, 4.0]);
    }

    #[test]
    fn presence_and_frequency_ignore_the_prompt() {
        let shaping =
            Shaping { presence_penalty: 0.5, frequency_penalty: 0.25, ..Shaping::default() };
        let mut shaper = shaper(shaping, &[0, 1], &[]);
        assert_eq!(shaped(&shaper, &[1.0, 1.0, 1.0]), [1.0, 1.0, 1.0]);
        for token in [1, 1, 2] {
            shaper.push(token);
        }
        assert_eq!(shaped(&shaper, &[1.0, 1.0, 1.0]), [1.0, 0.0, 0.25]);
    }

    #[test]
    fn repetition_includes_the_prompt() {
        let shaping = Shaping { repetition_penalty: 2.0, ..Shaping::default() };
        let mut shaper = shaper(shaping, &[0, 1], &[]);
        shaper.push(2);
        assert_eq!(shaped(&shaper, &[4.0, -4.0, 2.0, 2.0]), [2.0, -8.0, 1.0, 2.0]);
    }

    #[test]
    fn adds_bias_and_ignores_unknown_tokens() {
        let shaping = Shaping { bias: vec![(1, -100.0), (9, 5.0)], ..Shaping::default() };
        assert_eq!(shaped(&shaper(shaping, &[], &[]), &[1.0, 1.0]), [1.0, -99.0]);
    }

    #[test]
    fn suppresses_stop_tokens_below_the_minimum_length() {
        let shaping = Shaping { min_tokens: 2, ..Shaping::default() };
        let mut shaper = shaper(shaping, &[], &[1, 70]);
        for _ in 0..2 {
            assert_eq!(shaped(&shaper, &[0.0, 9.0]), [0.0, f32::NEG_INFINITY]);
            shaper.push(0);
        }
        assert_eq!(shaped(&shaper, &[0.0, 9.0]), [0.0, 9.0]);
    }

    #[test]
    fn complete_grammar_ends_an_answer_below_the_minimum_length() {
        let shaping = Shaping { min_tokens: 9, ..Shaping::default() };
        let grammar = Only { text: vec![0], end: 1, at: 0 };
        let constraint = Some(Constraint::new(Box::new(grammar)));
        let mut shaper = Shaper { constraint, ..shaper(shaping, &[], &[1]) };
        assert_eq!(shaped(&shaper, &[0.0, 9.0]), [0.0, f32::NEG_INFINITY]);
        shaper.push(0);
        assert_eq!(shaper.apply(&mut [0.0, 9.0]), Continuation::Complete);
    }
}
