//! Which objects the store has, as far as an engine's scheduler needs to know.
//!
//! A scheduler asks about every chunk of every request that waits, in every step, on the thread that everything waits
//! for. So a lookup reads one table. Keys that are new go to the store together, once a step, and a thread of the
//! store's writes the answers into the table.

use std::collections::VecDeque;
use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;
use std::time::{Duration, Instant};

use hashbrown::HashTable;
use hashbrown::hash_table::Entry;
use parking_lot::Mutex;
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use terrace_l3::ExistsOptions;
use xxhash_rust::xxh3::xxh3_64_with_seed;

use super::NativeTransfers;
use super::batch::Keys;
use super::job::FAILED;
use crate::errors::bad_argument;

/// How many answers are written at a time: the scheduler's thread waits no longer than that.
const ANSWERS_AT_A_TIME: usize = 64;

/// Lookups of `terrace_kv.transfers.Transfers.lookups`.
#[pyclass(frozen, name = "Lookups", module = "terrace_kv._native")]
pub(crate) struct NativeLookups {
    transfers: Py<NativeTransfers>,
    known: Arc<Mutex<Known>>,
    hit: Py<PyAny>,
    miss: Py<PyAny>,
    retry: Py<PyAny>,
}

#[pymethods]
impl NativeLookups {
    #[new]
    fn new(
        transfers: Py<NativeTransfers>,
        hit: Py<PyAny>,
        miss: Py<PyAny>,
        retry: Py<PyAny>,
        seconds: f64,
    ) -> PyResult<Self> {
        let keep = Duration::try_from_secs_f64(seconds).map_err(bad_argument)?;
        let known = Arc::new(Mutex::new(Known::new(keep)));
        Ok(Self { transfers, known, hit, miss, retry })
    }

    /// What is known of a key; `retry` if it is new or the store has not answered.
    fn lookup(&self, key: &Bound<'_, PyBytes>, _context: &Bound<'_, PyAny>) -> Py<PyAny> {
        let answer = self.known.lock().lookup(key.as_bytes());
        let said = match answer {
            Answer::Hit => &self.hit,
            Answer::Miss => &self.miss,
            Answer::Asked | Answer::AskedTooEarly => &self.retry,
        };
        said.clone_ref(key.py())
    }

    /// Asks the store about the keys that are new since the last time.
    fn flush(&self) -> PyResult<()> {
        let keys = {
            let mut known = self.known.lock();
            known.expire(Instant::now());
            if known.fresh.len() == 0 {
                return Ok(());
            }
            known.questions += 1;
            std::mem::take(&mut known.fresh)
        };
        let question = Question { known: self.known.clone(), keys };
        let options = ExistsOptions { prefetch_to_memory: true, lease: false };
        self.transfers.get().ask(question, options)
    }

    /// Takes keys for misses for a while, because their objects could not be read.
    fn missed(&self, keys: &Bound<'_, PyAny>) -> PyResult<()> {
        let keys = Keys::of(keys)?;
        let mut known = self.known.lock();
        for key in keys.iter() {
            let hash = known.hash(key);
            if let Some(answer) = known.answer_mut(hash) {
                *answer = Answer::Miss;
            }
        }
        Ok(())
    }

    /// Has keys asked about again, because their objects were stored.
    fn forget(&self, keys: &Bound<'_, PyAny>) -> PyResult<()> {
        let keys = Keys::of(keys)?;
        let mut known = self.known.lock();
        for key in keys.iter() {
            let hash = known.hash(key);
            match known.answer_mut(hash) {
                Some(Answer::Hit | Answer::Miss) => known.remove(hash),
                Some(answer @ Answer::Asked) => *answer = Answer::AskedTooEarly,
                Some(Answer::AskedTooEarly) | None => {}
            }
        }
        Ok(())
    }

    /// Whether there are questions that the store has not answered.
    fn pending(&self) -> bool {
        self.known.lock().questions > 0
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Answer {
    /// The store has been asked, or will be in this step.
    Asked,
    /// As above, but the object was stored meanwhile: the answer will not be believed.
    AskedTooEarly,
    Hit,
    Miss,
}

/// Stands for a key. Two keys of one hash, which nobody is likely to see, share an answer; whoever believes it has a
/// chunk computed that the store has, or reads one that it has not, which is then computed too.
#[derive(Clone, Copy, PartialEq, Eq)]
struct KeyHash(u64);

/// Each key of the table is new, in a question under way, or among the answers that grow old.
struct Known {
    /// Without the keys themselves: the fewer bytes a lookup touches, the sooner it has them.
    answers: HashTable<(KeyHash, Answer)>,
    /// Tenants may have a say in keys, and must not be able to crowd them.
    seed: u64,
    fresh: Keys,
    questions: usize,
    keep: Duration,
    /// When which answers are too old to be believed.
    ages: VecDeque<(Instant, Vec<KeyHash>)>,
}

impl Known {
    fn new(keep: Duration) -> Self {
        Self {
            answers: HashTable::new(),
            seed: RandomState::new().hash_one(0),
            fresh: Keys::default(),
            questions: 0,
            keep,
            ages: VecDeque::new(),
        }
    }

    fn hash(&self, key: &[u8]) -> KeyHash {
        KeyHash(xxh3_64_with_seed(key, self.seed))
    }

    fn lookup(&mut self, key: &[u8]) -> Answer {
        let hash = self.hash(key);
        match self.answers.entry(hash.0, |(known, _)| *known == hash, |(known, _)| known.0) {
            Entry::Occupied(known) => known.get().1,
            Entry::Vacant(place) => {
                place.insert((hash, Answer::Asked));
                self.fresh.push(key);
                Answer::Asked
            }
        }
    }

    fn answer_mut(&mut self, hash: KeyHash) -> Option<&mut Answer> {
        let found = self.answers.find_mut(hash.0, |(known, _)| *known == hash);
        found.map(|(_, answer)| answer)
    }

    fn remove(&mut self, hash: KeyHash) {
        if let Ok(known) = self.answers.find_entry(hash.0, |(known, _)| *known == hash) {
            known.remove();
        }
    }

    fn settle(&mut self, hash: KeyHash, verdict: Answer) {
        match self.answer_mut(hash) {
            Some(answer @ Answer::Asked) => *answer = verdict,
            Some(Answer::AskedTooEarly) => self.remove(hash),
            // It could not be read meanwhile.
            Some(Answer::Hit | Answer::Miss) | None => {}
        }
    }

    fn expire(&mut self, now: Instant) {
        while self.ages.front().is_some_and(|(until, _)| *until <= now) {
            let (_, hashes) = self.ages.pop_front().expect("there is one");
            for hash in hashes {
                if let Some(Answer::Hit | Answer::Miss) = self.answer_mut(hash) {
                    self.remove(hash);
                }
            }
        }
    }
}

/// Keys that the store is asked about. One that is dropped has its keys taken for misses: a scheduler that is never
/// answered would try again for ever.
pub(super) struct Question {
    known: Arc<Mutex<Known>>,
    pub(super) keys: Keys,
}

impl Question {
    /// Takes in what the store says, a code for each key. What it does not know is a miss: the engine computes it.
    pub(super) fn answer(mut self, codes: &[u8]) {
        self.settle(codes.iter().map(|&code| match code {
            0 | FAILED => Answer::Miss,
            _ => Answer::Hit,
        }));
    }

    fn settle(&mut self, mut verdicts: impl Iterator<Item = Answer>) {
        let keys = std::mem::take(&mut self.keys);
        let mut hashes = Vec::with_capacity(keys.len());
        let mut left = keys.iter().peekable();
        while left.peek().is_some() {
            let mut known = self.known.lock();
            for key in left.by_ref().take(ANSWERS_AT_A_TIME) {
                let hash = known.hash(key);
                known.settle(hash, verdicts.next().unwrap_or(Answer::Miss));
                hashes.push(hash);
            }
        }
        let mut known = self.known.lock();
        known.questions -= 1;
        let until = Instant::now() + known.keep;
        known.ages.push_back((until, hashes));
    }
}

impl Drop for Question {
    fn drop(&mut self) {
        if self.keys.len() > 0 {
            self.settle(std::iter::empty());
        }
    }
}
