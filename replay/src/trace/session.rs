//! Sessions: consecutive turns, and answers that later prompts contain.

use std::ops::Range;

use terrace_cache::{HashedMap, Token};

use super::{Trace, TraceRequest};

/// The place of a request in a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Turn {
    /// Session: any number common to its turns and unique to them.
    pub session: u64,
    /// User's think time after the answer before it. If absent, the turn arrives at its own time,
    /// but not before that answer.
    pub think_us: Option<u64>,
}

/// Links of a turn to other turns of its session.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Link {
    /// The session, numbered from 0.
    pub(crate) session: u32,
    pub(crate) think_us: Option<u64>,
    /// The turn whose answer it waits for.
    pub(crate) after: Option<u32>,
    /// The turn whose prompt contains its answer.
    pub(crate) answer_in: Option<u32>,
}

impl Trace {
    /// Returns whether any request waits for the answer to another.
    #[must_use]
    pub fn has_sessions(&self) -> bool {
        self.requests.iter().any(|request| request.link.is_some_and(|link| link.after.is_some()))
    }

    /// Links the turns of each session, which are sorted by arrival.
    pub(super) fn connect_turns(&mut self, turns: &[(u32, Turn)]) {
        let mut latest: HashedMap<u64, (u32, u32)> = HashedMap::default();
        for &(place, turn) in turns {
            let next_session = latest.len() as u32;
            let before = latest.get(&turn.session).copied();
            let session = before.map_or(next_session, |(session, _)| session);
            let after = before.map(|(_, place)| place);
            if let Some(after) = after {
                let answer_in = self.extends(after, place).then_some(place);
                if let Some(link) = &mut self.requests[after as usize].link {
                    link.answer_in = answer_in;
                }
            }
            latest.insert(turn.session, (session, place));
            let think_us = turn.think_us.filter(|_| after.is_some());
            let link = Link { session, think_us, after, answer_in: None };
            self.requests[place as usize].link = Some(link);
        }
    }

    /// Returns whether a prompt extends another.
    fn extends(&self, earlier: u32, later: u32) -> bool {
        let [earlier, later] = [earlier, later].map(|place| &self.requests[place as usize]);
        later.input_tokens > earlier.input_tokens
            && self.blocks(later).starts_with(self.blocks(earlier))
    }

    /// Returns the tokens of an answer at these positions, counted from the prompt's start, as far
    /// as a later prompt contains them.
    pub(crate) fn answer_tokens(
        &self,
        request: &TraceRequest,
        positions: Range<u32>,
    ) -> impl Iterator<Item = Token> {
        let told_by = request.link.and_then(|link| link.answer_in);
        let told_by = told_by.map(|place| &self.requests[place as usize]);
        let blocks = told_by.map_or(&[][..], |later| self.blocks(later));
        let end = told_by.map_or(0, |later| later.input_tokens);
        positions.take_while(move |&position| position < end).map(move |position| {
            blocks[(position / self.block_tokens) as usize] * self.block_tokens
                + position % self.block_tokens
        })
    }

    /// Returns the prompt that contains an answer, and its number of cached tokens when the answer
    /// is complete: the KV of the last one is never computed.
    pub(super) fn with_answer(&self, request: &TraceRequest) -> Option<(&TraceRequest, u32)> {
        let later = &self.requests[request.link?.answer_in? as usize];
        let computed = request.input_tokens.saturating_add(request.output_tokens - 1);
        Some((later, computed.min(later.input_tokens)))
    }
}
