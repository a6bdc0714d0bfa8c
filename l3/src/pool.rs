//! Pool of pages for short-term use.

use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::arena::{Arena, Lent, Source, Target};

const OPEN: &str = "it is never closed";

/// Unused pages of an arena. Clones share the pool.
#[derive(Clone, Debug)]
pub struct PagePool {
    shared: Arc<PoolState>,
}

#[derive(Debug)]
struct PoolState {
    arena: Arena,
    free: Mutex<Vec<u32>>,
    /// Pages that a store still used when they were dropped.
    overdue: Mutex<Vec<u32>>,
    permits: Arc<Semaphore>,
}

impl PagePool {
    /// Creates a pool of all pages of an arena.
    #[must_use]
    pub fn new(arena: Arena) -> Self {
        let shared = PoolState {
            free: Mutex::new((0..arena.pages()).collect()),
            overdue: Mutex::default(),
            permits: Arc::new(Semaphore::new(arena.pages() as usize)),
            arena,
        };
        Self { shared: Arc::new(shared) }
    }

    /// Arena of the pages.
    #[must_use]
    pub fn arena(&self) -> &Arena {
        &self.shared.arena
    }

    /// Takes `count` pages; waits until there are enough.
    pub async fn take(&self, count: usize) -> Vec<PooledPage> {
        self.reclaim();
        let permits = self.shared.permits.clone().acquire_many_owned(count as u32);
        let mut permits = permits.await.expect(OPEN);
        let page = |_| self.page(permits.split(1).expect("there are as many as pages"));
        (0..count).map(page).collect()
    }

    /// Takes a page, if one is free.
    pub fn try_take(&self) -> Option<PooledPage> {
        self.reclaim();
        self.shared.permits.clone().try_acquire_owned().ok().map(|permit| self.page(permit))
    }

    fn page(&self, permit: OwnedSemaphorePermit) -> PooledPage {
        let number = self.shared.free.lock().pop().expect("there are as many as permits");
        PooledPage { pool: self.clone(), number, permit: Some(permit) }
    }

    /// Returns overdue pages to the pool once they are no longer lent.
    fn reclaim(&self) {
        let PoolState { arena, free, overdue, permits } = &*self.shared;
        overdue.lock().retain(|page| {
            let returned = arena.target(*page).is_ok();
            if returned {
                free.lock().push(*page);
                permits.add_permits(1);
            }
            !returned
        });
    }
}

/// A page taken from the pool. Dropping it returns the page, as soon as it is no longer lent.
#[derive(Debug)]
pub struct PooledPage {
    pool: PagePool,
    number: u32,
    permit: Option<OwnedSemaphorePermit>,
}

impl PooledPage {
    /// Lends the first `length` bytes for writing.
    ///
    /// # Errors
    /// While they are being read or written.
    pub fn target(&self, length: usize) -> Result<Target, Lent> {
        Ok(self.pool.shared.arena.target(self.number)?.first(length))
    }

    /// Lends the first `length` bytes for reading.
    ///
    /// # Errors
    /// While they are being written.
    pub fn source(&self, length: usize) -> Result<Source, Lent> {
        Ok(self.pool.shared.arena.source(self.number)?.first(length))
    }
}

impl Drop for PooledPage {
    fn drop(&mut self) {
        let PoolState { arena, free, overdue, .. } = &*self.pool.shared;
        if arena.target(self.number).is_ok() {
            // Before the permit is returned.
            free.lock().push(self.number);
        } else {
            if let Some(permit) = self.permit.take() {
                permit.forget();
            }
            overdue.lock().push(self.number);
        }
    }
}

#[cfg(all(test, not(feature = "loom")))]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_page_is_reused_when_it_is_no_longer_lent() {
        let pool = PagePool::new(Arena::new(2, 64).unwrap());
        let mut pages = pool.take(2).await;
        assert!(pool.try_take().is_none());
        let slow = pages[0].source(10).unwrap();
        let busy = pages[0].number;
        pages.clear();
        let other = pool.try_take().unwrap();
        assert_ne!(other.number, busy);
        assert!(pool.try_take().is_none(), "the page is still being read");
        drop(slow);
        assert_eq!(pool.take(1).await[0].number, busy);
    }
}
