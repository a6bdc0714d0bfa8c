//! Small objects that a feature store keeps beside tensors, and the memory that they come and go through.

use std::sync::Arc;
use std::time::Duration;

use super::config::Secret;
use super::record::{RECORD_BYTES, Record, Unsound};
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
    secret: Option<Secret>,
    pages: PagePool,
    _registration: Registration,
}

/// Why notes could not be read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum NoteError {
    /// One was not written by somebody who knows the secret.
    Forged,
    /// The store failed.
    Store(StoreError),
}

impl From<StoreError> for NoteError {
    fn from(error: StoreError) -> Self {
        Self::Store(error)
    }
}

impl Notes {
    pub(super) fn new(
        store: Arc<dyn Store>,
        owner: Owner,
        secret: Option<Secret>,
    ) -> Result<Self, StoreError> {
        let arena = Arena::with_headroom(PAGES, RECORD_BYTES)
            .map_err(|error| StoreError::io("allocating memory for notes", &error))?;
        let registration = store.register(&arena)?;
        let pages = PagePool::new(arena);
        Ok(Self { store, owner, secret, pages, _registration: registration })
    }

    /// From now on notes have the pins of this owner.
    pub(super) fn pin_for(&mut self, owner: Owner) {
        self.owner = owner;
    }

    /// Writes a note that nothing evicts. What was left under the name by a former life of this process is
    /// in the way once.
    pub(super) async fn write(
        &self,
        id: ObjectId,
        record: &Record,
        durable: bool,
    ) -> Result<(), StoreError> {
        const TRIES: usize = 3;
        let page = self.filled(&id, record).await?;
        for _ in 0..TRIES {
            match self.put(id, &page, durable).await {
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

    /// Writes a note where others write too, unless one of theirs is there.
    pub(super) async fn write_if_free(
        &self,
        id: ObjectId,
        record: &Record,
        durable: bool,
    ) -> Result<Stored, StoreError> {
        let page = self.filled(&id, record).await?;
        match self.put(id, &page, durable).await {
            Ok(Stored::AlreadyThere) => {
                // It has got a pin of ours, which is not ours to give.
                drop(self.store.unpin(&[id], Pin::Hard(self.owner)).await);
                Ok(Stored::AlreadyThere)
            }
            Err(StoreError::Pinned) => Ok(Stored::AlreadyThere),
            written => written,
        }
    }

    /// A page with a note on it.
    async fn filled(&self, id: &ObjectId, record: &Record) -> Result<PooledPage, StoreError> {
        let page = self.pages(1).await?.remove(0);
        let mut bytes = page.target(RECORD_BYTES).map_err(lent)?;
        record.encode(id, self.secret.as_ref(), &mut bytes);
        drop(bytes);
        Ok(page)
    }

    async fn put(
        &self,
        id: ObjectId,
        page: &PooledPage,
        durable: bool,
    ) -> Result<Stored, StoreError> {
        let put = Put::new(id, page.source(RECORD_BYTES).map_err(lent)?);
        let options = PutOptions { pin: Some(Pin::Hard(self.owner)), durable };
        one_each(self.store.put_from(vec![put], options).await, 1).remove(0)
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
    pub(super) async fn read(&self, ids: &[ObjectId]) -> Vec<Result<Record, NoteError>> {
        let mut records = Vec::with_capacity(ids.len());
        for ids in ids.chunks(BATCH) {
            match self.read_batch(ids).await {
                Ok(batch) => records.extend(batch),
                Err(error) => records.extend(vec![Err(error.into()); ids.len()]),
            }
        }
        records
    }

    async fn read_batch(
        &self,
        ids: &[ObjectId],
    ) -> Result<Vec<Result<Record, NoteError>>, StoreError> {
        let pages = self.pages(ids.len()).await?;
        let get = |(id, page): (&ObjectId, &PooledPage)| {
            Ok(Get::new(*id, page.target(RECORD_BYTES).map_err(lent)?))
        };
        let gets = ids.iter().zip(&pages).map(get).collect::<Result<Vec<_>, StoreError>>()?;
        let results = one_each(self.store.get_into(gets, GetOptions::default()).await, ids.len());
        let verify = |((result, page), id): ((Result<_, StoreError>, &PooledPage), &ObjectId)| {
            result?;
            let bytes = page.source(RECORD_BYTES).map_err(lent)?;
            Record::verify(id, self.secret.as_ref(), &bytes).map_err(|unsound| match unsound {
                Unsound::Forged => NoteError::Forged,
                Unsound::Other => StoreError::Corrupt(Mismatch::Version).into(),
            })
        };
        Ok(results.into_iter().zip(&pages).zip(ids).map(verify).collect())
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

    /// Whether a note is there whose being there says it all. With a secret it must be authentic, too.
    pub(super) async fn is_there(&self, id: ObjectId) -> Result<bool, NoteError> {
        let is_there = self.are_there(&[id]).await.remove(0)?;
        if is_there { self.is_authentic(id).await } else { Ok(false) }
    }

    /// Whether a note that was there a moment ago is there still, and authentic.
    pub(super) async fn is_authentic(&self, id: ObjectId) -> Result<bool, NoteError> {
        if self.secret.is_none() {
            return Ok(true);
        }
        match self.read(&[id]).await.remove(0) {
            Ok(_) => Ok(true),
            Err(NoteError::Store(StoreError::Missing)) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// The records among `ids` that are there, each with its id. One that cannot be asked for or read says
    /// nothing, so the whole answer fails.
    pub(super) async fn find(
        &self,
        ids: &[ObjectId],
    ) -> Result<Vec<(ObjectId, Record)>, NoteError> {
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
                Err(NoteError::Store(StoreError::Missing)) => {}
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
    ) -> Result<Vec<(ObjectId, Record)>, NoteError> {
        const TRIES: usize = 3;
        for _ in 1..TRIES {
            match self.find(ids).await {
                Err(NoteError::Store(StoreError::Corrupt(_) | StoreError::Length { .. })) => {}
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
