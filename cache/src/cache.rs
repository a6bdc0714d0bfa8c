//! The tree and the pools together: the face of this crate.

use std::collections::BTreeSet;
use std::fmt;

use serde::{Deserialize, Serialize};

use crate::audit::{Claims, Fault, audit};
use crate::events::{KvEventLog, KvEvents};
use crate::evict::EvictionKind;
use crate::key::PageKey;
use crate::node::Node;
use crate::pin::{DevicePin, HostPin, Pin};
use crate::pool::Pool;
use crate::prefix::PrefixDigest;
use crate::reach::Reach;
use crate::run::PageRun;
use crate::sequence::Sequence;
use crate::tier::{Device, DevicePage, DevicePages, Host, HostPage, HostPages, Pages, Tier};
use crate::tree::{Cursor, Depths, Match, NodeId, Segment, Tree};
use crate::write_policy::WritePolicy;

/// Sizes and policies of a cache.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct CacheConfig {
    /// Tokens in a page: a power of two from 1 to 256.
    pub page_size: u32,
    /// Pages of the device arena.
    pub device_pages: u32,
    /// Pages of the host arena; 0 for no host tier.
    pub host_pages: u32,
    /// Which pages go first, on device and on host.
    pub eviction: EvictionKind,
    /// When device pages are copied to host.
    pub write_policy: WritePolicy,
    /// Maximum number of page keys in KV events that are not drained; 0 for no KV events. Nothing is recorded before
    /// the first drain.
    pub kv_event_keys_max: u32,
}

impl Default for CacheConfig {
    fn default() -> Self {
        Self {
            page_size: 16,
            device_pages: 4096,
            host_pages: 0,
            eviction: EvictionKind::default(),
            write_policy: WritePolicy::WriteThrough,
            kv_event_keys_max: 1 << 16,
        }
    }
}

/// Result of publishing pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Published {
    /// By how many pages the pinned path grew.
    pub published_pages: u32,
    /// The first page that the tree had already; ours went back to the pool.
    pub first_duplicate: Option<u32>,
}

/// Next victim of eviction on device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Victim {
    node: NodeId,
    /// Its pages.
    pub pages: usize,
    /// True if no other tier in this process has its bytes.
    pub is_last_copy: bool,
}

/// Pages that were given up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Freed {
    /// On device.
    pub device_pages: usize,
    /// On host.
    pub host_pages: usize,
}

/// Use of one tier.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TierUse {
    /// All pages of the arena.
    pub total_pages: usize,
    /// Pages without an owner.
    pub free_pages: usize,
    /// Cached pages that could be evicted right now.
    pub evictable_pages: usize,
    /// Pages evicted so far, to make room for others.
    pub evicted_pages: u64,
}

impl TierUse {
    /// Pages that can be had right now.
    #[must_use]
    pub fn available_pages(&self) -> usize {
        self.free_pages + self.evictable_pages
    }
}

/// Use of the cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CacheUse {
    /// Device memory.
    pub device: TierUse,
    /// Host memory.
    pub host: TierUse,
}

/// Memory of the tree itself.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CacheMemory {
    /// Nodes of the tree.
    pub nodes: usize,
    /// Distinct pages in the tree, whichever tiers hold them.
    pub pages: usize,
    /// Bytes of all bookkeeping, the tokens aside.
    pub metadata_bytes: usize,
    /// Bytes of the tokens that matches compare.
    pub token_bytes: usize,
}

/// Pages that an operation is bringing somewhere, by their places on the pinned path.
#[must_use = "an arrival that is never settled blocks its pages for ever"]
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Arrival {
    segments: Vec<Segment>,
}

impl Arrival {
    /// Number of pages in flight.
    #[must_use]
    pub fn pages(&self) -> usize {
        self.segments.iter().map(|segment| segment.pages as usize).sum()
    }

    /// The place of the page before which so many others are under way.
    #[must_use]
    pub fn page_at(&self, mut pages_before: u32) -> Option<u32> {
        self.segments.iter().find_map(|segment| {
            let page = segment.start_page + pages_before;
            let is_here = pages_before < segment.pages;
            pages_before = pages_before.saturating_sub(segment.pages);
            is_here.then_some(page)
        })
    }

    /// The place of the first page.
    #[must_use]
    pub fn start_page(&self) -> u32 {
        self.segments.first().map_or(0, |segment| segment.start_page)
    }

    /// The place behind the last page.
    #[must_use]
    pub fn end_page(&self) -> u32 {
        self.segments.last().map_or(0, |segment| segment.start_page + segment.pages)
    }
}

/// The KV cache of one engine: what device and host hold, and what may go.
pub struct Cache {
    pub(crate) tree: Tree,
    pub(crate) device: Pool<Device>,
    pub(crate) host: Pool<Host>,
    device_evicted_pages: u64,
    host_evicted_pages: u64,
    write_policy: WritePolicy,
}

impl fmt::Debug for Cache {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Cache").field("usage", &self.usage()).finish_non_exhaustive()
    }
}

impl Cache {
    /// An empty cache.
    ///
    /// # Panics
    /// If the page size is not a power of two from 1 to 256.
    #[must_use]
    pub fn new(config: &CacheConfig) -> Self {
        let page_size = config.page_size;
        assert!(page_size.is_power_of_two() && page_size <= 256, "page size {page_size}");
        let events = KvEventLog::new(config.kv_event_keys_max as usize);
        let pages = config.device_pages.saturating_add(config.host_pages);
        Self {
            tree: Tree::new(page_size, pages as usize, config.eviction, events),
            device: Pool::new(config.device_pages),
            host: Pool::new(config.host_pages),
            device_evicted_pages: 0,
            host_evicted_pages: 0,
            write_policy: config.write_policy,
        }
    }

    // ---- reading ----

    /// Matches the first `pages_max` pages of a sequence. Changes nothing.
    #[must_use]
    pub fn lookup(&self, sequence: &Sequence, pages_max: u32) -> Match {
        self.tree.lookup(sequence, pages_max)
    }

    /// Depths of a match by keys alone, for frequent decisions that read no page. Changes nothing.
    #[must_use]
    pub fn depths(&self, sequence: &Sequence, pages_max: u32) -> Depths {
        self.tree.depths(sequence, pages_max)
    }

    /// Writes the device pages of a pinned path, from page `start_page` on, to the end of `into`.
    pub fn device_pages(&self, pin: &DevicePin, start_page: u32, into: &mut Vec<DevicePage>) {
        self.tree.pages(pin, start_page, into);
    }

    /// Number of the run's pages, which follow the pinned path, that the device holds already.
    #[must_use]
    pub fn held_ahead(&self, pin: &DevicePin, run: PageRun<'_>) -> u32 {
        self.tree.held_ahead(pin, run)
    }

    /// The nodes from the root to a place, top down, by number: what two sequences share.
    pub fn path(&self, at: Cursor) -> impl Iterator<Item = u32> {
        self.tree.path(at.node.index, 0).into_iter()
    }

    /// Use of the tiers, in constant time.
    #[must_use]
    pub fn usage(&self) -> CacheUse {
        CacheUse {
            device: TierUse {
                total_pages: self.device.total(),
                free_pages: self.device.free(),
                evictable_pages: self.tree.device.evictable_pages,
                evicted_pages: self.device_evicted_pages,
            },
            host: TierUse {
                total_pages: self.host.total(),
                free_pages: self.host.free(),
                evictable_pages: self.tree.host.evictable_pages,
                evicted_pages: self.host_evicted_pages,
            },
        }
    }

    /// Number of nodes that all changes of the tree have visited: its cost in a unit that does not depend on the
    /// machine.
    #[must_use]
    pub fn node_visits(&self) -> u64 {
        self.tree.visits
    }

    /// Memory of the tree. Walks the whole tree.
    #[must_use]
    pub fn memory(&self) -> CacheMemory {
        let tree = &self.tree;
        let mut memory = CacheMemory {
            nodes: tree.nodes.len() - tree.vacant.len(),
            metadata_bytes: tree.by_key.capacity() * (size_of::<(PageKey, u32)>() + 1)
                + tree.nodes.len() * size_of::<Node>()
                + tree.vacant.capacity() * size_of::<u32>()
                + tree.spare_bytes()
                + tree.digests.bytes(),
            ..CacheMemory::default()
        };
        // Nodes share the prompts that they came with.
        let mut counted = BTreeSet::new();
        for node in &tree.nodes {
            memory.pages += node.len();
            memory.metadata_bytes += node.device.pages.capacity() * size_of::<DevicePage>()
                + node.host.pages.capacity() * size_of::<HostPage>();
            let (allocation, token_bytes, key_bytes) = node.excerpt.allocation();
            if counted.insert(allocation) {
                memory.token_bytes += token_bytes;
                memory.metadata_bytes += key_bytes;
            }
        }
        memory
    }

    /// The write policy it was made with.
    #[must_use]
    pub fn write_policy(&self) -> WritePolicy {
        self.write_policy
    }

    /// Proves that every page is owned exactly once and every pin is counted, given all that is
    /// owned outside the cache.
    ///
    /// # Errors
    /// What is wrong, in words.
    pub fn audit(&self, claims: &Claims) -> Result<(), Fault> {
        audit(&self.tree, &self.device, &self.host, claims)
    }

    // ---- pins ----

    /// Pins the device pages of the path that ends at `at`; found by [`Cache::lookup`].
    pub fn pin_device(&mut self, namespace: PageKey, at: Cursor) -> DevicePin {
        self.tree.pin(namespace, at)
    }

    /// Pins the bytes of the path that ends at `at`, host copies first.
    pub fn pin_host(&mut self, namespace: PageKey, at: Cursor) -> HostPin {
        self.tree.pin(namespace, at)
    }

    /// Pins what the device holds of a path that is pinned on host.
    pub fn pin_device_along(&mut self, along: &HostPin) -> DevicePin {
        self.tree.pin_held(along)
    }

    /// Pins what the host holds of a path that is pinned on device.
    pub fn pin_host_along(&mut self, along: &DevicePin) -> HostPin {
        self.tree.pin_held(along)
    }

    /// Pins a path that is pinned already once more, for another owner.
    pub fn pin_again<T: Tier>(&mut self, pin: &Pin<T>) -> Pin<T> {
        let namespace = self.tree.node(pin.node).namespace;
        self.tree.pin(namespace, Cursor { node: pin.node, depth: pin.depth })
    }

    /// Lets go of a path too early: what a planted bug does.
    #[doc(hidden)]
    pub fn let_go<T: Tier>(&mut self, pin: Pin<T>) -> Pin<T> {
        let root = self.tree.pin(self.tree.node(pin.node).namespace, Cursor::START);
        self.tree.unpin(pin);
        root
    }

    /// Pins what the device would evict next, so that it can be copied first.
    pub fn pin_victim(&mut self, victim: Victim) -> DevicePin {
        let node = victim.node;
        let depth = self.tree.node(victim.node).end_page();
        let namespace = self.tree.node(victim.node).namespace;
        self.tree.pin(namespace, Cursor { node, depth })
    }

    /// Gives a pin back.
    pub fn unpin_device(&mut self, pin: DevicePin) {
        self.tree.unpin(pin);
    }

    /// Gives a pin back.
    pub fn unpin_host(&mut self, pin: HostPin) {
        self.tree.unpin(pin);
    }

    /// Gives back a pin in a namespace that no request has any more, and evicts all pages of that namespace that
    /// nothing else holds.
    pub fn retire<T: Tier>(&mut self, pin: Pin<T>) {
        let namespace = self.tree.node(pin.node).namespace;
        self.tree.unpin(pin);
        self.tree.evict_namespace(namespace, &mut self.device, &mut self.host);
    }

    /// Shortens a pin to the first `depth` pages of its path, where a node ends.
    pub fn shorten_pin<T: Tier>(&mut self, pin: Pin<T>, depth: u32) -> Pin<T> {
        let shorter = self.tree.pin_above(&pin, depth);
        self.tree.unpin(pin);
        shorter
    }

    /// Pages of a pinned path in the pin's tier that nothing else keeps.
    #[must_use]
    pub fn pages_kept_by<T: Tier>(&self, pin: &Pin<T>) -> usize {
        self.tree.pages_kept_by(pin)
    }

    /// Notes a use of the pinned path: `found` if a request found it here, as opposed to made it.
    pub fn touch(&mut self, pin: &DevicePin, found: bool, priority: i32) {
        self.tree.touch(pin, found.into(), priority);
    }

    /// Notes a use of the pinned path, as [`Cache::touch`] does.
    pub fn touch_host(&mut self, pin: &HostPin, found: bool, priority: i32) {
        self.tree.touch(pin, found.into(), priority);
    }

    /// A request that writes so far uses the pinned path.
    pub fn extend_reach<T: Tier>(&mut self, pin: &Pin<T>, reach: Reach) {
        self.tree.extend_reach(pin, reach);
    }

    // ---- pages ----

    /// Takes free device pages, all or none. Evicts nothing.
    #[must_use]
    pub fn take_device_pages(&mut self, count: usize) -> Option<DevicePages> {
        let mut pages = Pages::none();
        self.device.take(count, &mut pages).then_some(pages)
    }

    /// Adds free device pages to owned ones, all or none. Evicts nothing.
    #[must_use]
    pub fn grow_device_pages(&mut self, pages: &mut DevicePages, count: usize) -> bool {
        self.device.take(count, pages)
    }

    /// Takes free host pages, all or none. Evicts nothing.
    #[must_use]
    pub fn take_host_pages(&mut self, count: usize) -> Option<HostPages> {
        let mut pages = Pages::none();
        self.host.take(count, &mut pages).then_some(pages)
    }

    /// Device pages that come back from now on are not handed out before they have
    /// [cooled](Self::cooled) so far: until then a step may write to them. What is evicted is not written
    /// to. The numbers only go up.
    pub fn cool_device_pages_until(&mut self, step: Option<u64>) {
        self.device.cool_until(step);
    }

    /// This step and those before it do not write any more.
    pub fn cooled(&mut self, step: u64) {
        self.device.cooled(step);
    }

    /// Device pages that cool.
    #[must_use]
    pub fn cooling_pages(&self) -> usize {
        self.device.cooling()
    }

    /// Returns device pages to the pool.
    pub fn give_device_pages(&mut self, pages: DevicePages) {
        self.device.give(pages);
    }

    /// Returns host pages to the pool.
    pub fn give_host_pages(&mut self, pages: HostPages) {
        self.host.give(pages);
    }

    // ---- publishing ----

    /// Makes sure that `nodes` more runs of a few pages can be published without allocating.
    pub fn set_aside(&mut self, nodes: usize) {
        self.tree.set_aside(nodes);
    }

    /// Makes up, in part, for what was used of that.
    pub fn replenish(&mut self) {
        self.tree.replenish();
    }

    /// Makes computed pages visible to matches, at the end of the pinned path, and moves the pin
    /// to their end. What is left in `pages` could not be published and stays the caller's. New ones
    /// have the priority of the request that made them.
    pub fn publish_device(
        &mut self,
        pin: &mut DevicePin,
        run: PageRun<'_>,
        pages: &mut DevicePages,
        priority: i32,
    ) -> Published {
        let (published_pages, first_duplicate) =
            self.tree.insert(pin, run, pages, priority, false, &mut self.device);
        Published { published_pages, first_duplicate }
    }

    /// Makes pages that came from L3 visible to matches, at the end of the pinned path, and moves
    /// the pin to their end.
    pub fn publish_from_l3(
        &mut self,
        pin: &mut HostPin,
        run: PageRun<'_>,
        mut pages: HostPages,
        priority: i32,
    ) -> Published {
        let (published_pages, first_duplicate) =
            self.tree.insert(pin, run, &mut pages, priority, true, &mut self.host);
        self.host.give(pages);
        Published { published_pages, first_duplicate }
    }

    // ---- evicting ----

    /// Next victim of eviction on device.
    pub fn device_victim(&mut self) -> Option<Victim> {
        let index = self.tree.device.policy.victim()?;
        let node = &self.tree.nodes[index as usize];
        Some(Victim {
            node: NodeId { index, generation: node.generation },
            pages: node.len(),
            is_last_copy: !node.has_sound_host_copy(),
        })
    }

    /// Evicts from the device until `wanted` pages are free or nothing more can go.
    pub fn free_device_pages(&mut self, wanted: usize) -> bool {
        while self.device.free() < wanted {
            let Some(victim) = self.tree.device.policy.victim() else { break };
            let missing = wanted - self.device.free();
            let evicted = self.tree.evict_device(victim, missing, &mut self.device, &mut self.host);
            self.device_evicted_pages += evicted as u64;
        }
        self.device.free() >= wanted
    }

    /// Evicts from host until `wanted` pages are free or nothing more can go.
    pub fn free_host_pages(&mut self, wanted: usize) -> bool {
        while self.host.free() < wanted {
            let Some(victim) = self.tree.host.policy.victim() else { break };
            let missing = wanted - self.host.free();
            self.host_evicted_pages += self.tree.evict_host(victim, missing, &mut self.host) as u64;
        }
        self.host.free() >= wanted
    }

    /// Removes everything that is not pinned. The KV events report that all is removed, and then what is still held.
    pub fn clear(&mut self) -> Freed {
        let (device_free, host_free) = (self.device.free(), self.host.free());
        let evicted = (self.device_evicted_pages, self.host_evicted_pages);
        self.tree.events.begin_clearing();
        self.free_host_pages(usize::MAX);
        self.free_device_pages(usize::MAX);
        self.tree.events.cleared();
        self.tree.tell_what_is_left();
        // Nothing had to make room for anything.
        (self.device_evicted_pages, self.host_evicted_pages) = evicted;
        Freed {
            device_pages: self.device.free() - device_free,
            host_pages: self.host.free() - host_free,
        }
    }

    /// Forgets what the device holds and nothing has pinned. Pages of which the host has a copy stay there; those below
    /// a page without one are forgotten there too.
    pub fn clear_device(&mut self) -> Freed {
        let (device_free, host_free) = (self.device.free(), self.host.free());
        let evicted = self.device_evicted_pages;
        self.free_device_pages(usize::MAX);
        // No page had to make room for another.
        self.device_evicted_pages = evicted;
        Freed {
            device_pages: self.device.free() - device_free,
            host_pages: self.host.free() - host_free,
        }
    }

    // ---- events ----

    /// Writes the KV events since the last call into `into`, whose memory is used again. The first time,
    /// and when more has happened than there was room for, it is a snapshot instead.
    pub fn drain_events(&mut self, into: &mut KvEvents) {
        if !self.tree.events.drain(into) {
            self.tree.tell_all(into);
        }
    }

    /// Writes a snapshot into `into`, whose memory is reused: the start for a further consumer of the same events.
    /// Takes time proportional to what it writes.
    pub fn snapshot(&self, into: &mut KvEvents) {
        self.tree.tell_all(into);
    }

    /// Stops recording KV events until they are drained again.
    pub fn stop_events(&mut self) {
        self.tree.events.stop();
    }

    // ---- moving pages between tiers ----

    /// Number of pages of the pinned path that a write-back would copy.
    #[must_use]
    pub fn unwritten_pages(&self, pin: &DevicePin, at_end: bool) -> usize {
        let path = self.tree.path(pin.node.index, 0);
        let nodes = path.iter().map(|&index| &self.tree.nodes[index as usize]);
        nodes
            .filter(|node| node.wants_host_copy())
            .filter(|node| !at_end || self.write_policy.writes_at_end(node.usage.hits))
            .map(Node::len)
            .sum()
    }

    /// Begins to copy pages of the pinned path to host: those without a host copy, from the top,
    /// at most `pages_max`; at a request's end (`at_end`) only those that the write policy wants.
    /// Writes the device pages, in order, to `sources`.
    pub fn begin_write_back(
        &mut self,
        pin: &DevicePin,
        at_end: bool,
        pages_max: usize,
        sources: &mut Vec<DevicePage>,
    ) -> Arrival {
        self.tree.drop_unsound(pin, &mut self.host);
        let policy = self.write_policy;
        let segments = self.tree.expect_arrival::<Host, _>(
            pin,
            0,
            pages_max,
            |usage| usage.may_be_on_host() && (!at_end || policy.writes_at_end(usage.hits)),
            |node| sources.extend_from_slice(&node.device.pages),
        );
        Arrival { segments }
    }

    /// Number of device pages that can be evicted without loss after a successful write-back: pages that only its own
    /// pin keeps and that are on host then.
    #[must_use]
    pub fn pages_freed_by(&self, pin: &DevicePin, arrival: &Arrival) -> usize {
        self.tree.pages_freed_by(pin, &arrival.segments)
    }

    /// Ends a write-back of which the first `sound_pages` arrived.
    pub fn end_write_back(
        &mut self,
        pin: &DevicePin,
        arrival: &Arrival,
        pages: HostPages,
        sound_pages: usize,
    ) {
        self.tree.settle_arrival(pin, &arrival.segments, pages, sound_pages, &mut self.host);
    }

    /// Begins to copy the pinned path's pages from `start_page` on to the device. Writes the host
    /// pages, in order, to `sources`.
    pub fn begin_load_back(
        &mut self,
        pin: &HostPin,
        start_page: u32,
        sources: &mut Vec<HostPage>,
    ) -> Arrival {
        let segments = self.tree.expect_arrival::<Device, _>(
            pin,
            start_page,
            usize::MAX,
            |_| true,
            |node| sources.extend_from_slice(&node.host.pages),
        );
        Arrival { segments }
    }

    /// Ends a load-back of which the first `sound_pages` arrived. The path up to them must be
    /// pinned on device.
    pub fn end_load_back(
        &mut self,
        pin: &HostPin,
        arrival: &Arrival,
        pages: DevicePages,
        sound_pages: usize,
    ) {
        self.tree.settle_arrival(pin, &arrival.segments, pages, sound_pages, &mut self.device);
    }

    /// Begins to store in L3 what the host holds of the pinned path and L3 is not known to have, at most
    /// `pages_max`. Writes keys and host pages, in order. What is known is that of the latest round
    /// ([`Cache::begin_l3_round`]), or, for one that goes on bit by bit, of the round in which it began: else it
    /// might never end.
    pub fn begin_backup(
        &mut self,
        pin: &HostPin,
        round: u32,
        pages_max: usize,
        keys: &mut Vec<PageKey>,
        sources: &mut Vec<HostPage>,
    ) -> Arrival {
        let segments = self.tree.begin_backup(pin, round, pages_max, |node| {
            keys.extend_from_slice(node.keys());
            sources.extend_from_slice(&node.host.pages);
        });
        Arrival { segments }
    }

    /// The keys of the pinned path from its first page on, in pieces, and whether they are among those
    /// of an arrival: whole pieces are, as long as it is not over.
    pub fn keys_along(
        &self,
        pin: &HostPin,
        arrival: &Arrival,
    ) -> impl Iterator<Item = (&[PageKey], bool)> {
        self.tree.keys_along(pin, &arrival.segments)
    }

    /// Writes the [digest](PrefixDigest) of each page of an arrival along the pinned path to the end of `into`, in
    /// order, and returns that of the path up to the last of them. An arrival of no pages has the whole path's.
    ///
    /// Nodes remember digests, so that a path that grows is not hashed again from its first page.
    pub fn digests_along(
        &mut self,
        pin: &HostPin,
        arrival: &Arrival,
        into: &mut Vec<PrefixDigest>,
    ) -> PrefixDigest {
        self.tree.digests_along(pin, &arrival.segments, into)
    }

    /// Begins a new round of what is known about L3: what it was not seen to have in this round or the one
    /// before is stored again when its turn comes, since stores lose things and do not tell.
    pub fn begin_l3_round(&mut self) {
        self.tree.l3_round = self.tree.l3_round.saturating_add(1);
    }

    /// The round that was begun last.
    #[must_use]
    pub fn l3_round(&self) -> u32 {
        self.tree.l3_round
    }

    /// Merges what grew bit by bit along a pinned path, once it will not grow any more.
    pub fn tidy<T: Tier>(&mut self, pin: &Pin<T>) {
        self.tree.tidy(pin);
    }

    /// Ends a backup of which L3 took the first `stored_pages`.
    pub fn end_backup(&mut self, pin: &HostPin, arrival: &Arrival, stored_pages: usize) {
        self.tree.end_backup(pin, &arrival.segments, stored_pages);
    }

    /// Never reads the host copies of the pinned path from `start_page` on again: they are
    /// computed or fetched anew.
    pub fn distrust_host(&mut self, pin: &HostPin, start_page: u32) {
        self.tree.distrust_host(pin, start_page);
    }
}
