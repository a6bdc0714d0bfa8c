//! Several clients of one cluster.

use std::process::Command;
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::{Duration, Instant};

use terrace_cache::Namespace;
use terrace_l3::{
    Arena, ExistsOptions, Get, GetOptions, ObjectId, Put, PutOptions, Registration, Removal, Store,
    StoreError, Stored,
};
use terrace_l3_mooncake::{MooncakeConfig, MooncakeStore};
use terrace_tests::l3::objects::{self, HARD, page};
use terrace_tests::mooncake::{Cluster, Options};

use super::{OBJECT_BYTES_MAX, config, open};

/// So many transfers of one client may be under way.
pub(super) const PAGES: u32 = 128;

/// A client with memory of its own.
pub(super) struct Member {
    pub(super) store: Arc<dyn Store>,
    pub(super) arena: Arena,
    _registration: Registration,
}

impl Member {
    pub(super) fn new(config: &MooncakeConfig) -> Self {
        Self::with(Arc::new(open(config.clone())), config.object_bytes_max)
    }

    pub(super) fn with(store: Arc<dyn Store>, bytes: usize) -> Self {
        let arena = Arena::with_headroom(PAGES, bytes).unwrap();
        let registration = store.register(&arena).unwrap();
        Self { store, arena, _registration: registration }
    }

    pub(super) async fn put(&self, id: ObjectId) -> Result<Stored, StoreError> {
        self.put_with(id, PutOptions::default()).await
    }

    pub(super) async fn put_with(
        &self,
        id: ObjectId,
        options: PutOptions,
    ) -> Result<Stored, StoreError> {
        // Calls that were given up may have their pages for a while yet.
        let mut target = (0..PAGES).find_map(|page| self.arena.target(page).ok()).expect("a page");
        objects::fill(&id, &mut target);
        let page = target.page();
        drop(target);
        let puts = vec![Put::new(id, self.arena.source(page).expect("it is free"))];
        self.store.put_from(puts, options).await.remove(0)
    }

    /// Reads an object and checks its bytes.
    pub(super) async fn get(&self, id: ObjectId) -> Result<(), StoreError> {
        let mut target = (0..PAGES).find_map(|page| self.arena.target(page).ok()).expect("a page");
        target.fill(0xEE);
        let page = target.page();
        let gets = vec![Get::new(id, target)];
        self.store.get_into(gets, GetOptions::default()).await.remove(0)?;
        let read = self.arena.source(page).expect("the store has let go of it");
        assert!(objects::is_right(&id, &read), "{id:?} was served with wrong bytes");
        Ok(())
    }

    pub(super) async fn has(&self, id: ObjectId) -> bool {
        let found = self.store.exists(&[id], ExistsOptions::default()).await.remove(0);
        found.unwrap().is_present()
    }

    /// How often a call came to an outcome.
    pub(super) fn count(&self, call: &str, outcome: &str) -> u64 {
        let name = format!("terrace_mooncake_{call}_total");
        self.store.stats().figure(&name, outcome).unwrap()
    }
}

const PINNED: PutOptions = PutOptions { pin: Some(HARD), durable: false };

#[tokio::test]
#[ignore = "needs a Mooncake cluster: run scripts/test-mooncake"]
async fn what_one_client_puts_another_gets() {
    let cluster = Cluster::start(Options::default());
    let config = config(&cluster);
    let (first, second) = (Member::new(&config), Member::new(&config));
    let options = ExistsOptions::default();
    assert!(!second.store.exists(&[page(1)], options).await.remove(0).unwrap().is_present());
    assert_eq!(first.put(page(1)).await, Ok(Stored::New));
    assert!(second.has(page(1)).await);
    second.get(page(1)).await.unwrap();
    assert_eq!(second.put_with(page(1), PINNED).await, Ok(Stored::AlreadyThere), "it looks first");
    // Without its writer, too.
    first.store.shutdown().await.unwrap();
    drop(first);
    Member::new(&config).get(page(1)).await.unwrap();
    assert_eq!(second.store.remove(&[page(1)], Removal::Forced).await, [Err(StoreError::Pinned)]);
    second.store.unpin(&[page(1)], HARD).await.remove(0).unwrap();
    second.store.remove(&[page(1)], Removal::Forced).await.remove(0).unwrap();
    assert_eq!(Member::new(&config).get(page(1)).await, Err(StoreError::Missing));
}

#[tokio::test]
#[ignore = "needs a Mooncake cluster: run scripts/test-mooncake"]
async fn pages_of_two_ranks_never_mix_with_those_of_one() {
    let cluster = Cluster::start(Options::default());
    let config = config(&cluster);
    let member = Member::new(&config);
    let page_of = |tensor_ranks| {
        let namespace = Namespace { tensor_ranks, ..Namespace::new("model", 16) }.digest();
        ObjectId::page(namespace, namespace.next(namespace, &[1, 2, 3]))
    };
    let same_key = ObjectId { key: page_of(1).key, ..page_of(2) };
    assert_eq!(member.put(page_of(1)).await, Ok(Stored::New));
    for other in [page_of(2), same_key] {
        assert!(!member.has(other).await);
        assert_eq!(member.get(other).await, Err(StoreError::Missing));
    }
    assert_eq!(member.put(page_of(2)).await, Ok(Stored::New));
    assert_eq!(Member::new(&config).get(same_key).await, Err(StoreError::Missing));
    Member::new(&config).get(page_of(2)).await.unwrap();
}

/// Writes a value of zeros with the store's own Python client, as somebody else would.
fn foreign_writer(
    cluster: &Cluster,
    config: &MooncakeConfig,
    id: ObjectId,
    length: usize,
) -> Command {
    const PROGRAM: &str = "
import sys, os
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
master, key, length = sys.argv[1:]
assert store.setup('127.0.0.1', 'P2PHANDSHAKE', 0, 1 << 24, 'tcp', '', master) == 0
assert store.put(key, bytes(int(length))) == 0
os._exit(0)
";
    let programs = std::env::var("TERRACE_MOONCAKE_PROGRAMS").unwrap();
    let python = std::path::Path::new(&programs).join("../../../../bin/python");
    let ObjectId { namespace, key, generation } = id;
    let key = format!("{}/{:032x}/{:032x}/{generation:x}", config.prefix, namespace.0, key.0);
    let mut writer = Command::new(python);
    writer.args(["-c", PROGRAM]).args([cluster.address(), key, length.to_string()]);
    writer
}

fn write_foreign_value(cluster: &Cluster, config: &MooncakeConfig, id: ObjectId, length: usize) {
    let done = foreign_writer(cluster, config, id, length).output().unwrap();
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
}

/// An old or foreign value is no object: F40.
#[tokio::test]
#[ignore = "needs a Mooncake cluster: run scripts/test-mooncake"]
async fn a_foreign_value_under_the_key_is_a_miss_and_makes_room_for_the_object() {
    let cluster = Cluster::start(Options::default());
    let config = config(&cluster);
    for (number, length) in (0..).zip([OBJECT_BYTES_MAX + 80, 80, 7, OBJECT_BYTES_MAX + 100_000]) {
        let (id, pinned) = (page(number), page(100 + number));
        write_foreign_value(&cluster, &config, id, length);
        write_foreign_value(&cluster, &config, pinned, length);
        let member = Member::new(&config);
        assert!(member.has(id).await, "the cluster says so");
        // The cluster keeps what it has and calls it a success; the reader finds out.
        assert_eq!(member.put(id).await, Ok(Stored::New));
        let corrupt = member.get(id).await;
        assert!(matches!(corrupt, Err(StoreError::Corrupt(_))), "{length} bytes: {corrupt:?}");
        assert!(!member.has(id).await);
        assert_eq!(member.put(id).await, Ok(Stored::New));
        member.get(id).await.unwrap();
        // What must not vanish is looked at before.
        assert_eq!(member.put_with(pinned, PINNED).await, Ok(Stored::New));
        member.get(pinned).await.unwrap();
        assert_eq!(member.store.stats().remote.unwrap().corrupt, 1);
    }
}

/// Reads until the cluster says that somebody's put of the object has not ended.
async fn sees_unfinished(member: &Member, id: ObjectId) {
    let until = Instant::now() + Duration::from_secs(20);
    while member.count("get", "unfinished") == 0 {
        assert_eq!(member.get(id).await, Err(StoreError::Missing));
        assert!(Instant::now() < until, "nobody has begun to put it");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// What a put may say while another's of the same key has not ended, and what nobody may then read.
async fn is_nobodys_yet(member: &Member, id: ObjectId) {
    const DURABLE: PutOptions = PutOptions { pin: None, durable: true };
    assert!(!member.has(id).await, "it cannot be read");
    // The cluster calls it a success. A page may vanish anyhow, so that is good enough for one.
    assert_eq!(member.put(id).await, Ok(Stored::New));
    assert_eq!(member.get(id).await, Err(StoreError::Missing));
    // It is not good enough for what must not vanish.
    for options in [PINNED, DURABLE] {
        assert_eq!(member.put_with(id, options).await, Err(StoreError::BeingWritten));
    }
    assert_eq!(member.get(id).await, Err(StoreError::Missing));
}

/// A put while the first put of the key is on its way: F40.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs a Mooncake cluster: run scripts/test-mooncake"]
async fn f40_a_put_during_the_first_put_does_not_vouch_for_it() {
    let cluster = Cluster::start(Options { nodes: 1, ..Options::default() });
    let config = config(&cluster);
    let (first, second) = (Arc::new(Member::new(&config)), Member::new(&config));
    cluster.suspend_node(0);
    let putting = tokio::spawn({
        let first = first.clone();
        async move { first.put(page(1)).await }
    });
    sees_unfinished(&second, page(1)).await;
    is_nobodys_yet(&second, page(1)).await;
    assert!(!putting.is_finished());
    cluster.wake_node(0);
    assert_eq!(putting.await.unwrap(), Ok(Stored::New));
    second.get(page(1)).await.unwrap();
    assert_eq!(second.put_with(page(1), PINNED).await, Ok(Stored::AlreadyThere));
}

/// A writer that died has left half a put behind: F40.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs a Mooncake cluster: run scripts/test-mooncake"]
async fn f40_a_put_that_will_never_end_blocks_its_key_for_a_while_only() {
    let cluster = Cluster::start(Options { nodes: 1, unfinished_s: Some(3), ..Options::default() });
    let config = config(&cluster);
    let member = Member::new(&config);
    cluster.suspend_node(0);
    let mut writer = foreign_writer(&cluster, &config, page(1), OBJECT_BYTES_MAX).spawn().unwrap();
    sees_unfinished(&member, page(1)).await;
    writer.kill().unwrap();
    writer.wait().unwrap();
    cluster.wake_node(0);
    is_nobodys_yet(&member, page(1)).await;
    let until = Instant::now() + Duration::from_secs(30);
    while member.put_with(page(1), PINNED).await != Ok(Stored::New) {
        assert!(Instant::now() < until, "the key stays blocked");
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    member.get(page(1)).await.unwrap();
}

/// Asking renews a lease, so it is not done all the time: F31.
#[tokio::test]
#[ignore = "needs a Mooncake cluster: run scripts/test-mooncake"]
async fn an_object_is_asked_about_once_in_a_while() {
    let cluster = Cluster::start(Options::default());
    let config = MooncakeConfig { seen_ttl_ms: 1_500, ..config(&cluster) };
    let member = Member::new(&config);
    member.put(page(1)).await.unwrap();
    assert_eq!(member.count("exists", "done"), 0, "a put of a page asks nothing");
    for _ in 0..20 {
        assert!(member.has(page(1)).await);
    }
    assert_eq!(member.count("exists", "done"), 1);
    tokio::time::sleep(Duration::from_millis(1_600)).await;
    assert!(member.has(page(1)).await);
    assert_eq!(member.count("exists", "done"), 2);
}

/// Fills the cluster with other objects until it has let go of `victim`, if it may.
async fn press(other: &Member, first: u64, objects: u64) {
    for number in first..first + objects {
        let stored = other.put(page(number)).await;
        assert!(matches!(stored, Ok(_) | Err(StoreError::Full)), "{stored:?}");
    }
}

#[tokio::test]
#[ignore = "needs a Mooncake cluster: run scripts/test-mooncake"]
async fn pins_hold_against_the_clusters_own_eviction_and_end_with_their_unpin() {
    const BYTES: usize = 256 << 10;
    let options = Options { nodes: 1, node_mib: 16, lease_ms: 600, ..Options::default() };
    let cluster = Cluster::start(options);
    let config = MooncakeConfig {
        capacity_bytes: 1 << 30,
        object_bytes_max: BYTES,
        keep_interval_ms: 150,
        ..config(&cluster)
    };
    let (member, other) = (Member::new(&config), Member::new(&config));
    assert_eq!(member.put(page(1)).await, Ok(Stored::New));
    assert_eq!(member.put(page(2)).await, Ok(Stored::New));
    assert_eq!(member.put_with(page(3), PINNED).await, Ok(Stored::New));
    member.store.pin(&[page(2)], HARD).await.remove(0).unwrap();
    press(&other, 1_000, 300).await;
    assert_eq!(member.get(page(1)).await, Err(StoreError::Missing), "it has no pin");
    member.get(page(2)).await.expect("its lease is renewed");
    member.get(page(3)).await.expect("the cluster itself has pinned it");
    for number in [2, 3] {
        member.store.unpin(&[page(number)], HARD).await.remove(0).unwrap();
    }
    // The cluster's own pin is taken off a little later, and nobody loses the object by that.
    tokio::time::sleep(Duration::from_millis(2_500)).await;
    member.get(page(3)).await.unwrap();
    tokio::time::sleep(Duration::from_millis(700)).await;
    press(&other, 2_000, 300).await;
    for number in [2, 3] {
        assert_eq!(member.get(page(number)).await, Err(StoreError::Missing), "page {number}");
    }
}

/// A process that ends leaves no pin behind that would fill the cluster for ever.
#[tokio::test]
#[ignore = "needs a Mooncake cluster: run scripts/test-mooncake"]
async fn a_store_that_is_shut_down_takes_its_pins_along() {
    let cluster = Cluster::start(Options::default());
    let config = config(&cluster);
    let member = Member::new(&config);
    member.put_with(page(1), PINNED).await.unwrap();
    member.put(page(2)).await.unwrap();
    member.store.shutdown().await.unwrap();
    let next = Member::new(&config);
    assert_eq!(next.get(page(1)).await, Err(StoreError::Missing));
    next.get(page(2)).await.unwrap();
}

/// Objects of one batch are removed by several threads, and nothing else is.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs a Mooncake cluster: run scripts/test-mooncake"]
async fn many_objects_are_removed_by_several_threads() {
    const BYTES: usize = 1000;
    const OBJECTS: u64 = 1024;
    let cluster = Cluster::start(Options::default());
    let config = MooncakeConfig {
        capacity_bytes: 4 * OBJECTS * BYTES as u64,
        object_bytes_max: BYTES,
        ..config(&cluster)
    };
    let (member, other) = (Member::new(&config), Member::new(&config));
    other.put(page(0)).await.unwrap();
    for calls in [OBJECTS as usize, 1, OBJECTS as usize, 1] {
        let ids: Vec<ObjectId> = (1..=OBJECTS).map(page).collect();
        for id in &ids {
            assert_eq!(member.put(*id).await, Ok(Stored::New));
        }
        let began = Instant::now();
        for ids in ids.chunks(ids.len() / calls) {
            for removed in member.store.remove(ids, Removal::Forced).await {
                removed.unwrap();
            }
        }
        println!("{OBJECTS} objects removed in {calls} calls: {:?}", began.elapsed());
        let left = cluster.ask("/get_all_keys");
        assert_eq!(left.lines().filter(|key| key.contains(&config.prefix)).count(), 1);
        let again = member.store.remove(&ids, Removal::Forced).await;
        assert!(again.into_iter().all(|result| result == Err(StoreError::Missing)));
    }
    other.get(page(0)).await.unwrap();
}

/// Pages with room for a header travel without a copy, others through memory of the store's own.
#[tokio::test]
#[ignore = "needs a Mooncake cluster: run scripts/test-mooncake"]
async fn pages_with_headroom_are_not_copied() {
    let cluster = Cluster::start(Options::default());
    let member = Member::new(&config(&cluster));
    member.put(page(1)).await.unwrap();
    member.get(page(1)).await.unwrap();
    let bounced = || member.store.stats().remote.unwrap().bounced_bytes;
    assert_eq!(bounced(), 0);
    let plain = Arena::new(1, OBJECT_BYTES_MAX).unwrap();
    let _registration = member.store.register(&plain).unwrap();
    let gets = vec![Get::new(page(1), plain.target(0).unwrap())];
    member.store.get_into(gets, GetOptions::default()).await.remove(0).unwrap();
    assert!(objects::is_right(&page(1), &plain.source(0).unwrap()));
    assert_eq!(bounced(), OBJECT_BYTES_MAX as u64);
}

/// Pages in memory that somebody else has allocated, with so much room before each.
#[allow(unsafe_code)]
fn foreign(pages: u32, page_bytes: usize, headroom_bytes: usize) -> Arena {
    let bytes = pages as usize * (headroom_bytes + page_bytes);
    let mut slab = vec![0u8; bytes + 4096].into_boxed_slice();
    let offset = slab.as_ptr().align_offset(4096);
    let base = NonNull::new(slab[offset..].as_mut_ptr()).unwrap();
    // SAFETY: there are as many bytes from there on; the box moves into the arena, and nobody else has it.
    unsafe {
        match headroom_bytes {
            0 => Arena::from_raw(base, pages, page_bytes, Box::new(slab)),
            room => Arena::from_raw_with_headroom(base, pages, page_bytes, room, Box::new(slab)),
        }
    }
}

/// Foreign memory is transferred without a copy if it has headroom, and copied otherwise. One value is
/// stored in both cases, and readable into both kinds of memory.
#[tokio::test]
#[ignore = "needs a Mooncake cluster: run scripts/test-mooncake"]
async fn foreign_memory_needs_headroom_to_avoid_copies() {
    const BYTES: usize = 512 << 10;
    let cluster = Cluster::start(Options::default());
    let config = MooncakeConfig {
        capacity_bytes: 16 * BYTES as u64,
        object_bytes_max: BYTES,
        ..config(&cluster)
    };
    let keys = || {
        let keys = cluster.ask("/get_all_keys");
        keys.lines().filter(|key| key.contains(&config.prefix)).count()
    };
    let (writer, reader) = (Member::new(&config), Member::new(&config));
    let bounced = |member: &Member| member.store.stats().remote.unwrap().bounced_bytes;
    for (number, (room, copies)) in (0..).zip([(4096, 0), (0, 1)]) {
        for (offset, options) in [(0, PutOptions::default()), (1, PINNED)] {
            let id = page(10 * number + offset);
            let theirs = foreign(2, BYTES, room);
            let registrations =
                [&writer, &reader].map(|member| member.store.register(&theirs).unwrap());
            let before = (bounced(&writer), bounced(&reader));
            objects::fill(&id, &mut theirs.target(0).unwrap());
            let put = Put::new(id, theirs.source(0).unwrap());
            let stored = writer.store.put_from(vec![put], options).await.remove(0);
            assert_eq!(stored, Ok(Stored::New));
            assert_eq!(keys(), 1);
            for member in [&writer, &reader] {
                let get = Get::new(id, theirs.target(1).unwrap());
                member.store.get_into(vec![get], GetOptions::default()).await.remove(0).unwrap();
                assert!(objects::is_right(&id, &theirs.source(1).unwrap()));
                // Into memory of our own, with headroom.
                member.get(id).await.unwrap();
                assert!(member.has(id).await);
            }
            let copied = copies * BYTES as u64;
            let after = (bounced(&writer), bounced(&reader));
            assert_eq!(after, (before.0 + 2 * copied, before.1 + copied));
            let remover = if offset == 0 { &reader } else { &writer };
            drop(remover.store.unpin(&[id], HARD).await);
            remover.store.remove(&[id], Removal::Forced).await.remove(0).unwrap();
            assert_eq!(keys(), 0, "a value is left");
            assert_eq!(writer.get(id).await, Err(StoreError::Missing));
            drop(registrations);
        }
    }
}

#[tokio::test]
#[ignore = "needs a Mooncake cluster: run scripts/test-mooncake"]
async fn a_store_connects_by_itself_when_its_master_appears() {
    let mut cluster = Cluster::start(Options { nodes: 1, ..Options::default() });
    cluster.kill_master();
    let config = MooncakeConfig { connect_retry_ms: 200, ..config(&cluster) };
    let store = MooncakeStore::open(config).unwrap();
    assert!(!store.wait_until_connected(Duration::from_millis(300)));
    let began = Instant::now();
    let refused = store.exists(&[page(1)], ExistsOptions::default()).await.remove(0);
    assert!(refused.unwrap_err().to_string().contains("cannot be used"));
    assert!(began.elapsed() < Duration::from_secs(1), "it does not wait");
    cluster.start_master();
    assert!(store.wait_until_connected(Duration::from_secs(60)));
    let member = Member::with(Arc::new(store), OBJECT_BYTES_MAX);
    // The node finds its master again within some seconds.
    let until = Instant::now() + Duration::from_secs(40);
    while member.put(page(1)).await != Ok(Stored::New) {
        assert!(Instant::now() < until, "nothing can be put");
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    member.get(page(1)).await.unwrap();
}
