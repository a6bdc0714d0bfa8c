//! Models and GPUs known by name, and the sizes derived from them.

use serde::Serialize;

use crate::error::ReplayError;

/// A model, as far as its cost depends on it.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct ModelSpec {
    /// Name on the command line.
    pub name: &'static str,
    /// Number of weights.
    pub parameters: f64,
    /// Number of weights used for one token; smaller for a mixture of experts.
    pub active_parameters: f64,
    /// Experts of a layer; 1 without a mixture.
    pub experts: u32,
    /// Experts that a token uses.
    pub experts_per_token: u32,
    /// Bytes of one weight.
    pub weight_bytes: f64,
    /// Number of layers.
    pub layers: u32,
    /// Values per token between layers.
    pub hidden_width: u32,
    /// Values per token within the feed-forward part of a layer.
    pub inner_width: u32,
    /// Size of the vocabulary.
    pub vocabulary: u32,
    /// Heads with separate keys and values; 1 for a latent, which all heads share.
    pub kv_heads: u32,
    /// True if keys and values are separate; a latent is both.
    pub has_keys_and_values: bool,
    /// Values that one layer caches per token: keys and values of its KV heads, or the latent.
    pub kv_values_per_layer: u32,
    /// Bytes of a cached value.
    pub kv_value_bytes: u32,
    /// Attention heads times the width of key and value together.
    pub attention_width: u32,
}

/// A GPU, as far as costs depend on it.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Gpu {
    /// Name on the command line.
    pub name: &'static str,
    /// Dense 16-bit floating-point operations per second.
    pub flops: f64,
    /// Memory bandwidth.
    pub memory_bytes_per_second: f64,
    /// Memory available to programs, in bytes.
    pub memory_bytes: u64,
    /// Bandwidth to and from other GPUs of the machine.
    pub exchange_bytes_per_second: f64,
    /// Bandwidth to and from the host in one large copy.
    pub host_bytes_per_second: u64,
    /// Bandwidth of its network adapter, each way.
    pub network_bytes_per_second: u64,
    /// Price of an hour, including its share of the machine except host memory.
    pub hour_price: f64,
}

/// Share of GPU memory that engines use by default. The rest is for the driver, libraries and
/// fragmentation.
const MEMORY_SHARE: f64 = 0.9;
/// Memory of recorded step launches on each GPU.
const GRAPH_BYTES: f64 = (1u64 << 30) as f64;
/// Rows whose logits are computed at once.
const LOGIT_ROWS: f64 = 256.0;

impl ModelSpec {
    /// Llama 3.1, 8 billion parameters.
    pub const LLAMA_3_1_8B: Self =
        Self::plain("llama-3.1-8b", 8.03e9, [32, 4096, 14_336, 128_256], [32, 8]);
    /// Llama 3.1, 70 billion parameters.
    pub const LLAMA_3_1_70B: Self =
        Self::plain("llama-3.1-70b", 70.6e9, [80, 8192, 28_672, 128_256], [64, 8]);
    /// All known models.
    pub const ALL: [Self; 7] = [
        Self::LLAMA_3_1_8B,
        Self::LLAMA_3_1_70B,
        Self::plain("qwen2.5-7b", 7.62e9, [28, 3584, 18_944, 152_064], [28, 4]),
        Self::plain("qwen2.5-32b", 32.8e9, [64, 5120, 27_648, 152_064], [40, 8]),
        Self::plain("qwen2.5-72b", 72.7e9, [80, 8192, 29_568, 152_064], [64, 8]),
        Self::plain("mistral-7b", 7.25e9, [32, 4096, 14_336, 32_768], [32, 8]),
        // Latent attention: 512 values and 64 for the position, whatever the number of heads. The
        // weights have 8 bits; products are priced as 16 bits.
        Self {
            name: "deepseek-v3",
            parameters: 671e9,
            active_parameters: 37e9,
            experts: 256,
            experts_per_token: 8,
            weight_bytes: 1.0,
            layers: 61,
            hidden_width: 7168,
            inner_width: 18_432,
            vocabulary: 129_280,
            kv_heads: 1,
            has_keys_and_values: false,
            kv_values_per_layer: 576,
            kv_value_bytes: 2,
            attention_width: 128 * (192 + 128),
        },
    ];

    /// Creates a model with heads of width 128 and 16-bit weights: its layers, hidden width, inner
    /// width and vocabulary, and its heads and KV heads.
    const fn plain(name: &'static str, parameters: f64, shape: [u32; 4], heads: [u32; 2]) -> Self {
        let [layers, hidden_width, inner_width, vocabulary] = shape;
        let [heads, kv_heads] = heads;
        let head_width = 128;
        Self {
            name,
            parameters,
            active_parameters: parameters,
            experts: 1,
            experts_per_token: 1,
            weight_bytes: 2.0,
            layers,
            hidden_width,
            inner_width,
            vocabulary,
            kv_heads,
            has_keys_and_values: true,
            kv_values_per_layer: 2 * kv_heads * head_width,
            kv_value_bytes: 2,
            attention_width: heads * 2 * head_width,
        }
    }

    /// Returns the model of a name.
    ///
    /// # Errors
    /// Fails if it is unknown; the error lists the known ones.
    pub fn named(name: &str) -> Result<Self, ReplayError> {
        find("model", name, &Self::ALL, |model| model.name)
    }

    /// Returns the bytes of KV per token, not counting copies on other ranks.
    #[must_use]
    pub fn kv_bytes_per_token(&self) -> u64 {
        u64::from(self.layers)
            * u64::from(self.kv_values_per_layer)
            * u64::from(self.kv_value_bytes)
    }

    /// Returns the number of distinct parts into which the KV of a token is divided among GPUs. A
    /// KV head is not divided, so with fewer heads than GPUs several GPUs hold the same part.
    #[must_use]
    pub fn kv_parts(&self, tensor_parallel: u32) -> f64 {
        let heads_per_rank = self.kv_heads.div_ceil(tensor_parallel.max(1));
        f64::from(self.kv_heads) / f64::from(heads_per_rank)
    }

    /// Returns the bytes of KV per token on one GPU.
    #[must_use]
    pub fn kv_bytes_per_rank(&self, tensor_parallel: u32) -> f64 {
        self.kv_bytes_per_token() as f64 / self.kv_parts(tensor_parallel)
    }

    /// Returns the consecutive bytes of a page in GPU memory, where every layer has separate arrays
    /// for keys and values.
    #[must_use]
    pub fn piece_bytes(&self, page_size: u32, tensor_parallel: u32) -> u64 {
        let arrays = if self.has_keys_and_values { 2.0 } else { 1.0 } * f64::from(self.layers);
        (self.kv_bytes_per_rank(tensor_parallel) * f64::from(page_size) / arrays) as u64
    }

    /// Returns the share of the experts that a token uses; 0 without a mixture.
    #[must_use]
    pub fn expert_share(&self) -> f64 {
        match self.experts {
            0 | 1 => 0.0,
            experts => f64::from(self.experts_per_token) / f64::from(experts),
        }
    }

    /// Returns the number of weights that every token needs; the others belong to experts.
    #[must_use]
    pub fn common_parameters(&self) -> f64 {
        let share = self.expert_share();
        if share == 0.0 {
            return self.parameters;
        }
        let experts = (self.parameters - self.active_parameters) / (1.0 - share);
        self.parameters - experts
    }

    /// Returns the bytes that a GPU needs for a step: activations between and within layers, and
    /// logits.
    #[must_use]
    pub fn activation_bytes(&self, step_tokens: u32, tensor_parallel: u32) -> f64 {
        let gpus = f64::from(tensor_parallel.max(1));
        // Input, output, residual and norm between layers; two products within.
        let numbers = 4.0 * f64::from(self.hidden_width) + 2.0 * f64::from(self.inner_width) / gpus;
        let logits = LOGIT_ROWS * f64::from(self.vocabulary) * 4.0;
        f64::from(step_tokens) * numbers * 2.0 + logits
    }

    /// Returns the number of tokens whose KV fits beside the weights, activations and recorded
    /// launches, in nine tenths of the memory; 0 if the weights do not fit.
    #[must_use]
    pub fn device_tokens(&self, gpu: &Gpu, tensor_parallel: u32, step_tokens: u32) -> u64 {
        let weights = self.parameters * self.weight_bytes / f64::from(tensor_parallel.max(1));
        let left = gpu.memory_bytes as f64 * MEMORY_SHARE
            - weights
            - self.activation_bytes(step_tokens, tensor_parallel)
            - GRAPH_BYTES;
        (left.max(0.0) / self.kv_bytes_per_rank(tensor_parallel)) as u64
    }
}

impl Gpu {
    /// Nvidia A100 with 80 GB.
    pub const A100: Self = Self {
        name: "a100",
        flops: 312e12,
        memory_bytes_per_second: 2.04e12,
        memory_bytes: 81_050 * MIB,
        exchange_bytes_per_second: 300e9,
        host_bytes_per_second: 25_000_000_000,
        network_bytes_per_second: 25_000_000_000,
        hour_price: 1.6,
    };
    /// Nvidia H100, SXM.
    pub const H100: Self = Self {
        name: "h100",
        flops: 989e12,
        memory_bytes_per_second: 3.35e12,
        memory_bytes: 81_000 * MIB,
        exchange_bytes_per_second: 450e9,
        host_bytes_per_second: 55_000_000_000,
        network_bytes_per_second: 50_000_000_000,
        hour_price: 2.5,
    };
    /// Nvidia H200.
    pub const H200: Self = Self {
        name: "h200",
        memory_bytes_per_second: 4.8e12,
        memory_bytes: 143_150 * MIB,
        hour_price: 3.2,
        ..Self::H100
    };
    /// Nvidia B200.
    pub const B200: Self = Self {
        name: "b200",
        flops: 2250e12,
        memory_bytes_per_second: 8.0e12,
        memory_bytes: 182_600 * MIB,
        exchange_bytes_per_second: 900e9,
        hour_price: 5.0,
        ..Self::H100
    };
    /// Nvidia L40S; GPUs communicate over PCIe.
    pub const L40S: Self = Self {
        name: "l40s",
        flops: 362e12,
        memory_bytes_per_second: 0.864e12,
        memory_bytes: 45_500 * MIB,
        exchange_bytes_per_second: 25e9,
        host_bytes_per_second: 25_000_000_000,
        network_bytes_per_second: 25_000_000_000,
        hour_price: 1.0,
    };
    /// All known GPUs.
    pub const ALL: [Self; 5] = [Self::A100, Self::H100, Self::H200, Self::B200, Self::L40S];

    /// Returns the GPU of a name.
    ///
    /// # Errors
    /// Fails if it is unknown; the error lists the known ones.
    pub fn named(name: &str) -> Result<Self, ReplayError> {
        find("GPU", name, &Self::ALL, |gpu| gpu.name)
    }
}

const MIB: u64 = 1 << 20;

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

#[cfg(test)]
mod tests {
    use super::*;

    fn deepseek() -> ModelSpec {
        ModelSpec::named("DeepSeek-V3").unwrap()
    }

    #[test]
    fn kv_bytes_match_the_layers() {
        assert_eq!(ModelSpec::LLAMA_3_1_8B.kv_bytes_per_token(), 128 * 1024);
        assert_eq!(ModelSpec::LLAMA_3_1_70B.kv_bytes_per_token(), 320 * 1024);
        assert_eq!(deepseek().kv_bytes_per_token(), 61 * 576 * 2);
    }

    #[test]
    fn kv_heads_are_not_divided() {
        let llama = ModelSpec::LLAMA_3_1_70B;
        assert_eq!([1, 2, 8, 16].map(|gpus| llama.kv_parts(gpus)), [1.0, 2.0, 8.0, 8.0]);
        assert_eq!([1, 8].map(|gpus| deepseek().kv_parts(gpus)), [1.0, 1.0]);
    }

    #[test]
    fn replicated_kv_counts_once() {
        let tokens = deepseek().device_tokens(&Gpu::H200, 8, 8192);
        assert!((500_000..800_000).contains(&tokens), "{tokens}");
        let alone = ModelSpec::LLAMA_3_1_8B.device_tokens(&Gpu::H100, 1, 8192);
        assert!((400_000..480_000).contains(&alone), "{alone}");
        let larger_steps = ModelSpec::LLAMA_3_1_8B.device_tokens(&Gpu::H100, 1, 65_536);
        assert!(larger_steps < alone - 20_000, "{larger_steps}");
        assert_eq!(ModelSpec::LLAMA_3_1_70B.device_tokens(&Gpu::L40S, 1, 8192), 0);
    }

    #[test]
    fn experts_and_common_weights_add_up() {
        let model = deepseek();
        let experts = model.parameters - model.common_parameters();
        let active = model.common_parameters() + experts * model.expert_share();
        assert!((active / model.active_parameters - 1.0).abs() < 1e-9);
        assert!((15e9..18e9).contains(&model.common_parameters()));
        assert_eq!(ModelSpec::LLAMA_3_1_8B.common_parameters(), 8.03e9);
    }

    #[test]
    fn pieces_are_keys_or_values_of_one_layer() {
        assert_eq!(ModelSpec::LLAMA_3_1_8B.piece_bytes(16, 1), 32 << 10);
        assert_eq!(ModelSpec::LLAMA_3_1_8B.piece_bytes(16, 4), 8 << 10);
        assert_eq!(deepseek().piece_bytes(64, 8), 64 * 576 * 2);
    }
}
