//! When the next request arrives.

use crate::config::Arrival;
use crate::trace::Trace;

/// Hands out the requests of a trace, one after the other.
#[derive(Debug)]
pub(crate) struct Arrivals<'a> {
    trace: &'a Trace,
    arrival: Arrival,
    next: usize,
    /// In a closed loop, how many more may be alive.
    places: u32,
}

impl<'a> Arrivals<'a> {
    pub(crate) fn new(trace: &'a Trace, arrival: Arrival) -> Self {
        let places = match arrival {
            Arrival::Trace { .. } => 0,
            Arrival::ClosedLoop { concurrency } => concurrency,
        };
        Self { trace, arrival, next: 0, places }
    }

    /// When the next request arrives, counted from the first; none if that depends on an answer.
    pub(crate) fn next_us(&self, now_us: u64) -> Option<u64> {
        let requests = self.trace.requests();
        let request = requests.get(self.next)?;
        match self.arrival {
            Arrival::Trace { speed_up } => {
                let since_first = request.arrival_us - requests[0].arrival_us;
                Some((since_first as f64 / speed_up).round() as u64)
            }
            Arrival::ClosedLoop { .. } => (self.places > 0).then_some(now_us),
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
