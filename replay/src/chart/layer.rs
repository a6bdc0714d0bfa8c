//! Layers of a plot, and their styles.

use std::fmt::Write;

use maud::{Markup, html};

use super::tenths;

/// Colours of lines without a fixed meaning.
pub const HUES: [&str; 8] = ["hue0", "hue1", "hue2", "hue3", "hue4", "hue5", "hue6", "hue7"];

/// Dashes of lines by style; the first is solid.
const DASHES: [Option<&str>; 4] = [None, Some("7 3"), Some("2 3"), Some("9 3 2 3")];

/// Width of a legend sample of a line and of an area, and their height.
pub(super) const SAMPLE_WIDTH: f64 = 26.0;
const AREA_WIDTH: f64 = 14.0;
pub(super) const SAMPLE_HEIGHT: f64 = 10.0;

/// A layer of a plot. Later layers are drawn over earlier ones.
#[derive(Debug)]
pub struct Layer {
    /// Name in the legend.
    pub(super) name: String,
    /// A colour of the palette.
    colour: &'static str,
    /// Index of dashes and points, so that lines differ without colour.
    style: usize,
    mark: Mark,
}

/// Shape of a layer.
#[derive(Debug)]
pub enum Mark {
    /// A line through points.
    Line(Vec<(f64, f64)>),
    /// A dashed line, for limits.
    Limit(Vec<(f64, f64)>),
    /// A line with its points marked, for a few values.
    Points(Vec<(f64, f64)>),
    /// Points without a line.
    Dots(Vec<(f64, f64)>),
    /// An area between two lines, by x.
    Area(Vec<(f64, f64, f64)>),
}

impl Layer {
    /// Creates a layer with a name and a colour of the palette.
    #[must_use]
    pub fn new(name: &str, colour: &'static str, mark: Mark) -> Self {
        Self { name: name.to_owned(), colour, style: 0, mark }
    }

    /// Sets the dashes and points; there are eight styles.
    #[must_use]
    pub fn styled(self, style: usize) -> Self {
        Self { style, ..self }
    }

    /// Renders the mark, with its values placed by `at`.
    pub(super) fn drawn(&self, at: impl Fn(f64, f64) -> (f64, f64)) -> Markup {
        let placed = |points: &[(f64, f64)]| -> Vec<(f64, f64)> {
            points.iter().map(|&(x, y)| at(x, y)).collect()
        };
        match &self.mark {
            Mark::Line(points) => self.line(placed(points)),
            Mark::Limit(points) => self.limit(placed(points)),
            Mark::Points(points) => {
                html! { (self.line(placed(points))) (self.dots(placed(points))) }
            }
            Mark::Dots(points) => self.dots(placed(points)),
            Mark::Area(points) => {
                let top = points.iter().map(|&(x, _, to)| at(x, to));
                let back = points.iter().rev().map(|&(x, from, _)| at(x, from));
                html! { path.area style=(self.paint()) d={ (path(top.chain(back))) "Z" } {} }
            }
        }
    }

    /// Renders the legend entry.
    pub(super) fn key(&self) -> Markup {
        let width = match self.mark {
            Mark::Area(_) => AREA_WIDTH,
            Mark::Line(_) | Mark::Limit(_) | Mark::Points(_) | Mark::Dots(_) => SAMPLE_WIDTH,
        };
        html! {
            svg.sample width=(width) height=(SAMPLE_HEIGHT) aria-hidden="true" { (self.sample()) }
        }
    }

    /// Renders the legend sample.
    pub(super) fn sample(&self) -> Markup {
        let middle = SAMPLE_HEIGHT / 2.0;
        let line = vec![(0.0, middle), (SAMPLE_WIDTH, middle)];
        let dot = vec![(SAMPLE_WIDTH / 2.0, middle)];
        match self.mark {
            Mark::Line(_) => self.line(line),
            Mark::Limit(_) => self.limit(line),
            Mark::Points(_) => html! { (self.line(line)) (self.dots(dot)) },
            Mark::Dots(_) => self.dots(dot),
            Mark::Area(_) => {
                html! { rect.area style=(self.paint()) width=(AREA_WIDTH) height=(SAMPLE_HEIGHT) rx="2" {} }
            }
        }
    }

    /// Returns the colour for the style sheet.
    fn paint(&self) -> String {
        format!("--c:var(--{})", self.colour)
    }

    fn line(&self, points: Vec<(f64, f64)>) -> Markup {
        let dashes = DASHES[self.style % DASHES.len()];
        html! { path.line style=(self.paint()) stroke-dasharray=[dashes] d=(path(points)) {} }
    }

    fn limit(&self, points: Vec<(f64, f64)>) -> Markup {
        html! { path.limit style=(self.paint()) d=(path(points)) {} }
    }

    /// Renders points: circles, squares, triangles or diamonds by style; the second four styles are
    /// hollow.
    fn dots(&self, points: Vec<(f64, f64)>) -> Markup {
        let is_hollow = self.style % 8 >= 4;
        let corners: &[(f64, f64)] = match self.style % 4 {
            0 => &[],
            1 => &[(-3.0, -3.0), (3.0, -3.0), (3.0, 3.0), (-3.0, 3.0)],
            2 => &[(0.0, -4.0), (3.6, 2.8), (-3.6, 2.8)],
            _ => &[(0.0, -4.2), (4.2, 0.0), (0.0, 4.2), (-4.2, 0.0)],
        };
        html! {
            @for (x, y) in points {
                @if corners.is_empty() {
                    circle.dot.hollow[is_hollow] style=(self.paint()) cx=(tenths(x)) cy=(tenths(y)) r="3" {}
                } @else {
                    @let corners = corners.iter().map(|(right, down)| (x + right, y + down));
                    path.dot.hollow[is_hollow] style=(self.paint()) d={ (path(corners)) "Z" } {}
                }
            }
        }
    }
}

fn path(points: impl IntoIterator<Item = (f64, f64)>) -> String {
    let mut path = String::new();
    for (x, y) in points {
        let command = if path.is_empty() { 'M' } else { 'L' };
        let _ = write!(path, "{command}{x:.1} {y:.1}");
    }
    path
}
