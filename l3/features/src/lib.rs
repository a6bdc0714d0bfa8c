//! Feature store: passes samples of tensors from producers to consumers.
//!
//! A producer [puts](FeatureStore::put) a sample, a few tensors that belong together, and passes
//! the [`FeatureRef`] to a consumer. The consumer [gets](FeatureStore::get) the tensors and
//! [releases](FeatureStore::release) the ref, which frees their memory at once. Every tensor is one
//! hard-pinned object of a [`Store`]. It is written directly from registered memory and read
//! directly into registered memory; the ref describes it.
//!
//! `docs/feature-store.md` describes the guarantees. How they are kept:
//!
//! - Every put of a sample is a generation with a unique number, which is part of the keys of its
//!   objects. So nothing that happens to one generation, however late, touches another, and no
//!   object is ever written twice.
//! - A put returns its ref when all tensors are stored. The ref is valid as long as all of them
//!   exist and no revocation exists. Removing any object of a generation ends it everywhere; if
//!   none can be removed, a revocation is written instead.
//! - A producer writes to the store what it is about to put (a *record*, under its own number), and
//!   which generation of a sample is complete (a *claim*, under the sample's name). After a restart
//!   it finds by its records what it has put; a put of the same sample finds by the claims what to
//!   supersede. Only its producer writes and removes a record or a claim.
//! - A ref can be [promised](FeatureRef::promise) before the sample is put. It names a generation
//!   that does not exist yet, so it reads as gone until the last tensor is stored.
//! - With a secret, refs and records carry codes that only holders of the secret can create, and
//!   refs are bound to the bytes of their tensors.

mod config;
mod dtype;
mod error;
mod free;
mod generation;
mod keys;
mod ledger;
mod notes;
mod owner;
mod put;
mod record;
mod recovery;
mod reference;
mod stats;
mod tensor;
#[cfg(test)]
mod tests;

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::{Duration, SystemTime};

use parking_lot::Mutex;
use serde::Serialize;
use tokio::sync::Notify;
use tokio::time::Instant;

pub use self::config::{FeatureConfig, FreeConfig, Secret, WhenFull};
pub use self::dtype::Dtype;
pub use self::error::FeatureError;
pub use self::keys::OWNERS_MAX;
pub use self::record::TENSORS_MAX;
pub use self::reference::FeatureRef;
pub use self::stats::{FeatureStats, OldestSample};
pub use self::tensor::{Tensor, TensorSpec};

use self::keys::Keys;
use self::ledger::{GenerationEntry, GenerationLedger, GenerationStage};
use self::notes::{NoteError, Notes};
use self::owner::{NumberRegistry, Ownership};
use self::record::RECORD_BYTES;
use self::reference::Mac;
use terrace_l3::backend::{ALIGNMENT, died, one_each};
use terrace_l3::{
    Arena, Get, GetOptions, ObjectId, Owner, Registration, Store, StoreError, Target, TierStats,
};

/// Samples of tensors in a [`Store`]. Clones share it.
///
/// Puts and frees run in tasks of their own, so it needs a tokio runtime with time.
#[derive(Clone, Debug)]
pub struct FeatureStore {
    shared: Arc<FeatureCore>,
}

struct FeatureCore {
    store: Arc<dyn Store>,
    keys: Keys,
    config: FeatureConfig,
    /// Number of this process as a producer.
    own: Option<Ownership>,
    /// Owner of the pins of this process: the producer, or all consumers together.
    pins: Owner,
    notes: Notes,
    ledger: Mutex<GenerationLedger>,
    clock: Clock,
    /// Locks that serialise the puts of a sample up to the point where they take effect.
    claiming: [tokio::sync::Mutex<()>; 16],
    /// Orders puts that wait for room by arrival.
    gate: tokio::sync::Mutex<()>,
    waiting: AtomicU64,
    /// Notified when room was freed.
    freed: Notify,
    /// Generation at which the search for consumed samples continues.
    reap_from: Mutex<u64>,
}

/// Result of a release.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Released {
    /// The memory is free.
    Freed,
    /// The sample is unreadable, but some of its bytes could not be removed yet; gc continues.
    Lingering,
    /// The sample was ended elsewhere, or is about to be.
    AlreadyGone,
    /// The sample stays for further epochs, as its producer has configured.
    Retained,
}

/// Result of [`FeatureStore::gc`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct GcReport {
    /// Samples of this producer that other processes have consumed, and whose room is free again.
    pub consumed: u64,
    /// Samples that were not released in time.
    pub expired: u64,
    /// Generations whose objects are all removed.
    pub freed: u64,
    /// Generations whose freeing is still to be retried.
    pub parked: u64,
}

impl FeatureStore {
    /// Opens the feature store that `config` names in `store`. A producer finds the samples that it
    /// put before.
    ///
    /// A [`Guarded`](terrace_l3::Guarded) store must not have a negative cache (`negative_ttl_ms:
    /// 0`): notes of other processes appear and disappear under the same names.
    ///
    /// # Errors
    /// If the settings are invalid or the store cannot be read.
    pub async fn open(store: Arc<dyn Store>, config: FeatureConfig) -> Result<Self, FeatureError> {
        config.check()?;
        let keys = Keys::new(&config.store)?;
        let failed = |error| FeatureError::Store { key: config.store.clone(), error };
        let pins_of = |owner: Option<u16>| match owner {
            Some(number) => Owner::named(&format!("{} producer {number}", config.store)),
            None => Owner::named(&format!("{} consumers", config.store)),
        };
        let pins = pins_of(config.owner);
        let mut notes = Notes::new(store.clone(), pins, config.secret.clone()).map_err(failed)?;
        let (clock, durable) = (Clock::new(), config.durable);
        let registry = NumberRegistry { keys: &keys, notes: &notes, clock, durable };
        let own = match config.owner {
            Some(number) => Some(registry.take(number).await?),
            None if config.find_owner => Some(registry.find().await?),
            None => None,
        };
        let pins = pins_of(own.as_ref().map(|own| own.number));
        notes.pin_for(pins);
        let shared = Arc::new(FeatureCore {
            pins,
            notes,
            own,
            ledger: Mutex::new(GenerationLedger::new(&config)),
            store,
            keys,
            clock,
            claiming: Default::default(),
            gate: tokio::sync::Mutex::default(),
            waiting: AtomicU64::new(0),
            freed: Notify::new(),
            reap_from: Mutex::new(0),
            config,
        });
        if let Some(owner) = shared.number() {
            shared.recover(owner).await?;
        }
        Ok(Self { shared })
    }

    /// Lets the store use the arena until the registration is dropped: tensors are put from
    /// registered memory and read into registered memory only.
    ///
    /// # Errors
    /// If the arena is registered already, or the store cannot use it.
    pub fn register(&self, arena: &Arena) -> Result<Registration, FeatureError> {
        self.shared.store.register(arena).map_err(|error| self.shared.failed(error))
    }

    /// Puts a sample. When this returns, earlier generations of it from any producer are
    /// unreadable. If it fails they are unchanged, unless the error says otherwise.
    ///
    /// Dropping the future cancels the put.
    ///
    /// # Errors
    /// If the tensors cannot be a sample, the budget is used up, another put of the sample is
    /// later, or the store fails. The sample is then unreadable, and its remains are freed.
    pub async fn put(
        &self,
        sample: &str,
        tensors: Vec<Tensor>,
    ) -> Result<FeatureRef, FeatureError> {
        let result = self.shared.clone().put(sample, tensors, None).await;
        if result.is_err() {
            self.shared.ledger.lock().stats.puts_failed += 1;
        }
        result
    }

    /// Puts the sample whose ref was [promised](FeatureRef::promise), once. Otherwise like
    /// [`FeatureStore::put`]; a consumer that has the ref can read the sample as soon as its last
    /// tensor is stored.
    ///
    /// # Errors
    /// Like [`FeatureStore::put`], and if the promise is not of this producer.
    pub async fn keep(
        &self,
        promise: &FeatureRef,
        tensors: Vec<Tensor>,
    ) -> Result<(), FeatureError> {
        self.shared.check(promise)?;
        let owner = self.shared.number().ok_or(FeatureError::NotAProducer)?;
        let is_ours = promise.promised && generation::owner(promise.generation) == owner;
        if !is_ours || !promise.tensors.iter().eq(tensors.iter().map(|tensor| &tensor.spec)) {
            let text = "this producer has not promised this sample: use the ref that it created";
            return Err(FeatureError::Config(text.to_owned()));
        }
        let put = self.shared.clone().put(&promise.sample, tensors, Some(promise.generation));
        let result = put.await;
        if result.is_err() {
            self.shared.ledger.lock().stats.puts_failed += 1;
        }
        result.map(drop)
    }

    /// Reads a sample into new memory.
    ///
    /// # Errors
    /// [`FeatureError::Gone`] after a release, an abort, a supersession or `max_hold_ms`;
    /// [`FeatureError::Damaged`] if a tensor is short or damaged; and errors of the store.
    pub async fn get(&self, reference: &FeatureRef) -> Result<Vec<Tensor>, FeatureError> {
        self.shared.check(reference)?;
        let mut arenas = Vec::with_capacity(reference.tensors.len());
        for tensor in &reference.tensors {
            let bytes = size(tensor)?;
            // Rounded up to the alignment of direct IO, so that no kind of store needs a copy.
            let arena = Arena::with_headroom(1, bytes.max(1).next_multiple_of(ALIGNMENT))
                .map_err(|error| self.shared.failed(StoreError::io("allocating memory", &error)))?;
            let registration = self.register(&arena)?;
            arenas.push((arena, registration, bytes));
        }
        let target = |(arena, _, bytes): &(Arena, Registration, usize)| {
            arena.target(0).expect("the arena is new").first(*bytes)
        };
        self.get_into(reference, arenas.iter().map(target).collect()).await?;
        let tensor = |(spec, (arena, _, bytes)): (&TensorSpec, &(Arena, _, usize))| {
            let data = arena.source(0).expect("a store that answers has let go of it");
            Tensor::new(spec.clone(), data.first(*bytes))
        };
        Ok(reference.tensors.iter().zip(&arenas).map(tensor).collect())
    }

    /// Reads a sample into registered memory of the caller, with one target per tensor in the order
    /// of the ref, each exactly as long as its tensor.
    ///
    /// # Errors
    /// Like [`FeatureStore::get`]; the content of all targets is then undefined.
    pub async fn get_into(
        &self,
        reference: &FeatureRef,
        targets: Vec<Target>,
    ) -> Result<(), FeatureError> {
        let shared = &self.shared;
        shared.check(reference)?;
        if targets.len() != reference.tensors.len() {
            let (expected, found) = (reference.tensors.len(), targets.len());
            return Err(FeatureError::TargetCount { expected, found });
        }
        for (tensor, target) in reference.tensors.iter().zip(&targets) {
            check_bytes(tensor, target.len())?;
        }
        let result = shared.read(reference, targets).await;
        let stats = &mut shared.ledger.lock().stats;
        match &result {
            Ok(()) => {
                stats.gets += 1;
                stats.get_bytes += reference.bytes();
            }
            Err(FeatureError::Gone { .. }) => stats.gets_gone += 1,
            Err(FeatureError::Damaged { .. }) => stats.gets_damaged += 1,
            Err(_) => {}
        }
        result
    }

    /// Consumes the sample: it becomes unreadable in every process, and its memory is freed at
    /// once, regardless of leases. Releasing a superseded generation frees nothing else.
    ///
    /// # Errors
    /// [`FeatureError::NotRevoked`] if that could not be recorded in the store: this process
    /// refuses the ref all the same, and gc retries.
    pub async fn release(&self, reference: FeatureRef) -> Result<Released, FeatureError> {
        let shared = &self.shared;
        shared.check(&reference)?;
        if shared.ledger.lock().refuses(reference.generation) {
            return Ok(Released::AlreadyGone);
        }
        if reference.retain {
            shared.ledger.lock().stats.retained += 1;
            return Ok(Released::Retained);
        }
        let entry = shared.entry(&reference.sample, shared.tensor_ids(&reference));
        let note = shared.keys.revocation(&reference.sample, reference.generation);
        // If that is unknown, the sample is not known to be gone.
        let revoked = shared.notes.is_there(note).await == Ok(true);
        let freed = shared.end(reference.generation, entry).await;
        if !freed.found || revoked {
            return Ok(Released::AlreadyGone);
        }
        shared.ledger.lock().stats.released += 1;
        shared.revoked(&reference.sample, reference.generation, &freed)?;
        Ok(if freed.complete { Released::Freed } else { Released::Lingering })
    }

    /// Aborts a sample: all generations of it become unreadable, from any producer, and active puts
    /// of it in this process fail. Returns the number of generations.
    ///
    /// # Errors
    /// If the store could not be read or written. This process refuses the known generations all
    /// the same.
    pub async fn abort(&self, sample: &str) -> Result<u64, FeatureError> {
        let shared = &self.shared;
        keys::check_sample(sample)?;
        let own: Vec<u64> = shared.ledger.lock().of_sample(sample).collect();
        let mut doomed: Vec<_> = own.into_iter().map(|own| (own, None)).collect();
        let claims = shared.claims(sample).await;
        let others = claims.iter().flat_map(|claims| &claims.others);
        doomed.extend(others.map(|(_, claim)| (claim.generation, Some(shared.entry_of(claim)))));
        let mut aborted = 0;
        let mut failure = None;
        for (generation, entry) in doomed {
            let entry = entry.unwrap_or_else(|| shared.entry(sample, Vec::new()));
            let freed = shared.end(generation, entry).await;
            aborted += u64::from(freed.found);
            failure = failure.or(shared.revoked(sample, generation, &freed).err());
        }
        shared.ledger.lock().stats.aborted += aborted;
        claims?;
        failure.map_or(Ok(aborted), Err)
    }

    /// Frees consumed and expired samples, and retries failed frees. Call it about once per second;
    /// a put that waits for room does it as well. A complete sample is checked again after
    /// [`FeatureConfig::recheck_ms`], or if more than three quarters of the budget are in use.
    ///
    /// # Errors
    /// If the store could not be read; everything else was done. [`FeatureError::Fenced`] if
    /// another process has this producer's number.
    pub async fn gc(&self) -> Result<GcReport, FeatureError> {
        let recheck = match self.shared.is_short_of_room() {
            // A put may be about to wait, or an engine may hold it back because of the statistics.
            true => Duration::ZERO,
            false => Duration::from_millis(self.shared.config.recheck_ms),
        };
        self.shared.gc(recheck).await
    }

    /// Number of this producer; `None` for a consumer.
    #[must_use]
    pub fn owner(&self) -> Option<u16> {
        self.shared.number()
    }

    /// Ends the work as a producer. If no sample is left, the number becomes free. Otherwise the
    /// next process that uses this number takes over, or one that finds it after some minutes
    /// without a heartbeat.
    ///
    /// # Errors
    /// If the store could not be read or written.
    pub async fn close(&self) -> Result<(), FeatureError> {
        self.shared.give_number_back().await
    }

    /// Waits until all samples of this producer are consumed or expired. A producer whose store
    /// keeps samples in this process's memory, such as a segment contributed to a cluster, waits
    /// for this before it shuts the store down. Without `max_hold_ms` the wait is unbounded. It
    /// ends if another process takes this producer's number, and with it the samples.
    pub async fn consumed(&self) {
        const PAUSE: Duration = Duration::from_millis(100);
        loop {
            // The store may be reachable again later; expiry continues meanwhile.
            if let Err(FeatureError::Fenced { .. }) = self.shared.gc(PAUSE).await {
                return;
            }
            let FeatureStats { live, putting, .. } = self.stats();
            if live + putting == 0 {
                return;
            }
            tokio::time::sleep(PAUSE).await;
        }
    }

    /// Keys of a sample's tensors and the objects with their bytes, for tools that inspect the
    /// store.
    #[must_use]
    pub fn objects(&self, reference: &FeatureRef) -> Vec<(String, ObjectId)> {
        let FeatureRef { sample, generation, tensors, .. } = reference;
        let key =
            |tensor: &TensorSpec| self.shared.keys.tensor_key(sample, *generation, &tensor.name);
        tensors.iter().map(key).zip(self.shared.tensor_ids(reference)).collect()
    }

    /// Counters and gauges.
    #[must_use]
    pub fn stats(&self) -> FeatureStats {
        self.shared.stats()
    }
}

impl FeatureCore {
    fn number(&self) -> Option<u16> {
        self.own.as_ref().map(|own| own.number)
    }

    /// Tier that keeps pinned objects.
    fn lowest_tier(&self) -> TierStats {
        let stats = self.store.stats();
        stats.remote.or(stats.disk).or(stats.memory).unwrap_or_default()
    }

    /// Bytes of the store that a sample with tensors of these sizes takes, with its record and its
    /// claim.
    fn footprint(&self, sizes: impl Iterator<Item = u64>) -> u64 {
        let slot_bytes = self.lowest_tier().slot_bytes;
        let notes = [RECORD_BYTES as u64; 2].into_iter();
        sizes.chain(notes).map(|bytes| bytes.max(slot_bytes)).sum()
    }

    /// Checks that the ref belongs to this store, and is authentic.
    fn check(&self, reference: &FeatureRef) -> Result<(), FeatureError> {
        if reference.store != self.keys.store() {
            let (expected, found) = (self.keys.store().to_owned(), reference.store.clone());
            return Err(FeatureError::OtherStore { expected, found });
        }
        if let Some(secret) = &self.config.secret
            && !reference.is_authentic(secret)
        {
            self.ledger.lock().stats.forged += 1;
            let key = self.keys.sample_key(&reference.sample, reference.generation);
            return Err(FeatureError::Forged { key });
        }
        keys::check_sample(&reference.sample)?;
        check_specs(&reference.tensors)
    }

    async fn read(&self, reference: &FeatureRef, targets: Vec<Target>) -> Result<(), FeatureError> {
        let FeatureRef { sample, generation, tensors, .. } = reference;
        let gone = || FeatureError::Gone { key: self.keys.sample_key(sample, *generation) };
        if self.ledger.lock().refuses(*generation) {
            return Err(gone());
        }
        let ids = self.tensor_ids(reference);
        let pages: Vec<_> =
            targets.iter().map(|target| (target.arena(), target.page(), target.len())).collect();
        let gets: Vec<Get> =
            ids.iter().zip(targets).map(|(id, target)| Get::new(*id, target)).collect();
        let (revoked, results) = tokio::join!(
            self.notes.is_there(self.keys.revocation(sample, *generation)),
            self.store.get_into(gets, GetOptions::default()),
        );
        let mut failure = None;
        for (tensor, result) in tensors.iter().zip(one_each(results, tensors.len())) {
            let key = || self.keys.tensor_key(sample, *generation, &tensor.name);
            match result {
                Ok(_) => {}
                // A missing tensor makes the sample unreadable, whatever the errors of the others
                // are.
                Err(StoreError::Missing | StoreError::Superseded { .. }) => return Err(gone()),
                Err(error @ (StoreError::Corrupt(_) | StoreError::Length { .. })) => {
                    failure = Some(FeatureError::Damaged { key: key(), error });
                }
                Err(error) => {
                    failure = failure.or(Some(FeatureError::Store { key: key(), error }));
                }
            }
        }
        match revoked {
            Ok(true) => return Err(gone()),
            Ok(false) => failure.map_or(Ok(()), Err)?,
            Err(error) => {
                let key = self.keys.sample_key(sample, *generation);
                let unknown = || self.note_failed("the revocation of", &key, error);
                return Err(failure.unwrap_or_else(unknown));
            }
        }
        self.check_contents(reference, pages).await
    }

    /// With a secret, verifies that the tensors read into these pages are those of the ref.
    async fn check_contents(
        &self,
        reference: &FeatureRef,
        pages: Vec<(Arena, u32, usize)>,
    ) -> Result<(), FeatureError> {
        let Some(secret) = self.config.secret.clone() else { return Ok(()) };
        let lend = |(arena, page, length): (Arena, u32, usize)| {
            let source = arena.source(page).map_err(|_| StoreError::BeingWritten)?;
            Ok(source.first(length))
        };
        let sources = pages.into_iter().map(lend).collect::<Result<Vec<_>, _>>();
        let sources = sources.map_err(|error| self.failed(error))?;
        let compute = move || -> (Vec<Mac>, [u8; 32]) {
            let found: Vec<_> =
                sources.iter().map(|source| Mac(secret.of_tensor(source))).collect();
            let digest = secret.of_contents(&found);
            (found, digest)
        };
        let found = tokio::task::spawn_blocking(compute).await;
        let (found, digest) = found.map_err(|error| self.failed(died(error)))?;
        let FeatureRef { sample, generation, tensors, contents, promised, .. } = reference;
        if *promised {
            return self.check_noted(reference, digest).await;
        }
        if *contents == found {
            return Ok(());
        }
        let expected = contents.iter().map(Some).chain(std::iter::repeat(None));
        let differs =
            |((_, found), expected): &((_, &Mac), Option<&Mac>)| *expected != Some(*found);
        let first = tensors.iter().zip(&found).zip(expected).find(differs);
        let name = first.map_or("", |((tensor, _), _)| &*tensor.name);
        self.ledger.lock().stats.forged += 1;
        let key = self.keys.tensor_key(sample, *generation, name);
        Err(FeatureError::ForgedObject { what: "the tensor", key })
    }

    /// Verifies that the tensors of a promised sample are those that its producer has claimed.
    /// Before the claim they count as absent.
    async fn check_noted(
        &self,
        reference: &FeatureRef,
        digest: [u8; 32],
    ) -> Result<(), FeatureError> {
        let FeatureRef { sample, generation, .. } = reference;
        let key = self.keys.sample_key(sample, *generation);
        let claims = self.notes.find(&self.keys.claims(sample)).await;
        let claims = claims.map_err(|error| self.note_failed("a claim on", sample, error))?;
        match claims.into_iter().find(|(_, claim)| claim.generation == *generation) {
            Some((_, claim)) if claim.contents == digest => Ok(()),
            Some(_) => {
                self.ledger.lock().stats.forged += 1;
                Err(FeatureError::ForgedObject { what: "a tensor of", key })
            }
            None => Err(FeatureError::Gone { key }),
        }
    }

    fn tensor_ids(&self, reference: &FeatureRef) -> Vec<ObjectId> {
        let FeatureRef { sample, generation, tensors, .. } = reference;
        let id = |tensor: &TensorSpec| self.keys.tensor(sample, *generation, &tensor.name);
        tensors.iter().map(id).collect()
    }

    /// Entry for another producer's generation that is to be freed here.
    fn entry(&self, sample: &str, tensors: Vec<ObjectId>) -> GenerationEntry {
        GenerationEntry {
            sample: sample.into(),
            tensors,
            bytes: 0,
            own: None,
            dead: false,
            revoked: false,
            unsettled_until: None,
            stage: GenerationStage::Live,
        }
    }

    fn failed(&self, error: StoreError) -> FeatureError {
        FeatureError::Store { key: self.keys.store().to_owned(), error }
    }

    /// Error of a note that could not be read.
    fn note_failed(&self, what: &'static str, key: &str, error: NoteError) -> FeatureError {
        match error {
            NoteError::Store(error) => self.failed(error),
            NoteError::Forged => {
                self.ledger.lock().stats.forged += 1;
                FeatureError::ForgedObject { what, key: key.to_owned() }
            }
        }
    }

    fn stats(&self) -> FeatureStats {
        let ledger = self.ledger.lock();
        let now_ms = self.clock.now_ms();
        let oldest = ledger.oldest().map(|(generation, sample, created_ms)| OldestSample {
            key: self.keys.sample_key(sample, generation),
            age_ms: now_ms.saturating_sub(created_ms),
        });
        let waiting = self.waiting.load(std::sync::atomic::Ordering::Relaxed);
        FeatureStats { waiting, oldest, ..ledger.stats() }
    }
}

impl fmt::Debug for FeatureCore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FeatureStore")
            .field("store", &self.store)
            .field("config", &self.config)
            .finish_non_exhaustive()
    }
}

/// Milliseconds since 1970, advancing monotonically from the start: later clock changes have no
/// effect.
#[derive(Clone, Copy, Debug)]
struct Clock {
    born_ms: u64,
    born: Instant,
}

impl Clock {
    fn new() -> Self {
        let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
        let born_ms = since.unwrap_or(Duration::ZERO).as_millis() as u64;
        Self { born_ms, born: Instant::now() }
    }

    fn now_ms(&self) -> u64 {
        self.born_ms + self.born.elapsed().as_millis() as u64
    }
}

/// Checks that these can be the tensors of a sample.
fn check_specs(tensors: &[TensorSpec]) -> Result<(), FeatureError> {
    if !(1..=TENSORS_MAX).contains(&tensors.len()) {
        return Err(FeatureError::TensorCount { found: tensors.len(), max: TENSORS_MAX });
    }
    let mut names = std::collections::BTreeSet::new();
    for tensor in tensors {
        keys::check_name("a tensor", &tensor.name)?;
        size(tensor)?;
        if !names.insert(&tensor.name) {
            return Err(FeatureError::DuplicateTensor { key: tensor.name.clone() });
        }
    }
    Ok(())
}

fn size(tensor: &TensorSpec) -> Result<usize, FeatureError> {
    tensor.bytes().ok_or_else(|| FeatureError::Shape { tensor: tensor.name.clone() })
}

fn check_bytes(tensor: &TensorSpec, found: usize) -> Result<(), FeatureError> {
    let expected = size(tensor)?;
    if expected == found {
        return Ok(());
    }
    Err(FeatureError::Bytes { tensor: tensor.name.clone(), expected, found })
}
