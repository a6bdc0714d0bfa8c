//! Devices, models and stores that fail, delay and lose data at random.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use terrace_engine::{
    CopyError, CopyJob, Device, Forward, KvLayout, Logits, ModelError, PageLayout, Step,
};
use terrace_kit::mixed;
use terrace_l3::{
    Answer, Arena, ExistsOptions, Get, GetOptions, ObjectId, Pin, Presence, Put, PutOptions,
    Registration, Removal, Results, Served, Store, StoreError, StoreStats, Stored,
};

/// A source of random draws that depends on the seed and the number of draws.
#[derive(Clone, Debug)]
pub struct Chance(Arc<AtomicU64>);

impl Chance {
    /// Creates a source.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Self(Arc::new(AtomicU64::new(mixed(seed))))
    }

    /// Returns a number below `bound`.
    #[must_use]
    pub fn below(&self, bound: u64) -> u64 {
        mixed(self.0.fetch_add(1, Ordering::Relaxed)) % bound
    }

    /// Returns true with a probability of one in `times`.
    #[must_use]
    pub fn once_in(&self, times: u64) -> bool {
        self.below(times) == 0
    }
}

/// A device some of whose copies fail, before they start or after everything is written.
#[derive(Debug)]
pub struct FlakyDevice<D> {
    inner: D,
    chance: Chance,
    once_in: u64,
}

impl<D> FlakyDevice<D> {
    /// Creates a device of which one copy in `once_in` fails.
    pub fn new(inner: D, chance: Chance, once_in: u64) -> Self {
        Self { inner, chance, once_in }
    }
}

impl<D: Device> Device for FlakyDevice<D> {
    type Memory = D::Memory;
    type Fence = D::Fence;

    fn pages(&self) -> u32 {
        self.inner.pages()
    }

    fn layout(&self) -> &PageLayout {
        self.inner.layout()
    }

    fn memory(&self) -> &D::Memory {
        self.inner.memory()
    }

    fn host(&self) -> Option<&Arena> {
        self.inner.host()
    }

    fn start_copy(&self, job: CopyJob<D::Fence>) {
        let fails = || Err(CopyError::Failed("at random".to_owned()));
        if !self.chance.once_in(self.once_in) {
            return self.inner.start_copy(job);
        }
        if self.chance.once_in(2) {
            return (job.done)(fails());
        }
        let done = job.done;
        self.inner.start_copy(CopyJob { done: Box::new(move |_| done(fails())), ..job });
    }
}

/// A device whose copies start late and out of order.
#[derive(Debug)]
pub struct LateDevice<D> {
    inner: Arc<D>,
    chance: Chance,
    late_max: Duration,
}

impl<D> LateDevice<D> {
    /// Creates a device whose copies start after up to `late_max`.
    pub fn new(inner: D, chance: Chance, late_max: Duration) -> Self {
        Self { inner: Arc::new(inner), chance, late_max }
    }
}

impl<D: Device> Device for LateDevice<D> {
    type Memory = D::Memory;
    type Fence = D::Fence;

    fn pages(&self) -> u32 {
        self.inner.pages()
    }

    fn layout(&self) -> &PageLayout {
        self.inner.layout()
    }

    fn memory(&self) -> &D::Memory {
        self.inner.memory()
    }

    fn host(&self) -> Option<&Arena> {
        self.inner.host()
    }

    fn start_copy(&self, job: CopyJob<D::Fence>) {
        let late = Duration::from_micros(self.chance.below(self.late_max.as_micros() as u64));
        let inner = self.inner.clone();
        std::thread::spawn(move || {
            std::thread::sleep(late);
            inner.start_copy(job);
        });
    }
}

/// A model some of whose steps fail after they have written their KV, by an error or a panic.
#[derive(Debug)]
pub struct FlakyModel<M> {
    inner: M,
    chance: Chance,
    once_in: u64,
}

impl<M> FlakyModel<M> {
    /// Creates a model of which one step in `once_in` fails.
    pub fn new(inner: M, chance: Chance, once_in: u64) -> Self {
        Self { inner, chance, once_in }
    }
}

impl<M: Forward> Forward for FlakyModel<M> {
    type Memory = M::Memory;

    fn kv_layout(&self) -> KvLayout {
        self.inner.kv_layout()
    }

    fn vocabulary(&self) -> usize {
        self.inner.vocabulary()
    }

    fn positions_max(&self) -> u32 {
        self.inner.positions_max()
    }

    fn fingerprint(&self) -> String {
        self.inner.fingerprint()
    }

    fn waits_for_layers(&self) -> bool {
        self.inner.waits_for_layers()
    }

    fn forward(
        &mut self,
        memory: &M::Memory,
        step: &Step<'_>,
        logits: &mut Logits<'_>,
    ) -> Result<(), ModelError> {
        self.inner.forward(memory, step, logits)?;
        if self.chance.once_in(self.once_in) {
            if self.chance.once_in(2) {
                panic!("a flaky model panics");
            }
            return Err(ModelError("a flaky model fails".to_owned()));
        }
        Ok(())
    }
}

/// A store that answers late, fails calls, fails single objects, and loses objects.
#[derive(Debug)]
pub struct FlakyStore {
    inner: Arc<dyn Store>,
    chance: Chance,
    once_in: u64,
}

impl FlakyStore {
    /// Creates a store of which one call in `once_in` and one object in `once_in` fail.
    pub fn new(inner: Arc<dyn Store>, chance: Chance, once_in: u64) -> Self {
        Self { inner, chance, once_in }
    }

    fn error(&self) -> StoreError {
        if self.chance.once_in(2) {
            return StoreError::Missing;
        }
        let error = std::io::Error::new(std::io::ErrorKind::ConnectionReset, "at random");
        StoreError::io("asking a flaky store", &error)
    }

    async fn dawdle(&self) {
        if self.chance.once_in(self.once_in) {
            tokio::time::sleep(Duration::from_millis(self.chance.below(30))).await;
        }
    }

    /// Makes results fail: all of them, or each at random.
    fn damage<T>(&self, results: &mut Results<T>) {
        let all = self.chance.once_in(self.once_in);
        for result in results {
            if all || self.chance.once_in(self.once_in) {
                *result = Err(self.error());
            }
        }
    }
}

impl Store for FlakyStore {
    fn register(&self, arena: &Arena) -> Result<Registration, StoreError> {
        self.inner.register(arena)
    }

    fn exists<'a>(
        &'a self,
        ids: &'a [ObjectId],
        options: ExistsOptions,
    ) -> Answer<'a, Results<Presence>> {
        Box::pin(async move {
            self.dawdle().await;
            let mut results = self.inner.exists(ids, options).await;
            self.damage(&mut results);
            results
        })
    }

    fn put_from(&self, puts: Vec<Put>, options: PutOptions) -> Answer<'_, Results<Stored>> {
        Box::pin(async move {
            self.dawdle().await;
            let mut results = self.inner.put_from(puts, options).await;
            self.damage(&mut results);
            results
        })
    }

    fn get_into(&self, mut gets: Vec<Get>, options: GetOptions) -> Answer<'_, Results<Served>> {
        Box::pin(async move {
            self.dawdle().await;
            // A failed read may leave any bytes behind.
            if self.chance.once_in(self.once_in) {
                gets.iter_mut().for_each(|get| get.target.fill(0xa5));
                return gets.iter().map(|_| Err(self.error())).collect();
            }
            let mut results = self.inner.get_into(gets, options).await;
            self.damage(&mut results);
            results
        })
    }

    fn pin<'a>(&'a self, ids: &'a [ObjectId], pin: Pin) -> Answer<'a, Results<()>> {
        self.inner.pin(ids, pin)
    }

    fn unpin<'a>(&'a self, ids: &'a [ObjectId], pin: Pin) -> Answer<'a, Results<()>> {
        self.inner.unpin(ids, pin)
    }

    fn remove<'a>(&'a self, ids: &'a [ObjectId], removal: Removal) -> Answer<'a, Results<()>> {
        self.inner.remove(ids, removal)
    }

    fn flush(&self) -> Answer<'_, Result<(), StoreError>> {
        self.inner.flush()
    }

    fn stats(&self) -> StoreStats {
        self.inner.stats()
    }

    fn shutdown(&self) -> Answer<'_, Result<(), StoreError>> {
        self.inner.shutdown()
    }
}
