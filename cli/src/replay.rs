//! `terrace replay`: what a trace would do on a configuration.

mod calibration;
mod comparison;
mod kv_events;
mod rate;
mod settings;
mod summary;

use std::error::Error;
use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde::Serialize;
use terrace_kit::Process;
use terrace_replay::{
    Axis, Calibration, CostModel, Measurement, Options, Setting, Sweep, Trace, html,
};

use crate::heap;
use crate::trace::Source;
use kv_events::KvEvents;
use settings::Settings;

const EXAMPLES: &str = "\
Examples:
  terrace replay conversation_trace.jsonl --report replay.html
      One worker: Llama 3.1 8B on one H100, a host tier four times the device tier, unlimited L3
  terrace replay --synthetic agents --device 40GiB --host 0 --l3 0
      Synthetic requests and only the device tier
  terrace replay trace.jsonl.gz --workers 4 --routing prefix-aware --l3-latency 2ms
      Four workers that share one L3
  terrace replay trace.jsonl --sweep host=0,64GiB,256GiB --sweep policy=lru,slru,s3fifo --report grid.html
      Every combination, on all cores, to compare sizes and policies
  terrace replay trace.jsonl --find-rate --slo-ttft 2s --slo-tpot 50ms
      The highest request rate at which one worker meets the SLO
  terrace replay --calibrate steps.csv --model llama-3.1-8b --gpu h100 --gpus 1
      Compare predicted step times with measured ones
  terrace replay --kv-events tcp://10.0.0.1:5557+tcp://10.0.0.1:5558 --kv-events tcp://10.0.0.2:5557 --kv-time 10m
      What the caches of two servers hold, from their KV events, and what was computed twice

Give sizes in tokens (1000000, 2M) or in bytes of KV (64GiB). The same trace, settings and seed give
byte-identical JSON, except for the field `run`.";

/// Arguments of `terrace replay`.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Arguments {
    #[command(flatten)]
    source: Source,
    #[command(flatten)]
    settings: Settings,
    #[command(flatten)]
    kv_events: KvEvents,
    /// Sweep a setting over values, like host=0,64GiB; repeat it to replay every combination
    #[arg(long = "sweep", value_name = "NAME=VALUES", help_heading = "Sweep")]
    sweeps: Vec<String>,
    /// Replay this many days with different seeds: other synthetic requests, or the trace with other arrival
    /// times. Reports means with confidence intervals
    #[arg(long, value_name = "NUMBER", help_heading = "Sweep", value_parser = clap::value_parser!(u32).range(2..=100))]
    seeds: Option<u32>,
    /// Find the highest request rate that meets the SLO (--slo-ttft, --slo-tpot)
    #[arg(long, help_heading = "Sweep", conflicts_with_all = ["sweeps", "report", "csv"])]
    find_rate: bool,
    /// Parallel replays [default: one per core]
    #[arg(long, help_heading = "Sweep", value_parser = clap::value_parser!(u16).range(1..=1024))]
    threads: Option<u16>,
    /// Print JSON
    #[arg(long)]
    json: bool,
    /// Write an HTML report with plots
    #[arg(long, value_name = "FILE")]
    report: Option<PathBuf>,
    /// Write results as CSV: one line per configuration of a sweep, or per time interval of a replay
    #[arg(long, value_name = "FILE")]
    csv: Option<PathBuf>,
    /// Fit the step cost model to measured steps instead of using the preset of model and GPU: CSV or JSON
    /// lines with prefill_tokens, prefill_pairs, decode_rows, decode_context and step_us
    #[arg(long, value_name = "FILE")]
    costs: Option<PathBuf>,
    /// Compare measured steps, in the format of --costs, with the prediction for model and GPU, and exit
    #[arg(long, value_name = "FILE", conflicts_with_all = ["costs", "sweeps", "report"])]
    calibrate: Option<PathBuf>,
}

/// Figures that depend on the machine.
#[derive(Serialize)]
pub(crate) struct Run {
    trace: String,
    read_s: f64,
    wall_s: f64,
    peak_rss_mb: Option<f64>,
    threads: usize,
}

/// The JSON output.
#[derive(Serialize)]
struct WithRun<'a, T> {
    #[serde(flatten)]
    result: &'a T,
    run: Run,
}

pub(crate) fn run(arguments: &Arguments) -> Result<String, Box<dyn Error>> {
    let began = Instant::now();
    heap::ask_for_huge_pages();
    if arguments.kv_events.are_asked_for() {
        let report = arguments.kv_events.study()?;
        return match arguments.json {
            true => Ok(serde_json::to_string_pretty(&report)? + "\n"),
            false => Ok(kv_events::draw(&report)),
        };
    }
    let mut options = arguments.settings.options();
    if let Some(file) = &arguments.calibrate {
        return arguments.calibrate(file, &options);
    }
    if let Some(file) = &arguments.costs {
        options.cost = Some(costs(file)?);
    }
    let axes = arguments.sweeps.iter().map(|text| Axis::parse(text));
    let axes = axes.collect::<Result<Vec<_>, _>>()?;
    // Invalid settings and outputs are refused before a long trace is read.
    Sweep::check(&options, &axes)?;
    if arguments.source.is_synthetic() && axes.iter().any(|axis| axis.setting == Setting::Seed) {
        return Err("--sweep seed: synthetic requests depend on the seed too, and a sweep replays a single \
                    trace; run it once for each --seed, or sweep over a file of `terrace trace generate`"
            .into());
    }
    if arguments.seeds.is_some() && axes.iter().any(|axis| axis.setting == Setting::Seed) {
        return Err("--seeds and --sweep seed exclude each other: give only one".into());
    }
    let mut page = arguments.report.as_deref().map(create).transpose()?;
    let mut csv = arguments.csv.as_deref().map(create).transpose()?;
    let (trace, requests) = arguments.source.read(arguments.settings.seed())?;
    let read = began.elapsed();
    let run = |threads| Run {
        trace: trace.clone(),
        read_s: read.as_secs_f64(),
        wall_s: began.elapsed().as_secs_f64(),
        peak_rss_mb: peak_rss_mb(),
        threads,
    };
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let threads = arguments.threads.map_or(cores, usize::from);
    if arguments.find_rate {
        let config = options.config()?;
        let quantum_us = requests.arrival_quantum_us();
        let requests = match quantum_us {
            Some(us) => requests.spread_arrivals(us),
            None => requests,
        };
        let days = arguments.days(requests)?;
        let search = with_progress(None, |progress| {
            terrace_replay::find_rate(&NEVER, &days, &config, threads, progress)
        })?;
        let found = rate::Found {
            search: &search,
            days: days.len(),
            arrivals_spread_over_s: quantum_us.map(|us| us as f64 / 1e6),
        };
        let run = run(threads);
        return arguments.output(&found, run, |run| rate::draw(&trace, &config.slo, &found, run));
    }
    if axes.is_empty() && arguments.seeds.is_none() {
        let report = terrace_replay::replay(&requests, &options.config()?)?;
        let run = run(1);
        if let Some(page) = &mut page {
            page.write_all(html::report_page(&trace, &report).as_bytes())?;
        }
        if let Some(csv) = &mut csv {
            csv.write_all(terrace_replay::csv::series_csv(&report).as_bytes())?;
        }
        return arguments.output(&report, run, |run| summary::draw(&trace, &report, run));
    }
    let days = arguments.days(requests)?;
    let size = Sweep::size(&axes) * days.len();
    let sweep = with_progress(Some(size), |progress| {
        Sweep::run_days(&NEVER, &days, &options, axes, threads, progress)
    })?;
    let run = run(threads);
    if let Some(page) = &mut page {
        page.write_all(html::sweep_page(&trace, &sweep).as_bytes())?;
    }
    if let Some(csv) = &mut csv {
        csv.write_all(terrace_replay::csv::sweep_csv(&sweep).as_bytes())?;
    }
    arguments.output(&sweep, run, |run| comparison::draw(&trace, &sweep, run))
}

/// A replay is stopped only by ending the program.
static NEVER: AtomicBool = AtomicBool::new(false);

impl Arguments {
    fn calibrate(&self, file: &Path, options: &Options) -> Result<String, Box<dyn Error>> {
        let config = options.config()?;
        let named = |error: &dyn std::fmt::Display| format!("{}: {error}", file.display());
        let calibration = Calibration::new(config.cost, &measurements(file)?);
        let calibration = calibration.map_err(|error| named(&error))?;
        if self.json {
            return Ok(serde_json::to_string_pretty(&calibration)? + "\n");
        }
        Ok(calibration::draw(&file.display().to_string(), &config.machine(), &calibration))
    }

    /// The first day as it was read, and the others.
    fn days(&self, first: Trace) -> Result<Vec<Trace>, Box<dyn Error>> {
        let mut days = vec![first];
        for day in 1..self.seeds.unwrap_or(1) {
            let seed = self.settings.seed().wrapping_add(u64::from(day));
            let another = match self.source.is_synthetic() {
                true => self.source.read(seed)?.1,
                false => days[0].another_day(seed),
            };
            days.push(another);
        }
        Ok(days)
    }

    fn output<T: Serialize>(
        &self,
        result: &T,
        run: Run,
        draw: impl FnOnce(&Run) -> String,
    ) -> Result<String, Box<dyn Error>> {
        if self.json {
            return Ok(serde_json::to_string_pretty(&WithRun { result, run })? + "\n");
        }
        let mut text = draw(&run);
        for (what, file) in [("report", &self.report), ("CSV", &self.csv)] {
            if let Some(file) = file {
                text += &format!("  {what:<13}{}\n", file.display());
            }
        }
        Ok(text)
    }
}

/// Shows how far it is, of so many replays if that is known.
fn with_progress<T, E: Error + 'static>(
    replays: Option<usize>,
    work: impl FnOnce(&(dyn Fn() + Sync)) -> Result<T, E>,
) -> Result<T, Box<dyn Error>> {
    let length = replays.map(|replays| replays as u64);
    let bar = ProgressBar::with_draw_target(length, ProgressDrawTarget::stderr());
    let template =
        if replays.is_some() { "{bar:40} {pos} of {len}, {eta} left" } else { "{pos} replays" };
    bar.set_style(ProgressStyle::with_template(template)?);
    bar.enable_steady_tick(Duration::from_millis(500));
    let result = work(&|| bar.inc(1));
    bar.finish_and_clear();
    Ok(result?)
}

fn measurements(file: &Path) -> Result<Vec<Measurement>, Box<dyn Error>> {
    let named = |error: &dyn std::fmt::Display| format!("{}: {error}", file.display());
    let text = std::fs::read_to_string(file).map_err(|error| named(&error))?;
    Ok(Measurement::parse(&text).map_err(|error| named(&error))?)
}

fn costs(file: &Path) -> Result<CostModel, Box<dyn Error>> {
    let fit = CostModel::fit(&measurements(file)?);
    let fit = fit.map_err(|error| format!("{}: {error}", file.display()))?;
    eprintln!(
        "{}: {} steps, mean error of the fit {}",
        file.display(),
        fit.measurements,
        terrace_replay::human::percent(fit.relative_residual)
    );
    Ok(fit.cost)
}

fn create(file: &Path) -> Result<File, String> {
    File::create(file).map_err(|error| format!("{}: {error}", file.display()))
}

/// The most memory that this process has had, where the system tells.
fn peak_rss_mb() -> Option<f64> {
    let bytes = Process::Own.peak_resident_bytes()?;
    Some((bytes as f64 / 1000.0).round() / 1000.0)
}
