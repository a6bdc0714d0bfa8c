//! Small objects that a feature store keeps beside tensors, and the pages for transferring them.

use std::sync::Arc;
use std::time::Duration;

use super::config::Secret;
use super::record::{RECORD_BYTES, Record, Unsound};
use terrace_l3::backend::{PagePool, PooledPage, one_each};
use terrace_l3::{
    Arena, ExistsOptions, Get, GetOptions, Lent, Mismatch, ObjectId, Owner, Pin, Presence, Put,
    PutOptions, Registration, Removal, Results, Store, StoreError, Stored,
};

/// Maximum number of notes in transfer.
const PAGES: u32 = 64;

/// Maximum number of notes read in one call.
const BATCH: usize = 16;

/// Maximum number of objects looked up in one call.
pub(super) const ASK_BATCH: usize = 256;

/// Writes and reads notes.
#[derive(Debug)]
pub(super) struct Notes {
    store: Arc<dyn Store>,
    /// Owner of the pins that keep the notes.
    owner: Owner,
    secret: Option<Secret>,
    pages: PagePool,
    _registration: Registration,
}

/// Reason why notes could not be read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum NoteError {
    /// A note was not written with the secret.
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

    /// Sets the owner of the pins of further notes.
    pub(super) fn pin_for(&mut self, owner: Owner) {
        self.owner = owner;
    }

    /// Writes a note that cannot be evicted. A note that an earlier run of this process left under
    /// the name is replaced.
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

    /// Writes a note in a place shared with other producers, unless it is taken.
    pub(super) async fn write_if_free(
        &self,
        id: ObjectId,
        record: &Record,
        durable: bool,
    ) -> Result<Stored, StoreError> {
        let page = self.filled(&id, record).await?;
        match self.put(id, &page, durable).await {
            Ok(Stored::AlreadyThere) => {
                // The existing note has received our pin; undo that.
                drop(self.store.unpin(&[id], Pin::Hard(self.owner)).await);
                Ok(Stored::AlreadyThere)
            }
            Err(StoreError::Pinned) => Ok(Stored::AlreadyThere),
            written => written,
        }
    }

    /// A page with an encoded note.
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

    /// Removes objects, regardless of pins.
    pub(super) async fn remove(&self, ids: &[ObjectId]) -> Results<()> {
        let mut results = Vec::with_capacity(ids.len());
        for ids in ids.chunks(ASK_BATCH) {
            let removed = self.store.remove(ids, Removal::Final).await;
            results.extend(one_each(removed, ids.len()));
        }
        results
    }

    /// Reads records. Anything else counts as damaged.
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

    /// Takes free pages.
    async fn pages(&self, count: usize) -> Result<Vec<PooledPage>, StoreError> {
        const PATIENCE: Duration = Duration::from_secs(10);
        let pages = tokio::time::timeout(PATIENCE, self.pages.take(count)).await;
        pages.map_err(|_| StoreError::TimedOut(PATIENCE))
    }

    /// Looks up objects, where their state can be determined.
    pub(super) async fn are_there(&self, ids: &[ObjectId]) -> Results<bool> {
        let mut found = Vec::with_capacity(ids.len());
        for ids in ids.chunks(ASK_BATCH) {
            let results = self.store.exists(ids, ExistsOptions::default()).await;
            let results = one_each(results, ids.len()).into_iter();
            found.extend(results.map(|result| result.map(Presence::is_present)));
        }
        found
    }

    /// Checks whether a note exists whose existence is its content. With a secret it must be
    /// authentic, too.
    pub(super) async fn is_there(&self, id: ObjectId) -> Result<bool, NoteError> {
        let is_there = self.are_there(&[id]).await.remove(0)?;
        if is_there { self.is_authentic(id).await } else { Ok(false) }
    }

    /// Checks that a note that was present still is, and is authentic.
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

    /// Existing records among `ids`, each with its id. Fails if any of them cannot be looked up or
    /// read.
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
                // Removed meanwhile.
                Err(NoteError::Store(StoreError::Missing)) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(found)
    }

    /// Like [`Notes::find`], without damaged records: a store removes them, so they cannot be read
    /// at the next attempt either.
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

/// A page that should be free is lent.
fn lent(_: Lent) -> StoreError {
    StoreError::BeingWritten
}
