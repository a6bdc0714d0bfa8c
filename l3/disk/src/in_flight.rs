//! Counting transfers, so that a store can wait for the last one.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::{Condvar, Mutex};
use tokio::sync::Notify;

/// Transfers that have not ended.
#[derive(Debug, Default)]
pub(super) struct InFlight {
    count: AtomicUsize,
    none: Notify,
    /// The same for threads that block.
    lock: Mutex<()>,
    none_blocking: Condvar,
}

impl InFlight {
    /// Waits until there are none.
    pub(super) async fn none(&self) {
        loop {
            let mut none = std::pin::pin!(self.none.notified());
            none.as_mut().enable();
            if self.count.load(Ordering::SeqCst) == 0 {
                return;
            }
            none.await;
        }
    }

    /// The same for a thread that may block.
    pub(super) fn none_blocking(&self) {
        let mut guard = self.lock.lock();
        while self.count.load(Ordering::Acquire) > 0 {
            self.none_blocking.wait(&mut guard);
        }
    }
}

pub(super) struct Ticket(Arc<InFlight>);

impl Ticket {
    pub(super) fn new(in_flight: &Arc<InFlight>) -> Self {
        in_flight.count.fetch_add(1, Ordering::SeqCst);
        Self(in_flight.clone())
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        if self.0.count.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.0.none.notify_waiters();
            let _guard = self.0.lock.lock();
            self.0.none_blocking.notify_all();
        }
    }
}
