//! The state machine of a request, on statig.

use std::fmt;

use statig::Outcome;
use statig::blocking::{self, IntoStateMachine, IntoStateMachineExt, StateMachine};
use terrace_cache::Cache;
use terrace_cache::planted::{Bug, planted};

use crate::event::{Event, EventName, Output};
use crate::ids::OpId;
use crate::state::{Computing, State, StateName};

/// Lifecycle of one request.
pub struct Lifecycle {
    machine: StateMachine<Machine>,
}

/// Effect of an event.
#[derive(Debug)]
pub struct Change {
    /// State before the event.
    pub from: StateName,
    /// State after the event.
    pub to: StateName,
    /// Resources that the request hands out.
    pub output: Output,
}

impl Lifecycle {
    /// Makes the lifecycle of a request that was just submitted.
    #[must_use]
    pub fn new() -> Self {
        Self { machine: Machine.state_machine() }
    }

    /// Applies an event.
    ///
    /// # Panics
    /// If the event is illegal in this state, which is an error in the scheduler.
    #[inline]
    pub fn handle(&mut self, event: Event<'_>, cache: &mut Cache) -> Change {
        let (from, name) = (self.state().name(), event.name());
        let Some(to) = from.after(name) else { panic!("{name:?} is illegal in {from:?}") };
        let mut context = Context { cache, event: Some(event), output: Output::Nothing };
        self.machine.handle_with_context(&name, &mut context);
        debug_assert_eq!(self.state().name(), to, "{name:?} in {from:?}");
        Change { from, to, output: context.output }
    }

    /// Current state with the resources that it owns.
    #[must_use]
    pub fn state(&self) -> &State {
        self.machine.state()
    }
}

impl Default for Lifecycle {
    fn default() -> Self {
        Self::new()
    }
}

impl fmt::Debug for Lifecycle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.state().fmt(f)
    }
}

/// The machine itself has no data: the states own everything.
struct Machine;

/// Context of one transition: the cache, the event with its resources, and the result.
struct Context<'a> {
    cache: &'a mut Cache,
    event: Option<Event<'a>>,
    output: Output,
}

impl IntoStateMachine for Machine {
    type Event<'event> = EventName;
    type Context<'context> = Context<'context>;
    type State = State;
    type Superstate<'state> = ();

    fn initial() -> State {
        State::Submitted { probe: None }
    }
}

impl blocking::State<Machine> for State {
    fn call_handler(
        &mut self,
        _: &mut Machine,
        _: &EventName,
        context: &mut Context<'_>,
    ) -> Outcome<State> {
        let event = context.event.take().expect("a state handles an event once");
        self.apply(event, context)
    }

    /// Releases the resources that the transition has not moved on.
    fn call_exit_action(&mut self, _: &mut Machine, context: &mut Context<'_>) {
        let cache = &mut *context.cache;
        match self.take() {
            State::Prefetching { path: pin, .. }
            | State::PrefetchDone { path: pin }
            | State::Retracted { kept: pin, .. } => {
                if let Some(pin) = pin
                    && !planted(Bug::LeakPinOnAbort)
                {
                    cache.unpin_host(pin);
                }
            }
            State::Prefilling(computing) | State::Decoding(computing) => computing.release(cache),
            State::Draining { path } => cache.unpin_device(path),
            State::Submitted { .. }
            | State::WritingBack { .. }
            | State::Finished
            | State::Aborted
            | State::Failed(_) => {}
        }
    }
}

impl State {
    /// Moves the resources of a legal event.
    #[inline]
    fn apply(&mut self, event: Event<'_>, context: &mut Context<'_>) -> Outcome<State> {
        let Context { cache, output, .. } = context;
        match event {
            Event::ProbeStarted(op) => *self.probe_mut() = Some(op),
            Event::ProbeEnded => *self.probe_mut() = None,
            Event::PrefetchStarted { op, start_page, path } => {
                let State::Prefilling(computing) = self else {
                    return Outcome::Transition(State::Prefetching {
                        op,
                        start_page,
                        path: Some(path),
                    });
                };
                computing.transfer = Some(op);
                computing.keep_unloaded(Some(path), cache);
            }
            Event::PrefetchEnded { path } => {
                if let State::Prefetching { path: previous, .. } = self {
                    let path = path.or_else(|| previous.take());
                    return Outcome::Transition(State::PrefetchDone { path });
                }
                let computing = self.computing_mut();
                computing.transfer = None;
                computing.keep_unloaded(path, cache);
            }
            Event::PinsYielded => match self {
                State::Prefetching { path: pin, .. }
                | State::PrefetchDone { path: pin }
                | State::Retracted { kept: pin, .. } => {
                    if let Some(pin) = pin.take() {
                        cache.unpin_host(pin);
                    }
                }
                State::Prefilling(computing) | State::Decoding(computing) => {
                    computing.keep_unloaded(None, cache);
                }
                State::Submitted { .. }
                | State::Draining { .. }
                | State::WritingBack { .. }
                | State::Finished
                | State::Aborted
                | State::Failed(_) => unreachable!("{self:?} has no host pin"),
            },
            Event::Admitted(computing) => {
                return Outcome::Transition(State::Prefilling(computing));
            }
            Event::Grow { pages } => {
                let tail = &mut self.computing_mut().tail;
                *output = Output::Grown(cache.grow_device_pages(tail, pages));
            }
            Event::Computed { run, priority } => {
                let Computing { path, tail, .. } = self.computing_mut();
                *output = Output::Published(cache.publish_device(path, run, tail, priority));
            }
            Event::LoadBackStarted { op, pages } => {
                let computing = self.computing_mut();
                computing.transfer = Some(op);
                let kept = computing.tail.len() - pages;
                *output = Output::Pages(computing.tail.split_off(kept));
            }
            Event::LoadBackEnded { path } => {
                let computing = self.computing_mut();
                computing.transfer = None;
                if let Some(path) = path {
                    let shorter = std::mem::replace(&mut computing.path, path);
                    cache.unpin_device(shorter);
                }
            }
            Event::PrefillEnded => {
                let computing = self.take_computing(cache);
                return Outcome::Transition(State::Decoding(computing));
            }
            Event::Retracted { kept, write_back } => {
                let Computing { path, tail, .. } = self.take_computing(cache);
                cache.give_device_pages(tail);
                match write_back {
                    Some(_) => *output = Output::Path(path),
                    None => cache.unpin_device(path),
                }
                let kept = Some(kept);
                return Outcome::Transition(State::Retracted { kept, write_back, probe: None });
            }
            Event::Kept(pin) => {
                let State::Retracted { kept, write_back, .. } = self else {
                    unreachable!("{self:?} keeps nothing on host")
                };
                *write_back = None;
                if let Some(shorter) = kept.replace(pin) {
                    cache.unpin_host(shorter);
                }
            }
            Event::Completed => {
                let Computing { path, tail, .. } = self.take_computing(cache);
                if !planted(Bug::LosePagesOnCompletion) {
                    cache.give_device_pages(tail);
                }
                return Outcome::Transition(State::Draining { path });
            }
            Event::WriteBackStarted(op) => {
                if let State::Draining { path } = self.take() {
                    *output = Output::Path(path);
                }
                return Outcome::Transition(State::WritingBack { op });
            }
            Event::Drained => return Outcome::Transition(State::Finished),
            Event::Abort => return Outcome::Transition(State::Aborted),
            Event::Fail(reason) => return Outcome::Transition(State::Failed(reason)),
        }
        Outcome::Handled
    }

    /// Takes the state with its resources. [`State::Finished`], which owns nothing, stands in for it until the
    /// transition is complete.
    fn take(&mut self) -> State {
        std::mem::replace(self, State::Finished)
    }

    /// Takes the resources of a computing request without its host pin.
    fn take_computing(&mut self, cache: &mut Cache) -> Computing {
        self.computing_mut().keep_unloaded(None, cache);
        match self.take() {
            State::Prefilling(computing) | State::Decoding(computing) => computing,
            State::Submitted { .. }
            | State::Prefetching { .. }
            | State::PrefetchDone { .. }
            | State::Retracted { .. }
            | State::Draining { .. }
            | State::WritingBack { .. }
            | State::Finished
            | State::Aborted
            | State::Failed(_) => unreachable!("the state was checked"),
        }
    }

    fn computing_mut(&mut self) -> &mut Computing {
        if let State::Prefilling(computing) | State::Decoding(computing) = self {
            return computing;
        }
        unreachable!("{self:?} does not compute")
    }

    fn probe_mut(&mut self) -> &mut Option<OpId> {
        if let State::Submitted { probe } | State::Retracted { probe, .. } = self {
            return probe;
        }
        unreachable!("{self:?} has no probe")
    }
}
