//! `terrace decisions`: does again what the scheduler of a server did, and compares.

use std::error::Error;
use std::fmt::Write as _;
use std::fs::File;
use std::io::{BufRead, BufReader, Write as _, stdin, stdout};
use std::path::PathBuf;

use terrace_replay::{Checked, check_decisions};
use terrace_scheduler::{Plan, Time};

/// Arguments of `terrace decisions`.
#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// A decision log written by `terrace serve --decision-log`; `-` for standard input
    log: PathBuf,
    /// Print every plan
    #[arg(long, conflicts_with = "json")]
    steps: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(arguments: &Arguments) -> Result<String, Box<dyn Error>> {
    let name = arguments.log.display();
    let log: Box<dyn BufRead> = if arguments.log.as_os_str() == "-" {
        Box::new(stdin().lock())
    } else {
        Box::new(BufReader::new(File::open(&arguments.log).map_err(|e| format!("{name}: {e}"))?))
    };
    let mut out = stdout().lock();
    let checked = check_decisions(log, |line, at, plan| {
        if arguments.steps && !plan.is_idle() {
            // Whoever reads may have read enough.
            let _ = writeln!(out, "{}", told(line, at, plan));
        }
    })
    .map_err(|error| format!("{name}: {error}"))?;
    if arguments.json {
        // Also of a difference: the program then ends with an error all the same.
        writeln!(out, "{}", serde_json::to_string_pretty(&checked)?)?;
    }
    match (&checked.difference, arguments.json) {
        (None, true) => Ok(String::new()),
        (None, false) => Ok(summary(&checked) + "\n"),
        (Some(_), true) => Err("a plan differs from the recorded one".into()),
        (Some(_), false) => Err(summary(&checked).into()),
    }
}

/// A plan in a line.
fn told(line: u64, at: Time, plan: &Plan) -> String {
    let mut text = format!("{line:>8} {:>12.3} ms", at.0 as f64 / 1000.0);
    for prefill in &plan.prefills {
        let end = prefill.start + prefill.tokens;
        let _ = write!(text, "  {} prefills {}..{end}", prefill.request, prefill.start);
    }
    if let [first, .., last] = &plan.decodes[..] {
        let count = plan.decodes.len();
        let _ = write!(text, "  {count} decode, {} to {}", first.request, last.request);
    } else if let [decode] = &plan.decodes[..] {
        let _ = write!(text, "  {} decodes", decode.request);
    }
    for copy in &plan.copies {
        let _ = write!(text, "  {} {:?} {}", copy.op, copy.direction, plan.host_pages(copy).len());
    }
    for op in &plan.l3 {
        let _ = write!(text, "  {} {:?} {}", op.op, op.kind, plan.l3_keys(op).len());
    }
    for op in &plan.cancelled {
        let _ = write!(text, "  {op} cancelled");
    }
    for ended in &plan.ended {
        let _ = write!(text, "  {} {:?}", ended.request, ended.state);
    }
    text
}

fn summary(checked: &Checked) -> String {
    let Checked { calls, plans, steps, difference, ends_within_a_line } = checked;
    let mut text = match difference {
        None => format!(
            "{calls} calls re-run: all {plans} plans, {steps} of them with a step, are the same"
        ),
        Some(difference) => format!("after {plans} plans: {difference}"),
    };
    if *ends_within_a_line {
        text.push_str("\nthe last line is incomplete and was skipped");
    }
    text
}
