//! What a request is about: the tokens of its prompt, as the workers will see them.

use std::path::Path;

use serde_json::Value;
use terrace_model::{ChatTemplate, LoadError, Tokenizer};
use terrace_scheduler::Token;

use crate::fields::Fields;
use crate::messages::Chat;
use crate::parameters::{Kind, tokens};

/// How the workers make tokens of requests.
#[derive(Debug)]
pub(super) struct Prompting {
    tokenizer: Tokenizer,
    chat: ChatTemplate,
}

/// What decides where a request goes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Prompt {
    pub(super) tokens: Vec<Token>,
    pub(super) cache_salt: String,
}

impl Prompting {
    /// As the model of a folder does; without one, as the built-in model does.
    ///
    /// # Errors
    /// When the folder cannot be used.
    pub(super) fn of(folder: Option<&Path>) -> Result<Self, LoadError> {
        let (tokenizer, chat) = match folder {
            Some(folder) => terrace_model::load_prompting(folder)?,
            None => {
                let built_in = terrace_model::unloaded_built_in();
                (built_in.tokenizer, built_in.chat)
            }
        };
        Ok(Self { tokenizer, chat })
    }

    /// The prompt of a request, the first if it has several; nothing if it cannot be told. What is wrong with a
    /// request is for the worker to say.
    pub(super) fn read(&self, kind: Kind, body: &[u8]) -> Option<Prompt> {
        let mut fields = Fields::parse(body).ok()?;
        let cache_salt = fields.text("cache_salt").ok()?.unwrap_or_default();
        let tokens = match kind {
            Kind::Chat => {
                let chat = Chat::parse(&mut fields).ok()?;
                self.tokenizer.encode_chat(&self.chat, &chat.conversation).ok()?
            }
            Kind::Completion => {
                let is_whole = fields.flag_or("add_special_tokens", true).ok()?;
                self.first(fields.take("prompt")?, is_whole)?
            }
        };
        Some(Prompt { tokens, cache_salt })
    }

    fn first(&self, prompt: Value, is_whole: bool) -> Option<Vec<Token>> {
        match prompt {
            Value::String(text) if is_whole => self.tokenizer.encode(&text).ok(),
            Value::String(text) => self.tokenizer.encode_plain(&text).ok(),
            Value::Array(items) => match items.first()? {
                Value::Number(_) => tokens(&items),
                Value::String(_) | Value::Array(_) => {
                    self.first(items.into_iter().next()?, is_whole)
                }
                Value::Null | Value::Bool(_) | Value::Object(_) => None,
            },
            Value::Null | Value::Bool(_) | Value::Number(_) | Value::Object(_) => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn prompts_of_all_forms_are_read() {
        let prompting = Prompting::of(None).unwrap();
        let read = |kind, body: Value| prompting.read(kind, body.to_string().as_bytes());
        let text = read(Kind::Completion, json!({ "prompt": "abc", "cache_salt": "s" })).unwrap();
        assert_eq!((text.tokens.is_empty(), &*text.cache_salt), (false, "s"));
        let several = read(Kind::Completion, json!({ "prompt": ["abc", "d"] })).unwrap();
        assert_eq!(several.tokens, text.tokens);
        let tokens = json!({ "prompt": text.tokens });
        assert_eq!(read(Kind::Completion, tokens).unwrap().tokens, text.tokens);
        let messages = json!({ "messages": [{ "role": "user", "content": "abc" }] });
        assert!(read(Kind::Chat, messages).unwrap().tokens.len() > 3);
        for odd in [json!({}), json!({ "prompt": 5 }), json!({ "prompt": [] }), json!([])] {
            assert_eq!(read(Kind::Completion, odd), None);
        }
    }
}
