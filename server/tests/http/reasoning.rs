//! Reasoning, separated from the content of an answer.

use serde_json::{Value, json};

use crate::client::post;
use crate::tools::{CHAT, ask, world};
use crate::world::World;

/// A template of a model that opens its reasoning itself, and of one whose prompt opens it.
const PLAIN: &str = "{# <think> #}{%- for message in messages %}{{- message.content }}{%- endfor %}\
    {%- if tools %}{{- '<tool_call>' }}{%- endif %}{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}";
const OPENED: &str = "{%- for message in messages %}{{- message.content }}{%- endfor %}\
    {%- if add_generation_prompt %}{{- '<|assistant|><think>\\n' }}{%- endif %}";
const UNMARKED: &str = "{%- for message in messages %}{{- message.content }}{%- endfor %}\
    {%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}";
const ANSWER: &str = "<think>\nOne and one.\n</think>\n\nTwo.";

fn question() -> Value {
    json!({ "messages": [{ "role": "user", "content": "Sum?" }] })
}

/// The reasoning and the content of a stream, joined, and all chunks.
async fn streamed(world: &World, mut request: Value) -> (String, String, Vec<Value>) {
    request["stream"] = true.into();
    let chunks = post(world.address, CHAT, &request).await.events();
    let (mut reasoning, mut content) = (String::new(), String::new());
    for chunk in &chunks {
        let delta = &chunk["choices"][0]["delta"];
        assert_eq!(delta["reasoning"], delta["reasoning_content"]);
        reasoning.push_str(delta["reasoning_content"].as_str().unwrap_or_default());
        content.push_str(delta["content"].as_str().unwrap_or_default());
    }
    (reasoning, content, chunks)
}

#[tokio::test(flavor = "multi_thread")]
async fn reasoning_has_a_field_of_its_own_plain_and_streamed() {
    for template in [PLAIN, OPENED] {
        let world = world(template, None, ANSWER).await;
        let answer = ask(&world, &question()).await;
        let message = &answer["choices"][0]["message"];
        assert_eq!(message["content"], "Two.", "{answer}");
        assert_eq!(message["reasoning_content"], "One and one.");
        assert_eq!(message["reasoning"], "One and one.");
        assert_eq!(answer["choices"][0]["finish_reason"], "stop");
        let tokens = answer["usage"]["completion_tokens_details"]["reasoning_tokens"].as_u64();
        let until_closed = ANSWER.find("\n\nTwo").unwrap() as u64;
        let opening = if template == OPENED { "<think>\n".len() as u64 } else { 0 };
        assert_eq!(tokens, Some(until_closed - opening), "a letter is a token");
        let (reasoning, content, _) = streamed(&world, question()).await;
        assert_eq!((&*reasoning, &*content), ("One and one.", "Two."));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_call_after_reasoning_is_a_call() {
    let said = "<think>It rains.</think>\n<tool_call>{\"name\": \"weather\", \"arguments\": {}}</tool_call>";
    let world = world(PLAIN, None, said).await;
    let mut request = question();
    request["tools"] = json!([{ "type": "function", "function": { "name": "weather" } }]);
    let answer = ask(&world, &request).await;
    let choice = &answer["choices"][0];
    assert_eq!(choice["message"]["reasoning_content"], "It rains.", "{answer}");
    assert_eq!(choice["message"]["tool_calls"][0]["function"]["name"], "weather");
    assert_eq!(choice["finish_reason"], "tool_calls");
}

#[tokio::test(flavor = "multi_thread")]
async fn log_probabilities_cover_reasoning_and_content() {
    let world = world(PLAIN, None, ANSWER).await;
    let mut request = question();
    request["logprobs"] = true.into();
    let answer = ask(&world, &request).await;
    let told = |content: &Value| -> String {
        let tokens = content.as_array().into_iter().flatten();
        tokens.map(|token| token["token"].as_str().unwrap()).collect()
    };
    assert_eq!(told(&answer["choices"][0]["logprobs"]["content"]), ANSWER);
    let (_, _, chunks) = streamed(&world, request).await;
    let all: String =
        chunks.iter().map(|chunk| told(&chunk["choices"][0]["logprobs"]["content"])).collect();
    assert_eq!(all, ANSWER);
}

#[tokio::test(flavor = "multi_thread")]
async fn without_marks_in_its_template_a_model_says_what_it_says() {
    let world = world(UNMARKED, None, ANSWER).await;
    let answer = ask(&world, &question()).await;
    assert_eq!(answer["choices"][0]["message"]["content"], ANSWER);
    assert_eq!(answer["choices"][0]["message"]["reasoning"], Value::Null);
    assert_eq!(answer["usage"]["completion_tokens_details"], Value::Null);
}
