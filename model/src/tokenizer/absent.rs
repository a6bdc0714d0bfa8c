//! Stand-ins for tokenizers from files, in builds without them.

use std::convert::Infallible;

use serde_json::Value;
use terrace_cache::Token;

/// There is none.
#[derive(Clone, Debug)]
pub(super) struct FileTokenizer(Infallible);

impl FileTokenizer {
    /// # Errors
    /// Always.
    pub(super) fn from_json(_json: &[u8]) -> Result<Self, String> {
        Err("this program was built without tokenizers from files".to_owned())
    }

    pub(super) fn encode(&self, _text: &str, _with_special: bool) -> Result<Vec<Token>, String> {
        match self.0 {}
    }

    pub(super) fn decode(&self, _tokens: &[Token], _skips_special: bool) -> String {
        match self.0 {}
    }

    pub(super) fn token_name(&self, _token: Token) -> Option<String> {
        match self.0 {}
    }

    pub(super) fn token_of(&self, _text: &str) -> Option<Token> {
        match self.0 {}
    }

    pub(super) fn vocabulary(&self) -> usize {
        match self.0 {}
    }

    pub(super) fn added(&self, _token: Token) -> Option<(String, bool)> {
        match self.0 {}
    }

    pub(super) fn decoder(&self) -> Option<Value> {
        match self.0 {}
    }
}
