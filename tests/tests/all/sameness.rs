//! Bit-identical output: with a real model, the same prompt has the same answer and the same logits
//! to the bit, whether its KV was computed, kept on device, loaded from host or fetched from L3.
//!
//! The reference is computed by the model alone: the whole prompt at once, without engine and
//! cache. The kill of a whole server is tested in `cli/tests/program/serve.rs`.

use std::sync::Arc;
use std::sync::LazyLock;
use std::time::Duration;

use terrace_cache::{Cache, CacheConfig};
use terrace_engine::{
    CpuDevice, CpuMemory, Device, EndReason, Engine, Figures, Forward, Generate, Logits,
    PageLayout, PageTable, Sampler, Sampling, Span, Step, Threaded, Update,
};
use terrace_l3::{GuardConfig, Guarded, MemoryConfig, MemoryStore, Store};
use terrace_l3_disk::{DiskConfig, DiskStore};
use terrace_model::Llama;
use terrace_scheduler::{Config, L3Config, RateConfig, Slot, Token};
use terrace_tests::engine::{Chance, FlakyDevice, FlakyModel, FlakyStore, figures_when};
use tokio::sync::Mutex;
use xxhash_rust::xxh3::{xxh3_64, xxh3_64_with_seed};

const PAGE_SIZE: u32 = 16;
const NEW_TOKENS: u32 = 3;
const PATIENCE: Duration = Duration::from_secs(300);

/// A prompt, and the model's own result.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Example {
    prompt: Vec<Token>,
    answer: Vec<Token>,
    checksum: u64,
}

/// Models compute on all cores: two at a time would be slower than one after the other.
static ONE_AT_A_TIME: Mutex<()> = Mutex::const_new(());

static EXAMPLES: LazyLock<Vec<Example>> = LazyLock::new(examples);

/// Returns prompts with shared prefixes, conversations of several turns, and every length around
/// page boundaries.
fn examples() -> Vec<Example> {
    let mut alone = Alone::new();
    let mut examples = Vec::new();
    for length in (1..=50).chain(62..=66).chain([127, 128, 129, 255, 256, 257, 272, 300]) {
        examples.push(alone.answer(text(0, length)));
    }
    for document in 1..=6 {
        let shared = text(document, [47, 48, 49, 100, 160, 250][document - 1]);
        for question in 0..14 {
            let question = text(10 * document + question, 3 + 5 * question);
            examples.push(alone.answer([shared.clone(), question].concat()));
        }
    }
    for conversation in 0..10 {
        let mut so_far = text(100 + conversation, 20 + 7 * conversation);
        for turn in 0..6 {
            let example = alone.answer(so_far.clone());
            so_far.extend(&example.answer);
            so_far.extend(text(200 + 10 * conversation + turn, 9 + turn));
            examples.push(example);
        }
    }
    examples
}

/// Returns pseudo-random text bytes.
fn text(seed: usize, length: usize) -> Vec<Token> {
    let chance = Chance::new(seed as u64 + 1);
    (0..length).map(|_| 32 + chance.below(95) as Token).collect()
}

/// Returns a model of two layers: errors in the KV of the first show in the second.
fn model() -> Llama {
    terrace_model::shallow(2, 2)
}

/// The model without engine and cache.
struct Alone {
    model: Llama,
    memory: CpuMemory,
    table: PageTable,
}

impl Alone {
    fn new() -> Self {
        let model = model();
        let pages = Cache::new(&CacheConfig::default()).take_device_pages(40).unwrap();
        let mut table = PageTable::new(1, PAGE_SIZE);
        table.set(Slot(0), 0, pages.as_slice());
        let memory = CpuMemory::new(4096, model.kv_shape().page_bytes(PAGE_SIZE)).unwrap();
        Self { model, memory, table }
    }

    fn answer(&mut self, prompt: Vec<Token>) -> Example {
        let (mut sampler, mut logits) = (Sampler::default(), Vec::new());
        let (mut start, mut tokens) = (0, prompt.clone());
        let (mut answer, mut checksum) = (Vec::new(), 0);
        while answer.len() < NEW_TOKENS as usize {
            let span = Span { slot: Slot(0), start, tokens: 0..tokens.len(), logits: 1 };
            let step = Step { spans: &[span], tokens: &tokens, table: &self.table, arriving: &[] };
            logits.clear();
            let (mut rows, mut take) = (Vec::new(), |row: &[f32]| logits.extend_from_slice(row));
            let mut taken = Logits::new(self.model.vocabulary(), &mut rows, &mut take);
            self.model.forward(&self.memory, &step, &mut taken).unwrap();
            let bytes: Vec<u8> = logits.iter().flat_map(|logit| logit.to_le_bytes()).collect();
            checksum = xxh3_64_with_seed(&xxh3_64(&bytes).to_le_bytes(), checksum);
            start += tokens.len() as u32;
            let token = sampler.choose(&logits, &Sampling::GREEDY, 0);
            answer.push(token);
            tokens = vec![token];
        }
        Example { prompt, answer, checksum }
    }
}

fn layout() -> PageLayout {
    model().kv_layout().pages(PAGE_SIZE).unwrap()
}

fn page_bytes() -> usize {
    layout().bytes()
}

fn config() -> Config {
    let rates = RateConfig { prefill_ns_per_token: 5_000_000, ..RateConfig::default() };
    let mut config = Config::builder().page_size(PAGE_SIZE).rates(rates).build().unwrap();
    config.batch.running_max = 32;
    // Prompts are divided into several spans, and share steps with decodes.
    config.batch.step_tokens_max = 96;
    config.l3 = Some(L3Config { prefetch_threshold_pages: 1, ..L3Config::default() });
    config
}

fn start(device_pages: u32, host_pages: u32, store: Option<Arc<dyn Store>>) -> Engine {
    let device = CpuDevice::new(device_pages, host_pages, layout()).unwrap();
    Engine::start(config(), Threaded::new(model()), Arc::new(device), store).unwrap()
}

fn memory_store() -> Arc<dyn Store> {
    Arc::new(MemoryStore::new(MemoryConfig::new(1 << 30, page_bytes())).unwrap())
}

/// Sends a prompt and compares the answer. Returns false if the request was cancelled or failed.
async fn check(
    engine: &Engine,
    example: &Example,
    salt: &str,
    hangs_up_after: usize,
) -> Option<()> {
    let mut generate = Generate::new(example.prompt.clone(), NEW_TOKENS);
    generate.logits_checksum = true;
    generate.salt = salt.to_owned();
    let mut generation = engine.submit(generate).await.unwrap();
    let mut answer = Vec::new();
    loop {
        if answer.len() >= hangs_up_after {
            return None;
        }
        match generation.next().await.unwrap() {
            Update::Started(_) | Update::Prompt(_) | Update::Logprobs(_) => {}
            Update::Token(token) => answer.push(token),
            Update::Ended(ending) => match ending.reason {
                EndReason::Length => {
                    let (prompt, checksum) = (example.prompt.clone(), ending.logits_checksum);
                    let found = Example { prompt, answer, checksum: checksum.unwrap() };
                    assert_eq!(found, *example, "another answer, or other logits");
                    return Some(());
                }
                EndReason::Failed(_) => return None,
                EndReason::Stop
                | EndReason::Aborted
                | EndReason::Grammar
                | EndReason::DeviceLost => {
                    panic!("it ended as {:?}", ending.reason)
                }
            },
        }
    }
}

/// Sends all examples, one after the other.
async fn check_all(engine: &Engine) {
    for example in &*EXAMPLES {
        check(engine, example, "", usize::MAX).await.unwrap();
    }
}

/// Sends all examples, `at_once` at a time, and cancels some; returns the number of answers.
async fn check_together(engine: &Engine, at_once: usize, hang_up_once_in: Option<u64>) -> usize {
    let chance = Chance::new(5);
    let mut askers = tokio::task::JoinSet::<Option<()>>::new();
    let mut answered = 0;
    for example in &*EXAMPLES {
        let hangs_up = hang_up_once_in.is_some_and(|times| chance.once_in(times));
        let after = if hangs_up { chance.below(4) as usize } else { usize::MAX };
        if askers.len() == at_once {
            answered += usize::from(askers.join_next().await.unwrap().unwrap().is_some());
        }
        let engine = engine.clone();
        askers.spawn(async move { check(&engine, example, "", after).await });
    }
    answered + askers.join_all().await.into_iter().flatten().count()
}

async fn figures(engine: &Engine) -> Figures {
    engine.figures().await.unwrap()
}

#[test]
fn there_are_at_least_two_hundred_different_examples() {
    let mut prompts: Vec<_> = EXAMPLES.iter().map(|example| &example.prompt).collect();
    prompts.sort();
    prompts.dedup();
    assert!(prompts.len() >= 200, "{}", prompts.len());
    let mut checksums: Vec<_> = EXAMPLES.iter().map(|example| example.checksum).collect();
    checksums.sort_unstable();
    checksums.dedup();
    assert_eq!(checksums.len(), prompts.len(), "different prompts have different logits");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn with_caching_off() {
    let _turn = ONE_AT_A_TIME.lock().await;
    let engine = start(64, 0, None);
    for (number, example) in EXAMPLES.iter().enumerate() {
        check(&engine, example, &number.to_string(), usize::MAX).await.unwrap();
    }
    assert_eq!(figures(&engine).await.scheduler.device_hit_tokens, 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn with_hits_on_device() {
    let _turn = ONE_AT_A_TIME.lock().await;
    let engine = start(4096, 0, None);
    check_all(&engine).await;
    let first = figures(&engine).await.scheduler;
    check_all(&engine).await;
    let second = figures(&engine).await.scheduler;
    let hits = second.device_hit_tokens - first.device_hit_tokens;
    let tokens = second.prompt_tokens - first.prompt_tokens;
    assert!(hits * 10 > tokens * 7, "{hits} of {tokens}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn with_hits_on_host_because_the_device_is_too_small() {
    let _turn = ONE_AT_A_TIME.lock().await;
    let engine = start(24, 4096, None);
    check_all(&engine).await;
    let first = figures(&engine).await.scheduler;
    check_all(&engine).await;
    let second = figures(&engine).await.scheduler;
    let hits = second.host_hit_tokens - first.host_hit_tokens;
    let tokens = second.prompt_tokens - first.prompt_tokens;
    assert!(hits * 6 > tokens, "{hits} of {tokens}");
    assert!(second.cache.device.evicted_pages > 100);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn with_hits_in_l3() {
    let _turn = ONE_AT_A_TIME.lock().await;
    let engine = start(64, 64, Some(memory_store()));
    check_all(&engine).await;
    let tokens = figures(&engine).await.scheduler.prompt_tokens;
    for example in &*EXAMPLES {
        // Pages that a request or transfer still pins are not cleared.
        figures_when(&engine, "quiet", |Figures { scheduler, .. }| {
            scheduler.draining == 0 && scheduler.transfers_under_way() == 0
        })
        .await;
        engine.clear_cache().await;
        check(&engine, example, "", usize::MAX).await.unwrap();
    }
    let stats = figures(&engine).await.scheduler;
    assert!(stats.l3_hit_tokens * 10 > tokens * 7, "{stats:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn with_hits_in_l3_after_a_restart() {
    let _turn = ONE_AT_A_TIME.lock().await;
    let folder = tempfile::tempdir().unwrap();
    let open = || -> Arc<dyn Store> {
        let config = DiskConfig::new(folder.path(), 1 << 30, page_bytes());
        Arc::new(Guarded::new(Arc::new(DiskStore::open(config).unwrap()), GuardConfig::default()))
    };
    let engine = start(64, 64, Some(open()));
    check_all(&engine).await;
    let drained = engine.shutdown(PATIENCE).await;
    assert_eq!(drained.abandoned_transfers, 0);

    let engine = start(64, 64, Some(open()));
    check_all(&engine).await;
    let stats = figures(&engine).await.scheduler;
    assert!(stats.l3_hit_tokens * 6 > stats.prompt_tokens, "{stats:?}");
    engine.shutdown(PATIENCE).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn under_concurrency() {
    let _turn = ONE_AT_A_TIME.lock().await;
    let engine = start(256, 256, Some(memory_store()));
    assert_eq!(check_together(&engine, 24, None).await, EXAMPLES.len());
    assert_eq!(check_together(&engine, 24, None).await, EXAMPLES.len());
    let stats = figures(&engine).await.scheduler;
    assert!(stats.device_hit_tokens > 0 && stats.host_hit_tokens > 0, "{stats:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn under_aborts() {
    let _turn = ONE_AT_A_TIME.lock().await;
    let engine = start(128, 128, Some(memory_store()));
    let answered = check_together(&engine, 24, Some(2)).await;
    assert!(answered > 80 && answered < EXAMPLES.len() - 50, "{answered}");
    assert_eq!(check_together(&engine, 24, None).await, EXAMPLES.len());
    assert!(figures(&engine).await.scheduler.aborted > 50);
}

/// Runs with a store, a device and a model that fail at random.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn with_parts_that_fail_at_random() {
    let _turn = ONE_AT_A_TIME.lock().await;
    let chance = Chance::new(11);
    let flaky = Arc::new(FlakyStore::new(memory_store(), chance.clone(), 16));
    let guard = GuardConfig {
        get_timeout_ms: 100,
        put_timeout_ms: 100,
        failures_to_open: u32::MAX,
        ..GuardConfig::default()
    };
    let guarded: Arc<dyn Store> = Arc::new(Guarded::new(flaky, guard));
    let device = CpuDevice::new(40, 128, layout()).unwrap();
    let device = FlakyDevice::new(device, chance.clone(), 10);
    assert!(device.host().is_some());
    let model = Threaded::new(FlakyModel::new(model(), chance.clone(), 100));
    let mut config = config();
    config.l3 = Some(L3Config {
        prefetch_threshold_pages: 1,
        negative_ttl_ms: 50,
        backoff_base_ms: 5,
        backoff_max_ms: 50,
        ..L3Config::default()
    });
    let engine = Engine::start(config, model, Arc::new(device), Some(guarded)).unwrap();
    // Failures are random, so it runs until every tier had hits and every part has failed.
    const ROUNDS_MAX: usize = 12;
    for _ in 0..ROUNDS_MAX {
        let answered = check_together(&engine, 16, Some(8)).await;
        assert!(answered > 140, "{answered}");
        engine.clear_cache().await;
        let stats = figures(&engine).await.scheduler;
        let failures = [stats.steps_failed, stats.write_backs.failures, stats.backups.failures];
        let hits = [stats.device_hit_tokens, stats.host_hit_tokens, stats.l3_hit_tokens];
        if failures.into_iter().chain(hits).all(|count| count > 0) {
            return;
        }
    }
    panic!("too little happened: {:?}", figures(&engine).await.scheduler);
}
