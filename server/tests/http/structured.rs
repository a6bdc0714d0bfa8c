//! Answers that follow a rule.

use serde_json::{Value, json};

use crate::client::{complete, post};
use crate::world::World;

async fn choice(world: &World, fields: Value) -> (String, String) {
    let mut request = json!({ "prompt": "say", "seed": 3, "max_tokens": 60 });
    for (name, value) in fields.as_object().unwrap() {
        request[name] = value.clone();
    }
    let plain = complete(world.address, &request).await;
    let text = plain["choices"][0]["text"].as_str().unwrap();
    request["stream"] = true.into();
    let events = post(world.address, "/v1/completions", &request).await.events();
    let streamed: String =
        events.iter().map(|event| event["choices"][0]["text"].as_str().unwrap()).collect();
    assert_eq!(text, streamed);
    (text.to_owned(), plain["choices"][0]["finish_reason"].as_str().unwrap().to_owned())
}

#[tokio::test(flavor = "multi_thread")]
async fn answers_follow_schemas_expressions_choices_and_grammars() {
    let world = World::quick().await;
    let schema = json!({
        "type": "object",
        "properties": {
            "colour": { "enum": ["red", "blue"] },
            "sizes": { "type": "array", "items": { "enum": [1, 22, 333] }, "minItems": 2, "maxItems": 2 },
        },
        "required": ["colour", "sizes"],
        "additionalProperties": false,
    });
    let format = json!({ "type": "json_schema", "json_schema": { "name": "x", "schema": schema } });
    for fields in [json!({ "response_format": format }), json!({ "guided_json": schema })] {
        let (text, finish) = choice(&world, fields).await;
        let said: Value =
            serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text}"));
        assert!(["red", "blue"].contains(&said["colour"].as_str().unwrap()), "{said}");
        assert_eq!(said["sizes"].as_array().unwrap().len(), 2, "{said}");
        assert_eq!(finish, "stop");
    }
    let (text, finish) = choice(&world, json!({ "guided_regex": "[a-c]{4}-[0-9]" })).await;
    let is_letter = |byte: &u8| (b'a'..=b'c').contains(byte);
    assert!(text.len() == 6 && text.as_bytes()[..4].iter().all(is_letter), "{text}");
    assert_eq!(finish, "stop");
    let fields = json!({ "structured_outputs": { "choice": ["yes, always", "never"] } });
    assert!(["yes, always", "never"].contains(&&*choice(&world, fields).await.0));
    let fields = json!({ "guided_grammar": "start: \"<\" start \">\" | \"x\"", "max_tokens": 200 });
    let (text, _) = choice(&world, fields).await;
    let opened = text.bytes().take_while(|byte| *byte == b'<').count();
    assert_eq!(text, format!("{}x{}", "<".repeat(opened), ">".repeat(opened)));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_chat_answers_with_json() {
    let world = World::quick().await;
    let request = json!({
        "messages": [{ "role": "user", "content": "Tell me" }], "n": 3, "max_tokens": 90, "seed": 1,
        "response_format": { "type": "json_object" },
        "logit_bias": { "125": 4 },
    });
    let answer = post(world.address, "/v1/chat/completions", &request).await.json();
    for choice in answer["choices"].as_array().unwrap() {
        let text = choice["message"]["content"].as_str().unwrap();
        assert!(text.starts_with('{'), "{text}");
        match choice["finish_reason"].as_str().unwrap() {
            "stop" => assert!(serde_json::from_str::<Value>(text).unwrap().is_object(), "{text}"),
            finish => assert_eq!((finish, text.len()), ("length", 90), "{text}"),
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_answer_that_is_cut_says_so_and_one_that_is_complete_ends() {
    let world = World::quick().await;
    let cut = choice(&world, json!({ "guided_regex": "a{30}", "max_tokens": 9 })).await;
    assert_eq!(cut, ("a".repeat(9), "length".to_owned()));
    for fields in [json!({ "ignore_eos": true }), json!({ "min_tokens": 40 })] {
        let mut fields = fields;
        fields["guided_regex"] = "ab{9}".into();
        assert_eq!(choice(&world, fields).await, ("abbbbbbbbb".to_owned(), "stop".to_owned()));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_rule_that_makes_no_sense_is_refused_with_the_reason() {
    let world = World::quick().await;
    let format =
        json!({ "type": "json_schema", "json_schema": { "schema": { "type": "nonsense" } } });
    let wrong = [
        (json!({ "response_format": format }), "response_format"),
        (json!({ "guided_regex": "(a" }), "guided_regex"),
        (json!({ "guided_grammar": "start: nowhere" }), "guided_grammar"),
        (json!({ "guided_grammar": "(".repeat(50_000) }), "guided_grammar"),
        (json!({ "guided_regex": "a", "guided_choice": ["b"] }), "guided_choice"),
    ];
    for (fields, name) in wrong {
        let mut request = json!({ "prompt": "x" });
        for (name, value) in fields.as_object().unwrap() {
            request[name] = value.clone();
        }
        let response = post(world.address, "/v1/completions", &request).await;
        let error = &response.json()["error"];
        assert_eq!((response.status, &error["param"]), (400, &json!(name)), "{error}");
    }
    assert_eq!(world.figures().await.scheduler.submitted, 0);
}
