//! Backfill: requests that are admitted while an earlier one waits for memory, because they do not delay it.
//!
//! When the earlier request can start follows from the tokens that running requests may still produce. Another request
//! may run meanwhile if there is room for both at that time.

use crate::requests::Handle;
use crate::scheduler::Scheduler;

/// Room for requests behind one that waits for memory.
#[derive(Debug, Default)]
pub(crate) struct Backfill {
    /// Device pages that they may take, for as long as they live.
    spare_pages: usize,
    /// By the steps that a running request may still take, the pages that it leaves. The memory is used again.
    ends: Vec<(u32, usize)>,
}

impl Backfill {
    pub(crate) fn has_room_for(&self, pages: usize) -> bool {
        pages <= self.spare_pages
    }

    pub(crate) fn take(&mut self, pages: usize) {
        self.spare_pages -= pages;
    }
}

impl Scheduler {
    /// Computes the room that requests behind `first` may take, and tells whether there is any.
    pub(crate) fn backfill_behind(&mut self, first: Handle) -> bool {
        let available = self.cache.usage().device.available_pages();
        let reserved = self.reserved_pages();
        if available <= reserved {
            return false;
        }
        let needed = self.new_pages(first, self.glance(first)) + reserved;
        let ends = &mut self.backfill.ends;
        ends.clear();
        for &handle in self.batch.running() {
            let entry = &self.requests[handle];
            if let Some(computing) = entry.life.state().computing() {
                let left = entry.prefill_end.saturating_sub(entry.computed_tokens);
                let steps = left / self.config.batch.step_tokens_max + entry.remaining_tokens;
                let pages = self.cache.pages_kept_by(&computing.path) + computing.tail.len();
                ends.push((steps, pages));
            }
        }
        ends.sort_unstable();
        let mut free = available + self.operations.pages_making_room() + self.cache.cooling_pages();
        let mut ended = 0;
        while free < needed && ended < ends.len() {
            free += ends[ended].1;
            ended += 1;
        }
        let steps = ended.checked_sub(1).map_or(0, |last| ends[last].0);
        // By then the others have grown by the pages that they decode.
        let growth = (ends.len() - ended) * steps.div_ceil(self.config.cache.page_size) as usize;
        self.backfill.spare_pages = free.saturating_sub(needed + growth);
        self.backfill.spare_pages > 0
    }

    /// Pages of a request with all tokens that it may produce.
    pub(crate) fn pages_of_life(&self, handle: Handle) -> usize {
        let entry = &self.requests[handle];
        let tokens = u64::from(entry.tokens()) + u64::from(entry.remaining_tokens);
        tokens.div_ceil(self.config.cache.page_size.into()) as usize
    }
}
