//! One answer of the engine, as text.

use std::time::Instant;

use futures_util::stream::{self, Stream};
use terrace_engine::{EndReason, Generation, Logprobs, Update};
use terrace_model::Decoder;
use terrace_scheduler::{Hits, Token};

use crate::echo::Echo;
use crate::logprobs::{Scored, Scribe};
use crate::metrics::AnswerClock;
use crate::stop::StopMatcher;
use crate::tool_calls::Call;

/// An answer under way. Dropping it calls the request off.
#[derive(Debug)]
pub(crate) struct Answer {
    generation: Option<Generation>,
    decoder: Option<Decoder>,
    stops: StopMatcher,
    /// Stop strings are not looked for in so many tokens.
    min_tokens: u32,
    /// The prompt, until it is told.
    echo: Option<Echo>,
    /// Whether the engine sends log-probabilities of the prompt.
    scores_prompt: bool,
    /// Tells log-probabilities, if they were asked for.
    scribe: Option<Scribe>,
    /// Log-probabilities of the next token.
    logprobs: Option<Box<Logprobs>>,
    /// Tokens that mark calls, and their text.
    marks: Vec<(Token, &'static str)>,
    tokens: u32,
    hits: Hits,
    first_token_at: Option<Instant>,
    clock: AnswerClock,
    /// The end, once the text before it has been handed out.
    ending: Option<Piece>,
}

/// Something new of an answer.
#[derive(Clone, Debug)]
pub(crate) enum Piece {
    /// More text, never none.
    Text(Fragment),
    /// More reasoning, never none.
    Reasoning(Fragment),
    /// A call of a function.
    Call(Call),
    /// The end of a complete answer.
    Complete(Complete),
    /// The end of an answer that failed or was aborted.
    Unfinished(EndReason),
}

/// Some text of an answer.
#[derive(Clone, Debug, Default)]
pub(crate) struct Fragment {
    pub(crate) text: String,
    /// The tokens that begin in it and how likely they were, if that was asked for.
    pub(crate) scored: Vec<Scored>,
    /// Tokens of the answer up to this text.
    pub(crate) tokens: u32,
}

impl Fragment {
    pub(crate) fn push(&mut self, mut more: Fragment) {
        self.tokens = self.tokens.max(more.tokens);
        self.text.push_str(&more.text);
        self.scored.append(&mut more.scored);
    }

    fn is_empty(&self) -> bool {
        self.text.is_empty() && self.scored.is_empty()
    }
}

impl From<String> for Fragment {
    fn from(text: String) -> Self {
        Self { text, ..Self::default() }
    }
}

/// Options of an answer.
#[derive(Debug)]
pub(crate) struct Manner {
    pub(crate) stops: Vec<String>,
    pub(crate) keeps_stop: bool,
    pub(crate) min_tokens: u32,
    /// The prompt, if it is part of the answer.
    pub(crate) echo: Option<Echo>,
    /// Whether log-probabilities are returned.
    pub(crate) is_scored: bool,
    pub(crate) marks: Vec<(Token, &'static str)>,
}

/// Figures of a complete answer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Complete {
    pub(crate) finish: Finish,
    pub(crate) tokens: u32,
    /// Tokens until the end of the reasoning.
    pub(crate) reasoning_tokens: u32,
    pub(crate) hits: Hits,
    /// Unless it was not asked for, or a stop string ended the answer before its last token.
    pub(crate) logits_checksum: Option<u64>,
    pub(crate) first_token_at: Option<Instant>,
}

/// Reason for the end of an answer.
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
        manner: Manner,
        clock: AnswerClock,
    ) -> Self {
        let Manner { stops, keeps_stop, min_tokens, echo, is_scored, marks } = manner;
        Self {
            generation: Some(generation),
            decoder: Some(decoder),
            stops: StopMatcher::new(stops).keeping_stop(keeps_stop),
            min_tokens,
            marks,
            scores_prompt: is_scored && echo.is_some(),
            echo,
            scribe: is_scored.then(Scribe::default),
            logprobs: None,
            tokens: 0,
            hits: Hits::default(),
            first_token_at: None,
            clock,
            ending: None,
        }
    }

    /// Returns the pieces in order. The last is the end.
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
                Update::Started(hits) => {
                    self.hits = hits;
                    self.clock.started(hits);
                    if !self.scores_prompt
                        && let Some(prompt) = self.tell_prompt(Vec::new())
                    {
                        return Some(prompt);
                    }
                }
                Update::Prompt(logprobs) => {
                    if let Some(prompt) = self.tell_prompt(logprobs) {
                        return Some(prompt);
                    }
                }
                Update::Logprobs(logprobs) => self.logprobs = Some(logprobs),
                Update::Token(token) => {
                    self.tokens += 1;
                    self.clock.token();
                    self.first_token_at.get_or_insert_with(Instant::now);
                    let text = match self.marks.iter().find(|(mark, _)| *mark == token) {
                        Some((_, text)) => (*text).to_owned(),
                        None => self.decoder.as_mut()?.push(token),
                    };
                    let logprobs = self.logprobs.take();
                    if let Some(scribe) = &mut self.scribe {
                        scribe.add(token, logprobs.map(|logprobs| *logprobs), &text);
                    }
                    let (text, has_stopped) = self.look_for_stops(text);
                    if has_stopped {
                        self.generation.take()?.finish();
                        let last = self.fragment(text);
                        return Some(self.end(last, Finish::Stop, None));
                    }
                    let fragment = self.fragment(text);
                    if !fragment.is_empty() {
                        return Some(Piece::Text(fragment));
                    }
                }
                Update::Ended(ending) => {
                    self.generation = None;
                    let finish = match ending.reason {
                        EndReason::Stop => Finish::Stop,
                        EndReason::Length => Finish::Length,
                        EndReason::Aborted
                        | EndReason::Grammar
                        | EndReason::Failed(_)
                        | EndReason::DeviceLost => {
                            return Some(Piece::Unfinished(ending.reason));
                        }
                    };
                    let rest = self.decoder.take()?.finish();
                    let (mut text, has_stopped) = self.look_for_stops(rest);
                    if has_stopped {
                        let last = self.fragment(text);
                        return Some(self.end(last, Finish::Stop, ending.logits_checksum));
                    }
                    text.push_str(&self.stops.finish());
                    let mut last = self.fragment(text);
                    last.scored.extend(self.scribe.iter_mut().flat_map(Scribe::rest));
                    return Some(self.end(last, finish, ending.logits_checksum));
                }
            }
        }
    }

    /// The prompt, if it is part of the answer.
    fn tell_prompt(&mut self, logprobs: Vec<Logprobs>) -> Option<Piece> {
        let text = self.echo.take()?.tell(logprobs, self.scribe.as_mut());
        let fragment = self.fragment(text);
        (!fragment.is_empty()).then_some(Piece::Text(fragment))
    }

    /// Returns the text that is certainly before any stop string, and whether a stop string was found.
    fn look_for_stops(&mut self, text: String) -> (String, bool) {
        match self.tokens <= self.min_tokens {
            true => (text, false),
            false => self.stops.push(&text),
        }
    }

    fn fragment(&mut self, text: String) -> Fragment {
        let scored = self.scribe.as_mut().map(|scribe| scribe.told(&text)).unwrap_or_default();
        Fragment { text, scored, tokens: self.tokens }
    }

    fn end(&mut self, last: Fragment, finish: Finish, logits_checksum: Option<u64>) -> Piece {
        self.clock.complete(finish, self.tokens);
        let complete = Piece::Complete(Complete {
            finish,
            tokens: self.tokens,
            reasoning_tokens: 0,
            hits: self.hits,
            logits_checksum,
            first_token_at: self.first_token_at,
        });
        if last.is_empty() {
            return complete;
        }
        self.ending = Some(complete);
        Piece::Text(last)
    }
}
