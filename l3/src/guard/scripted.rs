//! A store for tests that fails as scripted.

use std::collections::BTreeMap;
use std::num::NonZeroU64;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use terrace_cache::PageKey;

use crate::arena::Arena;
use crate::object::ObjectId;
use crate::registry::{Registration, Registry};
use crate::stats::StoreStats;
use crate::store::{
    Answer, ExistsOptions, Get, GetOptions, Owner, Pin, Place, Presence, Put, PutOptions, Removal,
    Results, Served, Store, StoreError, Stored,
};

/// Longer than any test waits.
pub(crate) const HANGING: Duration = Duration::from_secs(3600);

/// A store in memory with fault switches. Clones are the same store.
#[derive(Clone, Debug, Default)]
pub(crate) struct Scripted {
    script: Arc<Mutex<Script>>,
    registry: Registry,
}

/// Content and behaviour. Calls are named by the first word of their method.
#[derive(Debug, Default)]
pub(crate) struct Script {
    /// Objects, and whether each is hard pinned.
    pub(crate) objects: BTreeMap<ObjectId, (Vec<u8>, bool)>,
    /// Duration of calls.
    pub(crate) slow: BTreeMap<&'static str, Duration>,
    /// Error that calls return for all objects.
    pub(crate) failing: BTreeMap<&'static str, StoreError>,
    /// One result is missing.
    pub(crate) miscounts: bool,
    /// Calls panic.
    pub(crate) panics: bool,
    /// Calls so far, with the number of objects of each.
    pub(crate) calls: Vec<(&'static str, usize)>,
}

impl Scripted {
    pub(crate) fn script<T>(&self, change: impl FnOnce(&mut Script) -> T) -> T {
        change(&mut self.script.lock())
    }

    pub(crate) fn store(&self) -> Arc<dyn Store> {
        Arc::new(self.clone())
    }

    /// Makes every call fail with this error, or succeed.
    pub(crate) fn is(&self, error: Option<StoreError>) {
        let calls = ["exists", "put", "get", "pin", "unpin", "remove", "flush", "shutdown"];
        let failing = error.map(|error| calls.map(|call| (call, error.clone())).into());
        self.script(|script| script.failing = failing.unwrap_or_default());
    }

    /// Takes the calls since the last time.
    pub(crate) fn calls(&self) -> Vec<(&'static str, usize)> {
        self.script(|script| std::mem::take(&mut script.calls))
    }

    pub(crate) fn holds(&self, id: ObjectId) -> bool {
        self.script(|script| script.objects.contains_key(&id))
    }

    async fn answer<O, T>(
        &self,
        call: &'static str,
        objects: Vec<O>,
        mut each: impl FnMut(&mut Script, O) -> Result<T, StoreError>,
    ) -> Results<T> {
        let slow = self.script(|script| {
            script.calls.push((call, objects.len()));
            script.slow.get(call).copied()
        });
        if let Some(slow) = slow {
            tokio::time::sleep(slow).await;
        }
        let mut script = self.script.lock();
        assert!(!script.panics, "told to");
        let left_out = usize::from(script.miscounts);
        let answers = objects.into_iter().map(|object| match script.failing.get(call) {
            Some(error) => Err(error.clone()),
            None => each(&mut script, object),
        });
        answers.skip(left_out).collect()
    }

    async fn answer_once(&self, call: &'static str) -> Result<(), StoreError> {
        self.answer(call, vec![()], |_, ()| Ok(())).await.pop().unwrap_or(Ok(()))
    }
}

impl Script {
    fn object(&mut self, id: ObjectId) -> Result<&mut (Vec<u8>, bool), StoreError> {
        self.objects.get_mut(&id).ok_or(StoreError::Missing)
    }

    fn put(&mut self, put: &Put, options: PutOptions) -> Stored {
        let pin = matches!(options.pin, Some(Pin::Hard(_)));
        if let Ok((_, pinned)) = self.object(put.id) {
            *pinned |= pin;
            return Stored::AlreadyThere;
        }
        self.objects.insert(put.id, (put.source.to_vec(), pin));
        Stored::New
    }

    fn read(&mut self, mut get: Get) -> Result<Served, StoreError> {
        get.target.copy_from_slice(&self.object(get.id)?.0);
        Ok(Served { place: Place::Memory, waited: false })
    }

    fn unpin(&mut self, id: ObjectId) -> Result<(), StoreError> {
        match std::mem::take(&mut self.object(id)?.1) {
            true => Ok(()),
            false => Err(StoreError::NotPinned),
        }
    }

    fn remove(&mut self, id: ObjectId, removal: Removal) -> Result<(), StoreError> {
        if self.object(id)?.1 && removal != Removal::Final {
            return Err(StoreError::Pinned);
        }
        self.objects.remove(&id);
        Ok(())
    }
}

impl Store for Scripted {
    fn register(&self, arena: &Arena) -> Result<Registration, StoreError> {
        self.registry.register(arena)
    }

    fn exists<'a>(
        &'a self,
        ids: &'a [ObjectId],
        _options: ExistsOptions,
    ) -> Answer<'a, Results<Presence>> {
        Box::pin(self.answer("exists", ids.to_vec(), |script, id| {
            let present = script.objects.contains_key(&id);
            Ok(if present { Presence::Present(Place::Memory) } else { Presence::Absent })
        }))
    }

    fn put_from(&self, puts: Vec<Put>, options: PutOptions) -> Answer<'_, Results<Stored>> {
        Box::pin(self.answer("put", puts, move |script, put| Ok(script.put(&put, options))))
    }

    fn get_into(&self, gets: Vec<Get>, _options: GetOptions) -> Answer<'_, Results<Served>> {
        Box::pin(self.answer("get", gets, Script::read))
    }

    fn pin<'a>(&'a self, ids: &'a [ObjectId], _pin: Pin) -> Answer<'a, Results<()>> {
        let pin = |script: &mut Script, id| script.object(id).map(|(_, pinned)| *pinned = true);
        Box::pin(self.answer("pin", ids.to_vec(), pin))
    }

    fn unpin<'a>(&'a self, ids: &'a [ObjectId], _pin: Pin) -> Answer<'a, Results<()>> {
        Box::pin(self.answer("unpin", ids.to_vec(), Script::unpin))
    }

    fn remove<'a>(&'a self, ids: &'a [ObjectId], removal: Removal) -> Answer<'a, Results<()>> {
        let remove = move |script: &mut Script, id| script.remove(id, removal);
        Box::pin(self.answer("remove", ids.to_vec(), remove))
    }

    fn flush(&self) -> Answer<'_, Result<(), StoreError>> {
        Box::pin(self.answer_once("flush"))
    }

    fn stats(&self) -> StoreStats {
        StoreStats::default()
    }

    fn shutdown(&self) -> Answer<'_, Result<(), StoreError>> {
        Box::pin(self.answer_once("shutdown"))
    }
}

/// Hard pin of the only owner.
pub(crate) const HARD: Pin = Pin::Hard(Owner(NonZeroU64::MIN));

/// Id of a page by number.
pub(crate) fn id(key: u128) -> ObjectId {
    ObjectId::page(PageKey(1), PageKey(key))
}

/// Error of a failed medium.
pub(crate) fn broken() -> StoreError {
    StoreError::io("testing", &std::io::Error::other("told to"))
}

/// Stores page 0 of the arena under each id.
pub(crate) async fn put(store: &dyn Store, arena: &Arena, ids: &[ObjectId]) -> Results<Stored> {
    let puts = ids.iter().map(|id| Put::new(*id, arena.source(0).unwrap())).collect();
    store.put_from(puts, PutOptions::default()).await
}

/// Reads each id into its own page, from page 1 of the arena on.
pub(crate) async fn get(store: &dyn Store, arena: &Arena, ids: &[ObjectId]) -> Results<Served> {
    let gets =
        (1..).zip(ids).map(|(page, id)| Get::new(*id, arena.target(page).unwrap())).collect();
    store.get_into(gets, GetOptions::default()).await
}

/// Presence of each id.
pub(crate) async fn present(store: &dyn Store, ids: &[ObjectId]) -> Vec<bool> {
    let found = store.exists(ids, ExistsOptions::default()).await;
    found.into_iter().map(|found| found.unwrap().is_present()).collect()
}
