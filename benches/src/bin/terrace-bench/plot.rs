//! The figures of `terrace-bench scaling` as a picture: an SVG on a light ground.

use std::fmt::{Display, Write};

use terrace_bench::{Cost, ScalingFigures, Sweep};

use crate::scaling::short;

const STYLE: &str = "
  text { font: 12px -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif; fill: #1f2328 }
  .title { font-size: 15px; font-weight: 600 }
  .faint { fill: #656d76 }
  .end { text-anchor: end }
  .middle { text-anchor: middle }
  .paper { fill: #ffffff }
  .grid { stroke: #d8dee4 }
  .guide { stroke: #8c959f; stroke-dasharray: 5 4 }
  .line { fill: none; stroke-width: 2 }
  .dots { stroke-width: 7; stroke-linecap: round }
  .c0 { stroke: #0969da } .c1 { stroke: #bc4c00 } .c2 { stroke: #1a7f37 }
  .c3 { stroke: #8250df } .c4 { stroke: #bf3989 } .c5 { stroke: #1b7c83 }
";
const COLOURS: usize = 6;

const PANEL_WIDTH: f64 = 520.0;
const PANEL_HEIGHT: f64 = 468.0;
/// Where the axes are within a panel.
const LEFT: f64 = 64.0;
const RIGHT: f64 = 496.0;
const TOP: f64 = 52.0;
const BOTTOM: f64 = 292.0;
/// Where the legend is: its left end, its columns, and the line that explains them.
const LEGEND_LEFT: f64 = 24.0;
const TIME_RIGHT: f64 = 442.0;
const NODES_RIGHT: f64 = RIGHT;
const LEGEND_TOP: f64 = 336.0;
const LEGEND_LINE: f64 = 19.0;

/// Draws all figures.
pub(super) fn svg(figures: &ScalingFigures) -> String {
    let rows = figures.sweeps.len().div_ceil(2);
    let (width, height) = (2.0 * PANEL_WIDTH, rows as f64 * PANEL_HEIGHT);
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{height}\" \
         viewBox=\"0 0 {width} {height}\">\n<style>{STYLE}</style>\n\
         <rect class=\"paper\" width=\"{width}\" height=\"{height}\" rx=\"6\"/>\n"
    );
    for (place, sweep) in figures.sweeps.iter().enumerate() {
        let (x, y) = ((place % 2) as f64 * PANEL_WIDTH, (place / 2) as f64 * PANEL_HEIGHT);
        let _ = writeln!(svg, "<g transform=\"translate({x} {y})\">");
        draw_sweep(&mut svg, sweep);
        svg += "</g>\n";
    }
    svg + "</svg>\n"
}

/// Lines over two logarithmic axes, and the legend below.
fn draw_sweep(svg: &mut String, sweep: &Sweep) {
    let costs = &sweep.costs;
    let (first, last) = (sweep.sizes[0] as f64, sweep.sizes[sweep.sizes.len() - 1] as f64);
    let (bottom, top) = decades(costs);
    let x = |size: f64| LEFT + (RIGHT - LEFT) * (size / first).ln() / (last / first).ln();
    let y = |ns: f64| BOTTOM - (BOTTOM - TOP) * (ns / bottom).ln() / (top / bottom).ln();

    label(svg, "title", LEGEND_LEFT, 28.0, format!("by {}", sweep.dimension));
    for &size in &sweep.sizes {
        let at = x(size as f64);
        rule(svg, "grid", (at, TOP), (at, BOTTOM));
        label(svg, "faint middle", at, BOTTOM + 18.0, short(size));
    }
    for power in bottom.log10().round() as i32..=top.log10().round() as i32 {
        let at = y(10f64.powi(power));
        rule(svg, "grid", (LEFT, at), (RIGHT, at));
        label(svg, "faint end", LEFT - 8.0, at + 4.0, time_name(power));
    }
    // What grows as fast as the size, from the corner to where it leaves the panel.
    let factor = (last / first).min(top / bottom);
    let end = (x(first * factor), y(bottom * factor));
    rule(svg, "guide", (LEFT, BOTTOM), end);
    label(svg, "faint end", end.0 - 4.0, end.1 - 6.0, "linear growth");

    label(svg, "faint", LEGEND_LEFT, LEGEND_TOP, "growth for ten times the size:");
    label(svg, "faint end", TIME_RIGHT, LEGEND_TOP, "time");
    label(svg, "faint end", NODES_RIGHT, LEGEND_TOP, "nodes");
    for (cost, place) in costs.iter().zip(0..) {
        let points = sweep.sizes.iter().zip(&cost.times);
        curve(
            svg,
            place,
            points.map(|(&size, time)| (x(size as f64), y(time * ns_per(cost.unit)))),
        );
        let at = LEGEND_TOP + (place + 1) as f64 * LEGEND_LINE;
        let sample = [LEGEND_LEFT, LEGEND_LEFT + 18.0].map(|x| (x, at - 4.0));
        curve(svg, place, sample.into_iter());
        label(svg, "", LEGEND_LEFT + 28.0, at, format!("{}, {}", cost.name, cost.unit));
        label(svg, "end", TIME_RIGHT, at, format!("x {:.2}", cost.growth));
        label(svg, "end", NODES_RIGHT, at, format!("x {:.2}", cost.nodes_growth));
    }
}

fn ns_per(unit: &str) -> f64 {
    if unit == "us" { 1000.0 } else { 1.0 }
}

/// The powers of ten between which all times are, in nanoseconds.
fn decades(costs: &[Cost]) -> (f64, f64) {
    let times =
        costs.iter().flat_map(|cost| cost.times.iter().map(|time| time * ns_per(cost.unit)));
    let (least, most) = times.fold((f64::MAX, 10.0), |(a, b), time| (time.min(a), time.max(b)));
    (10f64.powf(least.log10().floor()), 10f64.powf(most.log10().ceil()))
}

/// A power of ten nanoseconds.
fn time_name(power: i32) -> String {
    match power {
        6.. => format!("{} ms", 10f64.powi(power - 6)),
        3.. => format!("{} us", 10f64.powi(power - 3)),
        _ => format!("{} ns", 10f64.powi(power)),
    }
}

fn label(svg: &mut String, class: &str, x: f64, y: f64, text: impl Display) {
    let _ = writeln!(svg, "<text class=\"{class}\" x=\"{x:.1}\" y=\"{y:.1}\">{text}</text>");
}

fn rule(svg: &mut String, class: &str, from: (f64, f64), to: (f64, f64)) {
    let ((x1, y1), (x2, y2)) = (from, to);
    let _ = writeln!(
        svg,
        "<line class=\"{class}\" x1=\"{x1:.1}\" y1=\"{y1:.1}\" x2=\"{x2:.1}\" y2=\"{y2:.1}\"/>"
    );
}

/// A line with a dot at each of its points.
fn curve(svg: &mut String, place: usize, points: impl Iterator<Item = (f64, f64)>) {
    let (mut path, mut dots) = (String::new(), String::new());
    for (x, y) in points {
        let _ = write!(path, "{}{x:.1} {y:.1}", if path.is_empty() { "M" } else { "L" });
        // A line of no length with round ends.
        let _ = write!(dots, "M{x:.1} {y:.1}h0");
    }
    let colour = place % COLOURS;
    let _ = writeln!(svg, "<path class=\"line c{colour}\" d=\"{path}\"/>");
    let _ = writeln!(svg, "<path class=\"dots c{colour}\" d=\"{dots}\"/>");
}
