//! Many at once.

use std::sync::Arc;

use terrace_l3_features::{FeatureError, FeatureRef, Released};
use tokio::sync::mpsc;
use tokio::task::JoinSet;

use super::Stage;

/// After concurrent puts of a sample, at most one generation is readable: the latest of those whose
/// put succeeded.
pub(super) async fn producers_of_one_sample_leave_one_generation(stage: Stage) {
    let consumer = stage.consumer().await;
    let mut producers = Vec::new();
    for owner in 0..4 {
        producers.push(Arc::new(stage.open(stage.producer_config(owner)).await));
    }
    for round in 0..25 {
        let mut puts = JoinSet::new();
        for producer in producers.iter().chain(&producers[..2]) {
            let producer = producer.clone();
            puts.spawn(async move { producer.put_as("a", round).await });
        }
        let mut refs = Vec::new();
        while let Some(put) = puts.join_next().await {
            match put.unwrap() {
                Ok(reference) => refs.push(reference),
                Err(FeatureError::Superseded { .. }) => {}
                Err(error) => panic!("{error}"),
            }
        }
        refs.sort_by_key(FeatureRef::generation);
        let latest = refs.pop().expect("the latest put is well");
        consumer.read(&latest, round).await.expect("the latest can be read");
        for older in refs {
            assert!(consumer.is_gone(&older).await, "round {round}: two can be read");
        }
    }
    consumer.features.abort("a").await.unwrap();
    for producer in &producers {
        producer.settles().await;
    }
    stage.assert_empty(&consumer).await;
}

pub(super) async fn producers_and_consumers_pass_on_everything_once(stage: Stage) {
    const SAMPLES: u64 = 60;
    let (sender, receiver) = mpsc::channel::<(FeatureRef, u64)>(4);
    let receiver = Arc::new(tokio::sync::Mutex::new(receiver));
    let (mut producing, mut consuming) = (JoinSet::new(), JoinSet::new());
    let mut producers = Vec::new();
    for owner in 0..2 {
        let producer = Arc::new(stage.open(stage.producer_config(owner)).await);
        producers.push(producer.clone());
        let sender = sender.clone();
        producing.spawn(async move {
            for salt in 0..SAMPLES {
                let reference = producer.put_as(&format!("{owner}/{salt}"), salt).await.unwrap();
                sender.send((reference, salt)).await.unwrap();
            }
        });
    }
    drop(sender);
    for _ in 0..3 {
        let (consumer, receiver) = (stage.consumer().await, receiver.clone());
        consuming.spawn(async move {
            let mut consumed = 0;
            loop {
                let next = receiver.lock().await.recv().await;
                let Some((reference, salt)) = next else { return consumed };
                consumer.read(&reference, salt).await.unwrap();
                assert_eq!(consumer.release(&reference).await, Ok(Released::Freed));
                consumed += 1;
            }
        });
    }
    producing.join_all().await;
    let consumed: u64 = consuming.join_all().await.into_iter().sum();
    assert_eq!(consumed, 2 * SAMPLES);
    for producer in &producers {
        producer.settles().await;
    }
    stage.assert_empty(&producers[0]).await;
}

pub(super) async fn a_thousand_cycles_leave_nothing(stage: Stage) {
    let (producer, consumer) = (stage.producer().await, stage.consumer().await);
    for number in 0..1000 {
        let reference = producer.put(&format!("{}", number % 7)).await;
        if number % 50 == 0 {
            consumer.read(&reference, 0).await.unwrap();
        }
        if number % 3 > 0 {
            consumer.release(&reference).await.unwrap();
        }
        if number % 10 == 0 {
            producer.features.gc().await.unwrap();
        }
    }
    for sample in 0..7 {
        producer.features.abort(&sample.to_string()).await.unwrap();
    }
    producer.settles().await;
    stage.assert_empty(&producer).await;
}
