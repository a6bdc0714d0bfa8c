//! Writes figures in the text format that Prometheus reads.

use std::fmt::{self, Display, Write};

/// Text under construction. Every metric says what it is before its first value.
#[derive(Debug, Default)]
pub(crate) struct Exposition(String);

/// How a figure behaves.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Kind {
    /// It only grows.
    Counter,
    /// It says how things are.
    Gauge,
}

impl Exposition {
    /// A counter without labels.
    pub(crate) fn counter(&mut self, name: &str, help: &str, value: impl Display) {
        self.metric(Kind::Counter, name, help, &[("", value)], "");
    }

    /// A gauge without labels.
    pub(crate) fn gauge(&mut self, name: &str, help: &str, value: impl Display) {
        self.metric(Kind::Gauge, name, help, &[("", value)], "");
    }

    /// A metric with one value for each value of a label. Neither needs escaping: they are ours.
    pub(crate) fn metric<V: Display>(
        &mut self,
        kind: Kind,
        name: &str,
        help: &str,
        values: &[(&str, V)],
        label: &str,
    ) {
        let kind = match kind {
            Kind::Counter => "counter",
            Kind::Gauge => "gauge",
        };
        self.line(format_args!("# HELP {name} {help}"));
        self.line(format_args!("# TYPE {name} {kind}"));
        for (of, value) in values {
            match label {
                "" => self.line(format_args!("{name} {value}")),
                label => self.line(format_args!("{name}{{{label}=\"{of}\"}} {value}")),
            }
        }
    }

    pub(crate) fn finish(self) -> String {
        self.0
    }

    fn line(&mut self, line: fmt::Arguments<'_>) {
        // Writing to a string does not fail.
        let _ = writeln!(self.0, "{line}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metrics_say_what_they_are() {
        let mut text = Exposition::default();
        text.counter("a_total", "How many.", 7);
        text.metric(Kind::Gauge, "b", "How full.", &[("x", 0.5), ("y", 1.0)], "tier");
        let expected = "# HELP a_total How many.\n# TYPE a_total counter\na_total 7\n\
                        # HELP b How full.\n# TYPE b gauge\nb{tier=\"x\"} 0.5\nb{tier=\"y\"} 1\n";
        assert_eq!(text.finish(), expected);
    }
}
