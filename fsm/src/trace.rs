//! Recorded transitions and their check.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};

use crate::event::EventName;
use crate::ids::{RequestId, Time};
use crate::state::StateName;

/// Change of a request's state.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Transition {
    /// Time of the change.
    pub at: Time,
    /// The request.
    pub request: RequestId,
    /// State before the event.
    pub from: StateName,
    /// The event.
    pub event: EventName,
    /// State after the event.
    pub to: StateName,
}

impl fmt::Display for Transition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {:?} -> {:?} ({:?})", self.request, self.from, self.to, self.event)
    }
}

/// A recorded transition that the lifecycle does not allow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IllegalTransition {
    /// Index of the transition in the trace.
    pub index: usize,
    /// The transition.
    pub transition: Transition,
}

impl fmt::Display for IllegalTransition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "transition {} of the trace is illegal: {}", self.index, self.transition)
    }
}

impl std::error::Error for IllegalTransition {}

/// Checks a trace against the lifecycle and returns the last state of each request.
///
/// A trace may begin with requests in any state, as after a restart of the recording. Each further transition of a
/// request must start in the state where its last one ended, and lead to the state that the lifecycle defines.
///
/// # Errors
/// The first illegal transition.
pub fn replay(
    trace: impl IntoIterator<Item = Transition>,
) -> Result<BTreeMap<RequestId, StateName>, IllegalTransition> {
    let mut states = BTreeMap::new();
    for (index, transition) in trace.into_iter().enumerate() {
        let known = states.insert(transition.request, transition.to);
        // An id may be used again once its request has ended.
        let starts_right = known.is_none_or(|state: StateName| {
            state == transition.from || (state.is_end() && transition.from == StateName::Submitted)
        });
        if !starts_right || transition.from.after(transition.event) != Some(transition.to) {
            return Err(IllegalTransition { index, transition });
        }
    }
    Ok(states)
}
