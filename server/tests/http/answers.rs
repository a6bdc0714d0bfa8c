//! Answers, whole and streamed.

use std::time::Duration;

use serde_json::{Value, json};
use terrace_server::Config;

use crate::client::{begin, complete, get, post};
use crate::world::{NAME, World};

fn text_of(choice: &Value) -> &str {
    choice["text"].as_str().or(choice["message"]["content"].as_str()).unwrap()
}

/// What a stream says, for each choice: its text and why it ended.
fn gathered(events: &[Value], choices: usize) -> Vec<(String, Value)> {
    let mut gathered = vec![(String::new(), Value::Null); choices];
    for choice in events.iter().flat_map(|event| event["choices"].as_array().unwrap()) {
        let (text, finish) = &mut gathered[choice["index"].as_u64().unwrap() as usize];
        assert!(finish.is_null(), "nothing comes after the end");
        let new = choice["text"].as_str().or(choice["delta"]["content"].as_str());
        text.push_str(new.unwrap_or_default());
        *finish = choice["finish_reason"].clone();
    }
    gathered
}

#[tokio::test(flavor = "multi_thread")]
async fn plain_and_streamed_answers_agree() {
    let world = World::quick().await;
    let chat = json!({ "messages": [{ "role": "user", "content": "Tell me" }] });
    let requests = [
        ("/v1/completions", json!({ "prompt": ["Once", "Twice"], "n": 2 })),
        ("/v1/completions", json!({ "prompt": [[66, 67], [68]], "stop": "e" })),
        ("/v1/chat/completions", chat),
    ];
    for (path, mut request) in requests {
        request["seed"] = 7.into();
        request["max_tokens"] = 40.into();
        let plain = post(world.address, path, &request).await.json();
        request["stream"] = true.into();
        request["stream_options"] = json!({ "include_usage": true });
        let events = post(world.address, path, &request).await.events();
        let choices = plain["choices"].as_array().unwrap();
        let streamed = gathered(&events, choices.len());
        for (choice, (text, finish)) in choices.iter().zip(&streamed) {
            assert_eq!(text_of(choice), text);
            assert_eq!(choice["finish_reason"], *finish);
        }
        let (usage, last) = (&plain["usage"], events.last().unwrap());
        for count in ["prompt_tokens", "completion_tokens", "total_tokens"] {
            assert_eq!(usage[count], last["usage"][count]);
        }
        assert!(last["terrace"]["time_to_first_token_ms"].as_f64().unwrap() >= 0.0);
        assert!(events[..events.len() - 1].iter().all(|event| event["usage"].is_null()));

        request["stream_options"] =
            json!({ "include_usage": true, "continuous_usage_stats": true });
        let events = post(world.address, path, &request).await.events();
        let told: Vec<u64> = events
            .iter()
            .map(|event| event["usage"]["completion_tokens"].as_u64().unwrap())
            .collect();
        assert!(told.is_sorted() && told[0] < told[told.len() - 1], "{told:?}");
        assert_eq!(told.last().copied(), usage["completion_tokens"].as_u64());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_prompt_that_was_seen_is_found_on_the_device() {
    let world = World::quick().await;
    let request = json!({ "prompt": "x".repeat(99), "temperature": 0, "logits_checksum": true });
    let (first, again) =
        (complete(world.address, &request).await, complete(world.address, &request).await);
    assert_eq!(first["usage"]["prompt_tokens"], 100);
    assert_eq!(first["usage"]["prompt_tokens_details"]["cached_tokens"], 0);
    let details = &again["usage"]["prompt_tokens_details"];
    assert_eq!(details["cached_by_tier"], json!({ "device": 96, "host": 0, "l3": 0 }));
    assert_eq!(details["cached_tokens"], 96);
    assert_eq!(first["choices"], again["choices"]);
    assert_eq!(first["choices"][0]["logits_checksum"].as_str().unwrap().len(), 16);
    assert_eq!(first["usage"]["completion_tokens"], 16, "as OpenAI has it");
    let salted = json!({ "prompt": "x".repeat(99), "cache_salt": "other" });
    let salted = complete(world.address, &salted).await;
    assert_eq!(salted["usage"]["prompt_tokens_details"]["cached_tokens"], 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_seed_decides_all_choices() {
    let world = World::quick().await;
    let ask = async |seed: Value| {
        let request = json!({ "prompt": "dice", "n": 3, "seed": seed });
        let answer = complete(world.address, &request).await;
        let choices = answer["choices"].as_array().unwrap();
        choices.iter().map(|choice| text_of(choice).to_owned()).collect::<Vec<_>>()
    };
    let first = ask(json!(1)).await;
    assert_eq!(first, ask(json!(1)).await);
    assert_ne!(first, ask(json!(2)).await);
    assert_ne!(ask(json!(null)).await, ask(json!(null)).await);
    assert!(first[0] != first[1] && first[1] != first[2], "{first:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn several_answers_compute_their_prompt_once() {
    let world = World::quick().await;
    let request = json!({ "prompt": "x".repeat(98), "n": 3, "max_tokens": 2, "seed": 1 });
    let answer = complete(world.address, &request).await;
    // The tokenizer begins with a token of its own.
    let usage = &answer["usage"];
    assert_eq!((&usage["prompt_tokens"], &usage["completion_tokens"]), (&json!(99), &json!(6)));
    assert_eq!(usage["prompt_tokens_details"]["cached_tokens"], 0, "the first found nothing");
    for (index, choice) in answer["choices"].as_array().unwrap().iter().enumerate() {
        assert_eq!(choice["index"], index);
    }
    let figures = world.figures().await;
    let page_size = u64::from(figures.page_size);
    let shared = 98 / page_size * page_size;
    assert!(shared > 0, "a prompt of several pages");
    assert_eq!(figures.scheduler.submitted, 3);
    assert_eq!(figures.scheduler.prefilled_tokens, 99 + 2 * (99 - shared));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stop_string_ends_an_answer_before_it() {
    let world = World::quick().await;
    let mut request = json!({ "prompt": "go on", "temperature": 0, "max_tokens": 60 });
    let whole = complete(world.address, &request).await;
    let whole = text_of(&whole["choices"][0]).to_owned();
    let stop = &whole[20..24];
    let before = &whole[..whole.find(stop).unwrap()];
    request["stop"] = json!([stop, "never so"]);
    let stopped = complete(world.address, &request).await;
    assert_eq!(text_of(&stopped["choices"][0]), before);
    assert_eq!(stopped["choices"][0]["finish_reason"], "stop");
    request["stream"] = true.into();
    let events = post(world.address, "/v1/completions", &request).await.events();
    assert_eq!(gathered(&events, 1), [(before.to_owned(), json!("stop"))]);
    world.wait_for("the end of all", |figures| figures.scheduler.finished == 3).await;
    assert_eq!(world.figures().await.scheduler.aborted, 0, "what it computed is kept");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stop_token_ends_an_answer_unless_it_is_ignored() {
    let world = World::quick().await;
    let mut request = json!({ "prompt": "stop!", "max_tokens": 5, "temperature": 0 });
    let stopped = complete(world.address, &request).await;
    assert_eq!(text_of(&stopped["choices"][0]), "");
    assert_eq!(stopped["choices"][0]["finish_reason"], "stop");
    assert_eq!(stopped["usage"]["completion_tokens"], 0);
    request["ignore_eos"] = true.into();
    let went_on = complete(world.address, &request).await;
    assert_eq!(went_on["choices"][0]["finish_reason"], "length");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_goes_away_calls_its_requests_off() {
    let world = World::new(Config::default(), Duration::from_millis(5)).await;
    let long = json!({ "prompt": "long", "max_tokens": 10_000, "n": 2, "stream": true });
    let stream = begin(world.address, &long).await;
    assert_eq!(world.figures().await.scheduler.running, 2);
    drop(stream);
    world.wait_for("calling off a stream", |figures| figures.scheduler.aborted == 2).await;

    let mut plain = long;
    plain["stream"] = false.into();
    let address = world.address;
    let asking = tokio::spawn(async move { complete(address, &plain).await });
    world.wait_for("the beginning", |figures| figures.scheduler.running == 2).await;
    asking.abort();
    world.wait_for("calling off a plain one", |figures| figures.scheduler.aborted == 4).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_model_can_be_asked_for_by_its_name() {
    let world = World::quick().await;
    let list = get(world.address, "/v1/models").await.json();
    assert_eq!(list["data"][0]["id"], NAME);
    let toy = get(world.address, "/v1/models/toy").await.json();
    assert_eq!(toy, list["data"][0]);
    assert_eq!((&toy["root"], &toy["created"]), (&json!("nowhere"), &json!(1_700_000_000)));
    assert_eq!(toy["max_model_len"], 65_536);
    assert_eq!(get(world.address, "/v1/models/an/other").await.status, 404);
    assert_eq!(get(world.address, "/health").await.status, 200);
    complete(world.address, &json!({ "prompt": "x", "model": NAME })).await;
    let other = json!({ "prompt": "x", "model": "other" });
    let refused = post(world.address, "/v1/completions", &other).await;
    assert_eq!(
        (refused.status, &refused.json()["error"]["code"]),
        (404, &json!("model_not_found"))
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_stops_finishes_what_it_has_begun() {
    let mut world = World::new(Config::default(), Duration::from_millis(20)).await;
    let request = json!({ "prompt": "last", "max_tokens": 40 });
    let (address, engine) = (world.address, world.engine.clone());
    let asking = tokio::spawn(async move { complete(address, &request).await });
    world.wait_for("the beginning", |figures| figures.scheduler.running == 1).await;
    world.stop();
    let refused = loop {
        let refused = post(address, "/v1/completions", &json!({ "prompt": "late" })).await;
        // Being told takes the server a moment.
        if refused.status != 200 {
            break refused;
        }
    };
    assert_eq!(refused.status, 503);
    assert!(refused.head.contains("retry-after"));
    assert_eq!(get(address, "/health").await.status, 503);
    let answer = asking.await.unwrap();
    assert_eq!(answer["usage"]["completion_tokens"], 40);
    let drained = world.stopped().await;
    assert_eq!((drained.aborted, drained.abandoned_transfers), (0, 0));
    assert!(engine.figures().await.is_none());
    assert!(tokio::net::TcpStream::connect(address).await.is_err());
}

#[tokio::test(flavor = "multi_thread")]
async fn an_answer_that_outlasts_the_patience_is_cut_short() {
    let config = Config { shutdown_patience: Duration::from_millis(100), ..Config::default() };
    let mut world = World::new(config, Duration::from_millis(10)).await;
    let request = json!({ "prompt": "last", "max_tokens": 10_000 });
    let address = world.address;
    let asking =
        tokio::spawn(async move { post(address, "/v1/completions", &request).await.status });
    world.wait_for("the beginning", |figures| figures.scheduler.running == 1).await;
    world.stop();
    assert_eq!(asking.await.unwrap(), 503);
    assert_eq!(world.stopped().await.aborted, 1);
}
