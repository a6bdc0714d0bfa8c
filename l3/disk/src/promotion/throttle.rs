//! Admission of promotions: each object once, a bounded number, and none while memory is short.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use tokio::time::Instant;

use super::PromotionConfig;
use super::PromotionStats;
use terrace_l3::ObjectId;

/// State of every promotion that is active or ended recently.
#[derive(Debug)]
pub(crate) struct Throttle {
    active_max: u64,
    remember: Duration,
    remembered_max: usize,
    cooldown: Duration,
    /// Ordered, so that the generations of an object are neighbours.
    entries: BTreeMap<ObjectId, PromotionEntry>,
    /// Ended promotions, each exactly once. Only these are ever forgotten, so an active promotion
    /// is never lost by time.
    ended: VecDeque<(Instant, ObjectId)>,
    /// Time when a promotion last found no memory.
    starved: Option<Instant>,
    stats: PromotionStats,
}

/// Outcome of a promotion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PromotionOutcome {
    /// The object is in memory.
    Done,
    /// It was in memory already.
    AlreadyResident,
    /// The object is no longer on disk, or is unreadable.
    Vanished,
    /// Memory had no room.
    NoMemory,
    /// Any other failure.
    Failed,
}

#[derive(Debug)]
struct PromotionEntry {
    state: PromotionState,
    revoked: bool,
}

/// State of a promotion. Outcomes after which the object may be promoted again at once have no
/// state: an object that vanished is not on disk, and a lack of memory pauses all promotions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PromotionState {
    /// Waiting for a worker.
    Triggered,
    InFlight,
    Done,
    Failed,
    AlreadyResident,
}

impl PromotionState {
    fn is_active(self) -> bool {
        match self {
            PromotionState::Triggered | PromotionState::InFlight => true,
            PromotionState::Done | PromotionState::Failed | PromotionState::AlreadyResident => {
                false
            }
        }
    }
}

impl Throttle {
    pub(crate) fn new(config: &PromotionConfig) -> Self {
        Self {
            active_max: u64::from(config.queue_max),
            remember: Duration::from_millis(config.remember_ms),
            remembered_max: config.remembered_max as usize,
            cooldown: Duration::from_millis(config.cooldown_ms),
            entries: BTreeMap::new(),
            ended: VecDeque::new(),
            starved: None,
            stats: PromotionStats::default(),
        }
    }

    /// Starts a promotion of the object unless it is refused; returns whether it did. The promotion
    /// is active until its [`end`](Self::end).
    pub(crate) fn trigger(&mut self, id: ObjectId, now: Instant) -> bool {
        self.forget(now);
        if self.entries.contains_key(&id) {
            self.stats.deduplicated += 1;
        } else if self.starved.is_some_and(|since| elapsed(since, now) < self.cooldown) {
            self.stats.cooled_down += 1;
        } else if self.active() >= self.active_max {
            self.stats.queue_full += 1;
        } else {
            self.stats.triggered += 1;
            self.entries
                .insert(id, PromotionEntry { state: PromotionState::Triggered, revoked: false });
            return true;
        }
        false
    }

    /// Records that a worker has started.
    pub(crate) fn start(&mut self, id: &ObjectId) {
        let entry = self.entries.get_mut(id).expect("an active entry stays");
        assert_eq!(entry.state, PromotionState::Triggered, "a promotion starts once");
        entry.state = PromotionState::InFlight;
    }

    /// Ends the promotion.
    pub(crate) fn end(&mut self, id: &ObjectId, ending: PromotionOutcome, now: Instant) {
        let entry = self.entries.get_mut(id).expect("an active entry stays");
        assert!(entry.state.is_active(), "a promotion ends once");
        let (count, remembered) = match ending {
            PromotionOutcome::Done => (&mut self.stats.done, Some(PromotionState::Done)),
            PromotionOutcome::AlreadyResident => {
                (&mut self.stats.already_resident, Some(PromotionState::AlreadyResident))
            }
            PromotionOutcome::Vanished => (&mut self.stats.vanished, None),
            PromotionOutcome::NoMemory => (&mut self.stats.no_memory, None),
            PromotionOutcome::Failed => (&mut self.stats.failed, Some(PromotionState::Failed)),
        };
        *count += 1;
        if ending == PromotionOutcome::NoMemory {
            self.starved = Some(now);
        }
        if let Some(state) = remembered {
            entry.state = state;
            self.ended.push_back((now, *id));
        } else {
            self.entries.remove(id);
        }
        self.forget(now);
    }

    /// Revokes the object's promotion if it is active.
    pub(crate) fn revoke(&mut self, id: &ObjectId) {
        if let Some(entry) = self.entries.get_mut(id) {
            entry.revoked = true;
        }
    }

    /// Like [`Throttle::revoke`], for all lower generations of the object.
    pub(crate) fn revoke_lower(&mut self, id: &ObjectId) {
        for (_, entry) in self.entries.range_mut(id.with_generation(0)..*id) {
            entry.revoked = true;
        }
    }

    /// Counters and gauges, without those of gets.
    pub(crate) fn stats(&mut self, now: Instant) -> PromotionStats {
        self.forget(now);
        let remembered = self.ended.len() as u64;
        PromotionStats { active: self.active(), remembered, ..self.stats }
    }

    pub(crate) fn is_active(&self, id: &ObjectId) -> bool {
        self.entries.get(id).is_some_and(|entry| entry.state.is_active())
    }

    pub(crate) fn is_revoked(&self, id: &ObjectId) -> bool {
        self.entries.get(id).is_some_and(|entry| entry.revoked)
    }

    fn active(&self) -> u64 {
        (self.entries.len() - self.ended.len()) as u64
    }

    fn forget(&mut self, now: Instant) {
        while let Some((since, id)) = self.ended.front()
            && (elapsed(*since, now) >= self.remember || self.ended.len() > self.remembered_max)
        {
            self.entries.remove(id);
            self.ended.pop_front();
        }
    }
}

fn elapsed(since: Instant, now: Instant) -> Duration {
    now.saturating_duration_since(since)
}

#[cfg(all(test, not(feature = "loom")))]
mod tests {
    use proptest::prelude::*;
    use terrace_cache::PageKey;

    use super::*;

    fn id(key: u128) -> ObjectId {
        ObjectId::page(PageKey(1), PageKey(key))
    }

    fn millis(millis: u64) -> Duration {
        Duration::from_millis(millis)
    }

    fn throttle(config: PromotionConfig) -> (Throttle, Instant) {
        (Throttle::new(&config), Instant::now())
    }

    #[test]
    fn an_object_is_promoted_once() {
        for ending in
            [PromotionOutcome::Done, PromotionOutcome::AlreadyResident, PromotionOutcome::Failed]
        {
            let (mut throttle, start) = throttle(PromotionConfig::default());
            assert!(throttle.trigger(id(1), start));
            assert!(!throttle.trigger(id(1), start), "it waits");
            throttle.start(&id(1));
            assert!(!throttle.trigger(id(1), start), "it is under way");
            throttle.end(&id(1), ending, start + millis(5));
            assert!(!throttle.trigger(id(1), start + millis(1004)), "it is remembered");
            assert!(throttle.trigger(id(2), start), "each for itself");
            assert!(throttle.trigger(id(1), start + millis(1005)));
            assert_eq!(throttle.stats.deduplicated, 3);
        }
    }

    #[test]
    fn f37_an_active_promotion_never_expires() {
        let (mut throttle, start) = throttle(PromotionConfig::default());
        assert!(throttle.trigger(id(1), start));
        assert!(throttle.trigger(id(2), start));
        throttle.start(&id(2));
        let much_later = start + Duration::from_secs(1_000_000);
        assert!(!throttle.trigger(id(1), much_later));
        assert!(!throttle.trigger(id(2), much_later));
        throttle.end(&id(2), PromotionOutcome::Done, much_later);
        throttle.end(&id(1), PromotionOutcome::Done, much_later);
        assert!(!throttle.trigger(id(2), much_later + millis(999)), "its time begins with its end");
    }

    #[test]
    fn f36_a_promotion_that_failed_before_it_started_is_tried_again() {
        let (mut throttle, start) = throttle(PromotionConfig::default());
        assert!(throttle.trigger(id(1), start));
        throttle.end(&id(1), PromotionOutcome::Failed, start);
        assert!(!throttle.is_active(&id(1)), "it is not active");
        assert!(throttle.trigger(id(1), start + millis(1000)));
    }

    #[test]
    fn a_lack_of_memory_pauses_all_promotions() {
        let (mut throttle, start) = throttle(PromotionConfig::default());
        assert!(throttle.trigger(id(1), start));
        throttle.end(&id(1), PromotionOutcome::NoMemory, start);
        assert!(!throttle.trigger(id(1), start + millis(499)));
        assert!(!throttle.trigger(id(2), start + millis(499)));
        assert!(throttle.trigger(id(1), start + millis(500)), "the object itself is not at fault");
        let stats = throttle.stats(start);
        assert_eq!((stats.cooled_down, stats.deduplicated, stats.no_memory), (2, 0, 1));
    }

    #[test]
    fn vanished_objects_are_not_remembered() {
        let (mut throttle, start) = throttle(PromotionConfig::default());
        assert!(throttle.trigger(id(1), start));
        throttle.end(&id(1), PromotionOutcome::Vanished, start);
        assert!(throttle.trigger(id(1), start));
    }

    #[test]
    fn the_queue_and_the_memory_of_ended_promotions_are_limited() {
        let config =
            PromotionConfig { queue_max: 3, remembered_max: 2, ..PromotionConfig::default() };
        let (mut throttle, start) = throttle(config);
        let begun = (0..5).filter(|key| throttle.trigger(id(*key), start)).count();
        assert_eq!((begun, throttle.stats.queue_full), (3, 2));
        for key in 0..3 {
            throttle.end(&id(key), PromotionOutcome::Done, start);
        }
        assert_eq!(throttle.stats(start).remembered, 2);
        assert!(throttle.trigger(id(0), start), "the oldest is forgotten");
        assert!(!throttle.trigger(id(2), start));
    }

    #[derive(Clone, Copy, Debug)]
    enum Step {
        Trigger(u128),
        Start(u128),
        End(u128, PromotionOutcome),
        Wait(u64),
    }

    fn step() -> impl Strategy<Value = Step> {
        let ending = prop::sample::select(vec![
            PromotionOutcome::Done,
            PromotionOutcome::AlreadyResident,
            PromotionOutcome::Vanished,
            PromotionOutcome::NoMemory,
            PromotionOutcome::Failed,
        ]);
        prop_oneof![
            4 => (0u128..6).prop_map(Step::Trigger),
            2 => (0u128..6).prop_map(Step::Start),
            3 => ((0u128..6), ending).prop_map(|(key, ending)| Step::End(key, ending)),
            2 => (0u64..20).prop_map(Step::Wait),
        ]
    }

    proptest! {
        /// Compared with a model that knows only which promotions are active, and whether they
        /// started.
        #[test]
        fn active_promotions_stay_and_the_counts_add_up(
            steps in prop::collection::vec(step(), 0..200),
            queue_max in 1u32..6,
            remembered_max in 0u32..6,
        ) {
            let (mut throttle, mut now) = throttle(PromotionConfig {
                queue_max,
                remembered_max,
                remember_ms: 15,
                cooldown_ms: 8,
                ..PromotionConfig::default()
            });
            let mut active = BTreeMap::new();
            let mut requests = 0;
            for step in steps {
                match step {
                    Step::Trigger(key) => {
                        requests += 1;
                        if throttle.trigger(id(key), now) {
                            prop_assert!(active.insert(key, false).is_none(), "a second ticket");
                        }
                    }
                    Step::Start(key) => {
                        if let Some(started @ false) = active.get_mut(&key) {
                            *started = true;
                            throttle.start(&id(key));
                        }
                    }
                    Step::End(key, ending) => {
                        if active.remove(&key).is_some() {
                            throttle.end(&id(key), ending, now);
                        }
                    }
                    Step::Wait(time) => now += millis(time),
                }
                for key in 0..6 {
                    prop_assert_eq!(throttle.is_active(&id(key)), active.contains_key(&key));
                }
                let stats = throttle.stats(now);
                let refused = stats.deduplicated + stats.cooled_down + stats.queue_full;
                let ended = stats.done
                    + stats.already_resident
                    + stats.vanished
                    + stats.no_memory
                    + stats.failed;
                prop_assert_eq!(stats.triggered + refused, requests);
                prop_assert_eq!(stats.triggered, ended + stats.active);
                prop_assert_eq!(stats.active, active.len() as u64);
                prop_assert!(stats.active <= u64::from(queue_max));
                prop_assert!(stats.remembered <= u64::from(remembered_max));
                prop_assert_eq!(throttle.entries.len() as u64, stats.active + stats.remembered);
            }
        }
    }
}
