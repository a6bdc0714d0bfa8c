//! Known states of keys: those to look up, and the store's answers.

use std::collections::VecDeque;
use std::hash::{BuildHasher, RandomState};
use std::sync::atomic::{AtomicU8, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use hashbrown::HashTable;
use hashbrown::hash_table::Entry;
use xxhash_rust::xxh3::xxh3_64_with_seed;

use super::super::batch::Keys;
use super::super::job::FAILED;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Answer {
    /// The lookup is in flight, or is part of this step.
    Asked,
    Hit,
    Miss,
}

/// Hash of a key. On the unlikely collision of two keys, which share an answer, the engine computes
/// a chunk that is stored, or fails to read one that is not and then computes it.
#[derive(Clone, Copy, PartialEq, Eq)]
struct KeyHash(u64);

impl KeyHash {
    /// The hash of no key.
    const NONE: Self = Self(0);
}

/// Place of a key: the number of its question, and its index there.
#[derive(Clone, Copy)]
struct Place {
    /// Question numbers wrap around.
    question: u32,
    key: u32,
}

/// Answers by key, and the new keys.
pub(super) struct Known {
    /// Latest place of each key, while that question is kept.
    places: HashTable<(KeyHash, Place)>,
    /// Random seed: tenants may influence keys, and must not be able to force collisions.
    seed: u64,
    questions: Questions,
    /// Expected place of the next key, if lookups repeat in order.
    next: Place,
    keep: Duration,
    /// Number of unanswered questions.
    open: Arc<AtomicUsize>,
}

/// Questions sent to the store, in order, and the next one.
struct Questions {
    /// Number of the first question. It starts just below the wrap-around, so that this is
    /// exercised.
    first: u32,
    asked: VecDeque<Asked>,
    /// Total number of keys in `asked`.
    asked_keys: usize,
    fresh: Fresh,
}

/// A question that was sent to the store.
struct Asked {
    /// Hashes of its keys; none for keys to be looked up again.
    hashes: Vec<KeyHash>,
    answers: Arc<Answers>,
}

/// The next question.
#[derive(Default)]
struct Fresh {
    keys: Keys,
    hashes: Vec<KeyHash>,
    /// Indices of its keys that count as misses, whatever the store answers.
    missed: Vec<usize>,
}

/// Number of places up to which the table is never shrunk.
const FEW: usize = 2048;

impl Known {
    pub(super) fn new(keep: Duration) -> Self {
        let questions = Questions {
            first: u32::MAX - 2,
            asked: VecDeque::new(),
            asked_keys: 0,
            fresh: Fresh::default(),
        };
        Self {
            places: HashTable::with_capacity(FEW),
            seed: RandomState::new().hash_one(0),
            next: Place { question: questions.first, key: 0 },
            questions,
            keep,
            open: Arc::default(),
        }
    }

    pub(super) fn lookup(&mut self, key: &[u8]) -> Answer {
        let hash = self.hash(key);
        let mut place = self.next;
        if self.questions.hash_at(place) != Some(hash) {
            place = self.find_or_ask(hash, key);
        }
        self.next = Place { key: place.key + 1, ..place };
        let asked = self.questions.asked.get(self.questions.index(place));
        asked.map_or(Answer::Asked, |asked| asked.answers.get(place.key as usize))
    }

    /// Returns the next question, unless there is no new key. Drops expired answers.
    pub(super) fn ask(&mut self, now: Instant) -> Option<Question> {
        self.expire(now);
        let (keys, answers) = self.questions.ask()?;
        self.open.fetch_add(1, Ordering::Relaxed);
        Some(Question { keys, answers, open: self.open.clone() })
    }

    /// Marks a key as a miss until that expires.
    pub(super) fn miss(&mut self, key: &[u8]) {
        let place = self.find_or_ask(self.hash(key), key);
        let (index, key) = (self.questions.index(place), place.key as usize);
        match self.questions.asked.get(index) {
            Some(asked) => asked.answers.set(key, Answer::Miss),
            None => self.questions.fresh.missed.push(key),
        }
    }

    /// Makes a key be looked up again. An answer in flight is ignored.
    pub(super) fn forget(&mut self, key: &[u8]) {
        let hash = self.hash(key);
        let Some(&(_, place)) = self.places.find(hash.0, |(known, _)| *known == hash) else {
            return;
        };
        if self.questions.hash_at(place) != Some(hash) {
            return;
        }
        let (index, key) = (self.questions.index(place), place.key as usize);
        match self.questions.asked.get_mut(index) {
            Some(asked) => asked.hashes[key] = KeyHash::NONE,
            None => self.questions.fresh.missed.retain(|&missed| missed != key),
        }
    }

    /// Returns whether questions are unanswered.
    pub(super) fn is_open(&self) -> bool {
        self.open.load(Ordering::Acquire) > 0
    }

    fn hash(&self, key: &[u8]) -> KeyHash {
        KeyHash(xxh3_64_with_seed(key, self.seed).max(1))
    }

    fn find_or_ask(&mut self, hash: KeyHash, key: &[u8]) -> Place {
        let found = self.places.entry(hash.0, |(known, _)| *known == hash, |(known, _)| known.0);
        match found {
            Entry::Occupied(mut known) => {
                let place = &mut known.get_mut().1;
                if self.questions.hash_at(*place) != Some(hash) {
                    *place = self.questions.add(hash, key);
                }
                *place
            }
            Entry::Vacant(none) => none.insert((hash, self.questions.add(hash, key))).get().1,
        }
    }

    fn expire(&mut self, now: Instant) {
        let questions = &mut self.questions;
        questions.expire(|since| now - since >= self.keep);
        if self.places.len() > 2 * (questions.asked_keys + questions.fresh.keys.len()) + FEW {
            self.places.retain(|(hash, place)| questions.hash_at(*place) == Some(*hash));
        }
    }
}

impl Questions {
    /// Adds a key to the next question.
    fn add(&mut self, hash: KeyHash, key: &[u8]) -> Place {
        let question = self.first.wrapping_add(self.asked.len() as u32);
        let place = Place { question, key: self.fresh.hashes.len() as u32 };
        self.fresh.keys.push(key);
        self.fresh.hashes.push(hash);
        place
    }

    /// Closes the next question, unless it has no keys.
    fn ask(&mut self) -> Option<(Keys, Arc<Answers>)> {
        if self.fresh.hashes.is_empty() {
            return None;
        }
        // Room for the same number again.
        let room = Fresh {
            keys: self.fresh.keys.room_for_as_many(),
            hashes: Vec::with_capacity(self.fresh.hashes.len()),
            missed: Vec::new(),
        };
        let Fresh { keys, hashes, missed } = std::mem::replace(&mut self.fresh, room);
        let answers = Arc::new(Answers::none(keys.len()));
        missed.into_iter().for_each(|key| answers.set(key, Answer::Miss));
        self.asked_keys += hashes.len();
        self.asked.push_back(Asked { hashes, answers: answers.clone() });
        Some((keys, answers))
    }

    /// Drops the first questions whose answers have expired.
    fn expire(&mut self, is_old: impl Fn(Instant) -> bool) {
        while let Some(asked) = self.asked.front()
            && asked.answers.since.get().is_some_and(|&since| is_old(since))
        {
            self.asked_keys -= asked.hashes.len();
            self.asked.pop_front();
            self.first = self.first.wrapping_add(1);
        }
    }

    /// Returns the index in `asked` of a place's question; `asked.len()` if it is the next one or
    /// dropped.
    fn index(&self, place: Place) -> usize {
        place.question.wrapping_sub(self.first) as usize
    }

    /// Returns the hash of the key at a place. Places in dropped questions have none, or that of
    /// another key.
    fn hash_at(&self, place: Place) -> Option<KeyHash> {
        let index = self.index(place);
        let hashes = match self.asked.get(index) {
            Some(asked) => &asked.hashes,
            None if index == self.asked.len() => &self.fresh.hashes,
            None => return None,
        };
        hashes.get(place.key as usize).copied()
    }
}

/// The store's answers to a question.
struct Answers {
    of_keys: Box<[AtomicU8]>,
    /// Time of the last answer.
    since: OnceLock<Instant>,
}

impl Answers {
    fn none(keys: usize) -> Self {
        let of_keys = (0..keys).map(|_| AtomicU8::new(Answer::Asked as u8)).collect();
        Self { of_keys, since: OnceLock::new() }
    }

    fn get(&self, key: usize) -> Answer {
        const HIT: u8 = Answer::Hit as u8;
        const MISS: u8 = Answer::Miss as u8;
        match self.of_keys[key].load(Ordering::Relaxed) {
            HIT => Answer::Hit,
            MISS => Answer::Miss,
            _ => Answer::Asked,
        }
    }

    fn set(&self, key: usize, answer: Answer) {
        self.of_keys[key].store(answer as u8, Ordering::Relaxed);
    }

    /// Records an answer, unless the object is known to be unreadable.
    fn settle(&self, key: usize, answer: Answer) {
        let (asked, answer) = (Answer::Asked as u8, answer as u8);
        let place = &self.of_keys[key];
        let _ = place.compare_exchange(asked, answer, Ordering::Relaxed, Ordering::Relaxed);
    }
}

/// Keys to look up in the store. Dropping it marks the remaining keys as misses: without an answer
/// a scheduler would retry for ever.
pub(in crate::transfers) struct Question {
    pub(in crate::transfers) keys: Keys,
    answers: Arc<Answers>,
    open: Arc<AtomicUsize>,
}

impl Question {
    /// Records the store's answers, a code per key. Unknown counts as a miss: the engine computes
    /// it.
    pub(in crate::transfers) fn answer(self, codes: &[u8]) {
        for (key, &code) in codes.iter().enumerate() {
            let answer = if matches!(code, 0 | FAILED) { Answer::Miss } else { Answer::Hit };
            self.answers.settle(key, answer);
        }
    }
}

impl Drop for Question {
    fn drop(&mut self) {
        (0..self.keys.len()).for_each(|key| self.answers.settle(key, Answer::Miss));
        let _ = self.answers.since.set(Instant::now());
        self.open.fetch_sub(1, Ordering::Release);
    }
}
