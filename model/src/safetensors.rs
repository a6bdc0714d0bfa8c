//! Files in the safetensors format: a length, a header in JSON, and the numbers. And what the parts of a model are
//! called in them.

use std::collections::BTreeMap;

use serde::Deserialize;

use crate::weights::{LayerPart, Part};

/// The largest header; models of a thousand layers have a tenth of it.
const HEADER_BYTES_MAX: u64 = 64 << 20;

/// What a file's header says of a tensor.
#[derive(Debug, Deserialize)]
pub(crate) struct TensorHeader {
    pub(crate) dtype: String,
    pub(crate) shape: Vec<usize>,
    /// Where its bytes begin and end, behind the header.
    pub(crate) data_offsets: (usize, usize),
}

#[derive(Debug, Deserialize)]
struct Header {
    /// Words about the file.
    #[serde(rename = "__metadata__", default)]
    _metadata: serde::de::IgnoredAny,
    #[serde(flatten)]
    tensors: BTreeMap<String, TensorHeader>,
}

/// The tensors that a file has, and where the numbers begin; or what is wrong with it.
pub(crate) fn read_header(bytes: &[u8]) -> Result<(BTreeMap<String, TensorHeader>, usize), String> {
    let Some((length, rest)) = bytes.split_first_chunk::<8>() else {
        return Err(format!("{} bytes are no safetensors file", bytes.len()));
    };
    let length = u64::from_le_bytes(*length);
    if length > HEADER_BYTES_MAX || length > rest.len() as u64 {
        return Err(format!(
            "its header should have {length} bytes, but the file has {}",
            rest.len()
        ));
    }
    let header = &rest[..length as usize];
    let header: Header = serde_json::from_slice(header).map_err(|error| error.to_string())?;
    Ok((header.tensors, 8 + length as usize))
}

impl TensorHeader {
    /// How many bytes the tensor has, if they lie within so many bytes of numbers; or what is wrong with it.
    pub(crate) fn len_within(
        &self,
        name: &str,
        element_bytes: usize,
        data: usize,
    ) -> Result<usize, String> {
        let (start, end) = self.data_offsets;
        let len = self.shape.iter().product::<usize>() * element_bytes;
        if end.checked_sub(start) != Some(len) {
            return Err(format!("{name} lies at {start} to {end}, but has {len} bytes"));
        }
        if end > data {
            return Err(format!(
                "{name} ends at {end}, but the file has only {data} bytes of weights"
            ));
        }
        Ok(len)
    }
}

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
