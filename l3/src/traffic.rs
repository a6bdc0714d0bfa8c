//! Traffic counters of a backend.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::stats::TierStats;
use crate::store::{StoreError, Stored};

/// Counters of objects and bytes.
#[derive(Debug, Default)]
pub struct Traffic {
    puts: AtomicU64,
    puts_already_there: AtomicU64,
    puts_full: AtomicU64,
    put_bytes: AtomicU64,
    gets: AtomicU64,
    gets_missing: AtomicU64,
    get_bytes: AtomicU64,
    /// Objects looked up.
    pub exists: AtomicU64,
    corrupt: AtomicU64,
}

impl Traffic {
    /// Adds to a counter.
    pub fn count(counter: &AtomicU64, by: usize) {
        counter.fetch_add(by as u64, Ordering::Relaxed);
    }

    /// Counts the result of a put.
    pub fn put(&self, result: &Result<Stored, StoreError>, bytes: usize) {
        match result {
            Ok(Stored::New) => {
                Self::count(&self.puts, 1);
                Self::count(&self.put_bytes, bytes);
            }
            Ok(Stored::AlreadyThere) => Self::count(&self.puts_already_there, 1),
            Err(StoreError::Full) => Self::count(&self.puts_full, 1),
            Err(_) => {}
        }
    }

    /// Counts the result of a get.
    pub fn get<T>(&self, result: &Result<T, StoreError>, bytes: usize) {
        match result {
            Ok(_) => {
                Self::count(&self.gets, 1);
                Self::count(&self.get_bytes, bytes);
            }
            Err(StoreError::Missing) => Self::count(&self.gets_missing, 1),
            Err(StoreError::Corrupt(_)) => Self::count(&self.corrupt, 1),
            Err(_) => {}
        }
    }

    /// Adds the counters to `stats`.
    pub fn fill(&self, stats: TierStats) -> TierStats {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        TierStats {
            puts: read(&self.puts),
            puts_already_there: read(&self.puts_already_there),
            puts_full: read(&self.puts_full),
            put_bytes: read(&self.put_bytes),
            gets: read(&self.gets),
            gets_missing: read(&self.gets_missing),
            get_bytes: read(&self.get_bytes),
            exists: read(&self.exists),
            corrupt: read(&self.corrupt),
            ..stats
        }
    }
}
