//! When the next request arrives.

use crate::config::Arrival;
use crate::trace::Trace;

/// Hands out the requests of a trace, one after the other.
#[derive(Debug)]
pub(crate) struct Arrivals<'a> {
    trace: &'a Trace,
    arrival: Arrival,
    next: usize,
    /// When the next request arrives by the trace: asked for with every step.
    next_us: Option<u64>,
    /// In a closed loop, how many more may be alive.
    places: u32,
}

impl<'a> Arrivals<'a> {
    pub(crate) fn new(trace: &'a Trace, arrival: Arrival) -> Self {
        let places = match arrival {
            Arrival::Trace { .. } => 0,
            Arrival::ClosedLoop { concurrency } => concurrency,
        };
        let mut arrivals = Self { trace, arrival, next: 0, next_us: None, places };
        arrivals.next_us = arrivals.traced_us();
        arrivals
    }

    /// When the next request arrives, counted from the first; none if that depends on an answer.
    pub(crate) fn next_us(&self, now_us: u64) -> Option<u64> {
        match self.arrival {
            Arrival::Trace { .. } => self.next_us,
            Arrival::ClosedLoop { .. } => self.next_us.filter(|_| self.places > 0).map(|_| now_us),
        }
    }

    fn traced_us(&self) -> Option<u64> {
        let requests = self.trace.requests();
        let since_first = requests.get(self.next)?.arrival_us - requests[0].arrival_us;
        match self.arrival {
            Arrival::Trace { speed_up } => Some((since_first as f64 / speed_up).round() as u64),
            Arrival::ClosedLoop { .. } => Some(since_first),
        }
    }

    /// The request that arrives by this moment.
    pub(crate) fn pop(&mut self, now_us: u64) -> Option<u32> {
        if self.next_us(now_us)? > now_us {
            return None;
        }
        match self.arrival {
            Arrival::Trace { .. } => {}
            Arrival::ClosedLoop { .. } => self.places -= 1,
        }
        self.next += 1;
        self.next_us = self.traced_us();
        Some(self.next as u32 - 1)
    }

    /// So many requests have been answered, or never will be.
    pub(crate) fn answered(&mut self, requests: u32) {
        match self.arrival {
            Arrival::Trace { .. } => {}
            Arrival::ClosedLoop { .. } => self.places += requests,
        }
    }
}
