//! Computation of page keys for a prompt in the processor's cache.

use std::hint::black_box;
use std::time::Instant;

use serde::Serialize;
use terrace_cache::{Namespace, Sequence, Token};
use terrace_kit::mixed;

use crate::figures::nanos;

/// Parameters of the benchmark.
#[derive(Clone, Copy, Debug)]
pub struct KeysWorkload {
    /// Tokens in the prompt.
    pub tokens: u32,
    /// Number of measurements for each page size; the fastest counts.
    pub rounds: u32,
}

/// Results of the benchmark, by page size.
#[derive(Clone, Debug, Serialize)]
pub struct KeysFigures {
    /// Cost for each page size.
    pub page_sizes: Vec<KeyCost>,
}

/// Cost of keys for one page size.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct KeyCost {
    /// Tokens in a page.
    pub page_size: u32,
    /// Nanoseconds per page key.
    pub ns_per_page: f64,
    /// Nanoseconds per token.
    pub ns_per_token: f64,
}

impl KeysWorkload {
    /// Hashes the same prompt repeatedly.
    #[must_use]
    pub fn run(&self) -> KeysFigures {
        let tokens = (0..u64::from(self.tokens)).map(|place| mixed(place) % 128_000);
        let tokens: Vec<Token> = tokens.map(|token| token as Token).collect();
        let sizes = [1, 4, 16, 64, 256].into_iter().filter(|&size| size <= self.tokens);
        KeysFigures { page_sizes: sizes.map(|size| self.cost(size, &tokens)).collect() }
    }

    fn cost(&self, page_size: u32, tokens: &[Token]) -> KeyCost {
        let root = Namespace::new("bench", page_size).digest();
        let rounds = (0..self.rounds).map(|_| {
            let prompt = black_box(tokens.to_vec());
            let start = Instant::now();
            let sequence = black_box(Sequence::new(root, page_size, prompt));
            let took = start.elapsed();
            drop(sequence);
            nanos(took)
        });
        let quickest = rounds.min().unwrap_or_default() as f64;
        let pages = tokens.len() / page_size as usize;
        let ns_per_token = quickest / tokens.len() as f64;
        KeyCost { page_size, ns_per_page: quickest / pages as f64, ns_per_token }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn measures_every_page_size_that_fits() {
        let sizes = |tokens| {
            let figures = KeysWorkload { tokens, rounds: 1 }.run();
            figures.page_sizes.iter().map(|cost| cost.page_size).collect::<Vec<_>>()
        };
        assert_eq!(sizes(1024), [1, 4, 16, 64, 256]);
        assert_eq!(sizes(20), [1, 4, 16]);
    }
}
