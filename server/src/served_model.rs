//! What the server knows about the model that its engine computes.

use std::sync::Arc;

use terrace_model::{ChatTemplate, Tokenizer};
use terrace_scheduler::Token;

/// A model as clients see it.
#[derive(Clone, Debug)]
pub struct ServedModel {
    /// What clients call it.
    pub name: String,
    /// Its tokens.
    pub tokenizer: Tokenizer,
    /// How it is talked to.
    pub chat: ChatTemplate,
    /// The tokens that end an answer.
    pub stop_tokens: Arc<[Token]>,
    /// The longest sequence, prompt and answer together, that the model was made for and the device
    /// has room for.
    pub tokens_max: u32,
}
