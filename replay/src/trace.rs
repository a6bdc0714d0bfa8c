//! Traces of requests: arrival times, lengths, and shared prefixes of prompts.

mod build;
mod curve;
mod describe;
mod import;
mod prefixes;
mod read;
mod session;
mod synthetic;
mod write;

use std::collections::HashSet;
use std::ops::Range;

use serde::Serialize;
use terrace_cache::Token;
use terrace_kit::Dice;

pub use build::{TOKENS_MAX, TraceBuilder};
pub use curve::ReuseCurve;
pub use describe::{
    Bin, CapacityPoint, Description, Lengths, PageCeiling, Popular, Sharing, TracePeriod,
    WorkingSet,
};
pub use import::{Format, ImportOptions, Tokenise};
pub use read::{BadLine, BadLines, ReadOptions, Reading, TraceError};
pub(crate) use session::Link;
pub use session::Turn;
pub use synthetic::{Synthetic, SyntheticError, Workload};

use crate::draws::Draws;
use prefixes::Prefixes;

/// Requests in order of arrival. Prompts are lists of blocks; equal blocks have equal tokens, and
/// different ones have no token in common.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Trace {
    block_tokens: u32,
    /// Number of blocks, which are numbered by first appearance.
    distinct_blocks: u32,
    blocks: Vec<u32>,
    requests: Vec<TraceRequest>,
}

/// One request of a [`Trace`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TraceRequest {
    /// Arrival time, relative to the first of the trace.
    pub arrival_us: u64,
    /// Tokens in the prompt, at least one.
    pub input_tokens: u32,
    /// Tokens in the answer, at least one.
    pub output_tokens: u32,
    blocks: Range<u32>,
    /// Its place in a session, if it belongs to one.
    pub(crate) link: Option<Link>,
}

/// Upper bound of reuse: the tokens that an unlimited cache could reuse that keeps every earlier
/// prompt, and every answer that a later prompt contains. It counts whole pages, and at most all
/// but one token of each prompt, since a request must compute something.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Ceiling {
    /// Tokens of all prompts.
    pub prompt_tokens: u64,
    /// Tokens among them that can be reused if requests run in sequence.
    pub reusable_tokens: u64,
    /// Reusable tokens if requests may overlap. This is larger where a request's last page, which
    /// it cannot reuse itself, is computed before those of requests that can.
    pub any_order_tokens: u64,
    /// Reusable tokens of each request, by arrival.
    pub by_request: Vec<u32>,
}

impl Ceiling {
    /// Returns the reusable share of all prompt tokens.
    #[must_use]
    pub fn ratio(&self) -> f64 {
        self.reusable_tokens as f64 / self.prompt_tokens.max(1) as f64
    }
}

impl Trace {
    /// Returns the requests, sorted by arrival.
    #[must_use]
    pub fn requests(&self) -> &[TraceRequest] {
        &self.requests
    }

    /// Returns the blocks of a request's prompt; the last may be used in part.
    ///
    /// # Panics
    /// Panics if the request belongs to another trace.
    #[must_use]
    pub fn blocks(&self, request: &TraceRequest) -> &[u32] {
        &self.blocks[request.blocks.start as usize..request.blocks.end as usize]
    }

    /// Returns the same requests with new random gaps, around the same means.
    #[must_use]
    pub fn another_day(&self, seed: u64) -> Self {
        let mut dice = Dice::new(seed);
        let mut day = self.clone();
        let (mut before_us, mut at_us) = (0, 0.0);
        for request in &mut day.requests {
            let gap_us = request.arrival_us - std::mem::replace(&mut before_us, request.arrival_us);
            at_us += dice.exponential(gap_us as f64);
            request.arrival_us = at_us as u64;
        }
        day
    }

    /// Returns the interval in microseconds to which arrival times were rounded, if requests arrive
    /// together because of it.
    ///
    /// Published traces are often rounded to seconds. Replayed at any speed, such a trace has
    /// bursts that its traffic did not have. The gaps between arrival times are then multiples of
    /// the interval, nearly all of them to within 1 %.
    #[must_use]
    pub fn arrival_quantum_us(&self) -> Option<u64> {
        const QUANTUM_MIN_US: u64 = 100_000;
        const REQUESTS_PER_TIME_MIN: usize = 2;
        let mut times: Vec<u64> = self.requests.iter().map(|request| request.arrival_us).collect();
        times.dedup();
        let mut gaps_us: Vec<u64> = times.windows(2).map(|pair| pair[1] - pair[0]).collect();
        gaps_us.sort_unstable();
        let quantum_us = *gaps_us.get(gaps_us.len().saturating_sub(1) / 2)?;
        let is_multiple = |gap_us: &&u64| {
            let above_us = **gap_us % quantum_us;
            above_us.min(quantum_us - above_us) * 100 <= quantum_us
        };
        let is_rounded = gaps_us.iter().filter(is_multiple).count() * 10 >= gaps_us.len() * 9;
        let is_shared = self.requests.len() >= REQUESTS_PER_TIME_MIN * times.len();
        (is_rounded && is_shared && quantum_us >= QUANTUM_MIN_US).then_some(quantum_us)
    }

    /// Returns the same requests in the same order. Requests of one arrival time are spread evenly
    /// over an interval that starts with it, or over the time to the next arrival if that is
    /// shorter.
    #[must_use]
    pub fn spread_arrivals(&self, interval_us: u64) -> Self {
        let mut spread = self.clone();
        let mut rest = &mut spread.requests[..];
        while let Some(first) = rest.first() {
            let at_us = first.arrival_us;
            let count = rest.partition_point(|request| request.arrival_us == at_us);
            let (together, later) = rest.split_at_mut(count);
            let gap_us = later.first().map_or(interval_us, |next| next.arrival_us - at_us);
            for (place, request) in (0..).zip(together) {
                request.arrival_us += interval_us.min(gap_us) * place / count as u64;
            }
            rest = later;
        }
        spread
    }

    /// Returns a number shared by requests of a session or, without one, by requests whose prompts
    /// begin with the same block.
    pub(crate) fn family(&self, request: &TraceRequest) -> u64 {
        if let Some(link) = request.link {
            return u64::from(link.session) | 1 << 32;
        }
        self.blocks(request).first().copied().unwrap_or(0).into()
    }

    /// Returns the number of tokens in a block.
    #[must_use]
    pub fn block_tokens(&self) -> u32 {
        self.block_tokens
    }

    /// Returns the number of distinct blocks.
    #[must_use]
    pub fn distinct_blocks(&self) -> u32 {
        self.distinct_blocks
    }

    /// Returns an upper bound of all prompt tokens; generated tokens start here.
    #[must_use]
    pub fn token_bound(&self) -> Token {
        self.distinct_blocks * self.block_tokens
    }

    /// Iterates over the token ranges of a request's prompt, by block.
    ///
    /// # Panics
    /// Panics if the request belongs to another trace.
    pub fn token_blocks(&self, request: &TraceRequest) -> impl Iterator<Item = Range<Token>> {
        let mut rest = request.input_tokens;
        self.blocks(request).iter().map(move |&block| {
            let first = block * self.block_tokens;
            let here = rest.min(self.block_tokens);
            rest -= here;
            first..first + here
        })
    }

    /// Returns the upper bound of reuse for pages of this size.
    #[must_use]
    pub fn ceiling(&self, page_size: u32) -> Ceiling {
        let mut prefixes = Prefixes::new(self.distinct_blocks);
        // For each prefix, the used length of its last block in earlier requests.
        let mut covered: Vec<u32> = Vec::new();
        // Pages that end where a prompt ends.
        let mut last_pages = HashSet::new();
        let mut ceiling = Ceiling::default();
        // Adds a prefix of a prompt, and returns how much of it was present, and its end.
        let mut cover = |request: &TraceRequest, tokens: u32| {
            let (mut common, mut follows) = (0, true);
            let mut rest = tokens;
            let mut at = Prefixes::ROOT;
            for &block in self.blocks(request) {
                if rest == 0 {
                    break;
                }
                at = prefixes.extend(at, block);
                if at as usize >= covered.len() {
                    covered.resize(at as usize + 1, 0);
                }
                let covered = &mut covered[at as usize];
                let here = rest.min(self.block_tokens);
                if follows {
                    common += here.min(*covered);
                    follows = *covered == self.block_tokens;
                }
                *covered = here.max(*covered);
                rest -= here;
            }
            (common, at)
        };
        for request in &self.requests {
            let (common, at) = cover(request, request.input_tokens);
            let length = request.input_tokens;
            if length.is_multiple_of(page_size) {
                let is_new = last_pages.insert((at, length % self.block_tokens));
                // The request that computed it first could have reused it: the other order is
                // better.
                if is_new && common == length {
                    ceiling.any_order_tokens += u64::from(page_size);
                }
            }
            let usable = common.min(length - 1);
            let usable = usable - usable % page_size;
            ceiling.prompt_tokens += u64::from(length);
            ceiling.reusable_tokens += u64::from(usable);
            ceiling.by_request.push(usable);
            if let Some((later, tokens)) = self.with_answer(request) {
                let (known, _) = cover(later, tokens);
                // Had the answer come first, the earlier computation could have reused it.
                ceiling.any_order_tokens += u64::from(known.saturating_sub(length));
            }
        }
        ceiling.any_order_tokens += ceiling.reusable_tokens;
        ceiling
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn trace(block_tokens: u32, requests: &[(u32, &[u64])]) -> Trace {
        let mut builder = TraceBuilder::new(block_tokens).unwrap();
        for (time, (input_tokens, ids)) in (0..).zip(requests) {
            builder.push(time, *input_tokens, 1, ids).unwrap();
        }
        builder.finish()
    }

    /// Reference implementation: the longest common prefix with any earlier prompt, token by token.
    fn slow_ceiling(trace: &Trace, page_size: u32) -> u64 {
        let mut prompts: Vec<Vec<Token>> = Vec::new();
        let mut reusable = 0;
        for request in trace.requests() {
            let tokens: Vec<Token> = trace.token_blocks(request).flatten().collect();
            let common = |earlier: &Vec<Token>| {
                earlier.iter().zip(&tokens).take_while(|(one, other)| one == other).count()
            };
            let longest = prompts.iter().map(common).max().unwrap_or(0).min(tokens.len() - 1);
            reusable += (longest - longest % page_size as usize) as u64;
            let (length, answer) = (request.input_tokens, request.output_tokens - 1);
            let mut whole = tokens;
            whole.extend(trace.answer_tokens(request, length..length + answer));
            prompts.push(whole);
        }
        reusable
    }

    #[test]
    fn tokens_of_equal_blocks_are_equal_and_others_differ() {
        let trace = trace(4, &[(6, &[9, 7]), (8, &[9, u64::MAX])]);
        let blocks =
            |number: usize| trace.token_blocks(&trace.requests()[number]).collect::<Vec<_>>();
        assert_eq!(blocks(0), [0..4, 4..6]);
        assert_eq!(blocks(1), [0..4, 8..12]);
        assert_eq!(trace.token_bound(), 12);
    }

    #[test]
    fn repeated_prompt_is_reused_except_its_last_page() {
        let trace = trace(8, &[(16, &[1, 2]), (16, &[1, 2]), (12, &[1, 2])]);
        // 15 usable tokens are three pages of 4, 11 are two.
        let ceiling = trace.ceiling(4);
        assert_eq!((ceiling.prompt_tokens, ceiling.by_request), (44, vec![0, 12, 8]));
        assert_eq!(ceiling.reusable_tokens, 12 + 8);
        // The third page of the last prompt could have been computed for it alone, and reused by
        // the others.
        assert_eq!(ceiling.any_order_tokens, 12 + 8 + 4);
        assert_eq!(trace.ceiling(16).reusable_tokens, 0);
    }

    #[test]
    fn another_day_keeps_requests_and_changes_times() {
        let mut builder = TraceBuilder::new(16).unwrap();
        for number in 0..2000 {
            builder.push(number * 500, 20, 3, &[number, number + 1]).unwrap();
        }
        let trace = builder.finish();
        let days = [1, 2].map(|seed| trace.another_day(seed));
        assert!(days[0] != trace && days[0] != days[1] && days[0] == trace.another_day(1));
        for day in days {
            assert!(day.requests().is_sorted_by_key(|request| request.arrival_us));
            assert_eq!(day.ceiling(16), trace.ceiling(16));
            let ends = [&day, &trace].map(|of| of.requests().last().unwrap().arrival_us as f64);
            assert!((0.9..1.1).contains(&(ends[0] / ends[1])), "{ends:?}");
        }
    }

    fn trace_arriving_at(times_us: &[u64]) -> Trace {
        let mut builder = TraceBuilder::new(16).unwrap();
        times_us.iter().for_each(|&at_us| builder.push(at_us, 4, 1, &[1]).unwrap());
        builder.finish()
    }

    #[test]
    fn detects_rounded_arrival_times() {
        const S: u64 = 1_000_000;
        let quantum = |times_us: &[u64]| trace_arriving_at(times_us).arrival_quantum_us();
        assert_eq!(quantum(&[0, 0, 3 * S, 3 * S, 9 * S, 9 * S]), Some(3 * S));
        let jitter = [0, 3 * S - 1000, 6 * S, 9 * S, 12 * S].map(|at_us| [at_us; 2]);
        assert_eq!(quantum(jitter.as_flattened()), Some(3 * S), "times may be off by 1 %");
        assert_eq!(
            quantum(&[0, 0, 3 * S, 3 * S, 4 * S, 4 * S, 9 * S, 9 * S]),
            None,
            "one gap is no multiple"
        );
        assert_eq!(quantum(&[0, 3 * S, 6 * S]), None, "no two arrive together");
        assert_eq!(quantum(&[0, 0, 1000, 1000]), None, "milliseconds are precise enough");
        assert_eq!(quantum(&[0, 0, 0]), None, "there is no interval to spread them over");
    }

    #[test]
    fn spreads_requests_of_one_arrival_time() {
        let spread = trace_arriving_at(&[0, 0, 0, 150, 600, 600]).spread_arrivals(300);
        let times: Vec<u64> = spread.requests().iter().map(|request| request.arrival_us).collect();
        assert_eq!(times, [0, 50, 100, 150, 600, 750]);
    }

    #[test]
    fn turns_are_linked_and_contain_answers() {
        let mut builder = TraceBuilder::new(4).unwrap();
        let turn = |session| Turn { session, think_us: Some(7) };
        builder.push_turn(0, 6, 3, &[1, 2], turn(50)).unwrap();
        builder.push_turn(5, 9, 2, &[1, 2, 3], turn(50)).unwrap();
        // This turn's prompt does not begin with the earlier one.
        builder.push_turn(9, 5, 2, &[8, 9], turn(50)).unwrap();
        builder.push(7, 4, 1, &[1]).unwrap();
        let trace = builder.finish();
        let links: Vec<_> = trace.requests().iter().map(|request| request.link).collect();
        let link =
            |after, answer_in, think_us| Some(Link { session: 0, think_us, after, answer_in });
        let expected = [
            link(None, Some(1), None),
            link(Some(0), None, Some(7)),
            None,
            link(Some(1), None, Some(7)),
        ];
        assert_eq!(links, expected);
        assert!(trace.has_sessions());
        let first = &trace.requests()[0];
        // Tokens 6 and 7 of the second block, and the first of the third.
        let answer: Vec<Token> = trace.answer_tokens(first, 6..12).collect();
        assert_eq!(answer, [6, 7, 8]);
        // Eight tokens of the second turn are cached when the first is answered: two pages of 4.
        assert_eq!(trace.ceiling(4).by_request, [0, 8, 0, 0]);
    }

    /// Returns all permutations of a few requests.
    fn orders(count: usize) -> Vec<Vec<usize>> {
        let Some(last) = count.checked_sub(1) else { return vec![Vec::new()] };
        let shorter = orders(last).into_iter();
        let with_last = |order: Vec<usize>| {
            (0..count).map(move |place| {
                let mut order = order.clone();
                order.insert(place, last);
                order
            })
        };
        shorter.flat_map(with_last).collect()
    }

    proptest::proptest! {
        #[test]
        fn no_order_of_requests_reuses_more_than_the_ceiling_for_any_order(
            prompts in proptest::collection::vec(
                (proptest::collection::vec(0u64..2, 1..4), 0u32..4), 1..6),
        ) {
            let build = |order: &[usize]| {
                let mut builder = TraceBuilder::new(4).unwrap();
                for &place in order {
                    let (ids, unused) = &prompts[place];
                    builder.push(0, ids.len() as u32 * 4 - unused, 1, ids).unwrap();
                }
                builder.finish()
            };
            let orders = orders(prompts.len());
            let bound = build(&orders[0]).ceiling(2).any_order_tokens;
            for order in orders {
                let trace = build(&order);
                proptest::prop_assert!(slow_ceiling(&trace, 2) <= bound);
                proptest::prop_assert_eq!(trace.ceiling(2).any_order_tokens, bound);
            }
        }

        #[test]
        fn ceiling_includes_answers(
            page_size in proptest::sample::select(vec![1u32, 2, 4]),
            turns in proptest::collection::vec((0u64..4, 1u32..9, 1u32..9), 1..25),
        ) {
            // Sessions that share prefixes in pairs, grow by an answer and a message each turn, and
            // end in unique blocks.
            let mut builder = TraceBuilder::new(4).unwrap();
            let mut lengths = [0u32; 4];
            for (session, message, output) in turns {
                let length = &mut lengths[session as usize];
                *length += message;
                let ids: Vec<u64> = (0..u64::from(length.div_ceil(4)))
                    .map(|block| block + if block < 2 { session / 2 * 100 } else { session * 1000 })
                    .collect();
                let turn = Turn { session, think_us: None };
                builder.push_turn(0, *length, output, &ids, turn).unwrap();
                *length += output;
            }
            let trace = builder.finish();
            let expected = slow_ceiling(&trace, page_size);
            let found = trace.ceiling(page_size);
            proptest::prop_assert_eq!(found.reusable_tokens, expected);
            proptest::prop_assert!(found.any_order_tokens >= found.reusable_tokens);
        }

        #[test]
        fn ceiling_equals_the_reference(
            block_tokens in 1u32..9,
            page_size in proptest::sample::select(vec![1u32, 2, 4, 8]),
            prompts in proptest::collection::vec(
                (proptest::collection::vec(0u64..3, 1..6), 0u32..8), 1..30),
        ) {
            let mut builder = TraceBuilder::new(block_tokens).unwrap();
            for (ids, unused) in &prompts {
                let whole = ids.len() as u32 * block_tokens;
                let input_tokens = whole - unused.min(&(block_tokens - 1));
                builder.push(0, input_tokens, 1, ids).unwrap();
            }
            let trace = builder.finish();
            let expected = slow_ceiling(&trace, page_size);
            proptest::prop_assert_eq!(trace.ceiling(page_size).reusable_tokens, expected);
        }
    }
}
