//! Costs of cache operations, by the size of the tree.

use std::time::Instant;

use terrace_cache::{Cache, CacheConfig, Cursor, Namespace, PageKey, Sequence, Token};
use terrace_kit::mixed;
use terrace_scheduler::ConfigError;

use super::full_pool::{FullPool, PageEnds, nodes_in_order};
use super::{BestMedian, Reading};
use crate::cache::{Parts, request};
use crate::figures::nanos;

const PAGE_SIZE: u32 = 16;
/// Pages of the shared prefix of a family, and unique pages of each prompt. They are equal, so that
/// room for one prompt evicts exactly one other.
const PART_PAGES: u64 = 50;
const PROMPT_PAGES: u64 = 2 * PART_PAGES;
const SIBLINGS: u64 = 19;
const FAMILY_PAGES: u64 = (1 + SIBLINGS) * PART_PAGES;

/// Paths that are pinned and unpinned between two clock reads: one alone takes about as long as a
/// clock read.
const PINS: usize = 16;

/// Number of families inserted into full caches, in total for one size.
const NEW_FAMILIES: u64 = 64;

/// Full caches of one size.
pub(super) struct Trees {
    pub(super) pages: u32,
    pub(super) quick: bool,
    /// Returns the bytes allocated by this process so far.
    pub(super) allocated_bytes: fn() -> u64,
}

impl Trees {
    pub(super) fn readings(&self) -> Result<Vec<Reading>, ConfigError> {
        // A small tree would soon hold only new prompts, so it is rebuilt several times.
        let families = (u64::from(self.pages) / FAMILY_PAGES / 10).clamp(1, NEW_FAMILIES);
        let builds = if self.quick { 1 } else { NEW_FAMILIES / families };
        let mut costs = Costs::new();
        for _ in 0..builds {
            let mut tree = FullTree::new(self.pages);
            tree.use_in_another_order(&mut costs);
            tree.find_again(&mut costs);
            tree.add_families(families, &mut costs);
        }
        let mut readings = costs.readings();
        readings.push(self.step()?);
        Ok(readings)
    }

    /// Measures a whole scheduler on such a cache.
    fn step(&self) -> Result<Reading, ConfigError> {
        let pool = FullPool {
            device_pages: self.pages,
            victim_tokens: 1024,
            running: 32,
            page_ends: PageEnds::Spread,
            steps: if self.quick { 64 } else { 512 },
            rounds: if self.quick { 1 } else { 3 },
            allocated_bytes: self.allocated_bytes,
        };
        let steps = pool.measure()?;
        let nodes = nodes_in_order(&steps);
        Ok(Reading {
            name: "decode step of 32 that evicts 2 pages",
            unit: "us",
            time: steps[steps.len() / 2].us,
            nodes: nodes[nodes.len() / 2] as f64,
        })
    }
}

struct Costs {
    lookup_same: BestMedian,
    lookup_other: BestMedian,
    pin: BestMedian,
    insert: BestMedian,
    evict_and_insert: BestMedian,
    looked_up: Mean,
    pinned: Mean,
    inserted: Mean,
    replaced: Mean,
}

/// Mean number of visited nodes of an operation.
#[derive(Default)]
struct Mean {
    nodes: u64,
    count: u64,
}

impl Mean {
    fn note(&mut self, nodes: u64, count: u64) {
        self.nodes += nodes;
        self.count += count;
    }

    fn get(&self) -> f64 {
        self.nodes as f64 / self.count as f64
    }
}

impl Costs {
    fn new() -> Self {
        Self {
            lookup_same: BestMedian::new(),
            lookup_other: BestMedian::new(),
            pin: BestMedian::new(),
            insert: BestMedian::new(),
            evict_and_insert: BestMedian::new(),
            looked_up: Mean::default(),
            pinned: Mean::default(),
            inserted: Mean::default(),
            replaced: Mean::default(),
        }
    }

    fn readings(&self) -> Vec<Reading> {
        let per = |best: &BestMedian, count: u64| best.best / count as f64;
        let reading =
            |name, unit, time, nodes: &Mean| Reading { name, unit, time, nodes: nodes.get() };
        vec![
            reading(
                "look up 100 pages, always the same",
                "ns per page",
                per(&self.lookup_same, PROMPT_PAGES),
                &self.looked_up,
            ),
            reading(
                "look up 100 pages, different each time",
                "ns per page",
                per(&self.lookup_other, PROMPT_PAGES),
                &self.looked_up,
            ),
            reading("pin and unpin a path", "ns", per(&self.pin, PINS as u64), &self.pinned),
            reading(
                "insert 50 pages",
                "ns per page",
                per(&self.insert, PART_PAGES),
                &self.inserted,
            ),
            reading(
                "evict 50 pages and insert 50",
                "ns per page",
                per(&self.evict_and_insert, PART_PAGES),
                &self.replaced,
            ),
        ]
    }
}

/// A cache without free pages.
struct FullTree {
    cache: Cache,
    root: PageKey,
    prompts: u64,
}

impl FullTree {
    fn new(device_pages: u32) -> Self {
        let cache = Cache::new(&CacheConfig {
            page_size: PAGE_SIZE,
            device_pages,
            ..CacheConfig::default()
        });
        let root = Namespace::new("bench", PAGE_SIZE).digest();
        let mut tree = Self { cache, root, prompts: 0 };
        for _ in 0..u64::from(device_pages) / FAMILY_PAGES * SIBLINGS {
            tree.add();
        }
        assert_eq!(tree.cache.usage().device.free_pages, 0, "families fill the pool exactly");
        tree
    }

    /// Finds and uses every prompt once in another order, so that eviction order differs from
    /// memory order.
    fn use_in_another_order(&mut self, costs: &mut Costs) {
        let mut order: Vec<u64> = (0..self.prompts).collect();
        order.sort_unstable_by_key(|&number| mixed(number));
        let mut found = Vec::with_capacity(PINS);
        for batch in order.chunks_exact(PINS) {
            found.clear();
            for &number in batch {
                let sequence = Sequence::new(self.root, PAGE_SIZE, prompt(number));
                found.push(self.look_up(&sequence, &mut costs.lookup_other));
                costs.looked_up.note(self.cache.path(found[found.len() - 1]).count() as u64, 1);
            }
            self.pin_and_unpin(&found, costs);
            if costs.lookup_other.round.len() >= 1024 {
                costs.lookup_other.end_round();
                costs.pin.end_round();
            }
        }
        costs.lookup_other.end_round();
        costs.pin.end_round();
    }

    fn look_up(&self, sequence: &Sequence, time: &mut BestMedian) -> Cursor {
        let start = Instant::now();
        let found = self.cache.lookup(sequence, u32::MAX).device;
        time.note(nanos(start.elapsed()));
        assert_eq!(u64::from(found.depth), PROMPT_PAGES, "all of it is cached");
        found
    }

    /// Pins and unpins paths in order, since paths with a late fork share nodes that would be
    /// visited once.
    fn pin_and_unpin(&mut self, found: &[Cursor], costs: &mut Costs) {
        let visits = self.cache.node_visits();
        let start = Instant::now();
        for &at in found {
            let pin = self.cache.pin_device(self.root, at);
            self.cache.unpin_device(pin);
        }
        costs.pin.note(nanos(start.elapsed()));
        costs.pinned.note(self.cache.node_visits() - visits, found.len() as u64);
        for &at in found {
            let pin = self.cache.pin_device(self.root, at);
            self.cache.touch(&pin, true, 0);
            self.cache.unpin_device(pin);
        }
    }

    fn find_again(&mut self, costs: &mut Costs) {
        let sequence = Sequence::new(self.root, PAGE_SIZE, prompt(self.prompts / 2));
        for _ in 0..1024 {
            self.look_up(&sequence, &mut costs.lookup_same);
        }
        costs.lookup_same.end_round();
    }

    /// Inserts families into free pages, then as many that evict.
    fn add_families(&mut self, families: u64, costs: &mut Costs) {
        self.cache.free_device_pages((families * FAMILY_PAGES) as usize);
        for _ in 0..families * SIBLINGS {
            let parts = self.add();
            costs.inserted.note(parts.insert_visits, 1);
            if parts.inserted_pages as u64 == PART_PAGES {
                costs.insert.note(nanos(parts.insert));
            }
        }
        costs.insert.end_round();
        for _ in 0..families * SIBLINGS {
            let parts = self.add();
            costs.replaced.note(parts.evict_visits + parts.insert_visits, 1);
            if parts.inserted_pages as u64 == PART_PAGES {
                costs.evict_and_insert.note(nanos(parts.evict + parts.insert));
            }
        }
        costs.evict_and_insert.end_round();
        assert_eq!(self.cache.usage().device.free_pages, 0, "families fill the pool exactly");
    }

    /// Inserts the next new prompt.
    fn add(&mut self) -> Parts {
        self.prompts += 1;
        request(&mut self.cache, self.root, PAGE_SIZE, prompt(self.prompts - 1))
    }
}

/// Returns the whole pages of a prompt and one more token, because the last one is never matched.
fn prompt(number: u64) -> Vec<Token> {
    const PART_TOKENS: u64 = PART_PAGES * PAGE_SIZE as u64;
    let opening = number / SIBLINGS * PART_TOKENS..(number / SIBLINGS + 1) * PART_TOKENS;
    let own = (1 << 40) + number * PART_TOKENS..(1 << 40) + (number + 1) * PART_TOKENS + 1;
    opening.chain(own).map(|place| (mixed(place) % 128_000) as Token).collect()
}
