//! Construction of a trace, request by request.

use terrace_cache::HashedMap;

use super::{Trace, TraceRequest, Turn};

/// Largest number of tokens in a prompt or an answer.
pub const TOKENS_MAX: u32 = 16 << 20;

/// Largest number of tokens in a block.
const BLOCK_TOKENS_MAX: u32 = 65_536;

/// Largest number of distinct tokens in all prompts: ids have 32 bits, with room for the tokens of
/// answers.
const DISTINCT_TOKENS_MAX: u64 = u32::MAX as u64 - (1 << 28);

/// Largest number of blocks in all prompts: 2 GiB of memory.
const BLOCKS_MAX: usize = 1 << 29;

/// Largest number of requests.
const REQUESTS_MAX: usize = 1 << 26;

/// Builder of a [`Trace`].
#[derive(Debug)]
pub struct TraceBuilder {
    trace: Trace,
    numbers: HashedMap<u64, u32>,
    /// Session turns, by the index of their request in order of insertion.
    turns: HashedMap<u32, Turn>,
}

impl TraceBuilder {
    /// Creates a builder for blocks of `block_tokens` tokens.
    ///
    /// # Errors
    /// Fails if the size is invalid.
    pub fn new(block_tokens: u32) -> Result<Self, String> {
        if !(1..=BLOCK_TOKENS_MAX).contains(&block_tokens) {
            return Err(format!(
                "blocks of {block_tokens} tokens: use 1 to {BLOCK_TOKENS_MAX} tokens per block"
            ));
        }
        let trace =
            Trace { block_tokens, distinct_blocks: 0, blocks: Vec::new(), requests: Vec::new() };
        Ok(Self { trace, numbers: HashedMap::default(), turns: HashedMap::default() })
    }

    /// Adds a request whose prompt has these blocks. An answer has at least one token, since a
    /// prefill yields one.
    ///
    /// # Errors
    /// Fails if the request is invalid; nothing is added then.
    pub fn push(
        &mut self,
        arrival_us: u64,
        input_tokens: u32,
        output_tokens: u32,
        block_ids: &[u64],
    ) -> Result<(), String> {
        let trace = &mut self.trace;
        for (what, tokens) in [("a prompt", input_tokens), ("an output", output_tokens)] {
            if tokens > TOKENS_MAX {
                return Err(format!(
                    "{what} of {tokens} tokens is too long; the maximum is {TOKENS_MAX}"
                ));
            }
        }
        if input_tokens == 0 {
            return Err("a prompt without tokens; remove such requests".to_owned());
        }
        let needed = input_tokens.div_ceil(trace.block_tokens) as usize;
        if block_ids.len() != needed {
            return Err(format!(
                "{} block ids for a prompt of {input_tokens} tokens, which has {needed} blocks of {} \
                 tokens; is that the block size of this trace?",
                block_ids.len(),
                trace.block_tokens
            ));
        }
        let distinct_tokens =
            (u64::from(trace.distinct_blocks) + needed as u64) * u64::from(trace.block_tokens);
        if distinct_tokens > DISTINCT_TOKENS_MAX {
            return Err(format!(
                "more than {DISTINCT_TOKENS_MAX} distinct tokens in one trace; split it"
            ));
        }
        if trace.blocks.len() + needed > BLOCKS_MAX || trace.requests.len() == REQUESTS_MAX {
            return Err(format!(
                "more than {REQUESTS_MAX} requests or {BLOCKS_MAX} blocks in one trace; split it"
            ));
        }
        let start = trace.blocks.len() as u32;
        for &id in block_ids {
            let number = *self.numbers.entry(id).or_insert(trace.distinct_blocks);
            trace.distinct_blocks += u32::from(number == trace.distinct_blocks);
            trace.blocks.push(number);
        }
        let blocks = start..trace.blocks.len() as u32;
        let output_tokens = output_tokens.max(1);
        let request = TraceRequest { arrival_us, input_tokens, output_tokens, blocks, link: None };
        trace.requests.push(request);
        Ok(())
    }

    /// Adds a turn of a session, which waits for the answer to the turn before it. If its prompt
    /// begins with the whole earlier prompt, the continuation is that answer and a new message, so
    /// the answer can be reused.
    ///
    /// # Errors
    /// Same as [`TraceBuilder::push`].
    pub fn push_turn(
        &mut self,
        arrival_us: u64,
        input_tokens: u32,
        output_tokens: u32,
        block_ids: &[u64],
        turn: Turn,
    ) -> Result<(), String> {
        let place = self.trace.requests.len() as u32;
        self.push(arrival_us, input_tokens, output_tokens, block_ids)?;
        self.turns.insert(place, turn);
        Ok(())
    }

    /// Returns the number of tokens in a block.
    #[must_use]
    pub fn block_tokens(&self) -> u32 {
        self.trace.block_tokens
    }

    /// Returns the number of requests so far.
    #[must_use]
    pub fn len(&self) -> usize {
        self.trace.requests.len()
    }

    /// Returns whether there are no requests yet.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.trace.requests.is_empty()
    }

    /// Returns the trace, sorted by arrival and, within one time, by insertion, with times relative
    /// to the first.
    #[must_use]
    pub fn finish(self) -> Trace {
        let mut trace = self.trace;
        let mut order: Vec<u32> = (0..trace.requests.len() as u32).collect();
        order.sort_by_key(|&place| trace.requests[place as usize].arrival_us);
        trace.requests.sort_by_key(|request| request.arrival_us);
        let turn = |(place, added): (u32, &u32)| Some((place, *self.turns.get(added)?));
        let turns: Vec<(u32, Turn)> = (0..).zip(&order).filter_map(turn).collect();
        trace.connect_turns(&turns);
        let first_us = trace.requests.first().map_or(0, |request| request.arrival_us);
        trace.requests.iter_mut().for_each(|request| request.arrival_us -= first_us);
        trace.blocks.shrink_to_fit();
        trace
    }
}
