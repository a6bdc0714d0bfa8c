//! Samples that were put are read unchanged, and others are not.

use terrace_l3::{Arena, StoreError};
use terrace_l3_features::{
    Dtype, FeatureConfig, FeatureError, FeatureRef, Secret, TENSORS_MAX, Tensor, TensorSpec,
};

use super::{Process, SAMPLE_BYTES, Stage, fill};

pub(super) async fn a_sample_comes_back_as_it_was_put(stage: Stage) {
    let (producer, consumer) = (stage.producer().await, stage.consumer().await);
    let mut refs = Vec::new();
    for number in 0..8 {
        refs.push(producer.put(&format!("epoch 1/{number}")).await);
    }
    for reference in refs.iter().rev() {
        consumer.read(reference, 0).await.unwrap();
        producer.read(reference, 0).await.expect("a producer may read as well");
    }
    let (put, got) = (producer.features.stats(), consumer.features.stats());
    assert_eq!((put.live, put.puts, put.put_bytes), (8, 8, 8 * SAMPLE_BYTES));
    assert_eq!((got.gets, got.get_bytes), (8, 8 * SAMPLE_BYTES));
    assert!(put.oldest.unwrap().key.starts_with(&format!("{}/epoch 1/0/g", stage.name)));
}

pub(super) async fn every_type_and_shape_travels_on_the_ref(stage: Stage) {
    let (producer, consumer) = (stage.producer().await, stage.consumer().await);
    let shapes: [&[u64]; 4] = [&[8], &[2, 3, 4], &[0, 7], &[1, 1, 1, 8, 1]];
    let spec = |(number, dtype): (usize, &Dtype)| {
        TensorSpec::new(format!("{dtype}"), *dtype, shapes[number % shapes.len()])
    };
    let specs: Vec<TensorSpec> = Dtype::ALL.iter().enumerate().map(spec).collect();
    let reference = producer.put_specs("all", 1, specs.clone()).await.unwrap();
    let reference: FeatureRef =
        serde_json::from_str(&serde_json::to_string(&reference).unwrap()).unwrap();
    assert_eq!(reference.tensors(), specs);
    consumer.read(&reference, 1).await.unwrap();
}

pub(super) async fn a_ref_is_small_and_can_be_sent(stage: Stage) {
    let config = FeatureConfig { secret: Some(Secret::new(b"of all")), ..stage.producer_config(0) };
    let producer = stage.open(config).await;
    let reference = producer.put("a sample").await;
    let text = serde_json::to_string(&reference).unwrap();
    assert!(text.len() < 512, "{} bytes: {text}", text.len());
    assert_eq!(serde_json::from_str::<FeatureRef>(&text).unwrap(), reference);
    assert_eq!((reference.sample(), reference.bytes()), ("a sample", SAMPLE_BYTES));
}

pub(super) async fn tensors_may_be_read_into_memory_of_the_callers(stage: Stage) {
    let (producer, consumer) = (stage.producer().await, stage.consumer().await);
    let reference = producer.put("a").await;
    let arena = Arena::new(4, 6000).unwrap();
    let registration = consumer.features.register(&arena).unwrap();
    let targets = |lengths: &[usize]| {
        let target = |(page, length): (u32, &usize)| arena.target(page).unwrap().first(*length);
        (2..).zip(lengths).map(target).collect::<Vec<_>>()
    };
    consumer.features.get_into(&reference, targets(&[6000, 800])).await.unwrap();
    for ((page, tensor), bytes) in (2..).zip(["hidden", "ids"]).zip([6000, 800]) {
        let mut expected = vec![0; bytes];
        fill("a", tensor, 0, &mut expected);
        assert_eq!(arena.source(page).unwrap()[..bytes], expected[..]);
    }
    let wrong = consumer.features.get_into(&reference, targets(&[6000, 799])).await;
    assert!(matches!(wrong, Err(FeatureError::Bytes { expected: 800, found: 799, .. })));
    let wrong = consumer.features.get_into(&reference, targets(&[6000])).await;
    assert_eq!(wrong, Err(FeatureError::TargetCount { expected: 2, found: 1 }));
    drop(registration);
}

pub(super) async fn every_tensor_is_one_object_under_its_key(stage: Stage) {
    let producer = stage.producer().await;
    let reference = producer.put("a/b").await;
    let generation = reference.generation();
    let keys = producer.features.objects(&reference).into_iter().map(|(key, _)| key);
    let expected = ["hidden", "ids"].map(|name| format!("{}/a/b/g{generation}/{name}", stage.name));
    assert_eq!(keys.collect::<Vec<_>>(), expected);
    assert_eq!(producer.objects_left(&reference).await, 2);
}

pub(super) async fn f39_unregistered_memory_is_refused(stage: Stage) {
    let (producer, consumer) = (stage.producer().await, stage.consumer().await);
    let arena = Arena::new(2, 6000).unwrap();
    let spec = TensorSpec::new("x", Dtype::U8, [6000]);
    let tensor = Tensor::new(spec.clone(), arena.source(0).unwrap());
    let refused = producer.features.put("a", vec![tensor]).await.unwrap_err();
    let is_refused = |error: &FeatureError| {
        matches!(error, FeatureError::Store { error: StoreError::NotRegistered { .. }, .. })
    };
    assert!(is_refused(&refused), "{refused}");
    let reference = producer.put_specs("a", 0, vec![spec]).await.unwrap();
    let targets = vec![arena.target(1).unwrap()];
    let refused = consumer.features.get_into(&reference, targets).await.unwrap_err();
    assert!(is_refused(&refused), "{refused}");
    consumer.read(&reference, 0).await.unwrap();
}

pub(super) async fn what_is_no_sample_is_refused(stage: Stage) {
    let (producer, consumer) = (stage.producer().await, stage.consumer().await);
    let put = async |process: &Process, sample: &str, specs: Vec<TensorSpec>| {
        process.put_specs(sample, 0, specs).await.unwrap_err()
    };
    let one = || TensorSpec::new("x", Dtype::U8, [1]);
    assert_eq!(put(&consumer, "a", vec![one()]).await, FeatureError::NotAProducer);
    let none = put(&producer, "a", vec![]).await;
    assert_eq!(none, FeatureError::TensorCount { found: 0, max: TENSORS_MAX });
    let number = |number| TensorSpec::new(format!("{number}"), Dtype::U8, [1]);
    let many = put(&producer, "a", (0..=TENSORS_MAX).map(number).collect()).await;
    assert!(matches!(many, FeatureError::TensorCount { .. }), "{many}");
    let twice = put(&producer, "a", vec![one(), one()]).await;
    assert!(matches!(twice, FeatureError::DuplicateTensor { .. }), "{twice}");
    let slash = put(&producer, "a", vec![TensorSpec::new("x/y", Dtype::U8, [1])]).await;
    assert!(matches!(slash, FeatureError::Name { .. }), "{slash}");
    let nameless = put(&producer, "", vec![one()]).await;
    assert!(matches!(nameless, FeatureError::Sample { .. }), "{nameless}");
    let arena = Arena::new(1, 100).unwrap();
    let odd = Tensor::new(TensorSpec::new("x", Dtype::F4, [3]), arena.source(0).unwrap());
    let odd = producer.features.put("a", vec![odd]).await.unwrap_err();
    assert!(matches!(odd, FeatureError::Shape { .. }), "{odd}");
    let short = Tensor::new(TensorSpec::new("x", Dtype::F32, [26]), arena.source(0).unwrap());
    let short = producer.features.put("a", vec![short]).await.unwrap_err();
    assert!(matches!(short, FeatureError::Bytes { expected: 104, found: 100, .. }), "{short}");
    producer.settles().await;
}

pub(super) async fn forged_and_altered_refs_are_refused(stage: Stage) {
    let secret = |text: &str| Some(Secret::new(text.as_bytes()));
    let config = FeatureConfig { secret: secret("ours"), ..stage.producer_config(0) };
    let producer = stage.open(config.clone()).await;
    let consumer = stage.open(FeatureConfig { owner: None, ..config.clone() }).await;
    let reference = producer.put("a").await;
    consumer.read(&reference, 0).await.unwrap();

    let outsider = FeatureConfig { secret: secret("theirs"), owner: Some(1), ..config.clone() };
    let outsider = stage.open(outsider).await;
    let unsigned = stage.open(FeatureConfig { secret: None, owner: Some(2), ..config }).await;
    let forged = [
        outsider.features.put("b", tensors(&outsider).await).await.unwrap(),
        unsigned.put("c").await,
        altered(&reference, "generation", |value| *value = (value.as_u64().unwrap() + 1).into()),
        altered(&reference, "tensors", |value| value[0]["dtype"] = "F16".into()),
        altered(&reference, "tensors", |value| value[0]["shape"] = serde_json::json!([100, 30])),
        altered(&reference, "sample", |value| *value = "b".into()),
        altered(&reference, "retain", |value| *value = true.into()),
        altered(&reference, "contents", |value| value[1] = value[0].clone()),
        altered(&reference, "mac", |value| *value = "0".repeat(64).into()),
    ];
    for forged in forged {
        let refused = consumer.features.get(&forged).await.unwrap_err();
        assert!(matches!(refused, FeatureError::Forged { .. }), "{refused}");
        let refused = consumer.release(&forged).await.unwrap_err();
        assert!(matches!(refused, FeatureError::Forged { .. }), "{refused}");
    }
    assert_eq!(consumer.features.stats().forged, 18);
    consumer.read(&reference, 0).await.expect("nothing has happened to it");
}

async fn tensors(process: &Process) -> Vec<Tensor> {
    let arena = Arena::new(1, 8).unwrap();
    let registration = process.features.register(&arena).unwrap();
    // It lives as long as the store.
    std::mem::forget(registration);
    vec![Tensor::new(TensorSpec::new("x", Dtype::I64, [1]), arena.source(0).unwrap())]
}

/// The ref with one of its fields changed, as an attacker with its text could.
fn altered(
    reference: &FeatureRef,
    field: &str,
    change: impl Fn(&mut serde_json::Value),
) -> FeatureRef {
    let mut value = serde_json::to_value(reference).unwrap();
    change(&mut value[field]);
    serde_json::from_value(value).unwrap()
}

pub(super) async fn a_ref_of_another_store_is_refused(stage: Stage) {
    let (producer, consumer) = (stage.producer().await, stage.consumer().await);
    let reference = producer.put("a").await;
    let other = altered(&reference, "store", |value| *value = "other".into());
    let refused = consumer.features.get(&other).await.unwrap_err();
    assert!(matches!(refused, FeatureError::OtherStore { .. }), "{refused}");
    let other = stage.open(FeatureConfig::consumer("other")).await;
    assert!(matches!(other.features.get(&reference).await, Err(FeatureError::OtherStore { .. })));
}
