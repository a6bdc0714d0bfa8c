//! A model that costs nothing and yet depends on every token before: it keeps tokens as its KV and
//! reads them back, so that KV that got lost or mixed up changes the answer.

use std::time::Duration;

use terrace_engine::{CpuMemory, Forward, KvLayout, KvShape, Logits, ModelError, Step};
use terrace_scheduler::Token;

/// Ends an answer; comes only after a prompt that ends with an exclamation mark.
const END: usize = 257;
const VOCABULARY: usize = 262;
const SHAPE: KvShape = KvShape { layers: 1, heads: 1, head_elements: 4 };

#[derive(Debug, Default)]
pub(crate) struct Toy {
    /// How long a step takes.
    pub(crate) step: Duration,
    /// What it says, if that is decided.
    pub(crate) speech: Option<Speech>,
}

/// An answer that is always the same.
#[derive(Debug)]
pub(crate) struct Speech {
    /// The token that a prompt ends with, which is nowhere in the answer.
    pub(crate) after: Token,
    /// The answer, with what ends it.
    pub(crate) tokens: Vec<Token>,
}

impl Speech {
    /// What comes after so many tokens.
    fn next(&self, read: impl Fn(u32) -> u64, end: u32) -> Token {
        let is_prompt = |place: &u32| read(end - 1 - place) == u64::from(self.after);
        let said = (0..end).find(is_prompt).expect("the prompt ends with its mark");
        self.tokens[said as usize]
    }
}

impl Forward for Toy {
    type Memory = CpuMemory;

    fn kv_layout(&self) -> KvLayout {
        SHAPE.layout()
    }

    fn vocabulary(&self) -> usize {
        VOCABULARY
    }

    fn positions_max(&self) -> u32 {
        100_000
    }

    fn fingerprint(&self) -> String {
        "toy".to_owned()
    }

    fn forward(
        &mut self,
        memory: &CpuMemory,
        step: &Step<'_>,
        logits: &mut Logits<'_>,
    ) -> Result<(), ModelError> {
        std::thread::sleep(self.step);
        let page_size = step.table.page_size();
        let place = |position: u32| {
            let element = (position % page_size) as usize * SHAPE.head_elements;
            ((position / page_size) as usize, SHAPE.keys_at(0, 0, page_size) + element)
        };
        let mut pages = memory.lend(step).map_err(|lent| ModelError(lent.to_string()))?;
        for span in step.spans {
            let table = step.pages_of(span);
            for (position, token) in (span.start..).zip(step.tokens_of(span)) {
                let (page, element) = place(position);
                pages.write(table[page])[element] = *token as f32;
            }
            let read = |position| {
                let (page, element) = place(position);
                pages.read(table[page])[element] as u64
            };
            let mut hash = 7;
            for position in 0..span.end() {
                hash = mix(hash ^ read(position));
                if (span.end() - position) as usize <= span.logits {
                    let ends = read(position) == u64::from(b'!');
                    let said = self.speech.as_ref().map(|speech| speech.next(read, position + 1));
                    let logit = |token: usize| match said {
                        Some(said) if said as usize == token => 100.0,
                        Some(_) => -100.0,
                        None => logit(hash, token, ends),
                    };
                    logits.add(1, |row| {
                        (0..).zip(row).for_each(|(token, out)| *out = logit(token));
                    });
                }
            }
        }
        Ok(())
    }
}

fn logit(hash: u64, token: usize, ends: bool) -> f32 {
    match token {
        END if ends => 100.0,
        // Readable text without exclamation marks.
        34..=126 => mix(hash ^ token as u64) as f32 / u64::MAX as f32 * 8.0,
        _ => -100.0,
    }
}

fn mix(x: u64) -> u64 {
    let x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}
