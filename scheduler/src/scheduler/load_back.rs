//! Load-backs: cached pages of an admitted request are copied from host instead of being recomputed.

use terrace_cache::planted::{Bug, planted};
use terrace_cache::{Depths, DevicePages, HostPin};
use terrace_fsm::{Event as LifeEvent, OpId, State};

use super::Scheduler;
use crate::config::ms;
use crate::deferred::Wake;
use crate::event::Outcome;
use crate::ids::Handle;
use crate::operations::{Operation, Reported, Work};
use crate::plan::{Copy, CopyDirection, Plan};
use crate::requests::Entry;
use crate::wait::Wait;

impl Scheduler {
    /// Number of pages that can be loaded from host within the share of load-backs.
    pub(super) fn loadable_pages(&self, handle: Handle, found: Depths) -> u32 {
        let in_flight = self.operations.counts().load_backs.in_flight_pages;
        let share = self.config.copies.load_back_pages_max.saturating_sub(in_flight);
        self.loadable_within(share, handle, found)
    }

    fn loadable_within(&self, share: u32, handle: Handle, found: Depths) -> u32 {
        let pages = (found.host - found.device).min(share);
        let possible = pages >= self.config.copies.load_back_threshold_pages
            && !planted(Bug::NeverLoadBack)
            && !found.arriving
            && !self.requests[handle].distrusts_host;
        if possible { pages } else { 0 }
    }

    /// Defers a request until other load-backs have ended, if it can then load pages that it would have to recompute
    /// now. It does not wait for late load-backs, and waits only once.
    pub(super) fn defer_for_share(&mut self, handle: Handle, found: Depths) -> bool {
        let counts = self.operations.counts().load_backs;
        let others = counts.in_flight_pages - counts.quarantined_pages;
        if others == 0 || self.requests[handle].patience.for_share() {
            return false;
        }
        let copies = &self.config.copies;
        let share = copies.load_back_pages_max.saturating_sub(counts.quarantined_pages);
        let wanted = self.loadable_within(share, handle, found);
        let is_worth_it = wanted > self.loadable_pages(handle, found)
            && self.rates.load_back_pays(wanted, wanted * self.config.cache.page_size);
        if is_worth_it {
            let until = self.now.after(ms(copies.load_back_timeout_ms));
            self.defer(handle, Some(until), Wake::Share);
        }
        is_worth_it
    }

    /// Number of pages that are loaded before the request is part of a step. Where steps overlap load-backs, the last
    /// pages are loaded during its first step, so that the step waits for no more than is loaded within it.
    pub(super) fn pages_before_steps(&self, pages: u32, others_run: bool) -> u32 {
        let threshold = self.config.copies.load_back_threshold_pages.max(1);
        let within_step = self.rates.pages_loaded_within_step().max(threshold);
        match self.overlaps && others_run && pages > within_step {
            true => pages - within_step,
            false => pages,
        }
    }

    /// Loads pages that were left on host at the admission.
    pub(super) fn continue_load_back(&mut self, handle: Handle, plan: &mut Plan) {
        let entry = &self.requests[handle];
        let State::Prefilling(computing) = entry.life.state() else { return };
        let start_page = computing.path.depth();
        let page_size = self.config.cache.page_size;
        let is_between_pages = entry.computed_tokens == start_page * page_size;
        // A step in flight writes to the destination pages.
        let is_computed = self.steps.have(entry);
        if !entry.loads_more || computing.transfer.is_some() || !is_between_pages || is_computed {
            return;
        }
        let found = self.cache.lookup(&entry.sequence, self.cacheable_pages(handle)).depths();
        let on_host = found.host - found.device;
        let loadable = self.loadable_pages(handle, found).min(computing.tail.len() as u32);
        let pages = self.pages_before_steps(loadable, self.batch.running().len() > 1);
        let pays = self.rates.load_back_pays(on_host, on_host * page_size);
        self.requests[handle].loads_more = pays && pages < on_host;
        self.release_share(handle);
        if !pays || pages == 0 || found.device != start_page {
            self.transition(handle, LifeEvent::PinsYielded);
            return;
        }
        let sequence = &self.requests[handle].sequence;
        let namespace = sequence.root();
        let at = self.cache.lookup(sequence, start_page + pages).host;
        let source = self.cache.pin_host(namespace, at);
        let op = self.operations.next_id();
        let pages = pages as usize;
        let output = self.transition(handle, LifeEvent::LoadBackStarted { op, pages });
        let entry = &mut self.requests[handle];
        entry.row_entries = entry.row_entries.min(start_page);
        self.start_load_back(handle, source, start_page, output.into_pages(), plan);
        if !self.requests[handle].loads_more {
            self.transition(handle, LifeEvent::PinsYielded);
        }
        let until = self.now.after(ms(self.config.copies.load_back_timeout_ms));
        self.requests.wait(handle, Wait::LoadBack { until });
    }

    pub(super) fn start_load_back(
        &mut self,
        handle: Handle,
        source: HostPin,
        start_page: u32,
        pages: DevicePages,
        plan: &mut Plan,
    ) -> OpId {
        let first = plan.copy_host_pages.len() as u32;
        let arrival = self.cache.begin_load_back(&source, start_page, &mut plan.copy_host_pages);
        assert_eq!(arrival.pages(), pages.len(), "a load-back has a destination for each page");
        plan.copy_device_pages.extend_from_slice(pages.as_slice());
        let anchor = self.cache.pin_device_along(&source);
        let count = pages.len() as u32;
        let work = Work::LoadBack { source, anchor, arrival, pages };
        let op = self.operations.start(work, Some(handle), count, self.now);
        self.requests[handle].loading_tokens = count * self.config.cache.page_size;
        let pages = first..first + count;
        plan.copies.push(Copy { op, direction: CopyDirection::LoadBack, pages });
        op
    }

    /// Returns true if the request is part of steps while its load-back is in flight. A request with more pages to
    /// load loads them first.
    pub(super) fn computes_while_loading(&self, entry: &Entry) -> bool {
        self.overlaps && !entry.loads_more
    }

    /// Publishes the pages of a load-back that has ended.
    pub(super) fn load_back_ended(&mut self, op: OpId, operation: Operation) {
        let Operation { work, owner, started, pages: count, sound_pages, .. } = operation;
        let Operation { corrupt, is_stale, .. } = operation;
        let Work::LoadBack { source, anchor, arrival, pages } = work else {
            unreachable!("a load-back")
        };
        let start_page = arrival.start_page();
        let is_read = self.steps.read(op);
        let owner = owner.filter(|&handle| self.waits_for(handle, op));
        let is_told = |handle: &Handle| self.requests[*handle].row_entries > start_page;
        let told = owner.filter(is_told).map(|_| pages.as_slice().to_vec());
        let is_trusted = told.is_some() && planted(Bug::TrustStepOnFailedLoad);
        let sound_pages = if is_trusted { count } else { sound_pages };
        if !is_stale {
            self.overlaps = self.config.copies.load_back_overlaps && sound_pages == count;
        }
        self.cache.end_load_back(&source, &arrival, pages, sound_pages as usize);
        if corrupt {
            self.cache.distrust_host(&source, start_page + sound_pages);
        }
        let measured = (sound_pages == count && owner.is_some()).then_some(count);
        self.rates.load_back_ended(started, self.now, measured);
        if let Some(handle) = owner {
            let path = self.cache.pin_device_along(&source);
            let loaded = match planted(Bug::BelieveWholeLoadBack) {
                true => source.depth(),
                false => path.depth(),
            };
            if self.requests[handle].hit_count.is_counting() {
                self.count_loaded(handle, start_page..loaded.max(start_page));
            }
            if let Some(told) = told {
                let mut there = Vec::new();
                self.cache.device_pages(&path, start_page, &mut there);
                if there != told {
                    self.discard_loaded(handle, start_page);
                }
            }
            self.transition(handle, LifeEvent::LoadBackEnded { path: Some(path) });
            self.requests.wait(handle, Wait::STEP);
            let entry = &mut self.requests[handle];
            entry.computed_tokens = loaded * self.config.cache.page_size;
            entry.loading_tokens = 0;
            entry.distrusts_host |= sound_pages < count;
            self.start_sharing(handle);
        } else if let Some(step) = self.steps.last().filter(|_| is_read) {
            // Nothing else pins the pages that a step may still read.
            step.keep(self.cache.pin_device_along(&source));
        }
        self.cache.unpin_device(anchor);
        match is_stale {
            true => self.cache.retire(source),
            false => self.cache.unpin_host(source),
        }
        self.requests.wake_for_load_back();
    }

    /// Voids the steps in flight that read pages of a load-back that are missing, or in other places than the plan
    /// said.
    fn discard_loaded(&mut self, handle: Handle, start_page: u32) {
        let entry = &mut self.requests[handle];
        if entry.row_entries > start_page {
            entry.row_entries = start_page;
            entry.in_flight.cancel();
        }
    }

    /// Counts hits once, at the first admission; loaded pages count when their load-back has ended.
    fn count_loaded(&mut self, handle: Handle, loaded: std::ops::Range<u32>) {
        let entry = &mut self.requests[handle];
        let fetched = entry.l3.fetched();
        let from_l3 = loaded.end.min(fetched.end).saturating_sub(loaded.start.max(fetched.start));
        let from_host = loaded.len() as u32 - from_l3;
        let page_size = self.config.cache.page_size;
        entry.hit_count.add_loaded(from_host * page_size, from_l3 * page_size);
        self.stats.host_hit_tokens += u64::from(from_host * page_size);
        self.stats.l3_hit_tokens += u64::from(from_l3 * page_size);
    }

    /// Lets the request recompute the pages of a late load-back.
    pub(super) fn compute_instead_of_loading(&mut self, handle: Handle) {
        self.abandon_operation(handle);
        // While this load-back is late, steps that wait for others would be late too.
        self.overlaps = false;
        let start_page = self.requests[handle].life.state().computing().map(|it| it.path.depth());
        self.discard_loaded(handle, start_page.expect("who loads computes"));
        let entry = &mut self.requests[handle];
        (entry.distrusts_host, entry.loading_tokens) = (true, 0);
        self.transition(handle, LifeEvent::LoadBackEnded { path: None });
        self.requests.wait(handle, Wait::STEP);
    }

    /// Applies reported steps without the load-backs that they wait for.
    pub(super) fn end_steps_without_load_backs(&mut self) {
        while self.steps.some_are_held() {
            let waiting: Vec<Handle> =
                self.steps.first_waits(&self.requests).map(|(handle, _)| handle).collect();
            waiting.into_iter().for_each(|handle| self.compute_instead_of_loading(handle));
            self.end_held_steps();
        }
    }

    /// Ends load-backs with the step that waits for them. Only a planted bug does this.
    pub(super) fn end_load_backs_early(&mut self) {
        let waiting = self.steps.first_waits(&self.requests).filter(|_| self.steps.some_are_held());
        let ops: Vec<OpId> = waiting.map(|(_, op)| op).collect();
        for (op, rank) in ops.into_iter().flat_map(|op| (0..64).map(move |rank| (op, rank))) {
            if let Ok(Reported::Ended(operation)) = self.operations.report(op, rank, Outcome::Done)
            {
                self.load_back_ended(op, operation);
            }
        }
    }
}
