//! Actions on a world, each a line of text. Any subset of a valid list of actions is valid too, so
//! lists can be minimised.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use terrace_scheduler::{Outcome, Reach, Token};

use crate::world::Damage;

/// Prefix of a prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Opening {
    /// Tokens from the given one on: a shared text.
    Text(Token),
    /// An ended conversation, counted from the latest: its prompt and its answer.
    Conversation(u32),
}

/// Optional properties of a request.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct RequestOptions {
    /// A range of the prompt that stands for other content.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub passage: Option<PassageOption>,
    /// Lowest tier that it reads.
    #[serde(skip_serializing_if = "Reach::is_all")]
    pub reads: Reach,
    /// Lowest tier that it writes.
    #[serde(skip_serializing_if = "Reach::is_all")]
    pub writes: Reach,
    /// Adapter by number, instead of that of its namespace.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub adapter: Option<u32>,
}

impl RequestOptions {
    fn are_none(&self) -> bool {
        *self == Self::default()
    }
}

/// A passage, clipped to the prompt.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PassageOption {
    /// First position, modulo the length of the prompt.
    pub start: u32,
    /// Largest number of tokens.
    pub tokens: u32,
    /// Content; 0 for plain tokens.
    pub content: u32,
    /// True if it must not be divided.
    pub is_whole: bool,
}

/// An action on a world. Indices are taken modulo the number of candidates; without candidates an
/// action has no effect.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Action {
    /// Submits a request.
    Submit {
        /// Prefix of its prompt.
        opening: Opening,
        /// Number of tokens of the prefix.
        opening_tokens: u32,
        /// Number of unique tokens behind the prefix.
        own_tokens: u32,
        /// First of the unique tokens.
        own_start: Token,
        /// Largest number of new tokens.
        new_tokens: u32,
        /// Its priority.
        priority: i32,
        /// Adapter and salt, by number.
        namespace: u32,
        /// True if it stops at its first tokens.
        stops_at_once: bool,
        /// Optional properties.
        #[serde(default, skip_serializing_if = "RequestOptions::are_none")]
        wishes: RequestOptions,
        /// Number of further answers to its prompt.
        #[serde(default, skip_serializing_if = "is_none")]
        siblings: u32,
    },
    /// Aborts the n-th live request.
    Abort(u32),
    /// Sets the priority of the n-th live request.
    SetPriority(u32, i32),
    /// Requests a plan.
    Plan,
    /// Completes the first step in flight; decodes accept at most this number of tokens.
    Compute(u32),
    /// Fails the first step in flight.
    FailStep,
    /// Completes the first step in flight, except for its n-th member, which fails.
    FailMember(u32),
    /// Executes the first step that the device has not executed.
    Execute,
    /// Executes the next layer of that step.
    ExecuteLayer,
    /// Reports the n-th pending outcome.
    Report(u32, Outcome),
    /// Moves the bytes of the n-th pending outcome, if it is a load-back, before it is reported.
    Arrive(u32, Outcome),
    /// Moves the bytes of one layer of the n-th pending outcome, if it is a copy between device and
    /// host, before it is reported.
    ArriveLayer(u32, u32, Outcome),
    /// Reports the n-th pending outcome, with a damaged page.
    ReportDamaged(u32, u32, Damage),
    /// Repeats the n-th of the latest outcomes.
    Repeat(u32),
    /// Advances the time, in microseconds.
    Wait(u64),
    /// Clears the cache.
    Clear,
    /// Replaces the weights by the n-th, if no step is in flight.
    ReplaceWeights(u32),
    /// Restarts L3; `true` if old objects remain.
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
