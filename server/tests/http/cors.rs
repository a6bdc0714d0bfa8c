//! Pages of other sites, the version, the description of the API, and servers without keys.

use std::time::Duration;

use serde_json::json;
use terrace_server::{BindError, Config};

use crate::client::{get, send};
use crate::world::World;

const PREFLIGHT: &str = "Access-Control-Request-Method: POST\r\n\
    Access-Control-Request-Headers: authorization,x-stainless-os\r\n";
const ALLOWED: &str = "access-control-allow-origin";

#[tokio::test(flavor = "multi_thread")]
async fn pages_of_other_sites_may_read_responses_only_where_that_is_set() {
    let from = |origin: &str| format!("Origin: {origin}\r\n");
    let preflight = |world: &World, origin: &str| {
        let (address, headers) = (world.address, from(origin) + PREFLIGHT);
        async move { send(address, "OPTIONS", "/v1/chat/completions", &headers, "").await }
    };
    let closed = World::quick().await;
    let refused = preflight(&closed, "https://a.example").await;
    assert!(refused.status == 405 && !refused.head.contains(ALLOWED), "{refused:?}");
    let origins = "https://a.example, http://localhost:3000".to_owned();
    let config = Config { cors_origins: origins, ..Config::default() };
    let world = World::new(config, Duration::ZERO).await;
    let allowed = preflight(&world, "https://a.example").await;
    assert_eq!(allowed.status, 200, "{allowed:?}");
    for header in [
        "access-control-allow-origin: https://a.example",
        "access-control-allow-headers: authorization,x-stainless-os",
        "access-control-allow-methods: get,post",
    ] {
        assert!(allowed.head.contains(header), "{header}: {}", allowed.head);
    }
    let other = preflight(&world, "https://b.example").await;
    assert!(!other.head.contains(ALLOWED), "{other:?}");
    let error =
        send(world.address, "POST", "/v1/completions", &from("https://a.example"), "{").await;
    assert_eq!(error.status, 400);
    assert!(error.head.contains(ALLOWED), "errors can be read too: {}", error.head);
    let reset =
        send(world.address, "POST", "/reset_prefix_cache", &from("https://a.example"), "").await;
    assert_eq!(reset.status, 403, "{reset:?}");
    let all = Config { cors_origins: "*".to_owned(), ..Config::default() };
    let world = World::new(all, Duration::ZERO).await;
    assert!(
        preflight(&world, "https://c.example")
            .await
            .head
            .contains("access-control-allow-origin: *")
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn the_version_and_the_description_need_no_key() {
    let config = Config { keys: vec!["alice=a".parse().unwrap()], ..Config::default() };
    let world = World::new(config, Duration::ZERO).await;
    let version = get(world.address, "/version").await;
    assert_eq!(
        (version.status, version.json()),
        (200, json!({ "version": env!("CARGO_PKG_VERSION") }))
    );
    let document = get(world.address, "/openapi.json").await.json();
    assert_eq!(document["openapi"], "3.1.0");
    assert_eq!(document["info"]["version"], env!("CARGO_PKG_VERSION"));
    assert!(document["paths"]["/v1/responses"]["post"].is_object());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_without_keys_serves_other_machines_only_if_that_is_allowed() {
    // An address that no machine has, so nothing listens on it.
    let open = Config { listen: "192.0.2.1:0".to_owned(), ..Config::default() };
    let error = World::bind_error(open.clone()).await;
    assert!(matches!(error, BindError::Anonymous(_)), "{error}");
    assert!(error.to_string().contains("--allow-anonymous"), "{error}");
    let allowed = Config { allow_anonymous: true, ..open.clone() };
    let with_keys = Config { keys: vec!["alice=a".parse().unwrap()], ..open };
    for config in [allowed, with_keys] {
        let error = World::bind_error(config).await;
        assert!(matches!(error, BindError::Address { .. }), "{error}");
    }
}
