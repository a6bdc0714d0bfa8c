//! Adapters of the live requests, and the number of them that run at once.

use crate::ids::AdapterId;

/// The adapters of live requests.
#[derive(Debug, Default)]
pub(crate) struct Adapters {
    /// Adapters by number, from 1 on. Places without a live request are reused.
    known: Vec<Known>,
    /// Number of adapters that run.
    running: u32,
}

#[derive(Debug, Default)]
struct Known {
    name: String,
    live: u32,
    running: u32,
}

impl Adapters {
    /// Counts a new request and returns the number of its adapter.
    pub(crate) fn acquire(&mut self, name: String) -> AdapterId {
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

    /// Counts another request with the adapter of a live one.
    pub(crate) fn add_request(&mut self, adapter: AdapterId) {
        if let Some(known) = self.known_mut(adapter) {
            known.live += 1;
        }
    }

    /// Counts the end of a request.
    pub(crate) fn release(&mut self, adapter: AdapterId) {
        if let Some(known) = self.known_mut(adapter) {
            known.live -= 1;
        }
    }

    /// Counts a request that starts to run. Returns true if it is the first with this adapter.
    pub(crate) fn starts(&mut self, adapter: AdapterId) -> bool {
        let Some(known) = self.known_mut(adapter) else { return false };
        known.running += 1;
        let is_first = known.running == 1;
        self.running += u32::from(is_first);
        is_first
    }

    /// Counts a request that stops running.
    pub(crate) fn stops(&mut self, adapter: AdapterId) {
        if let Some(known) = self.known_mut(adapter) {
            known.running -= 1;
            self.running -= u32::from(self.known[adapter.0 as usize - 1].running == 0);
        }
    }

    fn known_mut(&mut self, adapter: AdapterId) -> Option<&mut Known> {
        self.known.get_mut((adapter.0 as usize).checked_sub(1)?)
    }

    /// Name of an adapter that a live request uses.
    pub(crate) fn name(&self, adapter: AdapterId) -> Option<&str> {
        self.known(adapter).filter(|known| known.live > 0).map(|known| &*known.name)
    }

    fn known(&self, adapter: AdapterId) -> Option<&Known> {
        self.known.get((adapter.0 as usize).checked_sub(1)?)
    }

    /// Returns true if a running request uses the adapter.
    pub(crate) fn runs(&self, adapter: AdapterId) -> bool {
        self.known(adapter).is_some_and(|known| known.running > 0)
    }

    /// Numbers of live and of running requests of each adapter.
    pub(crate) fn counts(&self) -> impl Iterator<Item = (AdapterId, u32, u32)> {
        let numbered = (1..).map(AdapterId).zip(&self.known);
        numbered.map(|(adapter, known)| (adapter, known.live, known.running))
    }

    /// Number of different adapters that run.
    pub(crate) fn running(&self) -> u32 {
        self.running
    }
}
