//! Summary of a replay for a terminal.

use std::fmt::Write;

use terrace_replay::human::{bytes, count, milliseconds, percent, seconds, whole};
use terrace_replay::{Distribution, Report};

use super::Run;

/// The longest bar of a tier: all prompt tokens.
const BAR_CELLS: f64 = 60.0;
/// The longest line of a paragraph.
const PARAGRAPH_CELLS: usize = 100;

pub(super) fn draw(trace: &str, report: &Report, run: &Run) -> String {
    let mut text = format!(
        "{trace}: {} requests in {}\n  {}\n  {}\n\n",
        whole(report.requests),
        seconds(report.virtual_s),
        report.config.machine(),
        report.tiers()
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
    let _ = writeln!(
        text,
        "\n  throughput   {} output tokens/s, {} prompt tokens/s; workers busy {} of the time",
        count(report.output_tokens_per_s),
        count(report.prompt_tokens_per_s),
        percent(report.busy())
    );
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
        "  cost         ${:.2} per hour (GPUs ${:.2}, host memory ${:.2}, L3 ${:.2}); ${:.3} per million tokens, \
         ${:.2} per million output tokens",
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
    let _ = writeln!(text, "\n{}", wrapped(&report.verdict.text));
    text += &took(run);
    text
}

/// Sentences as a paragraph as wide as the lines above it.
fn wrapped(sentences: &str) -> String {
    let (mut paragraph, mut width) = (String::new(), 0);
    for word in sentences.split(' ') {
        let length = word.chars().count() + 1;
        let is_first = width == 0 || width + length > PARAGRAPH_CELLS;
        if is_first {
            paragraph += if paragraph.is_empty() { "  " } else { "\n  " };
        } else {
            paragraph.push(' ');
        }
        width = if is_first { length } else { width + length };
        paragraph += word;
    }
    paragraph + "\n"
}

/// What it took to find out.
pub(super) fn took(run: &Run) -> String {
    let memory = run.peak_rss_mb.map_or(String::new(), |mb| format!(", {mb:.0} MB of memory"));
    format!("  took         {}{memory}\n", milliseconds(run.wall_s * 1000.0))
}

fn distribution(text: &mut String, name: &str, of: &Distribution) {
    let [mean, p50, p90, p99, max] = [of.mean, of.p50, of.p90, of.p99, of.max].map(milliseconds);
    let _ = writeln!(text, "  {name:<13}{mean:>13}{p50:>13}{p90:>13}{p99:>13}{max:>13}");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paragraphs_keep_their_words_and_their_width() {
        let sentences = "Nothing is short. ".repeat(30).trim_end().to_owned();
        let paragraph = wrapped(&sentences);
        let lines: Vec<&str> = paragraph.lines().collect();
        assert!(lines.len() > 3);
        assert!(
            lines.iter().all(|line| line.starts_with("  ") && line.len() <= PARAGRAPH_CELLS + 2)
        );
        let words: Vec<&str> = paragraph.split_whitespace().collect();
        assert_eq!(words.join(" "), sentences);
    }
}
