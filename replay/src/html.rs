//! Reports as pages: a single self-contained file for light and dark mode, large and small screens.
//! The only script shows values at the pointer.

mod coarse;
mod plots;
mod report;
mod slowest;
mod sweep;

use maud::{DOCTYPE, Markup, PreEscaped, html};
use serde::Serialize;

use crate::chart::{self, Chart};
use crate::report::Report;
use crate::sweep::Sweep;

const STYLE: &str = include_str!("html/page.css");
const SCRIPT: &str = include_str!("html/page.js");

/// Renders the page of one replay; `trace` is the name of its trace.
#[must_use]
pub fn report_page(trace: &str, report: &Report) -> String {
    document(&format!("Replay of {trace}"), &report::body(trace, report), report)
}

/// Renders the page that compares the replays of a sweep.
#[must_use]
pub fn sweep_page(trace: &str, sweep: &Sweep) -> String {
    document(&format!("Sweep over {trace}"), &sweep::body(trace, sweep), sweep)
}

/// Renders a page with the figures as embedded JSON, for other plots.
fn document(title: &str, body: &Markup, data: &impl Serialize) -> String {
    // A script element has no escapes and ends at a tag. In JSON this character occurs only in
    // strings, where it can be escaped.
    let data = serde_json::to_string(data).unwrap_or_default().replace('<', "\\u003c");
    let page = html! {
        (DOCTYPE)
        html lang="en" {
            head {
                meta charset="utf-8";
                meta name="viewport" content="width=device-width, initial-scale=1";
                title { (title) }
                style { (PreEscaped(chart::PALETTE)) (PreEscaped(STYLE)) (PreEscaped(chart::STYLE)) }
            }
            body {
                (body)
                div #tip role="status" hidden {}
                script #data type="application/json" { (PreEscaped(data)) }
                script { (PreEscaped(SCRIPT)) }
            }
        }
    };
    page.into_string()
}

/// Renders the heading: the operation, the trace and the machine.
fn heading(what: &str, trace: &str, machine: &str) -> Markup {
    html! { h1 { (what) " " (trace) " " span.quiet { (machine) } } }
}

/// Renders a section of a page.
fn section(title: &str, content: &Markup) -> Markup {
    html! { section { h2 { (title) } (content) } }
}

/// Renders plots side by side.
fn chart_section(title: &str, charts: &[Chart]) -> Markup {
    section(title, &html! { div.plots { @for chart in charts { (chart.figure()) } } })
}

/// Renders a legend entry: a name and its colour.
fn key(colour: &str, name: &str) -> Markup {
    html! { li { span.key style={ "--c:var(--" (colour) ")" } {} (name) } }
}

/// Renders a table with column titles.
fn table(names: &[&str], rows: &[Vec<String>]) -> Markup {
    html! {
        div.table {
            table {
                thead { tr { @for name in names { th { (name) } } } }
                tbody { @for row in rows { tr { @for cell in row { td { (cell) } } } } }
            }
        }
    }
}

/// A cell of a sortable table: its text, and its sort key.
struct Cell {
    text: String,
    value: Option<f64>,
}

/// Renders a table that is sorted by a click on a column title.
fn sortable_table(names: &[&str], rows: &[Vec<Cell>], best: usize) -> Markup {
    html! {
        div.table {
            table.sortable {
                thead { tr { @for name in names { th { button type="button" { (name) } } } } }
                tbody {
                    @for (place, row) in rows.iter().enumerate() {
                        tr.best[place == best] {
                            @for Cell { text, value } in row {
                                td data-value=[value.filter(|value| value.is_finite())] { (text) }
                            }
                        }
                    }
                }
            }
        }
    }
}

/// Renders a key figure.
fn figure(name: &str, value: &str, more: &str) -> Markup {
    html! { div { dt { (name) } dd { (value) small { (more) } } } }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::options::{Options, Setting};
    use crate::sweep::Axis;
    use crate::trace::{Synthetic, Trace, TraceBuilder};

    /// A string that would close its element and inject a script if it were not escaped.
    const HOSTILE: &str = "</title></style><!--<script>alert(1)</script>\"' onload=x &.jsonl";

    /// Asserts that all elements are closed in order and all values quoted. The content of `script`
    /// and `style` is not checked.
    pub(crate) fn assert_well_formed(markup: &str) {
        let mut open: Vec<&str> = Vec::new();
        let mut rest = markup.strip_prefix("<!DOCTYPE html>").unwrap_or(markup);
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
            let mut attributes = outside.split_whitespace().skip(1);
            let is_sound = |name: &str| name == "hidden" || name.ends_with('=');
            assert!(attributes.all(is_sound), "<{tag}>");
            let name = tag.split(' ').next().unwrap_or_default();
            if name != "meta" {
                open.push(name);
            }
            if matches!(name, "script" | "style") {
                rest = &rest[rest.find(&format!("</{name}>")).expect("it is closed")..];
            }
        }
        assert_eq!(open, [""; 0]);
    }

    /// Asserts that a page loads nothing, and that the hostile text is shown `shown` times and is
    /// never markup.
    fn assert_self_contained(page: &str, shown: usize) {
        for reference in ["http:", "https:", "src=", "href=", "url(", "@import", "fetch("] {
            assert!(!page.contains(reference), "{reference}");
        }
        assert!(!page.contains("NaN") && !page.contains("inf\""), "a number that is none");
        let own = [
            ("<script", 2),
            ("</script", 2),
            ("<style", 1),
            ("</style", 1),
            ("</title", 1),
            ("<!--", 0),
        ];
        for (tag, count) in own {
            assert_eq!(page.matches(tag).count(), count, "{tag}");
        }
        let found = page.matches("&lt;script&gt;alert(1)&lt;/script&gt;").count();
        assert!(found >= shown, "{found} of {shown}");
        assert!(page.contains("&quot;' onload=x &amp;.jsonl"));
    }

    /// Returns the embedded figures.
    fn data(page: &str) -> serde_json::Value {
        let start = page.find("<script id=\"data\"").expect("figures");
        let start = start + page[start..].find('>').unwrap() + 1;
        let end = start + page[start..].find("</script>").unwrap();
        serde_json::from_str(&page[start..end]).unwrap()
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
    fn replay_page_is_well_formed_and_self_contained() {
        for trace in traces() {
            let mut report = crate::replay(&trace, &small_options().config().unwrap()).unwrap();
            report.config.model = HOSTILE.to_owned();
            report.verdict.text = HOSTILE.to_owned();
            let page = report_page(HOSTILE, &report);
            assert_well_formed(&page);
            // The title, the heading, the machine, the verdict and the configuration.
            assert_self_contained(&page, 5);
            assert_eq!(data(&page)["config"]["model"], HOSTILE);
            assert_eq!(data(&page)["verdict"]["text"], HOSTILE);
        }
    }

    #[test]
    fn sweep_page_is_well_formed_and_self_contained() {
        let axes = ["host=0,200k", "policy=lru,slru", "l3=0,unlimited", "order=arrival,priority"];
        let axes: Vec<Axis> = axes.iter().map(|text| Axis::parse(text).unwrap()).collect();
        // With one, two and four axes: separate plots for the dimensions that do not fit one.
        for count in [1, 2, 4] {
            let sweep =
                Sweep::run(&traces()[0], &small_options(), axes[..count].to_vec(), 2, &|| {});
            let mut sweep = sweep.unwrap();
            sweep.answer = HOSTILE.to_owned();
            sweep.machines = vec![HOSTILE.to_owned()];
            for axis in &mut sweep.axes {
                axis.values[0] = HOSTILE.to_owned();
            }
            for point in &mut sweep.points {
                point.values[count - 1] = HOSTILE.to_owned();
            }
            let page = sweep_page(HOSTILE, &sweep);
            assert_well_formed(&page);
            // The title, the heading, the machine, the answer, the axes, and a cell for each configuration.
            assert_self_contained(&page, 4 + count + sweep.points.len());
            assert!(page.contains("Cost and time to first token"));
            assert_eq!(data(&page)["answer"], HOSTILE);
        }
        let days = [&traces()[1], &traces()[1].another_day(1)].map(Clone::clone);
        let stop = std::sync::atomic::AtomicBool::new(false);
        let sweep = Sweep::run_days(&stop, &days, &small_options(), Vec::new(), 1, &|| {});
        let page = sweep_page(HOSTILE, &sweep.unwrap());
        assert_well_formed(&page);
        assert_self_contained(&page, 2);
    }

    #[test]
    fn page_embeds_the_figures() {
        let report = crate::replay(&traces()[1], &small_options().config().unwrap()).unwrap();
        let data = data(&report_page("trace", &report));
        assert_eq!(data["finished"], report.finished);
        assert_eq!(
            data["series"]["arrivals"].as_array().unwrap().len(),
            report.series.arrivals.len()
        );
    }
}
