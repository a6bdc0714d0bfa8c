//! The engine on a GPU: answers do not depend on where their KV comes from, and the first token
//! comes in time.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use terrace_cuda::canary::CanaryConfig;
use terrace_cuda::{Context, CudaConfig, CudaDevice, CudaFence, CudaLlama, CudaMemory};
use terrace_engine::{EndReason, Engine, Generate, Model, Update};
use terrace_kit::Dice;
use terrace_l3::{GuardConfig, Guarded, Store};
use terrace_l3_disk::{DiskConfig, DiskStore};
use terrace_model::Shape;
use terrace_scheduler::{Config, CopyDirection, L3Config, RateConfig, Stats, Token};

use crate::Done;
use crate::table::Table;
use crate::world::{eight_billion, small};

pub(crate) const PAGE_SIZE: u32 = 16;

/// A prompt, its answer and the checksum of the logits that it came from.
pub(crate) type Example = (Vec<Token>, Vec<Token>, Option<u64>);

pub(crate) struct Server {
    pub(crate) engine: Engine,
    pub(crate) device: Arc<CudaDevice>,
}

/// Sizes of an engine.
pub(crate) struct Sizes {
    pub(crate) device_tokens: u32,
    pub(crate) host_tokens: u32,
    pub(crate) step_tokens: u32,
    pub(crate) canary: Option<CanaryConfig>,
}

impl Server {
    pub(crate) fn start(
        context: &Arc<Context>,
        shape: &Shape,
        sizes: Sizes,
        folder: Option<&Path>,
    ) -> Result<Self, Box<dyn std::error::Error>> {
        Self::start_with(context, CudaLlama::random(context, shape)?, sizes, folder)
    }

    pub(crate) fn start_with<M>(
        context: &Arc<Context>,
        model: M,
        sizes: Sizes,
        folder: Option<&Path>,
    ) -> Result<Self, Box<dyn std::error::Error>>
    where
        M: Model<Memory = CudaMemory, Fence = CudaFence>,
    {
        let layout = model.kv_layout().pages(PAGE_SIZE)?;
        let page_bytes = layout.bytes();
        let cuda = CudaConfig {
            device_pages: sizes.device_tokens / PAGE_SIZE,
            host_pages: sizes.host_tokens / PAGE_SIZE,
            layout,
            canary: sizes.canary,
            ways: None,
        };
        let device = Arc::new(CudaDevice::new(context, cuda)?);
        let rates = RateConfig {
            prefill_ns_per_token: 40_000,
            load_back_ns_per_page: page_bytes as u64 / 50,
            prefetch_ns_per_page: page_bytes as u64 * 10 / 25,
            prefetch_latency_us: 1_000,
        };
        let mut config = Config::builder().page_size(PAGE_SIZE).rates(rates).build()?;
        config.batch.running_max = 64;
        config.batch.step_tokens_max = sizes.step_tokens;
        config.batch.steps_in_flight_max = 2;
        config.copies.load_back_overlaps = true;
        config.l3 = Some(L3Config { prefetch_threshold_pages: 1, ..L3Config::default() });
        let open = |folder: &Path| -> Result<Arc<dyn Store>, Box<dyn std::error::Error>> {
            let config = DiskConfig::new(folder, 24 << 30, page_bytes);
            let store = Arc::new(DiskStore::open(config)?);
            Ok(Arc::new(Guarded::new(store, GuardConfig::default())))
        };
        let store = folder.map(open).transpose()?;
        let engine = Engine::start(config, model, device.clone(), store)?;
        Ok(Self { engine, device })
    }

    /// Sends a prompt, and returns the answer, the checksum of its logits, and the time of its
    /// first token.
    pub(crate) async fn ask(
        &self,
        prompt: &[Token],
        new_tokens: u32,
        salt: &str,
    ) -> Result<(Example, Duration), Box<dyn std::error::Error>> {
        let mut generate = Generate::new(prompt.to_vec(), new_tokens);
        generate.logits_checksum = prompt.len() < 10_000;
        generate.salt = salt.to_owned();
        let (answer, checksum, first) = self.answer(generate).await?;
        Ok(((prompt.to_vec(), answer, checksum), first))
    }

    async fn answer(
        &self,
        generate: Generate,
    ) -> Result<(Vec<Token>, Option<u64>, Duration), Box<dyn std::error::Error>> {
        let began = Instant::now();
        let mut generation = self.engine.submit(generate).await?;
        let (mut answer, mut first) = (Vec::new(), Duration::ZERO);
        loop {
            match generation.next().await.ok_or("the engine has ended")? {
                Update::Started(_) | Update::Prompt(_) | Update::Logprobs(_) => {}
                Update::Token(token) => {
                    if answer.is_empty() {
                        first = began.elapsed();
                    }
                    answer.push(token);
                }
                Update::Ended(ending) if ending.reason == EndReason::Length => {
                    return Ok((answer, ending.logits_checksum, first));
                }
                Update::Ended(ending) => return Err(format!("ended as {:?}", ending.reason).into()),
            }
        }
    }

    /// Sends a prompt and waits for the end of the answer. Logits are not copied to the host.
    pub(crate) async fn ask_only(
        &self,
        prompt: &[Token],
        new_tokens: u32,
    ) -> Result<(), Box<dyn std::error::Error>> {
        self.answer(Generate::new(prompt.to_vec(), new_tokens)).await.map(drop)
    }

    /// Waits until the engine is idle.
    pub(crate) async fn rest(&self) -> Result<Stats, Box<dyn std::error::Error>> {
        loop {
            let figures = self.engine.figures().await.ok_or("the engine has ended")?;
            let stats = figures.scheduler;
            if stats.draining == 0 && stats.transfers_under_way() == 0 {
                return Ok(stats);
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
}

pub(crate) fn runtime() -> std::io::Result<tokio::runtime::Runtime> {
    tokio::runtime::Builder::new_multi_thread().worker_threads(4).enable_all().build()
}

/// Compares answers whose prefix is computed, on device, on host, in L3, and in L3 after a restart.
pub(crate) fn sameness(context: &Arc<Context>, table: &mut Table) -> Done {
    runtime()?.block_on(same(context, table))
}

async fn same(context: &Arc<Context>, table: &mut Table) -> Done {
    const NEW_TOKENS: u32 = 6;
    let shape = small();
    let mut dice = Dice::new(21);
    let shared: Vec<Vec<Token>> = (0..6).map(|_| dice.tokens(1_500, shape.vocabulary)).collect();
    let mut prompts: Vec<Vec<Token>> = Vec::new();
    for number in 0..60 {
        let mut prompt = shared[number % 6][..300 + 20 * number].to_vec();
        let more = 1 + dice.place(200);
        prompt.extend(dice.tokens(more, shape.vocabulary));
        prompts.push(prompt);
    }
    let sizes = |device_tokens, host_tokens| Sizes {
        device_tokens,
        host_tokens,
        step_tokens: 512,
        canary: Some(CanaryConfig { one_page_in: 4 }),
    };
    let server = Server::start(context, &shape, sizes(65_536, 0), None)?;
    let mut examples: Vec<Example> = Vec::new();
    for (number, prompt) in prompts.iter().enumerate() {
        examples.push(server.ask(prompt, NEW_TOKENS, &number.to_string()).await?.0);
    }
    server.engine.shutdown(Duration::from_secs(10)).await;
    let folder = tempfile::tempdir()?;
    for (what, device_tokens, host_tokens, has_l3) in [
        ("hits on device", 262_144, 0, false),
        ("hits on host, the device too small", 8_192, 262_144, false),
        ("everything put into L3", 65_536, 65_536, true),
        ("hits in L3 after a restart", 65_536, 65_536, true),
    ] {
        let l3 = has_l3.then(|| folder.path());
        let server = Server::start(context, &shape, sizes(device_tokens, host_tokens), l3)?;
        let passes = if has_l3 { 1 } else { 2 };
        let mut wrong = 0;
        for _ in 0..passes {
            // Several at a time, so that batch sizes vary.
            for some in examples.chunks(7) {
                let asked = some.iter().map(|(prompt, ..)| server.ask(prompt, NEW_TOKENS, ""));
                let answered = futures_util::future::join_all(asked).await;
                for (found, expected) in answered.into_iter().zip(some) {
                    wrong += usize::from(found?.0 != *expected);
                }
            }
            let _ = server.rest().await?;
        }
        let stats = server.rest().await?;
        let hits = (stats.device_hit_tokens, stats.host_hit_tokens, stats.l3_hit_tokens);
        let copies = server.device.stats();
        let corrupt = copies.to_device.pages_corrupt + copies.to_host.pages_corrupt;
        let compared = copies.to_device.pages_compared + copies.to_host.pages_compared;
        let found = format!(
            "{wrong} of {} wrong; hits {hits:?}; {corrupt} of {compared} pages corrupt",
            examples.len() * passes
        );
        let has_hits = match what {
            "hits on device" => hits.0 > 0,
            "hits on host, the device too small" => hits.1 > 0 && compared > 0,
            "hits in L3 after a restart" => hits.2 > 0 && compared > 0,
            _ => compared > 0,
        };
        table.check(&format!("engine, {what}"), &found, wrong == 0 && corrupt == 0 && has_hits);
        server.engine.shutdown(Duration::from_secs(20)).await;
    }
    canary(context, table, &prompts[0]).await
}

/// Checks that a page corrupted in transit is detected.
async fn canary(context: &Arc<Context>, table: &mut Table, prompt: &[Token]) -> Done {
    let canary = Some(CanaryConfig { one_page_in: 1 });
    let (device_tokens, host_tokens, step_tokens) = (8_192, 65_536, 512);
    let sizes = Sizes { device_tokens, host_tokens, step_tokens, canary };
    let server = Server::start(context, &small(), sizes, None)?;
    server.device.corrupt_next_copy(CopyDirection::WriteBack);
    server.ask(prompt, 2, "").await?;
    let _ = server.rest().await?;
    let corrupt = server.device.stats().to_host.pages_corrupt;
    table.check(
        "a page damaged on its way is noticed",
        &format!("{corrupt} noticed"),
        corrupt == 1,
    );
    server.engine.shutdown(Duration::from_secs(10)).await;
    Ok(())
}

/// Measures the time to the first token behind 32,768 cached tokens, from host and from disk.
pub(crate) fn first_tokens(context: &Arc<Context>, table: &mut Table) -> Done {
    runtime()?.block_on(first(context, table))
}

async fn first(context: &Arc<Context>, table: &mut Table) -> Done {
    const TOKENS: u32 = 32_768;
    const PROMPTS: u32 = 3;
    let shape = eight_billion();
    let folder = tempfile::tempdir()?;
    let sizes = Sizes {
        device_tokens: TOKENS + 8_192,
        host_tokens: PROMPTS * TOKENS + 4_096,
        step_tokens: 8_192,
        canary: None,
    };
    let server = Server::start(context, &shape, sizes, Some(folder.path()))?;
    let mut dice = Dice::new(4);
    let prompts: Vec<Vec<Token>> =
        (0..PROMPTS).map(|_| dice.tokens(TOKENS as usize, shape.vocabulary)).collect();
    let milliseconds = |time: Duration| time.as_secs_f64() * 1e3;
    server.ask(&dice.tokens(9_000, shape.vocabulary), 1, "warm").await?;
    let _ = server.rest().await?;
    let mut passes = Vec::new();
    let mut firsts = Vec::new();
    for pass in 0..2 {
        let began = Instant::now();
        let mut times = Vec::new();
        for prompt in &prompts {
            times.push(milliseconds(server.ask(prompt, 1, "").await?.1));
            if pass == 0 {
                let _ = server.rest().await?;
            }
        }
        passes.push(began.elapsed());
        firsts.push(times);
    }
    println!("      first tokens after {firsts:.0?} ms");
    let best = |times: &[f64]| times.iter().copied().fold(f64::MAX, f64::min);
    let (computed, host) = (best(&firsts[0]), best(&firsts[1]));
    let what = "first token of 32,768 tokens that are on host";
    let found = format!("{host:.0} ms, {:.1} times as fast", computed / host);
    table.figure(what, &found, "110 ms, 12 times", host <= 110.0 && computed / host >= 12.0);
    let _ = server.rest().await?;
    server.engine.clear_cache().await;
    let disk = milliseconds(server.ask(&prompts[0], 1, "").await?.1);
    let stats = server.rest().await?;
    let what = "the same from disk";
    let found = format!("{disk:.0} ms, {} tokens came from it", stats.l3_hit_tokens);
    let goal = format!("no more than {computed:.0} ms");
    table.figure(what, &found, &goal, disk <= computed * 1.02);
    let link = server.device.stats();
    println!("      {:?}", link.to_device);
    server.engine.shutdown(Duration::from_secs(20)).await;
    Ok(())
}
