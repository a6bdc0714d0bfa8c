//! A wrapper that bounds the cost of a failing store: a bounded time at first, and then nothing.

mod batch;
mod breaker;
mod negative;

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use tokio::time::{Instant, timeout};

use self::breaker::{Breaker, BreakerTicket, Verdict};
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

/// Limits of a [`Guarded`] store: deadlines, circuit breaker and negative cache.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct GuardConfig {
    /// Deadline of [`Store::exists`].
    pub exists_timeout_ms: u64,
    /// Deadline of [`Store::put_from`].
    pub put_timeout_ms: u64,
    /// Deadline of [`Store::get_into`], including any wait for promotions.
    pub get_timeout_ms: u64,
    /// Deadline of [`Store::pin`], [`Store::unpin`] and [`Store::remove`].
    pub control_timeout_ms: u64,
    /// Deadline of [`Store::flush`].
    pub flush_timeout_ms: u64,
    /// Deadline of [`Store::shutdown`].
    pub shutdown_timeout_ms: u64,
    /// Maximum number of calls, at least one, that are past their deadline and still running. At
    /// this number, further calls are refused.
    pub overdue_max: u32,
    /// Number of consecutive failed calls that opens the breaker.
    pub failures_to_open: u32,
    /// Initial pause of the open breaker. It doubles with each failed probe.
    pub pause_ms: u64,
    /// Maximum pause.
    pub pause_max_ms: u64,
    /// Maximum number of concurrent probes of the half-open breaker; at least one.
    pub probes: u32,
    /// Time during which an object that could not be read is not requested again.
    pub negative_ttl_ms: u64,
    /// Maximum number of such objects that are remembered.
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

/// A store whose failures cost a bounded time, whatever the inner store does.
///
/// - Every call has a deadline. Past it, the call returns [`StoreError::TimedOut`]; the operation
///   itself continues.
/// - After consecutive failures, a circuit breaker opens for a while, and every call returns
///   [`StoreError::Unavailable`] at once.
/// - An object that could not be read is not requested again for a while, even if the store reports
///   it as present.
///
/// Calls run in tasks of their own, so they need a tokio runtime with time. A caller that stops
/// waiting affects neither the inner store nor what the guard learns from the call.
#[derive(Debug)]
pub struct Guarded {
    shared: Arc<GuardCore>,
}

#[derive(Debug)]
struct GuardCore {
    inner: Arc<dyn Store>,
    config: GuardConfig,
    state: Mutex<GuardState>,
}

#[derive(Debug)]
struct GuardState {
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
        let state = GuardState {
            breaker: Breaker::new(&config),
            negative: NegativeCache::new(&config),
            overdue: 0,
            refused: 0,
            timed_out: 0,
            negative_hits: 0,
        };
        Self { shared: Arc::new(GuardCore { inner, config, state: Mutex::new(state) }) }
    }

    /// Runs `ask` for this number of objects if the breaker admits it. `learn` sees the results,
    /// even if the caller has stopped waiting.
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

    /// Runs a call that only changes how the store treats objects.
    async fn control(
        &self,
        objects: usize,
        ask: impl Future<Output = Results<()>> + Send + 'static,
    ) -> Results<()> {
        self.call(self.shared.config.control_timeout_ms, objects, ask, |_, _| {}).await
    }

    /// Removes the objects of a batch that are in the negative cache. The flags say which were
    /// removed.
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
            let mut reading = PendingReads::new(&self.shared, ids);
            let learn = move |negative: &mut NegativeCache, results: &Results<Served>| {
                let now = Instant::now();
                for (id, result) in std::mem::take(&mut reading.ids).into_iter().zip(results) {
                    negative.end_read(id, is_lasting_failure(result), now);
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
            // Shutdown bypasses the breaker.
            let call = AdmittedCall { shared: self.shared.clone(), ticket: None, overdue: false };
            call.run(self.shared.config.shutdown_timeout_ms, 1, ask, |_, _| {}).await.remove(0)
        })
    }
}

impl GuardCore {
    fn admit(self: &Arc<Self>) -> Result<AdmittedCall, StoreError> {
        let mut state = self.state.lock();
        let admitted = if state.overdue < self.config.overdue_max.max(1) {
            state.breaker.admit(Instant::now())
        } else {
            Err(Duration::from_millis(self.config.pause_ms))
        };
        state.refused += u64::from(admitted.is_err());
        let call =
            |ticket| AdmittedCall { shared: self.clone(), ticket: Some(ticket), overdue: false };
        admitted.map(call).map_err(|retry_after| StoreError::Unavailable { retry_after })
    }
}

/// An admitted call. Dropping it reports its end to the breaker in every case, so that a lost probe
/// does not block later ones.
#[derive(Debug)]
struct AdmittedCall {
    shared: Arc<GuardCore>,
    /// Present until the breaker has the verdict.
    ticket: Option<BreakerTicket>,
    overdue: bool,
}

impl AdmittedCall {
    /// Runs the call in a task, since the store may block its thread. A second task watches the
    /// deadline, which applies even if the caller has stopped waiting.
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

    /// Updates breaker and negative cache from the results.
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
            log_transition(before, &state.breaker, error);
        }
        learn(&mut state.negative, results);
        state.timed_out += u64::from(late);
        state.overdue += u32::from(late);
        self.overdue = late;
        drop(state);
        self
    }
}

/// Logs when the breaker opens and closes.
fn log_transition(before: BreakerState, breaker: &Breaker, error: Option<&StoreError>) {
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

impl Drop for AdmittedCall {
    fn drop(&mut self) {
        let mut state = self.shared.state.lock();
        if let Some(ticket) = self.ticket.take() {
            state.breaker.ended(ticket, Verdict::Unknown, Instant::now());
        }
        state.overdue -= u32::from(self.overdue);
    }
}

/// Objects that are being read, until their outcome is known or lost.
struct PendingReads {
    shared: Arc<GuardCore>,
    ids: Vec<ObjectId>,
}

impl PendingReads {
    fn new(shared: &Arc<GuardCore>, ids: Vec<ObjectId>) -> Self {
        let negative = &mut shared.state.lock().negative;
        ids.iter().for_each(|id| negative.begin_read(*id));
        Self { shared: shared.clone(), ids }
    }
}

impl Drop for PendingReads {
    fn drop(&mut self) {
        if !self.ids.is_empty() {
            let (negative, now) = (&mut self.shared.state.lock().negative, Instant::now());
            self.ids.drain(..).for_each(|id| negative.end_read(id, false, now));
        }
    }
}

/// Returns true if reading the object again soon would fail too.
fn is_lasting_failure(result: &Result<Served, StoreError>) -> bool {
    result.as_ref().is_err_and(|error| {
        matches!(error, StoreError::Missing | StoreError::Corrupt(_)) || error.is_unwell()
    })
}

/// Returns `now + pause`, limited to a century ahead, which clocks can represent.
pub fn after(now: Instant, pause: Duration) -> Instant {
    const FAR: Duration = Duration::from_secs(100 * 365 * 24 * 3600);
    now + pause.min(FAR)
}

#[cfg(all(test, not(feature = "loom")))]
pub(crate) mod scripted;

#[cfg(all(test, not(feature = "loom")))]
mod tests;
