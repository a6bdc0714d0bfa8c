//! What the parts of a model are called in files of weights.

use crate::weights::{LayerPart, Part};

/// The name of a part in files.
pub(crate) fn name_of(part: Part) -> String {
    match part {
        Part::Embeddings => "model.embed_tokens.weight".to_owned(),
        Part::FinalNorm => "model.norm.weight".to_owned(),
        Part::Head => "lm_head.weight".to_owned(),
        Part::OfLayer(layer, part) => {
            let part = match part {
                LayerPart::AttentionNorm => "input_layernorm.weight",
                LayerPart::Queries => "self_attn.q_proj.weight",
                LayerPart::Keys => "self_attn.k_proj.weight",
                LayerPart::Values => "self_attn.v_proj.weight",
                LayerPart::QueryBias => "self_attn.q_proj.bias",
                LayerPart::KeyBias => "self_attn.k_proj.bias",
                LayerPart::ValueBias => "self_attn.v_proj.bias",
                LayerPart::QueryNorm => "self_attn.q_norm.weight",
                LayerPart::KeyNorm => "self_attn.k_norm.weight",
                LayerPart::AttentionOut => "self_attn.o_proj.weight",
                LayerPart::FeedForwardNorm => "post_attention_layernorm.weight",
                LayerPart::Gate => "mlp.gate_proj.weight",
                LayerPart::Up => "mlp.up_proj.weight",
                LayerPart::Down => "mlp.down_proj.weight",
            };
            format!("model.layers.{layer}.{part}")
        }
    }
}
