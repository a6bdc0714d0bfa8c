//! Reuse by cache size: the exact stack distances of an LRU cache, for all sizes in one pass.

use super::Trace;
use super::prefixes::Prefixes;

/// Reuse by capacity, for one page size. An LRU cache of pages that evicts a prompt's last page
/// first reuses exactly this much if requests run in sequence.
#[derive(Clone, Debug)]
pub struct ReuseCurve {
    page_size: u32,
    prompt_tokens: u64,
    distinct_pages: u64,
    /// Reused pages: the number of distinct pages used since the last use, and the number of
    /// consecutive such pages; each further page has one more before it.
    returns: Vec<(u64, u32)>,
}

/// Pages that are only used together: a part of a block after one prefix.
struct Atom {
    pages: u32,
    /// Index of its latest use, if it was used.
    last_use: Option<usize>,
}

impl ReuseCurve {
    /// Analyses a whole trace.
    #[must_use]
    pub fn new(trace: &Trace, page_size: u32) -> Self {
        let Parts { ends, first, uses } = Parts::new(trace, page_size);
        let mut atoms: Vec<Atom> = Vec::with_capacity(ends.len());
        for (place, &(prefix, end)) in ends.iter().enumerate() {
            let before = place.checked_sub(1).map(|before| ends[before]);
            let start = before.filter(|before| before.0 == prefix).map_or(0, |before| before.1);
            atoms.push(Atom { pages: end - start, last_use: None });
        }
        let uses_max: usize = uses
            .iter()
            .flatten()
            .map(|&(prefix, end)| {
                let from = first[prefix as usize] as usize;
                ends[from..].iter().take_while(|&&at| at <= (prefix, end)).count()
            })
            .sum();

        let mut recent = Fenwick::new(uses_max);
        let mut returns = Vec::new();
        let mut next_use = 0;
        let mut touched = Vec::new();
        for (request, uses) in trace.requests().iter().zip(&uses) {
            touched.clear();
            let mut usable = (request.input_tokens - 1) / page_size;
            for &(prefix, end) in uses {
                let from = first[prefix as usize] as usize;
                for place in from..ends.len() {
                    if ends[place] > (prefix, end) {
                        break;
                    }
                    touched.push(place);
                    let atom = &atoms[place];
                    let pages = atom.pages.min(usable);
                    usable -= pages;
                    if let Some(last_use) = atom.last_use.filter(|_| pages > 0) {
                        returns.push((recent.total - recent.up_to(last_use), pages));
                    }
                }
            }
            // The start of a prompt is shared most: it counts as used last.
            for &place in touched.iter().rev() {
                let atom = &mut atoms[place];
                if let Some(last_use) = atom.last_use {
                    recent.add(last_use, -i64::from(atom.pages));
                }
                recent.add(next_use, atom.pages.into());
                atom.last_use = Some(next_use);
                next_use += 1;
            }
        }
        let prompt_tokens = trace.requests().iter().map(|r| u64::from(r.input_tokens)).sum();
        Self { page_size, prompt_tokens, distinct_pages: recent.total, returns }
    }

    /// Returns the tokens that a cache of `capacity_pages` pages would reuse.
    #[must_use]
    pub fn reusable_tokens(&self, capacity_pages: u64) -> u64 {
        let pages = self
            .returns
            .iter()
            .map(|&(between, pages)| capacity_pages.saturating_sub(between).min(pages.into()));
        pages.sum::<u64>() * u64::from(self.page_size)
    }

    /// Returns the same as a share of all prompt tokens.
    #[must_use]
    pub fn ratio(&self, capacity_pages: u64) -> f64 {
        self.reusable_tokens(capacity_pages) as f64 / self.prompt_tokens.max(1) as f64
    }

    /// Returns the number of distinct pages: a larger cache gains nothing.
    #[must_use]
    pub fn distinct_pages(&self) -> u64 {
        self.distinct_pages
    }
}

/// Divisions of blocks at the places where prompts end.
struct Parts {
    /// Prefix and page within its last block, sorted: the end of each part.
    ends: Vec<(u32, u32)>,
    /// First part of each prefix.
    first: Vec<u32>,
    /// For each request its prefixes, and the pages of each one's last block. A page belongs to the
    /// block in which it ends.
    uses: Vec<Vec<(u32, u32)>>,
}

impl Parts {
    fn new(trace: &Trace, page_size: u32) -> Self {
        let mut prefixes = Prefixes::new(trace.distinct_blocks());
        let mut uses = Vec::with_capacity(trace.requests().len());
        let mut ends = Vec::new();
        for request in trace.requests() {
            let mut at = Prefixes::ROOT;
            let (mut tokens, mut pages) = (0, 0);
            let blocks = trace.blocks(request).iter().map(|&block| {
                at = prefixes.extend(at, block);
                tokens = (tokens + trace.block_tokens()).min(request.input_tokens);
                let before = std::mem::replace(&mut pages, tokens / page_size);
                (at, pages - before)
            });
            let blocks: Vec<(u32, u32)> = blocks.filter(|&(_, pages)| pages > 0).collect();
            ends.extend(&blocks);
            uses.push(blocks);
        }
        ends.sort_unstable();
        ends.dedup();
        let mut first = vec![0; prefixes.bound() as usize];
        for (place, &(prefix, _)) in ends.iter().enumerate().rev() {
            first[prefix as usize] = place as u32;
        }
        Self { ends, first, uses }
    }
}

/// Prefix sums over a mutable list.
struct Fenwick {
    sums: Vec<i64>,
    total: u64,
}

impl Fenwick {
    fn new(length: usize) -> Self {
        Self { sums: vec![0; length + 1], total: 0 }
    }

    fn add(&mut self, place: usize, change: i64) {
        self.total = self.total.wrapping_add_signed(change);
        let mut at = place + 1;
        while at < self.sums.len() {
            self.sums[at] += change;
            at += at & at.wrapping_neg();
        }
    }

    /// Returns the sum up to and including a place.
    fn up_to(&self, place: usize) -> u64 {
        let mut at = place + 1;
        let mut sum = 0;
        while at > 0 {
            sum += self.sums[at];
            at -= at & at.wrapping_neg();
        }
        sum as u64
    }
}

#[cfg(test)]
mod tests {
    use terrace_cache::Token;

    use super::super::TraceBuilder;
    use super::*;

    /// Reference implementation: a list of prefixes, the latest first.
    fn slow_lru(trace: &Trace, page_size: u32, capacity: usize) -> u64 {
        let page_size = page_size as usize;
        let mut cached: Vec<Vec<Token>> = Vec::new();
        let mut reused = 0;
        for request in trace.requests() {
            let tokens: Vec<Token> = trace.token_blocks(request).flatten().collect();
            let pages: Vec<&[Token]> =
                (1..=tokens.len() / page_size).map(|page| &tokens[..page * page_size]).collect();
            let usable = &pages[..(tokens.len() - 1) / page_size];
            let found = usable.iter().take_while(|page| cached.iter().any(|other| other == *page));
            reused += (found.count() * page_size) as u64;
            for page in pages.iter().rev() {
                cached.retain(|other| other != page);
                cached.insert(0, page.to_vec());
                cached.truncate(capacity);
            }
        }
        reused
    }

    proptest::proptest! {
        #[test]
        fn curve_equals_a_simulated_cache(
            block_tokens in 1u32..9,
            page_size in proptest::sample::select(vec![1u32, 2, 4, 8]),
            prompts in proptest::collection::vec(
                (proptest::collection::vec(0u64..3, 1..6), 0u32..8), 1..25),
        ) {
            let mut builder = TraceBuilder::new(block_tokens).unwrap();
            for (ids, unused) in &prompts {
                let whole = ids.len() as u32 * block_tokens;
                builder.push(0, whole - unused.min(&(block_tokens - 1)), 1, ids).unwrap();
            }
            let trace = builder.finish();
            let curve = ReuseCurve::new(&trace, page_size);
            for capacity in 0..=curve.distinct_pages() + 1 {
                let expected = slow_lru(&trace, page_size, capacity as usize);
                proptest::prop_assert_eq!(curve.reusable_tokens(capacity), expected, "{}", capacity);
            }
            let ceiling = trace.ceiling(page_size).reusable_tokens;
            proptest::prop_assert_eq!(curve.reusable_tokens(u64::MAX), ceiling);
        }
    }
}
