//! The tokens of the built-in model: bytes, and marks between messages.

use terrace_cache::Token;

use crate::conversation::{Conversation, PromptEnd};

/// Begins every text.
pub(crate) const BEGIN: Token = 256;
/// Ends a text.
pub(crate) const END: Token = 257;
/// Begin a message of one role.
const SYSTEM: Token = 258;
const USER: Token = 259;
const ASSISTANT: Token = 260;
/// Ends a message.
pub(crate) const END_OF_MESSAGE: Token = 261;

/// Tokens 0 to 255 are bytes; the marks after them come from no text.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ByteTokenizer;

impl ByteTokenizer {
    /// Number of tokens.
    pub(crate) const VOCABULARY: usize = 262;

    pub(crate) fn encode(text: &str) -> Vec<Token> {
        std::iter::once(BEGIN).chain(Self::encode_plain(text)).collect()
    }

    pub(crate) fn encode_plain(text: &str) -> impl Iterator<Item = Token> {
        text.bytes().map(Token::from)
    }

    /// The tokens of a conversation. Marks are put between messages here, and nothing that a message
    /// says can become one.
    pub(crate) fn encode_chat(conversation: &Conversation) -> Vec<Token> {
        let mut tokens = vec![BEGIN];
        if conversation.special_tokens {
            tokens.push(BEGIN);
        }
        if let Some(tools) = conversation.tools_in_words() {
            tokens.push(SYSTEM);
            tokens.extend(Self::encode_plain(&tools));
            tokens.push(END_OF_MESSAGE);
        }
        for message in &conversation.messages {
            match message.role.as_str() {
                "system" | "developer" => tokens.push(SYSTEM),
                "assistant" => tokens.push(ASSISTANT),
                "user" => tokens.push(USER),
                other => {
                    // Roles without a mark are written as text.
                    tokens.push(USER);
                    tokens.extend(Self::encode_plain(other));
                    tokens.extend(Self::encode_plain(": "));
                }
            }
            tokens.extend(Self::encode_plain(&message.in_words()));
            tokens.push(END_OF_MESSAGE);
        }
        match conversation.end {
            PromptEnd::Answer => tokens.push(ASSISTANT),
            PromptEnd::LastMessage => {}
            PromptEnd::Continued => drop(tokens.pop()),
        }
        tokens
    }

    /// The displayed name of a mark.
    pub(crate) fn mark(token: Token) -> Option<&'static str> {
        match token {
            BEGIN => Some("<|begin|>"),
            END | END_OF_MESSAGE => Some("<|end|>"),
            SYSTEM => Some("<|system|>"),
            USER => Some("<|user|>"),
            ASSISTANT => Some("<|assistant|>"),
            _ => None,
        }
    }

    /// The name of a token.
    pub(crate) fn name(token: Token) -> Option<String> {
        let mark = match token {
            BEGIN => "<|begin|>",
            END | END_OF_MESSAGE => "<|end|>",
            SYSTEM => "<|system|>",
            USER => "<|user|>",
            ASSISTANT => "<|assistant|>",
            other => {
                let byte = u8::try_from(other).ok()?;
                return Some(match byte.is_ascii() {
                    true => char::from(byte).to_string(),
                    false => format!("<0x{byte:02X}>"),
                });
            }
        };
        Some(mark.to_owned())
    }

    /// The byte that a token is; none for a mark.
    pub(crate) fn byte(token: Token) -> Option<u8> {
        u8::try_from(token).ok()
    }
}
