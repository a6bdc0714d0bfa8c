//! Observers of a scheduler, which see every call and its result.
//!
//! A scheduler is a pure function of its calls, so an observer can record and repeat them step by step. An engine
//! that is observed drives a [`WatchedScheduler`].

use std::ops::Deref;

use terrace_cache::{Freed, KvEvents, PrefixDigest};
use terrace_fsm::{OpId, RequestId, Time, Transition};

use crate::config::Config;
use crate::error::{ConfigError, EventError, StepsInFlight, SubmitError, UnknownRequest};
use crate::event::Event;
use crate::plan::Plan;
use crate::request::Request;
use crate::scheduler::Scheduler;

/// Call of a scheduler.
#[derive(Clone, Copy, Debug)]
pub enum Seen<'a> {
    /// A scheduler was made with this configuration. This is the first call.
    Began(&'a Config),
    /// A request was accepted. Rejected requests change nothing.
    Submitted(&'a Request),
    /// A request was aborted.
    Aborted(RequestId),
    /// The priority of a request was changed.
    PrioritySet(RequestId, i32),
    /// An event was applied.
    Advanced(Event<'a>),
    /// A plan was made.
    Planned(&'a Plan),
    /// The weights were replaced by those with this fingerprint.
    WeightsReplaced(&'a str),
    /// The cache was cleared.
    CacheCleared,
    /// Unused pages on the device were forgotten.
    DeviceCleared,
}

/// Observer of all calls of a scheduler, in their order. It is called between steps, so it must not block.
pub trait Witness: Send {
    /// Called after each call of the scheduler.
    fn saw(&mut self, now: Time, seen: Seen<'_>);
}

/// Scheduler that reports its calls to observers. Without observers it costs no more than a [`Scheduler`].
#[allow(missing_debug_implementations)]
pub struct WatchedScheduler {
    scheduler: Scheduler,
    witnesses: Vec<Box<dyn Witness>>,
}

impl WatchedScheduler {
    /// Makes an idle scheduler like [`Scheduler::new`].
    ///
    /// # Errors
    /// If the configuration cannot work. The error says what to change.
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
    /// If the request cannot be accepted.
    pub fn submit(&mut self, now: Time, request: Request) -> Result<(), SubmitError> {
        let watched = (!self.witnesses.is_empty()).then(|| request.clone());
        self.scheduler.submit(now, request)?;
        if let Some(request) = watched {
            self.tell(now, Seen::Submitted(&request));
        }
        Ok(())
    }

    /// See [`Scheduler::l3_digests`]. Observers do not see it, because it changes nothing.
    pub fn l3_digests(&mut self, op: OpId, into: &mut Vec<PrefixDigest>) {
        self.scheduler.l3_digests(op, into);
    }

    /// See [`Scheduler::abort`].
    ///
    /// # Errors
    /// If there is no live request with this id.
    pub fn abort(&mut self, now: Time, id: RequestId) -> Result<(), UnknownRequest> {
        self.scheduler.abort(now, id)?;
        self.tell(now, Seen::Aborted(id));
        Ok(())
    }

    /// See [`Scheduler::set_priority`].
    ///
    /// # Errors
    /// If there is no live request with this id.
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
    /// If the event contradicts the plans.
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
    /// If a step is in flight.
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

    /// See [`Scheduler::drain_kv_events`]. Observers do not see it, because no decision depends on it.
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
