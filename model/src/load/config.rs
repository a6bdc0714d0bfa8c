//! `config.json`: the sizes and features of a model.

use std::path::{Path, PathBuf};

use serde::Deserialize;
use terrace_cache::Token;

use super::{LoadError, parse, read};
use crate::rope::{Rope, Scaling};
use crate::shape::Shape;

/// The contents of `config.json`.
#[derive(Debug)]
pub(super) struct Config {
    pub(super) path: PathBuf,
    pub(super) shape: Shape,
    /// The tokens that end an answer, unless `generation_config.json` says otherwise.
    pub(super) stop_tokens: Vec<Token>,
}

/// The kind of the model. Other kinds have other fields, so this is parsed first.
#[derive(Debug, Deserialize)]
struct Kind {
    architectures: Option<Vec<String>>,
    model_type: Option<String>,
}

/// The fields that are read. Others do not change results.
#[derive(Debug, Deserialize)]
struct Fields {
    vocab_size: usize,
    hidden_size: usize,
    num_hidden_layers: usize,
    num_attention_heads: usize,
    num_key_value_heads: Option<usize>,
    head_dim: Option<usize>,
    intermediate_size: usize,
    rms_norm_eps: Option<f64>,
    max_position_embeddings: u32,
    rope_theta: Option<f64>,
    rope_scaling: Option<RopeFields>,
    /// All about positions, in newer folders.
    rope_parameters: Option<RopeFields>,
    hidden_act: Option<String>,
    tie_word_embeddings: Option<bool>,
    attention_bias: Option<bool>,
    mlp_bias: Option<bool>,
    use_sliding_window: Option<bool>,
    sliding_window: Option<u64>,
    eos_token_id: Option<TokenIds>,
    quantization_config: Option<serde_json::Value>,
}

#[derive(Debug, Default, Deserialize)]
struct RopeFields {
    rope_theta: Option<f64>,
    rope_type: Option<String>,
    /// Name of `rope_type` in older folders.
    #[serde(rename = "type")]
    old_type: Option<String>,
    factor: Option<f64>,
    low_freq_factor: Option<f64>,
    high_freq_factor: Option<f64>,
    original_max_position_embeddings: Option<f64>,
}

/// One token or several.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
pub(super) enum TokenIds {
    One(Token),
    Several(Vec<Token>),
}

impl TokenIds {
    pub(super) fn into_vec(self) -> Vec<Token> {
        match self {
            Self::One(token) => vec![token],
            Self::Several(tokens) => tokens,
        }
    }
}

/// Supported families of models.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Family {
    Llama,
    Mistral,
    Qwen2,
    Qwen3,
}

/// Reads `config.json`.
pub(super) fn read_config(folder: &Path) -> Result<Config, LoadError> {
    let path = folder.join("config.json");
    let advice = "a model folder must have one; is this the right folder?";
    let json = read(&path, advice)?;
    let family = family(&parse(&path, &json)?)
        .map_err(|problem| LoadError::Architecture { path: path.clone(), problem })?;
    let fields: Fields = parse(&path, &json)?;
    let unsupported = |problem: String| LoadError::Unsupported { path: path.clone(), problem };
    refuse(&fields, family).map_err(unsupported)?;
    let rope = rope(&fields).map_err(unsupported)?;
    let heads = fields.num_attention_heads;
    let head_dim_if_absent = match family {
        Family::Llama | Family::Mistral | Family::Qwen2 => {
            fields.hidden_size.checked_div(heads).unwrap_or(0)
        }
        // The width of a Qwen3 does not follow from its heads.
        Family::Qwen3 => 128,
    };
    let shape = Shape {
        vocabulary: fields.vocab_size,
        dim: fields.hidden_size,
        layers: fields.num_hidden_layers,
        heads,
        kv_heads: fields.num_key_value_heads.unwrap_or(heads),
        head_dim: fields.head_dim.unwrap_or(head_dim_if_absent),
        hidden: fields.intermediate_size,
        norm_epsilon: fields.rms_norm_eps.unwrap_or(1e-6) as f32,
        positions_max: fields.max_position_embeddings,
        rope,
        qkv_bias: family == Family::Qwen2,
        qk_norm: family == Family::Qwen3,
        tied: fields.tie_word_embeddings.unwrap_or(false),
    };
    shape.check().map_err(|problem| LoadError::Size { path: path.clone(), problem })?;
    let stop_tokens = fields.eos_token_id.map_or_else(Vec::new, TokenIds::into_vec);
    Ok(Config { path, shape, stop_tokens })
}

fn family(kind: &Kind) -> Result<Family, String> {
    let architecture = kind.architectures.as_deref().and_then(<[String]>::first);
    match (architecture.map(String::as_str), kind.model_type.as_deref()) {
        (Some("LlamaForCausalLM"), _) | (None, Some("llama")) => Ok(Family::Llama),
        (Some("MistralForCausalLM"), _) | (None, Some("mistral")) => Ok(Family::Mistral),
        (Some("Qwen2ForCausalLM"), _) | (None, Some("qwen2")) => Ok(Family::Qwen2),
        (Some("Qwen3ForCausalLM"), _) | (None, Some("qwen3")) => Ok(Family::Qwen3),
        (Some(other), Some(model_type)) => {
            Err(format!("the architecture {other}, of model_type {model_type}, is not supported"))
        }
        (Some(other), None) => Err(format!("the architecture {other} is not supported")),
        (None, Some(other)) => Err(format!("the model_type {other} is not supported")),
        (None, None) => Err("neither architectures nor model_type is given".to_owned()),
    }
}

/// Refuses features that are not supported.
fn refuse(fields: &Fields, family: Family) -> Result<(), String> {
    match fields.hidden_act.as_deref() {
        None | Some("silu" | "swish") => {}
        Some(other) => return Err(format!("hidden_act {other} is not supported")),
    }
    if fields.quantization_config.is_some() {
        return Err("quantised weights are not supported".to_owned());
    }
    if fields.attention_bias == Some(true) && family != Family::Qwen2 {
        return Err("attention_bias is not supported".to_owned());
    }
    if fields.mlp_bias == Some(true) {
        return Err("mlp_bias is not supported".to_owned());
    }
    let slides = match family {
        Family::Llama => false,
        Family::Qwen2 | Family::Qwen3 => fields.use_sliding_window == Some(true),
        // A window as long as the context has no effect.
        Family::Mistral => fields
            .sliding_window
            .is_some_and(|window| window < u64::from(fields.max_position_embeddings)),
    };
    if slides {
        return Err("attention through a sliding window is not supported".to_owned());
    }
    Ok(())
}

fn rope(fields: &Fields) -> Result<Rope, String> {
    let none = RopeFields::default();
    let scaling = fields.rope_scaling.as_ref().or(fields.rope_parameters.as_ref()).unwrap_or(&none);
    let theta = fields.rope_parameters.as_ref().and_then(|rope| rope.rope_theta);
    let theta = fields.rope_theta.or(theta).unwrap_or(10_000.0);
    let needed = |value: Option<f64>, name: &str| {
        value.ok_or_else(|| format!("rope scaling without {name} is not supported"))
    };
    let rope_type = scaling.rope_type.as_deref().or(scaling.old_type.as_deref());
    let scaling = match rope_type.unwrap_or("default") {
        "default" => Scaling::None,
        "linear" => Scaling::Linear { factor: needed(scaling.factor, "factor")? },
        "llama3" => Scaling::Llama3 {
            factor: needed(scaling.factor, "factor")?,
            low_frequency: needed(scaling.low_freq_factor, "low_freq_factor")?,
            high_frequency: needed(scaling.high_freq_factor, "high_freq_factor")?,
            original_positions: needed(
                scaling.original_max_position_embeddings,
                "original_max_position_embeddings",
            )?,
        },
        other => return Err(format!("rope scaling of type {other} is not supported")),
    };
    Ok(Rope { theta, scaling })
}
