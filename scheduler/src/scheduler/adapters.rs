//! Waits for a place for an adapter.

use terrace_cache::planted::{Bug, planted};

use super::Scheduler;
use crate::config::ms;
use crate::deferred::Wake;
use crate::ids::Handle;

impl Scheduler {
    /// Event that the request has to wait for because too many adapters run. If an earlier request has waited for
    /// a place for its adapter for too long, no other request with an adapter starts before it.
    pub(super) fn adapter_wait(&self, handle: Handle) -> Option<Wake> {
        let adapters_max = self.config.batch.adapters_max;
        let adapter = self.requests[handle].adapter;
        if adapters_max == 0 || adapter.is_none() || planted(Bug::TooManyAdapters) {
            return None;
        }
        let lacks_place =
            |adapter| !self.adapters.runs(adapter) && self.adapters.running() >= adapters_max;
        if lacks_place(adapter) {
            return Some(Wake::Adapter(adapter));
        }
        let overdue = self.now.before(ms(self.config.queue.wait_max_ms));
        let waits_too_long = |first: &Handle| {
            let entry = &self.requests[*first];
            *first < handle && entry.submitted_at < overdue && lacks_place(entry.adapter)
        };
        let first = self.requests.deferred().first_for_adapter().filter(waits_too_long);
        first.map(|producer| Wake::Producer { producer, page: 0 })
    }

    /// Queues requests that wait for a place for their adapter, as far as there are places.
    pub(super) fn wake_for_adapters(&mut self) {
        let adapters_max = self.config.batch.adapters_max;
        self.requests.wake_for_adapters(adapters_max.saturating_sub(self.adapters.running()));
    }
}
