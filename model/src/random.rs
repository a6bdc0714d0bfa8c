//! A model whose weights are generated, for tests and benches. It says nothing sensible, but it computes like any
//! other model, and greedy answers are readable text that does not end.

use terrace_cache::Token;

use crate::byte_tokenizer::ByteTokenizer;
use crate::llama::Llama;
use crate::rope::{Rope, Scaling};
use crate::shape::Shape;
use crate::weights::{LayerPart, Part, WeightSource, collect};
use crate::{Loaded, Unloaded};

/// The model's name.
const NAME: &str = "terrace-random";
/// Version of everything that changes the results of the model.
const VERSION: u32 = 1;
/// Seed of the generator.
const SEED: u64 = 0x7465_7272_6163_6500 + VERSION as u64;

/// The model with random weights, computed by this number of CPU threads.
#[must_use]
pub fn random(threads: usize) -> Loaded {
    unloaded_random().on_cpu(threads)
}

/// The model with random weights, before they are generated.
#[must_use]
pub fn unloaded_random() -> Unloaded {
    let shape = shape();
    let weights = Generated::of(&shape, format!("{NAME}-{VERSION}"));
    Unloaded::of_bytes(NAME, shape, weights)
}

/// The model with random weights and fewer layers: for tests that have no time for all of them.
#[must_use]
pub fn shallow(layers: usize, threads: usize) -> Llama {
    let shape = Shape { layers, ..shape() };
    let weights = Generated::of(&shape, format!("{NAME}-{VERSION}-of-{layers}"));
    Llama::new(shape, weights.identity.clone(), threads, |shape| collect(shape, &weights))
}

/// Sizes that take a second or two for a prompt of some thousand tokens: long enough that one sees
/// what a cache is good for, and short enough to wait for.
fn shape() -> Shape {
    Shape {
        vocabulary: ByteTokenizer::VOCABULARY,
        dim: 256,
        layers: 8,
        heads: 8,
        kv_heads: 4,
        head_dim: 32,
        hidden: 1280,
        norm_epsilon: 1e-5,
        positions_max: 16_384,
        rope: Rope { theta: 10_000.0, scaling: Scaling::None },
        qkv_bias: false,
        qk_norm: false,
        tied: false,
    }
}

/// Weights from a generator that can be asked for any of them in any order.
#[derive(Debug)]
struct Generated {
    layers: usize,
    identity: String,
}

impl Generated {
    fn of(shape: &Shape, identity: String) -> Self {
        Self { layers: shape.layers, identity }
    }
}

impl WeightSource for Generated {
    fn fingerprint(&self, _shape: &Shape) -> String {
        self.identity.clone()
    }

    fn row(&self, part: Part, row: usize, out: &mut [f32]) {
        let inputs = (out.len() as f32).sqrt();
        let deep = (2.0 * self.layers as f32).sqrt();
        let scale = match part {
            Part::Embeddings => 1.0,
            // Readable text only: the logits of everything else are zero, which is less than the
            // highest of the others.
            Part::Head if is_readable(row as Token) => 4.0 / inputs,
            Part::Head => 0.0,
            Part::FinalNorm => return out.fill(1.0),
            Part::OfLayer(_, part) => match part {
                LayerPart::AttentionNorm
                | LayerPart::FeedForwardNorm
                | LayerPart::QueryNorm
                | LayerPart::KeyNorm => return out.fill(1.0),
                LayerPart::QueryBias | LayerPart::KeyBias | LayerPart::ValueBias => {
                    return out.fill(0.0);
                }
                // Scores that differ enough for heads to choose.
                LayerPart::Queries | LayerPart::Keys => 1.5 / inputs,
                LayerPart::Values | LayerPart::Gate | LayerPart::Up => 1.0 / inputs,
                // What is added to a token stays about as large as the token, however many add.
                LayerPart::AttentionOut => 4.0 / inputs / deep,
                LayerPart::Down => 2.0 / inputs / deep,
            },
        };
        let start = mix(SEED ^ (number(part) << 32 | row as u64));
        for (counter, out) in (0..).zip(out) {
            *out = scale * normal(mix(start.wrapping_add(counter)));
        }
    }
}

fn is_readable(token: Token) -> bool {
    (32..=126).contains(&token)
}

/// A number for each part of a model.
fn number(part: Part) -> u64 {
    match part {
        Part::Embeddings => 0,
        Part::FinalNorm => 1,
        Part::Head => 2,
        Part::OfLayer(layer, part) => (layer as u64 + 1) << 8 | part as u64,
    }
}

/// SplitMix64 at a place of its sequence.
fn mix(place: u64) -> u64 {
    let x = place.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// A number of mean zero and variance one: the sum of four uniform ones is near enough to normal.
fn normal(bits: u64) -> f32 {
    let sum: u64 = (0..4).map(|part| bits >> (16 * part) & 0xffff).sum();
    (sum as f32 / 65_535.0 - 2.0) * 3_f32.sqrt()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn generated_numbers_are_about_normal() {
        let numbers: Vec<f32> = (0..100_000).map(|i| normal(mix(i))).collect();
        let mean = numbers.iter().sum::<f32>() / 1e5;
        let variance = numbers.iter().map(|x| x * x).sum::<f32>() / 1e5;
        assert!(mean.abs() < 0.02 && (variance - 1.0).abs() < 0.02, "{mean} {variance}");
    }

    #[test]
    fn the_random_model_is_always_the_same() {
        let shape = shape();
        let mut row = vec![0.0; shape.dim];
        Generated::of(&shape, String::new()).row(Part::OfLayer(3, LayerPart::Keys), 17, &mut row);
        let digest = xxhash_rust::xxh3::xxh3_64(
            &row.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<u8>>(),
        );
        // A change here needs another `VERSION`, or cached KV would be taken for another
        // model's.
        assert_eq!(digest, 0x0fa4_0a18_134d_d9db);
    }
}
