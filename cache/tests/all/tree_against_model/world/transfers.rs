//! Transfers between the tiers and L3: each holds its pins and pages from its beginning to its end.

use terrace_cache::{Arrival, DevicePage, DevicePages, DevicePin, HostPage, HostPages, PageKey};

use super::{Anchor, Sound, World};

pub(super) enum Transfer {
    WriteBack {
        pin: DevicePin,
        arrival: Arrival,
        sources: Vec<DevicePage>,
        keys: Vec<PageKey>,
        pages: HostPages,
    },
    LoadBack {
        anchor: Anchor,
        pin: DevicePin,
        arrival: Arrival,
        sources: Vec<HostPage>,
        pages: DevicePages,
    },
    Backup {
        anchor: Anchor,
        arrival: Arrival,
        sources: Vec<HostPage>,
        keys: Vec<PageKey>,
    },
    Prefetch {
        anchor: Anchor,
        pages: HostPages,
    },
}

impl Transfer {
    /// Pin of the operation on host.
    pub(super) fn anchor(&self) -> Option<&Anchor> {
        match self {
            Self::WriteBack { .. } => None,
            Self::LoadBack { anchor, .. }
            | Self::Backup { anchor, .. }
            | Self::Prefetch { anchor, .. } => Some(anchor),
        }
    }

    pub(super) fn anchor_mut(&mut self) -> Option<&mut Anchor> {
        match self {
            Self::WriteBack { .. } => None,
            Self::LoadBack { anchor, .. }
            | Self::Backup { anchor, .. }
            | Self::Prefetch { anchor, .. } => Some(anchor),
        }
    }
}

impl World {
    // ---- transfers begin ----

    pub(super) fn write_back(&mut self, sequence: usize, at_end: bool, pages_max: usize) {
        let sequence = &self.sequences[sequence % self.sequences.len()];
        let found = self.cache.lookup(sequence, u32::MAX);
        let pin = self.cache.pin_device(sequence.root(), found.device);
        self.write_back_pinned(pin, at_end, pages_max);
    }

    pub(super) fn write_back_victim(&mut self) {
        let Some(victim) = self.cache.device_victim() else { return };
        let pin = self.cache.pin_victim(victim);
        let mut pages = Vec::new();
        self.cache.device_pages(&pin, pin.depth() - victim.pages as u32, &mut pages);
        assert_eq!(pages.len(), victim.pages);
        self.write_back_pinned(pin, false, usize::MAX);
    }

    pub(super) fn write_back_pinned(&mut self, pin: DevicePin, at_end: bool, pages_max: usize) {
        self.free_host(self.cache.unwritten_pages(&pin, at_end).min(pages_max));
        let pages_max = pages_max.min(self.cache.usage().host.free_pages);
        let unwritten = self.cache.unwritten_pages(&pin, at_end);
        let mut path = Vec::new();
        self.cache.device_pages(&pin, 0, &mut path);
        let path: Vec<PageKey> = path.iter().map(|&page| self.content(page)).collect();
        self.hear_events();
        if !at_end {
            self.check_unwritten(&path, unwritten);
        }
        let mut sources = Vec::new();
        let arrival = self.cache.begin_write_back(&pin, at_end, pages_max, &mut sources);
        assert_eq!(arrival.pages(), unwritten.min(pages_max));
        assert_eq!(arrival.pages(), sources.len());
        let keys: Vec<PageKey> = sources.iter().map(|&page| self.content(page)).collect();
        let places = keys.iter().map(|key| path.iter().position(|other| other == key));
        assert!(places.is_sorted_by(|a, b| a.is_some() && a < b), "sources are out of order");
        assert!(!keys.iter().any(|key| self.is_being_written(key)), "a page is written twice");
        if keys.is_empty() {
            self.cache.unpin_device(pin);
            return;
        }
        let pages = self.cache.take_host_pages(keys.len()).expect("they are free");
        self.host.scrub(&pages);
        self.transfers.push(Transfer::WriteBack { pin, arrival, sources, keys, pages });
    }

    pub(super) fn load_back(&mut self, sequence: usize, pages_max: u32) {
        let sequence = sequence % self.sequences.len();
        let root = self.sequences[sequence].root();
        let found = self.cache.lookup(&self.sequences[sequence], pages_max);
        let (start, end) = (found.device.depth, found.host.depth);
        if start == end || found.arriving {
            return;
        }
        let keys = self.sequences[sequence].run(start, end).keys().to_vec();
        let host_pin = self.cache.pin_host(root, found.host);
        let pin = self.cache.pin_device(root, found.device);
        if !self.free_device(keys.len()) {
            self.cache.unpin_host(host_pin);
            self.cache.unpin_device(pin);
            return;
        }
        let mut sources = Vec::new();
        let arrival = self.cache.begin_load_back(&host_pin, start, &mut sources);
        assert_eq!((arrival.start_page(), arrival.pages()), (start, keys.len()));
        assert_eq!(sources.len(), keys.len());
        for (&source, key) in sources.iter().zip(keys) {
            assert_eq!(self.host.read(source), Some(key), "a wrong page would be loaded");
        }
        let pages = self.cache.take_device_pages(sources.len()).expect("they were just freed");
        self.device.scrub(&pages);
        let anchor = Anchor { sequence, pin: host_pin, doubted: false };
        self.transfers.push(Transfer::LoadBack { anchor, pin, arrival, sources, pages });
    }

    pub(super) fn backup(&mut self, sequence: usize, pages_max: usize) {
        let sequence = sequence % self.sequences.len();
        let found = self.cache.lookup(&self.sequences[sequence], u32::MAX);
        let pin = self.cache.pin_host(self.sequences[sequence].root(), found.host);
        let (mut keys, mut sources) = (Vec::new(), Vec::new());
        let arrival = self.cache.begin_backup(
            &pin,
            self.cache.l3_round(),
            pages_max,
            &mut keys,
            &mut sources,
        );
        assert_eq!((keys.len(), sources.len()), (arrival.pages(), arrival.pages()));
        assert!(keys.len() <= pages_max);
        for (key, &source) in keys.iter().zip(&sources) {
            assert!(self.sequences[sequence].keys().iter().any(|ours| ours == *key));
            assert_eq!(self.host.read(source), Some(*key), "a wrong page would be stored");
            assert!(!self.is_being_stored(key), "a page is stored twice");
        }
        if keys.is_empty() {
            self.cache.unpin_host(pin);
            return;
        }
        let anchor = Anchor { sequence, pin, doubted: false };
        self.transfers.push(Transfer::Backup { anchor, arrival, sources, keys });
    }

    pub(super) fn prefetch(&mut self, sequence: usize, pages: usize) {
        let sequence = sequence % self.sequences.len();
        let found = self.cache.lookup(&self.sequences[sequence], u32::MAX);
        let pages = pages.min(self.sequences[sequence].keys().len() - found.host.depth as usize);
        let pin = self.cache.pin_host(self.sequences[sequence].root(), found.host);
        if pages == 0 || !self.free_host(pages) {
            self.cache.unpin_host(pin);
            return;
        }
        let pages = self.cache.take_host_pages(pages).expect("they were just freed");
        self.host.scrub(&pages);
        let anchor = Anchor { sequence, pin, doubted: false };
        self.transfers.push(Transfer::Prefetch { anchor, pages });
    }

    // ---- transfers end ----

    pub(super) fn settle(&mut self, transfer: usize, sound: Sound) {
        let Some(transfer) = transfer.checked_rem(self.transfers.len()) else { return };
        match self.transfers.swap_remove(transfer) {
            Transfer::WriteBack { pin, arrival, sources, keys, pages } => {
                let sound = sound.of(keys.len());
                for (&source, key) in sources.iter().zip(&keys) {
                    assert_eq!(self.device.read(source), Some(*key), "reused while it was read");
                }
                for (&page, &key) in pages.as_slice().iter().zip(&keys[..sound]) {
                    self.host.write(page, Some(key));
                }
                self.cache.end_write_back(&pin, &arrival, pages, sound);
                self.cache.unpin_device(pin);
                self.hear_events();
                let held = |key: &PageKey| {
                    self.mirror.host.contains(key) || self.is_doubted_and_pinned(key)
                };
                assert!(keys[..sound].iter().all(held));
            }
            Transfer::LoadBack { anchor, pin, arrival, sources, pages } => {
                let Anchor { sequence, pin: host_pin, doubted } = anchor;
                let sound = sound.of(pages.len());
                let end = arrival.start_page() + sound as u32;
                let keys = self.sequences[sequence].keys();
                let keys = keys.iter().skip(arrival.start_page() as usize);
                for (&source, key) in sources.iter().zip(keys) {
                    assert!(doubted || self.host.read(source) == Some(key), "reused while read");
                }
                for (&source, &page) in sources.iter().zip(pages.as_slice()).take(sound) {
                    self.device.write(page, self.host.read(source));
                }
                self.cache.end_load_back(&host_pin, &arrival, pages, sound);
                let found = self.cache.lookup(&self.sequences[sequence], u32::MAX);
                assert!(doubted || found.device.depth >= end, "what arrived is not found");
                self.cache.unpin_host(host_pin);
                self.cache.unpin_device(pin);
                self.read_device(sequence);
            }
            Transfer::Backup { anchor, arrival, sources, keys } => {
                let Anchor { pin, doubted, .. } = anchor;
                for (&source, key) in sources.iter().zip(&keys) {
                    assert!(doubted || self.host.read(source) == Some(*key), "reused while read");
                }
                self.cache.end_backup(&pin, &arrival, sound.of(keys.len()));
                self.cache.unpin_host(pin);
            }
            Transfer::Prefetch { mut anchor, mut pages } => {
                let sound = sound.of(pages.len());
                self.cache.give_host_pages(pages.split_off(sound));
                let sequence = &self.sequences[anchor.sequence];
                let start = anchor.pin.depth();
                let run = sequence.run(start, start + sound as u32);
                for (&page, key) in pages.as_slice().iter().zip(run.keys().iter()) {
                    self.host.write(page, Some(key));
                }
                anchor.doubted |= run.keys().iter().any(|key| self.is_doubted_and_pinned(&key));
                let published = self.cache.publish_from_l3(&mut anchor.pin, run, pages, 0);
                assert_eq!(published.published_pages, sound as u32);
                assert_eq!(anchor.pin.depth(), start + sound as u32);
                self.note_published(anchor.sequence, start + sound as u32);
                self.anchors.push(anchor);
            }
        }
    }

    pub(super) fn distrust(&mut self, sequence: usize, start_page: u32, keep_pin: bool) {
        let sequence = sequence % self.sequences.len();
        let found = self.cache.lookup(&self.sequences[sequence], u32::MAX);
        let (depth, on_device) = (found.host.depth, found.device.depth);
        if depth == 0 {
            return;
        }
        let start = start_page % depth;
        let pin = self.cache.pin_host(self.sequences[sequence].root(), found.host);
        self.cache.distrust_host(&pin, start);
        self.ever_distrusted = true;
        let found = self.cache.lookup(&self.sequences[sequence], u32::MAX);
        assert_eq!((found.device.depth, found.host.depth), (on_device, on_device.max(start)));

        let spoilt = self.sequences[sequence].run(start, depth).keys().to_vec();
        for &key in &spoilt {
            self.host.spoil(key);
            self.unsound.insert(key);
        }
        let in_flight = self.transfers.iter_mut().filter_map(Transfer::anchor_mut);
        for anchor in self.anchors.iter_mut().chain(in_flight) {
            let path = anchor.path(&self.sequences);
            anchor.doubted |= path.iter().any(|key| spoilt.contains(key));
        }
        if keep_pin {
            self.anchors.push(Anchor { sequence, pin, doubted: true });
        } else {
            self.cache.unpin_host(pin);
        }
    }
}
