//! Request traces: lengths and the ids of 512-token blocks, one request a line, as JSON.

use std::fmt;
use std::path::Path;

use serde::Deserialize;
use terrace_cache::Token;

const BLOCK_TOKENS: usize = 512;

/// Requests in the order of their arrival.
#[derive(Clone, Debug)]
pub struct Trace {
    requests: Vec<Record>,
}

#[derive(Clone, Debug, Deserialize)]
struct Record {
    input_length: usize,
    hash_ids: Vec<u64>,
}

/// A trace that cannot be read.
#[derive(Debug)]
pub struct TraceError(String);

impl fmt::Display for TraceError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for TraceError {}

impl Trace {
    /// Reads a file with one request a line.
    ///
    /// # Errors
    /// The file or line that is not understood.
    pub fn read(path: &Path) -> Result<Self, TraceError> {
        let name = path.display();
        let text = std::fs::read_to_string(path)
            .map_err(|error| TraceError(format!("{name}: {error}")))?;
        let mut requests = Vec::new();
        for (number, line) in (1..).zip(text.lines()) {
            let record: Record = serde_json::from_str(line)
                .map_err(|error| TraceError(format!("{name}, line {number}: {error}")))?;
            if record.input_length > record.hash_ids.len() * BLOCK_TOKENS {
                return Err(TraceError(format!("{name}, line {number}: fewer blocks than tokens")));
            }
            requests.push(record);
        }
        if requests.is_empty() {
            return Err(TraceError(format!("{name} has no requests")));
        }
        Ok(Self { requests })
    }

    /// Conversations that grow turn by turn behind a few common openings.
    #[must_use]
    pub fn synthetic() -> Self {
        let mut next_block = 0;
        let mut blocks = |count: u64| {
            next_block += count;
            (next_block - count..next_block).collect::<Vec<u64>>()
        };
        let openings: Vec<Vec<u64>> = (0..4).map(|_| blocks(2)).collect();
        let mut conversations: Vec<Vec<u64>> = Vec::new();
        let mut requests = Vec::new();
        for turn in 0..3000u64 {
            let dice = splitmix64(turn);
            let fresh = conversations.len() < 20 || dice.is_multiple_of(5);
            let place = if fresh {
                conversations.push(openings[(dice >> 8) as usize % openings.len()].clone());
                conversations.len() - 1
            } else {
                conversations.len() - 1 - (dice >> 16) as usize % conversations.len().min(40)
            };
            let conversation = &mut conversations[place];
            conversation.extend(blocks(1 + (dice >> 32) % 8));
            let unused = (dice >> 40) as usize % BLOCK_TOKENS;
            requests.push(Record {
                input_length: conversation.len() * BLOCK_TOKENS - unused,
                hash_ids: conversation.clone(),
            });
        }
        Self { requests }
    }

    /// How many requests there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.requests.len()
    }

    /// Whether there is none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.requests.is_empty()
    }

    /// Whole pages of all requests together: more than any cache of them can need.
    #[must_use]
    pub fn pages(&self, page_size: u32) -> usize {
        self.requests.iter().map(|record| record.input_length / page_size as usize).sum()
    }

    /// The prompts, one after the other. Token j of block h is a fixed function of h and j.
    pub fn prompts(&self) -> impl Iterator<Item = Vec<Token>> + '_ {
        self.requests.iter().map(|record| {
            let mut tokens = Vec::with_capacity(record.hash_ids.len() * BLOCK_TOKENS);
            for &block in &record.hash_ids {
                let first = block * BLOCK_TOKENS as u64;
                let block = first..first + BLOCK_TOKENS as u64;
                tokens.extend(block.map(|place| (splitmix64(place) % 128_000) as Token));
            }
            tokens.truncate(record.input_length);
            tokens
        })
    }
}

pub(crate) fn splitmix64(seed: u64) -> u64 {
    let mut word = seed.wrapping_add(0x9E37_79B9_7F4A_7C15);
    word = (word ^ (word >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    word = (word ^ (word >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    word ^ (word >> 31)
}
