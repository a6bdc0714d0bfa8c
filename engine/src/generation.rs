//! Requests as the engine's users see them: what they ask for, and what they get back.

use std::any::Any;
use std::sync::Arc;

use serde::Serialize;
use terrace_scheduler::{FailReason, Hits, Passage, Reach, RequestId, Token};
use tokio::sync::mpsc;

use crate::happening::{Happening, Happenings};
use crate::sampling::Sampling;
use crate::sampling::grammar::Grammar;
use crate::sampling::logprobs::Logprobs;
use crate::sampling::shaping::Shaping;

/// What to generate.
#[derive(Debug)]
pub struct Generate {
    /// The tokens to start from.
    pub prompt: Vec<Token>,
    /// How many tokens to produce at the most. With none the prompt is all that there is to know about.
    pub max_new_tokens: u32,
    /// How they are chosen.
    pub sampling: Sampling,
    /// What changes their logits before.
    pub shaping: Shaping,
    /// How the answer may go on; in any way without.
    pub grammar: Option<Box<dyn Grammar>>,
    /// Tokens that end the answer.
    pub stop_tokens: Arc<[Token]>,
    /// Whether the token that ends the answer is part of it.
    pub keeps_stop_token: bool,
    /// Whether to tell the log-probability of each token, and of how many of the likeliest in its place.
    pub logprobs: Option<u32>,
    /// Whether to tell the same of the prompt's tokens. All of the prompt is computed then, whatever the
    /// cache holds of it.
    pub prompt_logprobs: bool,
    /// Higher goes first where priorities count.
    pub priority: i32,
    /// Whose cache it uses: requests of different salts never share a page. Empty for everybody's.
    pub salt: String,
    /// The adapter to compute with, one of [`Model::adapters`](crate::Model::adapters). Empty for none.
    pub adapter: String,
    /// Where the prompt says more than its tokens do, as with images. The model has to know what.
    pub passages: Vec<Passage>,
    /// How far down the tiers it looks for what it needs, and how far what it computes is written.
    pub reads: Reach,
    /// See `reads`.
    pub writes: Reach,
    /// Whether to sum up the logits that the answer came from.
    pub logits_checksum: bool,
    /// Dropped when the engine has forgotten the request.
    pub ticket: Option<Ticket>,
}

/// Another answer to the prompt of a [`Generate`]: what is its own. All else is as for the first.
#[derive(Debug)]
pub struct Sibling {
    /// How its tokens are chosen.
    pub sampling: Sampling,
    /// How it may go on; in any way without.
    pub grammar: Option<Box<dyn Grammar>>,
    /// Dropped when the engine has forgotten it.
    pub ticket: Option<Ticket>,
}

/// Something that a request holds for as long as it takes a place in the engine, which is longer than
/// its answer takes: what it computed may still be on its way to the host.
pub type Ticket = Arc<dyn Any + Send + Sync>;

impl Generate {
    /// The likeliest continuation of a prompt.
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

/// An answer as it comes. Dropping it calls the request off.
#[derive(Debug)]
pub struct Generation {
    id: RequestId,
    updates: mpsc::UnboundedReceiver<Update>,
    happenings: Happenings,
    has_ended: bool,
}

/// Something new about an answer.
#[derive(Clone, Debug, PartialEq)]
pub enum Update {
    /// The prompt is computed or loaded: where its KV came from. Comes once, before the first token.
    Started(Hits),
    /// How likely the prompt's tokens were, from the second on, if that was asked for. Comes after the
    /// start.
    Prompt(Vec<Logprobs>),
    /// How likely the next token was, if that was asked for. Comes right before it.
    Logprobs(Box<Logprobs>),
    /// The next token.
    Token(Token),
    /// Nothing more comes.
    Ended(Ending),
}

/// How an answer ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ending {
    /// Why.
    pub reason: EndReason,
    /// A checksum of the logits of all its tokens, if it was asked for.
    pub logits_checksum: Option<u64>,
}

/// Why an answer ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum EndReason {
    /// The model produced a stop token, the grammar is complete, or the asker had what it needed
    /// ([`Generation::finish`]).
    Stop,
    /// It has all the tokens that it may have.
    Length,
    /// It was called off, by its asker or because the engine shuts down.
    Aborted,
    /// Its grammar came to its limits.
    Grammar,
    /// It could not go on.
    Failed(FailReason),
    /// The device has failed for good, and the engine has ended.
    DeviceLost,
}

impl Generation {
    pub(crate) fn new(
        id: RequestId,
        updates: mpsc::UnboundedReceiver<Update>,
        happenings: Happenings,
    ) -> Self {
        Self { id, updates, happenings, has_ended: false }
    }

    /// The next update; nothing after the end.
    pub async fn next(&mut self) -> Option<Update> {
        if self.has_ended {
            return None;
        }
        // An engine that has died owes nothing more.
        let update = self
            .updates
            .recv()
            .await
            .unwrap_or(Update::Ended(Ending { reason: EndReason::Aborted, logits_checksum: None }));
        self.has_ended = matches!(update, Update::Ended(_));
        Some(update)
    }

    /// The request's name.
    #[must_use]
    pub fn id(&self) -> RequestId {
        self.id
    }

    /// Ends the request as one that has come to its end: what it computed is kept like that of any
    /// other that has finished, which a request that is called off is not promised.
    pub fn finish(mut self) {
        self.has_ended = true;
        self.happenings.send(Happening::Finish(self.id));
    }
}

impl Drop for Generation {
    fn drop(&mut self) {
        if !self.has_ended {
            self.happenings.send(Happening::Abort(self.id));
        }
    }
}
