//! Answers that may go on only in certain ways.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, mpsc};

use parking_lot::Mutex;
use terrace_scheduler::Token;

/// Knows how an answer may go on.
///
/// It is asked on a thread of its own while the model computes, and may take about as long as a step.
pub trait Grammar: Send + std::fmt::Debug {
    /// The answer has gone on with a token that was allowed.
    ///
    /// # Errors
    /// Why the answer cannot go on.
    fn advance(&mut self, token: Token) -> Result<(), GrammarError>;

    /// Which tokens may come next. Tokens that end an answer are allowed where it may end.
    ///
    /// # Errors
    /// Why the answer cannot go on.
    fn allowed(&mut self) -> Result<Allowed, GrammarError>;
}

/// A set of tokens: a bit for each, the lowest tokens in the lowest bits.
pub type Allowed = Vec<u32>;

/// A grammar that has come to its limits.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct GrammarError(pub String);

/// What a grammar allows next, as it is handed to a model. Finding that out may take about as long as a
/// step, and a thread does it while the model computes: whoever needs it earlier waits, or has the work.
///
/// Clones are the same.
#[derive(Clone, Debug)]
pub struct Mask(Arc<Mutex<Following>>);

/// How far a grammar has been followed.
#[derive(Debug)]
struct Following {
    grammar: Box<dyn Grammar>,
    /// Has come, and the grammar has not been told.
    untold: Option<Token>,
    /// What is allowed after all that has come, once that was asked.
    allowed: Option<Result<Allowed, GrammarError>>,
}

impl Mask {
    /// Follows a grammar.
    #[must_use]
    pub fn new(grammar: Box<dyn Grammar>) -> Self {
        Self(Arc::new(Mutex::new(Following { grammar, untold: None, allowed: None })))
    }

    /// The answer has another token.
    pub fn push(&self, token: Token) {
        let mut following = self.0.lock();
        following.untold = Some(token);
        following.allowed = None;
    }

    /// What is allowed next.
    ///
    /// # Errors
    /// Why the answer cannot go on.
    pub fn allowed(&self) -> Result<Allowed, GrammarError> {
        self.0.lock().allowed().clone()
    }

    /// Leaves only what is allowed next among the logits.
    ///
    /// # Errors
    /// Why the answer cannot go on.
    pub fn apply(&self, logits: &mut [f32]) -> Result<(), GrammarError> {
        let mut following = self.0.lock();
        let allowed = following.allowed().as_ref().map_err(Clone::clone)?;
        let bits = allowed.iter().flat_map(|word| (0..32).map(move |bit| word >> bit & 1 == 1));
        for (logit, is_allowed) in logits.iter_mut().zip(bits.chain(std::iter::repeat(false))) {
            if !is_allowed {
                *logit = f32::NEG_INFINITY;
            }
        }
        Ok(())
    }
}

impl Following {
    /// What is allowed next, which is found out unless it is known.
    fn allowed(&mut self) -> &Result<Allowed, GrammarError> {
        let Self { grammar, untold, allowed } = self;
        allowed.get_or_insert_with(|| {
            // What goes wrong with the grammar of one request must not fail the step of all.
            let find = AssertUnwindSafe(|| {
                untold.take().map_or(Ok(()), |token| grammar.advance(token))?;
                grammar.allowed()
            });
            catch_unwind(find).unwrap_or_else(|_| Err(GrammarError("it panicked".to_owned())))
        })
    }
}

/// A thread that finds out what masks allow while the model computes. It begins with the first.
#[derive(Debug, Default)]
pub(crate) struct Preparer {
    masks: Option<mpsc::Sender<Mask>>,
}

impl Preparer {
    /// Begins to find out what a mask allows next. If that cannot be done, whoever needs it finds out by
    /// itself.
    pub(crate) fn start(&mut self, mask: Mask) {
        let masks = self.masks.get_or_insert_with(|| {
            let (sender, masks) = mpsc::channel::<Mask>();
            let work = move || {
                for mask in masks {
                    mask.0.lock().allowed();
                }
            };
            let _ = std::thread::Builder::new().name("terrace-grammars".to_owned()).spawn(work);
            sender
        });
        let _ = masks.send(mask);
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// Allows one text, and then the end.
    #[derive(Debug)]
    pub(crate) struct Only {
        pub(crate) text: Vec<Token>,
        pub(crate) end: Token,
        pub(crate) at: usize,
    }

    impl Grammar for Only {
        fn advance(&mut self, token: Token) -> Result<(), GrammarError> {
            match self.text.get(self.at) {
                Some(next) if *next == token => self.at += 1,
                Some(_) | None => return Err(GrammarError(format!("{token} at {}", self.at))),
            }
            Ok(())
        }

        fn allowed(&mut self) -> Result<Allowed, GrammarError> {
            let next = self.text.get(self.at).copied().unwrap_or(self.end);
            let mut allowed = vec![0; 2];
            allowed[next as usize / 32] |= 1 << (next % 32);
            Ok(allowed)
        }
    }

    #[test]
    fn only_what_is_allowed_is_left() {
        let mask = Mask::new(Box::new(Only { text: vec![3, 40], end: 1, at: 0 }));
        let mut preparer = Preparer::default();
        for (before, expected) in [(None, 3), (Some(3), 40), (Some(40), 1)] {
            if let Some(token) = before {
                mask.push(token);
            }
            preparer.start(mask.clone());
            // Asked twice, as after a step that failed, it says the same.
            for _ in 0..2 {
                let mut logits = [0.5; 70];
                mask.apply(&mut logits).unwrap();
                let left = (0..70).filter(|token| logits[*token] == 0.5).collect::<Vec<_>>();
                assert_eq!(left, [expected]);
            }
        }
        mask.push(7);
        assert!(mask.apply(&mut [0.5; 70]).is_err());
    }

    #[test]
    fn a_grammar_that_panics_fails_alone() {
        #[derive(Debug)]
        struct Panics;
        impl Grammar for Panics {
            fn advance(&mut self, _token: Token) -> Result<(), GrammarError> {
                Ok(())
            }
            fn allowed(&mut self) -> Result<Allowed, GrammarError> {
                panic!("a grammar panics")
            }
        }
        let mask = Mask::new(Box::new(Panics));
        assert!(mask.apply(&mut [0.0]).is_err());
    }
}
