//! What reading from L3 goes by: who is to be asked about, who was told, and how L3 is doing.

use std::collections::VecDeque;

use terrace_cache::{HostPin, Keys, PageKey, Sequence};
use terrace_fsm::{State, Time};

use crate::config::{L3Config, ms};
use crate::requests::{Handle, Requests};
use crate::scheduler::Scheduler;
use crate::store_health::{Backoff, NegativeCache};
use crate::waiting::Waiting;

/// What reading from L3 needs.
#[derive(Debug)]
pub(crate) struct Reading {
    /// Requests about which L3 is to be asked; some may have gone on without.
    to_ask: VecDeque<Handle>,
    /// Requests of which L3 has enough; some may have gone on without.
    told: VecDeque<Handle>,
    /// Pages that L3 brought for requests that still wait to be admitted: they hold host memory.
    waiting_pages: u32,
    negative: NegativeCache,
    probe_backoff: Backoff,
    prefetch_backoff: Backoff,
}

impl Reading {
    pub(crate) fn new(config: &L3Config) -> Self {
        let backoff = || Backoff::new(ms(config.backoff_base_ms), ms(config.backoff_max_ms));
        Self {
            to_ask: VecDeque::new(),
            told: VecDeque::new(),
            waiting_pages: 0,
            negative: NegativeCache::new(ms(config.negative_ttl_ms), config.negative_max),
            probe_backoff: backoff(),
            prefetch_backoff: backoff(),
        }
    }

    // ---- lines ----

    /// L3 is to be asked about a request.
    pub(crate) fn ask_about(&mut self, handle: Handle) {
        self.to_ask.push_back(handle);
    }

    /// L3 has enough of a request.
    pub(crate) fn was_told_about(&mut self, handle: Handle) {
        self.told.push_back(handle);
    }

    /// L3 has more of a request whose turn it is: it comes before all others.
    pub(crate) fn is_told_first(&mut self, handle: Handle) {
        self.told.push_front(handle);
    }

    /// Who is the first to be asked about.
    pub(crate) fn first_to_ask(&self) -> Option<Handle> {
        self.to_ask.front().copied()
    }

    /// What becomes of the first to be asked about is decided.
    pub(crate) fn next_to_ask(&mut self) {
        self.to_ask.pop_front();
    }

    /// Who is the first of whom L3 has enough.
    pub(crate) fn first_told(&self) -> Option<Handle> {
        self.told.front().copied()
    }

    /// What becomes of the first of whom L3 has enough is decided.
    pub(crate) fn next_told(&mut self) {
        self.told.pop_front();
    }

    /// Forgets those who have ended.
    pub(crate) fn prune(&mut self, requests: &Requests) {
        requests.prune(&mut self.to_ask);
        requests.prune(&mut self.told);
    }

    pub(crate) fn has_somebody_to_decide_about(&self) -> bool {
        !self.to_ask.is_empty() || !self.told.is_empty()
    }

    // ---- pages that wait for their request ----

    /// So many pages wait on host for their request to be admitted.
    pub(crate) fn pages_wait(&mut self, pages: u32) {
        self.waiting_pages += pages;
    }

    /// So many pages no longer do.
    pub(crate) fn pages_wait_no_more(&mut self, pages: u32) {
        self.waiting_pages -= pages;
    }

    pub(crate) fn waiting_pages(&self) -> u32 {
        self.waiting_pages
    }

    // ---- how L3 is doing ----

    /// How many of the keys, from the first, are worth asking for.
    pub(crate) fn askable(&self, keys: Keys<'_>, now: Time) -> u32 {
        self.negative.askable(keys, now) as u32
    }

    /// L3 did not deliver a page: it is not asked for that for a while.
    pub(crate) fn is_missing(&mut self, key: PageKey, now: Time) {
        self.negative.insert(key, now);
    }

    /// L3 has a page.
    pub(crate) fn is_there(&mut self, key: PageKey) {
        self.negative.remove(key);
    }

    /// See [`Backoff::note`].
    pub(crate) fn note_probe(&mut self, failed: bool, is_telling: bool, now: Time) {
        self.probe_backoff.note(failed, is_telling, now);
    }

    /// See [`Backoff::note`].
    pub(crate) fn note_prefetch(&mut self, failed: bool, is_telling: bool, now: Time) {
        self.prefetch_backoff.note(failed, is_telling, now);
    }

    /// A prefetch keeps its request waiting for too long: the first page of it is not asked for for a while.
    fn prefetch_is_late(&mut self, sequence: &Sequence, start_page: u32, now: Time) {
        self.prefetch_backoff.failed(now);
        if let Some(undelivered) = sequence.keys().get(start_page as usize) {
            self.negative.insert(undelivered, now);
        }
    }

    pub(crate) fn may_probe(&self, now: Time) -> bool {
        self.probe_backoff.allows(now)
    }

    pub(crate) fn may_prefetch(&self, now: Time) -> bool {
        self.prefetch_backoff.allows(now)
    }
}

impl Scheduler {
    /// L3 keeps a request waiting in vain: it is left alone for a while, and not asked for what it
    /// did not deliver.
    pub(crate) fn l3_is_late(&mut self, handle: Handle) {
        let Some(reading) = &mut self.reading else { return };
        let entry = &self.requests[handle];
        match entry.life.state() {
            State::Submitted { probe: Some(_) } | State::Retracted { probe: Some(_), .. } => {
                reading.probe_backoff.failed(self.now);
                self.operations.note_late_probe();
            }
            State::Prefetching { start_page, .. } => {
                reading.prefetch_is_late(&entry.sequence, *start_page, self.now);
            }
            State::Prefilling(computing) if matches!(entry.waiting(), Waiting::Fetching { .. }) => {
                let start_page =
                    computing.unloaded.as_ref().map_or(computing.path.depth(), HostPin::depth);
                reading.prefetch_is_late(&entry.sequence, start_page, self.now);
            }
            State::Submitted { probe: None }
            | State::PrefetchDone { .. }
            | State::Prefilling(_)
            | State::Decoding(_)
            | State::Retracted { probe: None, .. }
            | State::Draining { .. }
            | State::WritingBack { .. }
            | State::Finished
            | State::Aborted
            | State::Failed(_)
            | State::Left => {}
        }
    }
}
