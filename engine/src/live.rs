//! The driver's state of a request that has not ended.

use std::ops::Range;
use std::sync::Arc;

use terrace_scheduler::{Hits, Passage, RequestId, Slot, StateName, Time, Token};
use tokio::sync::mpsc;
use xxhash_rust::xxh3::xxh3_64_with_seed;

use crate::batch::{Batch, Choice, Wanted};
use crate::generation::{EndReason, Ending, Generate, Sibling, Ticket, Update};
use crate::sampling::Choosing;
use crate::sampling::chooser::Chosen;
use crate::sampling::grammar::Constraint;
use crate::sampling::logprobs::{Logprobs, PromptScores};
use crate::sampling::shaping::Continuation;
use crate::view::RequestView;

/// A request, from its submission until the scheduler reports its end. The client has the complete
/// answer with the last token; copies of its KV may still be in flight then.
#[derive(Debug)]
pub(crate) struct Live {
    pub(crate) view: RequestView,
    updates: mpsc::UnboundedSender<Update>,
    /// Updates to send next.
    unsent: Vec<Update>,
    /// Sampling parameters, sent to the model when the request is assigned a row.
    pub(crate) choosing: Arc<Choosing>,
    /// Adapter to compute with, if any.
    pub(crate) adapter: Option<Arc<str>>,
    /// Prompt ranges that stand for other content.
    pub(crate) passages: Arc<[Passage]>,
    /// Grammar of the answer, until the answer has ended.
    constraint: Option<Constraint>,
    /// Scores of the prompt's tokens, until they are sent.
    prompt_scores: Option<Box<PromptScores>>,
    /// The row assigned last.
    pub(crate) slot: Option<Slot>,
    stop_tokens: Arc<[Token]>,
    keeps_stop_token: bool,
    max_new_tokens: u32,
    checksum: Option<u64>,
    is_complete: bool,
    is_answered: bool,
    _ticket: Option<Ticket>,
}

impl Live {
    pub(crate) fn new(
        id: RequestId,
        generate: &Generate,
        own: Sibling,
        now: Time,
    ) -> (Self, mpsc::UnboundedReceiver<Update>) {
        let (updates, receiver) = mpsc::unbounded_channel();
        let prompt_tokens = generate.prompt.len() as u32;
        let prompt_scores =
            generate.prompt_logprobs.then(|| Box::new(PromptScores::new(generate.prompt.clone())));
        let shaping = generate.shaping.clone();
        let prompt = if shaping.repeats_cost() { generate.prompt.clone() } else { Vec::new() };
        let choosing = Choosing {
            sampling: own.sampling,
            shaping,
            ends: generate.stop_tokens.clone(),
            prompt,
            logprobs: generate.logprobs,
            logits: generate.logits_checksum,
        };
        let live = Self {
            view: RequestView::new(id, generate.salt.clone(), prompt_tokens, now),
            updates,
            unsent: Vec::new(),
            choosing: Arc::new(choosing),
            adapter: Some(generate.adapter.as_str()).filter(|name| !name.is_empty()).map(Arc::from),
            passages: generate.passages.as_slice().into(),
            constraint: own.grammar.map(Constraint::new),
            prompt_scores,
            slot: None,
            stop_tokens: generate.stop_tokens.clone(),
            keeps_stop_token: generate.keeps_stop_token,
            max_new_tokens: generate.max_new_tokens,
            checksum: generate.logits_checksum.then_some(0),
            is_complete: false,
            is_answered: false,
            _ticket: own.ticket,
        };
        (live, receiver)
    }

    /// Marks the answer as complete for the client.
    pub(crate) fn finish(&mut self) {
        self.is_complete = true;
    }

    /// Reports that the prompt is computed or loaded.
    pub(crate) fn start(&mut self, hits: Hits) {
        self.view.hits = hits;
        self.queue(Update::Started(hits));
        if let Some(scores) = self.prompt_scores.take() {
            self.queue(Update::Prompt(scores.into_scores()));
        }
    }

    /// Adds the scores of the prompt tokens that follow the positions from `start` on.
    pub(crate) fn take_scores(&mut self, start: u32, scores: Vec<Logprobs>) {
        if let Some(prompt_scores) = &mut self.prompt_scores {
            prompt_scores.take(start, scores);
        }
    }

    /// Adds a chosen token, and the checksum of its logits if requested.
    pub(crate) fn produce(&mut self, chosen: Chosen, logits_checksum: u64) {
        if self.is_answered {
            // The step was started before the end was known.
            return;
        }
        if self.max_new_tokens == 0 {
            // Every step chooses a token; this one was not requested.
            self.answer(EndReason::Length);
            return;
        }
        self.view.new_tokens += 1;
        if let Some(checksum) = &mut self.checksum {
            *checksum = xxh3_64_with_seed(&logits_checksum.to_le_bytes(), *checksum);
        }
        match &chosen.continuation {
            Continuation::Yes => {}
            Continuation::Complete => return self.answer(EndReason::Stop),
            Continuation::Failed(error) => {
                tracing::warn!("a grammar exceeded its limits: {error}");
                return self.answer(EndReason::Grammar);
            }
        }
        let ends = self.ends_with(&chosen);
        let is_stop_token = self.stop_tokens.contains(&chosen.token);
        if !ends || (is_stop_token && self.keeps_stop_token && !self.is_complete) {
            if let Some(constraint) = &self.constraint {
                constraint.push(chosen.token);
            }
            if let Some(logprobs) = chosen.logprobs {
                self.queue(Update::Logprobs(logprobs));
            }
            self.queue(Update::Token(chosen.token));
        }
        if ends {
            self.answer(EndReason::Stop);
        } else if self.view.new_tokens == self.max_new_tokens {
            self.answer(EndReason::Length);
        }
    }

    /// Ends the request, and returns its view for the history.
    pub(crate) fn end(mut self, reason: EndReason) -> RequestView {
        self.answer(reason);
        self.send_updates();
        self.view
    }

    /// Adds the use of the logits behind some positions to the batch, for the batch's next span,
    /// and returns the number of logit rows.
    pub(crate) fn want(&self, batch: &mut Batch, positions: Range<u32>, produces: bool) -> usize {
        let first = batch.scored.len();
        let logits = match &self.prompt_scores {
            Some(scores) => {
                batch.scored.extend_from_slice(scores.following(positions.clone()));
                positions.len()
            }
            None => usize::from(produces),
        };
        if logits > 0 {
            let index = positions.end.saturating_sub(self.view.prompt_tokens);
            let mask = || self.constraint.as_ref().map(|constraint| constraint.mask(index));
            let choice = produces.then(|| Choice { index, mask: mask() });
            let (span, scored) = (batch.spans.len(), first..batch.scored.len());
            batch.wanted.push(Wanted { span, choice, scored });
        }
        logits
    }

    /// Cancels masks that wait for a token of a failed step.
    pub(crate) fn call_off(&self) {
        if let Some(constraint) = &self.constraint {
            constraint.call_off();
        }
    }

    /// Returns whether this token is the last.
    pub(crate) fn ends_with(&self, chosen: &Chosen) -> bool {
        self.is_complete
            || chosen.continuation != Continuation::Yes
            || self.stop_tokens.contains(&chosen.token)
    }

    /// Returns whether the client has the complete answer.
    pub(crate) fn is_answered(&self) -> bool {
        self.is_answered
    }

    fn answer(&mut self, reason: EndReason) {
        if !self.is_answered {
            self.is_answered = true;
            self.constraint = None;
            self.queue(Update::Ended(Ending { reason, logits_checksum: self.checksum }));
        }
    }

    fn queue(&mut self, update: Update) {
        self.unsent.push(update);
    }

    /// Sends queued updates, which wakes the client; called after the next step has started. A
    /// closed channel is ignored: the drop of its receiver has cancelled the request.
    pub(crate) fn send_updates(&mut self) {
        for update in self.unsent.drain(..) {
            let _ = self.updates.send(update);
        }
    }
}

impl EndReason {
    /// Converts the end reason of the scheduler.
    pub(crate) fn of(ended: &terrace_scheduler::Ended) -> Self {
        match (ended.state, ended.reason) {
            (_, Some(reason)) => Self::Failed(reason),
            (StateName::Finished, None) => Self::Length,
            (_, None) => Self::Aborted,
        }
    }
}
