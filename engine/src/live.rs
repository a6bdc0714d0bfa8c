//! A request that has not ended, as the driver knows it.

use std::sync::Arc;
use std::time::Instant;

use terrace_scheduler::{Hits, RequestId, StateName, Time, Token};
use tokio::sync::mpsc;
use xxhash_rust::xxh3::xxh3_64_with_seed;

use crate::generation::{EndReason, Ending, Generate, Ticket, Update};
use crate::sampling::Sampling;
use crate::stepper::{Chosen, Wanted};
use crate::view::RequestView;

/// A request, from its submission until the scheduler says that it has ended. Its asker has the whole
/// answer as soon as the last token is there: what is then still to be copied is not its business.
#[derive(Debug)]
pub(crate) struct Live {
    pub(crate) view: RequestView,
    updates: mpsc::UnboundedSender<Update>,
    sampling: Sampling,
    stop_tokens: Arc<[Token]>,
    max_new_tokens: u32,
    checksum: Option<u64>,
    wants_no_more: bool,
    is_answered: bool,
    submitted_at: Instant,
    last_token_at: Option<Instant>,
    _ticket: Option<Ticket>,
}

impl Live {
    pub(crate) fn new(
        id: RequestId,
        generate: &Generate,
        now: Time,
    ) -> (Self, mpsc::UnboundedReceiver<Update>) {
        let (updates, receiver) = mpsc::unbounded_channel();
        let prompt_tokens = generate.prompt.len() as u32;
        let live = Self {
            view: RequestView::new(id, generate.salt.clone(), prompt_tokens, now),
            updates,
            sampling: generate.sampling,
            stop_tokens: generate.stop_tokens.clone(),
            max_new_tokens: generate.max_new_tokens,
            checksum: generate.logits_checksum.then_some(0),
            wants_no_more: false,
            is_answered: false,
            submitted_at: Instant::now(),
            last_token_at: None,
            _ticket: generate.ticket.clone(),
        };
        (live, receiver)
    }

    /// Its asker has what it needs.
    pub(crate) fn finish(&mut self) {
        self.wants_no_more = true;
    }

    /// Its prompt is computed or loaded.
    pub(crate) fn start(&mut self, hits: Hits) {
        self.view.hits = hits;
        self.tell(Update::Started(hits));
    }

    /// It has another token.
    pub(crate) fn produce(&mut self, chosen: &Chosen) {
        self.measure();
        self.view.new_tokens += 1;
        if let Some(checksum) = &mut self.checksum {
            *checksum = xxh3_64_with_seed(&chosen.checksum.to_le_bytes(), *checksum);
        }
        if self.ends_with(chosen.token) {
            self.answer(EndReason::Stop);
            return;
        }
        self.tell(Update::Token(chosen.token));
        if self.view.new_tokens == self.max_new_tokens {
            self.answer(EndReason::Length);
        }
    }

    /// Its life is over: what remains is its story.
    pub(crate) fn end(mut self, reason: EndReason) -> RequestView {
        self.answer(reason);
        self.view
    }

    /// What the next token is chosen by.
    pub(crate) fn wanted(&self) -> Wanted {
        Wanted {
            request: self.view.id,
            sampling: self.sampling,
            index: self.view.new_tokens,
            checksum: self.checksum.is_some(),
        }
    }

    /// Whether this token is its last.
    pub(crate) fn ends_with(&self, token: Token) -> bool {
        self.wants_no_more || self.stop_tokens.contains(&token)
    }

    /// Whether its asker has the whole answer.
    pub(crate) fn is_answered(&self) -> bool {
        self.is_answered
    }

    fn measure(&mut self) {
        let now = Instant::now();
        match self.last_token_at.replace(now) {
            Some(before) => {
                metrics::histogram!("terrace_inter_token_seconds").record(now - before);
            }
            None => {
                metrics::histogram!("terrace_time_to_first_token_seconds")
                    .record(now - self.submitted_at);
            }
        }
    }

    fn answer(&mut self, reason: EndReason) {
        if !self.is_answered {
            self.is_answered = true;
            self.tell(Update::Ended(Ending { reason, logits_checksum: self.checksum }));
        }
    }

    /// Whether anybody listens is not checked: whoever does not has called the request off.
    fn tell(&self, update: Update) {
        let _ = self.updates.send(update);
    }
}

impl EndReason {
    /// How the scheduler says that a request has ended.
    pub(crate) fn of(ended: &terrace_scheduler::Ended) -> Self {
        match (ended.state, ended.reason) {
            (_, Some(reason)) => Self::Failed(reason),
            (StateName::Finished, None) => Self::Length,
            (_, None) => Self::Aborted,
        }
    }
}
