//! The model that comes with the program. It was trained on books of fields, to answer questions about their rows; how
//! is in `docs/answering-model.md`. Its weights are part of the program, so there is nothing to download.

use std::collections::BTreeMap;
use std::ops::Range;

use safetensors::tensor::{Dtype, SafeTensors};
use xxhash_rust::xxh3::xxh3_128;

use crate::byte_tokenizer::ByteTokenizer;
use crate::rope::{Rope, Scaling};
use crate::shape::Shape;
use crate::tensor_names::name_of;
use crate::weights::{Part, WeightSource};
use crate::{Loaded, Unloaded};

/// The name under which the model is known.
const NAME: &str = "terrace-built-in";
/// What `model/answers/train.py` has written.
const WEIGHTS: &[u8] = include_bytes!("../answers/model.safetensors");

/// The model that comes with the program, on so many threads of the CPU.
#[must_use]
pub fn built_in(threads: usize) -> Loaded {
    unloaded_built_in().on_cpu(threads)
}

/// The model that comes with the program, before its weights are unpacked.
#[must_use]
pub fn unloaded_built_in() -> Unloaded {
    let shape = shape();
    let weights = Trained::of(&shape);
    Unloaded::of_bytes(NAME, shape, weights)
}

/// The sizes that it was trained with.
fn shape() -> Shape {
    Shape {
        vocabulary: ByteTokenizer::VOCABULARY,
        dim: 256,
        layers: 6,
        heads: 6,
        kv_heads: 3,
        head_dim: 64,
        hidden: 448,
        norm_epsilon: 1e-5,
        // It has seen 4,096 at the most. Longer prompts are computed like any others, but what it says about
        // them is less often right.
        positions_max: 16_384,
        rope: Rope { theta: 500_000.0, scaling: Scaling::None },
        qkv_bias: false,
        qk_norm: false,
        tied: true,
    }
}

/// Weights in the program, all of them in bf16.
#[derive(Debug)]
struct Trained {
    /// Where in `WEIGHTS` each part lies.
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
