//! Every field that OpenAI's and vLLM's servers know is honoured, refused by name, or harmless.

use serde_json::{Value, json};

use crate::client::post;
use crate::world::World;

/// Fields that are honoured, each with a value that none of them can mean.
const HONOURED: &[(&str, &str)] = &[
    ("model", "7"),
    ("prompt", "{}"),
    ("messages", "7"),
    ("max_tokens", "-1"),
    ("max_completion_tokens", "-1"),
    ("n", "0"),
    ("stream", "7"),
    ("stream_options", "7"),
    ("stop", "7"),
    ("seed", "\"x\""),
    ("temperature", "-1"),
    ("top_p", "2"),
    ("top_k", "-2"),
    ("min_p", "2"),
    ("presence_penalty", "3"),
    ("frequency_penalty", "3"),
    ("repetition_penalty", "0"),
    ("logit_bias", "7"),
    ("min_tokens", "-1"),
    ("stop_token_ids", "7"),
    ("include_stop_str_in_output", "7"),
    ("ignore_eos", "7"),
    ("skip_special_tokens", "7"),
    ("logprobs", "\"x\""),
    ("return_tokens_as_token_ids", "7"),
    ("response_format", "7"),
    ("structured_outputs", "7"),
    ("guided_json", "7"),
    ("guided_json_object", "7"),
    ("guided_regex", "7"),
    ("guided_choice", "7"),
    ("guided_grammar", "7"),
    ("priority", "\"x\""),
    ("cache_salt", "7"),
    ("add_special_tokens", "7"),
    ("truncate_prompt_tokens", "\"x\""),
];

/// Fields that one of the two kinds of request honours and the other refuses, each with a value that
/// neither can mean.
const HONOURED_BY_ONE: &[(&str, &str)] = &[
    ("echo", "7"),
    ("top_logprobs", "21"),
    ("tools", "7"),
    ("tool_choice", "7"),
    ("parallel_tool_calls", "7"),
    ("chat_template_kwargs", "7"),
    ("continue_final_message", "7"),
    ("add_generation_prompt", "7"),
    ("reasoning_effort", "7"),
];

/// Fields that change nothing that this server says.
const HARMLESS: &[(&str, &str)] = &[
    ("user", "names whom an answer is for"),
    ("safety_identifier", "names whom an answer is for"),
    ("metadata", "is kept with what is stored, and nothing is"),
    ("store", "asks for storing, which no answer shows"),
    ("service_tier", "there is one"),
    ("prompt_cache_key", "a hint where to find a prefix, and every prefix is looked for"),
    ("prompt_cache_retention", "a hint how long to keep a prefix"),
    ("prediction", "a hint that may save time"),
    ("request_id", "names a request"),
    ("include_reasoning", "there is no reasoning apart from the answer"),
    ("spaces_between_special_tokens", "the tokenizers of a tokenizer.json put none"),
    ("verbosity", "is ignored with a warning: models that know it are not served"),
];

/// Fields that would change an answer.
const REFUSED: &[&str] = &[
    "allowed_token_ids",
    "audio",
    "bad_words",
    "best_of",
    "bootstrap_host",
    "bootstrap_port",
    "bootstrap_room",
    "chat_template",
    "documents",
    "early_stopping",
    "function_call",
    "functions",
    "guided_decoding_backend",
    "guided_whitespace_pattern",
    "kv_transfer_params",
    "length_penalty",
    "logits_processors",
    "media_io_kwargs",
    "mm_processor_kwargs",
    "modalities",
    "prompt_embeds",
    "prompt_logprobs",
    "repetition_detection",
    "return_token_ids",
    "structural_tag",
    "suffix",
    "thinking_token_budget",
    "use_beam_search",
    "vllm_xargs",
    "web_search_options",
];

fn request(path: &str, name: &str, value: Value) -> Value {
    let mut request = match path {
        "/v1/completions" => json!({ "prompt": "x" }),
        _ => json!({ "messages": [{ "role": "user", "content": "x" }] }),
    };
    request["max_tokens"] = 1.into();
    request[name] = value;
    request
}

#[tokio::test(flavor = "multi_thread")]
async fn every_known_field_is_honoured_refused_or_harmless() {
    let world = World::quick().await;
    let paths = ["/v1/completions", "/v1/chat/completions"];
    let refused = async |path: &str, name: &str, value: Value| {
        let response = post(world.address, path, &request(path, name, value)).await;
        let error = &response.json()["error"];
        let param = error["param"].as_str().unwrap_or_default().to_owned();
        assert_eq!((response.status, &*param), (400, name), "{path} {error}");
    };
    for path in paths {
        for (name, value) in HONOURED {
            let of_other = match path {
                "/v1/completions" => "messages",
                _ => "prompt",
            };
            if *name != of_other {
                refused(path, name, serde_json::from_str(value).unwrap()).await;
            }
        }
        for name in REFUSED {
            refused(path, name, json!(7)).await;
        }
        for (name, reason) in HARMLESS {
            let response = post(world.address, path, &request(path, name, json!("x"))).await;
            assert_eq!(response.status, 200, "{name}: it {reason}");
        }
        for (name, value) in HONOURED_BY_ONE {
            refused(path, name, serde_json::from_str(value).unwrap()).await;
        }
    }
    refused("/v1/completions", "top_logprobs", json!(3)).await;
    refused("/v1/chat/completions", "echo", json!(true)).await;
}
