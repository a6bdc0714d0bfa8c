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

#[tokio::test(flavor = "multi_thread")]
async fn a_forced_call_has_arguments_that_follow_its_schema() {
    let world = World::quick().await;
    let tool = |name: &str, field: &str| {
        let schema = json!({
            "type": "object", "properties": { field: { "$ref": "#/$defs/size" } }, "required": [field],
            "additionalProperties": false, "$defs": { "size": { "enum": [1, 22, 333] } },
        });
        json!({ "type": "function", "function": { "name": name, "parameters": schema, "strict": true } })
    };
    let named = json!({ "type": "function", "function": { "name": "paint" } });
    for (choice, names) in [(json!("required"), &["paint", "build"][..]), (named, &["paint"])] {
        let request = json!({
            "messages": [{ "role": "user", "content": "Do it" }], "tools": [tool("paint", "width"), tool("build", "height")],
            "tool_choice": choice, "parallel_tool_calls": false, "max_tokens": 200, "seed": 5,
            // Blanks between the parts are allowed, and the toy would write many.
            "logit_bias": { "32": -100, "10": -100, "9": -100, "13": -100 },
        });
        let answer = post(world.address, "/v1/chat/completions", &request).await;
        assert_eq!(answer.status, 200, "{answer:?}");
        let answer = answer.json();
        let said = &answer["choices"][0];
        assert_eq!(said["finish_reason"], "tool_calls", "{answer}");
        let [call] = &said["message"]["tool_calls"].as_array().unwrap()[..] else {
            panic!("{answer}")
        };
        assert!(names.contains(&call["function"]["name"].as_str().unwrap()), "{call}");
        let arguments: Value =
            serde_json::from_str(call["function"]["arguments"].as_str().unwrap()).unwrap();
        let field = if call["function"]["name"] == "paint" { "width" } else { "height" };
        assert!([1, 22, 333].contains(&arguments[field].as_u64().unwrap()), "{arguments}");
        let mut streaming = request.clone();
        streaming["stream"] = true.into();
        let chunks = post(world.address, "/v1/chat/completions", &streaming).await.events();
        let mut calls =
            chunks.iter().map(|chunk| &chunk["choices"][0]["delta"]["tool_calls"][0]["function"]);
        assert!(calls.any(|function| *function == call["function"]), "{chunks:?}");
        let mut cut = request;
        cut["max_tokens"] = 3.into();
        let answer = post(world.address, "/v1/chat/completions", &cut).await.json();
        let said = &answer["choices"][0];
        assert_eq!(
            (&said["finish_reason"], &said["message"]["tool_calls"]),
            (&json!("length"), &Value::Null)
        );
        assert!(!said["message"]["content"].as_str().unwrap().is_empty(), "{answer}");
    }
    let both = json!({
        "messages": [{ "role": "user", "content": "x" }], "tools": [tool("paint", "width")],
        "tool_choice": "required", "response_format": { "type": "json_object" },
    });
    let refused = post(world.address, "/v1/chat/completions", &both).await;
    assert_eq!(
        (refused.status, &refused.json()["error"]["param"]),
        (400, &json!("response_format"))
    );
}
