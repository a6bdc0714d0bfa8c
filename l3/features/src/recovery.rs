//! What a producer finds in the store when it is started again.

use std::collections::BTreeMap;
use std::sync::Arc;

use tokio::time::Instant;

use super::Shared;
use super::error::FeatureError;
use super::keys::CELLS;
use super::ledger::{Entry, Own, Stage};
use super::record::Record;
use terrace_l3::{ObjectId, Pin};

impl Shared {
    /// Finds this producer's samples by its records. Those without a claim were never complete, and those
    /// that a later claim supersedes are over: both are freed. All others have their budget and their
    /// time as before.
    pub(super) async fn recover(self: &Arc<Self>, owner: u16) -> Result<(), FeatureError> {
        let failed = |error| self.failed(error);
        let ids = (0..self.config.samples_max).map(|slot| self.keys.record(owner, slot));
        let ids: Vec<ObjectId> = ids.collect();
        let slots: BTreeMap<ObjectId, u32> = ids.iter().copied().zip(0..).collect();
        let mut records = self.notes.find_sound(&ids).await.map_err(failed)?;
        records.sort_by_key(|(id, _)| slots[id]);
        let cells = |(_, record): &(ObjectId, Record)| {
            let sample = record.sample.clone();
            (0..CELLS).map(move |cell| self.keys.claim(&sample, owner, cell))
        };
        let claims: Vec<ObjectId> = records.iter().flat_map(cells).collect();
        let claims = self.notes.find_sound(&claims).await.map_err(failed)?;
        let claims: BTreeMap<u64, (ObjectId, Record)> =
            claims.into_iter().map(|claim| (claim.1.generation, claim)).collect();
        let mut latest: BTreeMap<&str, u64> = BTreeMap::new();
        for (generation, (_, record)) in &claims {
            let latest = latest.entry(&record.sample).or_default();
            *latest = (*latest).max(*generation);
        }
        let mut pinned = Vec::new();
        for (id, record) in &records {
            let claim = claims.get(&record.generation).map(|(claim, _)| *claim);
            let cell_of = |claim| {
                (0..CELLS).find(|cell| self.keys.claim(&record.sample, owner, *cell) == claim)
            };
            let own = Own {
                slot: slots[id],
                created_ms: record.created_ms,
                cell: claim.and_then(cell_of),
            };
            let is_latest = latest.get(&*record.sample) == Some(&record.generation);
            let entry = Entry {
                stage: if is_latest { Stage::Live } else { leaving_now() },
                // A generation that was never claimed has no refs.
                dead: claim.is_none(),
                bytes: record.bytes(),
                own: Some(own),
                ..self.entry_of(record)
            };
            if is_latest {
                pinned.extend(entry.tensors.iter().copied().chain([*id]).chain(claim));
            }
            self.ledger.lock().restore(record.generation, entry);
        }
        let last = records.iter().map(|(_, record)| record.generation).max().unwrap_or(0);
        *self.last_generation.lock() = last;
        self.ledger.lock().stats.restored = records.len() as u64;
        // Not every store has kept them, and those that have wait to hear of their owner.
        drop(self.store.pin(&pinned, Pin::Hard(self.pins)).await);
        // What has ended meanwhile is noticed right away, and again by every gc.
        self.gc().await.map(drop)
    }
}

fn leaving_now() -> Stage {
    Stage::Leaving { failures: 0, due: Instant::now(), in_hand: false }
}
