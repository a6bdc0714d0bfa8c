//! Backfill: requests that are admitted while an earlier one waits for memory, because they do not delay it.
//!
//! The start of the earlier request follows from the tokens that running requests may still produce. A later
//! request may run meanwhile if there is room for both at that time.

/// Room for requests behind one that waits for memory.
#[derive(Debug, Default)]
pub(crate) struct Backfill {
    /// Device pages that later requests may take for their whole life.
    spare_pages: usize,
    /// Running requests by the steps that each may still take. The memory is reused.
    ends: Vec<RunEnd>,
}

/// Remaining steps of a running request and the pages that it frees then.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct RunEnd {
    pub(crate) steps: u32,
    pub(crate) pages: usize,
}

impl Backfill {
    /// Computes the room for later requests, if the first one needs `needed` pages and `free` are available, and
    /// returns true if there is any.
    pub(crate) fn measure(
        &mut self,
        mut free: usize,
        needed: usize,
        page_size: u32,
        running: impl Iterator<Item = RunEnd>,
    ) -> bool {
        self.ends.clear();
        self.ends.extend(running);
        self.ends.sort_unstable();
        let mut ended = 0;
        while free < needed && ended < self.ends.len() {
            free += self.ends[ended].pages;
            ended += 1;
        }
        let steps = ended.checked_sub(1).map_or(0, |last| self.ends[last].steps);
        // Until then the other running requests grow by the pages that they decode.
        let growth = (self.ends.len() - ended) * steps.div_ceil(page_size) as usize;
        self.spare_pages = free.saturating_sub(needed + growth);
        self.spare_pages > 0
    }

    pub(crate) fn has_room_for(&self, pages: usize) -> bool {
        pages <= self.spare_pages
    }

    pub(crate) fn take(&mut self, pages: usize) {
        self.spare_pages -= pages;
    }
}
