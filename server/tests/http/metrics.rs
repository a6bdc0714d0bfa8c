//! `GET /metrics`, read as Prometheus would.

use std::collections::BTreeMap;

use serde_json::json;

use crate::client::{complete, get};
use crate::world::World;

/// All samples by name and labels, and the kind of each metric.
struct Scrape {
    samples: BTreeMap<String, f64>,
    kinds: BTreeMap<String, String>,
}

impl Scrape {
    async fn of(world: &World) -> Self {
        let response = get(world.address, "/metrics").await;
        assert_eq!(response.status, 200);
        assert!(response.head.contains("text/plain"));
        let mut scrape = Self { samples: BTreeMap::new(), kinds: BTreeMap::new() };
        let mut helped = Vec::new();
        for line in response.body.lines().filter(|line| !line.is_empty()) {
            if let Some(help) = line.strip_prefix("# HELP ") {
                let (name, help) = help.split_once(' ').unwrap();
                assert!(help.ends_with('.'), "{line}");
                helped.push(name.to_owned());
            } else if let Some(kind) = line.strip_prefix("# TYPE ") {
                let (name, kind) = kind.split_once(' ').unwrap();
                assert!(helped.iter().any(|helped| helped == name), "{name} has no help");
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

    fn kind(&self, sample: &str) -> Option<&str> {
        let name = sample.split('{').next().unwrap();
        let family = ["_bucket", "_sum", "_count"].iter().find_map(|end| name.strip_suffix(end));
        let kind = self.kinds.get(name).or_else(|| self.kinds.get(family?))?;
        Some(kind.as_str())
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn metrics_have_names_help_and_only_grow() {
    let world = World::quick().await;
    let request = json!({ "prompt": "x".repeat(99), "max_tokens": 8 });
    complete(world.address, &request).await;
    world.wait_for("the end", |figures| figures.scheduler.finished == 1).await;
    let before = Scrape::of(&world).await;
    complete(world.address, &request).await;
    world.wait_for("the end", |figures| figures.scheduler.finished == 2).await;
    let after = Scrape::of(&world).await;

    for (name, value) in &before.samples {
        assert!(name.starts_with("terrace_") || name.starts_with("process_"), "{name}");
        if matches!(before.kind(name), Some("counter" | "histogram")) {
            assert!(after.samples[name] >= *value, "{name} went back");
        }
    }
    let grew = |name: &str| after.samples[name] - before.samples[name];
    assert_eq!(grew(r#"terrace_prompt_tokens_total{tier="device"}"#), 96.0);
    assert_eq!(grew(r#"terrace_prompt_tokens_total{tier="computed"}"#), 4.0);
    assert_eq!(grew(r#"terrace_requests_ended_total{end="finished"}"#), 1.0);
    assert_eq!(grew("terrace_generated_tokens_total"), 8.0);
    // The histograms are those of all servers of this process.
    assert!(grew("terrace_time_to_first_token_seconds_count") >= 1.0);
    assert!(grew("terrace_inter_token_seconds_count") >= 7.0);
    assert!(after.samples["terrace_model_seconds_total"] > 0.0);
    let overhead = after.samples["terrace_engine_overhead_ratio"];
    assert!((0.0..=1.0).contains(&overhead), "{overhead}");
    for kind in ["prefetch", "load_back", "write_back", "backup"] {
        assert!(
            after.samples.contains_key(&format!("terrace_moved_bytes_total{{kind=\"{kind}\"}}"))
        );
    }
}
