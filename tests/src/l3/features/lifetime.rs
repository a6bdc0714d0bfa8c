//! When samples can be had, and when their memory is free.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use terrace_l3::ExistsOptions;
use terrace_l3_features::{FeatureConfig, FeatureError, FeatureRef, Released};

use super::{Asked, Stage, Trick, refuse};

/// A released sample could be read on while its lease lasted.
pub(super) async fn f34_a_released_sample_cannot_be_had_anywhere(stage: Stage) {
    let (producer, consumer, other) =
        (stage.producer().await, stage.consumer().await, stage.consumer().await);
    for releasing in [&producer, &consumer] {
        let reference = producer.put("a").await;
        let ids: Vec<_> =
            producer.features.objects(&reference).into_iter().map(|(_, id)| id).collect();
        let leased = ExistsOptions { lease: true, ..ExistsOptions::default() };
        consumer.store.exists(&ids, leased).await;
        consumer.read(&reference, 0).await.unwrap();
        assert_eq!(releasing.release(&reference).await, Ok(Released::Freed));
        for process in [&producer, &consumer, &other] {
            assert!(process.is_gone(&reference).await);
        }
        assert_eq!(other.release(&reference).await, Ok(Released::AlreadyGone));
        assert_eq!(releasing.release(&reference).await, Ok(Released::AlreadyGone));
    }
    producer.settles().await;
    stage.assert_empty(&producer).await;
}

/// Memory was what is in flight and what waits for its lease to end.
pub(super) async fn f33_a_release_frees_at_once_whatever_the_leases(stage: Stage) {
    let (producer, consumer) = (stage.producer().await, stage.consumer().await);
    for number in 0..100 {
        let reference = producer.put(&format!("{number}")).await;
        let ids: Vec<_> =
            producer.features.objects(&reference).into_iter().map(|(_, id)| id).collect();
        let leased = ExistsOptions { lease: true, ..ExistsOptions::default() };
        consumer.store.exists(&ids, leased).await;
        consumer.read(&reference, 0).await.unwrap();
        assert_eq!(consumer.release(&reference).await, Ok(Released::Freed));
        assert_eq!(consumer.objects_left(&reference).await, 0);
        producer.features.gc().await.unwrap();
        assert_eq!(producer.features.stats().resident_bytes, 0);
    }
    assert_eq!(producer.features.stats().consumed_elsewhere, 100);
    stage.assert_empty(&producer).await;
}

pub(super) async fn an_aborted_sample_cannot_be_had_anywhere(stage: Stage) {
    let (producer, consumer) = (stage.producer().await, stage.consumer().await);
    let stranger = stage.open(stage.producer_config(1)).await;
    for aborting in [&producer, &consumer, &stranger] {
        let (reference, spared) = (producer.put("a").await, producer.put("b").await);
        assert_eq!(aborting.features.abort("a").await, Ok(1));
        for process in [&producer, &consumer, &stranger] {
            assert!(process.is_gone(&reference).await);
            process.read(&spared, 0).await.expect("another sample");
        }
        assert_eq!(producer.objects_left(&reference).await, 0);
    }
    assert_eq!(producer.features.abort("b").await, Ok(1));
    producer.settles().await;
    assert_eq!(producer.features.abort("a").await, Ok(0));
    stranger.settles().await;
    stage.assert_empty(&producer).await;
}

pub(super) async fn a_put_supersedes_the_older_generation_everywhere(stage: Stage) {
    let (producer, consumer) = (stage.producer().await, stage.consumer().await);
    let mut older: Vec<FeatureRef> = Vec::new();
    for salt in 0..5 {
        let reference = producer.put_as("a", salt).await.unwrap();
        consumer.read(&reference, salt).await.unwrap();
        for older in &older {
            assert!(consumer.is_gone(older).await && producer.is_gone(older).await);
            assert_eq!(producer.objects_left(older).await, 0);
        }
        if let Some(last) = older.last() {
            assert!(reference.generation() > last.generation());
        }
        older.push(reference);
    }
    let stats = producer.features.stats();
    assert_eq!((stats.live, stats.superseded), (1, 4));
    consumer.release(&older[4]).await.unwrap();
    producer.settles().await;
    stage.assert_empty(&producer).await;
}

pub(super) async fn another_producer_supersedes_as_well(stage: Stage) {
    let consumer = stage.consumer().await;
    let mut producers = Vec::new();
    for owner in [0, 7, 31] {
        producers.push(stage.open(stage.producer_config(owner)).await);
    }
    let mut older: Vec<FeatureRef> = Vec::new();
    for salt in 0..9 {
        let producer = &producers[salt as usize % 3];
        let reference = producer.put_as("a", salt).await.unwrap();
        consumer.read(&reference, salt).await.unwrap();
        for older in &older {
            assert!(consumer.is_gone(older).await, "{salt}");
            assert_eq!(consumer.objects_left(older).await, 0);
            assert!(older.generation() < reference.generation());
        }
        older.push(reference);
    }
    consumer.release(&older[8]).await.unwrap();
    for producer in &producers {
        producer.settles().await;
    }
    stage.assert_empty(&consumer).await;
}

pub(super) async fn a_stale_ref_frees_nothing_else(stage: Stage) {
    let (producer, consumer) = (stage.producer().await, stage.consumer().await);
    let stale = producer.put_as("a", 1).await.unwrap();
    let current = producer.put_as("a", 2).await.unwrap();
    for process in [&producer, &consumer] {
        assert_eq!(process.release(&stale).await, Ok(Released::AlreadyGone));
    }
    consumer.read(&current, 2).await.unwrap();
    let leased = ExistsOptions { lease: true, ..ExistsOptions::default() };
    let ids: Vec<_> = producer.features.objects(&stale).into_iter().map(|(_, id)| id).collect();
    consumer.store.exists(&ids, leased).await;
    producer.features.gc().await.unwrap();
    consumer.read(&current, 2).await.unwrap();
    assert_eq!(consumer.release(&current).await, Ok(Released::Freed));
    producer.settles().await;
    stage.assert_empty(&producer).await;
}

/// A put of an existing name reports success and keeps the old bytes. So no name is used twice,
/// even by a restarted producer.
pub(super) async fn f40_two_puts_never_share_a_name(stage: Stage) {
    let mut names = BTreeSet::new();
    for round in 0..4 {
        let producer = stage.producer().await;
        for salt in 0..5 {
            let reference = producer.put_as("a", round * 10 + salt).await.unwrap();
            for (key, id) in producer.features.objects(&reference) {
                assert!(names.insert(id), "{key} was there before");
            }
            producer.read(&reference, round * 10 + salt).await.unwrap();
            if salt == 2 {
                producer.release(&reference).await.unwrap();
            }
        }
    }
}

pub(super) async fn a_sample_is_consumed_once(stage: Stage) {
    let producer = stage.producer().await;
    let reference = producer.put("a").await;
    let mut consumers = Vec::new();
    for _ in 0..4 {
        consumers.push(stage.consumer().await);
    }
    let mut freed = 0;
    for consumer in &consumers {
        match consumer.release(&reference).await.unwrap() {
            Released::Freed => freed += 1,
            Released::AlreadyGone => {}
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(freed, 1);
}

pub(super) async fn a_retained_sample_lasts_for_further_epochs(stage: Stage) {
    let config = FeatureConfig { retain_on_release: true, ..stage.producer_config(0) };
    let (producer, consumer) = (stage.open(config).await, stage.consumer().await);
    let reference = producer.put("a").await;
    for _ in 0..3 {
        consumer.read(&reference, 0).await.unwrap();
        assert_eq!(consumer.release(&reference).await, Ok(Released::Retained));
    }
    assert_eq!(producer.features.abort("a").await, Ok(1));
    assert!(consumer.is_gone(&reference).await);
    producer.settles().await;
}

/// A removal failed, and what it should have freed was never freed.
pub(super) async fn f35_a_failed_free_is_parked_and_retried(stage: Stage) {
    let producer = stage.producer().await;
    let (consumer, store) = stage.mischievous(stage.consumer_config()).await;
    let other = stage.consumer().await;
    let refs = [producer.put("a").await, producer.put("b").await];
    // One of two tensors goes, the other stays.
    let mut unpinned = false;
    store.set(move |asked| match asked {
        Asked::Remove if !std::mem::replace(&mut unpinned, true) => Trick::Half,
        Asked::Remove => Trick::Refuse,
        _ => Trick::None,
    });
    for reference in &refs {
        assert_eq!(consumer.release(reference).await, Ok(Released::Lingering));
        assert!(consumer.is_gone(reference).await && other.is_gone(reference).await);
        assert!(producer.is_gone(reference).await);
    }
    assert_eq!(consumer.objects_left(&refs[0]).await, 1);
    let stats = consumer.features.stats();
    assert_eq!((stats.parked, stats.released), (2, 2));
    let (began, mut reports) = (Instant::now(), 0);
    for _ in 0..20 {
        reports += consumer.features.gc().await.unwrap().parked;
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    let retries = consumer.features.stats().retries;
    // Each after 5, 10, 20, 40 ms, and then every 50.
    let most = 2 * (5 + began.elapsed().as_millis() as u64 / 50);
    assert!(reports >= 38 && (4..=most).contains(&retries), "less and less often: {retries}");
    store.set(|_| Trick::None);
    consumer.settles().await;
    for reference in &refs {
        assert_eq!(other.objects_left(reference).await, 0);
        assert!(consumer.is_gone(reference).await && other.is_gone(reference).await);
    }
    assert_eq!(consumer.features.stats().recovered, 2);
    producer.settles().await;
    stage.assert_empty(&producer).await;
}

/// Where nothing can be removed at all, everybody learns of a release all the same.
pub(super) async fn a_store_that_removes_nothing_is_told_by_a_note(stage: Stage) {
    let producer = stage.producer().await;
    let (consumer, store) = stage.mischievous(stage.consumer_config()).await;
    let other = stage.consumer().await;
    let reference = producer.put("a").await;
    store.set(refuse(&[Asked::Remove]));
    assert_eq!(consumer.release(&reference).await, Ok(Released::Lingering));
    assert_eq!(other.objects_left(&reference).await, 2, "its bytes are all there");
    for process in [&consumer, &other, &producer] {
        assert!(process.is_gone(&reference).await);
    }
    // The producer sees to it, even if the consumer never does.
    drop(consumer);
    producer.settles().await;
    assert_eq!(other.objects_left(&reference).await, 0);
    assert!(other.is_gone(&reference).await);
    stage.assert_empty(&producer).await;
}

/// If nothing can be written either, the caller gets an error, and this process refuses the ref.
pub(super) async fn a_store_that_cannot_be_told_is_told_by_gc(stage: Stage) {
    let producer = stage.producer().await;
    let (consumer, store) = stage.mischievous(stage.consumer_config()).await;
    let other = stage.consumer().await;
    let reference = producer.put("a").await;
    store.set(refuse(&[Asked::Remove, Asked::Unpin, Asked::Put]));
    let untold = consumer.release(&reference).await.unwrap_err();
    assert!(matches!(untold, FeatureError::NotRevoked { .. }), "{untold}");
    assert!(consumer.is_gone(&reference).await);
    assert_eq!(consumer.release(&reference).await, Ok(Released::AlreadyGone));
    store.set(|_| Trick::None);
    consumer.settles().await;
    assert!(consumer.is_gone(&reference).await && other.is_gone(&reference).await);
    producer.settles().await;
    stage.assert_empty(&producer).await;
}
