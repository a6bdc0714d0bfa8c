//! Plans: what the engine is to compute and to move next.

use std::ops::Range;

use serde::{Deserialize, Serialize};
use terrace_cache::{DevicePage, HostPage, PageKey};
use terrace_fsm::{FailReason, OpId, RequestId, Slot, StateName};

use crate::ids::{AdapterId, StepId};

/// What to do next.
///
/// The engine keeps a page table with one row for each [`Slot`]. It first applies [`rows`]
/// (in order), then may start everything else at once, in any order: nothing in a plan depends on
/// something else in the same plan, except for prefills that [say so](Prefill::waits_for). A step that
/// is planned [behind](Plan::behind) another begins when that one has ended; steps launched before keep
/// the rows that they were launched with.
///
/// The order of every list is stable: `prefills` and `decodes` by admission, `rows` as the batch
/// (prefills, then decodes), `copies` and `l3` by operation id, `cancelled` by operation id, `completed`
/// and `ended` by time.
///
/// A plan is reused: give the same one to [`plan_into`](crate::Scheduler::plan_into) again and it
/// does not allocate.
///
/// [`rows`]: Plan::rows
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Plan {
    /// The forward step; none if there is nothing to compute or
    /// [as many as may](crate::BatchConfig::steps_in_flight_max) are still running.
    pub step: Option<StepId>,
    /// The step in flight that it follows.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub behind: Option<StepId>,
    /// How often the engine may repeat the step before it reports the results of all at once, each decode
    /// one token further each time: there is room for that, and until something happens the plans in
    /// between would say nothing else. Nothing but 0 unless
    /// [`repeats_max`](crate::BatchConfig::repeats_max) allows it.
    #[serde(skip_serializing_if = "is_zero")]
    pub repeats_max: u32,
    /// Parts of prompts to compute in it.
    pub prefills: Vec<Prefill>,
    /// Requests that produce their next tokens in it.
    pub decodes: Vec<Decode>,
    /// Entries of the page table that change before it.
    pub rows: Vec<RowChange>,
    /// Copies between device and host.
    pub copies: Vec<Copy>,
    /// Questions and transfers for L3.
    pub l3: Vec<L3Op>,
    /// Operations that nobody waits for any more. The driver may stop them, and says how far they came
    /// ([`Outcome::CalledOff`](crate::Outcome::CalledOff)); their outcomes are still owed.
    pub cancelled: Vec<OpId>,
    /// Requests whose last token is known since the last plan, or whose prompt is computed if they produce
    /// none. They have left the batch; their life ends when what they computed was copied.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub completed: Vec<RequestId>,
    /// Requests whose life has ended since the last plan.
    pub ended: Vec<Ended>,
    pub(crate) row_pages: Vec<DevicePage>,
    pub(crate) copy_device_pages: Vec<DevicePage>,
    pub(crate) copy_host_pages: Vec<HostPage>,
    pub(crate) l3_keys: Vec<PageKey>,
    pub(crate) l3_host_pages: Vec<HostPage>,
}

/// A part of a prompt to compute.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Prefill {
    /// Whose.
    pub request: RequestId,
    /// Its row of the page table.
    pub slot: Slot,
    /// The position of the first token.
    pub start: u32,
    /// How many tokens. They are in [`Scheduler::tokens`](crate::Scheduler::tokens).
    pub tokens: u32,
    /// Whether this is the last part, so that the step produces the next token, if the request is to have
    /// one.
    pub produces_token: bool,
    /// The load-back that brings the pages right before `start`, if it has not been reported yet: it may be under way,
    /// or begin with this very plan. A layer of these pages is read only after it has arrived. Nothing but `None`
    /// unless [`load_back_overlaps`](crate::CopyConfig::load_back_overlaps) allows it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub waits_for: Option<OpId>,
    /// The adapter to compute with.
    #[serde(default, skip_serializing_if = "AdapterId::is_none")]
    pub adapter: AdapterId,
}

/// A request that produces its next tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Decode {
    /// Whose.
    pub request: RequestId,
    /// Its row of the page table.
    pub slot: Slot,
    /// The position of the first token to compute: the latest one produced.
    pub start: u32,
    /// For how many positions there is room: more than one with speculative decoding.
    pub tokens: u32,
    /// The row of the step before, [`Plan::behind`], that is yet to produce the token to start from. Rows count
    /// from 0, prefills before decodes, as they stand in that step's plan.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub input: Option<u32>,
    /// The adapter to compute with.
    #[serde(default, skip_serializing_if = "AdapterId::is_none")]
    pub adapter: AdapterId,
}

/// Consecutive entries of one row of the page table that change.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct RowChange {
    /// The row.
    pub slot: Slot,
    /// The first entry.
    pub first_entry: u32,
    pub(crate) pages: Range<u32>,
}

/// Which way a copy goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CopyDirection {
    /// Host to device.
    LoadBack,
    /// Device to host. The pages are computed already.
    WriteBack,
}

/// A copy between device and host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Copy {
    /// The operation.
    pub op: OpId,
    /// Which way.
    pub direction: CopyDirection,
    pub(crate) pages: Range<u32>,
}

/// What L3 is to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum L3Kind {
    /// Say how many of the pages, from the first, it has.
    Probe,
    /// Read the pages into host memory.
    Prefetch,
    /// Store the pages from host memory.
    Backup,
}

/// A question or transfer for L3.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct L3Op {
    /// The operation.
    pub op: OpId,
    /// What to do.
    pub kind: L3Kind,
    pub(crate) keys: Range<u32>,
    pub(crate) pages: Range<u32>,
}

/// A request whose life has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ended {
    /// Whose.
    pub request: RequestId,
    /// How: Finished, Aborted or Failed.
    pub state: StateName,
    /// Why, if it failed.
    pub reason: Option<FailReason>,
}

impl Plan {
    /// Whether there is nothing to do.
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
