//! Adapters: which there are, and how many of them run at once.

use serde::{Deserialize, Serialize};
use terrace_cache::planted::{Bug, planted};

use crate::config::ms;
use crate::parked::Wake;
use crate::requests::Handle;
use crate::scheduler::Scheduler;

/// An adapter (LoRA) by its number. It means the same as long as a request that uses it is alive;
/// [`Scheduler::adapter`] says its name.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[serde(transparent)]
pub struct AdapterId(pub u32);

impl AdapterId {
    /// No adapter: the plain model.
    pub const NONE: Self = Self(0);

    /// Whether there is none.
    #[must_use]
    pub fn is_none(&self) -> bool {
        *self == Self::NONE
    }
}

/// The adapters of live requests.
#[derive(Debug, Default)]
pub(crate) struct Adapters {
    /// By number, from 1 on; places without a live request are used again.
    known: Vec<Known>,
    /// How many of them run.
    running: u32,
}

#[derive(Debug, Default)]
struct Known {
    name: String,
    live: u32,
    running: u32,
}

impl Adapters {
    /// A request with this adapter has come.
    pub(crate) fn came(&mut self, name: String) -> AdapterId {
        if name.is_empty() {
            return AdapterId::NONE;
        }
        let is_it = |known: &Known| known.live > 0 && known.name == name;
        let place = self.known.iter().position(is_it).unwrap_or_else(|| {
            let unused = self.known.iter().position(|known| known.live == 0);
            unused.unwrap_or_else(|| {
                self.known.push(Known::default());
                self.known.len() - 1
            })
        });
        let known = &mut self.known[place];
        (known.name, known.live) = (name, known.live + 1);
        AdapterId(place as u32 + 1)
    }

    /// Another request with an adapter of a live one has come.
    pub(crate) fn came_again(&mut self, adapter: AdapterId) {
        if let Some(known) = self.known_mut(adapter) {
            known.live += 1;
        }
    }

    /// A request with this adapter has gone.
    pub(crate) fn went(&mut self, adapter: AdapterId) {
        if let Some(known) = self.known_mut(adapter) {
            known.live -= 1;
        }
    }

    /// A request with this adapter runs from now on. Tells whether it is the first.
    pub(crate) fn starts(&mut self, adapter: AdapterId) -> bool {
        let Some(known) = self.known_mut(adapter) else { return false };
        known.running += 1;
        let is_first = known.running == 1;
        self.running += u32::from(is_first);
        is_first
    }

    /// It does not run any more.
    pub(crate) fn stops(&mut self, adapter: AdapterId) {
        if let Some(known) = self.known_mut(adapter) {
            known.running -= 1;
            self.running -= u32::from(self.known[adapter.0 as usize - 1].running == 0);
        }
    }

    fn known_mut(&mut self, adapter: AdapterId) -> Option<&mut Known> {
        self.known.get_mut((adapter.0 as usize).checked_sub(1)?)
    }

    fn known(&self, adapter: AdapterId) -> Option<&Known> {
        self.known.get((adapter.0 as usize).checked_sub(1)?)
    }

    fn runs(&self, adapter: AdapterId) -> bool {
        self.known(adapter).is_some_and(|known| known.running > 0)
    }

    /// How many live requests, and how many running ones, use each, for the audit.
    pub(crate) fn counts(&self) -> impl Iterator<Item = (AdapterId, u32, u32)> {
        let numbered = (1..).map(AdapterId).zip(&self.known);
        numbered.map(|(adapter, known)| (adapter, known.live, known.running))
    }

    /// How many different ones run.
    pub(crate) fn running(&self) -> u32 {
        self.running
    }
}

impl Scheduler {
    /// The name of an adapter that a plan names; nothing for none, and for one that no live request uses.
    #[must_use]
    pub fn adapter(&self, adapter: AdapterId) -> Option<&str> {
        self.adapters.known(adapter).filter(|known| known.live > 0).map(|known| &*known.name)
    }

    /// The event that a request has to wait for because as many adapters run as may. If another has waited for a place
    /// for its adapter for too long, no other with an adapter begins before it: those that run come to their end.
    pub(crate) fn waits_for_adapter(&self, handle: Handle) -> Option<Wake> {
        let adapters_max = self.config.batch.adapters_max;
        let adapter = self.requests[handle].adapter;
        if adapters_max == 0 || adapter.is_none() || planted(Bug::TooManyAdapters) {
            return None;
        }
        let lacks_place =
            |adapter| !self.adapters.runs(adapter) && self.adapters.running >= adapters_max;
        if lacks_place(adapter) {
            return Some(Wake::Adapter(adapter));
        }
        let overdue = self.now.before(ms(self.config.queue.wait_max_ms));
        let waits_too_long = |first: &Handle| {
            let entry = &self.requests[*first];
            *first < handle && entry.submitted_at < overdue && lacks_place(entry.adapter)
        };
        let first = self.requests.parked().first_for_adapter().filter(waits_too_long);
        first.map(|provider| Wake::Provider { provider, page: 0 })
    }

    /// Lets requests that wait for a place for their adapter be tried, if there is one.
    pub(crate) fn wake_for_adapters(&mut self) {
        let adapters_max = self.config.batch.adapters_max;
        self.requests.wake_for_adapters(adapters_max.saturating_sub(self.adapters.running));
    }
}
