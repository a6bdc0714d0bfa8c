//! What is going to happen, in the order in which it will.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use terrace_scheduler::{OpId, Outcome};

/// Something that happens to a worker.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Happening {
    /// Its step ends.
    Step { worker: u32 },
    /// An operation of its has an outcome.
    Operation { worker: u32, op: OpId, outcome: Outcome },
    /// A backup of its is in the store from now on.
    Stored { worker: u32, op: OpId },
    /// It wanted to be asked for a plan.
    Wake { worker: u32 },
}

/// What is going to happen. Of what happens at the same moment, that comes first which was known
/// first.
#[derive(Debug, Default)]
pub(crate) struct Happenings {
    queue: BinaryHeap<Reverse<Due>>,
    next: u64,
}

#[derive(Debug)]
struct Due {
    at_us: u64,
    number: u64,
    happening: Happening,
}

impl PartialEq for Due {
    fn eq(&self, other: &Self) -> bool {
        self.number == other.number
    }
}

impl Eq for Due {}

impl PartialOrd for Due {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Due {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        (self.at_us, self.number).cmp(&(other.at_us, other.number))
    }
}

impl Happenings {
    pub(crate) fn add(&mut self, at_us: u64, happening: Happening) {
        self.queue.push(Reverse(Due { at_us, number: self.next, happening }));
        self.next += 1;
    }

    /// When the next thing happens.
    pub(crate) fn next_us(&self) -> Option<u64> {
        self.queue.peek().map(|Reverse(due)| due.at_us)
    }

    /// The worker that is woken next and when, if nothing happens before.
    pub(crate) fn next_wake(&self) -> Option<(u64, u32)> {
        let Reverse(due) = self.queue.peek()?;
        match due.happening {
            Happening::Wake { worker } => Some((due.at_us, worker)),
            Happening::Step { .. } | Happening::Operation { .. } | Happening::Stored { .. } => None,
        }
    }

    /// What happens next, if it happens by this moment.
    pub(crate) fn pop(&mut self, now_us: u64) -> Option<Happening> {
        if self.next_us()? > now_us {
            return None;
        }
        self.queue.pop().map(|Reverse(due)| due.happening)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_happens_at_the_same_moment_happens_in_the_order_of_being_known() {
        let mut happenings = Happenings::default();
        for (at_us, worker) in [(5, 0), (3, 1), (5, 2), (3, 3)] {
            happenings.add(at_us, Happening::Wake { worker });
        }
        let mut order = Vec::new();
        while let Some(now_us) = happenings.next_us() {
            let Some(Happening::Wake { worker }) = happenings.pop(now_us) else { break };
            order.push((now_us, worker));
        }
        assert_eq!(order, [(3, 1), (3, 3), (5, 0), (5, 2)]);
    }
}
