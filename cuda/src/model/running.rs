//! A started model: the state of its rows, and the submission of steps to the GPU.

mod probe;

use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use parking_lot::Mutex;
use terrace_engine::{Batch, ModelError, PageTable, StepLimits};
use terrace_model::Shape;

use super::choices::Choices;
use super::choosing::{self, Choosing, Results};
use super::forward::{BufferBytes, Extent, Forward, GRAPH_TOKENS_MAX, LOGITS_ROWS, Lists, rounded};
use super::header::{Header, Plan, Section};
use super::kernels::{Kernels, Parameters, ROWS, SEGMENT};
use super::plain::{self, Awaited, Change, Item, NOWHERE, Segments};
use super::products;
use super::step::{Expected, Limits, Row, Work};
use super::ticket::{CudaTicket, Times};
use super::weights::Weights;
use crate::context::Context;
use crate::driver::Driver;
use crate::error::CudaError;
use crate::fence::CudaFence;
use crate::memory::CudaMemory;

/// A model between its first step and its last.
#[derive(Debug)]
pub(super) struct Running {
    driver: Arc<dyn Driver>,
    forward: Forward,
    choosing: Choosing,
    header: Header,
    sections: Sections,
    memory: CudaMemory,
    limits: Limits,
    table: PageTable,
    rows: Arc<Mutex<Vec<Option<Row>>>>,
    arrivals: u64,
    work: Work,
    times: Arc<Times>,
}

/// Places of a step's lists, in this order.
#[derive(Clone, Copy, Debug)]
struct Sections {
    counts: Section,
    segments: Section,
    awaited: Section,
    choosing: choosing::Sections,
    changes: Section,
    few: Section,
    tokens: Section,
    many: Section,
    logits_of: Section,
    pages: Section,
}

impl Sections {
    fn new(plan: &mut Plan, shape: &Shape, limits: StepLimits, bytes: &BufferBytes) -> Self {
        let (rows, tokens) = (limits.rows as usize, rounded(limits.tokens_max as usize));
        let tokens = tokens.max(GRAPH_TOKENS_MAX);
        let tiles = tokens.div_ceil(ROWS / shape.group()) + rows;
        let entries = shape.positions_max.div_ceil(limits.page_size) as usize;
        Self {
            counts: plan.add::<u32>(3),
            segments: plan.add::<Segments>(rows + tiles),
            awaited: plan.add::<Awaited>(rows),
            choosing: choosing::Sections::new(plan, rows, tokens),
            changes: plan.add::<Change>(8 * rows),
            few: plan.add::<Item>(bytes.partials_max as usize + rows),
            tokens: plan.add::<plain::Token>(tokens),
            many: plan.add::<Item>(tiles + bytes.partials_max as usize),
            logits_of: plan.add::<u32>(tokens),
            pages: plan.add::<u32>(2 * rows * entries),
        }
    }
}

/// Returns a line with the GPU and the versions for which stored algorithms are valid.
fn machine(context: &Context) -> Result<String, CudaError> {
    Ok(format!(
        "{}, compute capability {}, {} multiprocessors, driver {}, cuBLASLt {}",
        context.name(),
        context.capability(),
        context.multiprocessors()?,
        context.driver_version()?,
        products::version()?
    ))
}

/// Returns the device bytes of the model beside weights and KV.
pub(super) fn bytes(shape: &Shape, limits: StepLimits) -> usize {
    let bytes = BufferBytes::new(shape, limits, SEGMENT);
    // Shaped logits are as large as logits; the rest is cuBLASLt's workspace and the lists.
    let counts = super::shaping::counts_bytes(shape, limits);
    bytes.total() + bytes.logits + counts + (128 << 20)
}

impl Running {
    pub(super) fn new(
        driver: &Arc<dyn Driver>,
        shape: &Shape,
        kernels: Kernels,
        weights: Weights,
        memory: &CudaMemory,
        limits: StepLimits,
        choices: Option<&Path>,
    ) -> Result<Self, CudaError> {
        kernels.context.bind()?;
        let (segment, blocks) = (kernels.segment, kernels.context.multiprocessors()? as usize);
        let bytes = BufferBytes::new(shape, limits, segment);
        let choices = Choices::open(choices, machine(&kernels.context)?);
        let mut plan = Plan::default();
        let sections = Sections::new(&mut plan, shape, limits, &bytes);
        let (page_size, partials_max) = (limits.page_size, bytes.partials_max);
        Ok(Self {
            driver: driver.clone(),
            forward: Forward::new(driver, shape, kernels, weights, memory, limits, choices)?,
            choosing: Choosing::new(driver, shape, limits, sections.choosing)?,
            header: Header::new(driver, &plan)?,
            sections,
            memory: memory.clone(),
            limits: Limits { partials_max, blocks, segment },
            table: PageTable::new(limits.rows, page_size),
            rows: Arc::new(Mutex::new((0..limits.rows).map(|_| None).collect())),
            arrivals: 0,
            work: Work::default(),
            times: Arc::default(),
        })
    }

    /// Compares products of some numbers of rows with those of the largest product. No step is in
    /// flight.
    pub(super) fn product_differences(
        &mut self,
        layer: usize,
        counts: &[usize],
    ) -> Result<Vec<String>, CudaError> {
        self.driver.bind_thread()?;
        self.forward.product_differences(&*self.driver, layer, counts)
    }

    pub(super) fn launch(&mut self, batch: &Arc<Batch>) -> Result<CudaTicket, ModelError> {
        let launched_at = Instant::now();
        let launched = self.prepare_and_hand_over(batch);
        if launched.is_err() {
            // The counts on the device are unknown after a failed launch.
            self.rows.lock().iter_mut().flatten().for_each(Row::forget_counts);
        }
        let (expected, results, fence) = launched?;
        Ok(CudaTicket {
            fence,
            expected,
            results,
            rows: self.rows.clone(),
            times: self.times.clone(),
            launched_at,
            vocabulary: self.forward.shape.vocabulary,
        })
    }

    fn prepare_and_hand_over(
        &mut self,
        batch: &Arc<Batch>,
    ) -> Result<(Vec<Expected>, Results, CudaFence), ModelError> {
        self.tell(batch);
        let expected = {
            let rows = &mut self.rows.lock();
            self.work.prepare(&self.forward.shape, self.limits, batch, &self.table, rows)?
        };
        let told = |error: CudaError| ModelError(error.to_string());
        self.driver.bind_thread().map_err(|error| told(error.into()))?;
        let fence = self.memory.fence().map_err(told)?;
        let results = self.hand_over(batch, &fence).map_err(told)?;
        Ok((expected, results, fence))
    }

    /// Applies the departures, arrivals and page-table changes of a batch.
    fn tell(&mut self, batch: &Batch) {
        self.table.apply(batch);
        let rows = &mut self.rows.lock();
        for slot in &batch.went {
            rows[slot.0 as usize] = None;
        }
        for came in &batch.came {
            self.arrivals += 1;
            let vocabulary = self.forward.shape.vocabulary;
            let row = Row::new(&came.choosing, &came.produced, self.arrivals, vocabulary);
            rows[came.slot.0 as usize] = Some(row);
        }
    }

    /// Submits the prepared step to the GPU.
    fn hand_over(&mut self, batch: &Batch, fence: &CudaFence) -> Result<Results, CudaError> {
        let tokens = self.work.tokens.len();
        let rounded = rounded(tokens);
        let nowhere = plain::Token { place: NOWHERE, ..plain::Token::default() };
        self.work.tokens.resize(rounded, nowhere);
        let lists = self.send(fence)?;
        self.take_in(&lists)?;
        let each_has_logits = self.work.logits_of.len() == tokens
            && self.work.logits_of.iter().zip(0..).all(|(token, place)| *token == place);
        let is_for_graph = tokens <= GRAPH_TOKENS_MAX
            && each_has_logits
            && self.work.many.is_empty()
            && batch.arriving.is_empty();
        if is_for_graph {
            self.forward.by_graph(rounded, &lists)?;
        } else {
            let extent = self.extent();
            self.forward.layers(extent, &lists, &batch.arriving)?;
        }
        let mut results = self.choosing.begin(&self.work)?;
        for first in (0..self.work.logits_of.len()).step_by(LOGITS_ROWS) {
            let rows = LOGITS_ROWS.min(self.work.logits_of.len() - first);
            if !is_for_graph {
                self.forward.logits(rows, Some(lists.logits_of.offset(first * 4)))?;
            }
            let range = first as u32..(first + rows) as u32;
            self.choosing.choose(&self.forward, &self.header, &self.work, range, &mut results)?;
        }
        self.choosing.end(&self.forward, &self.work, &results)?;
        fence.record(self.forward.stream)?;
        Ok(results)
    }

    /// Returns the size of the prepared step.
    fn extent(&self) -> Extent {
        Extent {
            tokens: self.work.tokens.len(),
            many: self.work.many.len(),
            has_few: !self.work.few.is_empty(),
            has_segments: !self.work.segments.is_empty(),
        }
    }

    /// Sends the step's lists.
    fn send(&mut self, fence: &CudaFence) -> Result<Lists, CudaError> {
        let (header, sections, work) = (&mut self.header, &self.sections, &self.work);
        header.begin(&*self.driver, self.forward.stream)?;
        let tokens = work.segments.iter().map(|it| it.tokens).max().unwrap_or(0);
        let rows = tokens * self.forward.group() as u32;
        let counts = [work.few.len() as u32, work.segments.len() as u32, rows];
        header.write(sections.counts, &counts)?;
        header.write(sections.segments, &work.segments)?;
        header.write(sections.awaited, &work.awaited)?;
        self.choosing.write(header, work)?;
        header.write(sections.changes, &work.changes)?;
        header.write(sections.few, &work.few)?;
        header.write(sections.tokens, &work.tokens)?;
        header.write(sections.many, &work.many)?;
        header.write(sections.logits_of, &work.logits_of)?;
        header.write(sections.pages, &work.pages)?;
        header.send(&*self.driver, self.forward.stream, fence)?;
        Ok(Lists {
            tokens: header.at(sections.tokens),
            many: header.at(sections.many),
            few: header.at(sections.few),
            few_count: header.at(sections.counts),
            segments: header.at(sections.segments),
            segments_counts: header.at(sections.counts).offset(4),
            logits_of: header.at(sections.logits_of),
        })
    }

    /// Submits the page-table changes and the placement of awaited tokens.
    fn take_in(&self, lists: &Lists) -> Result<(), CudaError> {
        let (work, header) = (&self.work, &self.header);
        if work.changes.is_empty() && work.awaited.is_empty() {
            return Ok(());
        }
        let buffers = self.forward.buffers();
        let parameters = Parameters::default()
            .wide(buffers.table.at().0)
            .narrow(buffers.row_entries)
            .wide(header.at(self.sections.changes).0)
            .narrow(work.changes.len() as u32)
            .wide(header.at(self.sections.pages).0)
            .wide(lists.tokens.0)
            .wide(header.at(self.sections.awaited).0)
            .narrow(work.awaited.len() as u32)
            .wide(self.choosing.chosen().0);
        let blocks = work.changes.len().clamp(1, 256);
        #[allow(unsafe_code)]
        // SAFETY: the lists were sent, changes are of rows and entries that there are, and awaited tokens are of the step.
        Ok(unsafe { self.forward.kernels.take_in.launch(self.forward.stream, blocks, parameters) }?)
    }
}

impl Drop for Running {
    /// Waits for launched steps.
    fn drop(&mut self) {
        if self.driver.bind_thread().is_ok() {
            let _ = self.driver.drain(self.forward.stream);
            self.driver.destroy_stream(self.forward.stream);
        }
    }
}
