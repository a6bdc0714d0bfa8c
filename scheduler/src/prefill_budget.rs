//! Budget of a step for prompts: how much of each prompt it computes.

use terrace_cache::Passage;
use terrace_cache::planted::{Bug, planted};

use crate::config::BatchConfig;
use crate::prompt_cost::{prompt_cost, tokens_within};

/// Tokens of one step that prompts may still take.
#[derive(Debug)]
pub(crate) struct PrefillBudget {
    tokens_left: u32,
    /// Part of the budget for prompts that the step cannot finish.
    left_for_long: u32,
    /// Some prompt is not computed to its end in this step.
    is_part_left: bool,
    /// Some prompt got less because of `left_for_long` or because of a passage.
    is_held_back: bool,
    /// No prompt has taken any token.
    is_untouched: bool,
    /// Tokens assigned beyond the budget, because a passage is not cut.
    overdrawn: u32,
}

/// Share of the budget that is set aside for the shortest prompts.
#[derive(Debug)]
pub(crate) struct Reserve {
    tokens: u32,
    for_long: u32,
}

/// Rest of a prompt from which a step takes a part.
#[derive(Debug)]
pub(crate) struct PromptRest<'a> {
    pub(crate) start: u32,
    pub(crate) end: u32,
    /// The step already computes tokens right before `start`.
    pub(crate) continues_part: bool,
    pub(crate) passages: &'a [Passage],
}

impl PrefillBudget {
    pub(crate) fn new(tokens: u32, for_long: u32) -> Self {
        Self {
            tokens_left: tokens,
            left_for_long: for_long,
            is_part_left: false,
            is_held_back: false,
            is_untouched: true,
            overdrawn: 0,
        }
    }

    /// Sets a share of the budget aside.
    pub(crate) fn set_aside(&mut self, percent: u32) -> Reserve {
        let share = |of: u32| (u64::from(of) * u64::from(percent)).div_ceil(100) as u32;
        let reserve =
            Reserve { tokens: share(self.tokens_left), for_long: share(self.left_for_long) };
        self.tokens_left -= reserve.tokens;
        self.left_for_long -= reserve.for_long;
        reserve
    }

    /// Adds what was set aside, without the tokens that were assigned beyond the budget meanwhile.
    pub(crate) fn restore(&mut self, reserve: Reserve) {
        self.tokens_left += reserve.tokens.saturating_sub(self.overdrawn);
        self.left_for_long += reserve.for_long;
    }

    /// End of the next part of a prompt, or `None` if it starts with a passage that needs a step of its own.
    /// Parts end with a page where possible, so that all of it can be published.
    pub(crate) fn part_end(
        &mut self,
        config: &BatchConfig,
        page_size: u32,
        prompt: &PromptRest<'_>,
    ) -> Option<u32> {
        let start = prompt.start;
        let in_budget = start.saturating_add(tokens_within(config, start, self.tokens_left));
        let mut end = prompt.end.min(in_budget);
        if end < prompt.end {
            let in_step = end;
            let for_long = tokens_within(config, start, self.left_for_long);
            end = end.min(start.saturating_add(for_long));
            self.is_held_back |= end < in_step;
            let page_end = end - end % page_size;
            end = match page_end > start {
                true => page_end,
                // Less than a page is better than nothing, unless the part already ends with a page.
                false if prompt.continues_part && start.is_multiple_of(page_size) => start,
                false => end,
            };
            if !prompt.passages.is_empty() && !planted(Bug::CutPassages) {
                match end_outside_passages(prompt.passages, start, end, self.is_untouched) {
                    Some(outside) => end = outside,
                    None => {
                        // Other prompts may take what is too little for the passage.
                        (self.is_part_left, self.is_held_back) = (true, true);
                        return None;
                    }
                }
            }
        }
        Some(end)
    }

    /// Assigns the tokens of a prompt up to `end`.
    pub(crate) fn assign(&mut self, config: &BatchConfig, prompt: &PromptRest<'_>, end: u32) {
        let counted = prompt_cost(config, prompt.start, end - prompt.start);
        self.is_untouched = false;
        self.overdrawn += counted.saturating_sub(self.tokens_left);
        if end < prompt.end {
            self.is_part_left = true;
            self.left_for_long = self.left_for_long.saturating_sub(counted);
        }
        self.tokens_left = self.tokens_left.saturating_sub(counted);
    }

    pub(crate) fn tokens_left(&self) -> u32 {
        self.tokens_left
    }

    pub(crate) fn is_spent(&self) -> bool {
        self.tokens_left == 0
    }

    /// Returns true if some prompt is not computed to its end in this step.
    pub(crate) fn is_part_left(&self) -> bool {
        self.is_part_left
    }

    /// Returns true if some prompt got less than the tokens that were left.
    pub(crate) fn is_held_back(&self) -> bool {
        self.is_held_back
    }
}

/// End of a part that would end inside of a passage: before the passage, or behind it if the passage starts the part
/// and the step is untouched. `None` if the passage has to wait for such a step.
fn end_outside_passages(
    passages: &[Passage],
    start: u32,
    end: u32,
    is_untouched: bool,
) -> Option<u32> {
    let begins_here =
        |passage: &Passage| passage.is_whole && passage.start == start && end == start;
    match passages.iter().find(|passage| passage.is_cut_at(end) || begins_here(passage)) {
        Some(passage) if passage.start > start => Some(passage.start),
        Some(passage) => is_untouched.then_some(passage.end),
        None => Some(end),
    }
}
