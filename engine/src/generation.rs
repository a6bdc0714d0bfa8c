//! Requests and answers as users of the engine see them.

use std::any::Any;
use std::sync::Arc;

use serde::Serialize;
use terrace_scheduler::{FailReason, Hits, Passage, Reach, RequestId, Token};
use tokio::sync::mpsc;

use crate::message::{DriverMessage, DriverSender};
use crate::sampling::Sampling;
use crate::sampling::grammar::Grammar;
use crate::sampling::logprobs::Logprobs;
use crate::sampling::shaping::Shaping;

/// A generation request.
#[derive(Debug)]
pub struct Generate {
    /// Prompt tokens.
    pub prompt: Vec<Token>,
    /// Largest number of tokens to generate. With 0 the request only scores or prefills the prompt.
    pub max_new_tokens: u32,
    /// Sampling parameters.
    pub sampling: Sampling,
    /// Changes to the logits before sampling.
    pub shaping: Shaping,
    /// Grammar of the answer; unconstrained without one.
    pub grammar: Option<Box<dyn Grammar>>,
    /// Tokens that end the answer.
    pub stop_tokens: Arc<[Token]>,
    /// True if the answer includes the stop token.
    pub keeps_stop_token: bool,
    /// Reports the log-probability of each token, and of this number of the likeliest alternatives.
    pub logprobs: Option<u32>,
    /// Reports the same for the prompt's tokens. The whole prompt is then computed, whether or not
    /// it is cached.
    pub prompt_logprobs: bool,
    /// Priority; higher values are scheduled first under policies that use priorities.
    pub priority: i32,
    /// Cache salt: requests of different salts never share a page. The empty salt is the shared
    /// one.
    pub salt: String,
    /// Adapter to compute with, one of [`Model::adapters`](crate::Model::adapters). Empty for none.
    pub adapter: String,
    /// Prompt ranges that stand for other content, such as images. The model must support them.
    pub passages: Vec<Passage>,
    /// Lowest tier that is searched for the prefix.
    pub reads: Reach,
    /// Lowest tier that computed pages are written to.
    pub writes: Reach,
    /// Returns a checksum of the logits of the answer.
    pub logits_checksum: bool,
    /// Dropped when the engine has released the request.
    pub ticket: Option<Ticket>,
}

/// A further answer to the prompt of a [`Generate`]: its individual parameters. The others are
/// shared with the first answer.
#[derive(Debug)]
pub struct Sibling {
    /// Sampling parameters.
    pub sampling: Sampling,
    /// Grammar of the answer; unconstrained without one.
    pub grammar: Option<Box<dyn Grammar>>,
    /// Dropped when the engine has released the request.
    pub ticket: Option<Ticket>,
}

/// A value that a request holds while it occupies the engine. This can outlast its answer: its KV
/// may still be on its way to the host.
pub type Ticket = Arc<dyn Any + Send + Sync>;

impl Generate {
    /// Creates a request for the greedy continuation of a prompt.
    #[must_use]
    pub fn new(prompt: Vec<Token>, max_new_tokens: u32) -> Self {
        Self {
            prompt,
            max_new_tokens,
            sampling: Sampling::GREEDY,
            shaping: Shaping::default(),
            grammar: None,
            stop_tokens: Arc::new([]),
            keeps_stop_token: false,
            logprobs: None,
            prompt_logprobs: false,
            priority: 0,
            salt: String::new(),
            adapter: String::new(),
            passages: Vec::new(),
            reads: Reach::L3,
            writes: Reach::L3,
            logits_checksum: false,
            ticket: None,
        }
    }
}

/// A stream of updates of one answer. Dropping it cancels the request.
#[derive(Debug)]
pub struct Generation {
    id: RequestId,
    updates: mpsc::UnboundedReceiver<Update>,
    messages: DriverSender,
    has_ended: bool,
}

/// An event of an answer.
#[derive(Clone, Debug, PartialEq)]
pub enum Update {
    /// The prompt is computed or loaded, from the given sources. Sent once, before the first token.
    Started(Hits),
    /// Log-probabilities of the prompt's tokens, from the second on, if requested. Sent after
    /// [`Started`](Self::Started).
    Prompt(Vec<Logprobs>),
    /// Log-probability of the next token, if requested. Sent right before the token.
    Logprobs(Box<Logprobs>),
    /// The next token.
    Token(Token),
    /// The end of the answer; the last update.
    Ended(Ending),
}

/// The end of an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ending {
    /// Reason of the end.
    pub reason: EndReason,
    /// Checksum of the logits of all tokens, if requested.
    pub logits_checksum: Option<u64>,
}

/// The reason for which an answer ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum EndReason {
    /// The model produced a stop token, the grammar is complete, or the client finished the answer
    /// ([`Generation::finish`]).
    Stop,
    /// The answer has reached its token limit.
    Length,
    /// The request was cancelled, by its client or by a shutdown.
    Aborted,
    /// The grammar has exceeded its limits.
    Grammar,
    /// The request failed.
    Failed(FailReason),
    /// The device has failed permanently, and the engine has ended.
    DeviceLost,
}

impl Generation {
    pub(crate) fn new(
        id: RequestId,
        updates: mpsc::UnboundedReceiver<Update>,
        messages: DriverSender,
    ) -> Self {
        Self { id, updates, messages, has_ended: false }
    }

    /// Returns the next update; none after the end.
    pub async fn next(&mut self) -> Option<Update> {
        if self.has_ended {
            return None;
        }
        // The engine has died: no update follows.
        let update = self
            .updates
            .recv()
            .await
            .unwrap_or(Update::Ended(Ending { reason: EndReason::Aborted, logits_checksum: None }));
        self.has_ended = matches!(update, Update::Ended(_));
        Some(update)
    }

    /// Returns the id of the request.
    #[must_use]
    pub fn id(&self) -> RequestId {
        self.id
    }

    /// Ends the request as complete. Its KV is kept like that of every finished request; a
    /// cancelled request has no such guarantee.
    pub fn finish(mut self) {
        self.has_ended = true;
        self.messages.send(DriverMessage::Finish(self.id));
    }
}

impl Drop for Generation {
    fn drop(&mut self) {
        if !self.has_ended {
            self.messages.send(DriverMessage::Abort(self.id));
        }
    }
}
