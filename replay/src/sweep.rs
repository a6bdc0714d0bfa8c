//! Sweeps: the same trace on a grid of configurations, on all cores.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use serde::Serialize;

use crate::config::Config;
use crate::error::ReplayError;
use crate::human;
use crate::options::{OptionError, Options, Setting};
use crate::report::{BytesMoved, Distribution, Report, Reuse};
use crate::trace::Trace;

/// More configurations than this are not replayed at once.
pub const POINTS_MAX: usize = 10_000;

/// Workers that compute so much of the time cannot keep up.
const OVERLOADED: f64 = 0.98;

/// What is good enough: this much of the best time to first token.
const GOOD_ENOUGH: f64 = 1.05;

/// A setting and the values that it takes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Axis {
    /// The setting.
    pub setting: Setting,
    /// Its values, as they were written.
    pub values: Vec<String>,
}

/// What came of a sweep.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Sweep {
    /// What was varied.
    pub axes: Vec<Axis>,
    /// What to take from it, in a sentence.
    pub answer: String,
    /// The place in `points` of the smallest that is good enough.
    pub recommended: usize,
    /// All configurations: the last axis changes fastest.
    pub points: Vec<SweepPoint>,
}

/// One configuration and its figures.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct SweepPoint {
    /// The values on the axes.
    pub values: Vec<String>,
    /// The size of a worker's device tier.
    pub device_tokens: u64,
    /// The size of a worker's host tier.
    pub host_tokens: u64,
    /// The size of L3; none for no limit.
    pub l3_tokens: Option<u64>,
    /// The most that L3 held.
    pub l3_peak_tokens: u64,
    /// Bytes of KV for one token.
    pub kv_bytes_per_token: u64,
    /// Workers.
    pub workers: u32,
    /// Requests that got all their tokens.
    pub finished: u64,
    /// Requests that failed or could not be taken.
    pub failed: u64,
    /// From the first arrival to the last token.
    pub virtual_s: f64,
    /// Which share of the prompt tokens was found where.
    pub reuse: Reuse,
    /// From arrival to the first token.
    pub ttft_ms: Distribution,
    /// Between one token and the next.
    pub itl_ms: Distribution,
    /// From arrival to the last token.
    pub e2e_ms: Distribution,
    /// Tokens produced in a second.
    pub output_tokens_per_s: f64,
    /// The share of the time in which workers computed.
    pub busy: f64,
    /// Bytes that went over each kind of link.
    pub bytes_moved: BytesMoved,
}

/// A sweep that cannot be done.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SweepError {
    /// An axis that is not understood.
    #[error("{text:?}: write NAME=VALUE,VALUE,…, like host=0,64GiB,256GiB")]
    Axis {
        /// What was written.
        text: String,
    },
    /// A setting on two axes.
    #[error("{setting} is swept twice; put all its values into one")]
    Twice {
        /// Which.
        setting: Setting,
    },
    /// A setting without values.
    #[error("{setting} is to be swept and has no values: give at least one")]
    NoValues {
        /// Which.
        setting: Setting,
    },
    /// Too many configurations.
    #[error("{points} configurations; at most {POINTS_MAX} are replayed at once")]
    TooMany {
        /// How many there would be.
        points: usize,
    },
    /// A configuration that cannot be.
    #[error(transparent)]
    Options(#[from] OptionError),
    /// A replay that went wrong.
    #[error("{point}: {error}")]
    Replay {
        /// Its values on the axes.
        point: String,
        /// What went wrong.
        error: ReplayError,
    },
}

impl Axis {
    /// Reads `NAME=VALUE,VALUE,…`.
    ///
    /// # Errors
    /// What is not understood.
    pub fn parse(text: &str) -> Result<Self, SweepError> {
        let wrong = || SweepError::Axis { text: text.to_owned() };
        let (name, values) = text.split_once('=').ok_or_else(wrong)?;
        let values: Vec<String> = values.split(',').map(|value| value.trim().to_owned()).collect();
        if values.iter().any(String::is_empty) {
            return Err(wrong());
        }
        Ok(Self { setting: Setting::named(name.trim())?, values })
    }
}

impl Sweep {
    /// Replays a trace on every combination of values. All are checked before the first begins.
    /// `progress` is told whenever one is done. The result does not depend on the number of threads.
    ///
    /// # Errors
    /// What cannot be configured, or what went wrong in a replay.
    ///
    /// # Panics
    /// If a thread does.
    pub fn run(
        trace: &Trace,
        base: &Options,
        axes: Vec<Axis>,
        threads: usize,
        progress: &(dyn Fn() + Sync),
    ) -> Result<Self, SweepError> {
        Self::run_unless(&AtomicBool::new(false), trace, base, axes, threads, progress)
    }

    /// The same, unless somebody sets `stop` meanwhile.
    ///
    /// # Errors
    /// As [`Sweep::run`], and [`ReplayError::Stopped`] soon after `stop` was set.
    ///
    /// # Panics
    /// If a thread does.
    pub fn run_unless(
        stop: &AtomicBool,
        trace: &Trace,
        base: &Options,
        axes: Vec<Axis>,
        threads: usize,
        progress: &(dyn Fn() + Sync),
    ) -> Result<Self, SweepError> {
        let grid = grid(base, &axes)?;
        let next = AtomicUsize::new(0);
        let results: Vec<Mutex<Option<Result<SweepPoint, ReplayError>>>> =
            grid.iter().map(|_| Mutex::new(None)).collect();
        let work = || {
            // Whoever is free takes the next, so that all are busy until the last few.
            while let Some((place, (values, config))) = {
                let place = next.fetch_add(1, Ordering::Relaxed);
                grid.get(place).map(|point| (place, point))
            } {
                let replayed = crate::replay_unless(stop, trace, config);
                let point = replayed.map(|report| SweepPoint::new(values.clone(), &report));
                *results[place].lock().expect("nobody panics while holding it") = Some(point);
                progress();
            }
        };
        std::thread::scope(|scope| {
            for _ in 1..threads.clamp(1, grid.len()) {
                scope.spawn(work);
            }
            work();
        });
        let mut points = Vec::with_capacity(grid.len());
        for ((values, _), result) in grid.into_iter().zip(results) {
            let result = result.into_inner().expect("nobody panicked");
            let point = result.expect("every place was taken");
            points.push(
                point.map_err(|error| SweepError::Replay {
                    point: describe(&axes, &values),
                    error,
                })?,
            );
        }
        let (recommended, answer) = answer(&axes, &points);
        Ok(Self { axes, answer, recommended, points })
    }

    /// Whether all configurations can be: better known before a long trace is read.
    ///
    /// # Errors
    /// The first that cannot.
    pub fn check(base: &Options, axes: &[Axis]) -> Result<(), SweepError> {
        grid(base, axes).map(drop)
    }

    /// How many configurations these axes make.
    #[must_use]
    pub fn size(axes: &[Axis]) -> usize {
        axes.iter().fold(1, |size: usize, axis| size.saturating_mul(axis.values.len()))
    }
}

impl SweepPoint {
    fn new(values: Vec<String>, report: &Report) -> Self {
        let config = &report.config;
        let page_size = u64::from(config.scheduler.cache.page_size);
        let tokens = |pages: u64| pages * page_size;
        let workers = report.workers.len().max(1) as f64;
        Self {
            values,
            device_tokens: tokens(config.scheduler.cache.device_pages.into()),
            host_tokens: tokens(config.scheduler.cache.host_pages.into()),
            l3_tokens: match config.scheduler.l3 {
                Some(_) => config.store.pages_max.map(tokens),
                None => Some(0),
            },
            l3_peak_tokens: report.store.map_or(0, |store| tokens(store.pages_peak)),
            kv_bytes_per_token: config.kv_bytes_per_token,
            workers: config.workers,
            finished: report.finished,
            failed: report.failed + report.refused,
            virtual_s: report.virtual_s,
            reuse: report.reuse,
            ttft_ms: report.ttft_ms,
            itl_ms: report.itl_ms,
            e2e_ms: report.e2e_ms,
            output_tokens_per_s: report.output_tokens_per_s,
            busy: report.workers.iter().map(|worker| worker.busy).sum::<f64>() / workers,
            bytes_moved: report.bytes_moved,
        }
    }

    /// What it takes, the dearest first.
    fn price(&self) -> (u64, u64, u64, u64) {
        let workers = u64::from(self.workers);
        (
            workers,
            self.device_tokens * workers,
            self.host_tokens * workers,
            self.l3_tokens.unwrap_or(u64::MAX),
        )
    }
}

/// Values on the axes, as `host 64GiB, policy lru`.
#[must_use]
pub fn describe(axes: &[Axis], values: &[String]) -> String {
    let pairs = axes.iter().zip(values).map(|(axis, value)| format!("{} {value}", axis.setting));
    pairs.collect::<Vec<_>>().join(", ")
}

/// Every combination of values, with its configuration.
fn grid(base: &Options, axes: &[Axis]) -> Result<Vec<(Vec<String>, Config)>, SweepError> {
    for (place, axis) in axes.iter().enumerate() {
        if axes[..place].iter().any(|earlier| earlier.setting == axis.setting) {
            return Err(SweepError::Twice { setting: axis.setting });
        }
        if axis.values.is_empty() {
            return Err(SweepError::NoValues { setting: axis.setting });
        }
    }
    let points = Sweep::size(axes);
    if points > POINTS_MAX {
        return Err(SweepError::TooMany { points });
    }
    let mut grid: Vec<(Vec<String>, Options)> = vec![(Vec::new(), base.clone())];
    for axis in axes {
        let extend = |(values, options): &(Vec<String>, Options), value: &String| {
            let (mut values, mut options) = (values.clone(), options.clone());
            values.push(value.clone());
            options.set(axis.setting, value);
            (values, options)
        };
        grid = grid
            .iter()
            .flat_map(|point| axis.values.iter().map(move |value| extend(point, value)))
            .collect();
    }
    grid.into_iter().map(|(values, options)| Ok((values, options.config()?))).collect()
}

/// The smallest configuration whose time to first token is nearly the best, and why.
fn answer(axes: &[Axis], points: &[SweepPoint]) -> (usize, String) {
    let ttft = |point: &SweepPoint| point.ttft_ms.mean;
    let places = || 0..points.len();
    if points.iter().all(|point| point.finished == 0) {
        let answer =
            "No configuration could run any of the requests: they are too long for the device.";
        return (0, answer.to_owned());
    }
    // Who fails requests is only recommended if all do.
    let fewest = points.iter().map(|point| point.failed).min().unwrap_or(0);
    let taken = |place: &usize| points[*place].failed == fewest;
    let best = places()
        .filter(taken)
        .min_by(|&one, &other| ttft(&points[one]).total_cmp(&ttft(&points[other])));
    let Some(best) = best else { return (0, "Nothing was replayed.".to_owned()) };
    let limit = ttft(&points[best]) * GOOD_ENOUGH;
    let good = || places().filter(taken).filter(|&place| ttft(&points[place]) <= limit);
    let smallest = good().min_by(|&one, &other| {
        let (one, other) = (&points[one], &points[other]);
        one.price().cmp(&other.price()).then(ttft(one).total_cmp(&ttft(other)))
    });
    let chosen = smallest.unwrap_or(best);
    let point = &points[chosen];
    let bytes = |tokens: u64| human::bytes((tokens * point.kv_bytes_per_token) as f64);
    let l3 = match point.l3_tokens {
        Some(0) => "no L3".to_owned(),
        Some(tokens) => format!("{} of L3", bytes(tokens)),
        None => format!("L3 without limit, of which {} are used", bytes(point.l3_peak_tokens)),
    };
    let mut answer = format!(
        "Take {}: with {} of host memory a worker and {l3}, the first token comes after {} on average",
        describe(axes, &point.values),
        bytes(point.host_tokens),
        human::milliseconds(ttft(point))
    );
    answer += &if chosen == best {
        ", the best of all".to_owned()
    } else {
        let best = &points[best];
        format!(
            ", within 5 % of the best ({} with {})",
            human::milliseconds(ttft(best)),
            describe(axes, &best.values)
        )
    };
    answer += &format!(
        "; {} of prompt tokens are reused, and {} could be.",
        human::percent(point.reuse.total),
        human::percent(point.reuse.ceiling)
    );
    if good().count() == points.len() && points.len() > 1 {
        answer +=
            " All configurations are within 5 % of each other, so the choice hardly matters here.";
    }
    if point.failed > 0 {
        let failed = human::whole(point.failed);
        answer += &format!(" {failed} requests failed or were too long for the device.");
    }
    if point.busy > OVERLOADED {
        answer += " Even so the workers compute all the time and requests wait for them: more workers \
                   or faster ones would change more than memory does.";
    }
    (chosen, answer)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::trace::{Synthetic, Workload};

    fn axes(texts: &[&str]) -> Vec<Axis> {
        texts.iter().map(|text| Axis::parse(text).unwrap()).collect()
    }

    fn small_options() -> Options {
        let mut options = Options::default();
        options.set(Setting::Device, "200k");
        options
    }

    fn refusal(texts: &[&str]) -> String {
        let axes: Result<Vec<Axis>, SweepError> =
            texts.iter().map(|text| Axis::parse(text)).collect();
        let grid = axes.and_then(|axes| grid(&Options::default(), &axes));
        grid.map(|grid| grid.len()).unwrap_err().to_string()
    }

    #[test]
    fn the_grid_has_every_combination_and_the_last_axis_changes_fastest() {
        let axes = axes(&["host=0,64GiB", "policy=lru,slru,s3fifo"]);
        let grid = grid(&Options::default(), &axes).unwrap();
        let names: Vec<String> = grid.iter().map(|(values, _)| values.join(" ")).collect();
        let expected = ["0 lru", "0 slru", "0 s3fifo", "64GiB lru", "64GiB slru", "64GiB s3fifo"];
        assert_eq!(names, expected);
        assert_eq!(grid[3].1.scheduler.cache.host_pages, 32_768);
    }

    #[test]
    fn nonsense_is_refused_before_anything_runs() {
        assert!(refusal(&["host"]).contains("write NAME=VALUE"));
        assert!(refusal(&["host=1,,2"]).contains("write NAME=VALUE"));
        assert!(refusal(&["colour=red"]).contains("there is no setting \"colour\""));
        assert!(refusal(&["host=1", "host=2"]).contains("host is swept twice"));
        assert!(refusal(&["host=64GiB,lots"]).contains("host lots: write tokens"));
        let many: String = (0..200).map(|n| format!("{n},")).collect();
        let many = many.trim_end_matches(',');
        let refused = refusal(&[&format!("host={many}"), &format!("l3={many}")]);
        assert!(refused.contains("40000 configurations; at most 10000"), "{refused}");
    }

    #[test]
    fn a_sweep_that_is_stopped_says_so() {
        let trace = Synthetic { requests: 100, ..Synthetic::default() }.trace().unwrap();
        let stop = AtomicBool::new(false);
        let done = AtomicUsize::new(0);
        // It is stopped when the first is done: the others are not replayed.
        let progress = || {
            done.fetch_add(1, Ordering::Relaxed);
            stop.store(true, Ordering::Relaxed);
        };
        let axes = axes(&["host=0,400k,600k"]);
        let swept = Sweep::run_unless(&stop, &trace, &small_options(), axes, 1, &progress);
        let refused = swept.unwrap_err();
        assert!(matches!(refused, SweepError::Replay { error: ReplayError::Stopped, .. }));
        assert_eq!(done.into_inner(), 3);
    }

    #[test]
    fn any_number_of_threads_gives_the_same_bytes() {
        let synthetic =
            Synthetic { workload: Workload::Chat, requests: 150, ..Synthetic::default() };
        let trace = synthetic.trace().unwrap();
        let json = [1, 2, 3].map(|threads| {
            let axes = axes(&["host=0,400k", "policy=lru,slru", "l3=0,unlimited"]);
            let sweep = Sweep::run(&trace, &small_options(), axes, threads, &|| {}).unwrap();
            serde_json::to_string(&sweep).unwrap()
        });
        assert_eq!(json[0], json[1]);
        assert_eq!(json[0], json[2]);
    }

    #[test]
    fn the_smallest_that_is_nearly_the_best_is_recommended() {
        let trace = Synthetic { requests: 100, ..Synthetic::default() }.trace().unwrap();
        let axes = axes(&["host=400k,600k,1M", "l3=0"]);
        let mut sweep = Sweep::run(&trace, &small_options(), axes, 2, &|| {}).unwrap();
        for (point, ms) in sweep.points.iter_mut().zip([120.0, 104.0, 100.0]) {
            point.ttft_ms.mean = ms;
        }
        let (place, sentence) = answer(&sweep.axes, &sweep.points);
        assert_eq!(place, 1);
        assert!(sentence.starts_with("Take host 600k, l3 0: with 73.2 GiB of host memory"));
        assert!(sentence.contains("within 5 % of the best (100 ms with host 1M"), "{sentence}");
        sweep.points[1].failed = 1;
        assert_eq!(answer(&sweep.axes, &sweep.points).0, 2);
    }
}
