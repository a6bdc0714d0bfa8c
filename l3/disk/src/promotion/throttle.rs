//! Which promotions may begin: each once, only so many, and none while memory is short.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use tokio::time::Instant;

use super::PromotionConfig;
use super::PromotionStats;
use terrace_l3::ObjectId;

/// The state of every promotion that is under way or ended lately.
#[derive(Debug)]
pub(crate) struct Throttle {
    active_max: u64,
    remember: Duration,
    remembered_max: usize,
    cooldown: Duration,
    /// Ordered, so that the generations of an object are neighbours.
    entries: BTreeMap<ObjectId, Entry>,
    /// The ended ones, each exactly once. Only what is in here is ever forgotten, so that time never
    /// takes away an entry that somebody works on.
    ended: VecDeque<(Instant, ObjectId)>,
    /// When a promotion last found no memory.
    starved: Option<Instant>,
    stats: PromotionStats,
}

/// How a promotion ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ending {
    /// The object is in memory.
    Done,
    /// It was in memory already.
    AlreadyResident,
    /// It is not on disk any more, or not to be read any more.
    Vanished,
    /// Memory had no room.
    NoMemory,
    /// Anything else.
    Failed,
}

#[derive(Debug)]
struct Entry {
    state: State,
    revoked: bool,
}

/// Where a promotion is. One that ended without a reason to leave the object alone has no state: an
/// object that vanished is not on disk to be asked for, and a lack of memory pauses all promotions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// Waiting for a worker.
    Triggered,
    InFlight,
    Done,
    Failed,
    AlreadyResident,
}

impl State {
    fn is_active(self) -> bool {
        match self {
            State::Triggered | State::InFlight => true,
            State::Done | State::Failed | State::AlreadyResident => false,
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

    /// Whether a promotion of the object begins; it is active from then on, until its
    /// [`end`](Self::end).
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
            self.entries.insert(id, Entry { state: State::Triggered, revoked: false });
            return true;
        }
        false
    }

    /// A worker has taken it up.
    pub(crate) fn start(&mut self, id: &ObjectId) {
        let entry = self.entries.get_mut(id).expect("an active entry stays");
        assert_eq!(entry.state, State::Triggered, "a promotion starts once");
        entry.state = State::InFlight;
    }

    /// The promotion is over.
    pub(crate) fn end(&mut self, id: &ObjectId, ending: Ending, now: Instant) {
        let entry = self.entries.get_mut(id).expect("an active entry stays");
        assert!(entry.state.is_active(), "a promotion ends once");
        let (count, remembered) = match ending {
            Ending::Done => (&mut self.stats.done, Some(State::Done)),
            Ending::AlreadyResident => {
                (&mut self.stats.already_resident, Some(State::AlreadyResident))
            }
            Ending::Vanished => (&mut self.stats.vanished, None),
            Ending::NoMemory => (&mut self.stats.no_memory, None),
            Ending::Failed => (&mut self.stats.failed, Some(State::Failed)),
        };
        *count += 1;
        if ending == Ending::NoMemory {
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

    /// Marks the object's promotion, if it is under way, as not wanted any more.
    pub(crate) fn revoke(&mut self, id: &ObjectId) {
        if let Some(entry) = self.entries.get_mut(id) {
            entry.revoked = true;
        }
    }

    /// Likewise for all lower generations of the object.
    pub(crate) fn revoke_lower(&mut self, id: &ObjectId) {
        for (_, entry) in self.entries.range_mut(id.with_generation(0)..*id) {
            entry.revoked = true;
        }
    }

    /// Counters and gauges; the gets are not among them.
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
        for ending in [Ending::Done, Ending::AlreadyResident, Ending::Failed] {
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
    fn f37_time_never_takes_an_active_promotion_away() {
        let (mut throttle, start) = throttle(PromotionConfig::default());
        assert!(throttle.trigger(id(1), start));
        assert!(throttle.trigger(id(2), start));
        throttle.start(&id(2));
        let much_later = start + Duration::from_secs(1_000_000);
        assert!(!throttle.trigger(id(1), much_later));
        assert!(!throttle.trigger(id(2), much_later));
        throttle.end(&id(2), Ending::Done, much_later);
        throttle.end(&id(1), Ending::Done, much_later);
        assert!(!throttle.trigger(id(2), much_later + millis(999)), "its time begins with its end");
    }

    #[test]
    fn f36_a_promotion_that_failed_before_it_started_is_tried_again() {
        let (mut throttle, start) = throttle(PromotionConfig::default());
        assert!(throttle.trigger(id(1), start));
        throttle.end(&id(1), Ending::Failed, start);
        assert!(!throttle.is_active(&id(1)), "nobody waits for it");
        assert!(throttle.trigger(id(1), start + millis(1000)));
    }

    #[test]
    fn a_lack_of_memory_pauses_all_promotions() {
        let (mut throttle, start) = throttle(PromotionConfig::default());
        assert!(throttle.trigger(id(1), start));
        throttle.end(&id(1), Ending::NoMemory, start);
        assert!(!throttle.trigger(id(1), start + millis(499)));
        assert!(!throttle.trigger(id(2), start + millis(499)));
        assert!(throttle.trigger(id(1), start + millis(500)), "the object itself is not at fault");
        let stats = throttle.stats(start);
        assert_eq!((stats.cooled_down, stats.deduplicated, stats.no_memory), (2, 0, 1));
    }

    #[test]
    fn what_vanished_is_not_remembered() {
        let (mut throttle, start) = throttle(PromotionConfig::default());
        assert!(throttle.trigger(id(1), start));
        throttle.end(&id(1), Ending::Vanished, start);
        assert!(throttle.trigger(id(1), start));
    }

    #[test]
    fn only_so_many_wait_and_only_so_many_are_remembered() {
        let config =
            PromotionConfig { queue_max: 3, remembered_max: 2, ..PromotionConfig::default() };
        let (mut throttle, start) = throttle(config);
        let begun = (0..5).filter(|key| throttle.trigger(id(*key), start)).count();
        assert_eq!((begun, throttle.stats.queue_full), (3, 2));
        for key in 0..3 {
            throttle.end(&id(key), Ending::Done, start);
        }
        assert_eq!(throttle.stats(start).remembered, 2);
        assert!(throttle.trigger(id(0), start), "the oldest is forgotten");
        assert!(!throttle.trigger(id(2), start));
    }

    #[derive(Clone, Copy, Debug)]
    enum Step {
        Trigger(u128),
        Start(u128),
        End(u128, Ending),
        Wait(u64),
    }

    fn step() -> impl Strategy<Value = Step> {
        let ending = prop::sample::select(vec![
            Ending::Done,
            Ending::AlreadyResident,
            Ending::Vanished,
            Ending::NoMemory,
            Ending::Failed,
        ]);
        prop_oneof![
            4 => (0u128..6).prop_map(Step::Trigger),
            2 => (0u128..6).prop_map(Step::Start),
            3 => ((0u128..6), ending).prop_map(|(key, ending)| Step::End(key, ending)),
            2 => (0u64..20).prop_map(Step::Wait),
        ]
    }

    proptest! {
        /// Against a model that knows only which promotions are active, and whether they started.
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
