//! Recovery of a restarted producer's samples from the store.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::error::FeatureError;
use super::keys::{CELLS, first_cell};
use super::ledger::{Cell, GenerationEntry, GenerationStage, Own};
use super::notes::NoteError;
use super::record::Record;
use super::{FeatureCore, generation};
use terrace_l3::{ObjectId, Pin};

impl FeatureCore {
    /// Finds this producer's samples by its records. Samples without a claim were never complete,
    /// and those that a later claim supersedes are over: both are freed. All others keep their
    /// budget and their age.
    pub(super) async fn recover(self: &Arc<Self>, owner: u16) -> Result<(), FeatureError> {
        let whose = format!("producer {owner} of {}", self.keys.store());
        let failed = |error| self.note_failed("a note of", &whose, error);
        let ids = (0..self.config.samples_max).map(|slot| self.keys.record(owner, slot));
        let ids: Vec<ObjectId> = ids.collect();
        let slots: BTreeMap<ObjectId, u32> = ids.iter().copied().zip(0..).collect();
        let mut records = self.notes.find_sound(&ids).await.map_err(failed)?;
        records.sort_by_key(|(id, _)| slots[id]);
        let claims = self.own_claims(owner, &records).await.map_err(failed)?;
        let mut latest: BTreeMap<&str, u64> = BTreeMap::new();
        for (generation, (_, record)) in &claims {
            let latest = latest.entry(&record.sample).or_default();
            *latest = (*latest).max(*generation);
        }
        let mut pinned = Vec::new();
        for (id, record) in &records {
            let claim = claims.get(&record.generation).map(|(claim, _)| *claim);
            let cell_of = |claim| {
                let number =
                    (0..CELLS).find(|cell| self.keys.claim(&record.sample, *cell) == claim)?;
                Some(Cell { number, is_ours: true })
            };
            let own = Own {
                slot: slots[id],
                created_ms: record.created_ms,
                cell: claim.and_then(cell_of),
                seen: None,
            };
            let is_latest = latest.get(&*record.sample) == Some(&record.generation);
            let entry = GenerationEntry {
                stage: if is_latest { GenerationStage::Live } else { leaving_now() },
                // A generation that was never claimed has no refs.
                dead: claim.is_none(),
                bytes: self.footprint(record.sizes()),
                own: Some(own),
                ..self.entry_of(record)
            };
            if is_latest {
                pinned.extend(entry.tensors.iter().copied().chain([*id]).chain(claim));
            }
            self.ledger.lock().restore(record.generation, entry);
        }
        let last = records.iter().map(|(_, record)| record.generation).max().unwrap_or(0);
        generation::found(last);
        self.ledger.lock().stats.restored = records.len() as u64;
        // Not every store has kept the pins, and those that have expire them unless their owner
        // returns.
        drop(self.store.pin(&pinned, Pin::Hard(self.pins)).await);
        // Samples that ended meanwhile are found now, and again by every gc.
        self.gc(Duration::ZERO).await.map(drop)
    }

    /// Claims of this producer that match its records, by generation. Nearly all are in their first
    /// cell; only for the others all cells of their samples are read.
    async fn own_claims(
        &self,
        owner: u16,
        records: &[(ObjectId, Record)],
    ) -> Result<BTreeMap<u64, (ObjectId, Record)>, NoteError> {
        let first = |(_, record): &(ObjectId, Record)| {
            self.keys.claim(&record.sample, first_cell(record.generation))
        };
        let first: BTreeSet<ObjectId> = records.iter().map(first).collect();
        let mut claims = BTreeMap::new();
        let mut look = Vec::from_iter(first);
        for is_last in [false, true] {
            let found = self.notes.find_sound(&look).await?.into_iter();
            let own = found.filter(|(_, record)| record.owner == owner);
            claims.extend(own.map(|(id, record)| (record.generation, (id, record))));
            if is_last {
                break;
            }
            let lost = records.iter().filter(|(_, it)| !claims.contains_key(&it.generation));
            let lost: BTreeSet<&str> = lost.map(|(_, record)| &*record.sample).collect();
            look = lost.into_iter().flat_map(|sample| self.keys.claims(sample)).collect();
        }
        Ok(claims)
    }
}

fn leaving_now() -> GenerationStage {
    GenerationStage::Leaving { failures: 0, due: Instant::now(), in_hand: false }
}
