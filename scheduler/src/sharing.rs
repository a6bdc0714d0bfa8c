//! Sharing what others compute, load or fetch: who is about to have which page, and who waits for it.

use std::collections::hash_map::Entry as Place;

use terrace_cache::planted::{Bug, planted};
use terrace_cache::{Depths, HashedMap, PageKey};
use terrace_fsm::{StateName, Time};

use crate::config::ms;
use crate::parked::Wake;
use crate::requests::{Entry, Handle};
use crate::scheduler::Scheduler;
use crate::waiting::Waiting;

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

impl Entry {
    /// Whether the page of this token comes to be there for others by what it does: it asks L3 for it,
    /// fetches, loads or computes it.
    fn brings(&self, first_token: u32) -> bool {
        match self.waiting() {
            Waiting::ToAsk
            | Waiting::Asking { .. }
            | Waiting::Told { .. }
            | Waiting::Fetching { .. } => true,
            Waiting::Loading { .. } | Waiting::Computing { .. } => {
                self.state() == StateName::Prefilling
                    && self.computed_tokens < first_token + self.sequence.page_size()
                    && self.publishes()
            }
            Waiting::InLine { .. } | Waiting::Parked { .. } | Waiting::Draining { .. } => false,
        }
    }

    /// Whether steps compute its prompt. Before that it waits for nothing that has no deadline of its own.
    fn goes_on_with_prompt(&self) -> bool {
        self.state() != StateName::Prefilling || self.flying.tokens + self.chunk_tokens > 0
    }
}

impl Scheduler {
    /// Defers a request whose next page another one computes, loads or fetches, if the wait for that is still within
    /// bounds: it goes on while more and more of the prefix is there, and for one of the same submission however long
    /// that takes. Tells whether it waits.
    pub(crate) fn waits_for_another(&mut self, handle: Handle, found: Depths) -> bool {
        let (now, pages) = (self.now, found.host);
        let sibling = self.sibling_that_brings(handle, found.device);
        let mut by = sibling.or_else(|| self.who_brings(handle, pages));
        if by.is_none() && found.arriving {
            by = self.who_brings(handle, found.device);
        } else if by.is_none() {
            return false;
        }
        let entry = &self.requests[handle];
        if !entry.takes_hits() || planted(Bug::NeverShare) {
            return false;
        }
        let mut sharing = entry.sharing.unwrap_or_else(|| {
            self.stats.shared_waits += 1;
            Sharing { began: now, progressed: now, pages }
        });
        // One that fetches or loads has a deadline of its own for that.
        let has_deadline = |by: Handle| {
            self.requests[by].life.state().operation().is_some()
                && !planted(Bug::StallDuringSharedLoad)
        };
        let goes_on = |sibling: Handle| self.requests[sibling].goes_on_with_prompt();
        if pages > sharing.pages || by.is_some_and(has_deadline) || sibling.is_some_and(goes_on) {
            (sharing.progressed, sharing.pages) = (now, pages);
        }
        self.requests[handle].sharing = Some(sharing);
        let queue = &self.config.queue;
        let stalls = sharing.progressed.after(ms(queue.share_stall_max_ms));
        let until = match sibling {
            Some(_) => stalls,
            None => sharing.began.after(ms(queue.share_wait_max_ms)).min(stalls),
        };
        if now >= until {
            return false;
        }
        let wake = match by {
            Some(provider) => {
                Wake::Provider { provider, page: self.common_pages(handle, provider) }
            }
            None => Wake::Arrival,
        };
        self.park(handle, Some(until), wake);
        true
    }

    /// Pages that both requests begin with, as far as the first of them can use them.
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

    /// Another request of the same submission that computes, loads or fetches this page of theirs, or one
    /// before it, or asks L3 for that.
    fn sibling_that_brings(&self, handle: Handle, page: u32) -> Option<Handle> {
        let siblings = self.requests[handle].siblings.as_ref()?;
        if page >= self.cacheable_pages(handle) {
            return None;
        }
        let first_token = page * self.config.cache.page_size;
        let brings = |&sibling: &Handle| {
            let entry = self.requests.get(sibling).filter(|entry| entry.handle != handle);
            entry.is_some_and(|entry| entry.brings(first_token))
        };
        siblings.iter().copied().find(brings)
    }

    /// Whether these were submitted together.
    pub(crate) fn are_siblings(&self, handle: Handle, other: Handle) -> bool {
        self.requests[handle].siblings.as_ref().is_some_and(|all| all.contains(&other))
    }

    /// Another request that computes or fetches this page of the request's.
    pub(crate) fn who_brings(&self, handle: Handle, page: u32) -> Option<Handle> {
        let key = self.requests[handle].sequence.keys().get(page as usize)?;
        self.announced.by_page.get(&key).copied().filter(|&by| by != handle)
    }

    pub(crate) fn is_coming(&self, handle: Handle, page: u32) -> bool {
        self.who_brings(handle, page).is_some() || self.sibling_that_brings(handle, page).is_some()
    }

    /// Lets others know which page this request computes next.
    pub(crate) fn start_sharing(&mut self, handle: Handle) {
        let next_page = self.requests[handle].computed_tokens / self.config.cache.page_size;
        self.announce(handle, next_page);
    }

    /// Lets others know which page this request is about to have. Those that follow it go on alone where their ways
    /// part.
    pub(crate) fn announce(&mut self, handle: Handle, next_page: u32) {
        self.withdraw_announcement(handle);
        let entry = &self.requests[handle];
        let key = entry.sequence.keys().get(next_page as usize).filter(|_| entry.publishes());
        let page = match key.map(|key| (key, self.announced.by_page.entry(key))) {
            Some((key, Place::Vacant(vacant))) => {
                vacant.insert(handle);
                self.requests[handle].computing_key = Some(key);
                next_page
            }
            // What it does will not be there for others, or is another's to bring.
            Some((_, Place::Occupied(_))) | None => u32::MAX,
        };
        self.requests.wake_followers(handle, page);
    }

    /// The request brings no pages any more.
    pub(crate) fn stop_sharing(&mut self, handle: Handle) {
        self.withdraw_announcement(handle);
        self.requests.wake_followers(handle, u32::MAX);
    }

    fn withdraw_announcement(&mut self, handle: Handle) {
        if let Some(key) = self.requests[handle].computing_key.take()
            && !planted(Bug::KeepSharingAfterEnd)
        {
            self.announced.by_page.remove(&key);
        }
    }
}
