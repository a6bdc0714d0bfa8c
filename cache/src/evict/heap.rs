//! A binary heap of nodes by rank from which any node can be taken out.

/// Order of eviction: the smallest is first, and no two are equal.
pub(crate) type Rank = (u64, u64);

const ABSENT: u32 = u32::MAX;

/// Nodes ordered by rank. Memory grows to the largest number of nodes once and stays.
#[derive(Debug, Default)]
pub(crate) struct RankHeap {
    heap: Vec<(Rank, u32)>,
    /// Where in the heap each node is.
    places: Vec<u32>,
}

impl RankHeap {
    pub(crate) fn insert(&mut self, node: u32, rank: Rank) {
        if self.places.len() <= node as usize {
            self.places.resize(node as usize + 1, ABSENT);
        }
        debug_assert_eq!(self.places[node as usize], ABSENT, "offered twice");
        self.heap.push((rank, node));
        self.places[node as usize] = self.heap.len() as u32 - 1;
        self.rise(self.heap.len() - 1);
    }

    /// Takes the node out; tells whether it was there.
    pub(crate) fn remove(&mut self, node: u32) -> bool {
        let Some(place) = self.place(node) else { return false };
        self.places[node as usize] = ABSENT;
        self.heap.swap_remove(place);
        if place < self.heap.len() {
            self.places[self.heap[place].1 as usize] = place as u32;
            self.rise(place);
            self.sink(place);
        }
        true
    }

    pub(crate) fn first(&self) -> Option<u32> {
        self.heap.first().map(|&(_, node)| node)
    }

    pub(crate) fn len(&self) -> usize {
        self.heap.len()
    }

    fn place(&self, node: u32) -> Option<usize> {
        self.places
            .get(node as usize)
            .filter(|&&place| place != ABSENT)
            .map(|&place| place as usize)
    }

    fn rise(&mut self, mut place: usize) {
        while place > 0 && self.heap[place].0 < self.heap[(place - 1) / 2].0 {
            self.swap(place, (place - 1) / 2);
            place = (place - 1) / 2;
        }
    }

    fn sink(&mut self, mut place: usize) {
        loop {
            let (left, right) = (2 * place + 1, 2 * place + 2);
            let mut least = place;
            if left < self.heap.len() && self.heap[left].0 < self.heap[least].0 {
                least = left;
            }
            if right < self.heap.len() && self.heap[right].0 < self.heap[least].0 {
                least = right;
            }
            if least == place {
                return;
            }
            self.swap(place, least);
            place = least;
        }
    }

    fn swap(&mut self, a: usize, b: usize) {
        self.heap.swap(a, b);
        self.places[self.heap[a].1 as usize] = a as u32;
        self.places[self.heap[b].1 as usize] = b as u32;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keeps_order_through_insertions_and_removals() {
        let mut heap = RankHeap::default();
        for node in 0..200u32 {
            heap.insert(node, (u64::from(node * 37 % 200), u64::from(node)));
        }
        for node in (0..200).filter(|node| node % 4 == 1) {
            assert!(heap.remove(node));
            assert!(!heap.remove(node));
        }
        let mut last = 0;
        while let Some(node) = heap.first() {
            assert!(node % 4 != 1);
            let rank = node * 37 % 200;
            assert!(rank >= last);
            last = rank;
            heap.remove(node);
        }
        assert_eq!(heap.len(), 0);
    }
}
