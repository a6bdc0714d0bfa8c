//! What is known of keys: which the store is to be asked about, and what it has answered.

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
    /// The store has been asked, or will be in this step.
    Asked,
    Hit,
    Miss,
}

/// Stands for a key. Two keys of one hash, which nobody is likely to see, share an answer; whoever believes it has a
/// chunk computed that the store has, or reads one that it has not, which is then computed too.
#[derive(Clone, Copy, PartialEq, Eq)]
struct KeyHash(u64);

impl KeyHash {
    /// The hash of no key.
    const NONE: Self = Self(0);
}

/// Where a key was asked about: the number of the question, and the key's place there.
#[derive(Clone, Copy)]
struct Place {
    /// Numbers begin anew after the largest.
    question: u32,
    key: u32,
}

/// Answers about keys, and the keys that are new.
pub(super) struct Known {
    /// Where each key was asked about last, if that question is still there and knows it.
    places: HashTable<(KeyHash, Place)>,
    /// Tenants may have a say in keys, and must not be able to crowd them.
    seed: u64,
    questions: Questions,
    /// Where the next key is if lookups go on in the order of the last time.
    next: Place,
    keep: Duration,
    /// How many questions the store has not answered.
    open: Arc<AtomicUsize>,
}

/// Those that the store has been asked, in order, and the next one.
struct Questions {
    /// The number of the first. It begins little before numbers begin anew, so that this is nothing rare.
    first: u32,
    asked: VecDeque<Asked>,
    /// How many keys all of `asked` have.
    asked_keys: usize,
    fresh: Fresh,
}

/// A question that the store has been asked.
struct Asked {
    /// Of its keys; none of those that are to be asked about again.
    hashes: Vec<KeyHash>,
    answers: Arc<Answers>,
}

/// The next question.
#[derive(Default)]
struct Fresh {
    keys: Keys,
    hashes: Vec<KeyHash>,
    /// Those of its keys that are taken for misses, whatever the store says.
    missed: Vec<usize>,
}

/// So many places are never too many.
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

    /// The next question, unless no key is new. Forgets what is too old to be believed.
    pub(super) fn ask(&mut self, now: Instant) -> Option<Question> {
        self.expire(now);
        let (keys, answers) = self.questions.ask()?;
        self.open.fetch_add(1, Ordering::Relaxed);
        Some(Question { keys, answers, open: self.open.clone() })
    }

    /// Takes a key for a miss until that is too old to be believed.
    pub(super) fn miss(&mut self, key: &[u8]) {
        let place = self.find_or_ask(self.hash(key), key);
        let (index, key) = (self.questions.index(place), place.key as usize);
        match self.questions.asked.get(index) {
            Some(asked) => asked.answers.set(key, Answer::Miss),
            None => self.questions.fresh.missed.push(key),
        }
    }

    /// Has a key asked about again. If the store has been asked about it, then what it answers is not believed.
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

    /// Whether there are questions that the store has not answered.
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
    /// Adds a key to the next one.
    fn add(&mut self, hash: KeyHash, key: &[u8]) -> Place {
        let question = self.first.wrapping_add(self.asked.len() as u32);
        let place = Place { question, key: self.fresh.hashes.len() as u32 };
        self.fresh.keys.push(key);
        self.fresh.hashes.push(hash);
        place
    }

    /// The next one is asked, unless no key is new.
    fn ask(&mut self) -> Option<(Keys, Arc<Answers>)> {
        if self.fresh.hashes.is_empty() {
            return None;
        }
        // There is room for as many again.
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

    /// Forgets the first ones, as far as their answers are old.
    fn expire(&mut self, is_old: impl Fn(Instant) -> bool) {
        while let Some(asked) = self.asked.front()
            && asked.answers.since.get().is_some_and(|&since| is_old(since))
        {
            self.asked_keys -= asked.hashes.len();
            self.asked.pop_front();
            self.first = self.first.wrapping_add(1);
        }
    }

    /// Of which of `asked` it is a place; of the next one, if that has no such place.
    fn index(&self, place: Place) -> usize {
        place.question.wrapping_sub(self.first) as usize
    }

    /// The hash of the key that is there. Places of questions that are forgotten have none, or that of another key.
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

/// What the store says of the keys of a question.
struct Answers {
    of_keys: Box<[AtomicU8]>,
    /// When the last one was there.
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

    /// Takes an answer in, unless it is known already that the object could not be read.
    fn settle(&self, key: usize, answer: Answer) {
        let (asked, answer) = (Answer::Asked as u8, answer as u8);
        let place = &self.of_keys[key];
        let _ = place.compare_exchange(asked, answer, Ordering::Relaxed, Ordering::Relaxed);
    }
}

/// Keys that the store is asked about. One that is dropped has the rest of its keys taken for misses: a scheduler that
/// is never answered would try again for ever.
pub(in crate::transfers) struct Question {
    pub(in crate::transfers) keys: Keys,
    answers: Arc<Answers>,
    open: Arc<AtomicUsize>,
}

impl Question {
    /// Takes in what the store says, a code for each key. What it does not know is a miss: the engine computes it.
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
