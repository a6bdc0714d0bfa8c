//! The tokenizer of a `tokenizer.json`.

use std::sync::Arc;

use serde_json::Value;
use terrace_cache::Token;

/// A tokenizer that a file describes. Clones are cheap.
#[derive(Clone, Debug)]
pub(super) struct FileTokenizer(Arc<tokenizers::Tokenizer>);

impl FileTokenizer {
    pub(super) fn from_json(json: &[u8]) -> Result<Self, String> {
        let tokenizer = tokenizers::Tokenizer::from_bytes(json);
        let mut tokenizer = tokenizer.map_err(|error| error.to_string())?;
        // How long a prompt may be is not the tokenizer's to decide.
        tokenizer.with_truncation(None).map_err(|error| error.to_string())?;
        tokenizer.with_padding(None);
        Ok(Self(Arc::new(tokenizer)))
    }

    /// The tokens of a text, or why there are none.
    pub(super) fn encode(&self, text: &str, with_special: bool) -> Result<Vec<Token>, String> {
        match self.0.encode_fast(text, with_special) {
            Ok(encoding) => Ok(encoding.get_ids().to_vec()),
            Err(error) => Err(error.to_string()),
        }
    }

    /// The text of tokens.
    pub(super) fn decode(&self, tokens: &[Token], skips_special: bool) -> String {
        // No decoder that a tokenizer.json can have fails; if one did, silence is all that is left.
        self.0.decode(tokens, skips_special).unwrap_or_default()
    }

    pub(super) fn token_name(&self, token: Token) -> Option<String> {
        self.0.id_to_token(token)
    }

    pub(super) fn token_of(&self, text: &str) -> Option<Token> {
        self.0.token_to_id(text)
    }

    /// One more than the highest token.
    pub(super) fn vocabulary(&self) -> usize {
        let highest = self.0.get_vocab(true).into_values().max();
        highest.map_or(0, |highest| highest as usize + 1)
    }

    /// The text of a token that was added to the vocabulary, and whether the token is special.
    pub(super) fn added(&self, token: Token) -> Option<(String, bool)> {
        let added = self.0.get_added_vocabulary();
        let content = added.simple_id_to_token(token)?;
        let is_special = added.is_special_token(&content);
        Some((content, is_special))
    }

    /// The decoder, as the file describes it.
    pub(super) fn decoder(&self) -> Option<Value> {
        self.0.get_decoder().and_then(|decoder| serde_json::to_value(decoder).ok())
    }
}
