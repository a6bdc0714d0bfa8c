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
    /// The parked ones by the time of their next try, and by the age of their release.
    due: BTreeSet<(Instant, ObjectId)>,
    oldest: BTreeSet<(u64, ObjectId)>,
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
    /// How many hard pins are to be taken back, besides those that somebody has in hand.
    unpins: u16,
    failures: u32,
    stage: Stage,
}

#[derive(Clone, Copy, Debug)]
enum Stage {
    /// It is being removed, or put again.
    InHand,
    /// Its removal failed.
    Parked { due: Instant },
    /// The store says that it has removed it, or nobody tries any more.
    Gone { until: Instant },
}

/// An object in hand: to be removed, or to be put again.
#[derive(Clone, Copy, Debug)]
pub(crate) struct InHand {
    pub(crate) id: ObjectId,
    /// How many hard pins are to be taken back first.
    pub(crate) unpins: u16,
    release: u64,
}

/// Whether an object may be put.
#[derive(Clone, Copy, Debug)]
pub(crate) enum MayPut {
    /// It may: it was not released.
    Yes,
    /// When what was released is removed.
    AfterRemoving(InHand),
    /// It may not, because somebody else has it in hand.
    No,
}

impl Ledger {
    pub(crate) fn new(config: ReleaseConfig) -> Self {
        Self {
            entries: BTreeMap::new(),
            due: BTreeSet::new(),
            oldest: BTreeSet::new(),
            gone: BTreeSet::new(),
            releases: 0,
            config,
            stats: ReleaseStats::default(),
        }
    }

    /// Takes an object in hand for good.
    pub(crate) fn release(&mut self, id: ObjectId) -> InHand {
        self.stats.released += 1;
        // Each release takes back a pin, even if those before it could not yet.
        let unpins = self.owed(id).saturating_add(1);
        let entry = self.new_entry(unpins);
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
        let unpins = self.owed(object.id).saturating_add(object.unpins);
        if let Some(entry) = self.in_hand(object) {
            self.park(object.id, Entry { unpins, ..entry }, now);
        } else if let Some(entry) = self.entries.get_mut(&object.id) {
            // Released again meanwhile: that one takes back these pins as well.
            entry.unpins = unpins;
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
            None => MayPut::Yes,
            Some(Stage::InHand) => MayPut::No,
            Some(Stage::Parked { .. }) => MayPut::AfterRemoving(self.retry(&[id])[0]),
            Some(Stage::Gone { .. }) => MayPut::AfterRemoving(self.take(id)),
        }
    }

    /// Notes how a put went that had the object `in_hand` if it was released before, and says what
    /// to answer. `pin` tells whether the put came with a hard pin.
    pub(crate) fn end_put(
        &mut self,
        id: ObjectId,
        in_hand: Option<InHand>,
        pin: bool,
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
                self.park_anew(id, pin, now);
                return Err(StoreError::BeingWritten);
            }
            // Released while it was being put: the removal may have come before the bytes.
            (None, Ok(_)) => self.park_anew(id, pin, now),
            // Nobody knows whether the bytes are there, or will be.
            (_, Err(error)) if error.may_have_happened() => self.park_anew(id, pin, now),
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
        ReleaseStats { parked: self.oldest.len() as u64, ..self.stats }
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
        let Entry { release, unpins, .. } = self.entries[&id];
        self.set(id, Some(Entry { stage: Stage::InHand, unpins: 0, ..self.entries[&id] }));
        InHand { id, unpins, release }
    }

    fn owed(&self, id: ObjectId) -> u16 {
        self.entries.get(&id).map_or(0, |entry| entry.unpins)
    }

    fn new_entry(&mut self, unpins: u16) -> Entry {
        self.releases += 1;
        Entry { release: self.releases, unpins, failures: 0, stage: Stage::InHand }
    }

    /// As if it had been released again, and that had failed.
    fn park_anew(&mut self, id: ObjectId, unpin: bool, now: Instant) {
        let unpins = self.owed(id).max(u16::from(unpin));
        let entry = self.new_entry(unpins);
        self.park(id, entry, now);
    }

    fn park(&mut self, id: ObjectId, entry: Entry, now: Instant) {
        let pause = self.config.retry_ms.saturating_mul(1 << entry.failures.min(20));
        // Without any pause the retries would keep a thread busy.
        let pause = Duration::from_millis(pause.min(self.config.retry_max_ms).max(1));
        let stage = Stage::Parked { due: after(now, pause) };
        self.set(id, Some(Entry { failures: entry.failures.saturating_add(1), stage, ..entry }));
        while self.oldest.len() > self.config.parked_max as usize {
            let (_, id) = *self.oldest.first().expect("there are some");
            self.stats.abandoned += 1;
            self.bury(id, self.entries[&id], now);
        }
        self.stats.parked_most = self.stats.parked_most.max(self.oldest.len() as u64);
    }

    fn bury(&mut self, id: ObjectId, entry: Entry, now: Instant) {
        let until = after(now, Duration::from_millis(self.config.tombstone_ttl_ms));
        let stage = Stage::Gone { until };
        self.set(id, Some(Entry { unpins: 0, failures: 0, stage, ..entry }));
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
        match before.map(|before| (before.release, before.stage)) {
            None | Some((_, Stage::InHand)) => {}
            Some((release, Stage::Parked { due })) => {
                self.due.remove(&(due, id));
                self.oldest.remove(&(release, id));
            }
            Some((_, Stage::Gone { until })) => {
                self.gone.remove(&(until, id));
            }
        }
        match entry.map(|entry| (entry.release, entry.stage)) {
            None | Some((_, Stage::InHand)) => {}
            Some((release, Stage::Parked { due })) => {
                self.due.insert((due, id));
                self.oldest.insert((release, id));
            }
            Some((_, Stage::Gone { until })) => {
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
    fn what_is_parked_is_bounded_and_the_oldest_is_given_up() {
        let (mut ledger, now) = ledger();
        for key in 0..5 {
            let object = ledger.release(id(key));
            ledger.failed(object, now);
        }
        let stats = ledger.stats();
        assert_eq!((stats.parked, stats.parked_most, stats.abandoned), (3, 3, 2));
        assert!((0..5).all(|key| ledger.hides(id(key), now)), "given up, but still released");
        let later = now + Duration::from_secs(1);
        let mut take = || ledger.take_due(later).iter().map(|object| object.id).collect();
        let batches: [Vec<ObjectId>; 3] = [take(), take(), take()];
        assert_eq!(batches, [vec![id(2), id(3)], vec![id(4)], vec![]]);
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
        assert!(matches!(ledger.begin_put(id(1), now), MayPut::No), "it is being removed");
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
                MayPut::Yes | MayPut::No => None,
            }
        };
        let object = in_hand(&mut ledger);
        assert_eq!(ledger.end_put(id(1), object, false, Ok(Stored::New), now), Ok(Stored::New));
        assert!(ledger.entries.is_empty());

        let object = in_hand(&mut ledger);
        let lingers = ledger.end_put(id(1), object, false, Ok(Stored::AlreadyThere), now);
        assert_eq!(lingers, Err(StoreError::BeingWritten));
        assert_eq!(ledger.stats().parked, 1);

        let object = in_hand(&mut ledger);
        let failed = ledger.end_put(id(1), object, false, Err(StoreError::Full), now);
        assert_eq!((failed, ledger.stats().parked), (Err(StoreError::Full), 0));
        assert!(ledger.hides(id(1), now));

        let object = in_hand(&mut ledger);
        let late = StoreError::TimedOut(Duration::ZERO);
        assert_eq!(ledger.end_put(id(1), object, true, Err(late.clone()), now), Err(late));
        let parked = ledger.take_parked();
        assert_eq!(parked[0].unpins, 1, "it may arrive with its pin");
    }

    #[test]
    fn a_put_that_a_release_overtook_is_removed_after_it() {
        let (mut ledger, now) = ledger();
        assert!(matches!(ledger.begin_put(id(1), now), MayPut::Yes));
        let object = ledger.release(id(1));
        ledger.removed(object, now);
        assert_eq!(ledger.end_put(id(1), None, true, Ok(Stored::New), now), Ok(Stored::New));
        assert!(ledger.hides(id(1), now));
        assert_eq!(ledger.take_parked().len(), 1);
    }
}
