//! Admission: requests get a slot and memory.

use terrace_cache::planted::{Bug, planted};
use terrace_cache::{Depths, DevicePin, HostPin, Match, Reach};
use terrace_fsm::{Computing, Event as LifeEvent, StateName};

use super::Scheduler;
use crate::candidates::collect_candidates;
use crate::config::{Config, ms};
use crate::ids::Handle;
use crate::patience::Patience;
use crate::plan::Plan;
use crate::prompt_cost::prompt_cost;
use crate::requests::Entry;
use crate::wait::Wait;

/// Result of an attempt to admit a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Tried {
    Admitted,
    /// Memory is short.
    Blocked,
    /// The request waits for an event.
    Deferred,
}

/// Pins of the cached pages of an admitted request.
struct Pins {
    path: DevicePin,
    /// Pages that are loaded first.
    source: Option<HostPin>,
    /// All pages on host, if some are loaded later.
    unloaded: Option<HostPin>,
}

impl Scheduler {
    /// Admits queued requests while there are slots, memory and tokens to compute; with `from`, only those of at
    /// least this priority.
    pub(super) fn admit(&mut self, plan: &mut Plan, from: Option<i32>, mut tokens_left: u32) {
        if self.requests.queue().is_empty() || self.batch.free_slots().is_empty() {
            return;
        }
        let mut candidates = std::mem::take(&mut self.candidates);
        let wait_max = ms(self.config.queue.wait_max_ms);
        let overdue = self.now.before(wait_max);
        let (queue, requests, cache) = (&self.config.queue, &self.requests, &self.cache);
        collect_candidates(queue, overdue, requests, cache, &mut candidates);
        // True once an earlier request waits for memory.
        let mut is_behind = false;
        let mut rest = candidates.iter();
        while let Some(candidate) = rest.next() {
            let handle = candidate.handle;
            let is_due = from.is_none_or(|from| self.requests[handle].priority >= from);
            if self.batch.free_slots().is_empty() || tokens_left == 0 || !is_due {
                break;
            }
            if is_behind && !self.backfill.has_room_for(self.pages_of_life(handle)) {
                continue;
            }
            let mut tried = self.try_admit(handle, 0, plan);
            if tried == Tried::Blocked && !is_behind && self.only_waiting_hold_memory() {
                // Only waiting requests hold memory: they release it, and the first one is admitted.
                self.release_waiting_pins(handle);
                tried = self.try_admit(handle, 0, plan);
            }
            match tried {
                Tried::Admitted => {
                    let entry = &self.requests[handle];
                    let (start, end) = (entry.found_tokens(), entry.prefill_end);
                    let to_compute = prompt_cost(&self.config.batch, start, end - start);
                    let loads = entry.life.state().operation().is_some();
                    if !loads || self.computes_while_loading(entry) {
                        tokens_left = tokens_left.saturating_sub(to_compute);
                    }
                    if is_behind {
                        self.backfill.take(self.pages_of_life(handle));
                    }
                }
                Tried::Blocked if candidate.strict && !is_behind => {
                    is_behind = !rest.as_slice().is_empty() && self.backfill_behind(handle);
                    if !is_behind {
                        break;
                    }
                }
                Tried::Blocked | Tried::Deferred => {}
            }
        }
        self.candidates = candidates;
    }

    fn only_waiting_hold_memory(&self) -> bool {
        self.batch.running().is_empty() && self.pages_making_room() == 0
    }

    /// Admits a request if its pages and `spare_pages` more are available, or defers it.
    pub(super) fn try_admit(
        &mut self,
        handle: Handle,
        spare_pages: usize,
        plan: &mut Plan,
    ) -> Tried {
        if let Some(wake) = self.adapter_wait(handle) {
            self.defer(handle, None, wake);
            return Tried::Deferred;
        }
        let seen = self.match_depths(handle);
        self.note_uncached(handle, seen.host);
        if self.defer_for_producer(handle, seen)
            || self.probe_before_admission(handle, seen.host, plan)
            || self.defer_for_share(handle, seen)
        {
            return Tried::Deferred;
        }
        let spare_pages = spare_pages + self.reserved_pages();
        if !self.may_fit(self.new_pages(handle, seen) + spare_pages) {
            // Requests that wait for memory are tried in every step: their tokens are not compared each time.
            self.wake_when_room_is_late(handle);
            return Tried::Blocked;
        }
        let found = self.find(handle);
        let depths = found.depths();
        let namespace = self.requests[handle].sequence.root();
        let page_size = self.config.cache.page_size;
        let loadable_pages = self.loadable_pages(handle, depths);
        let pays = self.rates.load_back_pays(loadable_pages, loadable_pages * page_size);
        let others_run = !self.batch.running().is_empty();
        let load_pages = match pays {
            true => self.pages_before_steps(loadable_pages, others_run),
            false => 0,
        };
        let new_pages = self.new_pages(handle, depths);

        // Pins first: making room must not evict the pages that were found.
        let source = (load_pages > 0).then(|| {
            let end = depths.device + load_pages;
            let at = match end < depths.host {
                true => self.cache.lookup(&self.requests[handle].sequence, end).host,
                false => found.host,
            };
            self.cache.pin_host(namespace, at)
        });
        let on_host = depths.host - depths.device;
        let loads_more = pays && load_pages < on_host;
        let unloaded = loads_more.then(|| self.cache.pin_host(namespace, found.host));
        let path = self.cache.pin_device(namespace, found.device);
        // Pages that were just pinned are not available any more.
        if !self.may_fit(new_pages + spare_pages) || !self.make_room(handle, new_pages, plan) {
            self.cache.unpin_device(path);
            source.into_iter().chain(unloaded).for_each(|pin| self.cache.unpin_host(pin));
            self.wake_when_room_is_late(handle);
            return Tried::Blocked;
        }
        if !pays && loadable_pages > 0 {
            self.rates.decay_load_back_estimate();
        }
        // The rest of the pages in L3 is prefetched in further pieces, behind those on host.
        let fetches_on = load_pages > 0 && self.requests[handle].l3.held_pages() > 0;
        if !fetches_on {
            self.forget_found(handle);
        }
        let entry = &mut self.requests[handle];
        entry.loads_more = loads_more || entry.l3.found().is_some();
        self.grant(handle, Pins { path, source, unloaded }, load_pages, new_pages, plan);
        Tried::Admitted
    }

    /// Gives the request its slot and memory, and starts its load-back.
    fn grant(
        &mut self,
        handle: Handle,
        pins: Pins,
        load_pages: u32,
        new_pages: usize,
        plan: &mut Plan,
    ) {
        let Pins { path, source, unloaded } = pins;
        if self.requests[handle].state() == StateName::Prefetching {
            self.stop_fetching(handle);
        }
        self.abandon_operation(handle);
        self.release_share(handle);

        let entry = &mut self.requests[handle];
        let device_tokens = path.depth() * self.config.cache.page_size;
        let is_first = entry.hit_count.admit(device_tokens);
        if is_first {
            self.stats.prompt_tokens += u64::from(entry.prompt_tokens);
            self.stats.device_hit_tokens += u64::from(device_tokens);
        }
        entry.patience = Patience::default();
        if !planted(Bug::KeepRowOfRetracted) {
            entry.row_entries = 0;
        }
        entry.stalled = false;
        entry.computed_tokens = device_tokens;
        entry.prefill_end = entry.tokens();
        entry.sequence.reserve(handle.room_for_answer(entry.remaining_tokens));
        // Each running request may need a node for its decoded pages, and later another.
        self.cache.set_aside(2 * (self.batch.running().len() + 1));
        let (priority, writes) = (entry.priority, entry.options.writes);
        match &source {
            Some(source) => {
                self.cache.touch_host(source, is_first, priority);
                self.cache.extend_reach(source, writes);
            }
            None => {
                self.cache.touch(&path, is_first, priority);
                self.cache.extend_reach(&path, writes);
            }
        }

        let mut tail = self.cache.take_device_pages(new_pages).expect("room was made");
        let load_back = source.map(|source| {
            let destination = tail.split_off(new_pages - load_pages as usize);
            self.start_load_back(handle, source, path.depth(), destination, plan)
        });
        let slot = self.batch.take_slot().expect("a slot is free");
        let computing = Computing { slot, path, tail, transfer: load_back, unloaded };
        self.transition(handle, LifeEvent::Admitted(computing));
        self.batch.join(handle, slot);
        let adapter = self.requests[handle].adapter;
        if self.adapters.starts(adapter) {
            self.requests.wake_with_adapter(adapter);
        }
        let loads_until = self.now.after(ms(self.config.copies.load_back_timeout_ms));
        let waiting = match load_back {
            Some(_) => Wait::LoadBack { until: loads_until },
            None => Wait::STEP,
        };
        self.requests.limit_start(handle, None);
        self.requests.wait(handle, waiting);
        self.start_sharing(handle);
    }

    /// Matches the request's pages in the tiers that it reads.
    pub(super) fn find(&self, handle: Handle) -> Match {
        let entry = &self.requests[handle];
        let found = self.cache.lookup(&entry.sequence, self.cacheable_pages(handle));
        match entry.may_read(Reach::Host) {
            true => found,
            false => Match { host: found.device, arriving: false, ..found },
        }
    }

    /// Matches the request's pages in the tiers that it reads by keys alone, which is enough for decisions.
    pub(super) fn match_depths(&self, handle: Handle) -> Depths {
        let entry = &self.requests[handle];
        let seen = self.cache.depths(&entry.sequence, self.cacheable_pages(handle));
        match entry.may_read(Reach::Host) {
            true => seen,
            false => Depths { host: seen.device, arriving: false, ..seen },
        }
    }

    /// Number of device pages that the request needs besides those found.
    pub(super) fn new_pages(&self, handle: Handle, found: Depths) -> usize {
        self.prefill_pages(handle) - found.device as usize
    }

    /// Number of device pages that are reserved for running requests.
    pub(super) fn reserved_pages(&self) -> usize {
        self.batch.running().len() * self.config.batch.decode_reserve_pages as usize
    }

    fn may_fit(&self, pages: usize) -> bool {
        pages <= self.cache.usage().device.available_pages()
    }

    /// Number of pages of the request that may come from the cache. At least one token is computed, to produce the
    /// next one from.
    pub(super) fn cacheable_pages(&self, handle: Handle) -> u32 {
        let entry = &self.requests[handle];
        if !entry.takes_hits() {
            return 0;
        }
        (entry.tokens() - 1) / self.config.cache.page_size
    }
}

/// End of the known tokens and of the first decode: the request gets pages up to here at the start.
pub(super) fn prefill_end(config: &Config, entry: &Entry) -> u32 {
    entry.tokens() + config.batch.decode_tokens.min(entry.remaining_tokens.saturating_sub(1))
}
