//! Functions that a model may call: a folder's template is told of them, and calls are found in what the
//! model says.

use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::{Value, json};
use terrace_model::Loaded;
use terrace_server::{Config, ToolFormat};

use crate::client::post;
use crate::toy::{Speech, Toy};
use crate::world::World;

pub(crate) const CHAT: &str = "/v1/chat/completions";
/// The token that the template ends prompts with, and the one that ends answers.
const ASSISTANT: u32 = 1;
const END: u32 = 2;

/// Tools, messages with their calls, and what is to be said about the weather.
const HERMES: &str = "\
    {%- if tools %}{{- 'tools:' }}{%- for tool in tools %}{{- tool | tojson }}{%- endfor %}{%- endif %}\
    {%- for message in messages %}{{- '[' + message.role + ']' + message.content }}\
    {%- for call in message.tool_calls %}{{- '<tool_call>' + ({'name': call.function.name, \
    'arguments': call.function.arguments} | tojson) + '</tool_call>' }}{%- endfor %}{%- endfor %}\
    {%- if mood %}{{- '(' + mood + ')' }}{%- endif %}\
    {%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}";
const SILENT: &str = "{%- for message in messages %}{{- message.content }}{%- endfor %}\
    {%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}";

/// A folder whose tokenizer has a token for each letter and for marks, and this template.
fn folder(template: &str) -> Loaded {
    let folder = tempfile::tempdir().unwrap();
    let fixture = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../model/tests/fixtures/llama");
    for file in ["config.json", "model.safetensors"] {
        std::fs::copy(fixture.join(file), folder.path().join(file)).unwrap();
    }
    write_tokenizer(&folder.path().join("tokenizer.json"));
    std::fs::write(folder.path().join("chat_template.jinja"), template).unwrap();
    terrace_model::load(folder.path(), 1).unwrap()
}

fn write_tokenizer(path: &Path) {
    let marks = ["<|begin|>", "<|assistant|>", "<|end|>", "<|python_tag|>", "[TOOL_CALLS]"];
    let mark = |(id, content): (usize, &&str)| {
        json!({ "id": id, "content": content, "single_word": false, "lstrip": false,
            "rstrip": false, "normalized": false, "special": true })
    };
    // What byte-level tokenizers call a blank and the end of a line, and all that is its own name.
    let letters = ['\u{120}', '\u{10a}'].into_iter().chain('!'..='~').map(String::from);
    let names = marks.iter().map(|mark| (*mark).to_owned()).chain(letters).enumerate();
    let vocabulary: serde_json::Map<_, _> =
        names.map(|(id, name)| (name, Value::from(id))).collect();
    let bytes = json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true,
        "use_regex": false });
    let tokenizer = json!({
        "version": "1.0", "truncation": null, "padding": null, "normalizer": null,
        "added_tokens": marks.iter().enumerate().map(mark).collect::<Vec<_>>(),
        "pre_tokenizer": bytes, "post_processor": null, "decoder": bytes,
        "model": { "type": "BPE", "dropout": null, "unk_token": null,
            "continuing_subword_prefix": null, "end_of_word_suffix": null, "fuse_unk": false,
            "byte_fallback": false, "vocab": vocabulary, "merges": [] },
    });
    std::fs::write(path, tokenizer.to_string()).unwrap();
}

/// A server with this template whose model says this.
pub(crate) async fn world(template: &str, format: Option<ToolFormat>, answer: &str) -> World {
    let loaded = folder(template);
    let mut tokens = loaded.tokenizer.encode_plain(answer).unwrap();
    tokens.push(END);
    let speech = Some(Speech { after: ASSISTANT, tokens });
    World::with(Config::default(), Toy { step: Duration::ZERO, speech }, |model| {
        model.tool_format = format.or_else(|| ToolFormat::of(&loaded.chat));
        model.marks_reasoning = loaded.chat.mentions("<think>");
        model.tokenizer = loaded.tokenizer;
        model.chat = loaded.chat;
        model.stop_tokens = loaded.stop_tokens.into();
    })
    .await
}

fn question() -> Value {
    let parameters = json!({ "type": "object", "properties": { "city": { "type": "string" } } });
    json!({
        "messages": [{ "role": "user", "content": "Rain?" }],
        "tools": [{ "type": "function",
            "function": { "name": "weather", "description": "Of a city", "parameters": parameters } }],
    })
}

pub(crate) async fn ask(world: &World, body: &Value) -> Value {
    let response = post(world.address, CHAT, body).await;
    assert_eq!(response.status, 200, "{response:?}");
    response.json()
}

/// The text of the prompt that a request would have.
async fn prompt(world: &World, body: &Value) -> String {
    let told = post(world.address, "/tokenize", body).await;
    assert_eq!(told.status, 200, "{told:?}");
    let tokens = json!({ "tokens": told.json()["tokens"] });
    let told = post(world.address, "/detokenize", &tokens).await.json();
    told["prompt"].as_str().unwrap().to_owned()
}

const CALLS: &str = "One moment.\n<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \
                     \"Bern\", \"at\": 7}}\n</tool_call>\n<tool_call>{\"name\": \"weather\", \
                     \"arguments\": {\"city\": \"Rome\"}}</tool_call>";

#[tokio::test(flavor = "multi_thread")]
async fn calls_come_apart_from_the_text_plain_and_streamed() {
    let world = world(HERMES, None, CALLS).await;
    let mut request = question();
    let answer = ask(&world, &request).await;
    let choice = &answer["choices"][0];
    assert_eq!(choice["finish_reason"], "tool_calls", "{answer}");
    assert_eq!(choice["message"]["content"], "One moment.");
    let calls = choice["message"]["tool_calls"].as_array().unwrap();
    let functions: Vec<_> = calls.iter().map(|call| call["function"].clone()).collect();
    let weather = |arguments: &str| json!({ "name": "weather", "arguments": arguments });
    let expected = [weather(r#"{"city":"Bern","at":7}"#), weather(r#"{"city":"Rome"}"#)];
    assert_eq!(functions, expected);
    assert!(calls.iter().all(|call| call["type"] == "function"));
    assert_ne!(calls[0]["id"], calls[1]["id"]);

    request["stream"] = true.into();
    let events = post(world.address, CHAT, &request).await.events();
    let deltas: Vec<_> = events.iter().map(|event| &event["choices"][0]["delta"]).collect();
    let said: String = deltas.iter().filter_map(|delta| delta["content"].as_str()).collect();
    assert_eq!(said, "One moment.");
    let streamed: Vec<_> =
        deltas.iter().filter_map(|delta| delta["tool_calls"].as_array()).flatten().collect();
    for (index, (call, function)) in streamed.iter().zip(&expected).enumerate() {
        assert_eq!((&call["index"], &call["function"]), (&json!(index), function));
        assert!(call["id"].is_string() && call["type"] == "function");
    }
    assert_eq!(streamed.len(), 2);
    let last = events.last().unwrap();
    assert_eq!(last["choices"][0]["finish_reason"], "tool_calls");

    request["stream"] = false.into();
    request["parallel_tool_calls"] = false.into();
    let one = ask(&world, &request).await;
    assert_eq!(one["choices"][0]["message"]["tool_calls"].as_array().unwrap().len(), 1);
    request["tool_choice"] = "none".into();
    let none = ask(&world, &request).await;
    assert_eq!(none["choices"][0]["message"]["content"], CALLS);
    assert_eq!(none["choices"][0]["finish_reason"], "stop");
}

#[tokio::test(flavor = "multi_thread")]
async fn every_format_is_read_with_marks_that_are_no_text() {
    let cases = [
        (
            ToolFormat::Llama,
            "<|python_tag|>{\"name\": \"weather\", \"parameters\": {\"city\": \"Bern\"}}",
        ),
        (ToolFormat::Llama, "{\"name\": \"weather\", \"parameters\": {\"city\": \"Bern\"}}"),
        (
            ToolFormat::Mistral,
            "[TOOL_CALLS][{\"name\": \"weather\", \"arguments\": {\"city\": \"Bern\"}}]",
        ),
    ];
    for (format, said) in cases {
        let world = world(HERMES, Some(format), said).await;
        let answer = ask(&world, &question()).await;
        let message = &answer["choices"][0]["message"];
        assert_eq!(message["content"], Value::Null, "{format}: {answer}");
        let call = &message["tool_calls"][0];
        assert_eq!(call["function"]["arguments"], r#"{"city":"Bern"}"#);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_template_is_told_of_tools_calls_and_results() {
    let world = world(HERMES, None, CALLS).await;
    let mut request = question();
    let first = prompt(&world, &request).await;
    let tool =
        r#"tools:{"type": "function", "function": {"name": "weather", "description": "Of a city""#;
    assert!(first.starts_with(tool), "{first}");
    assert!(first.ends_with("[user]Rain?<|assistant|>"), "{first}");

    // The conversation goes on with what came back, as clients send it.
    let mut answer = ask(&world, &request).await;
    let message = answer["choices"][0]["message"].take();
    let id = message["tool_calls"][0]["id"].clone();
    let messages = request["messages"].as_array_mut().unwrap();
    messages.push(message);
    messages.push(json!({ "role": "tool", "tool_call_id": id, "content": "wet" }));
    let second = prompt(&world, &request).await;
    let calls = "[assistant]One moment.<tool_call>{\"name\": \"weather\", \"arguments\": {\"city\": \
                 \"Bern\", \"at\": 7}}</tool_call><tool_call>";
    assert!(second.contains(calls), "{second}");
    assert!(second.ends_with("[tool]wet<|assistant|>"), "{second}");
    ask(&world, &request).await;

    request["tools"] = json!(null);
    request["chat_template_kwargs"] = json!({ "mood": "sunny" });
    let moody = prompt(&world, &request).await;
    assert!(moody.starts_with("[user]Rain?") && moody.contains("(sunny)"), "{moody}");
}

#[tokio::test(flavor = "multi_thread")]
async fn tools_that_a_template_does_not_know_are_refused() {
    let silent = world(SILENT, None, "hi").await;
    let refused = post(silent.address, CHAT, &question()).await;
    let error = &refused.json()["error"];
    assert_eq!((refused.status, &error["param"]), (400, &json!("tools")));
    assert!(error["message"].as_str().unwrap().contains("chat_template.jinja"), "{error}");
    let call =
        json!({ "id": "1", "type": "function", "function": { "name": "f", "arguments": "{}" } });
    let called =
        json!({ "messages": [{ "role": "assistant", "content": null, "tool_calls": [call] }] });
    assert_eq!(post(silent.address, CHAT, &called).await.status, 400);
    let plain = json!({ "messages": [{ "role": "user", "content": "x" }], "tools": [] });
    assert_eq!(ask(&silent, &plain).await["choices"][0]["message"]["content"], "hi");

    // A template that knows tools, but not in a way that is known here.
    let strange = HERMES.replace("<tool_call>", "<call>");
    let world = world(&strange, None, "hi").await;
    let refused = post(world.address, CHAT, &question()).await;
    assert_eq!(refused.status, 400);
    assert!(refused.body.contains("--tool-format"), "{}", refused.body);
    for choice in
        [json!("required"), json!({ "type": "function", "function": { "name": "weather" } })]
    {
        let mut forced = question();
        forced["tool_choice"] = choice;
        forced["max_tokens"] = 2.into();
        let answer = post(world.address, CHAT, &forced).await;
        // A forced call has no format, but it needs a constraint.
        match cfg!(feature = "structured-outputs") {
            true => assert_eq!(answer.status, 200, "{answer:?}"),
            false => assert_eq!(answer.json()["error"]["param"], "tool_choice"),
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_built_in_model_is_told_of_tools_too() {
    let world = World::quick().await;
    let mut request = question();
    let text = prompt(&world, &request).await;
    assert!(text.contains("Functions that can be called") && text.contains("weather"), "{text}");
    request["max_tokens"] = 4.into();
    let answer = ask(&world, &request).await;
    assert_eq!(answer["choices"][0]["finish_reason"], "length");
}
