//! Loans of many pages at once: one owner for all of them, at a few nanoseconds per page.

use std::fmt;
use std::sync::Arc;

use super::{Arena, Lending, Lent, Slab};

/// Pages of one arena lent for reading. Dropping it returns all of them.
pub struct Sources(Loans);

/// Pages of one arena lent for writing. Dropping it returns all of them.
pub struct Targets(Loans);

/// Number of pages that are inspected before they are taken one by one. Inspecting overlaps the
/// cache misses of all of them; taking a page is an atomic operation that waits for all memory
/// accesses before it.
const LOOK_AHEAD: usize = 64;

struct Loans {
    inner: Arc<Slab>,
    pages: Vec<u32>,
}

impl Arena {
    /// Lends pages for reading: all of them, or none.
    ///
    /// # Errors
    /// If one of them is lent for writing.
    ///
    /// # Panics
    /// If the arena has no such page.
    pub fn sources(&self, pages: impl IntoIterator<Item = u32>) -> Result<Sources, Lent> {
        let mut sources = Sources(Loans::none_of(self));
        // Pages that were taken before the one that is lent are returned when `sources` is dropped.
        sources.0.take(pages.into_iter(), Lending::is_shareable, Lending::share)?;
        Ok(sources)
    }

    /// Lends pages for writing: all of them, or none.
    ///
    /// # Errors
    /// If one of them is lent, or is listed twice.
    ///
    /// # Panics
    /// If the arena has no such page.
    pub fn targets(&self, pages: impl IntoIterator<Item = u32>) -> Result<Targets, Lent> {
        let mut targets = Targets(Loans::none_of(self));
        targets.0.take(pages.into_iter(), Lending::is_idle, Lending::lend_exclusively)?;
        Ok(targets)
    }
}

impl Loans {
    fn none_of(arena: &Arena) -> Self {
        Self { inner: arena.inner.clone(), pages: Vec::new() }
    }

    fn take(
        &mut self,
        mut pages: impl Iterator<Item = u32>,
        is_to_be_had: impl Fn(&Lending) -> bool,
        take: impl Fn(&Lending) -> bool,
    ) -> Result<(), Lent> {
        let (inner, taken) = (&self.inner, &mut self.pages);
        taken.reserve_exact(pages.size_hint().0);
        let lending = |page: &u32| &inner.lending[*page as usize];
        let mut some = Vec::with_capacity(LOOK_AHEAD);
        loop {
            some.clear();
            some.extend(pages.by_ref().take(LOOK_AHEAD));
            if let Some(&page) = some.iter().find(|page| !is_to_be_had(lending(page))) {
                return Err(Lent { page });
            }
            for page in &some {
                if !take(lending(page)) {
                    return Err(Lent { page: *page });
                }
                taken.push(*page);
            }
            if some.len() < LOOK_AHEAD {
                return Ok(());
            }
        }
    }

    fn give_back(&self, give_back: impl Fn(&Lending)) {
        let Slab { lending, returned, .. } = &*self.inner;
        self.pages.iter().for_each(|page| give_back(&lending[*page as usize]));
        returned.notify_waiters();
    }

    fn start(&self, n: usize) -> *mut u8 {
        self.inner.start(self.pages[n])
    }
}

macro_rules! loans {
    ($name:ident) => {
        impl $name {
            /// Number of pages.
            #[must_use]
            pub fn len(&self) -> usize {
                self.0.pages.len()
            }

            /// Returns true if there are no pages.
            #[must_use]
            pub fn is_empty(&self) -> bool {
                self.0.pages.is_empty()
            }

            /// Addresses of the pages in the order of the request, for transfers that a device
            /// performs.
            pub fn starts(&self) -> impl ExactSizeIterator<Item = *mut u8> {
                self.0.pages.iter().map(|page| self.0.inner.start(*page))
            }

            /// Bytes of the `n`-th page.
            ///
            /// # Panics
            /// If there is no such page.
            #[must_use]
            pub fn bytes(&self, n: usize) -> &[u8] {
                // SAFETY: the bytes are initialised memory of the arena, and while this loan lasts
                // nothing else writes to them.
                unsafe { std::slice::from_raw_parts(self.0.start(n), self.0.inner.page_bytes) }
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                let Loans { inner, pages } = &self.0;
                write!(f, "{} of {} pages of arena {}", stringify!($name), pages.len(), inner.id)
            }
        }
    };
}

loans!(Sources);
loans!(Targets);

impl Targets {
    /// Bytes of the `n`-th page, for writing.
    ///
    /// # Panics
    /// If there is no such page.
    #[must_use]
    pub fn bytes_mut(&mut self, n: usize) -> &mut [u8] {
        // SAFETY: as for reading, and nothing else reads them either: each page is lent once.
        unsafe { std::slice::from_raw_parts_mut(self.0.start(n), self.0.inner.page_bytes) }
    }
}

impl Drop for Sources {
    fn drop(&mut self) {
        self.0.give_back(Lending::unshare);
    }
}

impl Drop for Targets {
    fn drop(&mut self) {
        self.0.give_back(Lending::release_writer);
    }
}

#[cfg(all(test, not(feature = "loom")))]
mod tests {
    use super::*;

    #[test]
    fn all_pages_are_lent_or_none() {
        let arena = Arena::new(4, 64).unwrap();
        let in_use = arena.target(2).unwrap();
        assert_eq!(arena.sources([0, 1, 2, 3]).unwrap_err(), Lent { page: 2 });
        assert_eq!(arena.targets([3, 0, 2]).unwrap_err(), Lent { page: 2 });
        assert_eq!(arena.targets([0, 1, 0]).unwrap_err(), Lent { page: 0 }, "a page twice");
        let panics = std::panic::AssertUnwindSafe(|| arena.targets([0, 1, 99]));
        assert!(std::panic::catch_unwind(panics).is_err(), "there is no such page");
        assert_eq!((0..4).filter(|page| arena.is_lent(*page)).collect::<Vec<_>>(), [2]);
        drop(in_use);
        drop(arena.targets([3, 2, 1, 0]).unwrap());
        assert!(arena.sources([]).unwrap().is_empty());
        assert!((0..4).all(|page| !arena.is_lent(page)));
    }

    #[test]
    fn many_loans_exclude_as_single_ones_do() {
        let arena = Arena::with_headroom(4, 64).unwrap();
        let mut targets = arena.targets([3, 1]).unwrap();
        for n in 0..targets.len() {
            targets.bytes_mut(n).fill(n as u8 + 1);
        }
        assert!(arena.source(1).is_err() && arena.target(3).is_err() && arena.source(0).is_ok());
        drop(targets);
        let (sources, also) = (arena.sources([1, 3, 1]).unwrap(), arena.source(1).unwrap());
        assert_eq!([0, 1, 2].map(|n| sources.bytes(n)[63]), [2, 1, 2]);
        assert_eq!(sources.starts().next(), Some(also.start()), "behind its headroom");
        drop(also);
        assert!(arena.target(1).is_err() && arena.targets([3]).is_err());
        drop(sources);
        assert!(arena.target(1).is_ok() && arena.target(3).is_ok());
    }

    #[tokio::test]
    async fn returning_many_pages_wakes_waiters() {
        let arena = Arena::new(2, 64).unwrap();
        let targets = arena.targets([0, 1]).unwrap();
        let waiter = tokio::spawn({
            let arena = arena.clone();
            async move { arena.returned(1).await }
        });
        tokio::task::yield_now().await;
        assert!(!waiter.is_finished());
        drop(targets);
        waiter.await.unwrap();
    }
}
