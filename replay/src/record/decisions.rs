//! The decision log: every call of a live scheduler, and its repetition for comparison.

use std::fmt;
use std::io::{self, BufRead, Read};
use std::path::Path;

use serde::{Deserialize, Serialize};
use serde_json::Value;
use terrace_scheduler::{
    Config, ConfigError, Event, EventError, OpId, Outcome, Plan, Request, RequestId, Scheduler,
    Seen, StepId, StepResult, StepsInFlight, SubmitError, Time, Token, UnknownRequest, Witness,
};

use super::lines::Lines;

/// Longest line of a call.
const LINE_BYTES_MAX: u64 = 1 << 30;
/// Largest number of differing values that are named.
const NAMED_MAX: usize = 16;

/// Records every call. The file holds the tokens of all prompts and is as sensitive as they are.
#[allow(missing_debug_implementations)]
pub struct DecisionRecorder {
    lines: Lines,
}

impl DecisionRecorder {
    /// Records into a new file.
    ///
    /// # Errors
    /// Fails if the file exists or cannot be created.
    pub fn create(path: &Path) -> io::Result<Self> {
        Ok(Self { lines: Lines::create(path)? })
    }
}

#[derive(Serialize)]
struct LoggedLine<'a> {
    at: Time,
    #[serde(flatten)]
    call: LoggedCallRef<'a>,
}

/// A call as it is written; [`Call`] is its form when read.
#[derive(Serialize)]
#[serde(rename_all = "snake_case")]
enum LoggedCallRef<'a> {
    Began(&'a Config),
    Submitted(&'a Request),
    Aborted(RequestId),
    PrioritySet(RequestId, i32),
    Advanced(Event<'a>),
    Planned(&'a Plan),
    WeightsReplaced(&'a str),
    CacheCleared(()),
    DeviceCleared(()),
}

impl Witness for DecisionRecorder {
    fn saw(&mut self, at: Time, seen: Seen<'_>) {
        let call = match seen {
            Seen::Began(config) => LoggedCallRef::Began(config),
            Seen::Submitted(request) => LoggedCallRef::Submitted(request),
            Seen::Aborted(request) => LoggedCallRef::Aborted(request),
            Seen::PrioritySet(request, priority) => LoggedCallRef::PrioritySet(request, priority),
            Seen::Advanced(event) => LoggedCallRef::Advanced(event),
            Seen::Planned(plan) => LoggedCallRef::Planned(plan),
            Seen::WeightsReplaced(fingerprint) => LoggedCallRef::WeightsReplaced(fingerprint),
            Seen::CacheCleared => LoggedCallRef::CacheCleared(()),
            Seen::DeviceCleared => LoggedCallRef::DeviceCleared(()),
        };
        self.lines.add(&LoggedLine { at, call });
    }
}

#[derive(Deserialize)]
struct Line {
    at: Time,
    #[serde(flatten)]
    call: Call,
}

#[derive(Deserialize)]
#[serde(rename_all = "snake_case")]
enum Call {
    Began(Box<Config>),
    Submitted(Request),
    Aborted(RequestId),
    PrioritySet(RequestId, i32),
    Advanced(LoggedEvent),
    Planned(Value),
    WeightsReplaced(String),
    CacheCleared(()),
    DeviceCleared(()),
}

/// An [`Event`] that owns its results.
#[derive(Deserialize)]
#[serde(rename_all = "snake_case")]
enum LoggedEvent {
    StepDone {
        step: StepId,
        results: Vec<Produced>,
        #[serde(default)]
        failed: Vec<RequestId>,
    },
    StepFailed {
        step: StepId,
    },
    Operation {
        op: OpId,
        rank: u32,
        outcome: Outcome,
    },
}

#[derive(Deserialize)]
struct Produced {
    request: RequestId,
    tokens: Vec<Token>,
    finished: bool,
}

/// Result of a repetition.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Checked {
    /// Repeated calls.
    pub calls: u64,
    /// Compared plans.
    pub plans: u64,
    /// Plans that started a step.
    pub steps: u64,
    /// The first plan that differs; later calls were not repeated.
    pub difference: Option<Difference>,
    /// True if the last line is incomplete, as after the recording process was killed.
    pub ends_within_a_line: bool,
}

/// A plan that differs.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Difference {
    /// Line of the log, from 1.
    pub line: u64,
    /// Time of the plan, in microseconds since the start.
    pub at_us: u64,
    /// Differing values: the path in the plan, the value in the log, the new value.
    pub values: Vec<(String, Value, Value)>,
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "line {}, {} us: the plan differs", self.line, self.at_us)?;
        for (place, logged, planned) in &self.values {
            write!(f, "\n  {place}: was {logged}, is {planned}")?;
        }
        Ok(())
    }
}

/// A log that cannot be repeated.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DecisionError {
    /// The file cannot be read.
    #[error("line {line}: {error}")]
    Input {
        /// Line, from 1.
        line: u64,
        /// Cause.
        error: io::Error,
    },
    /// A line is not a valid call.
    #[error("line {line} is not a scheduler call: {error}; is this a decision log?")]
    Line {
        /// Line, from 1.
        line: u64,
        /// Cause.
        error: serde_json::Error,
    },
    /// The first line does not create the scheduler.
    #[error("line {line}: the log must begin with the scheduler's configuration")]
    NotBegun {
        /// Line, from 1.
        line: u64,
    },
    /// A second scheduler is created within the log.
    #[error("line {line}: a second scheduler starts; a log must have only one, so split it here")]
    BegunTwice {
        /// Line, from 1.
        line: u64,
    },
    /// The scheduler rejects a call that it accepted when recorded.
    #[error("line {line}: a call that was accepted when recorded is refused: {refusal}")]
    Refused {
        /// Line, from 1.
        line: u64,
        /// Cause.
        refusal: Refusal,
    },
}

/// Cause of a rejection.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Refusal {
    /// The configuration.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// A request.
    #[error(transparent)]
    Submit(#[from] SubmitError),
    /// An abort.
    #[error(transparent)]
    Abort(#[from] UnknownRequest),
    /// An event.
    #[error(transparent)]
    Event(#[from] EventError),
    /// New weights.
    #[error(transparent)]
    Weights(#[from] StepsInFlight),
}

/// Repeats the calls of a log with a new scheduler and compares each plan with the logged one, up
/// to the first difference. `follow` is called with the line, time and content of every plan.
///
/// # Errors
/// Fails if the log cannot be parsed or repeated.
pub fn check_decisions(
    mut log: impl BufRead,
    mut follow: impl FnMut(u64, Time, &Plan),
) -> Result<Checked, DecisionError> {
    let mut checked = Checked::default();
    let (mut scheduler, mut plan, mut bytes) = (None, Plan::default(), Vec::new());
    for line in 1.. {
        bytes.clear();
        let read = (&mut log).take(LINE_BYTES_MAX).read_until(b'\n', &mut bytes);
        read.map_err(|error| DecisionError::Input { line, error })?;
        if bytes.is_empty() {
            break;
        }
        if bytes.last() != Some(&b'\n') && (bytes.len() as u64) < LINE_BYTES_MAX {
            checked.ends_within_a_line = true;
            break;
        }
        let Line { at, call } =
            serde_json::from_slice(&bytes).map_err(|error| DecisionError::Line { line, error })?;
        checked.calls += 1;
        let refused = |refusal| DecisionError::Refused { line, refusal };
        if let Call::Began(config) = call {
            if scheduler.is_some() {
                return Err(DecisionError::BegunTwice { line });
            }
            scheduler = Some(Scheduler::new(*config).map_err(|error| refused(error.into()))?);
            continue;
        }
        let scheduler = scheduler.as_mut().ok_or(DecisionError::NotBegun { line })?;
        let Call::Planned(logged) = call else {
            make(scheduler, at, call).map_err(refused)?;
            continue;
        };
        scheduler.plan_into(at, &mut plan);
        scheduler.drain_trace().for_each(drop);
        follow(line, at, &plan);
        checked.plans += 1;
        checked.steps += u64::from(plan.step.is_some());
        let planned = serde_json::to_value(&plan).expect("a plan can be written as JSON");
        if planned != logged {
            let mut values = Vec::new();
            compare("", &logged, &planned, &mut values);
            checked.difference = Some(Difference { line, at_us: at.0, values });
            break;
        }
    }
    match scheduler {
        Some(_) => Ok(checked),
        None => Err(DecisionError::NotBegun { line: 1 }),
    }
}

fn make(scheduler: &mut Scheduler, at: Time, call: Call) -> Result<(), Refusal> {
    match call {
        Call::Submitted(request) => scheduler.submit(at, request)?,
        Call::Aborted(request) => scheduler.abort(at, request)?,
        Call::PrioritySet(request, priority) => scheduler.set_priority(request, priority)?,
        Call::Advanced(LoggedEvent::StepDone { step, results, failed }) => {
            let results: Vec<_> = results
                .iter()
                .map(|Produced { request, tokens, finished }| StepResult {
                    request: *request,
                    tokens,
                    finished: *finished,
                })
                .collect();
            scheduler.advance(at, Event::StepDone { step, results: &results, failed: &failed })?;
        }
        Call::Advanced(LoggedEvent::StepFailed { step }) => {
            scheduler.advance(at, Event::StepFailed { step })?;
        }
        Call::Advanced(LoggedEvent::Operation { op, rank, outcome }) => {
            scheduler.advance(at, Event::Operation { op, rank, outcome })?;
        }
        Call::WeightsReplaced(fingerprint) => scheduler.replace_weights(at, &fingerprint)?,
        Call::CacheCleared(()) => {
            scheduler.clear_cache();
        }
        Call::DeviceCleared(()) => {
            scheduler.clear_device();
        }
        Call::Began(_) | Call::Planned(_) => unreachable!("the caller does these itself"),
    }
    Ok(())
}

/// Collects the paths at which two values differ.
fn compare(place: &str, was: &Value, is: &Value, values: &mut Vec<(String, Value, Value)>) {
    if was == is || values.len() == NAMED_MAX {
        return;
    }
    match (was, is) {
        (Value::Object(was), Value::Object(is)) if was.len() == is.len() => {
            for (name, value) in was {
                let now = is.get(name).unwrap_or(&Value::Null);
                compare(&format!("{place}.{name}"), value, now, values);
            }
        }
        (Value::Array(was), Value::Array(is)) if was.len() == is.len() => {
            for (index, (was, is)) in was.iter().zip(is).enumerate() {
                compare(&format!("{place}[{index}]"), was, is, values);
            }
        }
        _ => values.push((place.trim_start_matches('.').to_owned(), was.clone(), is.clone())),
    }
}
