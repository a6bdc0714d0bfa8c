//! Puts and gets of a store in a Mooncake cluster, and the share of checksums in them.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use serde::Serialize;
use terrace_kit::median;
use terrace_l3::backend::payload_checksums;
use terrace_l3::{Arena, Get, GetOptions, ObjectId, Put, PutOptions, Removal, Store};
use terrace_l3_mooncake::{MooncakeConfig, MooncakeStore};

use crate::l3::{all, id};

type Failure = Box<dyn std::error::Error + Send + Sync>;

/// What to measure.
#[derive(Clone, Debug)]
pub struct MooncakeWorkload {
    /// The library of the installation.
    pub library: PathBuf,
    /// HOST:PORT of the master of a cluster in which there is room for two batches.
    pub master: String,
    /// The sizes of objects.
    pub object_bytes: Vec<usize>,
    /// Objects in a batch.
    pub batch: u32,
    /// Number of batches.
    pub rounds: u32,
}

/// Durations of batches of one object size: medians, in microseconds.
#[derive(Clone, Debug, Serialize)]
pub struct MooncakeFigures {
    /// Size of an object.
    pub object_bytes: usize,
    /// Objects per batch.
    pub batch: u32,
    /// Put of a batch.
    pub put_us: f64,
    /// Get of a batch.
    pub get_us: f64,
    /// Checksums of a batch, on one call outside the store.
    pub checksums_us: f64,
}

impl MooncakeWorkload {
    /// Measures.
    ///
    /// # Errors
    /// When the cluster is not reached or fails.
    pub fn run(&self) -> Result<Vec<MooncakeFigures>, Failure> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let measure = |bytes: &usize| runtime.block_on(self.measure(*bytes));
        self.object_bytes.iter().map(measure).collect()
    }

    async fn measure(&self, object_bytes: usize) -> Result<MooncakeFigures, Failure> {
        const PATIENCE: Duration = Duration::from_secs(10);
        let capacity = 4 * u64::from(self.batch) * object_bytes as u64;
        let config = MooncakeConfig {
            prefix: format!("terrace-bench-{}", std::process::id()),
            ..MooncakeConfig::new(&self.library, &self.master, capacity, object_bytes)
        };
        let store = MooncakeStore::open(config)?;
        store.connect_within(PATIENCE)?;
        let arena = Arena::with_headroom(self.batch, object_bytes)?;
        let _registration = store.register(&arena)?;
        for page in 0..self.batch {
            arena.target(page)?.iter_mut().zip(0u32..).for_each(|(byte, at)| {
                *byte = (at.wrapping_mul(2_654_435_761) >> 24) as u8 ^ page as u8;
            });
        }
        let mut rounds = Vec::new();
        for _ in 0..self.rounds {
            rounds.push(self.batch_of_store(&store, &arena).await?);
        }
        store.shutdown().await?;
        // The first rounds open connections.
        let rounds = &rounds[rounds.len() / 10..];
        let median_us = |time: fn(&Times) -> Duration| {
            median(rounds.iter().map(|round| time(round).as_secs_f64() * 1e6))
        };
        Ok(MooncakeFigures {
            object_bytes,
            batch: self.batch,
            put_us: median_us(|it| it.put),
            get_us: median_us(|it| it.get),
            checksums_us: median_us(|it| it.checksums),
        })
    }

    async fn batch_of_store(&self, store: &MooncakeStore, arena: &Arena) -> Result<Times, Failure> {
        let ids: Vec<ObjectId> = (0..self.batch).map(id).collect();
        let put = |(id, page): (&ObjectId, u32)| Ok(Put::new(*id, arena.source(page)?));
        let puts = ids.iter().zip(0..).map(put).collect::<Result<_, Failure>>()?;
        let began = Instant::now();
        all(store.put_from(puts, PutOptions::default()).await)?;
        let put = began.elapsed();
        let get = |(id, page): (&ObjectId, u32)| Ok(Get::new(*id, arena.target(page)?));
        let gets = ids.iter().zip(0..).map(get).collect::<Result<_, Failure>>()?;
        let began = Instant::now();
        all(store.get_into(gets, GetOptions::default()).await)?;
        let get = began.elapsed();
        all(store.remove(&ids, Removal::Forced).await)?;
        let pages = (0..self.batch).map(|page| arena.source(page));
        let pages = pages.collect::<Result<Vec<_>, _>>()?;
        let payloads: Vec<&[u8]> = pages.iter().map(|page| &**page).collect();
        let began = Instant::now();
        std::hint::black_box(payload_checksums(&payloads));
        Ok(Times { put, get, checksums: began.elapsed() })
    }
}

/// Durations for one batch.
#[derive(Clone, Copy, Debug)]
struct Times {
    put: Duration,
    get: Duration,
    checksums: Duration,
}
