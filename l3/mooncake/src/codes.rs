//! What the library's codes mean, and what is done about each. `docs/mooncake.md` has the same table.

use std::sync::atomic::{AtomicU64, Ordering};

use serde::Serialize;

use super::library::PAYLOAD_LOST;

/// What a call came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    Done,
    /// No room, or none that may be made: -200.
    Full,
    /// The object is larger than the buffer, or an argument makes no sense: -600.
    BadLength,
    /// Somebody's put of the object has not ended: -703.
    Unfinished,
    /// There is no such object: -704.
    Absent,
    /// It is there already: -705.
    AlreadyThere,
    /// A lease keeps it: -706.
    Leased,
    /// The lease ran out while it was read: -707.
    LeaseLapsed,
    /// Bytes did not get through to or from a storage node: -800.
    TransferFailed,
    /// The master does not answer: -900.
    MasterGone,
    /// Any other code.
    Other,
}

/// All outcomes: the code, its name in metrics.
const OUTCOMES: [(Outcome, Option<i64>, &str); 11] = [
    (Outcome::Done, Some(0), "done"),
    (Outcome::Full, Some(-200), "full"),
    (Outcome::BadLength, Some(-600), "bad-length"),
    (Outcome::Unfinished, Some(-703), "unfinished"),
    (Outcome::Absent, Some(-704), "absent"),
    (Outcome::AlreadyThere, Some(-705), "already-there"),
    (Outcome::Leased, Some(-706), "leased"),
    (Outcome::LeaseLapsed, Some(-707), "lease-lapsed"),
    (Outcome::TransferFailed, Some(-800), "transfer-failed"),
    (Outcome::MasterGone, Some(-900), "master-gone"),
    (Outcome::Other, None, "other"),
];

impl Outcome {
    /// What a code means; everything from zero on is a success.
    pub(crate) fn of(code: i64) -> Self {
        if code == PAYLOAD_LOST {
            return Self::Absent;
        }
        let known = OUTCOMES.iter().find(|(_, known, _)| *known == Some(code.min(0)));
        known.map_or(Self::Other, |(outcome, _, _)| *outcome)
    }

    /// Whether bytes may still be on their way although the call has ended: the library stops waiting
    /// for a transfer when it has taken too long, and says no more than that it has failed.
    pub(crate) fn may_go_on(self) -> bool {
        matches!(self, Self::TransferFailed | Self::Other)
    }
}

/// The calls that are counted.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Call {
    Put,
    Get,
    Exists,
    Remove,
}

const CALLS: [&str; 4] = ["put", "get", "exists", "remove"];

/// How often each call came to what, object by object.
#[derive(Debug, Default)]
pub(crate) struct Outcomes([[AtomicU64; OUTCOMES.len()]; CALLS.len()]);

impl Outcomes {
    /// Counts a code and says what it means.
    pub(crate) fn count(&self, call: Call, code: i64) -> Outcome {
        let outcome = Outcome::of(code);
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

/// How often a call came to an outcome.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct OutcomeCount {
    /// Which call: put, get, exists or remove.
    pub call: &'static str,
    /// What it came to; the documentation says which code it is.
    pub outcome: &'static str,
    /// How many objects.
    pub count: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_code_has_its_place_in_the_table_and_in_the_documentation() {
        let file = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/mooncake.md");
        let documentation = std::fs::read_to_string(file).expect("docs/mooncake.md is there");
        for (place, (outcome, code, name)) in OUTCOMES.into_iter().enumerate() {
            assert_eq!(outcome as usize, place, "counters are found by their place");
            let code = code.map_or("any other".to_owned(), |code| code.to_string());
            let row = format!("| {code} | `{name}` |");
            assert!(documentation.contains(&row), "docs/mooncake.md has no row {row}");
        }
        assert_eq!(Outcome::of(4096), Outcome::Done);
        assert_eq!(Outcome::of(-1), Outcome::Other);
    }

    #[test]
    fn outcomes_are_counted_by_call() {
        let outcomes = Outcomes::default();
        outcomes.count(Call::Get, 77);
        outcomes.count(Call::Get, -704);
        outcomes.count(Call::Remove, -704);
        let counted: Vec<_> = outcomes.read().into_iter().filter(|it| it.count > 0).collect();
        let shown: Vec<_> = counted.iter().map(|it| (it.call, it.outcome, it.count)).collect();
        assert_eq!(shown, [("get", "done", 1), ("get", "absent", 1), ("remove", "absent", 1)]);
    }
}
