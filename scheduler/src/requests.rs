//! The live requests.

use std::collections::{BTreeSet, VecDeque};
use std::ops::Range;
use std::sync::Arc;

use terrace_cache::planted::{Bug, planted};
use terrace_cache::{HashedMap, PageKey, Reach, Sequence};
use terrace_fsm::{Computing, Lifecycle, RequestId, State, StateName, Time};

use crate::admission_queue::AdmissionQueue;
use crate::deferred::Deferred;
use crate::ids::{AdapterId, Handle};
use crate::in_flight::InFlight;
use crate::producers::SharedWait;
use crate::stats::Hits;
use crate::wait::{Found, Wait};

/// So often L3 is asked about a request before it runs: what the cache loses again and again is not
/// worth more probes.
pub(crate) const L3_ASKS_MAX: u32 = 8;

/// Everything about one live request: first what every step looks at, close together.
#[derive(Debug)]
#[repr(C)]
pub(crate) struct Entry {
    pub(crate) id: RequestId,
    pub(crate) handle: Handle,
    /// Tokens whose KV is computed or loaded, from the first.
    pub(crate) computed_tokens: u32,
    /// Tokens behind those whose KV its load-back brings.
    pub(crate) loading_tokens: u32,
    pub(crate) prompt_tokens: u32,
    /// Tokens that it may still produce.
    pub(crate) remaining_tokens: u32,
    /// Entries of its row that the engine knows.
    pub(crate) row_entries: u32,
    pub(crate) adapter: AdapterId,
    /// Failed steps in a row.
    pub(crate) failed_steps: u32,
    /// Whether it sits out the next step for want of memory.
    pub(crate) stalled: bool,
    /// Whether each of its tokens is known before a step that follows it is planned.
    pub(crate) waits_for_tokens: bool,
    /// How far down the tiers it looks for what it needs, and what it computes is written.
    pub(crate) reads: Reach,
    pub(crate) writes: Reach,
    pub(crate) life: Lifecycle,
    /// What steps in flight compute of it.
    pub(crate) in_flight: InFlight,
    pub(crate) sequence: Sequence,

    pub(crate) priority: i32,
    /// Tokens behind those that the step being planned computes of its prompt.
    pub(crate) chunk_tokens: u32,
    /// Where its prefill ends.
    pub(crate) prefill_end: u32,
    /// Whether its whole prompt is computed, whatever the cache holds.
    pub(crate) computes_prompt: bool,
    pub(crate) salt: Box<str>,
    /// All answers that were submitted with it, itself among them; nothing for one that came alone.
    pub(crate) siblings: Option<Arc<[Handle]>>,

    pub(crate) submitted_at: Time,
    wait: Wait,
    /// When it fails if it has not started by then.
    start_by: Option<Time>,
    timer: Option<Time>,
    /// How it has waited for others that compute or load its prefix, since it last ran.
    pub(crate) shared_wait: Option<SharedWait>,
    /// Tokens of it that the cache lacked when somebody looked last.
    pub(crate) uncached_tokens: Option<u32>,

    /// What L3 was asked for last. It is asked anew, if that can be, when there is none.
    pub(crate) asked: Option<Asked>,
    /// How often L3 may still be asked.
    pub(crate) asks_left: u32,
    /// What L3 is known to have of it and has not brought yet.
    pub(crate) found: Option<Found>,
    /// The pages that L3 brought for it.
    pub(crate) fetched: Range<u32>,
    /// How many of those wait on host to be loaded, and count towards the share of the prefetches.
    pub(crate) held_pages: u32,
    /// Whether a load-back failed it: it computes instead.
    pub(crate) distrusts_host: bool,

    /// Whether it has waited for copies to host that make room.
    pub(crate) waited_for_room: bool,
    /// Whether it has waited in vain for others to load less.
    pub(crate) waited_for_share: bool,
    /// Whether the host has more of it than could be loaded at once.
    pub(crate) loads_on: bool,

    /// The page that others wait for while it prefills.
    pub(crate) computing_key: Option<PageKey>,
    /// Whether it was admitted before, so that its hits are counted.
    pub(crate) admitted_before: bool,
    /// Whether what it loads now counts as hits.
    pub(crate) counts_loaded: bool,
    /// What of its prompt was found at its first admission.
    pub(crate) hits: Hits,
}

/// What L3 was asked for, or was not worth asking for.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Asked {
    /// The first page: what the cache held then.
    pub(crate) from: u32,
    /// The first page behind it that L3 did not have, as far as is known.
    pub(crate) lacks: Option<u32>,
}

impl Entry {
    /// L3 did not deliver a page of what it was asked for.
    pub(crate) fn l3_lacks(&mut self, page: u32) {
        if let Some(asked) = &mut self.asked {
            asked.lacks = Some(page);
        }
    }

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
            computes_prompt: false,
            waits_for_tokens: false,
            reads: Reach::L3,
            writes: Reach::L3,
            adapter: AdapterId::NONE,
            salt: Box::default(),
            siblings: None,
            life: Lifecycle::new(),
            submitted_at: now,
            wait: Wait::ProbeQueued,
            start_by: None,
            timer: None,
            shared_wait: None,
            uncached_tokens: None,
            asked: None,
            asks_left: L3_ASKS_MAX,
            found: None,
            fetched: 0..0,
            held_pages: 0,
            distrusts_host: false,
            waited_for_room: false,
            waited_for_share: false,
            loads_on: false,
            computed_tokens: 0,
            loading_tokens: 0,
            in_flight: InFlight::default(),
            chunk_tokens: 0,
            prefill_end: 0,
            row_entries: 0,
            computing_key: None,
            admitted_before: false,
            counts_loaded: false,
            hits: Hits::default(),
            stalled: false,
            failed_steps: 0,
        }
    }

    /// Another answer to the same prompt, which has just come.
    pub(crate) fn sibling(&self, id: RequestId, handle: Handle) -> Self {
        let (sequence, now) = (self.sequence.clone(), self.submitted_at);
        let sibling = Self::new(id, handle, self.priority, sequence, self.remaining_tokens, now);
        Self {
            computes_prompt: self.computes_prompt,
            waits_for_tokens: self.waits_for_tokens,
            reads: if planted(Bug::AnswersApart) { Reach::Nothing } else { self.reads },
            writes: self.writes,
            adapter: self.adapter,
            salt: self.salt.clone(),
            ..sibling
        }
    }

    pub(crate) fn state(&self) -> StateName {
        self.life.state().name()
    }

    /// Whether it holds pages while it waits to run.
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

    /// Forgets what was learnt about its tokens on host and in L3: they are looked up anew.
    pub(crate) fn forget_lookups(&mut self) {
        self.computed_tokens = 0;
        self.distrusts_host = false;
        self.loads_on = false;
        (self.asked, self.asks_left) = (None, L3_ASKS_MAX);
        (self.found, self.fetched, self.uncached_tokens) = (None, 0..0, None);
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

    /// When it fails if it has not started by then.
    pub(crate) fn start_by(&self) -> Option<Time> {
        self.start_by
    }

    /// The earlier of the two moments that it waits for.
    fn next_moment(&self) -> Option<Time> {
        match (self.wait.until(), self.start_by) {
            (Some(until), Some(start_by)) => Some(until.min(start_by)),
            (until, start_by) => until.or(start_by),
        }
    }

    pub(crate) fn tokens(&self) -> u32 {
        self.sequence.len() as u32
    }

    /// Whether what the cache holds of it may serve it.
    pub(crate) fn takes_hits(&self) -> bool {
        self.may_read(Reach::Device)
            && (!self.computes_prompt || self.tokens() > self.prompt_tokens)
    }

    /// Whether it may have what this tier holds.
    pub(crate) fn may_read(&self, tier: Reach) -> bool {
        self.reads >= tier || planted(Bug::ReadBeyondReach)
    }

    /// The adapter that a plan names.
    pub(crate) fn planned_adapter(&self) -> AdapterId {
        if planted(Bug::ForgetAdapter) { AdapterId::NONE } else { self.adapter }
    }

    /// Whether others may have what it computes.
    pub(crate) fn publishes(&self) -> bool {
        self.writes > Reach::Nothing || planted(Bug::PublishUnwritten)
    }

    /// The whole pages that are computed and that others cannot see yet, but may.
    #[inline]
    pub(crate) fn unpublished_pages(&self, page_size: u32) -> Option<Range<u32>> {
        let start = self.life.state().computing()?.path.depth();
        let computed = self.computed_tokens + u32::from(planted(Bug::PublishUncomputedPage));
        let are_some = computed >= (start + 1) * page_size && self.publishes();
        are_some.then(|| start..computed / page_size)
    }

    /// Tokens whose KV is there, or will be when its load-back has ended.
    pub(crate) fn found_tokens(&self) -> u32 {
        self.computed_tokens + self.loading_tokens
    }

    /// Tokens whose KV will be there when its load-back and the steps in flight have ended.
    pub(crate) fn planned_tokens(&self) -> u32 {
        self.found_tokens() + self.in_flight.tokens()
    }

    /// Pages that it has on device: published ones and its own. Those that are being loaded are their operation's.
    pub(crate) fn device_pages(&self) -> u32 {
        self.life.state().computing().map_or(0, Computing::device_pages)
    }

    /// Who is served first when memory is short: lower is better.
    pub(crate) fn rank(&self) -> (std::cmp::Reverse<i32>, u64) {
        (std::cmp::Reverse(self.priority), self.handle.serial)
    }
}

/// The live requests, by place and by id, their timers, and the line of those that could be admitted.
#[derive(Debug, Default)]
pub(crate) struct Requests {
    entries: Vec<Option<Entry>>,
    vacant: Vec<u32>,
    /// Where the live requests are; an id stays until its end has been told, lest it mean two.
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

    /// The end of a request has been told: its id may be used again.
    pub(crate) fn free_id(&mut self, id: RequestId) {
        self.by_id.remove(&id);
    }

    /// Whether a request has this id, or had it and its end has not been told.
    pub(crate) fn knows(&self, id: RequestId) -> bool {
        self.by_id.contains_key(&id)
    }

    /// From now on the request waits for this: its place in line, its timer and what wakes it follow.
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

    /// Requests that wait for pages of this one up to `page` are in line again.
    pub(crate) fn wake_followers(&mut self, producer: Handle, page: u32) {
        while let Some(follower) = self.deferred.follower(producer, page) {
            self.wait(follower, Wait::ADMISSION);
        }
    }

    /// Requests that wait for load-backs are in line again: one has ended.
    pub(crate) fn wake_for_load_back(&mut self) {
        while let Some(handle) = self.deferred.first_for_load_back() {
            self.wait(handle, Wait::ADMISSION);
        }
    }

    /// Requests that wait for a place for their adapter are in line again, as many as there are places.
    pub(crate) fn wake_for_adapters(&mut self, places: u32) {
        for _ in 0..places {
            let Some(handle) = self.deferred.first_for_adapter() else { return };
            self.wait(handle, Wait::ADMISSION);
        }
    }

    /// Requests that wait for a place for this adapter are in line again: it runs.
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

    /// The request fails if it has not started by then.
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

    /// A request whose timer has run out, if any; its timer is off then.
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

    /// Drops those that have ended from a queue, once they may be the most of it.
    pub(crate) fn prune(&self, queue: &mut VecDeque<Handle>) {
        if queue.len() > self.len() {
            queue.retain(|&handle| self.get(handle).is_some());
        }
    }

    /// Those that could be admitted.
    pub(crate) fn queue(&self) -> &AdmissionQueue {
        &self.queue
    }

    pub(crate) fn len(&self) -> usize {
        self.entries.len() - self.vacant.len()
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &Entry> {
        self.entries.iter().flatten()
    }

    /// Timers that run, for the audit.
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
