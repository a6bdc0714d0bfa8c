//! Sharing what others compute, load or fetch: who is about to have which page, and who waits for it.

use std::collections::hash_map::Entry as Place;

use terrace_cache::planted::{Bug, planted};
use terrace_cache::{HashedMap, Match, PageKey};
use terrace_fsm::{StateName, Time};

use crate::config::ms;
use crate::requests::Handle;
use crate::scheduler::Scheduler;
use crate::waiting::DelayReason;

/// Requests that others may wait for, by the page that each is about to have.
#[derive(Debug, Default)]
pub(crate) struct Announced {
    by_page: HashedMap<PageKey, Handle>,
}

impl Announced {
    pub(crate) fn len(&self) -> usize {
        self.by_page.len()
    }
}

/// How a request has waited for others.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sharing {
    began: Time,
    /// When it last came to something.
    progressed: Time,
    /// How many pages were there then.
    pages: u32,
}

impl Scheduler {
    /// Whether another request is computing or loading the next page of this one, and the wait for
    /// it is still within bounds: it goes on while more and more of the prefix is there.
    pub(crate) fn waits_for_another(&mut self, handle: Handle, found: &Match) -> bool {
        if !found.arriving && !self.is_coming(handle, found.host.depth) {
            return false;
        }
        let (now, pages) = (self.now, found.host.depth);
        let entry = &self.requests[handle];
        if !entry.takes_hits() || planted(Bug::NeverShare) {
            return false;
        }
        let mut sharing = entry.sharing.unwrap_or_else(|| {
            self.stats.shared_waits += 1;
            Sharing { began: now, progressed: now, pages }
        });
        // Who fetches or loads has a deadline of its own for that.
        let has_deadline = |by: Handle| self.requests[by].life.state().operation().is_some();
        if pages > sharing.pages || self.who_brings(handle, pages).is_some_and(has_deadline) {
            (sharing.progressed, sharing.pages) = (now, pages);
        }
        self.requests[handle].sharing = Some(sharing);
        let queue = &self.config.queue;
        let stalls = sharing.progressed.after(ms(queue.share_stall_max_ms));
        let until = sharing.began.after(ms(queue.share_wait_max_ms)).min(stalls);
        if now < until && self.requests[handle].state() != StateName::Prefetching {
            self.look_again(handle, until, DelayReason::Prefix);
        }
        now < until
    }

    /// Another request that computes or fetches this page of the request's.
    pub(crate) fn who_brings(&self, handle: Handle, page: u32) -> Option<Handle> {
        let key = self.requests[handle].sequence.keys().get(page as usize)?;
        self.announced.by_page.get(&key).copied().filter(|&by| by != handle)
    }

    pub(crate) fn is_coming(&self, handle: Handle, page: u32) -> bool {
        self.who_brings(handle, page).is_some()
    }

    /// Lets others know which page this request computes next.
    pub(crate) fn start_sharing(&mut self, handle: Handle) {
        let next_page = self.requests[handle].computed_tokens / self.config.cache.page_size;
        self.announce(handle, next_page);
    }

    /// Lets others know which page this request is about to have.
    pub(crate) fn announce(&mut self, handle: Handle, next_page: u32) {
        self.stop_sharing(handle);
        let entry = &self.requests[handle];
        let Some(key) = entry.sequence.keys().get(next_page as usize) else { return };
        if let Place::Vacant(vacant) = self.announced.by_page.entry(key) {
            vacant.insert(handle);
            self.requests[handle].computing_key = Some(key);
        }
    }

    pub(crate) fn stop_sharing(&mut self, handle: Handle) {
        if let Some(key) = self.requests[handle].computing_key.take()
            && !planted(Bug::KeepSharingAfterEnd)
        {
            self.announced.by_page.remove(&key);
        }
    }
}
