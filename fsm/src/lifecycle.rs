//! The machine: statig's, with our states, events and ways out.

use statig::Outcome;
use statig::blocking::{self, IntoStateMachine, IntoStateMachineExt, StateMachine};
use terrace_cache::planted::{Bug, planted};
use terrace_cache::{Cache, HostPin};

use crate::event::{Event, Handover};
use crate::ids::OpId;
use crate::state::{Computing, State, StateName};

/// The life of one request.
pub struct Lifecycle {
    machine: StateMachine<Machine>,
}

impl Lifecycle {
    /// A request that was just submitted.
    #[must_use]
    pub fn new() -> Self {
        Self { machine: Machine.state_machine() }
    }

    /// Lets something happen; tells the states before and after.
    ///
    /// # Panics
    /// If the event is illegal in this state: the scheduler is broken.
    pub fn handle(&mut self, event: &Event<'_>, cache: &mut Cache) -> (StateName, StateName) {
        let from = self.state().name();
        let expected = from.after(event.name());
        assert!(expected.is_some(), "{:?} is illegal in {from:?}", event.name());
        self.machine.handle_with_context(event, cache);
        let to = self.state().name();
        debug_assert_eq!(Some(to), expected, "{:?} in {from:?}", event.name());
        (from, to)
    }

    /// The state, with what it owns.
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

impl std::fmt::Debug for Lifecycle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.state().fmt(f)
    }
}

/// All that there is belongs to the states; the machine itself has nothing.
struct Machine;

impl IntoStateMachine for Machine {
    type Event<'event> = Event<'event>;
    type Context<'context> = Cache;
    type State = State;
    type Superstate<'state> = Superstate;

    fn initial() -> State {
        State::Submitted { probe: None }
    }
}

/// What all live states have in common.
enum Superstate {
    Live,
}

impl blocking::Superstate<Machine> for Superstate {
    fn call_handler(
        &mut self,
        _: &mut Machine,
        event: &Event<'_>,
        _: &mut Cache,
    ) -> Outcome<State> {
        match event {
            Event::Abort => Outcome::Transition(State::Aborted),
            Event::Fail(reason) => Outcome::Transition(State::Failed(*reason)),
            Event::ProbeStarted(_)
            | Event::ProbeEnded
            | Event::PrefetchStarted { .. }
            | Event::PrefetchEnded { .. }
            | Event::PinsYielded
            | Event::Admitted(_)
            | Event::Grow { .. }
            | Event::Computed { .. }
            | Event::LoadBackStarted { .. }
            | Event::LoadBackEnded { .. }
            | Event::PrefillEnded
            | Event::Retracted { .. }
            | Event::Kept(_)
            | Event::Completed
            | Event::WriteBackStarted(..)
            | Event::Drained => Outcome::Super,
        }
    }
}

impl blocking::State<Machine> for State {
    fn call_handler(
        &mut self,
        _: &mut Machine,
        event: &Event<'_>,
        cache: &mut Cache,
    ) -> Outcome<State> {
        match self {
            State::Submitted { probe } => in_queue(probe, event),
            State::Prefetching { path, .. } => in_prefetching(path, event, cache),
            State::PrefetchDone { path } => in_prefetch_done(path, event, cache),
            State::Prefilling(_) | State::Decoding(_) => self.while_computing(event, cache),
            State::Retracted { .. } => self.while_retracted(event, cache),
            State::Draining { .. } => self.while_draining(event),
            State::WritingBack { .. } => in_writing_back(event),
            State::Finished | State::Aborted | State::Failed(_) | State::Left => Outcome::Super,
        }
    }

    /// Gives back whatever the transition did not hand on.
    fn call_exit_action(&mut self, _: &mut Machine, cache: &mut Cache) {
        match std::mem::replace(self, State::Left) {
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
            | State::Failed(_)
            | State::Left => {}
        }
    }

    fn superstate(&mut self) -> Option<Superstate> {
        match self {
            State::Submitted { .. }
            | State::Prefetching { .. }
            | State::PrefetchDone { .. }
            | State::Prefilling(_)
            | State::Decoding(_)
            | State::Retracted { .. }
            | State::Draining { .. }
            | State::WritingBack { .. } => Some(Superstate::Live),
            State::Finished | State::Aborted | State::Failed(_) | State::Left => None,
        }
    }
}

/// What one who waits for its turn has in common with others who do: L3 is asked, and it is admitted.
fn in_queue(probe: &mut Option<OpId>, event: &Event<'_>) -> Outcome<State> {
    match event {
        Event::ProbeStarted(op) => {
            *probe = Some(*op);
            Outcome::Handled
        }
        Event::ProbeEnded => {
            *probe = None;
            Outcome::Handled
        }
        Event::PrefetchStarted { op, start_page, path } => {
            Outcome::Transition(State::Prefetching {
                op: *op,
                start_page: *start_page,
                path: Some(path.take()),
            })
        }
        Event::Admitted(computing) => Outcome::Transition(State::Prefilling(computing.take())),
        _ => Outcome::Super,
    }
}

fn in_prefetching(
    path: &mut Option<HostPin>,
    event: &Event<'_>,
    cache: &mut Cache,
) -> Outcome<State> {
    match event {
        Event::PrefetchEnded { path: longer } => {
            let path = match longer {
                Some(longer) => Some(longer.take()),
                None => path.take(),
            };
            Outcome::Transition(State::PrefetchDone { path })
        }
        Event::PinsYielded => yield_pin(path, cache),
        _ => Outcome::Super,
    }
}

fn in_prefetch_done(
    path: &mut Option<HostPin>,
    event: &Event<'_>,
    cache: &mut Cache,
) -> Outcome<State> {
    match event {
        // The next piece of what L3 has: its own pin covers what the first one brought.
        Event::PrefetchStarted { op, start_page, path } => {
            Outcome::Transition(State::Prefetching {
                op: *op,
                start_page: *start_page,
                path: Some(path.take()),
            })
        }
        Event::Admitted(computing) => Outcome::Transition(State::Prefilling(computing.take())),
        Event::PinsYielded => yield_pin(path, cache),
        _ => Outcome::Super,
    }
}

fn in_writing_back(event: &Event<'_>) -> Outcome<State> {
    match event {
        Event::Drained => Outcome::Transition(State::Finished),
        _ => Outcome::Super,
    }
}

fn yield_pin(pin: &mut Option<HostPin>, cache: &mut Cache) -> Outcome<State> {
    if let Some(pin) = pin.take() {
        cache.unpin_host(pin);
    }
    Outcome::Handled
}

impl State {
    fn while_computing(&mut self, event: &Event<'_>, cache: &mut Cache) -> Outcome<State> {
        let (State::Prefilling(computing) | State::Decoding(computing)) = self else {
            return Outcome::Super;
        };
        match event {
            Event::Grow { pages, grown } => {
                grown.set(cache.grow_device_pages(&mut computing.tail, *pages));
                Outcome::Handled
            }
            Event::Computed { run, priority, published } => {
                let Computing { path, tail, .. } = computing;
                published.set(Some(cache.publish_device(path, *run, tail, *priority)));
                Outcome::Handled
            }
            Event::PrefetchStarted { op, start_page: _, path } => {
                computing.transfer = Some(*op);
                computing.keep_unloaded(Some(path.take()), cache);
                Outcome::Handled
            }
            Event::PrefetchEnded { path } => {
                computing.transfer = None;
                computing.keep_unloaded(path.as_ref().map(Handover::take), cache);
                Outcome::Handled
            }
            Event::PinsYielded => {
                computing.keep_unloaded(None, cache);
                Outcome::Handled
            }
            Event::LoadBackStarted { op, pages, destination } => {
                computing.transfer = Some(*op);
                let kept = computing.tail.len() - pages;
                destination.put(computing.tail.split_off(kept));
                Outcome::Handled
            }
            Event::LoadBackEnded { path } => {
                computing.transfer = None;
                if let Some(path) = path {
                    let shorter = std::mem::replace(&mut computing.path, path.take());
                    cache.unpin_device(shorter);
                }
                Outcome::Handled
            }
            Event::PrefillEnded => {
                Outcome::Transition(State::Decoding(self.leave_computing(cache)))
            }
            Event::Completed => {
                let Computing { path, tail, .. } = self.leave_computing(cache);
                if !planted(Bug::LosePagesOnCompletion) {
                    cache.give_device_pages(tail);
                }
                Outcome::Transition(State::Draining { path })
            }
            Event::Retracted { kept, write_back } => {
                let Computing { path, tail, .. } = self.leave_computing(cache);
                cache.give_device_pages(tail);
                match write_back {
                    Some((_, pin)) => pin.put(path),
                    None => cache.unpin_device(path),
                }
                let write_back = write_back.map(|(op, _)| op);
                let kept = Some(kept.take());
                Outcome::Transition(State::Retracted { kept, write_back, probe: None })
            }
            _ => Outcome::Super,
        }
    }

    fn while_retracted(&mut self, event: &Event<'_>, cache: &mut Cache) -> Outcome<State> {
        let State::Retracted { kept, write_back, probe } = self else { return Outcome::Super };
        match event {
            Event::Kept(pin) => {
                *write_back = None;
                if let Some(shorter) = kept.replace(pin.take()) {
                    cache.unpin_host(shorter);
                }
                Outcome::Handled
            }
            Event::PinsYielded => yield_pin(kept, cache),
            _ => in_queue(probe, event),
        }
    }

    fn while_draining(&mut self, event: &Event<'_>) -> Outcome<State> {
        match event {
            Event::WriteBackStarted(op, pin) => {
                if let State::Draining { path } = std::mem::replace(self, State::Left) {
                    pin.put(path);
                }
                Outcome::Transition(State::WritingBack { op: *op })
            }
            Event::Drained => Outcome::Transition(State::Finished),
            _ => Outcome::Super,
        }
    }

    /// Hands on what the request owns while it computes. Nothing more is loaded for it.
    fn leave_computing(&mut self, cache: &mut Cache) -> Computing {
        match std::mem::replace(self, State::Left) {
            State::Prefilling(mut computing) | State::Decoding(mut computing) => {
                computing.keep_unloaded(None, cache);
                computing
            }
            other => unreachable!("{other:?} does not compute"),
        }
    }
}
