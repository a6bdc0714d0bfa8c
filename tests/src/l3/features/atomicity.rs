//! A sample is there with all of its tensors, or not at all.

use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use terrace_l3::StoreError;
use terrace_l3_features::{FeatureConfig, FeatureError, Released};
use tokio::time::{sleep, timeout};

use super::{Asked, Stage, Trick, steal};

/// Every single call of a put goes wrong, in every way.
pub(super) async fn a_put_that_fails_anywhere_leaves_nothing(stage: Stage) {
    let (producer, store) = stage.mischievous(stage.producer_config(0)).await;
    let consumer = stage.consumer().await;
    for trick in [Trick::Refuse, Trick::LoseAnswer, Trick::Half] {
        let mut failures = 0;
        for nth in 0.. {
            store.set(|_| Trick::None);
            let before = producer.put_as("a", 1).await.unwrap();
            let calls = Arc::new(AtomicU64::new(0));
            let counted = calls.clone();
            store.set(move |_| {
                let call = counted.fetch_add(1, Ordering::Relaxed);
                if call == nth { trick } else { Trick::None }
            });
            let result = producer.put_as("a", 2).await;
            store.set(|_| Trick::None);
            match &result {
                Ok(reference) => {
                    consumer.read(reference, 2).await.unwrap();
                    assert!(consumer.is_gone(&before).await, "{trick:?} {nth}");
                    consumer.release(reference).await.unwrap();
                }
                Err(_) => {
                    failures += 1;
                    let stats = producer.features.stats();
                    assert!(stats.live <= 1, "{trick:?} {nth}: {stats:#?}");
                    if stats.live == 1 {
                        consumer.read(&before, 1).await.expect("what was there stays");
                    }
                    producer.features.abort("a").await.unwrap();
                    assert!(consumer.is_gone(&before).await);
                }
            }
            producer.settles().await;
            if calls.load(Ordering::Relaxed) <= nth {
                break;
            }
        }
        assert!(failures >= 3, "{trick:?} was hardly noticed: {failures}");
    }
    stage.assert_empty(&producer).await;
}

pub(super) async fn a_put_that_nobody_waits_for_leaves_nothing(stage: Stage) {
    let producer = stage.producer().await;
    let mut dropped = 0;
    for polls in 0..40 {
        let mut put = std::pin::pin!(producer.put_as("a", polls));
        let mut ended = false;
        for _ in 0..polls {
            ended = ended
                || std::future::poll_fn(|context| {
                    std::task::Poll::Ready(put.as_mut().poll(context).is_ready())
                })
                .await;
            tokio::task::yield_now().await;
        }
        dropped += u64::from(!ended);
    }
    assert!(dropped > 0, "no put was given up");
    let _ = producer.features.abort("a").await;
    producer.settles().await;
    stage.assert_empty(&producer).await;
}

pub(super) async fn a_producer_that_dies_in_mid_put_leaves_nothing(stage: Stage) {
    // It dies before its nth call has begun: whose the number is, looking for others, record, tensors, whose the number
    // is, claim, whose the number is, looking again.
    for nth in 0..8 {
        let (dying, store) = stage.mischievous(stage.producer_config(0)).await;
        let (mut call, hangs) = (0, Arc::new(AtomicU64::new(0)));
        let hung = hangs.clone();
        store.set(move |_| {
            call += 1;
            if call <= nth {
                return Trick::None;
            }
            hung.fetch_add(1, Ordering::Relaxed);
            Trick::Hang
        });
        let mut put = std::pin::pin!(dying.put_as("a", nth));
        while hangs.load(Ordering::Relaxed) == 0 {
            let died = timeout(Duration::from_millis(5), &mut put).await;
            assert!(died.is_err(), "it was to die, not to end");
        }
        let restarted = stage.producer().await;
        // With a claim, the producer may or may not have given out its ref.
        assert_eq!(restarted.features.stats().live, u64::from(nth >= 6), "{nth}");
        drop(restarted);
        let config = FeatureConfig { max_hold_ms: Some(1), ..stage.producer_config(0) };
        let producer = stage.open(config).await;
        producer.settles().await;
        stage.assert_empty(&producer).await;
    }
}

/// A producer is killed while it writes a note, and the store blocks the name for a writer that
/// never returns.
pub(super) async fn where_a_dead_producer_wrote_others_need_not_wait(stage: Stage) {
    let (producer, store) = stage.mischievous(stage.producer_config(0)).await;
    let consumer = stage.consumer().await;
    let mut puts = 0;
    store.set(move |asked| {
        puts += u32::from(asked == Asked::Put);
        // The record finds another place the second time, the claim after the tensors.
        if asked == Asked::Put && [1, 4].contains(&puts) { Trick::Busy } else { Trick::None }
    });
    let reference = producer.put("a").await;
    store.set(|_| Trick::None);
    consumer.read(&reference, 0).await.unwrap();
    // It is found again where it is noted.
    let restarted = stage.producer().await;
    let stats = restarted.features.stats();
    assert_eq!((stats.live, stats.restored), (1, 1));
    let newer = restarted.put_as("a", 1).await.unwrap();
    assert!(consumer.is_gone(&reference).await);
    assert_eq!(consumer.release(&newer).await, Ok(Released::Freed));
    restarted.settles().await;
    stage.assert_empty(&restarted).await;
}

/// A read that brought fewer bytes than asked for passed for a whole one.
pub(super) async fn f12_a_short_tensor_fails_the_whole_sample(stage: Stage) {
    let producer = stage.producer().await;
    let (consumer, store) = stage.mischievous(stage.consumer_config()).await;
    let reference = producer.put("a").await;
    store.set(|asked| if asked == Asked::Get { Trick::Shorten } else { Trick::None });
    let error = consumer.features.get(&reference).await.unwrap_err();
    let FeatureError::Damaged { key, error: StoreError::Length { .. } } = &error else {
        panic!("{error}")
    };
    assert!(key.ends_with("/ids"), "{key}");
    assert_eq!((consumer.features.stats().gets, consumer.features.stats().gets_damaged), (0, 1));
}

pub(super) async fn a_damaged_tensor_fails_the_whole_sample(stage: Stage) {
    let producer = stage.producer().await;
    let (consumer, store) = stage.mischievous(stage.consumer_config()).await;
    let reference = producer.put("a").await;
    store.set(|asked| if asked == Asked::Get { Trick::Damage } else { Trick::None });
    let error = consumer.features.get(&reference).await.unwrap_err();
    assert!(matches!(error, FeatureError::Damaged { .. }), "{error}");
    store.set(|asked| if asked == Asked::Get { Trick::Half } else { Trick::None });
    let error = consumer.features.get(&reference).await.unwrap_err();
    assert!(matches!(error, FeatureError::Store { .. }), "{error}");
}

pub(super) async fn a_missing_tensor_fails_the_whole_sample(stage: Stage) {
    let (producer, consumer) = (stage.producer().await, stage.consumer().await);
    for tensor in 0..2 {
        let reference = producer.put("a").await;
        steal(&consumer, &reference, tensor).await;
        assert!(consumer.is_gone(&reference).await && producer.is_gone(&reference).await);
        producer.settles().await;
        assert_eq!(producer.objects_left(&reference).await, 0);
    }
    stage.assert_empty(&producer).await;
}

/// A put fails because the store does not answer, is cleaned up, and then its objects arrive.
pub(super) async fn what_arrives_late_is_freed(stage: Stage) {
    let (producer, store) = stage.mischievous(stage.producer_config(0)).await;
    let reference = producer.put_as("a", 0).await.unwrap();
    let mut puts = 0;
    store.set(move |asked| {
        puts += u32::from(asked == Asked::Put);
        // The record is stored; the tensors are too, but that is not known.
        match asked {
            Asked::Put if puts == 2 => Trick::LoseAnswer,
            // Nothing seems to be there yet.
            Asked::Remove if puts >= 2 => Trick::Refuse,
            _ => Trick::None,
        }
    });
    assert!(producer.put_as("a", 1).await.is_err());
    producer.read(&reference, 0).await.expect("the older generation is as it was");
    assert!(producer.features.stats().parked > 0);
    store.set(|_| Trick::None);
    producer.release(&reference).await.unwrap();
    sleep(Duration::from_millis(60)).await;
    producer.settles().await;
    stage.assert_empty(&producer).await;
}

/// Two engines were started with the same settings while one of them was putting a sample: wherever that was, what it gave
/// out can be read, and what it did not give out takes nothing with it.
pub(super) async fn two_processes_with_one_number_lose_no_sample(stage: Stage) {
    let consumer = stage.consumer().await;
    let (mut given, mut refused) = (0, 0);
    for nth in 0..10 {
        let (first, store) = stage.mischievous(stage.producer_config(0)).await;
        let before = first.put_as("before", nth).await.unwrap();
        let (mut call, pauses) = (0, Arc::new(AtomicU64::new(0)));
        let paused = pauses.clone();
        store.set(move |_| {
            call += 1;
            if call <= nth {
                return Trick::None;
            }
            paused.fetch_add(1, Ordering::Relaxed);
            Trick::Pause
        });
        let put = tokio::spawn(async move { (first.put_as("a", nth).await, first) });
        while pauses.load(Ordering::Relaxed) == 0 && !put.is_finished() {
            sleep(Duration::from_millis(1)).await;
        }
        let second = stage.producer().await;
        let beside = second.put_as("beside", nth).await.unwrap();
        store.set(|_| Trick::None);
        store.resume();
        let (put, first) = put.await.unwrap();
        assert!(matches!(first.features.gc().await, Err(FeatureError::Fenced { owner: 0, .. })));
        second.features.gc().await.unwrap();
        match put {
            Ok(reference) => {
                given += 1;
                consumer.read(&reference, nth).await.expect("it was given out");
            }
            Err(FeatureError::Fenced { owner: 0, .. }) => refused += 1,
            Err(error) => panic!("{nth}: {error}"),
        }
        for reference in [&before, &beside] {
            consumer.read(reference, nth).await.expect("nobody has released it");
        }
        let newer = second.put_as("a", 100 + nth).await.unwrap();
        consumer.read(&newer, 100 + nth).await.unwrap();
        for reference in [&before, &beside, &newer] {
            assert_eq!(consumer.release(reference).await, Ok(Released::Freed));
        }
        second.settles().await;
        stage.assert_empty(&second).await;
    }
    assert!(given > 0 && refused > 4, "{given} given out, {refused} refused");
}
