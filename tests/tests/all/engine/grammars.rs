//! Answers with grammars, with steps launched ahead.

use std::sync::atomic::{AtomicUsize, Ordering};

use terrace_engine::{Batch, Model, ModelError, StepLimits, ThreadedTicket};

use super::*;

/// A model that counts the tokens that were launched before they were known.
struct Watched {
    inner: Threaded<ToyModel>,
    awaited: Arc<AtomicUsize>,
}

impl Model for Watched {
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

    fn begin(&mut self, memory: &CpuMemory, limits: StepLimits) -> Result<(), ModelError> {
        self.inner.begin(memory, limits)
    }

    fn launch(&mut self, batch: &Arc<Batch>) -> Result<ThreadedTicket, ModelError> {
        self.awaited.fetch_add(batch.awaited.len(), Ordering::Relaxed);
        self.inner.launch(batch)
    }
}

/// Two steps are in flight even if a grammar must consume each token before the next is chosen.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn step_is_launched_before_a_grammar_consumes_the_previous_token() {
    const TOKENS: u32 = 400;
    let mut config = config();
    config.batch.steps_in_flight_max = 2;
    let awaited = Arc::<AtomicUsize>::default();
    let inner = Threaded::new(ToyModel::default());
    let model = Watched { inner, awaited: awaited.clone() };
    let engine = Engine::start(config, model, Arc::new(device(64, 0)), None).unwrap();
    let mut generate = Generate::new(prompt(1, 20), TOKENS);
    generate.grammar = Some(Box::new(Even { tokens: 0 }));
    let generation = engine.submit(generate).await.unwrap();
    let asker = tokio::spawn(heard(generation));
    // A plan while a step is in flight launches another.
    while !asker.is_finished() {
        engine.figures().await;
    }
    let answer = asker.await.unwrap();
    assert_eq!(answer.reason, EndReason::Length);
    assert!(answer.tokens.iter().all(|token| token.is_multiple_of(2)));
    let awaited = awaited.load(Ordering::Relaxed);
    assert!(awaited > 0, "no token was awaited");
}

/// Tokens that a grammar waits for may never arrive: the step fails, or the request is retracted or
/// cancelled.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn grammar_follows_its_answer_through_failed_steps() {
    const REQUESTS: u32 = 120;
    let generate = |number: u32| {
        let mut generate = Generate::new(prompt(number % 30, 5 + number % 60), 20 + number % 40);
        generate.grammar = Some(Box::new(Even { tokens: 0 }));
        if number % 3 == 1 {
            generate.sampling = Sampling { temperature: 1.0, seed: 5, ..Sampling::GREEDY };
            generate.shaping = Shaping { repetition_penalty: 1.5, ..Shaping::default() };
        }
        if number % 4 == 2 {
            generate.stop_tokens = (0..20).collect();
        }
        generate
    };
    let calm = start(device(256, 0), None);
    let mut expected = Vec::new();
    for number in 0..REQUESTS {
        let Answer { tokens, reason, .. } = ask_for(&calm, generate(number)).await;
        expected.push((tokens, reason));
    }
    let mut config = config();
    config.batch.steps_in_flight_max = 2;
    let model = Threaded::new(FlakyModel::new(ToyModel::default(), Chance::new(3), 25));
    let engine = Engine::start(config, model, Arc::new(device(16, 40)), None).unwrap();
    let mut askers = tokio::task::JoinSet::new();
    for number in 0..REQUESTS {
        let (engine, generate) = (engine.clone(), generate(number));
        askers.spawn(async move {
            let mut generation = engine.submit(generate).await.unwrap();
            if number % 5 == 0 {
                // Cancelled after a few updates.
                for _ in 0..number % 7 {
                    generation.next().await;
                }
                return None;
            }
            let Answer { tokens, reason, .. } = heard(generation).await;
            Some((number, tokens, reason))
        });
    }
    let answers = tokio::time::timeout(PATIENCE, askers.join_all()).await.expect("all are told");
    let mut failed = 0;
    for (number, tokens, reason) in answers.into_iter().flatten() {
        match reason {
            EndReason::Failed(FailReason::StepFailed) => failed += 1,
            _ => assert_eq!((tokens, reason), expected[number as usize], "request {number}"),
        }
    }
    let figures = engine.figures().await.unwrap();
    assert!(figures.steps.failed > 10 && failed < 20, "{failed} requests have failed");
    assert!(figures.scheduler.retractions > 0, "all of them fit");
    let drained = engine.shutdown(PATIENCE).await;
    assert_eq!((drained.aborted, drained.abandoned_transfers), (0, 0));
}
