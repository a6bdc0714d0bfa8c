//! Plans: work for the engine and the drivers.

use std::ops::Range;

use serde::{Deserialize, Serialize};
use terrace_cache::{DevicePage, HostPage, PageKey};
use terrace_fsm::{FailReason, OpId, RequestId, Slot, StateName};

use crate::ids::{AdapterId, StepId};

/// Work for the engine and the drivers.
///
/// The engine keeps a page table with one row for each [`Slot`]. It first applies [`rows`] in order, then may start
/// everything else at once and in any order: nothing in a plan depends on something else in the same plan, except
/// prefills that [wait for a load-back](Prefill::waits_for). A step that is planned [behind](Plan::behind) another
/// starts when that one has ended. Steps launched before keep the rows that they were launched with.
///
/// The order of every list is stable: `prefills` and `decodes` by admission, `rows` as the batch (prefills, then
/// decodes), `copies`, `l3` and `cancelled` by operation id, `completed` and `ended` by time.
///
/// A plan is reused: passed to [`plan_into`](crate::Scheduler::plan_into) again it does not allocate.
///
/// [`rows`]: Plan::rows
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Plan {
    /// The forward step; `None` if there is nothing to compute or the [maximum
    /// number](crate::BatchConfig::steps_in_flight_max) of steps is in flight.
    pub step: Option<StepId>,
    /// The step in flight that it follows.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub behind: Option<StepId>,
    /// Maximum number of repetitions of the step before the engine reports all results at once, each decode one token
    /// further each time. There is room for that, and until an event arrives the plans in between would be the same.
    /// It is 0 unless [`repeats_max`](crate::BatchConfig::repeats_max) allows more.
    #[serde(skip_serializing_if = "is_zero")]
    pub repeats_max: u32,
    /// Parts of prompts to compute.
    pub prefills: Vec<Prefill>,
    /// Requests that produce their next tokens.
    pub decodes: Vec<Decode>,
    /// Entries of the page table that change before the step.
    pub rows: Vec<RowChange>,
    /// Copies between device and host.
    pub copies: Vec<Copy>,
    /// Probes and transfers of L3.
    pub l3: Vec<L3Op>,
    /// Operations that no request waits for any more. The driver may stop them and reports how far they came
    /// ([`Outcome::CalledOff`](crate::Outcome::CalledOff)). Their outcomes are still owed.
    pub cancelled: Vec<OpId>,
    /// Requests whose last token became known since the last plan, or whose prompt is computed if they produce none.
    /// They have left the batch, and end when their pages are copied.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub completed: Vec<RequestId>,
    /// Requests that have ended since the last plan.
    pub ended: Vec<Ended>,
    pub(crate) row_pages: Vec<DevicePage>,
    pub(crate) copy_device_pages: Vec<DevicePage>,
    pub(crate) copy_host_pages: Vec<HostPage>,
    pub(crate) l3_keys: Vec<PageKey>,
    pub(crate) l3_host_pages: Vec<HostPage>,
}

/// Part of a prompt to compute.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Prefill {
    /// The request.
    pub request: RequestId,
    /// Row of the page table.
    pub slot: Slot,
    /// Position of the first token.
    pub start: u32,
    /// Number of tokens. [`Scheduler::tokens`](crate::Scheduler::tokens) returns them.
    pub tokens: u32,
    /// True if this is the last part, so that the step produces the next token, unless the request produces none.
    pub produces_token: bool,
    /// Load-back of the pages right before `start` that has not been reported: it may be in flight, or start with
    /// this plan. The engine reads a layer of these pages only after it has arrived. Always `None` unless
    /// [`load_back_overlaps`](crate::CopyConfig::load_back_overlaps) allows it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub waits_for: Option<OpId>,
    /// Adapter to compute with.
    #[serde(default, skip_serializing_if = "AdapterId::is_none")]
    pub adapter: AdapterId,
}

/// Request that produces its next tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Decode {
    /// The request.
    pub request: RequestId,
    /// Row of the page table.
    pub slot: Slot,
    /// Position of the first token to compute: the latest one produced.
    pub start: u32,
    /// Number of positions with room: more than one with speculative decoding.
    pub tokens: u32,
    /// Row of the step before ([`Plan::behind`]) that is yet to produce the input token. Rows count from 0 in the
    /// order of that step's plan, prefills before decodes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub input: Option<u32>,
    /// Adapter to compute with.
    #[serde(default, skip_serializing_if = "AdapterId::is_none")]
    pub adapter: AdapterId,
}

/// Consecutive entries of one row of the page table that change.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct RowChange {
    /// Row of the page table.
    pub slot: Slot,
    /// First entry that changes.
    pub first_entry: u32,
    pub(crate) pages: Range<u32>,
}

/// Direction of a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CopyDirection {
    /// Host to device.
    LoadBack,
    /// Device to host. The pages are computed already.
    WriteBack,
}

/// Copy between device and host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Copy {
    /// The operation.
    pub op: OpId,
    /// Direction of the copy.
    pub direction: CopyDirection,
    pub(crate) pages: Range<u32>,
}

/// Kind of an L3 operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum L3Kind {
    /// Report how many of the pages, from the first, exist.
    Probe,
    /// Read the pages into host memory.
    Prefetch,
    /// Store the pages from host memory.
    Backup,
}

/// Probe or transfer of L3.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct L3Op {
    /// The operation.
    pub op: OpId,
    /// Kind of the operation.
    pub kind: L3Kind,
    pub(crate) keys: Range<u32>,
    pub(crate) pages: Range<u32>,
}

/// Request that has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ended {
    /// The request.
    pub request: RequestId,
    /// Final state: Finished, Aborted or Failed.
    pub state: StateName,
    /// Reason of a failure.
    pub reason: Option<FailReason>,
}

impl Plan {
    /// Returns true if there is nothing to do.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.step.is_none()
            && self.copies.is_empty()
            && self.l3.is_empty()
            && self.cancelled.is_empty()
            && self.completed.is_empty()
            && self.ended.is_empty()
    }

    /// The pages that go into a row.
    #[must_use]
    pub fn row_pages(&self, change: &RowChange) -> &[DevicePage] {
        slice(&self.row_pages, &change.pages)
    }

    /// The device pages of a copy.
    #[must_use]
    pub fn device_pages(&self, copy: &Copy) -> &[DevicePage] {
        slice(&self.copy_device_pages, &copy.pages)
    }

    /// The host pages of a copy; the n-th belongs to the n-th device page.
    #[must_use]
    pub fn host_pages(&self, copy: &Copy) -> &[HostPage] {
        slice(&self.copy_host_pages, &copy.pages)
    }

    /// The keys of an L3 operation.
    #[must_use]
    pub fn l3_keys(&self, op: &L3Op) -> &[PageKey] {
        slice(&self.l3_keys, &op.keys)
    }

    /// The host pages of an L3 operation; the n-th belongs to the n-th key. A probe has none.
    #[must_use]
    pub fn l3_host_pages(&self, op: &L3Op) -> &[HostPage] {
        slice(&self.l3_host_pages, &op.pages)
    }

    pub(crate) fn clear(&mut self) {
        (self.step, self.behind) = (None, None);
        self.repeats_max = 0;
        self.prefills.clear();
        self.decodes.clear();
        self.rows.clear();
        self.copies.clear();
        self.l3.clear();
        self.cancelled.clear();
        self.completed.clear();
        self.ended.clear();
        self.row_pages.clear();
        self.copy_device_pages.clear();
        self.copy_host_pages.clear();
        self.l3_keys.clear();
        self.l3_host_pages.clear();
    }
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde asks for a reference")]
fn is_zero(count: &u32) -> bool {
    *count == 0
}

fn slice<'a, T>(all: &'a [T], range: &Range<u32>) -> &'a [T] {
    &all[range.start as usize..range.end as usize]
}
