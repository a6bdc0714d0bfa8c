//! The plots of one replay.

use std::fmt::Write;

use crate::chart::{
    Chart, Layer, Mark, Scale, milliseconds_tick, percent_tick, short_bandwidth, short_count,
};
use crate::human::{bandwidth, bytes, count, milliseconds, percent, seconds};
use crate::report::{CurvePoint, Distribution, Report, Series};

/// Returns the midpoints of the intervals.
fn times(series: &Series, length: usize) -> impl Iterator<Item = f64> + use<> {
    let interval_s = series.interval_s;
    (0..length).map(move |place| (place as f64 + 0.5) * interval_s)
}

fn time_scale(series: &Series) -> Scale {
    Scale::time(series.arrivals.len() as f64 * series.interval_s)
}

fn over_time(series: &Series, values: &[f64]) -> Vec<(f64, f64)> {
    times(series, values.len()).zip(values.iter().copied()).collect()
}

/// Returns tooltips over time: one line per column.
fn tips(
    series: &Series,
    columns: &[(&str, &[f64])],
    value: impl Fn(f64) -> String,
) -> Vec<(f64, String)> {
    let length = columns.iter().map(|(_, values)| values.len()).min().unwrap_or(0);
    let tip = |(place, time): (usize, f64)| {
        let mut text = format!("at {}", seconds(time));
        for (name, values) in columns {
            let _ = write!(text, "\n{name}: {}", value(values[place]));
        }
        (time, text)
    };
    times(series, length).enumerate().map(tip).collect()
}

/// Returns stacked areas.
fn stacked(series: &Series, columns: &[(&str, &'static str, &[f64])]) -> (Vec<Layer>, f64) {
    let length = columns.first().map_or(0, |(_, _, values)| values.len());
    let mut base = vec![0.0; length];
    let mut layers = Vec::new();
    for (name, colour, values) in columns {
        let top: Vec<f64> = base.iter().zip(*values).map(|(base, value)| base + value).collect();
        let area = times(series, length).zip(base.iter().zip(&top));
        let area = area.map(|(time, (&from, &to))| (time, from, to)).collect();
        layers.push(Layer::new(name, colour, Mark::Area(area)));
        base = top;
    }
    (layers, most(&base))
}

fn most(values: &[f64]) -> f64 {
    values.iter().copied().fold(0.0, f64::max)
}

fn shares(parts: &[u64], of: &[u64]) -> Vec<f64> {
    parts.iter().zip(of).map(|(&part, &of)| part as f64 / of.max(1) as f64).collect()
}

pub(super) fn hits(series: &Series) -> Chart {
    let share = |tokens: &[u64]| shares(tokens, &series.prompt_tokens);
    let [device, host, l3] =
        [&series.device_hit_tokens, &series.host_hit_tokens, &series.l3_hit_tokens]
            .map(|tokens| share(tokens));
    let ceiling = share(&series.ceiling_tokens);
    let (mut layers, top) = stacked(
        series,
        &[("device", "device", &device), ("host", "host", &host), ("L3", "l3", &l3)],
    );
    let limit = Mark::Limit(over_time(series, &ceiling));
    layers.push(Layer::new("ceiling", "text", limit));
    let columns: [(&str, &[f64]); 4] =
        [("ceiling", &ceiling), ("L3", &l3), ("host", &host), ("device", &device)];
    Chart {
        title: "Hit rate by tier".to_owned(),
        note: "The broken line is what an unlimited cache would have found.".to_owned(),
        x: time_scale(series),
        y: Scale::linear(top.max(most(&ceiling)), "share of prompt tokens", percent_tick),
        layers,
        tips: tips(series, &columns, percent),
    }
}

pub(super) fn reuse_total(series: &Series) -> Chart {
    let [device, host, l3, ceiling] = [
        &series.device_hit_tokens,
        &series.host_hit_tokens,
        &series.l3_hit_tokens,
        &series.ceiling_tokens,
    ]
    .map(|tokens| so_far(tokens));
    let (mut layers, top) = stacked(
        series,
        &[("device", "device", &device), ("host", "host", &host), ("L3", "l3", &l3)],
    );
    layers.push(Layer::new("ceiling", "text", Mark::Limit(over_time(series, &ceiling))));
    let columns: [(&str, &[f64]); 4] =
        [("ceiling", &ceiling), ("L3", &l3), ("host", &host), ("device", &device)];
    Chart {
        title: "Reused tokens, cumulative".to_owned(),
        note: "The gap to the broken line was recomputed.".to_owned(),
        x: time_scale(series),
        y: Scale::linear(top.max(most(&ceiling)), "tokens", short_count),
        layers,
        tips: tips(series, &columns, count),
    }
}

pub(super) fn prompts(series: &Series) -> Chart {
    let rate = |tokens: &[u64]| per_second(series, tokens);
    let [device, host, l3, all] = [
        &series.device_hit_tokens,
        &series.host_hit_tokens,
        &series.l3_hit_tokens,
        &series.prompt_tokens,
    ]
    .map(|tokens| rate(tokens));
    let found = device.iter().zip(&host).zip(&l3).map(|((device, host), l3)| device + host + l3);
    let computed: Vec<f64> = all.iter().zip(found).map(|(all, found)| all - found).collect();
    let columns: [(&str, &'static str, &[f64]); 4] = [
        ("computed", "computed", &computed),
        ("device", "device", &device),
        ("host", "host", &host),
        ("L3", "l3", &l3),
    ];
    let (layers, top) = stacked(series, &columns);
    let mut tooltips: Vec<(&str, &[f64])> =
        columns.iter().map(|(name, _, values)| (*name, *values)).collect();
    tooltips.reverse();
    Chart {
        title: "Prompt tokens".to_owned(),
        note: "At the time of their request's first token.".to_owned(),
        x: time_scale(series),
        y: Scale::linear(top, "tokens/s", short_count),
        layers,
        tips: tips(series, &tooltips, count),
    }
}

fn per_second(series: &Series, values: &[u64]) -> Vec<f64> {
    values.iter().map(|&value| value as f64 / series.interval_s.max(1e-9)).collect()
}

fn so_far(values: &[u64]) -> Vec<f64> {
    let sums = values.iter().scan(0, |sum, &value| {
        *sum += value;
        Some(*sum as f64)
    });
    sums.collect()
}

pub(super) fn distribution(
    title: &str,
    note: &str,
    what: &str,
    curve: &[CurvePoint],
    short: &Distribution,
) -> Chart {
    let positive = curve.iter().map(|point| point.ms).find(|&ms| ms > 0.0).unwrap_or(1.0);
    let x = Scale::logarithmic(positive, short.max, "time (logarithmic)", milliseconds_tick);
    let points = curve.iter().map(|point| (point.ms, point.share)).collect();
    let tip = |point: &CurvePoint| {
        let text = format!("{} of {what}\nwithin {}", percent(point.share), milliseconds(point.ms));
        (point.ms, text)
    };
    let at = |ms: f64| Mark::Limit(vec![(ms, 0.0), (ms, 1.0)]);
    Chart {
        title: title.to_owned(),
        note: note.to_owned(),
        x,
        y: Scale::linear(1.0, &format!("share of {what}"), percent_tick),
        layers: vec![
            Layer::new(what, "accent", Mark::Line(points)),
            Layer::new(&format!("p50: {}", milliseconds(short.p50)), "host", at(short.p50)),
            Layer::new(&format!("p99: {}", milliseconds(short.p99)), "alarm", at(short.p99)),
        ],
        tips: curve.iter().map(tip).collect(),
    }
}

pub(super) fn ttft_over_time(series: &Series) -> Chart {
    // Intervals without a first token have no mean.
    let drawn = |values: &[f64]| -> Vec<(f64, f64)> {
        let with_tokens = over_time(series, values).into_iter().zip(&series.first_tokens);
        with_tokens.filter(|(_, count)| **count > 0).map(|(point, _)| point).collect()
    };
    let (mean, longest) = (drawn(&series.ttft_ms_mean), drawn(&series.ttft_ms_max));
    let smallest = mean.iter().map(|&(_, ms)| ms).fold(f64::INFINITY, f64::min);
    let columns: [(&str, &[f64]); 2] =
        [("longest", &series.ttft_ms_max), ("mean", &series.ttft_ms_mean)];
    Chart {
        title: "TTFT over time".to_owned(),
        note: "Of requests whose first token came at that time.".to_owned(),
        x: time_scale(series),
        y: Scale::logarithmic(
            smallest,
            most(&series.ttft_ms_max),
            "time (logarithmic)",
            milliseconds_tick,
        ),
        layers: vec![
            Layer::new("longest", "retracted", Mark::Line(longest)),
            Layer::new("mean", "accent", Mark::Line(mean)),
        ],
        tips: tips(series, &columns, milliseconds),
    }
}

pub(super) fn tier(
    name: &str,
    colour: &'static str,
    used: &[f64],
    pinned: &[f64],
    interval_s: f64,
) -> Chart {
    let series = Series { interval_s, arrivals: vec![0; used.len()], ..Series::default() };
    let in_use: Vec<f64> =
        used.iter().zip(pinned).map(|(used, pinned)| used.min(*pinned)).collect();
    let cached: Vec<f64> = used.iter().zip(&in_use).map(|(used, in_use)| used - in_use).collect();
    let (layers, _) =
        stacked(&series, &[("in use", "computed", &in_use), ("cached", colour, &cached)]);
    let columns: [(&str, &[f64]); 2] = [("cached", &cached), ("in use", &in_use)];
    Chart {
        title: format!("{name}: pages"),
        note: "In use: held by requests and transfers. The rest can be evicted.".to_owned(),
        x: time_scale(&series),
        y: Scale::linear(1.0, "share of its pages", percent_tick),
        layers,
        tips: tips(&series, &columns, percent),
    }
}

pub(super) fn l3(report: &Report, series: &Series) -> Chart {
    let page_bytes = report.config.page_bytes() as f64;
    let held: Vec<f64> = series.l3_pages.iter().map(|pages| pages * page_bytes).collect();
    let limit = report.config.store.pages_max.map(|pages| pages as f64 * page_bytes);
    let end = series.arrivals.len() as f64 * series.interval_s;
    let (mut layers, top) = stacked(series, &[("held", "l3", &held)]);
    if let Some(limit) = limit {
        layers.push(Layer::new("limit", "text", Mark::Limit(vec![(0.0, limit), (end, limit)])));
    }
    Chart {
        title: "L3".to_owned(),
        note: "All workers share it.".to_owned(),
        x: time_scale(series),
        y: Scale::bytes(top.max(limit.unwrap_or(0.0)), "bytes of KV"),
        layers,
        tips: tips(series, &[("held", &held)], bytes),
    }
}

fn link_colours() -> [(&'static str, &'static str); 4] {
    [
        ("host to device", "device"),
        ("device to host", "host"),
        ("L3 to host", "l3"),
        ("host to L3", "decoding"),
    ]
}

/// Returns the values of each link.
fn by_link(series: &Series, value: impl Fn(&[u64]) -> Vec<f64>) -> [Vec<f64>; 4] {
    [
        value(&series.host_to_device_bytes),
        value(&series.device_to_host_bytes),
        value(&series.l3_to_host_bytes),
        value(&series.host_to_l3_bytes),
    ]
}

pub(super) fn moved(series: &Series) -> Chart {
    let rates = by_link(series, |bytes| per_second(series, bytes));
    let y = |top| Scale::linear(top, "bytes/s", short_bandwidth);
    lines(series, "Bytes transferred", "All workers together.", &rates, y, bandwidth)
}

pub(super) fn moved_so_far(series: &Series) -> Chart {
    let sums = by_link(series, so_far);
    let y = |top| Scale::bytes(top, "bytes");
    lines(series, "Bytes transferred, cumulative", "All workers together.", &sums, y, bytes)
}

pub(super) fn busy(series: &Series) -> Chart {
    let shares = [
        series.host_to_device_busy.clone(),
        series.device_to_host_busy.clone(),
        series.l3_to_host_busy.clone(),
        series.host_to_l3_busy.clone(),
    ];
    let note = "Share of the time in which a link transfers.";
    lines(
        series,
        "Links in use",
        note,
        &shares,
        |top| Scale::linear(top, "share of the time", percent_tick),
        percent,
    )
}

fn lines(
    series: &Series,
    title: &str,
    note: &str,
    values: &[Vec<f64>; 4],
    y: impl Fn(f64) -> Scale,
    value: fn(f64) -> String,
) -> Chart {
    let top = values.iter().map(|values| most(values)).fold(0.0, f64::max);
    let named = || link_colours().into_iter().zip(values);
    let layers = named().enumerate().map(|(style, ((name, colour), values))| {
        Layer::new(name, colour, Mark::Line(over_time(series, values))).styled(style)
    });
    let columns: Vec<(&str, &[f64])> =
        named().map(|((name, _), values)| (name, values.as_slice())).collect();
    Chart {
        title: title.to_owned(),
        note: note.to_owned(),
        x: time_scale(series),
        y: y(top),
        layers: layers.collect(),
        tips: tips(series, &columns, value),
    }
}

pub(super) fn states(series: &Series) -> Chart {
    // Fetching requests are counted among the waiting.
    let others: Vec<f64> =
        series.waiting.iter().zip(&series.prefetching).map(|(w, p)| w - p).collect();
    let columns: [(&str, &'static str, &[f64]); 5] = [
        ("decoding", "decoding", &series.decoding),
        ("prefilling", "prefilling", &series.prefilling),
        ("fetching from L3", "fetching", &series.prefetching),
        ("waiting", "waiting", &others),
        ("writing back", "draining", &series.draining),
    ];
    let (layers, top) = stacked(series, &columns);
    let mut tooltips: Vec<(&str, &[f64])> =
        columns.iter().map(|(name, _, values)| (*name, *values)).collect();
    tooltips.reverse();
    Chart {
        title: "Requests by state".to_owned(),
        note: "On average over each interval.".to_owned(),
        x: time_scale(series),
        y: Scale::linear(top, "requests", short_count),
        layers,
        tips: tips(series, &tooltips, |value| format!("{value:.1}")),
    }
}

pub(super) fn load(series: &Series) -> Chart {
    let rate = per_second(series, &series.arrivals);
    let top = most(&rate);
    let mut tooltips = tips(series, &[("computing", &series.busy)], percent);
    for ((_, text), rate) in tooltips.iter_mut().zip(&rate) {
        let _ = write!(text, "\narrivals: {rate:.2} in a second");
    }
    // Two units would have to share an axis, so arrivals are drawn relative to their peak.
    let relative: Vec<f64> = rate.iter().map(|rate| rate / top.max(1e-12)).collect();
    let name = format!("arrivals (100 % is {top:.1} per second)");
    Chart {
        title: "Load".to_owned(),
        note: "Share of the time in which workers compute.".to_owned(),
        x: time_scale(series),
        y: Scale::linear(1.0, "share", percent_tick),
        layers: vec![
            Layer::new("computing", "prefilling", Mark::Line(over_time(series, &series.busy))),
            Layer::new(&name, "computed", Mark::Line(over_time(series, &relative))),
        ],
        tips: tooltips,
    }
}

pub(super) fn output(series: &Series) -> Chart {
    let rate = per_second(series, &series.output_tokens);
    let mut tooltips = tips(series, &[("tokens/s", &rate)], count);
    for ((_, text), ms) in tooltips.iter_mut().zip(&series.itl_ms_mean) {
        let _ = write!(text, "\nbetween tokens: {}", milliseconds(*ms));
    }
    Chart {
        title: "Output tokens".to_owned(),
        note: "All workers together.".to_owned(),
        x: time_scale(series),
        y: Scale::linear(most(&rate), "tokens/s", short_count),
        layers: vec![Layer::new("tokens", "decoding", Mark::Line(over_time(series, &rate)))],
        tips: tooltips,
    }
}
