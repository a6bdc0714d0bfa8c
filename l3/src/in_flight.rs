//! Counting what is under way, so that whoever closes can wait for the last of it.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::{Condvar, Mutex};
use tokio::sync::Notify;

/// What has begun and not ended. Clones count the same.
#[derive(Clone, Debug, Default)]
pub struct InFlight {
    shared: Arc<Shared>,
}

#[derive(Debug, Default)]
struct Shared {
    count: AtomicUsize,
    none: Notify,
    /// The same for threads that block.
    lock: Mutex<()>,
    none_blocking: Condvar,
}

impl InFlight {
    /// Something begins, and ends when the answer is dropped. Whoever may be closed begins first and looks
    /// whether it is closed then: so a shutdown waits for all who were told that it is not.
    pub fn begin(&self) -> Ticket {
        self.shared.count.fetch_add(1, Ordering::SeqCst);
        Ticket(self.clone())
    }

    /// Waits until there is nothing.
    pub async fn none(&self) {
        loop {
            let mut none = std::pin::pin!(self.shared.none.notified());
            none.as_mut().enable();
            if self.shared.count.load(Ordering::SeqCst) == 0 {
                return;
            }
            none.await;
        }
    }

    /// The same for a thread that may block.
    pub fn none_blocking(&self) {
        let mut guard = self.shared.lock.lock();
        while self.shared.count.load(Ordering::SeqCst) > 0 {
            self.shared.none_blocking.wait(&mut guard);
        }
    }
}

/// Something that is under way.
#[derive(Debug)]
pub struct Ticket(InFlight);

impl Drop for Ticket {
    fn drop(&mut self) {
        let Shared { count, none, lock, none_blocking } = &*self.0.shared;
        if count.fetch_sub(1, Ordering::SeqCst) == 1 {
            none.notify_waiters();
            let _guard = lock.lock();
            none_blocking.notify_all();
        }
    }
}
