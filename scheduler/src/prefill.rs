//! Prefills: which prompts a step computes, and how much of each.
//!
//! Most of a step goes by turn. A part of it ([`BatchConfig::shortest_first_percent`]) goes to the prompts
//! with the least left to compute, running or waiting, so that nobody's first token waits for all of
//! somebody else's prompt.
//!
//! [`BatchConfig::shortest_first_percent`]: crate::BatchConfig::shortest_first_percent

use std::cmp::Reverse;

use terrace_cache::Passage;
use terrace_cache::planted::{Bug, planted};
use terrace_fsm::State;

use crate::admission::prefill_end;
use crate::admission_order::AdmissionOrder;
use crate::config::ms;
use crate::pace::{tokens_for, work};
use crate::plan::{Plan, Prefill};
use crate::requests::{Entry, Handle};
use crate::scheduler::Scheduler;

/// What sharing a step out among prompts needs.
#[derive(Debug, Default)]
pub(crate) struct ShareOut {
    by_turn: Vec<Handle>,
    shortest: Vec<Short>,
    /// Whether somebody's prompt is not computed to its end in the step that is planned.
    is_part_left: bool,
    /// How much of the step is left for prompts that it cannot finish.
    left_for_long: u32,
    /// Whether one of those would have got more of it.
    is_held_back: bool,
    /// Whether nobody has got anything of it.
    is_untouched: bool,
    /// What was given beyond what there was, since a passage is not cut.
    overdrawn: u32,
    /// Whose passage did not fit what was left of a step: it comes first in the next.
    has_waited: Option<Handle>,
}

/// One of those with the least left to compute.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Short {
    tokens_left: u32,
    handle: Handle,
}

impl Scheduler {
    /// Shares the step's tokens out among prompts, admitting those that wait.
    pub(crate) fn plan_prefills(&mut self, plan: &mut Plan, tokens_left: &mut u32) {
        self.wake_for_adapters();
        if *tokens_left == 0
            || (self.batch.prefilling().is_empty() && self.requests.line().is_empty())
        {
            return;
        }
        for place in 0..self.batch.prefilling().len() {
            let handle = self.batch.prefilling()[place];
            self.take_over(handle);
            self.load_on(handle, plan);
            self.fetch_on(handle);
        }
        if !self.batch.prefilling().is_empty() {
            self.plan_prefetches(plan);
        }
        self.share_out.is_part_left = false;
        self.share_out.is_held_back = false;
        (self.share_out.is_untouched, self.share_out.overdrawn) = (true, 0);
        self.share_out.left_for_long = self.work_for_long_prompts();
        if let Some(handle) = self.share_out.has_waited.take() {
            self.give(handle, tokens_left);
        }
        let long = self.share_out.left_for_long;
        let percent = self.config.batch.shortest_first_percent;
        let for_shortest = (u64::from(*tokens_left) * u64::from(percent)).div_ceil(100) as u32;
        *tokens_left -= for_shortest;
        let long_for_shortest = (u64::from(long) * u64::from(percent)).div_ceil(100) as u32;
        self.share_out.left_for_long = long - long_for_shortest;
        self.share_by_turn(plan, true, tokens_left);
        // If something is left that nobody was refused, everybody who could be admitted has been.
        let is_short = *tokens_left == 0 || self.share_out.is_held_back;
        *tokens_left += for_shortest.saturating_sub(self.share_out.overdrawn);
        self.share_out.left_for_long += long_for_shortest;
        if is_short {
            self.share_among_shortest(plan, tokens_left);
        }
        if is_short || self.share_out.is_part_left {
            self.share_by_turn(plan, is_short, tokens_left);
        }
        self.plan_chunks(plan);
    }

    // ---- by turn ----

    /// Gives tokens to those who run and then, if it admits, to those who wait, in the order of
    /// admission.
    fn share_by_turn(&mut self, plan: &mut Plan, admits: bool, tokens_left: &mut u32) {
        match self.config.queue.order {
            AdmissionOrder::Priority => self.share_by_priority(plan, admits, tokens_left),
            AdmissionOrder::Arrival | AdmissionOrder::LongestPrefix => {
                for place in 0..self.batch.prefilling().len() {
                    self.give(self.batch.prefilling()[place], tokens_left);
                }
            }
        }
        if admits {
            self.admit_and_give(plan, None, tokens_left);
        }
    }

    /// Gives tokens to those who run, the most urgent first, and before them to those who wait and are
    /// more urgent. Who was submitted too long ago goes first here too.
    fn share_by_priority(&mut self, plan: &mut Plan, admits: bool, tokens_left: &mut u32) {
        let overdue = self.now.before(ms(self.config.queue.wait_max_ms));
        let mut by_turn = std::mem::take(&mut self.share_out.by_turn);
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
                self.admit_and_give(plan, Some(from), tokens_left);
            }
            self.give(handle, tokens_left);
        }
        self.share_out.by_turn = by_turn;
    }

    /// Admits waiting requests while there are tokens, and gives them theirs; with `from`, only those of at least
    /// this priority.
    fn admit_and_give(&mut self, plan: &mut Plan, from: Option<i32>, tokens_left: &mut u32) {
        if *tokens_left == 0 {
            return;
        }
        let first_new = self.batch.prefilling().len();
        self.admit(plan, from, *tokens_left);
        for place in first_new..self.batch.prefilling().len() {
            self.give(self.batch.prefilling()[place], tokens_left);
        }
    }

    // ---- by what is left ----

    /// Gives tokens to those with the least left to compute. One who waits is admitted for it only if
    /// the first in line keeps a slot and the memory that it needs.
    fn share_among_shortest(&mut self, plan: &mut Plan, tokens_left: &mut u32) {
        if *tokens_left == 0 || planted(Bug::StarveTheShort) {
            return;
        }
        let mut shortest = std::mem::take(&mut self.share_out.shortest);
        shortest.clear();
        for &handle in self.batch.prefilling() {
            if self.can_compute(handle) {
                shortest.push(Short { tokens_left: self.ungiven_tokens(handle), handle });
            }
        }
        if !self.batch.free_slots().is_empty() {
            let window = self.config.queue.window as usize;
            let running = shortest.len();
            let waiting = self.requests.line().arrivals().take(window);
            shortest.extend(waiting.map(|handle| Short { tokens_left: 0, handle }));
            for short in &mut shortest[running..] {
                short.tokens_left = self.uncached_tokens(short.handle);
            }
        }
        shortest.sort_unstable();
        let first_in_line = self.requests.line().first(self.config.queue.order);
        for &Short { handle, .. } in &shortest {
            if *tokens_left == 0 {
                break;
            }
            if self.requests[handle].waiting().is_in_line() {
                let spare = first_in_line.filter(|&first| first != handle);
                let spare = spare.filter(|&first| self.requests[first].waiting().is_in_line());
                // The first in line keeps a slot,
                if self.batch.free_slots().len() > usize::from(spare.is_some()) {
                    // and its pages with a reserve for this one.
                    let reserve = self.config.batch.decode_reserve_pages as usize;
                    let needed = |first| self.new_pages(first, self.glance(first)) + reserve;
                    self.try_admit(handle, spare.map_or(0, needed), plan);
                }
            }
            self.give(handle, tokens_left);
        }
        self.share_out.shortest = shortest;
    }

    /// Returns how many tokens of a waiting request the cache lacked at the last look: enough to tell short prompts
    /// from long ones without looking every time. At the first look the request is deferred if it waits for another,
    /// because it may not be tried while others take all tokens.
    fn uncached_tokens(&mut self, handle: Handle) -> u32 {
        if let Some(tokens) = self.requests[handle].uncached_tokens {
            return tokens;
        }
        let seen = self.glance(handle);
        self.waits_for_another(handle, seen);
        self.note_uncached(handle, seen.host)
    }

    pub(crate) fn note_uncached(&mut self, handle: Handle, cached_pages: u32) -> u32 {
        let entry = &mut self.requests[handle];
        let tokens = entry.tokens() - cached_pages * self.config.cache.page_size;
        entry.uncached_tokens = Some(tokens);
        tokens
    }

    pub(crate) fn prefill_pages(&self, handle: Handle) -> usize {
        let end = prefill_end(&self.config, &self.requests[handle]);
        end.div_ceil(self.config.cache.page_size) as usize
    }

    // ---- chunks ----

    /// How much of a step prompts may have that it cannot finish: whoever comes meanwhile waits for it.
    fn work_for_long_prompts(&self) -> u32 {
        let chunk_min = self.config.batch.chunk_tokens_min;
        match self.arrivals.gap_ns(self.now) {
            Some(gap_ns) => self.rates.work_within(gap_ns / 4).max(chunk_min),
            None => u32::MAX,
        }
    }

    /// Whether the request has a prompt to compute, and all that it takes.
    fn can_compute(&self, handle: Handle) -> bool {
        let Some(entry) = self.requests.get(handle) else { return false };
        match entry.life.state() {
            State::Prefilling(computing) => {
                entry.waiting().may_compute()
                    && (computing.transfer.is_none() || self.computes_while_loading(entry))
                    && !entry.stalled
                    && entry.planned_tokens() < entry.prefill_end
                    && !self.steps.is_in_vain_for(entry)
            }
            _ => false,
        }
    }

    /// How many tokens of its prompt this step does not compute yet.
    fn ungiven_tokens(&self, handle: Handle) -> u32 {
        let entry = &self.requests[handle];
        entry.prefill_end - entry.planned_tokens() - entry.chunk_tokens
    }

    /// Lets the step compute the next part of a prompt, as much as there are tokens for; parts end with a
    /// page where they can, so that all of it can be published.
    fn give(&mut self, handle: Handle, tokens_left: &mut u32) {
        if *tokens_left == 0 || !self.can_compute(handle) || self.is_given_to_another(handle) {
            return;
        }
        let (page_size, config) = (self.config.cache.page_size, &self.config.batch);
        let entry = &mut self.requests[handle];
        let start = entry.planned_tokens() + entry.chunk_tokens;
        let in_budget = start.saturating_add(tokens_for(config, start, *tokens_left));
        let mut end = entry.prefill_end.min(in_budget);
        if end < entry.prefill_end {
            let in_step = end;
            let for_long = tokens_for(config, start, self.share_out.left_for_long);
            end = end.min(start.saturating_add(for_long));
            self.share_out.is_held_back |= end < in_step;
            let page_end = end - end % page_size;
            end = match page_end > start {
                true => page_end,
                // Less than a page is better than nothing, but not than to end with one.
                false if entry.chunk_tokens > 0 && start.is_multiple_of(page_size) => start,
                false => end,
            };
            let passages = entry.sequence.passages();
            if !passages.is_empty() && !planted(Bug::CutPassages) {
                match end_outside_passages(passages, start, end, self.share_out.is_untouched) {
                    Some(outside) => end = outside,
                    None => {
                        // Others may get what is too little for it.
                        (self.share_out.is_part_left, self.share_out.is_held_back) = (true, true);
                        self.share_out.has_waited.get_or_insert(handle);
                        return;
                    }
                }
            }
        }
        let counted = work(config, start, end - start);
        self.share_out.is_untouched = false;
        self.share_out.has_waited.take_if(|waits| *waits == handle);
        self.share_out.overdrawn += counted.saturating_sub(*tokens_left);
        if end < entry.prefill_end {
            self.share_out.is_part_left = true;
            let left = &mut self.share_out.left_for_long;
            *left = left.saturating_sub(counted);
        }
        entry.chunk_tokens += end - start;
        *tokens_left = tokens_left.saturating_sub(counted);
    }

    /// Whether this step computes the request's next page for another already: it is taken over then. If
    /// another was to compute it and is not there yet, this one does, and the other takes over.
    fn is_given_to_another(&mut self, handle: Handle) -> bool {
        let entry = &self.requests[handle];
        if self.batch.prefilling().len() < 2
            || entry.chunk_tokens > 0
            || entry.flying.tokens > 0
            || !entry.takes_hits()
        {
            return false;
        }
        let next_page = entry.found_tokens() / self.config.cache.page_size;
        let Some(other) = self.who_brings(handle, next_page) else { return false };
        if self.config.queue.share_wait_max_ms == 0 && !self.are_siblings(handle, other) {
            return false;
        }
        if self.requests[other].chunk_tokens + self.requests[other].flying.tokens > 0 {
            return next_page < self.cacheable_pages(handle);
        }
        if self.can_compute(other) {
            self.stop_sharing(other);
            self.announce(handle, next_page);
        }
        false
    }

    /// Writes what was given to the plan, by admission.
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
                adapter: entry.adapter_told(),
            });
        }
    }

    // ---- what others have published ----

    /// Takes over the pages that others have published ahead of a prefill, instead of computing them
    /// once more.
    fn take_over(&mut self, handle: Handle) {
        let entry = &self.requests[handle];
        let State::Prefilling(computing) = entry.life.state() else { return };
        let start = computing.path.depth();
        let end = self.cacheable_pages(handle).min(start + computing.tail.len() as u32);
        // Who publishes nothing has computed more than its path tells.
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
        // To the tree they are pages that it has already: ours go back to the pool.
        self.publish_pages(handle, start, start + pages);
        let page_size = self.config.cache.page_size;
        let entry = &mut self.requests[handle];
        let computed_tokens = (start + pages) * page_size;
        let taken_tokens = computed_tokens - entry.computed_tokens;
        entry.computed_tokens = computed_tokens;
        if entry.counts_loaded {
            entry.hits.device_tokens += taken_tokens;
            self.stats.device_hit_tokens += u64::from(taken_tokens);
        }
        self.start_sharing(handle);
    }
}

/// Where a part of a prompt ends that may not end inside of a passage: before the passage, or if it begins there
/// and the step is all its own, behind it. Nothing if it has to wait for such a step.
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
