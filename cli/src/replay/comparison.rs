//! What a sweep found, as a table for a terminal.

use terrace_replay::human::{count, milliseconds, percent, whole};
use terrace_replay::{Sweep, SweepPoint};

use super::Run;
use super::summary::took;

pub(super) fn draw(trace: &str, sweep: &Sweep, run: &Run) -> String {
    let mut names: Vec<String> =
        sweep.axes.iter().map(|axis| axis.setting.name().to_owned()).collect();
    let figures =
        ["reused", "device", "host", "L3", "TTFT mean", "p50", "p99", "ITL mean", "tokens/s"];
    names.extend(figures.map(str::to_owned));
    let some_failed = sweep.points.iter().any(|point| point.failed > 0);
    if some_failed {
        names.push("failed".to_owned());
    }
    let row = |point: &SweepPoint| {
        let reuse = [point.reuse.total, point.reuse.device, point.reuse.host, point.reuse.l3];
        let times = [point.ttft_ms.mean, point.ttft_ms.p50, point.ttft_ms.p99, point.itl_ms.mean];
        let mut row = point.values.clone();
        row.extend(reuse.map(percent));
        row.extend(times.map(milliseconds));
        row.push(count(point.output_tokens_per_s));
        if some_failed {
            row.push(whole(point.failed));
        }
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
    let mut text = format!("{trace}: {} configurations\n\n", sweep.points.len());
    text += &line(" ", &names);
    for (place, row) in rows.iter().enumerate() {
        text += &line(if place == sweep.recommended { "*" } else { " " }, row);
    }
    text += &format!("\n* {}\n\n", sweep.answer);
    text += &took(run);
    text
}
