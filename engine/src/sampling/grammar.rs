//! Constrained decoding.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, mpsc};

use parking_lot::{Condvar, Mutex};
use terrace_scheduler::Token;

/// A grammar that constrains an answer.
///
/// The engine calls it on a separate thread while the model computes. A call may take about as long
/// as a step.
pub trait Grammar: Send + std::fmt::Debug {
    /// Advances by a token that was allowed.
    ///
    /// # Errors
    /// Fails if the answer cannot go on.
    fn advance(&mut self, token: Token) -> Result<(), GrammarError>;

    /// Returns the tokens that may come next, including stop tokens where the answer may end.
    ///
    /// # Errors
    /// Fails if the answer cannot go on.
    fn allowed(&mut self) -> Result<Allowed, GrammarError>;
}

/// A set of tokens as a bit mask, with the lowest tokens in the lowest bits.
pub type Allowed = Vec<u32>;

/// A grammar that has exceeded its limits.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct GrammarError(pub String);

/// The grammar of one answer, with the answer's tokens.
///
/// Dropping it ends the answer: masks that wait for tokens stop waiting.
#[derive(Debug)]
pub struct Constraint(Arc<Shared>);

/// The tokens allowed at one position of an answer, as passed to a model.
///
/// A mask may be created before the preceding tokens are known; reading it waits for them. Its
/// computation may take about as long as a step and runs on a thread beside the model. A model that
/// reads it earlier waits for it or computes it.
#[derive(Clone, Debug)]
pub struct Mask {
    shared: Arc<Shared>,
    /// Number of tokens before the position.
    index: u32,
    /// Epoch in which the mask was created.
    epoch: u32,
}

#[derive(Debug)]
struct Shared {
    // Separate from the grammar's lock: the driver changes it and must not wait for a grammar.
    answer: Mutex<Answer>,
    changed: Condvar,
    following: Mutex<Following>,
}

/// The tokens of an answer.
#[derive(Debug, Default)]
struct Answer {
    /// Number of tokens.
    tokens: u32,
    /// Tokens that the grammar has not consumed.
    unconsumed: Vec<Token>,
    /// Incremented when masks must stop waiting for tokens.
    epoch: u32,
    has_ended: bool,
}

/// The state of a grammar behind the tokens that it has consumed.
#[derive(Debug)]
struct Following {
    grammar: Box<dyn Grammar>,
    /// Allowed tokens behind all consumed tokens, if computed.
    allowed: Option<Result<Allowed, GrammarError>>,
}

impl Constraint {
    /// Creates a constraint for an empty answer.
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
        answer.unconsumed.push(token);
        self.0.changed.notify_all();
    }

    /// Cancels masks that wait for tokens, after a failed step.
    pub fn call_off(&self) {
        self.0.answer.lock().epoch += 1;
        self.0.changed.notify_all();
    }

    /// Returns the mask behind the first `index` tokens of the answer, which need not be known yet.
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
    /// Returns whether all preceding tokens are known, or the mask is cancelled.
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

    /// Waits until all preceding tokens are known, or the mask is cancelled.
    pub(crate) fn wait(&self) {
        let mut answer = self.shared.answer.lock();
        self.shared.changed.wait_while(&mut answer, |answer| !self.is_due(answer));
    }

    /// Reads the allowed tokens once they are known: one bit for each token, the lowest tokens in
    /// the lowest bits. Tokens without a bit are not allowed.
    ///
    /// # Errors
    /// Fails if the answer cannot go on, if the mask is cancelled, or if the answer has ended. The
    /// chosen token is then not part of the answer.
    pub fn read<T>(&self, read: impl FnOnce(&[u32]) -> T) -> Result<T, GrammarError> {
        self.wait();
        let mut following = self.shared.following.lock();
        let unconsumed = {
            let answer = &mut *self.shared.answer.lock();
            if self.is_called_off(answer) || answer.tokens != self.index {
                return Err(GrammarError("the step before it came to nothing".to_owned()));
            }
            std::mem::take(&mut answer.unconsumed)
        };
        following.allowed(&unconsumed).as_ref().map(|allowed| read(allowed)).map_err(Clone::clone)
    }

    /// Sets the logits of all tokens that are not allowed to negative infinity.
    ///
    /// # Errors
    /// Same as [`Mask::read`].
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
    /// Consumes further tokens, and returns the allowed tokens behind them, from the cache if
    /// possible.
    fn allowed(&mut self, unconsumed: &[Token]) -> &Result<Allowed, GrammarError> {
        let Self { grammar, allowed } = self;
        if !unconsumed.is_empty() && !matches!(allowed, Some(Err(_))) {
            *allowed = None;
        }
        allowed.get_or_insert_with(|| {
            // A panic in the grammar of one request must not fail the step of all requests.
            let find = AssertUnwindSafe(|| {
                unconsumed.iter().try_for_each(|token| grammar.advance(*token))?;
                grammar.allowed()
            });
            catch_unwind(find).unwrap_or_else(|_| Err(GrammarError("it panicked".to_owned())))
        })
    }
}

/// A thread that computes masks beside the model. It starts with the first mask.
#[derive(Debug, Default)]
pub(crate) struct Preparer {
    masks: Option<mpsc::Sender<Mask>>,
}

impl Preparer {
    /// Starts the computation of a mask. If that fails, the model computes the mask when it reads
    /// it.
    pub(crate) fn start(&mut self, mask: Mask) {
        let masks = self.masks.get_or_insert_with(|| {
            let (sender, masks) = mpsc::channel::<Mask>();
            let work = move || {
                for mask in masks {
                    // Errors surface at the model's own read.
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

    /// A grammar that allows one text and then the end.
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
    fn mask_keeps_only_allowed_tokens() {
        let constraint = Constraint::new(Box::new(Only { text: vec![3, 40], end: 1, at: 0 }));
        let mut preparer = Preparer::default();
        for (index, before, expected) in [(0, None, 3), (1, Some(3), 40), (2, Some(40), 1)] {
            let mask = constraint.mask(index);
            // A mask created before the preceding token is known waits for it.
            preparer.start(mask.clone());
            assert_eq!(mask.is_ready(), before.is_none());
            if let Some(token) = before {
                constraint.push(token);
            }
            // Repeated reads, as after a failed step, give the same result.
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
    fn cancelled_masks_stop_waiting() {
        let only = Only { text: vec![3, 40], end: 1, at: 0 };
        let constraint = Constraint::new(Box::new(only));
        let waits = |mask: Mask| std::thread::spawn(move || mask.read(<[u32]>::to_vec));
        let (called_off, ready) = (waits(constraint.mask(1)), constraint.mask(0));
        constraint.call_off();
        assert!(called_off.join().unwrap().is_err());
        // The step is retried, and its token arrives.
        assert_eq!(ready.read(<[u32]>::to_vec).unwrap(), [1 << 3, 0], "it waits for none");
        let after = waits(constraint.mask(1));
        constraint.push(3);
        assert_eq!(after.join().unwrap().unwrap(), [0, 1 << 8]);
        // A late read asks for an old position and must not get the next mask.
        let (late, after_the_end) = (constraint.mask(0), constraint.mask(2));
        assert!(late.read(|_| ()).is_err());
        let after_the_end = waits(after_the_end);
        drop(constraint);
        assert!(after_the_end.join().unwrap().is_err());
    }

    #[test]
    fn panic_of_a_grammar_fails_only_its_request() {
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
