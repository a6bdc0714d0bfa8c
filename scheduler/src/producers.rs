//! Producers of pages that other requests may wait for, and the waits for them.

use std::collections::hash_map::Entry as Place;

use terrace_cache::planted::{Bug, planted};
use terrace_cache::{HashedMap, PageKey};
use terrace_fsm::Time;

use crate::config::{QueueConfig, ms};
use crate::ids::Handle;

/// Requests that compute, load or prefetch pages, by the next page of each.
#[derive(Debug, Default)]
pub(crate) struct Producers {
    by_page: HashedMap<PageKey, Handle>,
}

impl Producers {
    /// Registers the producer of a page. Returns false if the page has one already.
    pub(crate) fn register(&mut self, key: PageKey, producer: Handle) -> bool {
        match self.by_page.entry(key) {
            Place::Vacant(vacant) => {
                vacant.insert(producer);
                true
            }
            Place::Occupied(_) => false,
        }
    }

    /// Removes the producer of a page.
    pub(crate) fn withdraw(&mut self, key: PageKey) {
        if !planted(Bug::KeepSharingAfterEnd) {
            self.by_page.remove(&key);
        }
    }

    /// Producer of a page.
    pub(crate) fn find(&self, key: PageKey) -> Option<Handle> {
        self.by_page.get(&key).copied()
    }

    /// Number of pages with a producer.
    pub(crate) fn len(&self) -> usize {
        self.by_page.len()
    }
}

/// Wait for pages of a producer, bounded in total and since the last progress.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SharedWait {
    began: Time,
    progressed: Time,
    /// Cached pages at the last progress.
    pages: u32,
}

impl SharedWait {
    pub(crate) fn new(now: Time, pages: u32) -> Self {
        Self { began: now, progressed: now, pages }
    }

    /// Notes progress if more pages are cached, or if the producer is bounded by a deadline or by steps.
    pub(crate) fn observe(&mut self, now: Time, pages: u32, producer_progresses: bool) {
        if pages > self.pages || producer_progresses {
            (self.progressed, self.pages) = (now, pages);
        }
    }

    /// End of the wait. A wait for a sibling is bounded only by the time without progress.
    pub(crate) fn until(&self, queue: &QueueConfig, for_sibling: bool) -> Time {
        let stalled = self.progressed.after(ms(queue.share_stall_max_ms));
        match for_sibling {
            true => stalled,
            false => self.began.after(ms(queue.share_wait_max_ms)).min(stalled),
        }
    }
}
