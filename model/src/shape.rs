//! The shape of a Llama: its sizes and features.

use crate::rope::Rope;

/// The sizes of a model. They are checked once, when its folder is read.
#[derive(Clone, Debug, PartialEq)]
pub struct Shape {
    /// Number of tokens.
    pub vocabulary: usize,
    /// Elements of a token between layers.
    pub dim: usize,
    /// Layers.
    pub layers: usize,
    /// Query heads of a layer.
    pub heads: usize,
    /// Key and value heads of a layer. Consecutive query heads share one.
    pub kv_heads: usize,
    /// Elements of a query, key or value.
    pub head_dim: usize,
    /// Elements of a token inside the feed-forward network.
    pub hidden: usize,
    /// Number that keeps norms from dividing by zero.
    pub norm_epsilon: f32,
    /// Maximum length of a sequence, in tokens.
    pub positions_max: u32,
    /// Speed at which positions turn queries and keys.
    pub rope: Rope,
    /// Biases of queries, keys and values are added.
    pub qkv_bias: bool,
    /// The query and the key of each head are normed before positions turn them.
    pub qk_norm: bool,
    /// The embeddings are also the weights of the logits.
    pub tied: bool,
}

impl Shape {
    /// Checks the sizes.
    pub(crate) fn check(&self) -> Result<(), String> {
        // Beyond any model, and small enough that no product of three overflows.
        const SIZES: [(&str, usize); 7] = [
            ("vocab_size", 1 << 21),
            ("hidden_size", 1 << 16),
            ("num_hidden_layers", 1 << 10),
            ("num_attention_heads", 1 << 10),
            ("num_key_value_heads", 1 << 10),
            ("head_dim", 1 << 10),
            ("intermediate_size", 1 << 18),
        ];
        let found = [
            self.vocabulary,
            self.dim,
            self.layers,
            self.heads,
            self.kv_heads,
            self.head_dim,
            self.hidden,
        ];
        for ((name, max), found) in SIZES.into_iter().zip(found) {
            if !(1..=max).contains(&found) {
                return Err(format!("{name} is {found}, but must be 1 to {max}"));
            }
        }
        if !self.heads.is_multiple_of(self.kv_heads) {
            return Err(format!(
                "num_attention_heads is {}, which num_key_value_heads, {}, does not divide",
                self.heads, self.kv_heads
            ));
        }
        if !self.head_dim.is_multiple_of(2) {
            return Err(format!("head_dim is {}, but must be even", self.head_dim));
        }
        if !(1..=1 << 24).contains(&self.positions_max) {
            return Err(format!(
                "max_position_embeddings is {}, but must be 1 to {}",
                self.positions_max,
                1 << 24
            ));
        }
        if !(self.norm_epsilon >= 0.0 && self.norm_epsilon < 1.0) {
            return Err(format!(
                "rms_norm_eps is {}, but must be 0 to 1, without 1",
                self.norm_epsilon
            ));
        }
        self.rope.check()
    }

    /// Query heads that share a key and value head.
    #[must_use]
    pub fn group(&self) -> usize {
        self.heads / self.kv_heads
    }

    /// Elements of all queries of a token in a layer.
    #[must_use]
    pub fn queries(&self) -> usize {
        self.heads * self.head_dim
    }

    /// Elements of all keys, or all values, of a token in a layer.
    #[must_use]
    pub fn keys(&self) -> usize {
        self.kv_heads * self.head_dim
    }

    /// Elements of queries, keys and values of a token in a layer.
    #[must_use]
    pub fn qkv(&self) -> usize {
        self.queries() + 2 * self.keys()
    }

    /// Angle by which each of a head's pairs of elements turns from one position to the next, in radians. A pair is an
    /// element of the head's first half and one of its second.
    #[must_use]
    pub fn frequencies(&self) -> Vec<f32> {
        self.rope.frequencies(self.head_dim)
    }
}
