//! The page that compares the configurations of a sweep.

use std::fmt::Write;

use super::chart::{Chart, Layer, Mark};
use super::plots::{milliseconds_tick, percent_tick, short_count};
use super::scale::Scale;
use super::{escape, table};
use crate::human::{bytes, count, milliseconds, percent};
use crate::sweep::{Axis, Sweep, SweepPoint, describe};

/// Lines that can be told apart.
const HUES: [&str; 8] = ["hue0", "hue1", "hue2", "hue3", "hue4", "hue5", "hue6", "hue7"];

pub(super) fn body(trace: &str, sweep: &Sweep) -> String {
    let mut html = format!(
        "<header><h1>Sweep over {}</h1><p class=\"quiet\">{} configurations: {}</p>\
         <p class=\"answer\">{}</p></header>\n",
        escape(trace),
        sweep.points.len(),
        escape(&varied(&sweep.axes)),
        escape(&sweep.answer)
    );
    let layout = Layout::new(&sweep.axes);
    for facet in layout.facets(sweep) {
        html += &layout.section(sweep, &facet);
    }
    html += &points(sweep);
    html
}

fn varied(axes: &[Axis]) -> String {
    let all = axes.iter().map(|axis| format!("{} = {}", axis.setting, axis.values.join(", ")));
    all.collect::<Vec<_>>().join("; ")
}

/// Which axis goes from left to right, which are lines, and which have plots of their own.
struct Layout {
    along: usize,
    lines: Vec<usize>,
    facets: Vec<usize>,
}

impl Layout {
    fn new(axes: &[Axis]) -> Self {
        let several = |axis: &Axis| axis.values.len() > 1;
        let sizes = axes.iter().position(|axis| axis.setting.is_size() && several(axis));
        let along = sizes.or_else(|| axes.iter().position(several)).unwrap_or(0);
        let (mut lines, mut facets, mut count) = (Vec::new(), Vec::new(), 1);
        for place in (0..axes.len()).filter(|&place| place != along) {
            if count * axes[place].values.len() <= HUES.len() {
                count *= axes[place].values.len();
                lines.push(place);
            } else {
                facets.push(place);
            }
        }
        Self { along, lines, facets }
    }

    fn part(places: &[usize], point: &SweepPoint) -> Vec<String> {
        places.iter().map(|&place| point.values[place].clone()).collect()
    }

    fn distinct(places: &[usize], points: &[&SweepPoint]) -> Vec<Vec<String>> {
        let mut found: Vec<Vec<String>> = Vec::new();
        for point in points {
            let part = Self::part(places, point);
            if !found.contains(&part) {
                found.push(part);
            }
        }
        found
    }

    fn name(places: &[usize], axes: &[Axis], values: &[String]) -> String {
        let axes: Vec<Axis> = places.iter().map(|&place| axes[place].clone()).collect();
        describe(&axes, values)
    }

    fn facets(&self, sweep: &Sweep) -> Vec<Vec<String>> {
        Self::distinct(&self.facets, &sweep.points.iter().collect::<Vec<_>>())
    }

    fn section(&self, sweep: &Sweep, facet: &[String]) -> String {
        let in_facet = |point: &&SweepPoint| Self::part(&self.facets, point) == facet;
        let points: Vec<&SweepPoint> = sweep.points.iter().filter(in_facet).collect();
        let charts = measures(sweep).map(|measure| self.chart(sweep, &points, measure));
        let title = match facet.is_empty() {
            true => "Comparison".to_owned(),
            false => Self::name(&self.facets, &sweep.axes, facet),
        };
        let charts: String = charts.iter().map(Chart::html).collect();
        format!(
            "<section><h2>{}</h2><div class=\"plots\">{charts}</div></section>\n",
            escape(&title)
        )
    }

    fn values<'a>(&self, sweep: &'a Sweep) -> &'a [String] {
        sweep.axes.get(self.along).map_or(&[], |axis| &axis.values)
    }

    fn chart(&self, sweep: &Sweep, points: &[&SweepPoint], measure: Measure) -> Chart {
        let Measure { title, note, y, limit, value, shown } = measure;
        let along = self.values(sweep);
        let place_of = |point: &SweepPoint| {
            let own = point.values.get(self.along);
            along.iter().position(|value| Some(value) == own).unwrap_or(0)
        };
        let at = |place: usize| place as f64 + 0.5;
        let mut layers = Vec::new();
        let mut texts: Vec<String> = along
            .iter()
            .map(|value| format!("{} {value}", sweep.axes[self.along].setting))
            .collect();
        for (values, hue) in Self::distinct(&self.lines, points).iter().zip(HUES) {
            let name = match self.lines.is_empty() {
                true => title.to_owned(),
                false => Self::name(&self.lines, &sweep.axes, values),
            };
            let on_line = points.iter().filter(|point| Self::part(&self.lines, point) == *values);
            let mut line = Vec::new();
            for point in on_line {
                line.push((at(place_of(point)), value(point)));
                if let Some(text) = texts.get_mut(place_of(point)) {
                    let _ = write!(text, "\n{name}: {}", shown(value(point)));
                }
            }
            layers.push(Layer::new(&name, hue, Mark::Points(line)));
        }
        if let Some(limit) = limit {
            let line = Mark::Limit(vec![(0.0, limit), (along.len() as f64, limit)]);
            layers.push(Layer::new("ceiling", "text", line));
        }
        let label = sweep.axes.get(self.along).map_or("", |axis| axis.setting.name());
        Chart {
            title: title.to_owned(),
            note: note.to_owned(),
            x: Scale::named(along, label),
            y,
            layers,
            tips: texts.into_iter().enumerate().map(|(place, text)| (at(place), text)).collect(),
        }
    }
}

/// Something to compare by.
struct Measure {
    title: &'static str,
    note: &'static str,
    y: Scale,
    /// What cannot be exceeded.
    limit: Option<f64>,
    value: fn(&SweepPoint) -> f64,
    shown: fn(f64) -> String,
}

/// What configurations are compared by. Axes are the same in all parts of the page.
fn measures(sweep: &Sweep) -> [Measure; 5] {
    let most = |value: fn(&SweepPoint) -> f64| sweep.points.iter().map(value).fold(0.0, f64::max);
    let time = |title, label, value: fn(&SweepPoint) -> f64| {
        let least = sweep.points.iter().map(value).fold(f64::INFINITY, f64::min);
        // Where the worst is far worse than the best, the difference between the good would vanish.
        let y = if most(value) > 20.0 * least {
            let label = format!("{label} (logarithmic)");
            Scale::logarithmic(round_down(least), most(value), &label, milliseconds_tick)
        } else {
            Scale::milliseconds(most(value), label)
        };
        Measure { title, note: "Less is better.", y, limit: None, value, shown: milliseconds }
    };
    let first = "time to first token";
    let ceiling = most(|point| point.reuse.ceiling);
    [
        time("Time to first token, mean", first, |point| point.ttft_ms.mean),
        Measure {
            title: "Prompt tokens reused",
            note: "The broken line is what a cache without limits would have found.",
            y: Scale::linear(ceiling, "share of prompt tokens", percent_tick),
            limit: Some(ceiling),
            value: |point| point.reuse.total,
            shown: percent,
        },
        time("Time to first token, 99th percentile", first, |point| point.ttft_ms.p99),
        time("Between tokens, mean", "between tokens", |point| point.itl_ms.mean),
        Measure {
            title: "Tokens produced",
            note: "All workers together.",
            y: Scale::linear(
                most(|point| point.output_tokens_per_s),
                "tokens in a second",
                short_count,
            ),
            limit: None,
            value: |point| point.output_tokens_per_s,
            shown: count,
        },
    ]
}

/// A power of ten that is no more.
fn round_down(value: f64) -> f64 {
    10f64.powf(value.max(1e-6).log10().floor())
}

fn points(sweep: &Sweep) -> String {
    let mut names: Vec<&str> = sweep.axes.iter().map(|axis| axis.setting.name()).collect();
    names.extend([
        "reused",
        "device",
        "host",
        "L3",
        "TTFT mean",
        "p50",
        "p99",
        "ITL mean",
        "tokens/s",
        "computing",
        "host memory",
        "L3 used",
        "failed",
    ]);
    let row = |point: &SweepPoint| {
        let weight = |tokens: u64| bytes((tokens * point.kv_bytes_per_token) as f64);
        let mut row = point.values.clone();
        let reuse = [point.reuse.total, point.reuse.device, point.reuse.host, point.reuse.l3];
        row.extend(reuse.map(percent));
        let times = [point.ttft_ms.mean, point.ttft_ms.p50, point.ttft_ms.p99, point.itl_ms.mean];
        row.extend(times.map(milliseconds));
        row.extend([
            count(point.output_tokens_per_s),
            percent(point.busy),
            weight(point.host_tokens),
            weight(point.l3_peak_tokens),
            point.failed.to_string(),
        ]);
        row
    };
    let rows: Vec<Vec<String>> = sweep.points.iter().map(row).collect();
    format!(
        "<section><h2>All configurations</h2>{}</section>\n",
        table(&names, &rows, Some(sweep.recommended))
    )
}
