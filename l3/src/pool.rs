//! Pages that are lent to whoever needs one for a while.

use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::arena::{Arena, Lent, Source, Target};

const OPEN: &str = "it is never closed";

/// The pages of an arena that nobody uses. Clones are the same pages.
#[derive(Clone, Debug)]
pub struct PagePool {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    arena: Arena,
    free: Mutex<Vec<u32>>,
    /// Pages that a store had not given back when their use ended.
    overdue: Mutex<Vec<u32>>,
    permits: Arc<Semaphore>,
}

impl PagePool {
    /// All pages of an arena.
    #[must_use]
    pub fn new(arena: Arena) -> Self {
        let shared = Shared {
            free: Mutex::new((0..arena.pages()).collect()),
            overdue: Mutex::default(),
            permits: Arc::new(Semaphore::new(arena.pages() as usize)),
            arena,
        };
        Self { shared: Arc::new(shared) }
    }

    /// The memory that the pages are in.
    #[must_use]
    pub fn arena(&self) -> &Arena {
        &self.shared.arena
    }

    /// So many pages, for which it waits.
    pub async fn take(&self, count: usize) -> Vec<PooledPage> {
        self.reclaim();
        let permits = self.shared.permits.clone().acquire_many_owned(count as u32);
        let mut permits = permits.await.expect(OPEN);
        let page = |_| self.page(permits.split(1).expect("there are as many as pages"));
        (0..count).map(page).collect()
    }

    /// A page, if one is free.
    pub fn try_take(&self) -> Option<PooledPage> {
        self.reclaim();
        self.shared.permits.clone().try_acquire_owned().ok().map(|permit| self.page(permit))
    }

    fn page(&self, permit: OwnedSemaphorePermit) -> PooledPage {
        let number = self.shared.free.lock().pop().expect("there are as many as permits");
        PooledPage { pool: self.clone(), number, permit: Some(permit) }
    }

    /// Takes up the pages that have come back at last.
    fn reclaim(&self) {
        let Shared { arena, free, overdue, permits } = &*self.shared;
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

/// A page in somebody's use; dropping it gives it back, when nothing touches it any more.
#[derive(Debug)]
pub struct PooledPage {
    pool: PagePool,
    number: u32,
    permit: Option<OwnedSemaphorePermit>,
}

impl PooledPage {
    /// The first bytes of the page, to be written.
    ///
    /// # Errors
    /// While they are being read or written.
    pub fn target(&self, length: usize) -> Result<Target, Lent> {
        Ok(self.pool.shared.arena.target(self.number)?.first(length))
    }

    /// The first bytes of the page, to be read.
    ///
    /// # Errors
    /// While they are being written.
    pub fn source(&self, length: usize) -> Result<Source, Lent> {
        Ok(self.pool.shared.arena.source(self.number)?.first(length))
    }
}

impl Drop for PooledPage {
    fn drop(&mut self) {
        let Shared { arena, free, overdue, .. } = &*self.pool.shared;
        if arena.target(self.number).is_ok() {
            // Before the permit is given back.
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
    async fn a_page_is_lent_again_when_nothing_touches_it_any_more() {
        let pool = PagePool::new(Arena::new(2, 64).unwrap());
        let mut pages = pool.take(2).await;
        assert!(pool.try_take().is_none());
        let slow = pages[0].source(10).unwrap();
        let busy = pages[0].number;
        pages.clear();
        let other = pool.try_take().unwrap();
        assert_ne!(other.number, busy);
        assert!(pool.try_take().is_none(), "somebody still reads it");
        drop(slow);
        assert_eq!(pool.take(1).await[0].number, busy);
    }
}
