//! Tests of the engine with a model that detects every wrong page: answers are right, and no
//! failure blocks it.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use terrace_cache::WritePolicy;
use terrace_engine::{
    CopyJob, CpuDevice, CpuFence, CpuMemory, Device, EndReason, Engine, Forward, Generate,
    Generation, Grammar, GrammarError, KvEvent, KvEvents, KvFeed, KvLayout, KvTier, KvType,
    PageLayout, Sampling, Shaping, Sibling, StartError, SubmitError, Threaded, Update,
};
use terrace_l3::{GuardConfig, Guarded, MemoryConfig, MemoryStore, Store};
use terrace_scheduler::{
    Config, CopyDirection, FailReason, Hits, L3Config, PageKey, PrefetchPolicy, RateConfig, Token,
};
use terrace_tests::engine::{
    Chance, FlakyDevice, FlakyModel, FlakyStore, LateDevice, PAGE_SIZE, ToyModel, figures_when,
    toy_answer,
};
use terrace_tests::l3::faulty::{Call, Fault, FaultyStore};

mod grammars;
mod overlap;
mod prefixes;

const PATIENCE: Duration = Duration::from_secs(120);

fn layout() -> PageLayout {
    ToyModel::default().kv_layout().pages(PAGE_SIZE).unwrap()
}

fn page_bytes() -> usize {
    layout().bytes()
}

fn device(device_pages: u32, host_pages: u32) -> CpuDevice {
    CpuDevice::new(device_pages, host_pages, layout()).unwrap()
}

fn memory_store() -> Arc<dyn Store> {
    Arc::new(MemoryStore::new(MemoryConfig::new(64 << 20, page_bytes())).unwrap())
}

/// The toy computes so fast that loading would not pay.
fn config() -> Config {
    let rates = RateConfig { prefill_ns_per_token: 10_000_000, ..RateConfig::default() };
    let mut config = Config::builder().page_size(PAGE_SIZE).rates(rates).build().unwrap();
    config.batch.running_max = 16;
    config.batch.step_tokens_max = 128;
    config
}

fn start(
    device: impl Device<Memory = CpuMemory, Fence = CpuFence>,
    store: Option<Arc<dyn Store>>,
) -> Engine {
    Engine::start(config(), Threaded::new(ToyModel::default()), Arc::new(device), store).unwrap()
}

/// Returns a unique prompt: prompts of different seeds share no prefix.
fn prompt(seed: u32, tokens: u32) -> Vec<Token> {
    (0..tokens).map(|place| (place * 7 + seed * 31 + place * place % 11) % 97).collect()
}

#[derive(Debug, PartialEq)]
struct Answer {
    tokens: Vec<Token>,
    hits: Hits,
    reason: EndReason,
    checksum: Option<u64>,
}

async fn ask(engine: &Engine, prompt: &[Token], tokens: u32) -> Answer {
    ask_for(engine, Generate::new(prompt.to_vec(), tokens)).await
}

async fn ask_for(engine: &Engine, generate: Generate) -> Answer {
    heard(engine.submit(generate).await.unwrap()).await
}

/// Collects a whole answer.
async fn heard(mut generation: Generation) -> Answer {
    let (mut tokens, mut found) = (Vec::new(), None);
    loop {
        match generation.next().await.unwrap() {
            Update::Started(hits) => assert!(found.replace(hits).is_none(), "started twice"),
            Update::Prompt(_) | Update::Logprobs(_) => {}
            Update::Token(token) => tokens.push(token),
            Update::Ended(ending) => {
                let (reason, checksum) = (ending.reason, ending.logits_checksum);
                assert_eq!(generation.next().await, None, "nothing comes after the end");
                return Answer { tokens, hits: found.unwrap_or_default(), reason, checksum };
            }
        }
    }
}

/// Waits until all computed pages are in L3.
async fn backed_up(engine: &Engine, pages: u64) {
    figures_when(engine, "the backup", |figures| figures.scheduler.backups.sound_pages >= pages)
        .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn second_answer_is_a_device_hit_and_equal() {
    let engine = start(device(64, 0), None);
    let prompt = prompt(1, 100);
    let first = ask(&engine, &prompt, 20).await;
    assert_eq!(first.tokens, toy_answer(&prompt, 20));
    assert_eq!((first.hits.total(), first.reason), (0, EndReason::Length));
    let second = ask(&engine, &prompt, 20).await;
    assert_eq!(second.tokens, first.tokens);
    assert_eq!(second.hits, Hits { device_tokens: 96, ..Hits::default() });
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn evicted_pages_are_loaded_from_host() {
    let engine = start(device(16, 64), None);
    let old = prompt(1, 200);
    ask(&engine, &old, 8).await;
    for seed in 2..5 {
        ask(&engine, &prompt(seed, 200), 8).await;
    }
    let answer = ask(&engine, &old, 8).await;
    assert_eq!(answer.tokens, toy_answer(&old, 8));
    assert!(answer.hits.host_tokens > 0, "{:?}", answer.hits);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn another_engine_hits_pages_in_l3() {
    let store = memory_store();
    let prompt = prompt(3, 300);
    let first = start(device(64, 64), Some(store.clone()));
    let computed = ask(&first, &prompt, 8).await;
    backed_up(&first, 18).await;
    let second = start(device(64, 64), Some(store));
    let fetched = ask(&second, &prompt, 8).await;
    assert_eq!(fetched.tokens, computed.tokens);
    assert_eq!(fetched.hits, Hits { l3_tokens: 288, ..Hits::default() });
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn l3_transfers_use_the_host_arena_without_a_copy() {
    let witness = Arc::new(FaultyStore::new(memory_store()));
    let device = device(64, 64);
    let host = format!("{:?}", device.host().unwrap());
    let engine = start(device, Some(witness.clone()));
    let prompt = prompt(3, 300);
    ask(&engine, &prompt, 8).await;
    // The last page is that of the answer: no copy pins any page then.
    backed_up(&engine, 19).await;
    engine.clear_cache().await;
    assert_eq!(ask(&engine, &prompt, 8).await.hits.l3_tokens, 288);
    assert_eq!(witness.arenas(), BTreeSet::from([host]));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn salts_do_not_share() {
    let engine = start(device(64, 64), Some(memory_store()));
    let prompt = prompt(4, 100);
    for salt in ["alice", "bob"] {
        let mut generate = Generate::new(prompt.clone(), 4);
        generate.salt = salt.to_owned();
        assert_eq!(ask_for(&engine, generate).await.hits.total(), 0, "{salt} asks first");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn answer_ends_before_its_stop_token() {
    let engine = start(device(64, 0), None);
    let prompt = prompt(5, 40);
    let whole = toy_answer(&prompt, 30);
    let stop = whole[10];
    let first = whole.iter().position(|&token| token == stop).unwrap();
    let mut generate = Generate::new(prompt, 30);
    generate.stop_tokens = Arc::new([stop]);
    let answer = ask_for(&engine, generate).await;
    assert_eq!((answer.tokens, answer.reason), (whole[..first].to_vec(), EndReason::Stop));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn checksums_distinguish_exactly_different_answers() {
    let engine = start(device(64, 0), None);
    let ask = |seed| {
        let mut generate = Generate::new(prompt(seed, 50), 5);
        generate.logits_checksum = true;
        ask_for(&engine, generate)
    };
    let (one, again, two) = (ask(1).await, ask(1).await, ask(2).await);
    assert!(one.checksum.is_some());
    assert_eq!(one.checksum, again.checksum);
    assert_ne!(one.checksum, two.checksum);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn dropping_an_answer_cancels_its_request() {
    let engine = start(device(256, 0), None);
    let mut generation = engine.submit(Generate::new(prompt(1, 20), 4000)).await.unwrap();
    assert!(matches!(generation.next().await, Some(Update::Started(_))));
    drop(generation);
    figures_when(&engine, "the abort", |figures| figures.scheduler.aborted == 1).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn finish_ends_a_request_as_finished() {
    let engine = start(device(256, 64), None);
    let mut generation = engine.submit(Generate::new(prompt(1, 40), 4000)).await.unwrap();
    assert!(matches!(generation.next().await, Some(Update::Started(_))));
    generation.finish();
    let figures = figures_when(&engine, "the end", |figures| figures.scheduler.finished == 1).await;
    assert_eq!(figures.scheduler.aborted, 0);
    assert!(figures.scheduler.write_backs.sound_pages >= 2, "what it computed was copied to host");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rejects_invalid_requests() {
    let engine = start(device(16, 0), None);
    let refusal = async |generate| engine.submit(generate).await.unwrap_err();
    assert!(matches!(
        refusal(Generate::new(vec![1; 4000], 200)).await,
        SubmitError::TooLong { .. }
    ));
    assert!(matches!(
        refusal(Generate::new(vec![1, 97], 2)).await,
        SubmitError::UnknownToken { token: 97, .. }
    ));
    assert!(matches!(refusal(Generate::new(vec![1; 300], 2)).await, SubmitError::Scheduler(_)));
    assert!(matches!(refusal(Generate::new(Vec::new(), 2)).await, SubmitError::Scheduler(_)));
    assert_eq!(ask(&engine, &[1], 1).await.tokens, toy_answer(&[1], 1), "and it goes on");
}

fn sibling(sampling: Sampling) -> Sibling {
    Sibling { sampling, grammar: None, ticket: None }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sibling_answers_compute_the_prompt_once() {
    let engine = start(device(64, 0), None);
    let (prompt, tokens) = (prompt(1, 100), 12);
    let dice = Sampling { temperature: 1.0, top_k: 20, seed: 7, ..Sampling::GREEDY };
    let alone = ask_for(
        &start(device(64, 0), None),
        Generate { sampling: dice, ..Generate::new(prompt.clone(), tokens) },
    )
    .await;
    let generate = Generate::new(prompt.clone(), tokens);
    let grammar: Option<Box<dyn Grammar>> = Some(Box::new(Even { tokens: 0 }));
    let siblings = vec![
        sibling(dice),
        sibling(Sampling::GREEDY),
        Sibling { grammar, ..sibling(Sampling::GREEDY) },
    ];
    let mut answers = engine.submit_answers(generate, siblings).await.unwrap();
    assert_eq!(answers.len(), 4);
    let even = heard(answers.pop().unwrap()).await;
    // One answer is cancelled; the others go on.
    drop(answers.pop());
    let second = heard(answers.pop().unwrap()).await;
    let first = heard(answers.pop().unwrap()).await;
    assert_eq!((first.tokens, first.hits.total()), (toy_answer(&prompt, tokens as usize), 0));
    assert_eq!(second.tokens, alone.tokens);
    assert!(!even.tokens.is_empty() && even.tokens.iter().all(|token| token % 2 == 0));
    for sibling in [&second.hits, &even.hits] {
        assert_eq!(*sibling, Hits { device_tokens: 96, ..Hits::default() });
    }
    let figures = engine.figures().await.unwrap();
    assert_eq!(figures.scheduler.submitted, 4);
    assert!(figures.scheduler.prefilled_tokens <= 100 + 3 * 4);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn siblings_are_accepted_all_or_none() {
    let mut config = config();
    config.queue.requests_max = 2;
    let model = Threaded::new(ToyModel::default());
    let engine = Engine::start(config, model, Arc::new(device(64, 0)), None).unwrap();
    let generate = || Generate::new(prompt(1, 40), 2);
    let siblings = |count| (0..count).map(|_| sibling(Sampling::GREEDY)).collect();
    let refused = engine.submit_answers(generate(), siblings(2)).await.unwrap_err();
    assert!(matches!(refused, SubmitError::Scheduler(_)), "{refused}");
    assert_eq!(engine.figures().await.unwrap().scheduler.submitted, 0);
    let answers = engine.submit_answers(generate(), siblings(1)).await.unwrap();
    for answer in answers {
        assert_eq!(heard(answer).await.tokens, toy_answer(&prompt(1, 40), 2));
    }
}

#[tokio::test]
async fn rejects_a_device_of_another_page_size() {
    let refused = |layout: PageLayout| {
        let device = CpuDevice::new(16, 0, layout).unwrap();
        let error =
            Engine::start(config(), Threaded::new(ToyModel::default()), Arc::new(device), None);
        match error.unwrap_err() {
            error @ StartError::Layout { .. } => error.to_string(),
            other => panic!("{other}"),
        }
    };
    let larger = ToyModel::default().kv_layout().pages(2 * PAGE_SIZE).unwrap();
    let error = refused(larger);
    assert!(
        error.contains("4096 bytes for 16 tokens") && error.contains("8192 bytes for 32"),
        "{error}"
    );
    // Equal page sizes with incompatible layouts.
    let others = KvLayout::keys_and_values(KvType::Bf16, 1, 2, 32).pages(PAGE_SIZE).unwrap();
    assert_eq!(others.bytes(), page_bytes());
    let error = refused(others);
    assert!(error.contains("keys and values f32") && error.contains("bf16"), "{error}");
}

/// A store that hangs in a call does not delay requests that do not need it, and delays the others
/// only up to the deadline.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hanging_store_delays_no_other_request() {
    for call in [Call::Exists, Call::Get, Call::Put] {
        let faulty = Arc::new(FaultyStore::new(memory_store()));
        let stored = prompt(1, 300);
        let first = start(device(64, 64), Some(faulty.clone()));
        ask(&first, &stored, 4).await;
        backed_up(&first, 18).await;

        faulty.set(call, Some(Fault::BeginsLate));
        let engine = start(device(64, 64), Some(faulty.clone()));
        let other = prompt(9, 20);
        let asked = async { tokio::join!(ask(&engine, &stored, 4), ask(&engine, &other, 50)) };
        // The store hangs until it is released, so any answer shows that it was not waited for.
        let answers = tokio::time::timeout(PATIENCE, asked).await;
        let (waits, other_answer) = answers.unwrap_or_else(|_| panic!("{call:?} held them up"));
        assert_eq!(waits.tokens, toy_answer(&stored, 4), "{call:?}");
        assert_eq!(other_answer.tokens, toy_answer(&other, 50), "{call:?}");
        faulty.set(call, None);
        figures_when(&engine, "the end of the transfers", |figures| {
            let stats = &figures.scheduler;
            stats.prefetches.in_flight + stats.backups.in_flight + stats.probes.in_flight == 0
        })
        .await;
        assert_eq!(ask(&engine, &stored, 4).await.tokens, toy_answer(&stored, 4));
    }
}

/// A guarded store abandons a read that still writes to host memory: the pages are reused only
/// after the read has released them.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pages_of_an_abandoned_read_are_reused_after_its_end() {
    let faulty = Arc::new(FaultyStore::new(memory_store()));
    let stored = prompt(1, 300);
    let first = start(device(64, 64), Some(faulty.clone()));
    ask(&first, &stored, 4).await;
    backed_up(&first, 18).await;

    faulty.set(Call::Get, Some(Fault::BeginsLate));
    let guard = GuardConfig { get_timeout_ms: 30, ..GuardConfig::default() };
    let guarded = Arc::new(Guarded::new(faulty.clone(), guard));
    let engine = start(device(32, 24), Some(guarded));
    assert_eq!(ask(&engine, &stored, 4).await.tokens, toy_answer(&stored, 4));
    let figures = engine.figures().await.unwrap();
    assert_eq!(figures.scheduler.prefetches.quarantined_pages, 18, "the read has not ended");
    for seed in 2..20 {
        let other = prompt(seed, 100);
        assert_eq!(ask(&engine, &other, 4).await.tokens, toy_answer(&other, 4));
    }
    faulty.set(Call::Get, None);
    figures_when(&engine, "the end of the read", |figures| {
        figures.scheduler.prefetches.quarantined_pages == 0
    })
    .await;
    assert_eq!(ask(&engine, &stored, 4).await.tokens, toy_answer(&stored, 4));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn shutdown_stores_computed_pages() {
    let store = memory_store();
    let engine = start(device(64, 64), Some(store.clone()));
    let prompts: Vec<_> = (0..4).map(|seed| prompt(seed, 100)).collect();
    for prompt in &prompts {
        ask(&engine, prompt, 4).await;
    }
    let drained = engine.shutdown(PATIENCE).await;
    assert_eq!((drained.aborted, drained.abandoned_transfers), (0, 0));
    assert_eq!(store.stats().memory.unwrap().objects, 4 * 6);
    let refused = engine.submit(Generate::new(vec![1], 1)).await;
    assert_eq!(refused.unwrap_err(), SubmitError::ShuttingDown);
    assert!(engine.figures().await.is_none());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn shutdown_waits_for_answers_up_to_its_patience() {
    let engine = start(device(256, 0), None);
    let short = engine.submit(Generate::new(prompt(1, 20), 10)).await.unwrap();
    let drained = engine.shutdown(PATIENCE).await;
    assert_eq!(drained.aborted, 0);
    drop(short);

    let engine = start(device(256, 0), None);
    let mut long = engine.submit(Generate::new(prompt(1, 20), 4000)).await.unwrap();
    let drained = engine.shutdown(Duration::from_millis(1)).await;
    assert_eq!(drained.aborted, 1);
    let mut last = None;
    while let Some(update) = long.next().await {
        last = Some(update);
    }
    assert!(matches!(last, Some(Update::Ended(ending)) if ending.reason == EndReason::Aborted));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn shutdown_abandons_a_hanging_store() {
    let faulty = Arc::new(FaultyStore::new(memory_store()));
    faulty.set(Call::Put, Some(Fault::BeginsLate));
    let engine = start(device(64, 64), Some(faulty.clone()));
    ask(&engine, &prompt(1, 100), 4).await;
    figures_when(&engine, "the backup", |figures| figures.scheduler.backups.in_flight == 1).await;
    let shutdown = engine.shutdown(Duration::from_millis(100));
    let drained = tokio::time::timeout(PATIENCE, shutdown).await.expect("it gives up");
    assert_eq!(drained.abandoned_transfers, 1);
}

/// A device whose copies never end, or panic.
#[derive(Debug)]
struct BrokenDevice {
    inner: CpuDevice,
    panics: bool,
    begun: Mutex<Vec<CopyJob<CpuFence>>>,
}

impl BrokenDevice {
    fn new(panics: bool) -> Self {
        Self { inner: device(64, 64), panics, begun: Mutex::default() }
    }
}

impl Device for BrokenDevice {
    type Memory = CpuMemory;
    type Fence = CpuFence;

    fn pages(&self) -> u32 {
        self.inner.pages()
    }

    fn layout(&self) -> &PageLayout {
        self.inner.layout()
    }

    fn memory(&self) -> &Self::Memory {
        self.inner.memory()
    }

    fn host(&self) -> Option<&terrace_l3::Arena> {
        self.inner.host()
    }

    fn start_copy(&self, job: CopyJob<CpuFence>) {
        assert!(!self.panics, "a broken device panics");
        self.begun.lock().unwrap().push(job);
    }
}

/// A device that holds load-backs back.
#[derive(Debug)]
struct HoldingDevice {
    inner: CpuDevice,
    held: Mutex<Vec<CopyJob<CpuFence>>>,
}

impl Device for HoldingDevice {
    type Memory = CpuMemory;
    type Fence = CpuFence;

    fn pages(&self) -> u32 {
        self.inner.pages()
    }

    fn layout(&self) -> &PageLayout {
        self.inner.layout()
    }

    fn memory(&self) -> &Self::Memory {
        self.inner.memory()
    }

    fn host(&self) -> Option<&terrace_l3::Arena> {
        self.inner.host()
    }

    fn start_copy(&self, job: CopyJob<CpuFence>) {
        match job.direction {
            CopyDirection::LoadBack => self.held.lock().unwrap().push(job),
            CopyDirection::WriteBack => self.inner.start_copy(job),
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn copy_of_an_aborted_request_is_cancelled() {
    let mut config = config();
    config.copies.load_back_timeout_ms = 50;
    // There is room to compute the pages whose load-back is held.
    let device = Arc::new(HoldingDevice { inner: device(40, 128), held: Mutex::default() });
    let engine =
        Engine::start(config, Threaded::new(ToyModel::default()), device.clone(), None).unwrap();
    let old = prompt(1, 200);
    ask(&engine, &old, 8).await;
    for seed in 2..8 {
        ask(&engine, &prompt(seed, 200), 8).await;
    }
    // The load-back misses its deadline, so the pages are computed.
    assert_eq!(ask(&engine, &old, 8).await.tokens, toy_answer(&old, 8));
    let held = std::mem::take(&mut *device.held.lock().unwrap());
    assert!(!held.is_empty(), "it was to be loaded");
    for job in held {
        assert!(job.progress.is_called_off(), "{job:?}");
        device.inner.start_copy(job);
    }
    let figures = figures_when(&engine, "the end of the copies", |figures| {
        figures.scheduler.load_backs.in_flight == 0
    });
    let load_backs = figures.await.scheduler.load_backs;
    assert_eq!((load_backs.sound_pages, load_backs.failures), (0, 0), "none of them began");
    assert_eq!(ask(&engine, &prompt(9, 50), 8).await.tokens, toy_answer(&prompt(9, 50), 8));
}

/// A prefetch of an aborted request reads no more than the pieces in flight. Their pages are kept,
/// the rest of its memory is freed, and a later request for the same prompt gets all of it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn prefetch_of_an_aborted_request_is_cancelled() {
    const PAGES: u32 = 100;
    const HOST_PAGES: u32 = 256;
    let faulty = Arc::new(FaultyStore::new(memory_store()));
    let stored = prompt(1, PAGES * PAGE_SIZE + 1);
    let first = start(device(160, HOST_PAGES), Some(faulty.clone()));
    ask(&first, &stored, 1).await;
    backed_up(&first, PAGES.into()).await;

    faulty.set(Call::Get, Some(Fault::BeginsLate));
    let mut config = config();
    let prefetch = PrefetchPolicy::Wait { max_ms: 3_600_000 };
    config.l3 = Some(L3Config { prefetch, probe_timeout_ms: 3_600_000, ..L3Config::default() });
    let device = Arc::new(device(160, HOST_PAGES));
    let engine =
        Engine::start(config, Threaded::new(ToyModel::default()), device, Some(faulty.clone()))
            .unwrap();
    let asked = engine.submit(Generate::new(stored.clone(), 1)).await.unwrap();
    figures_when(&engine, "the prefetch", |_| faulty.calls(Call::Get) == 2).await;
    drop(asked);
    figures_when(&engine, "the abort", |figures| figures.scheduler.aborted == 1).await;
    // A further answer causes a plan after the abort, which cancels the prefetch.
    ask(&engine, &prompt(2, 2), 1).await;
    faulty.set(Call::Get, None);
    let figures = figures_when(&engine, "the end of the prefetch", |figures| {
        figures.scheduler.prefetches.in_flight == 0
    });
    let stats = figures.await.scheduler;
    let read = stats.prefetches.sound_pages as u32;
    assert!(0 < read && read <= 32, "{read} of {PAGES} pages were read");
    assert_eq!(faulty.calls(Call::Get), 2, "no others began");
    assert_eq!((stats.prefetches.called_off, stats.prefetches.failures), (1, 0));
    assert_eq!(stats.cache.host.free_pages, (HOST_PAGES - read) as usize, "the rest is free again");

    let answer = ask(&engine, &stored, 1).await;
    assert_eq!(answer.tokens, toy_answer(&stored, 1));
    let (host_tokens, l3_tokens) = (read * PAGE_SIZE, (PAGES - read) * PAGE_SIZE);
    assert_eq!(answer.hits, Hits { device_tokens: 0, host_tokens, l3_tokens });
}

/// Late, reordered and failed copies cause no wrong answer.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn answers_are_right_for_any_order_of_copies() {
    copies_come_in_any_order(false).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn answers_are_right_for_any_order_of_overlapped_copies() {
    copies_come_in_any_order(true).await;
}

async fn copies_come_in_any_order(load_back_overlaps: bool) {
    let chance = Chance::new(77);
    let flaky = FlakyDevice::new(device(40, 80), chance.clone(), 8);
    let late = LateDevice::new(flaky, chance.clone(), Duration::from_millis(8));
    let mut config = config();
    config.copies.load_back_timeout_ms = 6;
    config.copies.load_back_overlaps = load_back_overlaps;
    let engine =
        Engine::start(config, Threaded::new(ToyModel::default()), Arc::new(late), None).unwrap();
    // More prompts than the host holds, so that there are always copies. Failures are random, so it
    // runs until each kind has occurred.
    const ROUNDS_MAX: usize = 500;
    for round in 0..ROUNDS_MAX {
        let mut askers = tokio::task::JoinSet::new();
        for _ in 0..6 {
            let (engine, prompt) = (engine.clone(), prompt(chance.below(24) as u32, 120));
            askers.spawn(async move {
                assert_eq!(ask(&engine, &prompt, 6).await.tokens, toy_answer(&prompt, 6));
            });
        }
        askers.join_all().await;
        let stats = engine.figures().await.unwrap().scheduler;
        let seen = [stats.host_hit_tokens, stats.load_backs.failures, stats.write_backs.failures];
        if round > 8 && seen.iter().all(|count| *count > 0) {
            return;
        }
    }
    panic!("too little happened: {:?}", engine.figures().await.unwrap().scheduler);
}

/// Returns the processor time of this thread.
#[cfg(target_os = "linux")]
fn computed() -> Duration {
    let told = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap();
    Duration::from_nanos(told.split(' ').next().unwrap().parse().unwrap())
}

/// Only the driver runs on this thread.
#[cfg(target_os = "linux")]
#[tokio::test]
async fn shutdown_sleeps_while_it_waits_for_copies() {
    let mut config = config();
    config.cache.write_policy = WritePolicy::WriteThrough;
    let device = Arc::new(BrokenDevice::new(false));
    let engine = Engine::start(config, Threaded::new(ToyModel::default()), device, None).unwrap();
    ask(&engine, &prompt(1, 100), 20).await;
    figures_when(&engine, "the copy", |figures| figures.scheduler.draining == 1).await;
    let before = computed();
    let drained = engine.shutdown(Duration::from_millis(400)).await;
    assert!(drained.abandoned_transfers > 0, "{drained:?}");
    let busy = computed() - before;
    assert!(busy < Duration::from_millis(100), "waiting took {busy:?} of the processor");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_cancelled_by_a_shutdown_end_at_once() {
    let faulty = Arc::new(FaultyStore::new(memory_store()));
    faulty.set(Call::Exists, Some(Fault::BeginsLate));
    let mut config = config();
    config.l3 = Some(L3Config { probe_timeout_ms: 3_600_000, ..L3Config::default() });
    let engine = Engine::start(
        config,
        Threaded::new(ToyModel::default()),
        Arc::new(device(64, 64)),
        Some(faulty.clone()),
    )
    .unwrap();
    let mut waiting = engine.submit(Generate::new(prompt(1, 100), 4)).await.unwrap();
    let shutdown = tokio::spawn(async move { engine.shutdown(Duration::from_secs(1)).await });
    // The probe would take an hour.
    let told = tokio::time::timeout(PATIENCE, waiting.next()).await.expect("it is told");
    assert!(matches!(told, Some(Update::Ended(_))));
    assert_eq!(shutdown.await.unwrap().aborted, 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_shutdown_call_returns_at_the_end() {
    let engine = start(device(256, 0), None);
    let _long = engine.submit(Generate::new(prompt(1, 20), 4000)).await.unwrap();
    let (first, second) = tokio::join!(
        engine.shutdown(Duration::from_millis(50)),
        engine.shutdown(Duration::from_millis(50)),
    );
    assert_eq!((first.aborted, second.aborted), (1, 1));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn panicked_engine_counts_as_ended() {
    let engine = start(BrokenDevice::new(true), None);
    let running = tokio::time::timeout(Duration::from_millis(50), engine.ended()).await;
    assert!(running.is_err(), "it runs");
    ask(&engine, &prompt(1, 100), 20).await;
    tokio::time::timeout(PATIENCE, engine.ended()).await.unwrap();
    assert!(engine.figures().await.is_none());
}

/// Sampling state follows a request that is retracted and gets another row.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn penalties_survive_a_retraction() {
    const ASKERS: u32 = 8;
    let penalised = |seed| {
        let mut generate = Generate::new(prompt(seed, 20), 60);
        generate.shaping = Shaping { frequency_penalty: 1.5, ..Shaping::default() };
        generate
    };
    let roomy = start(device(256, 0), None);
    let mut expected = Vec::new();
    for seed in 0..ASKERS {
        expected.push(ask_for(&roomy, penalised(seed)).await.tokens);
        assert_ne!(expected[seed as usize], toy_answer(&prompt(seed, 20), 60), "they matter");
    }
    assert_eq!(figures_when(&roomy, "an end", |_| true).await.scheduler.retractions, 0);

    let small = start(device(16, 0), None);
    let mut askers = tokio::task::JoinSet::new();
    for seed in 0..ASKERS {
        let (small, generate) = (small.clone(), penalised(seed));
        askers.spawn(async move { (seed, ask_for(&small, generate).await.tokens) });
    }
    let answers = askers.join_all().await;
    let retractions = figures_when(&small, "an end", |_| true).await.scheduler.retractions;
    assert!(retractions > 0, "all of them fit");
    for (seed, answer) in answers {
        assert_eq!(answer, expected[seed as usize]);
    }
}

/// A grammar that allows only even tokens, and in every other position only multiples of 4.
#[derive(Debug)]
struct Even {
    tokens: u32,
}

impl Grammar for Even {
    fn advance(&mut self, token: Token) -> Result<(), GrammarError> {
        self.tokens += 1;
        if token.is_multiple_of(2) { Ok(()) } else { Err(GrammarError("odd".to_owned())) }
    }

    fn allowed(&mut self) -> Result<Vec<u32>, GrammarError> {
        let allowed = if self.tokens.is_multiple_of(2) { 0x5555_5555 } else { 0x1111_1111 };
        Ok(vec![allowed; ToyModel::default().vocabulary().div_ceil(32)])
    }
}

/// Steps that are launched ahead change no answer, for every kind of sampling and of end.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn steps_launched_ahead_change_no_answer() {
    const REQUESTS: u32 = 300;
    let generate = |number: u32| {
        let mut generate = Generate::new(prompt(number % 40, 5 + number % 90), 1 + number % 50);
        let vocabulary = ToyModel::default().vocabulary() as Token;
        match number % 6 {
            0 => {}
            1 => {
                generate.sampling =
                    Sampling { temperature: 1.0, top_k: 20, seed: 7, ..Sampling::GREEDY };
            }
            2 => generate.shaping = Shaping { frequency_penalty: 1.5, ..Shaping::default() },
            3 => generate.stop_tokens = (0..vocabulary / 10).collect(),
            4 => generate.grammar = Some(Box::new(Even { tokens: 0 })),
            _ => generate.logprobs = Some(2),
        }
        generate.logits_checksum = true;
        generate
    };
    let mut all = Vec::new();
    for steps_in_flight_max in [1, 2] {
        let mut config = config();
        config.batch.steps_in_flight_max = steps_in_flight_max;
        let device = Arc::new(device(60, 40));
        let engine =
            Engine::start(config, Threaded::new(ToyModel::default()), device, None).unwrap();
        let mut askers = tokio::task::JoinSet::new();
        for number in 0..REQUESTS {
            let (engine, generate) = (engine.clone(), generate(number));
            askers.spawn(async move {
                let Answer { tokens, reason, checksum, .. } = ask_for(&engine, generate).await;
                (number, tokens, reason, checksum)
            });
        }
        let mut answers = askers.join_all().await;
        answers.sort_by_key(|(number, ..)| *number);
        all.push(answers);
        let drained = engine.shutdown(PATIENCE).await;
        assert_eq!((drained.aborted, drained.abandoned_transfers), (0, 0));
    }
    let stopped = all[0].iter().filter(|(_, _, reason, _)| *reason == EndReason::Stop).count();
    assert!(stopped > 20, "only {stopped} have ended before their length");
    for (one, two) in all[0].iter().zip(&all[1]) {
        assert_eq!(one, two);
    }
}

/// A model that always fails fails the request, not the engine.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn failing_model_fails_the_request() {
    let model = Threaded::new(FlakyModel::new(ToyModel::default(), Chance::new(1), 1));
    let engine = Engine::start(config(), model, Arc::new(device(64, 0)), None).unwrap();
    let answer = ask(&engine, &prompt(1, 20), 4).await;
    assert_eq!(answer.reason, EndReason::Failed(FailReason::StepFailed));
    assert_eq!(engine.figures().await.unwrap().scheduler.failed, 1);
}

/// All at once: small tiers, shared prefixes, aborts, and a device, a model and a store that fail
/// at random. Every answer is right, and all resources are released in the end.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn answers_are_right_under_random_failures() {
    // The number of timely prefetches depends on the machine, so it runs until all kinds have
    // occurred.
    let enough =
        |seen: [u64; 4]| seen.into_iter().zip([50, 20, 1000, 1000]).all(|(it, least)| it > least);
    let mut seen = [0; 4];
    for seed in 0..36 {
        if seed >= 6 && enough(seen) {
            break;
        }
        let chance = Chance::new(seed);
        let mut config = config();
        config.batch.steps_in_flight_max = 1 + (seed % 2) as u32;
        config.copies.load_back_overlaps = seed / 2 % 2 == 1;
        // The test lasts some tens of milliseconds, so back-offs are short.
        config.l3 = Some(L3Config {
            negative_ttl_ms: 5,
            backoff_base_ms: 1,
            backoff_max_ms: 5,
            ..L3Config::default()
        });
        let flaky = Arc::new(FlakyStore::new(memory_store(), chance.clone(), 16));
        let guard =
            GuardConfig { get_timeout_ms: 20, put_timeout_ms: 20, ..GuardConfig::default() };
        let guarded: Arc<dyn Store> = Arc::new(Guarded::new(flaky, guard));
        let flaky_device = FlakyDevice::new(device(48, 40), chance.clone(), 6);
        let model = Threaded::new(FlakyModel::new(ToyModel::default(), chance.clone(), 40));
        let engine = Engine::start(config, model, Arc::new(flaky_device), Some(guarded)).unwrap();
        let mut askers = tokio::task::JoinSet::new();
        for _ in 0..8 {
            let (engine, chance) = (engine.clone(), chance.clone());
            askers.spawn(async move {
                let mut answered = 0;
                for _ in 0..100 {
                    answered += u32::from(ask_something(&engine, &chance).await);
                }
                answered
            });
        }
        let answered: u32 = askers.join_all().await.into_iter().sum();
        let figures = engine.figures().await.unwrap();
        assert!(answered > 400, "seed {seed}: only {answered} of 800 were answered");
        let stats = &figures.scheduler;
        let counts = [
            figures.steps.failed,
            stats.load_backs.failures,
            stats.host_hit_tokens,
            stats.l3_hit_tokens,
        ];
        seen = std::array::from_fn(|place| seen[place] + counts[place]);
        let drained = engine.shutdown(PATIENCE).await;
        assert_eq!((drained.aborted, drained.abandoned_transfers), (0, 0), "seed {seed}");
    }
    assert!(enough(seen), "too little has failed or was cached: {seen:?}");
}

/// Sends a request for one of a few documents, and cancels some. Returns whether there was an
/// answer.
async fn ask_something(engine: &Engine, chance: &Chance) -> bool {
    let document = prompt(chance.below(5) as u32, 16 * (1 + chance.below(12)) as u32);
    let question: Vec<Token> =
        (0..1 + chance.below(20)).map(|_| chance.below(97) as Token).collect();
    let prompt = [document, question].concat();
    let tokens = 1 + chance.below(24) as usize;
    if chance.once_in(12) {
        engine.clear_cache().await;
    }
    let mut generation = engine.submit(Generate::new(prompt.clone(), tokens as u32)).await.unwrap();
    let hangs_up_after = if chance.once_in(5) { chance.below(8) } else { u64::MAX };
    let mut answer = Vec::new();
    loop {
        if answer.len() as u64 > hangs_up_after {
            return false;
        }
        match generation.next().await.unwrap() {
            Update::Started(_) | Update::Prompt(_) | Update::Logprobs(_) => {}
            Update::Token(token) => answer.push(token),
            Update::Ended(ending) => match ending.reason {
                EndReason::Length => {
                    assert_eq!(answer, toy_answer(&prompt, tokens), "a wrong answer");
                    return true;
                }
                EndReason::Failed(FailReason::StepFailed) => return false,
                reason => panic!("it ended with {reason:?}"),
            },
        }
    }
}

/// State of a feed: the tokens of each page in each tier.
#[derive(Default)]
struct Heard {
    pages: BTreeMap<(KvTier, PageKey), Vec<Token>>,
    expected: u64,
    snapshots: u32,
}

impl Heard {
    fn hear(&mut self, events: &KvEvents) {
        if events.is_snapshot {
            self.pages.clear();
            self.snapshots += 1;
        } else {
            assert_eq!(events.first(), self.expected, "a feed has no gaps");
        }
        self.expected = events.next;
        for event in events.iter() {
            match event {
                KvEvent::Stored { tier, keys, tokens, .. } => {
                    let pages = keys.iter().zip(tokens.chunks(PAGE_SIZE as usize));
                    let pages = pages.map(|(&key, tokens)| ((tier, key), tokens.to_vec()));
                    self.pages.extend(pages);
                }
                KvEvent::Removed { tier, keys, .. } => {
                    keys.iter().for_each(|&key| assert!(self.pages.remove(&(tier, key)).is_some()));
                }
                KvEvent::Cleared => self.pages.retain(|(tier, _), _| *tier == KvTier::L3),
            }
        }
    }

    /// Reads the feed until a tier has `pages` pages.
    async fn until(&mut self, feed: &mut KvFeed, tier: KvTier, pages: usize) {
        let heard = async {
            while self.held(tier) != pages {
                self.hear(&feed.next().await.expect("an engine that runs"));
            }
        };
        tokio::time::timeout(PATIENCE, heard).await.expect("it is told in time");
    }

    fn held(&self, tier: KvTier) -> usize {
        self.pages.keys().filter(|(held_by, _)| *held_by == tier).count()
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn routers_follow_the_content_of_each_tier() {
    let engine = start(device(64, 64), Some(memory_store()));
    let prompt = prompt(1, 100);
    let mut early = engine.kv_events(1000).await.unwrap();
    let mut heard = Heard::default();
    ask(&engine, &prompt, 1).await;
    for tier in [KvTier::Device, KvTier::Host, KvTier::L3] {
        heard.until(&mut early, tier, 6).await;
    }
    for page in prompt.chunks_exact(PAGE_SIZE as usize) {
        let with_its_tokens = heard.pages.values().filter(|tokens| **tokens == page).count();
        assert_eq!(with_its_tokens, 3, "each page is in each tier");
    }
    assert_eq!(heard.snapshots, 1, "it has missed nothing since it began");
    let mut late = engine.kv_events(1000).await.unwrap();
    let mut heard_late = Heard::default();
    heard_late.until(&mut late, KvTier::L3, 6).await;
    assert_eq!(heard_late.pages, heard.pages, "a late subscriber starts with a complete snapshot");

    engine.clear_cache().await.unwrap();
    for (heard, feed) in [(&mut heard, &mut early), (&mut heard_late, &mut late)] {
        heard.until(feed, KvTier::Device, 0).await;
        assert_eq!((heard.held(KvTier::Host), heard.held(KvTier::L3)), (0, 6));
    }
    engine.shutdown(PATIENCE).await;
    assert!(tokio::time::timeout(PATIENCE, early.next()).await.unwrap().is_none());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn slow_router_restarts_from_a_snapshot() {
    let engine = start(device(64, 0), None);
    let mut feed = engine.kv_events(2).await.unwrap();
    for seed in 0..6 {
        ask(&engine, &prompt(seed, 40), 1).await;
    }
    let mut heard = Heard::default();
    // Only the reader is active: it still gets all events.
    heard.until(&mut feed, KvTier::Device, 12).await;
    assert_eq!(heard.snapshots, 2);
    assert_eq!(feed.try_next(), None);
}
