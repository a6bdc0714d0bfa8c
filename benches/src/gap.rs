//! Idle time of a device between two steps of an engine, measured with a model that only takes
//! time.

use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use serde::Serialize;
use terrace_engine::{
    Batch, Chosen, Continuation, CpuDevice, CpuFence, CpuMemory, Engine, Finished, Generate,
    KvLayout, KvShape, Model, ModelError, Output, StepLimits, StepTicket, Update,
};
use terrace_scheduler::{Config, Token};

use crate::figures::{Distribution, nanos};

/// Parameters of the benchmark.
#[derive(Clone, Copy, Debug)]
pub struct GapWorkload {
    /// Number of running requests.
    pub running: u32,
    /// Largest number of steps in flight.
    pub in_flight: u32,
    /// Number of decode steps.
    pub steps: u32,
    /// Duration of a step on the device.
    pub step: Duration,
    /// Duration of a launch.
    pub launch: Duration,
}

/// Results of the benchmark.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct GapFigures {
    /// Number of steps with all requests.
    pub steps: usize,
    /// Time from the end of one step to the start of the next.
    pub gap_us: Distribution,
}

const PAGE_SIZE: u32 = 16;
const VOCABULARY: usize = 64;
const SHAPE: KvShape = KvShape { layers: 1, heads: 1, head_elements: 4 };

impl GapWorkload {
    /// Runs the benchmark.
    ///
    /// # Errors
    /// Fails if the system lacks resources.
    pub fn run(&self) -> Result<GapFigures, Box<dyn std::error::Error>> {
        let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
        runtime.block_on(self.measure())
    }

    async fn measure(&self) -> Result<GapFigures, Box<dyn std::error::Error>> {
        let ran = Ran::default();
        let model = IdleModel { workload: *self, ran: ran.clone(), device: None };
        let row_pages = (self.steps + 8).div_ceil(PAGE_SIZE) + 1;
        let layout = SHAPE.layout().pages(PAGE_SIZE)?;
        let device = CpuDevice::new(row_pages * self.running * 2, 0, layout)?;
        let mut config = Config::builder().page_size(PAGE_SIZE).build()?;
        config.batch.running_max = self.running;
        config.batch.steps_in_flight_max = self.in_flight;
        let engine = Engine::start(config, model, Arc::new(device), None)?;
        let mut answers = Vec::new();
        for request in 0..self.running {
            let prompt = vec![request % VOCABULARY as Token, request / VOCABULARY as Token, 1];
            answers.push(engine.submit(Generate::new(prompt, self.steps)).await?);
        }
        for mut answer in answers {
            while let Some(update) = answer.next().await {
                if let Update::Ended(_) = update {
                    break;
                }
            }
        }
        engine.shutdown(Duration::from_secs(10)).await;
        Ok(figures(&ran.0.lock(), self.running as usize))
    }
}

/// Returns the gaps between steps of all requests.
fn figures(ran: &[Step], running: usize) -> GapFigures {
    let full = |step: &Step| step.requests == running;
    let pairs = ran.windows(2).filter(|pair| pair.iter().all(full));
    let gaps: Vec<u64> =
        pairs.map(|pair| nanos(pair[1].began.saturating_duration_since(pair[0].ended))).collect();
    GapFigures { steps: gaps.len(), gap_us: Distribution::of(gaps) }
}

/// A completed step.
#[derive(Clone, Copy, Debug)]
struct Step {
    requests: usize,
    began: Instant,
    ended: Instant,
}

#[derive(Clone, Debug, Default)]
struct Ran(Arc<Mutex<Vec<Step>>>);

/// A model that computes nothing and takes time: its device is one thread.
#[derive(Debug)]
struct IdleModel {
    workload: GapWorkload,
    ran: Ran,
    device: Option<mpsc::Sender<Launched>>,
}

#[derive(Debug)]
struct Launched {
    batch: Arc<Batch>,
    finished: mpsc::SyncSender<Finished>,
}

#[derive(Debug)]
struct Ticket(mpsc::Receiver<Finished>);

impl StepTicket for Ticket {
    type Fence = CpuFence;

    /// Nothing is copied, so the fence has passed.
    fn fence(&self) -> CpuFence {
        CpuFence::default()
    }

    fn finish(self) -> Finished {
        self.0.recv().expect("the device runs while steps are launched")
    }
}

impl Model for IdleModel {
    type Memory = CpuMemory;
    type Fence = CpuFence;
    type Ticket = Ticket;

    fn kv_layout(&self) -> KvLayout {
        SHAPE.layout()
    }

    fn vocabulary(&self) -> usize {
        VOCABULARY
    }

    fn positions_max(&self) -> u32 {
        1 << 20
    }

    fn fingerprint(&self) -> String {
        "idler".to_owned()
    }

    fn begin(&mut self, _memory: &CpuMemory, _limits: StepLimits) -> Result<(), ModelError> {
        let (device, launched) = mpsc::channel::<Launched>();
        let (step, ran) = (self.workload.step, self.ran.clone());
        std::thread::spawn(move || {
            for Launched { batch, finished } in launched {
                let began_at = Instant::now();
                std::thread::sleep(step);
                let ended_at = Instant::now();
                let requests = batch.spans.len();
                ran.0.lock().push(Step { requests, began: began_at, ended: ended_at });
                let outputs = batch.wanted.iter().map(|_| output()).collect();
                drop(batch);
                // The engine may have ended.
                let _ = finished.send(Finished { result: Ok(outputs), began_at, ended_at });
            }
        });
        self.device = Some(device);
        Ok(())
    }

    fn launch(&mut self, batch: &Arc<Batch>) -> Result<Ticket, ModelError> {
        spin(self.workload.launch);
        let (finished, ticket) = mpsc::sync_channel(1);
        let device = self.device.as_ref().expect("it has begun");
        let step = Launched { batch: batch.clone(), finished };
        device.send(step).map_err(|_| ModelError("its device has ended".to_owned()))?;
        Ok(Ticket(ticket))
    }
}

fn output() -> Output {
    let chosen = Chosen { token: 0, continuation: Continuation::Yes, logprobs: None, logits: None };
    Output { chosen: Some(chosen), scores: Vec::new() }
}

/// Keeps a processor busy, as a launch does.
fn spin(time: Duration) {
    let until = Instant::now() + time;
    while Instant::now() < until {
        std::hint::spin_loop();
    }
}
