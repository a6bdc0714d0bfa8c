//! Negative cache: objects that are not worth requesting yet.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use tokio::time::Instant;

use super::{GuardConfig, after};
use crate::object::ObjectId;

/// Objects that could not be read recently.
#[derive(Debug)]
pub(crate) struct NegativeCache {
    until: BTreeMap<ObjectId, Instant>,
    oldest_first: VecDeque<(Instant, ObjectId)>,
    /// Objects that are being read: the number of readers, and whether one was stored meanwhile.
    reading: BTreeMap<ObjectId, (u32, bool)>,
    ttl: Duration,
    objects_max: usize,
}

impl NegativeCache {
    pub(crate) fn new(config: &GuardConfig) -> Self {
        Self {
            until: BTreeMap::new(),
            oldest_first: VecDeque::new(),
            reading: BTreeMap::new(),
            ttl: Duration::from_millis(config.negative_ttl_ms),
            objects_max: config.negative_max as usize,
        }
    }

    /// Records that a read begins.
    pub(crate) fn begin_read(&mut self, id: ObjectId) {
        self.reading.entry(id).or_default().0 += 1;
    }

    /// Records that a read ended. `futile` is ignored if the object was stored meanwhile.
    pub(crate) fn end_read(&mut self, id: ObjectId, futile: bool, now: Instant) {
        let (readers, stored) = self.reading.get_mut(&id).expect("each read begins");
        let stored = *stored;
        *readers -= 1;
        if *readers == 0 {
            self.reading.remove(&id);
        }
        if futile && !stored {
            self.insert(id, now);
        }
    }

    fn insert(&mut self, id: ObjectId, now: Instant) {
        let until = after(now, self.ttl);
        self.until.insert(id, until);
        self.oldest_first.push_back((until, id));
        self.expire(now);
    }

    /// Records that the object was stored.
    pub(crate) fn remove(&mut self, id: ObjectId) {
        self.until.remove(&id);
        if let Some((_, stored)) = self.reading.get_mut(&id) {
            *stored = true;
        }
    }

    /// Number of objects remembered.
    pub(crate) fn len(&mut self, now: Instant) -> usize {
        self.expire(now);
        self.until.len()
    }

    pub(crate) fn contains(&self, id: ObjectId, now: Instant) -> bool {
        self.until.get(&id).is_some_and(|until| now < *until)
    }

    fn expire(&mut self, now: Instant) {
        while let Some((until, id)) = self.oldest_first.front().copied() {
            if now < until && self.oldest_first.len() <= self.objects_max {
                return;
            }
            self.oldest_first.pop_front();
            if self.until.get(&id) == Some(&until) {
                self.until.remove(&id);
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

    fn cache(negative_ttl_ms: u64, negative_max: u32) -> (NegativeCache, Instant) {
        let config = GuardConfig { negative_ttl_ms, negative_max, ..GuardConfig::default() };
        (NegativeCache::new(&config), Instant::now())
    }

    #[test]
    fn an_object_is_remembered_for_a_while_or_until_it_is_stored() {
        let (mut negative, now) = cache(100, 10);
        negative.insert(id(1), now);
        negative.insert(id(2), now);
        assert!(!negative.contains(id(1).with_generation(1), now), "another object");
        negative.remove(id(2));
        assert_eq!([1, 2, 3].map(|key| negative.contains(id(key), now)), [true, false, false]);
        let later = now + Duration::from_millis(100);
        assert!(!negative.contains(id(1), later));
        assert_eq!((negative.len(later), negative.oldest_first.len()), (0, 0));
    }

    #[test]
    fn the_number_of_objects_is_limited() {
        let (mut negative, now) = cache(100, 2);
        for key in 0..10 {
            negative.insert(id(key), now);
            negative.remove(id(key / 2));
        }
        assert!(negative.oldest_first.len() <= 2 && negative.len(now) <= 2);
        assert!(!negative.contains(id(7), now) && negative.contains(id(9), now));
    }
}
