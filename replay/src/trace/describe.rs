//! Description of a trace: lengths, sharing, working sets, and reuse.

use serde::Serialize;

use super::prefixes::Prefixes;
use super::{ReuseCurve, Trace};

/// Windows for working sets.
const WINDOWS_S: [u64; 4] = [60, 300, 900, 3600];

/// Number of periods of a trace.
const PERIODS: u64 = 60;

/// Largest number of popular prefixes.
const POPULAR_MAX: usize = 5;

/// Description of a trace.
#[derive(Clone, Debug, Serialize)]
pub struct Description {
    /// Number of requests.
    pub requests: u64,
    /// Time from the first arrival to the last.
    pub span_s: f64,
    /// Tokens in a block.
    pub block_tokens: u32,
    /// Tokens in a page, where pages are counted.
    pub page_size: u32,
    /// Tokens of prompts.
    pub input: Lengths,
    /// Tokens of answers.
    pub output: Lengths,
    /// Sharing between prompts.
    pub sharing: Sharing,
    /// Distinct tokens used within time windows.
    pub working_sets: Vec<WorkingSet>,
    /// The trace in slices of equal length.
    pub periods: Vec<TracePeriod>,
    /// Upper bounds of reuse, by page size.
    pub ceilings: Vec<PageCeiling>,
    /// Reuse of an LRU cache, by size.
    pub curve: Vec<CapacityPoint>,
}

/// Distribution of lengths.
#[derive(Clone, Debug, Serialize)]
pub struct Lengths {
    /// Total.
    pub total: u64,
    /// Mean.
    pub mean: f64,
    /// Median.
    pub p50: u32,
    /// 90th percentile.
    pub p90: u32,
    /// 99th percentile.
    pub p99: u32,
    /// Maximum.
    pub max: u32,
    /// Histogram; each bin ends at twice the length of the one before.
    pub histogram: Vec<Bin>,
}

/// A bin of a histogram.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Bin {
    /// Smallest value.
    pub from: u32,
    /// Largest value.
    pub to: u32,
    /// Number of values.
    pub count: u64,
}

/// Sharing between prompts, in an unlimited cache.
#[derive(Clone, Debug, Serialize)]
pub struct Sharing {
    /// Distinct tokens, as prefixes: the final content of an unlimited cache.
    pub distinct_tokens: u64,
    /// Requests with hits.
    pub requests_with_reuse: u64,
    /// Mean number of hit tokens of those.
    pub mean_reused_tokens: f64,
    /// Histogram of the reused share of prompts, in percent.
    pub reused_percent: Vec<Bin>,
    /// Most popular prefixes.
    pub popular: Vec<Popular>,
}

/// A shared prefix.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Popular {
    /// Length, up to where fewer than half of the prompts agree.
    pub tokens: u64,
    /// Number of prompts with it.
    pub requests: u64,
}

/// Distinct tokens used within windows of one length.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct WorkingSet {
    /// Length of the window.
    pub window_s: u64,
    /// Mean over all windows, including empty ones.
    pub mean_tokens: f64,
    /// Maximum over all windows.
    pub max_tokens: u64,
}

/// A slice of the trace.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct TracePeriod {
    /// Start.
    pub start_s: f64,
    /// Arriving requests.
    pub requests: u64,
    /// Their prompt tokens.
    pub input_tokens: u64,
    /// Their answer tokens.
    pub output_tokens: u64,
    /// Their prompt tokens that an unlimited cache could reuse.
    pub reusable_tokens: u64,
}

/// Upper bound of reuse for a page size.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct PageCeiling {
    /// Tokens in a page.
    pub page_size: u32,
    /// Reusable tokens.
    pub reusable_tokens: u64,
    /// The share of all prompt tokens.
    pub ratio: f64,
}

/// Reuse of a cache of some size.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct CapacityPoint {
    /// Size of the cache.
    pub capacity_tokens: u64,
    /// Reusable tokens.
    pub reusable_tokens: u64,
    /// The share of all prompt tokens.
    pub ratio: f64,
}

impl Trace {
    /// Describes the whole trace; pages have this size.
    #[must_use]
    pub fn describe(&self, page_size: u32) -> Description {
        let reusable = self.ceiling(page_size).by_request;
        let lengths = |of: fn(&super::TraceRequest) -> u32| {
            Lengths::new(self.requests().iter().map(of).collect())
        };
        let mut page_sizes = vec![1, 16, 32, 64, 128, 256, page_size];
        page_sizes.sort_unstable();
        page_sizes.dedup();
        Description {
            requests: self.requests().len() as u64,
            span_s: self.last_arrival_us() as f64 / 1e6,
            block_tokens: self.block_tokens(),
            page_size,
            input: lengths(|request| request.input_tokens),
            output: lengths(|request| request.output_tokens),
            sharing: self.sharing(&reusable),
            working_sets: self.working_sets(),
            periods: self.periods(&reusable),
            ceilings: page_sizes.into_iter().map(|size| self.page_ceiling(size)).collect(),
            curve: self.capacity_points(page_size),
        }
    }

    fn last_arrival_us(&self) -> u64 {
        self.requests().last().map_or(0, |request| request.arrival_us)
    }

    fn page_ceiling(&self, page_size: u32) -> PageCeiling {
        let ceiling = self.ceiling(page_size);
        PageCeiling { page_size, reusable_tokens: ceiling.reusable_tokens, ratio: ceiling.ratio() }
    }

    fn capacity_points(&self, page_size: u32) -> Vec<CapacityPoint> {
        let curve = ReuseCurve::new(self, page_size);
        let most = curve.distinct_pages();
        // Powers of two and the middles between them.
        let steps = (4..).flat_map(|power| [2u64 << power, 3 << power]);
        // Sizes below a thousandth of the total are not useful.
        let sizes = steps.skip_while(|pages| pages * 1000 < most);
        let sizes = sizes.take_while(|&pages| pages < most).chain([most]);
        sizes
            .map(|pages| CapacityPoint {
                capacity_tokens: pages * u64::from(page_size),
                reusable_tokens: curve.reusable_tokens(pages),
                ratio: curve.ratio(pages),
            })
            .collect()
    }

    fn periods(&self, reusable: &[u32]) -> Vec<TracePeriod> {
        let length_us = self.last_arrival_us() / PERIODS + 1;
        let mut periods = vec![TracePeriod::default(); PERIODS as usize];
        for (place, period) in periods.iter_mut().enumerate() {
            period.start_s = (place as u64 * length_us) as f64 / 1e6;
        }
        for (request, &reusable) in self.requests().iter().zip(reusable) {
            let period = &mut periods[(request.arrival_us / length_us) as usize];
            period.requests += 1;
            period.input_tokens += u64::from(request.input_tokens);
            period.output_tokens += u64::from(request.output_tokens);
            period.reusable_tokens += u64::from(reusable);
        }
        periods
    }

    fn sharing(&self, reusable: &[u32]) -> Sharing {
        let mut tenths = [0; 10];
        for (request, &reusable) in self.requests().iter().zip(reusable) {
            let percent = u64::from(reusable) * 100 / u64::from(request.input_tokens);
            tenths[percent as usize / 10] += 1;
        }
        let bins = (0u32..).zip(tenths);
        let with_reuse = reusable.iter().filter(|&&tokens| tokens > 0).count() as u64;
        let reused: u64 = reusable.iter().map(|&tokens| u64::from(tokens)).sum();
        let (distinct_tokens, popular) = self.prefix_use();
        Sharing {
            distinct_tokens,
            requests_with_reuse: with_reuse,
            mean_reused_tokens: reused as f64 / with_reuse.max(1) as f64,
            reused_percent: bins
                .map(|(tenth, count)| Bin { from: tenth * 10, to: tenth * 10 + 9, count })
                .collect(),
            popular,
        }
    }

    /// Returns the number of distinct tokens, and the most popular prefixes.
    fn prefix_use(&self) -> (u64, Vec<Popular>) {
        #[derive(Clone, Copy, Default)]
        struct Prefix {
            tokens: u32,
            depth: u32,
            requests: u32,
            /// Number of requests of the most frequent continuation.
            continued: u32,
        }
        let mut prefixes = Prefixes::new(self.distinct_blocks());
        let mut all: Vec<Prefix> = Vec::new();
        let mut parents: Vec<u32> = Vec::new();
        for request in self.requests() {
            let (mut at, mut rest) = (Prefixes::ROOT, request.input_tokens);
            for (depth, &block) in (1..).zip(self.blocks(request)) {
                let parent = at;
                at = prefixes.extend(parent, block);
                if at as usize >= all.len() {
                    all.resize(at as usize + 1, Prefix::default());
                    parents.resize(at as usize + 1, Prefixes::ROOT);
                }
                let prefix = &mut all[at as usize];
                prefix.tokens = prefix.tokens.max(rest.min(self.block_tokens()));
                prefix.depth = depth;
                prefix.requests += 1;
                parents[at as usize] = parent;
                rest = rest.saturating_sub(self.block_tokens());
            }
        }
        for at in 0..all.len() {
            if let Some(parent) = all.get(parents[at] as usize).copied() {
                let continued = parent.continued.max(all[at].requests);
                all[parents[at] as usize].continued = continued;
            }
        }
        let distinct_tokens = all.iter().map(|prefix| u64::from(prefix.tokens)).sum();
        // A prefix whose longer continuation is nearly as frequent is not listed.
        let mut popular: Vec<Popular> = all
            .iter()
            .filter(|prefix| prefix.requests > 1 && prefix.continued * 2 <= prefix.requests)
            .map(|prefix| Popular {
                tokens: u64::from(prefix.depth - 1) * u64::from(self.block_tokens())
                    + u64::from(prefix.tokens),
                requests: prefix.requests.into(),
            })
            .collect();
        popular.sort_by_key(|popular| (std::cmp::Reverse(popular.requests), popular.tokens));
        popular.truncate(POPULAR_MAX);
        (distinct_tokens, popular)
    }

    fn working_sets(&self) -> Vec<WorkingSet> {
        let span_s = self.last_arrival_us() / 1_000_000 + 1;
        let shorter = WINDOWS_S.into_iter().filter(|&window_s| window_s < span_s);
        shorter.chain([span_s]).map(|window_s| self.working_set(window_s)).collect()
    }

    fn working_set(&self, window_s: u64) -> WorkingSet {
        let mut prefixes = Prefixes::new(self.distinct_blocks());
        // By prefix: the window of its last use, from 1 on, and the used length of its last block.
        let mut used: Vec<(u64, u32)> = Vec::new();
        let (mut total, mut current, mut max_tokens, mut window) = (0u64, 0u64, 0u64, 1);
        for request in self.requests() {
            let now = request.arrival_us / (window_s * 1_000_000) + 1;
            if now != window {
                (current, window) = (0, now);
            }
            let (mut at, mut rest) = (Prefixes::ROOT, request.input_tokens);
            for &block in self.blocks(request) {
                at = prefixes.extend(at, block);
                if at as usize >= used.len() {
                    used.resize(at as usize + 1, (0, 0));
                }
                let here = rest.min(self.block_tokens());
                rest -= here;
                let used = &mut used[at as usize];
                if used.0 != now {
                    *used = (now, 0);
                }
                let more = here.saturating_sub(used.1);
                used.1 += more;
                current += u64::from(more);
                total += u64::from(more);
            }
            max_tokens = max_tokens.max(current);
        }
        let windows = self.last_arrival_us() / (window_s * 1_000_000) + 1;
        WorkingSet { window_s, mean_tokens: total as f64 / windows as f64, max_tokens }
    }
}

impl Lengths {
    fn new(mut lengths: Vec<u32>) -> Self {
        lengths.sort_unstable();
        let total: u64 = lengths.iter().map(|&length| u64::from(length)).sum();
        let last = lengths.len().saturating_sub(1);
        let at = |share: f64| {
            let place = (share * lengths.len() as f64).ceil() as usize;
            lengths.get(place.saturating_sub(1).min(last)).copied().unwrap_or(0)
        };
        let mut histogram: Vec<Bin> = Vec::new();
        for &length in &lengths {
            let from = if length == 0 { 0 } else { 1 << length.ilog2() };
            match histogram.last_mut() {
                Some(bin) if bin.from == from => bin.count += 1,
                Some(_) | None => {
                    let next = histogram.last().map_or(from, |bin| bin.to + 1);
                    // Empty bins are listed.
                    let mut start = next;
                    while start < from {
                        let to = start * 2 - 1;
                        histogram.push(Bin { from: start, to, count: 0 });
                        start = to + 1;
                    }
                    let to = (from * 2).saturating_sub(1);
                    histogram.push(Bin { from, to, count: 1 });
                }
            }
        }
        Self {
            total,
            mean: total as f64 / lengths.len().max(1) as f64,
            p50: at(0.5),
            p90: at(0.9),
            p99: at(0.99),
            max: lengths.last().copied().unwrap_or(0),
            histogram,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::TraceBuilder;
    use super::*;

    fn trace() -> Trace {
        let mut builder = TraceBuilder::new(4).unwrap();
        builder.push(0, 8, 10, &[1, 2]).unwrap();
        builder.push(30_000_000, 12, 20, &[1, 2, 3]).unwrap();
        builder.push(100_000_000, 10, 30, &[1, 2, 4]).unwrap();
        builder.push(100_000_001, 4, 40, &[9]).unwrap();
        builder.finish()
    }

    #[test]
    fn lengths_and_histograms_add_up() {
        let described = trace().describe(4);
        assert_eq!(
            (described.requests, described.input.total, described.output.total),
            (4, 34, 100)
        );
        assert_eq!((described.input.p50, described.input.p99, described.input.max), (8, 12, 12));
        let bins = [(4, 7, 1), (8, 15, 3)].map(|(from, to, count)| Bin { from, to, count });
        assert_eq!(described.input.histogram, bins);
        let spread = Lengths::new(vec![1, 9]).histogram;
        assert_eq!(spread.iter().map(|bin| bin.count).collect::<Vec<_>>(), [1, 0, 0, 1]);
    }

    #[test]
    fn describes_sharing() {
        let sharing = trace().describe(4).sharing;
        assert_eq!(sharing.distinct_tokens, 8 + 4 + 2 + 4);
        assert_eq!((sharing.requests_with_reuse, sharing.mean_reused_tokens), (2, 8.0));
        // 8 of 12 tokens are reused, and 8 of 10.
        let tenths: Vec<u64> = sharing.reused_percent.iter().map(|bin| bin.count).collect();
        assert_eq!(tenths, [2, 0, 0, 0, 0, 0, 1, 0, 1, 0]);
        assert_eq!(sharing.popular, [Popular { tokens: 8, requests: 3 }]);
    }

    #[test]
    fn working_sets_count_distinct_tokens() {
        let sets = trace().describe(4).working_sets;
        let minute = WorkingSet { window_s: 60, mean_tokens: (12.0 + 14.0) / 2.0, max_tokens: 14 };
        let whole = WorkingSet { window_s: 101, mean_tokens: 18.0, max_tokens: 18 };
        assert_eq!(sets, [minute, whole]);
    }

    #[test]
    fn periods_cover_the_trace() {
        let described = trace().describe(4);
        let sum = |of: fn(&TracePeriod) -> u64| described.periods.iter().map(of).sum::<u64>();
        assert_eq!(sum(|period| period.requests), 4);
        assert_eq!(sum(|period| period.reusable_tokens), 16);
        assert_eq!(described.curve.last().unwrap().reusable_tokens, 16);
    }
}
