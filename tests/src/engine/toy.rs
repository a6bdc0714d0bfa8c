//! A model whose KV is a digest of the tokens so far. It detects any wrong page, and its answers
//! can be computed from the prompt alone.

use terrace_engine::{
    CpuMemory, Forward, KvLayout, KvShape, Logits, ModelError, NewWeights, Step, WeightsError,
};
use terrace_scheduler::Token;

/// Tokens in a page.
pub const PAGE_SIZE: u32 = 16;
const VOCABULARY: usize = 97;
/// A page has one disk sector.
const SHAPE: KvShape = KvShape { layers: 1, heads: 1, head_elements: 32 };

/// A toy model.
#[derive(Clone, Copy, Debug, Default)]
pub struct ToyModel {
    /// Start value of all digests. Another `ToyModel` serves as new weights of a running one.
    pub weights: u64,
}

impl ToyModel {
    /// Returns its answer to a prompt.
    #[must_use]
    pub fn answer(&self, prompt: &[Token], tokens: usize) -> Vec<Token> {
        let mut digest = prompt.iter().fold(self.weights, |digest, &token| extend(digest, token));
        let mut answer = Vec::new();
        while answer.len() < tokens {
            let token = next_token(digest);
            answer.push(token);
            digest = extend(digest, token);
        }
        answer
    }
}

/// Returns the answer of the default model to a prompt.
#[must_use]
pub fn toy_answer(prompt: &[Token], tokens: usize) -> Vec<Token> {
    ToyModel::default().answer(prompt, tokens)
}

fn extend(digest: u64, token: Token) -> u64 {
    let mixed = (digest ^ u64::from(token)).wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb)
}

fn next_token(digest: u64) -> Token {
    (digest % VOCABULARY as u64) as Token
}

/// The KV of a position: its token, and the digest of all tokens up to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Entry {
    token: Token,
    digest: u64,
}

impl Entry {
    fn to_elements(self) -> [f32; 3] {
        [self.token, self.digest as u32, (self.digest >> 32) as u32].map(f32::from_bits)
    }

    fn from_elements(elements: &[f32]) -> Self {
        let [token, low, high] = [0, 1, 2].map(|place| elements[place].to_bits());
        Self { token, digest: u64::from(low) | u64::from(high) << 32 }
    }
}

impl Forward for ToyModel {
    type Memory = CpuMemory;

    fn kv_layout(&self) -> KvLayout {
        SHAPE.layout()
    }

    fn vocabulary(&self) -> usize {
        VOCABULARY
    }

    fn positions_max(&self) -> u32 {
        4096
    }

    fn fingerprint(&self) -> String {
        format!("toy-{}", self.weights)
    }

    fn replace_weights(&mut self, weights: NewWeights) -> Result<(), WeightsError> {
        let other = weights.downcast::<ToyModel>();
        *self = *other.map_err(|_| WeightsError::Refused("it takes a `ToyModel`".to_owned()))?;
        Ok(())
    }

    fn waits_for_layers(&self) -> bool {
        true
    }

    fn forward(
        &mut self,
        memory: &CpuMemory,
        step: &Step<'_>,
        logits: &mut Logits<'_>,
    ) -> Result<(), ModelError> {
        let mut kv = memory.lend(step).map_err(|lent| ModelError(lent.to_string()))?;
        step.wait_for_layer(0).map_err(|error| ModelError(error.to_string()))?;
        for span in step.spans {
            let pages = step.pages_of(span);
            let mut digest = self.weights;
            for position in 0..span.start {
                let page = kv.read(pages[(position / PAGE_SIZE) as usize]);
                let entry = Entry::from_elements(&page[offset(position)..]);
                digest = extend(digest, entry.token);
                if entry.digest != digest {
                    // A failed step would be retried; a wrong answer is visible to the test.
                    eprintln!("wrong KV at position {position} of {span:?}");
                    digest = !digest;
                }
            }
            for (position, &token) in (span.start..).zip(step.tokens_of(span)) {
                digest = extend(digest, token);
                let page = kv.write(pages[(position / PAGE_SIZE) as usize]);
                let elements = Entry { token, digest }.to_elements();
                page[offset(position)..][..3].copy_from_slice(&elements);
                if (span.end() - position) as usize <= span.logits {
                    logits.add(1, |row| {
                        row.fill(0.0);
                        row[next_token(digest) as usize] = 1.0;
                    });
                }
            }
        }
        Ok(())
    }
}

fn offset(position: u32) -> usize {
    (position % PAGE_SIZE) as usize * SHAPE.head_elements
}
