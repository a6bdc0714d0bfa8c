//! The cache alone, with one request at a time: match, pin, evict, insert, unpin.

use std::ops::AddAssign;
use std::time::{Duration, Instant};

use serde::Serialize;
use terrace_cache::{Cache, CacheConfig, EvictionKind, Namespace, PageKey, Sequence, Token};

use crate::figures::{Distribution, nanos};

/// Parameters of the benchmark.
#[derive(Clone, Copy, Debug)]
pub struct CacheWorkload {
    /// Tokens in a page.
    pub page_size: u32,
    /// Device pages; if none, as many as the trace can need.
    pub device_pages: Option<u32>,
    /// Eviction policy.
    pub eviction: EvictionKind,
}

/// Results of the benchmark.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct CacheFigures {
    /// Requests of the trace.
    pub requests: usize,
    /// Tokens in their prompts.
    pub tokens: u64,
    /// Tokens found in the cache.
    pub hit_tokens: u64,
    /// Ratio of hit tokens to all tokens.
    pub hit_ratio: f64,
    /// Time of all cache operations of a request.
    pub us_per_request: Distribution,
    /// Cost of each operation per page.
    pub ns_per_page: PerPage,
    /// Bookkeeping per page cached at the end, without tokens.
    pub bytes_per_page: f64,
    /// Tokens that matches compare, per page.
    pub token_bytes_per_page: f64,
}

/// Nanoseconds per page.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct PerPage {
    /// Hashing, per page of the prompt.
    pub hash: f64,
    /// Matching and pinning, per page found.
    pub r#match: f64,
    /// Eviction, per page inserted.
    pub evict: f64,
    /// Insertion and unpinning, per page inserted.
    pub insert: f64,
}

/// Times, pages and visited nodes of the operations of a request.
#[derive(Default)]
pub(crate) struct Parts {
    hash: Duration,
    matching: Duration,
    pub(crate) evict: Duration,
    pub(crate) insert: Duration,
    pages: usize,
    found_pages: usize,
    pub(crate) inserted_pages: usize,
    pub(crate) evict_visits: u64,
    pub(crate) insert_visits: u64,
}

impl Parts {
    fn total(&self) -> Duration {
        self.hash + self.matching + self.evict + self.insert
    }
}

impl AddAssign for Parts {
    fn add_assign(&mut self, other: Self) {
        self.hash += other.hash;
        self.matching += other.matching;
        self.evict += other.evict;
        self.insert += other.insert;
        self.pages += other.pages;
        self.found_pages += other.found_pages;
        self.inserted_pages += other.inserted_pages;
        self.evict_visits += other.evict_visits;
        self.insert_visits += other.insert_visits;
    }
}

impl CacheWorkload {
    /// Runs prompts through an empty cache of `unlimited` pages, unless its size is set.
    #[must_use]
    pub fn run(&self, prompts: impl Iterator<Item = Vec<Token>>, unlimited: u32) -> CacheFigures {
        let mut cache = Cache::new(&CacheConfig {
            page_size: self.page_size,
            device_pages: self.device_pages.unwrap_or(unlimited),
            eviction: self.eviction,
            ..CacheConfig::default()
        });
        let root = Namespace::new("bench", self.page_size).digest();
        let (mut totals, mut tokens, mut samples) = (Parts::default(), 0, Vec::new());
        for prompt in prompts {
            tokens += prompt.len() as u64;
            let parts = request(&mut cache, root, self.page_size, prompt);
            samples.push(nanos(parts.total()));
            totals += parts;
        }
        let hit_tokens = totals.found_pages as u64 * u64::from(self.page_size);
        let memory = cache.memory();
        let per = |total: f64, count: usize| if count == 0 { 0.0 } else { total / count as f64 };
        let ns = |took: Duration, pages| per(took.as_nanos() as f64, pages);
        CacheFigures {
            requests: samples.len(),
            tokens,
            hit_tokens,
            hit_ratio: hit_tokens as f64 / tokens as f64,
            us_per_request: Distribution::of(samples),
            ns_per_page: PerPage {
                hash: ns(totals.hash, totals.pages),
                r#match: ns(totals.matching, totals.found_pages),
                evict: ns(totals.evict, totals.inserted_pages),
                insert: ns(totals.insert, totals.inserted_pages),
            },
            bytes_per_page: per(memory.metadata_bytes as f64, memory.pages),
            token_bytes_per_page: per(memory.token_bytes as f64, memory.pages),
        }
    }
}

/// Runs all cache operations of a request: match all but the last token, pin, evict as needed,
/// insert the whole pages, unpin.
pub(crate) fn request(
    cache: &mut Cache,
    root: PageKey,
    page_size: u32,
    prompt: Vec<Token>,
) -> Parts {
    let matchable = (prompt.len() as u32 - 1) / page_size;
    let start = Instant::now();
    let sequence = Sequence::new(root, page_size, prompt);
    let hashed = Instant::now();
    let found = cache.lookup(&sequence, matchable).device;
    let mut pin = cache.pin_device(root, found);
    cache.touch(&pin, true, 0);
    let matched = Instant::now();
    let visits_matched = cache.node_visits();
    let pages = sequence.keys().len() as u32;
    let missing = (pages - found.depth) as usize;
    let fits = cache.free_device_pages(missing);
    let evicted = Instant::now();
    let visits_evicted = cache.node_visits();
    if fits {
        let mut new = cache.take_device_pages(missing).expect("room was made");
        cache.publish_device(&mut pin, sequence.run(found.depth, pages), &mut new, 0);
        cache.give_device_pages(new);
    }
    cache.unpin_device(pin);
    let end = Instant::now();
    Parts {
        hash: hashed - start,
        matching: matched - hashed,
        evict: evicted - matched,
        insert: end - evicted,
        pages: pages as usize,
        found_pages: found.depth as usize,
        inserted_pages: if fits { missing } else { 0 },
        evict_visits: visits_evicted - visits_matched,
        insert_visits: cache.node_visits() - visits_evicted,
    }
}

#[cfg(all(test, feature = "program"))]
mod tests {
    use super::*;
    use crate::trace;

    #[test]
    fn larger_cache_has_no_fewer_hits() {
        let trace = trace::conversations();
        let hits = |device_pages| {
            let eviction = EvictionKind::Lru;
            let workload = CacheWorkload { page_size: 16, device_pages, eviction };
            workload.run(trace::prompts(&trace), trace::pages(&trace, 16)).hit_tokens
        };
        let (small, unlimited) = (hits(Some(20_000)), hits(None));
        assert!(0 < small && small < unlimited, "{small} of {unlimited}");
    }
}
