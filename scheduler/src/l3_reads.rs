//! State of reading from L3: queues of requests to probe and to prefetch, and the health of L3.

use std::collections::VecDeque;

use terrace_cache::{Keys, PageKey, Sequence};
use terrace_fsm::Time;

use crate::config::{L3Config, ms};
use crate::ids::Handle;
use crate::requests::Requests;
use crate::store_health::{Backoff, NegativeCache};

/// State of reading from L3.
#[derive(Debug)]
pub(crate) struct L3Reads {
    /// Requests to probe for; some may no longer wait for it.
    probe_queue: VecDeque<Handle>,
    /// Requests with a hit in L3 to prefetch; some may no longer wait for it.
    prefetch_queue: VecDeque<Handle>,
    /// Prefetched host pages of requests that are not admitted yet.
    held_pages: u32,
    negative: NegativeCache,
    probe_backoff: Backoff,
    prefetch_backoff: Backoff,
}

impl L3Reads {
    pub(crate) fn new(config: &L3Config) -> Self {
        let backoff = || Backoff::new(ms(config.backoff_base_ms), ms(config.backoff_max_ms));
        Self {
            probe_queue: VecDeque::new(),
            prefetch_queue: VecDeque::new(),
            held_pages: 0,
            negative: NegativeCache::new(ms(config.negative_ttl_ms), config.negative_max),
            probe_backoff: backoff(),
            prefetch_backoff: backoff(),
        }
    }

    // ---- queues ----

    /// Queues a probe for a request.
    pub(crate) fn queue_probe(&mut self, handle: Handle) {
        self.probe_queue.push_back(handle);
    }

    /// Queues the prefetch of a request.
    pub(crate) fn queue_prefetch(&mut self, handle: Handle) {
        self.prefetch_queue.push_back(handle);
    }

    /// Queues the prefetch of a request before all others.
    pub(crate) fn queue_prefetch_first(&mut self, handle: Handle) {
        self.prefetch_queue.push_front(handle);
    }

    /// First request to probe for.
    pub(crate) fn next_probe(&self) -> Option<Handle> {
        self.probe_queue.front().copied()
    }

    /// Removes the first request to probe for.
    pub(crate) fn pop_probe(&mut self) {
        self.probe_queue.pop_front();
    }

    /// First request to prefetch.
    pub(crate) fn next_prefetch(&self) -> Option<Handle> {
        self.prefetch_queue.front().copied()
    }

    /// Removes the first request to prefetch.
    pub(crate) fn pop_prefetch(&mut self) {
        self.prefetch_queue.pop_front();
    }

    /// Removes requests that have ended.
    pub(crate) fn prune(&mut self, requests: &Requests) {
        requests.prune(&mut self.probe_queue);
        requests.prune(&mut self.prefetch_queue);
    }

    pub(crate) fn has_queued(&self) -> bool {
        !self.probe_queue.is_empty() || !self.prefetch_queue.is_empty()
    }

    // ---- prefetched pages ----

    /// Counts host pages that were prefetched for a request that is not admitted yet.
    pub(crate) fn hold_pages(&mut self, pages: u32) {
        self.held_pages += pages;
    }

    /// Stops counting prefetched host pages.
    pub(crate) fn release_pages(&mut self, pages: u32) {
        self.held_pages -= pages;
    }

    pub(crate) fn held_pages(&self) -> u32 {
        self.held_pages
    }

    // ---- health of L3 ----

    /// Length of the prefix of `keys` that L3 is not known to lack.
    pub(crate) fn askable(&self, keys: Keys<'_>, now: Time) -> u32 {
        self.negative.askable(keys, now) as u32
    }

    /// Notes that L3 did not deliver a page.
    pub(crate) fn note_missing(&mut self, key: PageKey, now: Time) {
        self.negative.insert(key, now);
    }

    /// Notes that L3 has a page.
    pub(crate) fn note_present(&mut self, key: PageKey) {
        self.negative.remove(key);
    }

    /// Notes how a probe went. See [`Backoff::note`].
    pub(crate) fn note_probe(&mut self, failed: bool, is_conclusive: bool, now: Time) {
        self.probe_backoff.note(failed, is_conclusive, now);
    }

    /// Notes how a prefetch went. See [`Backoff::note`].
    pub(crate) fn note_prefetch(&mut self, failed: bool, is_conclusive: bool, now: Time) {
        self.prefetch_backoff.note(failed, is_conclusive, now);
    }

    /// Notes a probe whose request has stopped waiting.
    pub(crate) fn note_late_probe(&mut self, now: Time) {
        self.probe_backoff.failed(now);
    }

    /// Notes a prefetch whose request has stopped waiting: its first page counts as missing for a while.
    pub(crate) fn note_late_prefetch(&mut self, sequence: &Sequence, start_page: u32, now: Time) {
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
