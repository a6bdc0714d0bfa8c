//! L3 pages with the keys of one prompt and the KV of another.

use terrace_cache::{PrefixDigest, Sequence};
use terrace_l3::{Arena, Get, GetOptions, Mismatch, ObjectId, Put, PutOptions, StoreError};

use super::*;

/// Returns the object ids of a prompt's pages, and the digests of their prefixes.
async fn pages_of(engine: &Engine, prompt: &[Token]) -> Vec<(ObjectId, PrefixDigest)> {
    let root = engine.namespaces(vec![String::new()]).await.expect("it runs")[0];
    let sequence = Sequence::new(root, PAGE_SIZE, prompt.to_vec());
    let pages = sequence.keys().len() as u32;
    let mut digests = Vec::new();
    PrefixDigest::of_namespace(root).extend_along(sequence.run(0, pages), &mut digests);
    let ids = sequence.keys().iter().map(|key| ObjectId::page(root, key)).collect::<Vec<_>>();
    ids.into_iter().zip(digests).collect()
}

/// A key collision forced by a client: valid objects with the keys of one prompt that hold the KV
/// of another. The model detects a page that does not belong to its prompt.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn f84_an_engine_reads_no_page_of_other_tokens() {
    let (prompt, other) = (prompt(3, 100), prompt(4, 100));
    for has_prefix in [true, false] {
        let store = memory_store();
        let engine = start(device(64, 64), Some(store.clone()));
        let (pages, others) = (pages_of(&engine, &prompt).await, pages_of(&engine, &other).await);
        ask(&engine, &other, 1).await;
        backed_up(&engine, 6).await;

        // Stores the pages of one prompt under the keys of the other.
        let arena = Arena::new(6, page_bytes()).unwrap();
        let _registration = store.register(&arena).unwrap();
        let gets = (0..6).zip(&others).map(|(page, (id, prefix))| {
            Get::new(*id, arena.target(page).unwrap()).with_prefix(*prefix)
        });
        let read = store.get_into(gets.collect(), GetOptions::default()).await;
        assert!(read.iter().all(Result::is_ok), "they have these prefixes: {read:?}");
        let puts = (0..6).zip(pages.iter().zip(&others)).map(|(page, ((id, _), (_, prefix)))| {
            let put = Put::new(*id, arena.source(page).unwrap());
            if has_prefix { put.with_prefix(*prefix) } else { put }
        });
        let stored = store.put_from(puts.collect(), PutOptions::default()).await;
        assert!(stored.iter().all(Result::is_ok), "{stored:?}");

        let answer = ask(&engine, &prompt, 8).await;
        assert_eq!(answer.tokens, toy_answer(&prompt, 8));
        assert_eq!(answer.hits.total(), 0);
        let figures = engine.figures().await.unwrap();
        assert_eq!(figures.scheduler.probes.sound_pages, 6, "they were there");
        assert_eq!(figures.scheduler.prefetches.failures, 0, "and are no fault of the store");
        let (id, prefix) = pages[0];
        let get = Get::new(id, arena.target(0).unwrap()).with_prefix(prefix);
        let read = store.get_into(vec![get], GetOptions::default()).await.remove(0);
        assert_ne!(read, Err(StoreError::Corrupt(Mismatch::Prefix)), "the wrong one was removed");
    }
}
