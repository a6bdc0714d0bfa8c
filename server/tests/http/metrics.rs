//! `GET /metrics`, read as Prometheus would.

use std::time::Duration;

use serde_json::json;
use terrace_server::Config;

use crate::client::{begin, complete, get, post};
use crate::scrape::Scrape;
use crate::world::{NAME, World};

#[tokio::test(flavor = "multi_thread")]
async fn metrics_have_names_help_and_only_grow() {
    let world = World::quick().await;
    let request = json!({ "prompt": "x".repeat(99), "max_tokens": 8 });
    complete(world.address, &request).await;
    world.wait_for("the end", |figures| figures.scheduler.finished == 1).await;
    let before = Scrape::of(world.address).await;
    complete(world.address, &request).await;
    world.wait_for("the end", |figures| figures.scheduler.finished == 2).await;
    let after = Scrape::of(world.address).await;

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
    assert_eq!(grew("terrace_time_to_first_token_seconds_count"), 1.0);
    assert_eq!(grew("terrace_inter_token_seconds_count"), 7.0, "8 tokens have 7 gaps");
    assert_eq!(grew("terrace_request_seconds_count"), 1.0);
    assert_eq!(grew("terrace_queue_seconds_count"), 1.0);
    assert_eq!(grew("terrace_request_prompt_tokens_sum"), 100.0);
    assert_eq!(grew("terrace_request_generated_tokens_sum"), 8.0);
    assert_eq!(grew(r#"terrace_answers_total{finish="length"}"#), 1.0);
    assert!(after.samples["terrace_model_seconds_total"] > 0.0);
    let overhead = after.samples["terrace_engine_overhead_ratio"];
    assert!((0.0..=1.0).contains(&overhead), "{overhead}");
    for kind in ["prefetch", "load_back", "write_back", "backup"] {
        assert!(
            after.samples.contains_key(&format!("terrace_moved_bytes_total{{kind=\"{kind}\"}}"))
        );
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn times_are_those_that_a_client_sees() {
    const STEP: Duration = Duration::from_millis(20);
    let world = World::new(Config::default(), STEP).await;
    let request = json!({ "prompt": "x", "max_tokens": 5, "stream": true });
    let began = std::time::Instant::now();
    post(world.address, "/v1/completions", &request).await;
    let took = began.elapsed().as_secs_f64();
    let scrape = Scrape::of(world.address).await;
    let sum = |name: &str| scrape.samples[&format!("terrace_{name}_seconds_sum")];
    let (first, between, all) = (sum("time_to_first_token"), sum("inter_token"), sum("request"));
    // A busy machine may read tokens late, but not before they are there.
    assert!(first >= STEP.as_secs_f64(), "{first}");
    assert!(first + between >= 5.0 * STEP.as_secs_f64(), "{first} and {between}");
    assert!(all >= first + between - 1e-6 && all <= took, "{all} of {took}");
    assert!(sum("queue") < first);
    assert_eq!(scrape.samples["terrace_inter_token_seconds_count"], 4.0);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_answer_that_nobody_waits_for_is_counted_as_called_off() {
    let world = World::new(Config::default(), Duration::from_millis(20)).await;
    let request = json!({ "prompt": "x", "max_tokens": 1000, "stream": true });
    drop(begin(world.address, &request).await);
    world.wait_for("the end", |figures| figures.scheduler.aborted == 1).await;
    let mut scrape = Scrape::of(world.address).await;
    // The engine may know before the server has cleared up.
    while scrape.samples[r#"terrace_answers_total{finish="abort"}"#] == 0.0 {
        tokio::time::sleep(Duration::from_millis(10)).await;
        scrape = Scrape::of(world.address).await;
    }
    assert_eq!(scrape.samples[r#"terrace_answers_total{finish="abort"}"#], 1.0);
    assert_eq!(scrape.samples["terrace_request_seconds_count"], 0.0);
}

#[tokio::test(flavor = "multi_thread")]
async fn dashboards_made_for_vllm_find_their_names_if_asked_for() {
    let config = Config { metrics_vllm_names: true, ..Config::default() };
    let world = World::new(config, Duration::ZERO).await;
    complete(world.address, &json!({ "prompt": "x".repeat(20), "max_tokens": 3 })).await;
    let scrape = Scrape::of(world.address).await;
    let of_model = |name: &str| scrape.samples[&format!("vllm:{name}{{model_name=\"{NAME}\"}}")];
    assert_eq!(of_model("time_to_first_token_seconds_count"), 1.0);
    assert_eq!(of_model("inter_token_latency_seconds_count"), 2.0);
    assert_eq!(of_model("e2e_request_latency_seconds_count"), 1.0);
    assert_eq!(of_model("prompt_tokens_total"), 21.0);
    let finished =
        format!("vllm:request_success_total{{model_name=\"{NAME}\",finished_reason=\"length\"}}");
    assert_eq!(scrape.samples[&finished], 1.0);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_page_says_what_it_is() {
    let world = World::quick().await;
    let response = get(world.address, "/metrics").await;
    let kind = "content-type: application/openmetrics-text; version=1.0.0; charset=utf-8";
    assert!(response.head.contains(kind), "{}", response.head);
    assert!(response.body.ends_with("\n# EOF\n"));
}
