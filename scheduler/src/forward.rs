//! The forward step: which prompts and decodes it computes, and what its results change.

use std::cell::Cell;

use terrace_cache::planted::{Bug, planted};
use terrace_fsm::{Event as LifeEvent, FailReason, Slot, State, StateName};

use crate::admission::prefill_end;
use crate::config::Config;
use crate::event::StepResult;
use crate::pace::work;
use crate::plan::{Decode, Plan, RowChange};
use crate::reading::Reading;
use crate::requests::{Entry, Handle};
use crate::scheduler::Scheduler;
use crate::step::{Member, Step, next_of};

impl Scheduler {
    /// Fills the plan with the next step, if there is something to compute.
    pub(crate) fn plan_forward(&mut self, plan: &mut Plan) {
        let mut tokens_left = self.config.batch.step_tokens_max;
        let retractions = self.stats.retractions;
        if self.config.batch.mixed {
            self.make_room_for(plan, &[StateName::Prefilling, StateName::Decoding]);
            self.plan_decodes(plan, &mut tokens_left);
            self.plan_prefills(plan, &mut tokens_left);
        } else if self.steps.prefill_streak() < self.config.batch.prefill_streak_max {
            self.plan_prefills_alone(plan, &mut tokens_left);
            if plan.prefills.is_empty() {
                self.plan_decodes_alone(plan, &mut tokens_left);
            }
        } else {
            self.plan_decodes_alone(plan, &mut tokens_left);
            if plan.decodes.is_empty() {
                self.plan_prefills_alone(plan, &mut tokens_left);
            }
        }
        let nothing = plan.prefills.is_empty() && plan.decodes.is_empty();
        if nothing && self.stats.retractions > retractions {
            // What was given up may serve another, and nothing would remind us later.
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

    fn plan_prefills_alone(&mut self, plan: &mut Plan, tokens_left: &mut u32) {
        if self.batch.prefilling() > 0 {
            self.make_room_for(plan, &[StateName::Prefilling]);
        }
        self.plan_prefills(plan, tokens_left);
    }

    fn plan_decodes_alone(&mut self, plan: &mut Plan, tokens_left: &mut u32) {
        self.make_room_for(plan, &[StateName::Decoding]);
        self.plan_decodes(plan, tokens_left);
    }

    // ---- decodes ----

    fn plan_decodes(&mut self, plan: &mut Plan, tokens_left: &mut u32) {
        for place in 0..self.batch.running().len() {
            let handle = self.batch.running()[place];
            let entry = &self.requests[handle];
            let State::Decoding(computing) = entry.life.state() else { continue };
            if entry.stalled {
                continue;
            }
            let tokens = decode_tokens(&self.config, entry);
            *tokens_left -= tokens;
            plan.decodes.push(Decode {
                request: entry.id,
                slot: computing.slot,
                start: entry.computed_tokens,
                tokens,
            });
        }
    }

    /// How often the step can be repeated without a plan in between: nobody waits for one, and every
    /// decode has room on its pages and tokens to produce.
    fn repeats_max(&self, plan: &Plan) -> u32 {
        let repeats_max = self.config.batch.repeats_max;
        let all_decode = plan.decodes.len() == self.batch.running().len();
        if repeats_max == 0 || !all_decode || self.somebody_waits_for_a_plan() {
            return 0;
        }
        let page_size = self.config.cache.page_size;
        let repeats = self.batch.running().iter().map(|&handle| {
            let entry = &self.requests[handle];
            let room = entry.device_pages() * page_size - entry.computed_tokens;
            room.min(entry.remaining_tokens()).saturating_sub(1)
        });
        repeats.fold(repeats_max, u32::min)
    }

    /// Whether a plan may do something for a request without anything having happened before it.
    fn somebody_waits_for_a_plan(&self) -> bool {
        !self.requests.line().is_empty()
            || !self.drains.nobody_waits()
            || self.reading.as_ref().is_some_and(Reading::has_somebody_to_decide_about)
    }

    /// Gives every running request in one of these states the pages for what it computes next. In
    /// case of need the worst ranked give up theirs, or sit out while pages are on their way.
    fn make_room_for(&mut self, plan: &mut Plan, states: &[StateName]) {
        for place in 0..self.batch.running().len() {
            let handle = self.batch.running()[place];
            let entry = &mut self.requests[handle];
            if !states.contains(&entry.state()) {
                continue;
            }
            entry.stalled = false;
            let missing = missing_pages(&self.config, entry);
            if missing > 0 && !self.grow(handle, missing) {
                self.make_room_by_retraction(handle, missing, plan);
            }
        }
        self.batch.forget_who_left(&self.requests);
    }

    /// Gives the request so many more device pages, evicting if need be.
    pub(crate) fn grow(&mut self, handle: Handle, pages: usize) -> bool {
        if !self.cache.free_device_pages(pages) {
            return false;
        }
        let grown = Cell::new(false);
        self.happen(handle, &LifeEvent::Grow { pages, grown: &grown });
        grown.get()
    }

    // ---- the step itself, and rows ----

    fn begin_step(&mut self, plan: &mut Plan) {
        let mut members = self.steps.members();
        let holder = |slot: Slot| self.batch.holder(slot).expect("a member has its slot");
        members.extend(plan.prefills.iter().map(|prefill| Member {
            handle: holder(prefill.slot),
            request: prefill.request,
            end: prefill.start + prefill.tokens,
            tokens_max: prefill.produces_token.into(),
            is_decode: false,
        }));
        members.extend(plan.decodes.iter().map(|decode| Member {
            handle: holder(decode.slot),
            request: decode.request,
            end: decode.start + decode.tokens,
            tokens_max: decode.tokens + plan.repeats_max,
            is_decode: true,
        }));
        for member in &members {
            self.plan_row(member.handle, plan);
        }
        plan.step = Some(self.steps.begin(self.now, plan.repeats_max, members));
        self.stats.steps += 1;
    }

    /// Tells the engine which entries of a row it does not know yet.
    fn plan_row(&mut self, handle: Handle, plan: &mut Plan) {
        let entry = &mut self.requests[handle];
        let computing = entry.life.state().computing().expect("a member computes");
        let published = computing.path.depth();
        let entries = published + computing.tail.len() as u32;
        let first_entry = entry.row_entries;
        if first_entry >= entries {
            return;
        }
        let first = plan.row_pages.len() as u32;
        if first_entry < published {
            self.cache.device_pages(&computing.path, first_entry, &mut plan.row_pages);
        }
        let known_tail = first_entry.saturating_sub(published) as usize;
        plan.row_pages.extend_from_slice(&computing.tail.as_slice()[known_tail..]);
        let pages = first..plan.row_pages.len() as u32;
        plan.rows.push(RowChange { slot: computing.slot, first_entry, pages });
        entry.row_entries = entries;
    }

    // ---- results ----

    /// The step's KV is written: publishes it, appends the new tokens, lets requests go on or end.
    pub(crate) fn step_done(&mut self, step: Step, results: &[StepResult<'_>]) {
        let mut repeated = 0;
        if step.repeats_max > 0 {
            let longest = results.iter().map(|result| result.tokens.len() as u64).max();
            repeated = longest.unwrap_or(1) - 1;
            self.stats.steps += repeated;
        }
        self.observe_rates(&step, repeated);
        let mut in_order = results;
        for member in &step.members {
            let ours = |result: &&StepResult<'_>| result.request == member.request;
            let result = match member.tokens_max {
                0 => None,
                _ => next_of(member, &mut in_order).or_else(|| results.iter().find(ours)),
            };
            self.member_done(*member, result);
        }
        self.steps.recycle(step);
    }

    fn member_done(&mut self, member: Member, result: Option<&StepResult<'_>>) {
        let handle = member.handle;
        let Some(entry) = self.requests.get_mut(handle) else { return };
        entry.failed_steps = 0;
        let new_tokens = result.map_or(0, |result| result.tokens.len() as u32);
        if member.is_decode {
            // Of the positions computed, those hold that led to a token.
            entry.computed_tokens += match planted(Bug::BelieveDrafts) {
                true => (member.end - entry.computed_tokens).min(new_tokens + 1),
                false => new_tokens,
            };
        } else {
            self.stats.prefilled_tokens += u64::from(member.end - entry.computed_tokens);
            entry.computed_tokens = member.end;
        }
        if let Some(result) = result {
            entry.sequence.extend(result.tokens);
            self.stats.generated_tokens += u64::from(new_tokens);
        }
        let completed =
            result.is_some_and(|result| result.finished) || entry.remaining_tokens() == 0;
        let prefilled = !member.is_decode && result.is_some();
        self.publish(handle);
        if completed {
            self.complete(handle);
        } else if prefilled {
            self.stop_sharing(handle);
            self.batch.prefill_ended();
            self.happen(handle, &LifeEvent::PrefillEnded);
        } else if !member.is_decode {
            self.start_sharing(handle);
        }
    }

    /// Makes the whole pages that are computed visible to others. Most tokens complete none.
    fn publish(&mut self, handle: Handle) {
        let entry = &self.requests[handle];
        let Some(computing) = entry.life.state().computing() else { return };
        let start = computing.path.depth();
        let computed = entry.computed_tokens + u32::from(planted(Bug::PublishUncomputedPage));
        let page_size = self.config.cache.page_size;
        if computed >= (start + 1) * page_size {
            self.publish_pages(handle, start, computed / page_size);
        }
    }

    // Apart, so that looking costs little.
    #[inline(never)]
    pub(crate) fn publish_pages(&mut self, handle: Handle, start: u32, end: u32) {
        let published = Cell::new(None);
        let Entry { life, sequence, priority, .. } = &mut self.requests[handle];
        let (run, priority) = (sequence.run(start, end), *priority);
        let event = LifeEvent::Computed { run, priority, published: &published };
        life.handle(&event, &mut self.cache);
        let duplicate = published.get().and_then(|published| published.first_duplicate);
        if let Some(first) = duplicate.filter(|_| !planted(Bug::KeepRowOfDuplicate)) {
            // The tree had some of these pages: the row must name the tree's, not ours.
            let entry = &mut self.requests[handle];
            entry.row_entries = entry.row_entries.min(first);
        }
    }

    /// The step wrote nothing that can be trusted: its members try again, but not for ever.
    pub(crate) fn step_failed(&mut self, step: Step) {
        self.stats.steps_failed += 1;
        for member in &step.members {
            let Some(entry) = self.requests.get_mut(member.handle) else { continue };
            entry.failed_steps += 1;
            if planted(Bug::BelieveFailedStep) && member.tokens_max == 0 {
                entry.computed_tokens = member.end;
            }
            if entry.failed_steps >= self.config.batch.step_failures_max {
                self.end(member.handle, &LifeEvent::Fail(FailReason::StepFailed));
            }
        }
        self.steps.recycle(step);
    }

    /// Measures how fast prompts are computed, beside decodes too: under load there are always some.
    fn observe_rates(&mut self, step: &Step, repeated: u64) {
        let took = self.now.since(step.started);
        // Prefills come before decodes.
        let has_decodes = step.members.last().is_some_and(|member| member.is_decode);
        if step.members.first().is_some_and(|member| member.is_decode) {
            self.rates.observe_decodes(took, repeated);
            return;
        }
        let prefills = step.members.iter().take_while(|member| !member.is_decode);
        let (mut tokens, mut counted) = (0, 0);
        for member in prefills {
            let Some(entry) = self.requests.get(member.handle) else { continue };
            let (start, computed) = (entry.computed_tokens, member.end - entry.computed_tokens);
            tokens += computed;
            counted += work(&self.config.batch, start, computed);
        }
        self.rates.observe_prefill(tokens, counted, took, has_decodes);
    }
}

/// For how many positions a decode needs room.
fn decode_tokens(config: &Config, entry: &Entry) -> u32 {
    config.batch.decode_tokens.min(entry.remaining_tokens())
}

/// Device pages that a running request lacks for what it computes next.
fn missing_pages(config: &Config, entry: &Entry) -> usize {
    let end = match entry.life.state() {
        State::Decoding(_) => {
            let late = u32::from(planted(Bug::GrowOnePageTooLate));
            entry.computed_tokens + decode_tokens(config, entry) - late
        }
        // A prefill has all its pages from the start, unless its load-back fell short.
        State::Prefilling(computing) if computing.load_back.is_none() => prefill_end(config, entry),
        _ => 0,
    };
    let (page_size, pages) = (config.cache.page_size, entry.device_pages());
    match end.saturating_sub(pages * page_size) {
        0 => 0,
        tokens => tokens.div_ceil(page_size) as usize,
    }
}
