//! Synchronisation primitives: the real ones, or loom's models of them.

#[cfg(not(feature = "loom"))]
pub use parking_lot::Mutex;
#[cfg(not(feature = "loom"))]
pub(crate) use std::sync::atomic::{AtomicU32, Ordering};

#[cfg(feature = "loom")]
pub(crate) use loom::sync::atomic::{AtomicU32, Ordering};
#[cfg(feature = "loom")]
pub use modelled::Mutex;

#[cfg(feature = "loom")]
mod modelled {
    /// Loom's mutex with the interface of `parking_lot`'s.
    #[derive(Debug, Default)]
    pub struct Mutex<T>(loom::sync::Mutex<T>);

    impl<T> Mutex<T> {
        pub fn new(value: T) -> Self {
            Self(loom::sync::Mutex::new(value))
        }

        pub fn lock(&self) -> loom::sync::MutexGuard<'_, T> {
            self.0.lock().expect("no holder panics")
        }
    }
}
