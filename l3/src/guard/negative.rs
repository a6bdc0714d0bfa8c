//! Objects that are not worth asking for again yet.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use tokio::time::Instant;

use super::{GuardConfig, after};
use crate::object::ObjectId;

/// Objects that could not be read lately, so that not every request tries again.
#[derive(Debug)]
pub(crate) struct NegativeCache {
    until: BTreeMap<ObjectId, Instant>,
    oldest_first: VecDeque<(Instant, ObjectId)>,
    /// Objects that were stored lately, and when: a get from before that says nothing about them.
    stored: BTreeMap<ObjectId, Instant>,
    stored_first: VecDeque<(Instant, ObjectId)>,
    ttl: Duration,
    objects_max: usize,
}

impl NegativeCache {
    pub(crate) fn new(config: &GuardConfig) -> Self {
        Self {
            until: BTreeMap::new(),
            oldest_first: VecDeque::new(),
            stored: BTreeMap::new(),
            stored_first: VecDeque::new(),
            ttl: Duration::from_millis(config.negative_ttl_ms),
            objects_max: config.negative_max as usize,
        }
    }

    /// A get that began at `began` could not read the object.
    pub(crate) fn insert(&mut self, id: ObjectId, began: Instant, now: Instant) {
        if self.stored.get(&id).is_some_and(|stored| *stored > began) {
            return;
        }
        let until = after(now, self.ttl);
        self.until.insert(id, until);
        self.oldest_first.push_back((until, id));
        self.expire(now);
    }

    /// The object has been stored.
    pub(crate) fn remove(&mut self, id: ObjectId, now: Instant) {
        self.until.remove(&id);
        self.stored.insert(id, now);
        self.stored_first.push_back((now, id));
        if self.stored_first.len() > self.objects_max
            && let Some((stored, id)) = self.stored_first.pop_front()
            && self.stored.get(&id) == Some(&stored)
        {
            self.stored.remove(&id);
        }
    }

    /// How many objects are remembered.
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
        negative.insert(id(1), now, now);
        negative.insert(id(2), now, now);
        assert!(!negative.contains(id(1).with_generation(1), now), "another object");
        negative.remove(id(2), now);
        assert_eq!([1, 2, 3].map(|key| negative.contains(id(key), now)), [true, false, false]);
        let later = now + Duration::from_millis(100);
        assert!(!negative.contains(id(1), later));
        assert_eq!((negative.len(later), negative.oldest_first.len()), (0, 0));
    }

    #[test]
    fn only_so_many_are_remembered() {
        let (mut negative, now) = cache(100, 2);
        for key in 0..10 {
            let then = now + Duration::from_millis(key as u64);
            negative.insert(id(key), then, then);
            negative.remove(id(key / 2), then);
        }
        assert!(negative.stored.len() <= 2 && negative.stored_first.len() <= 2);
        assert!(negative.oldest_first.len() <= 2 && negative.len(now) <= 2);
        assert!(!negative.contains(id(7), now) && negative.contains(id(9), now));
    }
}
