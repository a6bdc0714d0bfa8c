//! Answers that may go on only in certain ways.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, mpsc};

use parking_lot::{Condvar, Mutex};
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

/// The grammar of one answer, and the tokens that the answer has.
///
/// When it is dropped, the answer has ended: masks that wait for tokens do not wait any longer.
#[derive(Debug)]
pub struct Constraint(Arc<Shared>);

/// Tokens that may come at one place of an answer, as they are handed to a model.
///
/// A mask may be made before the tokens in front of that place are known, and waits for them when it is read. Computing
/// it may take about as long as a step. A thread does that while the model computes; a model that reads the mask earlier
/// waits, or computes it.
#[derive(Clone, Debug)]
pub struct Mask {
    shared: Arc<Shared>,
    /// Tokens that the answer has before that place.
    index: u32,
    /// The epoch that it was made in.
    epoch: u32,
}

#[derive(Debug)]
struct Shared {
    // Changed by the task that decides, which must not wait for a grammar: so it is apart from that.
    answer: Mutex<Answer>,
    changed: Condvar,
    following: Mutex<Following>,
}

/// How far an answer has come.
#[derive(Debug, Default)]
struct Answer {
    /// Number of its tokens.
    tokens: u32,
    /// Those of them that the grammar has not seen.
    untold: Vec<Token>,
    /// Changes when tokens that masks wait for do not come.
    epoch: u32,
    has_ended: bool,
}

/// How far a grammar has followed an answer.
#[derive(Debug)]
struct Following {
    grammar: Box<dyn Grammar>,
    /// What is allowed after all tokens that it has seen, once that is known.
    allowed: Option<Result<Allowed, GrammarError>>,
}

impl Constraint {
    /// A grammar and an answer without tokens.
    #[must_use]
    pub fn new(grammar: Box<dyn Grammar>) -> Self {
        Self(Arc::new(Shared {
            answer: Mutex::default(),
            changed: Condvar::new(),
            following: Mutex::new(Following { grammar, allowed: None }),
        }))
    }

    /// Adds a token to the answer.
    pub fn push(&self, token: Token) {
        let mut answer = self.0.answer.lock();
        answer.tokens += 1;
        answer.untold.push(token);
        self.0.changed.notify_all();
    }

    /// Calls off the masks that wait for tokens: these do not come, and nobody needs what the masks allow.
    pub fn call_off(&self) {
        self.0.answer.lock().epoch += 1;
        self.0.changed.notify_all();
    }

    /// What is allowed behind the first `index` tokens of the answer, which need not be known yet.
    #[must_use]
    pub fn mask(&self, index: u32) -> Mask {
        let epoch = self.0.answer.lock().epoch;
        Mask { shared: self.0.clone(), index, epoch }
    }
}

impl Drop for Constraint {
    fn drop(&mut self) {
        self.0.answer.lock().has_ended = true;
        self.0.changed.notify_all();
    }
}

impl Mask {
    /// Whether all tokens before are known, or will never be.
    pub(crate) fn is_ready(&self) -> bool {
        self.is_due(&self.shared.answer.lock())
    }

    fn is_due(&self, answer: &Answer) -> bool {
        answer.tokens >= self.index || self.is_called_off(answer)
    }

    fn is_called_off(&self, answer: &Answer) -> bool {
        let never_comes = answer.epoch != self.epoch && answer.tokens < self.index;
        never_comes || answer.has_ended
    }

    /// Waits until all tokens before are known, or it is called off.
    pub(crate) fn wait(&self) {
        let mut answer = self.shared.answer.lock();
        self.shared.changed.wait_while(&mut answer, |answer| !self.is_due(answer));
    }

    /// Reads what is allowed, when that is known: a bit for each token, the lowest tokens in the lowest bits. Tokens
    /// without a bit are not allowed.
    ///
    /// # Errors
    /// Why the answer cannot go on. A mask that was called off, or whose answer has ended, is an error too: whatever is
    /// chosen then is not part of the answer.
    pub fn read<T>(&self, read: impl FnOnce(&[u32]) -> T) -> Result<T, GrammarError> {
        self.wait();
        let mut following = self.shared.following.lock();
        let untold = {
            let answer = &mut *self.shared.answer.lock();
            if self.is_called_off(answer) || answer.tokens != self.index {
                return Err(GrammarError("the step before it came to nothing".to_owned()));
            }
            std::mem::take(&mut answer.untold)
        };
        following.allowed(&untold).as_ref().map(|allowed| read(allowed)).map_err(Clone::clone)
    }

    /// Leaves only what is allowed among the logits.
    ///
    /// # Errors
    /// As [`Mask::read`].
    pub fn apply(&self, logits: &mut [f32]) -> Result<(), GrammarError> {
        self.read(|allowed| {
            let bits = allowed.iter().flat_map(|word| (0..32).map(move |bit| word >> bit & 1 == 1));
            for (logit, is_allowed) in logits.iter_mut().zip(bits.chain(std::iter::repeat(false))) {
                if !is_allowed {
                    *logit = f32::NEG_INFINITY;
                }
            }
        })
    }
}

impl Following {
    /// What is allowed behind more tokens, which is computed unless it is known.
    fn allowed(&mut self, untold: &[Token]) -> &Result<Allowed, GrammarError> {
        let Self { grammar, allowed } = self;
        if !untold.is_empty() && !matches!(allowed, Some(Err(_))) {
            *allowed = None;
        }
        allowed.get_or_insert_with(|| {
            // What goes wrong with the grammar of one request must not fail the step of all.
            let find = AssertUnwindSafe(|| {
                untold.iter().try_for_each(|token| grammar.advance(*token))?;
                grammar.allowed()
            });
            catch_unwind(find).unwrap_or_else(|_| Err(GrammarError("it panicked".to_owned())))
        })
    }
}

/// A thread that computes masks while the model computes. It begins with the first.
#[derive(Debug, Default)]
pub(crate) struct Preparer {
    masks: Option<mpsc::Sender<Mask>>,
}

impl Preparer {
    /// Begins to compute a mask. If that cannot be done, a model that reads it computes it.
    pub(crate) fn start(&mut self, mask: Mask) {
        let masks = self.masks.get_or_insert_with(|| {
            let (sender, masks) = mpsc::channel::<Mask>();
            let work = move || {
                for mask in masks {
                    // What is wrong with it is told where it is read.
                    let _ = mask.read(|_| ());
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
        let constraint = Constraint::new(Box::new(Only { text: vec![3, 40], end: 1, at: 0 }));
        let mut preparer = Preparer::default();
        for (index, before, expected) in [(0, None, 3), (1, Some(3), 40), (2, Some(40), 1)] {
            let mask = constraint.mask(index);
            // Made before the token in front of it is known, it waits for that.
            preparer.start(mask.clone());
            assert_eq!(mask.is_ready(), before.is_none());
            if let Some(token) = before {
                constraint.push(token);
            }
            // Asked twice, as after a step that failed, it says the same.
            for mask in [mask, constraint.mask(index)] {
                let mut logits = [0.5; 70];
                mask.apply(&mut logits).unwrap();
                let left = (0..70).filter(|token| logits[*token] == 0.5).collect::<Vec<_>>();
                assert_eq!(left, [expected]);
            }
        }
        constraint.push(7);
        assert!(constraint.mask(3).apply(&mut [0.5; 70]).is_err());
    }

    #[test]
    fn masks_of_tokens_that_do_not_come_wait_no_longer() {
        let only = Only { text: vec![3, 40], end: 1, at: 0 };
        let constraint = Constraint::new(Box::new(only));
        let waits = |mask: Mask| std::thread::spawn(move || mask.read(<[u32]>::to_vec));
        let (called_off, ready) = (waits(constraint.mask(1)), constraint.mask(0));
        constraint.call_off();
        assert!(called_off.join().unwrap().is_err());
        // The step is computed again, and its token comes this time.
        assert_eq!(ready.read(<[u32]>::to_vec).unwrap(), [1 << 3, 0], "it waits for none");
        let after = waits(constraint.mask(1));
        constraint.push(3);
        assert_eq!(after.join().unwrap().unwrap(), [0, 1 << 8]);
        // One that is late asks for what is long known, and must not have what comes next.
        let (late, after_the_end) = (constraint.mask(0), constraint.mask(2));
        assert!(late.read(|_| ()).is_err());
        let after_the_end = waits(after_the_end);
        drop(constraint);
        assert!(after_the_end.join().unwrap().is_err());
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
        let constraint = Constraint::new(Box::new(Panics));
        assert!(constraint.mask(0).apply(&mut [0.0]).is_err());
    }
}
