//! The thread that the model runs on.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use terrace_scheduler::{Plan, RequestId, StepId, Token};
use xxhash_rust::xxh3::xxh3_64;

use crate::batch::{Batch, PageTable, Span};
use crate::device::Device;
use crate::happening::{Happening, Happenings};
use crate::logits::Logits;
use crate::model::{Model, ModelError};
use crate::sampling::grammar::Preparer;
use crate::sampling::logprobs::{Logprobs, PromptScores, Scorer};
use crate::sampling::shaping::{GoesOn, Shaper};
use crate::sampling::{Sampler, Sampling};

/// A step on its way to the model and back. Its memory is used again for the next one.
#[derive(Debug)]
pub(crate) struct StepJob {
    pub(crate) step: StepId,
    /// The plan of the step, for the rows that change.
    pub(crate) plan: Plan,
    pub(crate) spans: Vec<Span>,
    pub(crate) tokens: Vec<Token>,
    /// What the logits are for, in the order of the spans that want some.
    pub(crate) wanted: Vec<Wanted>,
    /// What came of it; if all went well, every token that was to be chosen is.
    pub(crate) result: Result<(), ModelError>,
    pub(crate) could_begin_at: Instant,
    pub(crate) model_time: Duration,
    pub(crate) ended_at: Instant,
}

/// What the logits of a request are for.
#[derive(Debug)]
pub(crate) struct Wanted {
    pub(crate) request: RequestId,
    /// How many rows of logits there are.
    pub(crate) rows: usize,
    /// Whether a token is to be chosen by the last of them.
    pub(crate) produces: bool,
    pub(crate) sampling: Sampling,
    /// How many the request has produced before.
    pub(crate) index: u32,
    pub(crate) checksum: bool,
    /// Of how many of the likeliest tokens to tell the log-probability, if it is wanted at all.
    pub(crate) logprobs: Option<u32>,
    /// What changes logits before a token is chosen by them; lent by the request.
    pub(crate) shaper: Option<Box<Shaper>>,
    /// What the prompt's tokens are scored in; lent by the request.
    pub(crate) prompt_scores: Option<Box<PromptScores>>,
    /// What came of it.
    pub(crate) chosen: Option<Chosen>,
}

/// A token that was chosen.
#[derive(Debug)]
pub(crate) struct Chosen {
    pub(crate) token: Token,
    /// Of the logits, if it was wanted.
    pub(crate) checksum: u64,
    pub(crate) logprobs: Option<Box<Logprobs>>,
    pub(crate) goes_on: GoesOn,
}

impl StepJob {
    pub(crate) fn new() -> Self {
        let now = Instant::now();
        Self {
            step: StepId(0),
            plan: Plan::default(),
            spans: Vec::new(),
            tokens: Vec::new(),
            wanted: Vec::new(),
            result: Ok(()),
            could_begin_at: now,
            model_time: Duration::ZERO,
            ended_at: now,
        }
    }
}

/// The way to the model's thread, which ends when this is dropped.
#[derive(Debug)]
pub(crate) struct Stepper {
    jobs: mpsc::Sender<Box<StepJob>>,
}

impl Stepper {
    pub(crate) fn spawn<M, D>(
        model: M,
        device: Arc<D>,
        table: PageTable,
        happenings: Happenings,
    ) -> std::io::Result<Self>
    where
        D: Device,
        M: Model<Memory = D::Memory>,
    {
        let (jobs, receiver) = mpsc::channel::<Box<StepJob>>();
        let (chooser, preparer, rows) = Default::default();
        let mut thread = ModelThread { model, device, table, chooser, preparer, rows };
        std::thread::Builder::new().name("terrace-model".to_owned()).spawn(move || {
            for mut job in receiver {
                thread.run(&mut job);
                happenings.send(Happening::StepEnded(job));
            }
        })?;
        Ok(Self { jobs })
    }

    pub(crate) fn start(&self, job: Box<StepJob>) {
        self.jobs.send(job).expect("the model's thread lives as long as its driver");
    }
}

struct ModelThread<M, D> {
    model: M,
    device: Arc<D>,
    table: PageTable,
    chooser: Chooser,
    preparer: Preparer,
    /// Memory for logits.
    rows: Vec<f32>,
}

/// Makes of logits what is wanted.
#[derive(Debug, Default)]
struct Chooser {
    sampler: Sampler,
    scorer: Scorer,
    /// Memory for logits that are changed.
    shaped: Vec<f32>,
}

impl Chooser {
    /// Takes a row of logits, the last of a request's or one before it.
    fn take(&mut self, wanted: &mut Wanted, is_last: bool, logits: &[f32]) {
        if let Some(scores) = &mut wanted.prompt_scores {
            scores.take(&mut self.scorer, logits);
        }
        if wanted.produces && is_last {
            wanted.chosen = Some(self.choose(wanted, logits));
        }
    }

    fn choose(&mut self, wanted: &Wanted, logits: &[f32]) -> Chosen {
        let (shaped, goes_on) = match &wanted.shaper {
            Some(shaper) => {
                self.shaped.clear();
                self.shaped.extend_from_slice(logits);
                let goes_on = shaper.apply(&mut self.shaped);
                (&*self.shaped, goes_on)
            }
            None => (logits, GoesOn::Yes),
        };
        let token = self.sampler.choose(shaped, &wanted.sampling, wanted.index);
        Chosen {
            token,
            checksum: if wanted.checksum { checksum(logits) } else { 0 },
            // Of what the model said, not of what was made of it.
            logprobs: wanted.logprobs.map(|top| Box::new(self.scorer.score(logits, token, top))),
            goes_on,
        }
    }
}

impl<M, D> ModelThread<M, D>
where
    D: Device,
    M: Model<Memory = D::Memory>,
{
    fn run(&mut self, job: &mut StepJob) {
        // A model that panics has failed at this step; the others are owed an answer.
        job.result = catch_unwind(AssertUnwindSafe(|| self.compute(job)))
            .unwrap_or_else(|panic| Err(ModelError(message(&*panic))));
        self.device.step_ended(job.step);
        job.ended_at = Instant::now();
    }

    fn compute(&mut self, job: &mut StepJob) -> Result<(), ModelError> {
        let Self { model, device, table, chooser, preparer, rows } = self;
        let StepJob { plan, spans, tokens, wanted, model_time, .. } = job;
        table.apply(plan);
        for wanted in wanted.iter_mut() {
            wanted.chosen = None;
            if let Some(shaper) = wanted.shaper.as_ref().filter(|_| wanted.produces) {
                shaper.prepare(preparer);
            }
        }
        let rows_wanted: usize = wanted.iter().map(|wanted| wanted.rows).sum();
        let mut next = wanted.iter_mut();
        let mut current = next.next();
        let mut taken = 0;
        let mut take = |logits: &[f32]| {
            let Some(wanted) = &mut current else { return };
            taken += 1;
            let is_last = taken == wanted.rows;
            chooser.take(wanted, is_last, logits);
            if is_last {
                (current, taken) = (next.next(), 0);
            }
        };
        let mut logits = Logits::new(model.vocabulary(), rows, &mut take);
        let batch = Batch { spans, tokens, table };
        let began = Instant::now();
        let computed = model.forward(device.memory(), &batch, &mut logits);
        *model_time = began.elapsed().saturating_sub(logits.time_taking());
        computed?;
        match logits.taken() {
            found if found == rows_wanted => Ok(()),
            found => Err(ModelError(format!("{found} rows of logits instead of {rows_wanted}"))),
        }
    }
}

/// A checksum of the bits of logits, whatever the machine's byte order.
fn checksum(logits: &[f32]) -> u64 {
    let bytes: Vec<u8> = logits.iter().flat_map(|logit| logit.to_le_bytes()).collect();
    xxh3_64(&bytes)
}

fn message(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
    text.or_else(|| panic.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "it panicked".to_owned())
}
