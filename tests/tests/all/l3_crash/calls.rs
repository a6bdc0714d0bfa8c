//! Calls of a store with objects whose bytes and lengths follow from their names.

use std::pin::Pin as Pinned;
use terrace_tests::l3::objects::HARD;

use terrace_l3::{
    Arena, ExistsOptions, Get, GetOptions, ObjectId, Put, PutOptions, Removal, Results, Served,
    Store, StoreError, Stored,
};
use terrace_l3_disk::{BLOCK_BYTES, DiskStore};
use terrace_tests::l3::objects;

/// The largest object. With its header it takes four blocks.
pub(crate) const OBJECT_BYTES_MAX: usize = 3 * BLOCK_BYTES;

/// One call.
#[derive(Clone, Debug)]
pub(crate) enum Call {
    Put(Vec<ObjectId>, PutOptions),
    Get(Vec<ObjectId>),
    Remove(Vec<ObjectId>, Removal),
    Lease(Vec<ObjectId>),
    Pin(ObjectId),
    Unpin(ObjectId),
    Flush,
}

/// What came of it.
#[derive(Debug)]
pub(crate) enum Answered {
    Put(Results<Stored>),
    Get(Results<Served>),
    Remove(Results<()>),
    Pin(Result<(), StoreError>),
    Flush(Result<(), StoreError>),
    /// Nothing that a crash would tell.
    Other,
}

/// How long an object is.
pub(crate) fn length(id: &ObjectId) -> usize {
    const LENGTHS: [usize; 12] =
        [0, 1, 100, 511, 512, 513, 4095, 4096, 4097, 5000, 8192, OBJECT_BYTES_MAX];
    let spread = (id.key.0 as u64 ^ id.generation).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    LENGTHS[(spread >> 32) as usize % LENGTHS.len()]
}

impl Call {
    /// Makes the call, with pages of the arena from `page` on.
    pub(crate) fn start(
        self,
        store: DiskStore,
        arena: Arena,
        page: u32,
    ) -> Pinned<Box<dyn Future<Output = Answered> + Send>> {
        Box::pin(async move {
            match self {
                Call::Put(ids, options) => {
                    let puts = (page..).zip(ids).map(|(page, id)| put(&arena, page, id)).collect();
                    Answered::Put(store.put_from(puts, options).await)
                }
                Call::Get(ids) => Answered::Get(get(&store, &arena, page, &ids).await),
                Call::Remove(ids, removal) => Answered::Remove(store.remove(&ids, removal).await),
                Call::Lease(ids) => {
                    let options = ExistsOptions { lease: true, ..ExistsOptions::default() };
                    store.exists(&ids, options).await;
                    Answered::Other
                }
                Call::Pin(id) => Answered::Pin(store.pin(&[id], HARD).await.remove(0)),
                Call::Unpin(id) => {
                    // A later generation may have replaced it, pin and all.
                    let _ = store.unpin(&[id], HARD).await;
                    Answered::Other
                }
                Call::Flush => Answered::Flush(store.flush().await),
            }
        })
    }
}

/// An object to store, in a page of the arena.
pub(crate) fn put(arena: &Arena, page: u32, id: ObjectId) -> Put {
    let mut target = arena.target(page).expect("nobody uses it");
    objects::fill(&id, &mut target[..length(&id)]);
    drop(target);
    Put::new(id, arena.source(page).expect("nobody writes to it").first(length(&id)))
}

/// Reads objects and checks their bytes.
///
/// # Panics
/// When any are wrong.
pub(crate) async fn get(
    store: &DiskStore,
    arena: &Arena,
    page: u32,
    ids: &[ObjectId],
) -> Results<Served> {
    let get = |(page, id): (u32, &ObjectId)| {
        let mut target = arena.target(page).expect("nobody uses it");
        target.fill(0xEE);
        Get::new(*id, target.first(length(id)))
    };
    let gets = (page..).zip(ids).map(get).collect();
    let results = store.get_into(gets, GetOptions::default()).await;
    for ((page, id), result) in (page..).zip(ids).zip(&results) {
        if result.is_ok() {
            let source = arena.source(page).expect("nobody writes to it");
            assert!(objects::is_right(id, &source[..length(id)]), "{id:?} has wrong bytes");
        }
    }
    results
}
