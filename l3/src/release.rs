//! Freeing what is consumed: at once for whoever asks, and without fail in the end.

mod ledger;

use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use tokio::sync::{Notify, RwLock};
use tokio::task::JoinHandle;
use tokio::time::{Instant, timeout_at};

use self::ledger::{InHand, Ledger, MayPut};
use crate::arena::Arena;
use crate::guard::{died, merge, one_each, split};
use crate::object::ObjectId;
use crate::registry::Registration;
use crate::stats::StoreStats;
use crate::store::{
    Answer, ExistsOptions, Get, GetOptions, Pin, Presence, Put, PutOptions, Removal, Results,
    Served, Store, StoreError, Stored,
};

/// How removals that fail are repeated, and how long a release is remembered.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ReleaseConfig {
    /// How long after a failure a removal is tried again. It doubles with each further failure.
    pub retry_ms: u64,
    /// How long at the most.
    pub retry_max_ms: u64,
    /// How many removals are tried again in one call.
    pub retry_batch_max: u32,
    /// How many objects may wait for their removal: while there are more, nothing can be put. None of them
    /// is forgotten.
    pub parked_max: u32,
    /// How long a removed object is refused, in case that the store only says that it has removed
    /// it.
    pub tombstone_ttl_ms: u64,
    /// How many removed objects are remembered for that; beyond it the oldest is forgotten.
    pub tombstones_max: u32,
}

impl Default for ReleaseConfig {
    fn default() -> Self {
        Self {
            retry_ms: 100,
            retry_max_ms: 30_000,
            retry_batch_max: 256,
            parked_max: 65_536,
            tombstone_ttl_ms: 600_000,
            tombstones_max: 65_536,
        }
    }
}

/// A store whose objects can be [released](Releases::release): nobody can have them from then on,
/// and their memory is freed as soon as the store inside can be brought to it.
///
/// While too many wait for their removal, puts fail with [`StoreError::Full`].
///
/// A released object may be put again. Since its old bytes may linger, the put first removes them
/// by force; it fails as that removal does, and with [`StoreError::BeingWritten`] while another
/// removal or put of the object is under way, or if the store inside finds the object there all the
/// same. Only a put that stores the object anew makes it available again.
///
/// Puts and removals run as tasks of their own, so they need a tokio runtime with time. They wait
/// as long as the store inside does: a [`Guarded`](crate::Guarded) store bounds it.
#[derive(Debug)]
pub struct Releases {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    inner: Arc<dyn Store>,
    ledger: Mutex<Ledger>,
    retry_batch_max: usize,
    /// The task that tries parked removals again, from the first one on.
    retrying: Mutex<Option<JoinHandle<()>>>,
    /// There is something to do earlier than that task knows.
    wake: Notify,
    /// No removal is tried again any more.
    closed: AtomicBool,
    /// Held for reading by whatever puts and removes, and for writing by the shutdown.
    calls: RwLock<()>,
}

impl Releases {
    /// Makes the objects of `inner` releasable.
    #[must_use]
    pub fn new(inner: Arc<dyn Store>, config: ReleaseConfig) -> Self {
        let shared = Shared {
            inner,
            retry_batch_max: config.retry_batch_max.max(1) as usize,
            ledger: Mutex::new(Ledger::new(config)),
            retrying: Mutex::new(None),
            wake: Notify::new(),
            closed: AtomicBool::new(false),
            calls: RwLock::new(()),
        };
        Self { shared: Arc::new(shared) }
    }

    /// Says that nobody needs these objects any more: removes them whatever pins and leases they have. From
    /// this call on, not only from its end, exactly these generations cannot be had any more.
    ///
    /// The answer comes when the removal was tried once; nothing depends on waiting for it. What
    /// could not be removed is tried again in the background.
    ///
    /// # Panics
    /// Outside of a tokio runtime.
    pub fn release(&self, ids: Vec<ObjectId>) -> impl Future<Output = ()> + Send + use<> {
        let mut ledger = self.shared.ledger.lock();
        let objects = ids.into_iter().map(|id| ledger.release(id)).collect();
        drop(ledger);
        let held = self.shared.hold(objects);
        let removal = tokio::spawn(async move {
            let shared = held.shared.clone();
            let _call = shared.calls.read().await;
            shared.remove(held).await;
        });
        async move { drop(removal.await) }
    }

    /// The part of a batch that was not released, and for each object whether it was.
    fn split<O>(&self, batch: Vec<O>, id: impl Fn(&O) -> ObjectId) -> (Vec<O>, Vec<bool>) {
        let (ledger, now) = (self.shared.ledger.lock(), Instant::now());
        split(batch, |object| ledger.hides(id(object), now))
    }
}

impl Store for Releases {
    fn register(&self, arena: &Arena) -> Result<Registration, StoreError> {
        self.shared.inner.register(arena)
    }

    fn exists<'a>(
        &'a self,
        ids: &'a [ObjectId],
        options: ExistsOptions,
    ) -> Answer<'a, Results<Presence>> {
        Box::pin(async move {
            let (asked, released) = self.split(ids.to_vec(), |id| *id);
            let results = match asked.len() {
                0 => Vec::new(),
                objects => one_each(self.shared.inner.exists(&asked, options).await, objects),
            };
            merge(&released, results, &Ok(Presence::Absent))
        })
    }

    fn put_from(&self, puts: Vec<Put>, options: PutOptions) -> Answer<'_, Results<Stored>> {
        let (shared, objects) = (self.shared.clone(), puts.len());
        Box::pin(async move {
            let put = tokio::spawn(async move { shared.put(puts, options).await });
            put.await.unwrap_or_else(|error| vec![Err(died(error)); objects])
        })
    }

    fn get_into(&self, gets: Vec<Get>, options: GetOptions) -> Answer<'_, Results<Served>> {
        Box::pin(async move {
            let (asked, released) = self.split(gets, |get| get.id);
            self.shared.ledger.lock().refused((released.len() - asked.len()) as u64);
            let results = match asked.len() {
                0 => Vec::new(),
                objects => one_each(self.shared.inner.get_into(asked, options).await, objects),
            };
            merge(&released, results, &Err(StoreError::Missing))
        })
    }

    fn pin<'a>(&'a self, ids: &'a [ObjectId], pin: Pin) -> Answer<'a, Results<()>> {
        Box::pin(async move {
            let (asked, released) = self.split(ids.to_vec(), |id| *id);
            let results = match asked.len() {
                0 => Vec::new(),
                objects => one_each(self.shared.inner.pin(&asked, pin).await, objects),
            };
            merge(&released, results, &Err(StoreError::Missing))
        })
    }

    fn unpin<'a>(&'a self, ids: &'a [ObjectId], pin: Pin) -> Answer<'a, Results<()>> {
        self.shared.inner.unpin(ids, pin)
    }

    fn remove<'a>(&'a self, ids: &'a [ObjectId], removal: Removal) -> Answer<'a, Results<()>> {
        self.shared.inner.remove(ids, removal)
    }

    fn flush(&self) -> Answer<'_, Result<(), StoreError>> {
        self.shared.inner.flush()
    }

    fn stats(&self) -> StoreStats {
        let release = self.shared.ledger.lock().stats();
        StoreStats { release: Some(release), ..self.shared.inner.stats() }
    }

    fn shutdown(&self) -> Answer<'_, Result<(), StoreError>> {
        Box::pin(async move {
            self.shared.close();
            let _alone = self.shared.calls.write().await;
            let parked = self.shared.ledger.lock().take_parked();
            let batches = parked.chunks(self.shared.retry_batch_max);
            let held: Vec<Held> = batches.map(|batch| self.shared.hold(batch.to_vec())).collect();
            for batch in held {
                self.shared.remove(batch).await;
            }
            self.shared.inner.shutdown().await
        })
    }
}

impl Drop for Releases {
    fn drop(&mut self) {
        self.shared.close();
    }
}

impl Shared {
    fn hold(self: &Arc<Self>, objects: Vec<InHand>) -> Held {
        Held { shared: self.clone(), objects }
    }

    /// Removes objects, or parks them.
    async fn remove(self: &Arc<Self>, mut held: Held) {
        let results = self.try_to_remove(&held.objects).await;
        let (mut ledger, now) = (self.ledger.lock(), Instant::now());
        for (object, result) in held.objects.drain(..).zip(results) {
            match result {
                Ok(()) => ledger.removed(object, now),
                Err(_) => ledger.failed(object, now),
            }
        }
        drop(ledger);
        self.keep_retrying();
    }

    /// Asks the store inside to remove objects. What it has not got any more is removed as well.
    async fn try_to_remove(&self, objects: &[InHand]) -> Results<()> {
        let ids: Vec<ObjectId> = objects.iter().map(|object| object.id).collect();
        if ids.is_empty() {
            return Vec::new();
        }
        let results = one_each(self.inner.remove(&ids, Removal::Final).await, ids.len());
        let is_removed = |result| match result {
            Err(StoreError::Missing | StoreError::Superseded { .. }) => Ok(()),
            Ok(()) | Err(_) => result,
        };
        results.into_iter().map(is_removed).collect()
    }

    async fn put(self: Arc<Self>, puts: Vec<Put>, options: PutOptions) -> Results<Stored> {
        let _call = self.calls.read().await;
        let ids: Vec<ObjectId> = puts.iter().map(|put| put.id).collect();
        let (admitted, mut held) = self.admit(&ids).await;
        let (puts, _) = {
            let mut admitted = admitted.iter();
            split(puts, |_| admitted.next().is_some_and(Result::is_err))
        };
        let results = match puts.len() {
            0 => Vec::new(),
            objects => one_each(self.inner.put_from(puts, options).await, objects),
        };
        let mut results = results.into_iter();
        let (mut ledger, now) = (self.ledger.lock(), Instant::now());
        held.objects.clear();
        let end_put = |(id, admitted): (ObjectId, Result<_, _>)| {
            let in_hand = admitted?;
            let result = results.next().expect("one result for each object asked for");
            ledger.end_put(id, in_hand, result, now)
        };
        let results = ids.into_iter().zip(admitted).map(end_put).collect();
        drop(ledger);
        self.keep_retrying();
        results
    }

    /// Which objects may be put. Those that were released before are removed and in hand then.
    async fn admit(self: &Arc<Self>, ids: &[ObjectId]) -> (Results<Option<InHand>>, Held) {
        let mut released = self.hold(Vec::new());
        let mut admitted: Vec<_> = {
            let (mut ledger, now) = (self.ledger.lock(), Instant::now());
            let begin_put = |id: &ObjectId| match ledger.begin_put(*id, now) {
                MayPut::Yes => Ok(None),
                MayPut::No(why) => Err(why),
                MayPut::AfterRemoving(object) => {
                    released.objects.push(object);
                    Ok(Some(object))
                }
            };
            ids.iter().map(begin_put).collect()
        };
        let removed = self.try_to_remove(&released.objects).await;
        let (mut ledger, now) = (self.ledger.lock(), Instant::now());
        let in_hand = admitted.iter_mut().filter(|admitted| matches!(admitted, Ok(Some(_))));
        let mut cleared = Vec::new();
        for (admitted, (object, removed)) in in_hand.zip(released.objects.drain(..).zip(removed)) {
            match removed {
                Ok(()) => {
                    ledger.cleared(object);
                    cleared.push(object);
                }
                Err(error) => {
                    ledger.failed(object, now);
                    *admitted = Err(error);
                }
            }
        }
        drop(ledger);
        released.objects = cleared;
        (admitted, released)
    }

    /// Sees to it that somebody tries again what is parked.
    fn keep_retrying(self: &Arc<Self>) {
        if self.is_closed() || self.ledger.lock().next_due().is_none() {
            return;
        }
        let mut retrying = self.retrying.lock();
        if retrying.as_ref().is_none_or(JoinHandle::is_finished) {
            *retrying = Some(tokio::spawn(self.clone().retry_until_closed()));
        }
        self.wake.notify_one();
    }

    async fn retry_until_closed(self: Arc<Self>) {
        loop {
            let next_due = self.ledger.lock().next_due();
            match next_due {
                Some(due) => drop(timeout_at(due, self.wake.notified()).await),
                None => self.wake.notified().await,
            }
            let _call = self.calls.read().await;
            if self.is_closed() {
                return;
            }
            let due = self.ledger.lock().take_due(Instant::now());
            if !due.is_empty() {
                self.remove(self.hold(due)).await;
            }
        }
    }

    fn close(&self) {
        self.closed.store(true, Ordering::Release);
        self.wake.notify_one();
    }

    fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }
}

/// Objects in somebody's hand. What is still there when it is dropped, with a runtime or by a panic of
/// the store inside, is parked.
#[derive(Debug)]
struct Held {
    shared: Arc<Shared>,
    objects: Vec<InHand>,
}

impl Drop for Held {
    fn drop(&mut self) {
        if self.objects.is_empty() {
            return;
        }
        let (mut ledger, now) = (self.shared.ledger.lock(), Instant::now());
        self.objects.drain(..).for_each(|object| ledger.failed(object, now));
        self.shared.wake.notify_one();
    }
}

#[cfg(all(test, not(feature = "loom")))]
mod tests;
