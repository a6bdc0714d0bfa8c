//! Whatever comes in, the server answers that it is wrong, or closes, and serves the next one.

use std::net::SocketAddr;
use std::time::Duration;

use proptest::prelude::*;
use proptest::test_runner::TestRunner;
use serde_json::{Value, json};
use terrace_server::{Config, Limits, Size};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::client::{Response, complete};
use crate::world::World;

const PATHS: [&str; 11] = [
    "/v1/completions",
    "/v1/chat/completions",
    "/tokenize",
    "/detokenize",
    "/reset_prefix_cache?l3=%ff",
    "/v1/models",
    "/v1/models/x%20y",
    "/health",
    "/metrics",
    "/",
    "/nothing?key=%ff",
];

/// Right and wrong values of any type.
fn value() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        (-3i64..40).prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        "\\PC{0,12}".prop_map(Value::from),
        Just(json!("text")),
        Just(json!("user")),
    ];
    leaf.prop_recursive(3, 16, 4, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
            prop::collection::vec((name(), inner), 0..4)
                .prop_map(|fields| Value::Object(fields.into_iter().collect())),
        ]
    })
}

fn name() -> impl Strategy<Value = String> {
    prop::sample::select(vec![
        "prompt",
        "messages",
        "role",
        "content",
        "type",
        "text",
        "model",
        "max_tokens",
        "n",
        "max_completion_tokens",
        "temperature",
        "top_p",
        "seed",
        "stop",
        "stream",
        "cache_salt",
        "stream_options",
        "include_usage",
        "priority",
        "logits_checksum",
        "ignore_eos",
        "logprobs",
        "tools",
        "tool_choice",
        "tool_calls",
        "tool_call_id",
        "tokens",
        "chat_template_kwargs",
        "continue_final_message",
        "add_generation_prompt",
        "truncate_prompt_tokens",
        "response_format",
        "logit_bias",
        "best_of",
        "echo",
        "suffix",
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
        "top_k",
        "min_p",
        "min_tokens",
        "stop_token_ids",
        "skip_special_tokens",
        "include_stop_str_in_output",
        "top_logprobs",
        "guided_regex",
        "guided_choice",
        "guided_grammar",
        "structured_outputs",
        "json",
        "regex",
        "choice",
        "",
    ])
    .prop_map(str::to_owned)
}

/// A request with some good fields and some of any kind.
fn body() -> impl Strategy<Value = Vec<u8>> {
    let fields = prop::collection::vec((name(), value()), 0..3);
    let json = (fields, prop::bool::weighted(0.8)).prop_map(|(fields, is_good)| {
        let mut body = json!({});
        if is_good {
            body["prompt"] = json!("x");
            body["messages"] = json!([{ "role": "user", "content": "x" }]);
            body["max_tokens"] = json!(3);
        }
        for (name, value) in fields {
            body[name] = value;
        }
        // What is asked for in earnest is bounded: an answer is to be waited for.
        if body["max_tokens"].as_i64().is_some_and(|max| max > 40) {
            body["max_tokens"] = json!(40);
        }
        if body["max_tokens"].is_null() {
            body["max_tokens"] = json!(3);
        }
        if body["max_completion_tokens"].as_i64().is_some_and(|max| max > 40) {
            body["max_completion_tokens"] = json!(40);
        }
        body.to_string().into_bytes()
    });
    prop_oneof![4 => json, 1 => prop::collection::vec(any::<u8>(), 0..64)]
}

/// Something that looks like a request, and something that does not.
fn bytes() -> impl Strategy<Value = Vec<u8>> {
    let rare = prop::sample::select(vec!["GET", "GET", "PUT", "HEAD", "X"]);
    let method = prop_oneof![2 => Just("POST"), 1 => rare];
    let rude = prop::sample::select(vec![
        "Expect: 100-continue\r\n",
        "Authorization: Bearer \u{ff}\r\n",
        "Content-Length: 3\r\n",
        "Transfer-Encoding: chunked\r\n",
        "Host: evil\r\n",
        "no colon\r\n",
    ]);
    let header = prop_oneof![3 => Just(""), 1 => rude];
    let path = prop_oneof![
        prop::sample::select(PATHS[..2].to_vec()),
        prop::sample::select(PATHS.to_vec()),
    ];
    let request = (method, path, header, body(), -4i64..5).prop_map(
        |(method, path, header, body, off_by)| {
            let length = (body.len() as i64 + if off_by.abs() == 4 { off_by } else { 0 }).max(0);
            let mut bytes = format!(
                "{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\
                 Content-Type: application/json\r\n{header}Content-Length: {length}\r\n\r\n"
            )
            .into_bytes();
            bytes.extend(body);
            bytes
        },
    );
    prop_oneof![9 => request, 1 => prop::collection::vec(any::<u8>(), 0..300)]
}

/// Sends bytes in pieces, and reads what comes back until the server closes.
async fn send_in_pieces(address: SocketAddr, bytes: &[u8], pieces: usize) -> Vec<u8> {
    let mut stream = TcpStream::connect(address).await.unwrap();
    stream.set_nodelay(true).unwrap();
    for piece in bytes.chunks(bytes.len().div_ceil(pieces).max(1)) {
        if stream.write_all(piece).await.is_err() {
            break;
        }
        tokio::task::yield_now().await;
    }
    let mut answer = Vec::new();
    let reading = tokio::time::timeout(Duration::from_secs(20), stream.read_to_end(&mut answer));
    let _ = reading.await.expect("the server neither answers nor closes");
    answer
}

#[test]
fn nothing_that_comes_in_makes_the_server_fail() {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
    let limits = Limits {
        header_timeout: Duration::from_millis(50),
        body_timeout: Duration::from_millis(50),
        idle_timeout: Duration::from_millis(100),
        body_max: Size::kib(4),
        ..Limits::default()
    };
    let config = Config { limits, ..Config::default() };
    let world = runtime.block_on(World::new(config, Duration::ZERO));
    let cases = std::env::var("PROPTEST_CASES").ok().and_then(|cases| cases.parse().ok());
    let config = ProptestConfig {
        cases: cases.unwrap_or(500),
        failure_persistence: None,
        ..ProptestConfig::default()
    };
    let outcome = TestRunner::new(config).run(&(bytes(), 1usize..8), |(bytes, pieces)| {
        let answer = runtime.block_on(send_in_pieces(world.address, &bytes, pieces));
        if let Some(response) = Response::parse(&answer) {
            let is_fine = (100..500).contains(&response.status);
            prop_assert!(is_fine, "{:?} to {:?}", response, String::from_utf8_lossy(&bytes));
        }
        Ok(())
    });
    if let Err(failure) = outcome {
        panic!("{failure}");
    }
    runtime.block_on(async {
        world
            .wait_for("the end of all", |figures| {
                let stats = &figures.scheduler;
                stats.waiting + stats.running + stats.draining == 0
            })
            .await;
        let stats = world.figures().await.scheduler;
        assert!(stats.finished > 10, "hardly anything was a good request: {stats:?}");
        assert_eq!(stats.failed, 0);
        complete(world.address, &json!({ "prompt": "a good request" })).await;
    });
}
