//! One answer as it comes from the engine, as text.

use std::time::Instant;

use futures_util::stream::{self, Stream};
use terrace_engine::{EndReason, Generation, Update};
use terrace_model::Decoder;
use terrace_scheduler::{Hits, Token};

use crate::stop::StopMatcher;
use crate::tool_calls::Call;

/// An answer under way. Dropping it calls the request off.
#[derive(Debug)]
pub(crate) struct Answer {
    generation: Option<Generation>,
    decoder: Option<Decoder>,
    stops: StopMatcher,
    /// Tokens that mark calls, and their text.
    marks: Vec<(Token, &'static str)>,
    tokens: u32,
    hits: Hits,
    first_token_at: Option<Instant>,
    /// The end, once the text before it has been handed out.
    ending: Option<Piece>,
}

/// Something new of an answer.
#[derive(Clone, Debug)]
pub(crate) enum Piece {
    /// More text, never none.
    Text(String),
    /// A call of a function.
    Call(Call),
    /// It is complete.
    Complete(Complete),
    /// It came to no end.
    Unfinished(EndReason),
}

/// What there is to know about a complete answer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Complete {
    pub(crate) finish: Finish,
    pub(crate) tokens: u32,
    pub(crate) hits: Hits,
    /// Unless it was not asked for, or a stop string ended the answer before its last token.
    pub(crate) logits_checksum: Option<u64>,
    pub(crate) first_token_at: Option<Instant>,
}

/// Why an answer is complete.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Finish {
    Stop,
    Length,
    ToolCalls,
}

impl Finish {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Stop => "stop",
            Self::Length => "length",
            Self::ToolCalls => "tool_calls",
        }
    }
}

impl Answer {
    pub(crate) fn new(
        generation: Generation,
        decoder: Decoder,
        stops: Vec<String>,
        marks: Vec<(Token, &'static str)>,
    ) -> Self {
        Self {
            generation: Some(generation),
            decoder: Some(decoder),
            stops: StopMatcher::new(stops),
            marks,
            tokens: 0,
            hits: Hits::default(),
            first_token_at: None,
            ending: None,
        }
    }

    /// Its pieces, in order; the last is the end.
    pub(crate) fn pieces(self) -> impl Stream<Item = Piece> + Send + 'static {
        stream::unfold(self, |mut answer| async {
            let piece = answer.next().await?;
            Some((piece, answer))
        })
    }

    async fn next(&mut self) -> Option<Piece> {
        if let Some(ending) = self.ending.take() {
            return Some(ending);
        }
        loop {
            match self.generation.as_mut()?.next().await? {
                Update::Started(hits) => self.hits = hits,
                Update::Token(token) => {
                    self.tokens += 1;
                    self.first_token_at.get_or_insert_with(Instant::now);
                    let text = match self.marks.iter().find(|(mark, _)| *mark == token) {
                        Some((_, text)) => (*text).to_owned(),
                        None => self.decoder.as_mut()?.push(token),
                    };
                    let (text, has_stopped) = self.stops.push(&text);
                    if has_stopped {
                        self.generation.take()?.finish();
                        return Some(self.end(text, Finish::Stop, None));
                    }
                    if !text.is_empty() {
                        return Some(Piece::Text(text));
                    }
                }
                Update::Ended(ending) => {
                    self.generation = None;
                    let finish = match ending.reason {
                        EndReason::Stop => Finish::Stop,
                        EndReason::Length => Finish::Length,
                        EndReason::Aborted | EndReason::Failed(_) => {
                            return Some(Piece::Unfinished(ending.reason));
                        }
                    };
                    let rest = self.decoder.take()?.finish();
                    let (mut text, has_stopped) = self.stops.push(&rest);
                    if has_stopped {
                        return Some(self.end(text, Finish::Stop, ending.logits_checksum));
                    }
                    text.push_str(&self.stops.finish());
                    return Some(self.end(text, finish, ending.logits_checksum));
                }
            }
        }
    }

    fn end(&mut self, text: String, finish: Finish, logits_checksum: Option<u64>) -> Piece {
        let complete = Piece::Complete(Complete {
            finish,
            tokens: self.tokens,
            hits: self.hits,
            logits_checksum,
            first_token_at: self.first_token_at,
        });
        if text.is_empty() {
            return complete;
        }
        self.ending = Some(complete);
        Piece::Text(text)
    }
}
