//! Knowledge about the pages of one request in L3.

use std::ops::Range;

use crate::wait::Found;

/// Maximum number of probes for a request before it runs. Pages that the cache loses again and again are not
/// worth more.
const PROBES_MAX: u32 = 8;

/// Knowledge about the pages of one request in L3, and the pages that were prefetched for it.
#[derive(Debug)]
pub(crate) struct L3Lookup {
    probed: Option<Probed>,
    probes_left: u32,
    found: Option<Found>,
    fetched: Range<u32>,
    held_pages: u32,
}

/// Pages of the last probe, or those that were not worth a probe.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Probed {
    /// First page: the cached pages at that time.
    pub(crate) from: u32,
    /// First later page that L3 did not have, as far as is known.
    pub(crate) lacks: Option<u32>,
}

impl Default for L3Lookup {
    fn default() -> Self {
        Self { probed: None, probes_left: PROBES_MAX, found: None, fetched: 0..0, held_pages: 0 }
    }
}

impl L3Lookup {
    // ---- probes ----

    /// Notes the pages of a probe, or pages that are not worth one.
    pub(crate) fn note_probed(&mut self, from: u32, lacks: Option<u32>) {
        self.probed = Some(Probed { from, lacks });
    }

    /// Forgets the last probe, so that the request may be probed for again.
    pub(crate) fn forget_probe(&mut self) {
        self.probed = None;
    }

    /// Notes that L3 did not deliver a page.
    pub(crate) fn note_missing(&mut self, page: u32) {
        if let Some(probed) = &mut self.probed {
            probed.lacks = Some(page);
        }
    }

    /// Counts a probe.
    pub(crate) fn start_probe(&mut self) {
        self.probes_left -= 1;
    }

    /// Pages of the last probe. Without one, the request is probed for again if possible.
    pub(crate) fn probed(&self) -> Option<Probed> {
        self.probed
    }

    /// Returns true if the limit of probes is not reached.
    pub(crate) fn may_probe(&self) -> bool {
        self.probes_left > 0
    }

    // ---- prefetches ----

    /// Replaces the pages that L3 is known to have and that are not prefetched yet.
    pub(crate) fn set_found(&mut self, found: Option<Found>) {
        self.found = found;
    }

    pub(crate) fn take_found(&mut self) -> Option<Found> {
        self.found.take()
    }

    /// Notes pages that arrived on host.
    pub(crate) fn note_fetched(&mut self, pages: Range<u32>) {
        self.held_pages += pages.end - pages.start;
        self.fetched = match self.fetched.end == pages.start {
            true => self.fetched.start..pages.end,
            false => pages,
        };
    }

    /// Stops holding prefetched pages and returns their number.
    pub(crate) fn release_held(&mut self) -> u32 {
        std::mem::take(&mut self.held_pages)
    }

    /// Pages that L3 is known to have and that are not prefetched yet.
    pub(crate) fn found(&self) -> Option<Found> {
        self.found
    }

    /// Pages that were prefetched for the request.
    pub(crate) fn fetched(&self) -> &Range<u32> {
        &self.fetched
    }

    /// Prefetched pages that wait on host to be loaded. They count towards the share of prefetches.
    pub(crate) fn held_pages(&self) -> u32 {
        self.held_pages
    }
}
