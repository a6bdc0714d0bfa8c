//! The event queue of a simulation.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use terrace_scheduler::{OpId, Outcome};

/// An event of a worker. Events that were scheduled before the worker failed are dropped.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Due {
    /// Its step ends.
    Step { worker: u32 },
    /// One of its operations completes.
    Operation { worker: u32, op: OpId, outcome: Outcome },
    /// One of its backups is in the store.
    Stored { worker: u32, op: OpId },
    /// A wake-up that its scheduler requested.
    Wake { worker: u32 },
    /// It fails.
    Down { worker: u32 },
    /// It recovers.
    Up { worker: u32 },
}

/// Pending events by time; events of equal time keep their order of insertion.
#[derive(Debug, Default)]
pub(crate) struct Agenda {
    queue: BinaryHeap<Reverse<Entry>>,
    next: u64,
    /// Number of failures of each worker so far.
    lives: Vec<u32>,
}

#[derive(Debug)]
struct Entry {
    at_us: u64,
    number: u64,
    due: Due,
    life: u32,
}

impl PartialEq for Entry {
    fn eq(&self, other: &Self) -> bool {
        self.number == other.number
    }
}

impl Eq for Entry {}

impl PartialOrd for Entry {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Entry {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        (self.at_us, self.number).cmp(&(other.at_us, other.number))
    }
}

impl Agenda {
    pub(crate) fn add(&mut self, at_us: u64, due: Due) {
        let life = self.life(due);
        self.queue.push(Reverse(Entry { at_us, number: self.next, due, life }));
        self.next += 1;
    }

    /// Drops all pending events of a worker, except outages.
    pub(crate) fn forget(&mut self, worker: u32) {
        if self.lives.len() <= worker as usize {
            self.lives.resize(worker as usize + 1, 0);
        }
        self.lives[worker as usize] += 1;
        let lives = std::mem::take(&mut self.lives);
        self.queue.retain(|Reverse(entry)| entry.life == life_of(&lives, entry.due));
        self.lives = lives;
    }

    fn life(&self, due: Due) -> u32 {
        life_of(&self.lives, due)
    }

    /// Returns the time of the next event.
    pub(crate) fn next_us(&self) -> Option<u64> {
        self.queue.peek().map(|Reverse(entry)| entry.at_us)
    }

    /// Returns the worker and time of the next wake-up, if no other event comes first.
    pub(crate) fn next_wake(&self) -> Option<(u64, u32)> {
        let Reverse(entry) = self.queue.peek()?;
        match entry.due {
            Due::Wake { worker } => Some((entry.at_us, worker)),
            Due::Step { .. }
            | Due::Operation { .. }
            | Due::Stored { .. }
            | Due::Down { .. }
            | Due::Up { .. } => None,
        }
    }

    /// Returns whether only outages are pending.
    pub(crate) fn are_outages(&self) -> bool {
        self.queue
            .iter()
            .all(|Reverse(entry)| matches!(entry.due, Due::Down { .. } | Due::Up { .. }))
    }

    /// Removes and returns the next event, if it is due.
    pub(crate) fn pop(&mut self, now_us: u64) -> Option<Due> {
        if self.next_us()? > now_us {
            return None;
        }
        self.queue.pop().map(|Reverse(entry)| entry.due)
    }
}

/// Returns the life of a worker to which an event belongs; outages belong to all lives.
fn life_of(lives: &[u32], due: Due) -> u32 {
    match due {
        Due::Step { worker }
        | Due::Operation { worker, .. }
        | Due::Stored { worker, .. }
        | Due::Wake { worker } => lives.get(worker as usize).copied().unwrap_or(0),
        Due::Down { .. } | Due::Up { .. } => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_of_equal_time_keep_their_order() {
        let mut agenda = Agenda::default();
        for (at_us, worker) in [(5, 0), (3, 1), (5, 2), (3, 3)] {
            agenda.add(at_us, Due::Wake { worker });
        }
        let mut order = Vec::new();
        while let Some(now_us) = agenda.next_us() {
            let Some(Due::Wake { worker }) = agenda.pop(now_us) else { break };
            order.push((now_us, worker));
        }
        assert_eq!(order, [(3, 1), (3, 3), (5, 0), (5, 2)]);
    }

    #[test]
    fn drops_events_of_a_failed_worker() {
        let mut agenda = Agenda::default();
        agenda.add(5, Due::Step { worker: 1 });
        agenda.add(6, Due::Step { worker: 0 });
        agenda.add(7, Due::Up { worker: 1 });
        agenda.forget(1);
        agenda.add(8, Due::Step { worker: 1 });
        let mut times = Vec::new();
        while let Some(now_us) = agenda.next_us() {
            times.push(now_us);
            agenda.pop(now_us);
        }
        assert_eq!(times, [6, 7, 8]);
    }
}
