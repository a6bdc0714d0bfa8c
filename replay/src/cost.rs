//! Step times by the composition of a step.

use serde::{Deserialize, Serialize};

use crate::error::ReplayError;
use crate::machine::{Gpu, ModelSpec};

/// Cost model of a step, in terms of:
///
/// ```text
/// step + max(weights + experts x share of them that is needed,
///            prefill_token x prefill tokens + decode_row x decodes)
///      + exchange_token x tokens
///      + prefill_pair x pairs + decode_context x context of the decodes
/// ```
///
/// Reading the weights and multiplying with them overlap, so the longer of the two counts. A step
/// reads the experts that its tokens select: with independent tokens, `1 - (1 -
/// expert_share)^tokens` of them. Exchanges between GPUs after each part of a layer are not
/// overlapped. A pair is a token of a prefill chunk together with one that it attends to; the
/// context of a decode is what it reads of the cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CostModel {
    /// Constant part of a step.
    pub step_ns: f64,
    /// One read of the weights that every token needs.
    pub weights_ns: f64,
    /// One read of all experts of a mixture.
    #[serde(default)]
    pub experts_ns: f64,
    /// Share of the experts that one token uses.
    #[serde(default)]
    pub expert_share: f64,
    /// Exchange between the GPUs that share the model, per token.
    #[serde(default)]
    pub exchange_token_ns: f64,
    /// Per token of a prefill chunk.
    pub prefill_token_ns: f64,
    /// Per pair of a prefill token and a token that it attends to.
    pub prefill_pair_ns: f64,
    /// Per decoding request.
    pub decode_row_ns: f64,
    /// Per token of context of a decode.
    pub decode_context_ns: f64,
}

/// The composition of a step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StepShape {
    /// Tokens of prefill chunks.
    pub prefill_tokens: u64,
    /// For each chunk, its tokens times those before it, and half its square.
    pub prefill_pairs: u64,
    /// Requests that decode.
    pub decode_rows: u64,
    /// Total context of those requests.
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

/// Share of a GPU's peak that matrix products reach.
const PRODUCT_EFFICIENCY: f64 = 0.55;
/// Share of a GPU's peak that prompt attention reaches.
const ATTENTION_EFFICIENCY: f64 = 0.40;
/// Share of a GPU's memory bandwidth that is reached.
const MEMORY_EFFICIENCY: f64 = 0.75;
/// Host time per step: launch, sampling, bookkeeping.
const STEP_OVERHEAD_NS: f64 = 500_000.0;
/// Latency of one exchange between the GPUs that share a model.
const EXCHANGE_NS: f64 = 10_000.0;
/// One after attention, one after the feed-forward part.
const EXCHANGES_PER_LAYER: f64 = 2.0;
/// Exchanged values have 16 bits.
const ACTIVATION_BYTES: f64 = 2.0;

impl CostModel {
    /// Returns the costs of a model on `tensor_parallel` GPUs, both by name.
    ///
    /// # Errors
    /// Fails if the model or the GPU is unknown, or there is no GPU.
    pub fn preset(model: &str, gpu: &str, tensor_parallel: u32) -> Result<Self, ReplayError> {
        let (model, gpu) = (ModelSpec::named(model)?, Gpu::named(gpu)?);
        if !(1..=64).contains(&tensor_parallel) {
            let value = tensor_parallel.to_string();
            let limits = "use 1 to 64";
            return Err(ReplayError::Setting { setting: "tensor_parallel", value, limits });
        }
        Ok(Self::of_machine(&model, &gpu, tensor_parallel))
    }

    /// Returns the costs of a model on `tensor_parallel` GPUs. Each part is bounded by compute,
    /// memory or the links between GPUs, at typical shares of the peak (55 % for products, 40 % for
    /// prompt attention, 75 % for memory reads).
    #[must_use]
    pub fn of_machine(model: &ModelSpec, gpu: &Gpu, tensor_parallel: u32) -> Self {
        let gpus = f64::from(tensor_parallel);
        let products = gpu.flops * gpus * PRODUCT_EFFICIENCY / 1e9;
        let attention = gpu.flops * gpus * ATTENTION_EFFICIENCY / 1e9;
        let memory = gpu.memory_bytes_per_second * MEMORY_EFFICIENCY / 1e9;
        let token_ns = 2.0 * model.active_parameters / products;
        let layers = f64::from(model.layers);
        let pair_flops = 2.0 * layers * f64::from(model.attention_width);
        let read_ns = |parameters: f64| parameters * model.weight_bytes / (memory * gpus);
        let exchanges = if tensor_parallel > 1 { EXCHANGES_PER_LAYER * layers } else { 0.0 };
        // In a ring, every GPU forwards all but its own part, first of the sums and then of the
        // results.
        let passed_on = 2.0 * (gpus - 1.0) / gpus;
        let exchanged_bytes = exchanges * f64::from(model.hidden_width) * ACTIVATION_BYTES;
        Self {
            step_ns: STEP_OVERHEAD_NS + exchanges * EXCHANGE_NS,
            weights_ns: read_ns(model.common_parameters()),
            experts_ns: read_ns(model.parameters - model.common_parameters()),
            expert_share: model.expert_share(),
            exchange_token_ns: exchanged_bytes * passed_on / gpu.exchange_bytes_per_second * 1e9,
            prefill_token_ns: token_ns,
            prefill_pair_ns: pair_flops / attention,
            decode_row_ns: token_ns,
            decode_context_ns: model.kv_bytes_per_rank(tensor_parallel) / memory,
        }
    }

    /// Returns the time of a step.
    #[must_use]
    pub fn step_ns(&self, shape: &StepShape) -> u64 {
        self.in_femtoseconds().step_ns(shape)
    }

    pub(crate) fn check(&self) -> Result<(), ReplayError> {
        let parts = [
            ("cost.step_ns", self.step_ns),
            ("cost.weights_ns", self.weights_ns),
            ("cost.experts_ns", self.experts_ns),
            ("cost.exchange_token_ns", self.exchange_token_ns),
            ("cost.prefill_token_ns", self.prefill_token_ns),
            ("cost.prefill_pair_ns", self.prefill_pair_ns),
            ("cost.decode_row_ns", self.decode_row_ns),
            ("cost.decode_context_ns", self.decode_context_ns),
        ];
        if !(0.0..=1.0).contains(&self.expert_share) {
            let value = self.expert_share.to_string();
            let limits = "use 0 to 1";
            return Err(ReplayError::Setting { setting: "cost.expert_share", value, limits });
        }
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
            experts: fs(self.experts_ns),
            expert_share: self.expert_share,
            exchange_token: fs(self.exchange_token_ns),
            prefill_token: fs(self.prefill_token_ns),
            prefill_pair: fs(self.prefill_pair_ns),
            decode_row: fs(self.decode_row_ns),
            decode_context: fs(self.decode_context_ns),
        }
    }
}

/// The cost model in integer femtoseconds, so that times are integer sums.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StepCost {
    step: u64,
    weights: u64,
    experts: u64,
    expert_share: f64,
    exchange_token: u64,
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
        let tokens = shape.prefill_tokens + shape.decode_rows;
        let read = u128::from(self.weights + self.experts_for(tokens));
        let exchange = part(self.exchange_token, tokens);
        let fs = u128::from(self.step) + products.max(read) + exchange + attention;
        // Typical times fit 64 bits, and 128-bit division is slow.
        match u64::try_from(fs) {
            Ok(fs) => fs / 1_000_000,
            Err(_) => u64::try_from(fs / 1_000_000).unwrap_or(u64::MAX),
        }
    }

    /// Returns the time to read the experts that `tokens` tokens select.
    fn experts_for(&self, tokens: u64) -> u64 {
        if self.experts == 0 {
            return 0;
        }
        // The system's `pow` differs between machines in the last digits.
        let spared = libm::pow(1.0 - self.expert_share, tokens as f64);
        (self.experts as f64 * (1.0 - spared)).round() as u64
    }

    /// Returns whole microseconds, at least one.
    pub(crate) fn step_us(&self, shape: &StepShape) -> u64 {
        self.step_ns(shape).div_ceil(1000).max(1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn decode_is_weight_bound_and_long_prefill_compute_bound() {
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
    fn chunking_keeps_the_number_of_pairs() {
        let (mut whole, mut parts) = (StepShape::default(), StepShape::default());
        whole.add_chunk(100, 50);
        parts.add_chunk(100, 20);
        parts.add_chunk(120, 30);
        assert_eq!(whole, parts);
    }

    #[test]
    fn two_gpus_are_less_than_twice_as_fast() {
        let steps = [1, 2].map(|gpus| {
            let cost = CostModel::preset("llama-3.1-70b", "h200", gpus).unwrap();
            cost.step_ns(&StepShape { decode_rows: 8, ..StepShape::default() })
        });
        assert!(steps[1] < steps[0] && steps[1] * 2 > steps[0], "{steps:?}");
    }

    fn prefill_ms(cost: &CostModel, tokens: u32) -> f64 {
        let mut shape = StepShape::default();
        shape.add_chunk(0, tokens);
        cost.step_ns(&shape) as f64 / 1e6
    }

    #[test]
    fn exchange_takes_time_per_byte() {
        // 8,192 tokens of 8,192 numbers, twice in each of 80 layers, 7/4 of it over each GPU's link.
        for (gpu, expected) in [("h100", 80.0..90.0), ("l40s", 1450.0..1600.0)] {
            let with = CostModel::preset("llama-3.1-70b", gpu, 8).unwrap();
            let without = CostModel { exchange_token_ns: 0.0, ..with };
            let exchange_ms = prefill_ms(&with, 8192) - prefill_ms(&without, 8192);
            assert!(expected.contains(&exchange_ms), "{gpu}: {exchange_ms}");
        }
        let alone = CostModel::preset("llama-3.1-8b", "h100", 1).unwrap();
        assert_eq!(alone.exchange_token_ns, 0.0);
    }

    #[test]
    fn reads_only_selected_experts() {
        let cost = CostModel::preset("deepseek-v3", "h200", 8).unwrap();
        let read_ms = |rows| {
            let shape = StepShape { decode_rows: rows, ..StepShape::default() };
            let others = cost.step_ns + cost.exchange_token_ns * rows as f64;
            (cost.step_ns(&shape) as f64 - others) / 1e6
        };
        // 37 of 671 GB for one token, at three quarters of 38.4 TB/s.
        assert!((1.2..1.4).contains(&read_ms(1)), "{}", read_ms(1));
        assert!(read_ms(8) < 8.0 * read_ms(1) && read_ms(8) > 3.0 * read_ms(1), "{}", read_ms(8));
        assert!((22.0..24.0).contains(&read_ms(256)), "{}", read_ms(256));
        assert_eq!(CostModel::preset("llama-3.1-8b", "h200", 1).unwrap().experts_ns, 0.0);
    }

    #[test]
    fn replicated_kv_is_read_by_every_gpu() {
        let context_ns =
            |model, gpus| CostModel::preset(model, "h200", gpus).unwrap().decode_context_ns;
        assert_eq!(context_ns("deepseek-v3", 8), context_ns("deepseek-v3", 1));
        assert_eq!(context_ns("llama-3.1-70b", 8) * 8.0, context_ns("llama-3.1-70b", 1));
        assert_eq!(context_ns("llama-3.1-70b", 16), context_ns("llama-3.1-70b", 8));
    }

    #[test]
    fn unknown_name_error_lists_known_names() {
        let error = CostModel::preset("gpt-9", "h100", 1).unwrap_err().to_string();
        assert!(error.contains("gpt-9") && error.contains("qwen2.5-32b"), "{error}");
    }
}
