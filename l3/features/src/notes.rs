//! Small objects that a feature store keeps beside tensors, and the memory that they come and go through.

use std::sync::Arc;
use std::time::Duration;

use super::record::{RECORD_BYTES, Record};
use terrace_l3::backend::{PagePool, PooledPage, one_each};
use terrace_l3::{
    Arena, ExistsOptions, Get, GetOptions, Lent, Mismatch, ObjectId, Owner, Pin, Presence, Put,
    PutOptions, Registration, Removal, Results, Store, StoreError, Stored,
};

/// How many notes are on their way at a time.
const PAGES: u32 = 64;

/// How many are read in one call.
const BATCH: usize = 16;

/// How many objects are asked about in one call.
pub(super) const ASK_BATCH: usize = 256;

/// Writes and reads notes.
#[derive(Debug)]
pub(super) struct Notes {
    store: Arc<dyn Store>,
    /// Whose pins keep them.
    owner: Owner,
    pages: PagePool,
    _registration: Registration,
}

impl Notes {
    pub(super) fn new(store: Arc<dyn Store>, owner: Owner) -> Result<Self, StoreError> {
        let arena = Arena::with_headroom(PAGES, RECORD_BYTES)
            .map_err(|error| StoreError::io("allocating memory for notes", &error))?;
        let registration = store.register(&arena)?;
        Ok(Self { store, owner, pages: PagePool::new(arena), _registration: registration })
    }

    /// Writes a record that nothing evicts.
    pub(super) async fn write(
        &self,
        id: ObjectId,
        record: &Record,
        durable: bool,
    ) -> Result<(), StoreError> {
        self.write_with(id, durable, |bytes| record.encode(bytes)).await
    }

    /// Writes a note whose being there says it all.
    pub(super) async fn mark(&self, id: ObjectId, durable: bool) -> Result<(), StoreError> {
        self.write_with(id, durable, |bytes| bytes.fill(0)).await
    }

    async fn write_with(
        &self,
        id: ObjectId,
        durable: bool,
        fill: impl Fn(&mut [u8]),
    ) -> Result<(), StoreError> {
        /// What was left under the name by a former life of this process is in the way once.
        const TRIES: usize = 3;
        let page = self.pages(1).await?.remove(0);
        fill(&mut page.target(RECORD_BYTES).map_err(lent)?);
        for _ in 0..TRIES {
            let put = Put::new(id, page.source(RECORD_BYTES).map_err(lent)?);
            let options = PutOptions { pin: Some(Pin::Hard(self.owner)), durable };
            match one_each(self.store.put_from(vec![put], options).await, 1).remove(0) {
                Ok(Stored::New) => return Ok(()),
                Ok(Stored::AlreadyThere) | Err(StoreError::Pinned) => {}
                Err(error) => return Err(error),
            }
            match self.remove(&[id]).await.remove(0) {
                Ok(()) | Err(StoreError::Missing) => {}
                Err(error) => return Err(error),
            }
        }
        Err(StoreError::BeingWritten)
    }

    /// Removes objects, whoever has pinned them.
    pub(super) async fn remove(&self, ids: &[ObjectId]) -> Results<()> {
        let mut results = Vec::with_capacity(ids.len());
        for ids in ids.chunks(ASK_BATCH) {
            let removed = self.store.remove(ids, Removal::Final).await;
            results.extend(one_each(removed, ids.len()));
        }
        results
    }

    /// Reads records. What is none is damaged.
    pub(super) async fn read(&self, ids: &[ObjectId]) -> Results<Record> {
        let mut records = Vec::with_capacity(ids.len());
        for ids in ids.chunks(BATCH) {
            match self.read_batch(ids).await {
                Ok(batch) => records.extend(batch),
                Err(error) => records.extend(vec![Err(error); ids.len()]),
            }
        }
        records
    }

    async fn read_batch(&self, ids: &[ObjectId]) -> Result<Results<Record>, StoreError> {
        let pages = self.pages(ids.len()).await?;
        let get = |(id, page): (&ObjectId, &PooledPage)| {
            Ok(Get::new(*id, page.target(RECORD_BYTES).map_err(lent)?))
        };
        let gets = ids.iter().zip(&pages).map(get).collect::<Result<Vec<_>, StoreError>>()?;
        let results = one_each(self.store.get_into(gets, GetOptions::default()).await, ids.len());
        let decode = |(result, page): (Result<_, StoreError>, &PooledPage)| {
            result?;
            let record = Record::decode(&page.source(RECORD_BYTES).map_err(lent)?);
            record.ok_or(StoreError::Corrupt(Mismatch::Version))
        };
        Ok(results.into_iter().zip(&pages).map(decode).collect())
    }

    /// Pages that nobody uses.
    async fn pages(&self, count: usize) -> Result<Vec<PooledPage>, StoreError> {
        const PATIENCE: Duration = Duration::from_secs(10);
        let pages = tokio::time::timeout(PATIENCE, self.pages.take(count)).await;
        pages.map_err(|_| StoreError::TimedOut(PATIENCE))
    }

    /// Which objects are there, as far as it can be told.
    pub(super) async fn are_there(&self, ids: &[ObjectId]) -> Results<bool> {
        let mut found = Vec::with_capacity(ids.len());
        for ids in ids.chunks(ASK_BATCH) {
            let results = self.store.exists(ids, ExistsOptions::default()).await;
            let results = one_each(results, ids.len()).into_iter();
            found.extend(results.map(|result| result.map(Presence::is_present)));
        }
        found
    }

    /// Whether one object is there.
    pub(super) async fn is_there(&self, id: ObjectId) -> Result<bool, StoreError> {
        self.are_there(&[id]).await.remove(0)
    }

    /// The records among `ids` that are there, each with its id. One that cannot be asked for or read says
    /// nothing, so the whole answer fails.
    pub(super) async fn find(
        &self,
        ids: &[ObjectId],
    ) -> Result<Vec<(ObjectId, Record)>, StoreError> {
        let mut there = Vec::new();
        for (id, is_there) in ids.iter().zip(self.are_there(ids).await) {
            if is_there? {
                there.push(*id);
            }
        }
        let mut found = Vec::new();
        for (id, result) in there.iter().zip(self.read(&there).await) {
            match result {
                Ok(record) => found.push((*id, record)),
                // Removed since.
                Err(StoreError::Missing) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(found)
    }

    /// As [`Notes::find`], but what is damaged is left out: a store removes it, so that it cannot be read
    /// at the next try either.
    pub(super) async fn find_sound(
        &self,
        ids: &[ObjectId],
    ) -> Result<Vec<(ObjectId, Record)>, StoreError> {
        const TRIES: usize = 3;
        for _ in 1..TRIES {
            match self.find(ids).await {
                Err(StoreError::Corrupt(_) | StoreError::Length { .. }) => {}
                answer => return answer,
            }
        }
        self.find(ids).await
    }
}

/// A page that is not where it should be.
fn lent(_: Lent) -> StoreError {
    StoreError::BeingWritten
}
