//! State of the cache as a router knows it from events alone.

use std::collections::{BTreeMap, BTreeSet};

use terrace_cache::{KvEvent, KvEvents, KvTier, PageKey, Sequence, Token};

pub(crate) struct Mirror {
    pub(crate) device: BTreeSet<PageKey>,
    pub(crate) host: BTreeSet<PageKey>,
    pub(crate) l3: BTreeSet<PageKey>,
    /// The number of the next event.
    expected: u64,
    /// Namespace, predecessor and tokens of every possible page.
    families: BTreeMap<PageKey, (PageKey, PageKey, Vec<Token>)>,
}

impl Mirror {
    pub(crate) fn new(sequences: &[Sequence]) -> Self {
        let mut families = BTreeMap::new();
        for sequence in sequences {
            let mut parent = sequence.root();
            for (page, key) in (0..).zip(sequence.keys().iter()) {
                let tokens = sequence.run(page, page + 1).tokens().to_vec();
                families.insert(key, (sequence.root(), parent, tokens));
                parent = key;
            }
        }
        let (device, host, l3) = Default::default();
        Self { device, host, l3, expected: 0, families }
    }

    pub(crate) fn hear(&mut self, events: &KvEvents) {
        if events.is_snapshot {
            for tier in [&mut self.device, &mut self.host, &mut self.l3] {
                tier.clear();
            }
        } else {
            assert_eq!(events.first(), self.expected, "a gap that no snapshot fills");
        }
        events.iter().for_each(|event| self.hear_one(&event));
        self.expected = events.next;
    }

    fn hear_one(&mut self, event: &KvEvent<'_>) {
        match event {
            KvEvent::Stored { tier, namespace, parent, keys, tokens, .. } => {
                let mut before = *parent;
                let page_size = tokens.len() / keys.len();
                for (&key, tokens) in keys.iter().zip(tokens.chunks(page_size)) {
                    let family = (*namespace, before, tokens.to_vec());
                    assert_eq!(self.families[&key], family, "{event:?}");
                    before = key;
                }
                let prefix_known = parent == namespace || self.device.contains(parent);
                assert!(prefix_known || *tier != KvTier::Device, "without its prefix: {event:?}");
                for &key in keys.iter() {
                    let is_news = self.tier(*tier).insert(key);
                    assert!(is_news || *tier == KvTier::L3, "stored twice: {event:?}");
                }
            }
            KvEvent::Removed { tier, namespace, keys } => {
                for key in keys.iter() {
                    assert_eq!(self.families[key].0, *namespace, "{event:?}");
                    assert!(self.tier(*tier).remove(key), "removed what was not stored: {event:?}");
                }
            }
            KvEvent::Cleared => {
                self.device.clear();
                self.host.clear();
            }
        }
    }

    /// Number of pages from the first on device, and on device or host.
    pub(crate) fn depths(&self, keys: &[PageKey]) -> (usize, usize) {
        let on_device = |key: &&PageKey| self.device.contains(key);
        let somewhere = |key: &&PageKey| self.device.contains(key) || self.host.contains(key);
        (keys.iter().take_while(on_device).count(), keys.iter().take_while(somewhere).count())
    }

    fn tier(&mut self, tier: KvTier) -> &mut BTreeSet<PageKey> {
        match tier {
            KvTier::Device => &mut self.device,
            KvTier::Host => &mut self.host,
            KvTier::L3 => &mut self.l3,
        }
    }
}
