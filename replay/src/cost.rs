//! How long a step takes, and what a token weighs: from presets of models and GPUs.

use serde::{Deserialize, Serialize};

use crate::error::ReplayError;

/// How long a step takes:
///
/// ```text
/// step + max(weights, prefill_token x prefill tokens + decode_row x decodes)
///      + prefill_pair x pairs + decode_context x context of the decodes
/// ```
///
/// Reading the weights and multiplying with them overlap, so the longer of the two counts. A pair is
/// a token of a prefill chunk together with one that it attends to; the context of a decode is what
/// it reads of the cache.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CostModel {
    /// Every step.
    pub step_ns: f64,
    /// Reading the weights once.
    pub weights_ns: f64,
    /// Each token of a prefill chunk.
    pub prefill_token_ns: f64,
    /// Each pair of a token of a prefill chunk and one up to it.
    pub prefill_pair_ns: f64,
    /// Each request that decodes.
    pub decode_row_ns: f64,
    /// Each token before those that decode.
    pub decode_context_ns: f64,
}

/// What a step consists of, as far as its cost goes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StepShape {
    /// Tokens of prefill chunks.
    pub prefill_tokens: u64,
    /// For each chunk, its tokens times those before it, and half its square.
    pub prefill_pairs: u64,
    /// Requests that decode.
    pub decode_rows: u64,
    /// The tokens before those.
    pub decode_context: u64,
}

impl StepShape {
    /// Adds a chunk that starts at a position.
    pub fn add_chunk(&mut self, start: u32, tokens: u32) {
        let (start, tokens) = (u64::from(start), u64::from(tokens));
        self.prefill_tokens += tokens;
        self.prefill_pairs += tokens * start + tokens * (tokens + 1) / 2;
    }
}

/// A model, as far as its cost goes.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Model {
    /// Its name on the command line.
    pub name: &'static str,
    /// All its weights.
    pub parameters: f64,
    /// The weights that one token is multiplied with; fewer for a mixture of experts.
    pub active_parameters: f64,
    /// Bytes of one weight.
    pub weight_bytes: f64,
    /// Its layers.
    pub layers: u32,
    /// Numbers that one layer keeps for a token: keys and values of its KV heads, or the latent.
    pub kv_values_per_layer: u32,
    /// Bytes of one of those.
    pub kv_value_bytes: u32,
    /// Attention heads times the width of key and value together.
    pub attention_width: u32,
}

/// A GPU, as far as its cost goes.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Gpu {
    /// Its name on the command line.
    pub name: &'static str,
    /// Dense floating-point operations a second, in 16 bits.
    pub flops: f64,
    /// Bytes that it reads from its memory in a second.
    pub memory_bytes_per_second: f64,
    /// Bytes of its memory.
    pub memory_bytes: u64,
    /// Bytes that it exchanges with the host in a second, each way.
    pub host_bytes_per_second: u64,
    /// Bytes that the network adapter beside it carries in a second, each way.
    pub network_bytes_per_second: u64,
}

/// The share of a GPU's peak that matrix products reach.
const PRODUCT_EFFICIENCY: f64 = 0.55;
/// The share of a GPU's peak that attention over a prompt reaches.
const ATTENTION_EFFICIENCY: f64 = 0.40;
/// The share of a GPU's memory bandwidth that is reached.
const MEMORY_EFFICIENCY: f64 = 0.75;
/// What every step takes on the host: launching, sampling, bookkeeping.
const STEP_OVERHEAD_NS: f64 = 500_000.0;
/// One exchange of results between the GPUs that share a model; each layer has two.
const EXCHANGE_NS: f64 = 10_000.0;
/// The share of a GPU's memory that weights and KV may fill.
const MEMORY_SHARE: f64 = 0.9;

impl Model {
    /// Llama 3.1, 8 billion parameters.
    pub const LLAMA_3_1_8B: Self = Self::plain("llama-3.1-8b", 8.03e9, 32, 32, 8, 128);
    /// Llama 3.1, 70 billion parameters.
    pub const LLAMA_3_1_70B: Self = Self::plain("llama-3.1-70b", 70.6e9, 80, 64, 8, 128);
    /// Every model that is known by name.
    pub const ALL: [Self; 7] = [
        Self::LLAMA_3_1_8B,
        Self::LLAMA_3_1_70B,
        Self::plain("qwen2.5-7b", 7.62e9, 28, 28, 4, 128),
        Self::plain("qwen2.5-32b", 32.8e9, 64, 40, 8, 128),
        Self::plain("qwen2.5-72b", 72.7e9, 80, 64, 8, 128),
        Self::plain("mistral-7b", 7.25e9, 32, 32, 8, 128),
        // Latent attention: 512 numbers and 64 for the position, whatever the number of heads. Its
        // weights are 8 bits wide; products are priced as 16 bits.
        Self {
            name: "deepseek-v3",
            parameters: 671e9,
            active_parameters: 37e9,
            weight_bytes: 1.0,
            layers: 61,
            kv_values_per_layer: 576,
            kv_value_bytes: 2,
            attention_width: 128 * (192 + 128),
        },
    ];

    const fn plain(
        name: &'static str,
        parameters: f64,
        layers: u32,
        heads: u32,
        kv_heads: u32,
        head_width: u32,
    ) -> Self {
        Self {
            name,
            parameters,
            active_parameters: parameters,
            weight_bytes: 2.0,
            layers,
            kv_values_per_layer: 2 * kv_heads * head_width,
            kv_value_bytes: 2,
            attention_width: heads * 2 * head_width,
        }
    }

    /// The model of this name.
    ///
    /// # Errors
    /// If there is none: which there are.
    pub fn named(name: &str) -> Result<Self, ReplayError> {
        find("model", name, &Self::ALL, |model| model.name)
    }

    /// Bytes of KV for one token, over all ranks.
    #[must_use]
    pub fn kv_bytes_per_token(&self) -> u64 {
        u64::from(self.layers)
            * u64::from(self.kv_values_per_layer)
            * u64::from(self.kv_value_bytes)
    }

    /// Tokens whose KV fits beside the weights, with a tenth of the memory left for other things;
    /// none if the weights do not fit.
    #[must_use]
    pub fn device_tokens(&self, gpu: &Gpu, tensor_parallel: u32) -> u64 {
        let memory = gpu.memory_bytes as f64 * f64::from(tensor_parallel) * MEMORY_SHARE;
        let left = memory - self.parameters * self.weight_bytes;
        (left.max(0.0) / self.kv_bytes_per_token() as f64) as u64
    }
}

impl Gpu {
    /// Nvidia A100 with 80 GB.
    pub const A100: Self = Self::new("a100", 312e12, 2.04e12, 80, 25, 25);
    /// Nvidia H100, SXM.
    pub const H100: Self = Self::new("h100", 989e12, 3.35e12, 80, 55, 50);
    /// Nvidia H200.
    pub const H200: Self = Self::new("h200", 989e12, 4.8e12, 141, 55, 50);
    /// Nvidia B200.
    pub const B200: Self = Self::new("b200", 2250e12, 8.0e12, 180, 55, 50);
    /// Nvidia L40S.
    pub const L40S: Self = Self::new("l40s", 362e12, 0.864e12, 48, 25, 25);
    /// Every GPU that is known by name.
    pub const ALL: [Self; 5] = [Self::A100, Self::H100, Self::H200, Self::B200, Self::L40S];

    const fn new(
        name: &'static str,
        flops: f64,
        memory_bytes_per_second: f64,
        memory_gb: u64,
        host_gb_per_second: u64,
        network_gb_per_second: u64,
    ) -> Self {
        Self {
            name,
            flops,
            memory_bytes_per_second,
            memory_bytes: memory_gb * 1_000_000_000,
            host_bytes_per_second: host_gb_per_second * 1_000_000_000,
            network_bytes_per_second: network_gb_per_second * 1_000_000_000,
        }
    }

    /// The GPU of this name.
    ///
    /// # Errors
    /// If there is none: which there are.
    pub fn named(name: &str) -> Result<Self, ReplayError> {
        find("GPU", name, &Self::ALL, |gpu| gpu.name)
    }
}

fn find<T: Copy>(
    kind: &'static str,
    name: &str,
    all: &[T],
    name_of: impl Fn(&T) -> &'static str,
) -> Result<T, ReplayError> {
    let known = || all.iter().map(&name_of).collect::<Vec<_>>().join(", ");
    let found = all.iter().find(|one| name_of(one).eq_ignore_ascii_case(name));
    found.copied().ok_or_else(|| ReplayError::UnknownPreset {
        kind,
        name: name.to_owned(),
        known: known(),
    })
}

impl CostModel {
    /// The costs of a model on so many GPUs, both by name.
    ///
    /// # Errors
    /// If model or GPU is not known, or there is no GPU.
    pub fn preset(model: &str, gpu: &str, tensor_parallel: u32) -> Result<Self, ReplayError> {
        let (model, gpu) = (Model::named(model)?, Gpu::named(gpu)?);
        if !(1..=64).contains(&tensor_parallel) {
            let value = tensor_parallel.to_string();
            let limits = "use 1 to 64";
            return Err(ReplayError::Setting { setting: "tensor_parallel", value, limits });
        }
        Ok(Self::of_machine(&model, &gpu, tensor_parallel))
    }

    /// The costs of a model on so many GPUs: what bounds each part, compute or memory, at the share
    /// of the peak that such kernels reach (55 % for products, 40 % for attention over a prompt, 75 %
    /// for reading memory).
    #[must_use]
    pub fn of_machine(model: &Model, gpu: &Gpu, tensor_parallel: u32) -> Self {
        let gpus = f64::from(tensor_parallel);
        let products = gpu.flops * gpus * PRODUCT_EFFICIENCY / 1e9;
        let attention = gpu.flops * gpus * ATTENTION_EFFICIENCY / 1e9;
        let memory = gpu.memory_bytes_per_second * gpus * MEMORY_EFFICIENCY / 1e9;
        let token_ns = 2.0 * model.active_parameters / products;
        let exchanges = if tensor_parallel > 1 { 2.0 * f64::from(model.layers) } else { 0.0 };
        let pair_flops = 2.0 * f64::from(model.layers) * f64::from(model.attention_width);
        Self {
            step_ns: STEP_OVERHEAD_NS + exchanges * EXCHANGE_NS,
            weights_ns: model.parameters * model.weight_bytes / memory,
            prefill_token_ns: token_ns,
            prefill_pair_ns: pair_flops / attention,
            decode_row_ns: token_ns,
            decode_context_ns: model.kv_bytes_per_token() as f64 / memory,
        }
    }

    /// How long a step takes.
    #[must_use]
    pub fn step_ns(&self, shape: &StepShape) -> u64 {
        self.in_femtoseconds().step_ns(shape)
    }

    pub(crate) fn check(&self) -> Result<(), ReplayError> {
        let parts = [
            ("cost.step_ns", self.step_ns),
            ("cost.weights_ns", self.weights_ns),
            ("cost.prefill_token_ns", self.prefill_token_ns),
            ("cost.prefill_pair_ns", self.prefill_pair_ns),
            ("cost.decode_row_ns", self.decode_row_ns),
            ("cost.decode_context_ns", self.decode_context_ns),
        ];
        match parts.iter().find(|(_, ns)| !(0.0..=1e12).contains(ns)) {
            Some((setting, ns)) => Err(ReplayError::Setting {
                setting,
                value: ns.to_string(),
                limits: "use 0 to 1e12 nanoseconds",
            }),
            None => Ok(()),
        }
    }

    pub(crate) fn in_femtoseconds(&self) -> StepCost {
        let fs = |ns: f64| (ns * 1e6).round() as u64;
        StepCost {
            step: fs(self.step_ns),
            weights: fs(self.weights_ns),
            prefill_token: fs(self.prefill_token_ns),
            prefill_pair: fs(self.prefill_pair_ns),
            decode_row: fs(self.decode_row_ns),
            decode_context: fs(self.decode_context_ns),
        }
    }
}

/// The same in whole femtoseconds, so that time is a sum of integers.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StepCost {
    step: u64,
    weights: u64,
    prefill_token: u64,
    prefill_pair: u64,
    decode_row: u64,
    decode_context: u64,
}

impl StepCost {
    pub(crate) fn step_ns(&self, shape: &StepShape) -> u64 {
        let part = |fs: u64, count: u64| u128::from(fs) * u128::from(count);
        let products = part(self.prefill_token, shape.prefill_tokens)
            + part(self.decode_row, shape.decode_rows);
        let attention = part(self.prefill_pair, shape.prefill_pairs)
            + part(self.decode_context, shape.decode_context);
        let fs = u128::from(self.step) + products.max(self.weights.into()) + attention;
        // Steps take less than hours, and long divisions are slow.
        match u64::try_from(fs) {
            Ok(fs) => fs / 1_000_000,
            Err(_) => u64::try_from(fs / 1_000_000).unwrap_or(u64::MAX),
        }
    }

    /// In whole microseconds, at least one.
    pub(crate) fn step_us(&self, shape: &StepShape) -> u64 {
        self.step_ns(shape).div_ceil(1000).max(1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kv_of_a_token_weighs_what_its_layers_keep() {
        assert_eq!(Model::LLAMA_3_1_8B.kv_bytes_per_token(), 128 * 1024);
        assert_eq!(Model::LLAMA_3_1_70B.kv_bytes_per_token(), 320 * 1024);
        assert_eq!(Model::named("DeepSeek-V3").unwrap().kv_bytes_per_token(), 61 * 576 * 2);
    }

    #[test]
    fn a_decode_waits_for_the_weights_and_a_long_prefill_for_the_products() {
        let cost = CostModel::preset("llama-3.1-8b", "h100", 1).unwrap();
        let one = StepShape { decode_rows: 1, decode_context: 1, ..StepShape::default() };
        let ms = cost.step_ns(&one) as f64 / 1e6;
        assert!((6.0..8.0).contains(&ms), "{ms}");
        let mut long = StepShape::default();
        long.add_chunk(0, 8192);
        let ms = cost.step_ns(&long) as f64 / 1e6;
        assert!((230.0..310.0).contains(&ms), "{ms}");
    }

    #[test]
    fn chunks_cost_what_the_whole_costs_in_pairs() {
        let (mut whole, mut parts) = (StepShape::default(), StepShape::default());
        whole.add_chunk(100, 50);
        parts.add_chunk(100, 20);
        parts.add_chunk(120, 30);
        assert_eq!(whole, parts);
    }

    #[test]
    fn two_gpus_are_faster_than_one_but_not_twice() {
        let steps = [1, 2].map(|gpus| {
            let cost = CostModel::preset("llama-3.1-70b", "h200", gpus).unwrap();
            cost.step_ns(&StepShape { decode_rows: 8, ..StepShape::default() })
        });
        assert!(steps[1] < steps[0] && steps[1] * 2 > steps[0], "{steps:?}");
    }

    #[test]
    fn an_unknown_name_is_answered_with_those_that_are_known() {
        let error = CostModel::preset("gpt-9", "h100", 1).unwrap_err().to_string();
        assert!(error.contains("gpt-9") && error.contains("qwen2.5-32b"), "{error}");
    }
}
