//! Requests of the Responses API, read as chat requests.

use serde_json::{Map, Value, json};

use crate::config::Limits;
use crate::error::ApiError;
use crate::fields::Fields;
use crate::parameters::{Kind, Parameters};
use crate::refused::refuse_the_rest;

/// Fields that mean the same in a chat request.
const SHARED: &[&str] = &[
    "cache_salt",
    "chat_template_kwargs",
    "frequency_penalty",
    "ignore_eos",
    "include_stop_str_in_output",
    "logit_bias",
    "min_p",
    "min_tokens",
    "model",
    "presence_penalty",
    "priority",
    "repetition_penalty",
    "seed",
    "skip_special_tokens",
    "stop",
    "stop_token_ids",
    "stream",
    "temperature",
    "top_k",
    "top_p",
    "truncate_prompt_tokens",
];

/// Fields of chat requests that have another name here, or no meaning.
const OF_CHATS: &[&str] = &[
    "logprobs",
    "max_completion_tokens",
    "max_tokens",
    "messages",
    "n",
    "response_format",
    "tool_choice",
];

/// Fields that change no output here.
const IGNORED: &[&str] = &[
    "max_tool_calls",
    "parallel_tool_calls",
    "safety_identifier",
    "service_tier",
    "stream_options",
];

const ROLES: [&str; 4] = ["system", "developer", "user", "assistant"];

/// The fields of a request that its response repeats.
#[derive(Clone, Debug)]
pub(crate) struct Repeated(pub(super) Map<String, Value>);

/// Reads a request as a chat request.
///
/// # Errors
/// The first field that is wrong, or that asks for something that this server cannot do.
pub(crate) fn parse(json: &[u8], limits: &Limits) -> Result<(Parameters, Repeated), ApiError> {
    let mut fields = Fields::parse(json)?;
    refuse_state(&mut fields)?;
    refuse_tools(&mut fields)?;
    for name in OF_CHATS {
        fields.refuse_unless(name, |value| {
            *name == "tool_choice" && (*value == "auto" || *value == "none")
        })?;
    }
    let mut repeated = Map::new();
    let mut chat = Map::new();
    let instructions = fields.text("instructions")?;
    let mut messages = Vec::new();
    if let Some(instructions) = &instructions {
        messages.push(json!({ "role": "system", "content": instructions }));
    }
    messages.extend(input(fields.take("input"))?);
    chat.insert("messages".to_owned(), messages.into());
    let tokens_max = fields.integer("max_output_tokens", 1..=i64::from(u32::MAX))?;
    chat.insert("max_tokens".to_owned(), tokens_max.into());
    let format = text_format(&mut fields)?;
    if let Some(format) = &format {
        chat.insert("response_format".to_owned(), chat_format(format));
    }
    let effort = reasoning_effort(&mut fields)?;
    chat.insert("reasoning_effort".to_owned(), effort.clone());
    for name in SHARED {
        if let Some(value) = fields.take(name) {
            chat.insert((*name).to_owned(), value);
        }
    }
    repeated.insert("instructions".to_owned(), instructions.into());
    repeated.insert("max_output_tokens".to_owned(), tokens_max.into());
    repeated.insert("metadata".to_owned(), fields.take("metadata").unwrap_or_else(|| json!({})));
    repeated.insert("reasoning".to_owned(), json!({ "effort": effort, "summary": null }));
    for name in ["temperature", "top_p"] {
        let value = chat.get(name).cloned().unwrap_or_else(|| 1.0.into());
        repeated.insert(name.to_owned(), value);
    }
    let format = format.unwrap_or_else(|| json!({ "type": "text" }));
    repeated.insert("text".to_owned(), json!({ "format": format }));
    repeated.insert("user".to_owned(), fields.take("user").into());
    for name in IGNORED {
        fields.take(name);
    }
    refuse_the_rest(fields, 1)?;
    let mut parameters = Parameters::read(Kind::Chat, Fields::from(chat), limits)?;
    parameters.structure = parameters.structure.map(|structure| structure.named("text"));
    Ok((parameters, Repeated(repeated)))
}

/// Refuses what needs responses that are kept: this server keeps none.
fn refuse_state(fields: &mut Fields) -> Result<(), ApiError> {
    let refused = |name: &str, advice: &str| {
        ApiError::field(
            name,
            format!("`{name}` is not supported, because this server keeps no responses: {advice}"),
        )
    };
    if fields.flag("store")? {
        return Err(refused("store", "set it to false, or leave it out"));
    }
    if fields.flag("background")? {
        return Err(refused("background", "set it to false, or leave it out"));
    }
    for name in ["previous_response_id", "conversation"] {
        if fields.take(name).is_some() {
            return Err(refused(name, "send the earlier messages in `input`"));
        }
    }
    if fields.take("prompt").is_some() {
        return Err(refused("prompt", "send the text in `input` and `instructions`"));
    }
    Ok(())
}

fn refuse_tools(fields: &mut Fields) -> Result<(), ApiError> {
    let is_empty = |value: &Value| value.as_array().is_some_and(Vec::is_empty);
    if fields.take("tools").is_some_and(|tools| !is_empty(&tools)) {
        let message = "`tools` is not supported in /v1/responses: use /v1/chat/completions";
        return Err(ApiError::field("tools", message));
    }
    fields.refuse_unless("include", is_empty)?;
    fields.refuse_unless("truncation", |value| *value == "disabled")
}

/// Reads the input as the messages of a chat.
fn input(value: Option<Value>) -> Result<Vec<Value>, ApiError> {
    match value {
        Some(Value::String(text)) => Ok(vec![json!({ "role": "user", "content": text })]),
        Some(Value::Array(items)) if !items.is_empty() => {
            let (mut messages, mut reasoning) = (Vec::new(), None);
            for (place, item) in items.into_iter().enumerate() {
                match item["type"].as_str() {
                    Some("reasoning") => reasoning = Some(reasoning_text(place, &item)?),
                    Some("message") | None => {
                        messages.push(message(place, &item, reasoning.take())?);
                    }
                    Some(kind) => {
                        let message = format!(
                            "items of type {kind:?} are not supported in `input`: use messages with text"
                        );
                        return Err(ApiError::field(format!("input[{place}].type"), message));
                    }
                }
            }
            Ok(messages)
        }
        Some(_) | None => {
            let message = "`input` must be a string or a list of messages that is not empty";
            Err(ApiError::field("input", message))
        }
    }
}

/// Reads one message. `reasoning` is that of an item in front of it.
fn message(place: usize, item: &Value, reasoning: Option<String>) -> Result<Value, ApiError> {
    let role = item["role"].as_str().filter(|role| ROLES.contains(role)).ok_or_else(|| {
        let message = format!("a message must have a `role`: use one of {}", ROLES.join(", "));
        ApiError::field(format!("input[{place}].role"), message)
    })?;
    let wrong = |message: String| Err(ApiError::field(format!("input[{place}].content"), message));
    let content = match &item["content"] {
        Value::String(text) => text.clone(),
        Value::Array(parts) => {
            let mut content = String::new();
            for part in parts {
                match (part["type"].as_str(), part["text"].as_str()) {
                    (Some("input_text" | "output_text" | "text"), Some(text)) => {
                        content.push_str(text)
                    }
                    (Some(kind), _) => {
                        return wrong(format!(
                            "this model takes text only, and a part has the type {kind:?}"
                        ));
                    }
                    (None, _) => return wrong("a part of `content` must have a `type`".to_owned()),
                }
            }
            content
        }
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::Object(_) => {
            return wrong("`content` must be a string or a list of text parts".to_owned());
        }
    };
    let mut message = json!({ "role": role, "content": content });
    if let Some(reasoning) = reasoning.filter(|_| role == "assistant") {
        message["reasoning_content"] = reasoning.into();
    }
    Ok(message)
}

/// Reads the reasoning that a client sends back.
fn reasoning_text(place: usize, item: &Value) -> Result<String, ApiError> {
    if !item["encrypted_content"].is_null() {
        let message = "this server cannot read `encrypted_content`: leave the reasoning item out";
        return Err(ApiError::field(format!("input[{place}].encrypted_content"), message));
    }
    let parts = item["content"].as_array().into_iter().flatten();
    Ok(parts.filter_map(|part| part["text"].as_str()).collect())
}

/// Takes the format of the text, if one is given that is not plain text.
fn text_format(fields: &mut Fields) -> Result<Option<Value>, ApiError> {
    let wrong = |message: &str| Err(ApiError::field("text", message.to_owned()));
    match fields.take("text") {
        None => Ok(None),
        Some(Value::Object(mut text)) => {
            let format = text.remove("format").filter(|format| !format.is_null());
            // As in chats, it changes nothing here.
            text.remove("verbosity");
            if let Some((name, _)) = text.into_iter().next() {
                return Err(ApiError::unsupported(&format!("text.{name}")));
            }
            let Some(format) = format else { return Ok(None) };
            match format["type"].as_str() {
                Some("text") => Ok(None),
                Some("json_object" | "json_schema") => Ok(Some(format)),
                Some(_) | None => wrong(
                    "`text.format` must have the type \"text\", \"json_object\" or \"json_schema\"",
                ),
            }
        }
        Some(_) => wrong("`text` must be an object"),
    }
}

/// The format as a chat request has it: with the schema one level deeper.
fn chat_format(format: &Value) -> Value {
    match format["type"] == "json_schema" {
        true => json!({ "type": "json_schema", "json_schema": format }),
        false => format.clone(),
    }
}

fn reasoning_effort(fields: &mut Fields) -> Result<Value, ApiError> {
    match fields.take("reasoning") {
        None => Ok(Value::Null),
        Some(Value::Object(mut reasoning)) => {
            let effort = reasoning.remove("effort").unwrap_or_default();
            match effort {
                Value::Null | Value::String(_) => Ok(effort),
                Value::Bool(_) | Value::Number(_) | Value::Array(_) | Value::Object(_) => {
                    Err(ApiError::field("reasoning", "`reasoning.effort` must be a string"))
                }
            }
        }
        Some(_) => Err(ApiError::field("reasoning", "`reasoning` must be an object")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::parameters::Input;

    fn read(request: &Value) -> Result<Parameters, ApiError> {
        parse(request.to_string().as_bytes(), &Limits::default()).map(|(parameters, _)| parameters)
    }

    fn messages(request: &Value) -> Vec<(String, String)> {
        match read(request).unwrap().input {
            Input::Chat(chat) => {
                let messages = chat.conversation.messages.into_iter();
                messages.map(|message| (message.role, message.content)).collect()
            }
            Input::Prompts(_) => panic!("a response is a chat"),
        }
    }

    fn is(expected: &[(&str, &str)]) -> Vec<(String, String)> {
        expected.iter().map(|(role, text)| ((*role).to_owned(), (*text).to_owned())).collect()
    }

    #[test]
    fn input_is_a_text_or_messages() {
        assert_eq!(messages(&json!({ "input": "Hi" })), is(&[("user", "Hi")]));
        let request = json!({
            "instructions": "Be brief.",
            "input": [
                { "role": "user", "content": "Hi" },
                { "type": "reasoning", "id": "rs_1", "summary": [],
                    "content": [{ "type": "reasoning_text", "text": "Greet." }] },
                { "type": "message", "role": "assistant",
                    "content": [{ "type": "output_text", "text": "Hel" }, { "type": "output_text", "text": "lo" }] },
                { "role": "user", "content": [{ "type": "input_text", "text": "More" }] },
            ],
        });
        let expected =
            [("system", "Be brief."), ("user", "Hi"), ("assistant", "Hello"), ("user", "More")];
        assert_eq!(messages(&request), is(&expected));
    }

    #[test]
    fn what_this_server_cannot_do_is_refused_by_name() {
        let with = |name: &str, value: Value| {
            let mut request = json!({ "input": "x" });
            request[name] = value;
            request
        };
        for (name, value) in [
            ("store", json!(true)),
            ("previous_response_id", json!("resp_1")),
            ("conversation", json!("conv_1")),
            ("background", json!(true)),
            ("prompt", json!({ "id": "x" })),
            ("tools", json!([{ "type": "web_search" }])),
            ("include", json!(["reasoning.encrypted_content"])),
            ("truncation", json!("auto")),
            ("top_logprobs", json!(3)),
            ("messages", json!([])),
            ("n", json!(2)),
            ("max_tokens", json!(3)),
            ("max_output_tokens", json!(0)),
            ("temperature", json!(3)),
            ("text", json!({ "format": { "type": "xml" } })),
            ("reasoning", json!("high")),
            ("tempratur", json!(1)),
        ] {
            let error = read(&with(name, value)).unwrap_err();
            assert_eq!(error.param(), Some(name));
        }
        for (input, param) in [
            (json!([]), "input"),
            (json!(7), "input"),
            (json!([{ "role": "tool", "content": "x" }]), "input[0].role"),
            (json!([{ "type": "function_call" }]), "input[0].type"),
            (
                json!([{ "role": "user", "content": [{ "type": "input_image" }] }]),
                "input[0].content",
            ),
            (
                json!([{ "type": "reasoning", "encrypted_content": "x" }]),
                "input[0].encrypted_content",
            ),
        ] {
            assert_eq!(read(&json!({ "input": input })).unwrap_err().param(), Some(param));
        }
        let harmless = json!({
            "input": "x", "store": false, "tools": [], "tool_choice": "auto", "truncation": "disabled",
            "parallel_tool_calls": true, "metadata": {}, "text": { "format": { "type": "text" } },
            "previous_response_id": null, "service_tier": "auto", "include": [], "temperature": 0,
        });
        assert!(read(&harmless).is_ok());
    }

    #[test]
    fn a_schema_is_a_structure_that_errors_name_by_its_own_field() {
        let schema = json!({ "type": "json_schema", "name": "x", "schema": { "type": "integer" } });
        let parameters = read(&json!({ "input": "x", "text": { "format": schema } })).unwrap();
        assert!(
            format!("{:?}", parameters.structure).contains("text"),
            "{:?}",
            parameters.structure
        );
    }
}
