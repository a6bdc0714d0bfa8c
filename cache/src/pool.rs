//! The free pages of one tier.

use std::collections::VecDeque;

use crate::tier::{Page, Pages};

/// Hands out the pages of one arena and takes them back, last returned first.
pub(crate) struct Pool<T> {
    free: Vec<Page<T>>,
    total: usize,
    /// Returned pages that a step may still write to, and the step until which that is so.
    cooling: VecDeque<(u64, Page<T>)>,
    /// Until when that is so of what comes back now.
    cool_until: Option<u64>,
}

impl<T> Pool<T> {
    pub(crate) fn new(total: u32) -> Self {
        Self {
            free: (0..total).rev().map(Page::new).collect(),
            total: total as usize,
            cooling: VecDeque::new(),
            cool_until: None,
        }
    }

    /// Moves `count` pages to the end of `into`, or none if there are fewer.
    pub(crate) fn take(&mut self, count: usize, into: &mut Pages<T>) -> bool {
        let Some(rest) = self.free.len().checked_sub(count) else { return false };
        into.as_vec_mut().extend(self.free.drain(rest..).rev());
        true
    }

    /// Takes back pages that may have to cool.
    pub(crate) fn give(&mut self, pages: Pages<T>) {
        self.cool(pages.into_vec().into_iter());
    }

    /// Returns pages like [`give`](Self::give).
    pub(crate) fn cool(&mut self, pages: impl DoubleEndedIterator<Item = Page<T>>) {
        match self.cool_until {
            None => self.give_all(pages),
            Some(until) => self.cooling.extend(pages.rev().map(|page| (until, page))),
        }
    }

    /// Takes back pages that no step writes to.
    pub(crate) fn give_all(&mut self, pages: impl DoubleEndedIterator<Item = Page<T>>) {
        self.free.extend(pages.rev());
        assert!(self.free.len() <= self.total, "more pages came back than were given out");
    }

    /// Pages that are returned from now on cool until this step, which never decreases.
    pub(crate) fn cool_until(&mut self, until: Option<u64>) {
        self.cool_until = until;
    }

    /// Frees the pages that were to cool until this step.
    pub(crate) fn cooled(&mut self, until: u64) {
        while let Some((_, page)) = self.cooling.pop_front_if(|(last, _)| *last <= until) {
            self.free.push(page);
        }
    }

    pub(crate) fn cooling(&self) -> usize {
        self.cooling.len()
    }

    pub(crate) fn free(&self) -> usize {
        self.free.len()
    }

    pub(crate) fn total(&self) -> usize {
        self.total
    }

    /// Pages without an owner.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &Page<T>> {
        self.free.iter().chain(self.cooling.iter().map(|(_, page)| page))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tier::Device;

    #[test]
    fn takes_all_or_nothing() {
        let mut pool = Pool::<Device>::new(3);
        let mut pages = Pages::none();
        assert!(!pool.take(4, &mut pages));
        assert!(pages.is_empty());
        assert!(pool.take(3, &mut pages));
        assert_eq!(pages.as_slice().iter().map(|p| p.slot()).collect::<Vec<_>>(), [0, 1, 2]);
        assert_eq!(pool.free(), 0);
        pool.give(pages);
        assert_eq!(pool.free(), 3);
    }

    #[test]
    fn pages_cool_until_no_step_writes_to_them() {
        let mut pool = Pool::<Device>::new(3);
        let take = |pool: &mut Pool<Device>| {
            let mut page = Pages::none();
            assert!(pool.take(1, &mut page));
            page
        };
        let (one, two, three) = (take(&mut pool), take(&mut pool), take(&mut pool));
        for (until, page) in [(Some(7), one), (Some(8), two), (None, three)] {
            pool.cool_until(until);
            pool.give(page);
        }
        assert_eq!((pool.free(), pool.cooling(), pool.iter().count()), (1, 2, 3));
        pool.cooled(6);
        assert_eq!((pool.free(), pool.cooling()), (1, 2));
        pool.cooled(7);
        assert_eq!((pool.free(), pool.cooling()), (2, 1));
        pool.cooled(9);
        assert_eq!((pool.free(), pool.cooling()), (3, 0));
    }

    #[test]
    #[should_panic(expected = "more pages came back")]
    fn a_page_given_back_twice_is_noticed() {
        Pool::<Device>::new(1).give_all([Page::new(0)].into_iter());
    }
}
