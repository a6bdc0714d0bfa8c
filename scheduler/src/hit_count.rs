//! Count of the hits of a request.

use crate::stats::Hits;

/// Hits of a request. They are counted only at its first admission and until its pages are loaded.
#[derive(Debug, Default)]
pub(crate) struct HitCount {
    hits: Hits,
    was_admitted: bool,
    is_counting: bool,
}

impl HitCount {
    /// Notes an admission with cached tokens on device. Returns true if it is the first.
    pub(crate) fn admit(&mut self, device_tokens: u32) -> bool {
        self.is_counting = !self.was_admitted;
        self.was_admitted = true;
        if self.is_counting {
            self.hits.device_tokens = device_tokens;
        }
        self.is_counting
    }

    /// Adds cached tokens on device.
    pub(crate) fn add_device(&mut self, tokens: u32) {
        self.hits.device_tokens += tokens;
    }

    /// Adds tokens that were loaded from host, and those that came from L3 for this request.
    pub(crate) fn add_loaded(&mut self, host_tokens: u32, l3_tokens: u32) {
        self.hits.host_tokens += host_tokens;
        self.hits.l3_tokens += l3_tokens;
    }

    /// Returns true if further hits count.
    pub(crate) fn is_counting(&self) -> bool {
        self.is_counting
    }

    pub(crate) fn hits(&self) -> Hits {
        self.hits
    }
}
