//! Plots as SVG: areas and lines over two axes, for the pages of a replay and, as a [`picture`],
//! for other figures. Lines differ in dashes and points as well as in colour.

mod layer;
mod names;
mod picture;
mod scale;

use maud::{Markup, html};

pub use self::layer::{HUES, Layer, Mark};
pub use self::names::milliseconds_tick;
pub(crate) use self::names::{percent_tick, short_bandwidth, short_count};
pub use self::picture::{Panel, picture};
pub use self::scale::Scale;

/// Style sheet with the palette for light and dark mode, and the typeface.
pub(crate) const PALETTE: &str = include_str!("chart/palette.css");
/// Style sheet of plots.
pub(crate) const STYLE: &str = include_str!("chart/plot.css");

/// Width of a plot: readable on a phone, where one plot fills the screen.
const WIDTH: f64 = 430.0;
const HEIGHT: f64 = 240.0;
const LEFT: f64 = 72.0;
const RIGHT: f64 = 12.0;
const TOP: f64 = 12.0;
const BOTTOM: f64 = 40.0;

/// A plot.
#[derive(Debug)]
pub struct Chart {
    /// Title.
    pub title: String,
    /// Description in a sentence.
    pub note: String,
    /// Horizontal axis.
    pub x: Scale,
    /// Vertical axis.
    pub y: Scale,
    /// Layers, from back to front.
    pub layers: Vec<Layer>,
    /// Tooltips: a place on the x axis and lines of text.
    pub tips: Vec<(f64, String)>,
}

impl Chart {
    /// Renders the plot with title and legend, as part of a page.
    pub(crate) fn figure(&self) -> Markup {
        let tips = (!self.tips.is_empty()).then(|| self.tips_json());
        html! {
            figure.plot {
                figcaption {
                    h3 { (self.title) }
                    @if !self.note.is_empty() { p.quiet { (self.note) } }
                }
                ul.legend { @for layer in &self.layers { li { (layer.key()) (layer.name) } } }
                svg viewBox={ "0 0 " (WIDTH) " " (HEIGHT) } role="img" aria-label=(self.title) data-tips=[tips] {
                    (self.drawing())
                    line.cross y1=(TOP) y2=(HEIGHT - BOTTOM) hidden {}
                }
            }
        }
    }

    /// Renders axes and layers.
    fn drawing(&self) -> Markup {
        html! {
            (self.axes())
            @for layer in &self.layers { (layer.drawn(|x, y| (self.x_at(x), self.y_at(y)))) }
        }
    }

    fn axes(&self) -> Markup {
        let (right, bottom) = (WIDTH - RIGHT, HEIGHT - BOTTOM);
        // A centred label at the edge would be cut off.
        let name_at = |x: f64| match x > right - 14.0 {
            true => (WIDTH - 2.0, "end"),
            false => (x, "middle"),
        };
        html! {
            @for (value, name) in &self.y.ticks {
                @let y = self.y_at(*value);
                line.grid x1=(LEFT) x2=(right) y1=(tenths(y)) y2=(tenths(y)) {}
                text.tick x=(LEFT - 6.0) y=(tenths(y + 4.0)) text-anchor="end" { (name) }
            }
            @for (value, name) in &self.x.ticks {
                @let x = self.x_at(*value);
                @let (name_x, anchor) = name_at(x);
                line.mark x1=(tenths(x)) x2=(tenths(x)) y1=(bottom) y2=(bottom + 4.0) {}
                text.tick x=(tenths(name_x)) y=(bottom + 16.0) text-anchor=(anchor) { (name) }
            }
            line.axis x1=(LEFT) x2=(right) y1=(bottom) y2=(bottom) {}
            text.label x=((LEFT + right) / 2.0) y=(HEIGHT - 6.0) text-anchor="middle" { (self.x.label) }
            text.label transform={ "translate(12 " ((TOP + bottom) / 2.0) ") rotate(-90)" } text-anchor="middle" {
                (self.y.label)
            }
        }
    }

    fn tips_json(&self) -> String {
        let tips = self.tips.iter().map(|(x, text)| {
            let x = (self.x_at(*x) * 10.0).round() / 10.0;
            serde_json::json!([x, text])
        });
        serde_json::Value::Array(tips.collect()).to_string()
    }

    fn x_at(&self, value: f64) -> f64 {
        LEFT + self.x.place(value) * (WIDTH - LEFT - RIGHT)
    }

    fn y_at(&self, value: f64) -> f64 {
        HEIGHT - BOTTOM - self.y.place(value) * (HEIGHT - TOP - BOTTOM)
    }
}

/// Formats a coordinate with one decimal: finer differences are invisible.
fn tenths(value: f64) -> String {
    format!("{value:.1}")
}
