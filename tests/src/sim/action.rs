//! Actions: everything that can be done to a world, each one line of text. A list of actions is a
//! complete story; leaving some out gives another legal story, so lists can be shrunk.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use terrace_scheduler::{Outcome, Token};

use crate::world::Damage;

/// What a prompt begins with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Opening {
    /// Tokens from the first on: a common text.
    Text(Token),
    /// A conversation that has ended: its prompt and its answer. Counted from the latest.
    Conversation(u32),
}

/// Something done to a world. Where an action speaks of the n-th of something, it means n modulo
/// how many there are; if there are none, nothing happens.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Action {
    /// A request arrives.
    Submit {
        /// What its prompt begins with.
        opening: Opening,
        /// How many tokens of a text.
        opening_tokens: u32,
        /// How many tokens of its own follow.
        own_tokens: u32,
        /// The first of those.
        own_start: Token,
        /// How many it may produce.
        new_tokens: u32,
        /// Its priority.
        priority: i32,
        /// Its adapter and salt, by number.
        namespace: u32,
        /// Whether its first tokens are its last.
        stops_at_once: bool,
    },
    /// The n-th live request is called off.
    Abort(u32),
    /// The n-th live request is as urgent as this from now on.
    SetPriority(u32, i32),
    /// The engine asks for a plan.
    Plan,
    /// The first step in flight is done; decodes accept so many tokens at the most.
    Compute(u32),
    /// The first step in flight comes to nothing.
    FailStep,
    /// The first step in flight is done, but for the part of its n-th member.
    FailMember(u32),
    /// The device gets through with the first step that it has not been at.
    Execute,
    /// The n-th outcome that is owed arrives.
    Report(u32, Outcome),
    /// The n-th outcome that is owed arrives, but a page was damaged on the way.
    ReportDamaged(u32, u32, Damage),
    /// The n-th of the latest outcomes arrives again.
    Repeat(u32),
    /// Time passes, in microseconds.
    Wait(u64),
    /// The cache is cleared.
    Clear,
    /// L3 restarts; `true` if old objects remain.
    RestartL3(bool),
}

impl fmt::Display for Action {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&serde_json::to_string(self).map_err(|_| fmt::Error)?)
    }
}

impl FromStr for Action {
    type Err = serde_json::Error;

    fn from_str(line: &str) -> Result<Self, Self::Err> {
        serde_json::from_str(line)
    }
}
