//! A request that has not ended, as the driver knows it.

use std::sync::Arc;

use terrace_scheduler::{Hits, RequestId, StateName, Time, Token};
use tokio::sync::mpsc;
use xxhash_rust::xxh3::xxh3_64_with_seed;

use crate::generation::{EndReason, Ending, Generate, Ticket, Update};
use crate::sampling::Sampling;
use crate::sampling::logprobs::PromptScores;
use crate::sampling::shaping::{GoesOn, Shaper};
use crate::stepper::{Chosen, Wanted};
use crate::view::RequestView;

/// A request, from its submission until the scheduler says that it has ended. Its asker has the whole
/// answer as soon as the last token is there: what is then still to be copied is not its business.
#[derive(Debug)]
pub(crate) struct Live {
    pub(crate) view: RequestView,
    updates: mpsc::UnboundedSender<Update>,
    sampling: Sampling,
    logprobs: Option<u32>,
    /// What changes its logits, if anything does; a step under way has it.
    shaper: Option<Box<Shaper>>,
    /// What its prompt's tokens are scored in, until they are told; a step under way has it.
    prompt_scores: Option<Box<PromptScores>>,
    stop_tokens: Arc<[Token]>,
    keeps_stop_token: bool,
    max_new_tokens: u32,
    checksum: Option<u64>,
    wants_no_more: bool,
    is_answered: bool,
    _ticket: Option<Ticket>,
}

impl Live {
    pub(crate) fn new(
        id: RequestId,
        generate: &mut Generate,
        now: Time,
    ) -> (Self, mpsc::UnboundedReceiver<Update>) {
        let (updates, receiver) = mpsc::unbounded_channel();
        let prompt_tokens = generate.prompt.len() as u32;
        let prompt_scores = generate.prompt_logprobs.then(|| {
            let top = generate.logprobs.unwrap_or(0);
            Box::new(PromptScores::new(generate.prompt.clone(), top))
        });
        let (shaping, grammar) = (std::mem::take(&mut generate.shaping), generate.grammar.take());
        let shaper = Shaper::new(shaping, grammar, &generate.prompt, &generate.stop_tokens);
        let live = Self {
            view: RequestView::new(id, generate.salt.clone(), prompt_tokens, now),
            updates,
            sampling: generate.sampling,
            logprobs: generate.logprobs,
            shaper: shaper.map(Box::new),
            prompt_scores,
            stop_tokens: generate.stop_tokens.clone(),
            keeps_stop_token: generate.keeps_stop_token,
            max_new_tokens: generate.max_new_tokens,
            checksum: generate.logits_checksum.then_some(0),
            wants_no_more: false,
            is_answered: false,
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
        if let Some(scores) = self.prompt_scores.take() {
            self.tell(Update::Prompt(scores.into_scores()));
        }
    }

    /// It has another token.
    pub(crate) fn produce(&mut self, chosen: Chosen) {
        if self.max_new_tokens == 0 {
            // It was chosen because every step chooses one, and nobody asked for it.
            self.answer(EndReason::Length);
            return;
        }
        self.view.new_tokens += 1;
        if let Some(checksum) = &mut self.checksum {
            *checksum = xxh3_64_with_seed(&chosen.checksum.to_le_bytes(), *checksum);
        }
        match &chosen.goes_on {
            GoesOn::Yes => {}
            GoesOn::Complete => return self.answer(EndReason::Stop),
            GoesOn::Failed(error) => {
                tracing::warn!("a grammar came to its limits: {error}");
                return self.answer(EndReason::Grammar);
            }
        }
        let ends = self.ends_with(&chosen);
        let is_stop_token = self.stop_tokens.contains(&chosen.token);
        if !ends || (is_stop_token && self.keeps_stop_token && !self.wants_no_more) {
            if let Some(shaper) = &mut self.shaper {
                shaper.push(chosen.token);
            }
            if let Some(logprobs) = chosen.logprobs {
                self.tell(Update::Logprobs(logprobs));
            }
            self.tell(Update::Token(chosen.token));
        }
        if ends {
            self.answer(EndReason::Stop);
        } else if self.view.new_tokens == self.max_new_tokens {
            self.answer(EndReason::Length);
        }
    }

    /// Its life is over: what remains is its story.
    pub(crate) fn end(mut self, reason: EndReason) -> RequestView {
        self.answer(reason);
        self.view
    }

    /// What the logits of a span are for, if it wants any: a span that begins at `start`, has so many
    /// tokens, and produces one or not.
    pub(crate) fn wanted(&mut self, start: u32, tokens: usize, produces: bool) -> Option<Wanted> {
        let rows = match &mut self.prompt_scores {
            Some(scores) => {
                scores.begin(start);
                tokens
            }
            None => usize::from(produces),
        };
        (rows > 0).then(|| Wanted {
            request: self.view.id,
            rows,
            produces,
            sampling: self.sampling,
            index: self.view.new_tokens,
            checksum: self.checksum.is_some(),
            logprobs: self.logprobs,
            shaper: self.shaper.take(),
            prompt_scores: self.prompt_scores.take(),
            chosen: None,
        })
    }

    /// Takes back what it has lent to a step.
    pub(crate) fn take_back(&mut self, wanted: &mut Wanted) {
        self.shaper = wanted.shaper.take();
        self.prompt_scores = wanted.prompt_scores.take();
    }

    /// Whether this token is its last.
    pub(crate) fn ends_with(&self, chosen: &Chosen) -> bool {
        self.wants_no_more
            || chosen.goes_on != GoesOn::Yes
            || self.stop_tokens.contains(&chosen.token)
    }

    /// Whether its asker has the whole answer.
    pub(crate) fn is_answered(&self) -> bool {
        self.is_answered
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
