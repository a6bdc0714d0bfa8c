//! What a store owes whoever comes back after a crash, as far as it follows from its answers.
//!
//! Objects may be evicted at any time, so an object that is durable is owed only as long as it is
//! known not to have been: up to the last look that found it there.

use std::collections::BTreeSet;

use terrace_l3::ObjectId;

use super::workload::{Record, Step, from_generation};

/// Something that must be so after a crash that interrupts an event from `from` on, before `to`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Promise {
    pub(crate) id: ObjectId,
    pub(crate) kind: Kind,
    pub(crate) from: usize,
    pub(crate) to: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// This generation is there, or a later one.
    Present,
    /// This generation is not there.
    Absent,
}

/// Everything that was promised in the course of a workload.
pub(crate) fn promises(record: &Record) -> Vec<Promise> {
    let mut promises = Vec::new();
    let mut firsts: BTreeSet<ObjectId> = BTreeSet::new();
    for id in &record.ids {
        promises.extend(absences(record, *id));
        if firsts.insert(id.with_generation(0)) {
            promises.extend(presences(record, id.with_generation(0)));
        }
    }
    promises
}

/// When some generation of an object must be there.
fn presences(record: &Record, first: ObjectId) -> Vec<Promise> {
    let mut promises = Vec::new();
    let mut owed: Option<(ObjectId, usize)> = None;
    let mut before: Option<&Step> = None;
    let mut end = |owed: &mut Option<(ObjectId, usize)>, to: usize| {
        if let Some((id, from)) = owed.take().filter(|(_, from)| *from < to) {
            promises.push(Promise { id, kind: Kind::Present, from, to });
        }
    };
    for step in &record.steps {
        // Evicted and stored again within a step, it would not be noticed to have been gone.
        let in_doubt = step.evicting && step.stores_any_of(&first);
        let is_kept = |id: &ObjectId| !in_doubt && !step.removes_from(id) && step.has_from(id);
        if owed.as_ref().is_some_and(|(id, _)| !is_kept(id)) {
            end(&mut owed, before.map_or(0, |before| before.end));
        }
        let durable = from_generation(&step.durable, &first).copied();
        let flushed = before.filter(|_| step.flushed).into_iter();
        let flushed = flushed.flat_map(|before| from_generation(&before.present, &first)).copied();
        let newest = durable.chain(flushed).filter(is_kept).max();
        if let Some(id) = newest
            && owed.is_none_or(|(owed, _)| owed < id)
        {
            end(&mut owed, step.end);
            owed = Some((id, step.end));
        }
        before = Some(step);
    }
    // Nothing is evicted when the store is closed, unless it was too full.
    let to = record.steps.last().map_or(0, |last| last.end);
    end(&mut owed, if record.evicted == 0 { usize::MAX } else { to });
    promises
}

/// When a generation of an object must not be there.
fn absences(record: &Record, id: ObjectId) -> Vec<Promise> {
    let mut promises = Vec::new();
    let mut since: Option<usize> = None;
    // A crash may have left an object and what replaces it, and the next one may take either.
    let (first, steps) = record.steps.split_first().expect("there is a first look");
    let mut was_absent = !first.present.contains(&id);
    for step in steps {
        if step.stored.contains(&id) {
            if let Some(from) = since.take().filter(|from| *from < step.begin) {
                let to = step.begin;
                promises.push(Promise { id, kind: Kind::Absent, from, to });
            }
            was_absent = false;
        }
        // Whoever replaces an object durably has taken it away durably.
        let replaced = from_generation(&step.durable, &id)
            .any(|later| *later != id && !step.evicting && !step.removes_from(later));
        if since.is_none() && ((step.flushed && was_absent) || replaced) {
            since = Some(step.end);
        }
        was_absent = !step.present.contains(&id);
    }
    promises.extend(since.map(|from| Promise { id, kind: Kind::Absent, from, to: usize::MAX }));
    promises
}
