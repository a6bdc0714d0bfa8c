//! Forward steps: prompts and decodes of a step, and the effect of its results.

use std::time::Duration;

use terrace_cache::Cache;
use terrace_cache::planted::{Bug, planted};
use terrace_fsm::{Event as LifeEvent, FailReason, RequestId, Slot, State};

use super::Scheduler;
use super::admission::prefill_end;
use crate::config::Config;
use crate::event::StepResult;
use crate::ids::Handle;
use crate::l3_reads::L3Reads;
use crate::operations::Operations;
use crate::plan::{Decode, Plan, Prefill, RowChange};
use crate::prompt_cost::prompt_cost;
use crate::requests::Entry;
use crate::results::ResultReader;
use crate::step::{Member, Step};

impl Scheduler {
    /// Adds the next step to the plan, if there is something to compute.
    pub(super) fn plan_forward(&mut self, plan: &mut Plan) {
        let mut tokens_left = self.config.batch.step_tokens_max;
        let retractions = self.stats.retractions;
        if self.plan_members(plan, &mut tokens_left).is_none() {
            return;
        }
        let nothing = plan.prefills.is_empty() && plan.decodes.is_empty();
        if nothing && self.stats.retractions > retractions {
            // The released pages may serve another request, and no event would start it later.
            self.plan_prefills(plan, &mut tokens_left);
        }
        self.steps.note_kind(plan);
        if plan.prefills.is_empty() && plan.decodes.is_empty() {
            return;
        }
        self.copy_ahead(plan);
        plan.repeats_max = self.repeats_max(plan);
        self.begin_step(plan);
    }

    /// Adds prompts and decodes to the plan. Returns `None` if it has to wait for the steps in flight.
    fn plan_members(&mut self, plan: &mut Plan, tokens_left: &mut u32) -> Option<()> {
        if !self.preempt(plan) {
            return None;
        }
        if self.config.batch.mixed {
            self.make_room_for(plan, |state| state.computing().is_some())?;
            self.plan_decodes(plan, tokens_left);
            self.plan_prefills(plan, tokens_left);
        } else if self.steps.prefill_streak() < self.config.batch.prefill_streak_max {
            self.plan_prefills_alone(plan, tokens_left)?;
            if plan.prefills.is_empty() {
                self.plan_decodes_alone(plan, tokens_left)?;
            }
        } else {
            self.plan_decodes_alone(plan, tokens_left)?;
            if plan.decodes.is_empty() {
                self.plan_prefills_alone(plan, tokens_left)?;
            }
        }
        Some(())
    }

    fn plan_prefills_alone(&mut self, plan: &mut Plan, tokens_left: &mut u32) -> Option<()> {
        if !self.batch.prefilling().is_empty() {
            self.make_room_for(plan, |state| matches!(state, State::Prefilling(_)))?;
        }
        self.plan_prefills(plan, tokens_left);
        Some(())
    }

    fn plan_decodes_alone(&mut self, plan: &mut Plan, tokens_left: &mut u32) -> Option<()> {
        match self.steps.is_empty() {
            true => self.make_room_for(plan, |state| matches!(state, State::Decoding(_)))?,
            // Requests whose prompt ends with a step in flight decode in the next.
            false => self.make_room_for(plan, |state| state.computing().is_some())?,
        }
        self.plan_decodes(plan, tokens_left);
        Some(())
    }

    // ---- decodes ----

    fn plan_decodes(&mut self, plan: &mut Plan, tokens_left: &mut u32) {
        if !self.steps.is_empty() {
            return self.plan_decodes_ahead(plan, tokens_left);
        }
        let decode_tokens = self.config.batch.decode_tokens;
        for &handle in self.batch.running() {
            let entry = &self.requests[handle];
            let State::Decoding(computing) = entry.life.state() else { continue };
            if entry.stalled {
                continue;
            }
            let tokens = decode_tokens.min(entry.remaining_tokens);
            *tokens_left -= tokens;
            let (slot, start) = (computing.slot, entry.computed_tokens);
            let (request, adapter) = (entry.id, entry.planned_adapter());
            plan.decodes.push(Decode { request, slot, start, tokens, input: None, adapter });
        }
    }

    /// Adds decodes behind steps in flight.
    #[inline(never)]
    fn plan_decodes_ahead(&mut self, plan: &mut Plan, tokens_left: &mut u32) {
        for &handle in self.batch.running() {
            let entry = &self.requests[handle];
            let computing = match entry.life.state() {
                State::Decoding(computing) => computing,
                // The prompt ends with a step in flight.
                State::Prefilling(computing) if entry.in_flight.new_tokens() > 0 => computing,
                State::Submitted { .. }
                | State::Prefetching { .. }
                | State::PrefetchDone { .. }
                | State::Prefilling(_)
                | State::Retracted { .. }
                | State::Draining { .. }
                | State::WritingBack { .. }
                | State::Finished
                | State::Aborted
                | State::Failed(_) => continue,
            };
            let tokens = decode_tokens(&self.config, entry);
            if tokens == 0 || self.steps.is_void_for(entry) {
                continue;
            }
            *tokens_left -= tokens;
            let (slot, start) = (computing.slot, entry.planned_tokens());
            let input = entry.in_flight.input();
            let (request, adapter) = (entry.id, entry.planned_adapter());
            plan.decodes.push(Decode { request, slot, start, tokens, input, adapter });
        }
    }

    /// Maximum number of repetitions of the step without a plan in between: no request waits for a plan, and every
    /// decode has room on its pages and tokens to produce.
    fn repeats_max(&self, plan: &Plan) -> u32 {
        let repeats_max = self.config.batch.repeats_max;
        let all_decode = plan.decodes.len() == self.batch.running().len();
        if repeats_max == 0 || !all_decode || self.has_work_for_a_plan() {
            return 0;
        }
        let page_size = self.config.cache.page_size;
        let repeats = self.batch.running().iter().map(|&handle| {
            let entry = &self.requests[handle];
            let room = entry.device_pages() * page_size - entry.computed_tokens;
            room.min(entry.remaining_tokens).saturating_sub(1)
        });
        repeats.fold(repeats_max, u32::min)
    }

    /// Returns true if a plan may help a request without any event before it.
    fn has_work_for_a_plan(&self) -> bool {
        !self.requests.queue().is_empty()
            || !self.pending_write_backs.is_empty()
            || self.l3_reads.as_ref().is_some_and(L3Reads::has_queued)
    }

    /// Gives every running request in such a state the pages for its next step. If memory is short, the lowest ranked
    /// requests are retracted, or sit out while pages become free. With steps in flight nothing is retracted, and
    /// `None` says that there is nothing to plan before they have ended.
    fn make_room_for(&mut self, plan: &mut Plan, is_meant: impl Fn(&State) -> bool) -> Option<()> {
        for place in 0..self.batch.running().len() {
            let handle = self.batch.running()[place];
            let entry = &mut self.requests[handle];
            if !is_meant(entry.life.state()) {
                continue;
            }
            entry.stalled = false;
            let missing = missing_pages(&self.config, entry);
            if missing > 0 && !self.grow(handle, missing) {
                if !self.steps.is_empty() {
                    return None;
                }
                self.make_room_by_retraction(handle, missing, plan);
            }
        }
        self.batch.remove_departed(&self.requests);
        Some(())
    }

    /// Gives the request more device pages, with eviction if necessary.
    pub(super) fn grow(&mut self, handle: Handle, pages: usize) -> bool {
        if !self.cache.free_device_pages(pages) {
            return false;
        }
        self.transition(handle, LifeEvent::Grow { pages }).grown()
    }

    // ---- the step itself, and rows ----

    fn begin_step(&mut self, plan: &mut Plan) {
        let mut step = self.steps.new_step(self.now, plan.repeats_max);
        let holder = |slot: Slot| self.batch.holder(slot).expect("a member has its slot");
        step.extend(plan.prefills.iter().map(|prefill| Member {
            handle: holder(prefill.slot),
            request: prefill.request,
            start: prefill.start,
            end: prefill.start + prefill.tokens,
            tokens_max: prefill.produces_token.into(),
            is_decode: false,
            epoch: 0,
        }));
        let repeats_max = plan.repeats_max;
        step.extend(plan.decodes.iter().map(|decode| Member {
            handle: holder(decode.slot),
            request: decode.request,
            start: decode.start,
            end: decode.start + decode.tokens,
            tokens_max: decode.tokens + repeats_max,
            is_decode: true,
            epoch: 0,
        }));
        let waits = |(place, prefill): (usize, &Prefill)| Some((place, prefill.waits_for?));
        step.extend_waits(plan.prefills.iter().enumerate().filter_map(waits));
        for member in step.members() {
            plan_row(&mut self.requests[member.handle], &self.cache, &self.operations, plan);
        }
        if self.steps.go_ahead() {
            let (id, requests) = (step.id(), &mut self.requests);
            step.set_epochs(|row, member| {
                let in_flight = &mut requests[member.handle].in_flight;
                in_flight.launch(member.tokens(), member.produces_tokens(), id, row)
            });
        }
        (plan.step, plan.behind) = (Some(step.id()), self.steps.last().map(|before| before.id()));
        self.stats.steps += 1;
        self.steps.launch(step);
        self.cool_pages();
    }

    fn cool_pages(&mut self) {
        if !planted(Bug::ReuseBeforeLaterStep) {
            self.cache.cool_device_pages_until(self.steps.cool_until());
        }
    }

    // ---- results ----

    /// Applies the results of a step: publishes its pages, appends the new tokens, and lets requests continue or end.
    pub(super) fn step_done(
        &mut self,
        step: Step,
        took: Duration,
        results: &[StepResult<'_>],
        failed: &[RequestId],
    ) {
        if !step.is_void() {
            let mut repeated = 0;
            if step.repeats_max() > 0 {
                let longest = results.iter().map(|result| result.tokens.len() as u64).max();
                repeated = longest.unwrap_or(1) - 1;
                self.stats.steps += repeated;
            }
            self.observe_rates(&step, took, repeated);
            let mut reader = ResultReader::new(results, self.steps.take_index());
            for member in step.members() {
                let result = match member.produces_tokens() {
                    false => None,
                    true => reader.next(member.request),
                };
                if !failed.is_empty() && failed.contains(&member.request) {
                    self.member_failed(member);
                } else {
                    self.member_done(member, result);
                }
            }
            self.steps.give_index(reader.into_index());
        }
        self.step_over(step);
    }

    /// Applies reports that were held back for load-backs and no longer wait.
    pub(super) fn end_held_steps(&mut self) {
        if planted(Bug::PublishWhileLoading) {
            self.end_load_backs_early();
        }
        while let Some(report) = self.steps.take_held(&self.requests) {
            let (at, done) = report.into_parts();
            let (step, took) = self.steps.end_first(at);
            match done {
                Some(done) => self.step_done(step, took, &done.results(), done.failed()),
                None => self.step_failed(step),
            }
        }
    }

    /// Releases the resources of an ended step.
    fn step_over(&mut self, step: Step) {
        self.cache.cooled(step.id().0);
        self.steps.recycle(step, &mut self.cache);
        self.cool_pages();
    }

    fn member_done(&mut self, member: &Member, result: Option<&StepResult<'_>>) {
        let handle = member.handle;
        let Some(entry) = self.requests.get_mut(handle) else { return };
        if self.steps.go_ahead() {
            if !member.counts_for(entry) {
                return;
            }
            entry.in_flight.land(member.tokens(), member.produces_tokens());
        }
        entry.failed_steps = 0;
        let new_tokens = result.map_or(0, |result| result.tokens.len() as u32);
        if member.is_decode {
            // Only the positions that led to a token are valid.
            entry.computed_tokens += match planted(Bug::BelieveDrafts) {
                true => (member.end - member.start).min(new_tokens + 1),
                false => new_tokens,
            };
        } else {
            self.stats.prefilled_tokens += u64::from(member.end - member.start);
            entry.computed_tokens = member.end;
        }
        if let Some(result) = result {
            entry.sequence.extend(result.tokens);
            entry.remaining_tokens -= new_tokens;
            self.stats.generated_tokens += u64::from(new_tokens);
        }
        let has_all = entry.remaining_tokens == 0 && entry.computed_tokens >= entry.prefill_end;
        let completed = has_all || result.is_some_and(|result| result.finished);
        let prefilled = !member.is_decode && result.is_some();
        let due = entry.unpublished_pages(self.config.cache.page_size);
        if let Some(pages) = due {
            self.publish_pages(handle, pages.start, pages.end);
        }
        if completed {
            self.complete(handle);
        } else if prefilled {
            self.stop_sharing(handle);
            self.batch.prefill_ended(handle);
            self.transition(handle, LifeEvent::PrefillEnded);
            self.release_fetched(handle);
            self.drain_prompt(handle);
        } else if !member.is_decode {
            self.start_sharing(handle);
        }
    }

    /// Publishes whole pages that are computed.
    // Separate, because most tokens complete no page.
    #[inline(never)]
    pub(super) fn publish_pages(&mut self, handle: Handle, start: u32, end: u32) {
        let Entry { life, sequence, priority, options, .. } = &mut self.requests[handle];
        let (run, priority) = (sequence.run(start, end).reaching(options.writes), *priority);
        let change = life.handle(LifeEvent::Computed { run, priority }, &mut self.cache);
        let duplicate = change.output.published().and_then(|published| published.first_duplicate);
        if let Some(first) = duplicate.filter(|_| !planted(Bug::KeepRowOfDuplicate)) {
            // The tree had some of these pages: the row must name its pages.
            let entry = &mut self.requests[handle];
            entry.row_entries = entry.row_entries.min(first);
        }
    }

    /// Discards a failed step: its members try again, up to a limit, and the steps behind it are void.
    pub(super) fn step_failed(&mut self, step: Step) {
        self.stats.steps_failed += 1;
        if !step.is_void() {
            for member in step.members() {
                self.member_failed(member);
            }
            if !planted(Bug::BelieveStepBehindFailed) {
                for member in self.steps.void_all() {
                    if let Some(entry) = self.requests.get_mut(member.handle) {
                        entry.in_flight.cancel();
                    }
                }
            }
        }
        self.step_over(step);
    }

    /// Discards a member's part of a step.
    fn member_failed(&mut self, member: &Member) {
        let Some(entry) =
            self.requests.get_mut(member.handle).filter(|entry| member.counts_for(entry))
        else {
            return;
        };
        entry.failed_steps += 1;
        if self.steps.go_ahead() {
            match planted(Bug::BelieveStepBehindFailed) {
                true => entry.in_flight.land(member.tokens(), member.produces_tokens()),
                false => entry.in_flight.cancel(),
            }
        }
        if planted(Bug::BelieveFailedStep) && !member.produces_tokens() {
            entry.computed_tokens = member.end;
        }
        if entry.failed_steps >= self.config.batch.step_failures_max {
            self.end(member.handle, LifeEvent::Fail(FailReason::StepFailed));
        }
    }

    /// Measures the speed of prompts, beside decodes too: under load there are always some.
    fn observe_rates(&mut self, step: &Step, took: Duration, repeated: u64) {
        if step.has_waits() {
            // The step may have waited longer than it computed.
            return;
        }
        // Prefills are before decodes.
        let has_decodes = step.members().last().is_some_and(|member| member.is_decode);
        if step.members().first().is_some_and(|member| member.is_decode) {
            self.rates.observe_decodes(took, repeated);
            return;
        }
        let prefills = step.members().iter().take_while(|member| !member.is_decode);
        let (mut tokens, mut counted) = (0, 0);
        for member in prefills.filter(|member| self.requests.get(member.handle).is_some()) {
            let computed = member.end - member.start;
            tokens += computed;
            counted += prompt_cost(&self.config.batch, member.start, computed);
        }
        self.rates.observe_prefill(tokens, counted, took, has_decodes);
    }
}

/// Adds the entries of a row that the engine does not know to the plan.
#[inline]
fn plan_row(entry: &mut Entry, cache: &Cache, operations: &Operations, plan: &mut Plan) {
    let computing = entry.life.state().computing().expect("a member computes");
    if computing.transfer.is_some() || entry.row_entries < computing.device_pages() {
        plan_changed_row(entry, cache, operations, plan);
    }
}

// Separate, because most rows do not change.
#[inline(never)]
fn plan_changed_row(entry: &mut Entry, cache: &Cache, operations: &Operations, plan: &mut Plan) {
    let computing = entry.life.state().computing().expect("a member computes");
    let (published, loading) = (computing.path.depth(), operations.loading(computing));
    let entries = published + (loading.len() + computing.tail.len()) as u32;
    let first_entry = entry.row_entries;
    if first_entry >= entries {
        return;
    }
    let first = plan.row_pages.len() as u32;
    if first_entry < published {
        cache.device_pages(&computing.path, first_entry, &mut plan.row_pages);
    }
    let mut known = first_entry.saturating_sub(published) as usize;
    if !loading.is_empty() {
        let of_loading = known.min(loading.len());
        plan.row_pages.extend_from_slice(&loading[of_loading..]);
        known -= of_loading;
    }
    plan.row_pages.extend_from_slice(&computing.tail.as_slice()[known..]);
    let pages = first..plan.row_pages.len() as u32;
    plan.rows.push(RowChange { slot: computing.slot, first_entry, pages });
    entry.row_entries = entries;
}

/// Number of positions that a decode needs room for: 0 if the steps in flight produce all tokens that it may, or a
/// token that it has to wait for.
#[inline]
fn decode_tokens(config: &Config, entry: &Entry) -> u32 {
    match entry.in_flight.new_tokens() {
        0 => config.batch.decode_tokens.min(entry.remaining_tokens),
        _ if entry.options.waits_for_tokens => 0,
        new_tokens => config.batch.decode_tokens.min(entry.remaining_tokens - new_tokens),
    }
}

/// Number of device pages that a running request lacks for its next step.
#[inline]
fn missing_pages(config: &Config, entry: &Entry) -> usize {
    let (computing, end) = match entry.life.state() {
        State::Decoding(computing) => {
            let late = u32::from(planted(Bug::GrowOnePageTooLate));
            (computing, entry.planned_tokens() + decode_tokens(config, entry) - late)
        }
        // A prefill has all its pages from the start, unless its load-back was incomplete.
        State::Prefilling(computing) if computing.transfer.is_none() => {
            (computing, prefill_end(config, entry))
        }
        State::Submitted { .. }
        | State::Prefetching { .. }
        | State::PrefetchDone { .. }
        | State::Prefilling(_)
        | State::Retracted { .. }
        | State::Draining { .. }
        | State::WritingBack { .. }
        | State::Finished
        | State::Aborted
        | State::Failed(_) => return 0,
    };
    let (page_size, pages) = (config.cache.page_size, computing.device_pages());
    match end.saturating_sub(pages * page_size) {
        0 => 0,
        tokens => tokens.div_ceil(page_size) as usize,
    }
}
