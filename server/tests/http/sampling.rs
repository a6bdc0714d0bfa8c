//! What changes how tokens are chosen.

use serde_json::{Value, json};

use crate::client::{complete, post};
use crate::world::World;

/// A greedy answer of some tokens, with some fields more.
async fn text(world: &World, fields: Value) -> String {
    let mut request = json!({ "prompt": "go on", "temperature": 0, "max_tokens": 24 });
    for (name, value) in fields.as_object().unwrap() {
        request[name] = value.clone();
    }
    let answer = complete(world.address, &request).await;
    request["stream"] = true.into();
    let events = post(world.address, "/v1/completions", &request).await.events();
    let pieces = events.iter().map(|event| event["choices"][0]["text"].as_str().unwrap());
    let streamed: String = pieces.collect();
    let text = answer["choices"][0]["text"].as_str().unwrap();
    assert_eq!(streamed, text, "streamed as plain");
    text.to_owned()
}

/// How often the most frequent byte comes.
fn most(text: &str) -> usize {
    (0..=255).map(|byte| text.bytes().filter(|it| *it == byte).count()).max().unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn few_candidates_are_as_good_as_greedy() {
    let world = World::quick().await;
    let greedy = text(&world, json!({})).await;
    let warm = json!({ "temperature": 2, "seed": 5 });
    assert_ne!(text(&world, warm.clone()).await, greedy);
    for (name, value) in [("top_k", json!(1)), ("min_p", json!(1)), ("top_p", json!(0))] {
        let mut fields = warm.clone();
        fields[name] = value;
        assert_eq!(text(&world, fields).await, greedy, "{name}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn penalties_and_bias_change_what_is_said() {
    let world = World::quick().await;
    let plain = text(&world, json!({ "max_tokens": 80 })).await;
    assert!(most(&plain) > 1, "{plain}");
    for penalty in ["presence_penalty", "frequency_penalty"] {
        let penalised = text(&world, json!({ "max_tokens": 80, penalty: 2 })).await;
        assert!(most(&penalised) < most(&plain), "{penalty}: {penalised} {plain}");
    }
    // Nothing that prompt or answer have already is as likely as anything else: logits are not negative.
    let never = json!({ "max_tokens": 80, "repetition_penalty": 100 });
    let never = text(&world, never).await;
    assert_eq!(most(&never), 1, "{never}");
    assert!(!"go on".chars().any(|it| never.contains(it)), "{never}");
    let first = u32::from(plain.as_bytes()[0]);
    let banned = text(&world, json!({ "logit_bias": { first.to_string(): -100 } })).await;
    assert!(!banned.contains(char::from(first as u8)), "{banned}");
    let forced = text(&world, json!({ "logit_bias": { "122": 100 } })).await;
    assert_eq!(forced, "z".repeat(24));
}

#[tokio::test(flavor = "multi_thread")]
async fn an_answer_ends_where_it_is_told_to_and_not_before() {
    let world = World::quick().await;
    let ask = async |fields: Value| {
        let mut request = json!({ "prompt": "stop!", "temperature": 0, "max_tokens": 8 });
        for (name, value) in fields.as_object().unwrap() {
            request[name] = value.clone();
        }
        let answer = complete(world.address, &request).await;
        let choice = &answer["choices"][0];
        let text = choice["text"].as_str().unwrap().to_owned();
        (text, choice["finish_reason"].as_str().unwrap().to_owned())
    };
    assert_eq!(ask(json!({})).await, (String::new(), "stop".to_owned()));
    let (longer, _) = ask(json!({ "min_tokens": 5 })).await;
    assert_eq!(longer.len(), 8, "the toy ends after an exclamation mark only");
    let (shown, _) = ask(json!({
        "include_stop_str_in_output": true, "skip_special_tokens": false
    }))
    .await;
    assert_eq!(shown, "<|end|>");

    let third = u32::from(longer.as_bytes()[2]);
    let at_third = json!({ "min_tokens": 1, "stop_token_ids": [third] });
    let up_to = longer.find(char::from(third as u8)).unwrap();
    assert_eq!(ask(at_third.clone()).await, (longer[..up_to].to_owned(), "stop".to_owned()));
    let mut kept = at_third;
    kept["include_stop_str_in_output"] = true.into();
    assert_eq!(ask(kept).await.0, longer[..=up_to]);
    let named = json!({ "ignore_eos": true, "stop_token_ids": [257] });
    assert_eq!(ask(named).await, (String::new(), "stop".to_owned()), "what is named counts");

    let string = &longer[1..3];
    let stop = json!({ "min_tokens": 1, "stop": string });
    let at = longer.find(string).unwrap();
    assert_eq!(ask(stop.clone()).await.0, longer[..at]);
    let mut kept = stop.clone();
    kept["include_stop_str_in_output"] = true.into();
    assert_eq!(ask(kept).await.0, longer[..at + 2]);
    let mut later = stop;
    later["min_tokens"] = 7.into();
    assert_eq!(ask(later).await, (longer, "length".to_owned()), "too early to end");
}

#[tokio::test(flavor = "multi_thread")]
async fn special_tokens_are_shown_to_those_who_want_them() {
    let world = World::quick().await;
    // The toy ends after an exclamation mark, and is not heard.
    let mut request = json!({ "prompt": "stop!", "ignore_eos": true, "max_tokens": 4 });
    let hidden = text(&world, request.clone()).await;
    assert_eq!(hidden.len(), 3, "{hidden}");
    request["skip_special_tokens"] = false.into();
    assert_eq!(text(&world, request).await, format!("<|end|>{hidden}"));
}

#[tokio::test(flavor = "multi_thread")]
async fn an_error_names_the_field_that_does_not_go_with_the_model() {
    let world = World::quick().await;
    let wrong = [
        (json!({ "min_tokens": 17 }), "min_tokens"),
        (json!({ "logit_bias": { "262": 1 } }), "logit_bias"),
        (json!({ "stop_token_ids": [262] }), "stop_token_ids"),
    ];
    for (fields, name) in wrong {
        let mut request = json!({ "prompt": "x" });
        request[name] = fields[name].clone();
        let response = post(world.address, "/v1/completions", &request).await;
        assert_eq!((response.status, &response.json()["error"]["param"]), (400, &json!(name)));
    }
    assert_eq!(world.figures().await.scheduler.submitted, 0);
}
