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
    /// An area between two lines, by x.
    Area(Vec<(f64, f64, f64)>),
}

impl Layer {
    pub(super) fn new(name: &str, colour: &'static str, mark: Mark) -> Self {
        Self { name: name.to_owned(), colour, mark }
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
            let kind = match layer.mark {
                Mark::Line(_) | Mark::Points(_) => "line",
                Mark::Limit(_) => "limit",
                Mark::Area(_) => "area",
            };
            let _ = write!(
                html,
                "<li><span class=\"key {kind}\" style=\"--c:var(--{})\"></span>{}</li>",
                layer.colour,
                escape(&layer.name)
            );
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
            Mark::Line(points) | Mark::Limit(points) | Mark::Points(points) => {
                let class = match layer.mark {
                    Mark::Limit(_) => "limit",
                    Mark::Line(_) | Mark::Points(_) | Mark::Area(_) => "line",
                };
                let path = self.path(points.iter().copied());
                let _ = write!(
                    html,
                    "<path class=\"{class}\" style=\"--c:var(--{colour})\" d=\"{path}\"/>"
                );
                if let Mark::Points(points) = &layer.mark {
                    for &(x, y) in points {
                        let (x, y) = (self.x_at(x), self.y_at(y));
                        let _ = write!(
                            html,
                            "<circle style=\"--c:var(--{colour})\" cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"3\"/>"
                        );
                    }
                }
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
