//! CSV output, for spreadsheets and plots.

use serde_json::Value;

use crate::report::Report;
use crate::sweep::Sweep;

/// Returns the configurations of a sweep, one per line: axis values first, then every figure under
/// its JSON name, with nested names joined by `_`.
#[must_use]
pub fn sweep_csv(sweep: &Sweep) -> String {
    let mut names: Vec<String> =
        sweep.axes.iter().map(|axis| axis.setting.name().to_owned()).collect();
    let mut rows = Vec::new();
    for (place, point) in sweep.points.iter().enumerate() {
        let mut figures = Vec::new();
        let mut value = serde_json::to_value(point).unwrap_or_default();
        if let Value::Object(fields) = &mut value {
            fields.remove("values");
        }
        flatten("", &value, &mut figures);
        if place == 0 {
            names.extend(figures.iter().map(|(name, _)| name.clone()));
            names.push("is_recommended".to_owned());
        }
        let mut row: Vec<String> = point.values.clone();
        row.extend(figures.into_iter().map(|(_, value)| value));
        row.push((place == sweep.recommended).to_string());
        rows.push(row);
    }
    lines(&names, rows)
}

/// Returns the time series of one replay: a line per interval, with its start time.
#[must_use]
pub fn series_csv(report: &Report) -> String {
    let value = serde_json::to_value(&report.series).unwrap_or_default();
    let mut names = vec!["from_s".to_owned()];
    let mut columns: Vec<&Vec<Value>> = Vec::new();
    if let Value::Object(fields) = &value {
        for (name, column) in fields {
            if let Value::Array(column) = column {
                names.push(name.clone());
                columns.push(column);
            }
        }
    }
    let length = columns.iter().map(|column| column.len()).min().unwrap_or(0);
    let row = |place: usize| {
        let from_s = place as f64 * report.series.interval_s;
        let cells = columns.iter().map(|column| cell(&column[place]));
        [from_s.to_string()].into_iter().chain(cells).collect()
    };
    lines(&names, (0..length).map(row).collect())
}

fn flatten(prefix: &str, value: &Value, into: &mut Vec<(String, String)>) {
    match value {
        Value::Object(fields) => {
            for (name, value) in fields {
                let name = match prefix {
                    "" => name.clone(),
                    prefix => format!("{prefix}_{name}"),
                };
                flatten(&name, value, into);
            }
        }
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) | Value::Array(_) => {
            into.push((prefix.to_owned(), cell(value)));
        }
    }
}

fn cell(value: &Value) -> String {
    match value {
        Value::Null => String::new(),
        Value::String(text) => text.clone(),
        Value::Bool(_) | Value::Number(_) | Value::Array(_) | Value::Object(_) => value.to_string(),
    }
}

fn lines(names: &[String], rows: Vec<Vec<String>>) -> String {
    let quoted = |text: &String| match text.contains([',', '"', '\n']) {
        true => format!("\"{}\"", text.replace('"', "\"\"")),
        false => text.clone(),
    };
    let line = |cells: &[String]| cells.iter().map(quoted).collect::<Vec<_>>().join(",") + "\n";
    let mut text = line(names);
    text.extend(rows.iter().map(|row| line(row)));
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::options::{Options, Setting};
    use crate::sweep::Axis;
    use crate::trace::Synthetic;

    fn cells(text: &str) -> Vec<Vec<String>> {
        text.lines().map(|line| line.split(',').map(str::to_owned).collect()).collect()
    }

    #[test]
    fn every_line_has_all_columns() {
        let trace = Synthetic { requests: 60, ..Synthetic::default() }.trace().unwrap();
        let mut options = Options::default();
        options.set(Setting::Device, "200k");
        let axes = vec![Axis::parse("host=0,400k").unwrap()];
        let sweep = Sweep::run(&trace, &options, axes, 1, &|| {}).unwrap();
        let table = cells(&sweep_csv(&sweep));
        assert_eq!((table.len(), table[0][0].as_str(), table[2][0].as_str()), (3, "host", "400k"));
        assert!(table.iter().all(|row| row.len() == table[0].len()), "{table:?}");
        let column = table[0].iter().position(|name| name == "ttft_ms_p90").unwrap();
        assert_eq!(table[1][column], sweep.points[0].ttft_ms.p90.to_string());

        let report = crate::replay(&trace, &options.config().unwrap()).unwrap();
        let table = cells(&series_csv(&report));
        assert_eq!(table.len(), report.series.arrivals.len() + 1);
        let column = table[0].iter().position(|name| name == "arrivals").unwrap();
        let sum: u64 = table[1..].iter().map(|row| row[column].parse::<u64>().unwrap()).sum();
        assert_eq!(sum, 60);
    }

    #[test]
    fn quotes_special_characters() {
        let row = vec!["a,b".to_owned(), "say \"x\"".to_owned()];
        assert_eq!(
            lines(&["one".to_owned(), "two".to_owned()], vec![row]),
            "one,two\n\"a,b\",\"say \"\"x\"\"\"\n"
        );
    }
}
