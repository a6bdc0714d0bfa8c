//! Arrival times of requests.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use crate::config::{Arrival, Sessions};
use crate::trace::{Trace, TraceRequest};

/// Iterator over the requests of a trace by arrival.
#[derive(Debug)]
pub(crate) struct Arrivals<'a> {
    trace: &'a Trace,
    arrival: Arrival,
    /// True if turns wait for the answers before them.
    waits_for_answers: bool,
    next: usize,
    /// Time of the next request of the trace; cached, because it is read at every step.
    next_us: Option<u64>,
    /// Free places of a closed loop.
    places: u32,
    /// Requests that wait for an answer, as pairs of the answering request and theirs, sorted.
    followers: Vec<(u32, u32)>,
    /// Requests whose preceding answer is complete, by arrival time.
    thinking: BinaryHeap<Reverse<(u64, u32)>>,
}

impl<'a> Arrivals<'a> {
    pub(crate) fn new(trace: &'a Trace, arrival: Arrival, sessions: Sessions) -> Self {
        let (places, waits_for_answers) = match (arrival, sessions) {
            (Arrival::Trace { .. }, Sessions::Wait) => (0, true),
            (Arrival::Trace { .. }, Sessions::ByTheClock) => (0, false),
            (Arrival::ClosedLoop { concurrency }, Sessions::Wait | Sessions::ByTheClock) => {
                (concurrency, false)
            }
        };
        let mut followers = Vec::new();
        if waits_for_answers {
            let pairs = (0..).zip(trace.requests());
            followers.extend(pairs.filter_map(|(place, request)| Some((after(request)?, place))));
            followers.sort_unstable();
        }
        let mut arrivals = Self {
            trace,
            arrival,
            waits_for_answers,
            next: 0,
            next_us: None,
            places,
            followers,
            thinking: BinaryHeap::new(),
        };
        arrivals.find_next();
        arrivals
    }

    /// Returns the time of the next arrival, relative to the first; none if it depends on an
    /// answer.
    pub(crate) fn next_us(&self, now_us: u64) -> Option<u64> {
        match self.arrival {
            Arrival::Trace { .. } => {
                let thinking_us = self.thinking.peek().map(|Reverse((at_us, _))| *at_us);
                [self.next_us, thinking_us].into_iter().flatten().min()
            }
            Arrival::ClosedLoop { .. } => self.next_us.filter(|_| self.places > 0).map(|_| now_us),
        }
    }

    /// Advances to the next request that does not wait for an answer.
    fn find_next(&mut self) {
        let requests = self.trace.requests();
        let waits = |request: &TraceRequest| self.waits_for_answers && after(request).is_some();
        while requests.get(self.next).is_some_and(waits) {
            self.next += 1;
        }
        self.next_us = requests.get(self.next).map(|request| self.traced_us(request));
    }

    /// Returns the arrival time of a request by the trace.
    fn traced_us(&self, request: &TraceRequest) -> u64 {
        let since_first = request.arrival_us - self.trace.requests()[0].arrival_us;
        match self.arrival {
            Arrival::Trace { speed_up } => (since_first as f64 / speed_up).round() as u64,
            Arrival::ClosedLoop { .. } => since_first,
        }
    }

    /// Removes and returns the next request, if it has arrived.
    pub(crate) fn pop(&mut self, now_us: u64) -> Option<u32> {
        if self.next_us(now_us)? > now_us {
            return None;
        }
        if let Some(&Reverse((at_us, request))) = self.thinking.peek()
            && self.next_us.is_none_or(|next_us| at_us < next_us)
        {
            self.thinking.pop();
            return Some(request);
        }
        match self.arrival {
            Arrival::Trace { .. } => {}
            Arrival::ClosedLoop { .. } => self.places -= 1,
        }
        self.next += 1;
        let request = self.next as u32 - 1;
        self.find_next();
        Some(request)
    }

    /// Records that a request is answered or has failed. This frees a place in a closed loop and
    /// schedules the next turn of a session.
    pub(crate) fn answered(&mut self, now_us: u64, request: u32) {
        match self.arrival {
            Arrival::Trace { .. } => {}
            Arrival::ClosedLoop { .. } => self.places += 1,
        }
        let first = self.followers.partition_point(|&(before, _)| before < request);
        let followers =
            self.followers[first..].iter().take_while(|&&(before, _)| before == request);
        for &(_, follower) in followers {
            let turn = &self.trace.requests()[follower as usize];
            let at_us = match turn.link.and_then(|link| link.think_us) {
                Some(think_us) => now_us + think_us,
                None => self.traced_us(turn).max(now_us),
            };
            self.thinking.push(Reverse((at_us, follower)));
        }
    }
}

fn after(request: &TraceRequest) -> Option<u32> {
    request.link?.after
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::trace::{TraceBuilder, Turn};

    fn trace() -> Trace {
        let mut builder = TraceBuilder::new(4).unwrap();
        let turn = |think_us| Turn { session: 1, think_us };
        builder.push_turn(0, 4, 1, &[1], turn(None)).unwrap();
        builder.push_turn(100, 4, 1, &[2], turn(Some(30))).unwrap();
        builder.push_turn(200, 4, 1, &[3], turn(None)).unwrap();
        builder.push(150, 4, 1, &[4]).unwrap();
        builder.finish()
    }

    #[test]
    fn turn_waits_for_the_previous_answer_and_think_time() {
        let trace = trace();
        let mut arrivals = Arrivals::new(&trace, Arrival::default(), Sessions::Wait);
        assert_eq!((arrivals.pop(0), arrivals.next_us(0)), (Some(0), Some(150)));
        arrivals.answered(90, 0);
        assert_eq!((arrivals.next_us(90), arrivals.pop(120)), (Some(120), Some(1)));
        assert_eq!((arrivals.pop(150), arrivals.next_us(150)), (Some(2), None));
        // Its time has passed when the answer arrives, and there is no think time.
        arrivals.answered(500, 1);
        assert_eq!((arrivals.pop(500), arrivals.next_us(500)), (Some(3), None));
    }

    #[test]
    fn by_the_clock_turns_do_not_wait() {
        let trace = trace();
        let mut arrivals = Arrivals::new(&trace, Arrival::default(), Sessions::ByTheClock);
        let mut order = Vec::new();
        while let Some(now_us) = arrivals.next_us(0) {
            order.extend(arrivals.pop(now_us).map(|request| (now_us, request)));
        }
        assert_eq!(order, [(0, 0), (100, 1), (150, 2), (200, 3)]);
    }
}
