//! A bucket in memory that counts its requests, and answers when a test wants it to.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use async_trait::async_trait;
use futures_util::stream::BoxStream;
use futures_util::{StreamExt, stream};
use terrace_l3_buckets::object_store::memory::InMemory;
use terrace_l3_buckets::object_store::path::Path;
use terrace_l3_buckets::object_store::{
    CopyOptions, GetOptions, GetResult, ListResult, MultipartUpload, ObjectMeta, ObjectStore,
    PutMultipartOptions, PutOptions, PutPayload, PutResult, Result,
};
use tokio::sync::watch;

/// Number of requests of each kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Requests {
    /// Lookups of objects.
    pub heads: u64,
    /// Objects, or parts of them.
    pub gets: u64,
    /// Objects written.
    pub puts: u64,
    /// Requests to delete any number of objects.
    pub deletes: u64,
    /// Lists of what is there.
    pub lists: u64,
}

impl Requests {
    /// Requests since `before`.
    #[must_use]
    pub fn since(self, before: Self) -> Self {
        Self {
            heads: self.heads - before.heads,
            gets: self.gets - before.gets,
            puts: self.puts - before.puts,
            deletes: self.deletes - before.deletes,
            lists: self.lists - before.lists,
        }
    }
}

/// A kind of request that can be held back.
#[derive(Debug)]
struct Gate(watch::Sender<bool>);

impl Default for Gate {
    fn default() -> Self {
        Self(watch::Sender::new(true))
    }
}

impl Gate {
    async fn pass(&self) {
        let mut is_open = self.0.subscribe();
        let _ = is_open.wait_for(|is_open| *is_open).await;
    }
}

/// The bucket. Clones are the same.
#[derive(Clone, Debug, Default)]
pub struct WatchedBucket(Arc<Watched>);

#[derive(Debug, Default)]
struct Watched {
    objects: InMemory,
    heads: AtomicU64,
    gets: AtomicU64,
    puts: AtomicU64,
    deletes: AtomicU64,
    lists: AtomicU64,
    puts_pass: Gate,
    deletes_pass: Gate,
}

impl WatchedBucket {
    /// Requests so far.
    #[must_use]
    pub fn requests(&self) -> Requests {
        let count = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        Requests {
            heads: count(&self.0.heads),
            gets: count(&self.0.gets),
            puts: count(&self.0.puts),
            deletes: count(&self.0.deletes),
            lists: count(&self.0.lists),
        }
    }

    /// Holds objects back that are written from now on, or lets them through.
    pub fn hold_puts(&self, hold: bool) {
        self.0.puts_pass.0.send_replace(!hold);
    }

    /// Holds requests back that delete something, or lets them through.
    pub fn hold_deletes(&self, hold: bool) {
        self.0.deletes_pass.0.send_replace(!hold);
    }

    /// The objects themselves, for changes behind the store's back.
    #[must_use]
    pub fn objects(&self) -> &InMemory {
        &self.0.objects
    }
}

fn count(counter: &AtomicU64) {
    counter.fetch_add(1, Ordering::Relaxed);
}

impl fmt::Display for WatchedBucket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("WatchedBucket")
    }
}

#[async_trait]
impl ObjectStore for WatchedBucket {
    async fn put_opts(
        &self,
        location: &Path,
        payload: PutPayload,
        options: PutOptions,
    ) -> Result<PutResult> {
        count(&self.0.puts);
        self.0.puts_pass.pass().await;
        self.0.objects.put_opts(location, payload, options).await
    }

    async fn put_multipart_opts(
        &self,
        location: &Path,
        options: PutMultipartOptions,
    ) -> Result<Box<dyn MultipartUpload>> {
        self.0.objects.put_multipart_opts(location, options).await
    }

    async fn get_opts(&self, location: &Path, options: GetOptions) -> Result<GetResult> {
        count(if options.head { &self.0.heads } else { &self.0.gets });
        self.0.objects.get_opts(location, options).await
    }

    fn delete_stream(
        &self,
        locations: BoxStream<'static, Result<Path>>,
    ) -> BoxStream<'static, Result<Path>> {
        let watched = self.0.clone();
        let deleted = stream::once(async move {
            count(&watched.deletes);
            watched.deletes_pass.pass().await;
            watched.objects.delete_stream(locations)
        });
        deleted.flatten().boxed()
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        count(&self.0.lists);
        self.0.objects.list(prefix)
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult> {
        count(&self.0.lists);
        self.0.objects.list_with_delimiter(prefix).await
    }

    async fn copy_opts(&self, from: &Path, to: &Path, options: CopyOptions) -> Result<()> {
        self.0.objects.copy_opts(from, to, options).await
    }
}
