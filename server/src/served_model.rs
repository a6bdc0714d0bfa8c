//! What the server knows about the model that its engine computes.

use std::sync::Arc;

use serde_json::{Value, json};
use terrace_model::{ChatTemplate, Tokenizer};
use terrace_scheduler::Token;

use crate::error::ApiError;
use crate::tool_calls::ToolFormat;

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
    /// How it writes calls of functions, if that is known.
    pub tool_format: Option<ToolFormat>,
    /// Where it comes from.
    pub root: String,
    /// When its files were last written, or else when it was made ready, in seconds since 1970.
    pub created: u64,
    /// Names its weights and all else that decides what it computes.
    pub fingerprint: String,
}

impl ServedModel {
    /// # Errors
    /// When somebody asks for another model.
    pub(crate) fn check_name(&self, asked: &str) -> Result<(), ApiError> {
        match asked == self.name {
            true => Ok(()),
            false => Err(ApiError::no_such_model(asked, &self.name)),
        }
    }

    /// What clients are told of it.
    pub(crate) fn json(&self) -> Value {
        json!({
            "id": self.name,
            "object": "model",
            "created": self.created,
            "owned_by": "terrace",
            "root": self.root,
            "parent": null,
            "max_model_len": self.tokens_max,
        })
    }

    /// The same for the same weights and the same build: where it differs, so may the answers to the
    /// same request.
    pub(crate) fn system_fingerprint(&self) -> String {
        let build = env!("CARGO_PKG_VERSION");
        let hash = blake3::hash(format!("{build}\n{}", self.fingerprint).as_bytes());
        format!("fp_{}", &hash.to_hex()[..16])
    }

    /// The tokens that mark calls, and their text. They would be no text otherwise.
    pub(crate) fn marks_of(&self, format: ToolFormat) -> Vec<(Token, &'static str)> {
        let marks = format.marks().iter();
        marks.filter_map(|mark| Some((self.tokenizer.token_of(mark)?, *mark))).collect()
    }
}
