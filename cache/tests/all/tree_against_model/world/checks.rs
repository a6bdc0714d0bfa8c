//! Invariants after every step.

use terrace_cache::{
    Claims, DevicePage, DevicePin, KvEvent, KvEvents, KvTier, Match, PageKey, Sequence,
};

use super::transfers::Transfer;
use super::{Sound, World};

impl World {
    // ---- reading ----

    /// Reads what a new request would read from the device.
    pub(super) fn read_device(&mut self, sequence: usize) {
        let sequence = &self.sequences[sequence];
        let found = self.cache.lookup(sequence, u32::MAX);
        let pin = self.cache.pin_device(sequence.root(), found.device);
        self.check_pinned(sequence, &pin);
        self.cache.unpin_device(pin);
    }

    /// Reads what a new request would load from host, and leaves it there.
    pub(super) fn read_host(&mut self, sequence: usize) {
        self.load_back(sequence, u32::MAX);
        if !self.transfers.is_empty() {
            self.settle(0, Sound::Nothing);
        }
    }

    pub(super) fn content(&self, page: DevicePage) -> PageKey {
        self.device.read(page).expect("a pinned page has bytes")
    }

    pub(super) fn is_being_written(&self, key: &PageKey) -> bool {
        self.transfers.iter().any(|transfer| match transfer {
            Transfer::WriteBack { keys, .. } => keys.contains(key),
            Transfer::LoadBack { .. } | Transfer::Backup { .. } | Transfer::Prefetch { .. } => {
                false
            }
        })
    }

    pub(super) fn is_being_stored(&self, key: &PageKey) -> bool {
        self.transfers.iter().any(|transfer| match transfer {
            Transfer::Backup { keys, .. } => keys.contains(key),
            Transfer::LoadBack { .. } | Transfer::WriteBack { .. } | Transfer::Prefetch { .. } => {
                false
            }
        })
    }

    pub(super) fn is_being_loaded(&self, key: &PageKey) -> bool {
        self.transfers.iter().any(|transfer| match transfer {
            Transfer::LoadBack { anchor, arrival, .. } => {
                anchor.path(&self.sequences)[arrival.start_page() as usize..].contains(key)
            }
            Transfer::WriteBack { .. } | Transfer::Backup { .. } | Transfer::Prefetch { .. } => {
                false
            }
        })
    }

    /// Returns true if a host copy may be unsound and read at the same time: then it cannot be replaced.
    pub(super) fn is_doubted_and_pinned(&self, key: &PageKey) -> bool {
        let in_flight = self.transfers.iter().filter_map(Transfer::anchor);
        let mut anchors = self.anchors.iter().chain(in_flight);
        self.unsound.contains(key)
            && anchors.any(|anchor| anchor.path(&self.sequences).contains(key))
    }

    pub(super) fn note_published(&mut self, sequence: usize, end_page: u32) {
        let sequence = &self.sequences[sequence];
        for pages in 1..=end_page as usize {
            let tokens = sequence.run(0, pages as u32).tokens().to_vec();
            self.published.insert((sequence.root(), tokens));
        }
    }

    // ---- checking ----

    pub(super) fn hear_events(&mut self) {
        let mut events = KvEvents::default();
        self.cache.drain_events(&mut events);
        self.mirror.hear(&events);
        for event in events.iter() {
            if let KvEvent::Stored { tier: KvTier::Host, keys, .. } = event {
                self.unsound.retain(|key| !keys.contains(key));
            }
        }
        self.told.push(events);
    }

    pub(super) fn check(&mut self) {
        self.hear_events();
        self.cache.audit(&self.claims()).expect("every page has one owner");
        for request in &self.requests {
            let sequence = &self.sequences[request.sequence];
            self.check_pinned(sequence, &request.pin);
            let found = self.cache.lookup(sequence, u32::MAX);
            assert!(found.device.depth >= request.pin.depth(), "a pinned prefix is not found");
        }
        for anchor in self.anchors.iter().filter(|anchor| !anchor.doubted) {
            let found = self.cache.lookup(&self.sequences[anchor.sequence], u32::MAX);
            assert!(found.host.depth >= anchor.pin.depth(), "a pinned prefix is not found");
        }
        for sequence in &self.sequences {
            self.check_match(sequence, self.cache.lookup(sequence, u32::MAX));
        }
        self.check_page_counts();
    }

    pub(super) fn check_pinned(&self, sequence: &Sequence, pin: &DevicePin) {
        let mut pages = Vec::new();
        self.cache.device_pages(pin, 0, &mut pages);
        assert_eq!(pages.len(), pin.depth() as usize);
        for (&page, key) in pages.iter().zip(sequence.keys().iter()) {
            assert_eq!(self.device.read(page), Some(key), "a wrong page was handed out");
        }
        let mut lower_half = Vec::new();
        self.cache.device_pages(pin, pin.depth() / 2, &mut lower_half);
        assert_eq!(lower_half, pages[pages.len() / 2..]);
    }

    pub(super) fn check_match(&self, sequence: &Sequence, found: Match) {
        let (device, host) = (found.device.depth as usize, found.host.depth as usize);
        assert_eq!(self.cache.depths(sequence, u32::MAX), found.depths(), "keys tell another tale");
        assert!(device <= host && host <= sequence.keys().len());
        let prefix = (sequence.root(), sequence.run(0, host as u32).tokens().to_vec());
        assert!(host == 0 || self.published.contains(&prefix), "more was found than published");
        let (heard_device, heard_host) = self.mirror.depths(&sequence.keys().to_vec());
        assert_eq!((device, host), (heard_device, heard_host), "events do not tell the truth");
        let mut keys = sequence.run(found.device.depth, found.host.depth).keys().iter();
        let loading = keys.any(|key| self.is_being_loaded(&key));
        assert_eq!(found.arriving, loading);
    }

    /// Pages that a write-back of a whole path copies: all that are neither on host nor in flight to it.
    pub(super) fn check_unwritten(&self, path: &[PageKey], unwritten: usize) {
        if !self.ever_distrusted {
            let wanted =
                |key: &&PageKey| !self.mirror.host.contains(key) && !self.is_being_written(key);
            assert_eq!(unwritten, path.iter().filter(wanted).count());
        }
    }

    pub(super) fn check_page_counts(&self) {
        let usage = self.cache.usage();
        let (mut device, mut host) = (usage.device.free_pages, usage.host.free_pages);
        for request in &self.requests {
            device += request.computed.len();
        }
        for transfer in &self.transfers {
            match transfer {
                Transfer::WriteBack { pages, .. } | Transfer::Prefetch { pages, .. } => {
                    host += pages.len();
                }
                Transfer::LoadBack { pages, .. } => device += pages.len(),
                Transfer::Backup { .. } => {}
            }
        }
        let in_tree = (usage.device.total_pages - device, usage.host.total_pages - host);
        let heard = (self.mirror.device.len(), self.mirror.host.len());
        assert_eq!(heard.0, in_tree.0);
        assert!(heard.1 == in_tree.1 || self.ever_distrusted && heard.1 < in_tree.1);
    }

    pub(super) fn claims(&self) -> Claims {
        let mut claims = Claims::default();
        for request in &self.requests {
            claims.device_pin(&request.pin);
            claims.device_pages(&request.computed);
        }
        let in_flight = self.transfers.iter().filter_map(Transfer::anchor);
        for anchor in self.anchors.iter().chain(in_flight) {
            claims.host_pin(&anchor.pin);
        }
        for transfer in &self.transfers {
            match transfer {
                Transfer::WriteBack { pin, pages, .. } => {
                    claims.device_pin(pin);
                    claims.host_pages(pages);
                }
                Transfer::LoadBack { pin, pages, .. } => {
                    claims.device_pin(pin);
                    claims.device_pages(pages);
                }
                Transfer::Backup { .. } => {}
                Transfer::Prefetch { pages, .. } => claims.host_pages(pages),
            }
        }
        claims
    }
}
