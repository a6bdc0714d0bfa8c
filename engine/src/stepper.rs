//! The threads that launch the model's steps and wait for them.

use std::any::Any;
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use terrace_scheduler::{RequestId, StepId};
use xxhash_rust::xxh3::xxh3_64;

use crate::batch::Batch;
use crate::device::CopyProgress;
use crate::message::{DriverMessage, DriverSender};
use crate::model::{Model, ModelError, NewWeights, StepTicket, WeightsError};
use crate::sampling::chooser::Output;
use crate::sampling::grammar::Preparer;

/// A step that is passed to the model and back. Its memory is reused.
#[derive(Debug)]
pub(crate) struct StepJob {
    pub(crate) step: StepId,
    pub(crate) batch: Arc<Batch>,
    /// Requests of the wanted outputs, in the batch's order.
    pub(crate) requests: Vec<RequestId>,
    /// Result of the step.
    pub(crate) result: Result<(), ModelError>,
    /// Outputs of a successful step, one for each request.
    pub(crate) outputs: Vec<Output>,
    /// Checksums of the logits of each output, if requested.
    pub(crate) checksums: Vec<u64>,
    pub(crate) could_begin_at: Instant,
    pub(crate) model_time: Duration,
    pub(crate) ended_at: Instant,
}

impl StepJob {
    pub(crate) fn new() -> Self {
        let now = Instant::now();
        Self {
            step: StepId(0),
            batch: Arc::default(),
            requests: Vec::new(),
            result: Ok(()),
            outputs: Vec::new(),
            checksums: Vec::new(),
            could_begin_at: now,
            model_time: Duration::ZERO,
            ended_at: now,
        }
    }

    /// Resets the job for another step.
    pub(crate) fn begin(&mut self, step: StepId, could_begin_at: Instant) {
        (self.step, self.could_begin_at) = (step, could_begin_at);
        // A model that still holds the batch keeps it.
        match Arc::get_mut(&mut self.batch) {
            Some(batch) => batch.clear(),
            None => self.batch = Arc::default(),
        }
        self.batch_mut().step = Some(step);
        self.requests.clear();
        self.outputs.clear();
        self.checksums.clear();
    }

    /// Returns the batch; valid until it is launched.
    pub(crate) fn batch_mut(&mut self) -> &mut Batch {
        Arc::get_mut(&mut self.batch).expect("no model has it before it is launched")
    }

    /// Returns the batch and the requests of its outputs; valid until it is launched.
    pub(crate) fn parts(&mut self) -> (&mut Batch, &mut Vec<RequestId>) {
        let batch = Arc::get_mut(&mut self.batch);
        (batch.expect("no model has it before it is launched"), &mut self.requests)
    }

    /// Marks the step as failed.
    fn fail(&mut self, error: ModelError) {
        self.result = Err(error);
        self.model_time = Duration::ZERO;
        self.ended_at = Instant::now();
    }
}

/// A job of the launching thread.
enum Job {
    Launch(Box<StepJob>),
    ReplaceWeights(NewWeights),
}

/// Channel to the launching thread. Dropping it ends that thread, and then the waiting thread.
pub(crate) struct Stepper<F> {
    jobs: mpsc::Sender<Job>,
    fences: Arc<Mutex<Fences<F>>>,
}

/// Fences of launched steps, oldest first.
struct Fences<F>(VecDeque<(StepId, F)>);

impl<F: Clone> Fences<F> {
    /// Returns the fence behind a step and all before it; drops older fences.
    fn behind(&mut self, step: StepId) -> Option<F> {
        while self.0.get(1).is_some_and(|(next, _)| *next <= step) {
            self.0.pop_front();
        }
        self.0.front().filter(|(first, _)| *first <= step).map(|(_, fence)| fence.clone())
    }
}

impl<F: Clone + Send + 'static> Stepper<F> {
    pub(crate) fn spawn<M>(model: M, messages: DriverSender) -> std::io::Result<Self>
    where
        M: Model<Fence = F>,
    {
        let fences = Arc::new(Mutex::new(Fences(VecDeque::new())));
        let (jobs, receiver) = mpsc::channel();
        let (launched, tickets) = mpsc::channel();
        let mut launcher =
            Launcher { model, preparer: Preparer::default(), unsent_rows: None, failed: false };
        let (launched_behind, heard) = (fences.clone(), messages.clone());
        std::thread::Builder::new().name("terrace-launch".to_owned()).spawn(move || {
            for job in receiver {
                let mut job = match job {
                    Job::Launch(job) => job,
                    Job::ReplaceWeights(weights) => {
                        heard.send(DriverMessage::WeightsReplaced(
                            launcher.replace_weights(weights),
                        ));
                        continue;
                    }
                };
                let ticket = launcher.launch(&mut job);
                if let Ok(ticket) = &ticket {
                    launched_behind.lock().0.push_back((job.step, ticket.fence()));
                }
                if launched.send((job, ticket)).is_err() {
                    return;
                }
            }
        })?;
        std::thread::Builder::new().name("terrace-steps".to_owned()).spawn(move || {
            for (mut job, ticket) in tickets {
                match ticket {
                    Ok(ticket) => finish(&mut job, ticket),
                    Err(error) => job.fail(error),
                }
                messages.send(DriverMessage::StepEnded(job));
            }
        })?;
        Ok(Self { jobs, fences })
    }

    pub(crate) fn start(&self, job: Box<StepJob>) {
        self.send(Job::Launch(job));
    }

    /// Makes the model replace its weights. No step is in flight.
    pub(crate) fn replace_weights(&self, weights: NewWeights) {
        self.send(Job::ReplaceWeights(weights));
    }

    fn send(&self, job: Job) {
        self.jobs.send(job).expect("the model's thread lives as long as its driver");
    }

    /// Returns the fence behind a launched step and all before it. Older fences are dropped.
    pub(crate) fn fence_behind(&self, step: StepId) -> Option<F> {
        self.fences.lock().behind(step)
    }
}

struct Launcher<M> {
    model: M,
    preparer: Preparer,
    /// Row changes of batches that could not be launched.
    unsent_rows: Option<Batch>,
    /// True if the last launch failed.
    failed: bool,
}

impl<M: Model> Launcher<M> {
    /// Replaces the weights, and returns the model's new fingerprint.
    fn replace_weights(&mut self, weights: NewWeights) -> Result<String, WeightsError> {
        let replace = AssertUnwindSafe(|| self.model.replace_weights(weights));
        let refused = |panic: Box<dyn Any + Send>| {
            let ModelError(text) = ModelError::of(&*panic);
            Err(WeightsError::Refused(text))
        };
        catch_unwind(replace).unwrap_or_else(refused)?;
        Ok(self.model.fingerprint())
    }

    fn launch(&mut self, job: &mut StepJob) -> Result<M::Ticket, ModelError> {
        if let Some(unsent_rows) = self.unsent_rows.take() {
            job.batch_mut().prepend_rows(unsent_rows);
        }
        let choices = job.batch.wanted.iter().filter_map(|wanted| wanted.choice.as_ref());
        let masks = choices.filter_map(|choice| choice.mask.as_ref());
        // Masks that wait for tokens come last, so that they do not delay others.
        let (ready, waiting): (Vec<_>, Vec<_>) = masks.partition(|mask| mask.is_ready());
        ready.into_iter().chain(waiting).for_each(|mask| self.preparer.start(mask.clone()));
        let launched = if self.failed && !job.batch.awaited.is_empty() {
            Err(ModelError("the previous step could not be launched".to_owned()))
        } else {
            let launch = AssertUnwindSafe(|| self.model.launch(&job.batch));
            catch_unwind(launch).unwrap_or_else(|panic| Err(ModelError::of(&*panic)))
        };
        self.failed = launched.is_err();
        if self.failed {
            self.unsent_rows = Some(job.batch.row_changes());
        }
        launched
    }
}

/// Waits for a step.
fn finish(job: &mut StepJob, ticket: impl StepTicket) {
    let finished = match catch_unwind(AssertUnwindSafe(|| ticket.finish())) {
        Ok(finished) => finished,
        Err(panic) => return job.fail(ModelError::of(&*panic)),
    };
    match finished.result {
        Ok(outputs) if outputs.len() == job.requests.len() => job.outputs = outputs,
        Ok(outputs) => {
            let (found, wanted) = (outputs.len(), job.requests.len());
            return job.fail(ModelError(format!("{found} outputs instead of {wanted}")));
        }
        Err(error) => return job.fail(error),
    }
    // The copies that a step has read are reported before its result.
    job.batch.arriving.iter().for_each(CopyProgress::wait_for_end);
    job.result = Ok(());
    job.model_time = finished.ended_at.saturating_duration_since(finished.began_at);
    job.ended_at = finished.ended_at;
    for output in &mut job.outputs {
        let logits = output.chosen.as_mut().and_then(|chosen| chosen.logits.take());
        job.checksums.push(logits.map_or(0, |logits| checksum(&logits)));
    }
}

/// Returns a checksum of the bits of logits, independent of byte order.
fn checksum(logits: &[f32]) -> u64 {
    let bytes: Vec<u8> = logits.iter().flat_map(|logit| logit.to_le_bytes()).collect();
    xxh3_64(&bytes)
}

#[cfg(test)]
mod tests {
    use terrace_scheduler::Slot;

    use super::*;
    use crate::batch::Awaited;
    use crate::layout::{KvLayout, KvType};
    use crate::model::{Finished, StepLimits};

    /// A model that fails launches on demand, and records departures.
    #[derive(Default)]
    struct Launches {
        fails: Vec<bool>,
        went: Vec<Vec<Slot>>,
    }

    struct Nothing;

    impl StepTicket for Nothing {
        type Fence = ();

        fn fence(&self) {}

        fn finish(self) -> Finished {
            unreachable!("the tests do not wait for a step")
        }
    }

    impl Model for Launches {
        type Memory = ();
        type Fence = ();
        type Ticket = Nothing;

        fn kv_layout(&self) -> KvLayout {
            KvLayout::keys_and_values(KvType::F32, 1, 1, 1)
        }

        fn vocabulary(&self) -> usize {
            1
        }

        fn positions_max(&self) -> u32 {
            1
        }

        fn fingerprint(&self) -> String {
            String::new()
        }

        fn begin(&mut self, (): &(), _limits: StepLimits) -> Result<(), ModelError> {
            Ok(())
        }

        fn launch(&mut self, batch: &Arc<Batch>) -> Result<Nothing, ModelError> {
            assert!(!self.fails.remove(0), "a model panics");
            self.went.push(batch.went.clone());
            Ok(Nothing)
        }
    }

    #[test]
    fn repeats_row_changes_of_a_failed_launch() {
        let model = Launches { fails: vec![true, false, false], ..Launches::default() };
        let preparer = Preparer::default();
        let mut launcher = Launcher { model, preparer, unsent_rows: None, failed: false };
        let mut launch = |slot, awaits: bool| {
            let mut job = StepJob::new();
            job.begin(StepId(slot), Instant::now());
            job.batch_mut().went.push(Slot(slot as u32));
            if awaits {
                job.batch_mut().awaited.push(Awaited { token: 0, output: 0 });
            }
            launcher.launch(&mut job).map(|Nothing| ())
        };
        assert!(launch(1, false).is_err());
        assert!(launch(2, true).is_err(), "what it awaits never comes");
        assert!(launch(3, false).is_ok());
        assert!(launch(4, true).is_ok());
        assert_eq!(launcher.model.went, [vec![Slot(1), Slot(2), Slot(3)], vec![Slot(4)]]);
    }

    #[test]
    fn fence_covers_its_step_and_all_before() {
        let launched = [1, 2, 4].map(|step| (StepId(step), step));
        let mut fences = Fences(VecDeque::from(launched));
        assert_eq!(fences.behind(StepId(0)), None, "nothing was launched");
        assert_eq!(fences.behind(StepId(1)), Some(1));
        // The third step could not be launched.
        assert_eq!(fences.behind(StepId(3)), Some(2));
        assert_eq!(fences.0.len(), 2, "what is before is forgotten");
        assert_eq!(fences.behind(StepId(9)), Some(4));
        assert_eq!(fences.behind(StepId(9)), Some(4), "the last is kept");
    }
}
