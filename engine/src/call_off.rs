//! A shared flag that cancels an operation.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// A cancellation flag. Clones share the flag.
#[derive(Clone, Debug, Default)]
pub(crate) struct CallOff(Arc<AtomicBool>);

impl CallOff {
    /// Requests cancellation.
    pub(crate) fn call_off(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    pub(crate) fn is_called_off(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}
