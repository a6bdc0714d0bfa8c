//! What callers can get wrong. An error means that nothing has changed.

use terrace_cache::PassageError;
use terrace_fsm::{OpId, RequestId};
use thiserror::Error;

use crate::ids::StepId;

/// A configuration that cannot work.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("{setting} = {value}: {advice}")]
pub struct ConfigError {
    /// The setting, as in the configuration file.
    pub setting: &'static str,
    /// What it was set to.
    pub value: u64,
    /// What to change.
    pub advice: &'static str,
}

impl ConfigError {
    pub(crate) fn new(setting: &'static str, value: u64, advice: &'static str) -> Self {
        Self { setting, value, advice }
    }
}

/// Weights cannot be replaced under steps that compute with them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("a step is in flight: report its results before the weights are replaced")]
pub struct StepsInFlight;

/// A request that cannot be taken.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum SubmitError {
    /// There is nothing to compute.
    #[error("{0} has an empty prompt: give it at least one token")]
    EmptyPrompt(RequestId),
    /// Even alone on an empty device it would not fit.
    #[error(
        "{request} needs {needed_pages} device pages, but there are only {device_pages}: shorten \
         the prompt, lower max_new_tokens or raise cache.device_pages"
    )]
    NeverFits {
        /// The request.
        request: RequestId,
        /// What its prompt and new tokens need.
        needed_pages: u64,
        /// What the device has.
        device_pages: u32,
    },
    /// Its passages cannot be.
    #[error("{request}: {error}")]
    BadPassage {
        /// The request.
        request: RequestId,
        /// What is wrong with them.
        error: PassageError,
    },
    /// A passage that is not to be cut would never fit a step.
    #[error(
        "{request} has a passage of {tokens} tokens that may not be split (is_whole), but a step \
         has room for only {tokens_max}: allow splitting, or raise batch.step_tokens_max"
    )]
    PassageTooLong {
        /// The request.
        request: RequestId,
        /// Tokens of the passage.
        tokens: u32,
        /// What a step has room for, all decodes beside it.
        tokens_max: u32,
    },
    /// Another request of this name is alive, or no plan has told its end yet.
    #[error("{0} already exists: an id must be unique until a plan has reported its end")]
    DuplicateId(RequestId),
    /// Too many requests are alive.
    #[error(
        "the maximum of {requests_max} requests is reached: submit again later or raise \
         queue.requests_max"
    )]
    QueueFull {
        /// The limit.
        requests_max: u32,
    },
}

/// A request that is not there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("{0} is unknown or has ended")]
pub struct UnknownRequest(pub RequestId);

/// An event that cannot be.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum EventError {
    /// No plan held this operation.
    #[error("{0} was never issued")]
    UnknownOperation(OpId),
    /// No plan held this step.
    #[error("step {} was never issued", .0.0)]
    UnknownStep(StepId),
    /// Steps end in the order in which they were planned.
    #[error("step {} cannot end before step {}", step.0, first.0)]
    StepOutOfTurn {
        /// The step.
        step: StepId,
        /// The first of those in flight.
        first: StepId,
    },
    /// The outcome comes from a rank that does not exist.
    #[error("{op} has no rank {rank}: there are {ranks} ranks")]
    UnknownRank {
        /// The operation.
        op: OpId,
        /// The rank.
        rank: u32,
        /// How many there are.
        ranks: u32,
    },
    /// The outcome claims more pages than the operation has.
    #[error("{op} has {pages} pages, and the outcome claims {claimed}")]
    TooManyPages {
        /// The operation.
        op: OpId,
        /// Its pages.
        pages: u32,
        /// The pages of the outcome.
        claimed: u32,
    },
    /// A request that should have produced tokens has no result.
    #[error("step {} has no result for {request}", step.0)]
    MissingResult {
        /// The step.
        step: StepId,
        /// The request.
        request: RequestId,
    },
    /// A request was not to produce tokens in this step.
    #[error("step {} does not produce tokens for {request}", step.0)]
    UnexpectedResult {
        /// The step.
        step: StepId,
        /// The request.
        request: RequestId,
    },
    /// A result has no tokens, or more than the step could produce.
    #[error("{request} may produce 1 to {tokens_max} tokens in this step, not {tokens}")]
    WrongTokenCount {
        /// The request.
        request: RequestId,
        /// What the result has.
        tokens: usize,
        /// What it may have.
        tokens_max: u32,
    },
}
