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
            "  {} requests failed, and {} were too long for the device\n",
            whole(report.failed),
            whole(report.refused)
        );
    }
    let reuse = &report.reuse;
    let _ = writeln!(
        text,
        "  reused       {} of prompt tokens; a cache without limits: {}",
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
    distribution(&mut text, "first token", &report.ttft_ms);
    distribution(&mut text, "between", &report.itl_ms);
    distribution(&mut text, "by answer", &report.tpot_ms);
    distribution(&mut text, "whole answer", &report.e2e_ms);
    distribution(&mut text, "in the queue", &report.queue_ms);
    let unmeasured = report.finished.saturating_sub(report.e2e_ms.count);
    if unmeasured > 0 {
        let _ = writeln!(text, "  without the first {} requests: the warm-up", whole(unmeasured));
    }
    let busy = report.workers.iter().map(|worker| worker.busy).sum::<f64>();
    let _ = writeln!(
        text,
        "\n  tokens       {} produced in a second, {} of prompts taken; {} of the time computing",
        count(report.output_tokens_per_s),
        count(report.prompt_tokens_per_s),
        percent(busy / report.workers.len().max(1) as f64)
    );
    let comes_on_its_own = matches!(report.config.arrival, Arrival::Trace { .. });
    let waits = report.queue_ms.p50 > report.itl_ms.p50;
    if comes_on_its_own && waits && busy / report.workers.len().max(1) as f64 > 0.98 {
        text +=
            "               requests come faster than they are served: they wait for the workers\n";
    }
    if let Some(goods) = &report.goodput {
        let _ = writeln!(
            text,
            "  promised     {} of requests are good, {:.2} in a second; {} in time, {} fast enough: {}",
            percent(goods.share),
            goods.requests_per_s,
            percent(goods.ttft_share),
            percent(goods.tpot_share),
            if goods.is_kept { "the promise is kept" } else { "the promise is not kept" }
        );
    }
    let spend = &report.spend;
    let _ = writeln!(
        text,
        "  costs        {:.2} an hour (GPUs {:.2}, host memory {:.2}, L3 {:.2}); {:.3} a million tokens, \
         {:.2} a million of answers",
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
        "  moved        host to device {}, back {}; L3 to host {}, back {}",
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
        (workers, others) => format!("{workers} workers of {} kinds, the first", others + 1),
    };
    let l3 = match (&config.scheduler.l3, config.store.pages_max, report.store) {
        (None, _, _) | (_, _, None) => "no L3".to_owned(),
        (Some(_), Some(pages), Some(_)) => format!("L3 {}", size(pages)),
        (Some(_), None, Some(store)) => {
            format!("L3 without limit, up to {}", size(store.pages_peak))
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
