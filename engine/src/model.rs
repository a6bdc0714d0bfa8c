//! What the engine asks of a model.

use crate::batch::Batch;
use crate::logits::Logits;

/// Computes forward steps. It runs on a thread of its own and may take as long as it needs.
///
/// The KV that it writes for a token, and the logits after it, must be a function of the tokens up to
/// there and nothing else, to the bit: not of how a prompt was cut into spans, of the other spans of a
/// batch, or of where pages lie. Whether KV was computed or loaded can then not be seen in an answer.
pub trait Model: Send + 'static {
    /// The device memory that the model reads and writes KV in.
    type Memory;

    /// How much KV a token has.
    fn kv_shape(&self) -> KvShape;

    /// How many tokens there are.
    fn vocabulary(&self) -> usize;

    /// The longest sequence that the model was made for.
    fn positions_max(&self) -> u32;

    /// Names model and weights: different weights have different fingerprints.
    fn fingerprint(&self) -> String;

    /// Computes the spans of a batch: writes the KV of their tokens to their pages, and gives to
    /// `logits` one row of [`Model::vocabulary`] values for each token after which a span wants logits,
    /// in order.
    ///
    /// # Errors
    /// When the step came to nothing. It may be tried again.
    fn forward(
        &mut self,
        memory: &Self::Memory,
        batch: &Batch<'_>,
        logits: &mut Logits<'_>,
    ) -> Result<(), ModelError>;
}

/// A step that came to nothing.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the model could not compute a step: {0}")]
pub struct ModelError(pub String);

/// How much KV a token has.
///
/// A page holds, for each layer and each KV head, the keys of its tokens and then their values:
/// `[layer][head][key or value][token][element]`, all of them `f32`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvShape {
    /// Layers of the model.
    pub layers: usize,
    /// Key and value heads of a layer.
    pub heads: usize,
    /// Elements of a key or value.
    pub head_elements: usize,
}

impl KvShape {
    /// The number of `f32` in a page of so many tokens.
    #[must_use]
    pub fn page_elements(&self, page_size: u32) -> usize {
        self.layers * self.heads * 2 * page_size as usize * self.head_elements
    }

    /// The size of a page of so many tokens.
    #[must_use]
    pub fn page_bytes(&self, page_size: u32) -> usize {
        self.page_elements(page_size) * size_of::<f32>()
    }

    /// Where in a page the keys of a layer and head begin; their values follow them.
    #[must_use]
    pub fn keys_at(&self, layer: usize, head: usize, page_size: u32) -> usize {
        (layer * self.heads + head) * 2 * page_size as usize * self.head_elements
    }
}
