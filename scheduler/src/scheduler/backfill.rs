//! Backfill behind a request that waits for memory.

use super::Scheduler;
use crate::backfill::RunEnd;
use crate::ids::Handle;

impl Scheduler {
    /// Computes the room that requests behind `first` may take, and returns true if there is any.
    pub(super) fn backfill_behind(&mut self, first: Handle) -> bool {
        let available = self.cache.usage().device.available_pages();
        let reserved = self.reserved_pages();
        if available <= reserved {
            return false;
        }
        let needed = self.new_pages(first, self.match_depths(first)) + reserved;
        let free = available + self.operations.pages_making_room() + self.cache.cooling_pages();
        let (requests, cache) = (&self.requests, &self.cache);
        let step_tokens_max = self.config.batch.step_tokens_max;
        let running = self.batch.running().iter().filter_map(|&handle| {
            let entry = &requests[handle];
            let computing = entry.life.state().computing()?;
            let left = entry.prefill_end.saturating_sub(entry.computed_tokens);
            let steps = left / step_tokens_max + entry.remaining_tokens;
            let pages = cache.pages_kept_by(&computing.path) + computing.tail.len();
            Some(RunEnd { steps, pages })
        });
        self.backfill.measure(free, needed, self.config.cache.page_size, running)
    }

    /// Pages of a request with all tokens that it may produce.
    pub(super) fn pages_of_life(&self, handle: Handle) -> usize {
        let entry = &self.requests[handle];
        let tokens = u64::from(entry.tokens()) + u64::from(entry.remaining_tokens);
        tokens.div_ceil(self.config.cache.page_size.into()) as usize
    }
}
