//! A request as the engine submits it.

use serde::{Deserialize, Serialize};
use terrace_cache::Token;
use terrace_fsm::RequestId;

/// What the engine wants done.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Request {
    /// Its name, unique among live requests.
    pub id: RequestId,
    /// The tokens to start from.
    pub prompt: Vec<Token>,
    /// How many tokens it may produce.
    pub max_new_tokens: u32,
    /// Higher goes first where priorities count.
    #[serde(default)]
    pub priority: i32,
    /// The adapter (LoRA) to compute with; empty for none.
    #[serde(default)]
    pub adapter: String,
    /// The tenant's salt; empty for none.
    #[serde(default)]
    pub salt: String,
}

impl Request {
    /// A request of plain priority, without adapter and salt.
    #[must_use]
    pub fn new(id: u64, prompt: Vec<Token>, max_new_tokens: u32) -> Self {
        Self {
            id: RequestId(id),
            prompt,
            max_new_tokens,
            priority: 0,
            adapter: String::new(),
            salt: String::new(),
        }
    }
}
