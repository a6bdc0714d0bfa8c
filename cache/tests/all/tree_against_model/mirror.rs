//! What a router knows of the cache from its events alone.

use std::collections::{BTreeMap, BTreeSet};

use terrace_cache::{KvEvent, PageKey, Sequence, TierName};

pub(crate) struct Mirror {
    pub(crate) device: BTreeSet<PageKey>,
    pub(crate) host: BTreeSet<PageKey>,
    /// Whether nothing was left in the cache when the log last started over: then the mirror
    /// knows all, not just a part.
    pub(crate) complete: bool,
    /// Of each page that there can be: its namespace and the page before it.
    families: BTreeMap<PageKey, (PageKey, PageKey)>,
}

impl Mirror {
    pub(crate) fn new(sequences: &[Sequence]) -> Self {
        let mut families = BTreeMap::new();
        for sequence in sequences {
            let mut parent = sequence.root();
            for key in sequence.keys().iter() {
                families.insert(key, (sequence.root(), parent));
                parent = key;
            }
        }
        Self { device: BTreeSet::new(), host: BTreeSet::new(), complete: true, families }
    }

    pub(crate) fn hear(&mut self, event: &KvEvent) {
        match event {
            KvEvent::Stored { tier, namespace, parent, keys } => {
                let mut before = *parent;
                for &key in keys {
                    assert_eq!(self.families[&key], (*namespace, before), "{event:?}");
                    before = key;
                }
                let prefix_known = parent == namespace || self.device.contains(parent);
                if self.complete && *tier == TierName::Device {
                    assert!(prefix_known, "stored on device without its prefix: {event:?}");
                }
                for &key in keys {
                    assert!(self.tier(*tier).insert(key), "stored twice: {event:?}");
                }
            }
            KvEvent::Removed { tier, namespace, keys } => {
                for key in keys {
                    assert_eq!(self.families[key].0, *namespace, "{event:?}");
                    let known = self.tier(*tier).remove(key);
                    assert!(known || !self.complete, "removed what was not stored: {event:?}");
                }
            }
            KvEvent::Cleared => {
                self.device.clear();
                self.host.clear();
                self.complete = false;
            }
        }
    }

    /// How many pages from the first are on device, and how many on device or host.
    pub(crate) fn depths(&self, keys: &[PageKey]) -> (usize, usize) {
        let on_device = |key: &&PageKey| self.device.contains(key);
        let somewhere = |key: &&PageKey| self.device.contains(key) || self.host.contains(key);
        (keys.iter().take_while(on_device).count(), keys.iter().take_while(somewhere).count())
    }

    fn tier(&mut self, tier: TierName) -> &mut BTreeSet<PageKey> {
        match tier {
            TierName::Device => &mut self.device,
            TierName::Host => &mut self.host,
        }
    }
}
