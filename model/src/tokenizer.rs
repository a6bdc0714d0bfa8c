//! From text to tokens and back.

#[cfg(not(feature = "folders"))]
mod absent;
#[cfg(feature = "folders")]
mod file;
mod token_bytes;

use terrace_cache::Token;

#[cfg(not(feature = "folders"))]
use absent::FileTokenizer;
#[cfg(feature = "folders")]
use file::FileTokenizer;
use token_bytes::Spelling;
pub use token_bytes::TokenBytes;

use crate::byte_tokenizer::ByteTokenizer;
use crate::chat::{ChatError, ChatTemplate};
use crate::conversation::Conversation;

/// Turns text into a model's tokens and back. Clones are cheap.
#[derive(Clone, Debug)]
pub struct Tokenizer(Kind);

#[derive(Clone, Debug)]
enum Kind {
    Bytes,
    File {
        tokenizer: FileTokenizer,
        /// One more than the highest token.
        vocabulary: usize,
        spelling: Spelling,
    },
}

/// A text that the model has no tokens for.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "the text cannot be turned into tokens: {0}; the model's tokenizer.json has no token for it"
)]
pub struct EncodeError(String);

impl Tokenizer {
    /// The built-in model's tokenizer: bytes, and marks that come from no text.
    #[must_use]
    pub fn bytes() -> Self {
        Self(Kind::Bytes)
    }

    /// The tokenizer of a `tokenizer.json`.
    pub(crate) fn from_json(json: &[u8]) -> Result<Self, String> {
        let tokenizer = FileTokenizer::from_json(json)?;
        let (vocabulary, spelling) = (tokenizer.vocabulary(), Spelling::of(&tokenizer));
        Ok(Self(Kind::File { tokenizer, vocabulary, spelling }))
    }

    /// The tokens of a text, with those that a model wants at the beginning or end of every text.
    ///
    /// # Errors
    /// Fails if the model has no tokens for the text. Byte tokenizers always have.
    pub fn encode(&self, text: &str) -> Result<Vec<Token>, EncodeError> {
        match &self.0 {
            Kind::Bytes => Ok(ByteTokenizer::encode(text)),
            Kind::File { tokenizer, .. } => tokenizer.encode(text, true).map_err(EncodeError),
        }
    }

    /// The tokens of a text alone. A folder's tokenizer recognises special tokens that the text names,
    /// as chat templates do; the byte tokenizer never does.
    ///
    /// # Errors
    /// Same as for [`Tokenizer::encode`].
    pub fn encode_plain(&self, text: &str) -> Result<Vec<Token>, EncodeError> {
        match &self.0 {
            Kind::Bytes => Ok(ByteTokenizer::encode_plain(text).collect()),
            Kind::File { tokenizer, .. } => tokenizer.encode(text, false).map_err(EncodeError),
        }
    }

    /// The tokens of a conversation.
    ///
    /// The byte tokenizer keeps its marks apart from what messages say. Folders' templates write both
    /// into one text, so a message that names a special token has it, as with everybody else who
    /// serves such a model.
    ///
    /// # Errors
    /// Fails if the template refuses the conversation, or the model has no tokens for it.
    pub fn encode_chat(
        &self,
        chat: &ChatTemplate,
        conversation: &Conversation,
    ) -> Result<Vec<Token>, ChatError> {
        match &self.0 {
            Kind::Bytes => {
                chat.check(conversation)?;
                Ok(ByteTokenizer::encode_chat(conversation))
            }
            Kind::File { tokenizer, .. } => {
                let text = chat.render(conversation)?;
                let tokens = tokenizer.encode(&text, conversation.special_tokens);
                Ok(tokens.map_err(EncodeError)?)
            }
        }
    }

    /// Returns a decoder, which turns the tokens of an answer into text one by one.
    #[must_use]
    pub fn decoder(&self) -> Decoder {
        self.decoder_after(&[])
    }

    /// The same for an answer that continues `prompt`: some tokenizers write the first word of a text
    /// differently from those after it.
    #[must_use]
    pub fn decoder_after(&self, prompt: &[Token]) -> Decoder {
        // As many tokens as may be needed for the last one to be whole.
        const CONTEXT: usize = 8;
        match &self.0 {
            Kind::Bytes => Decoder(Decoding::Bytes { incomplete: Vec::new(), shows_marks: false }),
            Kind::File { tokenizer, .. } => {
                let window = prompt[prompt.len().saturating_sub(CONTEXT)..].to_vec();
                let told = window.len();
                let tokenizer = tokenizer.clone();
                Decoder(Decoding::File { tokenizer, window, told, skips_special: true })
            }
        }
    }

    /// The text of tokens. Special tokens have none.
    #[must_use]
    pub fn decode(&self, tokens: &[Token]) -> String {
        let mut decoder = self.decoder();
        let mut text: String = tokens.iter().map(|token| decoder.push(*token)).collect();
        text.push_str(&decoder.finish());
        text
    }

    /// The text of tokens, with the names of special ones.
    #[must_use]
    pub fn decode_with_marks(&self, tokens: &[Token]) -> String {
        match &self.0 {
            Kind::Bytes => {
                let (mut text, mut decoder) = (String::new(), self.decoder());
                for token in tokens {
                    match ByteTokenizer::byte(*token) {
                        Some(_) => text.push_str(&decoder.push(*token)),
                        None => {
                            let before = std::mem::replace(&mut decoder, self.decoder());
                            text.push_str(&before.finish());
                            text.push_str(&ByteTokenizer::name(*token).unwrap_or_default());
                        }
                    }
                }
                text + &decoder.finish()
            }
            Kind::File { tokenizer, .. } => tokenizer.decode(tokens, false),
        }
    }

    /// Returns the tokenizer's name of a token; none for a token that it does not have.
    #[must_use]
    pub fn token_name(&self, token: Token) -> Option<String> {
        match &self.0 {
            Kind::Bytes => ByteTokenizer::name(token),
            Kind::File { tokenizer, .. } => tokenizer.token_name(token),
        }
    }

    /// Number of tokens: one more than the highest token.
    #[must_use]
    pub fn vocabulary(&self) -> usize {
        match &self.0 {
            Kind::Bytes => ByteTokenizer::VOCABULARY,
            Kind::File { vocabulary, .. } => *vocabulary,
        }
    }

    /// The token that a special string stands for.
    #[must_use]
    pub fn token_of(&self, text: &str) -> Option<Token> {
        match &self.0 {
            Kind::Bytes => None,
            Kind::File { tokenizer, .. } => tokenizer.token_of(text),
        }
    }
}

/// Turns tokens into text, one after the other, and keeps back what is not yet a whole character.
#[derive(Clone, Debug)]
pub struct Decoder(Decoding);

#[derive(Clone, Debug)]
enum Decoding {
    Bytes {
        /// The beginning of a character.
        incomplete: Vec<u8>,
        shows_marks: bool,
    },
    File {
        tokenizer: FileTokenizer,
        /// The tokens whose text was told last, since what a token says may depend on those before
        /// it, and then those that are kept back.
        window: Vec<Token>,
        /// Number of tokens whose text was returned.
        told: usize,
        skips_special: bool,
    },
}

impl Decoder {
    /// The same, but the names of special tokens are part of the text.
    #[must_use]
    pub fn showing_special(mut self) -> Self {
        match &mut self.0 {
            Decoding::Bytes { shows_marks, .. } => *shows_marks = true,
            Decoding::File { skips_special, .. } => *skips_special = false,
        }
        self
    }

    /// Adds a token and returns the text that is complete with it; often none.
    pub fn push(&mut self, token: Token) -> String {
        match &mut self.0 {
            Decoding::Bytes { incomplete, shows_marks } => {
                if let Some(mark) = ByteTokenizer::mark(token).filter(|_| *shows_marks) {
                    // What a mark cuts short never becomes a character.
                    let before = std::mem::take(incomplete);
                    return String::from_utf8_lossy(&before).into_owned() + mark;
                }
                incomplete.extend(ByteTokenizer::byte(token));
                complete(incomplete)
            }
            Decoding::File { tokenizer, window, told, skips_special } => {
                // A character has four bytes at most. What has not become one after so many tokens
                // never will.
                const KEPT_MAX: usize = 16;
                window.push(token);
                let text = new_text(tokenizer, window, *told, *skips_special);
                let kept = window.len() - *told;
                if (text.is_empty() || text.ends_with(char::REPLACEMENT_CHARACTER))
                    && kept < KEPT_MAX
                {
                    return String::new();
                }
                window.drain(..*told);
                *told = window.len();
                text
            }
        }
    }

    /// Returns what was kept back, with U+FFFD for what is no character.
    pub fn finish(self) -> String {
        match self.0 {
            Decoding::Bytes { incomplete, .. } => String::from_utf8_lossy(&incomplete).into_owned(),
            Decoding::File { tokenizer, window, told, skips_special } => {
                new_text(&tokenizer, &window, told, skips_special)
            }
        }
    }
}

/// Returns the text that the tokens from `told` on add to that of the tokens before them.
fn new_text(
    tokenizer: &FileTokenizer,
    window: &[Token],
    told: usize,
    skips_special: bool,
) -> String {
    let decode = |tokens| tokenizer.decode(tokens, skips_special);
    let (old, all) = (decode(&window[..told]), decode(window));
    let common = old.char_indices().zip(all.chars()).take_while(|((_, a), b)| a == b);
    let common = common.last().map_or(0, |((at, a), _)| at + a.len_utf8());
    all[common..].to_owned()
}

/// Takes all whole characters out of `bytes`; wrong bytes become U+FFFD.
fn complete(bytes: &mut Vec<u8>) -> String {
    let mut text = String::new();
    loop {
        match std::str::from_utf8(bytes) {
            Ok(rest) => {
                text.push_str(rest);
                bytes.clear();
                return text;
            }
            Err(error) => {
                let valid = error.valid_up_to();
                text.extend(std::str::from_utf8(&bytes[..valid]));
                let Some(wrong) = error.error_len() else {
                    bytes.drain(..valid);
                    return text;
                };
                text.push(char::REPLACEMENT_CHARACTER);
                bytes.drain(..valid + wrong);
            }
        }
    }
}
