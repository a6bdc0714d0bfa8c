//! Keys: tenants share nothing, and the operator sees everything.

use std::time::Duration;

use serde_json::{Value, json};
use terrace_server::{Config, Secret};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::client::{get, key, send};
use crate::world::World;

async fn guarded() -> World {
    let config = Config {
        keys: vec!["alice=alices-key".parse().unwrap(), "bob=bobs-key".parse().unwrap()],
        operator_key: Some(Secret::from("operators-key")),
        ..Config::default()
    };
    World::new(config, Duration::ZERO).await
}

#[tokio::test(flavor = "multi_thread")]
async fn tenants_share_no_page() {
    let world = guarded().await;
    let ask = async |who: &str, salt: &str| {
        let body = json!({ "prompt": "x".repeat(99), "cache_salt": salt }).to_string();
        let response = send(world.address, "POST", "/v1/completions", &key(who), &body).await;
        assert_eq!(response.status, 200, "{response:?}");
        response.json()["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap()
    };
    assert_eq!(ask("alices-key", "").await, 0);
    assert_eq!(ask("alices-key", "").await, 96);
    assert_eq!(ask("bobs-key", "").await, 0);
    assert_eq!(ask("operators-key", "").await, 0);
    assert_eq!(ask("alices-key", "s").await, 0);
    for salt in ["alice", "5:alice", "5:alices"] {
        assert_eq!(ask("bobs-key", salt).await, 0, "{salt}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn nobody_asks_without_a_key() {
    let world = guarded().await;
    for (path, body) in [("/v1/completions", r#"{"prompt":"x"}"#), ("/v1/chat/completions", "{}")] {
        for header in ["", &key("wrong"), "Authorization: Basic eDp5\r\n"] {
            let response = send(world.address, "POST", path, header, body).await;
            assert_eq!(response.status, 401, "{response:?}");
            assert!(response.head.contains("www-authenticate: bearer"));
            assert!(response.json()["error"]["message"].is_string());
        }
    }
    assert_eq!(get(world.address, "/v1/models").await.status, 401);
    assert_eq!(get(world.address, "/health").await.status, 200);
    assert_eq!(world.figures().await.scheduler.submitted, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn figures_are_for_the_operator() {
    let world = guarded().await;
    for path in ["/metrics", "/ui/events"] {
        let status = async |header: &str| send(world.address, "GET", path, header, "").await.status;
        assert_eq!(status("").await, 401);
        assert_eq!(status(&key("wrong")).await, 401);
        assert_eq!(status(&key("alices-key")).await, 403);
    }
    let response = send(world.address, "GET", "/metrics", &key("operators-key"), "").await;
    assert_eq!(response.status, 200);
    let seen = first_view(&world, "/ui/events?key=operators-key").await;
    assert!(seen["figures"]["scheduler"].is_object());
}

#[tokio::test(flavor = "multi_thread")]
async fn the_page_is_told_of_requests_and_of_the_tree() {
    let world = World::quick().await;
    assert!(get(world.address, "/").await.body.contains("page.js"));
    assert_eq!(get(world.address, "/page.js").await.status, 200);
    assert_eq!(get(world.address, "/page.css").await.status, 200);
    let request = json!({ "prompt": "x".repeat(99), "cache_salt": "seen" });
    crate::client::complete(world.address, &request).await;
    world.wait_for("the end", |figures| figures.scheduler.finished == 1).await;
    let view = first_view(&world, "/ui/events").await;
    assert_eq!(view["requests"][0]["salt"], ":seen");
    assert!(view["tree"].as_array().unwrap().len() > 1);
}

async fn first_view(world: &World, path: &str) -> Value {
    let mut stream = TcpStream::connect(world.address).await.unwrap();
    let request = format!("GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n");
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut seen = String::new();
    loop {
        let mut bytes = [0; 4096];
        let count = stream.read(&mut bytes).await.unwrap();
        assert!(count > 0, "{seen}");
        seen.push_str(&String::from_utf8_lossy(&bytes[..count]));
        if let Some((_, data)) = seen.split_once("data: ")
            && let Some((json, _)) = data.split_once("\n\n")
        {
            return serde_json::from_str(json).unwrap();
        }
    }
}
