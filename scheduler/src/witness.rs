//! Witnesses: who sees every call of a scheduler and its answer.
//!
//! A scheduler is a pure function of its calls, so what a witness has seen can be done again elsewhere,
//! step by step. An engine that lets itself be watched drives a [`WatchedScheduler`].

use std::ops::Deref;

use terrace_cache::{Freed, KvEvents, PrefixDigest};
use terrace_fsm::{OpId, RequestId, Time, Transition};

use crate::config::Config;
use crate::error::{ConfigError, EventError, StepsInFlight, SubmitError, UnknownRequest};
use crate::event::Event;
use crate::plan::Plan;
use crate::request::Request;
use crate::scheduler::Scheduler;

/// A call of a scheduler.
#[derive(Clone, Copy, Debug)]
pub enum Seen<'a> {
    /// A scheduler was made so: the first that is seen.
    Began(&'a Config),
    /// A request was taken. Those that were refused changed nothing.
    Submitted(&'a Request),
    /// A request was called off.
    Aborted(RequestId),
    /// A request is as urgent as this from now on.
    PrioritySet(RequestId, i32),
    /// Something happened outside.
    Advanced(Event<'a>),
    /// This was planned.
    Planned(&'a Plan),
    /// The model computes with weights of this fingerprint from now on.
    WeightsReplaced(&'a str),
    /// What nobody holds was forgotten.
    CacheCleared,
    /// Unused pages on the device were forgotten.
    DeviceCleared,
}

/// Somebody who sees all calls of a scheduler, in their order. It is called between steps, so it must
/// not wait for anything.
pub trait Witness: Send {
    /// This has just happened.
    fn saw(&mut self, now: Time, seen: Seen<'_>);
}

/// A scheduler whose calls are told to witnesses; without any it costs what the scheduler does.
#[allow(missing_debug_implementations)]
pub struct WatchedScheduler {
    scheduler: Scheduler,
    witnesses: Vec<Box<dyn Witness>>,
}

impl WatchedScheduler {
    /// An idle scheduler, as [`Scheduler::new`] makes it.
    ///
    /// # Errors
    /// What about the configuration cannot work, and what to change.
    pub fn new(config: Config, witnesses: Vec<Box<dyn Witness>>) -> Result<Self, ConfigError> {
        let mut this = Self { scheduler: Scheduler::new(config)?, witnesses };
        for witness in &mut this.witnesses {
            witness.saw(Time::default(), Seen::Began(this.scheduler.config()));
        }
        Ok(this)
    }

    /// See [`Scheduler::submit`].
    ///
    /// # Errors
    /// Why the request cannot be taken.
    pub fn submit(&mut self, now: Time, request: Request) -> Result<(), SubmitError> {
        let watched = (!self.witnesses.is_empty()).then(|| request.clone());
        self.scheduler.submit(now, request)?;
        if let Some(request) = watched {
            self.tell(now, Seen::Submitted(&request));
        }
        Ok(())
    }

    /// See [`Scheduler::l3_digests`]. No witness sees it: it changes nothing.
    pub fn l3_digests(&mut self, op: OpId, into: &mut Vec<PrefixDigest>) {
        self.scheduler.l3_digests(op, into);
    }

    /// See [`Scheduler::abort`].
    ///
    /// # Errors
    /// If there is no such request, or it has ended.
    pub fn abort(&mut self, now: Time, id: RequestId) -> Result<(), UnknownRequest> {
        self.scheduler.abort(now, id)?;
        self.tell(now, Seen::Aborted(id));
        Ok(())
    }

    /// See [`Scheduler::set_priority`].
    ///
    /// # Errors
    /// If there is no such request, or it has ended.
    pub fn set_priority(
        &mut self,
        now: Time,
        id: RequestId,
        priority: i32,
    ) -> Result<(), UnknownRequest> {
        self.scheduler.set_priority(id, priority)?;
        self.tell(now, Seen::PrioritySet(id, priority));
        Ok(())
    }

    /// See [`Scheduler::advance`].
    ///
    /// # Errors
    /// What about the event cannot be.
    pub fn advance(&mut self, now: Time, event: Event<'_>) -> Result<(), EventError> {
        self.scheduler.advance(now, event)?;
        self.tell(now, Seen::Advanced(event));
        Ok(())
    }

    /// See [`Scheduler::plan_into`].
    pub fn plan_into(&mut self, now: Time, plan: &mut Plan) {
        self.scheduler.plan_into(now, plan);
        self.tell(now, Seen::Planned(plan));
    }

    /// See [`Scheduler::replace_weights`].
    ///
    /// # Errors
    /// When a step is in flight.
    pub fn replace_weights(&mut self, now: Time, fingerprint: &str) -> Result<(), StepsInFlight> {
        self.scheduler.replace_weights(now, fingerprint)?;
        self.tell(now, Seen::WeightsReplaced(fingerprint));
        Ok(())
    }

    /// See [`Scheduler::clear_cache`].
    pub fn clear_cache(&mut self, now: Time) -> Freed {
        let freed = self.scheduler.clear_cache();
        self.tell(now, Seen::CacheCleared);
        freed
    }

    /// See [`Scheduler::clear_device`].
    pub fn clear_device(&mut self, now: Time) -> Freed {
        let freed = self.scheduler.clear_device();
        self.tell(now, Seen::DeviceCleared);
        freed
    }

    /// See [`Scheduler::drain_trace`].
    pub fn drain_trace(&mut self) -> impl Iterator<Item = Transition> + '_ {
        self.scheduler.drain_trace()
    }

    /// See [`Scheduler::drain_kv_events`]. Nothing that is decided depends on it, so witnesses need not see it.
    pub fn drain_kv_events(&mut self, into: &mut KvEvents) {
        self.scheduler.drain_kv_events(into);
    }

    /// See [`Scheduler::stop_kv_events`].
    pub fn stop_kv_events(&mut self) {
        self.scheduler.stop_kv_events();
    }

    fn tell(&mut self, now: Time, seen: Seen<'_>) {
        for witness in &mut self.witnesses {
            witness.saw(now, seen);
        }
    }
}

impl Deref for WatchedScheduler {
    type Target = Scheduler;

    fn deref(&self) -> &Scheduler {
        &self.scheduler
    }
}
