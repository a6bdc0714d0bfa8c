//! What changes logits before a token is chosen by them.

use std::collections::BTreeMap;
use std::sync::Arc;

use terrace_scheduler::Token;

use super::grammar::{Constraint, Grammar, GrammarError, Preparer};

/// What changes the logits of an answer before its tokens are chosen. The default changes nothing.
#[derive(Clone, Debug, PartialEq)]
pub struct Shaping {
    /// Taken off the logit of every token that the answer has already.
    pub presence_penalty: f32,
    /// Taken off the logit of a token as often as the answer has it already.
    pub frequency_penalty: f32,
    /// What the logits of tokens that prompt or answer have already are divided by, or multiplied with
    /// where they are negative.
    pub repetition_penalty: f32,
    /// Added to the logits of some tokens.
    pub bias: Vec<(Token, f32)>,
    /// The answer has at least so many tokens, as far as its grammar allows.
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
    fn counts_tokens(&self) -> bool {
        self.presence_penalty != 0.0 || self.frequency_penalty != 0.0 || self.repeats_cost()
    }

    fn repeats_cost(&self) -> bool {
        self.repetition_penalty != 1.0
    }
}

/// Changes the logits of one answer.
#[derive(Debug)]
pub(crate) struct Shaper {
    shaping: Shaping,
    constraint: Option<Constraint>,
    /// The tokens that end the answer.
    ends: Arc<[Token]>,
    /// How often the answer has each token, if that counts; never, for some of the prompt's.
    seen: BTreeMap<Token, u32>,
    produced: u32,
}

/// Whether an answer can go on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum GoesOn {
    Yes,
    /// Its grammar is complete, and nothing that ends it may be chosen.
    Complete,
    /// Its grammar is at its limits.
    Failed(GrammarError),
}

impl Shaper {
    /// Nothing for an answer whose logits stay as they are.
    pub(crate) fn new(
        shaping: Shaping,
        grammar: Option<Box<dyn Grammar>>,
        prompt: &[Token],
        ends: &Arc<[Token]>,
    ) -> Option<Self> {
        if shaping == Shaping::default() && grammar.is_none() {
            return None;
        }
        let prompt = if shaping.repeats_cost() { prompt } else { &[] };
        Some(Self {
            seen: prompt.iter().map(|&token| (token, 0)).collect(),
            constraint: grammar.map(Constraint::new),
            ends: ends.clone(),
            shaping,
            produced: 0,
        })
    }

    /// Begins with what takes long.
    pub(crate) fn prepare(&self, preparer: &mut Preparer) {
        if let Some(constraint) = &self.constraint {
            preparer.start(constraint.clone());
        }
    }

    /// Changes the logits of the next token.
    pub(crate) fn apply(&self, logits: &mut [f32]) -> GoesOn {
        if let Some(constraint) = &self.constraint
            && let Err(error) = constraint.apply(logits)
        {
            return GoesOn::Failed(error);
        }
        if self.produced < self.shaping.min_tokens {
            let vocabulary = logits.len();
            for &end in self.ends.iter().filter(|end| (**end as usize) < vocabulary) {
                logits[end as usize] = f32::NEG_INFINITY;
            }
        }
        let is_impossible = |logit: &f32| *logit == f32::NEG_INFINITY;
        if self.constraint.is_some() && logits.iter().all(is_impossible) {
            return GoesOn::Complete;
        }
        self.penalise(logits);
        for &(token, bias) in &self.shaping.bias {
            if let Some(logit) = logits.get_mut(token as usize) {
                *logit += bias;
            }
        }
        GoesOn::Yes
    }

    fn penalise(&self, logits: &mut [f32]) {
        let Shaping { presence_penalty, frequency_penalty, repetition_penalty, .. } = self.shaping;
        for (&token, &times) in &self.seen {
            let Some(logit) = logits.get_mut(token as usize) else { continue };
            if self.shaping.repeats_cost() {
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

    /// The answer has another token.
    pub(crate) fn push(&mut self, token: Token) {
        self.produced += 1;
        if self.shaping.counts_tokens() {
            *self.seen.entry(token).or_default() += 1;
        }
        if let Some(constraint) = &self.constraint {
            constraint.push(token);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::grammar::tests::Only;
    use super::*;

    fn shaper(shaping: Shaping, prompt: &[Token], ends: &[Token]) -> Shaper {
        Shaper::new(shaping, None, prompt, &ends.into()).unwrap()
    }

    fn shaped(shaper: &Shaper, logits: &[f32]) -> Vec<f32> {
        let mut logits = logits.to_vec();
        assert_eq!(shaper.apply(&mut logits), GoesOn::Yes);
        logits
    }

    #[test]
    fn nothing_asked_for_is_nothing_to_do() {
        assert!(Shaper::new(Shaping::default(), None, &[1], &[2].into()).is_none());
    }

    #[test]
    fn presence_and_frequency_are_of_the_answer_alone() {
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
    fn repetition_is_of_the_prompt_too() {
        let shaping = Shaping { repetition_penalty: 2.0, ..Shaping::default() };
        let mut shaper = shaper(shaping, &[0, 1], &[]);
        shaper.push(2);
        assert_eq!(shaped(&shaper, &[4.0, -4.0, 2.0, 2.0]), [2.0, -8.0, 1.0, 2.0]);
    }

    #[test]
    fn bias_is_added_and_tokens_that_do_not_exist_have_none() {
        let shaping = Shaping { bias: vec![(1, -100.0), (9, 5.0)], ..Shaping::default() };
        assert_eq!(shaped(&shaper(shaping, &[], &[]), &[1.0, 1.0]), [1.0, -99.0]);
    }

    #[test]
    fn an_answer_does_not_end_before_it_is_long_enough() {
        let shaping = Shaping { min_tokens: 2, ..Shaping::default() };
        let mut shaper = shaper(shaping, &[], &[1, 70]);
        for _ in 0..2 {
            assert_eq!(shaped(&shaper, &[0.0, 9.0]), [0.0, f32::NEG_INFINITY]);
            shaper.push(0);
        }
        assert_eq!(shaped(&shaper, &[0.0, 9.0]), [0.0, 9.0]);
    }

    #[test]
    fn a_grammar_that_is_complete_ends_an_answer_that_should_be_longer() {
        let shaping = Shaping { min_tokens: 9, ..Shaping::default() };
        let grammar = Only { text: vec![0], end: 1, at: 0 };
        let mut shaper = Shaper::new(shaping, Some(Box::new(grammar)), &[], &[1].into()).unwrap();
        assert_eq!(shaped(&shaper, &[0.0, 9.0]), [0.0, f32::NEG_INFINITY]);
        shaper.push(0);
        assert_eq!(shaper.apply(&mut [0.0, 9.0]), GoesOn::Complete);
    }
}
