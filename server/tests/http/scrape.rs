//! A page of metrics, taken apart as Prometheus would.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;

use crate::client::get;

/// All samples by name and labels, and the kind of each metric.
#[derive(Default)]
pub(crate) struct Scrape {
    pub(crate) samples: BTreeMap<String, f64>,
    kinds: BTreeMap<String, String>,
}

impl Scrape {
    /// Reads the page of a server or a node. It must be as OpenMetrics wants it.
    pub(crate) async fn of(address: SocketAddr) -> Self {
        let response = get(address, "/metrics").await;
        assert_eq!(response.status, 200);
        let mut scrape = Self::default();
        let mut helped = BTreeSet::new();
        let lines = response.body.strip_suffix("# EOF\n").expect("it ends with a mark").lines();
        for line in lines {
            if let Some(help) = line.strip_prefix("# HELP ") {
                let (name, help) = help.split_once(' ').unwrap();
                assert!(help.ends_with('.') && !help.ends_with(".."), "{line}");
                assert!(helped.insert(name), "{name} is told twice");
            } else if let Some(kind) = line.strip_prefix("# TYPE ") {
                let (name, kind) = kind.split_once(' ').unwrap();
                assert!(helped.contains(name), "{name} has no help");
                let again = scrape.kinds.insert(name.to_owned(), kind.to_owned());
                assert_eq!(again, None, "{name} is told twice");
            } else {
                let (name, value) = line.rsplit_once(' ').unwrap();
                let again = scrape.samples.insert(name.to_owned(), value.parse().unwrap());
                assert_eq!(again, None, "{name} is told twice");
                assert!(scrape.kind(name).is_some(), "{name} has no type");
            }
        }
        scrape
    }

    /// What a sample is one of.
    pub(crate) fn kind(&self, sample: &str) -> Option<&str> {
        let name = sample.split('{').next().unwrap();
        let endings: &[(&str, &str)] = &[
            ("_total", "counter"),
            ("_bucket", "histogram"),
            ("_sum", "histogram"),
            ("_count", "histogram"),
        ];
        let of = |(end, kind): &(&str, &str)| {
            let family = name.strip_suffix(end)?;
            self.kinds.get(family).filter(|it| it == kind)
        };
        let plain = self.kinds.get(name).filter(|kind| *kind == "gauge");
        endings.iter().find_map(of).or(plain).map(String::as_str)
    }

    /// The labels of each sample of this name.
    pub(crate) fn labels(&self, name: &str) -> Vec<BTreeMap<&str, &str>> {
        let samples = self.samples.keys().filter_map(|sample| sample.strip_prefix(name));
        let labels = samples.filter_map(|rest| match rest {
            "" => Some(BTreeMap::new()),
            rest => {
                let inside = rest.strip_prefix('{')?.strip_suffix("\"}")?;
                Some(inside.split("\",").filter_map(|label| label.split_once("=\"")).collect())
            }
        });
        labels.collect()
    }
}
