//! The page that compares the configurations of a sweep.

use std::cmp::Ordering;
use std::fmt::Write;

use maud::{Markup, html};

use super::{Cell, chart_section, heading, section, sortable_table};
use crate::chart::{Chart, HUES, Layer, Mark, Scale, milliseconds_tick, percent_tick, short_count};
use crate::human::{bytes, count, milliseconds, percent};
use crate::options::Setting;
use crate::sweep::{Axis, Sweep, SweepPoint, describe};

pub(super) fn body(trace: &str, sweep: &Sweep) -> Markup {
    let layout = Layout::new(&sweep.axes);
    html! {
        header {
            (heading("Sweep over", trace, &sweep.machines.join(", ")))
            p.quiet { (sweep.points.len()) " configurations: " (varied(&sweep.axes)) }
            p.answer { (sweep.answer) }
        }
        (front(sweep))
        @for facet in layout.facets(sweep) { (layout.section(sweep, &facet)) }
        (points(sweep))
    }
}

fn varied(axes: &[Axis]) -> String {
    let all = axes.iter().map(|axis| format!("{} = {}", axis.setting, axis.values.join(", ")));
    all.collect::<Vec<_>>().join("; ")
}

/// Assignment of axes: horizontal, lines, and separate plots.
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

    fn section(&self, sweep: &Sweep, facet: &[String]) -> Markup {
        let in_facet = |point: &&SweepPoint| Self::part(&self.facets, point) == facet;
        let points: Vec<&SweepPoint> = sweep.points.iter().filter(in_facet).collect();
        let charts: Vec<Chart> = measures(sweep)
            .into_iter()
            .map(|measure| self.chart(sweep, &points, measure))
            .collect();
        let title = match facet.is_empty() {
            true => "Comparison".to_owned(),
            false => Self::name(&self.facets, &sweep.axes, facet),
        };
        chart_section(&title, &charts)
    }

    /// Returns the values of the horizontal axis, ordered by size if they have one.
    fn values(&self, sweep: &Sweep) -> Vec<String> {
        let Some(axis) = sweep.axes.get(self.along) else { return Vec::new() };
        let size = |value: &String| {
            let with_it = |point: &&SweepPoint| point.values.get(self.along) == Some(value);
            let point = sweep.points.iter().find(with_it)?;
            let tokens = [
                (Setting::Device, point.device_tokens),
                (Setting::Host, point.host_tokens),
                (Setting::L3, point.l3_tokens.unwrap_or(u64::MAX)),
            ];
            let tier = tokens.into_iter().find(|(tier, _)| *tier == axis.setting);
            tier.map_or_else(|| axis.setting.magnitude(value), |(_, tokens)| Some(tokens as f64))
        };
        let mut sized: Vec<(Option<f64>, String)> =
            axis.values.iter().map(|value| (size(value), value.clone())).collect();
        if sized.iter().all(|(size, _)| size.is_some()) {
            sized.sort_by(|(a, _), (b, _)| a.partial_cmp(b).unwrap_or(Ordering::Equal));
        }
        sized.into_iter().map(|(_, value)| value).collect()
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
        let lines = Self::distinct(&self.lines, points);
        for (style, (values, hue)) in lines.iter().zip(HUES).enumerate() {
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
            line.sort_by(|(a, _), (b, _)| a.total_cmp(b));
            layers.push(Layer::new(&name, hue, Mark::Points(line)).styled(style));
        }
        if let Some(limit) = limit {
            let line = Mark::Limit(vec![(0.0, limit), (along.len() as f64, limit)]);
            layers.push(Layer::new("ceiling", "text", line));
        }
        let label = sweep.axes.get(self.along).map_or("", |axis| axis.setting.name());
        Chart {
            title: title.to_owned(),
            note: note.to_owned(),
            x: Scale::named(&along, label),
            y,
            layers,
            tips: texts.into_iter().enumerate().map(|(place, text)| (at(place), text)).collect(),
        }
    }
}

/// A measure of comparison.
struct Measure {
    title: &'static str,
    note: &'static str,
    y: Scale,
    /// Upper bound of the values.
    limit: Option<f64>,
    value: fn(&SweepPoint) -> f64,
    shown: fn(f64) -> String,
}

/// Returns the measures. Their axes are the same in all parts of the page.
fn measures(sweep: &Sweep) -> Vec<Measure> {
    let most = |value: fn(&SweepPoint) -> f64| sweep.points.iter().map(value).fold(0.0, f64::max);
    let time = |title, label, value: fn(&SweepPoint) -> f64| {
        let least = sweep.points.iter().map(value).fold(f64::INFINITY, f64::min);
        // On a linear axis with outliers the differences between good values would be invisible.
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
    let mut measures = vec![
        time("Time to first token, 90th percentile", first, |point| point.ttft_ms.p90),
        Measure {
            title: "Prompt tokens reused",
            note: "The broken line is what an unlimited cache would have found.",
            y: Scale::linear(ceiling, "share of prompt tokens", percent_tick),
            limit: Some(ceiling),
            value: |point| point.reuse.total,
            shown: percent,
        },
        time("Time to first token, 99th percentile", first, |point| point.ttft_ms.p99),
        time("Between tokens, by answer, 90th percentile", "between tokens", |point| {
            point.tpot_ms.p90
        }),
        time("Between tokens, 99th percentile", "between tokens", |point| point.itl_ms.p99),
        Measure {
            title: "Output tokens",
            note: "All workers together.",
            y: Scale::linear(most(|point| point.output_tokens_per_s), "tokens/s", short_count),
            limit: None,
            value: |point| point.output_tokens_per_s,
            shown: count,
        },
    ];
    if sweep.points.iter().any(|point| point.goodput.is_some()) {
        measures.push(Measure {
            title: "Good requests",
            note: "Requests within the SLO.",
            y: Scale::linear(1.0, "share of requests", percent_tick),
            limit: None,
            value: |point| point.goodput.map_or(0.0, |goods| goods.share),
            shown: percent,
        });
    }
    measures
}

/// Plots cost against both times, with the Pareto front highlighted.
fn front(sweep: &Sweep) -> Markup {
    let charts = [
        cost_chart(sweep, "Cost and time to first token", "first token, p90", |point| {
            point.ttft_ms.p90
        }),
        cost_chart(sweep, "Cost and time between tokens", "between tokens, p90", |point| {
            point.tpot_ms.p90
        }),
    ];
    chart_section("What it costs", &charts)
}

fn cost_chart(sweep: &Sweep, title: &str, label: &str, time: fn(&SweepPoint) -> f64) -> Chart {
    let cost = |point: &SweepPoint| point.spend.per_million_tokens;
    let at = |point: &SweepPoint| (cost(point), time(point));
    let most =
        |value: &dyn Fn(&SweepPoint) -> f64| sweep.points.iter().map(value).fold(0.0, f64::max);
    let least = sweep.points.iter().map(time).fold(f64::INFINITY, f64::min);
    let mut on_front: Vec<&SweepPoint> =
        sweep.points.iter().filter(|point| point.is_on_front).collect();
    on_front.sort_by(|a, b| cost(a).total_cmp(&cost(b)));
    let others = sweep.points.iter().filter(|point| !point.is_on_front).map(at);
    let mut layers = vec![
        Layer::new("others", "computed", Mark::Dots(others.collect())).styled(4),
        Layer::new(
            "nothing beats these",
            "hue0",
            Mark::Dots(on_front.iter().map(|point| at(point)).collect()),
        )
        .styled(1),
    ];
    if let Some(chosen) = sweep.points.get(sweep.recommended) {
        layers.push(Layer::new("recommended", "alarm", Mark::Dots(vec![at(chosen)])).styled(3));
    }
    let tip = |point: &SweepPoint| {
        let name = describe(&sweep.axes, &point.values);
        let text =
            format!("{name}\n{:.3} a million tokens\n{}", cost(point), milliseconds(time(point)));
        (cost(point), text)
    };
    let y = if most(&time) > 20.0 * least {
        let label = format!("{label} (logarithmic)");
        Scale::logarithmic(round_down(least), most(&time), &label, milliseconds_tick)
    } else {
        Scale::milliseconds(most(&time), label)
    };
    Chart {
        title: title.to_owned(),
        note: "Below and to the left is better.".to_owned(),
        x: Scale::linear(most(&cost), "cost per million tokens, $", short_count),
        y,
        layers,
        tips: sweep.points.iter().map(tip).collect(),
    }
}

/// Returns the largest power of ten that is not above `value`.
fn round_down(value: f64) -> f64 {
    10f64.powf(value.max(1e-6).log10().floor())
}

/// A column of the table: title, sort key, and cell text.
type Column = (&'static str, fn(&SweepPoint) -> f64, fn(&SweepPoint, f64) -> String);

const COLUMNS: [Column; 18] = [
    ("reused", |point| point.reuse.total, |_, share| percent(share)),
    ("device", |point| point.reuse.device, |_, share| percent(share)),
    ("host", |point| point.reuse.host, |_, share| percent(share)),
    ("L3", |point| point.reuse.l3, |_, share| percent(share)),
    ("TTFT mean", |point| point.ttft_ms.mean, |_, ms| milliseconds(ms)),
    ("p50", |point| point.ttft_ms.p50, |_, ms| milliseconds(ms)),
    (
        "p90",
        |point| point.ttft_ms.p90,
        |point, ms| match point.confidence {
            Some(sure) => format!("{} ± {}", milliseconds(ms), milliseconds(sure.ttft_ms_p90)),
            None => milliseconds(ms),
        },
    ),
    ("p99", |point| point.ttft_ms.p99, |_, ms| milliseconds(ms)),
    ("TPOT p90", |point| point.tpot_ms.p90, |_, ms| milliseconds(ms)),
    ("ITL mean", |point| point.itl_ms.mean, |_, ms| milliseconds(ms)),
    ("ITL p99", |point| point.itl_ms.p99, |_, ms| milliseconds(ms)),
    ("tokens/s", |point| point.output_tokens_per_s, |_, rate| count(rate)),
    ("computing", |point| point.busy, |_, share| percent(share)),
    ("host memory", |point| kv_bytes(point, point.host_tokens), |_, size| bytes(size)),
    ("L3 used", |point| kv_bytes(point, point.l3_peak_tokens), |_, size| bytes(size)),
    ("a million tokens", |point| point.spend.per_million_tokens, |_, cost| format!("${cost:.3}")),
    (
        "good",
        |point| point.goodput.map_or(f64::NAN, |goods| goods.share),
        |_, share| {
            if share.is_nan() { "–".to_owned() } else { percent(share) }
        },
    ),
    ("failed", |point| point.failed as f64, |_, failed| count(failed)),
];

fn kv_bytes(point: &SweepPoint, tokens: u64) -> f64 {
    (tokens * point.kv_bytes_per_token) as f64
}

fn points(sweep: &Sweep) -> Markup {
    let mut names: Vec<&str> = sweep.axes.iter().map(|axis| axis.setting.name()).collect();
    names.extend(COLUMNS.map(|(name, _, _)| name));
    let row = |point: &SweepPoint| {
        let own = sweep.axes.iter().zip(&point.values).map(|(axis, value)| Cell {
            text: value.clone(),
            value: axis.setting.magnitude(value),
        });
        let figures = COLUMNS.iter().map(|(_, value, text)| {
            let value = value(point);
            Cell { text: text(point, value), value: Some(value) }
        });
        own.chain(figures).collect()
    };
    let rows: Vec<Vec<Cell>> = sweep.points.iter().map(row).collect();
    section("All configurations", &sortable_table(&names, &rows, sweep.recommended))
}
