//! Log-probabilities and echoes: the same to the bit whether KV was computed or found.

use serde_json::{Value, json};

use crate::client::{complete, post};
use crate::world::World;

/// What the chunks of a stream say of one answer, put together: its text and log-probabilities.
fn joined(events: &[Value], text_of: fn(&Value) -> Option<&str>) -> (String, Vec<Value>) {
    let (mut text, mut logprobs) = (String::new(), Vec::new());
    for choice in events.iter().flat_map(|event| event["choices"].as_array().unwrap()) {
        text.push_str(text_of(choice).unwrap_or_default());
        if !choice["logprobs"].is_null() {
            logprobs.push(choice["logprobs"].clone());
        }
    }
    (text, logprobs)
}

fn list(value: &Value, name: &str) -> Vec<Value> {
    value[name].as_array().unwrap().clone()
}

#[tokio::test(flavor = "multi_thread")]
async fn computed_cached_and_echoed_agree_to_the_bit() {
    let world = World::quick().await;
    let prompt = "the same as ever ".repeat(12);
    let request = json!({ "prompt": prompt, "temperature": 0, "max_tokens": 9, "logprobs": 3 });
    let computed = complete(world.address, &request).await;
    let cached = complete(world.address, &request).await;
    let cached_tokens = |answer: &Value| {
        answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap()
    };
    assert_eq!((cached_tokens(&computed), cached_tokens(&cached)), (0, 192));
    assert_eq!(computed["choices"], cached["choices"]);

    let mut echo = request.clone();
    echo["echo"] = true.into();
    let quiet = "everything is where it stays";
    world.wait_for(quiet, |figures| figures.scheduler.draining == 0).await;
    let before = world.figures().await.scheduler.cache.device;
    let echoed = complete(world.address, &echo).await;
    assert_eq!(cached_tokens(&echoed), 0, "cached positions have no logits");
    let (text, answer) =
        (echoed["choices"][0]["text"].as_str().unwrap(), &computed["choices"][0]["text"]);
    assert_eq!(text, format!("{prompt}{}", answer.as_str().unwrap()));
    let (short, long) = (&computed["choices"][0]["logprobs"], &echoed["choices"][0]["logprobs"]);
    for name in ["tokens", "token_logprobs", "top_logprobs"] {
        let (short, long) = (list(short, name), list(long, name));
        assert_eq!(long.len(), 1 + prompt.len() + 9);
        assert_eq!(short, long[long.len() - 9..], "{name}");
    }
    world.wait_for(quiet, |figures| figures.scheduler.draining == 0).await;
    let after = world.figures().await.scheduler.cache.device;
    assert_eq!(
        (before.free_pages, before.evictable_pages),
        (after.free_pages, after.evictable_pages),
        "what was there already is not there twice"
    );

    // What an echo computes serves others, and its prompt's scores do not depend on what was there.
    let mut fresh = echo.clone();
    fresh["cache_salt"] = "fresh".into();
    let first = complete(world.address, &fresh).await;
    assert_eq!(first["choices"], echoed["choices"]);
    fresh["echo"] = false.into();
    assert_eq!(cached_tokens(&complete(world.address, &fresh).await), 192);

    // As evaluations ask: nothing new at all.
    let mut nothing = echo;
    nothing["max_tokens"] = 0.into();
    let nothing = complete(world.address, &nothing).await;
    assert_eq!(nothing["choices"][0]["text"], json!(prompt));
    assert_eq!(nothing["choices"][0]["finish_reason"], "length");
    assert_eq!(nothing["usage"]["completion_tokens"], 0);
    let scores = list(&nothing["choices"][0]["logprobs"], "token_logprobs");
    assert_eq!(scores, list(long, "token_logprobs")[..1 + prompt.len()]);
    assert!(scores[0].is_null() && scores[1..].iter().all(Value::is_number));
}

#[tokio::test(flavor = "multi_thread")]
async fn log_probabilities_are_of_the_model_alone() {
    let world = World::quick().await;
    let mut request = json!({ "prompt": "x", "max_tokens": 1, "temperature": 0, "logprobs": 20 });
    let plain = complete(world.address, &request).await;
    let top = plain["choices"][0]["logprobs"]["top_logprobs"][0].clone();
    let sum: f64 = top.as_object().unwrap().values().map(|it| it.as_f64().unwrap().exp()).sum();
    assert!(top.as_object().unwrap().len() == 20 && sum > 0.2 && sum < 1.0, "{sum} of {top}");
    let chosen = plain["choices"][0]["logprobs"]["token_logprobs"][0].as_f64().unwrap();
    let highest = top.as_object().unwrap().values().map(|it| it.as_f64().unwrap());
    assert_eq!(highest.fold(f64::NEG_INFINITY, f64::max), chosen, "greedy takes the likeliest");
    // Neither temperature nor bias is seen in them; what is chosen is.
    request["temperature"] = 2.into();
    request["logit_bias"] = json!({ "122": 100 });
    let biased = complete(world.address, &request).await;
    let logprobs = &biased["choices"][0]["logprobs"];
    assert_eq!(logprobs["tokens"], json!(["z"]));
    assert_ne!(plain["choices"][0]["logprobs"]["tokens"], json!(["z"]), "or it shows nothing");
    let mut with_chosen = top.as_object().unwrap().clone();
    with_chosen.insert("z".to_owned(), logprobs["token_logprobs"][0].clone());
    assert_eq!(logprobs["top_logprobs"][0], Value::Object(with_chosen));
}

#[tokio::test(flavor = "multi_thread")]
async fn streams_tell_the_same_with_the_text_it_belongs_to() {
    let world = World::quick().await;
    let mut request = json!({
        "prompt": "Once", "temperature": 0, "max_tokens": 30, "logprobs": 2, "echo": true
    });
    for stop in [Value::Null, "stop".into()] {
        request["stream"] = false.into();
        if !stop.is_null() {
            let text = complete(world.address, &request).await;
            let text = text["choices"][0]["text"].as_str().unwrap().to_owned();
            request["stop"] = text[14..17].into();
        }
        let plain = complete(world.address, &request).await;
        request["stream"] = true.into();
        let events = post(world.address, "/v1/completions", &request).await.events();
        let (text, logprobs) = joined(&events, |choice| choice["text"].as_str());
        assert_eq!(plain["choices"][0]["text"], json!(text));
        for name in ["tokens", "token_logprobs", "top_logprobs", "text_offset"] {
            let streamed: Vec<_> = logprobs.iter().flat_map(|it| list(it, name)).collect();
            assert_eq!(list(&plain["choices"][0]["logprobs"], name), streamed, "{name}");
        }
        let logprobs = &plain["choices"][0]["logprobs"];
        let offsets = list(logprobs, "text_offset");
        for (token, offset) in list(logprobs, "tokens").iter().zip(offsets).skip(1) {
            let (token, offset) = (token.as_str().unwrap(), offset.as_u64().unwrap() as usize);
            assert!(text[offset..].starts_with(token), "{token} at {offset} of {text}");
        }
        assert_eq!(list(logprobs, "tokens").len(), 1 + text.len(), "no more than the text has");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn chats_have_a_shape_of_their_own() {
    let world = World::quick().await;
    let mut request = json!({
        "messages": [{ "role": "user", "content": "Tell me" }], "temperature": 0, "max_tokens": 12,
        "logprobs": true, "top_logprobs": 2,
    });
    let plain = post(world.address, "/v1/chat/completions", &request).await.json();
    let choice = &plain["choices"][0];
    let content = list(&choice["logprobs"], "content");
    let text: String = content.iter().map(|it| it["token"].as_str().unwrap()).collect();
    assert_eq!(choice["message"]["content"], json!(text));
    for entry in &content {
        assert_eq!(entry["top_logprobs"].as_array().unwrap().len(), 2);
        assert_eq!(entry["top_logprobs"][0]["logprob"], entry["logprob"], "greedy");
        assert_eq!(entry["bytes"], json!(entry["token"].as_str().unwrap().as_bytes()));
    }
    request["stream"] = true.into();
    let events = post(world.address, "/v1/chat/completions", &request).await.events();
    let (streamed, logprobs) = joined(&events, |choice| choice["delta"]["content"].as_str());
    assert_eq!(streamed, text);
    let streamed: Vec<_> = logprobs.iter().flat_map(|it| list(it, "content")).collect();
    assert_eq!(streamed, content);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_echo_without_scores_takes_what_is_cached() {
    let world = World::quick().await;
    let prompt = "again and again ".repeat(5);
    let request = json!({ "prompt": [prompt, "other"], "echo": true, "max_tokens": 2, "n": 2 });
    let answer = complete(world.address, &request).await;
    for (place, choice) in answer["choices"].as_array().unwrap().iter().enumerate() {
        let expected = if place < 2 { &*prompt } else { "other" };
        assert!(choice["text"].as_str().unwrap().starts_with(expected));
        assert!(choice["logprobs"].is_null());
    }
    let echo_only = json!({ "prompt": prompt, "echo": true, "max_tokens": 0 });
    let again = complete(world.address, &echo_only).await;
    assert_eq!(again["usage"]["prompt_tokens_details"]["cached_tokens"], 80);
    assert_eq!(again["choices"][0]["text"], json!(prompt));
}
