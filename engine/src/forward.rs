//! Models that compute a step synchronously, and the thread that turns them into launched steps.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc;
use std::time::Instant;

use terrace_scheduler::Token;

use crate::batch::{Batch, PageTable, Step};
use crate::cpu::CpuFence;
use crate::layout::KvLayout;
use crate::logits::Logits;
use crate::model::{Finished, Model, ModelError, NewWeights, StepLimits, StepTicket, WeightsError};
use crate::sampling::chooser::{Chooser, Output};

/// A model that computes logits synchronously. [`Threaded`] makes a [`Model`] of it.
///
/// The requirements of [`Model`] on KV and logits apply.
pub trait Forward: Send + 'static {
    /// Device memory that holds the KV.
    type Memory;

    /// Returns the KV layout of a page.
    fn kv_layout(&self) -> KvLayout;

    /// Returns the number of tokens in the vocabulary.
    fn vocabulary(&self) -> usize;

    /// Returns the length of the longest supported sequence.
    fn positions_max(&self) -> u32;

    /// Returns the fingerprint of model and weights; different weights have different fingerprints.
    fn fingerprint(&self) -> String;

    /// Replaces the weights and the fingerprint; see [`Model::replace_weights`].
    ///
    /// # Errors
    /// Fails if the weights are refused; the model then keeps its weights.
    fn replace_weights(&mut self, weights: NewWeights) -> Result<(), WeightsError> {
        drop(weights);
        Err(WeightsError::Refused("it cannot replace its weights".to_owned()))
    }

    /// Returns whether the model waits for each layer before it reads it
    /// ([`Step::wait_for_layer`]).
    fn waits_for_layers(&self) -> bool {
        false
    }

    /// Computes the spans of a step: writes the KV of their tokens to their pages, and adds to
    /// `logits` one row of [`Forward::vocabulary`] values for each token whose logits are wanted,
    /// in order.
    ///
    /// # Errors
    /// Fails if the step has no result. The engine may retry it.
    fn forward(
        &mut self,
        memory: &Self::Memory,
        step: &Step<'_>,
        logits: &mut Logits<'_>,
    ) -> Result<(), ModelError>;
}

/// A model that computes steps in order on a thread and chooses their tokens.
#[derive(Debug)]
pub struct Threaded<F> {
    kv_layout: KvLayout,
    vocabulary: usize,
    positions_max: u32,
    fingerprint: String,
    waits_for_layers: bool,
    /// The model, until the thread starts.
    forward: Option<F>,
    /// Channel to the thread, which ends when the channel is dropped.
    work: Option<mpsc::Sender<Job>>,
}

/// A job of the thread.
enum Job {
    Step(Launched),
    ReplaceWeights(NewWeights, mpsc::SyncSender<Result<String, WeightsError>>),
}

/// A launched step.
#[derive(Debug)]
struct Launched {
    batch: Arc<Batch>,
    fence: CpuFence,
    finished: mpsc::SyncSender<Finished>,
}

impl<F: Forward> Threaded<F> {
    /// Creates a model from `forward`.
    pub fn new(forward: F) -> Self {
        Self {
            kv_layout: forward.kv_layout(),
            vocabulary: forward.vocabulary(),
            positions_max: forward.positions_max(),
            fingerprint: forward.fingerprint(),
            waits_for_layers: forward.waits_for_layers(),
            forward: Some(forward),
            work: None,
        }
    }
}

impl<F> Model for Threaded<F>
where
    F: Forward,
    F::Memory: Clone + Send + 'static,
{
    type Memory = F::Memory;
    type Fence = CpuFence;
    type Ticket = ThreadedTicket;

    fn kv_layout(&self) -> KvLayout {
        self.kv_layout.clone()
    }

    fn vocabulary(&self) -> usize {
        self.vocabulary
    }

    fn positions_max(&self) -> u32 {
        self.positions_max
    }

    fn fingerprint(&self) -> String {
        self.fingerprint.clone()
    }

    fn replace_weights(&mut self, weights: NewWeights) -> Result<(), WeightsError> {
        let gone = || WeightsError::Refused("its thread is not running".to_owned());
        let (replaced, answer) = mpsc::sync_channel(1);
        let job = Job::ReplaceWeights(weights, replaced);
        self.work.as_ref().ok_or_else(gone)?.send(job).map_err(|_| gone())?;
        self.fingerprint = answer.recv().map_err(|_| gone())??;
        Ok(())
    }

    fn waits_for_layers(&self) -> bool {
        self.waits_for_layers
    }

    fn begin(&mut self, memory: &F::Memory, limits: StepLimits) -> Result<(), ModelError> {
        let already = || ModelError("it has already started".to_owned());
        let forward = self.forward.take().ok_or_else(already)?;
        let (jobs, receiver) = mpsc::channel();
        let mut worker = Worker {
            forward,
            memory: memory.clone(),
            table: PageTable::new(limits.rows, limits.page_size),
            chooser: Chooser::new(limits.rows),
            tokens: Vec::new(),
            logits: Vec::new(),
            chosen: None,
        };
        let work = move || {
            // The thread ends with the engine.
            for job in receiver {
                match job {
                    Job::Step(Launched { batch, fence, finished }) => {
                        let done = worker.run(&batch);
                        fence.pass();
                        // Released first, so that the waiting thread can reuse its memory.
                        drop(batch);
                        let _ = finished.send(done);
                    }
                    Job::ReplaceWeights(weights, replaced) => {
                        let forward = &mut worker.forward;
                        let done = forward.replace_weights(weights);
                        let _ = replaced.send(done.map(|()| forward.fingerprint()));
                    }
                }
            }
        };
        let spawned = std::thread::Builder::new().name("terrace-forward".to_owned()).spawn(work);
        spawned.map_err(|error| ModelError(format!("cannot start its thread: {error}")))?;
        self.work = Some(jobs);
        Ok(())
    }

    fn launch(&mut self, batch: &Arc<Batch>) -> Result<ThreadedTicket, ModelError> {
        let gone = || ModelError("its thread is not running".to_owned());
        let (finished, ticket) = mpsc::sync_channel(1);
        let fence = CpuFence::default();
        let step = Launched { batch: batch.clone(), fence: fence.clone(), finished };
        self.work.as_ref().ok_or_else(gone)?.send(Job::Step(step)).map_err(|_| gone())?;
        Ok(ThreadedTicket { fence, finished: ticket })
    }
}

/// A step of a [`Threaded`] model.
#[derive(Debug)]
pub struct ThreadedTicket {
    fence: CpuFence,
    finished: mpsc::Receiver<Finished>,
}

impl StepTicket for ThreadedTicket {
    type Fence = CpuFence;

    fn fence(&self) -> CpuFence {
        self.fence.clone()
    }

    fn finish(self) -> Finished {
        self.finished.recv().unwrap_or_else(|_| {
            let now = Instant::now();
            let result = Err(ModelError("its thread has ended".to_owned()));
            Finished { result, began_at: now, ended_at: now }
        })
    }
}

/// State of the thread.
struct Worker<F: Forward> {
    forward: F,
    memory: F::Memory,
    table: PageTable,
    chooser: Chooser,
    /// Buffer for tokens, some of which were awaited.
    tokens: Vec<Token>,
    /// Buffer for logits.
    logits: Vec<f32>,
    /// Tokens chosen by the step before, unless it failed.
    chosen: Option<Vec<Option<Token>>>,
}

impl<F: Forward> Worker<F> {
    fn run(&mut self, batch: &Batch) -> Finished {
        let began_at = Instant::now();
        self.table.apply(batch);
        self.chooser.tell(batch);
        let before = self.chosen.take();
        // A panic of the model fails this step only; later steps still get an answer.
        let compute = AssertUnwindSafe(|| self.compute(batch, before.as_deref()));
        let result = catch_unwind(compute).unwrap_or_else(|panic| Err(ModelError::of(&*panic)));
        if let Ok(outputs) = &result {
            let token = |output: &Output| output.chosen.as_ref().map(|chosen| chosen.token);
            self.chosen = Some(outputs.iter().map(token).collect());
        }
        Finished { result, began_at, ended_at: Instant::now() }
    }

    fn compute(
        &mut self,
        batch: &Batch,
        before: Option<&[Option<Token>]>,
    ) -> Result<Vec<Output>, ModelError> {
        let Self { forward, memory, table, chooser, tokens, logits, .. } = self;
        let tokens = match &*batch.awaited {
            [] => &*batch.tokens,
            awaited => {
                let failed = || ModelError("the previous step failed".to_owned());
                let before = before.ok_or_else(failed)?;
                let unknown = || ModelError("it waits for a token that was not sampled".to_owned());
                tokens.clear();
                tokens.extend_from_slice(&batch.tokens);
                for awaited in awaited {
                    let token = before.get(awaited.output).copied().flatten();
                    tokens[awaited.token] = token.ok_or_else(unknown)?;
                }
                &*tokens
            }
        };
        chooser.begin(batch);
        let vocabulary = forward.vocabulary();
        let mut take = |rows: &[f32]| chooser.take(batch, vocabulary, rows);
        let mut logits = Logits::new(vocabulary, logits, &mut take);
        let step = Step { spans: &batch.spans, tokens, table, arriving: &batch.arriving };
        forward.forward(memory, &step, &mut logits)?;
        chooser.end(batch)
    }
}

#[cfg(test)]
mod tests {
    use terrace_scheduler::Slot;

    use super::*;
    use crate::batch::{Arrival, Awaited, Choice, Span, Wanted};
    use crate::layout::KvType;
    use crate::sampling::grammar::Constraint;
    use crate::sampling::grammar::tests::Only;
    use crate::sampling::shaping::{Continuation, Shaping};
    use crate::sampling::{Choosing, Sampling};

    const VOCABULARY: usize = 10;

    /// A model that waits for a message before each step, which may make it fail, and answers with
    /// the successor of the last token of each span.
    struct Waits {
        words: mpsc::Receiver<Result<(), ModelError>>,
    }

    impl Forward for Waits {
        type Memory = ();

        fn kv_layout(&self) -> KvLayout {
            KvLayout::keys_and_values(KvType::F32, 1, 1, 1)
        }

        fn vocabulary(&self) -> usize {
            VOCABULARY
        }

        fn positions_max(&self) -> u32 {
            100
        }

        fn fingerprint(&self) -> String {
            "waits".to_owned()
        }

        fn forward(
            &mut self,
            (): &(),
            step: &Step<'_>,
            logits: &mut Logits<'_>,
        ) -> Result<(), ModelError> {
            self.words.recv().expect("a word")?;
            for span in step.spans {
                let next = *step.tokens_of(span).last().unwrap() as usize + 1;
                logits.add(1, |row| {
                    row.fill(0.0);
                    row[next] = 1.0;
                });
            }
            Ok(())
        }
    }

    fn model() -> (Threaded<Waits>, mpsc::Sender<Result<(), ModelError>>) {
        let (sender, words) = mpsc::channel();
        let mut model = Threaded::new(Waits { words });
        model.begin(&(), StepLimits { page_size: 4, rows: 4, tokens_max: 16 }).unwrap();
        (model, sender)
    }

    /// Creates a step of some rows, each with its token or the output that it awaits.
    fn batch(inputs: &[(u32, Result<Token, usize>)]) -> Arc<Batch> {
        let mut batch = Batch::default();
        for (place, &(slot, input)) in inputs.iter().enumerate() {
            let tokens = place..place + 1;
            batch.spans.push(Span { slot: Slot(slot), start: 0, tokens, logits: 1 });
            batch.tokens.push(input.unwrap_or(0));
            if let Err(output) = input {
                batch.awaited.push(Awaited { token: place, output });
            }
            let choice = Some(Choice { index: 0, mask: None });
            batch.wanted.push(Wanted { span: place, choice, scored: 0..0 });
        }
        Arc::new(batch)
    }

    /// Creates the first step of some rows.
    fn first_batch(inputs: &[(u32, Token)]) -> Arc<Batch> {
        let known: Vec<_> = inputs.iter().map(|&(slot, token)| (slot, Ok(token))).collect();
        let mut batch = batch(&known);
        let choosing = Arc::new(Choosing {
            sampling: Sampling::GREEDY,
            shaping: Shaping::default(),
            ends: Arc::new([]),
            prompt: Vec::new(),
            logprobs: None,
            logits: false,
        });
        let arrival = |&(slot, _): &(u32, Token)| Arrival::new(Slot(slot), choosing.clone());
        Arc::get_mut(&mut batch).unwrap().came = inputs.iter().map(arrival).collect();
        batch
    }

    fn tokens(finished: Finished) -> Result<Vec<Token>, ModelError> {
        let token = |output: Output| output.chosen.unwrap().token;
        finished.result.map(|outputs| outputs.into_iter().map(token).collect())
    }

    #[test]
    fn step_starts_from_the_token_of_the_previous_step() {
        let (mut model, words) = model();
        let first = model.launch(&first_batch(&[(0, 1), (1, 5)])).unwrap();
        // Both steps are launched before any is computed: the model waits for a message.
        let second = model.launch(&batch(&[(1, Err(1)), (0, Err(0))])).unwrap();
        let third = model.launch(&batch(&[(0, Err(1)), (1, Ok(2))])).unwrap();
        for _ in 0..3 {
            words.send(Ok(())).unwrap();
        }
        assert_eq!(tokens(first.finish()).unwrap(), [2, 6]);
        assert_eq!(tokens(second.finish()).unwrap(), [7, 3]);
        assert_eq!(tokens(third.finish()).unwrap(), [4, 3]);
    }

    /// Restricts a choice to the tokens that a grammar allows after `index` tokens.
    fn choose_by(batch: &mut Arc<Batch>, constraint: &Constraint, index: u32) {
        let choice = Some(Choice { index, mask: Some(constraint.mask(index)) });
        Arc::get_mut(batch).unwrap().wanted[0].choice = choice;
    }

    #[test]
    fn step_is_computed_before_its_grammar_consumes_the_previous_token() {
        let (mut model, words) = model();
        let text = vec![3, 8];
        let constraint = Constraint::new(Box::new(Only { text, end: 1, at: 0 }));
        let [mut first, mut second] = [first_batch(&[(0, 1)]), batch(&[(0, Err(0))])];
        choose_by(&mut first, &constraint, 0);
        choose_by(&mut second, &constraint, 1);
        let first = model.launch(&first).unwrap();
        let second = model.launch(&second).unwrap();
        words.send(Ok(())).unwrap();
        assert_eq!(tokens(first.finish()).unwrap(), [3]);
        // The model reads its next message when it computes; the step before has then ended.
        words.send(Ok(())).unwrap();
        constraint.push(3);
        assert_eq!(tokens(second.finish()).unwrap(), [8]);
        // A step whose choice was cancelled is waited for, and its result is not used.
        let mut third = batch(&[(0, Err(0))]);
        choose_by(&mut third, &constraint, 2);
        let third = model.launch(&third).unwrap();
        words.send(Ok(())).unwrap();
        drop(constraint);
        let outputs = third.finish().result.unwrap();
        let continuation = &outputs[0].chosen.as_ref().unwrap().continuation;
        assert!(matches!(continuation, Continuation::Failed(_)), "{continuation:?}");
    }

    #[test]
    fn failed_step_fails_the_step_that_awaits_it() {
        let (mut model, words) = model();
        let first = model.launch(&first_batch(&[(0, 1)])).unwrap();
        let second = model.launch(&batch(&[(0, Err(0))])).unwrap();
        let third = model.launch(&batch(&[(0, Ok(3))])).unwrap();
        words.send(Err(ModelError("no".to_owned()))).unwrap();
        words.send(Ok(())).unwrap();
        assert_eq!(tokens(first.finish()), Err(ModelError("no".to_owned())));
        assert!(tokens(second.finish()).is_err());
        assert_eq!(
            tokens(third.finish()).unwrap(),
            [4],
            "it came to its row in the step that failed"
        );
    }

    #[test]
    fn batch_of_an_ended_step_is_reusable() {
        let (mut model, words) = model();
        words.send(Ok(())).unwrap();
        let mut batch = first_batch(&[(0, 1)]);
        model.launch(&batch).unwrap().finish();
        assert!(Arc::get_mut(&mut batch).is_some());
    }
}
