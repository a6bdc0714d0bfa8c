//! The scheduler, one call per step.

use std::sync::Arc;

use numpy::PyReadonlyArray1;
use parking_lot::Mutex;
use pyo3::prelude::*;
use pyo3::types::{PyByteArray, PyBytes, PyList};
use serde::Deserialize;
use terrace_scheduler::{
    AdapterId, Config, Event, KvEvent, KvEvents, KvTier, OpId, Outcome, PageKey, Passage, Plan,
    Reach, Request, RequestId, Scheduler, StepId, StepResult, Time, Token,
};

use crate::errors::{ConfigError, IntoPython, bad_argument, broken, unless_it_panics};
use crate::plan_bytes::PlanBytes;

/// Prompts from this length on are hashed without the GIL. All other calls take microseconds, less
/// than releasing and reacquiring it.
const LONG_PROMPT: usize = 4096;

/// A scheduler, and buffers for its plans and events.
struct Inner {
    scheduler: Scheduler,
    plan: Plan,
    events: KvEvents,
}

/// Native part of `terrace_kv.Scheduler`.
#[pyclass(frozen, name = "Scheduler", module = "terrace_kv._native")]
pub(crate) struct NativeScheduler {
    /// None after a broken invariant.
    inner: Arc<Mutex<Option<Inner>>>,
}

/// Optional properties of a request.
#[derive(Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct RequestOptions {
    computes_prompt: bool,
    waits_for_tokens: bool,
    passages: Vec<Passage>,
    reads: Reach,
    writes: Reach,
    siblings: Vec<RequestId>,
}

impl NativeScheduler {
    /// Runs a function with the scheduler.
    fn with<R>(&self, work: impl FnOnce(&mut Inner) -> PyResult<R>) -> PyResult<R> {
        let mut guard = self.inner.lock();
        let Some(inner) = guard.as_mut() else {
            return Err(broken("an earlier call has failed"));
        };
        let done = unless_it_panics(|| work(inner));
        if done.is_err() {
            *guard = None;
        }
        done?
    }

    fn advance(&self, now: u64, event: Event<'_>) -> PyResult<()> {
        self.with(|inner| {
            inner.scheduler.advance(Time(now), event).map_err(IntoPython::into_python)
        })
    }
}

#[pymethods]
impl NativeScheduler {
    #[new]
    fn new(config: &str) -> PyResult<Self> {
        let config: Config = serde_json::from_str(config)
            .map_err(|error| ConfigError::new_err(format!("invalid settings: {error}")))?;
        let scheduler = unless_it_panics(|| Scheduler::new(config))?;
        let scheduler = scheduler.map_err(IntoPython::into_python)?;
        let inner = Inner { scheduler, plan: Plan::default(), events: KvEvents::default() };
        Ok(Self { inner: Arc::new(Mutex::new(Some(inner))) })
    }

    /// Returns the settings in force, as JSON.
    fn config(&self) -> PyResult<String> {
        self.with(|inner| json(inner.scheduler.config()))
    }

    #[expect(clippy::too_many_arguments, reason = "Python names them")]
    fn submit(
        &self,
        python: Python<'_>,
        now: u64,
        id: u64,
        prompt: PyReadonlyArray1<'_, Token>,
        max_new_tokens: u32,
        priority: i32,
        adapter: String,
        salt: String,
        wishes: Option<&str>,
    ) -> PyResult<()> {
        let wishes: RequestOptions = match wishes {
            None => RequestOptions::default(),
            Some(text) => serde_json::from_str(text).map_err(bad_argument)?,
        };
        let prompt = prompt.as_slice().map_err(bad_argument)?.to_vec();
        let is_long = prompt.len() >= LONG_PROMPT;
        let mut request = Request::new(id, prompt, max_new_tokens);
        (request.priority, request.adapter, request.salt) = (priority, adapter, salt);
        let RequestOptions { computes_prompt, waits_for_tokens, passages, reads, writes, siblings } =
            wishes;
        (request.computes_prompt, request.waits_for_tokens) = (computes_prompt, waits_for_tokens);
        (request.passages, request.siblings) = (passages, siblings);
        (request.reads, request.writes) = (reads, writes);
        let submit = || {
            self.with(|inner| {
                inner.scheduler.submit(Time(now), request).map_err(IntoPython::into_python)
            })
        };
        if is_long { python.detach(submit) } else { submit() }
    }

    fn abort(&self, now: u64, id: u64) -> PyResult<()> {
        self.with(|inner| {
            inner.scheduler.abort(Time(now), RequestId(id)).map_err(IntoPython::into_python)
        })
    }

    fn set_priority(&self, id: u64, priority: i32) -> PyResult<()> {
        self.with(|inner| {
            let done = inner.scheduler.set_priority(RequestId(id), priority);
            done.map_err(IntoPython::into_python)
        })
    }

    /// Returns the next plan, as bytes.
    fn plan<'py>(&self, python: Python<'py>, now: u64) -> PyResult<Bound<'py, PyByteArray>> {
        self.with(|inner| {
            inner.scheduler.plan_into(Time(now), &mut inner.plan);
            let plan = PlanBytes::new(&inner.plan);
            PyByteArray::new_with(python, plan.len(), |bytes| {
                plan.write(&inner.scheduler, bytes);
                Ok(())
            })
        })
    }

    /// Reports the results of a step. Without `counts` each request has one token.
    #[pyo3(signature = (now, step, requests, tokens, counts, finished, failed))]
    #[expect(clippy::too_many_arguments, reason = "Python names them")]
    fn step_done(
        &self,
        now: u64,
        step: u64,
        requests: PyReadonlyArray1<'_, u64>,
        tokens: PyReadonlyArray1<'_, Token>,
        counts: Option<PyReadonlyArray1<'_, u32>>,
        finished: Option<PyReadonlyArray1<'_, bool>>,
        failed: Vec<u64>,
    ) -> PyResult<()> {
        let requests = requests.as_slice().map_err(bad_argument)?;
        let mut tokens = tokens.as_slice().map_err(bad_argument)?;
        let counts = counts.as_ref().map(|counts| counts.as_slice()).transpose();
        let counts = counts.map_err(bad_argument)?;
        let finished = finished.as_ref().map(|finished| finished.as_slice()).transpose();
        let finished = finished.map_err(bad_argument)?;
        let of_counts = counts.map_or(requests.len(), <[u32]>::len);
        let of_finished = finished.map_or(requests.len(), <[bool]>::len);
        let counted = counts.map(|counts| counts.iter().map(|&count| count as usize).sum());
        if (of_counts, of_finished) != (requests.len(), requests.len())
            || tokens.len() != counted.unwrap_or(requests.len())
        {
            return Err(bad_argument(format_args!(
                "{} requests have {} tokens, {of_counts} counts and {of_finished} flags: give one \
                 of each per request",
                requests.len(),
                tokens.len(),
            )));
        }
        let results = requests.iter().enumerate().map(|(place, &request)| {
            let count = counts.map_or(1, |counts| counts[place] as usize);
            let (ours, others) = tokens.split_at(count);
            tokens = others;
            let finished = finished.is_some_and(|finished| finished[place]);
            StepResult { request: RequestId(request), tokens: ours, finished }
        });
        let results: Vec<_> = results.collect();
        let failed: Vec<_> = failed.into_iter().map(RequestId).collect();
        self.advance(
            now,
            Event::StepDone { step: StepId(step), results: &results, failed: &failed },
        )
    }

    fn step_failed(&self, now: u64, step: u64) -> PyResult<()> {
        self.advance(now, Event::StepFailed { step: StepId(step) })
    }

    /// Reports the outcome of an operation on a rank. `pages` belongs to outcomes with partial
    /// progress.
    fn operation(&self, now: u64, op: u64, rank: u32, outcome: &str, pages: u32) -> PyResult<()> {
        let outcome = match outcome {
            "done" => Outcome::Done,
            "partial" => Outcome::Partial(pages),
            "missing" => Outcome::Missing,
            "failed" => Outcome::Failed,
            "corrupt" => Outcome::Corrupt,
            "corrupt_after" => Outcome::CorruptAfter(pages),
            "called_off" => Outcome::CalledOff(pages),
            "timed_out" => Outcome::TimedOut,
            other => {
                return Err(bad_argument(format_args!(
                    "there is no outcome {other:?}: use done, partial, missing, failed, corrupt, \
                     corrupt_after, called_off or timed_out"
                )));
            }
        };
        self.advance(now, Event::Operation { op: OpId(op), rank, outcome })
    }

    /// Returns the time at which a plan must be requested even without an event.
    fn deadline(&self) -> PyResult<Option<u64>> {
        self.with(|inner| Ok(inner.scheduler.deadline().map(|time| time.0)))
    }

    /// Returns the counters, as JSON.
    fn stats(&self) -> PyResult<String> {
        self.with(|inner| json(&inner.scheduler.stats()))
    }

    /// Returns the tokens of a request so far, as bytes.
    fn tokens<'py>(
        &self,
        python: Python<'py>,
        id: u64,
    ) -> PyResult<Option<Bound<'py, PyByteArray>>> {
        self.with(|inner| {
            let Some(tokens) = inner.scheduler.tokens(RequestId(id)) else { return Ok(None) };
            let written = PyByteArray::new_with(python, 4 * tokens.len(), |bytes| {
                for (place, token) in bytes.chunks_exact_mut(4).zip(tokens.iter()) {
                    place.copy_from_slice(&token.to_le_bytes());
                }
                Ok(())
            });
            written.map(Some)
        })
    }

    fn state(&self, id: u64) -> PyResult<Option<String>> {
        self.with(|inner| {
            inner.scheduler.state(RequestId(id)).map(|state| json(&state)).transpose()
        })
    }

    /// Returns the hits of a request on device, host and L3, in tokens.
    fn hits(&self, id: u64) -> PyResult<Option<(u32, u32, u32)>> {
        self.with(|inner| {
            let hits = inner.scheduler.hits(RequestId(id));
            Ok(hits.map(|hits| (hits.device_tokens, hits.host_tokens, hits.l3_tokens)))
        })
    }

    /// Returns the pages of a prompt on device and host.
    fn cached(
        &self,
        prompt: PyReadonlyArray1<'_, Token>,
        adapter: &str,
        salt: &str,
    ) -> PyResult<(u32, u32)> {
        let prompt = prompt.as_slice().map_err(bad_argument)?;
        self.with(|inner| {
            let cached = inner.scheduler.cached(prompt, adapter, salt);
            Ok((cached.device_pages, cached.host_pages))
        })
    }

    /// Returns the name of an adapter, given its number in plans.
    fn adapter(&self, adapter: u32) -> PyResult<Option<String>> {
        self.with(|inner| Ok(inner.scheduler.adapter(AdapterId(adapter)).map(str::to_owned)))
    }

    /// Returns the digest of a namespace.
    fn namespace<'py>(
        &self,
        python: Python<'py>,
        adapter: &str,
        salt: &str,
    ) -> PyResult<Bound<'py, PyBytes>> {
        self.with(|inner| Ok(key(python, inner.scheduler.namespace_of(adapter, salt))))
    }

    fn replace_weights(&self, now: u64, fingerprint: &str) -> PyResult<()> {
        self.with(|inner| {
            let done = inner.scheduler.replace_weights(Time(now), fingerprint);
            done.map_err(IntoPython::into_python)
        })
    }

    /// Evicts unused pages, and returns their numbers on device and host.
    fn clear_cache(&self) -> PyResult<(usize, usize)> {
        self.with(|inner| {
            let freed = inner.scheduler.clear_cache();
            Ok((freed.device_pages, freed.host_pages))
        })
    }

    /// Returns the KV events since the last call, or a snapshot: whether it is a snapshot, the
    /// numbers of its first and next event, and the events.
    fn kv_events<'py>(
        &self,
        python: Python<'py>,
        snapshot: bool,
    ) -> PyResult<(bool, u64, u64, Bound<'py, PyList>)> {
        self.with(|inner| {
            match snapshot {
                true => inner.scheduler.kv_snapshot(&mut inner.events),
                false => inner.scheduler.drain_kv_events(&mut inner.events),
            }
            let events = &inner.events;
            let events_list = PyList::empty(python);
            for event in events.iter() {
                append_event(python, &event, &events_list)?;
            }
            Ok((events.is_snapshot, events.first(), events.next, events_list))
        })
    }
}

/// Appends an event: its kind, its tier, the digest of its namespace, the key before its pages,
/// their keys, their tokens, and the contents of some of them.
fn append_event(
    python: Python<'_>,
    event: &KvEvent<'_>,
    events_list: &Bound<'_, PyList>,
) -> PyResult<()> {
    match event {
        KvEvent::Stored { tier, namespace, parent, keys, tokens, contents } => {
            let tokens: Vec<u8> = tokens.iter().flat_map(|token| token.to_le_bytes()).collect();
            let content = |content: &terrace_scheduler::PageContent| {
                (content.page, PyBytes::new(python, &content.digest.0.to_le_bytes()))
            };
            let contents: Vec<_> = contents.iter().map(content).collect();
            events_list.append((
                "stored",
                tier_name(*tier),
                key(python, *namespace),
                key(python, *parent),
                all_keys(python, keys),
                PyBytes::new(python, &tokens),
                contents,
            ))
        }
        KvEvent::Removed { tier, namespace, keys } => events_list.append((
            "removed",
            tier_name(*tier),
            key(python, *namespace),
            all_keys(python, keys),
        )),
        KvEvent::Cleared => events_list.append(("cleared",)),
    }
}

fn tier_name(tier: KvTier) -> &'static str {
    match tier {
        KvTier::Device => "device",
        KvTier::Host => "host",
        KvTier::L3 => "l3",
    }
}

fn key(python: Python<'_>, key: PageKey) -> Bound<'_, PyBytes> {
    PyBytes::new(python, &key.0.to_le_bytes())
}

fn all_keys<'py>(python: Python<'py>, keys: &[PageKey]) -> Bound<'py, PyBytes> {
    let bytes: Vec<u8> = keys.iter().flat_map(|key| key.0.to_le_bytes()).collect();
    PyBytes::new(python, &bytes)
}

pub(crate) fn json(value: &impl serde::Serialize) -> PyResult<String> {
    serde_json::to_string(value).map_err(bad_argument)
}
