//! The interface of a model.

use std::any::Any;
use std::sync::Arc;
use std::time::Instant;

use crate::batch::Batch;
use crate::layout::KvLayout;
use crate::sampling::chooser::Output;

/// A model that computes forward steps and chooses tokens.
///
/// Steps are launched in execution order, one or more ahead of the running step. Each is finished
/// by its [ticket](StepTicket), in the same order, on another thread. A step may consume tokens
/// that the step launched before it chooses ([`Batch::awaited`]).
///
/// The KV written for a token and the logits behind it must be a function of the tokens up to there
/// alone, to the bit. They must not depend on the division of a prompt into spans, on other spans
/// of a batch, or on page positions. An answer is then independent of whether its KV was computed
/// or loaded. The chosen token is a function of the logits and of the row's state in the batches,
/// as in [`Chooser`](crate::Chooser).
pub trait Model: Send + 'static {
    /// Device memory that holds the KV.
    type Memory;
    /// Fence type of the device.
    type Fence;
    /// Handle of a launched step.
    type Ticket: StepTicket<Fence = Self::Fence>;

    /// Returns the KV layout of a page.
    fn kv_layout(&self) -> KvLayout;

    /// Returns the number of tokens in the vocabulary.
    fn vocabulary(&self) -> usize;

    /// Returns the length of the longest supported sequence.
    fn positions_max(&self) -> u32;

    /// Returns the fingerprint of model and weights; different weights have different fingerprints.
    /// The engine names KV by the fingerprint after [`begin`](Self::begin), which may include the
    /// machine's rounding.
    fn fingerprint(&self) -> String;

    /// Returns the adapters that requests may name.
    fn adapters(&self) -> Vec<String> {
        Vec::new()
    }

    /// Returns whether the model supports passages
    /// ([`Arrival::passages`](crate::Arrival::passages)).
    fn takes_passages(&self) -> bool {
        false
    }

    /// Replaces the weights and the fingerprint. No step is in flight.
    ///
    /// # Errors
    /// Fails if the weights are refused; the model then keeps its weights.
    fn replace_weights(&mut self, weights: NewWeights) -> Result<(), WeightsError> {
        drop(weights);
        Err(WeightsError::Refused("it cannot replace its weights".to_owned()))
    }

    /// Returns whether the model reads a layer of a load-back only after it has arrived
    /// ([`Batch::arriving`]). For other models the engine starts a step after its load-backs are
    /// complete.
    fn waits_for_layers(&self) -> bool {
        false
    }

    /// Prepares for steps; called once, before the first.
    ///
    /// # Errors
    /// Fails if the model cannot work with these limits.
    fn begin(&mut self, memory: &Self::Memory, limits: StepLimits) -> Result<(), ModelError>;

    /// Applies the row changes of a batch and starts its computation behind all steps launched
    /// before. Returns without waiting for them, except when it reads [masks](crate::Choice::mask),
    /// which wait until the step before has been finished and reported. The model keeps the parts
    /// of the batch that it needs afterwards.
    ///
    /// # Errors
    /// Fails if the step could not be launched. No part of the batch was applied then, and the
    /// engine repeats its row changes.
    fn launch(&mut self, batch: &Arc<Batch>) -> Result<Self::Ticket, ModelError>;
}

/// Handle of a launched step.
pub trait StepTicket: Send + 'static {
    /// Fence type of the device.
    type Fence;

    /// Returns the fence behind the step. Pages of the step are free for other uses once it has
    /// passed, even if the ticket was not finished.
    fn fence(&self) -> Self::Fence;

    /// Waits until the step has ended.
    ///
    /// A failed step has applied the row changes of its batch. A later step that awaits its tokens
    /// fails as well.
    fn finish(self) -> Finished;
}

/// The result of a step.
#[derive(Debug)]
pub struct Finished {
    /// One output for each of [`Batch::wanted`], in order, or the error of a step that may be
    /// retried.
    pub result: Result<Vec<Output>, ModelError>,
    /// When all inputs were on the device.
    pub began_at: Instant,
    /// When all tokens were computed and chosen.
    pub ended_at: Instant,
}

/// Upper limits of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepLimits {
    /// Tokens in a page.
    pub page_size: u32,
    /// Rows of the page table: the number of sequences that run at once.
    pub rows: u32,
    /// Largest number of tokens in a step.
    pub tokens_max: u32,
}

/// Weights for a running model; the model defines the type.
pub type NewWeights = Box<dyn Any + Send>;

/// The reason for which weights were not replaced: the engine keeps its weights.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum WeightsError {
    /// The engine has ended.
    #[error("the engine has ended")]
    Ended,
    /// The model refuses them.
    #[error("the weights were not replaced: {0}")]
    Refused(String),
}

/// A failed step.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the model could not compute a step: {0}")]
pub struct ModelError(pub String);

impl ModelError {
    /// Returns the message of a panic.
    pub(crate) fn of(panic: &(dyn Any + Send)) -> Self {
        let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
        let text = text.or_else(|| panic.downcast_ref::<String>().cloned());
        Self(text.unwrap_or_else(|| "it panicked".to_owned()))
    }
}
