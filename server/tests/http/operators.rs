//! Functions for operators: cache reset, history, and request ids.

use std::time::Duration;

use serde_json::{Value, json};
use terrace_server::{Config, Limits, Secret};

use crate::client::{begin, complete, first_view, get, key, post, send};
use crate::world::World;

async fn cached(world: &World, request: &Value) -> u64 {
    let answer = complete(world.address, request).await;
    answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn the_cache_can_be_reset_while_requests_run() {
    let world = World::new(Config::default(), Duration::from_millis(2)).await;
    let request = json!({ "prompt": "x".repeat(99), "max_tokens": 1 });
    cached(&world, &request).await;
    assert_eq!(cached(&world, &request).await, 96);
    let long = json!({ "prompt": "y".repeat(64), "max_tokens": 10_000, "stream": true });
    let _running = begin(world.address, &long).await;
    let told = post(world.address, "/reset_prefix_cache", &json!(null)).await;
    assert_eq!(told.status, 200, "{told:?}");
    assert_eq!(told.json(), json!({ "device_pages": 6, "host_pages": 0, "l3": "kept" }));
    assert_eq!(cached(&world, &request).await, 0);
    assert_eq!(cached(&world, &request).await, 96, "the prompt is cached again");
    let shared = json!({ "prompt": "y".repeat(64), "max_tokens": 1 });
    assert_eq!(cached(&world, &shared).await, 64, "pages in use stay");
    let figures = world.figures().await.scheduler;
    assert_eq!((figures.running, figures.failed), (1, 0));
    let everything = post(world.address, "/reset_prefix_cache?l3=true", &json!(null)).await;
    assert_eq!(everything.status, 400);
    assert!(everything.body.contains("--l3"), "{}", everything.body);
}

#[tokio::test(flavor = "multi_thread")]
async fn only_the_operator_makes_a_server_forget() {
    let config = Config {
        keys: vec!["alice=alices-key".parse().unwrap()],
        operator_key: Some(Secret::from("operators-key")),
        ..Config::default()
    };
    let world = World::new(config, Duration::ZERO).await;
    let reset = async |headers: &str| {
        send(world.address, "POST", "/reset_prefix_cache", headers, "").await.status
    };
    assert_eq!(reset("").await, 401);
    assert_eq!(reset(&key("alices-key")).await, 403);
    assert_eq!(reset(&key("operators-key")).await, 200);
    let open = World::quick().await;
    for (origin, status) in [("http://evil.example", 403), ("http://localhost", 200)] {
        let headers = format!("Origin: {origin}\r\n");
        let told = send(open.address, "POST", "/reset_prefix_cache", &headers, "").await;
        assert_eq!(told.status, status, "{origin}");
    }
}

/// The sums of columns of the history that the page gets.
async fn history_of(world: &World, columns: &[&str]) -> Vec<u64> {
    let view = first_view(world.address, "").await;
    let sum = |name: &&str| {
        let column = view["history"][name].as_array().unwrap_or_else(|| panic!("{view}"));
        column.iter().map(|count| count.as_u64().unwrap()).sum()
    };
    columns.iter().map(sum).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn the_history_counts_prompts_by_source_and_responses_without_success() {
    let limits = Limits { requests_max: 2, ..Limits::default() };
    let config = Config { limits, ..Config::default() };
    let world = World::new(config, Duration::from_millis(2)).await;
    let request = json!({ "prompt": "x".repeat(99), "max_tokens": 1 });
    complete(world.address, &request).await;
    complete(world.address, &request).await;
    let tokens = history_of(&world, &["prompt_tokens", "device", "host", "l3"]).await;
    assert_eq!((tokens[1..].to_vec(), tokens[0] >= 198), (vec![96, 0, 0], true), "{tokens:?}");
    assert_eq!(post(world.address, "/v1/completions", &json!({ "prompt": 7.5 })).await.status, 400);
    assert_eq!(get(world.address, "/nothing").await.status, 404, "GET requests do not count");
    let long = json!({ "prompt": "y".repeat(64), "max_tokens": 10_000, "stream": true });
    let _running = begin(world.address, &long).await;
    let two = json!({ "prompt": ["a", "b"] });
    assert_eq!(post(world.address, "/v1/completions", &two).await.status, 429);
    let responses = history_of(&world, &["busy", "client_errors", "server_errors"]).await;
    assert_eq!(responses, [1, 1, 0]);
    let view = first_view(world.address, "").await;
    assert_eq!(view["instance"], first_view(world.address, "").await["instance"]);
    let other = World::quick().await;
    assert_ne!(view["instance"], first_view(other.address, "").await["instance"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn every_response_has_the_name_of_its_request() {
    let world = World::quick().await;
    let body = json!({ "prompt": "x", "max_tokens": 1 }).to_string();
    let stream = json!({ "prompt": "x", "max_tokens": 1, "stream": true }).to_string();
    let cases = [
        ("POST", "/v1/completions", body.as_str(), 200),
        ("POST", "/v1/completions", stream.as_str(), 200),
        ("POST", "/v1/completions", "{", 400),
        ("GET", "/v1/completions", "", 405),
        ("GET", "/nothing", "", 404),
        ("GET", "/health", "", 200),
    ];
    for (method, path, body, status) in cases {
        let named = send(world.address, method, path, "X-Request-Id: ab.12\r\n", body).await;
        assert_eq!(named.status, status);
        assert!(named.head.contains("\r\nx-request-id: ab.12"), "{}", named.head);
    }
    let name = async |given: &str| {
        let header = format!("X-Request-Id: {given}\r\n");
        let head = send(world.address, "GET", "/health", &header, "").await.head;
        let line = head.lines().find_map(|line| line.strip_prefix("x-request-id: "));
        line.unwrap().to_owned()
    };
    for rude in ["", "a b", &"x".repeat(200), "<script>"] {
        assert!(name(rude).await.starts_with("req-"), "{rude}");
    }
    assert_ne!(name("").await, name("").await);
    assert!(get(world.address, "/").await.head.contains("x-request-id"));
}
