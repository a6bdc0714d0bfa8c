//! A model with its tokenizer and chat template.

use terrace_cache::Token;

use crate::byte_tokenizer;
use crate::shape::Shape;
use crate::weights::{WeightSource, collect};
use crate::{ChatTemplate, Llama, Tokenizer};

/// A model with its tokenizer and chat template, whose weights are not read yet.
#[derive(Debug)]
pub struct Unloaded {
    /// The sizes of the model.
    pub shape: Shape,
    /// Its weights.
    pub weights: Box<dyn WeightSource>,
    /// Its tokens.
    pub tokenizer: Tokenizer,
    /// Its chat template.
    pub chat: ChatTemplate,
    /// The tokens that end an answer.
    pub stop_tokens: Vec<Token>,
    /// Its name.
    pub name: String,
}

impl Unloaded {
    /// Creates a model whose tokens are bytes, like the built-in one.
    pub(crate) fn of_bytes(name: &str, shape: Shape, weights: impl WeightSource + 'static) -> Self {
        Self {
            shape,
            weights: Box::new(weights),
            tokenizer: Tokenizer::bytes(),
            chat: ChatTemplate::built_in(),
            stop_tokens: vec![byte_tokenizer::END, byte_tokenizer::END_OF_MESSAGE],
            name: name.to_owned(),
        }
    }

    /// Reads the weights, to be used by this number of CPU threads.
    #[must_use]
    pub fn on_cpu(self, threads: usize) -> Loaded {
        let Self { shape, weights, tokenizer, chat, stop_tokens, name } = self;
        let fingerprint = weights.fingerprint(&shape);
        let model = Llama::new(shape, fingerprint, threads, |shape| collect(shape, &*weights));
        Loaded { model, tokenizer, chat, stop_tokens, name }
    }
}

/// A model on the CPU with its tokenizer and chat template.
#[derive(Debug)]
pub struct Loaded {
    /// The model.
    pub model: Llama,
    /// Its tokens.
    pub tokenizer: Tokenizer,
    /// Its chat template.
    pub chat: ChatTemplate,
    /// The tokens that end an answer.
    pub stop_tokens: Vec<Token>,
    /// Its name.
    pub name: String,
}
