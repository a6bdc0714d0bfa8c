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
use crate::parameters::TellsUsage;

/// Something is sent so often even if there is nothing to say, so that a client that is gone is
/// noticed while its request waits.
pub(crate) const KEEP_ALIVE: Duration = Duration::from_secs(15);

/// Sends the pieces of answers as they come.
pub(crate) fn respond(
    answers: Answers,
    tells_usage: TellsUsage,
) -> Sse<impl Stream<Item = Result<Event, Infallible>>> {
    let (has_begun, tokens) = (vec![false; answers.count], vec![0; answers.count]);
    let (ready, answers) = (VecDeque::new(), Some(answers));
    let chunks = Chunks { ready, answers, has_begun, tokens, tells_usage };
    let events = stream::unfold(chunks, |mut chunks| async {
        let event = chunks.next().await?;
        Some((Ok(event), chunks))
    });
    Sse::new(events).keep_alive(KeepAlive::new().interval(KEEP_ALIVE))
}

struct Chunks {
    /// Chunks that can be sent.
    ready: VecDeque<Event>,
    /// Source of further chunks.
    answers: Option<Answers>,
    /// Which answers have had a chunk.
    has_begun: Vec<bool>,
    /// Number of tokens of each answer.
    tokens: Vec<u32>,
    tells_usage: TellsUsage,
}

impl Chunks {
    async fn next(&mut self) -> Option<Event> {
        loop {
            if let Some(event) = self.ready.pop_front() {
                return Some(event);
            }
            let answers = self.answers.as_mut()?;
            match answers.pieces.next().await {
                Some((index, Piece::Text(fragment))) => {
                    self.tokens[index] = self.tokens[index].max(fragment.tokens);
                    let chunk = answers.reply.text_chunk(index, &fragment);
                    self.add(index, chunk);
                }
                Some((index, Piece::Reasoning(fragment))) => {
                    self.tokens[index] = self.tokens[index].max(fragment.tokens);
                    let chunk = answers.reply.reasoning_chunk(index, &fragment);
                    self.add(index, chunk);
                }
                Some((index, Piece::Call(call))) => {
                    let chunk = answers.reply.call_chunk(index, &call);
                    self.add(index, chunk);
                }
                Some((index, Piece::Complete(complete))) => {
                    answers.add(index, &complete);
                    self.tokens[index] = complete.tokens;
                    let chunk = answers.reply.last_chunk(index, &complete);
                    self.add(index, chunk);
                }
                Some((_, Piece::Unfinished(reason))) => {
                    answers.span.in_scope(|| {
                        tracing::warn!("a completion ended without a result: {reason:?}")
                    });
                    let error = ApiError::unfinished(reason);
                    answers.history.response(error.status());
                    self.answers = None;
                    self.ready.push_back(Event::default().data(error.json().to_string()));
                }
                None => {
                    if self.tells_usage != TellsUsage::Never {
                        let chunk = answers.reply.usage_chunk(&answers.usage);
                        self.ready.push_back(Event::default().data(chunk.to_string()));
                    }
                    self.answers = None;
                    self.ready.push_back(Event::default().data("[DONE]"));
                }
            }
        }
    }

    /// Adds a chunk of an answer. The first says who speaks: sent earlier, it would be taken for the
    /// first token by those who measure. Where only the last one says what the answers took, the others
    /// say that they do not.
    fn add(&mut self, index: usize, mut chunk: Value) {
        let Some(answers) = &self.answers else { return };
        if !std::mem::replace(&mut self.has_begun[index], true) {
            answers.reply.begin(&mut chunk);
        }
        match self.tells_usage {
            TellsUsage::Never => {}
            TellsUsage::AtTheEnd => chunk["usage"] = Value::Null,
            TellsUsage::AllAlong => {
                let tokens = self.tokens.iter().map(|tokens| u64::from(*tokens)).sum();
                chunk["usage"] = answers.usage.so_far(tokens);
            }
        }
        self.ready.push_back(Event::default().data(chunk.to_string()));
    }
}
