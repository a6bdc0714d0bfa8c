//! What clients get wrong.

use std::time::{Duration, Instant};

use serde_json::{Value, json};
use terrace_server::{Config, Limits};

use crate::client::{Response, begin, exchange, get, post, send};
use crate::world::World;

#[tokio::test(flavor = "multi_thread")]
async fn an_error_says_which_field_is_wrong() {
    let world = World::quick().await;
    let wrong = [
        (json!({}), "prompt"),
        (json!({ "prompt": [] }), "prompt"),
        (json!({ "prompt": [300] }), "prompt"),
        (json!({ "prompt": [[]] }), "prompt"),
        (json!({ "prompt": "x", "temperature": 3 }), "temperature"),
        (json!({ "prompt": "x", "max_tokens": 0 }), "max_tokens"),
        (json!({ "prompt": "x", "max_tokens": 100_000 }), "max_tokens"),
        (json!({ "prompt": "x", "max_tokens": 90_000 }), "max_tokens"),
        (json!({ "prompt": "x", "logprobs": 21 }), "logprobs"),
        (json!({ "prompt": "x", "n": 0 }), "n"),
    ];
    for (request, param) in wrong {
        let response = post(world.address, "/v1/completions", &request).await;
        let error = &response.json()["error"];
        assert_eq!((response.status, &error["param"]), (400, &json!(param)), "{request} {error}");
        assert_eq!(error["type"], "invalid_request_error");
        assert!(error["message"].as_str().unwrap().len() > 10);
    }
    assert_eq!(world.figures().await.scheduler.submitted, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn every_error_is_json_with_a_fitting_status() {
    let world = World::quick().await;
    let body = r#"{"prompt":"x"}"#;
    let cases = [
        (send(world.address, "POST", "/v1/completions", "", "{").await, 400),
        (send(world.address, "POST", "/v1/completions", "", "[]").await, 400),
        (send(world.address, "POST", "/v1/completions", "", "").await, 400),
        (get(world.address, "/v1/completions").await, 405),
        (get(world.address, "/v1/nothing").await, 404),
        (get(world.address, "/v1/models/%ff").await, 400),
        (get(world.address, "/tokenize").await, 405),
        (post(world.address, "/reset_prefix_cache?l3=perhaps", &json!({})).await, 400),
        (post(world.address, "/reset_prefix_cache?host=perhaps", &json!({})).await, 400),
        (send(world.address, "DELETE", "/health", "", "").await, 405),
        (post(world.address, "/v1/chat/completions", &json!({ "prompt": "x" })).await, 400),
    ];
    for (response, status) in cases {
        assert_eq!(response.status, status, "{response:?}");
        assert!(response.json()["error"]["message"].is_string());
    }
    let plain = format!(
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\
         Content-Type: text/plain\r\nContent-Length: {}\r\n\r\n{body}",
        body.len()
    );
    let response = Response::parse(&exchange(world.address, plain.as_bytes()).await).unwrap();
    assert_eq!(response.status, 415, "other sites' pages can send text, but not JSON");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_without_keys_answers_to_local_names_only() {
    let world = World::quick().await;
    for (host, status) in [("evil.example", 403), ("localhost:1", 200), ("127.0.0.1", 200)] {
        let request = format!("GET /health HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n");
        let response = Response::parse(&exchange(world.address, request.as_bytes()).await).unwrap();
        assert_eq!(response.status, status, "{host}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn more_requests_than_there_may_be_are_refused() {
    let limits = Limits { requests_max: 2, ..Limits::default() };
    let world = World::new(Config { limits, ..Config::default() }, Duration::from_millis(5)).await;
    let long = json!({ "prompt": "long", "max_tokens": 10_000, "stream": true });
    let first = begin(world.address, &long).await;
    let two: Value = json!({ "prompt": ["a", "b"] });
    let refused = post(world.address, "/v1/completions", &two).await;
    assert_eq!(refused.status, 429, "{refused:?}");
    assert!(refused.head.contains("retry-after"));
    drop(first);
    world.wait_for("room", |figures| figures.scheduler.aborted == 2).await;
    // Its place is given back a moment after that.
    let until = Instant::now() + Duration::from_secs(60);
    while post(world.address, "/v1/completions", &two).await.status != 200 {
        assert!(Instant::now() < until, "its place is not given back");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}
