//! The page of one replay.

use maud::{Markup, html};

use super::coarse::coarse;
use super::{chart_section, figure, heading, key, plots, section, slowest, table};
use crate::human::{bytes, count, milliseconds, percent, seconds, whole};
use crate::report::{Distribution, LinkUse, Report};

pub(super) fn body(trace: &str, report: &Report) -> Markup {
    let series = &coarse(&report.series, report.virtual_s);
    let hits = [plots::hits(series), plots::reuse_total(series), plots::prompts(series)];
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
    let transfers = [plots::moved(series), plots::moved_so_far(series), plots::busy(series)];
    let work = [plots::states(series), plots::load(series), plots::output(series)];
    let config = serde_json::to_string_pretty(&report.config).unwrap_or_default();
    html! {
        (header(trace, report))
        (chart_section("Hit rate by tier", &hits))
        (chart_section("Latency", &[ttft, itl, plots::ttft_over_time(series)]))
        (chart_section("Tier occupancy", &occupancy))
        (chart_section("Transfers", &transfers))
        (chart_section("Requests and workers", &work))
        (slowest::section(&report.slowest))
        (links(report))
        (workers(report))
        section { details { summary { "The configuration that was replayed" } pre { (config) } } }
    }
}

fn header(trace: &str, report: &Report) -> Markup {
    let reuse = &report.reuse;
    let tiers =
        [("device", "device", reuse.device), ("host", "host", reuse.host), ("L3", "l3", reuse.l3)];
    html! {
        header {
            (heading("Replay of", trace, &report.config.machine()))
            p.quiet { (report.tiers()) }
            p.answer { (with_flags(&report.verdict.text)) }
            (figures(report))
            @if report.failed + report.refused > 0 {
                p.alarm {
                    (whole(report.failed)) " requests failed, and " (whole(report.refused))
                    " were too long for the device."
                }
            }
            div.reuse {
                @for (_, colour, share) in tiers {
                    span style=(format!("--c:var(--{colour});width:{:.3}%", share * 100.0)) {}
                }
                i style=(format!("left:{:.3}%", reuse.ceiling * 100.0)) {}
            }
            ul.legend {
                @for (name, colour, share) in tiers {
                    (key(colour, &format!("{name} {}", percent(share))))
                }
                li { "ceiling " (percent(reuse.ceiling)) }
            }
        }
    }
}

fn figures(report: &Report) -> Markup {
    let time = |name: &str, of: &Distribution| {
        let [p50, p90, p99] = [of.p50, of.p90, of.p99].map(milliseconds);
        figure(name, &milliseconds(of.mean), &format!("p50 {p50}, p90 {p90}, p99 {p99}"))
    };
    let ceiling = format!("unlimited cache: {}", percent(report.reuse.ceiling));
    let cost = format!("${:.3}", report.spend.per_million_tokens);
    let cost_per_hour = format!("${:.2} per hour", report.spend.per_hour);
    let prompts = format!("{} prompt tokens/s", count(report.prompt_tokens_per_s));
    html! {
        dl.figures {
            (figure("hit rate", &percent(report.reuse.total), &ceiling))
            (time("TTFT, mean", &report.ttft_ms))
            (time("ITL, mean", &report.itl_ms))
            (time("TPOT, mean", &report.tpot_ms))
            @if let Some(goods) = &report.goodput {
                @let kept = if goods.is_kept { "the SLO is met" } else { "the SLO is not met" };
                @let rate = format!("{:.2} in a second; {kept}", goods.requests_per_s);
                (figure("good requests", &percent(goods.share), &rate))
            }
            (figure("cost per million tokens", &cost, &cost_per_hour))
            (figure("requests", &whole(report.requests), &format!("in {}", seconds(report.virtual_s))))
            (figure("output tokens/s", &count(report.output_tokens_per_s), &prompts))
        }
    }
}

/// Renders command-line flags as code, without line breaks within them.
fn with_flags(text: &str) -> Markup {
    let is_part = |character: char| character == '-' || character.is_ascii_alphanumeric();
    let Some(start) = text.find("--") else { return html! { (text) } };
    let (before, flag) = text.split_at(start);
    let (flag, after) = flag.split_at(flag.find(|c| !is_part(c)).unwrap_or(flag.len()));
    html! { (before) code { (flag) } (with_flags(after)) }
}

fn links(report: &Report) -> Markup {
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
    section("Links", &table(&names, &rows))
}

fn workers(report: &Report) -> Markup {
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
    section("Workers", &table(&names, &rows))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_are_rendered_as_code() {
        let text = "Try <more> (--gpus, --gpu). Nothing - else--";
        let marked = "Try &lt;more&gt; (<code>--gpus</code>, <code>--gpu</code>). Nothing - else<code>--</code>";
        assert_eq!(with_flags(text).into_string(), marked);
    }
}
