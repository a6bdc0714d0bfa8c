//! How long the GPU waits between steps.

#![allow(unsafe_code)]

use std::sync::Arc;
use std::time::{Duration, Instant};

use cudarc::driver::{result, sys};
use futures_util::future::join_all;
use parking_lot::Mutex;
use terrace_cuda::driver::{Priority, Stream};
use terrace_cuda::{Context, CudaError, CudaFence, CudaLlama, CudaMemory, CudaTicket};
use terrace_engine::{
    Batch, Engine, KvLayout, Model, ModelError, StepFigures, StepLimits, StepTicket,
};
use terrace_kit::Dice;
use terrace_scheduler::Token;

use crate::Done;
use crate::engine::{PAGE_SIZE, Server, Sizes, runtime};
use crate::figures::decode_ahead;
use crate::table::Table;
use crate::world::{World, eight_billion, greedy};

const ROWS: u32 = 64;
const PROMPT: u32 = 1024;
const NEW_TOKENS: u32 = 300;
/// Steps of this many are measured, when all rows decode.
const MEASURED: u32 = 200;

/// The share of time in which the GPU waits while 64 requests decode, with two steps in flight.
pub(crate) fn gaps(context: &Arc<Context>, table: &mut Table) -> Done {
    let ends = Arc::new(Ends::new(context)?);
    let model =
        Watched { model: CudaLlama::random(context, &eight_billion())?, ends: ends.clone() };
    let (told, interval) = runtime()?.block_on(through_engine(context, model, &ends))?;
    drop(ends);
    // The same steps by hand, which are launched as soon as there is room for them.
    let limits = StepLimits { page_size: PAGE_SIZE, rows: ROWS, tokens_max: 512 };
    let model = CudaLlama::random(context, &eight_billion())?;
    let mut world = World::new(context, model, limits, PROMPT + NEW_TOKENS)?;
    (0..ROWS).for_each(|row| world.come(row, greedy(), &[]));
    let (alone, _) = decode_ahead(&mut world, ROWS, PROMPT + 40, MEASURED)?;
    let by_events = 1.0 - alone / interval;
    let what = "GPU waits between decode steps, 64 rows, as it is told";
    table.figure(what, &format!("{:.1} %", 100.0 * told), "1 %", told <= 0.01);
    let what = "the same, by the times of steps on the GPU";
    let found = format!("{:.1} % ({interval:.2} ms, alone {alone:.2})", 100.0 * by_events);
    table.figure(what, &found, "1 %", by_events <= 0.01);
    Ok(())
}

/// The share that the engine tells, and from the end of one decode step to that of the next in milliseconds.
async fn through_engine(
    context: &Arc<Context>,
    model: Watched,
    ends: &Ends,
) -> Result<(f64, f64), Box<dyn std::error::Error>> {
    let sizes = Sizes {
        device_tokens: ROWS * (PROMPT + NEW_TOKENS + PAGE_SIZE),
        host_tokens: 0,
        step_tokens: 8192,
        canary: None,
    };
    let server = Server::start_with(context, model, sizes, None)?;
    let mut dice = Dice::new(9);
    let vocabulary = eight_billion().vocabulary;
    let prompts: Vec<Vec<Token>> =
        (0..ROWS).map(|_| dice.tokens(PROMPT as usize, vocabulary)).collect();
    let answers = join_all(prompts.iter().map(|prompt| server.ask_only(prompt, NEW_TOKENS)));
    let watch = async {
        wait_for_steps(&server.engine, ends, 40).await?;
        let before = figures(&server.engine).await?;
        wait_for_steps(&server.engine, ends, 40 + MEASURED as usize).await?;
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
    Ok((told?, ends.interval()?))
}

async fn figures(engine: &Engine) -> Result<StepFigures, &'static str> {
    Ok(engine.figures().await.ok_or("the engine has ended")?.steps)
}

/// Waits until so many steps have been launched in which all rows decode.
async fn wait_for_steps(engine: &Engine, ends: &Ends, steps: usize) -> Result<(), &'static str> {
    let began = Instant::now();
    while ends.points.lock().len() < steps {
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

/// A model of whose steps the times on the GPU are known.
struct Watched {
    model: CudaLlama,
    ends: Arc<Ends>,
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
        if batch.spans.len() == ROWS as usize && batch.tokens.len() == ROWS as usize {
            let noted = self.ends.note(&ticket.fence());
            noted.map_err(|error| ModelError(error.to_string()))?;
        }
        Ok(ticket)
    }
}

/// When steps have ended, by events of a stream that does nothing else.
struct Ends {
    context: Arc<Context>,
    stream: Stream,
    points: Mutex<Vec<Point>>,
}

struct Point(sys::CUevent);

// SAFETY: it is a handle, which any thread may use.
unsafe impl Send for Point {}

impl Ends {
    fn new(context: &Arc<Context>) -> Result<Self, CudaError> {
        let stream = context.create_stream(Priority::High)?;
        Ok(Self { context: context.clone(), stream, points: Mutex::default() })
    }

    /// Notes the moment at which a fence is passed.
    fn note(&self, fence: &CudaFence) -> Result<(), Box<dyn std::error::Error>> {
        fence.wait_on(self.stream)?;
        let event = result::event::create(sys::CUevent_flags::CU_EVENT_DEFAULT)?;
        self.points.lock().push(Point(event));
        // SAFETY: both exist until this is dropped.
        unsafe { result::event::record(event, self.stream.raw())? };
        Ok(())
    }

    /// From one end to the next in milliseconds: the mean over the steps that are measured.
    fn interval(&self) -> Result<f64, Box<dyn std::error::Error>> {
        self.context.bind()?;
        // SAFETY: the stream exists until this is dropped.
        unsafe { result::stream::synchronize(self.stream.raw())? };
        let points = self.points.lock();
        let (first, last) = (&points[40], &points[40 + MEASURED as usize - 1]);
        // SAFETY: both were recorded, and the stream has passed them.
        let milliseconds = unsafe { result::event::elapsed(first.0, last.0)? };
        Ok(f64::from(milliseconds) / f64::from(MEASURED - 1))
    }
}

impl Drop for Ends {
    fn drop(&mut self) {
        if self.context.bind().is_ok() {
            for point in self.points.get_mut().drain(..) {
                // SAFETY: nobody uses it any more.
                let _ = unsafe { result::event::destroy(point.0) };
            }
            // SAFETY: as above.
            let _ = unsafe { result::stream::destroy(self.stream.raw()) };
        }
    }
}
