//! Order in which queued requests are tried for admission.

use std::cmp::Reverse;

use terrace_cache::Cache;
use terrace_fsm::{StateName, Time};

use crate::admission_order::AdmissionOrder;
use crate::config::QueueConfig;
use crate::ids::Handle;
use crate::requests::Requests;

/// A request to try.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Candidate {
    pub(crate) handle: Handle,
    /// No later request may overtake it.
    pub(crate) strict: bool,
}

/// Writes the queued requests to try into `into`: first those submitted before `overdue`, then the others in
/// the configured order, at most `config.window` in all.
pub(crate) fn collect_candidates(
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
    let arrivals = || requests.queue().arrivals();
    let is_overdue = |handle: &Handle| requests[*handle].submitted_at < overdue;
    let is_retracted = |handle: &Handle| requests[*handle].state() == StateName::Retracted;
    // A request that may preempt an overdue one must not be tried behind it: they would alternate without end.
    let preempts = config.preempts && config.order == AdmissionOrder::Priority;
    let mut urgent = requests.queue().priorities().filter(|_| preempts).peekable();
    for handle in arrivals().take_while(is_overdue).take(window) {
        let from = config.priority_by_age(requests[handle].priority, true);
        while let Some((_, urgent)) = urgent.next_if(|&(own, _)| own >= from) {
            add(&mut std::iter::once(urgent), true);
        }
        add(&mut std::iter::once(handle), true);
    }
    match config.order {
        AdmissionOrder::Arrival => add(&mut arrivals(), true),
        AdmissionOrder::Priority => {
            add(&mut requests.queue().priorities().map(|(_, handle)| handle), true);
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

fn cached_pages(requests: &Requests, cache: &Cache, handle: Handle) -> u32 {
    let entry = &requests[handle];
    let pages_max = if entry.takes_hits() { u32::MAX } else { 0 };
    cache.depths(&entry.sequence, pages_max).host
}
