//! The built-in model. It answers questions about the rows of record books, and was trained for that; see
//! `docs/answering-model.md`. The program contains its weights, so there is nothing to download.

use std::collections::BTreeMap;
use std::ops::Range;

use safetensors::tensor::{Dtype, SafeTensors};
use serde::Deserialize;
use xxhash_rust::xxh3::xxh3_128;

use crate::byte_tokenizer::ByteTokenizer;
use crate::rope::{Rope, Scaling};
use crate::shape::Shape;
use crate::tensor_names::name_of;
use crate::weights::{Part, WeightSource};
use crate::{Loaded, Unloaded};

/// The model's name.
const NAME: &str = "terrace-built-in";
/// The weights, as `model/answers/train.py` writes them.
const WEIGHTS: &[u8] = include_bytes!("../answers/model.safetensors");
/// The sizes of the model and its measured accuracy, as `train.py` and `evaluate.py` write them.
const DESCRIPTION: &str = include_str!("../answers/model.json");

/// The accuracy of the built-in model's answers about the keepers of rows, for names that it was not trained on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BuiltInAccuracy {
    /// The longest text, in tokens, for which the accuracy holds. It is the model's context length.
    pub context_tokens: u32,
    /// Questions that were asked, at the length with the fewest right answers; none before a measurement.
    pub asked: u32,
    /// How many answers were right to the byte.
    pub right: u32,
}

impl BuiltInAccuracy {
    /// The share of right answers in percent, rounded down to a tenth; none before a measurement.
    #[must_use]
    pub fn percent(&self) -> Option<f64> {
        let per_mille = (u64::from(self.right) * 1000).checked_div(u64::from(self.asked))?;
        Some(per_mille as f64 / 10.0)
    }
}

/// The measured accuracy of the built-in model.
#[must_use]
pub fn built_in_accuracy() -> BuiltInAccuracy {
    let Description { context_tokens, measured, .. } = Description::read();
    let Measured { asked, right } = measured.unwrap_or_default();
    BuiltInAccuracy { context_tokens, asked, right }
}

/// The contents of `model.json`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Description {
    shape: Sizes,
    context_tokens: u32,
    measured: Option<Measured>,
}

/// The sizes that training chooses.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Sizes {
    dim: usize,
    layers: usize,
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    hidden: usize,
    rope_theta: f64,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct Measured {
    asked: u32,
    right: u32,
}

impl Description {
    fn read() -> Self {
        serde_json::from_str(DESCRIPTION).expect("the program's own description can be parsed")
    }
}

/// The built-in model, computed by this number of CPU threads.
#[must_use]
pub fn built_in(threads: usize) -> Loaded {
    unloaded_built_in().on_cpu(threads)
}

/// The built-in model, before its weights are unpacked.
#[must_use]
pub fn unloaded_built_in() -> Unloaded {
    let shape = shape();
    let weights = Trained::of(&shape);
    Unloaded::of_bytes(NAME, shape, weights)
}

/// The sizes of the model.
fn shape() -> Shape {
    let Description { shape: sizes, context_tokens, .. } = Description::read();
    Shape {
        vocabulary: ByteTokenizer::VOCABULARY,
        dim: sizes.dim,
        layers: sizes.layers,
        heads: sizes.heads,
        kv_heads: sizes.kv_heads,
        head_dim: sizes.head_dim,
        hidden: sizes.hidden,
        norm_epsilon: 1e-5,
        positions_max: context_tokens,
        rope: Rope { theta: sizes.rope_theta, scaling: Scaling::None },
        qkv_bias: false,
        qk_norm: false,
        tied: true,
    }
}

/// Weights in the program, all in bf16.
#[derive(Debug)]
struct Trained {
    /// The bytes of each part in `WEIGHTS`.
    parts: BTreeMap<Part, Range<usize>>,
}

impl Trained {
    fn of(shape: &Shape) -> Self {
        let fits = "the weights in the program fit its model";
        let (length, header) = SafeTensors::read_metadata(WEIGHTS).expect(fits);
        let start = size_of::<u64>() + length;
        let parts = Part::all(shape).map(|part| {
            let name = name_of(part);
            let tensor = header.info(&name).expect(fits);
            let (rows, columns) = part.size(shape);
            let expected: Vec<usize> = rows.into_iter().chain([columns]).collect();
            assert_eq!((tensor.dtype, &tensor.shape), (Dtype::BF16, &expected), "{name}");
            let (first, end) = tensor.data_offsets;
            (part, start + first..start + end)
        });
        Self { parts: parts.collect() }
    }
}

impl WeightSource for Trained {
    fn fingerprint(&self, shape: &Shape) -> String {
        let sizes = format!("{shape:?}");
        format!("{NAME}-{:016x}{:032x}", xxh3_128(sizes.as_bytes()) as u64, xxh3_128(WEIGHTS))
    }

    fn row(&self, part: Part, row: usize, out: &mut [f32]) {
        let bytes = &WEIGHTS[self.parts[&part].clone()][2 * row * out.len()..];
        for (out, bytes) in out.iter_mut().zip(bytes.as_chunks().0) {
            // A bf16 is the upper half of an f32.
            *out = f32::from_bits(u32::from(u16::from_le_bytes(*bytes)) << 16);
        }
    }

    fn as_bf16(&self, part: Part) -> Option<&[u8]> {
        Some(&WEIGHTS[self.parts[&part].clone()])
    }
}
