//! Trouble with real files: disks that are full, directories that cannot be used or go away, files of
//! others. A store says what is wrong and what to do, and never hangs.
//!
//! Some of it needs another process, another user or another file system: such a test starts its own
//! program again, to play the part of that name.

use std::fs;
use std::future::Future;
use std::io::{BufRead, BufReader, Read};
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use terrace_l3::{
    Arena, ExistsOptions, MemoryConfig, MemoryStore, ObjectId, Presence, PutOptions, Removal,
    Store, StoreError, Stored,
};
use terrace_l3_disk::{
    DiskConfig, DiskStore, IoEngine, OpenError, StoreFolder, TieredConfig, TieredStore,
    usual_reserve_bytes,
};
use terrace_tests::l3::objects::{HARD, get, page, put};
use tokio::time::timeout;

const OBJECT_BYTES_MAX: usize = 4096;
/// What a slot of such objects takes.
const SLOT_BYTES: u64 = 8192;
/// Longer than anything here takes.
const PATIENCE: Duration = Duration::from_secs(120);
const DURABLE: PutOptions = PutOptions { pin: None, durable: true };

fn config(path: &Path, slots: u64) -> DiskConfig {
    DiskConfig {
        depth: 4,
        grow_bytes: 32 * SLOT_BYTES,
        commit_interval_ms: 5,
        ..DiskConfig::new(path, slots * SLOT_BYTES, OBJECT_BYTES_MAX)
    }
}

/// A store with memory to use it with.
struct Bench {
    arena: Arena,
    _registration: terrace_l3::Registration,
    store: Arc<dyn Store>,
}

impl Bench {
    fn new(store: impl Store + 'static, object_bytes_max: usize) -> Self {
        let arena = Arena::new(2, object_bytes_max).unwrap();
        let registration = store.register(&arena).unwrap();
        Self { arena, _registration: registration, store: Arc::new(store) }
    }

    fn open(config: DiskConfig) -> Self {
        let object_bytes_max = config.object_bytes_max;
        Self::new(DiskStore::open(config).unwrap(), object_bytes_max)
    }

    async fn put_with(&self, number: u64, options: PutOptions) -> Result<Stored, StoreError> {
        let length = self.arena.page_bytes();
        in_time(put(&*self.store, &self.arena, page(number), length, options)).await
    }

    async fn put(&self, number: u64) -> Result<Stored, StoreError> {
        self.put_with(number, PutOptions::default()).await
    }

    /// Reads a page and checks its bytes.
    async fn get(&self, number: u64) -> Result<(), StoreError> {
        let length = self.arena.page_bytes();
        in_time(get(&*self.store, &self.arena, page(number), length)).await.map(drop)
    }

    /// The same where the store makes room all the time.
    async fn get_unless_evicted(&self, number: u64) {
        let served = self.get(number).await;
        assert!(matches!(served, Ok(()) | Err(StoreError::Missing)), "{served:?}");
    }

    /// Which of the first pages the store says that it has.
    async fn present(&self, numbers: std::ops::Range<u64>) -> Vec<u64> {
        let ids: Vec<ObjectId> = numbers.clone().map(page).collect();
        let found = in_time(self.store.exists(&ids, ExistsOptions::default())).await;
        let found = found.into_iter().map(|it| it.unwrap() != Presence::Absent);
        numbers.zip(found).filter(|(_, present)| *present).map(|(number, _)| number).collect()
    }
}

/// Nothing may hang.
async fn in_time<T>(call: impl Future<Output = T>) -> T {
    timeout(PATIENCE, call).await.expect("it answers in time")
}

// ---- the disk is full ----

/// What was removed takes its slot until the next round. Nothing that lives has to go for it.
#[tokio::test]
async fn what_was_removed_makes_room_before_what_lives() {
    const SLOTS: u64 = 16;
    let directory = tempfile::tempdir().unwrap();
    // No round but those that somebody waits for.
    let config = DiskConfig { commit_interval_ms: 3_600_000, ..config(directory.path(), SLOTS) };
    let bench = Bench::open(config);
    for number in 0..SLOTS {
        assert_eq!(bench.put(number).await, Ok(Stored::New));
        if number > 0 {
            let removed = in_time(bench.store.remove(&[page(number)], Removal::Plain)).await;
            assert_eq!(removed, [Ok(())]);
        }
    }
    assert_eq!(bench.put(SLOTS).await, Ok(Stored::New));
    assert_eq!(bench.present(0..SLOTS + 1).await, [0, SLOTS]);
    assert_eq!(bench.store.stats().disk.unwrap().evicted, 0);
}

/// A file system of its own for a part that a test plays, if this system lets us have one: a process
/// that is allowed to mount, but only within itself.
fn on_a_small_file_system(part: &str) {
    let directory = tempfile::tempdir().unwrap();
    let unshare = |script: &str| {
        let mut command = Command::new("unshare");
        command.args(["--map-root-user", "--mount", "sh", "-ec"]).arg(script);
        command.arg("sh").arg(directory.path()).arg(std::env::current_exe().unwrap());
        command
    };
    let mount = "mount -t tmpfs -o size=8m tmpfs \"$1\"";
    if !unshare(mount).output().is_ok_and(|output| output.status.success()) {
        eprintln!("skipped: this system does not let us mount a file system of our own");
        return;
    }
    let script = format!("{mount}; exec \"$2\" --exact {part} --nocapture --include-ignored");
    let output = unshare(&script).env(PART, directory.path()).output().unwrap();
    let text = String::from_utf8_lossy(&output.stderr) + String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && text.contains("1 passed"), "{text}");
}

/// Where a part is to be played. Without it a part is not played at all.
const PART: &str = "TERRACE_TROUBLE_AT";

fn stage() -> Option<PathBuf> {
    std::env::var_os(PART).map(PathBuf::from)
}

#[test]
fn a_store_on_a_full_disk_stays_small_and_evicts() {
    on_a_small_file_system("l3_trouble::part_of_a_full_disk");
}

#[tokio::test]
#[ignore = "played by a_store_on_a_full_disk_stays_small_and_evicts"]
async fn part_of_a_full_disk() {
    const BYTES: usize = 64 << 10;
    const SLOT: u64 = BYTES as u64 + 4096;
    let Some(directory) = stage() else { return };
    for grow_bytes in [1 << 20, 256 << 20] {
        let path = directory.join(grow_bytes.to_string());
        let config = DiskConfig {
            grow_bytes,
            lease_ttl_ms: 600_000,
            full_wait_ms: 20_000,
            ..DiskConfig::new(&path, 64 << 20, BYTES)
        };
        let bench = Bench::open(config.clone());
        let pinned = PutOptions { pin: Some(HARD), durable: false };
        assert_eq!(bench.put_with(1000, pinned).await, Ok(Stored::New));
        for number in 0..300 {
            assert_eq!(bench.put(number).await, Ok(Stored::New), "page {number}");
            bench.get_unless_evicted(number).await;
        }
        bench.get(1000).await.unwrap();
        bench.store.flush().await.unwrap();
        let stats = bench.store.stats().disk.unwrap();
        assert!(stats.disk_full > 0 && stats.evicted > 0, "{stats:?}");
        assert!(stats.objects * SLOT > 6 << 20, "it uses what there is: {stats:?}");
        assert_eq!((stats.io_errors, stats.corrupt, stats.puts_full), (0, 0, 0), "{stats:?}");

        // The share that leases may have is one of what there is, not of what there might have been.
        let there: Vec<ObjectId> = bench.present(0..300).await.into_iter().map(page).collect();
        let lease = ExistsOptions { prefetch_to_memory: false, lease: true };
        bench.store.exists(&there, lease).await;
        assert_eq!(bench.put(2000).await, Ok(Stored::New));

        drop(bench);
        let bench = Bench::open(config);
        let there = bench.present(0..300).await;
        assert!(there.len() > 50, "{there:?}");
        for number in there {
            bench.get(number).await.unwrap();
        }
        assert_eq!(bench.put_with(3000, DURABLE).await, Ok(Stored::New));
        drop(bench);
        fs::remove_dir_all(path).unwrap();
    }
    // No room at all is another matter.
    let rest = fs::File::create(directory.join("rest")).unwrap();
    let fill = [0; 4096];
    while std::io::Write::write(&mut &rest, &fill).is_ok() {}
    let refused = DiskStore::open(DiskConfig::new(directory.join("store"), 64 << 20, BYTES));
    match refused.unwrap_err() {
        OpenError::NoRoom { error, .. } => {
            assert!(error.to_string().contains("No space left"), "{error}");
        }
        OpenError::LittleFree { free_bytes, .. } => assert!(free_bytes < SLOT, "{free_bytes}"),
        // Not even for the directory itself.
        OpenError::Directory { error, .. } => {
            assert_eq!(error.kind(), std::io::ErrorKind::StorageFull, "{error}");
        }
        other => panic!("{other}"),
    }
}

#[test]
fn a_store_leaves_its_reserve_free() {
    on_a_small_file_system("l3_trouble::part_of_a_reserve");
}

#[tokio::test]
#[ignore = "played by a_store_leaves_its_reserve_free"]
async fn part_of_a_reserve() {
    const BYTES: usize = 64 << 10;
    const WANTED: u64 = 64 << 20;
    let Some(directory) = stage() else { return };
    let reserve_bytes = usual_reserve_bytes(&directory).unwrap();
    assert_eq!(reserve_bytes, 2 << 20, "a quarter of so small a disk");
    let path = directory.join("store");
    let grow_bytes = 1 << 20;
    let new = |path: &Path| DiskConfig::new(path, WANTED, BYTES);
    let config = DiskConfig { reserve_bytes, grow_bytes, ..new(&path) };
    let store = DiskStore::open(config.clone()).unwrap();
    let shortage = store.opening().shortage.expect("the disk is smaller than what is wanted");
    assert!((6 << 20..=8 << 20).contains(&shortage.free_bytes), "{shortage:?}");
    let promised = store.stats().disk.unwrap().capacity_bytes;
    assert!((5 << 20..=6 << 20).contains(&promised), "{promised}");
    let bench = Bench::new(store, BYTES);
    for number in 0..200 {
        assert_eq!(bench.put(number).await, Ok(Stored::New), "page {number}");
    }
    let stats = bench.store.stats().disk.unwrap();
    assert_eq!(stats.capacity_bytes, promised, "it became as large as it said");
    assert!(stats.bytes > promised * 9 / 10, "{stats:?}");

    // Others can use the reserve, and then all of it: what comes later replaces what is there.
    let others = fs::File::create(directory.join("others")).unwrap();
    let free = std::iter::repeat_with(|| std::io::Write::write(&mut &others, &[1; 4096]))
        .take_while(Result::is_ok)
        .count() as u64;
    assert!(free * 4096 > reserve_bytes - (64 << 10), "only {free} blocks were free");
    for number in 200..260 {
        assert_eq!(bench.put(number).await, Ok(Stored::New), "page {number}");
        bench.get(number).await.unwrap();
    }
    drop(bench);
    let store = DiskStore::open(config.clone()).unwrap();
    assert_eq!(store.stats().disk.unwrap().capacity_bytes, promised, "what it has, it keeps");
    // What is free again belongs to the reserve.
    others.set_len(free * 4096 - reserve_bytes / 2).unwrap();
    let another = DiskConfig { path: directory.join("another"), ..config };
    match DiskStore::open(another).unwrap_err() {
        OpenError::LittleFree { reserve_bytes: told, .. } => assert_eq!(told, reserve_bytes),
        other => panic!("{other}"),
    }
}

#[test]
fn on_a_small_disk_a_store_takes_the_room_of_those_that_nobody_uses() {
    on_a_small_file_system("l3_trouble::part_of_a_small_folder");
}

#[tokio::test]
#[ignore = "played by on_a_small_disk_a_store_takes_the_room_of_those_that_nobody_uses"]
async fn part_of_a_small_folder() {
    let Some(directory) = stage() else { return };
    let folder =
        StoreFolder { path: directory.clone(), limit_bytes: 256 << 20, reserve_bytes: 2 << 20 };
    let mut promised = Vec::new();
    for bytes in [16 << 10, 32 << 10, 64 << 10] {
        let opened = folder.open(bytes).unwrap();
        promised.push(opened.store.stats().disk.unwrap().capacity_bytes);
        let bench = Bench::new(opened.store, bytes);
        for number in 0..(8 << 20) / bytes as u64 {
            assert_eq!(bench.put(number).await, Ok(Stored::New), "page {number}");
        }
        bench.store.flush().await.unwrap();
        let stats = bench.store.stats().disk.unwrap();
        assert_eq!(stats.capacity_bytes, *promised.last().unwrap(), "{stats:?}");
        assert!(stats.bytes > stats.capacity_bytes * 9 / 10, "{stats:?}");
    }
    assert!(promised.iter().all(|bytes| *bytes > 4 << 20), "{promised:?}");
    let left = fs::read_dir(&directory).unwrap().map(|entry| entry.unwrap().file_name());
    assert_eq!(left.collect::<Vec<_>>(), ["pages-of-65536-bytes"]);
}

#[test]
fn a_store_on_a_read_only_file_system_says_so() {
    on_a_small_file_system("l3_trouble::part_of_a_read_only_disk");
}

#[tokio::test]
#[ignore = "played by a_store_on_a_read_only_file_system_says_so"]
async fn part_of_a_read_only_disk() {
    let Some(directory) = stage() else { return };
    let bench = Bench::open(config(&directory.join("store"), 64));
    assert_eq!(bench.put(0).await, Ok(Stored::New));
    drop(bench);
    let remounted =
        Command::new("mount").args(["-o", "remount,ro"]).arg(&directory).status().unwrap();
    assert!(remounted.success());
    for name in ["store", "another"] {
        let refused = DiskStore::open(config(&directory.join(name), 64)).unwrap_err();
        assert!(matches!(refused, OpenError::Directory { .. }), "{refused}");
        let message = refused.to_string();
        assert!(message.contains("Read-only file system") && message.contains(name), "{message}");
    }
}

// ---- the directory cannot be used ----

/// Whoever may do anything is not told that it may not: then somebody else plays the part.
fn as_nobody(part: &str) {
    const NOBODY: u32 = 65534;
    let directory = tempfile::tempdir().unwrap();
    let mine = fs::metadata(directory.path()).unwrap().uid();
    let program = std::env::current_exe().unwrap();
    let mut command = if mine == 0 {
        // Where the program lies may be closed to others.
        let copy = directory.path().join("program");
        fs::copy(&program, &copy).unwrap();
        fs::set_permissions(directory.path(), fs::Permissions::from_mode(0o755)).unwrap();
        let mut command = Command::new("setpriv");
        command.args(["--reuid=65534", "--regid=65534", "--clear-groups"]).arg(copy);
        command
    } else {
        Command::new(program)
    };
    let stage = directory.path().join("stage");
    fs::create_dir(&stage).unwrap();
    if mine == 0 {
        chown(&stage, Some(NOBODY), Some(NOBODY)).unwrap();
    }
    command.args(["--exact", part, "--nocapture", "--include-ignored"]).env(PART, &stage);
    let output = command.current_dir(directory.path()).output().expect("setpriv of util-linux");
    let text = String::from_utf8_lossy(&output.stderr) + String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && text.contains("1 passed"), "{text}");
}

#[test]
fn a_directory_that_may_not_be_used_is_named() {
    as_nobody("l3_trouble::part_of_a_forbidden_directory");
}

#[tokio::test]
#[ignore = "played by a_directory_that_may_not_be_used_is_named"]
async fn part_of_a_forbidden_directory() {
    let Some(stage) = stage() else { return };
    let may =
        |path: &Path, mode| fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
    let store = stage.join("store");
    let bench = Bench::open(config(&store, 64));
    assert_eq!(bench.put(0).await, Ok(Stored::New));
    drop(bench);
    let refused = |path: &Path| {
        let refused = DiskStore::open(config(path, 64)).unwrap_err();
        assert!(matches!(refused, OpenError::Directory { .. }), "{refused}");
        let message = refused.to_string();
        assert!(message.contains(path.to_str().unwrap()), "which: {message}");
        assert!(message.contains("Permission denied"), "why: {message}");
        assert!(message.contains("a writable directory"), "what to do: {message}");
    };
    for file in ["lock", "data", "index"] {
        for mode in [0o444, 0o000] {
            may(&store.join(file), mode);
            refused(&store);
        }
        may(&store.join(file), 0o644);
    }
    let closed = stage.join("closed");
    fs::create_dir(&closed).unwrap();
    for mode in [0o555, 0o000] {
        may(&closed, mode);
        refused(&closed);
        refused(&closed.join("new"));
    }
    may(&closed, 0o755);
    // None of it has done any harm.
    let bench = Bench::open(config(&store, 64));
    bench.get(0).await.unwrap();
}

#[test]
fn a_directory_that_is_a_file_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("file");
    fs::write(&file, "not a store").unwrap();
    for path in [file.clone(), file.join("below")] {
        let refused = DiskStore::open(config(&path, 64)).unwrap_err();
        assert!(matches!(refused, OpenError::Directory { .. }), "{refused}");
        assert!(refused.to_string().contains(path.to_str().unwrap()), "{refused}");
    }
    assert_eq!(fs::read(file).unwrap(), b"not a store");
}

#[test]
fn settings_that_cannot_work_are_refused_before_anything_is_touched() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("store");
    let sound = config(&path, 64);
    let changes: [fn(&mut DiskConfig); 5] = [
        |config| config.object_bytes_max = 0,
        |config| config.capacity_bytes = SLOT_BYTES - 1,
        |config| config.watermark_high = 1.5,
        |config| config.watermark_low = 0.99,
        |config| config.leased_share_max = -0.1,
    ];
    for change in changes {
        let mut config = sound.clone();
        change(&mut config);
        let refused = DiskStore::open(config).unwrap_err();
        assert!(matches!(refused, OpenError::Config(_)), "{refused}");
    }
    assert!(!path.exists());
}

// ---- the directory goes away ----

#[tokio::test]
async fn a_store_whose_directory_is_removed_says_so_and_goes_on_as_it_can() {
    for io in [IoEngine::Uring, IoEngine::Threads] {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("store");
        let bench = Bench::open(DiskConfig { io, ..config(&path, 64) });
        assert_eq!(bench.put_with(0, DURABLE).await, Ok(Stored::New));
        fs::remove_dir_all(&path).unwrap();
        bench.get(0).await.expect("its files are still open");
        let lost = bench.put_with(1, DURABLE).await.unwrap_err();
        assert!(lost.is_unwell() && lost.to_string().contains("deleted"), "{lost}");
        // From here on it takes nothing that it could not keep.
        let refused = bench.put(2).await.unwrap_err();
        assert!(refused.is_unwell(), "{refused}");
        assert!(in_time(bench.store.flush()).await.is_err());
        bench.get(0).await.expect("its files are still open");
        assert_eq!(bench.get(3).await, Err(StoreError::Missing));
        assert!(in_time(bench.store.shutdown()).await.is_err());
        // The same place is free for another store.
        let other = Bench::open(config(&path, 64));
        assert_eq!(other.put_with(0, DURABLE).await, Ok(Stored::New));
        drop(bench);
        other.get(0).await.unwrap();
    }
}

#[tokio::test]
async fn memory_goes_on_alone_when_its_disk_goes_away() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("store");
    let memory =
        MemoryStore::new(MemoryConfig::new(16 * OBJECT_BYTES_MAX as u64, OBJECT_BYTES_MAX))
            .unwrap();
    let disk = DiskStore::open(config(&path, 64)).unwrap();
    let tiers = TieredStore::new(memory, disk, TieredConfig::default()).unwrap();
    let bench = Bench::new(tiers, OBJECT_BYTES_MAX);
    assert_eq!(bench.put_with(0, DURABLE).await, Ok(Stored::New));
    fs::remove_dir_all(&path).unwrap();
    assert!(bench.put_with(1, DURABLE).await.is_err(), "it is not durable and does not say so");
    for number in 2..8 {
        assert_eq!(bench.put(number).await, Ok(Stored::New));
        bench.get(number).await.unwrap();
    }
    bench.get(0).await.unwrap();
    assert!(in_time(bench.store.shutdown()).await.is_err());
}

// ---- others use the directory ----

#[tokio::test]
async fn a_store_that_another_process_has_open_is_refused_and_the_process_named() {
    let directory = tempfile::tempdir().unwrap();
    let mut other = Command::new(std::env::current_exe().unwrap())
        .args([
            "--exact",
            "l3_trouble::part_of_the_other_process",
            "--nocapture",
            "--include-ignored",
        ])
        .env(PART, directory.path())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(other.stdout.take().unwrap()).lines();
    assert!(lines.any(|line| line.unwrap().ends_with("it is open")));
    let refused = DiskStore::open(config(directory.path(), 64)).unwrap_err();
    let OpenError::InUse { owner, .. } = &refused else { panic!("{refused}") };
    assert_eq!(*owner, format!("process {}", other.id()));
    assert!(refused.to_string().contains("stop it, or choose another directory"), "{refused}");
    // Its end, however sudden, frees the directory.
    other.kill().unwrap();
    other.wait().unwrap();
    let bench = Bench::open(config(directory.path(), 64));
    bench.get(0).await.expect("it was durable");
    let refused = DiskStore::open(config(directory.path(), 64)).unwrap_err();
    let OpenError::InUse { owner, .. } = &refused else { panic!("{refused}") };
    assert_eq!(*owner, format!("process {}", std::process::id()), "nor twice in one process");
}

#[tokio::test]
#[ignore = "played by a_store_that_another_process_has_open_is_refused_and_the_process_named"]
async fn part_of_the_other_process() {
    let Some(directory) = stage() else { return };
    let bench = Bench::open(config(&directory, 64));
    assert_eq!(bench.put_with(0, DURABLE).await, Ok(Stored::New));
    println!("it is open");
    // Until somebody ends this process, or whoever could is gone.
    let _ = std::io::stdin().read(&mut [0]);
}

#[tokio::test]
async fn a_store_made_for_other_objects_is_refused_and_left_as_it_is() {
    let directory = tempfile::tempdir().unwrap();
    let bench = Bench::open(config(directory.path(), 64));
    assert_eq!(bench.put(0).await, Ok(Stored::New));
    drop(bench);
    for wanted in [OBJECT_BYTES_MAX - 1, OBJECT_BYTES_MAX + 1, 1 << 20] {
        let other = DiskConfig {
            object_bytes_max: wanted,
            capacity_bytes: 1 << 30,
            ..config(directory.path(), 64)
        };
        let refused = DiskStore::open(other).unwrap_err();
        let OpenError::OtherObjects { found, wanted: asked, .. } = refused else {
            panic!("{refused}");
        };
        assert_eq!((found, asked), (OBJECT_BYTES_MAX, wanted));
        let message = refused.to_string();
        assert!(
            message.contains("4096 bytes") && message.contains("another directory"),
            "{message}"
        );
    }
    Bench::open(config(directory.path(), 64)).get(0).await.unwrap();
}

#[tokio::test]
async fn an_index_that_is_none_is_refused_and_left_as_it_is() {
    let noise: Vec<u8> = (0..20_000u32).map(|number| (number * 7 + number / 256) as u8).collect();
    for length in [5, 4096, noise.len()] {
        let directory = tempfile::tempdir().unwrap();
        let index = directory.path().join("index");
        fs::write(&index, &noise[..length]).unwrap();
        let refused = DiskStore::open(config(directory.path(), 64)).unwrap_err();
        assert!(matches!(refused, OpenError::Unreadable { .. }), "{refused}");
        assert!(refused.to_string().contains("move it away"), "{refused}");
        assert!(fs::read(&index).unwrap().starts_with(&noise[..length]));
    }
}

#[tokio::test]
async fn entries_that_are_none_are_empty_slots() {
    let directory = tempfile::tempdir().unwrap();
    let bench = Bench::open(config(directory.path(), 128));
    for number in 0..100 {
        assert_eq!(bench.put(number).await, Ok(Stored::New));
    }
    drop(bench);
    let index = directory.path().join("index");
    let mut bytes = fs::read(&index).unwrap();
    for (number, byte) in bytes[4096..].iter_mut().enumerate() {
        // Half of the entries are noise.
        if number / 64 % 2 == 0 {
            *byte = byte.wrapping_add((number % 251) as u8);
        }
    }
    fs::write(&index, bytes).unwrap();
    let bench = Bench::open(config(directory.path(), 128));
    let there = bench.present(0..100).await;
    assert_eq!(there.len(), 50);
    for number in there {
        bench.get(number).await.unwrap();
    }
    for number in 200..300 {
        assert_eq!(bench.put(number).await, Ok(Stored::New));
        bench.get_unless_evicted(number).await;
    }
}

// ---- the settings change ----

#[tokio::test]
async fn a_store_may_become_smaller_and_larger() {
    // The last index block of the small store has entries of slots that it has not any more.
    for small in [1, 10, 64, 70, 127] {
        let directory = tempfile::tempdir().unwrap();
        let bench = Bench::open(config(directory.path(), 200));
        for number in 0..200 {
            assert_eq!(bench.put(number).await, Ok(Stored::New));
        }
        drop(bench);
        let bench = Bench::open(config(directory.path(), small));
        let kept = bench.present(0..200).await;
        assert!(kept.len() <= small as usize, "{small}: {kept:?}");
        for number in &kept {
            bench.get(*number).await.unwrap();
        }
        drop(bench);
        for _ in 0..3 {
            let bench = Bench::open(config(directory.path(), 200));
            // What is said to be there is there, also when the data file has grown again.
            bench.store.flush().await.unwrap();
            let there = bench.present(0..200).await;
            assert!(there.iter().all(|number| kept.contains(number)), "{small}: {there:?}");
            for number in there {
                bench.get(number).await.unwrap();
            }
        }
        let bench = Bench::open(config(directory.path(), 200));
        for number in 300..450 {
            assert_eq!(bench.put(number).await, Ok(Stored::New));
            bench.get_unless_evicted(number).await;
        }
        let stats = bench.store.stats().disk.unwrap();
        assert_eq!((stats.corrupt, stats.io_errors), (0, 0));
    }
}

#[tokio::test]
async fn a_smaller_store_keeps_what_is_newest_and_says_what_it_dropped() {
    let directory = tempfile::tempdir().unwrap();
    let bench = Bench::open(config(directory.path(), 200));
    for number in 0..150 {
        assert_eq!(bench.put(number).await, Ok(Stored::New));
    }
    drop(bench);
    for dropped in [101, 0] {
        let store = DiskStore::open(config(directory.path(), 50)).unwrap();
        let opening = store.opening();
        assert_eq!(opening.dropped.objects, dropped);
        assert_eq!(opening.dropped.bytes, dropped * OBJECT_BYTES_MAX as u64);
        let bench = Bench::new(store, OBJECT_BYTES_MAX);
        assert_eq!(bench.present(0..150).await, Vec::from_iter(101..150));
        for number in 101..150 {
            bench.get(number).await.unwrap();
        }
        assert_eq!(fs::metadata(directory.path().join("data")).unwrap().len(), 50 * SLOT_BYTES);
    }
}

#[tokio::test]
async fn a_data_file_that_lost_its_end_costs_what_lay_there() {
    let directory = tempfile::tempdir().unwrap();
    let bench = Bench::open(config(directory.path(), 200));
    for number in 0..150 {
        assert_eq!(bench.put(number).await, Ok(Stored::New));
    }
    drop(bench);
    let data = fs::OpenOptions::new().write(true).open(directory.path().join("data")).unwrap();
    data.set_len(100 * SLOT_BYTES).unwrap();
    for _ in 0..3 {
        let bench = Bench::open(config(directory.path(), 200));
        bench.store.flush().await.unwrap();
        let mut served = 0;
        for number in bench.present(0..150).await {
            match bench.get(number).await {
                Ok(()) => served += 1,
                Err(StoreError::Corrupt(_)) => {
                    assert!(bench.present(number..number + 1).await.is_empty())
                }
                Err(error) => panic!("{error}"),
            }
        }
        assert_eq!(served, 100);
    }
}

#[tokio::test]
async fn the_engine_may_be_another_each_time() {
    let directory = tempfile::tempdir().unwrap();
    for (number, io) in [IoEngine::Uring, IoEngine::Threads, IoEngine::Auto].into_iter().enumerate()
    {
        let bench = Bench::open(DiskConfig { io, ..config(directory.path(), 64) });
        assert_eq!(bench.put(number as u64).await, Ok(Stored::New));
        for number in 0..=number as u64 {
            bench.get(number).await.unwrap();
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_store_can_be_opened_again_when_it_was_shut_down_and_dropped() {
    let directory = tempfile::tempdir().unwrap();
    let numbers = 0..8;
    for round in 0..30 {
        let config = config(directory.path(), 64);
        let opened = DiskStore::open(config);
        let disk = opened.unwrap_or_else(|error| panic!("round {round}: {error}"));
        let memory = MemoryConfig::new(8 * OBJECT_BYTES_MAX as u64, OBJECT_BYTES_MAX);
        let memory = MemoryStore::new(memory).unwrap();
        let tiers = TieredStore::new(memory, disk, TieredConfig::default()).unwrap();
        let bench = Bench::new(tiers, OBJECT_BYTES_MAX);
        for number in numbers.clone() {
            bench.put(number).await.unwrap();
        }
        let ids: Vec<ObjectId> = numbers.clone().map(page).collect();
        let prefetch = ExistsOptions { prefetch_to_memory: true, lease: false };
        bench.store.exists(&ids, prefetch).await;
        in_time(bench.store.shutdown()).await.unwrap();
    }
}
