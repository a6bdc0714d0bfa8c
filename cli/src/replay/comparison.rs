//! Results of a sweep as a table for a terminal.

use terrace_replay::human::{count, milliseconds, percent, whole};
use terrace_replay::{Sweep, SweepPoint};

use super::Run;
use super::summary::took;

/// A column: its name, and what it says of a configuration.
type Column = (&'static str, fn(&SweepPoint) -> String);

pub(super) fn draw(trace: &str, sweep: &Sweep, run: &Run) -> String {
    let mut columns: Vec<Column> = vec![
        ("reused", |point| percent(point.reuse.total)),
        ("device", |point| percent(point.reuse.device)),
        ("host", |point| percent(point.reuse.host)),
        ("L3", |point| percent(point.reuse.l3)),
        ("TTFT p50", |point| milliseconds(point.ttft_ms.p50)),
        ("p90", |point| milliseconds(point.ttft_ms.p90)),
        ("p99", |point| milliseconds(point.ttft_ms.p99)),
        ("TPOT p90", |point| milliseconds(point.tpot_ms.p90)),
        ("ITL p99", |point| milliseconds(point.itl_ms.p99)),
        ("tokens/s", |point| count(point.output_tokens_per_s)),
        ("$/1M", |point| format!("{:.3}", point.spend.per_million_tokens)),
    ];
    if sweep.points.iter().any(|point| point.confidence.is_some()) {
        let after_p90 = 6;
        columns.insert(
            after_p90,
            ("±", |point| {
                point.confidence.map_or(String::new(), |sure| milliseconds(sure.ttft_ms_p90))
            }),
        );
    }
    if sweep.points.iter().any(|point| point.goodput.is_some()) {
        columns.push(("good", |point| {
            point.goodput.map_or(String::new(), |goods| percent(goods.share))
        }));
    }
    if sweep.points.iter().any(|point| point.failed > 0) {
        columns.push(("failed", |point| whole(point.failed)));
    }
    let axes = sweep.axes.iter().map(|axis| axis.setting.name().to_owned());
    let names: Vec<String> =
        axes.chain(columns.iter().map(|(name, _)| (*name).to_owned())).collect();
    let row = |point: &SweepPoint| {
        let mut row = point.values.clone();
        row.extend(columns.iter().map(|(_, cell)| cell(point)));
        row
    };
    let rows: Vec<Vec<String>> = sweep.points.iter().map(row).collect();
    let width = |column: usize| {
        let cells = rows.iter().map(|row| row[column].chars().count());
        cells.max().unwrap_or(0).max(names[column].chars().count())
    };
    let widths: Vec<usize> = (0..names.len()).map(width).collect();
    let line = |mark: &str, cells: &[String]| {
        let cells = cells.iter().zip(&widths).map(|(cell, &width)| format!("  {cell:>width$}"));
        format!("{mark}{}\n", cells.collect::<String>())
    };
    let mut text = match sweep.points.len() {
        1 => format!("{trace}: one configuration\n\n"),
        many => format!("{trace}: {many} configurations\n\n"),
    };
    text += &line(" ", &names);
    for (place, row) in rows.iter().enumerate() {
        let mark = match (place == sweep.recommended, sweep.points[place].is_on_front) {
            (true, _) => "*",
            (false, true) => "+",
            (false, false) => " ",
        };
        text += &line(mark, row);
    }
    text += &format!("\n* {}\n", sweep.answer);
    if sweep.points.len() > 1 {
        text += "+ Pareto-optimal: no other configuration is better in cost, TTFT or TPOT without being worse \
                 in another.\n";
    }
    text.push('\n');
    text += &took(run);
    text
}
