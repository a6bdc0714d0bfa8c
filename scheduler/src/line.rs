//! Those that could be admitted, and the order in which they are tried.

use std::cmp::Reverse;
use std::collections::BTreeSet;

use terrace_cache::Cache;
use terrace_fsm::{StateName, Time};

use crate::admission_order::AdmissionOrder;
use crate::config::QueueConfig;
use crate::requests::{Handle, Requests};

/// A request to be tried.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Candidate {
    pub(crate) handle: Handle,
    /// Whether nobody may overtake it.
    pub(crate) strict: bool,
}

#[derive(Debug, Default)]
pub(crate) struct Line {
    by_priority: BTreeSet<(Reverse<i32>, Handle)>,
    by_arrival: BTreeSet<Handle>,
}

impl Line {
    pub(crate) fn insert(&mut self, handle: Handle, priority: i32) {
        self.by_priority.insert((Reverse(priority), handle));
        self.by_arrival.insert(handle);
    }

    pub(crate) fn remove(&mut self, handle: Handle, priority: i32) {
        self.by_priority.remove(&(Reverse(priority), handle));
        self.by_arrival.remove(&handle);
    }

    /// Those who wait, by arrival.
    pub(crate) fn arrivals(&self) -> impl Iterator<Item = Handle> {
        self.by_arrival.iter().copied()
    }

    /// Who is the first in line.
    pub(crate) fn first(&self, order: AdmissionOrder) -> Option<Handle> {
        match order {
            AdmissionOrder::Priority => self.by_priority.first().map(|&(_, handle)| handle),
            AdmissionOrder::Arrival | AdmissionOrder::LongestPrefix => {
                self.by_arrival.first().copied()
            }
        }
    }

    pub(crate) fn most_urgent(&self) -> Option<Handle> {
        self.first(AdmissionOrder::Priority)
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.by_arrival.is_empty()
    }

    pub(crate) fn len(&self) -> usize {
        self.by_arrival.len()
    }

    /// Whom to try, and in which order: those who were submitted before `overdue`, then the others by the configured
    /// order; at most `window` of them.
    pub(crate) fn candidates(
        &self,
        config: &QueueConfig,
        overdue: Time,
        requests: &Requests,
        cache: &Cache,
        into: &mut Vec<Candidate>,
    ) {
        let window = config.window as usize;
        into.clear();
        let mut add = |handles: &mut dyn Iterator<Item = Handle>, strict| {
            for handle in handles {
                if into.len() == window {
                    break;
                }
                if into.iter().all(|candidate| candidate.handle != handle) {
                    into.push(Candidate { handle, strict });
                }
            }
        };
        let arrivals = || self.by_arrival.iter().copied();
        let is_overdue = |handle: &Handle| requests[*handle].submitted_at < overdue;
        let is_retracted = |handle: &Handle| requests[*handle].state() == StateName::Retracted;
        // One that may preempt an overdue request must not be tried behind it, or they would take turns for ever.
        let preempts = config.preempts && config.order == AdmissionOrder::Priority;
        let mut urgent = self.by_priority.iter().filter(|_| preempts).peekable();
        for handle in arrivals().take_while(is_overdue).take(window) {
            let from = config.priority_by_age(requests[handle].priority, true);
            while let Some((_, urgent)) = urgent.next_if(|(Reverse(own), _)| *own >= from) {
                add(&mut std::iter::once(*urgent), true);
            }
            add(&mut std::iter::once(handle), true);
        }
        match config.order {
            AdmissionOrder::Arrival => add(&mut arrivals(), true),
            AdmissionOrder::Priority => {
                add(&mut self.by_priority.iter().map(|&(_, handle)| handle), true);
            }
            AdmissionOrder::LongestPrefix => {
                add(&mut arrivals().take(window).filter(is_retracted), true);
                let mut scored: Vec<_> = arrivals()
                    .take(window)
                    .map(|handle| (Reverse(cached_pages(requests, cache, handle)), handle))
                    .collect();
                scored.sort_unstable();
                add(&mut scored.into_iter().map(|(_, handle)| handle), false);
            }
        }
    }
}

fn cached_pages(requests: &Requests, cache: &Cache, handle: Handle) -> u32 {
    let entry = &requests[handle];
    let pages_max = if entry.takes_hits() { u32::MAX } else { 0 };
    cache.depths(&entry.sequence, pages_max).host
}
