//! Execution of jobs.

use std::sync::Arc;

use terrace_cache::PageKey;
use terrace_l3::{
    Arena, ExistsOptions, Get, GetOptions, ObjectId, Place, Presence, Put, PutOptions, Removal,
    Results, Source, Store, StoreError, Stored, Target,
};
use tokio::task::JoinSet;

use super::batch::{Batch, Keys, Loan};

/// Code of a failed key.
pub(super) const FAILED: u8 = 255;
/// Largest call of the store in bytes, except for single objects: deadlines then apply to similar
/// amounts, however much the engine requests.
const PIECE_BYTES: usize = 16 << 20;
/// Largest number of objects per call.
const PIECE_OBJECTS: usize = 256;
/// Largest number of pieces of a job in flight.
const PIECES_AT_A_TIME: usize = 4;

const BROKEN: &str = "a bug in Terrace: please report it";

/// Kind of a job.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Put,
    Get,
    Exists,
    Remove,
}

impl Kind {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Put => "put",
            Self::Get => "get",
            Self::Exists => "exists",
            Self::Remove => "remove",
        }
    }
}

/// A job with all its inputs.
pub(super) enum Work {
    Put { keys: Keys, batch: Batch<Source>, durable: bool },
    Get { keys: Keys, batch: Batch<Target> },
    Exists { keys: Keys, parts: u32, options: ExistsOptions },
    Remove { keys: Keys },
}

impl Work {
    pub(super) fn kind(&self) -> Kind {
        match self {
            Self::Put { .. } => Kind::Put,
            Self::Get { .. } => Kind::Get,
            Self::Exists { .. } => Kind::Exists,
            Self::Remove { .. } => Kind::Remove,
        }
    }

    pub(super) fn keys(&self) -> usize {
        match self {
            Self::Put { keys, .. }
            | Self::Get { keys, .. }
            | Self::Exists { keys, .. }
            | Self::Remove { keys } => keys.len(),
        }
    }
}

/// Result of a job.
pub(super) struct Done {
    pub(super) codes: Vec<u8>,
    pub(super) bytes: u64,
    pub(super) error: Option<String>,
    /// Kind of each failure.
    pub(super) failures: Vec<&'static str>,
}

impl Done {
    fn of(keys: usize) -> Self {
        Self { codes: vec![FAILED; keys], bytes: 0, error: None, failures: Vec::new() }
    }

    /// Creates the result of a job whose task has died.
    pub(super) fn broken(keys: usize) -> Self {
        Self { error: Some(BROKEN.into()), failures: vec!["broken"; keys], ..Self::of(keys) }
    }

    fn note<T>(&mut self, place: usize, result: Result<T, StoreError>, code: impl Fn(T) -> u8) {
        match result {
            Ok(done) => self.codes[place] = code(done),
            Err(error) => self.fail(kind_of(&error), || error.to_string()),
        }
    }

    /// Combines the results of parts: an object exists if all its parts do.
    fn joined(mut self, parts: usize) -> Self {
        let join = |parts: &[u8]| {
            let is = |code| parts.contains(&code);
            if is(0) { 0 } else { parts.iter().copied().max().unwrap_or(0) }
        };
        self.codes = self.codes.chunks(parts).map(join).collect();
        self
    }

    fn fail(&mut self, kind: &'static str, text: impl FnOnce() -> String) {
        self.failures.push(kind);
        // "missing" is the least informative error.
        if kind != "missing" && self.error.is_none() {
            self.error = Some(text());
        }
    }
}

/// Runs a job.
pub(super) async fn perform(store: Arc<dyn Store>, namespace: PageKey, work: Work) -> Done {
    match work {
        Work::Put { keys, batch, durable } => {
            let options = PutOptions { pin: None, durable };
            let code = |stored: Stored| u8::from(stored == Stored::AlreadyThere);
            let ask = move |store: Arc<dyn Store>, batch: Vec<(ObjectId, Source)>| async move {
                let puts = batch.into_iter().map(|(id, source)| Put::new(id, source)).collect();
                store.put_from(puts, options).await
            };
            transfer(store, keys.ids(namespace), batch, ask, code, |code| code == 0).await
        }
        Work::Get { keys, batch } => {
            let ask = move |store: Arc<dyn Store>, batch: Vec<(ObjectId, Target)>| async move {
                let gets = batch.into_iter().map(|(id, target)| Get::new(id, target)).collect();
                store.get_into(gets, GetOptions::default()).await
            };
            let ids = keys.ids(namespace);
            transfer(store, ids, batch, ask, |served| place_code(served.place), |_| true).await
        }
        Work::Exists { keys, parts: 0, options } => {
            exists(&*store, namespace, &keys, options).await
        }
        Work::Exists { keys, parts, options } => {
            exists(&*store, namespace, &keys.in_parts(parts), options).await.joined(parts as usize)
        }
        Work::Remove { keys } => {
            let ids = keys.ids(namespace);
            answered(store.remove(&ids, Removal::Forced).await, |()| 1)
        }
    }
}

/// Looks up objects.
pub(super) async fn exists(
    store: &dyn Store,
    namespace: PageKey,
    keys: &Keys,
    options: ExistsOptions,
) -> Done {
    let results = store.exists(&keys.ids(namespace), options).await;
    answered(results, |presence| match presence {
        Presence::Absent => 0,
        Presence::Present(place) => place_code(place),
    })
}

fn answered<T>(results: Results<T>, code: impl Fn(T) -> u8) -> Done {
    let mut done = Done::of(results.len());
    for (place, result) in results.into_iter().enumerate() {
        done.note(place, result, &code);
    }
    done
}

/// Transfers a batch piece by piece, and waits until the store has released all its memory.
async fn transfer<L, T, A>(
    store: Arc<dyn Store>,
    ids: Vec<ObjectId>,
    batch: Batch<L>,
    ask: impl Fn(Arc<dyn Store>, Vec<(ObjectId, L)>) -> A,
    code: impl Fn(T) -> u8,
    is_moved: impl Fn(u8) -> bool,
) -> Done
where
    L: Loan,
    T: Send + Sync + 'static,
    A: Future<Output = Results<T>> + Send + 'static,
{
    let mut done = Done::of(ids.len());
    let Batch { loans, registrations } = batch;
    let mut pieces = Pieces::default();
    for (place, (id, loan)) in ids.into_iter().zip(loans).enumerate() {
        match loan {
            Ok(loan) => pieces.add(place, id, loan),
            Err(text) => done.fail("in-use", || text),
        }
    }
    let mut under_way = JoinSet::new();
    let mut waiting = pieces.0.into_iter();
    loop {
        while under_way.len() < PIECES_AT_A_TIME
            && let Some(Piece { places, objects, .. }) = waiting.next()
        {
            let pages: Vec<_> =
                objects.iter().map(|(_, loan)| (loan.page(), loan.bytes())).collect();
            let asked = ask(store.clone(), objects);
            under_way.spawn(async move {
                let results = asked.await;
                let_go(&pages, &results).await;
                (places, pages, results)
            });
        }
        let Some(ended) = under_way.join_next().await else { break };
        // The keys of a piece that panicked stay failed.
        let Ok((places, pages, results)) = ended else {
            done.fail("broken", || BROKEN.into());
            continue;
        };
        for ((place, (_, bytes)), result) in places.into_iter().zip(pages).zip(results) {
            done.note(place, result, &code);
            let code = done.codes[place];
            done.bytes += if code != FAILED && is_moved(code) { bytes as u64 } else { 0 };
        }
    }
    drop(registrations);
    done
}

/// Waits until the memory of failed objects is released; that of the others already is.
async fn let_go<T>(pages: &[((Arena, u32), usize)], results: &Results<T>) {
    for (((arena, page), _), result) in pages.iter().zip(results) {
        if result.is_err() {
            arena.returned(*page).await;
        }
    }
}

/// Parts of a batch, each for one call of the store.
struct Pieces<L>(Vec<Piece<L>>);

struct Piece<L> {
    places: Vec<usize>,
    objects: Vec<(ObjectId, L)>,
    bytes: usize,
}

impl<L> Default for Pieces<L> {
    fn default() -> Self {
        Self(Vec::new())
    }
}

impl<L: Loan> Pieces<L> {
    fn add(&mut self, place: usize, id: ObjectId, loan: L) {
        let bytes = loan.bytes();
        let has_room = |piece: &Piece<L>| {
            piece.bytes + bytes <= PIECE_BYTES && piece.objects.len() < PIECE_OBJECTS
        };
        if !self.0.last().is_some_and(has_room) {
            self.0.push(Piece { places: Vec::new(), objects: Vec::new(), bytes: 0 });
        }
        let piece = self.0.last_mut().expect("it was made");
        piece.places.push(place);
        piece.objects.push((id, loan));
        piece.bytes += bytes;
    }
}

fn place_code(place: Place) -> u8 {
    match place {
        Place::Memory => 1,
        Place::Disk => 2,
    }
}

/// Returns the name of an error in metrics.
fn kind_of(error: &StoreError) -> &'static str {
    match error {
        StoreError::Missing | StoreError::Superseded { .. } => "missing",
        StoreError::Corrupt(_) | StoreError::Length { .. } => "damaged",
        StoreError::Full | StoreError::TooLarge { .. } => "full",
        StoreError::TimedOut(_) => "timed-out",
        StoreError::Unavailable { .. } => "unavailable",
        StoreError::HolderAway => "away",
        StoreError::Io { .. } => "io",
        StoreError::Closed => "closed",
        StoreError::Forbidden => "forbidden",
        StoreError::BeingWritten => "being-written",
        StoreError::NotRegistered { .. }
        | StoreError::AlreadyRegistered { .. }
        | StoreError::Leased
        | StoreError::Pinned
        | StoreError::NotPinned => "refused",
    }
}
