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
use crate::model::{Model, ModelError};
use crate::sampling::{Sampler, Sampling};

/// A step on its way to the model and back. Its memory is used again for the next one.
#[derive(Debug)]
pub(crate) struct StepJob {
    pub(crate) step: StepId,
    /// The plan of the step, for the rows that change.
    pub(crate) plan: Plan,
    pub(crate) spans: Vec<Span>,
    pub(crate) tokens: Vec<Token>,
    /// Who gets a token, in the order of the spans that want logits.
    pub(crate) wanted: Vec<Wanted>,
    /// What came of it; then one token for each that was wanted.
    pub(crate) result: Result<(), ModelError>,
    pub(crate) chosen: Vec<Chosen>,
    pub(crate) could_begin_at: Instant,
    pub(crate) model_time: Duration,
    pub(crate) ended_at: Instant,
}

/// A token that is to be chosen.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Wanted {
    pub(crate) request: RequestId,
    pub(crate) sampling: Sampling,
    /// How many the request has produced before.
    pub(crate) index: u32,
    pub(crate) checksum: bool,
}

/// A token that was chosen.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Chosen {
    pub(crate) token: Token,
    /// Of the logits, if it was wanted.
    pub(crate) checksum: u64,
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
            chosen: Vec::new(),
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
        let mut thread =
            ModelThread { model, device, table, sampler: Sampler::default(), logits: Vec::new() };
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
    sampler: Sampler,
    logits: Vec<f32>,
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
        self.table.apply(&job.plan);
        self.logits.clear();
        job.chosen.clear();
        let batch = Batch { spans: &job.spans, tokens: &job.tokens, table: &self.table };
        let began = Instant::now();
        let computed = self.model.forward(self.device.memory(), &batch, &mut self.logits);
        job.model_time = began.elapsed();
        computed?;

        let (vocabulary, rows) = (self.model.vocabulary(), job.wanted.len());
        if self.logits.len() != rows * vocabulary {
            let found = self.logits.len();
            return Err(ModelError(format!("{found} logits for {rows} x {vocabulary}")));
        }
        for (wanted, logits) in job.wanted.iter().zip(self.logits.chunks_exact(vocabulary)) {
            job.chosen.push(Chosen {
                token: self.sampler.choose(logits, &wanted.sampling, wanted.index),
                checksum: if wanted.checksum { checksum(logits) } else { 0 },
            });
        }
        Ok(())
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
