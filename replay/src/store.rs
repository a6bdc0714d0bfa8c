//! The shared store: its pages, latencies and failures.

use terrace_kit::Dice;
use terrace_scheduler::{L3Path, Outcome};

use crate::config::StoreConfig;
use crate::draws::Draws;
use crate::links::Link;
use crate::lru_pages::LruPages;
use crate::page_set::PageSet;
use crate::report::StoreUse;

/// The shared store. It identifies pages by 64 bits of their keys or, without a limit, by 32 bits
/// behind a known predecessor: with ten million pages, fewer than one in 10,000 replays confuses
/// two pages.
#[derive(Debug)]
pub(crate) struct Store {
    config: StoreConfig,
    pages: Held,
    dice: Dice,
    pub(crate) read_link: Link,
    pub(crate) write_link: Link,
    used: StoreUse,
}

#[derive(Debug)]
enum Held {
    /// No eviction.
    Unlimited(PageSet),
    Limited(LruPages),
}

impl Store {
    pub(crate) fn new(config: &StoreConfig, seed: u64) -> Self {
        Self {
            config: *config,
            pages: match config.pages_max {
                None => Held::Unlimited(PageSet::default()),
                Some(pages_max) => Held::Limited(LruPages::new(pages_max)),
            },
            dice: Dice::new(seed),
            read_link: Link::new(&config.read),
            write_link: Link::new(&config.write),
            used: StoreUse::default(),
        }
    }

    /// Looks up a path, and returns the number of its leading pages that are stored.
    pub(crate) fn probe(&mut self, path: &L3Path<'_>) -> Outcome {
        self.used.probes += 1;
        if self.dice.happens(self.config.probe_failure_rate) {
            self.used.failures += 1;
            return Outcome::Failed;
        }
        answer(self.pages.held(path), path)
    }

    /// Reads pages, and returns the result.
    pub(crate) fn read(&mut self, path: &L3Path<'_>) -> Outcome {
        self.used.reads += 1;
        if self.dice.happens(self.config.read_failure_rate) {
            self.used.failures += 1;
            return Outcome::Failed;
        }
        let mut pages = self.pages.held(path);
        if pages > 0 && self.dice.happens(self.config.short_read_rate) {
            self.used.failures += 1;
            pages = self.dice.place(pages);
        }
        self.pages.touch(path, pages);
        answer(pages, path)
    }

    /// Returns whether a write that starts now will succeed.
    pub(crate) fn accepts_write(&mut self) -> bool {
        self.used.writes += 1;
        let fails = self.dice.happens(self.config.write_failure_rate);
        self.used.failures += u64::from(fails);
        !fails
    }

    /// Inserts the pages of a completed write.
    pub(crate) fn insert(&mut self, path: &L3Path<'_>) {
        match &mut self.pages {
            Held::Unlimited(set) => set.insert(path),
            Held::Limited(lru) => {
                lru.insert(path);
                self.used.evicted_pages = lru.evicted();
            }
        }
        self.used.pages_peak = self.used.pages_peak.max(self.pages());
    }

    pub(crate) fn pages(&self) -> u64 {
        match &self.pages {
            Held::Unlimited(set) => set.len(),
            Held::Limited(lru) => lru.len(),
        }
    }

    pub(crate) fn probe_latency_us(&self) -> u64 {
        self.config.probe_latency_us
    }

    pub(crate) fn report(&self) -> StoreUse {
        StoreUse { pages: self.pages(), ..self.used }
    }
}

impl Held {
    fn held(&self, path: &L3Path<'_>) -> usize {
        match self {
            Self::Unlimited(set) => set.held(path),
            Self::Limited(lru) => lru.held(path),
        }
    }

    /// Marks the first pages of a path as used last.
    fn touch(&mut self, path: &L3Path<'_>, pages: usize) {
        match self {
            Self::Unlimited(_) => {}
            Self::Limited(lru) => lru.touch(path, pages),
        }
    }
}

fn answer(pages: usize, path: &L3Path<'_>) -> Outcome {
    match pages {
        0 => Outcome::Missing,
        _ if pages == path.pages() => Outcome::Done,
        _ => Outcome::Partial(pages as u32),
    }
}

#[cfg(test)]
mod tests {
    use terrace_scheduler::PageKey;

    use super::*;

    fn keys(range: std::ops::Range<u128>) -> Vec<PageKey> {
        range.map(|n| PageKey((n + 1) << 64)).collect()
    }

    /// Returns the path of an operation on these pages of a sequence.
    fn path(pages: &[PageKey]) -> L3Path<'_> {
        let mut path = L3Path::default();
        path.extend([pages], true);
        path
    }

    #[test]
    fn probe_counts_up_to_the_first_missing_page() {
        let mut store = Store::new(&StoreConfig::default(), 0);
        store.insert(&path(&keys(0..3)));
        store.insert(&path(&keys(4..6)));
        assert_eq!(store.probe(&path(&keys(0..6))), Outcome::Partial(3));
        assert_eq!(store.probe(&path(&keys(0..3))), Outcome::Done);
        assert_eq!(store.probe(&path(&keys(3..6))), Outcome::Missing);
    }

    #[test]
    fn limited_store_evicts_ends_of_unused_sequences_first() {
        let config = StoreConfig { pages_max: Some(6), ..StoreConfig::default() };
        let mut store = Store::new(&config, 0);
        store.insert(&path(&keys(0..3)));
        store.insert(&path(&keys(10..13)));
        assert_eq!(store.read(&path(&keys(0..3))), Outcome::Done);
        store.insert(&path(&keys(20..22)));
        assert_eq!(store.probe(&path(&keys(0..3))), Outcome::Done);
        assert_eq!(store.probe(&path(&keys(10..13))), Outcome::Partial(1));
        assert_eq!((store.report().pages, store.report().evicted_pages), (6, 2));
    }

    #[test]
    fn failure_rates_are_respected() {
        let config = StoreConfig {
            probe_failure_rate: 0.25,
            read_failure_rate: 0.5,
            short_read_rate: 1.0,
            ..StoreConfig::default()
        };
        let mut store = Store::new(&config, 7);
        store.insert(&path(&keys(0..8)));
        let probes =
            (0..4000).filter(|_| store.probe(&path(&keys(0..8))) == Outcome::Failed).count();
        assert!((900..1100).contains(&probes), "{probes}");
        let reads: Vec<_> = (0..4000).map(|_| store.read(&path(&keys(0..8)))).collect();
        let failed = reads.iter().filter(|read| **read == Outcome::Failed).count();
        assert!((1900..2100).contains(&failed), "{failed}");
        assert!(!reads.contains(&Outcome::Done), "all others are short");
    }
}
