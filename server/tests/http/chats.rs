//! Conversations: when their answers begin, where their prompts end, and how long they go on.

use std::time::Duration;

use serde_json::{Value, json};
use terrace_server::Config;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::client::{complete, post, request};
use crate::world::World;

const CHAT: &str = "/v1/chat/completions";

fn says(text: &str) -> Value {
    json!({ "messages": [{ "role": "user", "content": text }], "max_tokens": 4 })
}

async fn prompt_tokens(world: &World, request: &Value) -> u64 {
    let answer = post(world.address, CHAT, request).await;
    assert_eq!(answer.status, 200, "{answer:?}");
    answer.json()["usage"]["prompt_tokens"].as_u64().unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_says_nothing_before_the_first_token() {
    const STEP: Duration = Duration::from_millis(500);
    let world = World::new(Config::default(), STEP).await;
    let mut body = says("hi");
    body["stream"] = true.into();
    let mut stream = TcpStream::connect(world.address).await.unwrap();
    stream.write_all(request("POST", CHAT, "", &body.to_string()).as_bytes()).await.unwrap();
    let mut seen = String::new();
    while !seen.contains("data: ") {
        let mut bytes = [0; 4096];
        let count = stream.read(&mut bytes).await.unwrap();
        assert!(count > 0, "{seen}");
        seen.push_str(&String::from_utf8_lossy(&bytes[..count]));
        let generated = world.figures().await.scheduler.generated_tokens;
        assert!(generated > 0 || !seen.contains("data: "), "nothing is computed: {seen}");
    }
    let (_, first) = seen.split_once("data: ").unwrap();
    let first: Value = serde_json::from_str(first.lines().next().unwrap()).unwrap();
    let delta = &first["choices"][0]["delta"];
    assert_eq!(delta["role"], "assistant");
    assert_ne!(delta["content"], "", "whoever counts chunks counts tokens");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_answer_without_text_has_a_speaker_too() {
    let world = World::quick().await;
    let mut body = says("stop!");
    // The toy ends after an exclamation mark.
    body["continue_final_message"] = true.into();
    body["stream"] = true.into();
    let events = post(world.address, CHAT, &body).await.events();
    assert_eq!(events.len(), 1, "{events:?}");
    let choice = &events[0]["choices"][0];
    assert_eq!(choice["delta"], json!({ "role": "assistant", "content": "" }));
    assert_eq!(choice["finish_reason"], "stop");
    let fingerprint = events[0]["system_fingerprint"].as_str().unwrap();
    let plain = complete(world.address, &json!({ "prompt": "x" })).await;
    assert_eq!(plain["system_fingerprint"], fingerprint);
    assert!(fingerprint.starts_with("fp_"));
}

#[tokio::test(flavor = "multi_thread")]
async fn each_choice_says_once_who_speaks() {
    let world = World::quick().await;
    let mut body = says("hi");
    body["n"] = 3.into();
    body["stream"] = true.into();
    let events = post(world.address, CHAT, &body).await.events();
    for index in 0..3 {
        let choices = events.iter().map(|event| &event["choices"][0]);
        let ours: Vec<_> = choices.filter(|choice| choice["index"] == index).collect();
        assert_eq!(ours[0]["delta"]["role"], "assistant");
        assert!(ours[1..].iter().all(|choice| choice["delta"].get("role").is_none()));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_prompt_ends_where_it_is_told_to() {
    let world = World::quick().await;
    let mut body = says("hi");
    let answers = prompt_tokens(&world, &body).await;
    body["add_generation_prompt"] = false.into();
    assert_eq!(prompt_tokens(&world, &body).await, answers - 1);
    body["continue_final_message"] = true.into();
    assert_eq!(prompt_tokens(&world, &body).await, answers - 2);
    body["add_generation_prompt"] = true.into();
    let both = post(world.address, CHAT, &body).await;
    assert_eq!(both.status, 400, "{both:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_prompt_is_cut_to_its_last_tokens_if_that_is_wanted() {
    let world = World::quick().await;
    let mut body = says(&"x".repeat(100));
    body["truncate_prompt_tokens"] = 10.into();
    assert_eq!(prompt_tokens(&world, &body).await, 10);
    let long =
        json!({ "prompt": "y".repeat(70_000), "truncate_prompt_tokens": -1, "max_tokens": 6 });
    let fits = complete(world.address, &long).await;
    assert_eq!(fits["usage"]["prompt_tokens"], 65_530);
    let mut refused = long;
    refused["truncate_prompt_tokens"] = json!(null);
    assert_eq!(post(world.address, "/v1/completions", &refused).await.status, 400);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_chat_goes_on_to_the_end_of_the_context_and_keeps_nobody_out() {
    let world = World::new(Config::default(), Duration::from_millis(1)).await;
    let mut endless = says("go on");
    endless["max_tokens"] = json!(null);
    endless["stream"] = true.into();
    let mut streams = Vec::new();
    for _ in 0..4 {
        let mut stream = TcpStream::connect(world.address).await.unwrap();
        let bytes = request("POST", CHAT, "", &endless.to_string());
        stream.write_all(bytes.as_bytes()).await.unwrap();
        streams.push(stream);
    }
    // Each of them may fill the device, and all of them run.
    world.wait_for("more than 256", |f| f.scheduler.generated_tokens > 4 * 300).await;
    assert_eq!(world.figures().await.scheduler.running, 4);
    let free = world.figures().await.scheduler.cache.device.free_pages;
    assert!(free > 3000, "pages are taken when they are needed: {free}");
    complete(world.address, &json!({ "prompt": "another" })).await;
    drop(streams);
    world.wait_for("calling off", |figures| figures.scheduler.aborted == 4).await;

    // To the very end: a prompt that leaves room for three.
    let room = json!({ "messages": [{ "role": "user", "content": "x".repeat(65_529) }] });
    let answer = post(world.address, CHAT, &room).await.json();
    assert_eq!(answer["usage"]["total_tokens"], 65_536, "{answer}");
    assert_eq!(answer["choices"][0]["finish_reason"], "length");
}
