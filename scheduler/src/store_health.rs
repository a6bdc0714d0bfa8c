//! Health of L3: pages that it did not deliver, and back-off after failures.

use std::collections::VecDeque;
use std::time::Duration;

use terrace_cache::planted::{Bug, planted};
use terrace_cache::{HashedMap, Keys, PageKey};
use terrace_fsm::Time;

/// Number of key endings that are distinguished.
const ENDINGS: usize = 4096;

/// Pages that L3 failed to deliver recently, so that not every request asks for them again.
#[derive(Debug)]
pub(crate) struct NegativeCache {
    until: HashedMap<PageKey, Time>,
    /// Number of these keys by ending. Few keys are present and many are looked up, so most lookups end here.
    endings: Box<[u32; ENDINGS]>,
    oldest_first: VecDeque<(Time, PageKey)>,
    ttl: Duration,
    keys_max: usize,
}

impl NegativeCache {
    pub(crate) fn new(ttl: Duration, keys_max: u32) -> Self {
        Self {
            until: HashedMap::default(),
            endings: Box::new([0; ENDINGS]),
            oldest_first: VecDeque::new(),
            ttl,
            keys_max: keys_max as usize,
        }
    }

    pub(crate) fn insert(&mut self, key: PageKey, now: Time) {
        let until = now.after(self.ttl);
        if self.until.insert(key, until).is_none() {
            self.endings[ending(key)] += 1;
        }
        self.oldest_first.push_back((until, key));
        while self.oldest_first.len() > self.keys_max
            || self.oldest_first.front().is_some_and(|(until, _)| *until <= now)
        {
            let Some((until, key)) = self.oldest_first.pop_front() else { break };
            if self.until.get(&key) == Some(&until) {
                self.remove(key);
            }
        }
    }

    /// Removes a page that has been stored.
    pub(crate) fn remove(&mut self, key: PageKey) {
        if self.endings[ending(key)] > 0
            && !planted(Bug::MissingForGood)
            && self.until.remove(&key).is_some()
        {
            self.endings[ending(key)] -= 1;
        }
    }

    /// Length of the prefix of `keys` without a known missing page.
    pub(crate) fn askable(&self, keys: Keys<'_>, now: Time) -> usize {
        if self.until.is_empty() {
            return keys.len();
        }
        let fresh = |key: PageKey| {
            let lasts = |until: &Time| now < *until || planted(Bug::MissingForGood);
            self.endings[ending(key)] > 0 && self.until.get(&key).is_some_and(lasts)
        };
        keys.iter().position(fresh).unwrap_or(keys.len())
    }
}

fn ending(key: PageKey) -> usize {
    key.0 as usize % ENDINGS
}

/// Back-off after failures. Each further failure doubles it.
#[derive(Debug)]
pub(crate) struct Backoff {
    base: Duration,
    max: Duration,
    failures: u32,
    until: Time,
}

impl Backoff {
    pub(crate) fn new(base: Duration, max: Duration) -> Self {
        Self { base, max, failures: 0, until: Time::default() }
    }

    pub(crate) fn failed(&mut self, now: Time) {
        let pause = self.base.saturating_mul(1 << self.failures.min(20)).min(self.max);
        self.failures += 1;
        self.until = now.after(pause);
    }

    /// Notes how an operation went. A success proves nothing if it came too late for its request, or was called off.
    pub(crate) fn note(&mut self, failed: bool, is_telling: bool, now: Time) {
        if failed {
            self.failed(now);
        } else if is_telling {
            self.succeeded();
        }
    }

    fn succeeded(&mut self) {
        self.failures = 0;
        self.until = Time::default();
    }

    pub(crate) fn allows(&self, now: Time) -> bool {
        self.until <= now && !(self.failures > 0 && planted(Bug::BackOffForGood))
    }

    pub(crate) fn until(&self) -> Time {
        self.until
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn askable(negative: &NegativeCache, keys: &[PageKey], now: Time) -> usize {
        negative.askable(Keys { prompt: &keys[..1], appended: &keys[1..] }, now)
    }

    #[test]
    fn a_missing_page_is_not_requested_until_its_entry_expires() {
        let mut negative = NegativeCache::new(Duration::from_micros(100), 2);
        let keys = [PageKey(1), PageKey(2), PageKey(3)];
        negative.insert(PageKey(2), Time(0));
        assert_eq!(askable(&negative, &keys, Time(99)), 1);
        assert_eq!(askable(&negative, &keys, Time(100)), 3);
        negative.insert(PageKey(1), Time(50));
        negative.remove(PageKey(1));
        assert_eq!(askable(&negative, &keys, Time(60)), 1);
    }

    #[test]
    fn the_number_of_missing_pages_is_bounded() {
        let mut negative = NegativeCache::new(Duration::from_secs(1), 2);
        for key in 0..10 {
            negative.insert(PageKey(key), Time(key as u64));
        }
        assert_eq!((negative.until.len(), negative.oldest_first.len()), (2, 2));
        assert_eq!(askable(&negative, &[PageKey(7)], Time(20)), 1);
        assert_eq!(askable(&negative, &[PageKey(8)], Time(20)), 0);
    }

    #[test]
    fn back_off_doubles_up_to_a_limit() {
        let mut backoff = Backoff::new(Duration::from_micros(10), Duration::from_micros(35));
        let mut pauses = Vec::new();
        for _ in 0..4 {
            backoff.failed(Time(1000));
            pauses.push(backoff.until().0 - 1000);
        }
        assert_eq!(pauses, [10, 20, 35, 35]);
        backoff.succeeded();
        assert!(backoff.allows(Time(1000)));
    }
}
