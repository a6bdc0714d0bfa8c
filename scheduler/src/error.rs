//! Errors of callers. An error means that nothing has changed.

use terrace_cache::PassageError;
use terrace_fsm::{OpId, RequestId};
use thiserror::Error;

use crate::ids::StepId;

/// A configuration that cannot work.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("{setting} = {value}: {advice}")]
pub struct ConfigError {
    /// Name of the setting in the configuration file.
    pub setting: &'static str,
    /// Value of the setting.
    pub value: u64,
    /// Change that makes it work.
    pub advice: &'static str,
}

impl ConfigError {
    pub(crate) fn new(setting: &'static str, value: u64, advice: &'static str) -> Self {
        Self { setting, value, advice }
    }
}

/// Error of a weight replacement while a step is in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("a step is in flight: report its results before the weights are replaced")]
pub struct StepsInFlight;

/// Error of a submission.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum SubmitError {
    /// The prompt is empty.
    #[error("{0} has an empty prompt: give it at least one token")]
    EmptyPrompt(RequestId),
    /// The request does not fit the device, even alone.
    #[error(
        "{request} needs {needed_pages} device pages, but there are only {device_pages}: shorten \
         the prompt, lower max_new_tokens or raise cache.device_pages"
    )]
    NeverFits {
        /// The request.
        request: RequestId,
        /// Pages that its prompt and new tokens need.
        needed_pages: u64,
        /// Pages of the device.
        device_pages: u32,
    },
    /// The passages are invalid.
    #[error("{request}: {error}")]
    BadPassage {
        /// The request.
        request: RequestId,
        /// Error of the passages.
        error: PassageError,
    },
    /// A passage that must not be cut never fits a step.
    #[error(
        "{request} has a passage of {tokens} tokens that may not be split (is_whole), but a step \
         has room for only {tokens_max}: allow splitting, or raise batch.step_tokens_max"
    )]
    PassageTooLong {
        /// The request.
        request: RequestId,
        /// Tokens of the passage.
        tokens: u32,
        /// Maximum length that fits a step beside all decodes.
        tokens_max: u32,
    },
    /// The id is in use, or no plan has reported the end of its last request.
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

/// Error of a call with an unknown request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("{0} is unknown or has ended")]
pub struct UnknownRequest(pub RequestId);

/// Error of an event.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum EventError {
    /// No plan has contained this operation.
    #[error("{0} was never issued")]
    UnknownOperation(OpId),
    /// No plan has contained this step.
    #[error("step {} was never issued", .0.0)]
    UnknownStep(StepId),
    /// An earlier step is still in flight.
    #[error("step {} cannot end before step {}", step.0, first.0)]
    StepOutOfTurn {
        /// The step.
        step: StepId,
        /// First step in flight.
        first: StepId,
    },
    /// The outcome comes from a rank that does not exist.
    #[error("{op} has no rank {rank}: there are {ranks} ranks")]
    UnknownRank {
        /// The operation.
        op: OpId,
        /// The rank.
        rank: u32,
        /// Number of ranks.
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
    /// A request that produces tokens has no result.
    #[error("step {} has no result for {request}", step.0)]
    MissingResult {
        /// The step.
        step: StepId,
        /// The request.
        request: RequestId,
    },
    /// The request does not produce tokens in this step.
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
        /// Number of tokens in the result.
        tokens: usize,
        /// Maximum number of tokens.
        tokens_max: u32,
    },
}
