//! Prefills: the prompts that a step computes, and how much of each.
//!
//! Most of a step is shared by turn. A part of it ([`BatchConfig::shortest_first_percent`]) goes to the prompts
//! with the least left to compute, running or waiting, so that a first token never waits for the whole of another
//! prompt.
//!
//! [`BatchConfig::shortest_first_percent`]: crate::BatchConfig::shortest_first_percent

use std::cmp::Reverse;

use terrace_cache::planted::{Bug, planted};
use terrace_fsm::State;

use super::Scheduler;
use super::admission::prefill_end;
use crate::admission_order::AdmissionOrder;
use crate::config::ms;
use crate::ids::Handle;
use crate::plan::{Plan, Prefill};
use crate::prefill_budget::{PrefillBudget, PromptRest};
use crate::requests::Entry;

impl Scheduler {
    /// Shares the step's tokens among prompts, and admits queued requests.
    pub(super) fn plan_prefills(&mut self, plan: &mut Plan, tokens_left: &mut u32) {
        self.wake_for_adapters();
        if *tokens_left == 0
            || (self.batch.prefilling().is_empty() && self.requests.queue().is_empty())
        {
            return;
        }
        for place in 0..self.batch.prefilling().len() {
            let handle = self.batch.prefilling()[place];
            self.adopt_published(handle);
            self.continue_load_back(handle, plan);
            self.continue_prefetch(handle);
        }
        if !self.batch.prefilling().is_empty() {
            self.plan_prefetches(plan);
        }
        let mut budget = PrefillBudget::new(*tokens_left, self.work_for_long_prompts());
        if let Some(handle) = self.passed_over.take() {
            self.assign_tokens(handle, &mut budget);
        }
        let reserve = budget.set_aside(self.config.batch.shortest_first_percent);
        self.share_by_turn(plan, true, &mut budget);
        // If tokens are left and no prompt was held back, all requests that could be admitted have been.
        let is_short = budget.is_spent() || budget.is_held_back();
        budget.restore(reserve);
        if is_short {
            self.share_among_shortest(plan, &mut budget);
        }
        if is_short || budget.is_part_left() {
            self.share_by_turn(plan, is_short, &mut budget);
        }
        *tokens_left = budget.tokens_left();
        self.plan_chunks(plan);
    }

    // ---- by turn ----

    /// Assigns tokens to running requests and then, if `admits`, to queued ones, in the order of admission.
    fn share_by_turn(&mut self, plan: &mut Plan, admits: bool, budget: &mut PrefillBudget) {
        match self.config.queue.order {
            AdmissionOrder::Priority => self.share_by_priority(plan, admits, budget),
            AdmissionOrder::Arrival | AdmissionOrder::LongestPrefix => {
                for place in 0..self.batch.prefilling().len() {
                    self.assign_tokens(self.batch.prefilling()[place], budget);
                }
            }
        }
        if admits {
            self.admit_and_assign(plan, None, budget);
        }
    }

    /// Assigns tokens to running requests by priority, and before each of them to queued requests of higher priority.
    /// Requests that were submitted too long ago are first here too.
    fn share_by_priority(&mut self, plan: &mut Plan, admits: bool, budget: &mut PrefillBudget) {
        let overdue = self.now.before(ms(self.config.queue.wait_max_ms));
        let mut by_turn = std::mem::take(&mut self.prefill_turns);
        by_turn.clear();
        by_turn.extend(self.batch.prefilling().iter().filter(|&&handle| self.can_compute(handle)));
        by_turn.sort_unstable_by_key(|&handle| {
            let Entry { priority, submitted_at, .. } = self.requests[handle];
            (Reverse(self.config.queue.priority_by_age(priority, submitted_at < overdue)), handle)
        });
        for &handle in &by_turn {
            let Entry { priority, submitted_at, .. } = self.requests[handle];
            let from = self.config.queue.priority_by_age(priority, submitted_at < overdue);
            if admits && from < i32::MAX {
                self.admit_and_assign(plan, Some(from), budget);
            }
            self.assign_tokens(handle, budget);
        }
        self.prefill_turns = by_turn;
    }

    /// Admits queued requests while there are tokens, and assigns theirs; with `from`, only those of at least this
    /// priority.
    fn admit_and_assign(&mut self, plan: &mut Plan, from: Option<i32>, budget: &mut PrefillBudget) {
        if budget.is_spent() {
            return;
        }
        let first_new = self.batch.prefilling().len();
        self.admit(plan, from, budget.tokens_left());
        for place in first_new..self.batch.prefilling().len() {
            self.assign_tokens(self.batch.prefilling()[place], budget);
        }
    }

    // ---- by what is left ----

    /// Assigns tokens to the prompts with the least left to compute. A queued request is admitted for that only if
    /// the first in the queue keeps a slot and the memory that it needs.
    fn share_among_shortest(&mut self, plan: &mut Plan, budget: &mut PrefillBudget) {
        if budget.is_spent() || planted(Bug::StarveTheShort) {
            return;
        }
        let mut shortest = std::mem::take(&mut self.shortest_prefills);
        shortest.clear();
        for &handle in self.batch.prefilling() {
            if self.can_compute(handle) {
                shortest.push((self.unassigned_tokens(handle), handle));
            }
        }
        if !self.batch.free_slots().is_empty() {
            let window = self.config.queue.window as usize;
            let running = shortest.len();
            let waiting = self.requests.queue().arrivals().take(window);
            shortest.extend(waiting.map(|handle| (0, handle)));
            for (tokens_left, handle) in &mut shortest[running..] {
                *tokens_left = self.uncached_tokens(*handle);
            }
        }
        shortest.sort_unstable();
        let first_in_line = self.requests.queue().first(self.config.queue.order);
        for &(_, handle) in &shortest {
            if budget.is_spent() {
                break;
            }
            if self.requests[handle].wait().is_queued() {
                let spare = first_in_line.filter(|&first| first != handle);
                let spare = spare.filter(|&first| self.requests[first].wait().is_queued());
                // The first in the queue keeps a slot,
                if self.batch.free_slots().len() > usize::from(spare.is_some()) {
                    // and its pages, with a reserve for this one.
                    let reserve = self.config.batch.decode_reserve_pages as usize;
                    let needed = |first| self.new_pages(first, self.match_depths(first)) + reserve;
                    self.try_admit(handle, spare.map_or(0, needed), plan);
                }
            }
            self.assign_tokens(handle, budget);
        }
        self.shortest_prefills = shortest;
    }

    /// Returns the number of tokens of a queued request that were not cached at the last look: enough to distinguish
    /// short prompts from long ones. At the first look the request is deferred if it waits for a producer, because it
    /// may not be tried while others take all tokens.
    fn uncached_tokens(&mut self, handle: Handle) -> u32 {
        if let Some(tokens) = self.requests[handle].uncached_tokens {
            return tokens;
        }
        let seen = self.match_depths(handle);
        self.defer_for_producer(handle, seen);
        self.note_uncached(handle, seen.host)
    }

    pub(super) fn note_uncached(&mut self, handle: Handle, cached_pages: u32) -> u32 {
        let entry = &mut self.requests[handle];
        let tokens = entry.tokens() - cached_pages * self.config.cache.page_size;
        entry.uncached_tokens = Some(tokens);
        tokens
    }

    pub(super) fn prefill_pages(&self, handle: Handle) -> usize {
        let end = prefill_end(&self.config, &self.requests[handle]);
        end.div_ceil(self.config.cache.page_size) as usize
    }

    // ---- chunks ----

    /// Budget of a step for prompts that it cannot finish: new requests wait for it.
    fn work_for_long_prompts(&self) -> u32 {
        let chunk_min = self.config.batch.chunk_tokens_min;
        match self.arrivals.gap_ns(self.now) {
            Some(gap_ns) => self.rates.work_within(gap_ns / 4).max(chunk_min),
            None => u32::MAX,
        }
    }

    /// Returns true if the request can compute a part of its prompt.
    fn can_compute(&self, handle: Handle) -> bool {
        let Some(entry) = self.requests.get(handle) else { return false };
        let State::Prefilling(computing) = entry.life.state() else { return false };
        entry.wait().may_compute()
            && (computing.transfer.is_none() || self.computes_while_loading(entry))
            && !entry.stalled
            && entry.planned_tokens() < entry.prefill_end
            && !self.steps.is_void_for(entry)
    }

    /// Number of prompt tokens that this step does not compute.
    fn unassigned_tokens(&self, handle: Handle) -> u32 {
        let entry = &self.requests[handle];
        entry.prefill_end - entry.planned_tokens() - entry.chunk_tokens
    }

    /// Adds the next part of a prompt to the step, as large as the budget allows.
    fn assign_tokens(&mut self, handle: Handle, budget: &mut PrefillBudget) {
        if budget.is_spent() || !self.can_compute(handle) || self.is_computed_for_another(handle) {
            return;
        }
        let (page_size, config) = (self.config.cache.page_size, &self.config.batch);
        let entry = &mut self.requests[handle];
        let prompt = PromptRest {
            start: entry.planned_tokens() + entry.chunk_tokens,
            end: entry.prefill_end,
            continues_part: entry.chunk_tokens > 0,
            passages: entry.sequence.passages(),
        };
        let Some(end) = budget.part_end(config, page_size, &prompt) else {
            self.passed_over.get_or_insert(handle);
            return;
        };
        self.passed_over.take_if(|passed_over| *passed_over == handle);
        budget.assign(config, &prompt, end);
        entry.chunk_tokens += end - prompt.start;
    }

    /// Returns true if this step computes the request's next page for another one, so that the request adopts it. If
    /// another request is registered as the producer and does not compute it in this step, this one becomes the
    /// producer.
    fn is_computed_for_another(&mut self, handle: Handle) -> bool {
        let entry = &self.requests[handle];
        if self.batch.prefilling().len() < 2
            || entry.chunk_tokens > 0
            || entry.in_flight.tokens() > 0
            || !entry.takes_hits()
        {
            return false;
        }
        let next_page = entry.found_tokens() / self.config.cache.page_size;
        let Some(other) = self.find_producer(handle, next_page) else { return false };
        if self.config.queue.share_wait_max_ms == 0 && !self.are_siblings(handle, other) {
            return false;
        }
        if self.requests[other].chunk_tokens + self.requests[other].in_flight.tokens() > 0 {
            return next_page < self.cacheable_pages(handle);
        }
        if self.can_compute(other) {
            self.stop_sharing(other);
            self.announce(handle, next_page);
        }
        false
    }

    /// Adds the assigned tokens to the plan, by admission.
    fn plan_chunks(&mut self, plan: &mut Plan) {
        for &handle in self.batch.prefilling() {
            let entry = &mut self.requests[handle];
            let tokens = std::mem::take(&mut entry.chunk_tokens);
            let State::Prefilling(computing) = entry.life.state() else { continue };
            if tokens == 0 {
                continue;
            }
            let start = entry.planned_tokens();
            plan.prefills.push(Prefill {
                request: entry.id,
                slot: computing.slot,
                start,
                tokens,
                produces_token: start + tokens == entry.prefill_end && entry.remaining_tokens > 0,
                waits_for: computing.transfer.filter(|_| !planted(Bug::ForgetAwaitedLoadBack)),
                adapter: entry.planned_adapter(),
            });
        }
    }

    // ---- what others have published ----

    /// Adopts pages that other requests have published ahead of a prefill, instead of computing them again.
    fn adopt_published(&mut self, handle: Handle) {
        let entry = &self.requests[handle];
        let State::Prefilling(computing) = entry.life.state() else { return };
        let start = computing.path.depth();
        let end = self.cacheable_pages(handle).min(start + computing.tail.len() as u32);
        // A request that publishes nothing has computed more than its path holds.
        let is_behind = entry.computed_tokens >= (start + 1) * self.config.cache.page_size;
        if computing.transfer.is_some()
            || is_behind
            || self.steps.have(entry)
            || start >= end
            || planted(Bug::NeverTakeOver)
        {
            return;
        }
        let pages = self.cache.held_ahead(&computing.path, entry.sequence.run(start, end));
        if pages == 0 {
            return;
        }
        // The tree has these pages already: ours return to the pool.
        self.publish_pages(handle, start, start + pages);
        let page_size = self.config.cache.page_size;
        let entry = &mut self.requests[handle];
        let computed_tokens = (start + pages) * page_size;
        let taken_tokens = computed_tokens - entry.computed_tokens;
        entry.computed_tokens = computed_tokens;
        if entry.hit_count.is_counting() {
            entry.hit_count.add_device(taken_tokens);
            self.stats.device_hit_tokens += u64::from(taken_tokens);
        }
        self.start_sharing(handle);
    }
}
