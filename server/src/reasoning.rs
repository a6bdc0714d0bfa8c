//! The reasoning of an answer, separated from its content while the answer is generated.

use futures_util::StreamExt;
use futures_util::stream::{self, Stream};
use terrace_model::{ChatTemplate, Tokenizer};
use terrace_scheduler::Token;

use crate::answer::{Fragment, Piece};
use crate::logprobs::Scored;

const OPENED: &str = "<think>";
const CLOSED: &str = "</think>";

/// Texts that mark reasoning. Models may have special tokens for them, which are no text otherwise.
pub(crate) const MARKS: &[&str] = &[OPENED, CLOSED];

/// Whether a chat template shows that the model marks its reasoning.
pub(crate) fn is_marked_in(chat: &ChatTemplate) -> bool {
    chat.mentions(OPENED) || chat.mentions(CLOSED)
}

/// Whether a prompt ends by opening the reasoning of the answer, as some templates do.
pub(crate) fn is_open_after(tokenizer: &Tokenizer, prompt: &[Token]) -> bool {
    /// More tokens than the mark and blanks after it can have.
    const TAIL_TOKENS: usize = 16;
    let tail = &prompt[prompt.len().saturating_sub(TAIL_TOKENS)..];
    tokenizer.decode_with_marks(tail).trim_end().ends_with(OPENED)
}

/// Separates the reasoning in the pieces of an answer, if there is a reader.
pub(crate) fn separate(
    pieces: impl Stream<Item = Piece> + Send + 'static,
    mut reader: Option<ReasoningReader>,
) -> impl Stream<Item = Piece> + Send + 'static {
    pieces.flat_map(move |piece| {
        stream::iter(match &mut reader {
            Some(reader) => reader.take(piece),
            None => vec![piece],
        })
    })
}

/// Reads an answer that may begin with reasoning between `<think>` and `</think>`. Blanks around the marks belong to
/// neither reasoning nor content.
#[derive(Debug)]
pub(crate) struct ReasoningReader {
    position: Position,
    /// Text that may be part of a mark, or blanks before one.
    held: String,
    /// Log-probabilities of tokens whose text is held.
    scored: Vec<Scored>,
    /// Tokens of the answer until now.
    tokens: u32,
    reasoning_tokens: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Position {
    /// Nothing but blanks has come.
    Start,
    /// Within reasoning that has no text yet.
    Opened,
    Reasoning,
    /// After reasoning, and nothing but blanks since.
    Closed,
    Content,
}

impl ReasoningReader {
    /// Returns a reader for an answer whose prompt may have opened the reasoning.
    pub(crate) fn new(is_open: bool) -> Self {
        let position = if is_open { Position::Opened } else { Position::Start };
        let (held, scored) = (String::new(), Vec::new());
        Self { position, held, scored, tokens: 0, reasoning_tokens: 0 }
    }

    fn take(&mut self, piece: Piece) -> Vec<Piece> {
        let mut pieces = Vec::new();
        match piece {
            Piece::Text(Fragment { text, scored, tokens }) => {
                self.held.push_str(&text);
                self.scored.extend(scored);
                self.tokens = self.tokens.max(tokens);
                while self.step(&mut pieces) {}
            }
            Piece::Complete(mut complete) => {
                self.finish(&mut pieces);
                if matches!(self.position, Position::Opened | Position::Reasoning) {
                    self.reasoning_tokens = complete.tokens;
                }
                complete.reasoning_tokens = self.reasoning_tokens;
                pieces.push(Piece::Complete(complete));
            }
            other @ (Piece::Reasoning(_) | Piece::Call(_) | Piece::Unfinished(_)) => {
                pieces.push(other)
            }
        }
        pieces
    }

    /// Handles as much of the held text as is certain. Returns whether there may be more to do.
    fn step(&mut self, pieces: &mut Vec<Piece>) -> bool {
        match self.position {
            Position::Start => {
                let text = self.held.trim_start();
                if let Some(rest) = text.strip_prefix(OPENED) {
                    self.held = rest.to_owned();
                    self.position = Position::Opened;
                } else if OPENED.starts_with(text) {
                    return false;
                } else {
                    self.position = Position::Content;
                }
                true
            }
            Position::Opened => {
                self.drop_leading_blanks();
                let has_text = !self.held.is_empty();
                if has_text {
                    self.position = Position::Reasoning;
                }
                has_text
            }
            Position::Reasoning => {
                if let Some(at) = self.held.find(CLOSED) {
                    let rest = self.held.split_off(at + CLOSED.len());
                    let text = std::mem::replace(&mut self.held, rest);
                    self.tell(Piece::Reasoning, text[..at].trim_end(), pieces);
                    self.reasoning_tokens = self.tokens;
                    self.position = Position::Closed;
                    return true;
                }
                let rest = self.held.split_off(certain(&self.held));
                let text = std::mem::replace(&mut self.held, rest);
                self.tell(Piece::Reasoning, &text, pieces);
                false
            }
            Position::Closed => {
                self.drop_leading_blanks();
                let has_text = !self.held.is_empty();
                if has_text {
                    self.position = Position::Content;
                }
                has_text
            }
            Position::Content => {
                let text = std::mem::take(&mut self.held);
                self.tell(Piece::Text, &text, pieces);
                false
            }
        }
    }

    fn finish(&mut self, pieces: &mut Vec<Piece>) {
        let held = std::mem::take(&mut self.held);
        match self.position {
            Position::Opened | Position::Reasoning => {
                self.tell(Piece::Reasoning, held.trim_end(), pieces)
            }
            Position::Start | Position::Closed | Position::Content => {
                self.tell(Piece::Text, &held, pieces);
            }
        }
    }

    /// Adds a piece, unless there is nothing to tell.
    fn tell(&mut self, kind: fn(Fragment) -> Piece, text: &str, pieces: &mut Vec<Piece>) {
        if text.is_empty() && self.scored.is_empty() {
            return;
        }
        let scored = std::mem::take(&mut self.scored);
        pieces.push(kind(Fragment { text: text.to_owned(), scored, tokens: self.tokens }));
    }

    fn drop_leading_blanks(&mut self) {
        let blanks = self.held.len() - self.held.trim_start().len();
        self.held.drain(..blanks);
    }
}

/// Length of the text that is certainly before a closing mark and the blanks in front of it.
fn certain(text: &str) -> usize {
    let from = (text.len() + 1).saturating_sub(CLOSED.len());
    let mut ends = (from..text.len()).filter(|at| text.is_char_boundary(*at));
    let end = ends.find(|at| CLOSED.starts_with(&text[*at..])).unwrap_or(text.len());
    text[..end].trim_end().len()
}

#[cfg(test)]
mod tests {
    use terrace_scheduler::Hits;

    use super::*;
    use crate::answer::{Complete, Finish};

    /// Returns reasoning, content and the number of reasoning tokens of a text that comes in pieces of some characters,
    /// each as one token.
    fn read(is_open: bool, text: &str, size: usize) -> (String, String, u32) {
        let mut reader = ReasoningReader::new(is_open);
        let letters: Vec<char> = text.chars().collect();
        let chunks: Vec<String> = letters.chunks(size).map(|part| part.iter().collect()).collect();
        let tokens = chunks.len() as u32;
        let text = |(at, text)| Piece::Text(Fragment { text, scored: Vec::new(), tokens: at });
        let complete = Piece::Complete(Complete {
            finish: Finish::Stop,
            tokens,
            reasoning_tokens: 0,
            hits: Hits::default(),
            logits_checksum: None,
            first_token_at: None,
        });
        let pieces = (1..).zip(chunks).map(text).chain([complete]);
        let (mut reasoning, mut content, mut reasoning_tokens) =
            (String::new(), String::new(), None);
        for piece in pieces.flat_map(|piece| reader.take(piece)) {
            assert_eq!(reasoning_tokens, None, "the end is last");
            match piece {
                Piece::Reasoning(fragment) => {
                    assert!(content.is_empty() && !fragment.text.is_empty());
                    reasoning.push_str(&fragment.text);
                }
                Piece::Text(fragment) => {
                    assert!(!fragment.text.is_empty());
                    content.push_str(&fragment.text);
                }
                Piece::Complete(complete) => reasoning_tokens = Some(complete.reasoning_tokens),
                Piece::Call(_) | Piece::Unfinished(_) => panic!("{piece:?}"),
            }
        }
        (reasoning, content, reasoning_tokens.unwrap())
    }

    #[test]
    fn reasoning_is_separated_however_the_text_is_cut() {
        let cases = [
            (false, "<think>\nSo, ünd < so.\n</think>\n\nYes.\n", "So, ünd < so.", "Yes.\n"),
            (false, "\n <think>a</think>b", "a", "b"),
            (true, "\nSo.\n</think>\n\nYes.", "So.", "Yes."),
            (false, "<think>\n\n</think>\n\nYes.", "", "Yes."),
            (false, "No marks <think>here</think>.", "", "No marks <think>here</think>."),
            (false, "  <th", "", "  <th"),
            (false, "<think>cut off </thin", "cut off </thin", ""),
            (true, "a </b> c", "a </b> c", ""),
            (false, "<think>a</think>b <think>c</think>", "a", "b <think>c</think>"),
            (false, "", "", ""),
        ];
        for (is_open, text, reasoning, content) in cases {
            for size in [1, 2, 3, 7, 100] {
                let (found, said, _) = read(is_open, text, size);
                assert_eq!((&*found, &*said), (reasoning, content), "{text:?} by {size}");
            }
        }
    }

    #[test]
    fn tokens_of_reasoning_are_counted() {
        assert_eq!(read(false, "<think>abc</think>d", 1).2, 18);
        assert_eq!(read(true, "abc", 1).2, 3);
        assert_eq!(read(false, "abc", 1).2, 0);
    }
}
