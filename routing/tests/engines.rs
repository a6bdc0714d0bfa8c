//! Decoding of recorded streams of real engines, in `data/`.

use std::io::BufReader;

use terrace_routing::{
    Batch, Event, Heard, Medium, PromptBlocks, Recording, Study, WorkerIndex, decode,
};

fn heard(name: &str) -> Vec<Heard> {
    let file = format!("{}/tests/data/{name}.jsonl", env!("CARGO_MANIFEST_DIR"));
    let file = std::fs::File::open(file).unwrap();
    Recording::new(BufReader::new(file)).map(|line| line.unwrap().1).collect()
}

fn batches(name: &str) -> Vec<Batch> {
    let batch = |heard: Heard| match heard {
        Heard::Batch { payload, .. } => decode(&payload).unwrap(),
        Heard::Forget => panic!("nothing was lost"),
    };
    heard(name).into_iter().map(batch).collect()
}

fn index_after(batches: &[Batch]) -> WorkerIndex {
    let mut index = WorkerIndex::new(1000);
    batches.iter().for_each(|batch| index.apply(batch, |_| {}));
    index
}

fn cached(index: &WorkerIndex, prompt: std::ops::Range<u32>, salt: &str) -> u32 {
    let tokens: Vec<_> = prompt.collect();
    index.cached_tokens(&mut PromptBlocks::new(&tokens, salt))
}

/// vLLM had room for 15 blocks of 32 tokens and got these prompts in order: tokens 10 to 110; 10 to
/// 80 and others; 10 to 110 with a salt; 210 to 410; 15 to 310. Then its cache was reset, and it
/// got 10 to 74.
#[test]
fn decodes_vllm() {
    let batches = batches("vllm-0.32");
    let cleared = batches.iter().position(|batch| batch.events.contains(&Event::Cleared)).unwrap();
    let before = index_after(&batches[..1]);
    assert_eq!((cached(&before, 10..110, ""), before.block_size()), (96, 32));
    assert_eq!((cached(&before, 10..70, ""), cached(&before, 11..110, "")), (32, 0));
    let salted = |batches: &[Batch]| cached(&index_after(batches), 10..110, "s1");
    assert_eq!((1..=cleared).map(|count| salted(&batches[..count])).max(), Some(96));
    let full = index_after(&batches[..cleared]);
    assert_eq!(cached(&full, 15..310, ""), 288);
    assert_eq!(cached(&full, 10..110, ""), 0, "it had to make room");
    assert!(full.len() <= 15, "{}", full.len());
    let after = index_after(&batches);
    assert_eq!((cached(&after, 10..74, ""), cached(&after, 15..310, "")), (64, 0));
    assert_eq!((after.stats().orphans, after.stats().malformed), (0, 0));
}

#[test]
fn decodes_sglang() {
    let batches = batches("sglang-0.5.23");
    let index = index_after(&batches[..3]);
    assert_eq!((cached(&index, 0..20, ""), cached(&index, 0..20, "s1")), (12, 8));
    let media = [Medium::Device, Medium::Host, Medium::Shared].map(|medium| index.len_in(medium));
    assert_eq!(media, [5, 1, 0], "what lies outside is no merit of this worker");
    let index = index_after(&batches);
    assert_eq!(
        (cached(&index, 0..20, ""), cached(&index, 0..20, "s1")),
        (4, 8),
        "the host keeps one"
    );
    assert_eq!((index.stats().orphans, index.stats().malformed), (0, 0));
}

/// Versions before mid-2026, with array events and hashes of 32 bytes.
#[test]
fn decodes_old_versions() {
    let batches = batches("arrays");
    let index = index_after(&batches[..2]);
    assert_eq!(cached(&index, 0..20, ""), 12);
    let index = index_after(&batches[..3]);
    assert_eq!((cached(&index, 0..20, ""), index.len()), (4, 3), "an adapter's block is its own");
    assert!(index_after(&batches).is_empty());
}

#[test]
fn study_counts_duplicate_computation() {
    let mut study = Study::new(1000);
    for heard in heard("vllm-0.32") {
        study.hear("a", &heard);
        study.hear("b", &heard);
    }
    let report = study.report();
    let [a, b] = &report.workers[..] else { panic!("{report:?}") };
    assert_eq!((a.computed_blocks, a.held_elsewhere_blocks, a.gaps), (28, 0, 0));
    assert_eq!(
        (b.computed_blocks, b.held_elsewhere_blocks),
        (28, 28),
        "a had each a moment before"
    );
    assert_eq!((report.distinct_blocks, report.held_blocks), (3, 6));
    assert_eq!((report.computed_tokens, report.held_elsewhere_tokens), (2 * 28 * 32, 28 * 32));
}
