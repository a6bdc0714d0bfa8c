//! Terrace's disk store, called as its engine calls it: pages of registered memory, in batches.

use super::{BATCH, DEPTH, Pages, Store};
use anyhow::{Context, Result};
use std::{
    path::Path,
    sync::Arc,
    sync::atomic::{AtomicUsize, Ordering},
};
use terrace_cache::PageKey;
use terrace_l3::{Arena, Get, GetOptions, ObjectId, Put, PutOptions, Registration, Store as _};
use terrace_l3_disk::{DiskConfig, DiskStore};
use tokio::{runtime::Runtime, task::JoinHandle};

const NAMESPACE: PageKey = PageKey(1);
/// Batches in flight while writing: one is filled while the other is written.
const BATCHES: usize = 2;

/// A store, and registered memory.
pub struct Terrace {
    runtime: Runtime,
    store: Arc<DiskStore>,
    arena: Arena,
    /// Keeps the arena registered.
    _registration: Registration,
    durable: bool,
}

impl Terrace {
    /// Opens a store with as many slots as there are objects; nothing is evicted.
    pub fn open(dir: &Path, pages: &Pages, durable: bool) -> Result<Self> {
        let slot_bytes = pages.object_bytes + 4096;
        let capacity_bytes = (pages.keys.len() * slot_bytes) as u64;
        let store = Arc::new(DiskStore::open(DiskConfig {
            grow_bytes: capacity_bytes,
            watermark_high: 1.0,
            watermark_low: 1.0,
            ..DiskConfig::new(dir, capacity_bytes, pages.object_bytes)
        })?);
        let arena = Arena::new((BATCHES * BATCH) as u32, pages.object_bytes)?;
        for page in 0..arena.pages() {
            arena.target(page)?.copy_from_slice(&pages.body);
        }
        let _registration = store.register(&arena)?;
        Ok(Self { runtime: Runtime::new()?, store, arena, _registration, durable })
    }
}

impl Store for Terrace {
    fn put(&self, pages: &Pages) -> Result<()> {
        let options = PutOptions { durable: self.durable, ..PutOptions::default() };
        self.runtime.block_on(async {
            let mut waiting: [Option<JoinHandle<Result<()>>>; BATCHES] = Default::default();
            for (number, batch) in pages.keys.chunks(BATCH).enumerate() {
                let lane = number % BATCHES;
                if let Some(before) = waiting[lane].take() {
                    before.await??;
                }
                let mut puts = Vec::with_capacity(batch.len());
                for (page, &key) in (lane * BATCH..).zip(batch) {
                    pages.stamp(key, &mut self.arena.target(page as u32)?);
                    puts.push(Put::new(id(key), self.arena.source(page as u32)?));
                }
                let store = self.store.clone();
                waiting[lane] = Some(tokio::spawn(async move {
                    for result in store.put_from(puts, options).await {
                        result?;
                    }
                    Ok(())
                }));
            }
            for last in waiting.into_iter().flatten() {
                last.await??;
            }
            Ok(self.store.flush().await?)
        })
    }

    fn count(&self, pages: &Arc<Pages>, order: Vec<usize>) -> Result<usize> {
        let (order, next) = (Arc::new(order), Arc::new(AtomicUsize::new(0)));
        let readers: Vec<_> = (0..DEPTH as u32)
            .map(|page| {
                let (pages, order, next) = (pages.clone(), order.clone(), next.clone());
                let (store, arena) = (self.store.clone(), self.arena.clone());
                self.runtime.spawn(async move {
                    let mut found = 0;
                    while let Some(&i) = order.get(next.fetch_add(1, Ordering::Relaxed)) {
                        let key = pages.keys[i];
                        let gets = vec![Get::new(id(key), arena.target(page)?)];
                        let got = store.get_into(gets, GetOptions::default()).await;
                        let read = got.into_iter().next().context("one result for one get")?;
                        let whole = read.is_ok() && pages.is_object(key, &arena.source(page)?);
                        found += usize::from(whole);
                    }
                    anyhow::Ok(found)
                })
            })
            .collect();
        readers.into_iter().map(|reader| self.runtime.block_on(reader)?).sum()
    }

    fn close(self: Box<Self>) -> Result<()> {
        Ok(self.runtime.block_on(self.store.shutdown())?)
    }
}

fn id(key: u128) -> ObjectId {
    ObjectId::page(NAMESPACE, PageKey(key))
}
