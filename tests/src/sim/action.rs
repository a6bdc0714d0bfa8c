//! Actions: everything that can be done to a world, each one line of text. A list of actions is a
//! complete story; leaving some out gives another legal story, so lists can be shrunk.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use terrace_scheduler::{Outcome, Reach, Token};

use crate::world::Damage;

/// What a prompt begins with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Opening {
    /// Tokens from the first on: a common text.
    Text(Token),
    /// A conversation that has ended: its prompt and its answer. Counted from the latest.
    Conversation(u32),
}

/// What most requests do not ask for.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Wishes {
    /// A part of its prompt stands for something.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub passage: Option<PassageWish>,
    /// How far down the tiers it reads.
    #[serde(skip_serializing_if = "Reach::is_all")]
    pub reads: Reach,
    /// And how far it writes.
    #[serde(skip_serializing_if = "Reach::is_all")]
    pub writes: Reach,
    /// An adapter by number, instead of that of its namespace.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub adapter: Option<u32>,
}

impl Wishes {
    fn are_none(&self) -> bool {
        *self == Self::default()
    }
}

/// A passage, as far as the prompt goes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PassageWish {
    /// Its first position, modulo the length of the prompt.
    pub start: u32,
    /// Its tokens at the most.
    pub tokens: u32,
    /// What it stands for; 0 for nothing but its tokens.
    pub content: u32,
    /// Whether it is not to be cut.
    pub is_whole: bool,
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
        /// What it asks for besides.
        #[serde(default, skip_serializing_if = "Wishes::are_none")]
        wishes: Wishes,
        /// How many more answers to its prompt come with it.
        #[serde(default, skip_serializing_if = "is_none")]
        siblings: u32,
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
    /// The device gets through with the first step that it has not been through.
    Execute,
    /// The device gets through with the next layer of that step.
    ExecuteLayer,
    /// The n-th outcome that is owed arrives.
    Report(u32, Outcome),
    /// The n-th outcome that is owed, if it is of a load-back, will be this one: its bytes are there.
    Arrive(u32, Outcome),
    /// As much is known of the n-th outcome that is owed, if it is of a copy between device and host: of its bytes,
    /// those of one layer are there.
    ArriveLayer(u32, u32, Outcome),
    /// The n-th outcome that is owed arrives, but a page was damaged on the way.
    ReportDamaged(u32, u32, Damage),
    /// The n-th of the latest outcomes arrives again.
    Repeat(u32),
    /// Time passes, in microseconds.
    Wait(u64),
    /// The cache is cleared.
    Clear,
    /// The weights are replaced, by the n-th, if no step is in flight.
    ReplaceWeights(u32),
    /// L3 restarts; `true` if old objects remain.
    RestartL3(bool),
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde asks for a reference")]
fn is_none(siblings: &u32) -> bool {
    *siblings == 0
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
