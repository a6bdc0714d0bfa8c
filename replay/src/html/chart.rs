//! Plots as SVG: areas and lines over two axes, with a legend and what a pointer is told.

use std::fmt::Write;

use super::escape;
use super::scale::Scale;

/// Small enough to be read on a phone, where one plot fills the width.
const WIDTH: f64 = 430.0;
const HEIGHT: f64 = 240.0;
const LEFT: f64 = 66.0;
const RIGHT: f64 = 12.0;
const TOP: f64 = 12.0;
const BOTTOM: f64 = 40.0;

/// A plot.
#[derive(Debug)]
pub(super) struct Chart {
    pub(super) title: String,
    /// What is to be seen, in a sentence.
    pub(super) note: String,
    pub(super) x: Scale,
    pub(super) y: Scale,
    pub(super) layers: Vec<Layer>,
    /// What a pointer is told: a place on the x axis and lines of text.
    pub(super) tips: Vec<(f64, String)>,
}

/// Something that is drawn; later ones over earlier ones.
#[derive(Debug)]
pub(super) struct Layer {
    pub(super) name: String,
    /// A colour of the page's style.
    pub(super) colour: &'static str,
    /// Lines of different styles can be told apart without their colours.
    pub(super) style: usize,
    pub(super) mark: Mark,
}

/// How it is drawn.
#[derive(Debug)]
pub(super) enum Mark {
    /// A line through points.
    Line(Vec<(f64, f64)>),
    /// A broken line, for limits.
    Limit(Vec<(f64, f64)>),
    /// A line with its points marked, for a few values.
    Points(Vec<(f64, f64)>),
    /// Points without a line.
    Dots(Vec<(f64, f64)>),
    /// An area between two lines, by x.
    Area(Vec<(f64, f64, f64)>),
}

impl Layer {
    pub(super) fn new(name: &str, colour: &'static str, mark: Mark) -> Self {
        Self { name: name.to_owned(), colour, style: 0, mark }
    }

    /// The same with dashes and points of another kind.
    pub(super) fn styled(self, style: usize) -> Self {
        Self { style, ..self }
    }
}

impl Chart {
    /// The plot with title and legend.
    pub(super) fn html(&self) -> String {
        let mut html = String::new();
        let _ = write!(html, "<figure class=\"plot\"><figcaption><h3>{}</h3>", escape(&self.title));
        if !self.note.is_empty() {
            let _ = write!(html, "<p class=\"quiet\">{}</p>", escape(&self.note));
        }
        html.push_str("</figcaption>");
        self.legend(&mut html);
        self.svg(&mut html);
        html.push_str("</figure>\n");
        html
    }

    fn legend(&self, html: &mut String) {
        html.push_str("<ul class=\"legend\">");
        for layer in &self.layers {
            let colour = layer.colour;
            let key = match layer.mark {
                Mark::Line(_) | Mark::Points(_) | Mark::Dots(_) => sample(layer),
                Mark::Limit(_) => {
                    format!("<span class=\"key limit\" style=\"--c:var(--{colour})\"></span>")
                }
                Mark::Area(_) => {
                    format!("<span class=\"key area\" style=\"--c:var(--{colour})\"></span>")
                }
            };
            let _ = write!(html, "<li>{key}{}</li>", escape(&layer.name));
        }
        html.push_str("</ul>");
    }

    fn svg(&self, html: &mut String) {
        let _ = write!(
            html,
            "<svg viewBox=\"0 0 {WIDTH} {HEIGHT}\" role=\"img\" aria-label=\"{}\"",
            escape(&self.title)
        );
        if !self.tips.is_empty() {
            let _ = write!(html, " data-tips=\"{}\"", escape(&self.tips_json()));
        }
        html.push('>');
        self.axes(html);
        for layer in &self.layers {
            self.layer(html, layer);
        }
        let bottom = HEIGHT - BOTTOM;
        let _ =
            write!(html, "<line class=\"cross\" y1=\"{TOP}\" y2=\"{bottom}\" hidden=\"\"/></svg>");
    }

    fn axes(&self, html: &mut String) {
        let (right, bottom) = (WIDTH - RIGHT, HEIGHT - BOTTOM);
        for (value, name) in &self.y.ticks {
            let y = self.y_at(*value);
            let _ = write!(
                html,
                "<line class=\"grid\" x1=\"{LEFT}\" x2=\"{right}\" y1=\"{y:.1}\" y2=\"{y:.1}\"/>\
                 <text class=\"tick\" x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>",
                LEFT - 6.0,
                y + 4.0,
                escape(name)
            );
        }
        for (value, name) in &self.x.ticks {
            let x = self.x_at(*value);
            // A name at the edge would be cut off if it stood in the middle.
            let anchor = if x > right - 14.0 { "end" } else { "middle" };
            let x_name = if x > right - 14.0 { right + RIGHT - 2.0 } else { x };
            let _ = write!(
                html,
                "<line class=\"mark\" x1=\"{x:.1}\" x2=\"{x:.1}\" y1=\"{bottom}\" y2=\"{:.1}\"/>\
                 <text class=\"tick\" x=\"{x_name:.1}\" y=\"{:.1}\" text-anchor=\"{anchor}\">{}</text>",
                bottom + 4.0,
                bottom + 16.0,
                escape(name)
            );
        }
        let _ = write!(
            html,
            "<line class=\"axis\" x1=\"{LEFT}\" x2=\"{right}\" y1=\"{bottom}\" y2=\"{bottom}\"/>\
             <text class=\"label\" x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{}</text>\
             <text class=\"label\" transform=\"translate(10 {:.1}) rotate(-90)\" \
             text-anchor=\"middle\">{}</text>",
            (LEFT + right) / 2.0,
            HEIGHT - 6.0,
            escape(&self.x.label),
            (TOP + bottom) / 2.0,
            escape(&self.y.label)
        );
    }

    fn layer(&self, html: &mut String, layer: &Layer) {
        let colour = layer.colour;
        match &layer.mark {
            Mark::Line(points) | Mark::Points(points) => {
                let path = self.path(points.iter().copied());
                let _ = write!(html, "{}", line(layer, &path));
                if let Mark::Points(points) = &layer.mark {
                    self.dots(html, layer, points);
                }
            }
            Mark::Dots(points) => self.dots(html, layer, points),
            Mark::Limit(points) => {
                let path = self.path(points.iter().copied());
                let _ = write!(
                    html,
                    "<path class=\"limit\" style=\"--c:var(--{colour})\" d=\"{path}\"/>"
                );
            }
            Mark::Area(points) => {
                let top = points.iter().map(|&(x, _, to)| (x, to));
                let back = points.iter().rev().map(|&(x, from, _)| (x, from));
                let path = self.path(top.chain(back));
                let _ = write!(
                    html,
                    "<path class=\"area\" style=\"--c:var(--{colour})\" d=\"{path}Z\"/>"
                );
            }
        }
    }

    fn dots(&self, html: &mut String, layer: &Layer, points: &[(f64, f64)]) {
        for &(x, y) in points {
            html.push_str(&dot(layer, self.x_at(x), self.y_at(y)));
        }
    }

    fn path(&self, points: impl Iterator<Item = (f64, f64)>) -> String {
        let mut path = String::new();
        for (place, (x, y)) in points.enumerate() {
            let command = if place == 0 { 'M' } else { 'L' };
            let _ = write!(path, "{command}{:.1} {:.1}", self.x_at(x), self.y_at(y));
        }
        path
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

/// Dashes of lines, by style: the first is whole.
const DASHES: [&str; 4] = ["", "7 3", "2 3", "9 3 2 3"];

fn line(layer: &Layer, path: &str) -> String {
    let dashes = match DASHES[layer.style % DASHES.len()] {
        "" => String::new(),
        dashes => format!(" stroke-dasharray=\"{dashes}\""),
    };
    let colour = layer.colour;
    format!("<path class=\"line\" style=\"--c:var(--{colour})\"{dashes} d=\"{path}\"/>")
}

/// A point: round, square, triangular or a square on its corner, by style; the second four styles are hollow.
fn dot(layer: &Layer, x: f64, y: f64) -> String {
    let (colour, shape) = (layer.colour, layer.style % 4);
    let class = if layer.style % 8 < 4 { "dot" } else { "dot hollow" };
    let corners: &[(f64, f64)] = match shape {
        1 => &[(-3.0, -3.0), (3.0, -3.0), (3.0, 3.0), (-3.0, 3.0)],
        2 => &[(0.0, -4.0), (3.6, 2.8), (-3.6, 2.8)],
        _ => &[(0.0, -4.2), (4.2, 0.0), (0.0, 4.2), (-4.2, 0.0)],
    };
    let style = format!("class=\"{class}\" style=\"--c:var(--{colour})\"");
    if shape == 0 {
        return format!("<circle {style} cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"3\"/>");
    }
    let corner = |(place, (right, down)): (usize, &(f64, f64))| {
        let command = if place == 0 { 'M' } else { 'L' };
        format!("{command}{:.1} {:.1}", x + right, y + down)
    };
    let path: String = corners.iter().enumerate().map(corner).collect();
    format!("<path {style} d=\"{path}Z\"/>")
}

/// What a line or point looks like, for a legend.
fn sample(layer: &Layer) -> String {
    let mut inside = match layer.mark {
        Mark::Dots(_) => String::new(),
        Mark::Line(_) | Mark::Points(_) | Mark::Limit(_) | Mark::Area(_) => {
            line(layer, "M0 5L26 5")
        }
    };
    if matches!(layer.mark, Mark::Points(_) | Mark::Dots(_)) {
        inside += &dot(layer, 13.0, 5.0);
    }
    format!("<svg class=\"sample\" viewBox=\"0 0 26 10\" aria-hidden=\"true\">{inside}</svg>")
}
