//! What is in a trace: lengths, sharing, working sets, and what caches could reuse.

use serde::Serialize;

use super::prefixes::Prefixes;
use super::{ReuseCurve, Trace};

/// Windows of time for which the working set is found.
const WINDOWS_S: [u64; 4] = [60, 300, 900, 3600];

/// How many periods the whole time is divided into.
const PERIODS: u64 = 60;

/// The most popular prefixes that are named.
const POPULAR_MAX: usize = 5;

/// What is in a trace.
#[derive(Clone, Debug, Serialize)]
pub struct Description {
    /// How many requests there are.
    pub requests: u64,
    /// From the first arrival to the last.
    pub span_s: f64,
    /// Tokens in a block.
    pub block_tokens: u32,
    /// Tokens in a page, where pages are counted.
    pub page_size: u32,
    /// Tokens of prompts.
    pub input: Lengths,
    /// Tokens of answers.
    pub output: Lengths,
    /// What prompts have in common.
    pub sharing: Sharing,
    /// Different tokens that are used within windows of time.
    pub working_sets: Vec<WorkingSet>,
    /// The trace in slices of equal length.
    pub periods: Vec<TracePeriod>,
    /// What an unlimited cache could reuse, by page size.
    pub ceilings: Vec<PageCeiling>,
    /// What a cache of limited size could reuse that lets go of the least recently used.
    pub curve: Vec<CapacityPoint>,
}

/// How lengths are distributed.
#[derive(Clone, Debug, Serialize)]
pub struct Lengths {
    /// All together.
    pub total: u64,
    /// The mean.
    pub mean: f64,
    /// Half are no longer.
    pub p50: u32,
    /// Nine of ten are no longer.
    pub p90: u32,
    /// All but one of a hundred are no longer.
    pub p99: u32,
    /// The longest.
    pub max: u32,
    /// How many are how long; each bin ends at twice the length of the one before.
    pub histogram: Vec<Bin>,
}

/// A bin of a histogram.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Bin {
    /// The smallest value in it.
    pub from: u32,
    /// The largest.
    pub to: u32,
    /// How many are in it.
    pub count: u64,
}

/// What prompts have in common with earlier ones, in an unlimited cache.
#[derive(Clone, Debug, Serialize)]
pub struct Sharing {
    /// Different tokens, as prefixes: what an unlimited cache would hold in the end.
    pub distinct_tokens: u64,
    /// Requests that find something.
    pub requests_with_reuse: u64,
    /// Of those, what they find on average.
    pub mean_reused_tokens: f64,
    /// How much of the prompt is found, in percent: how many requests.
    pub reused_percent: Vec<Bin>,
    /// The most popular beginnings of prompts.
    pub popular: Vec<Popular>,
}

/// A beginning that prompts have in common.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Popular {
    /// How long it is: until fewer than half of them go on alike.
    pub tokens: u64,
    /// How many prompts begin with it.
    pub requests: u64,
}

/// Different tokens that are used within windows of one length.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct WorkingSet {
    /// The window's length.
    pub window_s: u64,
    /// The mean over all windows, empty ones included.
    pub mean_tokens: f64,
    /// The largest of any.
    pub max_tokens: u64,
}

/// A slice of the trace.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct TracePeriod {
    /// When it begins.
    pub start_s: f64,
    /// Requests that come in it.
    pub requests: u64,
    /// Tokens of their prompts.
    pub input_tokens: u64,
    /// Tokens of their answers.
    pub output_tokens: u64,
    /// Tokens of their prompts that an unlimited cache could reuse.
    pub reusable_tokens: u64,
}

/// What an unlimited cache could reuse.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct PageCeiling {
    /// Tokens in a page.
    pub page_size: u32,
    /// Tokens that could be reused.
    pub reusable_tokens: u64,
    /// The share of all prompt tokens.
    pub ratio: f64,
}

/// What a cache of some size could reuse.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct CapacityPoint {
    /// Its size.
    pub capacity_tokens: u64,
    /// Tokens that could be reused.
    pub reusable_tokens: u64,
    /// The share of all prompt tokens.
    pub ratio: f64,
}

impl Trace {
    /// Looks at the whole trace; pages are counted with this size.
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
        // What is less than a thousandth of everything is no size that anybody considers.
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

    /// Different tokens, and the most popular beginnings.
    fn prefix_use(&self) -> (u64, Vec<Popular>) {
        #[derive(Clone, Copy, Default)]
        struct Prefix {
            tokens: u32,
            depth: u32,
            requests: u32,
            /// The most requests that any continuation has.
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
        // A beginning that most go on with alike is not worth naming beside the longer one.
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
        // By prefix: the window that it was last used in, from 1 on, and how much of its last block.
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
                    // Lengths that nothing has are shown as such.
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
    fn sharing_tells_how_much_and_of_what() {
        let sharing = trace().describe(4).sharing;
        assert_eq!(sharing.distinct_tokens, 8 + 4 + 2 + 4);
        assert_eq!((sharing.requests_with_reuse, sharing.mean_reused_tokens), (2, 8.0));
        // Of 12 tokens 8 are found, and of 10 tokens 8.
        let tenths: Vec<u64> = sharing.reused_percent.iter().map(|bin| bin.count).collect();
        assert_eq!(tenths, [2, 0, 0, 0, 0, 0, 1, 0, 1, 0]);
        assert_eq!(sharing.popular, [Popular { tokens: 8, requests: 3 }]);
    }

    #[test]
    fn working_sets_count_what_is_used_within_a_window_once() {
        let sets = trace().describe(4).working_sets;
        let minute = WorkingSet { window_s: 60, mean_tokens: (12.0 + 14.0) / 2.0, max_tokens: 14 };
        let whole = WorkingSet { window_s: 101, mean_tokens: 18.0, max_tokens: 18 };
        assert_eq!(sets, [minute, whole]);
    }

    #[test]
    fn periods_cover_everything() {
        let described = trace().describe(4);
        let sum = |of: fn(&TracePeriod) -> u64| described.periods.iter().map(of).sum::<u64>();
        assert_eq!(sum(|period| period.requests), 4);
        assert_eq!(sum(|period| period.reusable_tokens), 16);
        assert_eq!(described.curve.last().unwrap().reusable_tokens, 16);
    }
}
