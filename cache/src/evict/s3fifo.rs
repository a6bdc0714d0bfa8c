//! S3-FIFO: newcomers prove themselves in a small queue, returners are remembered.

use std::collections::VecDeque;

use super::heap::RankHeap;
use super::{EvictionPolicy, Usage};
use crate::hash::HashedSet;

/// The small queue is drained first while it holds more than this share of the nodes, in percent.
const SMALL_PERCENT: usize = 10;
/// A node's credit in the main queue is at most this.
const CREDIT_MAX: u32 = 3;
/// Maximum number of evicted prefixes that are remembered.
const GHOSTS_MAX: usize = 1 << 16;

#[derive(Clone, Copy, Debug, Default)]
struct Place {
    /// Tells a node apart from another that had the same number before.
    created: u64,
    in_main: bool,
    /// The place in its queue: lower goes first.
    turn: u64,
    /// Hits that have been spent on staying.
    spent_hits: u32,
    hits: u32,
}

impl Place {
    fn credit(&self) -> u32 {
        (self.hits - self.spent_hits).min(CREDIT_MAX)
    }
}

/// Newcomers enter the small queue; those hit there move on to the main queue. In the main queue a
/// hit buys one more round. Whatever is evicted is remembered as a ghost, and a ghost that returns
/// enters the main queue at once.
#[derive(Debug, Default)]
pub(crate) struct S3Fifo {
    small: RankHeap,
    main: RankHeap,
    places: Vec<Place>,
    turn: u64,
    ghosts: VecDeque<u64>,
    ghost_set: HashedSet<u64>,
}

impl S3Fifo {
    fn next_turn(&mut self) -> u64 {
        self.turn += 1;
        self.turn
    }

    fn enqueue(&mut self, node: u32) {
        let place = self.places[node as usize];
        let queue = if place.in_main { &mut self.main } else { &mut self.small };
        queue.insert(node, (place.turn, 0));
    }

    /// To the end of the main queue.
    fn requeue_in_main(&mut self, node: u32) {
        self.withdraw(node);
        let turn = self.next_turn();
        let place = &mut self.places[node as usize];
        place.in_main = true;
        place.turn = turn;
        self.enqueue(node);
    }

    fn remember(&mut self, fingerprint: u64) {
        if self.ghost_set.insert(fingerprint) {
            self.ghosts.push_back(fingerprint);
        }
        if self.ghosts.len() > GHOSTS_MAX
            && let Some(oldest) = self.ghosts.pop_front()
        {
            self.ghost_set.remove(&oldest);
        }
    }
}

impl EvictionPolicy for S3Fifo {
    fn offer(&mut self, node: u32, usage: &Usage) {
        if self.places.len() <= node as usize {
            self.places.resize(node as usize + 1, Place { created: u64::MAX, ..Place::default() });
        }
        let place = self.places[node as usize];
        // Splits and merges hand a node's age to another number; a node's hits never fall.
        if place.created != usage.created || usage.hits < place.hits {
            let turn = self.next_turn();
            let in_main = self.ghost_set.contains(&usage.fingerprint);
            self.places[node as usize] =
                Place { created: usage.created, in_main, turn, spent_hits: 0, hits: 0 };
        }
        self.places[node as usize].hits = usage.hits;
        self.enqueue(node);
    }

    fn withdraw(&mut self, node: u32) {
        if !self.small.remove(node) {
            self.main.remove(node);
        }
    }

    fn victim(&mut self) -> Option<u32> {
        loop {
            let nodes = self.small.len() + self.main.len();
            let from_small = self.small.len() * 100 > nodes * SMALL_PERCENT;
            let node = if from_small { self.small.first() } else { self.main.first() }
                .or_else(|| self.small.first())?;
            let place = &mut self.places[node as usize];
            if place.credit() == 0 {
                return Some(node);
            }
            // A hit in the small queue earns the move; in the main queue it buys one round.
            place.spent_hits =
                if place.in_main { place.hits - place.credit() + 1 } else { place.hits };
            self.requeue_in_main(node);
        }
    }

    fn evicted(&mut self, _: u32, usage: &Usage) {
        self.remember(usage.fingerprint);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::evict::tests::{order, usage};

    #[test]
    fn new_pages_without_a_hit_are_evicted_before_others() {
        let mut policy = S3Fifo::default();
        let nodes = [usage(0, 0, 1), usage(1, 1, 0), usage(2, 2, 0)];
        assert_eq!(order(&mut policy, &nodes), [1, 2, 0]);
    }

    #[test]
    fn a_ghost_that_returns_enters_the_main_queue() {
        let mut policy = S3Fifo::default();
        let newcomer = usage(0, 0, 0);
        policy.offer(0, &newcomer);
        assert_eq!(policy.victim(), Some(0));
        policy.evicted(0, &newcomer);
        policy.withdraw(0);
        policy.offer(0, &Usage { created: 5, ..newcomer });
        for node in 1..4 {
            policy.offer(node, &usage(u64::from(node) + 5, 9, 0));
        }
        assert_eq!(order(&mut policy, &[]), [1, 2, 3, 0]);
    }

    #[test]
    fn a_node_of_the_same_age_under_a_number_that_was_used_before_starts_anew() {
        let mut policy = S3Fifo::default();
        policy.offer(0, &usage(1, 0, 5));
        assert_eq!(policy.victim(), Some(0), "its hits are spent on the main queue");
        policy.withdraw(0);
        policy.offer(0, &usage(1, 0, 2));
        assert_eq!(policy.victim(), Some(0));
    }

    #[test]
    fn ghosts_are_bounded() {
        let mut policy = S3Fifo::default();
        for fingerprint in 0..GHOSTS_MAX as u64 + 10 {
            policy.remember(fingerprint);
        }
        assert_eq!((policy.ghosts.len(), policy.ghost_set.len()), (GHOSTS_MAX, GHOSTS_MAX));
    }
}
