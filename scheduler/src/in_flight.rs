//! Work of the steps in flight for one request.

use terrace_cache::planted::{Bug, planted};

use crate::ids::StepId;

/// Tokens of one request that the steps in flight compute and produce.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct InFlight {
    /// Tokens behind the computed ones whose KV the steps write.
    tokens: u32,
    /// Minimum number of tokens that the steps produce.
    new_tokens: u32,
    /// Id after the last step that includes the request.
    until: StepId,
    /// Row of the request in that last step.
    row: u32,
    /// Number of cancellations, modulo more than can be in flight.
    epoch: u16,
}

impl InFlight {
    /// Adds the work of a step and returns the current epoch.
    pub(crate) fn launch(
        &mut self,
        tokens: u32,
        produces_token: bool,
        step: StepId,
        row: u32,
    ) -> u16 {
        self.tokens += tokens;
        self.new_tokens += u32::from(produces_token);
        (self.until, self.row) = (StepId(step.0 + 1), row);
        self.epoch
    }

    /// Removes the work of a step that has ended.
    pub(crate) fn land(&mut self, tokens: u32, produced_token: bool) {
        self.tokens -= tokens;
        self.new_tokens -= u32::from(produced_token);
    }

    /// Invalidates all results that are in flight.
    pub(crate) fn cancel(&mut self) {
        (self.tokens, self.new_tokens) = (0, 0);
        self.epoch = self.epoch.wrapping_add(1);
    }

    /// Tokens behind the computed ones whose KV the steps write.
    #[inline]
    pub(crate) fn tokens(&self) -> u32 {
        self.tokens
    }

    /// Minimum number of tokens that the steps produce.
    #[inline]
    pub(crate) fn new_tokens(&self) -> u32 {
        self.new_tokens
    }

    /// Id after the last step that includes the request.
    #[inline]
    pub(crate) fn until(&self) -> StepId {
        self.until
    }

    /// Epoch that the results of steps launched from now on carry.
    #[inline]
    pub(crate) fn epoch(&self) -> u16 {
        self.epoch
    }

    /// Row in flight that produces the next input token; `None` if the token is known.
    pub(crate) fn input(&self) -> Option<u32> {
        let row = self.row.saturating_sub(planted(Bug::InputOfAnotherRow).into());
        (self.new_tokens > 0).then_some(row)
    }
}
