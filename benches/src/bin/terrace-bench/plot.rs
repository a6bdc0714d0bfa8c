//! A plot of the results of `terrace-bench scaling`.

use terrace_bench::{Cost, ScalingFigures, Sweep};
use terrace_replay::chart::{Chart, HUES, Layer, Mark, Panel, Scale, milliseconds_tick, picture};

use crate::scaling::short;

/// Renders all figures as an SVG.
pub(super) fn svg(figures: &ScalingFigures) -> String {
    let panels: Vec<Panel> = figures.sweeps.iter().map(panel).collect();
    picture(&panels)
}

/// Creates a plot with two logarithmic axes and the growth in the legend.
fn panel(sweep: &Sweep) -> Panel {
    let Sweep { dimension, sizes, costs } = sweep;
    let (least_ms, most_ms) = decades(costs);
    let line = |(style, cost): (usize, &Cost)| {
        let points = sizes.iter().zip(&cost.times);
        let points = points.map(|(&size, time)| (size as f64, time * ms_per(cost.unit)));
        let name = format!("{}, {}", cost.name, cost.unit);
        Layer::new(&name, HUES[style % HUES.len()], Mark::Points(points.collect())).styled(style)
    };
    let mut layers: Vec<Layer> = costs.iter().enumerate().map(line).collect();
    layers.extend(proportional(sizes, least_ms, most_ms));
    let growth = |cost: &Cost| [cost.growth, cost.nodes_growth].map(|x| format!("x {x:.2}"));
    Panel {
        chart: Chart {
            title: format!("By {dimension}"),
            note: String::new(),
            x: Scale::logarithmic_sizes(
                sizes.iter().map(|&size| (size as f64, short(size))).collect(),
                &format!("{dimension} (logarithmic)"),
            ),
            y: Scale::logarithmic(least_ms, most_ms, "time (logarithmic)", milliseconds_tick),
            layers,
            tips: Vec::new(),
        },
        heading: "growth for ten times the size:".to_owned(),
        columns: ["time", "nodes"].map(str::to_owned).to_vec(),
        figures: costs.iter().map(|cost| growth(cost).to_vec()).collect(),
    }
}

/// Returns a line of proportional growth, from the corner to the edge of the plot.
fn proportional(sizes: &[u64], least_ms: f64, most_ms: f64) -> Option<Layer> {
    let (first, last) = (*sizes.first()? as f64, *sizes.last()? as f64);
    let factor = (last / first).min(most_ms / least_ms);
    let line = vec![(first, least_ms), (first * factor, least_ms * factor)];
    Some(Layer::new("linear growth", "quiet", Mark::Limit(line)))
}

/// Returns the factor from a unit of time, or of time per page, to milliseconds.
fn ms_per(unit: &str) -> f64 {
    if unit.starts_with("us") { 1e-3 } else { 1e-6 }
}

/// Returns the range of powers of ten that contains all times, in milliseconds.
fn decades(costs: &[Cost]) -> (f64, f64) {
    let times =
        costs.iter().flat_map(|cost| cost.times.iter().map(|time| time * ms_per(cost.unit)));
    let (least, most) =
        times.fold((f64::MAX, 0.0), |(a, b): (f64, f64), time| (a.min(time), b.max(time)));
    (10f64.powf(least.log10().floor()), 10f64.powf(most.log10().ceil()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plot_shows_growth() {
        let cost = |name, unit, times: [f64; 2]| Cost {
            name,
            unit,
            times: times.to_vec(),
            growth: 2.5,
            nodes: vec![1.0; 2],
            nodes_growth: 1.0,
        };
        let costs =
            vec![cost("look up", "ns a page", [20.0, 50.0]), cost("step", "us", [2.0, 900.0])];
        assert_eq!(decades(&costs), (1e-5, 1.0));
        let sweep = Sweep { dimension: "pages cached", sizes: vec![100, 1000], costs };
        let svg = svg(&ScalingFigures { sweeps: vec![sweep], full_pool: Vec::new() });
        for text in ["By pages cached", "look up, ns a page", "step, us", "x 2.50", "10 ns", "1 ms"]
        {
            assert!(svg.contains(&format!(">{text}<")), "{text} in {svg}");
        }
        // The corners of the plot: the power of ten below the first size and the one above the
        // last.
        assert!(svg.contains("M72.0 200.0L418.0 "), "{svg}");
    }
}
