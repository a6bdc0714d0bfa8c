//! Tests of a complete engine on the device, with a model whose steps run in a stream. Answers must
//! be correct whatever copies run beside them.

use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use terrace_engine::{
    Batch, Chosen, Continuation, EndReason, Ending, Engine, Finished, Generate, KvForm, KvLayout,
    KvType, Model, ModelError, Output, PageTable, Slab, StepLimits, StepTicket, Update,
};
use terrace_scheduler::{Config, RateConfig, Token};

use super::*;
use crate::driver::{DeviceAddress, Stream};
use crate::fake::{Access, FakeDriver};

const PAGE_SIZE: u32 = 4;
const LAYERS: usize = 3;
const VOCABULARY: u64 = 1000;
const NEW_TOKENS: u32 = 3;
const NUMBER_BYTES: usize = 8;

/// Returns the KV of a token in a layer, a single number: a function of the token, of its KV in the
/// layer before, and of the KV of all tokens before it. The chosen token depends on the KV of the
/// last layer.
fn kv(token: Token, layer_before: u64, earlier: impl Iterator<Item = u64>) -> u64 {
    let mixed = earlier.zip(1_u64..).fold(layer_before, |sum, (kv, position)| {
        sum.wrapping_add((kv ^ position).wrapping_mul(0x9e37_79b9_7f4a_7c15))
    });
    (mixed ^ u64::from(token)).wrapping_mul(0xd6e8_feb8_6659_fd93).rotate_left(29)
}

/// Computes the expected answer without pages.
fn answer(prompt: &[Token]) -> Vec<Token> {
    let mut tokens = prompt.to_vec();
    for _ in 0..NEW_TOKENS {
        let mut layer_before = vec![0; tokens.len()];
        for _ in 0..LAYERS {
            let mut layer: Vec<u64> = Vec::new();
            for (token, before) in tokens.iter().zip(&layer_before) {
                layer.push(kv(*token, *before, layer.iter().copied()));
            }
            layer_before = layer;
        }
        tokens.push((layer_before[tokens.len() - 1] % VOCABULARY) as Token);
    }
    tokens.split_off(prompt.len())
}

fn kv_layout() -> KvLayout {
    let form = KvForm::Vector { elements: NUMBER_BYTES };
    KvLayout { slabs: vec![Slab { layers: 0..LAYERS, dtype: KvType::U8, form }] }
}

/// A model whose steps run in a stream.
struct StreamModel {
    fake: FakeDriver,
    stream: Stream,
    memory: Option<CudaMemory>,
    table: PageTable,
    /// Simulated rounding mode, known once the model has started.
    bits: u64,
}

/// A span with the KV addresses of its positions.
struct Row {
    tokens: Vec<Token>,
    start: usize,
    at: Vec<DeviceAddress>,
}

/// Distance between the layers of a page.
const LAYER_BYTES: usize = PAGE_SIZE as usize * NUMBER_BYTES;

fn number(access: &mut Access<'_>, at: DeviceAddress, layer: usize) -> u64 {
    let bytes = access.bytes(at.offset(layer * LAYER_BYTES), NUMBER_BYTES).first_chunk();
    bytes.map_or(0, |bytes| u64::from_le_bytes(*bytes))
}

impl Row {
    fn compute(&self, access: &mut Access<'_>, layer: usize) {
        for (token, position) in self.tokens.iter().zip(self.start..) {
            let at = self.at[position];
            let before = layer.checked_sub(1).map_or(0, |before| number(access, at, before));
            let earlier = self.at[..position].iter().map(|at| number(access, *at, layer));
            let kv = kv(*token, before, earlier.collect::<Vec<_>>().into_iter());
            let at = at.offset(layer * LAYER_BYTES);
            access.bytes(at, NUMBER_BYTES).copy_from_slice(&kv.to_le_bytes());
        }
    }

    fn choose(&self, access: &mut Access<'_>) -> Token {
        let last = self.start + self.tokens.len() - 1;
        (number(access, self.at[last], LAYERS - 1) % VOCABULARY) as Token
    }
}

impl Model for StreamModel {
    type Memory = CudaMemory;
    type Fence = CudaFence;
    type Ticket = StreamTicket;

    fn kv_layout(&self) -> KvLayout {
        kv_layout()
    }

    fn vocabulary(&self) -> usize {
        VOCABULARY as usize
    }

    fn positions_max(&self) -> u32 {
        1000
    }

    fn fingerprint(&self) -> String {
        match &self.memory {
            Some(_) => format!("numbers-bits{}", self.bits),
            None => "numbers".to_owned(),
        }
    }

    fn waits_for_layers(&self) -> bool {
        true
    }

    fn begin(&mut self, memory: &CudaMemory, limits: StepLimits) -> Result<(), ModelError> {
        self.memory = Some(memory.clone());
        self.table = PageTable::new(limits.rows, limits.page_size);
        Ok(())
    }

    fn launch(&mut self, batch: &Arc<Batch>) -> Result<StreamTicket, ModelError> {
        let failed = |error: CudaError| ModelError(error.to_string());
        let memory = self.memory.as_ref().expect("it has begun");
        self.table.apply(batch);
        let rows = batch.spans.iter().map(|span| {
            let pages = self.table.row(span.slot);
            let at = |position: u32| {
                let within = (position % PAGE_SIZE) as usize * NUMBER_BYTES;
                memory.address(pages[(position / PAGE_SIZE) as usize]).offset(within)
            };
            let tokens = batch.tokens[span.tokens.clone()].to_vec();
            Row { tokens, start: span.start as usize, at: (0..span.end()).map(at).collect() }
        });
        let rows: Arc<Vec<Row>> = Arc::new(rows.collect());
        for layer in 0..LAYERS {
            for progress in &batch.arriving {
                memory.wait_for_layer(self.stream, progress, layer).map_err(failed)?;
            }
            let rows = rows.clone();
            self.fake.compute(self.stream, move |access| {
                rows.iter().for_each(|row| row.compute(access, layer));
            });
        }
        let chosen = Arc::new(Mutex::new(Vec::new()));
        let (choice, spans) = (chosen.clone(), batch.wanted.iter().map(|wanted| wanted.span));
        let spans: Vec<usize> = spans.collect();
        self.fake.compute(self.stream, move |access| {
            choice.lock().extend(spans.iter().map(|span| rows[*span].choose(access)));
        });
        let fence = memory.fence().map_err(failed)?;
        fence.record(self.stream).map_err(failed)?;
        Ok(StreamTicket { fence, chosen })
    }
}

struct StreamTicket {
    fence: CudaFence,
    chosen: Arc<Mutex<Vec<Token>>>,
}

impl StepTicket for StreamTicket {
    type Fence = CudaFence;

    fn fence(&self) -> CudaFence {
        self.fence.clone()
    }

    fn finish(self) -> Finished {
        let began_at = Instant::now();
        let waited = self.fence.wait().map_err(|error| ModelError(error.to_string()));
        let output = |token: &Token| {
            let chosen = Chosen {
                token: *token,
                continuation: Continuation::Yes,
                logprobs: None,
                logits: None,
            };
            Output { chosen: Some(chosen), scores: Vec::new() }
        };
        let result = waited.map(|()| self.chosen.lock().iter().map(output).collect());
        Finished { result, began_at, ended_at: Instant::now() }
    }
}

/// Returns prompts with shared prefixes. Each is longer than the space that the device has beside
/// it.
fn prompts() -> Vec<Vec<Token>> {
    let text = |seed: u32, length: u32| (0..length).map(move |n| (seed * 37 + n * 11) % 997);
    let documents = (0..6).map(|document| text(document, 40).collect::<Vec<Token>>());
    let documents: Vec<_> = documents.collect();
    let questions = (0..4_u32).flat_map(|question| {
        let ask = move |document: &Vec<Token>| {
            document.iter().copied().chain(text(100 + question, 5 + question)).collect()
        };
        documents.iter().map(ask).collect::<Vec<Vec<Token>>>()
    });
    questions.collect()
}

async fn ask(engine: Engine, prompt: Vec<Token>) {
    let expected = answer(&prompt);
    let mut generation = engine.submit(Generate::new(prompt, NEW_TOKENS)).await.unwrap();
    let mut found = Vec::new();
    loop {
        match generation.next().await.unwrap() {
            Update::Started(_) | Update::Prompt(_) | Update::Logprobs(_) => {}
            Update::Token(token) => found.push(token),
            Update::Ended(ending) => {
                assert_eq!((found, ending.reason), (expected, EndReason::Length));
                return;
            }
        }
    }
}

async fn answers_are_right(load_back_overlaps: bool, seed: u64) {
    let fake = FakeDriver::new(1 << 20, seed);
    let stream = fake.create_stream(Priority::High).unwrap();
    let layout = kv_layout().pages(PAGE_SIZE).unwrap();
    let ways = CopyWays { to_device_batch_from: Some(64), to_host_batch_from: None };
    let device_config = CudaConfig {
        device_pages: 30,
        host_pages: 200,
        layout,
        canary: Some(CanaryConfig { one_page_in: 1 }),
        ways: Some(ways),
    };
    let device =
        Arc::new(CudaDevice::with_driver(Arc::new(fake.clone()), device_config, None).unwrap());
    fake.change_faults(|faults| faults.delay_us_max = 150);
    let rates = RateConfig { prefill_ns_per_token: 5_000_000, ..RateConfig::default() };
    let mut config = Config::builder().page_size(PAGE_SIZE).rates(rates).build().unwrap();
    config.batch.running_max = 4;
    config.batch.step_tokens_max = 24;
    config.copies.load_back_overlaps = load_back_overlaps;
    let table = PageTable::new(0, PAGE_SIZE);
    let model = StreamModel { fake: fake.clone(), stream, memory: None, table, bits: 0 };
    let engine = Engine::start(config, model, device.clone(), None).unwrap();
    for _ in 0..2 {
        let mut askers = tokio::task::JoinSet::new();
        for prompt in prompts() {
            if askers.len() == 3 {
                askers.join_next().await.unwrap().unwrap();
            }
            askers.spawn(ask(engine.clone(), prompt));
        }
        askers.join_all().await;
    }
    engine.shutdown(Duration::from_secs(20)).await;
    let stats = device.stats();
    assert!(stats.to_host.bytes > 0 && stats.to_device.bytes > 0, "{stats:?}");
    let failed = [stats.to_host, stats.to_device].map(|link| (link.failed, link.pages_corrupt));
    assert_eq!((failed, fake.violations()), ([(0, 0); 2], Vec::new()));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn kv_names_include_rounding_after_start() {
    let mut names = Vec::new();
    for bits in [1, 2, 1] {
        let fake = FakeDriver::new(1 << 20, 1);
        let stream = fake.create_stream(Priority::High).unwrap();
        let layout = kv_layout().pages(PAGE_SIZE).unwrap();
        let device_config =
            CudaConfig { device_pages: 8, host_pages: 0, layout, canary: None, ways: None };
        let device = CudaDevice::with_driver(Arc::new(fake.clone()), device_config, None).unwrap();
        let config = Config::builder().page_size(PAGE_SIZE).build().unwrap();
        let table = PageTable::new(0, PAGE_SIZE);
        let model = StreamModel { fake, stream, memory: None, table, bits };
        let engine = Engine::start(config, model, Arc::new(device), None).unwrap();
        names.push(engine.namespaces(vec![String::new()]).await.unwrap());
    }
    assert_eq!(names[0], names[2]);
    assert_ne!(names[0], names[1]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn device_lost_in_a_step_ends_requests_and_engine() {
    let fake = FakeDriver::new(1 << 20, 1);
    let stream = fake.create_stream(Priority::High).unwrap();
    let layout = kv_layout().pages(PAGE_SIZE).unwrap();
    let device_config =
        CudaConfig { device_pages: 30, host_pages: 30, layout, canary: None, ways: None };
    let device =
        Arc::new(CudaDevice::with_driver(Arc::new(fake.clone()), device_config, None).unwrap());
    assert_eq!(device.failure(), None);
    let config = Config::builder().page_size(PAGE_SIZE).build().unwrap();
    let table = PageTable::new(0, PAGE_SIZE);
    let model = StreamModel { fake: fake.clone(), stream, memory: None, table, bits: 0 };
    let engine = Engine::start(config, model, device.clone(), None).unwrap();
    let held_up = fake.ban(0..1);
    fake.gate(stream, held_up);
    let mut generation = engine.submit(Generate::new(vec![1, 2, 3], NEW_TOKENS)).await.unwrap();
    while engine.figures().await.unwrap().scheduler.running == 0 {
        tokio::task::yield_now().await;
    }
    fake.lose();
    let ended = Update::Ended(Ending { reason: EndReason::DeviceLost, logits_checksum: None });
    assert_eq!(generation.next().await, Some(ended));
    tokio::time::timeout(Duration::from_secs(20), engine.ended()).await.unwrap();
    let reason = engine.failure().unwrap();
    assert!(reason.contains("was made to fail"), "{reason}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn answers_are_right_during_copies() {
    answers_are_right(false, 1).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn answers_are_right_when_steps_start_during_load_backs() {
    for seed in 0..3 {
        answers_are_right(true, seed).await;
    }
}
