//! The page of one replay.

use std::fmt::Write;

use super::chart::Chart;
use super::coarse::coarse;
use super::{escape, figure, heading, plots, slowest, table};
use crate::human::{bytes, count, milliseconds, percent, seconds, whole};
use crate::report::{Distribution, LinkUse, Report};

pub(super) fn body(trace: &str, report: &Report) -> String {
    let mut html = header(trace, report);
    let section = |title: &str, charts: Vec<Chart>| {
        let charts: String = charts.iter().map(Chart::html).collect();
        format!("<section><h2>{title}</h2><div class=\"plots\">{charts}</div></section>\n")
    };
    let series = &coarse(&report.series, report.virtual_s);
    html += &section(
        "Hit rate by tier",
        vec![plots::hits(series), plots::reuse_total(series), plots::prompts(series)],
    );
    let ttft = plots::distribution(
        "Time to first token (TTFT)",
        "Share of requests whose first token came within this time.",
        "requests",
        &report.ttft_curve,
        &report.ttft_ms,
    );
    let itl = plots::distribution(
        "Inter-token latency (ITL)",
        "Share of tokens that came within this time after the previous one.",
        "tokens",
        &report.itl_curve,
        &report.itl_ms,
    );
    html += &section("Latency", vec![ttft, itl, plots::ttft_over_time(series)]);
    let mut occupancy = vec![
        plots::tier(
            "Device",
            "device",
            &series.device_used,
            &series.device_pinned,
            series.interval_s,
        ),
        plots::tier("Host", "host", &series.host_used, &series.host_pinned, series.interval_s),
    ];
    if report.store.is_some() {
        occupancy.push(plots::l3(report, series));
    }
    html += &section("Tier occupancy", occupancy);
    html += &section(
        "Transfers",
        vec![plots::moved(series), plots::moved_so_far(series), plots::busy(series)],
    );
    html += &section(
        "Requests and workers",
        vec![plots::states(series), plots::load(series), plots::output(series)],
    );
    html += &slowest::section(&report.slowest);
    html += &links(report);
    html += &workers(report);
    let config = serde_json::to_string_pretty(&report.config).unwrap_or_default();
    let _ = writeln!(
        html,
        "<section><details><summary>The configuration that was replayed</summary><pre>{}</pre>\
         </details></section>",
        escape(&config)
    );
    html
}

fn header(trace: &str, report: &Report) -> String {
    let reuse = &report.reuse;
    let distribution = |of: &Distribution| {
        let [p50, p90, p99] = [of.p50, of.p90, of.p99].map(milliseconds);
        format!("p50 {p50}, p90 {p90}, p99 {p99}")
    };
    let mut html = heading("Replay of", trace, &report.config.machine());
    let _ = write!(
        html,
        "<p class=\"quiet\">{}</p><p class=\"answer\">{}</p>",
        escape(&report.tiers()),
        with_flags(&escape(&report.verdict.text))
    );
    html.push_str("<dl class=\"figures\">");
    html += &figure(
        "hit rate",
        &percent(reuse.total),
        &format!("unlimited cache: {}", percent(reuse.ceiling)),
    );
    html +=
        &figure("TTFT, mean", &milliseconds(report.ttft_ms.mean), &distribution(&report.ttft_ms));
    html += &figure("ITL, mean", &milliseconds(report.itl_ms.mean), &distribution(&report.itl_ms));
    html +=
        &figure("TPOT, mean", &milliseconds(report.tpot_ms.mean), &distribution(&report.tpot_ms));
    if let Some(goods) = &report.goodput {
        let kept = if goods.is_kept { "the SLO is met" } else { "the SLO is not met" };
        let rate = format!("{:.2} in a second; {kept}", goods.requests_per_s);
        html += &figure("good requests", &percent(goods.share), &rate);
    }
    html += &figure(
        "cost per million tokens",
        &format!("{:.3}", report.spend.per_million_tokens),
        &format!("{:.2} per hour", report.spend.per_hour),
    );
    html +=
        &figure("requests", &whole(report.requests), &format!("in {}", seconds(report.virtual_s)));
    html += &figure(
        "output tokens/s",
        &count(report.output_tokens_per_s),
        &format!("{} prompt tokens/s", count(report.prompt_tokens_per_s)),
    );
    html.push_str("</dl>");
    if report.failed + report.refused > 0 {
        let _ = write!(
            html,
            "<p class=\"alarm\">{} requests failed, and {} were too long for the device.</p>",
            whole(report.failed),
            whole(report.refused)
        );
    }
    html.push_str("<div class=\"reuse\">");
    let tiers = [("device", reuse.device), ("host", reuse.host), ("l3", reuse.l3)];
    for (tier, share) in tiers {
        let _ =
            write!(html, "<span style=\"--c:var(--{tier});width:{:.3}%\"></span>", share * 100.0);
    }
    let _ = write!(
        html,
        "<i style=\"left:{:.3}%\"></i></div><ul class=\"legend\">",
        reuse.ceiling * 100.0
    );
    for ((tier, share), name) in tiers.into_iter().zip(["device", "host", "L3"]) {
        let _ = write!(
            html,
            "<li><span class=\"key\" style=\"--c:var(--{tier})\"></span>{name} {}</li>",
            percent(share)
        );
    }
    let _ = writeln!(html, "<li>ceiling {}</li></ul></header>", percent(reuse.ceiling));
    html
}

/// Flags of the program look like such, and are not broken at the end of a line.
fn with_flags(escaped: &str) -> String {
    let is_part = |character: char| character == '-' || character.is_ascii_alphanumeric();
    let mut html = String::new();
    let mut rest = escaped;
    while let Some(start) = rest.find("--") {
        let (before, flag) = rest.split_at(start);
        let (flag, after) = flag.split_at(flag.find(|c| !is_part(c)).unwrap_or(flag.len()));
        let _ = write!(html, "{before}<code>{flag}</code>");
        rest = after;
    }
    html + rest
}

fn links(report: &Report) -> String {
    let name = |link: &LinkUse| {
        let name = link.link.in_words();
        match link.worker {
            Some(worker) => format!("worker {worker}, {name}"),
            None => name.to_owned(),
        }
    };
    let rows: Vec<Vec<String>> = report
        .links
        .iter()
        .map(|link| {
            vec![
                name(link),
                whole(link.transfers),
                bytes(link.bytes as f64),
                percent(link.busy),
                milliseconds(link.wait_ms_mean),
            ]
        })
        .collect();
    let names = ["link", "transfers", "moved", "in use", "mean wait"];
    format!("<section><h2>Links</h2>{}</section>\n", table(&names, &rows))
}

fn workers(report: &Report) -> String {
    let rows: Vec<Vec<String>> = report
        .workers
        .iter()
        .enumerate()
        .map(|(number, worker)| {
            vec![
                number.to_string(),
                whole(worker.requests),
                whole(worker.steps),
                percent(worker.busy),
                format!("{:.1}", worker.decodes_per_step),
                whole(worker.running_peak.into()),
                whole(worker.waiting_peak.into()),
                whole(worker.scheduler.retractions),
                whole(worker.scheduler.prefetches.failures),
            ]
        })
        .collect();
    let names = [
        "worker",
        "requests",
        "steps",
        "computing",
        "decodes per step",
        "most running",
        "most waiting",
        "retractions",
        "failed fetches",
    ];
    format!("<section><h2>Workers</h2>{}</section>\n", table(&names, &rows))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_stand_out() {
        let text = "Try more (--gpus, --gpu). Nothing - else--";
        let marked =
            "Try more (<code>--gpus</code>, <code>--gpu</code>). Nothing - else<code>--</code>";
        assert_eq!(with_flags(text), marked);
    }
}
