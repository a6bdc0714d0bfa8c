//! `docs/grafana.json` asks only for what servers and nodes tell.

use std::collections::BTreeSet;
use std::sync::Arc;

use serde_json::{Value, json};
use terrace_l3::{MemoryConfig, MemoryStore};
use terrace_l3_disk::{DiskConfig, DiskStore, TieredConfig, TieredStore};
use terrace_l3_nodes::{NodeConfig, NodeSecret, NodeServer};
use terrace_server::{
    Config, GpuFigures, GpuWatch, L3Choice, Server, Size, launch, serve_node_figures,
};

use crate::client::complete;
use crate::scrape::Scrape;

/// Labels that Prometheus adds to everything.
const ADDED: [&str; 2] = ["instance", "job"];

#[tokio::test(flavor = "multi_thread")]
async fn the_dashboard_asks_only_for_what_exists() {
    let file = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/grafana.json");
    let dashboard: Value = serde_json::from_str(&std::fs::read_to_string(file).unwrap()).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let pages = pages(folder.path()).await;
    let mut panels = 0;
    for panel in dashboard["panels"].as_array().unwrap() {
        let title = panel["title"].as_str().unwrap();
        for target in panel["targets"].as_array().into_iter().flatten() {
            let question = Question::parse(target["expr"].as_str().unwrap());
            question.check(&pages).unwrap_or_else(|error| panic!("{title}: {error}"));
            let legend = target["legendFormat"].as_str().unwrap();
            for label in legend.split("{{").skip(1).map(|rest| rest.split("}}").next().unwrap()) {
                let is_known = question.has_label(label, &pages);
                assert!(is_known, "{title}: the legend has {label}, which nothing has");
            }
        }
        panels += 1;
    }
    assert!(panels > 20, "{panels}");
    for variable in dashboard["templating"]["list"].as_array().unwrap() {
        if variable["type"] == "query" {
            let query = variable["query"]["query"].as_str().unwrap();
            let inside = query.strip_prefix("label_values(").and_then(|it| it.strip_suffix(')'));
            let (metric, label) = inside.and_then(|it| it.split_once(", ")).unwrap();
            Question::parse(metric).check(&pages).unwrap();
            assert!(ADDED.contains(&label), "{query}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_does_not_exist_is_noticed() {
    let folder = tempfile::tempdir().unwrap();
    let pages = pages(folder.path()).await;
    let is_right = |question: &str| Question::parse(question).check(&pages);
    assert_eq!(
        is_right("sum by (tier) (rate(terrace_pages{tier=\"host\"}[$__rate_interval]))"),
        Ok(())
    );
    for wrong in [
        "terrace_pagers",
        "terrace_pages{tear=\"host\"}",
        "terrace_pages{tier=\"hose\"}",
        "sum by (tear) (terrace_pages)",
        "rate(terrace_time_to_first_token_seconds[5m])",
        "rate(terrace_steps[5m])",
        "1 + 1",
    ] {
        assert!(is_right(wrong).is_err(), "{wrong}");
    }
}

/// The page of a server that has answered a request, with a node as its L3 and a GPU that has done nothing yet, and that
/// node's page.
async fn pages(folder: &std::path::Path) -> Vec<Scrape> {
    let object_bytes = 1 << 20;
    let memory = MemoryStore::new(MemoryConfig::new(16 << 20, object_bytes)).unwrap();
    let disk = DiskConfig::new(folder.join("node"), 64 << 20, object_bytes);
    let disk = DiskStore::open(disk).unwrap();
    let store = TieredStore::new(memory, disk, TieredConfig::default()).unwrap();
    let secret_file = folder.join("secret");
    std::fs::write(&secret_file, "known to this test and its node").unwrap();
    let secret = NodeSecret::read(&secret_file).unwrap();
    let node = NodeServer::bind("127.0.0.1:0", Arc::new(store), NodeConfig::new(secret));
    let node = Arc::new(node.unwrap().start().unwrap());
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let node_page = listener.local_addr().unwrap();
    let told = tokio::spawn(serve_node_figures(listener, node.clone()));

    let config = Config {
        listen: "127.0.0.1:0".to_owned(),
        threads: Some(1),
        device_memory: Some(Size::mib(16)),
        host_memory: Size::mib(16),
        l3: Some(L3Choice::Nodes(format!("one={}", node.address()))),
        node_secret_file: Some(secret_file),
        metrics_vllm_names: true,
        ..Config::default()
    };
    let launched = launch(&config).unwrap();
    let server = Server::bind(&config, launched.engine, launched.model).await.unwrap();
    let server = server.with_gpu(Some(GpuWatch::new(|| Some(GpuFigures::default()))));
    let address = server.address();
    let running = tokio::spawn(server.run(std::future::pending()));
    complete(address, &json!({ "prompt": "x".repeat(255), "max_tokens": 2 })).await;
    let pages = vec![Scrape::of(address).await, Scrape::of(node_page).await];
    running.abort();
    told.abort();
    pages
}

/// Labels that a metric must have, and their values where they are exact.
type Matchers = Vec<(String, Option<String>)>;

/// What is asked of Prometheus, as far as it names something.
#[derive(Debug, Default)]
struct Question {
    metrics: Vec<(String, Matchers)>,
    /// Labels by which something is summed up.
    grouped_by: BTreeSet<String>,
}

impl Question {
    fn parse(text: &str) -> Self {
        let mut question = Self::default();
        let mut rest = text;
        while let Some(next) = rest.chars().next() {
            let name_end =
                rest.find(|it: char| !(it.is_ascii_alphanumeric() || "_:$".contains(it)));
            let (name, after) = rest.split_at(name_end.unwrap_or(rest.len()));
            let after_space = after.trim_start();
            if matches!(name, "by" | "without" | "on" | "ignoring") {
                let (labels, after) = after_space[1..].split_once(')').unwrap();
                question.grouped_by.extend(labels.split(',').map(|it| it.trim().to_owned()));
                rest = after;
            } else if next.is_ascii_alphabetic() && is_function(after_space) {
                rest = after_space;
            } else if next.is_ascii_alphabetic() {
                let (labels, after) = match after.strip_prefix('{') {
                    Some(inside) => inside.split_once('}').unwrap(),
                    None => ("", after),
                };
                question.metrics.push((name.to_owned(), matchers(labels)));
                rest = after;
            } else if next == '[' {
                rest = rest.split_once(']').unwrap().1;
            } else {
                rest = if name.is_empty() { &rest[next.len_utf8()..] } else { after };
            }
        }
        question
    }

    fn check(&self, pages: &[Scrape]) -> Result<(), String> {
        if self.metrics.is_empty() {
            return Err("it asks for nothing".to_owned());
        }
        for (name, matchers) in &self.metrics {
            let samples: Vec<_> = pages.iter().flat_map(|page| page.labels(name)).collect();
            if samples.is_empty() {
                return Err(format!("{name} does not exist"));
            }
            for (label, value) in matchers.iter().filter(|(label, _)| !is_added(label)) {
                let has = samples.iter().any(|labels| match value {
                    Some(value) => labels.get(&label[..]) == Some(&&value[..]),
                    None => labels.contains_key(&label[..]),
                });
                if !has {
                    return Err(format!("no {name} has {label} = {value:?}"));
                }
            }
        }
        match self.grouped_by.iter().find(|label| !self.has_label(label, pages)) {
            Some(label) => Err(format!("nothing asked for has {label}")),
            None => Ok(()),
        }
    }

    fn has_label(&self, label: &str, pages: &[Scrape]) -> bool {
        let samples =
            |name: &str| pages.iter().flat_map(|page| page.labels(name)).collect::<Vec<_>>();
        is_added(label)
            || self
                .metrics
                .iter()
                .any(|(name, _)| samples(name).iter().any(|labels| labels.contains_key(label)))
    }
}

/// Whether a name before this is a function's or an aggregation's.
fn is_function(after: &str) -> bool {
    ["(", "by (", "without ("].iter().any(|it| after.starts_with(it))
}

fn is_added(label: &str) -> bool {
    ADDED.contains(&label)
}

/// What stands in braces: each label, and its value if it must be equal to one.
fn matchers(text: &str) -> Matchers {
    let one = |matcher: &str| {
        let (label, value) = matcher.split_once('=').unwrap();
        let value = value.strip_prefix('"').and_then(|value| value.strip_suffix('"'));
        let is_exact = !label.ends_with('!');
        let label = label.trim_end_matches('!').trim();
        (label.to_owned(), value.filter(|_| is_exact).map(str::to_owned))
    };
    text.split(',').filter(|matcher| !matcher.is_empty()).map(one).collect()
}
