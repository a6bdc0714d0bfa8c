//! The live requests.

use std::collections::{BTreeSet, VecDeque};
use std::ops::Range;
use std::sync::Arc;

use terrace_cache::planted::{Bug, planted};
use terrace_cache::{HashedMap, PageKey, Reach, Sequence};
use terrace_fsm::{Computing, Lifecycle, RequestId, State, StateName, Time};

use crate::admission_queue::AdmissionQueue;
use crate::deferred::Deferred;
use crate::hit_count::HitCount;
use crate::ids::{AdapterId, Handle};
use crate::in_flight::InFlight;
use crate::l3_lookup::L3Lookup;
use crate::patience::Patience;
use crate::wait::Wait;

/// Live request. The fields that every step reads are first, close together.
#[derive(Debug)]
#[repr(C)]
pub(crate) struct Entry {
    pub(crate) id: RequestId,
    pub(crate) handle: Handle,
    /// Tokens whose KV is computed or loaded, from the first.
    pub(crate) computed_tokens: u32,
    /// Tokens behind those that a load-back in flight brings.
    pub(crate) loading_tokens: u32,
    pub(crate) prompt_tokens: u32,
    /// Tokens that the request may still produce.
    pub(crate) remaining_tokens: u32,
    /// Entries of its row that the engine knows.
    pub(crate) row_entries: u32,
    pub(crate) adapter: AdapterId,
    /// Number of failed steps in a row.
    pub(crate) failed_steps: u32,
    /// Sits out the next step for lack of memory.
    pub(crate) stalled: bool,
    pub(crate) options: Options,
    pub(crate) life: Lifecycle,
    /// Work of the steps in flight.
    pub(crate) in_flight: InFlight,
    pub(crate) sequence: Sequence,

    pub(crate) priority: i32,
    /// Tokens behind the planned ones that the step being planned computes.
    pub(crate) chunk_tokens: u32,
    /// End of the prefill.
    pub(crate) prefill_end: u32,
    pub(crate) salt: Box<str>,
    /// All requests of the same submission, itself included; `None` for a single one.
    pub(crate) siblings: Option<Arc<[Handle]>>,

    pub(crate) submitted_at: Time,
    wait: Wait,
    /// Time at which it fails if it has not started.
    start_by: Option<Time>,
    timer: Option<Time>,
    /// Waits since it last ran.
    pub(crate) patience: Patience,
    /// Tokens that were not cached at the last look.
    pub(crate) uncached_tokens: Option<u32>,
    pub(crate) l3: L3Lookup,
    /// Computes instead of loading, because a load-back has failed.
    pub(crate) distrusts_host: bool,
    /// Host pages are left to load after the load-back in flight.
    pub(crate) loads_more: bool,
    /// Page that it is registered to produce for others.
    pub(crate) computing_key: Option<PageKey>,
    pub(crate) hit_count: HitCount,
}

/// Options of a request, see [`Request`](crate::Request).
#[derive(Clone, Copy, Debug)]
pub(crate) struct Options {
    pub(crate) computes_prompt: bool,
    pub(crate) waits_for_tokens: bool,
    pub(crate) reads: Reach,
    pub(crate) writes: Reach,
}

impl Entry {
    pub(crate) fn new(
        id: RequestId,
        handle: Handle,
        priority: i32,
        sequence: Sequence,
        max_new_tokens: u32,
        now: Time,
    ) -> Self {
        Self {
            id,
            handle,
            priority,
            prompt_tokens: sequence.len() as u32,
            sequence,
            remaining_tokens: max_new_tokens,
            options: Options {
                computes_prompt: false,
                waits_for_tokens: false,
                reads: Reach::L3,
                writes: Reach::L3,
            },
            adapter: AdapterId::NONE,
            salt: Box::default(),
            siblings: None,
            life: Lifecycle::new(),
            submitted_at: now,
            wait: Wait::ProbeQueued,
            start_by: None,
            timer: None,
            patience: Patience::default(),
            uncached_tokens: None,
            l3: L3Lookup::default(),
            distrusts_host: false,
            loads_more: false,
            computed_tokens: 0,
            loading_tokens: 0,
            in_flight: InFlight::default(),
            chunk_tokens: 0,
            prefill_end: 0,
            row_entries: 0,
            computing_key: None,
            hit_count: HitCount::default(),
            stalled: false,
            failed_steps: 0,
        }
    }

    /// Makes another request for the same prompt.
    pub(crate) fn sibling(&self, id: RequestId, handle: Handle) -> Self {
        let (sequence, now) = (self.sequence.clone(), self.submitted_at);
        let sibling = Self::new(id, handle, self.priority, sequence, self.remaining_tokens, now);
        let reads = if planted(Bug::AnswersApart) { Reach::Nothing } else { self.options.reads };
        Self {
            options: Options { reads, ..self.options },
            adapter: self.adapter,
            salt: self.salt.clone(),
            ..sibling
        }
    }

    pub(crate) fn state(&self) -> StateName {
        self.life.state().name()
    }

    /// Returns true if it holds host pages while it waits to run.
    pub(crate) fn holds_while_waiting(&self) -> bool {
        match self.life.state() {
            State::Prefetching { path: pin, .. }
            | State::PrefetchDone { path: pin }
            | State::Retracted { kept: pin, .. } => pin.is_some(),
            State::Submitted { .. }
            | State::Prefilling(_)
            | State::Decoding(_)
            | State::Draining { .. }
            | State::WritingBack { .. }
            | State::Finished
            | State::Aborted
            | State::Failed(_) => false,
        }
    }

    /// Resets everything that was learnt about its tokens on host and in L3. Prefetched pages are released before.
    pub(crate) fn reset_lookups(&mut self) {
        debug_assert_eq!(self.l3.held_pages(), 0);
        self.computed_tokens = 0;
        self.uncached_tokens = None;
        self.l3 = L3Lookup::default();
        (self.distrusts_host, self.loads_more) = (false, false);
    }

    /// Returns true if it may yet produce the page of this token for others: it probes, prefetches, loads or
    /// computes it.
    pub(crate) fn produces(&self, first_token: u32) -> bool {
        match self.wait {
            Wait::ProbeQueued
            | Wait::Probe { .. }
            | Wait::PrefetchQueued { .. }
            | Wait::Prefetch { .. } => true,
            Wait::LoadBack { .. } | Wait::Step { .. } => {
                self.state() == StateName::Prefilling
                    && self.computed_tokens < first_token + self.sequence.page_size()
                    && self.publishes()
            }
            Wait::Admission { .. } | Wait::Deferred { .. } | Wait::WriteBack { .. } => false,
        }
    }

    /// Returns true if steps compute its prompt. Before that, all its waits have deadlines of their own.
    pub(crate) fn is_computed_by_steps(&self) -> bool {
        self.state() != StateName::Prefilling || self.in_flight.tokens() + self.chunk_tokens > 0
    }

    /// Its current wait.
    pub(crate) fn wait(&self) -> Wait {
        self.wait
    }

    /// Time at which it fails if it has not started.
    pub(crate) fn start_by(&self) -> Option<Time> {
        self.start_by
    }

    /// Earlier end of its wait and of its time to start.
    fn next_moment(&self) -> Option<Time> {
        match (self.wait.until(), self.start_by) {
            (Some(until), Some(start_by)) => Some(until.min(start_by)),
            (until, start_by) => until.or(start_by),
        }
    }

    pub(crate) fn tokens(&self) -> u32 {
        self.sequence.len() as u32
    }

    /// Returns true if it may use cached pages.
    pub(crate) fn takes_hits(&self) -> bool {
        self.may_read(Reach::Device)
            && (!self.options.computes_prompt || self.tokens() > self.prompt_tokens)
    }

    /// Returns true if it may read from this tier.
    pub(crate) fn may_read(&self, tier: Reach) -> bool {
        self.options.reads >= tier || planted(Bug::ReadBeyondReach)
    }

    /// Adapter in a plan.
    pub(crate) fn planned_adapter(&self) -> AdapterId {
        if planted(Bug::ForgetAdapter) { AdapterId::NONE } else { self.adapter }
    }

    /// Returns true if others may use the pages that it computes.
    pub(crate) fn publishes(&self) -> bool {
        self.options.writes > Reach::Nothing || planted(Bug::PublishUnwritten)
    }

    /// Whole pages that are computed and not published yet, if they may be published.
    #[inline]
    pub(crate) fn unpublished_pages(&self, page_size: u32) -> Option<Range<u32>> {
        let start = self.life.state().computing()?.path.depth();
        let computed = self.computed_tokens + u32::from(planted(Bug::PublishUncomputedPage));
        let are_some = computed >= (start + 1) * page_size && self.publishes();
        are_some.then(|| start..computed / page_size)
    }

    /// Tokens whose KV is present after the load-back in flight.
    pub(crate) fn found_tokens(&self) -> u32 {
        self.computed_tokens + self.loading_tokens
    }

    /// Tokens whose KV is present after the load-back and the steps in flight.
    pub(crate) fn planned_tokens(&self) -> u32 {
        self.found_tokens() + self.in_flight.tokens()
    }

    /// Device pages: published ones and its own. Destination pages of a load-back belong to the operation.
    pub(crate) fn device_pages(&self) -> u32 {
        self.life.state().computing().map_or(0, Computing::device_pages)
    }

    /// Rank when memory is short. Lower ranks are served first.
    pub(crate) fn rank(&self) -> (std::cmp::Reverse<i32>, u64) {
        (std::cmp::Reverse(self.priority), self.handle.serial)
    }
}

/// Live requests by place and by id, their timers, the admission queue and the deferred requests.
#[derive(Debug, Default)]
pub(crate) struct Requests {
    entries: Vec<Option<Entry>>,
    vacant: Vec<u32>,
    /// Places by id. An id stays until a plan has reported the end, so that it never means two requests.
    by_id: HashedMap<RequestId, u32>,
    serial: u64,
    timers: BTreeSet<(Time, Handle)>,
    queue: AdmissionQueue,
    deferred: Deferred,
}

impl Requests {
    pub(crate) fn insert(&mut self, make: impl FnOnce(&Self, Handle) -> Entry) -> Handle {
        let index = self.vacant.pop().unwrap_or_else(|| {
            self.entries.push(None);
            self.entries.len() as u32 - 1
        });
        self.serial += 1;
        let handle = Handle { serial: self.serial, index };
        let entry = make(self, handle);
        self.by_id.insert(entry.id, index);
        self.entries[index as usize] = Some(entry);
        handle
    }

    pub(crate) fn remove(&mut self, handle: Handle) {
        self.set_timer(handle, None);
        let Entry { wait, priority, .. } = self[handle];
        if wait.is_queued() {
            self.queue.remove(handle, priority);
        }
        if let Some(wake) = wait.wake() {
            self.deferred.remove(handle, wake);
        }
        self.wake_followers(handle, u32::MAX);
        if self.entries[handle.index as usize].take().is_some() {
            self.vacant.push(handle.index);
        }
    }

    /// Frees the id of an ended request for reuse.
    pub(crate) fn free_id(&mut self, id: RequestId) {
        self.by_id.remove(&id);
    }

    /// Returns true if the id is in use, or its request has ended and no plan has reported that.
    pub(crate) fn knows(&self, id: RequestId) -> bool {
        self.by_id.contains_key(&id)
    }

    /// Replaces the wait of a request, and updates the admission queue, its timer and the event that wakes it.
    pub(crate) fn wait(&mut self, handle: Handle, wait: Wait) {
        let entry = self.get_mut(handle).expect("a live request");
        let before = std::mem::replace(&mut entry.wait, wait);
        let (priority, timer) = (entry.priority, entry.next_moment());
        let changes_timer = entry.timer != timer;
        match (before.is_queued(), wait.is_queued()) {
            (false, true) => self.queue.insert(handle, priority),
            (true, false) => self.queue.remove(handle, priority),
            (true, true) | (false, false) => {}
        }
        if let Some(wake) = before.wake() {
            self.deferred.remove(handle, wake);
        }
        if let Some(wake) = wait.wake() {
            self.deferred.insert(handle, wake);
        }
        if changes_timer {
            self.set_timer(handle, timer);
        }
        if !wait.may_provide() {
            self.wake_followers(handle, u32::MAX);
        }
    }

    // ---- deferred requests ----

    /// Queues requests that wait for pages of this producer up to `page`.
    pub(crate) fn wake_followers(&mut self, producer: Handle, page: u32) {
        while let Some(follower) = self.deferred.follower(producer, page) {
            self.wait(follower, Wait::ADMISSION);
        }
    }

    /// Queues requests that wait for the end of a load-back.
    pub(crate) fn wake_for_load_back(&mut self) {
        while let Some(handle) = self.deferred.first_for_load_back() {
            self.wait(handle, Wait::ADMISSION);
        }
    }

    /// Queues requests that wait for a place for their adapter, as many as there are places.
    pub(crate) fn wake_for_adapters(&mut self, places: u32) {
        for _ in 0..places {
            let Some(handle) = self.deferred.first_for_adapter() else { return };
            self.wait(handle, Wait::ADMISSION);
        }
    }

    /// Queues requests that wait for a place for this adapter, because it runs.
    pub(crate) fn wake_with_adapter(&mut self, adapter: AdapterId) {
        while let Some(handle) = self.deferred.first_with_adapter(adapter) {
            self.wait(handle, Wait::ADMISSION);
        }
    }

    /// Deferred requests.
    pub(crate) fn deferred(&self) -> &Deferred {
        &self.deferred
    }

    pub(crate) fn set_priority(&mut self, handle: Handle, priority: i32) {
        let entry = self.get_mut(handle).expect("a live request");
        let before = std::mem::replace(&mut entry.priority, priority);
        if entry.wait.is_queued() {
            self.queue.remove(handle, before);
            self.queue.insert(handle, priority);
        }
    }

    /// Sets the time at which the request fails if it has not started.
    pub(crate) fn limit_start(&mut self, handle: Handle, start_by: Option<Time>) {
        let entry = &mut self[handle];
        if entry.start_by != start_by {
            entry.start_by = start_by;
            let timer = entry.next_moment();
            self.set_timer(handle, timer);
        }
    }

    fn set_timer(&mut self, handle: Handle, timer: Option<Time>) {
        let before = std::mem::replace(&mut self[handle].timer, timer);
        if before == timer {
            return;
        }
        if let Some(before) = before {
            self.timers.remove(&(before, handle));
        }
        if let Some(timer) = timer {
            self.timers.insert((timer, handle));
        }
    }

    /// Clears the timer of a request whose timer has run out, and returns the request.
    pub(crate) fn next_expired(&mut self, now: Time) -> Option<Handle> {
        let &(_, handle) = self.timers.first().filter(|(timer, _)| *timer <= now)?;
        self.set_timer(handle, None);
        Some(handle)
    }

    pub(crate) fn next_timer(&self) -> Option<Time> {
        self.timers.first().map(|&(timer, _)| timer)
    }

    pub(crate) fn find(&self, id: RequestId) -> Option<Handle> {
        let &index = self.by_id.get(&id)?;
        let entry = self.entries[index as usize].as_ref().filter(|entry| entry.id == id);
        entry.map(|entry| entry.handle)
    }

    /// The request, if it is still alive.
    pub(crate) fn get(&self, handle: Handle) -> Option<&Entry> {
        let entry = self.entries[handle.index as usize].as_ref();
        entry.filter(|entry| entry.handle.serial == handle.serial)
    }

    pub(crate) fn get_mut(&mut self, handle: Handle) -> Option<&mut Entry> {
        let entry = self.entries[handle.index as usize].as_mut();
        entry.filter(|entry| entry.handle.serial == handle.serial)
    }

    /// Removes ended requests from a queue, once they may be most of it.
    pub(crate) fn prune(&self, queue: &mut VecDeque<Handle>) {
        if queue.len() > self.len() {
            queue.retain(|&handle| self.get(handle).is_some());
        }
    }

    /// Requests that may be admitted.
    pub(crate) fn queue(&self) -> &AdmissionQueue {
        &self.queue
    }

    pub(crate) fn len(&self) -> usize {
        self.entries.len() - self.vacant.len()
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &Entry> {
        self.entries.iter().flatten()
    }

    /// Number of running timers.
    pub(crate) fn timers(&self) -> usize {
        self.timers.len()
    }
}

impl std::ops::Index<Handle> for Requests {
    type Output = Entry;

    fn index(&self, handle: Handle) -> &Entry {
        self.get(handle).expect("a live request")
    }
}

impl std::ops::IndexMut<Handle> for Requests {
    fn index_mut(&mut self, handle: Handle) -> &mut Entry {
        self.get_mut(handle).expect("a live request")
    }
}
