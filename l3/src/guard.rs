//! What an unwell store may cost: a bounded time, and then nothing.

mod batch;
mod breaker;
mod negative;

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use tokio::time::{Instant, timeout};

use self::breaker::{Breaker, Ticket, Verdict};
use self::negative::NegativeCache;
use crate::arena::Arena;
use crate::object::ObjectId;
use crate::registry::Registration;
use crate::stats::{BreakerState, GuardStats, StoreStats};
use crate::store::{
    Answer, ExistsOptions, Get, GetOptions, Pin, Presence, Put, PutOptions, Removal, Results,
    Served, Store, StoreError, Stored,
};

pub use self::batch::{died, merge, one_each, split};

/// When a store counts as unwell, and how long it is left alone then.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct GuardConfig {
    /// How long [`Store::exists`] may take.
    pub exists_timeout_ms: u64,
    /// How long [`Store::put_from`] may take.
    pub put_timeout_ms: u64,
    /// How long [`Store::get_into`] may take, with any wait for promotions.
    pub get_timeout_ms: u64,
    /// How long [`Store::pin`], [`Store::unpin`] and [`Store::remove`] may take.
    pub control_timeout_ms: u64,
    /// How long [`Store::flush`] may take.
    pub flush_timeout_ms: u64,
    /// How long [`Store::shutdown`] may take.
    pub shutdown_timeout_ms: u64,
    /// While so many calls, at least one, are past their deadline and have not ended, no others are
    /// made.
    pub overdue_max: u32,
    /// After so many unwell calls in a row the store is left alone.
    pub failures_to_open: u32,
    /// For how long, the first time. It doubles with each failed try.
    pub pause_ms: u64,
    /// For how long at the most.
    pub pause_max_ms: u64,
    /// How many calls at a time may try whether the store is well again; at least one.
    pub probes: u32,
    /// How long an object that could not be read is not asked for again.
    pub negative_ttl_ms: u64,
    /// How many such objects are remembered.
    pub negative_max: u32,
}

impl Default for GuardConfig {
    fn default() -> Self {
        Self {
            exists_timeout_ms: 50,
            put_timeout_ms: 5_000,
            get_timeout_ms: 1_000,
            control_timeout_ms: 1_000,
            flush_timeout_ms: 30_000,
            shutdown_timeout_ms: 60_000,
            overdue_max: 64,
            failures_to_open: 5,
            pause_ms: 500,
            pause_max_ms: 30_000,
            probes: 1,
            negative_ttl_ms: 10_000,
            negative_max: 65_536,
        }
    }
}

/// A store whose failures are bounded, whatever the store inside does.
///
/// - Every call has a deadline. Past it, it answers [`StoreError::TimedOut`]; what it began goes
///   on.
/// - After some failures in a row the store is left alone for a while, and every call answers
///   [`StoreError::Unavailable`] at once.
/// - An object that could not be read is not asked for again for a while, even if the store says
///   that it is there.
///
/// Calls run as tasks of their own, so they need a tokio runtime with time. A caller who stops
/// waiting changes nothing for the store inside, nor for what is learnt from the call.
#[derive(Debug)]
pub struct Guarded {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    inner: Arc<dyn Store>,
    config: GuardConfig,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    breaker: Breaker,
    negative: NegativeCache,
    overdue: u32,
    refused: u64,
    timed_out: u64,
    negative_hits: u64,
}

impl Guarded {
    /// Guards `inner`.
    #[must_use]
    pub fn new(inner: Arc<dyn Store>, config: GuardConfig) -> Self {
        let state = State {
            breaker: Breaker::new(&config),
            negative: NegativeCache::new(&config),
            overdue: 0,
            refused: 0,
            timed_out: 0,
            negative_hits: 0,
        };
        Self { shared: Arc::new(Shared { inner, config, state: Mutex::new(state) }) }
    }

    /// Has `ask` answer for so many objects if the breaker lets it. Whatever it answers is shown to
    /// `learn`, even when nobody waits for it any more.
    async fn call<T: Clone + Send + 'static>(
        &self,
        limit_ms: u64,
        objects: usize,
        ask: impl Future<Output = Results<T>> + Send + 'static,
        learn: impl FnOnce(&mut NegativeCache, &Results<T>) + Send + 'static,
    ) -> Results<T> {
        if objects == 0 {
            return Vec::new();
        }
        match self.shared.admit() {
            Ok(call) => call.run(limit_ms, objects, ask, learn).await,
            Err(refusal) => vec![Err(refusal); objects],
        }
    }

    /// A call about objects that only changes how the store treats them.
    async fn control(
        &self,
        objects: usize,
        ask: impl Future<Output = Results<()>> + Send + 'static,
    ) -> Results<()> {
        self.call(self.shared.config.control_timeout_ms, objects, ask, |_, _| {}).await
    }

    /// The part of a batch that is worth asking for; and for each object whether it is not.
    fn split<O>(&self, batch: Vec<O>, id: impl Fn(&O) -> ObjectId) -> (Vec<O>, Vec<bool>) {
        let now = Instant::now();
        let mut state = self.shared.state.lock();
        let (asked, skipped) = split(batch, |object| state.negative.contains(id(object), now));
        state.negative_hits += (skipped.len() - asked.len()) as u64;
        (asked, skipped)
    }
}

impl Store for Guarded {
    fn register(&self, arena: &Arena) -> Result<Registration, StoreError> {
        self.shared.inner.register(arena)
    }

    fn exists<'a>(
        &'a self,
        ids: &'a [ObjectId],
        options: ExistsOptions,
    ) -> Answer<'a, Results<Presence>> {
        let inner = self.shared.inner.clone();
        Box::pin(async move {
            let (asked, skipped) = self.split(ids.to_vec(), |id| *id);
            let (limit_ms, objects) = (self.shared.config.exists_timeout_ms, asked.len());
            let ask = async move { inner.exists(&asked, options).await };
            let results = self.call(limit_ms, objects, ask, |_, _| {}).await;
            merge(&skipped, results, &Ok(Presence::Absent))
        })
    }

    fn put_from(&self, puts: Vec<Put>, options: PutOptions) -> Answer<'_, Results<Stored>> {
        let inner = self.shared.inner.clone();
        Box::pin(async move {
            let ids: Vec<ObjectId> = puts.iter().map(|put| put.id).collect();
            let ask = async move { inner.put_from(puts, options).await };
            let learn = {
                let ids = ids.clone();
                move |negative: &mut NegativeCache, results: &Results<Stored>| {
                    let stored = ids.iter().zip(results).filter(|(_, result)| result.is_ok());
                    stored.for_each(|(id, _)| negative.remove(*id));
                }
            };
            self.call(self.shared.config.put_timeout_ms, ids.len(), ask, learn).await
        })
    }

    fn get_into(&self, gets: Vec<Get>, options: GetOptions) -> Answer<'_, Results<Served>> {
        let inner = self.shared.inner.clone();
        Box::pin(async move {
            let (asked, skipped) = self.split(gets, |get| get.id);
            let ids: Vec<ObjectId> = asked.iter().map(|get| get.id).collect();
            let (limit_ms, objects) = (self.shared.config.get_timeout_ms, ids.len());
            let ask = async move { inner.get_into(asked, options).await };
            let mut reading = Reading::new(&self.shared, ids);
            let learn = move |negative: &mut NegativeCache, results: &Results<Served>| {
                let now = Instant::now();
                for (id, result) in std::mem::take(&mut reading.ids).into_iter().zip(results) {
                    negative.end_read(id, is_futile(result), now);
                }
            };
            let results = self.call(limit_ms, objects, ask, learn).await;
            merge(&skipped, results, &Err(StoreError::Missing))
        })
    }

    fn pin<'a>(&'a self, ids: &'a [ObjectId], pin: Pin) -> Answer<'a, Results<()>> {
        let (inner, ids) = (self.shared.inner.clone(), ids.to_vec());
        Box::pin(self.control(ids.len(), async move { inner.pin(&ids, pin).await }))
    }

    fn unpin<'a>(&'a self, ids: &'a [ObjectId], pin: Pin) -> Answer<'a, Results<()>> {
        let (inner, ids) = (self.shared.inner.clone(), ids.to_vec());
        Box::pin(self.control(ids.len(), async move { inner.unpin(&ids, pin).await }))
    }

    fn remove<'a>(&'a self, ids: &'a [ObjectId], removal: Removal) -> Answer<'a, Results<()>> {
        let (inner, ids) = (self.shared.inner.clone(), ids.to_vec());
        Box::pin(self.control(ids.len(), async move { inner.remove(&ids, removal).await }))
    }

    fn flush(&self) -> Answer<'_, Result<(), StoreError>> {
        let inner = self.shared.inner.clone();
        Box::pin(async move {
            let ask = async move { vec![inner.flush().await] };
            self.call(self.shared.config.flush_timeout_ms, 1, ask, |_, _| {}).await.remove(0)
        })
    }

    fn stats(&self) -> StoreStats {
        let mut state = self.shared.state.lock();
        let guard = GuardStats {
            breaker: state.breaker.state(),
            opened: state.breaker.opened(),
            refused: state.refused,
            timed_out: state.timed_out,
            overdue: u64::from(state.overdue),
            negative_hits: state.negative_hits,
            negative: state.negative.len(Instant::now()) as u64,
        };
        drop(state);
        StoreStats { guard: Some(guard), ..self.shared.inner.stats() }
    }

    fn shutdown(&self) -> Answer<'_, Result<(), StoreError>> {
        let inner = self.shared.inner.clone();
        Box::pin(async move {
            let ask = async move { vec![inner.shutdown().await] };
            // A store that nobody asks any more must be shut down all the same.
            let call = Call { shared: self.shared.clone(), ticket: None, overdue: false };
            call.run(self.shared.config.shutdown_timeout_ms, 1, ask, |_, _| {}).await.remove(0)
        })
    }
}

impl Shared {
    fn admit(self: &Arc<Self>) -> Result<Call, StoreError> {
        let mut state = self.state.lock();
        let admitted = if state.overdue < self.config.overdue_max.max(1) {
            state.breaker.admit(Instant::now())
        } else {
            Err(Duration::from_millis(self.config.pause_ms))
        };
        state.refused += u64::from(admitted.is_err());
        let call = |ticket| Call { shared: self.clone(), ticket: Some(ticket), overdue: false };
        admitted.map(call).map_err(|retry_after| StoreError::Unavailable { retry_after })
    }
}

/// A call that was let through, until it has ended. Dropping it says so, however it came about, so
/// that no probe is waited for in vain.
#[derive(Debug)]
struct Call {
    shared: Arc<Shared>,
    /// Until the breaker has its verdict.
    ticket: Option<Ticket>,
    overdue: bool,
}

impl Call {
    /// Asks the store, in a task of its own: the store may block its thread. The waiting is a task
    /// as well, because the deadline passes even for those who have gone away.
    async fn run<T: Clone + Send + 'static>(
        self,
        limit_ms: u64,
        objects: usize,
        ask: impl Future<Output = Results<T>> + Send + 'static,
        learn: impl FnOnce(&mut NegativeCache, &Results<T>) + Send + 'static,
    ) -> Results<T> {
        let limit = Duration::from_millis(limit_ms);
        let watch = tokio::spawn(async move {
            let mut asking = tokio::spawn(ask);
            let answer = timeout(limit, &mut asking).await;
            let late = answer.is_err();
            let results = match answer {
                Ok(Ok(results)) => one_each(results, objects),
                Ok(Err(error)) => vec![Err(died(error)); objects],
                Err(_) => vec![Err(StoreError::TimedOut(limit)); objects],
            };
            let call = self.answered(&results, late, learn);
            if late {
                tokio::spawn(async move {
                    let _ = asking.await;
                    drop(call);
                });
            }
            results
        });
        watch.await.unwrap_or_else(|error| vec![Err(died(error)); objects])
    }

    /// Learns from the answer.
    fn answered<T>(
        mut self,
        results: &Results<T>,
        late: bool,
        learn: impl FnOnce(&mut NegativeCache, &Results<T>),
    ) -> Self {
        let unwell =
            |result: &Result<T, StoreError>| result.as_ref().is_err_and(StoreError::is_unwell);
        let verdict = if results.iter().any(unwell) { Verdict::Unwell } else { Verdict::Well };
        let mut state = self.shared.state.lock();
        if let Some(ticket) = self.ticket.take() {
            let before = state.breaker.state();
            state.breaker.ended(ticket, verdict, Instant::now());
            let error =
                results.iter().find_map(|result| result.as_ref().err().filter(|it| it.is_unwell()));
            tell(before, &state.breaker, error);
        }
        learn(&mut state.negative, results);
        state.timed_out += u64::from(late);
        state.overdue += u32::from(late);
        self.overdue = late;
        drop(state);
        self
    }
}

/// Tells the operator when the store is left alone, and when it is asked again.
fn tell(before: BreakerState, breaker: &Breaker, error: Option<&StoreError>) {
    let reason = error.map(StoreError::to_string).unwrap_or_default();
    match (before, breaker.state()) {
        (BreakerState::Closed, BreakerState::Open) => tracing::warn!(
            "L3 is failing: circuit breaker open, requests compute instead. Last failure: {reason}"
        ),
        (BreakerState::HalfOpen, BreakerState::Open) => {
            tracing::debug!("L3 is still failing: {reason}");
        }
        (BreakerState::HalfOpen, BreakerState::Closed) => {
            tracing::info!("L3 has recovered: circuit breaker closed");
        }
        (BreakerState::Closed, BreakerState::Closed | BreakerState::HalfOpen)
        | (BreakerState::HalfOpen, BreakerState::HalfOpen)
        | (
            BreakerState::Open,
            BreakerState::Closed | BreakerState::Open | BreakerState::HalfOpen,
        ) => {}
    }
}

impl Drop for Call {
    fn drop(&mut self) {
        let mut state = self.shared.state.lock();
        if let Some(ticket) = self.ticket.take() {
            state.breaker.ended(ticket, Verdict::Unknown, Instant::now());
        }
        state.overdue -= u32::from(self.overdue);
    }
}

/// Objects that are being read, until it is known how that went or that nobody will know.
struct Reading {
    shared: Arc<Shared>,
    ids: Vec<ObjectId>,
}

impl Reading {
    fn new(shared: &Arc<Shared>, ids: Vec<ObjectId>) -> Self {
        let negative = &mut shared.state.lock().negative;
        ids.iter().for_each(|id| negative.begin_read(*id));
        Self { shared: shared.clone(), ids }
    }
}

impl Drop for Reading {
    fn drop(&mut self) {
        if !self.ids.is_empty() {
            let (negative, now) = (&mut self.shared.state.lock().negative, Instant::now());
            self.ids.drain(..).for_each(|id| negative.end_read(id, false, now));
        }
    }
}

/// Whether reading the object again soon would be in vain.
fn is_futile(result: &Result<Served, StoreError>) -> bool {
    result.as_ref().is_err_and(|error| {
        matches!(error, StoreError::Missing | StoreError::Corrupt(_)) || error.is_unwell()
    })
}

/// A time after `now`, or, if the clock cannot tell so far ahead, one that nobody lives to see.
pub fn after(now: Instant, pause: Duration) -> Instant {
    const FAR: Duration = Duration::from_secs(100 * 365 * 24 * 3600);
    now + pause.min(FAR)
}

#[cfg(all(test, not(feature = "loom")))]
pub(crate) mod scripted;

#[cfg(all(test, not(feature = "loom")))]
mod tests;
