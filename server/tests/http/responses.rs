//! The Responses API.

use std::net::SocketAddr;

use serde_json::{Value, json};
use terrace_server::Config;

use crate::client::{key, post, send};
use crate::tools::world;
use crate::world::World;

const PATH: &str = "/v1/responses";
const THINKING: &str = "{# <think> #}{%- for message in messages %}{{- '[' + message.role + ']' + message.content }}\
    {%- endfor %}{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}";

async fn respond(address: SocketAddr, request: &Value) -> Value {
    let response = post(address, PATH, request).await;
    assert_eq!(response.status, 200, "{response:?}");
    response.json()
}

/// The events of a stream, each with the name that its line has.
async fn events(address: SocketAddr, mut request: Value) -> Vec<Value> {
    request["stream"] = true.into();
    let response = post(address, PATH, &request).await;
    assert_eq!(response.status, 200, "{response:?}");
    let mut events = Vec::new();
    let mut name = "";
    for line in response.body.lines() {
        if let Some(found) = line.strip_prefix("event: ") {
            name = found;
        }
        if let Some(data) = line.strip_prefix("data: ") {
            let event: Value = serde_json::from_str(data).unwrap();
            assert_eq!(event["type"], name);
            assert_eq!(event["sequence_number"], events.len());
            events.push(event);
        }
    }
    events
}

fn text(response: &Value) -> String {
    let items = response["output"].as_array().unwrap().iter();
    let messages = items.filter(|item| item["type"] == "message");
    messages.map(|item| item["content"][0]["text"].as_str().unwrap()).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_response_has_items_and_usage() {
    let world = World::quick().await;
    let request = json!({
        "input": "Tell me about trees. ".repeat(8), "instructions": "Be brief.", "max_output_tokens": 12,
        "temperature": 0, "metadata": { "a": "b" },
    });
    let first = respond(world.address, &request).await;
    assert_eq!(first["object"], "response");
    assert_eq!(first["status"], "incomplete", "the toy goes on");
    assert_eq!(first["incomplete_details"]["reason"], "max_output_tokens");
    assert_eq!((&first["store"], &first["error"]), (&json!(false), &Value::Null));
    assert_eq!(
        (&first["metadata"], &first["instructions"]),
        (&json!({ "a": "b" }), &json!("Be brief."))
    );
    assert_eq!((first["temperature"].as_f64(), first["top_p"].as_f64()), (Some(0.0), Some(1.0)));
    let [item] = &first["output"].as_array().unwrap()[..] else { panic!("{first}") };
    assert_eq!((&item["type"], &item["role"]), (&json!("message"), &json!("assistant")));
    assert_eq!(text(&first).len(), 12);
    let usage = &first["usage"];
    assert_eq!(
        (&usage["output_tokens"], &usage["input_tokens_details"]["cached_tokens"]),
        (&json!(12), &json!(0))
    );
    let again = respond(world.address, &request).await;
    assert_eq!(text(&again), text(&first));
    assert!(
        again["usage"]["input_tokens_details"]["cached_tokens"].as_u64().unwrap() > 0,
        "{again}"
    );
    // The same conversation as a chat.
    let chat = json!({
        "messages": [{ "role": "system", "content": "Be brief." }, { "role": "user", "content": request["input"] }],
        "max_tokens": 12, "temperature": 0,
    });
    let chat = post(world.address, "/v1/chat/completions", &chat).await.json();
    assert_eq!(chat["choices"][0]["message"]["content"], text(&first));
    assert_eq!(chat["usage"]["prompt_tokens"], usage["input_tokens"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_builds_the_response_event_by_event() {
    let world = world(THINKING, None, "<think>Hm.</think>Yes, it is.").await;
    let request = json!({ "input": [{ "role": "user", "content": "Is it?" }], "temperature": 0 });
    let whole = respond(world.address, &request).await;
    assert_eq!(whole["status"], "completed");
    let events = events(world.address, request).await;
    let mut kinds: Vec<_> = events.iter().map(|event| event["type"].as_str().unwrap()).collect();
    kinds.dedup();
    assert_eq!(
        kinds,
        [
            "response.created",
            "response.in_progress",
            "response.output_item.added",
            "response.content_part.added",
            "response.reasoning_text.delta",
            "response.reasoning_text.done",
            "response.content_part.done",
            "response.output_item.done",
            "response.output_item.added",
            "response.content_part.added",
            "response.output_text.delta",
            "response.output_text.done",
            "response.content_part.done",
            "response.output_item.done",
            "response.completed",
        ]
    );
    let of = |kind: &'static str| events.iter().filter(move |event| event["type"] == kind);
    let deltas = |kind: &'static str| -> String {
        of(kind).map(|event| event["delta"].as_str().unwrap()).collect()
    };
    assert_eq!(deltas("response.reasoning_text.delta"), "Hm.");
    assert_eq!(deltas("response.output_text.delta"), "Yes, it is.");
    assert!(of("response.output_text.delta").count() > 3, "text comes in pieces");
    let done = of("response.output_text.done").next().unwrap();
    assert_eq!((&done["text"], &done["output_index"]), (&json!("Yes, it is."), &json!(1)));
    assert_eq!(of("response.created").next().unwrap()["response"]["status"], "in_progress");
    let last = &events.last().unwrap()["response"];
    let items: Vec<_> =
        of("response.output_item.done").map(|event| event["item"].clone()).collect();
    assert_eq!(last["output"], json!(items));
    assert_eq!(items[0]["content"][0]["text"], "Hm.");
    assert_eq!(
        last["usage"]["output_tokens_details"]["reasoning_tokens"],
        "<think>Hm.</think>".len()
    );
    for response in [last, &whole] {
        assert_eq!(text(response), "Yes, it is.");
    }
    assert_eq!(last["usage"]["output_tokens"], whole["usage"]["output_tokens"]);
    let ids: Vec<_> =
        of("response.output_item.added").map(|event| event["item"]["id"].clone()).collect();
    assert_eq!(ids, [items[0]["id"].clone(), items[1]["id"].clone()]);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_not_supported_is_refused_before_anything_is_computed() {
    let config = Config { keys: vec!["alice=a".parse().unwrap()], ..Config::default() };
    let world = World::new(config, std::time::Duration::ZERO).await;
    let ask = |request: Value, headers: String| async move {
        send(world.address, "POST", PATH, &headers, &request.to_string()).await
    };
    assert_eq!(ask(json!({ "input": "x" }), String::new()).await.status, 401);
    for (name, value) in [
        ("store", json!(true)),
        ("previous_response_id", json!("resp_1")),
        ("tools", json!([{ "type": "function", "name": "f" }])),
        ("input", json!([])),
    ] {
        let mut request = json!({ "input": "x", "max_output_tokens": 1 });
        request[name] = value;
        let refused = ask(request, key("a")).await;
        assert_eq!(refused.status, 400, "{refused:?}");
        assert_eq!(refused.json()["error"]["param"], name);
    }
    assert_eq!(ask(json!({ "input": "x", "max_output_tokens": 1 }), key("a")).await.status, 200);
}

#[cfg(feature = "structured-outputs")]
#[tokio::test(flavor = "multi_thread")]
async fn a_schema_shapes_the_text() {
    let world = World::quick().await;
    let schema = json!({ "enum": ["red", "blue"] });
    let format = json!({ "type": "json_schema", "name": "colour", "schema": schema });
    let request =
        json!({ "input": "Which?", "text": { "format": format }, "max_output_tokens": 40 });
    let response = respond(world.address, &request).await;
    assert!(["\"red\"", "\"blue\""].contains(&text(&response).trim()), "{response}");
    assert_eq!(response["status"], "completed");
}
