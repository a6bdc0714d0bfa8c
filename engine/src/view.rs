//! Observability: figures for metrics, and a complete view for people.

use std::collections::VecDeque;

use serde::Serialize;
use terrace_l3::StoreStats;
use terrace_scheduler::{Hits, NodeView, RequestId, StateName, Stats, Time};

use crate::histogram::TimeHistogram;

/// Figures of an engine. All are kept up to date, so a read is cheap.
#[derive(Clone, Debug, Serialize)]
pub struct Figures {
    /// Figures of the scheduler.
    pub scheduler: Stats,
    /// Figures of the store, if there is one.
    pub store: Option<StoreStats>,
    /// Costs of steps.
    pub steps: StepFigures,
    /// Time from submission to first admission, including the L3 lookup.
    pub queue: TimeHistogram,
    /// Tokens in a page.
    pub page_size: u32,
    /// Bytes in a page.
    pub page_bytes: usize,
}

/// Costs of steps: the division of the time between the start and the end of the work.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct StepFigures {
    /// Steps that have ended.
    pub steps: u64,
    /// Sum of the times from when a step could have started until it had ended.
    pub busy_us: u64,
    /// The part of it spent in the model.
    pub model_us: u64,
    /// Failed steps.
    pub failed: u64,
}

impl StepFigures {
    /// Returns the share of time that was neither spent in the model nor idle.
    #[must_use]
    pub fn overhead_ratio(&self) -> f64 {
        match self.busy_us {
            0 => 0.0,
            busy => (busy.saturating_sub(self.model_us)) as f64 / busy as f64,
        }
    }
}

/// The complete view of an engine.
#[derive(Clone, Debug, Serialize)]
pub struct View {
    /// Engine time of the view.
    pub now_us: u64,
    /// Figures.
    pub figures: Figures,
    /// Live requests, and those that ended last; oldest first.
    pub requests: Vec<RequestView>,
    /// Nodes of the cache tree, up to the requested number.
    pub tree: Vec<NodeView>,
}

/// A request and its history.
#[derive(Clone, Debug, Serialize)]
pub struct RequestView {
    /// Id.
    pub id: RequestId,
    /// Cache salt.
    pub salt: String,
    /// Current state.
    pub state: StateName,
    /// Tokens in the prompt.
    pub prompt_tokens: u32,
    /// Tokens generated.
    pub new_tokens: u32,
    /// Sources of the prompt's KV.
    pub hits: Hits,
    /// States so far, each with its start time.
    pub timeline: Vec<Moment>,
}

/// The start of a state.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Moment {
    /// Engine time.
    pub at_us: u64,
    /// The state.
    pub state: StateName,
}

impl RequestView {
    pub(crate) fn new(id: RequestId, salt: String, prompt_tokens: u32, now: Time) -> Self {
        Self {
            id,
            salt,
            state: StateName::Submitted,
            prompt_tokens,
            new_tokens: 0,
            hits: Hits::default(),
            timeline: vec![Moment { at_us: now.0, state: StateName::Submitted }],
        }
    }

    /// Returns the time since submission.
    pub(crate) fn age_us(&self, now: Time) -> u64 {
        self.timeline.first().map_or(0, |first| now.0.saturating_sub(first.at_us))
    }

    /// Records a change of state. A long history keeps its start and its latest entries.
    pub(crate) fn enter(&mut self, state: StateName, at: Time) {
        const MOMENTS_MAX: usize = 32;
        self.state = state;
        if self.timeline.len() == MOMENTS_MAX {
            self.timeline.remove(MOMENTS_MAX / 2);
        }
        self.timeline.push(Moment { at_us: at.0, state });
    }
}

/// The requests that ended last.
#[derive(Debug, Default)]
pub(crate) struct History(VecDeque<RequestView>);

impl History {
    const REQUESTS_MAX: usize = 48;

    pub(crate) fn add(&mut self, request: RequestView) {
        if self.0.len() == Self::REQUESTS_MAX {
            self.0.pop_front();
        }
        self.0.push_back(request);
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &RequestView> {
        self.0.iter()
    }
}
