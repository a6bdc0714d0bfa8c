//! The description of a trace, drawn for a terminal.

use std::fmt::Write;

use terrace_replay::human::{count, percent, seconds, whole};
use terrace_replay::trace::{Bin, Description, Lengths};

/// The longest bar.
const BAR_CELLS: f64 = 40.0;

pub(super) fn draw(name: &str, described: &Description) -> String {
    let mut text = String::new();
    let rate = described.requests as f64 / described.span_s.max(1e-9);
    let _ = writeln!(
        text,
        "{name}: {} requests in {} ({rate:.2}/s), blocks of {} tokens",
        whole(described.requests),
        seconds(described.span_s),
        described.block_tokens
    );
    lengths(&mut text, "Prompts", &described.input);
    lengths(&mut text, "Outputs", &described.output);
    arrivals(&mut text, described);
    sharing(&mut text, described);
    working_sets(&mut text, described);
    ceilings(&mut text, described);
    text
}

/// A bar in eighths of a cell.
pub(crate) fn bar(share: f64) -> String {
    let eighths = (share.clamp(0.0, 1.0) * BAR_CELLS * 8.0).round() as usize;
    let rest = ["", "▏", "▎", "▍", "▌", "▋", "▊", "▉"][eighths % 8];
    // Something is never drawn as nothing.
    let rest = if eighths == 0 && share > 0.0 { "▏" } else { rest };
    "█".repeat(eighths / 8) + rest
}

fn lengths(text: &mut String, what: &str, lengths: &Lengths) {
    let _ = writeln!(
        text,
        "\n{what}: {} tokens, mean {}, p50 {}, p90 {}, p99 {}, max {}",
        count(lengths.total as f64),
        count(lengths.mean.round()),
        whole(lengths.p50.into()),
        whole(lengths.p90.into()),
        whole(lengths.p99.into()),
        whole(lengths.max.into())
    );
    histogram(text, &lengths.histogram, |bin| format!("{} to {}", short(bin.from), short(bin.to)));
}

/// Powers of two as people write them.
fn short(tokens: u32) -> String {
    match tokens {
        0..1024 => tokens.to_string(),
        _ if (tokens + 1).is_multiple_of(1024) => format!("{}k", (tokens + 1) / 1024),
        _ => format!("{}k", tokens / 1024),
    }
}

fn histogram(text: &mut String, bins: &[Bin], name: impl Fn(&Bin) -> String) {
    let most = bins.iter().map(|bin| bin.count).max().unwrap_or(0).max(1);
    for bin in bins {
        let drawn = bar(bin.count as f64 / most as f64);
        let _ = writeln!(text, "  {:>14}  {:>8}  {drawn}", name(bin), whole(bin.count));
    }
}

fn arrivals(text: &mut String, described: &Description) {
    let most = described.periods.iter().map(|period| period.requests).max().unwrap_or(0).max(1);
    let levels = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];
    let drawn: String = described
        .periods
        .iter()
        .map(|period| match period.requests {
            0 => ' ',
            requests => levels[((requests * 7) as f64 / most as f64).round() as usize],
        })
        .collect();
    let length = described.periods.get(1).map_or(0.0, |period| period.start_s);
    let _ = writeln!(
        text,
        "\nArrivals over time, up to {} in {}:\n  {drawn}",
        whole(most),
        seconds(length)
    );
}

fn sharing(text: &mut String, described: &Description) {
    let sharing = &described.sharing;
    let reused = described.ceilings.iter().find(|at| at.page_size == described.page_size);
    let _ = writeln!(
        text,
        "\nPrefix sharing: {} of prompt tokens repeat an earlier prefix; {} distinct tokens",
        reused.map_or(String::new(), |at| percent(at.ratio)),
        count(sharing.distinct_tokens as f64)
    );
    let _ = writeln!(
        text,
        "  {} of requests share a prefix, {} tokens on average; shared part of the prompt:",
        percent(sharing.requests_with_reuse as f64 / described.requests.max(1) as f64),
        count(sharing.mean_reused_tokens.round())
    );
    histogram(text, &sharing.reused_percent, |bin| format!("{} to {} %", bin.from, bin.to + 1));
    if !sharing.popular.is_empty() {
        text.push_str("  Most frequent prefixes:\n");
    }
    for popular in &sharing.popular {
        let _ = writeln!(
            text,
            "  {:>8} tokens begin {} requests ({})",
            whole(popular.tokens),
            whole(popular.requests),
            percent(popular.requests as f64 / described.requests.max(1) as f64)
        );
    }
}

fn working_sets(text: &mut String, described: &Description) {
    text.push_str("\nWorking set: distinct tokens used within a time window\n");
    let _ = writeln!(text, "  {:>14}  {:>8}  {:>8}", "window", "mean", "max");
    for set in &described.working_sets {
        let _ = writeln!(
            text,
            "  {:>14}  {:>8}  {:>8}",
            seconds(set.window_s as f64),
            count(set.mean_tokens.round()),
            count(set.max_tokens as f64)
        );
    }
}

fn ceilings(text: &mut String, described: &Description) {
    text.push_str("\nHit rate of an unlimited cache, by page size\n");
    for ceiling in &described.ceilings {
        let drawn = bar(ceiling.ratio);
        let _ =
            writeln!(text, "  {:>14}  {:>8}  {drawn}", ceiling.page_size, percent(ceiling.ratio));
    }
    let _ = writeln!(
        text,
        "\nHit rate of an LRU cache by its size in tokens, pages of {}",
        described.page_size
    );
    // Sizes that reuse no more than the smallest say nothing.
    let least = described.curve.first().map_or(0.0, |point| point.ratio);
    let flat = described.curve.iter().take_while(|point| point.ratio < least + 0.001).count();
    for point in &described.curve[flat.saturating_sub(1)..] {
        let drawn = bar(point.ratio);
        let size = count(point.capacity_tokens as f64);
        let _ = writeln!(text, "  {size:>14}  {:>8}  {drawn}", percent(point.ratio));
    }
}
