//! Objects whose bytes are a function of their id, so that any wrong byte is detected.

use std::num::NonZeroU64;

use terrace_cache::PageKey;
use terrace_l3::{
    Arena, Get, GetOptions, ObjectId, Owner, Pin, Put, PutOptions, Served, Store, StoreError,
    Stored,
};

/// Hard pin of the only owner in most tests.
pub const HARD: Pin = Pin::Hard(Owner(NonZeroU64::MIN));

/// Hard pin of another owner.
pub const HARD_OF_ANOTHER: Pin = Pin::Hard(Owner(NonZeroU64::MAX));

/// Id of a page by number.
#[must_use]
pub fn page(number: u64) -> ObjectId {
    ObjectId::page(PageKey(0x7e44ace), PageKey(spread(number)))
}

/// Fills a buffer with the bytes that belong to `id`.
pub fn fill(id: &ObjectId, bytes: &mut [u8]) {
    let mut state = seed(id);
    for word in bytes.chunks_mut(8) {
        state = state.wrapping_mul(0x5851_F42D_4C95_7F2D).wrapping_add(0x1405_7B7E_F767_814F);
        let next = (state ^ (state >> 33)).to_le_bytes();
        word.copy_from_slice(&next[..word.len()]);
    }
}

/// Returns true if these are the bytes that belong to `id`.
#[must_use]
pub fn is_right(id: &ObjectId, bytes: &[u8]) -> bool {
    let mut expected = vec![0; bytes.len()];
    fill(id, &mut expected);
    expected == bytes
}

/// Stores `id` with its bytes, from page 0 of the arena.
///
/// # Errors
/// As returned by the store.
pub async fn put(
    store: &dyn Store,
    arena: &Arena,
    id: ObjectId,
    length: usize,
    options: PutOptions,
) -> Result<Stored, StoreError> {
    fill(&id, &mut arena.target(0).expect("nobody else uses it").first(length));
    let source = arena.source(0).expect("nobody writes to it").first(length);
    store.put_from(vec![Put::new(id, source)], options).await.remove(0)
}

/// Reads `id` into page 1 of the arena and checks its bytes.
///
/// # Errors
/// As returned by the store.
///
/// # Panics
/// If the store returns wrong bytes.
pub async fn get(
    store: &dyn Store,
    arena: &Arena,
    id: ObjectId,
    length: usize,
) -> Result<Served, StoreError> {
    let mut target = arena.target(1).expect("nobody else uses it").first(length);
    target.fill(0xEE);
    let served =
        store.get_into(vec![Get::new(id, target)], GetOptions::default()).await.remove(0)?;
    let source = arena.source(1).expect("the store has let go of it").first(length);
    assert!(is_right(&id, &source), "{id:?} was served with wrong bytes");
    Ok(served)
}

fn seed(id: &ObjectId) -> u64 {
    let mix =
        |state: u64, word: u64| (state ^ word).wrapping_mul(0x9E37_79B9_7F4A_7C15).rotate_left(29);
    let words = [
        id.namespace.0 as u64,
        (id.namespace.0 >> 64) as u64,
        id.key.0 as u64,
        (id.key.0 >> 64) as u64,
        id.generation,
    ];
    words.into_iter().fold(1, mix)
}

fn spread(number: u64) -> u128 {
    let low = number.wrapping_mul(0x9E37_79B9_7F4A_7C15);
    (u128::from(low.rotate_left(17) ^ number) << 64) | u128::from(low)
}
