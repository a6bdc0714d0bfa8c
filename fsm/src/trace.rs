//! Transitions, written down and checked again.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};

use crate::event::EventName;
use crate::ids::{RequestId, Time};
use crate::state::StateName;

/// One change of one request's state.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Transition {
    /// When.
    pub at: Time,
    /// Whose.
    pub request: RequestId,
    /// The state before.
    pub from: StateName,
    /// What happened.
    pub event: EventName,
    /// The state after.
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
    /// Its place in the trace.
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

/// Lives the recorded lives again and tells the state that each request ended up in.
///
/// A trace may begin with requests in any state, as after a restart of the recording; from then on
/// each transition must start where the request's last one ended and lead where the lifecycle says.
///
/// # Errors
/// The first transition that could not have happened.
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
