use super::keys::{CELLS, OWNER_COPIES, first_cell};
use super::*;
use terrace_l3::{
    ExistsOptions, MemoryConfig, MemoryStore, Pin, Put, PutOptions, Removal, TierStats,
};

const BYTES: usize = 8192;

fn store() -> Arc<MemoryStore> {
    Arc::new(MemoryStore::new(MemoryConfig::new(1024 * BYTES as u64, BYTES)).unwrap())
}

fn secret() -> Secret {
    Secret::new(b"of this run")
}

/// Number of objects besides the notes of the producers' numbers.
fn objects(store: &MemoryStore, producers: u64) -> u64 {
    store.stats().memory.unwrap().objects - producers * u64::from(OWNER_COPIES)
}

async fn open(store: &Arc<MemoryStore>, config: FeatureConfig) -> FeatureStore {
    FeatureStore::open(store.clone(), config).await.unwrap()
}

async fn put(features: &FeatureStore, sample: &str) -> Result<FeatureRef, FeatureError> {
    let arena = Arena::new(1, BYTES).unwrap();
    let _registration = features.register(&arena).unwrap();
    arena.target(0).unwrap().fill(7);
    let spec = TensorSpec::new("hidden", Dtype::U8, [BYTES as u64]);
    features.put(sample, vec![Tensor::new(spec, arena.source(0).unwrap())]).await
}

/// Replaces an object by other bytes, as an attacker with write access to the store could.
async fn plant(store: &MemoryStore, id: ObjectId, bytes: &[u8]) {
    drop(store.remove(&[id], Removal::Final).await);
    let arena = Arena::new(1, bytes.len()).unwrap();
    let _registration = store.register(&arena).unwrap();
    arena.target(0).unwrap().copy_from_slice(bytes);
    let options = PutOptions { pin: Some(Pin::Hard(Owner::named("a forger"))), durable: false };
    let put = Put::new(id, arena.source(0).unwrap());
    store.put_from(vec![put], options).await.remove(0).unwrap();
}

/// Bytes of an object.
async fn bytes_of(store: &MemoryStore, id: ObjectId, length: usize) -> Vec<u8> {
    let arena = Arena::new(1, length).unwrap();
    let _registration = store.register(&arena).unwrap();
    let get = Get::new(id, arena.target(0).unwrap());
    store.get_into(vec![get], GetOptions::default()).await.remove(0).unwrap();
    arena.source(0).unwrap().to_vec()
}

/// Changes one byte of an object.
async fn alter(store: &MemoryStore, id: ObjectId, length: usize) {
    let mut bytes = bytes_of(store, id, length).await;
    bytes[length / 2] ^= 1;
    plant(store, id, &bytes).await;
}

fn is_forged<T: std::fmt::Debug>(result: Result<T, FeatureError>, whose: &str) {
    match result {
        Err(FeatureError::ForgedObject { what, key }) => {
            assert!(format!("{what} {key}").contains(whose), "{what} {key}");
        }
        other => panic!("{whose}: {other:?}"),
    }
}

/// A put reads the cells for claims on its sample, not one place per producer.
#[tokio::test]
async fn the_number_of_lookups_of_a_put_is_independent_of_the_number_of_producers() {
    const PRODUCERS: u16 = 100;
    let store = store();
    let asked = || -> TierStats { store.stats().memory.unwrap() };
    let step = (OWNERS_MAX - 1) / (PRODUCERS - 1);
    let mut former: Option<FeatureRef> = None;
    let mut most = (0, 0, 0);
    for owner in (0..PRODUCERS).map(|number| number * step) {
        let config = FeatureConfig { samples_max: 4, ..FeatureConfig::producer("f", owner) };
        let producer = open(&store, config).await;
        let before = asked();
        let reference = put(&producer, "the same").await.unwrap();
        let after = asked();
        most.0 = most.0.max(after.exists - before.exists);
        most.1 = most.1.max(after.gets - before.gets);
        most.2 = most.2.max(after.puts - before.puts);
        if let Some(former) = former.replace(reference) {
            let gone = producer.get(&former).await;
            assert!(matches!(gone, Err(FeatureError::Gone { .. })), "{gone:?}");
        }
        producer.get(former.as_ref().unwrap()).await.unwrap();
        // The previous one has its claim until its next gc.
        if owner >= step {
            let config = FeatureConfig::producer("f", owner - step);
            open(&store, FeatureConfig { samples_max: 4, ..config }).await;
        }
    }
    println!("the most for one put: {} asked about, {} read, {} written", most.0, most.1, most.2);
    assert!(most.0 <= 2 * u64::from(CELLS) + 2, "{most:?}");
    assert!(most.1 <= 6 && most.2 <= 4, "{most:?}");
    assert_eq!(objects(&store, PRODUCERS.into()), 3, "one sample: a tensor and two notes");
}

/// As many producers as there are cells put one sample concurrently: none takes another's cell.
#[tokio::test]
async fn producers_without_gc_leave_no_orphaned_claims() {
    let store = store();
    let mut producers = Vec::new();
    for owner in 0..u16::from(CELLS) + 1 {
        let config = FeatureConfig { samples_max: 4, ..FeatureConfig::producer("f", owner) };
        producers.push(open(&store, config).await);
    }
    let (last, others) = producers.split_last().unwrap();
    for (number, producer) in others.iter().enumerate() {
        // A producer that finds no cell may be refused for now.
        match put(producer, "the same").await {
            Ok(_) => {}
            Err(FeatureError::Store { error: StoreError::BeingWritten, .. }) if number > 15 => {}
            Err(error) => panic!("producer {number}: {error}"),
        }
    }
    for producer in others {
        producer.gc().await.unwrap();
    }
    let reference = put(last, "the same").await.unwrap();
    for producer in others {
        producer.shared.gc(Duration::ZERO).await.unwrap();
    }
    last.get(&reference).await.unwrap();
    assert_eq!(objects(&store, producers.len() as u64), 3, "one sample: a tensor and two notes");
}

/// When the result of a claim's put was lost, another producer's claim may be there.
#[tokio::test]
async fn a_claim_that_may_be_ours_is_removed_only_if_it_is() {
    let store = store();
    let producer = open(&store, FeatureConfig::producer("f", 0)).await;
    let other = open(&store, FeatureConfig::producer("f", 1)).await;
    let (ours, theirs) =
        (put(&producer, "ours").await.unwrap(), put(&other, "theirs").await.unwrap());
    let shared = &producer.shared;
    for (reference, is_removed) in [(&ours, true), (&theirs, false)] {
        let FeatureRef { sample, generation, .. } = reference;
        let number = first_cell(*generation);
        let own = ledger::Own {
            slot: 1,
            created_ms: 0,
            cell: Some(ledger::Cell { number, is_ours: false }),
            seen: None,
        };
        let mut entry = shared.entry(sample, Vec::new());
        entry.own = Some(own);
        let mut work = ledger::FreeingWork { generation: ours.generation, entry };
        shared.disown(&mut work).await.unwrap();
        let claim = shared.keys.claim(sample, number);
        assert_eq!(shared.notes_of(&work).contains(&claim), is_removed, "{sample}");
    }
}

#[tokio::test]
async fn a_tensor_that_differs_from_the_ref_is_refused() {
    let store = store();
    let config = |config| FeatureConfig { secret: Some(secret()), ..config };
    let producer = open(&store, config(FeatureConfig::producer("f", 0))).await;
    let consumer = open(&store, config(FeatureConfig::consumer("f"))).await;
    let reference = put(&producer, "a").await.unwrap();
    consumer.get(&reference).await.unwrap();
    let (_, id) = producer.objects(&reference).remove(0);
    alter(&store, id, BYTES).await;
    is_forged(consumer.get(&reference).await, "f/a/");
    assert_eq!(consumer.stats().forged, 1);
    // This cannot be detected without the secret.
    let other = open(&store, FeatureConfig::consumer("f")).await;
    other.get(&reference).await.unwrap();
}

#[tokio::test]
async fn a_revocation_that_is_forged_ends_nothing() {
    let store = store();
    let config = |config| FeatureConfig { secret: Some(secret()), ..config };
    let producer = open(&store, config(FeatureConfig::producer("f", 0))).await;
    let consumer = open(&store, config(FeatureConfig::consumer("f"))).await;
    let (one, two) = (put(&producer, "one").await.unwrap(), put(&producer, "two").await.unwrap());
    let keys = &producer.shared.keys;
    let note = |reference: &FeatureRef| keys.revocation(&reference.sample, reference.generation);
    // Without a MAC, and with that of another note.
    plant(&store, note(&one), &[0; record::RECORD_BYTES]).await;
    is_forged(consumer.get(&one).await, "f/one");
    is_forged(producer.gc().await, "f/one");
    let real = producer.shared.keys.claim("two", first_cell(two.generation));
    let real = bytes_of(&store, real, record::RECORD_BYTES).await;
    plant(&store, note(&two), &real).await;
    is_forged(consumer.get(&two).await, "f/two");
    is_forged(producer.gc().await, "f/");
    let tensors = [&one, &two].map(|reference| producer.objects(reference)[0].1);
    let found = store.exists(&tensors, ExistsOptions::default()).await;
    assert!(found.into_iter().all(|found| found.unwrap().is_present()), "both live");
    assert_eq!(consumer.release(one).await, Ok(Released::Freed));
}

#[tokio::test]
async fn a_claim_that_is_forged_supersedes_nothing() {
    let store = store();
    let config = |config| FeatureConfig { secret: Some(secret()), ..config };
    let producer = open(&store, config(FeatureConfig::producer("f", 0))).await;
    let reference = put(&producer, "a").await.unwrap();
    let rival = open(&store, config(FeatureConfig::producer("f", 1))).await;
    let claim = producer.shared.keys.claim("a", first_cell(reference.generation));
    alter(&store, claim, record::RECORD_BYTES).await;
    is_forged(put(&rival, "a").await, "a claim on a");
    is_forged(rival.abort("a").await, "a claim on a");
    producer.get(&reference).await.unwrap();
    // A claim written with another secret is refused too.
    let stranger = Some(Secret::new(b"of another run"));
    let stranger = FeatureConfig { secret: stranger, ..FeatureConfig::producer("f", 2) };
    put(&open(&store, stranger).await, "b").await.unwrap();
    is_forged(put(&rival, "b").await, "a claim on b");
}

#[tokio::test]
async fn a_record_that_is_forged_frees_nothing() {
    let store = store();
    let config = FeatureConfig { secret: Some(secret()), ..FeatureConfig::producer("f", 0) };
    let producer = open(&store, config.clone()).await;
    let reference = put(&producer, "a").await.unwrap();
    let record = producer.shared.keys.record(0, 0);
    alter(&store, record, record::RECORD_BYTES).await;
    drop(producer);
    is_forged(FeatureStore::open(store.clone(), config.clone()).await, "producer 0 of f");
    let consumer = FeatureConfig { owner: None, ..config };
    open(&store, consumer).await.get(&reference).await.unwrap();
}

fn promise(owner: u16, sample: &str) -> FeatureRef {
    let spec = TensorSpec::new("hidden", Dtype::U8, [BYTES as u64]);
    FeatureRef::promise("f", owner, sample, vec![spec], false, None).unwrap()
}

async fn keep(features: &FeatureStore, promise: &FeatureRef) -> Result<(), FeatureError> {
    let arena = Arena::new(1, BYTES).unwrap();
    let _registration = features.register(&arena).unwrap();
    arena.target(0).unwrap().fill(9);
    let tensor = Tensor::new(promise.tensors()[0].clone(), arena.source(0).unwrap());
    features.keep(promise, vec![tensor]).await
}

#[tokio::test]
async fn a_promised_sample_is_gone_until_it_is_put_and_is_like_any_other_then() {
    let store = store();
    let producer = open(&store, FeatureConfig::producer("f", 3)).await;
    let consumer = open(&store, FeatureConfig::consumer("f")).await;
    let (promised, other) = (promise(3, "a"), promise(3, "b"));
    assert!(promised.is_promised() && other.generation() > promised.generation());
    let text = serde_json::to_string(&promised).unwrap();
    let promised: FeatureRef = serde_json::from_str(&text).unwrap();
    assert!(matches!(consumer.get(&promised).await, Err(FeatureError::Gone { .. })));
    assert_eq!(objects(&store, 1), 0, "a promise takes nothing");

    keep(&producer, &promised).await.unwrap();
    assert_eq!(consumer.get(&promised).await.unwrap()[0][..], [9; BYTES]);
    let again = keep(&producer, &promised).await;
    assert!(matches!(again, Err(FeatureError::Aborted { .. })), "{again:?}");
    assert_eq!(consumer.release(promised.clone()).await.unwrap(), Released::Freed);
    assert!(matches!(consumer.get(&promised).await, Err(FeatureError::Gone { .. })));
    assert_eq!(producer.gc().await.unwrap().consumed, 1);
    assert_eq!(objects(&store, 1), 0, "not even a note is left");
    assert_eq!(producer.stats().resident_bytes, 0);
}

#[tokio::test]
async fn promises_are_kept_by_who_made_them_and_never_after_a_later_put() {
    let store = store();
    let producer = open(&store, FeatureConfig::producer("f", 3)).await;
    let stranger = open(&store, FeatureConfig::producer("f", 4)).await;
    // Many promises at once get the numbers of the coming milliseconds: a put is later
    // nevertheless.
    let promises: Vec<_> = (0..50).map(|_| promise(3, "a")).collect();
    let late = promises.last().unwrap();
    let refused = keep(&stranger, late).await;
    assert!(matches!(refused, Err(FeatureError::Config(_))), "{refused:?}");
    let current = put(&producer, "a").await.unwrap();
    let superseded = keep(&producer, late).await;
    assert!(matches!(superseded, Err(FeatureError::Superseded { .. })), "{superseded:?}");
    assert_eq!(producer.get(&current).await.unwrap()[0][..], [7; BYTES]);
    // A consumer in the same process releases the ref before the put.
    let unwanted = promise(3, "b");
    assert_eq!(producer.release(unwanted.clone()).await.unwrap(), Released::AlreadyGone);
    let aborted = keep(&producer, &unwanted).await;
    assert!(matches!(aborted, Err(FeatureError::Aborted { .. })), "{aborted:?}");
    assert_eq!(producer.release(current).await.unwrap(), Released::Freed);
    assert_eq!(objects(&store, 2), 0);
    assert_eq!(producer.stats().resident_bytes, 0);
}

#[tokio::test]
async fn with_a_secret_promises_are_authenticated_and_so_are_the_bytes() {
    let store = store();
    let config = |config| FeatureConfig { secret: Some(secret()), ..config };
    let producer = open(&store, config(FeatureConfig::producer("f", 3))).await;
    let consumer = open(&store, config(FeatureConfig::consumer("f"))).await;
    let spec = || TensorSpec::new("hidden", Dtype::U8, [BYTES as u64]);
    let promise_with = |secret: &Secret| {
        FeatureRef::promise("f", 3, "a", vec![spec()], false, Some(secret)).unwrap()
    };
    for forged in [promise(3, "a"), promise_with(&Secret::new(b"of another run"))] {
        let kept = keep(&producer, &forged).await;
        assert!(matches!(kept, Err(FeatureError::Forged { .. })), "{kept:?}");
        let read = consumer.get(&forged).await;
        assert!(matches!(read, Err(FeatureError::Forged { .. })), "{read:?}");
    }
    let promised = promise_with(&secret());
    assert!(matches!(consumer.get(&promised).await, Err(FeatureError::Gone { .. })));
    keep(&producer, &promised).await.unwrap();
    assert_eq!(consumer.get(&promised).await.unwrap()[0][..], [9; BYTES]);
    let (_, id) = producer.objects(&promised).remove(0);
    alter(&store, id, BYTES).await;
    is_forged(consumer.get(&promised).await, "f/a/");
}

fn is_fenced<T: std::fmt::Debug>(result: Result<T, FeatureError>) {
    assert!(matches!(result, Err(FeatureError::Fenced { owner: 0, .. })), "{result:?}");
}

/// Two engines were started with the same settings. The later one has the number and the samples of
/// the earlier one, which is fenced and changes nothing any more.
#[tokio::test]
async fn of_two_processes_with_one_number_the_later_one_has_it() {
    let store = store();
    let config = || FeatureConfig { max_hold_ms: Some(0), ..FeatureConfig::producer("f", 0) };
    let first = open(&store, config()).await;
    let kept = put(&first, "kept").await.unwrap();
    let second = open(&store, FeatureConfig::producer("f", 0)).await;
    assert_eq!((second.stats().restored, second.stats().live), (1, 1));
    is_fenced(put(&first, "late").await);
    // Both would have used the same names.
    let refs = [put(&second, "a").await.unwrap(), put(&second, "b").await.unwrap()];
    is_fenced(first.gc().await);
    is_fenced(put(&first, "a").await);
    first.consumed().await;
    for reference in refs.iter().chain([&kept]) {
        second.get(reference).await.unwrap();
        // A process that has lost its number still consumes.
        assert_eq!(first.release(reference.clone()).await, Ok(Released::Freed));
    }
    assert_eq!(second.shared.gc(Duration::ZERO).await.unwrap().consumed, 3);
    assert_eq!(objects(&store, 1), 0, "nothing of either is left");
    // A former process that ends returns nothing that is not its own.
    first.close().await.unwrap();
    put(&second, "again").await.unwrap();
    let third = open(&store, config()).await;
    is_fenced(put(&second, "b").await);
    third.gc().await.unwrap();
    third.close().await.unwrap();
    assert_eq!(store.stats().memory.unwrap().objects, 0, "the number is free");
}

/// This happens when nodes without disks, or the master of a cluster, are restarted.
#[tokio::test]
async fn a_store_that_has_lost_everything_is_used_again() {
    let store = store();
    let producer = open(&store, FeatureConfig::producer("f", 0)).await;
    let lost = put(&producer, "a").await.unwrap();
    let keys = &producer.shared.keys;
    let mut ids: Vec<ObjectId> = keys.owners(0).into_iter().chain(keys.claims("a")).collect();
    ids.extend(producer.objects(&lost).into_iter().map(|(_, id)| id));
    ids.push(keys.record(0, 0));
    drop(store.remove(&ids, Removal::Final).await);
    assert_eq!(store.stats().memory.unwrap().objects, 0);
    // Another producer may have the cell of its claim by now.
    let rival = open(&store, FeatureConfig::producer("f", 1)).await;
    let theirs = put(&rival, "a").await.unwrap();
    let cell = producer.shared.ledger.lock().entry(lost.generation).unwrap().own.unwrap().cell;
    let claim = keys.claim("a", cell.unwrap().number);
    let record = rival.shared.notes.read(&[keys.claim("a", first_cell(theirs.generation))]).await;
    drop(store.remove(&[claim], Removal::Final).await);
    rival.shared.notes.write(claim, record[0].as_ref().unwrap(), false).await.unwrap();
    producer.shared.gc(Duration::ZERO).await.unwrap();
    assert_eq!(producer.stats().live, 0);
    assert!(rival.shared.notes.is_there(claim).await.unwrap(), "it is not the producer's");
    let reference = put(&producer, "b").await.unwrap();
    rival.get(&reference).await.unwrap();
    let heir = open(&store, FeatureConfig::producer("f", 0)).await;
    is_fenced(put(&producer, "c").await);
    assert_eq!(heir.stats().live, 1);
}

#[tokio::test]
async fn producers_without_a_number_find_free_ones() {
    let store = store();
    let found = || FeatureConfig { find_owner: true, ..FeatureConfig::consumer("f") };
    let highest = open(&store, FeatureConfig::producer("f", OWNERS_MAX - 1)).await;
    let (one, other) = (open(&store, found()).await, open(&store, found()).await);
    assert_eq!([&highest, &one, &other].map(FeatureStore::owner), [1023, 1022, 1021].map(Some));
    let (here, there) = (put(&one, "here").await.unwrap(), put(&other, "there").await.unwrap());
    one.gc().await.unwrap();
    assert!(one.get(&there).await.is_ok() && other.get(&here).await.is_ok());
    // A producer that ends returns its number when nothing of it is left.
    assert_eq!(one.release(here).await, Ok(Released::Freed));
    one.gc().await.unwrap();
    one.close().await.unwrap();
    let next = open(&store, found()).await;
    assert_eq!(next.owner(), Some(1022));
    let both = FeatureConfig { owner: Some(1), ..found() };
    let refused = FeatureStore::open(store.clone(), both).await;
    assert!(matches!(refused, Err(FeatureError::Config(_))), "{refused:?}");
}

/// Its process was killed and restarted without a number: its samples are taken over.
#[tokio::test]
async fn a_number_that_was_found_is_free_again_when_its_process_is_gone_for_long() {
    let store = store();
    let found = || FeatureConfig { find_owner: true, ..FeatureConfig::consumer("f") };
    let former = open(&store, found()).await;
    let left = put(&former, "left").await.unwrap();
    let soon = open(&store, found()).await;
    assert_eq!(soon.owner(), Some(1022), "the process may be there");
    let own = former.shared.own.as_ref().unwrap();
    let notes = own.held.lock().notes.clone();
    for note in &notes {
        let [mut record] = former.shared.notes.read(&[*note]).await.try_into().unwrap();
        record.as_mut().unwrap().created_ms -= owner::STALE_MS + 60_000;
        former.shared.notes.remove(&[*note]).await.remove(0).unwrap();
        former.shared.notes.write(*note, &record.unwrap(), false).await.unwrap();
    }
    // It sends a heartbeat.
    own.shown_ms.store(0, std::sync::atomic::Ordering::Relaxed);
    former.gc().await.unwrap();
    assert_eq!(open(&store, found()).await.owner(), Some(1021));
    let signs = former.shared.keys.signs_of(1023);
    drop(former.shared.notes.remove(&signs).await);
    let heir = open(&store, found()).await;
    assert_eq!((heir.owner(), heir.stats().live), (Some(1023), 1));
    heir.get(&left).await.unwrap();
    let late = put(&former, "late").await;
    assert!(matches!(late, Err(FeatureError::Fenced { owner: 1023, .. })), "{late:?}");
}

/// A put waits for consumers, whether its own budget or the shared store is full.
#[tokio::test]
async fn a_store_that_is_full_is_back_pressure() {
    // Three notes per producer, and three samples.
    let slots = 2 * u64::from(OWNER_COPIES) + 9;
    let store = Arc::new(MemoryStore::new(MemoryConfig::new(slots * BYTES as u64, BYTES)).unwrap());
    let config = FeatureConfig { poll_ms: 1, ..FeatureConfig::producer("f", 0) };
    let producer = open(&store, config.clone()).await;
    let other = FeatureConfig { when_full: WhenFull::Refuse, ..FeatureConfig::producer("f", 1) };
    let other = open(&store, other).await;
    let mut refs = Vec::new();
    for sample in ["0", "1", "2"] {
        refs.push(put(&producer, sample).await.unwrap());
    }
    assert_eq!(producer.stats().resident_bytes, 9 * BYTES as u64, "whole slots, with the notes");
    let refused = put(&other, "x").await;
    assert!(matches!(refused, Err(FeatureError::StoreFull { .. })), "{refused:?}");
    assert_eq!((other.stats().puts_over_budget, other.stats().resident_bytes), (1, 0));
    for free in 0..3 {
        let sample = format!("next {free}");
        let mut waiting = std::pin::pin!(put(&producer, &sample));
        let wait = Duration::from_millis(50);
        assert!(tokio::time::timeout(wait, &mut waiting).await.is_err(), "it waits");
        assert_eq!(producer.stats().waiting, 1);
        assert_eq!(other.release(refs.remove(0)).await, Ok(Released::Freed));
        let wait = Duration::from_secs(30);
        refs.push(tokio::time::timeout(wait, waiting).await.expect("it goes on").unwrap());
        assert_eq!(producer.stats().live, 3, "{free}");
    }
    for reference in &refs {
        producer.get(reference).await.unwrap();
    }
    // A sample that can never fit is refused at once.
    let specs = (0..slots).map(|it| TensorSpec::new(it.to_string(), Dtype::U8, [0]));
    let arena = Arena::new(1, BYTES).unwrap();
    let _registration = producer.register(&arena).unwrap();
    let empty = |spec| Tensor::new(spec, arena.source(0).unwrap().first(0));
    let huge = producer.put("huge", specs.map(empty).collect()).await;
    assert!(matches!(huge, Err(FeatureError::TooLarge { .. })), "{huge:?}");
}

/// On a bucket each lookup is a request.
#[tokio::test]
async fn gc_does_not_recheck_recently_seen_samples() {
    let store = store();
    let asked = || store.stats().memory.unwrap().exists;
    let producer = open(&store, FeatureConfig::producer("f", 0)).await;
    let mut refs = Vec::new();
    for sample in 0..20 {
        refs.push(put(&producer, &sample.to_string()).await.unwrap());
    }
    let mut looks = Vec::new();
    for _ in 0..5 {
        let before = asked();
        producer.gc().await.unwrap();
        looks.push(asked() - before);
    }
    assert_eq!(looks, [60, 0, 0, 0, 0], "a tensor, a claim and a revocation each");
    // Consumed samples are found after a while, and at once when room is short.
    producer.release(refs.remove(0)).await.unwrap();
    let consumer = open(&store, FeatureConfig::consumer("f")).await;
    consumer.release(refs.remove(0)).await.unwrap();
    producer.shared.gc(Duration::ZERO).await.unwrap();
    assert_eq!(producer.stats().live, 18);
}
