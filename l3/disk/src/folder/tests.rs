use std::time::Duration;

use terrace_cache::PageKey;

use super::*;
use terrace_l3::{Arena, ExistsOptions, ObjectId, Presence, Put, PutOptions, Store};

const LIMIT: u64 = 2 << 20;

fn folder(path: &Path) -> StoreFolder {
    StoreFolder { path: path.to_owned(), limit_bytes: LIMIT, reserve_bytes: 0 }
}

fn page(number: u64) -> ObjectId {
    ObjectId::page(PageKey(7), PageKey(u128::from(number) << 64))
}

/// Puts `count` pages and makes them durable.
async fn put_pages(opened: &OpenedInFolder, page_bytes: usize, count: u64) {
    let arena = Arena::new(1, page_bytes).unwrap();
    let _registration = opened.store.register(&arena).unwrap();
    for number in 0..count {
        let put = Put::new(page(number), arena.source(0).unwrap());
        opened.store.put_from(vec![put], PutOptions::default()).await.remove(0).unwrap();
    }
    opened.store.flush().await.unwrap();
}

async fn has(opened: &OpenedInFolder, number: u64) -> bool {
    let found = opened.store.exists(&[page(number)], ExistsOptions::default()).await;
    *found[0].as_ref().unwrap() != Presence::Absent
}

/// Total length of the files in a folder.
fn bytes_in(path: &Path) -> u64 {
    fs::read_dir(path)
        .unwrap()
        .map(|entry| {
            let (path, file) = entry.map(|it| (it.path(), it.metadata().unwrap())).unwrap();
            if file.is_dir() { bytes_in(&path) } else { file.len() }
        })
        .sum()
}

/// Sets the time of the last use of a store.
fn age(root: &Path, page_bytes: usize, seconds: u64) {
    let then = SystemTime::now() - Duration::from_secs(seconds);
    for name in FILES {
        let path = root.join(name_of(page_bytes)).join(name);
        File::options().write(true).open(path).unwrap().set_modified(then).unwrap();
    }
}

fn sizes(stores: &[OtherStore]) -> Vec<usize> {
    stores.iter().map(|store| store.object_bytes_max).collect()
}

#[tokio::test]
async fn four_sizes_of_page_keep_to_one_limit() {
    let root = tempfile::tempdir().unwrap();
    let mut gone = Vec::new();
    for page_bytes in [4096, 8192, 16384, 32768] {
        let opened = folder(root.path()).open(page_bytes).unwrap();
        gone.extend(sizes(&opened.removed));
        put_pages(&opened, page_bytes, 2 * LIMIT / page_bytes as u64).await;
        let capacity = opened.store.stats().disk.unwrap().capacity_bytes;
        assert!(capacity > LIMIT / 3, "the whole limit is there to be used: {capacity}");
        assert!(bytes_in(root.path()) <= LIMIT, "{} bytes", bytes_in(root.path()));
        drop(opened);
        assert!(bytes_in(root.path()) <= LIMIT, "{} bytes", bytes_in(root.path()));
    }
    assert_eq!(gone, [4096, 8192, 16384], "each takes the room of the one before");
}

#[tokio::test]
async fn least_recently_used_stores_are_removed_first() {
    let root = tempfile::tempdir().unwrap();
    for (page_bytes, seconds) in [(4096, 50), (8192, 5000), (12288, 500)] {
        let opened = folder(root.path()).open(page_bytes).unwrap();
        put_pages(&opened, page_bytes, 150_000 / page_bytes as u64).await;
        drop(opened);
        age(root.path(), page_bytes, seconds);
    }
    fs::write(root.path().join(name_of(8192)).join("mine"), "precious").unwrap();
    fs::create_dir(root.path().join("pages-of-mine")).unwrap();
    let opened = folder(root.path()).open(16384).unwrap();
    assert_eq!(sizes(&opened.others), [4096, 12288, 8192], "there is room for all");
    assert!(opened.others.iter().all(|other| other.bytes >= 150_000 && other.owner.is_none()));
    put_pages(&opened, 16384, 45).await;
    drop(opened);
    let opened = folder(root.path()).open(16384).unwrap();
    assert_eq!(sizes(&opened.others), [4096, 12288], "only the oldest was removed");
    assert!(has(&opened, 0).await && has(&opened, 44).await);
    let left = fs::read_to_string(root.path().join(name_of(8192)).join("mine")).unwrap();
    assert_eq!(left, "precious", "foreign files stay");
    assert!(root.path().join("pages-of-mine").exists());
    // A removed store starts empty.
    drop(opened);
    let opened = folder(root.path()).open(8192).unwrap();
    assert!(!has(&opened, 0).await);
}

#[tokio::test]
async fn a_store_in_use_stays_and_counts() {
    let root = tempfile::tempdir().unwrap();
    let first = folder(root.path()).open(4096).unwrap();
    put_pages(&first, 4096, 100).await;
    age(root.path(), 4096, 5000);
    let second = folder(root.path()).open(8192).unwrap();
    assert_eq!(sizes(&second.others), [4096]);
    let owner = second.others[0].owner.clone().unwrap();
    assert_eq!(owner, format!("process {}", std::process::id()));
    put_pages(&second, 8192, 2 * LIMIT / 8192).await;
    assert!(bytes_in(root.path()) <= LIMIT, "{} bytes", bytes_in(root.path()));
    assert!(has(&first, 0).await && has(&first, 99).await);
    // They use the whole limit: a third finds no room, and the error names their owner.
    put_pages(&first, 4096, 2 * LIMIT / 4096).await;
    assert!(bytes_in(root.path()) <= LIMIT, "{} bytes", bytes_in(root.path()));
    let refused = folder(root.path()).open(1 << 20).unwrap_err();
    assert!(matches!(refused, OpenError::FolderFull { .. }), "{refused}");
    assert!(refused.to_string().contains(&owner), "{refused}");
}

#[tokio::test]
async fn a_smaller_limit_removes_idle_stores_and_then_old_objects() {
    let root = tempfile::tempdir().unwrap();
    for page_bytes in [8192, 4096] {
        let opened = folder(root.path()).open(page_bytes).unwrap();
        put_pages(&opened, page_bytes, 300_000 / page_bytes as u64).await;
    }
    age(root.path(), 8192, 5000);
    let smaller = |limit_bytes| StoreFolder { limit_bytes, ..folder(root.path()) };
    let opened = smaller(1_000_000).open(4096).unwrap();
    assert_eq!((sizes(&opened.others), sizes(&opened.removed)), (vec![], vec![8192]));
    assert_eq!(opened.store.opening().dropped.objects, 0);
    assert!(has(&opened, 0).await);
    drop(opened);
    let opened = smaller(400_000).open(4096).unwrap();
    let stats = opened.store.stats().disk.unwrap();
    let dropped = opened.store.opening().dropped;
    assert_eq!(dropped.objects, 300_000 / 4096 - stats.objects, "{stats:?}");
    assert_eq!(dropped.bytes, 4096 * dropped.objects);
    assert!(stats.objects > 40 && bytes_in(root.path()) <= 400_000, "{stats:?}");
    assert!(!has(&opened, 0).await && has(&opened, 300_000 / 4096 - 1).await, "the oldest went");
}
