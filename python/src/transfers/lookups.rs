//! Which objects the store has, as far as an engine's scheduler needs to know.
//!
//! A scheduler asks about every chunk of every request that waits, in every step, on the thread that everything waits
//! for. So a lookup takes no lock and reads what lies side by side. Keys that are new go to the store together, once a
//! step, and a thread of the store's writes the answers where lookups find them.

use std::cell::{RefCell, RefMut};
use std::collections::VecDeque;
use std::hash::{BuildHasher, RandomState};
use std::sync::atomic::{AtomicU8, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use hashbrown::HashTable;
use hashbrown::hash_table::Entry;
use pyo3::exceptions::PyTypeError;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use terrace_l3::ExistsOptions;
use xxhash_rust::xxh3::xxh3_64_with_seed;

use super::NativeTransfers;
use super::batch::Keys;
use super::job::FAILED;
use crate::errors::bad_argument;

/// Lookups of `terrace_kv.transfers.Transfers.lookups`.
#[pyclass(frozen, name = "Lookups", module = "terrace_kv._native")]
pub(crate) struct NativeLookups {
    transfers: Py<NativeTransfers>,
    known: WithLockOfPython<Known>,
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
        let known = WithLockOfPython(RefCell::new(Known::new(keep)));
        Ok(Self { transfers, known, hit, miss, retry })
    }

    /// The function `lookup(key, context)`, which says what is known of a key: `retry` if it is new or the store has not
    /// answered.
    #[getter]
    fn lookup(this: Bound<'_, Self>) -> PyResult<Bound<'_, PyAny>> {
        let definition = (&raw const LOOKUP.0).cast_mut();
        #[expect(unsafe_code, reason = "PyO3's functions take three times as long to call")]
        // SAFETY: the definition lives for ever, and `lookup` is what it says.
        unsafe {
            let function = ffi::PyCFunction_New(definition, this.as_ptr());
            Bound::from_owned_ptr_or_err(this.py(), function)
        }
    }

    /// Asks the store about the keys that are new since the last time.
    fn flush(&self, python: Python<'_>) -> PyResult<()> {
        let question = self.known.borrow_mut(python).ask(Instant::now());
        let Some(question) = question else { return Ok(()) };
        let options = ExistsOptions { prefetch_to_memory: true, lease: false };
        self.transfers.get().ask(question, options)
    }

    /// Takes keys for misses for a while, because their objects could not be read.
    fn missed(&self, keys: &Bound<'_, PyAny>) -> PyResult<()> {
        let read = Keys::of(keys)?;
        let mut known = self.known.borrow_mut(keys.py());
        for key in read.iter() {
            let hash = known.hash(key);
            known.miss(hash);
        }
        Ok(())
    }

    /// Has keys asked about again, because their objects were stored.
    fn forget(&self, keys: &Bound<'_, PyAny>) -> PyResult<()> {
        let stored = Keys::of(keys)?;
        let mut known = self.known.borrow_mut(keys.py());
        for key in stored.iter() {
            let hash = known.hash(key);
            known.forget(hash);
        }
        Ok(())
    }

    /// Whether there are questions that the store has not answered.
    fn pending(&self, python: Python<'_>) -> bool {
        self.known.borrow_mut(python).open.load(Ordering::Acquire) > 0
    }
}

static LOOKUP: Definition = Definition(ffi::PyMethodDef {
    ml_name: c"lookup".as_ptr(),
    ml_meth: ffi::PyMethodDefPointer { PyCFunctionFast: lookup },
    ml_flags: ffi::METH_FASTCALL,
    ml_doc: std::ptr::null(),
});

struct Definition(ffi::PyMethodDef);

#[expect(unsafe_code, reason = "it has pointers")]
// SAFETY: nobody writes to it, nor to what it points to.
unsafe impl Sync for Definition {}

#[expect(unsafe_code, reason = "Python calls it")]
unsafe extern "C" fn lookup(
    this: *mut ffi::PyObject,
    arguments: *mut *mut ffi::PyObject,
    count: ffi::Py_ssize_t,
) -> *mut ffi::PyObject {
    // SAFETY: Python has its lock while it calls this, `this` is what the function was made with, and there are `count`
    // arguments, which stay until it returns.
    let (python, this, arguments) = unsafe {
        let python = Python::assume_attached();
        let arguments = arguments.cast::<Borrowed<'_, '_, PyAny>>();
        let arguments = std::slice::from_raw_parts(arguments, count as usize);
        (python, Borrowed::from_ptr(python, this).cast_unchecked::<NativeLookups>(), arguments)
    };
    let answer = match arguments {
        [key, _context] => key
            .cast::<PyBytes>()
            .map_err(PyErr::from)
            .map(|key| this.get().known.borrow_mut(python).lookup(key.as_bytes())),
        _ => Err(PyTypeError::new_err("lookup() takes a key and a context")),
    };
    let said = match answer {
        Ok(Answer::Hit) => &this.get().hit,
        Ok(Answer::Miss) => &this.get().miss,
        Ok(Answer::Asked) => &this.get().retry,
        Err(error) => {
            error.restore(python);
            return std::ptr::null_mut();
        }
    };
    said.clone_ref(python).into_ptr()
}

/// Something that whoever has the interpreter's lock may use, one at a time.
struct WithLockOfPython<T>(RefCell<T>);

#[expect(unsafe_code, reason = "another lock would take as long as a lookup")]
// SAFETY: it is borrowed with the interpreter's lock alone, and given back with it too, because nothing that is borrowed
// can go to another thread.
unsafe impl<T: Send> Sync for WithLockOfPython<T> {}

impl<T> WithLockOfPython<T> {
    fn borrow_mut<'a>(&'a self, _: Python<'a>) -> RefMut<'a, T> {
        self.0.borrow_mut()
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Answer {
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

/// Where the answer about a key is: the number of its question, and the key's place there.
#[derive(Clone, Copy)]
struct Place {
    /// Numbers begin anew after the largest.
    question: u32,
    key: u32,
}

impl Place {
    /// Which of the questions from `first` on it is. Those before come after all others.
    fn index(self, first: u32) -> usize {
        self.question.wrapping_sub(first) as usize
    }
}

struct Known {
    /// Also of questions that have grown old, until there are too many of them.
    places: HashTable<(KeyHash, Place)>,
    /// Tenants may have a say in keys, and must not be able to crowd them.
    seed: u64,
    /// The number of the oldest question.
    first: u32,
    asked: VecDeque<Asked>,
    /// The next question: its keys, and their hashes.
    fresh: Keys,
    fresh_hashes: Vec<KeyHash>,
    /// Where the next key is if lookups go on in the order of the last time.
    next: Place,
    keep: Duration,
    /// How many questions the store has not answered.
    open: Arc<AtomicUsize>,
}

/// A question that the store has been asked.
struct Asked {
    /// Of its keys; none of those that are to be asked about again.
    hashes: Vec<KeyHash>,
    answers: Arc<Answers>,
}

impl Known {
    fn new(keep: Duration) -> Self {
        Self {
            places: HashTable::with_capacity(FEW),
            seed: RandomState::new().hash_one(0),
            first: 0,
            asked: VecDeque::new(),
            fresh: Keys::default(),
            fresh_hashes: Vec::new(),
            next: Place { question: 0, key: 0 },
            keep,
            open: Arc::default(),
        }
    }

    fn hash(&self, key: &[u8]) -> KeyHash {
        KeyHash(xxh3_64_with_seed(key, self.seed).max(1))
    }

    fn lookup(&mut self, key: &[u8]) -> Answer {
        let hash = self.hash(key);
        let mut place = self.next;
        if self.hash_at(place) != Some(hash) {
            place = self.find_or_ask(hash, key);
        }
        self.next = Place { key: place.key + 1, ..place };
        let asked = self.asked.get(place.index(self.first));
        asked.map_or(Answer::Asked, |asked| asked.answers.get(place.key))
    }

    fn hash_at(&self, place: Place) -> Option<KeyHash> {
        self.asked.get(place.index(self.first))?.hashes.get(place.key as usize).copied()
    }

    fn find_or_ask(&mut self, hash: KeyHash, key: &[u8]) -> Place {
        let questions = self.asked.len();
        let question = self.first.wrapping_add(questions as u32);
        let fresh = Place { question, key: self.fresh.len() as u32 };
        let found = self.places.entry(hash.0, |(known, _)| *known == hash, |(known, _)| known.0);
        match found {
            Entry::Occupied(mut known) => {
                let place = &mut known.get_mut().1;
                if place.index(self.first) <= questions {
                    return *place;
                }
                *place = fresh;
            }
            Entry::Vacant(none) => drop(none.insert((hash, fresh))),
        }
        self.fresh.push(key);
        self.fresh_hashes.push(hash);
        fresh
    }

    fn find_asked(&mut self, hash: KeyHash) -> Option<(&mut Asked, usize)> {
        let (_, place) = self.places.find(hash.0, |(known, _)| *known == hash)?;
        let asked = self.asked.get_mut(place.index(self.first))?;
        Some((asked, place.key as usize))
    }

    fn miss(&mut self, hash: KeyHash) {
        if let Some((asked, key)) = self.find_asked(hash) {
            asked.answers.set(key, Answer::Miss);
        }
    }

    /// If the store has been asked about it, then what it answers is not believed.
    fn forget(&mut self, hash: KeyHash) {
        let Some((asked, key)) = self.find_asked(hash) else { return };
        asked.hashes[key] = KeyHash::NONE;
        if let Ok(known) = self.places.find_entry(hash.0, |(known, _)| *known == hash) {
            known.remove();
        }
    }

    /// What is new since the last time, if anything; and forgets what is too old to be believed.
    fn ask(&mut self, now: Instant) -> Option<Question> {
        self.expire(now);
        if self.fresh.len() == 0 {
            return None;
        }
        let (keys, hashes) = (self.fresh.take(), std::mem::take(&mut self.fresh_hashes));
        self.fresh_hashes.reserve(hashes.len());
        let answers = Arc::new(Answers::none(keys.len()));
        self.asked.push_back(Asked { hashes, answers: answers.clone() });
        self.open.fetch_add(1, Ordering::Relaxed);
        Some(Question { keys, answers, open: self.open.clone() })
    }

    fn expire(&mut self, now: Instant) {
        let is_old = |asked: &Asked| {
            asked.answers.since.get().is_some_and(|&since| now - since >= self.keep)
        };
        let old = self.asked.iter().take_while(|asked| is_old(asked)).count();
        if old == 0 {
            return;
        }
        self.asked.drain(..old);
        self.first = self.first.wrapping_add(old as u32);
        let live =
            self.asked.iter().map(|asked| asked.hashes.len()).sum::<usize>() + self.fresh.len();
        if self.places.len() > 2 * live + FEW {
            let (first, questions) = (self.first, self.asked.len());
            self.places.retain(|(_, place)| place.index(first) <= questions);
        }
    }
}

/// So many places are never too many.
const FEW: usize = 2048;

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

    fn get(&self, key: u32) -> Answer {
        const HIT: u8 = Answer::Hit as u8;
        const MISS: u8 = Answer::Miss as u8;
        match self.of_keys[key as usize].load(Ordering::Relaxed) {
            HIT => Answer::Hit,
            MISS => Answer::Miss,
            _ => Answer::Asked,
        }
    }

    fn set(&self, key: usize, answer: Answer) {
        self.of_keys[key].store(answer as u8, Ordering::Relaxed);
    }
}

/// Keys that the store is asked about. One that is dropped has the rest of its keys taken for misses: a scheduler that
/// is never answered would try again for ever.
pub(super) struct Question {
    pub(super) keys: Keys,
    answers: Arc<Answers>,
    open: Arc<AtomicUsize>,
}

impl Question {
    /// Takes in what the store says, a code for each key. What it does not know is a miss: the engine computes it.
    pub(super) fn answer(self, codes: &[u8]) {
        for (key, &code) in codes.iter().enumerate() {
            let answer = if matches!(code, 0 | FAILED) { Answer::Miss } else { Answer::Hit };
            self.settle(key, answer);
        }
    }

    /// Unless it is known already that the object could not be read.
    fn settle(&self, key: usize, answer: Answer) {
        let (asked, answer) = (Answer::Asked as u8, answer as u8);
        let place = &self.answers.of_keys[key];
        let _ = place.compare_exchange(asked, answer, Ordering::Relaxed, Ordering::Relaxed);
    }
}

impl Drop for Question {
    fn drop(&mut self) {
        (0..self.keys.len()).for_each(|key| self.settle(key, Answer::Miss));
        let _ = self.answers.since.set(Instant::now());
        self.open.fetch_sub(1, Ordering::Release);
    }
}
