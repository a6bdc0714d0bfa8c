//! Which objects were released, and how far their removal has come.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use tokio::time::Instant;

use super::ReleaseConfig;
use crate::guard::after;
use crate::object::ObjectId;
use crate::stats::ReleaseStats;
use crate::store::{StoreError, Stored};

/// Every object that was released and that the store might still hand out.
///
/// A release takes the object in hand and its removal is tried. If that succeeds, the object is
/// gone, which is remembered for a while in case the store is wrong about it; if not, it is parked
/// and taken in hand again when it is due. A put takes it in hand as well, and may bring it back to
/// life.
#[derive(Debug)]
pub(crate) struct Ledger {
    entries: BTreeMap<ObjectId, Entry>,
    /// The parked ones by the time of their next try.
    due: BTreeSet<(Instant, ObjectId)>,
    /// Those that are gone, by the time until which that is remembered.
    gone: BTreeSet<(Instant, ObjectId)>,
    releases: u64,
    config: ReleaseConfig,
    stats: ReleaseStats,
}

#[derive(Clone, Copy, Debug)]
struct Entry {
    /// The number of its last release. Whoever took the object in hand before has no say any more.
    release: u64,
    failures: u32,
    stage: Stage,
}

#[derive(Clone, Copy, Debug)]
enum Stage {
    /// It is being removed, or put again.
    InHand,
    /// Its removal failed.
    Parked { due: Instant },
    /// The store says that it has removed it.
    Gone { until: Instant },
}

/// An object in hand: to be removed, or to be put again.
#[derive(Clone, Copy, Debug)]
pub(crate) struct InHand {
    pub(crate) id: ObjectId,
    release: u64,
}

/// Whether an object may be put.
#[derive(Clone, Debug)]
pub(crate) enum MayPut {
    /// It may: it was not released.
    Yes,
    /// When what was released is removed.
    AfterRemoving(InHand),
    /// It may not.
    No(StoreError),
}

impl Ledger {
    pub(crate) fn new(config: ReleaseConfig) -> Self {
        Self {
            entries: BTreeMap::new(),
            due: BTreeSet::new(),
            gone: BTreeSet::new(),
            releases: 0,
            config,
            stats: ReleaseStats::default(),
        }
    }

    /// Takes an object in hand for good.
    pub(crate) fn release(&mut self, id: ObjectId) -> InHand {
        self.stats.released += 1;
        let entry = self.new_entry();
        self.set(id, Some(entry));
        self.take(id)
    }

    /// The store says that the object is removed.
    pub(crate) fn removed(&mut self, object: InHand, now: Instant) {
        if let Some(entry) = self.in_hand(object) {
            self.stats.recovered += u64::from(entry.failures > 0);
            self.bury(object.id, entry, now);
        }
    }

    /// The store says so, and the object stays in hand to be put again.
    pub(crate) fn cleared(&mut self, object: InHand) {
        if let Some(entry) = self.in_hand(object) {
            self.stats.recovered += u64::from(entry.failures > 0);
        }
    }

    /// The object could not be removed.
    pub(crate) fn failed(&mut self, object: InHand, now: Instant) {
        if let Some(entry) = self.in_hand(object) {
            self.park(object.id, entry, now);
        }
    }

    /// Takes parked objects in hand whose time has come.
    pub(crate) fn take_due(&mut self, now: Instant) -> Vec<InHand> {
        let due = self.due.iter().take_while(|(due, _)| *due <= now);
        let ids = due.take(self.config.retry_batch_max.max(1) as usize).map(|(_, id)| *id);
        let ids: Vec<ObjectId> = ids.collect();
        self.retry(&ids)
    }

    /// Takes all parked objects in hand.
    pub(crate) fn take_parked(&mut self) -> Vec<InHand> {
        let ids: Vec<ObjectId> = self.due.iter().map(|(_, id)| *id).collect();
        self.retry(&ids)
    }

    /// Asks whether an object may be put.
    pub(crate) fn begin_put(&mut self, id: ObjectId, now: Instant) -> MayPut {
        self.forget(now);
        match self.entries.get(&id).map(|entry| entry.stage) {
            // What does not go must not become more.
            _ if self.due.len() > self.config.parked_max as usize => MayPut::No(StoreError::Full),
            None => MayPut::Yes,
            // Somebody else has it in hand.
            Some(Stage::InHand) => MayPut::No(StoreError::BeingWritten),
            Some(Stage::Parked { .. }) => MayPut::AfterRemoving(self.retry(&[id])[0]),
            Some(Stage::Gone { .. }) => MayPut::AfterRemoving(self.take(id)),
        }
    }

    /// Notes how a put went that had the object `in_hand` if it was released before, and says what
    /// to answer.
    pub(crate) fn end_put(
        &mut self,
        id: ObjectId,
        in_hand: Option<InHand>,
        result: Result<Stored, StoreError>,
        now: Instant,
    ) -> Result<Stored, StoreError> {
        if !self.entries.contains_key(&id) {
            return result;
        }
        let revived = in_hand.and_then(|object| self.in_hand(object));
        match (revived, &result) {
            (Some(_), Ok(Stored::New)) => self.set(id, None),
            (Some(_), Ok(Stored::AlreadyThere)) => {
                self.park_anew(id, now);
                return Err(StoreError::BeingWritten);
            }
            // Released while it was being put: the removal may have come before the bytes.
            (None, Ok(_)) => self.park_anew(id, now),
            // Nobody knows whether the bytes are there, or will be.
            (_, Err(error)) if error.may_have_happened() => self.park_anew(id, now),
            (Some(entry), Err(_)) => self.bury(id, entry, now),
            (None, Err(_)) => {}
        }
        result
    }

    /// Notes that so many gets were refused.
    pub(crate) fn refused(&mut self, gets: u64) {
        self.stats.gets_refused += gets;
    }

    /// Whether the object was released.
    pub(crate) fn hides(&self, id: ObjectId, now: Instant) -> bool {
        self.entries.get(&id).is_some_and(|entry| match entry.stage {
            Stage::InHand | Stage::Parked { .. } => true,
            Stage::Gone { until } => now < until,
        })
    }

    /// When the next parked object is due.
    pub(crate) fn next_due(&self) -> Option<Instant> {
        self.due.first().map(|(due, _)| *due)
    }

    pub(crate) fn stats(&self) -> ReleaseStats {
        ReleaseStats { parked: self.due.len() as u64, ..self.stats }
    }

    /// The entry of an object if it has not been released again since it was taken in hand.
    fn in_hand(&self, object: InHand) -> Option<Entry> {
        self.entries.get(&object.id).copied().filter(|entry| entry.release == object.release)
    }

    fn retry(&mut self, ids: &[ObjectId]) -> Vec<InHand> {
        self.stats.retries += ids.len() as u64;
        ids.iter().map(|id| self.take(*id)).collect()
    }

    fn take(&mut self, id: ObjectId) -> InHand {
        let entry = self.entries[&id];
        self.set(id, Some(Entry { stage: Stage::InHand, ..entry }));
        InHand { id, release: entry.release }
    }

    fn new_entry(&mut self) -> Entry {
        self.releases += 1;
        Entry { release: self.releases, failures: 0, stage: Stage::InHand }
    }

    /// As if it had been released again, and that had failed.
    fn park_anew(&mut self, id: ObjectId, now: Instant) {
        let entry = self.new_entry();
        self.park(id, entry, now);
    }

    fn park(&mut self, id: ObjectId, entry: Entry, now: Instant) {
        let pause = self.config.retry_ms.saturating_mul(1 << entry.failures.min(20));
        // Without any pause the retries would keep a thread busy.
        let pause = Duration::from_millis(pause.min(self.config.retry_max_ms).max(1));
        let stage = Stage::Parked { due: after(now, pause) };
        self.set(id, Some(Entry { failures: entry.failures.saturating_add(1), stage, ..entry }));
        self.stats.parked_most = self.stats.parked_most.max(self.due.len() as u64);
    }

    fn bury(&mut self, id: ObjectId, entry: Entry, now: Instant) {
        let until = after(now, Duration::from_millis(self.config.tombstone_ttl_ms));
        let stage = Stage::Gone { until };
        self.set(id, Some(Entry { failures: 0, stage, ..entry }));
        self.forget(now);
    }

    /// Forgets what was gone long enough, and the oldest of what is too much.
    fn forget(&mut self, now: Instant) {
        while let Some((until, id)) = self.gone.first().copied() {
            if now < until && self.gone.len() <= self.config.tombstones_max as usize {
                return;
            }
            self.set(id, None);
        }
    }

    /// Changes an entry and the orders that it is part of.
    fn set(&mut self, id: ObjectId, entry: Option<Entry>) {
        let before = match entry {
            Some(entry) => self.entries.insert(id, entry),
            None => self.entries.remove(&id),
        };
        match before.map(|before| before.stage) {
            None | Some(Stage::InHand) => {}
            Some(Stage::Parked { due }) => {
                self.due.remove(&(due, id));
            }
            Some(Stage::Gone { until }) => {
                self.gone.remove(&(until, id));
            }
        }
        match entry.map(|entry| entry.stage) {
            None | Some(Stage::InHand) => {}
            Some(Stage::Parked { due }) => {
                self.due.insert((due, id));
            }
            Some(Stage::Gone { until }) => {
                self.gone.insert((until, id));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use terrace_cache::PageKey;

    fn id(key: u128) -> ObjectId {
        ObjectId::page(PageKey(1), PageKey(key))
    }

    fn ledger() -> (Ledger, Instant) {
        let config = ReleaseConfig {
            retry_ms: 100,
            retry_max_ms: 350,
            retry_batch_max: 2,
            parked_max: 3,
            tombstone_ttl_ms: 1000,
            tombstones_max: 2,
        };
        (Ledger::new(config), Instant::now())
    }

    #[test]
    fn pauses_double_up_to_a_limit() {
        let (mut ledger, mut now) = ledger();
        let mut object = ledger.release(id(1));
        let mut pauses = Vec::new();
        for _ in 0..4 {
            ledger.failed(object, now);
            let due = ledger.next_due().unwrap();
            assert!(ledger.take_due(due - Duration::from_millis(1)).is_empty());
            pauses.push((due - now).as_millis());
            now = due;
            object = ledger.take_due(now)[0];
        }
        assert_eq!(pauses, [100, 200, 350, 350]);
        ledger.removed(object, now);
        assert_eq!(ledger.next_due(), None);
        let stats = ledger.stats();
        assert_eq!((stats.retries, stats.recovered, stats.parked, stats.parked_most), (4, 1, 0, 1));
    }

    #[test]
    fn nothing_that_is_parked_is_forgotten_and_while_it_is_too_much_nothing_is_put() {
        let (mut ledger, now) = ledger();
        for key in 0..5 {
            let object = ledger.release(id(key));
            ledger.failed(object, now);
        }
        let stats = ledger.stats();
        assert_eq!((stats.parked, stats.parked_most), (5, 5));
        let refused = |may_put| matches!(may_put, MayPut::No(StoreError::Full));
        assert!(refused(ledger.begin_put(id(7), now)) && refused(ledger.begin_put(id(1), now)));
        let later = now + Duration::from_secs(1);
        let mut take = || ledger.take_due(later);
        let batches = [take(), take(), take(), take()];
        assert_eq!(batches.each_ref().map(Vec::len), [2, 2, 1, 0]);
        batches.concat().into_iter().for_each(|object| ledger.removed(object, later));
        assert!(matches!(ledger.begin_put(id(7), later), MayPut::Yes));
    }

    #[test]
    fn what_is_gone_is_remembered_for_a_while() {
        let (mut ledger, now) = ledger();
        for key in 0..3 {
            let object = ledger.release(id(key));
            ledger.removed(object, now);
        }
        assert_eq!([0, 1, 2].map(|key| ledger.hides(id(key), now)), [false, true, true]);
        let later = now + Duration::from_secs(1);
        assert!(!ledger.hides(id(1), later));
        assert!(matches!(ledger.begin_put(id(1), later), MayPut::Yes));
        assert!(ledger.entries.is_empty() && ledger.gone.is_empty());
    }

    #[test]
    fn the_last_release_decides() {
        let (mut ledger, now) = ledger();
        let first = ledger.release(id(1));
        let second = ledger.release(id(1));
        ledger.failed(first, now);
        assert_eq!(ledger.next_due(), None);
        assert!(matches!(ledger.begin_put(id(1), now), MayPut::No(_)), "it is being removed");
        ledger.removed(second, now);
        ledger.failed(first, now);
        assert_eq!(ledger.next_due(), None);
    }

    #[test]
    fn a_put_brings_back_to_life_only_what_it_has_stored_itself() {
        let (mut ledger, now) = ledger();
        let in_hand = |ledger: &mut Ledger| {
            let object = ledger.release(id(1));
            ledger.removed(object, now);
            match ledger.begin_put(id(1), now) {
                MayPut::AfterRemoving(object) => Some(object),
                MayPut::Yes | MayPut::No(_) => None,
            }
        };
        let object = in_hand(&mut ledger);
        assert_eq!(ledger.end_put(id(1), object, Ok(Stored::New), now), Ok(Stored::New));
        assert!(ledger.entries.is_empty());

        let object = in_hand(&mut ledger);
        let lingers = ledger.end_put(id(1), object, Ok(Stored::AlreadyThere), now);
        assert_eq!(lingers, Err(StoreError::BeingWritten));
        assert_eq!(ledger.stats().parked, 1);

        let object = in_hand(&mut ledger);
        let failed = ledger.end_put(id(1), object, Err(StoreError::Full), now);
        assert_eq!((failed, ledger.stats().parked), (Err(StoreError::Full), 0));
        assert!(ledger.hides(id(1), now));

        let object = in_hand(&mut ledger);
        let late = StoreError::TimedOut(Duration::ZERO);
        assert_eq!(ledger.end_put(id(1), object, Err(late.clone()), now), Err(late));
        assert_eq!(ledger.take_parked().len(), 1, "it may arrive yet");
    }

    #[test]
    fn a_put_that_a_release_overtook_is_removed_after_it() {
        let (mut ledger, now) = ledger();
        assert!(matches!(ledger.begin_put(id(1), now), MayPut::Yes));
        let object = ledger.release(id(1));
        ledger.removed(object, now);
        assert_eq!(ledger.end_put(id(1), None, Ok(Stored::New), now), Ok(Stored::New));
        assert!(ledger.hides(id(1), now));
        assert_eq!(ledger.take_parked().len(), 1);
    }
}
