//! What a replay found, for a terminal.

use std::fmt::Write;

use terrace_replay::human::{bytes, count, milliseconds, percent, seconds, whole};
use terrace_replay::{Arrival, Config, Distribution, Report};

use super::Run;

/// The longest bar of a tier: all prompt tokens.
const BAR_CELLS: f64 = 60.0;

pub(super) fn draw(trace: &str, report: &Report, run: &Run) -> String {
    let mut text = format!(
        "{trace}: {} requests in {}\n  {}\n\n",
        whole(report.requests),
        seconds(report.virtual_s),
        machine(report)
    );
    if report.failed + report.refused > 0 {
        let _ = writeln!(
            text,
            "  {} requests failed, {} were too long for the device\n",
            whole(report.failed),
            whole(report.refused)
        );
    }
    let reuse = &report.reuse;
    let _ = writeln!(
        text,
        "  hit rate     {} of prompt tokens; an unlimited cache would reach {}",
        percent(reuse.total),
        percent(reuse.ceiling)
    );
    for (name, share) in [("device", reuse.device), ("host", reuse.host), ("L3", reuse.l3)] {
        let bar = "█".repeat((share * BAR_CELLS).round() as usize);
        let _ = writeln!(text, "    {name:<10} {:<7} {bar}", percent(share));
    }
    let _ = writeln!(
        text,
        "\n  {:<13}{:>13}{:>13}{:>13}{:>13}{:>13}",
        "", "mean", "p50", "p90", "p99", "max"
    );
    distribution(&mut text, "TTFT", &report.ttft_ms);
    distribution(&mut text, "ITL", &report.itl_ms);
    distribution(&mut text, "TPOT", &report.tpot_ms);
    distribution(&mut text, "end to end", &report.e2e_ms);
    distribution(&mut text, "queue", &report.queue_ms);
    let unmeasured = report.finished.saturating_sub(report.e2e_ms.count);
    if unmeasured > 0 {
        let _ = writeln!(text, "  excluding {} warm-up requests", whole(unmeasured));
    }
    let busy = report.workers.iter().map(|worker| worker.busy).sum::<f64>();
    let _ = writeln!(
        text,
        "\n  throughput   {} output tokens/s, {} prompt tokens/s; workers busy {} of the time",
        count(report.output_tokens_per_s),
        count(report.prompt_tokens_per_s),
        percent(busy / report.workers.len().max(1) as f64)
    );
    let comes_on_its_own = matches!(report.config.arrival, Arrival::Trace { .. });
    let waits = report.queue_ms.p50 > report.itl_ms.p50;
    if comes_on_its_own && waits && busy / report.workers.len().max(1) as f64 > 0.98 {
        text += "               overloaded: requests arrive faster than the workers serve them\n";
    }
    if let Some(goods) = &report.goodput {
        let _ = writeln!(
            text,
            "  goodput      {} of requests meet the SLO, {:.2}/s; TTFT met by {}, TPOT by {}: {}",
            percent(goods.share),
            goods.requests_per_s,
            percent(goods.ttft_share),
            percent(goods.tpot_share),
            if goods.is_kept { "the SLO is met" } else { "the SLO is missed" }
        );
    }
    let spend = &report.spend;
    let _ = writeln!(
        text,
        "  cost         {:.2} per hour (GPUs {:.2}, host memory {:.2}, L3 {:.2}); {:.3} per million tokens, \
         {:.2} per million output tokens",
        spend.per_hour,
        spend.gpu_per_hour,
        spend.host_per_hour,
        spend.l3_per_hour,
        spend.per_million_tokens,
        spend.per_million_output_tokens
    );
    let moved = &report.bytes_moved;
    let _ = writeln!(
        text,
        "  transferred  host to device {}, device to host {}; L3 to host {}, host to L3 {}",
        bytes(moved.host_to_device as f64),
        bytes(moved.device_to_host as f64),
        bytes(moved.l3_to_host as f64),
        bytes(moved.host_to_l3 as f64)
    );
    text += &took(run);
    text
}

/// What it took to find out.
pub(super) fn took(run: &Run) -> String {
    let memory = run.peak_rss_mb.map_or(String::new(), |mb| format!(", {mb:.0} MB of memory"));
    format!("  took         {}{memory}\n", milliseconds(run.wall_s * 1000.0))
}

fn machine(report: &Report) -> String {
    let config: &Config = &report.config;
    let cache = &config.scheduler.cache;
    let size = |pages: u64| {
        let tokens = pages * u64::from(cache.page_size);
        let weight = bytes((tokens * config.kv_bytes_per_token) as f64);
        format!("{} tokens ({weight})", count(tokens as f64))
    };
    let workers = match (config.workers_in_all(), config.also.len()) {
        (1, _) => "one worker".to_owned(),
        (workers, 0) => format!("{workers} workers"),
        (workers, others) => format!("{workers} workers of {} kinds, the first one", others + 1),
    };
    let l3 = match (&config.scheduler.l3, config.store.pages_max, report.store) {
        (None, _, _) | (_, _, None) => "no L3".to_owned(),
        (Some(_), Some(pages), Some(_)) => format!("L3 {}", size(pages)),
        (Some(_), None, Some(store)) => {
            format!("unlimited L3, peak {}", size(store.pages_peak))
        }
    };
    let host = match cache.host_pages {
        0 => "no host".to_owned(),
        pages => format!("host {}", size(pages.into())),
    };
    format!(
        "{workers}, pages of {}: device {}, {host}, {l3}",
        cache.page_size,
        size(cache.device_pages.into())
    )
}

fn distribution(text: &mut String, name: &str, of: &Distribution) {
    let [mean, p50, p90, p99, max] = [of.mean, of.p50, of.p90, of.p99, of.max].map(milliseconds);
    let _ = writeln!(text, "  {name:<13}{mean:>13}{p50:>13}{p90:>13}{p99:>13}{max:>13}");
}
