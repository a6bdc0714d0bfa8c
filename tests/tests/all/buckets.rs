//! The backend in buckets: over folders here, and over a real server by `scripts/test-buckets`.

#[cfg(feature = "s3")]
mod s3;

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt;
use tempfile::TempDir;
use terrace_l3::{
    Arena, ExistsOptions, Mismatch, ObjectId, Pin, PutOptions, Registration, Removal, Store,
    StoreError, Stored,
};
use terrace_l3_buckets::object_store::{ObjectStore, ObjectStoreExt};
use terrace_l3_buckets::{BucketsConfig, BucketsStore};
use terrace_l3_features::{Dtype, FeatureConfig, FeatureStore, Released, Tensor, TensorSpec};
use terrace_tests::l3::conformance::{Backend, all};
use terrace_tests::l3::features::{self, FeatureBackend};
use terrace_tests::l3::objects::{HARD, get, page, put};
use terrace_tests::l3::watched_bucket::WatchedBucket;

/// No multiple of anything, so that no path is the easy one.
const OBJECT_BYTES_MAX: usize = 10_001;
const SLOTS: u64 = 16;
const LEASE_TTL_MS: u64 = 1500;

fn config(url: String) -> BucketsConfig {
    BucketsConfig {
        lease_ttl_ms: LEASE_TTL_MS,
        full_wait_ms: 5_000,
        request_timeout_ms: 60_000,
        ..BucketsConfig::new(url, SLOTS * OBJECT_BYTES_MAX as u64, OBJECT_BYTES_MAX)
    }
}

fn backend(config: BucketsConfig) -> Backend {
    Backend {
        store: Arc::new(BucketsStore::open(config).unwrap()),
        object_bytes_max: OBJECT_BYTES_MAX,
        objects_kept: 12,
        objects_max: SLOTS,
        copies: 1,
        lease_ttl: Duration::from_millis(LEASE_TTL_MS),
        full_wait: Duration::from_secs(5),
        keep: Box::new(()),
    }
}

fn in_folder(folder: &Path) -> BucketsConfig {
    config(format!("file://{}", folder.display()))
}

fn folder() -> Backend {
    let folder = tempfile::tempdir().unwrap();
    let backend = backend(in_folder(folder.path()));
    Backend { keep: Box::new(folder), ..backend }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_folder_keeps_the_promises_of_a_store() {
    all(folder).await;
}

/// One request at a time, and a guard in front as a server has it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn memory_behind_a_guard_keeps_the_promises_of_a_store() {
    all(|| backend(BucketsConfig { requests_max: 1, ..config("memory:///".to_owned()) }).guarded())
        .await;
}

/// Each process with a client of its own.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn features_in_a_folder() {
    features::all(|| {
        let folder = tempfile::tempdir().unwrap();
        let config = BucketsConfig {
            capacity_bytes: 512 * features::OBJECT_BYTES_MAX as u64,
            object_bytes_max: features::OBJECT_BYTES_MAX,
            ..in_folder(folder.path())
        };
        let path = folder.path().to_owned();
        let objects = move || leaves(&path).iter().filter(|path| path.is_file()).count() as u64;
        FeatureBackend {
            handle: Box::new(move || Arc::new(BucketsStore::open(config.clone()).unwrap())),
            objects: Some(Box::new(objects)),
            keep: Box::new(folder),
        }
    })
    .await;
}

/// A client of a bucket, with memory of its own.
struct Client {
    store: BucketsStore,
    arena: Arena,
    _registration: Registration,
}

impl Client {
    fn new(store: BucketsStore) -> Self {
        let arena = Arena::new(2, OBJECT_BYTES_MAX).unwrap();
        let _registration = store.register(&arena).unwrap();
        Self { store, arena, _registration }
    }

    fn of(folder: &TempDir) -> Self {
        Self::new(BucketsStore::open(in_folder(folder.path())).unwrap())
    }

    async fn put(&self, id: ObjectId) -> Result<Stored, StoreError> {
        self.put_with(id, None).await
    }

    async fn put_with(&self, id: ObjectId, pin: Option<Pin>) -> Result<Stored, StoreError> {
        let options = PutOptions { pin, durable: pin.is_some() };
        put(&self.store, &self.arena, id, OBJECT_BYTES_MAX, options).await
    }

    async fn get(&self, id: ObjectId) -> Result<(), StoreError> {
        get(&self.store, &self.arena, id, OBJECT_BYTES_MAX).await.map(drop)
    }

    async fn has(&self, id: ObjectId) -> bool {
        let found = self.store.exists(&[id], ExistsOptions::default()).await.remove(0);
        found.unwrap().is_present()
    }

    async fn remove(&self, id: ObjectId) -> Result<(), StoreError> {
        self.store.remove(&[id], Removal::Plain).await.remove(0)
    }
}

/// All files and all folders at the bottom.
fn leaves(folder: &Path) -> Vec<PathBuf> {
    // Others may be at work.
    let Ok(inside) = fs::read_dir(folder) else { return Vec::new() };
    let inside: Vec<PathBuf> = inside.filter_map(|entry| Some(entry.ok()?.path())).collect();
    if inside.is_empty() {
        return vec![folder.to_owned()];
    }
    inside
        .into_iter()
        .flat_map(|path| if path.is_dir() { leaves(&path) } else { vec![path] })
        .collect()
}

fn the_file(folder: &TempDir) -> PathBuf {
    let mut files = leaves(folder.path());
    assert_eq!(files.len(), 1, "{files:?}");
    files.remove(0)
}

/// Whoever has put it, and whoever reads it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_damaged_is_removed_and_reads_as_missing() {
    type Damage = fn(&mut Vec<u8>);
    let damages: [(Mismatch, Damage); 8] = [
        (Mismatch::Length, Vec::clear),
        (Mismatch::Length, |bytes| bytes.truncate(40)),
        (Mismatch::Length, |bytes| bytes.truncate(80)),
        (Mismatch::Length, |bytes| bytes.truncate(bytes.len() - 1)),
        (Mismatch::Length, |bytes| bytes.push(0)),
        (Mismatch::Magic, |bytes| bytes.fill(0xA5)),
        (Mismatch::HeaderChecksum, |bytes| bytes[60] ^= 1),
        (Mismatch::Payload, |bytes| *bytes.last_mut().unwrap() ^= 0x10),
    ];
    let folder = tempfile::tempdir().unwrap();
    let (one, other) = (Client::of(&folder), Client::of(&folder));
    for (number, (mismatch, damage)) in damages.into_iter().enumerate() {
        for reader in [&one, &other] {
            assert_eq!(one.put(page(0)).await, Ok(Stored::New), "damage {number}");
            let file = the_file(&folder);
            let mut bytes = fs::read(&file).unwrap();
            damage(&mut bytes);
            fs::write(&file, bytes).unwrap();
            let damaged = Err(StoreError::Corrupt(mismatch));
            assert_eq!(reader.get(page(0)).await, damaged, "damage {number}");
            assert!(!file.exists(), "damage {number}");
            for reader in [&one, &other] {
                assert_eq!(reader.get(page(0)).await, Err(StoreError::Missing), "damage {number}");
            }
        }
    }
    let corrupt = [&one, &other].map(|client| client.store.stats().remote.unwrap().corrupt);
    assert_eq!(corrupt, [8, 8]);
}

/// Under the name of another it is as damaged as anything; what must not vanish is put again over it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_put_with_a_pin_does_not_rely_on_what_is_damaged() {
    let folder = tempfile::tempdir().unwrap();
    let (one, other) = (Client::of(&folder), Client::of(&folder));
    assert_eq!(one.put(page(0)).await, Ok(Stored::New));
    let file = the_file(&folder);
    let foreign = fs::read(&file).unwrap();
    one.remove(page(0)).await.unwrap();
    assert_eq!(one.put(page(1)).await, Ok(Stored::New));
    fs::write(the_file(&folder), foreign).unwrap();
    assert_eq!(other.put_with(page(1), Some(HARD)).await, Ok(Stored::New));
    one.get(page(1)).await.unwrap();
    assert_eq!(other.remove(page(1)).await, Err(StoreError::Pinned));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn clients_share_a_bucket_and_each_keeps_to_its_share() {
    let folder = tempfile::tempdir().unwrap();
    let (one, other) = (Client::of(&folder), Client::of(&folder));
    assert_eq!(one.put(page(0)).await, Ok(Stored::New));
    assert!(other.has(page(0)).await);
    other.get(page(0)).await.unwrap();
    assert_eq!(other.put(page(0)).await, Ok(Stored::AlreadyThere));
    assert_eq!(other.store.stats().remote.unwrap().objects, 0, "it is the other's");
    for number in 100..100 + 3 * SLOTS {
        assert_eq!(other.put(page(number)).await, Ok(Stored::New));
    }
    one.get(page(0)).await.unwrap();
    assert_eq!(
        leaves(folder.path()).len() as u64,
        1 + SLOTS,
        "one has put one, the other its share"
    );
    // What one pins it keeps as if it had put it.
    assert_eq!(
        other.store.pin(&[page(0), page(7)], HARD).await,
        [Ok(()), Err(StoreError::Missing)]
    );
    for number in 200..200 + 3 * SLOTS {
        assert_eq!(other.put(page(number)).await, Ok(Stored::New));
    }
    other.get(page(0)).await.unwrap();
    assert_eq!(leaves(folder.path()).len() as u64, SLOTS);
    // Until it takes back its pin.
    other.store.unpin(&[page(0)], HARD).await.remove(0).unwrap();
    for number in 300..300 + 3 * SLOTS {
        assert_eq!(other.put(page(number)).await, Ok(Stored::New));
    }
    one.get(page(0)).await.unwrap();
    // Of another's pin nobody knows.
    assert_eq!(other.put_with(page(0), Some(HARD)).await, Ok(Stored::AlreadyThere));
    assert_eq!(other.store.stats().remote.unwrap().hard_pinned, 1);
    one.remove(page(0)).await.unwrap();
    assert_eq!(other.get(page(0)).await, Err(StoreError::Missing));
    assert_eq!(other.store.stats().remote.unwrap().hard_pinned, 0, "it is forgotten");
    assert_eq!(other.put(page(0)).await, Ok(Stored::New));
    one.remove(page(0)).await.unwrap();
    assert_eq!(other.put(page(0)).await, Ok(Stored::New), "the bucket is asked, not the ledger");
}

/// Also those that another client has put.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_higher_generation_replaces_the_lower_ones_of_others() {
    let folder = tempfile::tempdir().unwrap();
    let (one, other) = (Client::of(&folder), Client::of(&folder));
    let generation = |number| page(0).with_generation(number);
    for number in [0, 3] {
        assert_eq!(one.put(generation(number)).await, Ok(Stored::New));
    }
    assert_eq!(other.put(generation(2)).await, Err(StoreError::Superseded { present: 3 }));
    assert_eq!(other.put(generation(9)).await, Ok(Stored::New));
    assert_eq!(one.get(generation(3)).await, Err(StoreError::Missing));
    one.get(generation(9)).await.unwrap();
    assert_eq!(the_file(&folder).file_name().unwrap(), "0000000000000009");
    one.remove(generation(9)).await.unwrap();
    assert_eq!(leaves(folder.path()).len(), 1, "the namespace's folder is left, and nothing in it");
    assert!(leaves(folder.path())[0].is_dir());
}

/// A folder that nobody can write to stands for a bucket without rights.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_cannot_be_removed_stays_unreachable_and_is_tried_again() {
    let folder = tempfile::tempdir().unwrap();
    let client = Client::of(&folder);
    assert_eq!(client.put(page(0)).await, Ok(Stored::New));
    // A folder in the place of the file can be neither read nor removed like one.
    let file = the_file(&folder);
    fs::remove_file(&file).unwrap();
    fs::create_dir_all(file.join("in the way")).unwrap();
    let failed = client.remove(page(0)).await.unwrap_err();
    assert!(failed.is_unwell(), "{failed}");
    assert_eq!(client.get(page(0)).await, Err(StoreError::Missing));
    assert!(!client.has(page(0)).await);
    assert_eq!(client.store.flush().await, Err(failed.clone()));
    let stats = client.store.stats().remote.unwrap();
    assert_eq!((stats.objects, stats.resident_bytes), (0, OBJECT_BYTES_MAX as u64));
    assert_eq!(stats.io_errors, 2);
    fs::remove_dir_all(&file).unwrap();
    client.store.flush().await.unwrap();
    assert_eq!(client.store.stats().remote.unwrap().resident_bytes, 0);
    assert_eq!(client.put(page(0)).await, Ok(Stored::New));
}

/// A client of a bucket that is watched, with little patience.
fn watched(bucket: &WatchedBucket) -> Client {
    let config = BucketsConfig { request_timeout_ms: 300, ..config(String::new()) };
    Client::new(BucketsStore::over(config, Arc::new(bucket.clone()), "kv".into()).unwrap())
}

/// A put that has no answer in time while a reader removes what another client has left there damaged.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_put_without_an_answer_leaves_while_a_foreign_damaged_copy_does() {
    let bucket = WatchedBucket::default();
    let (one, other) = (watched(&bucket), Arc::new(watched(&bucket)));
    assert_eq!(one.put(page(0)).await, Ok(Stored::New));
    let listed = bucket.objects().list(None).next().await.unwrap().unwrap();
    bucket.objects().put(&listed.location, "damaged".into()).await.unwrap();
    bucket.hold_puts(true);
    bucket.hold_deletes(true);
    let before = bucket.requests();
    let put = tokio::spawn({
        let other = other.clone();
        async move { other.put(page(0)).await }
    });
    while bucket.requests().since(before).puts == 0 {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    // Its own request to remove what is damaged has no answer, either.
    let got = other.store.get_into(
        vec![terrace_l3::Get::new(page(0), other.arena.target(1).unwrap())],
        terrace_l3::GetOptions::default(),
    );
    assert!(matches!(got.await.remove(0), Err(StoreError::Corrupt(_))));
    let put = put.await.unwrap();
    assert!(matches!(put, Err(StoreError::TimedOut(_))), "{put:?}");
    bucket.hold_puts(false);
    bucket.hold_deletes(false);
    other.store.flush().await.unwrap();
    assert_eq!(other.store.stats().remote.unwrap().resident_bytes, 0, "its slot is free");
    assert_eq!(other.put(page(0)).await, Ok(Stored::New));
    other.get(page(0)).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_batch_is_removed_by_one_request() {
    let bucket = WatchedBucket::default();
    let (one, other) = (watched(&bucket), watched(&bucket));
    let ids: Vec<ObjectId> = (0..12).map(page).collect();
    for remover in [&one, &other] {
        for id in &ids {
            assert_eq!(one.put(*id).await, Ok(Stored::New));
        }
        let before = bucket.requests();
        let twice = [ids.clone(), ids[..1].to_vec()].concat();
        let removed = remover.store.remove(&twice, Removal::Final).await;
        assert!(removed[..12].iter().all(Result::is_ok), "{removed:?}");
        assert_eq!(removed[12], Err(StoreError::Missing));
        assert_eq!(bucket.requests().since(before).deletes, 1);
        for id in &ids {
            assert!(!one.has(*id).await);
        }
    }
}

/// Each is paid for, and most of them take as long as a put.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_sample_takes_so_many_requests() {
    const TENSORS: u32 = 3;
    let bucket = WatchedBucket::default();
    let process = async |config| {
        let client = watched(&bucket).store;
        FeatureStore::open(Arc::new(client), config).await.unwrap()
    };
    let producer = process(FeatureConfig::producer("f", 0)).await;
    let consumer = process(FeatureConfig::consumer("f")).await;
    let arena = Arena::new(TENSORS, OBJECT_BYTES_MAX).unwrap();
    let _registration = producer.register(&arena).unwrap();
    let tensor = |page: u32| {
        let spec = TensorSpec::new(page.to_string(), Dtype::U8, [OBJECT_BYTES_MAX as u64]);
        Tensor::new(spec, arena.source(page).unwrap())
    };
    let before = bucket.requests();
    let reference = producer.put("a", (0..TENSORS).map(tensor).collect()).await.unwrap();
    let put = bucket.requests().since(before);
    println!("a put: {put:?}");
    assert!(put.heads <= 16 && put.gets <= 4, "{put:?}");
    assert_eq!((put.puts, put.deletes, put.lists), (u64::from(TENSORS) + 2, 0, 0));
    for round in 0..4 {
        let before = bucket.requests();
        producer.gc().await.unwrap();
        let gc = bucket.requests().since(before);
        println!("gc: {gc:?}");
        let looks = if round == 0 { u64::from(TENSORS) + 2 } else { 0 };
        assert_eq!(
            (gc.heads, gc.gets),
            (looks, 1),
            "whose the number is, and now and then what lives"
        );
    }
    let before = bucket.requests();
    consumer.get(&reference).await.unwrap();
    assert_eq!(consumer.release(reference).await, Ok(Released::Freed));
    let consumed = bucket.requests().since(before);
    println!("a get and a release: {consumed:?}");
    assert_eq!((consumed.gets, consumed.deletes), (u64::from(TENSORS), 1));
    producer.close().await.unwrap();
}

#[test]
fn what_cannot_be_opened_is_refused_with_advice() {
    let refused = |url: &str| BucketsStore::open(config(url.to_owned())).unwrap_err().to_string();
    assert!(refused("nowhere").contains("nowhere"));
    assert!(refused("ftp://host/path").contains("ftp://host/path"));
    #[cfg(not(feature = "s3"))]
    assert!(refused("s3://bucket/prefix").contains("feature `s3`"));
    let none = BucketsConfig { capacity_bytes: 1, ..config("memory:///".to_owned()) };
    assert!(BucketsStore::open(none).is_err());
}
