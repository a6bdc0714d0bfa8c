//! The prompts of traces in the formats of `terrace replay`.

use terrace_cache::Token;
use terrace_kit::mixed;
use terrace_replay::trace::{Trace, TraceBuilder};

/// Upper bound of tokens, typical of models.
pub(crate) const VOCABULARY: u64 = 128_000;

/// Iterates over the prompts of a trace. Every token is a pseudo-random function of its block and
/// place, so that prompts take as long to hash and to compare as real ones. They have no spare
/// capacity: the cache would free it, and that would count as its time.
pub fn prompts(trace: &Trace) -> impl Iterator<Item = Vec<Token>> {
    trace.requests().iter().map(|request| {
        let mut prompt = Vec::with_capacity(request.input_tokens as usize);
        let places = trace.token_blocks(request).flatten();
        prompt.extend(places.map(|place| (mixed(place.into()) % VOCABULARY) as Token));
        prompt
    })
}

/// Returns the whole pages of all requests together: more than any cache of them needs.
#[must_use]
pub fn pages(trace: &Trace, page_size: u32) -> u32 {
    let pages = trace.requests().iter().map(|request| u64::from(request.input_tokens / page_size));
    u32::try_from(pages.sum::<u64>()).unwrap_or(u32::MAX)
}

/// Creates conversations that grow turn by turn behind a few shared prefixes.
///
/// # Panics
/// Never: the parameters are constant and valid.
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
