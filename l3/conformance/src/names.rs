//! Ids: namespaces, keys and generations.

use terrace_cache::{PageKey, PrefixDigest};
use terrace_l3::{GetOptions, Mismatch, ObjectId, Put, PutOptions, Removal, StoreError, Stored};

use super::Bench;
use crate::objects::{HARD, page};

/// Pages are named by their content, so a second put of an id has the same bytes. If it does not,
/// the first ones stay.
pub(super) async fn a_second_put_keeps_the_first_bytes(bench: Bench) {
    bench.put(0).await;
    for length in [bench.max(), 10] {
        bench.arena.target(0).expect("it is free").fill(0xAB);
        let source = bench.arena.source(0).expect("it is free").first(length);
        let puts = vec![Put::new(page(0), source)];
        let again = bench.store().put_from(puts, PutOptions::default()).await;
        assert_eq!(again, [Ok(Stored::AlreadyThere)]);
        bench.get(0).await.unwrap();
    }
}

/// Keys that agree in a half or in their hash, and equal keys of different namespaces: F10, F11.
pub(super) async fn different_ids_are_different_objects(bench: Bench) {
    let low = 0x0123_4567_89AB_CDEF_u64;
    // These two mix to the same hash.
    let keys = [u128::from(low), u128::from(low.rotate_left(32)) << 64];
    let digests = [1, 1 << 64, u128::MAX];
    let names = digests.into_iter().flat_map(|digest| {
        keys.into_iter().map(move |key| ObjectId::page(PageKey(digest), PageKey(key)))
    });
    let ids: Vec<ObjectId> = names.collect();
    for (number, id) in ids.iter().enumerate() {
        assert!(!bench.is_present(*id).await, "{id:?}");
        assert_eq!(bench.put_id(*id).await, Ok(Stored::New));
        for earlier in &ids[..=number] {
            bench.get_id(*earlier, bench.max()).await.unwrap();
        }
    }
    bench.pin(ids[0], HARD).await.unwrap();
    for id in &ids[1..] {
        bench.remove(*id, Removal::Plain).await.unwrap();
        assert_eq!(bench.get_id(*id, bench.max()).await, Err(StoreError::Missing));
    }
    bench.get_id(ids[0], bench.max()).await.unwrap();
}

/// Takes effect at once and for good: a lower generation is refused while a higher one exists.
pub(super) async fn a_higher_generation_replaces_lower_ones(bench: Bench) {
    let generation = |number| page(0).with_generation(number);
    for number in [0, 1, 5, u64::MAX] {
        assert_eq!(bench.put_id(generation(number)).await, Ok(Stored::New), "{number}");
        bench.get_id(generation(number), bench.max()).await.unwrap();
        assert_eq!(bench.put_id(generation(number)).await, Ok(Stored::AlreadyThere));
        for lower in [0, 1, 4, 5].into_iter().filter(|lower| *lower < number) {
            let id = generation(lower);
            let refused = bench.put_id(id).await;
            assert_eq!(refused, Err(StoreError::Superseded { present: number }), "{lower}");
            assert_eq!(bench.get_id(id, bench.max()).await, Err(StoreError::Missing));
            assert!(!bench.is_present(id).await);
        }
    }
    bench.assert_empties(&[generation(u64::MAX)]).await;
    // Within a batch the order counts; the higher one may still be in flight when the lower one is
    // handled.
    let ids = [generation(1), generation(3), generation(2)];
    let puts = (0..3).map(|number| bench.put_of(number, ids[number as usize], 100)).collect();
    let stored = bench.store().put_from(puts, PutOptions::default()).await;
    assert_eq!(stored[1], Ok(Stored::New));
    let refused = [StoreError::Superseded { present: 3 }, StoreError::BeingWritten];
    assert!(refused.map(Err).contains(&stored[2]), "{stored:?}");
    bench.get_id(generation(3), 100).await.unwrap();
    assert_eq!(bench.get_id(generation(1), 100).await, Err(StoreError::Missing));
    bench.assert_empties(&ids).await;
}

/// Gets, pins and removals affect no other generation.
pub(super) async fn an_id_means_exactly_its_generation(bench: Bench) {
    let generation = |number| page(0).with_generation(number);
    assert_eq!(bench.put_id(generation(4)).await, Ok(Stored::New));
    for other in [0, 3, 5].map(generation) {
        assert!(!bench.is_present(other).await);
        let gets = vec![bench.get_of(1, other, bench.max())];
        let served = bench.store().get_into(gets, GetOptions::default()).await;
        assert_eq!(served, [Err(StoreError::Missing)]);
        assert_eq!(bench.pin(other, HARD).await, Err(StoreError::Missing));
        assert_eq!(bench.unpin(other, HARD).await, Err(StoreError::Missing));
        assert_eq!(bench.remove(other, Removal::Forced).await, Err(StoreError::Missing));
    }
    bench.get_id(generation(4), bench.max()).await.unwrap();
    bench.remove(generation(4), Removal::Plain).await.unwrap();
}

fn prefix(number: u128) -> PrefixDigest {
    PrefixDigest::of_namespace(PageKey(number))
}

/// Reads page 0 with this prefix.
async fn get_with(bench: &Bench, number: u128) -> Result<(), StoreError> {
    let get = bench.get_of(1, page(0), bench.max()).with_prefix(prefix(number));
    bench.store().get_into(vec![get], GetOptions::default()).await.remove(0).map(drop)
}

/// Page keys can be made to collide. A page of other tokens under the same key is detected and
/// removed, so that the wanted one can be stored: F84.
pub(super) async fn a_page_is_read_with_its_own_prefix_only(bench: Bench) {
    let put = async |number| {
        let put = bench.put_of(0, page(0), bench.max()).with_prefix(prefix(number));
        let stored = bench.store().put_from(vec![put], PutOptions::default()).await.remove(0);
        // An object that is still moving between tiers is missing in the tier that it has not
        // reached.
        bench.store().flush().await.expect("it works");
        stored
    };
    let unsound = Err(StoreError::Corrupt(Mismatch::Prefix));
    assert_eq!(put(1).await, Ok(Stored::New));
    assert_eq!(get_with(&bench, 1).await, Ok(()));
    bench.get(0).await.expect("who does not know the prefix does not ask for it");
    assert_eq!(get_with(&bench, 2).await, unsound);
    assert_eq!(get_with(&bench, 1).await, Err(StoreError::Missing), "it was removed");
    assert_eq!(put(2).await, Ok(Stored::New));
    assert_eq!(get_with(&bench, 2).await, Ok(()));
    assert_eq!(get_with(&bench, 1).await, unsound);
}

/// It may have been stored by a version without prefixes, for any tokens.
pub(super) async fn a_page_without_a_prefix_matches_no_prefix(bench: Bench) {
    bench.put(0).await;
    bench.store().flush().await.expect("it works");
    assert_eq!(get_with(&bench, 1).await, Err(StoreError::Corrupt(Mismatch::Prefix)));
    assert_eq!(get_with(&bench, 1).await, Err(StoreError::Missing));
}
