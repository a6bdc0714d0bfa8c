//! The model that the server serves.

use std::sync::Arc;

use serde_json::{Value, json};
use terrace_model::{ChatTemplate, Tokenizer};
use terrace_scheduler::Token;

use crate::error::ApiError;
use crate::tool_calls::ToolFormat;

/// A model as clients see it.
#[derive(Clone, Debug)]
pub struct ServedModel {
    /// Name for clients.
    pub name: String,
    /// Tokenizer.
    pub tokenizer: Tokenizer,
    /// Chat template.
    pub chat: ChatTemplate,
    /// The tokens that end an answer.
    pub stop_tokens: Arc<[Token]>,
    /// The longest sequence, prompt and answer together, that the model was made for and the device
    /// has room for.
    pub tokens_max: u32,
    /// Format of function calls, if it is known.
    pub tool_format: Option<ToolFormat>,
    /// Whether it marks its reasoning with `<think>` and `</think>`.
    pub marks_reasoning: bool,
    /// Folder, or name of a model of the program.
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

    /// Returns the description for clients.
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

    /// The tokens of some marks, and their text. They would be no text otherwise.
    pub(crate) fn tokens_of_marks(&self, marks: &[&'static str]) -> Vec<(Token, &'static str)> {
        marks.iter().filter_map(|mark| Some((self.tokenizer.token_of(mark)?, *mark))).collect()
    }
}
