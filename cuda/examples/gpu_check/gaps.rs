//! Idle time of the GPU between steps.

#![allow(unsafe_code)]

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use cudarc::driver::{result, sys};
use futures_util::future::join_all;
use parking_lot::Mutex;
use terrace_cuda::driver::{Priority, Stream};
use terrace_cuda::{
    Context, CudaConfig, CudaDevice, CudaError, CudaFence, CudaLlama, CudaMemory, CudaTicket,
};
use terrace_engine::{
    Batch, Device, Engine, KvLayout, Model, ModelError, StepFigures, StepLimits, StepTicket,
};
use terrace_kit::Dice;
use terrace_scheduler::Token;

use crate::Done;
use crate::engine::{PAGE_SIZE, Server, Sizes, runtime};
use crate::table::Table;
use crate::world::eight_billion;

const ROWS: u32 = 64;
const PROMPT: u32 = 1024;
const NEW_TOKENS: u32 = 300;
const STEP_TOKENS: u32 = 8192;
const DEVICE_TOKENS: u32 = ROWS * (PROMPT + NEW_TOKENS + PAGE_SIZE);
/// Number of measured steps in which all rows decode.
const MEASURED: usize = 200;
/// Number of warm-up steps before them.
const SKIPPED: usize = 40;

/// Measures the share of time in which the GPU idles while 64 requests decode, with two steps in
/// flight.
pub(crate) fn gaps(context: &Arc<Context>, table: &mut Table) -> Done {
    let model = Watched::new(context)?;
    let seen = model.seen.clone();
    let told = runtime()?.block_on(through_engine(context, model))?;
    let interval = seen.interval()?;
    let batches = std::mem::take(&mut *seen.batches.lock());
    drop(seen);
    let alone = by_hand(context, &batches)?;
    let by_events = 1.0 - alone / interval;
    let what = "GPU waits between decode steps, 64 rows, as it is told";
    table.figure(what, &format!("{:.1} %", 100.0 * told), "1 %", told <= 0.01);
    let what = "the same, by the times of steps on the GPU";
    let found = format!("{:.1} % ({interval:.2} ms, alone {alone:.2})", 100.0 * by_events);
    table.figure(what, &found, "1 %", by_events <= 0.01);
    Ok(())
}

/// Returns the share that the engine reports, and records its launches.
async fn through_engine(
    context: &Arc<Context>,
    model: Watched,
) -> Result<f64, Box<dyn std::error::Error>> {
    let sizes = Sizes {
        device_tokens: DEVICE_TOKENS,
        host_tokens: 0,
        step_tokens: STEP_TOKENS,
        canary: None,
    };
    let seen = model.seen.clone();
    let server = Server::start_with(context, model, sizes, None)?;
    let mut dice = Dice::new(9);
    let vocabulary = eight_billion().vocabulary;
    let prompts: Vec<Vec<Token>> =
        (0..ROWS).map(|_| dice.tokens(PROMPT as usize, vocabulary)).collect();
    let answers = join_all(prompts.iter().map(|prompt| server.ask_only(prompt, NEW_TOKENS)));
    let watch = async {
        wait_for_steps(&server.engine, &seen, SKIPPED).await?;
        let before = figures(&server.engine).await?;
        wait_for_steps(&server.engine, &seen, SKIPPED + MEASURED).await?;
        let after = figures(&server.engine).await?;
        let of_these = StepFigures {
            busy_us: after.busy_us - before.busy_us,
            model_us: after.model_us - before.model_us,
            ..after
        };
        Ok::<f64, Box<dyn std::error::Error>>(of_these.overhead_ratio())
    };
    let (answers, told) = tokio::join!(answers, watch);
    answers.into_iter().collect::<Result<Vec<()>, _>>()?;
    server.engine.shutdown(Duration::from_secs(10)).await;
    told
}

/// Returns the time from the end of one decode step to the next in milliseconds. It launches an
/// engine's steps as soon as there is room for them. Prompts are computed too, so that decodes read
/// the same numbers and draw the same power.
fn by_hand(
    context: &Arc<Context>,
    batches: &[Arc<Batch>],
) -> Result<f64, Box<dyn std::error::Error>> {
    let mut model = Watched::new(context)?;
    let layout = model.kv_layout().pages(PAGE_SIZE)?;
    let device_pages = DEVICE_TOKENS / PAGE_SIZE;
    let config = CudaConfig { device_pages, host_pages: 0, layout, canary: None, ways: None };
    let device = CudaDevice::new(context, config)?;
    let limits = StepLimits { page_size: PAGE_SIZE, rows: ROWS, tokens_max: STEP_TOKENS };
    model.begin(device.memory(), limits)?;
    let mut in_flight = VecDeque::new();
    for batch in batches {
        in_flight.push_back(model.launch(batch)?);
        if in_flight.len() == 2 {
            in_flight.pop_front().expect("there are two").finish().result?;
        }
    }
    in_flight.into_iter().try_for_each(|ticket| ticket.finish().result.map(drop))?;
    model.seen.interval()
}

async fn figures(engine: &Engine) -> Result<StepFigures, &'static str> {
    Ok(engine.figures().await.ok_or("the engine has ended")?.steps)
}

/// Waits until the given number of steps has been launched in which all rows decode.
async fn wait_for_steps(engine: &Engine, seen: &Seen, steps: usize) -> Result<(), &'static str> {
    let began = Instant::now();
    while seen.ends.lock().len() < steps {
        if figures(engine).await?.failed > 0 {
            return Err("a step has failed");
        }
        if began.elapsed() > Duration::from_secs(60) {
            return Err("not all rows decode together");
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    Ok(())
}

/// A model that records its steps.
struct Watched {
    model: CudaLlama,
    seen: Arc<Seen>,
}

impl Watched {
    fn new(context: &Arc<Context>) -> Result<Self, CudaError> {
        let model = CudaLlama::random(context, &eight_billion())?;
        Ok(Self { model, seen: Arc::new(Seen::new(context)?) })
    }
}

impl Model for Watched {
    type Memory = CudaMemory;
    type Fence = CudaFence;
    type Ticket = CudaTicket;

    fn kv_layout(&self) -> KvLayout {
        self.model.kv_layout()
    }

    fn vocabulary(&self) -> usize {
        self.model.vocabulary()
    }

    fn positions_max(&self) -> u32 {
        self.model.positions_max()
    }

    fn fingerprint(&self) -> String {
        self.model.fingerprint()
    }

    fn waits_for_layers(&self) -> bool {
        self.model.waits_for_layers()
    }

    fn begin(&mut self, memory: &CudaMemory, limits: StepLimits) -> Result<(), ModelError> {
        self.model.begin(memory, limits)
    }

    fn launch(&mut self, batch: &Arc<Batch>) -> Result<CudaTicket, ModelError> {
        let ticket = self.model.launch(batch)?;
        self.seen.batches.lock().push(batch.clone());
        if batch.spans.len() == ROWS as usize && batch.tokens.len() == ROWS as usize {
            let noted = self.seen.note_end(&ticket.fence());
            noted.map_err(|error| ModelError(error.to_string()))?;
        }
        Ok(ticket)
    }
}

/// Batches that a model was given, and the end times of steps in which all rows decode, recorded by
/// events of a separate stream.
struct Seen {
    context: Arc<Context>,
    stream: Stream,
    batches: Mutex<Vec<Arc<Batch>>>,
    ends: Mutex<Vec<Point>>,
}

struct Point(sys::CUevent);

// SAFETY: it is a handle, which any thread may use.
unsafe impl Send for Point {}

impl Seen {
    fn new(context: &Arc<Context>) -> Result<Self, CudaError> {
        let stream = context.create_stream(Priority::High)?;
        let (batches, ends) = (Mutex::default(), Mutex::default());
        Ok(Self { context: context.clone(), stream, batches, ends })
    }

    /// Records the time at which a fence passes.
    fn note_end(&self, fence: &CudaFence) -> Result<(), Box<dyn std::error::Error>> {
        fence.wait_on(self.stream)?;
        let event = result::event::create(sys::CUevent_flags::CU_EVENT_DEFAULT)?;
        self.ends.lock().push(Point(event));
        // SAFETY: both exist until this is dropped.
        unsafe { result::event::record(event, self.stream.raw())? };
        Ok(())
    }

    /// Returns the mean time between step ends in milliseconds, over the measured steps.
    fn interval(&self) -> Result<f64, Box<dyn std::error::Error>> {
        self.context.bind()?;
        // SAFETY: the stream exists until this is dropped.
        unsafe { result::stream::synchronize(self.stream.raw())? };
        let ends = self.ends.lock();
        let (first, last) = (&ends[SKIPPED], &ends[SKIPPED + MEASURED - 1]);
        // SAFETY: both were recorded, and the stream has passed them.
        let milliseconds = unsafe { result::event::elapsed(first.0, last.0)? };
        Ok(f64::from(milliseconds) / (MEASURED - 1) as f64)
    }
}

impl Drop for Seen {
    fn drop(&mut self) {
        if self.context.bind().is_ok() {
            for point in self.ends.get_mut().drain(..) {
                // SAFETY: the event is no longer used.
                let _ = unsafe { result::event::destroy(point.0) };
            }
            // SAFETY: as above.
            let _ = unsafe { result::stream::destroy(self.stream.raw()) };
        }
    }
}
