//! What the engine asks of a model.

use std::any::Any;
use std::sync::Arc;
use std::time::Instant;

use crate::batch::Batch;
use crate::layout::KvLayout;
use crate::sampling::chooser::Output;

/// Computes forward steps, and chooses the tokens that come of them.
///
/// Steps are launched in the order in which they are to be computed, one or more ahead of the one that
/// runs, and each is finished by its [ticket](StepTicket): in the same order, on another thread. A step
/// may have tokens that the one launched before it chooses ([`Batch::awaited`]).
///
/// The KV that it writes for a token, and the logits after it, must be a function of the tokens up to
/// there and nothing else, to the bit: not of how a prompt was cut into spans, of the other spans of a
/// batch, or of where pages lie. Whether KV was computed or loaded can then not be seen in an answer. What
/// is chosen is a function of the logits and of what the batches say of the row, as
/// [`Chooser`](crate::Chooser) does it.
pub trait Model: Send + 'static {
    /// The device memory that the model reads and writes KV in.
    type Memory;
    /// What steps leave behind in the order of what the device does.
    type Fence;
    /// A step that was launched.
    type Ticket: StepTicket<Fence = Self::Fence>;

    /// How KV lies in a page.
    fn kv_layout(&self) -> KvLayout;

    /// How many tokens there are.
    fn vocabulary(&self) -> usize;

    /// The longest sequence that the model was made for.
    fn positions_max(&self) -> u32;

    /// Names model and weights: different weights have different fingerprints. KV is named by the one that the model has
    /// once it has begun: it may say how the machine rounds, too.
    fn fingerprint(&self) -> String;

    /// The adapters that it has: requests may ask for one of them.
    fn adapters(&self) -> Vec<String> {
        Vec::new()
    }

    /// Whether it knows what to put where a prompt says more than its tokens do
    /// ([`Arrival::passages`](crate::Arrival::passages)).
    fn takes_passages(&self) -> bool {
        false
    }

    /// Computes with other weights from here on, and has their fingerprint. No step is in flight.
    ///
    /// # Errors
    /// When it cannot: it goes on with those that it has.
    fn replace_weights(&mut self, weights: NewWeights) -> Result<(), WeightsError> {
        drop(weights);
        Err(WeightsError::Refused("it cannot replace its weights".to_owned()))
    }

    /// Whether it reads a layer of what is still loaded only after it has arrived ([`Batch::arriving`]). An engine with
    /// one that does not begins no step before all has been loaded.
    fn waits_for_layers(&self) -> bool {
        false
    }

    /// Prepares for steps, once, before the first.
    ///
    /// # Errors
    /// When the model cannot work so.
    fn begin(&mut self, memory: &Self::Memory, limits: StepLimits) -> Result<(), ModelError>;

    /// Takes in what a batch tells, begins to compute it behind all that were launched before, and
    /// returns without waiting for any of them, except that it may read [masks](crate::Choice::mask): those wait until
    /// the step before has been finished and reported. What the model needs of the batch after that it keeps.
    ///
    /// # Errors
    /// When the step could not be launched: nothing of the batch was taken in then, and what it tells of
    /// rows is told again.
    fn launch(&mut self, batch: &Arc<Batch>) -> Result<Self::Ticket, ModelError>;
}

/// A step that was launched.
pub trait StepTicket: Send + 'static {
    /// What it leaves behind in the order of what the device does.
    type Fence;

    /// Behind the step: whoever touches pages that it uses only after this was passed does not come too
    /// early, whether anybody has waited for the step or not.
    fn fence(&self) -> Self::Fence;

    /// Waits until the step has ended.
    ///
    /// A step that fails has still taken in what its batch told of rows, and a step behind it that awaits
    /// tokens of it fails as well.
    fn finish(self) -> Finished;
}

/// What came of a step.
#[derive(Debug)]
pub struct Finished {
    /// One output for each of [`Batch::wanted`], in order, unless the step came to nothing. It may be
    /// tried again.
    pub result: Result<Vec<Output>, ModelError>,
    /// When the device had everything to begin with.
    pub began_at: Instant,
    /// When it had computed and chosen everything.
    pub ended_at: Instant,
}

/// How large steps can be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepLimits {
    /// Tokens in a page.
    pub page_size: u32,
    /// Rows of the page table: sequences that run at once.
    pub rows: u32,
    /// Tokens that a step computes at the most.
    pub tokens_max: u32,
}

/// Weights for a model that runs: it says what it takes.
pub type NewWeights = Box<dyn Any + Send>;

/// Weights that could not be replaced: the engine goes on with those that it has.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum WeightsError {
    /// The engine has ended.
    #[error("the engine has ended")]
    Ended,
    /// The model does not take them.
    #[error("the weights were not replaced: {0}")]
    Refused(String),
}

/// A step that came to nothing.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the model could not compute a step: {0}")]
pub struct ModelError(pub String);

impl ModelError {
    /// What a panic says.
    pub(crate) fn of(panic: &(dyn Any + Send)) -> Self {
        let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
        let text = text.or_else(|| panic.downcast_ref::<String>().cloned());
        Self(text.unwrap_or_else(|| "it panicked".to_owned()))
    }
}
