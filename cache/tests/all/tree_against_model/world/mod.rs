//! A small world around a cache: requests, transfers in flight, and arenas that remember which
//! page's bytes lie in which slot. After every step it compares what the cache says with what it
//! knows itself.

mod checks;
mod transfers;

use std::collections::BTreeSet;
use std::marker::PhantomData;

use terrace_cache::{
    Cache, CacheConfig, Device, DevicePages, DevicePin, Host, HostPin, KvEvents, Page, PageKey,
    Pages, Sequence, Token,
};

use crate::tree_against_model::mirror::Mirror;
use transfers::Transfer;

/// One step. Numbers choose among what there is, modulo how much there is.
#[derive(Clone, Debug)]
pub(crate) enum Op {
    /// A request finds what the device holds of a sequence and pins it.
    Start { sequence: usize, pages_max: u32 },
    /// A request computes its next pages, which no other request sees yet.
    Compute { request: usize, pages: usize },
    /// A request publishes the first pages that it has computed.
    Publish { request: usize, pages: usize },
    /// A request notes its use of what it has pinned.
    Touch { request: usize, found: bool, priority: i32 },
    /// The same for a path that is pinned on host.
    TouchHost { anchor: usize, found: bool, priority: i32 },
    /// A request lets go of everything.
    Finish { request: usize },
    /// Pins the part of a request's path that is on host.
    PinHostAlong { request: usize },
    /// Gives a request the part on device of a path that is pinned on host.
    PinDeviceAlong { anchor: usize },
    /// A path that is pinned on host is pinned there once more.
    PinHostAgain { anchor: usize },
    /// Starts the write-back of the part of a sequence that is on device.
    WriteBack { sequence: usize, at_end: bool, pages_max: usize },
    /// Starts the write-back of the next victim on device.
    WriteBackVictim,
    /// Starts the load-back of the part of a sequence that is on host alone.
    LoadBack { sequence: usize, pages_max: u32 },
    /// Starts the backup of the part of a sequence that is on host.
    Backup { sequence: usize, pages_max: usize },
    /// Starts the prefetch of the part of a sequence that neither tier holds.
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
    /// Removes everything that is not pinned.
    Clear,
    /// The device forgets its unpinned pages.
    ClearDevice,
}

/// Part of a transfer that arrived.
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

/// Memory of one tier: the page whose bytes each slot holds, or none that may be read.
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

    /// Invalidates the bytes of pages that were just taken.
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
    /// True if host copies on the path were distrusted: then they need not be matched.
    doubted: bool,
}

impl Anchor {
    fn path(&self, sequences: &[Sequence]) -> Vec<PageKey> {
        sequences[self.sequence].run(0, self.pin.depth()).keys().to_vec()
    }
}

pub(crate) struct World {
    cache: Cache,
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
    pub(crate) told: Vec<KvEvents>,
    /// Pages whose host copies were distrusted and have not been replaced since.
    unsound: BTreeSet<PageKey>,
    ever_distrusted: bool,
}

impl World {
    pub(crate) fn new(config: &CacheConfig, sequences: Vec<Sequence>) -> Self {
        Self {
            cache: Cache::new(config),
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
            Op::PinHostAgain { anchor } => self.pin_again(anchor),
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
            Op::Clear => {
                let evictable = self.cache.usage().device.evictable_pages;
                let freed = self.cache.clear();
                assert!(freed.device_pages >= evictable, "{freed:?} of {evictable}");
            }
            Op::ClearDevice => {
                let evictable = self.cache.usage().device.evictable_pages;
                let freed = self.cache.clear_device();
                assert!(freed.device_pages >= evictable, "{freed:?} of {evictable}");
            }
        }
        self.check();
    }

    /// Ends everything, reads all that is left, and wants every page back.
    pub(crate) fn end(mut self) -> Vec<KvEvents> {
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
        let keys: Vec<_> = self.sequences[sequence].keys().iter().skip(start).take(pages).collect();
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
        let published = self.cache.publish_device(pin, run, &mut pages, 0);
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

    fn pin_again(&mut self, anchor: usize) {
        let Some(anchor) = self.anchor(anchor) else { return };
        let Anchor { sequence, ref pin, doubted } = self.anchors[anchor];
        let pin = self.cache.pin_again(pin);
        self.anchors.push(Anchor { sequence, pin, doubted });
    }

    fn release(&mut self, anchor: usize) {
        if let Some(anchor) = self.anchor(anchor) {
            let anchor = self.anchors.swap_remove(anchor);
            self.cache.unpin_host(anchor.pin);
        }
    }

    fn anchor(&self, anchor: usize) -> Option<usize> {
        anchor.checked_rem(self.anchors.len())
    }

    fn request(&self, request: usize) -> Option<usize> {
        request.checked_rem(self.requests.len())
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
}
