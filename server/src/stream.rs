//! Answers as they come: server-sent events, in chunks as OpenAI's clients read them.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::time::Duration;

use axum::response::Sse;
use axum::response::sse::{Event, KeepAlive};
use futures_util::StreamExt;
use futures_util::stream::{self, Stream};
use serde_json::Value;

use crate::answer::Piece;
use crate::error::ApiError;
use crate::generate::Answers;

/// Something is sent so often even if there is nothing to say, so that a client that is gone is
/// noticed while its request waits.
const KEEP_ALIVE: Duration = Duration::from_secs(15);

/// Sends the pieces of answers as they come.
pub(crate) fn respond(
    answers: Answers,
    include_usage: bool,
) -> Sse<impl Stream<Item = Result<Event, Infallible>>> {
    let first = (0..answers.count).filter_map(|index| answers.reply.first_chunk(index));
    let mut chunks = Chunks { ready: VecDeque::new(), answers: None, include_usage };
    for chunk in first {
        chunks.add(chunk);
    }
    chunks.answers = Some(answers);
    let events = stream::unfold(chunks, |mut chunks| async {
        let event = chunks.next().await?;
        Some((Ok(event), chunks))
    });
    Sse::new(events).keep_alive(KeepAlive::new().interval(KEEP_ALIVE))
}

struct Chunks {
    /// Chunks that can be sent.
    ready: VecDeque<Event>,
    /// What further ones come from.
    answers: Option<Answers>,
    include_usage: bool,
}

impl Chunks {
    async fn next(&mut self) -> Option<Event> {
        loop {
            if let Some(event) = self.ready.pop_front() {
                return Some(event);
            }
            let answers = self.answers.as_mut()?;
            match answers.pieces.next().await {
                Some((index, Piece::Text(text))) => {
                    let chunk = answers.reply.text_chunk(index, &text);
                    self.add(chunk);
                }
                Some((index, Piece::Complete(complete))) => {
                    answers.add(index, &complete);
                    let chunk = answers.reply.last_chunk(index, &complete);
                    self.add(chunk);
                }
                Some((_, Piece::Unfinished(reason))) => {
                    self.answers = None;
                    let error = ApiError::unfinished(reason).json();
                    self.ready.push_back(Event::default().data(error.to_string()));
                }
                None => {
                    if self.include_usage {
                        let chunk = answers.reply.usage_chunk(&answers.usage);
                        self.ready.push_back(Event::default().data(chunk.to_string()));
                    }
                    self.answers = None;
                    self.ready.push_back(Event::default().data("[DONE]"));
                }
            }
        }
    }

    /// Adds a chunk of an answer. Where the last one says what the answers took, the others say that
    /// they do not.
    fn add(&mut self, mut chunk: Value) {
        if self.include_usage {
            chunk["usage"] = Value::Null;
        }
        self.ready.push_back(Event::default().data(chunk.to_string()));
    }
}
