//! Tiny models in folders.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use half::{bf16, f16};
use serde_json::{Value, json};
use tempfile::TempDir;
use terrace_kit::Dice;
use terrace_model::{LoadError, Loaded, load};

/// Formats of a folder's weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Dtype {
    F32,
    F16,
    Bf16,
}

/// A tensor: its shape and numbers.
#[derive(Clone, Debug)]
pub(crate) struct Tensor {
    pub(crate) shape: Vec<usize>,
    pub(crate) numbers: Vec<f32>,
}

/// Contents of a folder.
#[derive(Clone, Debug)]
pub(crate) struct Folder {
    pub(crate) config: Value,
    pub(crate) tensors: BTreeMap<String, Tensor>,
    pub(crate) dtype: Dtype,
    /// Files that the weights are spread over.
    pub(crate) shards: usize,
    pub(crate) tokenizer: Value,
}

impl Folder {
    /// A Llama with heads whose sizes are no powers of two.
    pub(crate) fn llama() -> Self {
        Self::new(json!({
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": 300,
            "hidden_size": 44,
            "num_hidden_layers": 2,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "head_dim": 10,
            "intermediate_size": 52,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 4096,
            "rope_theta": 10000.0,
            "hidden_act": "silu",
            "tie_word_embeddings": false,
            "eos_token_id": 262,
        }))
    }

    /// A Qwen2: biases, tied embeddings.
    pub(crate) fn qwen2() -> Self {
        Self::new(json!({
            "architectures": ["Qwen2ForCausalLM"],
            "model_type": "qwen2",
            "vocab_size": 270,
            "hidden_size": 32,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "intermediate_size": 48,
            "rms_norm_eps": 1e-6,
            "max_position_embeddings": 2048,
            // One pair of each kind: fast, slow, and in between.
            "rope_theta": 400.0,
            "use_sliding_window": false,
            "sliding_window": 32,
            "hidden_act": "silu",
            "tie_word_embeddings": true,
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        }))
    }

    /// A Qwen3: norms of queries and keys, heads that are wider than their share of the width.
    pub(crate) fn qwen3() -> Self {
        Self::new(json!({
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "vocab_size": 270,
            "hidden_size": 32,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 18,
            "intermediate_size": 48,
            "rms_norm_eps": 1e-6,
            "max_position_embeddings": 2048,
            "rope_theta": 1_000_000.0,
            "attention_bias": false,
            "use_sliding_window": false,
            "sliding_window": null,
            "hidden_act": "silu",
            "tie_word_embeddings": true,
            "rope_scaling": null,
            "eos_token_id": [262, 261],
        }))
    }

    fn new(config: Value) -> Self {
        let size = |name: &str| config[name].as_u64().map(|size| size as usize);
        let (dim, hidden) = (size("hidden_size").unwrap(), size("intermediate_size").unwrap());
        let (heads, kv_heads) =
            (size("num_attention_heads").unwrap(), size("num_key_value_heads").unwrap());
        let head_dim = size("head_dim").unwrap_or(dim / heads);
        let vocabulary = size("vocab_size").unwrap();
        let mut dice = Dice::new(1);
        let mut tensors = BTreeMap::new();
        let mut add = |name: String, shape: Vec<usize>| {
            let about = if name.contains("norm") { 1.0 } else { 0.0 };
            let scale = match shape[..] {
                [_, inputs] if !name.contains("embed") => 2.0 / (inputs as f32).sqrt(),
                _ => 0.5,
            };
            // Numbers that half-precision formats have too.
            let number =
                |dice: &mut Dice| bf16::from_f32(about + scale * dice.around_zero()).to_f32();
            let numbers = (0..shape.iter().product()).map(|_| number(&mut dice)).collect();
            tensors.insert(name, Tensor { shape, numbers });
        };
        add("model.embed_tokens.weight".to_owned(), vec![vocabulary, dim]);
        add("model.norm.weight".to_owned(), vec![dim]);
        if config["tie_word_embeddings"] == false {
            add("lm_head.weight".to_owned(), vec![vocabulary, dim]);
        }
        for layer in 0..size("num_hidden_layers").unwrap() {
            let mut add = |name: &str, shape| add(format!("model.layers.{layer}.{name}"), shape);
            add("input_layernorm.weight", vec![dim]);
            add("post_attention_layernorm.weight", vec![dim]);
            for (name, heads) in [("q", heads), ("k", kv_heads), ("v", kv_heads)] {
                add(&format!("self_attn.{name}_proj.weight"), vec![heads * head_dim, dim]);
                if config["model_type"] == "qwen2" {
                    add(&format!("self_attn.{name}_proj.bias"), vec![heads * head_dim]);
                }
            }
            if config["model_type"] == "qwen3" {
                add("self_attn.q_norm.weight", vec![head_dim]);
                add("self_attn.k_norm.weight", vec![head_dim]);
            }
            add("self_attn.o_proj.weight", vec![dim, heads * head_dim]);
            add("mlp.gate_proj.weight", vec![hidden, dim]);
            add("mlp.up_proj.weight", vec![hidden, dim]);
            add("mlp.down_proj.weight", vec![dim, hidden]);
        }
        Self { config, tensors, dtype: Dtype::F32, shards: 1, tokenizer: tokenizer() }
    }

    /// Writes everything to a new folder.
    pub(crate) fn write(&self) -> TempDir {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path();
        write_json(&path.join("config.json"), &self.config);
        write_json(&path.join("tokenizer.json"), &self.tokenizer);
        if self.shards == 1 {
            let bytes = self.safetensors(|_| true);
            fs::write(path.join("model.safetensors"), bytes).unwrap();
            return folder;
        }
        let shard_of: BTreeMap<&String, usize> =
            self.tensors.keys().enumerate().map(|(i, name)| (name, i % self.shards)).collect();
        let file = |shard: usize| format!("model-{shard}.safetensors");
        for shard in 0..self.shards {
            let bytes = self.safetensors(|name| shard_of[name] == shard);
            fs::write(path.join(file(shard)), bytes).unwrap();
        }
        let map: BTreeMap<_, _> = shard_of.iter().map(|(name, s)| (name, file(*s))).collect();
        let index = json!({ "metadata": {}, "weight_map": map });
        write_json(&path.join("model.safetensors.index.json"), &index);
        folder
    }

    pub(crate) fn load(&self) -> Result<Loaded, LoadError> {
        load(self.write().path(), 2)
    }

    pub(crate) fn safetensors(&self, chosen: impl Fn(&String) -> bool) -> Vec<u8> {
        let (mut header, mut data) = (serde_json::Map::new(), Vec::new());
        header.insert("__metadata__".to_owned(), json!({ "format": "pt" }));
        for (name, tensor) in self.tensors.iter().filter(|(name, _)| chosen(name)) {
            let start = data.len();
            for number in &tensor.numbers {
                match self.dtype {
                    Dtype::F32 => data.extend(number.to_le_bytes()),
                    Dtype::F16 => data.extend(f16::from_f32(*number).to_le_bytes()),
                    Dtype::Bf16 => data.extend(bf16::from_f32(*number).to_le_bytes()),
                }
            }
            let dtype = format!("{:?}", self.dtype).to_uppercase();
            let offsets = [start, data.len()];
            let entry = json!({ "dtype": dtype, "shape": tensor.shape, "data_offsets": offsets });
            header.insert(name.clone(), entry);
        }
        let header = serde_json::to_vec(&header).unwrap();
        let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
        bytes.extend(header);
        bytes.extend(data);
        bytes
    }
}

pub(crate) fn write_json(path: &Path, value: &Value) {
    fs::write(path, serde_json::to_vec(value).unwrap()).unwrap();
}

/// A tokenizer of bytes and a few merges, as byte-level tokenizers are written: every byte has a
/// printable character that stands for it.
pub(crate) fn tokenizer() -> Value {
    let byte = |byte: u8| -> String { stand_in(byte).to_string() };
    let mut vocabulary: BTreeMap<String, u32> =
        (0..=255).map(|b: u8| (byte(b), u32::from(b))).collect();
    let pairs = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("Ġ", "w")];
    let mut merges = Vec::new();
    for (id, (left, right)) in (256..).zip(pairs) {
        vocabulary.insert(format!("{left}{right}"), id);
        merges.push(format!("{left} {right}"));
    }
    let special = |id: u32, content: &str| {
        json!({
            "id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false, "special": true,
        })
    };
    json!({
        "version": "1.0",
        "truncation": { "direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0 },
        "padding": null,
        "added_tokens": [special(261, "<|begin|>"), special(262, "<|end|>")],
        "normalizer": null,
        "pre_tokenizer": { "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true },
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [
                { "SpecialToken": { "id": "<|begin|>", "type_id": 0 } },
                { "Sequence": { "id": "A", "type_id": 0 } },
            ],
            "pair": [{ "Sequence": { "id": "A", "type_id": 0 } }, { "Sequence": { "id": "B", "type_id": 1 } }],
            "special_tokens": { "<|begin|>": { "id": "<|begin|>", "ids": [261], "tokens": ["<|begin|>"] } },
        },
        "decoder": { "type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true },
        "model": {
            "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false,
            "vocab": vocabulary, "merges": merges,
        },
    })
}

/// The character that stands for a byte: itself where it is printable, else one from 256 on.
fn stand_in(byte: u8) -> char {
    let printable = |b: &u8| matches!(b, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
    if printable(&byte) {
        return char::from(byte);
    }
    let before = (0..byte).filter(|b| !printable(b)).count() as u32;
    char::from_u32(256 + before).unwrap()
}
