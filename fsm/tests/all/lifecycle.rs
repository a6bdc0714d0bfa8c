//! The machine follows the table, and no transition loses a page or a pin.

use terrace_cache::{Cache, CacheConfig, Claims, Cursor, PageKey, Sequence};
use terrace_fsm::{
    Change, Computing, Event, EventName, FailReason, Lifecycle, OpId, Output, Slot, StateName,
};

const NAMESPACE: PageKey = PageKey(1);

/// A request with a cache around it.
struct World {
    cache: Cache,
    life: Lifecycle,
    sequence: Sequence,
}

impl World {
    fn new() -> Self {
        let config =
            CacheConfig { page_size: 2, device_pages: 8, host_pages: 8, ..CacheConfig::default() };
        Self {
            cache: Cache::new(&config),
            life: Lifecycle::new(),
            sequence: Sequence::new(NAMESPACE, 2, (0..9).collect()),
        }
    }

    fn computing(&mut self) -> Computing {
        Computing {
            slot: Slot(0),
            path: self.cache.pin_device(NAMESPACE, Cursor::START),
            tail: self.cache.take_device_pages(3).expect("the pool has eight"),
            transfer: None,
            unloaded: None,
        }
    }

    /// Applies an event of this name and returns the states before and after.
    fn apply(&mut self, name: EventName) -> (StateName, StateName) {
        let sequence = self.sequence.clone();
        let event = match name {
            EventName::ProbeStarted => Event::ProbeStarted(OpId(1)),
            EventName::ProbeEnded => Event::ProbeEnded,
            EventName::PrefetchStarted => {
                let path = self.cache.pin_host(NAMESPACE, Cursor::START);
                Event::PrefetchStarted { op: OpId(2), start_page: 0, path }
            }
            EventName::PrefetchEnded => {
                let path = self.cache.pin_host(NAMESPACE, Cursor::START);
                Event::PrefetchEnded { path: Some(path) }
            }
            EventName::PinsYielded => Event::PinsYielded,
            EventName::Admitted => Event::Admitted(self.computing()),
            EventName::Grow => Event::Grow { pages: 1 },
            EventName::Computed => {
                let start = self.life.state().computing().map_or(0, |c| c.path.depth());
                let run = sequence.run(start, start + 1);
                Event::Computed { run, priority: 0 }
            }
            EventName::LoadBackStarted => Event::LoadBackStarted { op: OpId(4), pages: 1 },
            EventName::LoadBackEnded => Event::LoadBackEnded { path: None },
            EventName::PrefillEnded => Event::PrefillEnded,
            EventName::Retracted => {
                let kept = self.cache.pin_host(NAMESPACE, Cursor::START);
                Event::Retracted { kept, write_back: None }
            }
            EventName::Kept => Event::Kept(self.cache.pin_host(NAMESPACE, Cursor::START)),
            EventName::Completed => Event::Completed,
            EventName::WriteBackStarted => Event::WriteBackStarted(OpId(3)),
            EventName::Drained => Event::Drained,
            EventName::Abort => Event::Abort,
            EventName::Fail => Event::Fail(FailReason::TimedOut),
        };
        let Change { from, to, output } = self.life.handle(event, &mut self.cache);
        match output {
            Output::Path(path) => self.cache.unpin_device(path),
            Output::Pages(pages) => self.cache.give_device_pages(pages),
            Output::Nothing | Output::Grown(_) | Output::Published(_) => {}
        }
        (from, to)
    }

    fn audit(&self) {
        let mut claims = Claims::default();
        self.life.state().claim(&mut claims);
        self.cache.audit(&claims).expect("nothing is lost");
    }
}

/// Events that lead from Submitted to each live state.
fn way_to(state: StateName) -> &'static [EventName] {
    use EventName::*;
    match state {
        StateName::Submitted => &[ProbeStarted],
        StateName::Prefetching => &[PrefetchStarted],
        StateName::PrefetchDone => &[PrefetchStarted, PrefetchEnded],
        StateName::Prefilling => &[Admitted],
        StateName::Decoding => &[Admitted, Grow, Computed, PrefillEnded],
        StateName::Retracted => &[Admitted, Computed, Retracted],
        StateName::Draining => &[Admitted, Computed, PrefillEnded, Completed],
        StateName::WritingBack => &[Admitted, Computed, Completed, WriteBackStarted],
        StateName::Finished => &[Admitted, Completed, Drained],
        StateName::Aborted => &[Abort],
        StateName::Failed => &[Fail],
    }
}

fn world_in(state: StateName) -> World {
    let mut world = World::new();
    for &event in way_to(state) {
        world.apply(event);
        world.audit();
    }
    assert_eq!(world.life.state().name(), state);
    world
}

#[test]
fn the_machine_follows_the_table() {
    for state in StateName::ALL {
        for event in EventName::ALL {
            let Some(expected) = state.after(event) else { continue };
            let mut world = world_in(state);
            assert_eq!(world.apply(event), (state, expected), "{event:?} in {state:?}");
            world.audit();
        }
    }
}

#[test]
fn illegal_events_panic() {
    for state in StateName::ALL {
        for event in EventName::ALL {
            if state.after(event).is_none() {
                let apply = std::panic::AssertUnwindSafe(|| world_in(state).apply(event));
                assert!(std::panic::catch_unwind(apply).is_err(), "{event:?} in {state:?}");
            }
        }
    }
}

#[test]
fn abort_in_every_live_state_releases_all_resources() {
    for state in StateName::ALL.into_iter().filter(|state| !state.is_end()) {
        let mut world = world_in(state);
        world.apply(EventName::Abort);
        world.audit();
        world.cache.clear();
        let usage = world.cache.usage();
        assert_eq!(usage.device.free_pages, usage.device.total_pages, "{state:?}");
        assert_eq!(usage.host.free_pages, usage.host.total_pages, "{state:?}");
    }
}

#[test]
fn only_end_states_are_final() {
    for state in StateName::ALL {
        let leads_on = EventName::ALL.into_iter().any(|event| state.after(event).is_some());
        assert_eq!(leads_on, !state.is_end(), "{state:?}");
    }
}
