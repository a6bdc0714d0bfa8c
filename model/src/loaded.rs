//! A model with its text.

use terrace_cache::Token;

use crate::{ChatTemplate, Llama, Tokenizer};

/// A model and all that belongs to it.
#[derive(Debug)]
pub struct Loaded {
    /// The model.
    pub model: Llama,
    /// Its tokens.
    pub tokenizer: Tokenizer,
    /// How it is talked to.
    pub chat: ChatTemplate,
    /// The tokens that end an answer.
    pub stop_tokens: Vec<Token>,
    /// Its name.
    pub name: String,
}
