//! Text output of `terrace-bench scaling`.

use std::fmt::Write;

use terrace_bench::{Cost, FullPoolFigures, PageEnds, ScalingFigures, StepCost, StepWork, Sweep};
use terrace_replay::Size;

const NAME_WIDTH: usize = 58;
const FIGURE_WIDTH: usize = 8;

/// Formats the figures as tables, one for each dimension and one for the full pool.
pub(super) fn text(figures: &ScalingFigures) -> String {
    let mut text = String::new();
    for sweep in &figures.sweeps {
        sweep_text(sweep, &mut text);
    }
    text += "x10: the factor by which a value grows when the size grows tenfold (1: constant, 10: linear)\n\n";
    text +=
        "64 requests decode in a full pool, so each page that they take must be evicted first\n";
    for pool in &figures.full_pool {
        pool_text(pool, &mut text);
    }
    text
}

fn sweep_text(sweep: &Sweep, text: &mut String) {
    let mut line = |name: &str, figures: &mut dyn Iterator<Item = String>, growth: &str| {
        let _ = write!(text, "{name:NAME_WIDTH$}");
        for figure in figures {
            let _ = write!(text, "{figure:>FIGURE_WIDTH$}");
        }
        let _ = writeln!(text, "{growth:>FIGURE_WIDTH$}");
    };
    let growth = |factor: f64| format!("x {factor:.2}");
    line(sweep.dimension, &mut sweep.sizes.iter().map(|&size| short(size)), "x10");
    for Cost { name, unit, times, nodes, growth: time_growth, nodes_growth } in &sweep.costs {
        let name = format!("  {name}, {unit}");
        line(&name, &mut times.iter().map(|&time| digits(time)), &growth(*time_growth));
        let counts = &mut nodes.iter().map(|count| format!("{count:.1}"));
        line("    nodes", counts, &growth(*nodes_growth));
    }
    text.push('\n');
}

fn pool_text(pool: &FullPoolFigures, text: &mut String) {
    let FullPoolFigures { victim_tokens, page_ends, median, slowest, .. } = pool;
    let page_ends = match page_ends {
        PageEnds::Spread => "4 requests end a page in every step",
        PageEnds::Drawn => "requests arrived one after the other",
        PageEnds::Together => "all requests end a page in the same step",
    };
    let _ = writeln!(
        text,
        "  evicted prompts of {} tokens; {page_ends}",
        short(u64::from(*victim_tokens))
    );
    let mut line = |name: &str, StepCost { us, work }: &StepCost, factor: &str| {
        let StepWork { pages_taken, pages_evicted, pages_published, nodes, .. } = work;
        let _ = writeln!(
            text,
            "    {name:25}{:>FIGURE_WIDTH$} us {factor:>FIGURE_WIDTH$}   \
             {pages_taken:>3} taken {pages_evicted:>3} evicted \
             {pages_published:>3} published {nodes:>4} nodes {:>9} allocated",
            digits(*us),
            Size(work.allocated_bytes).to_string(),
        );
    };
    line("median step", median, "");
    line("slowest step", slowest, &format!("x {:.2}", pool.slowest_over_median));
    line("slowest with free pages", &pool.slowest_with_free_pages, "");
    line("most added by eviction", &pool.most_added_by_eviction, "");
    let _ = writeln!(
        text,
        "    {} of {} steps take over 5 times the median",
        pool.steps_over_5_medians, pool.steps
    );
}

/// Formats three significant digits.
fn digits(value: f64) -> String {
    match value {
        100.0.. => format!("{value:.0}"),
        10.0.. => format!("{value:.1}"),
        _ => format!("{value:.2}"),
    }
}

/// Formats a size: 4096 as it is, 16384 as 16 Ki, 1000000 as 1 M.
pub(super) fn short(size: u64) -> String {
    match size {
        _ if size >= 1_000_000 && size.is_multiple_of(1_000_000) => {
            format!("{} M", size / 1_000_000)
        }
        _ if size >= 10_000 && size.is_multiple_of(1000) => format!("{} k", size / 1000),
        _ if size >= 10_000 && size.is_multiple_of(1024) => format!("{} Ki", size / 1024),
        _ => size.to_string(),
    }
}
