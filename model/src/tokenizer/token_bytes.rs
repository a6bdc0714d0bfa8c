//! The bytes of each token.

use serde_json::Value;
use terrace_cache::Token;

use super::{FileTokenizer, Kind, Tokenizer};
use crate::byte_tokenizer::ByteTokenizer;

/// The meaning of a token.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TokenBytes {
    /// Its part of a text, which need not be whole characters; the name of a special token.
    pub bytes: Vec<u8>,
    /// Set for a mark between texts, which is no text itself.
    pub is_special: bool,
}

/// Notations of bytes in vocabularies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Spelling {
    /// A character for each byte.
    Bytes,
    /// Text with a mark for spaces, and single bytes as `<0x00>` if there are such tokens.
    Text { space: Option<char>, single_bytes: bool },
    /// An unknown notation.
    Unknown,
}

impl Spelling {
    /// The notation of a tokenizer, known from its decoder.
    pub(super) fn of(tokenizer: &FileTokenizer) -> Self {
        let (mut space, mut single_bytes) = (None, false);
        let mut parts = Vec::from_iter(tokenizer.decoder());
        while let Some(part) = parts.pop() {
            match part["type"].as_str() {
                Some("Sequence") => {
                    parts.extend(part["decoders"].as_array().into_iter().flatten().cloned());
                }
                Some("ByteLevel") => return Self::Bytes,
                Some("ByteFallback") => single_bytes = true,
                Some("Metaspace") => space = only_char(&part["replacement"]),
                Some("Replace") if part["content"] == " " => {
                    space = only_char(&part["pattern"]["String"]);
                }
                Some(_) | None => {}
            }
        }
        match space.is_some() || single_bytes {
            true => Self::Text { space, single_bytes },
            false => Self::Unknown,
        }
    }

    fn bytes(self, written: &str) -> Option<Vec<u8>> {
        match self {
            Self::Bytes => written.chars().map(byte_of).collect(),
            Self::Text { space, single_bytes } => {
                let byte = written.strip_prefix("<0x").and_then(|rest| rest.strip_suffix('>'));
                let byte = byte.filter(|_| single_bytes);
                if let Some(byte) = byte.and_then(|byte| u8::from_str_radix(byte, 16).ok()) {
                    return Some(vec![byte]);
                }
                Some(match space {
                    Some(space) => written.replace(space, " ").into_bytes(),
                    None => written.as_bytes().to_vec(),
                })
            }
            Self::Unknown => None,
        }
    }
}

fn only_char(value: &Value) -> Option<char> {
    let mut chars = value.as_str()?.chars();
    chars.next().filter(|_| chars.next().is_none())
}

/// The byte that a character stands for where each byte has one: those that can be printed are their own,
/// the others follow one another from U+0100 on.
fn byte_of(character: char) -> Option<u8> {
    let is_own = |byte: &u8| matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
    match u32::from(character) {
        code @ 0..=0xff => u8::try_from(code).ok().filter(is_own),
        code => (0..=0xff).filter(|byte| !is_own(byte)).nth(code as usize - 0x100),
    }
}

impl Tokenizer {
    /// What a token stands for; nothing for one that the tokenizer does not have or whose way of writing
    /// bytes is not known.
    #[must_use]
    pub fn token_bytes(&self, token: Token) -> Option<TokenBytes> {
        match &self.0 {
            Kind::Bytes => match ByteTokenizer::byte(token) {
                Some(byte) => Some(TokenBytes { bytes: vec![byte], is_special: false }),
                None => {
                    let mark = ByteTokenizer::mark(token)?;
                    Some(TokenBytes { bytes: mark.as_bytes().to_vec(), is_special: true })
                }
            },
            Kind::File { tokenizer, spelling, .. } => {
                if let Some((content, is_special)) = tokenizer.added(token) {
                    return Some(TokenBytes { bytes: content.into_bytes(), is_special });
                }
                let bytes = spelling.bytes(&tokenizer.token_name(token)?)?;
                Some(TokenBytes { bytes, is_special: false })
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_has_a_character_of_its_own() {
        let mut bytes: Vec<u8> = ('\0'..'\u{200}').filter_map(byte_of).collect();
        bytes.sort_unstable();
        assert_eq!(bytes, (0..=255).collect::<Vec<u8>>());
        assert_eq!(
            (byte_of('Ġ'), byte_of('Ċ'), byte_of('A')),
            (Some(b' '), Some(b'\n'), Some(b'A'))
        );
        assert_eq!((byte_of(' '), byte_of('▁')), (None, None));
    }

    #[test]
    fn words_have_a_mark_for_spaces_and_single_bytes_a_number() {
        let spelling = Spelling::Text { space: Some('▁'), single_bytes: true };
        assert_eq!(spelling.bytes("▁a▁").unwrap(), b" a ");
        assert_eq!(spelling.bytes("<0xF0>").unwrap(), [0xf0]);
        assert_eq!(spelling.bytes("<0xno>").unwrap(), b"<0xno>");
        let plain = Spelling::Text { space: None, single_bytes: false };
        assert_eq!(plain.bytes("<0xF0>").unwrap(), b"<0xF0>");
        assert_eq!(Spelling::Unknown.bytes("a"), None);
    }
}
