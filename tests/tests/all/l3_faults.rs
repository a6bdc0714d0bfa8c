//! A disk store on a disk that fails: every operation once, in every way, and every field of what
//! is stored damaged. Nothing wrong is answered, nothing durable is lost, and nothing hangs.

use std::collections::BTreeSet;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use terrace_kit::Dice;
use terrace_l3::{
    Arena, ExistsOptions, HEADER_BYTES, Mismatch, ObjectId, PutOptions, Registration, Removal,
    Served, Store, StoreError, Stored, TierStats,
};
use terrace_l3_disk::{BLOCK_BYTES, Disk, DiskConfig, DiskFile, DiskStore, OpenError};
use terrace_tests::l3::objects;
use terrace_tests::l3::simulated_disk::{Errno, Failure, Fault, Operation, SimulatedDisk};

/// One whole block and a bit.
const OBJECT_BYTES: usize = 5000;
const SLOT_BYTES: u64 = 3 * BLOCK_BYTES as u64;
const ENTRY_BYTES: u64 = 64;
const DURABLE: PutOptions = PutOptions { pin: None, durable: true };
const LATER: PutOptions = PutOptions { pin: None, durable: false };
/// Nothing takes so long.
const TOO_LONG: Duration = Duration::from_secs(20);

/// A store whose rounds come on demand and which grows by eight objects.
fn config(slots: u64) -> DiskConfig {
    DiskConfig {
        grow_bytes: 8 * SLOT_BYTES,
        commit_interval_ms: 3_600_000,
        ..DiskConfig::new("simulated", slots * SLOT_BYTES, OBJECT_BYTES)
    }
}

/// A store on a simulated disk, and memory to use it.
struct Bench {
    store: DiskStore,
    disk: Arc<SimulatedDisk>,
    arena: Arena,
    _registration: Registration,
}

impl Bench {
    fn try_new(disk: &Arc<SimulatedDisk>, slots: u64) -> Result<Self, OpenError> {
        let store = DiskStore::open_on(disk.clone(), config(slots))?;
        let arena = Arena::new(2, OBJECT_BYTES).unwrap();
        let _registration = store.register(&arena).unwrap();
        Ok(Self { store, disk: disk.clone(), arena, _registration })
    }

    fn new(disk: SimulatedDisk, slots: u64) -> Self {
        Self::try_new(&Arc::new(disk), slots).unwrap()
    }

    async fn put(&self, id: ObjectId, options: PutOptions) -> Result<Stored, StoreError> {
        let put = objects::put(&self.store, &self.arena, id, OBJECT_BYTES, options);
        tokio::time::timeout(TOO_LONG, put).await.expect("a put ends")
    }

    async fn get(&self, id: ObjectId) -> Result<Served, StoreError> {
        let get = objects::get(&self.store, &self.arena, id, OBJECT_BYTES);
        tokio::time::timeout(TOO_LONG, get).await.expect("a get ends")
    }

    async fn flush(&self) -> Result<(), StoreError> {
        tokio::time::timeout(TOO_LONG, self.store.flush()).await.expect("a flush ends")
    }

    async fn remove(&self, id: ObjectId) -> Result<(), StoreError> {
        self.store.remove(&[id], Removal::Plain).await.remove(0)
    }

    async fn has(&self, id: ObjectId) -> bool {
        let presence = self.store.exists(&[id], ExistsOptions::default()).await.remove(0);
        presence.unwrap().is_present()
    }

    fn fail(&self, operation: Operation, file: DiskFile, failure: Failure) {
        self.disk.fail(Fault { operation, file, after: 0, failure, lasting: false });
    }

    fn stats(&self) -> TierStats {
        self.store.stats().disk.unwrap()
    }
}

/// What a store has promised while its disk failed.
#[derive(Default)]
struct Promised {
    ids: BTreeSet<ObjectId>,
    durable: BTreeSet<ObjectId>,
    /// Some may have had to go.
    evicted: bool,
}

impl Promised {
    async fn put(&mut self, bench: &Bench, id: ObjectId, options: PutOptions) {
        self.ids.insert(id);
        for lower in 0..id.generation {
            self.durable.remove(&id.with_generation(lower));
        }
        match bench.put(id, options).await {
            Ok(_) if options.durable => drop(self.durable.insert(id)),
            Ok(_) | Err(StoreError::Io { .. }) => {}
            Err(error) => panic!("{id:?} could not be stored: {error}"),
        }
    }

    async fn get(&mut self, bench: &Bench, id: ObjectId) {
        match bench.get(id).await {
            Ok(_) | Err(StoreError::Io { .. }) => {}
            Err(StoreError::Missing) => assert!(!bench.has(id).await),
            // A read that was too short.
            Err(StoreError::Corrupt(_)) => drop(self.durable.remove(&id)),
            Err(error) => panic!("{id:?} could not be read: {error}"),
        }
    }

    async fn remove(&mut self, bench: &Bench, id: ObjectId) {
        self.durable.remove(&id);
        match bench.remove(id).await {
            Ok(()) | Err(StoreError::Missing) => {}
            Err(error) => panic!("{id:?} could not be removed: {error}"),
        }
    }

    /// A bit of everything.
    async fn work(&mut self, bench: &Bench) {
        for number in 0..6 {
            let options = if number % 2 == 0 { DURABLE } else { LATER };
            self.put(bench, objects::page(number), options).await;
        }
        for number in 0..7 {
            self.get(bench, objects::page(number)).await;
        }
        self.remove(bench, objects::page(0)).await;
        self.put(bench, objects::page(2).with_generation(1), LATER).await;
        self.put(bench, objects::page(4).with_generation(1), DURABLE).await;
        self.remove(bench, objects::page(1)).await;
        if bench.flush().await.is_ok() {
            for id in &self.ids {
                if bench.has(*id).await {
                    self.durable.insert(*id);
                }
            }
        }
        for number in 10..24 {
            self.put(bench, objects::page(number), LATER).await;
            self.get(bench, objects::page(number)).await;
        }
        self.evicted = bench.stats().evicted > 0;
    }

    /// Looks at what the store says on a disk that is well again.
    async fn check(&self, disk: SimulatedDisk, slots: u64) {
        let bench = Bench::new(disk, slots);
        for id in &self.ids {
            let (has, read) = (bench.has(*id).await, bench.get(*id).await);
            assert_eq!(has, read.is_ok(), "{id:?} reads {read:?}");
            assert!(read.is_ok() || read == Err(StoreError::Missing), "{id:?} reads {read:?}");
            assert!(has || self.evicted || !self.durable.contains(id), "{id:?} is lost");
        }
        bench.put(objects::page(1000), LATER).await.unwrap();
        bench.get(objects::page(1000)).await.unwrap();
        bench.flush().await.unwrap();
    }
}

/// Lets one operation after the other fail, and answers how many there were.
async fn fail_each(operation: Operation, file: DiskFile, failure: Failure, slots: u64) -> u64 {
    let mut after = 0;
    loop {
        let disk = Arc::new(SimulatedDisk::new());
        disk.fail(Fault { operation, file, after, failure, lasting: false });
        let mut promised = Promised::default();
        match Bench::try_new(&disk, slots) {
            Ok(bench) => promised.work(&bench).await,
            Err(OpenError::Directory { .. } | OpenError::NoRoom { .. }) => {}
            Err(error) => panic!("{error}"),
        }
        let struck = disk.heal() == 0;
        // The store is closed, or the power fails.
        promised.check(disk.copy(), slots).await;
        let history = disk.history();
        for seed in 0..4 {
            let at = history.events().len();
            let disk = SimulatedDisk::after_crash(&history, at, &mut Dice::new(after * 4 + seed));
            promised.check(disk, slots).await;
        }
        if !struck {
            return after;
        }
        after += 1;
    }
}

#[tokio::test]
async fn every_operation_fails_in_every_way() {
    let errors = [Failure::Error(Errno::Io), Failure::Error(Errno::NoSpace)];
    let short = [Failure::Short(0), Failure::Short(700), Failure::Short(BLOCK_BYTES)];
    // With room for everything, and with little.
    for slots in [32, 12] {
        for file in [DiskFile::Data, DiskFile::Index] {
            for operation in [Operation::Read, Operation::Write] {
                for failure in errors.into_iter().chain(short) {
                    let count = fail_each(operation, file, failure, slots).await;
                    assert!(count > 0, "{operation:?} of {file:?} never fails");
                }
            }
            for operation in [Operation::Sync, Operation::Grow] {
                for failure in errors {
                    let count = fail_each(operation, file, failure, slots).await;
                    assert!(count > 0, "{operation:?} of {file:?} never fails");
                }
            }
        }
    }
}

#[tokio::test]
async fn a_sync_that_fails_ends_all_writing_and_no_reading() {
    for file in [DiskFile::Data, DiskFile::Index] {
        let bench = Bench::new(SimulatedDisk::new(), 32);
        bench.put(objects::page(1), DURABLE).await.unwrap();
        bench.put(objects::page(2), LATER).await.unwrap();
        assert_eq!(bench.stats().broken, 0);
        bench.fail(Operation::Sync, file, Failure::Error(Errno::Io));
        let waiting = {
            let store = bench.store.clone();
            tokio::spawn(async move { store.flush().await })
        };
        let refused = bench.put(objects::page(3), DURABLE).await.unwrap_err();
        let StoreError::Io { during: "making changes durable", .. } = &refused else {
            panic!("{refused}")
        };
        assert!(refused.is_unwell());
        assert_eq!(waiting.await.unwrap(), Err(refused.clone()));
        assert_eq!(bench.flush().await, Err(refused.clone()));
        assert_eq!(bench.stats().broken, 1);
        for number in [1, 2, 4] {
            let again = bench.put(objects::page(number), LATER).await;
            assert_eq!(again, Err(refused.clone()), "the store takes nothing more");
        }
        for number in 1..=3 {
            bench.get(objects::page(number)).await.unwrap();
        }
        bench.remove(objects::page(2)).await.unwrap();
        assert_eq!(bench.store.shutdown().await, Err(refused));
        let disk = bench.disk.copy();
        drop(bench);
        let bench = Bench::new(disk, 32);
        bench.get(objects::page(1)).await.unwrap();
        bench.put(objects::page(4), DURABLE).await.unwrap();
    }
}

#[tokio::test]
async fn a_full_disk_leaves_the_store_as_large_as_it_is() {
    // The second block of entries is needed for the 65th slot.
    for (file, slots, objects_max) in [(DiskFile::Data, 64, 8), (DiskFile::Index, 128, 64)] {
        let bench = Bench::new(SimulatedDisk::new(), slots);
        let failure = Failure::Error(Errno::NoSpace);
        let operation = Operation::Grow;
        bench.disk.fail(Fault { operation, file, after: 0, failure, lasting: true });
        for number in 0..100 {
            assert_eq!(bench.put(objects::page(number), LATER).await, Ok(Stored::New), "{number}");
            bench.get(objects::page(number)).await.unwrap();
        }
        let stats = bench.stats();
        assert!(stats.disk_full >= 1 && stats.objects <= objects_max, "{stats:?}");
        assert_eq!(stats.evicted + stats.objects, 100);
        // The next time there may be room.
        bench.disk.heal();
        let disk = bench.disk.clone();
        drop(bench);
        let bench = Bench::try_new(&disk, slots).unwrap();
        let room = slots - bench.stats().objects;
        for number in 100..100 + room.min(40) {
            bench.put(objects::page(number), LATER).await.unwrap();
        }
        assert_eq!(bench.stats().evicted, 0);
    }
}

#[tokio::test]
async fn files_and_memory_of_a_large_store_grow_with_its_objects() {
    const CAPACITY_BYTES: u64 = 10 << 40;
    let disk = Arc::new(SimulatedDisk::new());
    let config = DiskConfig { capacity_bytes: CAPACITY_BYTES, ..config(1) };
    let slots = CAPACITY_BYTES / SLOT_BYTES;
    let store = DiskStore::open_on(disk.clone(), config.clone()).unwrap();
    let arena = Arena::new(1, OBJECT_BYTES).unwrap();
    let _registration = store.register(&arena).unwrap();
    for number in 0..100 {
        objects::put(&store, &arena, objects::page(number), OBJECT_BYTES, LATER).await.unwrap();
    }
    store.flush().await.unwrap();
    let memory = store.stats().disk.unwrap().index_bytes;
    assert!(memory < slots / 100, "{memory} bytes of memory for 100 objects");
    let index_bytes = disk.length(DiskFile::Index).unwrap();
    assert!(index_bytes <= 4 * BLOCK_BYTES as u64, "{index_bytes} bytes of index");
    drop(store);
    let store = DiskStore::open_on(Arc::new(disk.copy()), config).unwrap();
    assert_eq!(store.stats().disk.unwrap().objects, 100);
}

#[tokio::test]
async fn a_store_that_finds_no_room_at_all_says_so() {
    for file in [DiskFile::Data, DiskFile::Index] {
        let disk = Arc::new(SimulatedDisk::new());
        let failure = Failure::Error(Errno::NoSpace);
        disk.fail(Fault { operation: Operation::Grow, file, after: 0, failure, lasting: true });
        let error = Bench::try_new(&disk, 8).err().unwrap();
        assert!(matches!(error, OpenError::NoRoom { .. }), "{error}");
        disk.heal();
        Bench::try_new(&disk, 8).unwrap().put(objects::page(1), DURABLE).await.unwrap();
    }
}

#[tokio::test]
async fn a_write_that_fails_costs_its_object_and_nothing_else() {
    const SLOTS: u64 = 8;
    let failures = [
        (Failure::Error(Errno::Io), None),
        (Failure::Error(Errno::NoSpace), Some(io::ErrorKind::StorageFull)),
        (Failure::Short(BLOCK_BYTES + 1), Some(io::ErrorKind::UnexpectedEof)),
    ];
    for (failure, expected) in failures {
        let bench = Bench::new(SimulatedDisk::new(), 2 * SLOTS);
        bench.fail(Operation::Write, DiskFile::Data, failure);
        let error = bench.put(objects::page(0), DURABLE).await.unwrap_err();
        let StoreError::Io { kind, during: "writing an object", .. } = error else {
            panic!("{error}")
        };
        assert!(expected.is_none_or(|expected| kind == expected), "{kind:?}");
        assert!(!bench.has(objects::page(0)).await);
        assert_eq!((bench.stats().io_errors, bench.stats().puts), (1, 0));
        // Its slot is not lost.
        for number in 0..SLOTS {
            bench.put(objects::page(number), LATER).await.unwrap();
        }
        assert_eq!((bench.stats().evicted, bench.stats().objects), (0, SLOTS));
    }
}

#[tokio::test]
async fn a_read_that_fails_is_no_proof_of_damage_and_a_short_one_is() {
    let bench = Bench::new(SimulatedDisk::new(), 8);
    for number in 0..3 {
        bench.put(objects::page(number), DURABLE).await.unwrap();
    }
    bench.fail(Operation::Read, DiskFile::Data, Failure::Error(Errno::Io));
    let error = bench.get(objects::page(1)).await.unwrap_err();
    assert!(matches!(error, StoreError::Io { during: "reading an object", .. }), "{error}");
    bench.get(objects::page(1)).await.unwrap();
    assert_eq!((bench.stats().io_errors, bench.stats().corrupt), (1, 0));
    bench.fail(Operation::Read, DiskFile::Data, Failure::Short(BLOCK_BYTES + 904));
    let error = bench.get(objects::page(1)).await.unwrap_err();
    assert_eq!(error, StoreError::Corrupt(Mismatch::Length));
    assert_gone(&bench, 1).await;
}

#[tokio::test]
async fn a_write_that_never_happened_is_noticed() {
    let id = |generation| objects::page(1).with_generation(generation);
    let bench = Bench::new(SimulatedDisk::new(), 8);
    for number in [0, 2] {
        bench.put(objects::page(number), DURABLE).await.unwrap();
    }
    for (generation, expected) in [(0, Mismatch::Magic), (2, Mismatch::Generation)] {
        bench.fail(Operation::Write, DiskFile::Data, Failure::Lost);
        bench.put(id(generation), DURABLE).await.unwrap();
        let error = bench.get(id(generation)).await.unwrap_err();
        assert_eq!(error, StoreError::Corrupt(expected));
        assert!(!bench.has(id(generation)).await);
        // The slot that is used next is the one that this leaves.
        bench.flush().await.unwrap();
        bench.put(id(1), DURABLE).await.unwrap();
        bench.remove(id(1)).await.unwrap();
        bench.flush().await.unwrap();
    }
    assert_eq!(bench.stats().corrupt, 2);
}

/// Object 1 of 0, 1 and 2 was damaged and is no more, now or later; the others are well.
async fn assert_gone(bench: &Bench, corrupt: u64) {
    let one = objects::page(1);
    assert!(!bench.has(one).await);
    assert_eq!(bench.get(one).await, Err(StoreError::Missing));
    assert_eq!(bench.stats().corrupt, corrupt);
    assert_eq!(bench.stats().objects, 2);
    bench.flush().await.unwrap();
    let again = Bench::new(bench.disk.copy(), 8);
    assert_eq!(again.get(one).await, Err(StoreError::Missing));
    for bench in [bench, &again] {
        for number in [0, 2] {
            bench.get(objects::page(number)).await.unwrap();
        }
        bench.put(one, DURABLE).await.unwrap();
        bench.get(one).await.unwrap();
    }
}

/// A disk with objects 0, 1 and 2 in the first three slots.
async fn three_objects() -> Arc<SimulatedDisk> {
    let bench = Bench::new(SimulatedDisk::new(), 8);
    for number in 0..3 {
        bench.put(objects::page(number), DURABLE).await.unwrap();
    }
    bench.disk.clone()
}

#[tokio::test]
async fn damaged_objects_are_never_served() {
    let template = three_objects().await;
    let header = BLOCK_BYTES as u64;
    let payload = OBJECT_BYTES as u64;
    assert_eq!(template.bytes(DiskFile::Data, SLOT_BYTES..SLOT_BYTES + 8), b"TERRACEO");
    let mut damages: Vec<(u64, Mismatch)> = Vec::new();
    for byte in 0..HEADER_BYTES as u64 {
        damages.push((
            byte,
            match byte {
                0..8 => Mismatch::Magic,
                8..16 => Mismatch::Version,
                16.. => Mismatch::HeaderChecksum,
            },
        ));
    }
    for byte in [0, payload / 2, payload - 1] {
        damages.push((header + byte, Mismatch::Payload));
    }
    for (byte, expected) in damages {
        let bench = Bench::new(template.copy(), 8);
        bench.disk.flip_bit(DiskFile::Data, SLOT_BYTES + byte, byte as u32 % 8);
        let read = bench.get(objects::page(1)).await;
        assert_eq!(read, Err(StoreError::Corrupt(expected)), "byte {byte}");
        assert_gone(&bench, 1).await;
    }
    // What lies between and behind belongs to nobody.
    let bench = Bench::new(template.copy(), 8);
    for byte in [HEADER_BYTES as u64, header - 1, header + payload, SLOT_BYTES - 1] {
        bench.disk.flip_bit(DiskFile::Data, SLOT_BYTES + byte, 3);
        bench.get(objects::page(1)).await.unwrap();
    }
}

#[tokio::test]
async fn a_damaged_entry_of_the_index_is_an_empty_slot_or_has_an_unknown_owner() {
    let template = three_objects().await;
    for byte in 0..ENTRY_BYTES {
        let disk = template.copy();
        let entry = BLOCK_BYTES as u64 + ENTRY_BYTES;
        disk.flip_bit(DiskFile::Index, entry + byte, byte as u32 % 8);
        let bench = Bench::new(disk, 8);
        if let 44..48 | 52..56 = byte {
            bench.get(objects::page(1)).await.unwrap();
            assert_eq!((bench.stats().objects, bench.stats().hard_pinned), (3, 1));
        } else {
            assert_gone(&bench, 0).await;
        }
    }
}

#[tokio::test]
async fn a_damaged_description_is_no_reason_to_begin_anew() {
    let template = three_objects().await;
    for bit in 0..32 * 8 {
        let disk = Arc::new(template.copy());
        disk.flip_bit(DiskFile::Index, bit / 8, bit as u32 % 8);
        let error = Bench::try_new(&disk, 8).err().unwrap();
        assert!(matches!(error, OpenError::Unreadable { .. }), "{error}");
        disk.flip_bit(DiskFile::Index, bit / 8, bit as u32 % 8);
        let bench = Bench::try_new(&disk, 8).unwrap();
        for number in 0..3 {
            bench.get(objects::page(number)).await.unwrap();
        }
    }
}
