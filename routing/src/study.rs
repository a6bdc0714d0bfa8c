//! Analysis of workers' events: cache sizes, duplicates, and the potential of prefix routing.

use std::collections::{BTreeMap, BTreeSet};

use serde::Serialize;

use crate::follow::Heard;
use crate::index::WorkerIndex;
use crate::wire::{Batch, Event, Medium, decode};

/// Follows the events of several workers.
#[derive(Debug)]
pub struct Study {
    workers: BTreeMap<String, Studied>,
    blocks_max: usize,
    first_at: Option<f64>,
    last_at: f64,
}

#[derive(Debug)]
struct Studied {
    index: WorkerIndex,
    batches: u64,
    unreadable: u64,
    gaps: u64,
    forgotten: u64,
    next: Option<u64>,
    blocks_peak: usize,
    computed_blocks: u64,
    held_elsewhere_blocks: u64,
}

/// Results of a [`Study`].
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct StudyReport {
    /// Time between the first and the last batch, by the workers' clocks.
    pub seconds: f64,
    /// Results of each worker.
    pub workers: Vec<WorkerReport>,
    /// Distinct blocks at the end.
    pub distinct_blocks: u64,
    /// Blocks at the end, counted once for each worker that has them.
    pub held_blocks: u64,
    /// Tokens computed by workers.
    pub computed_tokens: u64,
    /// Those of them whose KV another worker had at that time: prefix routing could have avoided
    /// the computation.
    pub held_elsewhere_tokens: u64,
}

/// Results of one worker.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct WorkerReport {
    /// Name.
    pub name: String,
    /// Batches.
    pub batches: u64,
    /// Batches that cannot be decoded.
    pub unreadable: u64,
    /// Gaps in the numbers.
    pub gaps: u64,
    /// Number of times that the state was dropped.
    pub forgotten: u64,
    /// Tokens in a block.
    pub block_size: u32,
    /// Blocks stored, in any medium.
    pub stored_blocks: u64,
    /// Blocks removed.
    pub removed_blocks: u64,
    /// Blocks with an unknown predecessor.
    pub orphan_blocks: u64,
    /// Blocks that were new on the device and on none of the worker's media before.
    pub computed_blocks: u64,
    /// Those of them that another worker had.
    pub held_elsewhere_blocks: u64,
    /// Largest number of blocks.
    pub blocks_peak: u64,
    /// Blocks on its device at the end.
    pub device_blocks: u64,
    /// Blocks in its host memory at the end.
    pub host_blocks: u64,
    /// Blocks on its disk at the end.
    pub disk_blocks: u64,
}

impl Study {
    /// Creates an analysis with at most `blocks_max` blocks per worker.
    #[must_use]
    pub fn new(blocks_max: usize) -> Self {
        Self { workers: BTreeMap::new(), blocks_max, first_at: None, last_at: 0.0 }
    }

    /// Adds an item of a worker's stream.
    pub fn hear(&mut self, worker: &str, heard: &Heard) {
        if !self.workers.contains_key(worker) {
            self.workers.insert(worker.to_owned(), Studied::new(self.blocks_max));
        }
        let Heard::Batch { seq, payload } = heard else {
            let studied = self.workers.get_mut(worker).expect("it is there");
            studied.forgotten += 1;
            studied.index.forget();
            return;
        };
        let batch = decode(payload);
        if let Ok(batch) = &batch {
            self.first_at.get_or_insert(batch.at);
            self.last_at = self.last_at.max(batch.at);
        }
        let mut studied = self.workers.remove(worker).expect("it is there");
        studied.count(*seq);
        match batch {
            Ok(batch) => {
                let held_elsewhere =
                    |chain| self.workers.values().any(|other| other.index.holds(chain));
                studied.take_in(&batch, held_elsewhere);
            }
            Err(_) => studied.unreadable += 1,
        }
        self.workers.insert(worker.to_owned(), studied);
    }

    /// Returns the results so far.
    #[must_use]
    pub fn report(&self) -> StudyReport {
        let distinct: BTreeSet<u64> =
            self.workers.values().flat_map(|studied| studied.index.chains()).collect();
        let tokens = |blocks: fn(&Studied) -> u64| {
            let of = |studied: &Studied| blocks(studied) * u64::from(studied.index.block_size());
            self.workers.values().map(of).sum()
        };
        StudyReport {
            seconds: self.first_at.map_or(0.0, |first| self.last_at - first),
            workers: self.workers.iter().map(|(name, studied)| studied.report(name)).collect(),
            distinct_blocks: distinct.len() as u64,
            held_blocks: self.workers.values().map(|studied| studied.index.len() as u64).sum(),
            computed_tokens: tokens(|studied| studied.computed_blocks),
            held_elsewhere_tokens: tokens(|studied| studied.held_elsewhere_blocks),
        }
    }
}

impl Studied {
    fn new(blocks_max: usize) -> Self {
        Self {
            index: WorkerIndex::new(blocks_max),
            batches: 0,
            unreadable: 0,
            gaps: 0,
            forgotten: 0,
            next: None,
            blocks_peak: 0,
            computed_blocks: 0,
            held_elsewhere_blocks: 0,
        }
    }

    fn count(&mut self, seq: u64) {
        self.batches += 1;
        self.gaps += u64::from(self.next.is_some_and(|next| next != seq));
        self.next = Some(seq + 1);
    }

    fn take_in(&mut self, batch: &Batch, held_elsewhere: impl Fn(u64) -> bool) {
        // A snapshot lists blocks that were not computed just now.
        let is_whole =
            matches!(batch.events.first(), Some(Event::Cleared)) && batch.events.len() > 1;
        let (mut computed, mut elsewhere) = (0, 0);
        self.index.apply(batch, |chain| {
            computed += 1;
            elsewhere += u64::from(held_elsewhere(chain));
        });
        if !is_whole {
            self.computed_blocks += computed;
            self.held_elsewhere_blocks += elsewhere;
        }
        self.blocks_peak = self.blocks_peak.max(self.index.len());
    }

    fn report(&self, name: &str) -> WorkerReport {
        let stats = self.index.stats();
        let held = |medium| self.index.len_in(medium) as u64;
        WorkerReport {
            name: name.to_owned(),
            batches: self.batches,
            unreadable: self.unreadable,
            gaps: self.gaps,
            forgotten: self.forgotten,
            block_size: self.index.block_size(),
            stored_blocks: stats.stored,
            removed_blocks: stats.removed,
            orphan_blocks: stats.orphans,
            computed_blocks: self.computed_blocks,
            held_elsewhere_blocks: self.held_elsewhere_blocks,
            blocks_peak: self.blocks_peak as u64,
            device_blocks: held(Medium::Device),
            host_blocks: held(Medium::Host),
            disk_blocks: held(Medium::Disk),
        }
    }
}
