//! Keys: tenants share nothing, and the operator sees everything.

use std::time::Duration;

use serde_json::{Value, json};
use terrace_server::{Config, Key, Limits, Secret};
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;

use crate::client::{first_view, get, key, post, request, send};
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
async fn one_that_takes_all_it_can_leaves_places_for_the_others() {
    let limits = Limits { requests_max: 20, ..Limits::default() };
    let keys = ["alice=alices-key", "bob=bobs-key"].map(|key| key.parse().unwrap());
    let config = Config { keys: keys.to_vec(), limits, ..Config::default() };
    let world = World::new(config, Duration::from_millis(5)).await;
    let ask = async |who: &str, body: &Value| {
        send(world.address, "POST", "/v1/completions", &key(who), &body.to_string()).await
    };
    let most = json!({ "prompt": vec!["x"; 20] });
    assert_eq!(ask("alices-key", &most).await.status, 400, "it could never have so many");
    let long = json!({ "prompt": ["a", "b"], "n": 4, "max_tokens": 10_000, "stream": true });
    let mut stream = TcpStream::connect(world.address).await.unwrap();
    let request = request("POST", "/v1/completions", &key("alices-key"), &long.to_string());
    stream.write_all(request.as_bytes()).await.unwrap();
    world.wait_for("the beginning", |figures| figures.scheduler.running == 8).await;

    let three = json!({ "prompt": ["a", "b", "c"], "max_tokens": 1 });
    let refused = ask("alices-key", &three).await;
    assert_eq!(refused.status, 429, "{refused:?}");
    assert!(refused.head.contains("retry-after"));
    assert!(refused.body.contains("2 are free"), "{}", refused.body);
    let all = json!({ "prompt": vec!["x"; 10], "max_tokens": 1 });
    assert_eq!(ask("bobs-key", &all).await.status, 200, "the other has all of its own");

    drop(stream);
    world.wait_for("calling it off", |figures| figures.scheduler.aborted == 8).await;
    let patience = tokio::time::Instant::now() + Duration::from_secs(30);
    while ask("alices-key", &three).await.status != 200 {
        assert!(tokio::time::Instant::now() < patience, "places come back");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn nobody_overtakes_the_others_unless_it_may() {
    let mut alice: Key = "alice=alices-key".parse().unwrap();
    alice.priority_max = Some(3);
    let config = Config { keys: vec![alice, "bob=bobs-key".parse().unwrap()], ..Config::default() };
    let world = World::new(config, Duration::ZERO).await;
    let ask = async |who: &str, priority: i64| {
        let body = json!({ "prompt": "x", "max_tokens": 1, "priority": priority }).to_string();
        send(world.address, "POST", "/v1/completions", &key(who), &body).await
    };
    assert_eq!(ask("alices-key", 3).await.status, 200);
    assert_eq!(ask("bobs-key", -7).await.status, 200);
    for (who, priority) in [("alices-key", 4), ("bobs-key", 1)] {
        let refused = ask(who, priority).await;
        assert_eq!((refused.status, &refused.json()["error"]["param"]), (400, &json!("priority")));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn one_request_may_not_ask_for_all_places() {
    let world = World::quick().await;
    let greedy = json!({ "prompt": vec!["x"; 64], "n": 16, "max_tokens": 1 });
    let refused = post(world.address, "/v1/completions", &greedy).await;
    assert_eq!(refused.status, 400, "{refused:?}");
    assert!(refused.body.contains("256 completions"));
    assert_eq!(world.figures().await.scheduler.submitted, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn nobody_asks_without_a_key() {
    let world = guarded().await;
    let bodies = [
        ("/v1/completions", r#"{"prompt":"x"}"#),
        ("/v1/chat/completions", "{}"),
        ("/tokenize", r#"{"prompt":"x"}"#),
        ("/detokenize", r#"{"tokens":[1]}"#),
    ];
    for (path, body) in bodies {
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
    let seen = first_view(world.address, &key("operators-key")).await;
    assert!(seen["figures"]["scheduler"].is_object());
    let in_address = get(world.address, "/ui/events?key=operators-key").await;
    assert_eq!(in_address.status, 401, "addresses land in logs");
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
    let view = first_view(world.address, "").await;
    assert_eq!(view["requests"][0]["salt"], ":seen");
    assert!(view["tree"].as_array().unwrap().len() > 1);
}
