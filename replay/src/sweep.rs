//! Sweeps: replays of the same trace on a grid of configurations, on all cores.

mod advice;
mod point;

use std::collections::HashSet;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use serde::Serialize;

use crate::config::Config;
use crate::error::ReplayError;
use crate::options::{OptionError, Options, Setting};
use crate::trace::Trace;

pub use point::{Confidence, SweepPoint};

/// Largest number of configurations.
pub const POINTS_MAX: usize = 10_000;

/// A setting and its values.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Axis {
    /// The setting.
    pub setting: Setting,
    /// Values as text.
    pub values: Vec<String>,
}

/// Result of a sweep.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Sweep {
    /// Models and their hardware: a single entry unless it was varied.
    pub machines: Vec<String>,
    /// Varied settings.
    pub axes: Vec<Axis>,
    /// Conclusion in a sentence.
    pub answer: String,
    /// Index in `points` of the recommended configuration.
    pub recommended: usize,
    /// All configurations; the last axis varies fastest.
    pub points: Vec<SweepPoint>,
}

/// An error of a sweep.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SweepError {
    /// An axis cannot be parsed.
    #[error("{text:?}: write NAME=VALUE,VALUE,…, like host=0,64GiB,256GiB")]
    Axis {
        /// Its text.
        text: String,
    },
    /// A setting occurs on two axes.
    #[error("{setting} is swept twice; list all its values in one --sweep")]
    Twice {
        /// The setting.
        setting: Setting,
    },
    /// A setting has no values.
    #[error("the sweep of {setting} has no values: give at least one")]
    NoValues {
        /// The setting.
        setting: Setting,
    },
    /// There are too many configurations.
    #[error("{points} configurations are too many: at most {POINTS_MAX} can be swept at once")]
    TooMany {
        /// Their number.
        points: usize,
    },
    /// A configuration is invalid.
    #[error(transparent)]
    Options(#[from] OptionError),
    /// A replay failed.
    #[error("{point}: {error}")]
    Replay {
        /// Its axis values.
        point: String,
        /// Error of the replay.
        error: ReplayError,
    },
}

impl Axis {
    /// Parses `NAME=VALUE,VALUE,…`.
    ///
    /// # Errors
    /// Fails if the text is invalid.
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
    /// Replays a trace on every combination of values. All configurations are checked first.
    /// `progress` is called after each replay. The result does not depend on the number of threads.
    ///
    /// # Errors
    /// Fails if a configuration is invalid or a replay fails.
    ///
    /// # Panics
    /// Panics if a thread panics.
    pub fn run(
        trace: &Trace,
        base: &Options,
        axes: Vec<Axis>,
        threads: usize,
        progress: &(dyn Fn() + Sync),
    ) -> Result<Self, SweepError> {
        Self::run_unless(&AtomicBool::new(false), trace, base, axes, threads, progress)
    }

    /// Same as [`Sweep::run`], until `stop` is set.
    ///
    /// # Errors
    /// Same as [`Sweep::run`], and [`ReplayError::Stopped`] soon after `stop` was set.
    ///
    /// # Panics
    /// Panics if a thread panics.
    pub fn run_unless(
        stop: &AtomicBool,
        trace: &Trace,
        base: &Options,
        axes: Vec<Axis>,
        threads: usize,
        progress: &(dyn Fn() + Sync),
    ) -> Result<Self, SweepError> {
        Self::run_days(stop, std::slice::from_ref(trace), base, axes, threads, progress)
    }

    /// Replays several similar traces on every combination of values, each with its own seed. The
    /// figures are means with confidence intervals.
    ///
    /// # Errors
    /// Same as [`Sweep::run_unless`].
    ///
    /// # Panics
    /// Panics if a thread panics.
    pub fn run_days(
        stop: &AtomicBool,
        traces: &[Trace],
        base: &Options,
        axes: Vec<Axis>,
        threads: usize,
        progress: &(dyn Fn() + Sync),
    ) -> Result<Self, SweepError> {
        let grid = grid(base, &axes)?;
        let days = traces.len().max(1);
        let results = in_parallel(threads, grid.len() * traces.len(), &|place| {
            let (values, config) = &grid[place / days];
            let day = place % days;
            let config = Config { seed: config.seed.wrapping_add(day as u64), ..config.clone() };
            let replayed = crate::replay_unless(stop, &traces[day], &config);
            progress();
            replayed.map(|report| SweepPoint::new(values.clone(), &report))
        });
        let mut points = Vec::with_capacity(grid.len());
        let mut results = results.into_iter();
        for (values, _) in &grid {
            let seeds: Result<Vec<SweepPoint>, ReplayError> = results.by_ref().take(days).collect();
            let named = |error| SweepError::Replay { point: describe(&axes, values), error };
            points.extend(SweepPoint::mean_of(&seeds.map_err(named)?));
        }
        advice::mark_front(&mut points);
        let (recommended, answer) = advice::answer(&axes, &points);
        let mut machines: Vec<String> = grid.iter().map(|(_, config)| config.machine()).collect();
        let mut known = HashSet::new();
        machines.retain(|machine| known.insert(machine.clone()));
        Ok(Self { machines, axes, answer, recommended, points })
    }

    /// Checks all configurations, before a long trace is read.
    ///
    /// # Errors
    /// Returns the first error.
    pub fn check(base: &Options, axes: &[Axis]) -> Result<(), SweepError> {
        grid(base, axes).map(drop)
    }

    /// Returns the number of configurations.
    #[must_use]
    pub fn size(axes: &[Axis]) -> usize {
        axes.iter().fold(1, |size: usize, axis| size.saturating_mul(axis.values.len()))
    }
}

/// Runs jobs in parallel and returns their results in order. Threads take the next job when they
/// are free.
pub(crate) fn in_parallel<T: Send>(
    threads: usize,
    count: usize,
    work: &(dyn Fn(usize) -> T + Sync),
) -> Vec<T> {
    let next = AtomicUsize::new(0);
    let results: Vec<Mutex<Option<T>>> = (0..count).map(|_| Mutex::new(None)).collect();
    let take = || {
        loop {
            let place = next.fetch_add(1, Ordering::Relaxed);
            let Some(result) = results.get(place) else { return };
            let done = work(place);
            *result.lock().expect("no thread panics while holding it") = Some(done);
        }
    };
    std::thread::scope(|scope| {
        for _ in 1..threads.clamp(1, count.max(1)) {
            scope.spawn(take);
        }
        take();
    });
    let taken = |result: Mutex<Option<T>>| {
        result.into_inner().expect("no thread panicked").expect("every place was taken")
    };
    results.into_iter().map(taken).collect()
}

/// Formats axis values, like `host 64GiB, policy lru`.
#[must_use]
pub fn describe(axes: &[Axis], values: &[String]) -> String {
    let pairs = axes.iter().zip(values).map(|(axis, value)| format!("{} {value}", axis.setting));
    pairs.collect::<Vec<_>>().join(", ")
}

/// Returns every combination of values, with its configuration.
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
    fn grid_has_every_combination_in_order() {
        let axes = axes(&["host=0,64GiB", "policy=lru,slru,s3fifo"]);
        let grid = grid(&Options::default(), &axes).unwrap();
        let names: Vec<String> = grid.iter().map(|(values, _)| values.join(" ")).collect();
        let expected = ["0 lru", "0 slru", "0 s3fifo", "64GiB lru", "64GiB slru", "64GiB s3fifo"];
        assert_eq!(names, expected);
        assert_eq!(grid[3].1.scheduler.cache.host_pages, 32_768);
    }

    #[test]
    fn rejects_invalid_grids_before_any_replay() {
        assert!(refusal(&["host"]).contains("write NAME=VALUE"));
        assert!(refusal(&["host=1,,2"]).contains("write NAME=VALUE"));
        assert!(refusal(&["colour=red"]).contains("there is no setting \"colour\""));
        assert!(refusal(&["host=1", "host=2"]).contains("host is swept twice"));
        assert!(refusal(&["host=64GiB,lots"]).contains("host lots: write tokens"));
        let many: String = (0..200).map(|n| format!("{n},")).collect();
        let many = many.trim_end_matches(',');
        let refused = refusal(&[&format!("host={many}"), &format!("l3={many}")]);
        assert!(refused.contains("40000 configurations are too many: at most 10000"), "{refused}");
    }

    #[test]
    fn stopped_sweep_returns_an_error() {
        let trace = Synthetic { requests: 100, ..Synthetic::default() }.trace().unwrap();
        let stop = AtomicBool::new(false);
        let done = AtomicUsize::new(0);
        // Stopped after the first replay: the others do not run.
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
    fn result_does_not_depend_on_threads() {
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
    fn days_are_averaged_with_confidence() {
        let trace = Synthetic { requests: 120, ..Synthetic::default() }.trace().unwrap();
        let never = AtomicBool::new(false);
        let run = |days: &[Trace]| {
            let axes = axes(&["host=0,400k"]);
            Sweep::run_days(&never, days, &small_options(), axes, 2, &|| {}).unwrap()
        };
        let one = run(std::slice::from_ref(&trace));
        let same = run(&[trace.clone(), trace.clone(), trace.clone()]);
        for (one, same) in one.points.iter().zip(&same.points) {
            assert!((same.ttft_ms.p90 / one.ttft_ms.p90 - 1.0).abs() < 1e-9);
            let sure = same.confidence.expect("three days");
            assert!(sure.seeds == 3 && sure.ttft_ms_p90 < 1e-6, "{sure:?}");
            assert_eq!((one.confidence, one.finished), (None, same.finished));
        }
        let other = run(&[trace.clone(), trace.another_day(1), trace.another_day(2)]);
        assert!(other.points.iter().all(|point| point.confidence.unwrap().ttft_ms_p90 > 0.0));
    }
}
