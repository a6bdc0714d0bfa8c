//! The free pages of one tier.

use crate::tier::{Page, Pages};

/// Hands out the pages of one arena and takes them back, last returned first.
pub(crate) struct Pool<T> {
    free: Vec<Page<T>>,
    total: usize,
}

impl<T> Pool<T> {
    pub(crate) fn new(total: u32) -> Self {
        Self { free: (0..total).rev().map(Page::new).collect(), total: total as usize }
    }

    /// Moves `count` pages to the end of `into`, or none if there are fewer.
    pub(crate) fn take(&mut self, count: usize, into: &mut Pages<T>) -> bool {
        let Some(rest) = self.free.len().checked_sub(count) else { return false };
        into.as_vec_mut().extend(self.free.drain(rest..).rev());
        true
    }

    pub(crate) fn give(&mut self, pages: Pages<T>) {
        self.give_all(pages.into_vec().into_iter());
    }

    pub(crate) fn give_all(&mut self, pages: impl DoubleEndedIterator<Item = Page<T>>) {
        self.free.extend(pages.rev());
        assert!(self.free.len() <= self.total, "more pages came back than were given out");
    }

    pub(crate) fn free(&self) -> usize {
        self.free.len()
    }

    pub(crate) fn total(&self) -> usize {
        self.total
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &Page<T>> {
        self.free.iter()
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
    #[should_panic(expected = "more pages came back")]
    fn a_page_given_back_twice_is_noticed() {
        Pool::<Device>::new(1).give_all([Page::new(0)].into_iter());
    }
}
