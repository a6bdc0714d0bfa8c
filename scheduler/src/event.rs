//! Events: what the engine and the L3 driver report back.

use serde::{Deserialize, Serialize};
use terrace_cache::Token;
use terrace_fsm::{OpId, RequestId};

use crate::ids::StepId;

/// Something that has happened outside.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Event<'a> {
    /// A forward step is over and its KV is written. If it waits for load-backs that were not reported yet
    /// ([`Prefill::waits_for`](crate::Prefill::waits_for)), its results take effect when they are, or are not waited
    /// for any more, and so do those of the steps behind it.
    StepDone {
        /// The step.
        step: StepId,
        /// One result for each request that was to produce tokens; those that have left the batch, or
        /// failed, may be left out.
        results: &'a [StepResult<'a>],
        /// Requests whose part came to nothing, though the step as a whole is sound. They try again, as
        /// after a failed step.
        #[serde(skip_serializing_if = "is_empty")]
        failed: &'a [RequestId],
    },
    /// A forward step came to nothing. What it wrote is not trusted, nor is what the steps behind it
    /// write; all of it will be planned again.
    StepFailed {
        /// The step.
        step: StepId,
    },
    /// An operation has an outcome, on one rank.
    Operation {
        /// The operation.
        op: OpId,
        /// The rank that reports; 0 if there is only one.
        rank: u32,
        /// What came of it.
        outcome: Outcome,
    },
}

fn is_empty(requests: &&[RequestId]) -> bool {
    requests.is_empty()
}

/// What a step produced for one request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct StepResult<'a> {
    /// The request.
    pub request: RequestId,
    /// The tokens that the step, with its repetitions, produced for it: at least one.
    pub tokens: &'a [Token],
    /// Whether they are its last, because of a stop token or string.
    pub finished: bool,
}

/// What came of an operation on one rank.
///
/// Every outcome but [`TimedOut`](Outcome::TimedOut) says that the driver has let go of the
/// operation's pages. Each rank owes one such outcome for each operation, however late.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// All pages were moved and are sound; a probe found all of them.
    Done,
    /// The first so many pages were moved and are sound; a probe found so many.
    Partial(u32),
    /// L3 does not have the first page.
    Missing,
    /// It did not work; no page is to be trusted.
    Failed,
    /// Bytes were not what they should be; no page is to be trusted.
    Corrupt,
    /// The first so many pages were moved and are sound; the bytes of the next were not what they should
    /// be, and neither it nor what follows is to be trusted.
    CorruptAfter(u32),
    /// The first so many pages were moved and are sound, and the driver stopped there: no request waits
    /// for the operation any more ([`Plan::cancelled`](crate::Plan::cancelled)), or the holder of the next
    /// page does not answer. It says nothing about the others: they are not missing, and the store has not
    /// failed.
    CalledOff(u32),
    /// The driver stopped waiting, but the transfer may still touch the pages: they stay
    /// quarantined until another outcome arrives.
    TimedOut,
}
