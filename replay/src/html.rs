//! Reports as pages: one file that needs nothing else, drawn here, for light and dark, large and small
//! screens. The only script shows values at the pointer.

mod chart;
mod coarse;
mod plots;
mod report;
mod scale;
mod slowest;
mod sweep;

use std::fmt::Write;

use serde::Serialize;

use crate::report::Report;
use crate::sweep::Sweep;

const STYLE: &str = include_str!("html/page.css");
const SCRIPT: &str = include_str!("html/page.js");

/// The page of one replay; `trace` is what its trace is called.
#[must_use]
pub fn report_page(trace: &str, report: &Report) -> String {
    document(&format!("Replay of {trace}"), &report::body(trace, report), report)
}

/// The page that compares the replays of a sweep.
#[must_use]
pub fn sweep_page(trace: &str, sweep: &Sweep) -> String {
    document(&format!("Sweep over {trace}"), &sweep::body(trace, sweep), sweep)
}

/// A page, with the figures behind it as JSON, so that they can be drawn again in other ways.
fn document(title: &str, body: &str, data: &impl Serialize) -> String {
    // A script ends where it is closed, and nothing in the figures may do that.
    let data = serde_json::to_string(data).unwrap_or_default().replace("</", "<\\/");
    let mut page = String::with_capacity(body.len() + data.len() + 16_384);
    let _ = write!(
        page,
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\"/>\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\"/>\n\
         <title>{}</title>\n<style>\n{STYLE}</style>\n</head>\n<body>\n{body}\
         <div id=\"tip\" role=\"status\" hidden=\"\"></div>\n\
         <script type=\"application/json\" id=\"data\">{data}</script>\n<script>\n{SCRIPT}</script>\n</body>\n</html>\n",
        escape(title)
    );
    page
}

/// How a page begins: what was done with which trace, and on what.
fn heading(what: &str, trace: &str, machine: &str) -> String {
    format!(
        "<header><h1>{what} {} <span class=\"quiet\">{}</span></h1>",
        escape(trace),
        escape(machine)
    )
}

/// Text as it may stand in a page, attributes included.
fn escape(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for character in text.chars() {
        match character {
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '"' => escaped.push_str("&quot;"),
            '\'' => escaped.push_str("&#39;"),
            other => escaped.push(other),
        }
    }
    escaped
}

/// A table whose first row names the columns.
fn table(names: &[&str], rows: &[Vec<String>]) -> String {
    let mut html = String::from("<div class=\"table\"><table><thead><tr>");
    for name in names {
        let _ = write!(html, "<th>{}</th>", escape(name));
    }
    html.push_str("</tr></thead><tbody>");
    for row in rows {
        html.push_str("<tr>");
        for cell in row {
            let _ = write!(html, "<td>{}</td>", escape(cell));
        }
        html.push_str("</tr>");
    }
    html.push_str("</tbody></table></div>\n");
    html
}

/// What a cell of a table that can be ordered says, and the number that it is ordered by.
struct Cell {
    text: String,
    value: Option<f64>,
}

/// A table that is ordered by the column whose name is pressed.
fn sortable_table(names: &[&str], rows: &[Vec<Cell>], best: Option<usize>) -> String {
    let mut html = String::from("<div class=\"table\"><table class=\"sortable\"><thead><tr>");
    for name in names {
        let _ = write!(html, "<th><button type=\"button\">{}</button></th>", escape(name));
    }
    html.push_str("</tr></thead><tbody>");
    for (place, row) in rows.iter().enumerate() {
        html.push_str(if best == Some(place) { "<tr class=\"best\">" } else { "<tr>" });
        for cell in row {
            let value = cell.value.filter(|value| value.is_finite());
            let value = value.map_or(String::new(), |value| format!(" data-value=\"{value}\""));
            let _ = write!(html, "<td{value}>{}</td>", escape(&cell.text));
        }
        html.push_str("</tr>");
    }
    html.push_str("</tbody></table></div>\n");
    html
}

/// A figure at the top of a page.
fn figure(name: &str, value: &str, more: &str) -> String {
    format!(
        "<div><dt>{}</dt><dd>{}<small>{}</small></dd></div>",
        escape(name),
        escape(value),
        escape(more)
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::options::{Options, Setting};
    use crate::sweep::Axis;
    use crate::trace::{Synthetic, Trace, TraceBuilder};

    const HOSTILE: &str = "<script>alert(1)</script>\"'&.jsonl";

    /// Every element is closed in order, and every attribute quoted. What is in `script` and `style` is
    /// not looked at.
    fn assert_well_formed(page: &str) {
        let mut open: Vec<&str> = Vec::new();
        let mut rest = page.strip_prefix("<!doctype html>").expect("a page");
        while let Some(start) = rest.find('<') {
            assert!(!rest[..start].contains('>'), "a stray > before {}", &rest[start..start + 20]);
            let end = start + rest[start..].find('>').expect("a tag ends");
            let tag = &rest[start + 1..end];
            rest = &rest[end + 1..];
            if let Some(name) = tag.strip_prefix('/') {
                assert_eq!(open.pop(), Some(name));
                continue;
            }
            assert_eq!(tag.matches('"').count() % 2, 0, "unbalanced quotes in <{tag}>");
            let outside: String = tag.split('"').step_by(2).collect();
            let attributes = outside.trim_end_matches('/').split_whitespace().skip(1);
            attributes.for_each(|name| assert!(name.ends_with('='), "{name} in <{tag}>"));
            let name = tag.split([' ', '/']).next().unwrap_or_default();
            if !tag.ends_with('/') {
                open.push(name);
            }
            if matches!(name, "script" | "style") {
                rest = &rest[rest.find(&format!("</{name}>")).expect("it is closed")..];
            }
        }
        assert_eq!(open, [""; 0]);
    }

    fn assert_self_contained(page: &str) {
        for reference in ["http:", "https:", "src=", "href=", "url(", "@import", "fetch("] {
            assert!(!page.contains(reference), "{reference}");
        }
        assert!(!page.contains("NaN") && !page.contains("inf\""), "a number that is none");
        assert!(!page.contains("alert(1)</script>"), "a name that became part of the page");
        assert!(page.contains("&lt;script&gt;alert(1)"));
    }

    fn small_options() -> Options {
        let mut options = Options::default();
        options.set(Setting::Device, "200k");
        options.set(Setting::Host, "400k");
        options
    }

    fn traces() -> [Trace; 2] {
        let mut one = TraceBuilder::new(16).unwrap();
        one.push(0, 5, 1, &[1]).unwrap();
        let many = Synthetic { requests: 200, ..Synthetic::default() };
        [one.finish(), many.trace().unwrap()]
    }

    #[test]
    fn the_page_of_a_replay_is_well_formed_and_needs_nothing_else() {
        for trace in traces() {
            let report = crate::replay(&trace, &small_options().config().unwrap()).unwrap();
            let page = report_page(HOSTILE, &report);
            assert_well_formed(&page);
            assert_self_contained(&page);
        }
    }

    #[test]
    fn the_page_of_a_sweep_is_well_formed_and_needs_nothing_else() {
        let axes = ["host=0,200k", "policy=lru,slru", "l3=0,unlimited", "order=arrival,tree-order"];
        let axes: Vec<Axis> = axes.iter().map(|text| Axis::parse(text).unwrap()).collect();
        // With one, two and four axes: plots of their own for what is too much for one.
        for count in [1, 2, 4] {
            let sweep =
                Sweep::run(&traces()[0], &small_options(), axes[..count].to_vec(), 2, &|| {});
            let page = sweep_page(HOSTILE, &sweep.unwrap());
            assert_well_formed(&page);
            assert_self_contained(&page);
            assert!(page.contains("Cost and time to first token"));
        }
        let days = [&traces()[1], &traces()[1].another_day(1)].map(Clone::clone);
        let stop = std::sync::atomic::AtomicBool::new(false);
        let sweep = Sweep::run_days(&stop, &days, &small_options(), Vec::new(), 1, &|| {});
        let page = sweep_page(HOSTILE, &sweep.unwrap());
        assert_well_formed(&page);
        assert_self_contained(&page);
    }

    #[test]
    fn the_figures_are_in_the_page() {
        let report = crate::replay(&traces()[1], &small_options().config().unwrap()).unwrap();
        let page = report_page("trace", &report);
        let start = page.find("id=\"data\">").unwrap() + "id=\"data\">".len();
        let end = start + page[start..].find("</script>").unwrap();
        let data: serde_json::Value = serde_json::from_str(&page[start..end]).unwrap();
        assert_eq!(data["finished"], report.finished);
        assert_eq!(
            data["series"]["arrivals"].as_array().unwrap().len(),
            report.series.arrivals.len()
        );
    }
}
