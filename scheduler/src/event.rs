//! Events: what the engine and the L3 driver report back.

use serde::{Deserialize, Serialize};
use terrace_cache::Token;
use terrace_fsm::{OpId, RequestId};

use crate::ids::StepId;

/// Event in the engine or in a driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Event<'a> {
    /// A forward step has ended and its KV is written. If it [waits for](crate::Prefill::waits_for) load-backs that
    /// are not reported yet, its results, and those of the steps behind it, take effect when they are reported or no
    /// longer awaited.
    StepDone {
        /// The step.
        step: StepId,
        /// One result for each request that produces tokens. Requests that have left the batch or failed may be left
        /// out.
        results: &'a [StepResult<'a>],
        /// Requests whose part of the step failed, though the step as a whole is sound. They are planned again, as
        /// after a failed step.
        #[serde(skip_serializing_if = "is_empty")]
        failed: &'a [RequestId],
    },
    /// A forward step failed. Its KV is not trusted, nor is that of the steps behind it. All of it is planned again.
    StepFailed {
        /// The step.
        step: StepId,
    },
    /// An operation has an outcome on one rank.
    Operation {
        /// The operation.
        op: OpId,
        /// Rank that reports; 0 if there is only one.
        rank: u32,
        /// Outcome on this rank.
        outcome: Outcome,
    },
}

fn is_empty(requests: &&[RequestId]) -> bool {
    requests.is_empty()
}

/// Result of a step for one request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct StepResult<'a> {
    /// The request.
    pub request: RequestId,
    /// Tokens that the step, with its repetitions, produced: at least one.
    pub tokens: &'a [Token],
    /// True if these tokens are the last, because of a stop token or string.
    pub finished: bool,
}

/// Outcome of an operation on one rank.
///
/// Every outcome except [`TimedOut`](Outcome::TimedOut) says that the driver no longer touches the operation's pages.
/// Each rank owes one such outcome for each operation, however late.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// All pages were moved and are sound; a probe found all of them.
    Done,
    /// This number of pages, from the first, were moved and are sound; a probe found them.
    Partial(u32),
    /// L3 does not have the first page.
    Missing,
    /// The operation failed; no page is trusted.
    Failed,
    /// Bytes were corrupt; no page is trusted.
    Corrupt,
    /// This number of pages, from the first, were moved and are sound. The bytes of the next page were corrupt, and
    /// neither it nor a later one is trusted.
    CorruptAfter(u32),
    /// This number of pages, from the first, were moved and are sound, and the driver stopped there: no request waits
    /// for the operation any more ([`Plan::cancelled`](crate::Plan::cancelled)), or the holder of the next page does
    /// not answer. The other pages are neither missing nor has the store failed.
    CalledOff(u32),
    /// The driver stopped waiting, but the transfer may still touch the pages: they stay
    /// quarantined until another outcome arrives.
    TimedOut,
}
