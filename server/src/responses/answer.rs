//! Answers of the Responses API: items of output, and events that build them.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::time::{SystemTime, UNIX_EPOCH};

use axum::http::StatusCode;
use axum::response::sse::{Event, KeepAlive};
use axum::response::{IntoResponse, Response, Sse};
use futures_util::StreamExt;
use futures_util::stream as streams;
use serde_json::{Map, Value, json};

use super::Repeated;
use crate::answer::{Finish, Piece};
use crate::error::{ApiError, json_response};
use crate::generate::Answers;
use crate::parameters::random;
use crate::stream::KEEP_ALIVE;

/// Waits for the whole answer and returns it as one response.
///
/// # Errors
/// If the answer does not end.
pub(crate) async fn whole(mut answers: Answers, repeated: Repeated) -> Result<Response, ApiError> {
    let mut builder = Builder::new(&answers, repeated);
    while let Some((index, piece)) = answers.pieces.next().await {
        match &piece {
            Piece::Complete(complete) => answers.add(index, complete),
            Piece::Unfinished(reason) => {
                tracing::warn!("a response ended without a result: {reason:?}");
                return Err(ApiError::unfinished(*reason));
            }
            Piece::Text(_) | Piece::Reasoning(_) | Piece::Call(_) => {}
        }
        builder.take(piece, &mut Vec::new());
    }
    Ok(json_response(StatusCode::OK, &builder.response(Some(answers.usage.of_response()))))
}

/// Sends the events of an answer while it is generated.
pub(crate) fn stream(answers: Answers, repeated: Repeated) -> Response {
    let builder = Builder::new(&answers, repeated);
    let mut events = Events { ready: VecDeque::new(), answers: Some(answers), builder };
    events.begin();
    let events = streams::unfold(events, |mut events| async {
        let event = events.next().await?;
        Some((Ok::<_, Infallible>(event), events))
    });
    Sse::new(events).keep_alive(KeepAlive::new().interval(KEEP_ALIVE)).into_response()
}

struct Events {
    ready: VecDeque<Event>,
    /// The source of further events, until the last one.
    answers: Option<Answers>,
    builder: Builder,
}

impl Events {
    fn begin(&mut self) {
        for kind in ["response.created", "response.in_progress"] {
            let response = self.builder.response(None);
            self.push(kind, json!({ "response": response }));
        }
    }

    async fn next(&mut self) -> Option<Event> {
        loop {
            if let Some(event) = self.ready.pop_front() {
                return Some(event);
            }
            let answers = self.answers.as_mut()?;
            match answers.pieces.next().await {
                Some((_, Piece::Unfinished(reason))) => {
                    answers.span.in_scope(|| {
                        tracing::warn!("a response ended without a result: {reason:?}");
                    });
                    self.answers = None;
                    let error = ApiError::unfinished(reason).json();
                    let message = error["error"]["message"].clone();
                    self.builder.status = Status::Failed(message);
                    let response = self.builder.response(None);
                    self.push("response.failed", json!({ "response": response }));
                }
                Some((index, piece)) => {
                    if let Piece::Complete(complete) = &piece {
                        answers.add(index, complete);
                    }
                    let mut events = Vec::new();
                    self.builder.take(piece, &mut events);
                    for (kind, event) in events {
                        self.push(kind, event);
                    }
                }
                None => {
                    let usage = answers.usage.of_response();
                    self.answers = None;
                    let kind = match self.builder.status {
                        Status::Incomplete => "response.incomplete",
                        Status::InProgress | Status::Completed | Status::Failed(_) => {
                            "response.completed"
                        }
                    };
                    let response = self.builder.response(Some(usage));
                    self.push(kind, json!({ "response": response }));
                }
            }
        }
    }

    fn push(&mut self, kind: &str, mut event: Value) {
        event["type"] = kind.into();
        event["sequence_number"] = self.builder.sequence.into();
        self.builder.sequence += 1;
        self.ready.push_back(Event::default().event(kind).data(event.to_string()));
    }
}

/// Builds the items of a response from the pieces of an answer.
struct Builder {
    id: String,
    created_at: u64,
    model: String,
    repeated: Map<String, Value>,
    status: Status,
    /// Items that are complete.
    output: Vec<Value>,
    open: Option<Open>,
    sequence: u64,
}

#[derive(Clone, Debug)]
enum Status {
    InProgress,
    Completed,
    /// `max_output_tokens` or the end of the context cut the answer off.
    Incomplete,
    /// The message of the error.
    Failed(Value),
}

impl Status {
    fn name(&self) -> &'static str {
        match self {
            Self::InProgress => "in_progress",
            Self::Completed => "completed",
            Self::Incomplete => "incomplete",
            Self::Failed(_) => "failed",
        }
    }
}

/// An item that is being built.
struct Open {
    kind: ItemKind,
    id: String,
    text: String,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum ItemKind {
    Reasoning,
    Message,
}

impl ItemKind {
    fn part(self, text: &str) -> Value {
        match self {
            Self::Reasoning => json!({ "type": "reasoning_text", "text": text }),
            Self::Message => {
                json!({ "type": "output_text", "text": text, "annotations": [], "logprobs": [] })
            }
        }
    }

    fn delta_event(self) -> &'static str {
        match self {
            Self::Reasoning => "response.reasoning_text.delta",
            Self::Message => "response.output_text.delta",
        }
    }

    fn done_event(self) -> &'static str {
        match self {
            Self::Reasoning => "response.reasoning_text.done",
            Self::Message => "response.output_text.done",
        }
    }
}

impl Open {
    fn new(kind: ItemKind) -> Self {
        let prefix = match kind {
            ItemKind::Reasoning => "rs",
            ItemKind::Message => "msg",
        };
        Self { kind, id: format!("{prefix}_{:016x}", random()), text: String::new() }
    }

    fn item(&self, status: &str, content: Vec<Value>) -> Value {
        match self.kind {
            ItemKind::Reasoning => json!({
                "id": self.id, "type": "reasoning", "status": status, "summary": [], "content": content,
            }),
            ItemKind::Message => json!({
                "id": self.id, "type": "message", "status": status, "role": "assistant", "content": content,
            }),
        }
    }
}

/// An event and its name.
type Named = (&'static str, Value);

impl Builder {
    fn new(answers: &Answers, Repeated(repeated): Repeated) -> Self {
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        Self {
            id: format!("resp_{:016x}", random()),
            created_at: now.map_or(0, |since| since.as_secs()),
            model: answers.reply.model().to_owned(),
            repeated,
            status: Status::InProgress,
            output: Vec::new(),
            open: None,
            sequence: 0,
        }
    }

    fn take(&mut self, piece: Piece, events: &mut Vec<Named>) {
        match piece {
            Piece::Reasoning(fragment) => self.add(ItemKind::Reasoning, &fragment.text, events),
            Piece::Text(fragment) => self.add(ItemKind::Message, &fragment.text, events),
            Piece::Complete(complete) => {
                if self.output.is_empty() && self.open.is_none() {
                    self.open(ItemKind::Message, events);
                }
                self.status = match complete.finish {
                    Finish::Stop | Finish::ToolCalls => Status::Completed,
                    Finish::Length => Status::Incomplete,
                };
                self.close(self.status.name(), events);
            }
            // Requests with tools are refused, and the caller handles an answer without an end.
            Piece::Call(_) | Piece::Unfinished(_) => {}
        }
    }

    fn add(&mut self, kind: ItemKind, text: &str, events: &mut Vec<Named>) {
        if self.open.as_ref().is_none_or(|open| open.kind != kind) {
            self.close("completed", events);
            self.open(kind, events);
        }
        let place = self.place();
        if let Some(open) = &mut self.open {
            open.text.push_str(text);
            let mut event = place;
            event["delta"] = text.into();
            if kind == ItemKind::Message {
                event["logprobs"] = json!([]);
            }
            events.push((kind.delta_event(), event));
        }
    }

    fn open(&mut self, kind: ItemKind, events: &mut Vec<Named>) {
        let open = Open::new(kind);
        let item = open.item("in_progress", Vec::new());
        let added = json!({ "output_index": self.output.len(), "item": item });
        events.push(("response.output_item.added", added));
        self.open = Some(open);
        let mut event = self.place();
        event["part"] = kind.part("");
        events.push(("response.content_part.added", event));
    }

    fn close(&mut self, status: &str, events: &mut Vec<Named>) {
        let place = self.place();
        let Some(open) = self.open.take() else { return };
        let part = open.kind.part(&open.text);
        let mut done = place.clone();
        done["text"] = open.text.as_str().into();
        if open.kind == ItemKind::Message {
            done["logprobs"] = json!([]);
        }
        events.push((open.kind.done_event(), done));
        let mut part_done = place;
        part_done["part"] = part.clone();
        events.push(("response.content_part.done", part_done));
        let item = open.item(status, vec![part]);
        let item_done = json!({ "output_index": self.output.len(), "item": item });
        events.push(("response.output_item.done", item_done));
        self.output.push(item);
    }

    /// Where the open item is, as its events say it.
    fn place(&self) -> Value {
        let id = self.open.as_ref().map(|open| open.id.as_str());
        json!({ "item_id": id, "output_index": self.output.len(), "content_index": 0 })
    }

    /// The response as far as it is known.
    fn response(&self, usage: Option<Value>) -> Value {
        let (error, incomplete) = match &self.status {
            Status::Failed(message) => {
                (json!({ "code": "server_error", "message": message }), Value::Null)
            }
            Status::Incomplete => (Value::Null, json!({ "reason": "max_output_tokens" })),
            Status::InProgress | Status::Completed => (Value::Null, Value::Null),
        };
        let mut response = json!({
            "id": self.id,
            "object": "response",
            "created_at": self.created_at,
            "status": self.status.name(),
            "background": false,
            "error": error,
            "incomplete_details": incomplete,
            "model": self.model,
            "output": self.output,
            "parallel_tool_calls": true,
            "previous_response_id": null,
            "store": false,
            "tool_choice": "auto",
            "tools": [],
            "truncation": "disabled",
            "usage": usage,
        });
        if let Value::Object(response) = &mut response {
            response.extend(self.repeated.clone());
        }
        response
    }
}
