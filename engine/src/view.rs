//! What the engine tells about itself: figures for metrics, and the whole picture for people.

use std::collections::VecDeque;

use serde::Serialize;
use terrace_l3::StoreStats;
use terrace_scheduler::{Hits, NodeView, RequestId, StateName, Stats, Time};

use crate::histogram::TimeHistogram;

/// Figures, all kept up to date, so that asking for them costs nothing.
#[derive(Clone, Debug, Serialize)]
pub struct Figures {
    /// The scheduler's.
    pub scheduler: Stats,
    /// The store's, if there is one.
    pub store: Option<StoreStats>,
    /// What steps have cost.
    pub steps: StepFigures,
    /// How long requests waited until they were first admitted, what L3 was asked for included.
    pub queue: TimeHistogram,
    /// Tokens in a page.
    pub page_size: u32,
    /// Bytes in a page.
    pub page_bytes: usize,
}

/// What steps have cost: where the time between the beginning and the end of the work went.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct StepFigures {
    /// Steps that have ended.
    pub steps: u64,
    /// From when a step could have begun until it had ended, added up.
    pub busy_us: u64,
    /// Of that, what the model took.
    pub model_us: u64,
    /// Steps that came to nothing.
    pub failed: u64,
}

impl StepFigures {
    /// The share of time that was neither spent in the model nor waiting for something to do.
    #[must_use]
    pub fn overhead_ratio(&self) -> f64 {
        match self.busy_us {
            0 => 0.0,
            busy => (busy.saturating_sub(self.model_us)) as f64 / busy as f64,
        }
    }
}

/// The whole picture.
#[derive(Clone, Debug, Serialize)]
pub struct View {
    /// When it was taken, in the engine's time.
    pub now_us: u64,
    /// Figures.
    pub figures: Figures,
    /// Live requests, and the latest that have ended; oldest first.
    pub requests: Vec<RequestView>,
    /// The cache's tree, as far as it is shown.
    pub tree: Vec<NodeView>,
}

/// A request and its life so far.
#[derive(Clone, Debug, Serialize)]
pub struct RequestView {
    /// Which.
    pub id: RequestId,
    /// Whose cache it uses.
    pub salt: String,
    /// The state it is in.
    pub state: StateName,
    /// Tokens of its prompt.
    pub prompt_tokens: u32,
    /// Tokens that it has produced.
    pub new_tokens: u32,
    /// Where the KV of its prompt came from.
    pub hits: Hits,
    /// The states that it has been in, each with the moment it began.
    pub timeline: Vec<Moment>,
}

/// The beginning of a state.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Moment {
    /// When, in the engine's time.
    pub at_us: u64,
    /// The state that began.
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

    /// How long ago it was taken.
    pub(crate) fn age_us(&self, now: Time) -> u64 {
        self.timeline.first().map_or(0, |first| now.0.saturating_sub(first.at_us))
    }

    /// Takes down a change of state. A life with very many keeps its beginning and the latest.
    pub(crate) fn enter(&mut self, state: StateName, at: Time) {
        const MOMENTS_MAX: usize = 32;
        self.state = state;
        if self.timeline.len() == MOMENTS_MAX {
            self.timeline.remove(MOMENTS_MAX / 2);
        }
        self.timeline.push(Moment { at_us: at.0, state });
    }
}

/// The latest requests that have ended.
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
