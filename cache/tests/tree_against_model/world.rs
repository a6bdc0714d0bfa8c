//! A small world around a cache: requests, transfers in flight, and arenas that remember which
//! page's bytes lie in which slot. After every step it compares what the cache says with what it
//! knows itself.

use std::collections::BTreeSet;
use std::marker::PhantomData;

use terrace_cache::{
    Arrival, Cache, CacheConfig, Claims, Device, DevicePage, DevicePages, DevicePin, Host,
    HostPage, HostPages, HostPin, KvEvent, Match, Page, PageKey, Pages, Sequence, TierName, Token,
};

use crate::mirror::Mirror;

/// One step. Numbers choose among what there is, modulo how much there is.
#[derive(Clone, Debug)]
pub(crate) enum Op {
    /// A request finds what the device holds of a sequence and pins it.
    Start { sequence: usize, pages_max: u32 },
    /// A request computes its next pages; nobody else sees them yet.
    Compute { request: usize, pages: usize },
    /// A request publishes the first pages that it has computed.
    Publish { request: usize, pages: usize },
    /// A request notes its use of what it has pinned.
    Touch { request: usize, found: bool, priority: i32 },
    /// The same for a path that is pinned on host.
    TouchHost { anchor: usize, found: bool, priority: i32 },
    /// A request lets go of everything.
    Finish { request: usize },
    /// What the host holds of a request's path is pinned there too.
    PinHostAlong { request: usize },
    /// What the device holds of a path that is pinned on host becomes a request's.
    PinDeviceAlong { anchor: usize },
    /// A path that is pinned on host is pinned there once more.
    PinHostAgain { anchor: usize },
    /// What the device holds of a sequence starts on its way to host.
    WriteBack { sequence: usize, at_end: bool, pages_max: usize },
    /// What the device would evict next starts on its way to host.
    WriteBackVictim,
    /// What only the host holds of a sequence starts on its way to the device.
    LoadBack { sequence: usize, pages_max: u32 },
    /// What the host holds of a sequence starts on its way to L3.
    Backup { sequence: usize, pages_max: usize },
    /// What neither tier holds of a sequence starts on its way from L3 to host.
    Prefetch { sequence: usize, pages: usize },
    /// A transfer ends.
    Settle { transfer: usize, sound: Sound },
    /// A path that was pinned on host is let go.
    Release { anchor: usize },
    /// The host copies of a sequence prove unsound from a page on.
    Distrust { sequence: usize, start_page: u32, keep_pin: bool },
    /// The device has to have free pages.
    EvictDevice { pages: usize },
    /// The host has to have free pages.
    EvictHost { pages: usize },
    /// Everything that nobody has pinned is forgotten.
    Clear,
}

/// How much of a transfer arrived.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Sound {
    All,
    Part(usize),
    Nothing,
}

impl Sound {
    fn of(self, pages: usize) -> usize {
        match self {
            Self::All => pages,
            Self::Part(part) => part % (pages + 1),
            Self::Nothing => 0,
        }
    }
}

/// The memory of one tier: which page's bytes lie in each slot, or none that anybody may read.
struct Arena<T> {
    slots: Vec<Option<PageKey>>,
    tier: PhantomData<T>,
}

impl<T: Copy> Arena<T> {
    fn new(pages: u32) -> Self {
        Self { slots: vec![None; pages as usize], tier: PhantomData }
    }

    fn read(&self, page: Page<T>) -> Option<PageKey> {
        self.slots[page.slot() as usize]
    }

    fn write(&mut self, page: Page<T>, content: Option<PageKey>) {
        self.slots[page.slot() as usize] = content;
    }

    /// What was in freshly taken pages means nothing.
    fn scrub(&mut self, pages: &Pages<T>) {
        for &page in pages.as_slice() {
            self.write(page, None);
        }
    }

    /// The bytes of a page turn out to be wrong, wherever they lie.
    fn spoil(&mut self, key: PageKey) {
        for slot in self.slots.iter_mut().filter(|slot| **slot == Some(key)) {
            *slot = None;
        }
    }
}

struct Request {
    sequence: usize,
    pin: DevicePin,
    computed: DevicePages,
}

struct Anchor {
    sequence: usize,
    pin: HostPin,
    /// Whether host copies on the path were distrusted: then nothing need be found there.
    doubted: bool,
}

impl Anchor {
    fn path<'a>(&self, sequences: &'a [Sequence]) -> &'a [PageKey] {
        &sequences[self.sequence].keys()[..self.pin.depth() as usize]
    }
}

enum Transfer {
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
    /// What it has pinned on host.
    fn anchor(&self) -> Option<&Anchor> {
        match self {
            Self::WriteBack { .. } => None,
            Self::LoadBack { anchor, .. }
            | Self::Backup { anchor, .. }
            | Self::Prefetch { anchor, .. } => Some(anchor),
        }
    }

    fn anchor_mut(&mut self) -> Option<&mut Anchor> {
        match self {
            Self::WriteBack { .. } => None,
            Self::LoadBack { anchor, .. }
            | Self::Backup { anchor, .. }
            | Self::Prefetch { anchor, .. } => Some(anchor),
        }
    }
}

pub(crate) struct World {
    cache: Cache,
    page_size: usize,
    sequences: Vec<Sequence>,
    device: Arena<Device>,
    host: Arena<Host>,
    requests: Vec<Request>,
    anchors: Vec<Anchor>,
    transfers: Vec<Transfer>,
    /// Every prefix that was ever published, by its namespace and its tokens.
    published: BTreeSet<(PageKey, Vec<Token>)>,
    mirror: Mirror,
    /// Everything that the cache told the outside, for comparing two runs.
    pub(crate) told: Vec<KvEvent>,
    /// Pages whose host copies were distrusted and have not been replaced since.
    unsound: BTreeSet<PageKey>,
    ever_distrusted: bool,
}

impl World {
    pub(crate) fn new(config: &CacheConfig, sequences: Vec<Sequence>) -> Self {
        Self {
            cache: Cache::new(config),
            page_size: config.page_size as usize,
            mirror: Mirror::new(&sequences),
            sequences,
            device: Arena::new(config.device_pages),
            host: Arena::new(config.host_pages),
            requests: Vec::new(),
            anchors: Vec::new(),
            transfers: Vec::new(),
            published: BTreeSet::new(),
            told: Vec::new(),
            unsound: BTreeSet::new(),
            ever_distrusted: false,
        }
    }

    /// Takes one step and checks everything.
    pub(crate) fn apply(&mut self, op: &Op) {
        match *op {
            Op::Start { sequence, pages_max } => self.start(sequence, pages_max),
            Op::Compute { request, pages } => self.compute(request, pages),
            Op::Publish { request, pages } => self.publish(request, pages),
            Op::Touch { request, found, priority } => self.touch(request, found, priority),
            Op::TouchHost { anchor, found, priority } => self.touch_host(anchor, found, priority),
            Op::Finish { request } => self.finish(request),
            Op::PinHostAlong { request } => self.pin_host_along(request),
            Op::PinDeviceAlong { anchor } => self.pin_device_along(anchor),
            Op::PinHostAgain { anchor } => self.pin_host_again(anchor),
            Op::WriteBack { sequence, at_end, pages_max } => {
                self.write_back(sequence, at_end, pages_max);
            }
            Op::WriteBackVictim => self.write_back_victim(),
            Op::LoadBack { sequence, pages_max } => self.load_back(sequence, pages_max),
            Op::Backup { sequence, pages_max } => self.backup(sequence, pages_max),
            Op::Prefetch { sequence, pages } => self.prefetch(sequence, pages),
            Op::Settle { transfer, sound } => self.settle(transfer, sound),
            Op::Release { anchor } => self.release(anchor),
            Op::Distrust { sequence, start_page, keep_pin } => {
                self.distrust(sequence, start_page, keep_pin);
            }
            Op::EvictDevice { pages } => {
                self.free_device(pages);
            }
            Op::EvictHost { pages } => {
                self.free_host(pages);
            }
            Op::Clear => self.cache.clear(),
        }
        self.check();
    }

    /// Ends everything, reads all that is left, and wants every page back.
    pub(crate) fn end(mut self) -> Vec<KvEvent> {
        while !self.transfers.is_empty() {
            self.settle(0, Sound::Part(1));
            self.check();
        }
        while !self.requests.is_empty() {
            self.finish(0);
        }
        while !self.anchors.is_empty() {
            self.release(0);
        }
        self.check();
        for sequence in 0..self.sequences.len() {
            self.read_device(sequence);
            self.read_host(sequence);
        }
        self.check();
        self.cache.clear();
        self.check();
        let (usage, memory) = (self.cache.usage(), self.cache.memory());
        assert_eq!(usage.device.free_pages, usage.device.total_pages);
        assert_eq!(usage.host.free_pages, usage.host.total_pages);
        assert_eq!((memory.nodes, memory.pages), (0, 0), "the empty tree has nodes");
        self.told
    }

    // ---- requests ----

    fn start(&mut self, sequence: usize, pages_max: u32) {
        let sequence = sequence % self.sequences.len();
        let found = self.cache.lookup(&self.sequences[sequence], pages_max);
        let pin = self.cache.pin_device(self.sequences[sequence].root(), found.device);
        assert_eq!(pin.depth(), found.device.depth);
        self.requests.push(Request { sequence, pin, computed: DevicePages::none() });
    }

    fn compute(&mut self, request: usize, pages: usize) {
        let Some(request) = self.request(request) else { return };
        let Request { sequence, ref pin, ref computed } = self.requests[request];
        let start = pin.depth() as usize + computed.len();
        let keys = &self.sequences[sequence].keys()[start..];
        let keys = keys[..pages.min(keys.len())].to_vec();
        if !self.free_device(keys.len()) {
            return;
        }
        let computed = &mut self.requests[request].computed;
        let before = computed.len();
        assert!(self.cache.grow_device_pages(computed, keys.len()), "they were just freed");
        for (&page, key) in computed.as_slice()[before..].iter().zip(keys) {
            self.device.write(page, Some(key));
        }
    }

    fn publish(&mut self, request: usize, pages: usize) {
        let Some(request) = self.request(request) else { return };
        let Request { sequence, pin, computed } = &mut self.requests[request];
        let rest = computed.split_off(pages.min(computed.len()));
        let mut pages = std::mem::replace(computed, rest);
        let (start, count) = (pin.depth(), pages.len() as u32);
        let run = self.sequences[*sequence].run(start, start + count);
        let published = self.cache.publish_device(pin, run, &mut pages);
        assert!(pages.is_empty(), "no two prefixes here have one key");
        assert_eq!((published.published_pages, pin.depth()), (count, start + count));
        let in_run = start..start + count;
        assert!(published.first_duplicate.is_none_or(|page| in_run.contains(&page)));
        let sequence = *sequence;
        self.note_published(sequence, start + count);
    }

    fn touch(&mut self, request: usize, found: bool, priority: i32) {
        if let Some(request) = self.request(request) {
            self.cache.touch(&self.requests[request].pin, found, priority);
        }
    }

    fn finish(&mut self, request: usize) {
        if let Some(request) = self.request(request) {
            let Request { pin, computed, .. } = self.requests.swap_remove(request);
            self.cache.give_device_pages(computed);
            self.cache.unpin_device(pin);
        }
    }

    fn touch_host(&mut self, anchor: usize, found: bool, priority: i32) {
        if let Some(anchor) = self.anchor(anchor) {
            self.cache.touch_host(&self.anchors[anchor].pin, found, priority);
        }
    }

    fn pin_host_along(&mut self, request: usize) {
        let Some(request) = self.request(request) else { return };
        let Request { sequence, ref pin, .. } = self.requests[request];
        let along = self.cache.pin_host_along(pin);
        assert!(along.depth() <= pin.depth());
        self.anchors.push(Anchor { sequence, pin: along, doubted: false });
    }

    fn pin_device_along(&mut self, anchor: usize) {
        let Some(anchor) = self.anchor(anchor) else { return };
        let Anchor { sequence, ref pin, .. } = self.anchors[anchor];
        let found = self.cache.lookup(&self.sequences[sequence], pin.depth());
        let along = self.cache.pin_device_along(pin);
        assert_eq!(along.depth(), found.device.depth, "the device holds a prefix");
        self.requests.push(Request { sequence, pin: along, computed: DevicePages::none() });
    }

    fn pin_host_again(&mut self, anchor: usize) {
        let Some(anchor) = self.anchor(anchor) else { return };
        let Anchor { sequence, ref pin, doubted } = self.anchors[anchor];
        let pin = self.cache.pin_host_again(pin);
        self.anchors.push(Anchor { sequence, pin, doubted });
    }

    fn anchor(&self, anchor: usize) -> Option<usize> {
        anchor.checked_rem(self.anchors.len())
    }

    fn request(&self, request: usize) -> Option<usize> {
        request.checked_rem(self.requests.len())
    }

    // ---- transfers begin ----

    fn write_back(&mut self, sequence: usize, at_end: bool, pages_max: usize) {
        let sequence = &self.sequences[sequence % self.sequences.len()];
        let found = self.cache.lookup(sequence, u32::MAX);
        let pin = self.cache.pin_device(sequence.root(), found.device);
        self.write_back_pinned(pin, at_end, pages_max);
    }

    fn write_back_victim(&mut self) {
        let Some(victim) = self.cache.device_victim() else { return };
        let pin = self.cache.pin_victim(victim);
        let mut pages = Vec::new();
        self.cache.device_pages(&pin, pin.depth() - victim.pages as u32, &mut pages);
        assert_eq!(pages.len(), victim.pages);
        self.write_back_pinned(pin, false, usize::MAX);
    }

    fn write_back_pinned(&mut self, pin: DevicePin, at_end: bool, pages_max: usize) {
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

    fn load_back(&mut self, sequence: usize, pages_max: u32) {
        let sequence = sequence % self.sequences.len();
        let (root, keys) = (self.sequences[sequence].root(), self.sequences[sequence].keys());
        let found = self.cache.lookup(&self.sequences[sequence], pages_max);
        let (start, end) = (found.device.depth, found.host.depth);
        if start == end || found.arriving {
            return;
        }
        let keys = keys[start as usize..end as usize].to_vec();
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

    fn backup(&mut self, sequence: usize, pages_max: usize) {
        let sequence = sequence % self.sequences.len();
        let found = self.cache.lookup(&self.sequences[sequence], u32::MAX);
        let pin = self.cache.pin_host(self.sequences[sequence].root(), found.host);
        let (mut keys, mut sources) = (Vec::new(), Vec::new());
        let arrival = self.cache.begin_backup(&pin, pages_max, &mut keys, &mut sources);
        assert_eq!((keys.len(), sources.len()), (arrival.pages(), arrival.pages()));
        assert!(keys.len() <= pages_max);
        for (key, &source) in keys.iter().zip(&sources) {
            assert!(self.sequences[sequence].keys().contains(key));
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

    fn prefetch(&mut self, sequence: usize, pages: usize) {
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

    fn settle(&mut self, transfer: usize, sound: Sound) {
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
                assert!(!self.mirror.complete || keys[..sound].iter().all(held));
            }
            Transfer::LoadBack { anchor, pin, arrival, sources, pages } => {
                let Anchor { sequence, pin: host_pin, doubted } = anchor;
                let sound = sound.of(pages.len());
                let end = arrival.start_page() + sound as u32;
                let keys = &self.sequences[sequence].keys()[arrival.start_page() as usize..];
                for (&source, key) in sources.iter().zip(keys) {
                    assert!(doubted || self.host.read(source) == Some(*key), "reused while read");
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
                for (&page, &key) in pages.as_slice().iter().zip(run.keys) {
                    self.host.write(page, Some(key));
                }
                anchor.doubted |= run.keys.iter().any(|key| self.is_doubted_and_pinned(key));
                let published = self.cache.publish_from_l3(&mut anchor.pin, run, pages);
                assert_eq!(published.published_pages, sound as u32);
                assert_eq!(anchor.pin.depth(), start + sound as u32);
                self.note_published(anchor.sequence, start + sound as u32);
                self.anchors.push(anchor);
            }
        }
    }

    fn release(&mut self, anchor: usize) {
        if let Some(anchor) = self.anchor(anchor) {
            let anchor = self.anchors.swap_remove(anchor);
            self.cache.unpin_host(anchor.pin);
        }
    }

    fn distrust(&mut self, sequence: usize, start_page: u32, keep_pin: bool) {
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

        let spoilt = self.sequences[sequence].keys()[start as usize..depth as usize].to_vec();
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

    // ---- room ----

    /// Frees device pages; what the cache says it can free, it can.
    fn free_device(&mut self, wanted: usize) -> bool {
        let before = self.cache.usage().device;
        let freed = self.cache.free_device_pages(wanted);
        assert_eq!(freed, wanted <= before.available_pages(), "{wanted} of {before:?}");
        let free = self.cache.usage().device.free_pages;
        assert_eq!(free, wanted.clamp(before.free_pages, before.available_pages()));
        freed
    }

    fn free_host(&mut self, wanted: usize) -> bool {
        let before = self.cache.usage().host;
        let freed = self.cache.free_host_pages(wanted);
        assert_eq!(freed, wanted <= before.available_pages(), "{wanted} of {before:?}");
        let free = self.cache.usage().host.free_pages;
        assert_eq!(free, wanted.clamp(before.free_pages, before.available_pages()));
        freed
    }

    // ---- reading ----

    /// Reads what a new request would read from the device.
    fn read_device(&mut self, sequence: usize) {
        let sequence = &self.sequences[sequence];
        let found = self.cache.lookup(sequence, u32::MAX);
        let pin = self.cache.pin_device(sequence.root(), found.device);
        self.check_pinned(sequence, &pin);
        self.cache.unpin_device(pin);
    }

    /// Reads what a new request would load from host, and leaves it there.
    fn read_host(&mut self, sequence: usize) {
        self.load_back(sequence, u32::MAX);
        if !self.transfers.is_empty() {
            self.settle(0, Sound::Nothing);
        }
    }

    fn content(&self, page: DevicePage) -> PageKey {
        self.device.read(page).expect("a pinned page has bytes")
    }

    fn is_being_written(&self, key: &PageKey) -> bool {
        self.transfers.iter().any(|transfer| match transfer {
            Transfer::WriteBack { keys, .. } => keys.contains(key),
            Transfer::LoadBack { .. } | Transfer::Backup { .. } | Transfer::Prefetch { .. } => {
                false
            }
        })
    }

    fn is_being_stored(&self, key: &PageKey) -> bool {
        self.transfers.iter().any(|transfer| match transfer {
            Transfer::Backup { keys, .. } => keys.contains(key),
            Transfer::LoadBack { .. } | Transfer::WriteBack { .. } | Transfer::Prefetch { .. } => {
                false
            }
        })
    }

    fn is_being_loaded(&self, key: &PageKey) -> bool {
        self.transfers.iter().any(|transfer| match transfer {
            Transfer::LoadBack { anchor, arrival, .. } => {
                anchor.path(&self.sequences)[arrival.start_page() as usize..].contains(key)
            }
            Transfer::WriteBack { .. } | Transfer::Backup { .. } | Transfer::Prefetch { .. } => {
                false
            }
        })
    }

    /// Whether a host copy may be unsound and read at the same time: then it cannot be replaced.
    fn is_doubted_and_pinned(&self, key: &PageKey) -> bool {
        let in_flight = self.transfers.iter().filter_map(Transfer::anchor);
        let mut anchors = self.anchors.iter().chain(in_flight);
        self.unsound.contains(key)
            && anchors.any(|anchor| anchor.path(&self.sequences).contains(key))
    }

    fn note_published(&mut self, sequence: usize, end_page: u32) {
        let sequence = &self.sequences[sequence];
        for pages in 1..=end_page as usize {
            let tokens = sequence.tokens()[..pages * self.page_size].to_vec();
            self.published.insert((sequence.root(), tokens));
        }
    }

    // ---- checking ----

    fn hear_events(&mut self) {
        let events: Vec<KvEvent> = self.cache.drain_events().collect();
        for event in &events {
            self.mirror.hear(event);
            if let KvEvent::Stored { tier: TierName::Host, keys, .. } = event {
                self.unsound.retain(|key| !keys.contains(key));
            }
        }
        if self.cache.memory().pages == 0 {
            self.mirror.complete = true;
        }
        self.told.extend(events);
    }

    fn check(&mut self) {
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

    fn check_pinned(&self, sequence: &Sequence, pin: &DevicePin) {
        let mut pages = Vec::new();
        self.cache.device_pages(pin, 0, &mut pages);
        assert_eq!(pages.len(), pin.depth() as usize);
        for (&page, key) in pages.iter().zip(sequence.keys()) {
            assert_eq!(self.device.read(page), Some(*key), "a wrong page was handed out");
        }
    }

    fn check_match(&self, sequence: &Sequence, found: Match) {
        let (device, host) = (found.device.depth as usize, found.host.depth as usize);
        assert!(device <= host && host <= sequence.keys().len());
        let prefix = (sequence.root(), sequence.tokens()[..host * self.page_size].to_vec());
        assert!(host == 0 || self.published.contains(&prefix), "more was found than published");
        let (heard_device, heard_host) = self.mirror.depths(sequence.keys());
        if self.mirror.complete {
            assert_eq!((device, host), (heard_device, heard_host), "events do not tell the truth");
        } else {
            assert!(heard_device <= device && heard_host <= host, "a router knows too much");
        }
        let loading = sequence.keys()[device..host].iter().any(|key| self.is_being_loaded(key));
        assert_eq!(found.arriving, loading);
    }

    /// What a write-back of a whole path copies: all that is neither on host nor on its way there.
    fn check_unwritten(&self, path: &[PageKey], unwritten: usize) {
        if self.mirror.complete && !self.ever_distrusted {
            let wanted =
                |key: &&PageKey| !self.mirror.host.contains(key) && !self.is_being_written(key);
            assert_eq!(unwritten, path.iter().filter(wanted).count());
        }
    }

    fn check_page_counts(&self) {
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
        assert!(heard.0 <= in_tree.0 && heard.1 <= in_tree.1);
        if self.mirror.complete {
            assert_eq!(heard.0, in_tree.0);
            assert!(self.ever_distrusted || heard.1 == in_tree.1);
        }
    }

    fn claims(&self) -> Claims {
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
