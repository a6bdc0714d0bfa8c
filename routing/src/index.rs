//! A router's view of one worker: the prompt prefixes that it has cached.
//!
//! Each engine has its own block names, which are not comparable. Tokens are: a block is identified
//! here by a chain, a hash of its tokens, of its other dependencies, and of the previous block's
//! chain. It can be computed for any prompt as well.

use terrace_cache::HashedMap;
use xxhash_rust::xxh3::xxh3_64;

use crate::wire::{Batch, Event, Medium, Stored};

/// The blocks of a worker.
#[derive(Debug)]
pub struct WorkerIndex {
    /// Blocks by the worker's name.
    blocks: HashedMap<u64, Held>,
    /// Number of blocks with each chain.
    chains: HashedMap<u64, u32>,
    block_size: u32,
    blocks_max: usize,
    stats: IndexStats,
}

#[derive(Clone, Copy, Debug)]
struct Held {
    chain: u64,
    /// Media that hold it, one bit each.
    media: u8,
}

/// Statistics of a [`WorkerIndex`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct IndexStats {
    /// Stored blocks.
    pub stored: u64,
    /// Removed blocks.
    pub removed: u64,
    /// Resets.
    pub cleared: u64,
    /// Blocks with an unknown predecessor, which are ignored.
    pub orphans: u64,
    /// Blocks above the limit, which are ignored.
    pub refused: u64,
    /// Inconsistent events.
    pub malformed: u64,
}

impl WorkerIndex {
    /// Creates an empty index of at most `blocks_max` blocks.
    #[must_use]
    pub fn new(blocks_max: usize) -> Self {
        Self {
            blocks: HashedMap::default(),
            chains: HashedMap::default(),
            block_size: 0,
            blocks_max,
            stats: IndexStats::default(),
        }
    }

    /// Applies a batch. `computed` is called with the chain of each block that is new on the
    /// worker's device and was on none of its media before.
    pub fn apply(&mut self, batch: &Batch, mut computed: impl FnMut(u64)) {
        for event in &batch.events {
            match event {
                Event::Stored(stored) => self.store(stored, &mut computed),
                Event::Removed { hashes, medium } => self.remove(hashes, *medium),
                Event::Cleared => {
                    self.stats.cleared += 1;
                    self.forget();
                }
                Event::Other => {}
            }
        }
    }

    /// Drops all blocks.
    pub fn forget(&mut self) {
        self.blocks.clear();
        self.chains.clear();
        self.block_size = 0;
    }

    /// Returns the number of leading prompt tokens that the worker has cached.
    pub fn cached_tokens(&self, prompt: &mut PromptBlocks<'_>) -> u32 {
        if self.block_size == 0 {
            return 0;
        }
        let chains = prompt.chains(self.block_size).iter();
        let held = chains.take_while(|chain| self.chains.contains_key(chain)).count();
        held as u32 * self.block_size
    }

    /// Returns whether the worker has a block.
    #[must_use]
    pub fn holds(&self, chain: u64) -> bool {
        self.chains.contains_key(&chain)
    }

    /// Iterates over the chains of all blocks, in no order.
    pub fn chains(&self) -> impl Iterator<Item = u64> {
        self.chains.keys().copied()
    }

    /// Returns the number of blocks on any medium.
    #[must_use]
    pub fn len(&self) -> usize {
        self.blocks.len()
    }

    /// Returns whether there are no blocks.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.blocks.is_empty()
    }

    /// Returns the number of blocks on a medium.
    #[must_use]
    pub fn len_in(&self, medium: Medium) -> usize {
        self.blocks.values().filter(|held| held.media & bit(medium) != 0).count()
    }

    /// Returns the tokens in a block; 0 until it is known.
    #[must_use]
    pub fn block_size(&self) -> u32 {
        self.block_size
    }

    /// Returns statistics.
    #[must_use]
    pub fn stats(&self) -> IndexStats {
        self.stats
    }

    fn store(&mut self, stored: &Stored, computed: &mut impl FnMut(u64)) {
        if stored.medium == Medium::Shared {
            return;
        }
        self.stats.stored += stored.hashes.len() as u64;
        let bit = bit(stored.medium);
        if stored.tokens.is_empty() {
            // Blocks that are already known.
            for hash in &stored.hashes {
                match self.blocks.get_mut(hash) {
                    Some(held) => held.media |= bit,
                    None => self.stats.orphans += 1,
                }
            }
            return;
        }
        if self.blocks.is_empty() {
            self.block_size = stored.block_size;
        }
        let size = stored.block_size as usize;
        let is_sound =
            size > 0 && stored.hashes.len().checked_mul(size) == Some(stored.tokens.len());
        if !is_sound || stored.block_size != self.block_size {
            self.stats.malformed += 1;
            return;
        }
        let mut chain = match stored.parent {
            None => root(stored.adapter.as_deref()),
            Some(parent) => match self.blocks.get(&parent) {
                Some(parent) => parent.chain,
                None => {
                    self.stats.orphans += stored.hashes.len() as u64;
                    return;
                }
            },
        };
        for (place, (&hash, tokens)) in
            stored.hashes.iter().zip(stored.tokens.chunks(size)).enumerate()
        {
            let extras = stored.extras.get(place).map_or(&[][..], |extras| extras);
            chain = next(chain, tokens, extras.iter().map(String::as_str));
            self.hold(hash, chain, bit, stored.medium, computed);
        }
    }

    fn hold(
        &mut self,
        hash: u64,
        chain: u64,
        bit: u8,
        medium: Medium,
        computed: &mut impl FnMut(u64),
    ) {
        if let Some(held) = self.blocks.get_mut(&hash) {
            if held.chain == chain {
                held.media |= bit;
                return;
            }
            // The worker reuses a name for another block: the former one is gone.
            let old = std::mem::replace(held, Held { chain, media: bit }).chain;
            self.drop_chain(old);
        } else if self.blocks.len() >= self.blocks_max {
            self.stats.refused += 1;
            return;
        } else {
            self.blocks.insert(hash, Held { chain, media: bit });
        }
        *self.chains.entry(chain).or_insert(0) += 1;
        if medium == Medium::Device {
            computed(chain);
        }
    }

    fn remove(&mut self, hashes: &[u64], medium: Medium) {
        self.stats.removed += hashes.len() as u64;
        for hash in hashes {
            let Some(held) = self.blocks.get_mut(hash) else { continue };
            held.media &= !bit(medium);
            if held.media == 0 {
                let chain = held.chain;
                self.blocks.remove(hash);
                self.drop_chain(chain);
            }
        }
    }

    fn drop_chain(&mut self, chain: u64) {
        if let Some(count) = self.chains.get_mut(&chain) {
            *count -= 1;
            if *count == 0 {
                self.chains.remove(&chain);
            }
        }
    }
}

fn bit(medium: Medium) -> u8 {
    match medium {
        Medium::Device => 1,
        Medium::Host => 2,
        Medium::Disk => 4,
        Medium::Shared => 8,
    }
}

/// Returns the chain before the first block of a prompt.
fn root(adapter: Option<&str>) -> u64 {
    match adapter {
        None => 0,
        Some(adapter) => next(0, &[], [adapter].into_iter()),
    }
}

/// Returns the chain of a block, given that of its predecessor.
fn next<'a>(before: u64, tokens: &[u32], extras: impl Iterator<Item = &'a str>) -> u64 {
    let mut bytes = Vec::with_capacity(8 + 4 * tokens.len());
    bytes.extend_from_slice(&before.to_le_bytes());
    bytes.extend(tokens.iter().flat_map(|token| token.to_le_bytes()));
    for extra in extras {
        bytes.extend_from_slice(&(extra.len() as u64).to_le_bytes());
        bytes.extend_from_slice(extra.as_bytes());
    }
    xxh3_64(&bytes)
}

/// The block chains of a prompt, for any block size.
#[derive(Debug)]
pub struct PromptBlocks<'a> {
    tokens: &'a [u32],
    salt: &'a str,
    by_size: Vec<(u32, Vec<u64>)>,
}

impl<'a> PromptBlocks<'a> {
    /// Creates the blocks of a prompt with a cache salt; empty for none.
    #[must_use]
    pub fn new(tokens: &'a [u32], salt: &'a str) -> Self {
        Self { tokens, salt, by_size: Vec::new() }
    }

    /// Returns the tokens.
    #[must_use]
    pub fn tokens(&self) -> &'a [u32] {
        self.tokens
    }

    /// Returns the chains of the whole blocks.
    fn chains(&mut self, block_size: u32) -> &[u64] {
        let known = self.by_size.iter().position(|(size, _)| *size == block_size);
        let place = known.unwrap_or_else(|| {
            let mut before = root(None);
            let mut salt = Some(self.salt).filter(|salt| !salt.is_empty());
            let blocks = self.tokens.chunks_exact(block_size as usize);
            let chains = blocks.map(|tokens| {
                before = next(before, tokens, salt.take().into_iter());
                before
            });
            let chains = chains.collect();
            self.by_size.push((block_size, chains));
            self.by_size.len() - 1
        });
        &self.by_size[place].1
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn batch(events: Vec<Event>) -> Batch {
        Batch { at: 0.0, events, rank: None }
    }

    fn stored(hashes: &[u64], parent: Option<u64>, first_token: u32, medium: Medium) -> Event {
        let tokens = (0..4 * hashes.len() as u32).map(|token| first_token + token).collect();
        Event::Stored(Stored {
            hashes: hashes.to_vec(),
            parent,
            tokens,
            block_size: 4,
            medium,
            ..Stored::default()
        })
    }

    fn removed(hashes: &[u64], medium: Medium) -> Event {
        Event::Removed { hashes: hashes.to_vec(), medium }
    }

    fn cached(index: &WorkerIndex, prompt: std::ops::Range<u32>, salt: &str) -> u32 {
        let tokens: Vec<u32> = prompt.collect();
        index.cached_tokens(&mut PromptBlocks::new(&tokens, salt))
    }

    #[test]
    fn counts_leading_whole_blocks() {
        let mut index = WorkerIndex::new(100);
        assert_eq!(cached(&index, 0..20, ""), 0);
        index.apply(&batch(vec![stored(&[1, 2], None, 0, Medium::Device)]), |_| {});
        index.apply(&batch(vec![stored(&[3], Some(2), 8, Medium::Device)]), |_| {});
        assert_eq!(cached(&index, 0..20, ""), 12);
        assert_eq!(cached(&index, 0..11, ""), 8);
        assert_eq!(cached(&index, 1..20, ""), 0);
        assert_eq!(cached(&index, 0..20, "salted"), 0);
        index.apply(&batch(vec![removed(&[2], Medium::Device)]), |_| {});
        assert_eq!(cached(&index, 0..20, ""), 4, "3 is there, but not what is before it");
        index.apply(&batch(vec![Event::Cleared]), |_| {});
        assert_eq!((cached(&index, 0..20, ""), index.len()), (0, 0));
    }

    #[test]
    fn block_counts_until_removed_from_all_media() {
        let mut index = WorkerIndex::new(100);
        let mut computed = 0;
        for medium in [Medium::Device, Medium::Host, Medium::Device] {
            index.apply(&batch(vec![stored(&[1], None, 0, medium)]), |_| computed += 1);
        }
        assert_eq!(computed, 1, "the copy was not computed");
        index.apply(&batch(vec![removed(&[1], Medium::Device)]), |_| {});
        assert_eq!((cached(&index, 0..4, ""), index.len_in(Medium::Host)), (4, 1));
        index.apply(&batch(vec![removed(&[1], Medium::Host)]), |_| {});
        assert_eq!(cached(&index, 0..4, ""), 0);
    }

    #[test]
    fn separates_salts_adapters_and_shared_stores() {
        let mut index = WorkerIndex::new(100);
        let Event::Stored(plain) = stored(&[1], None, 0, Medium::Device) else { unreachable!() };
        let salted = Stored { extras: vec![vec!["s".to_owned()]], ..plain.clone() };
        index.apply(&batch(vec![Event::Stored(salted)]), |_| {});
        assert_eq!((cached(&index, 0..4, "s"), cached(&index, 0..4, "")), (4, 0));
        let adapted = Stored { hashes: vec![2], adapter: Some("a".to_owned()), ..plain.clone() };
        index.apply(&batch(vec![Event::Stored(adapted)]), |_| {});
        let shared = Stored { hashes: vec![3], medium: Medium::Shared, ..plain };
        index.apply(&batch(vec![Event::Stored(shared)]), |_| {});
        assert_eq!((cached(&index, 0..4, ""), index.len()), (0, 2));
    }

    #[test]
    fn counts_orphans_and_refused_blocks() {
        let mut index = WorkerIndex::new(2);
        index.apply(&batch(vec![stored(&[5], Some(4), 0, Medium::Device)]), |_| {});
        index.apply(&batch(vec![stored(&[1, 2, 3], None, 0, Medium::Device)]), |_| {});
        let Event::Stored(sound) = stored(&[9], None, 0, Medium::Device) else { unreachable!() };
        let wrong = Stored { tokens: vec![1, 2, 3], ..sound.clone() };
        index.apply(&batch(vec![Event::Stored(wrong)]), |_| {});
        let other_size = Stored { block_size: 2, tokens: vec![1, 2], ..sound };
        index.apply(&batch(vec![Event::Stored(other_size)]), |_| {});
        let IndexStats { orphans, refused, malformed, .. } = index.stats();
        assert_eq!((orphans, refused, malformed, index.len()), (1, 1, 2, 2));
        assert_eq!(cached(&index, 0..12, ""), 8);
    }
}
