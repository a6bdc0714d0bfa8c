//! Failures of the third tier: wrong, lost and leaked objects of stores.

mod lifecycle;

use std::fs;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use tempfile::TempDir;
use terrace_cache::Namespace;
use terrace_l3::{
    Arena, ExistsOptions, Get, GetOptions, GuardConfig, Guarded, Header, MemoryConfig, MemoryStore,
    ObjectId, Presence, Put, PutOptions, Registration, Removal, Served, Store, StoreError, Stored,
};
use terrace_l3_disk::{
    Direction, DiskConfig, DiskStore, PromotionConfig, TieredConfig, TieredStore,
};
use terrace_tests::l3::faulty::{Call, Fault, FaultyStore};
use terrace_tests::l3::gated::{Gate, GatedDisk, Keeper};
use terrace_tests::l3::objects::{HARD, fill, get, is_right, page, put};

const BYTES: usize = 8192;
const SLOT_BYTES: u64 = BYTES as u64 + 4096;
const PAGES: u32 = 16;

/// A store, and memory to use it with.
struct Bench<S> {
    store: Arc<S>,
    arena: Arena,
    _registration: Registration,
    _directory: Option<TempDir>,
}

impl<S: Store> Bench<S> {
    fn new(store: S, directory: Option<TempDir>) -> Self {
        let arena = Arena::new(PAGES, BYTES).unwrap();
        let registration = store.register(&arena).unwrap();
        Self { store: Arc::new(store), arena, _registration: registration, _directory: directory }
    }

    async fn put_with(&self, id: ObjectId, options: PutOptions) -> Result<Stored, StoreError> {
        put(&*self.store, &self.arena, id, BYTES, options).await
    }

    async fn put(&self, id: ObjectId) {
        assert_eq!(self.put_with(id, PutOptions::default()).await, Ok(Stored::New));
    }

    /// Reads an object and checks its bytes.
    async fn get(&self, id: ObjectId) -> Result<Served, StoreError> {
        get(&*self.store, &self.arena, id, BYTES).await
    }

    async fn is_present(&self, id: ObjectId) -> bool {
        let found = self.store.exists(&[id], ExistsOptions::default()).await.remove(0);
        found.unwrap() != Presence::Absent
    }

    /// Reads objects in one batch and checks their bytes.
    async fn get_all(&self, ids: &[ObjectId], wait: Duration) -> Vec<Result<Served, StoreError>> {
        let target = |number: u32| self.arena.target(number).unwrap();
        let gets = (0..).zip(ids).map(|(number, id)| Get::new(*id, target(number))).collect();
        let options = GetOptions { promotion_wait: Some(wait) };
        let served = self.store.get_into(gets, options).await;
        for (number, (id, served)) in (0..).zip(ids.iter().zip(&served)) {
            let right = || is_right(id, &self.arena.source(number).unwrap());
            assert!(served.is_err() || right(), "{id:?} was served with wrong bytes");
        }
        served
    }
}

fn memory_store(slots: u64, lease_ttl_ms: u64) -> MemoryStore {
    let config = MemoryConfig::new(slots * BYTES as u64, BYTES);
    MemoryStore::new(MemoryConfig { lease_ttl_ms, ..config }).unwrap()
}

fn disk_config(path: &Path) -> DiskConfig {
    let config = DiskConfig::new(path, 64 * SLOT_BYTES, BYTES);
    DiskConfig { depth: 4, ..config }
}

fn memory() -> Bench<MemoryStore> {
    Bench::new(memory_store(64, 5000), None)
}

fn disk() -> Bench<DiskStore> {
    let directory = tempfile::tempdir().unwrap();
    Bench::new(DiskStore::open(disk_config(directory.path())).unwrap(), Some(directory))
}

/// Creates a disk store with gates.
fn gated() -> (Bench<DiskStore>, Keeper) {
    let directory = tempfile::tempdir().unwrap();
    let gates = Arc::new(GatedDisk::new(directory.path()));
    let store = DiskStore::open_on(gates.clone(), disk_config(directory.path())).unwrap();
    (Bench::new(store, Some(directory)), gates.keeper())
}

/// Creates two tiers over a disk with gates.
fn tiers(promotion: PromotionConfig) -> (Bench<TieredStore>, Keeper) {
    let directory = tempfile::tempdir().unwrap();
    let gates = Arc::new(GatedDisk::new(directory.path()));
    let disk = DiskStore::open_on(gates.clone(), disk_config(directory.path())).unwrap();
    let config = TieredConfig { promotion, ..TieredConfig::default() };
    // Promoted objects are leased, which would delay removals here.
    let tiers = TieredStore::new(memory_store(16, 0), disk, config).unwrap();
    (Bench::new(tiers, Some(directory)), gates.keeper())
}

fn pages(count: u64) -> Vec<ObjectId> {
    (0..count).map(page).collect()
}

/// Failure: keys omitted the weights, the element type, the layout or the page size, so that KV of
/// another model was served. Here they are part of the namespace, and equal keys in different
/// namespaces are different objects.
#[tokio::test]
async fn f10_objects_of_another_model_are_others() {
    f10(&memory()).await;
    f10(&disk()).await;
}

async fn f10(bench: &Bench<impl Store>) {
    let model = Namespace {
        layout: "layer-first".to_owned(),
        dtype: "bf16".to_owned(),
        ..Namespace::new("model", 16)
    };
    let others = [
        Namespace { model: "model, new weights".to_owned(), ..model.clone() },
        Namespace { layout: "page-first".to_owned(), ..model.clone() },
        Namespace { dtype: "fp8".to_owned(), ..model.clone() },
        Namespace { page_size: 32, ..model.clone() },
        Namespace { tensor_ranks: 2, ..model.clone() },
        model.with("adapter", ""),
    ];
    never_shared(bench, &model, &others).await;
}

/// Failure: the tenant's salt was not part of the key. Here it is part of the namespace, so tenants
/// neither find, read, pin nor remove each other's objects.
#[tokio::test]
async fn f11_tenants_share_nothing_in_the_store() {
    let tenant = |salt| Namespace::new("model", 16).with("", salt);
    let others = [tenant(""), tenant("two"), tenant("one ")];
    never_shared(&memory(), &tenant("one"), &others).await;
    never_shared(&disk(), &tenant("one"), &others).await;
}

async fn never_shared(bench: &Bench<impl Store>, of: &Namespace, others: &[Namespace]) {
    let key = of.digest().next(of.digest(), &[1, 2, 3]);
    let id = ObjectId::page(of.digest(), key);
    bench.put(id).await;
    for other in others {
        let digest = other.digest();
        assert_ne!(digest.next(digest, &[1, 2, 3]), key, "{other:?}");
        let id = ObjectId::page(other.digest(), key);
        assert!(!bench.is_present(id).await, "{other:?}");
        assert_eq!(bench.get(id).await, Err(StoreError::Missing));
        assert_eq!(bench.store.pin(&[id], HARD).await, [Err(StoreError::Missing)]);
        assert_eq!(bench.store.remove(&[id], Removal::Forced).await, [Err(StoreError::Missing)]);
        bench.put(id).await;
    }
    for other in others {
        bench.get(ObjectId::page(other.digest(), key)).await.unwrap();
    }
    bench.get(id).await.unwrap();
}

/// Failure: a short read was accepted without an error, and the rest of the buffer was undefined.
/// Here the length must be exact and every byte is verified. An object of another length than the
/// target is refused before it is read.
#[tokio::test]
async fn f12_a_short_read_is_no_read() {
    let (bench, gates) = gated();
    bench.put(page(0)).await;
    gates.set(Direction::Read, Gate::Short);
    let short = bench.get(page(0)).await;
    assert!(matches!(short, Err(StoreError::Corrupt(_))), "{short:?}");
    gates.set(Direction::Read, Gate::Open);
    assert_eq!(bench.get(page(0)).await, Err(StoreError::Missing), "it is not trusted any more");
    assert_eq!(bench.store.stats().disk.unwrap().corrupt, 1);

    // A short write fails too.
    gates.set(Direction::Write, Gate::Short);
    let short = bench.put_with(page(1), PutOptions::default()).await;
    assert!(matches!(&short, Err(error) if error.is_unwell()), "{short:?}");
    assert_eq!(bench.get(page(1)).await, Err(StoreError::Missing));

    let bench = memory();
    bench.put(page(0)).await;
    let reads_begun = gates.reads_begun();
    for length in [BYTES - 1, BYTES / 2, 0] {
        let refused = get(&*bench.store, &bench.arena, page(0), length).await;
        assert_eq!(refused, Err(StoreError::Length { expected: length, found: BYTES }));
    }
    assert_eq!(gates.reads_begun(), reads_begun);
    bench.get(page(0)).await.unwrap();
}

/// Failure: names were hashed with a per-process seed, so that nothing, or the wrong object, was
/// found after a restart. Here names and headers are the same in every process, and one process
/// reads what another has stored.
#[tokio::test]
async fn f13_another_process_reads_what_this_one_has_stored() {
    let directory = tempfile::tempdir().unwrap();
    let written = Command::new(std::env::current_exe().unwrap())
        .args([
            "--exact",
            "field_failures::store::f13_the_other_process",
            "--nocapture",
            "--include-ignored",
        ])
        .env(F13_PATH, directory.path())
        .output()
        .unwrap();
    let text = String::from_utf8(written.stdout).unwrap();
    assert!(text.contains("1 passed"), "{text}");
    assert!(text.contains(&f13_header()), "{} in {text}", f13_header());
    assert_eq!(
        f13_header(),
        "544552524143454f0100000000000000".to_owned()
            + "30a9539d2224573674b6034bb98a7fb3df6df18b2d7d67b5ac5543a19eeb2e55"
            + "07000000000000000020000000000000d74748b14892c0160c628a0d2162bfa1"
    );
    let bench =
        Bench::new(DiskStore::open(disk_config(directory.path())).unwrap(), Some(directory));
    bench.get(f13_id()).await.unwrap();
}

const F13_PATH: &str = "TERRACE_F13_PATH";

fn f13_id() -> ObjectId {
    let namespace = Namespace::new("model", 16).with("", "tenant").digest();
    ObjectId::page(namespace, namespace.next(namespace, &[1, 2, 3])).with_generation(7)
}

fn f13_header() -> String {
    let mut bytes = vec![0; BYTES];
    fill(&f13_id(), &mut bytes);
    Header::new(f13_id(), &bytes).encode().iter().map(|byte| format!("{byte:02x}")).collect()
}

#[tokio::test]
#[ignore = "played by f13_another_process_reads_what_this_one_has_stored"]
async fn f13_the_other_process() {
    let Some(path) = std::env::var_os(F13_PATH) else { return };
    println!("{}", f13_header());
    let bench = Bench::new(DiskStore::open(disk_config(Path::new(&path))).unwrap(), None);
    bench.put(f13_id()).await;
}

/// Failure: unregistered buffers worked over one transport and failed over the other. Here they
/// fail everywhere.
#[tokio::test]
async fn f39_unregistered_memory_is_refused_everywhere() {
    let (tiers, _gates) = tiers(PromotionConfig::default());
    let inner = Arc::new(memory_store(16, 5000));
    f39(&memory()).await;
    f39(&disk()).await;
    f39(&tiers).await;
    f39(&Bench::new(Guarded::new(inner, GuardConfig::default()), None)).await;
}

async fn f39(bench: &Bench<impl Store>) {
    bench.put(page(0)).await;
    let stranger = Arena::new(2, BYTES).unwrap();
    let refused = put(&*bench.store, &stranger, page(1), BYTES, PutOptions::default()).await;
    assert!(matches!(refused, Err(StoreError::NotRegistered { .. })), "{refused:?}");
    let refused = get(&*bench.store, &stranger, page(0), BYTES).await;
    assert!(matches!(refused, Err(StoreError::NotRegistered { .. })), "{refused:?}");
    assert!(!bench.is_present(page(1)).await);
    bench.get(page(0)).await.unwrap();
}

/// Failure: a put of an existing object reported success even while the first writer had not
/// finished, when it could not be read. Here a second put distinguishes the two cases.
#[tokio::test]
async fn f40_a_put_is_not_done_before_the_first_one_is() {
    let (tiers, gates) = tiers(PromotionConfig::default());
    f40(&tiers, &gates).await;
    let (disk, gates) = gated();
    f40(&disk, &gates).await;
}

async fn f40(bench: &Bench<impl Store + 'static>, gates: &GatedDisk) {
    gates.set(Direction::Write, Gate::Shut);
    let first = {
        let (store, arena) = (bench.store.clone(), bench.arena.clone());
        fill(&page(0), &mut arena.target(5).unwrap());
        let puts = vec![Put::new(page(0), arena.source(5).unwrap())];
        tokio::spawn(async move { store.put_from(puts, PutOptions::default()).await.remove(0) })
    };
    while gates.waiting() == 0 {
        tokio::task::yield_now().await;
    }
    for _ in 0..3 {
        bench.arena.target(6).unwrap().fill(0xAB);
        let puts = vec![Put::new(page(0), bench.arena.source(6).unwrap())];
        let second = bench.store.put_from(puts, PutOptions::default()).await;
        assert_eq!(second, [Err(StoreError::BeingWritten)]);
        assert!(!bench.is_present(page(0)).await);
        assert_eq!(bench.get(page(0)).await, Err(StoreError::Missing));
    }
    gates.set(Direction::Write, Gate::Open);
    assert_eq!(first.await.unwrap(), Ok(Stored::New));
    let again = bench.put_with(page(0), PutOptions::default()).await;
    assert_eq!(again, Ok(Stored::AlreadyThere));
    bench.get(page(0)).await.expect("the first one's bytes");
    // After a failed first put the object does not exist for the second one.
    gates.set(Direction::Write, Gate::Fails);
    let failed =
        put(&*bench.store, &bench.arena, page(1).with_generation(1), BYTES, PutOptions::default());
    assert!(failed.await.is_err());
    gates.set(Direction::Write, Gate::Open);
    bench.put(page(1).with_generation(1)).await;
    bench.get(page(1).with_generation(1)).await.unwrap();
}

/// Failure: after a crash the SSD tier had lost objects, or listed some that it did not have. Here
/// durable objects are found, and all listed objects can be read. The crash is a copy of the files
/// while the store has changes that are not durable.
#[tokio::test]
async fn f41_a_crash_leaves_no_phantoms_and_loses_nothing_durable() {
    let directory = tempfile::tempdir().unwrap();
    // Commits take place only on request, or when no slot is free.
    let config = DiskConfig { commit_interval_ms: 600_000, ..disk_config(directory.path()) };
    let bench = Bench::new(DiskStore::open(config.clone()).unwrap(), None);
    for id in pages(50) {
        bench.put(id).await;
    }
    bench.store.flush().await.unwrap();
    let pinned: Vec<ObjectId> = pages(50)[10..40].to_vec();
    bench.store.pin(&pinned, HARD).await;
    let mut crashes = 0;
    for round in 0..20 {
        for number in 0..3 {
            let put = bench.put_with(page(100 + 3 * round + number), PutOptions::default()).await;
            assert_eq!(put, Ok(Stored::New));
        }
        let removed = page(if round < 10 { round } else { 100 + 3 * (round - 10) });
        let _ = bench.store.remove(&[removed], Removal::Plain).await;
        let copy = tempfile::tempdir().unwrap();
        for file in ["data", "index"] {
            fs::copy(directory.path().join(file), copy.path().join(file)).unwrap();
        }
        let config = DiskConfig { path: copy.path().to_owned(), ..config.clone() };
        let crashed = Bench::new(DiskStore::open(config).unwrap(), Some(copy));
        for id in pages(200) {
            let present = crashed.is_present(id).await;
            assert!(present || !pinned.contains(&id), "{id:?} was durable and is lost");
            assert!(!present || crashed.get(id).await.is_ok(), "{id:?} is a phantom");
        }
        crashes += 1;
        if round % 7 == 6 {
            bench.store.flush().await.unwrap();
        }
    }
    assert_eq!(crashes, 20);
    assert_eq!(bench.store.stats().disk.unwrap().corrupt, 0);
}

/// Failure: a get that came too early recorded that the object was missing, although the object was
/// stored before the answer. Here a put overrides earlier lookups.
#[tokio::test(start_paused = true)]
async fn f24_what_was_missing_is_not_held_against_what_is_stored() {
    let faulty = Arc::new(FaultyStore::new(Arc::new(memory_store(16, 5000))));
    let bench = Bench::new(Guarded::new(faulty.clone(), GuardConfig::default()), None);
    faulty.set(Call::Get, Some(Fault::AnswersLate));
    let (store, target) = (bench.store.clone(), bench.arena.target(5).unwrap());
    let early = tokio::spawn(async move {
        let gets = vec![Get::new(page(0), target)];
        store.get_into(gets, GetOptions::default()).await
    });
    while faulty.calls(Call::Get) == 0 {
        tokio::task::yield_now().await;
    }
    tokio::task::yield_now().await;
    bench.put(page(0)).await;
    faulty.set(Call::Get, None);
    assert_eq!(early.await.unwrap(), [Err(StoreError::Missing)]);
    assert!(bench.is_present(page(0)).await);
    bench.get(page(0)).await.expect("it was stored");
}
