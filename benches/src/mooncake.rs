//! A store in a Mooncake cluster, compared with direct calls of Mooncake's library.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use serde::Serialize;
use terrace_kit::median;
use terrace_l3::{Arena, Get, GetOptions, ObjectId, Put, PutOptions, Removal, Store};
use terrace_l3_mooncake::{MooncakeConfig, MooncakeStore, PlainCalls};

use crate::l3::{all, id};

type Failure = Box<dyn std::error::Error + Send + Sync>;

/// Parameters of the benchmark.
#[derive(Clone, Debug)]
pub struct MooncakeWorkload {
    /// Path of the library.
    pub library: PathBuf,
    /// HOST:PORT of the master of a cluster with room for two batches.
    pub master: String,
    /// Object sizes.
    pub object_bytes: Vec<usize>,
    /// Objects per batch.
    pub batch: u32,
    /// Batches of each kind, in turn.
    pub rounds: u32,
}

/// Median times of batches of one size, in microseconds.
#[derive(Clone, Debug, Serialize)]
pub struct MooncakeFigures {
    /// Size of an object.
    pub object_bytes: usize,
    /// Objects per batch.
    pub batch: u32,
    /// Put by the library.
    pub plain_put_us: f64,
    /// Put by the store.
    pub put_us: f64,
    /// Get by the library.
    pub plain_get_us: f64,
    /// Get by the store.
    pub get_us: f64,
    /// Overhead of the store's put.
    pub put_overhead: MooncakeOverhead,
    /// Overhead of the store's get.
    pub get_overhead: MooncakeOverhead,
}

/// Overhead in percent: medians over adjacent batches.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct MooncakeOverhead {
    /// Compared with the library's call.
    pub percent: f64,
    /// Compared with the library's call plus the checksums of the batch: the adapter's own
    /// overhead.
    pub besides_checksums_percent: f64,
    /// Overhead of the checksums alone: the lower bound of a store that verifies what it serves.
    pub checksums_percent: f64,
}

impl MooncakeWorkload {
    /// Runs the benchmark.
    ///
    /// # Errors
    /// Fails if the cluster cannot be reached or fails.
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
        let plain = PlainCalls::new(&store, self.batch)?;
        let checked = PlainCalls::new(&store, self.batch)?.with_checksums();
        let mut rounds = Vec::new();
        for round in 0..self.rounds {
            let mut times = Round::default();
            // Each kind comes first equally often.
            for turn in 0..3 {
                match (round + turn) % 3 {
                    0 => times.store = self.batch_of_store(&store, &arena).await?,
                    1 => times.plain = batch_of(&plain, &arena)?,
                    _ => times.checked = batch_of(&checked, &arena)?,
                }
            }
            rounds.push(times);
        }
        store.shutdown().await?;
        // The first rounds open connections.
        let rounds = &rounds[rounds.len() / 10..];
        let median_us = |time: fn(&Round) -> Duration| {
            median(rounds.iter().map(|round| time(round).as_secs_f64() * 1e6))
        };
        let overhead = |call: fn(&Times) -> Duration| {
            let percent = |slow: fn(&Round) -> &Times, fast: fn(&Round) -> &Times| {
                let seconds = |times: &Times| call(times).as_secs_f64();
                let ratios = rounds.iter().map(|it| seconds(slow(it)) / seconds(fast(it)));
                100.0 * (median(ratios) - 1.0)
            };
            MooncakeOverhead {
                percent: percent(|it| &it.store, |it| &it.plain),
                besides_checksums_percent: percent(|it| &it.store, |it| &it.checked),
                checksums_percent: percent(|it| &it.checked, |it| &it.plain),
            }
        };
        Ok(MooncakeFigures {
            object_bytes,
            batch: self.batch,
            plain_put_us: median_us(|it| it.plain.put),
            put_us: median_us(|it| it.store.put),
            plain_get_us: median_us(|it| it.plain.get),
            get_us: median_us(|it| it.store.get),
            put_overhead: overhead(|times| times.put),
            get_overhead: overhead(|times| times.get),
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
        Ok(Times { put, get })
    }
}

/// Times of one batch: put and get.
#[derive(Clone, Copy, Debug, Default)]
struct Times {
    put: Duration,
    get: Duration,
}

/// Times of adjacent batches.
#[derive(Clone, Copy, Debug, Default)]
struct Round {
    store: Times,
    /// Library calls alone.
    plain: Times,
    /// Library calls with checksums.
    checked: Times,
}

fn batch_of(calls: &PlainCalls, arena: &Arena) -> Result<Times, Failure> {
    let times = Times { put: calls.put(arena)?, get: calls.get(arena)? };
    calls.remove();
    Ok(times)
}
