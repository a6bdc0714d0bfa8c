//! Request features beside tokens: adapters, passages, and weights that change while requests run.

use std::future::Future;
use std::pin::pin;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use terrace_engine::{
    Arrival, Batch, CpuDevice, CpuFence, CpuMemory, Engine, Forward, Generate, KvLayout, Model,
    ModelError, NewWeights, StepLimits, SubmitError, Threaded, ThreadedTicket, Update,
    WeightsError,
};
use terrace_l3::{MemoryConfig, MemoryStore, Store};
use terrace_scheduler::{Config, ContentKey, Hits, Passage, RateConfig, Token};
use terrace_tests::engine::{PAGE_SIZE, ToyModel, figures_when};

/// A toy with adapters and passages that records its rows' arrivals. With permits each step takes
/// one, until the sender is dropped.
struct Knowing {
    inner: Threaded<ToyModel>,
    came: Arc<Mutex<Vec<Arrival>>>,
    permits: Option<Receiver<()>>,
}

impl Knowing {
    fn new(came: &Arc<Mutex<Vec<Arrival>>>) -> Self {
        let inner = Threaded::new(ToyModel::default());
        Self { inner, came: came.clone(), permits: None }
    }
}

impl Model for Knowing {
    type Memory = CpuMemory;
    type Fence = CpuFence;
    type Ticket = ThreadedTicket;

    fn kv_layout(&self) -> KvLayout {
        self.inner.kv_layout()
    }

    fn vocabulary(&self) -> usize {
        self.inner.vocabulary()
    }

    fn positions_max(&self) -> u32 {
        self.inner.positions_max()
    }

    fn fingerprint(&self) -> String {
        self.inner.fingerprint()
    }

    fn adapters(&self) -> Vec<String> {
        ["cats", "dogs"].map(str::to_owned).to_vec()
    }

    fn takes_passages(&self) -> bool {
        true
    }

    fn replace_weights(&mut self, weights: NewWeights) -> Result<(), WeightsError> {
        self.inner.replace_weights(weights)
    }

    fn begin(&mut self, memory: &CpuMemory, limits: StepLimits) -> Result<(), ModelError> {
        self.inner.begin(memory, limits)
    }

    fn launch(&mut self, batch: &Arc<Batch>) -> Result<ThreadedTicket, ModelError> {
        self.came.lock().unwrap().extend(batch.came.iter().cloned());
        if let Some(permits) = &self.permits {
            let _ = permits.recv();
        }
        self.inner.launch(batch)
    }
}

fn start<M>(model: M, store: Option<Arc<dyn Store>>) -> Engine
where
    M: Model<Memory = CpuMemory, Fence = CpuFence>,
{
    let rates = RateConfig { prefill_ns_per_token: 10_000_000, ..RateConfig::default() };
    let config = Config::builder().page_size(PAGE_SIZE).rates(rates).build().unwrap();
    let layout = model.kv_layout().pages(PAGE_SIZE).unwrap();
    let device = CpuDevice::new(64, 64, layout).unwrap();
    Engine::start(config, model, Arc::new(device), store).unwrap()
}

fn prompt(seed: u32) -> Vec<Token> {
    (0..80).map(|place| (place * 7 + seed * 31) % 97).collect()
}

/// Returns the tokens of an answer, and the hits of its prompt.
async fn ask(engine: &Engine, generate: Generate) -> (Vec<Token>, Hits) {
    let mut generation = engine.submit(generate).await.unwrap();
    let (mut tokens, mut found) = (Vec::new(), Hits::default());
    while let Some(update) = generation.next().await {
        match update {
            Update::Started(hits) => found = hits,
            Update::Token(token) => tokens.push(token),
            Update::Prompt(_) | Update::Logprobs(_) | Update::Ended(_) => {}
        }
    }
    (tokens, found)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn adapters_and_passages_reach_the_model_and_share_no_page() {
    let came = Arc::new(Mutex::new(Vec::new()));
    let engine = start(Knowing::new(&came), None);
    let image = |content| Passage {
        start: 16,
        end: 32,
        content: Some(ContentKey(content)),
        is_whole: true,
    };
    let with = |adapter: &str, passages: &[Passage]| {
        let (adapter, passages) = (adapter.to_owned(), passages.to_vec());
        Generate { adapter, passages, ..Generate::new(prompt(1), 4) }
    };
    let hits = |device_tokens| Hits { device_tokens, ..Hits::default() };
    assert_eq!(ask(&engine, with("", &[])).await.1, hits(0));
    assert_eq!(ask(&engine, with("cats", &[])).await.1, hits(0));
    assert_eq!(ask(&engine, with("dogs", &[])).await.1, hits(0));
    assert_eq!(ask(&engine, with("cats", &[])).await.1, hits(64), "its own pages");
    assert_eq!(ask(&engine, with("", &[image(1)])).await.1, hits(16), "up to the image");
    assert_eq!(ask(&engine, with("", &[image(2)])).await.1, hits(16), "another image");
    assert_eq!(ask(&engine, with("", &[image(1)])).await.1, hits(64), "the same image");
    let came = came.lock().unwrap();
    let adapters: Vec<_> = came.iter().map(|came| came.adapter.as_deref()).collect();
    assert_eq!(adapters[..4], [None, Some("cats"), Some("dogs"), Some("cats")]);
    let contents = came[4..].iter().map(|came| came.passages[0].content.unwrap().0);
    assert_eq!(contents.collect::<Vec<_>>(), [1, 2, 1]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rejects_unknown_adapters_and_passages() {
    let came = Arc::default();
    let engine = start(Knowing::new(&came), None);
    let birds = Generate { adapter: "birds".to_owned(), ..Generate::new(prompt(1), 4) };
    let error = engine.submit(birds).await.unwrap_err();
    assert_eq!(error.to_string(), "the model has no adapter 'birds': it has cats, dogs");
    let plain = start(Threaded::new(ToyModel::default()), None);
    let cats = Generate { adapter: "cats".to_owned(), ..Generate::new(prompt(1), 4) };
    let error = plain.submit(cats).await.unwrap_err();
    assert_eq!(error.to_string(), "the model has no adapter 'cats': it has none");
    let passage = Passage { start: 0, end: 4, content: None, is_whole: true };
    let passages = Generate { passages: vec![passage], ..Generate::new(prompt(1), 4) };
    assert_eq!(plain.submit(passages).await.unwrap_err(), SubmitError::Passages);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn new_weights_hit_no_old_page_on_any_tier() {
    let (old, new) = (ToyModel { weights: 1 }, ToyModel { weights: 2 });
    let page_bytes = old.kv_layout().pages(PAGE_SIZE).unwrap().bytes();
    let store: Arc<dyn Store> =
        Arc::new(MemoryStore::new(MemoryConfig::new(64 << 20, page_bytes)).unwrap());
    let engine = start(Threaded::new(old), Some(store));
    let generate = || Generate::new(prompt(1), 4);
    assert_eq!(ask(&engine, generate()).await.0, old.answer(&prompt(1), 4));
    figures_when(&engine, "the backup", |figures| figures.scheduler.backups.sound_pages >= 5).await;
    engine.replace_weights(Box::new(new)).await.unwrap();
    assert_eq!(ask(&engine, generate()).await, (new.answer(&prompt(1), 4), Hits::default()));
    // After a return to the old weights, their pages in L3 are hits again.
    engine.replace_weights(Box::new(old)).await.unwrap();
    let (tokens, hits) = ask(&engine, generate()).await;
    assert_eq!(tokens, old.answer(&prompt(1), 4));
    assert_eq!(hits, Hits { l3_tokens: 64, ..Hits::default() });
}

/// Waits for a future that needs steps, and permits them one by one.
async fn stepping<T>(permits: &SyncSender<()>, awaited: impl Future<Output = T>) -> T {
    let mut awaited = pin!(awaited);
    loop {
        match tokio::time::timeout(Duration::from_millis(1), &mut awaited).await {
            Ok(came) => return came,
            Err(_) => drop(permits.try_send(())),
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn answers_continue_with_new_weights() {
    let models = [1, 2, 3].map(|weights| ToyModel { weights });
    let (permits, permitted) = sync_channel(1);
    let inner = Threaded::new(models[0]);
    let model = Knowing { inner, came: Arc::default(), permits: Some(permitted) };
    let engine = start(model, None);
    let mut asked = Vec::new();
    for seed in 0..4 {
        asked.push(engine.submit(Generate::new(prompt(seed), 400)).await.unwrap());
    }
    let mut answers = vec![Vec::new(); asked.len()];
    for (model, tokens) in [(models[1], 50), (models[2], 150)] {
        for (generation, answer) in asked.iter_mut().zip(&mut answers) {
            while answer.len() < tokens {
                if let Some(Update::Token(token)) = stepping(&permits, generation.next()).await {
                    answer.push(token);
                }
            }
        }
        stepping(&permits, engine.replace_weights(Box::new(model))).await.unwrap();
    }
    drop(permits);
    for (generation, answer) in asked.iter_mut().zip(&mut answers) {
        while let Some(update) = generation.next().await {
            if let Update::Token(token) = update {
                answer.push(token);
            }
        }
    }
    for (seed, answer) in (0..).zip(&answers) {
        // Number of tokens that each model has chosen in turn.
        let mut text = prompt(seed);
        for model in models {
            let left = &answer[text.len() - 80..];
            let chosen = model.answer(&text, left.len());
            let same = chosen.iter().zip(left).take_while(|(chosen, token)| chosen == token);
            let same = same.count();
            assert!(same >= 50, "model {} chose {same} tokens", model.weights);
            text.extend(&left[..same]);
        }
        assert_eq!(text.len(), 480, "all tokens were chosen by one of them");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn refused_weights_change_nothing() {
    let engine = start(Threaded::new(ToyModel::default()), None);
    let generate = || Generate::new(prompt(1), 4);
    let (tokens, _) = ask(&engine, generate()).await;
    let error = engine.replace_weights(Box::new("of another kind")).await.unwrap_err();
    assert_eq!(error.to_string(), "the weights were not replaced: it takes a `ToyModel`");
    let again = Hits { device_tokens: 64, ..Hits::default() };
    assert_eq!(ask(&engine, generate()).await, (tokens, again));
}
