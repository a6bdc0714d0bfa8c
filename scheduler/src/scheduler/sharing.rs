//! Sharing of pages: requests wait for pages that another request computes, loads or prefetches.

use terrace_cache::Depths;
use terrace_cache::planted::{Bug, planted};

use super::Scheduler;
use crate::deferred::Wake;
use crate::ids::Handle;
use crate::producers::SharedWait;

impl Scheduler {
    /// Defers a request whose next page another one computes, loads or prefetches, and returns true, if the wait is
    /// within its bounds: it continues while the cached prefix grows, and for a sibling however long that takes.
    pub(super) fn defer_for_producer(&mut self, handle: Handle, found: Depths) -> bool {
        let (now, pages) = (self.now, found.host);
        let sibling = self.sibling_producer(handle, found.device);
        let mut producer = sibling.or_else(|| self.find_producer(handle, pages));
        if producer.is_none() && found.arriving {
            producer = self.find_producer(handle, found.device);
        } else if producer.is_none() {
            return false;
        }
        let entry = &self.requests[handle];
        if !entry.takes_hits() || planted(Bug::NeverShare) {
            return false;
        }
        let mut wait = entry.patience.for_producer().unwrap_or_else(|| {
            self.stats.shared_waits += 1;
            SharedWait::new(now, pages)
        });
        // Transfers of the producer have deadlines of their own.
        let has_deadline = producer.is_some_and(|producer| {
            self.requests[producer].life.state().operation().is_some()
                && !planted(Bug::StallDuringSharedLoad)
        });
        let computes = sibling.is_some_and(|sibling| self.requests[sibling].is_computed_by_steps());
        wait.observe(now, pages, has_deadline || computes);
        self.requests[handle].patience.set_for_producer(Some(wait));
        let until = wait.until(&self.config.queue, sibling.is_some());
        if now >= until {
            return false;
        }
        let wake = match producer {
            Some(producer) => {
                Wake::Producer { producer, page: self.common_pages(handle, producer) }
            }
            None => Wake::Arrival,
        };
        self.defer(handle, Some(until), wake);
        true
    }

    /// Number of pages that both requests begin with, as far as the first can use them.
    fn common_pages(&self, handle: Handle, other: Handle) -> u32 {
        let (keys, others) =
            (self.requests[handle].sequence.keys(), self.requests[other].sequence.keys());
        // Keys chain: where two are equal, so are all before them.
        let (mut common, mut end) = (0, self.cacheable_pages(handle).min(others.len() as u32));
        while common < end {
            let middle = common + (end - common) / 2;
            match keys.get(middle as usize) == others.get(middle as usize) {
                true => common = middle + 1,
                false => end = middle,
            }
        }
        common
    }

    /// Sibling that computes, loads or prefetches this page or one before it, or probes L3 for it.
    fn sibling_producer(&self, handle: Handle, page: u32) -> Option<Handle> {
        let siblings = self.requests[handle].siblings.as_ref()?;
        if page >= self.cacheable_pages(handle) {
            return None;
        }
        let first_token = page * self.config.cache.page_size;
        let produces = |&sibling: &Handle| {
            let entry = self.requests.get(sibling).filter(|entry| entry.handle != handle);
            entry.is_some_and(|entry| entry.produces(first_token))
        };
        siblings.iter().copied().find(produces)
    }

    /// Returns true if both requests were submitted together.
    pub(super) fn are_siblings(&self, handle: Handle, other: Handle) -> bool {
        self.requests[handle].siblings.as_ref().is_some_and(|all| all.contains(&other))
    }

    /// Another request that computes or prefetches this page.
    pub(super) fn find_producer(&self, handle: Handle, page: u32) -> Option<Handle> {
        let key = self.requests[handle].sequence.keys().get(page as usize)?;
        self.producers.find(key).filter(|&producer| producer != handle)
    }

    /// Returns true if another request computes, loads or prefetches this page.
    pub(super) fn has_producer(&self, handle: Handle, page: u32) -> bool {
        self.find_producer(handle, page).is_some() || self.sibling_producer(handle, page).is_some()
    }

    /// Registers the request as the producer of the page that it computes next.
    pub(super) fn start_sharing(&mut self, handle: Handle) {
        let next_page = self.requests[handle].computed_tokens / self.config.cache.page_size;
        self.announce(handle, next_page);
    }

    /// Registers the request as the producer of a page. Followers that share no further page are queued again.
    pub(super) fn announce(&mut self, handle: Handle, next_page: u32) {
        self.withdraw_announcement(handle);
        let entry = &mut self.requests[handle];
        let key = entry.sequence.keys().get(next_page as usize).filter(|_| entry.publishes());
        let page = match key.filter(|&key| self.producers.register(key, handle)) {
            Some(key) => {
                entry.computing_key = Some(key);
                next_page
            }
            // Its pages are not published, or another request produces the page.
            None => u32::MAX,
        };
        self.requests.wake_followers(handle, page);
    }

    /// Ends the production of pages for others.
    pub(super) fn stop_sharing(&mut self, handle: Handle) {
        self.withdraw_announcement(handle);
        self.requests.wake_followers(handle, u32::MAX);
    }

    fn withdraw_announcement(&mut self, handle: Handle) {
        if let Some(key) = self.requests[handle].computing_key.take() {
            self.producers.withdraw(key);
        }
    }
}
