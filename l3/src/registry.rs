//! Arenas that a store may use.

use std::any::Any;
use std::collections::BTreeSet;
use std::fmt;
use std::sync::Arc;

use parking_lot::RwLock;

use crate::arena::Arena;
use crate::store::{Get, Put, StoreError};

/// Right of a store to use an arena. Dropping it ends the right: later calls with the arena's pages
/// are refused, and those in flight complete.
#[must_use = "dropping a registration ends it"]
pub struct Registration {
    _ends_it: Box<dyn Any + Send + Sync>,
}

impl Registration {
    /// Creates a registration that ends when `guard` is dropped.
    pub fn new(guard: impl Any + Send + Sync) -> Self {
        Self { _ends_it: Box::new(guard) }
    }
}

impl fmt::Debug for Registration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Registration")
    }
}

/// Arenas registered with one store.
#[derive(Clone, Debug, Default)]
pub struct Registry {
    arenas: Arc<RwLock<BTreeSet<u64>>>,
}

impl Registry {
    /// Lets the store use an arena until the registration is dropped.
    pub fn register(&self, arena: &Arena) -> Result<Registration, StoreError> {
        if !self.arenas.write().insert(arena.id()) {
            return Err(StoreError::AlreadyRegistered { arena: arena.id() });
        }
        Ok(Registration::new(ArenaGuard { registry: self.clone(), arena: arena.id() }))
    }

    fn check(&self, arena: u64) -> Result<(), StoreError> {
        if self.arenas.read().contains(&arena) {
            Ok(())
        } else {
            Err(StoreError::NotRegistered { arena })
        }
    }

    /// Refuses a put whose arena is not registered.
    pub fn check_put(&self, put: &Put) -> Result<(), StoreError> {
        self.check(put.source.arena_id())
    }

    /// Refuses a get whose arena is not registered.
    pub fn check_get(&self, get: &Get) -> Result<(), StoreError> {
        self.check(get.target.arena_id())
    }

    /// Number of arenas registered.
    pub fn arenas(&self) -> usize {
        self.arenas.read().len()
    }
}

struct ArenaGuard {
    registry: Registry,
    arena: u64,
}

impl Drop for ArenaGuard {
    fn drop(&mut self) {
        self.registry.arenas.write().remove(&self.arena);
    }
}
