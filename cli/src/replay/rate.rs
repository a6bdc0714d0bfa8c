//! The largest rate at which promises are kept, for a terminal.

use std::fmt::Write;

use serde::Serialize;
use terrace_replay::human::{milliseconds, percent};
use terrace_replay::{RateSearch, Slo, TriedRate};

use super::Run;
use super::summary::took;

/// A search, and the arrival times that it used.
#[derive(Serialize)]
pub(super) struct Found<'a> {
    #[serde(flatten)]
    pub(super) search: &'a RateSearch,
    /// Number of days on which each rate was replayed.
    pub(super) days: usize,
    /// Interval to which the trace's arrival times are rounded, over which requests were spread.
    pub(super) arrivals_spread_over_s: Option<f64>,
}

pub(super) fn draw(trace: &str, slo: &Slo, found: &Found, run: &Run) -> String {
    let search = found.search;
    let mut text = format!("{trace}: {}\n", promise(slo));
    if let Some(interval_s) = found.arrivals_spread_over_s {
        let _ = writeln!(
            text,
            "Arrival times are multiples of {interval_s} s: the requests of each are spread evenly over {interval_s} s"
        );
    }
    if found.days > 1 {
        let _ = writeln!(text, "Each rate is replayed on {} days with different seeds", found.days);
    }
    text += "\n";
    let _ = writeln!(
        text,
        "  {:>12}{:>10}{:>10}{:>12}{:>12}{:>14}",
        "requests/s", "speed-up", "good", "TTFT p90", "TPOT p90", "$/1M"
    );
    for tried in &search.tried {
        let mark = if search.best == Some(*tried) { "*" } else { " " };
        let _ = writeln!(
            text,
            "{mark} {:>12.3}{:>10.3}{:>10}{:>12}{:>12}{:>14.3}",
            tried.requests_per_s,
            tried.speed_up,
            percent(tried.goodput.share),
            milliseconds(tried.ttft_ms_p90),
            milliseconds(tried.tpot_ms_p90),
            tried.per_million_tokens
        );
    }
    text += &format!("\n* {}\n\n", answer(search));
    text += &took(run);
    text
}

fn promise(slo: &Slo) -> String {
    let mut parts = Vec::new();
    if let Some(ms) = slo.ttft_ms {
        parts.push(format!("TTFT up to {}", milliseconds(ms)));
    }
    if let Some(ms) = slo.tpot_ms {
        parts.push(format!("TPOT up to {}", milliseconds(ms)));
    }
    format!("SLO: {} for {} of requests", parts.join(" and "), percent(slo.share))
}

fn answer(search: &RateSearch) -> String {
    let rate = |tried: &TriedRate| format!("{:.2} requests/s", tried.requests_per_s);
    match (&search.best, &search.broken) {
        (Some(best), Some(broken)) => format!(
            "The SLO is met up to {} (goodput {:.2}/s), at a cost of ${:.3} per million tokens; it is missed \
             at {}.",
            rate(best),
            best.goodput.requests_per_s,
            best.per_million_tokens,
            rate(broken)
        ),
        (Some(best), None) => format!("The SLO is met even at {}.", rate(best)),
        (None, Some(broken)) => format!("The SLO is missed even at {}.", rate(broken)),
        (None, None) => "Nothing was tried.".to_owned(),
    }
}
