//! The prompts of traces, as `terrace replay` reads them.

use terrace_cache::Token;
use terrace_kit::mixed;
use terrace_replay::trace::{Trace, TraceBuilder};

/// Tokens are below this, as those of usual models are.
pub(crate) const VOCABULARY: u64 = 128_000;

/// The prompts of a trace, one after the other. Every token follows from its block and its place there, without
/// a pattern, so that prompts take as long to hash and to compare as those of users. They have no more room than
/// they need: giving back what is left of it is not for the cache to do, and would count as its time.
pub fn prompts(trace: &Trace) -> impl Iterator<Item = Vec<Token>> {
    trace.requests().iter().map(|request| {
        let mut prompt = Vec::with_capacity(request.input_tokens as usize);
        let places = trace.token_blocks(request).flatten();
        prompt.extend(places.map(|place| (mixed(place.into()) % VOCABULARY) as Token));
        prompt
    })
}

/// Whole pages of all requests together: more than any cache of them can need.
#[must_use]
pub fn pages(trace: &Trace, page_size: u32) -> u32 {
    let pages = trace.requests().iter().map(|request| u64::from(request.input_tokens / page_size));
    u32::try_from(pages.sum::<u64>()).unwrap_or(u32::MAX)
}

/// Conversations that grow turn by turn behind a few common openings.
///
/// # Panics
/// Never: they are always the same, and a trace can hold them.
#[must_use]
pub fn conversations() -> Trace {
    const BLOCK_TOKENS: u32 = 512;
    let mut trace = TraceBuilder::new(BLOCK_TOKENS).expect("a usual size");
    let mut next_block = 0;
    let mut blocks = |count: u64| {
        next_block += count;
        (next_block - count..next_block).collect::<Vec<u64>>()
    };
    let openings: Vec<Vec<u64>> = (0..4).map(|_| blocks(2)).collect();
    let mut conversations: Vec<Vec<u64>> = Vec::new();
    for turn in 0..3000u64 {
        let dice = mixed(turn);
        let fresh = conversations.len() < 20 || dice.is_multiple_of(5);
        let place = if fresh {
            conversations.push(openings[(dice >> 8) as usize % openings.len()].clone());
            conversations.len() - 1
        } else {
            conversations.len() - 1 - (dice >> 16) as usize % conversations.len().min(40)
        };
        let conversation = &mut conversations[place];
        conversation.extend(blocks(1 + (dice >> 32) % 8));
        let unused = (dice >> 40) as u32 % BLOCK_TOKENS;
        let tokens = conversation.len() as u32 * BLOCK_TOKENS - unused;
        trace.push(turn, tokens, 1, conversation).expect("a usual prompt");
    }
    trace.finish()
}
