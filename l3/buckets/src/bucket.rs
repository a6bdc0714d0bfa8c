//! Requests to the bucket: names of objects, and interpretation of the responses.

use std::fmt;
use std::future::Future;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use futures_util::{StreamExt, stream};
use object_store::local::LocalFileSystem;
use object_store::path::Path;
use object_store::{Error, ObjectStore, ObjectStoreExt, PutMode, PutOptions, PutPayload};
use tokio::sync::Semaphore;
use tokio::time::timeout;
use url::Url;

use super::{BucketsConfig, BucketsError};
use terrace_l3::{Get, HEADER_BYTES, Header, Mismatch, ObjectId, StoreError};

/// Maximum number of objects removed by one request: all kinds of buckets accept as many.
pub(crate) const DELETES_PER_REQUEST: usize = 256;

/// A bucket, or a folder used as one.
pub(crate) struct Bucket {
    objects: Arc<dyn ObjectStore>,
    prefix: Path,
    folder: Option<PathBuf>,
    requests: Semaphore,
    patience: Duration,
    failed: AtomicU64,
}

impl fmt::Debug for Bucket {
    /// Omits the credentials of the client.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Bucket {}/{}", self.objects, self.prefix)
    }
}

/// Prefixes of the environment variables with the bucket's address and credentials.
const VARIABLES: [&str; 3] = ["AWS_", "AZURE_", "GOOGLE_"];

impl Bucket {
    pub(crate) fn open(config: &BucketsConfig) -> Result<Self, BucketsError> {
        let refused = |why: String| BucketsError::Url { url: config.url.clone(), why };
        let url = Url::parse(&config.url).map_err(|error| refused(error.to_string()))?;
        if url.scheme() == "file" {
            let no_path = |()| refused("write a folder as file:///path/of/folder".to_owned());
            let folder = url.to_file_path().map_err(no_path)?;
            std::fs::create_dir_all(&folder).map_err(|error| refused(error.to_string()))?;
            let objects = LocalFileSystem::new_with_prefix(&folder);
            let objects = objects.map_err(|error| refused(error.to_string()))?;
            let bucket = Self::new(Arc::new(objects), Path::default(), config);
            return Ok(Self { folder: Some(folder), ..bucket });
        }
        let variables = std::env::vars_os().filter_map(|(name, value)| {
            let name = name.into_string().ok()?;
            let is_ours = VARIABLES.iter().any(|start| name.starts_with(start));
            is_ours.then_some((name, value.into_string().ok()?))
        });
        let (objects, prefix) = object_store::parse_url_opts(&url, variables)
            .map_err(|error| refused(format!("{error}{}", missing_feature())))?;
        Ok(Self::new(objects.into(), prefix, config))
    }

    pub(crate) fn new(objects: Arc<dyn ObjectStore>, prefix: Path, config: &BucketsConfig) -> Self {
        Self {
            objects,
            prefix,
            folder: None,
            requests: Semaphore::new(config.requests_max.max(1) as usize),
            patience: Duration::from_millis(config.request_timeout_ms),
            failed: AtomicU64::new(0),
        }
    }

    /// Stores an object unless it exists, and returns whether it was new.
    pub(crate) async fn create(
        &self,
        id: &ObjectId,
        object: [Bytes; 2],
    ) -> Result<bool, StoreError> {
        let path = self.path(id);
        let create = async {
            let payload = PutPayload::from_iter(object);
            let mode = PutOptions::from(PutMode::Create);
            match self.objects.put_opts(&path, payload.clone(), mode).await {
                Ok(_) => Ok(true),
                Err(Error::AlreadyExists { .. } | Error::Precondition { .. }) => Ok(false),
                // The store has no conditional puts: of two concurrent writers, both may believe to
                // be first.
                Err(Error::NotImplemented { .. } | Error::NotSupported { .. }) => {
                    match self.objects.head(&path).await {
                        Ok(_) => Ok(false),
                        Err(Error::NotFound { .. }) => {
                            self.objects.put(&path, payload).await.map(|_| true)
                        }
                        Err(error) => Err(error),
                    }
                }
                Err(error) => Err(error),
            }
        };
        self.request("writing an object", create).await.map_err(|error| match error {
            StoreError::Missing => {
                let message = "there is no such bucket: create it, or check the URL";
                StoreError::io(
                    "writing an object",
                    &io::Error::new(io::ErrorKind::NotFound, message),
                )
            }
            other => other,
        })
    }

    /// Length of an object's payload, if it exists. It is not verified.
    pub(crate) async fn length(&self, id: &ObjectId) -> Result<usize, StoreError> {
        let path = self.path(id);
        let meta = self.request("looking up an object", self.objects.head(&path)).await?;
        Ok((meta.size as usize).saturating_sub(HEADER_BYTES))
    }

    /// Length of an object's payload from its verified header.
    pub(crate) async fn sound_length(&self, id: &ObjectId) -> Result<usize, StoreError> {
        let length = self.length(id).await?;
        let path = self.path(id);
        let header = self.objects.get_range(&path, 0..HEADER_BYTES as u64);
        let header = match self.request("reading a header", header).await {
            // A shorter object has no such range.
            Err(StoreError::Io { .. }) if length == 0 => return Err(Mismatch::Length.into()),
            header => header?,
        };
        let header = header.first_chunk().ok_or(Mismatch::Length)?;
        Header::verify(header, id, length as u64)?;
        Ok(length)
    }

    /// Reads and verifies an object.
    pub(crate) async fn read(&self, get: &mut Get) -> Result<(), StoreError> {
        let id = &get.id;
        let path = self.path(id);
        let expected = HEADER_BYTES + get.target.len();
        let read = async {
            let object = self.objects.get(&path).await?;
            // An object of another length is not read, however long it is.
            if object.meta.size == expected as u64 {
                object.bytes().await.map(Some)
            } else {
                Ok(None)
            }
        };
        let Some(object) = self.request("reading an object", read).await? else {
            let found = self.sound_length(id).await?;
            return Err(match found == get.target.len() {
                true => StoreError::Missing, // It was replaced meanwhile.
                false => StoreError::Length { expected: get.target.len(), found },
            });
        };
        let (header, payload) = object.split_first_chunk().ok_or(Mismatch::Length)?;
        let header = get.verify(header)?;
        if payload.len() != get.target.len() {
            return Err(Mismatch::Length.into());
        }
        get.target.copy_from_slice(payload);
        header.verify_payload(&get.target)?;
        Ok(())
    }

    /// Removes up to [`DELETES_PER_REQUEST`] objects, in one request if the store supports it. An
    /// absent object counts as removed.
    pub(crate) async fn delete(&self, ids: &[ObjectId]) -> Vec<Result<(), StoreError>> {
        let paths: Vec<Path> = ids.iter().map(|id| self.path(id)).collect();
        let locations = stream::iter(paths.into_iter().map(Ok)).boxed();
        let deleted = self.objects.delete_stream(locations).collect::<Vec<_>>();
        // Failures are counted below: a request that fails as a whole has one result.
        let during = "removing objects";
        let deleted = match self.request(during, async { Ok(deleted.await) }).await {
            Ok(deleted) => deleted,
            Err(error) => return vec![Err(error); ids.len()],
        };
        let settle = |deleted: object_store::Result<Path>| match deleted {
            Ok(_) | Err(Error::NotFound { .. }) => Ok(()),
            Err(error) => Err(failure(during, &error)),
        };
        let mut results: Vec<Result<(), StoreError>> = deleted.into_iter().map(settle).collect();
        let failed = results.iter().filter(|result| result.is_err()).count();
        self.failed.fetch_add(failed as u64, Ordering::Relaxed);
        if results.len() != ids.len() {
            let error = results.into_iter().find_map(Result::err);
            let error = error.unwrap_or(StoreError::BeingWritten);
            return vec![Err(error); ids.len()];
        }
        if let Some(folder) = &self.folder {
            // Remove the folders of their generations, unless there are others.
            let removed = ids.iter().zip(&mut results).filter(|(_, result)| result.is_ok());
            let folders: Vec<PathBuf> =
                removed.map(|(id, _)| folder.join(self.name(id).as_ref())).collect();
            let remove = move || folders.iter().for_each(|it| drop(std::fs::remove_dir(it)));
            let _ = tokio::task::spawn_blocking(remove).await;
        }
        results
    }

    /// All generations of an object in the bucket.
    pub(crate) async fn generations(&self, id: &ObjectId) -> Result<Vec<u64>, StoreError> {
        let name = self.name(id);
        let listed = self.objects.list_with_delimiter(Some(&name));
        let listed = self.request("listing generations", listed).await?;
        let generation = |path: &Path| u64::from_str_radix(path.filename()?, 16).ok();
        Ok(listed.objects.iter().filter_map(|object| generation(&object.location)).collect())
    }

    /// Waits until a folder's file system has written everything; buckets have when they respond.
    pub(crate) async fn sync(&self) -> Result<(), StoreError> {
        let Some(folder) = self.folder.clone() else { return Ok(()) };
        let sync =
            move || rustix::fs::syncfs(std::fs::File::open(folder)?).map_err(io::Error::from);
        let synced = tokio::task::spawn_blocking(sync).await.map_err(io::Error::from);
        synced.flatten().map_err(|error| StoreError::io("syncing the folder", &error))
    }

    /// Number of failed requests.
    pub(crate) fn failed(&self) -> u64 {
        self.failed.load(Ordering::Relaxed)
    }

    pub(crate) fn patience(&self) -> Duration {
        self.patience
    }

    fn name(&self, id: &ObjectId) -> Path {
        let name = [format!("{:032x}", id.namespace.0), format!("{:032x}", id.key.0)];
        name.into_iter().fold(self.prefix.clone(), |path, part| path.join(part))
    }

    fn path(&self, id: &ObjectId) -> Path {
        self.name(id).join(format!("{:016x}", id.generation))
    }

    /// Waits for a permit and then for the response, within the request timeout.
    async fn request<T>(
        &self,
        during: &'static str,
        answer: impl Future<Output = object_store::Result<T>>,
    ) -> Result<T, StoreError> {
        let _turn = self.requests.acquire().await.expect("it is never closed");
        let answer = match timeout(self.patience, answer).await {
            Ok(answer) => answer.map_err(|error| failure(during, &error)),
            Err(_) => Err(StoreError::TimedOut(self.patience)),
        };
        if answer.as_ref().is_err_and(StoreError::is_unwell) {
            self.failed.fetch_add(1, Ordering::Relaxed);
        }
        answer
    }
}

fn missing_feature() -> &'static str {
    if cfg!(feature = "s3") {
        ""
    } else {
        "; this build supports only file:///FOLDER and memory:///; anything else needs the feature \
         `s3`"
    }
}

fn failure(during: &'static str, error: &Error) -> StoreError {
    let (kind, advice) = match error {
        Error::NotFound { .. } => return StoreError::Missing,
        Error::PermissionDenied { .. } | Error::Unauthenticated { .. } => (
            io::ErrorKind::PermissionDenied,
            "check that the credentials in the environment may read, write, list and delete here",
        ),
        _ => (
            io::ErrorKind::Other,
            "check that the address and region of the bucket are right and that it is reachable",
        ),
    };
    StoreError::io(during, &io::Error::new(kind, format!("{error}; {advice}")))
}
