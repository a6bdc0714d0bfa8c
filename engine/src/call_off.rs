//! Whether somebody still waits for an operation.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Tells those who perform an operation that nobody waits for it any more. Clones are of the same operation.
#[derive(Clone, Debug, Default)]
pub(crate) struct CallOff(Arc<AtomicBool>);

impl CallOff {
    /// Nobody waits any more.
    pub(crate) fn call_off(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    pub(crate) fn is_called_off(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}
