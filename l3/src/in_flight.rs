//! Counter of operations in flight, so that a shutdown can wait for the last of them.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::{Condvar, Mutex};
use tokio::sync::Notify;

/// Operations in flight. Clones share one counter.
#[derive(Clone, Debug, Default)]
pub struct InFlight {
    shared: Arc<FlightCounter>,
}

#[derive(Debug, Default)]
struct FlightCounter {
    count: AtomicUsize,
    none: Notify,
    /// Lock and condition for waiting threads.
    lock: Mutex<()>,
    none_blocking: Condvar,
}

impl InFlight {
    /// Counts an operation until the ticket is dropped. An operation must first take a ticket and
    /// then check for shutdown; so a shutdown waits for every operation that passed the check.
    pub fn begin(&self) -> Ticket {
        self.shared.count.fetch_add(1, Ordering::SeqCst);
        Ticket(self.clone())
    }

    /// Waits until no operation is in flight.
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

    /// Like [`InFlight::none`], for a thread that may block.
    pub fn none_blocking(&self) {
        let mut guard = self.shared.lock.lock();
        while self.shared.count.load(Ordering::SeqCst) > 0 {
            self.shared.none_blocking.wait(&mut guard);
        }
    }
}

/// An operation in flight.
#[derive(Debug)]
pub struct Ticket(InFlight);

impl Drop for Ticket {
    fn drop(&mut self) {
        let FlightCounter { count, none, lock, none_blocking } = &*self.0.shared;
        if count.fetch_sub(1, Ordering::SeqCst) == 1 {
            none.notify_waiters();
            let _guard = lock.lock();
            none_blocking.notify_all();
        }
    }
}
