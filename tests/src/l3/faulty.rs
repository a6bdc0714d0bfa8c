//! A store with injected faults and delays, around a sound one.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::sync::{Arc, Mutex, PoisonError};

use terrace_l3::{
    Answer, Arena, ExistsOptions, Get, GetOptions, ObjectId, Pin, Presence, Put, PutOptions,
    Registration, Removal, Results, Served, Store, StoreError, StoreStats, Stored,
};
use tokio::sync::watch;

/// The calls that can go wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Call {
    /// [`Store::exists`].
    Exists,
    /// [`Store::put_from`].
    Put,
    /// [`Store::get_into`].
    Get,
    /// [`Store::remove`].
    Remove,
}

/// Fault of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// It fails, and nothing has happened.
    Fails,
    /// It does not begin before the fault is gone.
    BeginsLate,
    /// It is done, but does not answer before the fault is gone.
    AnswersLate,
}

/// A store with faults.
#[derive(Debug)]
pub struct FaultyStore {
    inner: Arc<dyn Store>,
    faults: watch::Sender<BTreeMap<Call, Fault>>,
    calls: Mutex<BTreeMap<Call, u64>>,
    arenas: Mutex<BTreeSet<String>>,
}

impl FaultyStore {
    /// A store without faults so far.
    #[must_use]
    pub fn new(inner: Arc<dyn Store>) -> Self {
        Self {
            inner,
            faults: watch::Sender::default(),
            calls: Mutex::default(),
            arenas: Mutex::default(),
        }
    }

    /// From now on the call has this fault, or none.
    pub fn set(&self, call: Call, fault: Option<Fault>) {
        self.faults.send_modify(|faults| match fault {
            Some(fault) => drop(faults.insert(call, fault)),
            None => drop(faults.remove(&call)),
        });
    }

    /// Number of these calls.
    #[must_use]
    pub fn calls(&self, call: Call) -> u64 {
        let calls = self.calls.lock().unwrap_or_else(PoisonError::into_inner);
        calls.get(&call).copied().unwrap_or(0)
    }

    /// The arenas that pages came from and went to, as their `Debug` output names them.
    #[must_use]
    pub fn arenas(&self) -> BTreeSet<String> {
        self.arenas.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn saw(&self, arenas: impl Iterator<Item = Arena>) {
        let arenas = arenas.map(|arena| format!("{arena:?}"));
        self.arenas.lock().unwrap_or_else(PoisonError::into_inner).extend(arenas);
    }

    /// Makes a call for `objects` objects, with the current fault.
    async fn faulty<T: Clone>(
        &self,
        call: Call,
        objects: usize,
        answer: Answer<'_, Results<T>>,
    ) -> Results<T> {
        *self.calls.lock().unwrap_or_else(PoisonError::into_inner).entry(call).or_default() += 1;
        let fault = self.faults.borrow().get(&call).copied();
        match fault {
            None => answer.await,
            Some(Fault::Fails) => {
                let error = io::Error::new(io::ErrorKind::ConnectionReset, "the store is down");
                vec![Err(StoreError::io("asking a faulty store", &error)); objects]
            }
            Some(Fault::BeginsLate) => {
                self.cured(call).await;
                answer.await
            }
            Some(Fault::AnswersLate) => {
                let results = answer.await;
                self.cured(call).await;
                results
            }
        }
    }

    async fn cured(&self, call: Call) {
        let mut faults = self.faults.subscribe();
        let cured = faults.wait_for(|faults| !faults.contains_key(&call)).await;
        cured.expect("the store outlives its calls");
    }
}

impl Store for FaultyStore {
    fn register(&self, arena: &Arena) -> Result<Registration, StoreError> {
        self.inner.register(arena)
    }

    fn exists<'a>(
        &'a self,
        ids: &'a [ObjectId],
        options: ExistsOptions,
    ) -> Answer<'a, Results<Presence>> {
        Box::pin(self.faulty(Call::Exists, ids.len(), self.inner.exists(ids, options)))
    }

    fn put_from(&self, puts: Vec<Put>, options: PutOptions) -> Answer<'_, Results<Stored>> {
        self.saw(puts.iter().map(|put| put.source.arena()));
        Box::pin(self.faulty(Call::Put, puts.len(), self.inner.put_from(puts, options)))
    }

    fn get_into(&self, gets: Vec<Get>, options: GetOptions) -> Answer<'_, Results<Served>> {
        self.saw(gets.iter().map(|get| get.target.arena()));
        Box::pin(self.faulty(Call::Get, gets.len(), self.inner.get_into(gets, options)))
    }

    fn pin<'a>(&'a self, ids: &'a [ObjectId], pin: Pin) -> Answer<'a, Results<()>> {
        self.inner.pin(ids, pin)
    }

    fn unpin<'a>(&'a self, ids: &'a [ObjectId], pin: Pin) -> Answer<'a, Results<()>> {
        self.inner.unpin(ids, pin)
    }

    fn remove<'a>(&'a self, ids: &'a [ObjectId], removal: Removal) -> Answer<'a, Results<()>> {
        Box::pin(self.faulty(Call::Remove, ids.len(), self.inner.remove(ids, removal)))
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
