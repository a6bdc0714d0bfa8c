//! Replay: traces, and their simulation on a configuration.

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::Duration;

use numpy::{IntoPyArray, PyArray1, PyReadonlyArray1};
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use terrace_replay::trace::{
    BadLines, Format, ImportOptions, ReadOptions, Synthetic, Tokenise, TraceBuilder, Workload,
};
use terrace_replay::{
    Axis, CostModel, Fit, Measurement, OptionError, Options, ReplayError, Setting, Sweep,
    SweepError, Trace, TraceRequest, page_size, replay_unless,
};

use crate::errors::{ConfigError, IntoPython, TraceError, bad_argument, broken, unless_it_panics};
use crate::scheduler::json;

/// Interval at which a waiting thread checks for signals.
const TICK: Duration = Duration::from_millis(50);

/// Upper bound of threads, as a sanity check.
const THREADS_MAX: usize = 1024;

/// Native part of `terrace_kv.Trace`.
#[pyclass(frozen, name = "Trace", module = "terrace_kv._native")]
pub(crate) struct NativeTrace {
    trace: Trace,
    /// Number of skipped lines, and the messages of the first few.
    skipped: (u64, Vec<String>),
}

impl From<Trace> for NativeTrace {
    fn from(trace: Trace) -> Self {
        Self { trace, skipped: (0, Vec::new()) }
    }
}

/// Returns the format of a name.
fn format_named(name: &str) -> PyResult<Format> {
    let found = Format::ALL.into_iter().find(|(other, _)| *other == name);
    found.map(|(_, format)| format).ok_or_else(|| {
        let names = Format::ALL.map(|(name, _)| name).join(", ");
        TraceError::new_err(format!("there is no format {name:?}: use one of {names}"))
    })
}

type Column<'py> = Bound<'py, PyArray1<i64>>;

#[pymethods]
impl NativeTrace {
    #[staticmethod]
    #[pyo3(signature = (path, block_tokens, skip_bad_lines, format, arrivals, tokenise))]
    fn read(
        python: Python<'_>,
        path: PathBuf,
        block_tokens: Option<u32>,
        skip_bad_lines: bool,
        format: Option<&str>,
        arrivals: (f64, u64),
        tokenise: Option<Py<PyAny>>,
    ) -> PyResult<Self> {
        let bad_lines = if skip_bad_lines { BadLines::Skip } else { BadLines::Refuse };
        let format = format.map(format_named).transpose()?;
        let encode = |text: &str| -> Result<Vec<u32>, String> {
            let tokenise = tokenise.as_ref().ok_or("no tokenizer")?;
            let tokens = Python::attach(|python| tokenise.call1(python, (text,))?.extract(python));
            tokens.map_err(|error: PyErr| error.to_string())
        };
        let read = || {
            if path.is_dir() {
                return Trace::read(&path, &ReadOptions { block_tokens, bad_lines });
            }
            let tokenise = tokenise.as_ref().map(|_| &encode as Tokenise<'_>);
            let (rate_per_s, seed) = arrivals;
            let options =
                ImportOptions { format, block_tokens, bad_lines, rate_per_s, seed, tokenise };
            Trace::import(&path, &options)
        };
        let reading = python.detach(|| unless_it_panics(read))?;
        let reading = reading.map_err(IntoPython::into_python)?;
        let skipped = reading.skipped.iter().map(ToString::to_string).collect();
        Ok(Self { trace: reading.trace, skipped: (reading.skipped_lines, skipped) })
    }

    #[staticmethod]
    fn synthetic(
        python: Python<'_>,
        kind: &str,
        requests: u32,
        rate: f64,
        seed: u64,
        block_tokens: u32,
    ) -> PyResult<Self> {
        let workload = match kind {
            "chat" => Workload::Chat,
            "agents" => Workload::Agents,
            "documents" => Workload::Documents,
            "bursts" => Workload::Bursts,
            "mix" => Workload::Mix,
            other => {
                return Err(TraceError::new_err(format!(
                    "there is no workload {other:?}: use chat, agents, documents, bursts or mix"
                )));
            }
        };
        let synthetic = Synthetic { workload, requests, rate_per_s: rate, seed, block_tokens };
        let trace = python.detach(|| unless_it_panics(|| synthetic.trace()))?;
        trace.map(Self::from).map_err(|error| TraceError::new_err(error.to_string()))
    }

    /// Creates a trace of requests whose prompts have `blocks[n]` blocks each, with concatenated
    /// ids.
    #[staticmethod]
    fn of_blocks(
        arrival_us: PyReadonlyArray1<'_, u64>,
        input_tokens: PyReadonlyArray1<'_, u32>,
        output_tokens: PyReadonlyArray1<'_, u32>,
        blocks: PyReadonlyArray1<'_, u64>,
        block_ids: PyReadonlyArray1<'_, u64>,
        block_tokens: u32,
    ) -> PyResult<Self> {
        let arrival_us = arrival_us.as_slice().map_err(bad_argument)?;
        let input_tokens = input_tokens.as_slice().map_err(bad_argument)?;
        let output_tokens = output_tokens.as_slice().map_err(bad_argument)?;
        let blocks = blocks.as_slice().map_err(bad_argument)?;
        let mut ids = block_ids.as_slice().map_err(bad_argument)?;
        let lengths = [input_tokens.len(), output_tokens.len(), blocks.len()];
        if lengths != [arrival_us.len(); 3] {
            let [inputs, outputs, prompts] = lengths;
            return Err(TraceError::new_err(format!(
                "{} arrivals, {inputs} prompt lengths, {outputs} output lengths and {prompts} \
                 lists of blocks: give one of each per request",
                arrival_us.len(),
            )));
        }
        let refusal = |problem: String| TraceError::new_err(problem);
        let mut builder = TraceBuilder::new(block_tokens).map_err(refusal)?;
        for (place, &blocks) in blocks.iter().enumerate() {
            let Some((ours, others)) = ids.split_at_checked(blocks as usize) else {
                return Err(refusal(format!("request {place}: its block ids are missing")));
            };
            ids = others;
            let pushed =
                builder.push(arrival_us[place], input_tokens[place], output_tokens[place], ours);
            pushed.map_err(|problem| refusal(format!("request {place}: {problem}")))?;
        }
        Ok(builder.finish().into())
    }

    /// Returns one request per line, as JSON.
    fn lines<'py>(&self, python: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        let mut lines = Vec::new();
        python.detach(|| self.trace.write(&mut lines))?;
        Ok(PyBytes::new(python, &lines))
    }

    fn __len__(&self) -> usize {
        self.trace.requests().len()
    }

    fn block_tokens(&self) -> u32 {
        self.trace.block_tokens()
    }

    fn skipped(&self) -> (u64, Vec<String>) {
        self.skipped.clone()
    }

    /// Returns arrival times in microseconds, and the tokens of prompts and answers.
    fn columns<'py>(&self, python: Python<'py>) -> (Column<'py>, Column<'py>, Column<'py>) {
        let column = |of: fn(&TraceRequest) -> i64| {
            let values: Vec<i64> = self.trace.requests().iter().map(of).collect();
            values.into_pyarray(python)
        };
        (
            column(|request| request.arrival_us as i64),
            column(|request| request.input_tokens.into()),
            column(|request| request.output_tokens.into()),
        )
    }

    /// Returns the tokens of all prompts, the reusable tokens in this order and in any order, and
    /// those of each request.
    fn ceiling<'py>(
        &self,
        python: Python<'py>,
        page_size: u32,
    ) -> PyResult<(u64, u64, u64, Column<'py>)> {
        check_page_size(page_size)?;
        let ceiling = python.detach(|| self.trace.ceiling(page_size));
        let by_request: Vec<i64> = ceiling.by_request.into_iter().map(i64::from).collect();
        let by_request = by_request.into_pyarray(python);
        Ok((ceiling.prompt_tokens, ceiling.reusable_tokens, ceiling.any_order_tokens, by_request))
    }

    /// Returns a description, as JSON.
    fn describe(&self, python: Python<'_>, page_size: u32) -> PyResult<String> {
        check_page_size(page_size)?;
        json(&python.detach(|| self.trace.describe(page_size)))
    }
}

fn check_page_size(tokens: u32) -> PyResult<()> {
    page_size(&tokens.to_string())
        .map(drop)
        .map_err(|limits| ConfigError::new_err(format!("page_size {tokens}: {limits}")))
}

/// Fits costs to measured steps, as JSON.
#[pyfunction]
pub(crate) fn fit_costs(measurements: &str) -> PyResult<String> {
    json(&fit(measurements)?)
}

fn fit(measurements: &str) -> PyResult<Fit> {
    let fit = Measurement::parse(measurements).and_then(|steps| CostModel::fit(&steps));
    fit.map_err(IntoPython::into_python)
}

/// Replays a trace; returns the report as JSON.
#[pyfunction]
pub(crate) fn replay(
    python: Python<'_>,
    trace: &NativeTrace,
    settings: Vec<(String, String)>,
    measurements: Option<&str>,
) -> PyResult<String> {
    let config = options(settings, measurements)?.config().map_err(IntoPython::into_python)?;
    let stop = AtomicBool::new(false);
    let work = || replay_unless(&stop, &trace.trace, &config);
    let report = interruptible(python, &stop, &mut |python| python.check_signals(), work)?;
    json(&report.map_err(IntoPython::into_python)?)
}

/// Replays a trace on every combination; returns the results as JSON. `progress` is called with the
/// number of completed replays.
#[pyfunction]
pub(crate) fn sweep(
    python: Python<'_>,
    trace: &NativeTrace,
    settings: Vec<(String, String)>,
    measurements: Option<&str>,
    axes: Vec<(String, Vec<String>)>,
    threads: Option<usize>,
    progress: Option<Py<PyAny>>,
) -> PyResult<String> {
    let cores = || thread::available_parallelism().map_or(1, usize::from);
    let threads = threads.unwrap_or_else(cores);
    if !(1..=THREADS_MAX).contains(&threads) {
        let message = format!("{threads} threads: use 1 to {THREADS_MAX}");
        return Err(ConfigError::new_err(message));
    }
    let options = options(settings, measurements)?;
    let axis = |(name, values): (String, _)| Ok(Axis { setting: Setting::named(&name)?, values });
    let axes: Result<Vec<Axis>, OptionError> = axes.into_iter().map(axis).collect();
    let axes = axes.map_err(IntoPython::into_python)?;
    let (stop, done) = (AtomicBool::new(false), AtomicUsize::new(0));
    let all = Sweep::size(&axes);
    let mut completed = 0;
    let mut meanwhile = |python: Python<'_>| {
        python.check_signals()?;
        let done = done.load(Ordering::Relaxed);
        if let Some(progress) = progress.as_ref().filter(|_| done > completed) {
            completed = done;
            progress.call1(python, (done, all))?;
        }
        Ok(())
    };
    let swept = interruptible(python, &stop, &mut meanwhile, || {
        let progress = || {
            done.fetch_add(1, Ordering::Relaxed);
        };
        Sweep::run_unless(&stop, &trace.trace, &options, axes, threads, &progress)
    })?;
    let swept = swept.map_err(IntoPython::into_python)?;
    meanwhile(python)?;
    json(&swept)
}

fn options(settings: Vec<(String, String)>, measurements: Option<&str>) -> PyResult<Options> {
    let mut options = Options::default();
    for (name, value) in settings {
        options.set(Setting::named(&name).map_err(IntoPython::into_python)?, &value);
    }
    if let Some(measurements) = measurements {
        options.cost = Some(fit(measurements)?.cost);
    }
    Ok(options)
}

/// Runs work on a separate thread without the GIL. This thread calls `meanwhile` repeatedly with
/// the GIL, because Python handles signals on its main thread. If that fails, the work is stopped.
fn interruptible<R: Send>(
    python: Python<'_>,
    stop: &AtomicBool,
    meanwhile: &mut (dyn FnMut(Python<'_>) -> PyResult<()> + Send),
    work: impl FnOnce() -> R + Send,
) -> PyResult<R> {
    python.detach(|| {
        thread::scope(|scope| {
            let (sender, receiver) = mpsc::sync_channel(1);
            scope.spawn(move || sender.send(unless_it_panics(work)));
            loop {
                match receiver.recv_timeout(TICK) {
                    Ok(done) => return done,
                    Err(RecvTimeoutError::Timeout) => {
                        Python::attach(&mut *meanwhile)
                            .inspect_err(|_| stop.store(true, Ordering::Relaxed))?;
                    }
                    Err(RecvTimeoutError::Disconnected) => {
                        return Err(broken("a replay has panicked"));
                    }
                }
            }
        })
    })
}

impl IntoPython for OptionError {
    fn into_python(self) -> PyErr {
        ConfigError::new_err(self.to_string())
    }
}

impl IntoPython for SweepError {
    fn into_python(self) -> PyErr {
        match &self {
            Self::Replay { error, .. } => exception(error, self.to_string()),
            _ => ConfigError::new_err(self.to_string()),
        }
    }
}

impl IntoPython for ReplayError {
    fn into_python(self) -> PyErr {
        exception(&self, self.to_string())
    }
}

fn exception(error: &ReplayError, message: String) -> PyErr {
    match error {
        ReplayError::EmptyTrace => TraceError::new_err(message),
        ReplayError::AboveCeiling { .. } | ReplayError::Stuck { .. } => broken(&message),
        _ => ConfigError::new_err(message),
    }
}

impl IntoPython for terrace_replay::TraceError {
    fn into_python(self) -> PyErr {
        TraceError::new_err(match self {
            Self::Line(line) => format!("{line}; bad_lines=\"skip\" skips such lines"),
            other => other.to_string(),
        })
    }
}
