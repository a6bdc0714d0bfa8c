use super::keys::{CELLS, first_cell};
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

/// Puts other bytes in an object's place, as somebody could who can write to the store.
async fn plant(store: &MemoryStore, id: ObjectId, bytes: &[u8]) {
    drop(store.remove(&[id], Removal::Final).await);
    let arena = Arena::new(1, bytes.len()).unwrap();
    let _registration = store.register(&arena).unwrap();
    arena.target(0).unwrap().copy_from_slice(bytes);
    let options = PutOptions { pin: Some(Pin::Hard(Owner::named("a forger"))), durable: false };
    let put = Put::new(id, arena.source(0).unwrap());
    store.put_from(vec![put], options).await.remove(0).unwrap();
}

/// The bytes of an object.
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

/// Whoever puts a sample looks at the places for claims on it, not at one for each producer.
#[tokio::test]
async fn a_put_asks_about_so_many_places_however_many_producers_there_are() {
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
        // The one before has its claim until it looks again.
        if owner >= step {
            let config = FeatureConfig::producer("f", owner - step);
            open(&store, FeatureConfig { samples_max: 4, ..config }).await;
        }
    }
    println!("the most for one put: {} asked about, {} read, {} written", most.0, most.1, most.2);
    assert!(most.0 <= 2 * u64::from(CELLS) + 2, "{most:?}");
    assert!(most.1 <= 4 && most.2 <= 4, "{most:?}");
    assert_eq!(store.stats().memory.unwrap().objects, 3, "one sample: a tensor and two notes");
}

/// As many producers as there are places on one sample at a time: none takes another's place.
#[tokio::test]
async fn producers_that_do_not_look_again_leave_their_claims_to_nobody() {
    let store = store();
    let mut producers = Vec::new();
    for owner in 0..u16::from(CELLS) + 1 {
        let config = FeatureConfig { samples_max: 4, ..FeatureConfig::producer("f", owner) };
        producers.push(open(&store, config).await);
    }
    let (last, others) = producers.split_last().unwrap();
    for (number, producer) in others.iter().enumerate() {
        // One that finds no place nearby may be told to come back.
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
        producer.gc().await.unwrap();
    }
    last.get(&reference).await.unwrap();
    assert_eq!(store.stats().memory.unwrap().objects, 3, "one sample: a tensor and two notes");
}

/// Where the answer to a claim's put was lost, it may be another's that is there.
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
        };
        let mut entry = shared.entry(sample, Vec::new());
        entry.own = Some(own);
        let mut burial = ledger::Burial { generation: ours.generation, entry };
        shared.disown(&mut burial).await.unwrap();
        let claim = shared.keys.claim(sample, number);
        assert_eq!(shared.notes_of(&burial).contains(&claim), is_removed, "{sample}");
    }
}

#[tokio::test]
async fn a_tensor_that_is_not_the_refs_is_refused() {
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
    // Nobody can tell without the secret.
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
    // Without a secret's code, and with that of another note.
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
    // A claim of somebody who knows another secret is no better.
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
    FeatureRef::promise("f", owner, sample, vec![spec], false).unwrap()
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
    assert_eq!(store.stats().memory.unwrap().objects, 0, "a promise takes nothing");

    keep(&producer, &promised).await.unwrap();
    assert_eq!(consumer.get(&promised).await.unwrap()[0][..], [9; BYTES]);
    let again = keep(&producer, &promised).await;
    assert!(matches!(again, Err(FeatureError::Aborted { .. })), "{again:?}");
    assert_eq!(consumer.release(promised.clone()).await.unwrap(), Released::Freed);
    assert!(matches!(consumer.get(&promised).await, Err(FeatureError::Gone { .. })));
    assert_eq!(producer.gc().await.unwrap().consumed, 1);
    assert_eq!(store.stats().memory.unwrap().objects, 0, "not even a note is left");
    assert_eq!(producer.stats().resident_bytes, 0);
}

#[tokio::test]
async fn promises_are_kept_by_who_made_them_and_never_after_a_later_put() {
    let store = store();
    let producer = open(&store, FeatureConfig::producer("f", 3)).await;
    let stranger = open(&store, FeatureConfig::producer("f", 4)).await;
    // Many at once are numbered as if they came in the milliseconds to come: a put is later nevertheless.
    let promises: Vec<_> = (0..50).map(|_| promise(3, "a")).collect();
    let late = promises.last().unwrap();
    let refused = keep(&stranger, late).await;
    assert!(matches!(refused, Err(FeatureError::Config(_))), "{refused:?}");
    let current = put(&producer, "a").await.unwrap();
    let superseded = keep(&producer, late).await;
    assert!(matches!(superseded, Err(FeatureError::Superseded { .. })), "{superseded:?}");
    assert_eq!(producer.get(&current).await.unwrap()[0][..], [7; BYTES]);
    // Whoever keeps the ref in the same process says so before it is put.
    let unwanted = promise(3, "b");
    assert_eq!(producer.release(unwanted.clone()).await.unwrap(), Released::AlreadyGone);
    let aborted = keep(&producer, &unwanted).await;
    assert!(matches!(aborted, Err(FeatureError::Aborted { .. })), "{aborted:?}");
    assert_eq!(producer.release(current).await.unwrap(), Released::Freed);
    assert_eq!(store.stats().memory.unwrap().objects, 0);
    assert_eq!(producer.stats().resident_bytes, 0);
}

#[tokio::test]
async fn with_a_secret_nothing_is_promised() {
    let store = store();
    let config = FeatureConfig { secret: Some(secret()), ..FeatureConfig::producer("f", 3) };
    let producer = open(&store, config).await;
    let kept = keep(&producer, &promise(3, "a")).await;
    assert!(matches!(kept, Err(FeatureError::Forged { .. })), "{kept:?}");
}
