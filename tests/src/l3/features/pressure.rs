//! Budgets, and samples that are never released.

use std::time::Duration;

use terrace_l3_features::{FeatureConfig, FeatureError, FeatureRef, Released, WhenFull};
use tokio::time::{Instant, sleep, timeout};

use super::{Process, SAMPLE_FOOTPRINT, Stage};

/// A producer that may have three samples.
fn tight(stage: &Stage, when_full: WhenFull) -> FeatureConfig {
    FeatureConfig {
        max_resident_bytes: 3 * SAMPLE_FOOTPRINT + 100,
        when_full,
        ..stage.producer_config(0)
    }
}

async fn three(producer: &Process) -> Vec<FeatureRef> {
    let mut refs = Vec::new();
    for number in 0..3 {
        refs.push(producer.put(&format!("{number}")).await);
    }
    refs
}

pub(super) async fn a_budget_that_is_used_up_refuses(stage: Stage) {
    let producer = stage.open(tight(&stage, WhenFull::Refuse)).await;
    let consumer = stage.consumer().await;
    let refs = three(&producer).await;
    let refused = producer.put_as("3", 0).await.unwrap_err();
    let FeatureError::OverBudget { bytes, resident, samples, max } = refused else {
        panic!("{refused}")
    };
    assert_eq!((bytes, resident, samples), (SAMPLE_FOOTPRINT, 3 * SAMPLE_FOOTPRINT, 3));
    assert_eq!((max, producer.features.stats().puts_over_budget), (3 * SAMPLE_FOOTPRINT + 100, 1));
    consumer.release(&refs[1]).await.unwrap();
    producer.put("3").await;
    assert!(producer.put_as("4", 0).await.is_err());
    // A sample that is replaced needs room beside the one that it replaces.
    assert!(producer.put_as("3", 1).await.is_err());
    let config = FeatureConfig { max_resident_bytes: 100, ..stage.producer_config(1) };
    let never = stage.open(config).await.put_as("x", 0).await;
    assert_eq!(never, Err(FeatureError::TooLarge { bytes: SAMPLE_FOOTPRINT, max: 100 }));
}

pub(super) async fn a_put_waits_until_somebody_elsewhere_consumes(stage: Stage) {
    let producer = stage.open(tight(&stage, WhenFull::WaitMs(60_000))).await;
    let consumer = stage.consumer().await;
    let refs = three(&producer).await;
    for reference in &refs {
        let mut waiting = std::pin::pin!(producer.put_as("next", reference.generation()));
        assert!(timeout(Duration::from_millis(60), &mut waiting).await.is_err(), "it waits");
        assert_eq!(producer.features.stats().waiting, 1);
        consumer.release(reference).await.unwrap();
        let next = timeout(Duration::from_secs(30), waiting).await.expect("it waits no longer");
        producer.release(&next.unwrap()).await.unwrap();
        producer.put(&format!("another {}", reference.generation())).await;
    }
    let most = producer.features.stats().resident_most_bytes;
    assert!(most <= 3 * SAMPLE_FOOTPRINT + 100, "{most}");
}

pub(super) async fn a_put_does_not_wait_for_ever(stage: Stage) {
    let producer = stage.open(tight(&stage, WhenFull::WaitMs(50))).await;
    three(&producer).await;
    let began = Instant::now();
    let given_up = producer.put_as("3", 0).await;
    assert!(matches!(given_up, Err(FeatureError::OverBudget { .. })));
    assert!(began.elapsed() >= Duration::from_millis(50));
    assert_eq!(producer.features.stats().waiting, 0);
}

pub(super) async fn what_nobody_releases_is_freed(stage: Stage) {
    // Longer, until its time is not over before it was read: some machines are slow.
    for hold in [1500, 6_000, 24_000].map(Duration::from_millis) {
        let max_hold_ms = Some(hold.as_millis() as u64);
        let config = FeatureConfig { max_hold_ms, ..stage.producer_config(0) };
        let (producer, consumer) = (stage.open(config).await, stage.consumer().await);
        let began = Instant::now();
        let reference = producer.put("a").await;
        let mut expired = producer.features.gc().await.unwrap().expired;
        let read = consumer.read(&reference, 0).await;
        let is_in_time = began.elapsed() < hold;
        if is_in_time {
            read.expect("its time is not over");
        }
        sleep(hold + Duration::from_millis(20)).await;
        expired += producer.features.gc().await.unwrap().expired;
        assert_eq!((expired, producer.features.stats().expired), (1, 1));
        assert!(consumer.is_gone(&reference).await && producer.is_gone(&reference).await);
        assert_eq!(consumer.release(&reference).await, Ok(Released::AlreadyGone));
        producer.settles().await;
        stage.assert_empty(&producer).await;
        if is_in_time {
            return;
        }
    }
    panic!("24 seconds are too short for a put and a read");
}

pub(super) async fn the_budget_survives_a_restart(stage: Stage) {
    let config = tight(&stage, WhenFull::Refuse);
    let producer = stage.open(config.clone()).await;
    let consumer = stage.consumer().await;
    let refs = three(&producer).await;
    drop(producer);
    consumer.release(&refs[0]).await.unwrap();
    let producer = stage.open(config.clone()).await;
    let stats = producer.features.stats();
    assert_eq!((stats.live, stats.resident_bytes), (2, 2 * SAMPLE_FOOTPRINT));
    let next = producer.put("next").await;
    assert!(matches!(producer.put_as("x", 0).await, Err(FeatureError::OverBudget { .. })));
    for reference in [&refs[1], &refs[2], &next] {
        consumer.read(reference, 0).await.expect("a restart takes nothing away");
    }
    // Samples of a former life are superseded like any others.
    drop(producer);
    let producer = stage.open(stage.producer_config(0)).await;
    let newer = producer.put_as("1", 5).await.unwrap();
    assert!(consumer.is_gone(&refs[1]).await);
    consumer.read(&newer, 5).await.unwrap();
    for reference in [&refs[2], &next, &newer] {
        assert_eq!(consumer.release(reference).await, Ok(Released::Freed));
    }
    producer.settles().await;
    stage.assert_empty(&producer).await;
}

pub(super) async fn the_time_to_hold_survives_a_restart(stage: Stage) {
    let began = Instant::now();
    let consumer = stage.consumer().await;
    drop(stage.producer().await);
    // Several starts, however long one takes.
    let max_hold = Duration::from_secs(4) + 20 * began.elapsed();
    let max_hold_ms = Some(max_hold.as_millis() as u64);
    let config = FeatureConfig { max_hold_ms, ..stage.producer_config(0) };
    let producer = stage.open(config.clone()).await;
    let before = Instant::now();
    let reference = producer.put("a").await;
    let began = Instant::now();
    while began.elapsed() < max_hold / 2 {
        drop(stage.open(config.clone()).await);
        sleep(max_hold / 8).await;
    }
    drop(producer);
    let producer = stage.open(config).await;
    let read = consumer.read(&reference, 0).await;
    if before.elapsed() < max_hold {
        read.expect("its time is not over");
    }
    sleep((max_hold + Duration::from_millis(20)).saturating_sub(began.elapsed())).await;
    producer.features.gc().await.unwrap();
    assert!(consumer.is_gone(&reference).await, "each start began its time anew");
    producer.settles().await;
    stage.assert_empty(&producer).await;
}

pub(super) async fn a_restart_pins_what_is_there(stage: Stage) {
    let producer = stage.producer().await;
    let reference = producer.put("a").await;
    for _ in 0..3 {
        drop(stage.producer().await);
    }
    let pinned = producer.store.stats();
    for tier in pinned.memory.into_iter().chain(pinned.disk) {
        assert_eq!(tier.hard_pinned, tier.objects, "{tier:#?}");
    }
    // As many pins as before: one release removes them all.
    assert_eq!(stage.consumer().await.release(&reference).await, Ok(Released::Freed));
}

pub(super) async fn samples_are_bounded_like_bytes(stage: Stage) {
    let config =
        FeatureConfig { samples_max: 4, when_full: WhenFull::Refuse, ..stage.producer_config(0) };
    let producer = stage.open(config).await;
    let mut refs = Vec::new();
    for number in 0..4 {
        refs.push(producer.put(&format!("{number}")).await);
    }
    let refused = producer.put_as("4", 0).await;
    assert!(matches!(refused, Err(FeatureError::OverBudget { samples: 4, .. })), "{refused:?}");
    for reference in &refs {
        producer.release(reference).await.unwrap();
    }
    for number in 0..4 {
        producer.put(&format!("again {number}")).await;
    }
}

pub(super) async fn gc_looks_sooner_when_room_is_short(stage: Stage) {
    let config = FeatureConfig { recheck_ms: 600_000, ..tight(&stage, WhenFull::Refuse) };
    let (producer, consumer) = (stage.open(config).await, stage.consumer().await);
    let refs = three(&producer).await;
    let consumed = async || producer.features.gc().await.unwrap().consumed;
    assert_eq!(consumed().await, 0);
    consumer.release(&refs[0]).await.unwrap();
    assert_eq!(consumed().await, 1);
    // Two samples leave enough room.
    consumer.release(&refs[1]).await.unwrap();
    assert_eq!(consumed().await, 0);
    consumer.release(&refs[2]).await.unwrap();
}
