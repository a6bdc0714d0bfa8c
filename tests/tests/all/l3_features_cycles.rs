//! Twenty thousand samples go through a feature store, and memory stays as it was.

use std::process::Command;
use std::sync::Arc;

use terrace_kit::Process;
use terrace_l3::{Arena, MemoryConfig, MemoryStore, Store};
use terrace_l3_features::{
    Dtype, FeatureConfig, FeatureStore, FreeConfig, Released, Tensor, TensorSpec,
};

const CYCLES: u64 = 20_000;
/// By then everything that is remembered is as large as it gets.
const WARM: u64 = 4_000;
const BYTES: u64 = 4096;

/// What this process has in memory.
fn resident_bytes() -> u64 {
    Process::Own.resident_bytes().expect("this is Linux")
}

/// What the whole process holds is measured, so it is one that does nothing else.
#[test]
fn thousands_of_cycles_with_flat_memory() {
    let part = "l3_features_cycles::part_of_thousands_of_cycles";
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", part, "--include-ignored"])
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && text.contains("1 passed"), "{text}");
}

#[tokio::test]
#[ignore = "played by thousands_of_cycles_with_flat_memory"]
async fn part_of_thousands_of_cycles() {
    let memory =
        Arc::new(MemoryStore::new(MemoryConfig::new(256 * BYTES, BYTES as usize)).unwrap());
    let free = FreeConfig { tombstones_max: 1000, ..FreeConfig::default() };
    let config = FeatureConfig { free, ..FeatureConfig::producer("cycles", 0) };
    let consumer = FeatureConfig { owner: None, ..config.clone() };
    let producer = FeatureStore::open(memory.clone(), config).await.unwrap();
    let consumer = FeatureStore::open(memory.clone(), consumer).await.unwrap();
    let arena = Arena::new(4, BYTES as usize).unwrap();
    let _registration = producer.register(&arena).unwrap();
    let specs = ["hidden", "ids"].map(|name| TensorSpec::new(name, Dtype::U64, [BYTES / 8]));
    let mut before = 0;
    for cycle in 0..CYCLES {
        if cycle == WARM {
            before = resident_bytes();
        }
        for page in 0..2 {
            arena.target(page).unwrap()[..8]
                .copy_from_slice(&(cycle + u64::from(page)).to_le_bytes());
        }
        let tensors = specs.iter().zip(0..);
        let tensors =
            tensors.map(|(spec, page)| Tensor::new(spec.clone(), arena.source(page).unwrap()));
        let reference = producer.put(&format!("{cycle}"), tensors.collect()).await.unwrap();
        let targets = (2..4).map(|page| arena.target(page).unwrap()).collect();
        consumer.get_into(&reference, targets).await.unwrap();
        for page in 2..4 {
            let number = u64::from_le_bytes(arena.source(page).unwrap()[..8].try_into().unwrap());
            assert_eq!(number, cycle + u64::from(page) - 2);
        }
        assert_eq!(consumer.release(reference).await, Ok(Released::Freed));
        if cycle % 16 == 15 {
            producer.gc().await.unwrap();
            // What says who has the producer's number.
            assert_eq!(memory.stats().memory.unwrap().objects, 3, "cycle {cycle}");
        }
    }
    let grown = resident_bytes().saturating_sub(before);
    assert!(grown < 2 << 20, "{grown} bytes more than after {WARM} cycles");
    assert_eq!(memory.stats().memory.unwrap().evicted, 0);
}
