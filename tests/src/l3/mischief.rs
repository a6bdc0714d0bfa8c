//! A store in which any call may fail, as a callback decides.

use std::fmt;
use std::io;
use std::sync::{Arc, Mutex, PoisonError};

use terrace_l3::{
    Answer, Arena, ExistsOptions, Get, GetOptions, Mismatch, ObjectId, Pin, Presence, Put,
    PutOptions, Registration, Removal, Results, Served, Store, StoreError, StoreStats, Stored,
};
use tokio::sync::watch;

/// The calls of a [`Store`] that can go wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Asked {
    /// [`Store::exists`].
    Exists,
    /// [`Store::put_from`].
    Put,
    /// [`Store::get_into`].
    Get,
    /// [`Store::pin`].
    Pin,
    /// [`Store::unpin`].
    Unpin,
    /// [`Store::remove`].
    Remove,
    /// [`Store::flush`].
    Flush,
}

/// Fault of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Trick {
    /// None.
    None,
    /// Nothing happens, and it fails.
    Refuse,
    /// It happens, and fails all the same: the answer was lost.
    LoseAnswer,
    /// Every second object is refused.
    Half,
    /// Nothing happens, because another put of the id has not ended.
    Busy,
    /// It never ends.
    Hang,
    /// It waits for [`MischievousStore::resume`], and then what should happen does.
    Pause,
    /// A get finds the last object damaged.
    Damage,
    /// A get finds the last object short.
    Shorten,
}

type Decide = Box<dyn FnMut(Asked) -> Trick + Send>;

/// A store that plays tricks.
pub struct MischievousStore {
    inner: Arc<dyn Store>,
    decide: Mutex<Decide>,
    resumed: watch::Sender<bool>,
}

impl MischievousStore {
    /// Asks `decide` before every call.
    pub fn new(inner: Arc<dyn Store>, decide: impl FnMut(Asked) -> Trick + Send + 'static) -> Self {
        let resumed = watch::Sender::new(false);
        Self { inner, decide: Mutex::new(Box::new(decide)), resumed }
    }

    /// From now on `decide` is asked.
    pub fn set(&self, decide: impl FnMut(Asked) -> Trick + Send + 'static) {
        *self.decide.lock().unwrap_or_else(PoisonError::into_inner) = Box::new(decide);
    }

    /// Resumes paused calls, and pauses no further ones.
    pub fn resume(&self) {
        self.resumed.send_replace(true);
    }

    async fn pause(&self) {
        let mut resumed = self.resumed.subscribe();
        let _ = resumed.wait_for(|resumed| *resumed).await;
    }

    fn trick(&self, asked: Asked) -> Trick {
        (self.decide.lock().unwrap_or_else(PoisonError::into_inner))(asked)
    }

    /// Makes a call about a batch of objects.
    async fn play<'a, O, T: Clone>(
        &'a self,
        asked: Asked,
        batch: Vec<O>,
        ask: impl FnOnce(Vec<O>) -> Answer<'a, Results<T>>,
    ) -> Results<T> {
        let objects = batch.len();
        match self.trick(asked) {
            Trick::None => ask(batch).await,
            Trick::Refuse => vec![Err(down()); objects],
            Trick::Busy => vec![Err(StoreError::BeingWritten); objects],
            Trick::LoseAnswer => {
                ask(batch).await;
                vec![Err(down()); objects]
            }
            Trick::Half => {
                let mut number = 0;
                let mut odd = |_: &O| {
                    number += 1;
                    number % 2 == 1
                };
                let (kept, _): (Vec<O>, Vec<O>) = batch.into_iter().partition(|object| odd(object));
                let mut results = ask(kept).await.into_iter();
                let result = |number: usize| {
                    if number.is_multiple_of(2) { results.next() } else { None }
                };
                (0..objects).map(result).map(|result| result.unwrap_or(Err(down()))).collect()
            }
            Trick::Hang => std::future::pending().await,
            Trick::Pause => {
                self.pause().await;
                ask(batch).await
            }
            Trick::Damage => spoil(ask(batch).await, StoreError::Corrupt(Mismatch::Payload)),
            Trick::Shorten => spoil(ask(batch).await, StoreError::Length { expected: 2, found: 1 }),
        }
    }
}

fn spoil<T>(mut results: Results<T>, error: StoreError) -> Results<T> {
    if let Some(last) = results.last_mut() {
        *last = Err(error);
    }
    results
}

fn down() -> StoreError {
    let error = io::Error::new(io::ErrorKind::ConnectionReset, "the store is down");
    StoreError::io("asking a mischievous store", &error)
}

impl fmt::Debug for MischievousStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MischievousStore").field("inner", &self.inner).finish_non_exhaustive()
    }
}

impl Store for MischievousStore {
    fn register(&self, arena: &Arena) -> Result<Registration, StoreError> {
        self.inner.register(arena)
    }

    fn exists<'a>(
        &'a self,
        ids: &'a [ObjectId],
        options: ExistsOptions,
    ) -> Answer<'a, Results<Presence>> {
        Box::pin(self.play(Asked::Exists, ids.to_vec(), move |ids| {
            Box::pin(async move { self.inner.exists(&ids, options).await })
        }))
    }

    fn put_from(&self, puts: Vec<Put>, options: PutOptions) -> Answer<'_, Results<Stored>> {
        Box::pin(self.play(Asked::Put, puts, move |puts| self.inner.put_from(puts, options)))
    }

    fn get_into(&self, gets: Vec<Get>, options: GetOptions) -> Answer<'_, Results<Served>> {
        Box::pin(self.play(Asked::Get, gets, move |gets| self.inner.get_into(gets, options)))
    }

    fn pin<'a>(&'a self, ids: &'a [ObjectId], pin: Pin) -> Answer<'a, Results<()>> {
        Box::pin(self.play(Asked::Pin, ids.to_vec(), move |ids| {
            Box::pin(async move { self.inner.pin(&ids, pin).await })
        }))
    }

    fn unpin<'a>(&'a self, ids: &'a [ObjectId], pin: Pin) -> Answer<'a, Results<()>> {
        Box::pin(self.play(Asked::Unpin, ids.to_vec(), move |ids| {
            Box::pin(async move { self.inner.unpin(&ids, pin).await })
        }))
    }

    fn remove<'a>(&'a self, ids: &'a [ObjectId], removal: Removal) -> Answer<'a, Results<()>> {
        Box::pin(self.play(Asked::Remove, ids.to_vec(), move |ids| {
            Box::pin(async move { self.inner.remove(&ids, removal).await })
        }))
    }

    fn flush(&self) -> Answer<'_, Result<(), StoreError>> {
        Box::pin(async move {
            match self.trick(Asked::Flush) {
                Trick::None | Trick::Half | Trick::Busy | Trick::Damage | Trick::Shorten => {
                    self.inner.flush().await
                }
                Trick::Refuse => Err(down()),
                Trick::LoseAnswer => self.inner.flush().await.and(Err(down())),
                Trick::Hang => std::future::pending().await,
                Trick::Pause => {
                    self.pause().await;
                    self.inner.flush().await
                }
            }
        })
    }

    fn stats(&self) -> StoreStats {
        self.inner.stats()
    }

    fn shutdown(&self) -> Answer<'_, Result<(), StoreError>> {
        self.inner.shutdown()
    }
}
