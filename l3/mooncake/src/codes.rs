//! Result codes of the library and their handling. `docs/mooncake.md` has the same table.

use std::sync::atomic::{AtomicU64, Ordering};

use serde::Serialize;

/// Outcome of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CallOutcome {
    Done,
    /// No room, and none may be made: -200.
    Full,
    /// The object is larger than the buffer, or an argument is invalid: -600.
    BadLength,
    /// Another put of the object has not ended: -703.
    Unfinished,
    /// The object is absent: -704.
    Absent,
    /// The object exists: -705.
    AlreadyThere,
    /// A lease protects it: -706.
    Leased,
    /// The lease ran out during the read: -707.
    LeaseLapsed,
    /// The transfer to or from a storage node failed: -800.
    TransferFailed,
    /// The master does not answer: -900.
    MasterGone,
    /// Any other code.
    Other,
}

/// All outcomes, each with its code and its name in metrics.
const OUTCOMES: [(CallOutcome, Option<i64>, &str); 11] = [
    (CallOutcome::Done, Some(0), "done"),
    (CallOutcome::Full, Some(-200), "full"),
    (CallOutcome::BadLength, Some(-600), "bad-length"),
    (CallOutcome::Unfinished, Some(-703), "unfinished"),
    (CallOutcome::Absent, Some(-704), "absent"),
    (CallOutcome::AlreadyThere, Some(-705), "already-there"),
    (CallOutcome::Leased, Some(-706), "leased"),
    (CallOutcome::LeaseLapsed, Some(-707), "lease-lapsed"),
    (CallOutcome::TransferFailed, Some(-800), "transfer-failed"),
    (CallOutcome::MasterGone, Some(-900), "master-gone"),
    (CallOutcome::Other, None, "other"),
];

impl CallOutcome {
    /// Outcome for a code; zero and above are successes.
    pub(crate) fn of(code: i64) -> Self {
        let known = OUTCOMES.iter().find(|(_, known, _)| *known == Some(code.min(0)));
        known.map_or(Self::Other, |(outcome, _, _)| *outcome)
    }

    /// Returns true if a transfer may still be in flight although the call has ended: the library
    /// stops waiting for a slow transfer, and only reports that it has failed.
    pub(crate) fn may_continue(self) -> bool {
        matches!(self, Self::TransferFailed | Self::Other)
    }
}

/// Calls that are counted.
#[derive(Clone, Copy, Debug)]
pub(crate) enum CountedCall {
    Put,
    Get,
    Exists,
    Remove,
}

const CALLS: [&str; 4] = ["put", "get", "exists", "remove"];

/// Number of objects by call and outcome.
#[derive(Debug, Default)]
pub(crate) struct Outcomes([[AtomicU64; OUTCOMES.len()]; CALLS.len()]);

impl Outcomes {
    /// Counts a code and returns its outcome.
    pub(crate) fn count(&self, call: CountedCall, code: i64) -> CallOutcome {
        let outcome = CallOutcome::of(code);
        self.0[call as usize][outcome as usize].fetch_add(1, Ordering::Relaxed);
        outcome
    }

    /// The counters, in a fixed order.
    pub(crate) fn read(&self) -> Vec<OutcomeCount> {
        let row = |(call, row): (&&'static str, &[AtomicU64; OUTCOMES.len()])| {
            let cell = |((_, _, outcome), count): (&(_, _, &'static str), &AtomicU64)| {
                OutcomeCount { call, outcome, count: count.load(Ordering::Relaxed) }
            };
            OUTCOMES.iter().zip(row).map(cell).collect::<Vec<_>>()
        };
        CALLS.iter().zip(&self.0).flat_map(row).collect()
    }
}

/// Number of objects with an outcome of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct OutcomeCount {
    /// Call: put, get, exists or remove.
    pub call: &'static str,
    /// Outcome; the documentation lists their codes.
    pub outcome: &'static str,
    /// Number of objects.
    pub count: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_code_is_in_the_table_and_in_the_documentation() {
        let file = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/mooncake.md");
        let documentation = std::fs::read_to_string(file).expect("docs/mooncake.md is there");
        for (place, (outcome, code, name)) in OUTCOMES.into_iter().enumerate() {
            assert_eq!(outcome as usize, place, "counters are found by their place");
            let code = code.map_or("any other".to_owned(), |code| code.to_string());
            let row = format!("| {code} | `{name}` |");
            assert!(documentation.contains(&row), "docs/mooncake.md has no row {row}");
        }
        assert_eq!(CallOutcome::of(4096), CallOutcome::Done);
        assert_eq!(CallOutcome::of(-1), CallOutcome::Other);
    }

    #[test]
    fn outcomes_are_counted_by_call() {
        let outcomes = Outcomes::default();
        outcomes.count(CountedCall::Get, 77);
        outcomes.count(CountedCall::Get, -704);
        outcomes.count(CountedCall::Remove, -704);
        let counted: Vec<_> = outcomes.read().into_iter().filter(|it| it.count > 0).collect();
        let shown: Vec<_> = counted.iter().map(|it| (it.call, it.outcome, it.count)).collect();
        assert_eq!(shown, [("get", "done", 1), ("get", "absent", 1), ("remove", "absent", 1)]);
    }
}
