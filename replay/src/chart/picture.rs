//! Plots in a separate SVG file.

use maud::{Markup, PreEscaped, html};

use super::layer::{SAMPLE_HEIGHT, SAMPLE_WIDTH};
use super::{Chart, HEIGHT, PALETTE, STYLE, WIDTH};

const OWN_STYLE: &str = "
.paper { fill: var(--panel); }
svg .title { font-size: 14px; font-weight: 600; }
svg .quiet { fill: var(--quiet); font-weight: normal; font-size: 11px; }
";

/// Plots per row.
const ABREAST: usize = 2;
/// Margin around a plot with title and legend.
const MARGIN: f64 = 18.0;
const PANEL_WIDTH: f64 = WIDTH + 2.0 * MARGIN;
const PLOT_TOP: f64 = 34.0;
const LEGEND_TOP: f64 = PLOT_TOP + HEIGHT + 22.0;
const LINE_HEIGHT: f64 = 17.0;
/// Distance between the right ends of columns.
const COLUMN_WIDTH: f64 = 54.0;
/// Scale of a picture: text in documents is larger than in plots.
const ENLARGED: f64 = 1.12;

/// A plot in a picture: its legend is a table of figures, one line for each layer.
#[derive(Debug)]
pub struct Panel {
    /// The plot.
    pub chart: Chart,
    /// Heading of the figures.
    pub heading: String,
    /// Column titles.
    pub columns: Vec<String>,
    /// The figures of each layer, in the order of the layers; there may be none.
    pub figures: Vec<Vec<String>>,
}

/// Renders an SVG with these plots, two per row.
#[must_use]
pub fn picture(panels: &[Panel]) -> String {
    let layers_max = panels.iter().map(|panel| panel.chart.layers.len()).max().unwrap_or(0);
    let panel_height = LEGEND_TOP + layers_max as f64 * LINE_HEIGHT + MARGIN;
    let width = PANEL_WIDTH * ABREAST as f64;
    let height = panel_height * panels.len().div_ceil(ABREAST) as f64;
    let svg = html! {
        svg xmlns="http://www.w3.org/2000/svg" viewBox={ "0 0 " (width) " " (height) }
            width=((width * ENLARGED).round()) height=((height * ENLARGED).round()) {
            style { (PreEscaped(PALETTE)) (PreEscaped(STYLE)) (PreEscaped(OWN_STYLE)) }
            rect.paper width=(width) height=(height) rx="6" {}
            @for (place, panel) in panels.iter().enumerate() {
                @let (column, row) = (place % ABREAST, place / ABREAST);
                (moved(
                    column as f64 * PANEL_WIDTH + MARGIN,
                    row as f64 * panel_height,
                    &panel.drawing(),
                ))
            }
        }
    };
    svg.into_string()
}

impl Panel {
    fn drawing(&self) -> Markup {
        html! {
            text.title x="0" y="22" {
                (self.chart.title)
                @if !self.chart.note.is_empty() { " " tspan.quiet dx="6" { (self.chart.note) } }
            }
            (moved(0.0, PLOT_TOP, &self.chart.drawing()))
            text.quiet x="0" y=(LEGEND_TOP) { (self.heading) }
            (self.figures_at(LEGEND_TOP, "quiet", &self.columns))
            @for (place, layer) in self.chart.layers.iter().enumerate() {
                @let y = LEGEND_TOP + (place + 1) as f64 * LINE_HEIGHT;
                // The sample is centred on the height of small letters.
                (moved(0.0, y - 4.0 - SAMPLE_HEIGHT / 2.0, &layer.sample()))
                text x=(SAMPLE_WIDTH + 8.0) y=(y) { (layer.name) }
                @if let Some(figures) = self.figures.get(place) { (self.figures_at(y, "", figures)) }
            }
        }
    }

    /// Renders figures below the columns, right-aligned.
    fn figures_at(&self, y: f64, class: &str, figures: &[String]) -> Markup {
        let right = |place: usize| {
            WIDTH - self.columns.len().saturating_sub(place + 1) as f64 * COLUMN_WIDTH
        };
        html! {
            @for (place, figure) in figures.iter().enumerate() {
                text class=(class) x=(right(place)) y=(y) text-anchor="end" { (figure) }
            }
        }
    }
}

fn moved(x: f64, y: f64, content: &Markup) -> Markup {
    html! { g transform={ "translate(" (x) " " (y) ")" } { (content) } }
}

#[cfg(test)]
mod tests {
    use super::super::{HUES, Layer, Mark, Scale, milliseconds_tick};
    use super::*;
    use crate::html::tests::assert_well_formed;

    fn panel(title: &str) -> Panel {
        let sizes = [(10.0, "10".to_owned()), (1e4, "10 k".to_owned())];
        let line = |name, style: usize| {
            let points = vec![(10.0, 1e-3), (1e4, 2e-3)];
            Layer::new(name, HUES[style], Mark::Points(points)).styled(style)
        };
        let chart = Chart {
            title: title.to_owned(),
            note: "<note>".to_owned(),
            x: Scale::logarithmic_sizes(sizes.to_vec(), "<x>"),
            y: Scale::logarithmic(1e-4, 1e-2, "<y>", milliseconds_tick),
            layers: vec![line("<one>", 0), line("another", 1)],
            tips: Vec::new(),
        };
        let columns = ["time", "<nodes>"].map(str::to_owned).to_vec();
        let figures = vec![vec!["x 1".to_owned(), "x <2>".to_owned()]];
        Panel { chart, heading: "<growth>".to_owned(), columns, figures }
    }

    #[test]
    fn picture_escapes_all_texts() {
        let picture = picture(&["<script>alert(1)</script>", "\"'&", "third"].map(panel));
        assert_well_formed(&picture);
        assert_eq!(picture.matches("<script").count(), 0);
        for text in ["note", "x", "y", "one", "nodes", "growth", "script"] {
            assert!(picture.contains(&format!("&lt;{text}&gt;")), "{text}");
        }
        // Unquoted values are valid HTML, but not XML.
        assert!(!picture.contains(" hidden"));
    }

    #[test]
    fn lines_differ_without_colour() {
        let picture = picture(&[panel("title")]);
        assert_eq!(
            picture.matches("stroke-dasharray=\"7 3\"").count(),
            2,
            "the second, and its sample"
        );
        assert_eq!(
            picture.matches("<circle").count(),
            3,
            "the first line's points, and its sample"
        );
    }

    #[test]
    fn empty_picture_is_valid() {
        assert_well_formed(&picture(&[]));
    }
}
