//! From a configuration to a server, with the model of random weights and a store on disk.

use std::time::Duration;

use serde_json::{Value, json};
use terrace_server::{Config, L3Choice, LaunchError, Server, Size, launch};
use tokio::sync::oneshot;

use crate::client::complete;

fn small(folder: &std::path::Path) -> Config {
    Config {
        listen: "127.0.0.1:0".to_owned(),
        random_model: true,
        threads: Some(1),
        device_memory: Some(Size::mib(16)),
        host_memory: Size::mib(16),
        l3: Some(L3Choice::Disk(folder.to_owned())),
        l3_capacity: Size::mib(64),
        // Whatever else is on the disk of whoever runs this.
        l3_reserve: Some(Size(0)),
        ..Config::default()
    }
}

/// Starts a server, asks it, and stops it again.
async fn ask_once(config: &Config, request: &Value) -> Value {
    let launched = launch(config).unwrap();
    let server = Server::bind(config, launched.engine, launched.model).await.unwrap();
    let address = server.address();
    let (stop, told) = oneshot::channel::<()>();
    let running = tokio::spawn(server.run(async {
        let _ = told.await;
    }));
    let answer = complete(address, request).await;
    stop.send(()).unwrap();
    running.await.unwrap();
    answer
}

#[tokio::test(flavor = "multi_thread")]
async fn what_was_computed_outlives_the_server() {
    let folder = tempfile::tempdir().unwrap();
    let config = small(folder.path());
    let request = json!({ "prompt": "x".repeat(255), "temperature": 0, "logits_checksum": true });
    let first = ask_once(&config, &request).await;
    let again = ask_once(&config, &request).await;
    assert_eq!(first["choices"], again["choices"]);
    let details = &again["usage"]["prompt_tokens_details"];
    assert_eq!(details["cached_by_tier"], json!({ "device": 0, "host": 0, "l3": 240 }));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_store_that_is_in_use_is_named_with_what_to_do() {
    let folder = tempfile::tempdir().unwrap();
    let config = small(folder.path());
    let _first = launch(&config).unwrap();
    let error = launch(&config).unwrap_err();
    assert!(matches!(error, LaunchError::L3InUse { .. }), "{error}");
    assert!(error.to_string().contains("--l3 none"));
    let other_pages = Config { page_size: 32, ..config };
    assert!(launch(&other_pages).is_ok(), "another size of page has another store");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_cannot_work_is_told_before_it_starts() {
    let folder = tempfile::tempdir().unwrap();
    let config = small(folder.path());
    let cases = [
        (Config { device_memory: Some(Size::kib(64)), ..config.clone() }, "--device-memory"),
        (Config { host_memory: Size(0), ..config.clone() }, "--host-memory"),
        (Config { model: Some(folder.path().to_owned()), ..config.clone() }, "config.json"),
        (Config { page_size: 3, ..config.clone() }, "page_size"),
        (Config { running_max: Some(1024), ..config.clone() }, "step_tokens"),
        (Config { threads: Some(0), ..config.clone() }, "threads"),
    ];
    for (config, hint) in cases {
        let error = launch(&config).unwrap_err().to_string();
        assert!(error.contains(hint), "{error}");
    }
    let launched = launch(&config).unwrap();
    let taken = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let config = Config { listen: taken.local_addr().unwrap().to_string(), ..config };
    let error = Server::bind(&config, launched.engine, launched.model).await.unwrap_err();
    assert!(error.to_string().contains("in use by another program"), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn pages_of_other_sizes_are_told_and_go_when_the_limit_needs_their_room() {
    let folder = tempfile::tempdir().unwrap();
    let config = small(folder.path());
    let request = json!({ "prompt": "x".repeat(255), "max_tokens": 1 });
    ask_once(&config, &request).await;
    let other_pages = Config { page_size: 32, ..config.clone() };
    let launched = launch(&other_pages).unwrap();
    launched.engine.shutdown(Duration::from_secs(60)).await;
    let told = launched.summary.to_string();
    drop(launched);
    assert!(told.contains("also there: pages of 128.0 KiB in pages-of-131072-bytes"), "{told}");
    assert!(told.contains("last used just now, removed when their space is needed"), "{told}");
    // Another size again, so that nobody need wait until the store is closed.
    let no_room = Config { l3_capacity: Size::mib(9), page_size: 64, ..other_pages };
    let told = launch(&no_room).unwrap().summary.to_string();
    assert!(told.contains("warning: pages of 128.0 KiB in pages-of-131072-bytes"), "{told}");
    assert!(told.contains("were removed to free space"), "{told}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_smaller_store_says_how_many_pages_it_dropped() {
    let folder = tempfile::tempdir().unwrap();
    let config = small(folder.path());
    ask_once(&config, &json!({ "prompt": "x".repeat(700), "max_tokens": 1 })).await;
    let smaller = Config { l3_capacity: Size::mib(2), ..config };
    let told = launch(&smaller).unwrap().summary.to_string();
    assert!(told.contains("oldest pages,"), "{told}");
    assert!(told.contains("were dropped to keep to --l3-capacity 2.0 MiB"), "{told}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_disk_without_room_is_told_with_what_would_do() {
    let folder = tempfile::tempdir().unwrap();
    let config = Config { l3_reserve: Some(Size(1 << 62)), ..small(folder.path()) };
    let error = launch(&config).unwrap_err();
    assert!(matches!(error, LaunchError::L3NoRoom { .. }), "{error}");
    assert!(error.to_string().contains("lower --l3-reserve"), "{error}");
}
