//! Conversations, read from the JSON of chat requests and checked.

use serde::Deserialize;
use serde::de::{Deserializer, Error};
use serde_json::{Map, Value};
use terrace_model::{Conversation, FunctionCall, Message, PromptEnd, ToolCall, ToolKind};
use terrace_scheduler::Token;

use crate::error::ApiError;
use crate::fields::{Fields, typed};
use crate::served_model::ServedModel;
use crate::structured::Structure;
use crate::tools::{FunctionKind, Offer, Tools};

/// A conversation, and what the model may call to answer it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Chat {
    pub(crate) conversation: Conversation,
    pub(crate) offer: Option<Offer>,
    /// The constraint by which the answer is a call, if it has to be one.
    pub(crate) forced_calls: Option<Structure>,
}

/// Fields that only conversations have.
const CHAT_FIELDS: [&str; 8] = [
    "messages",
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "chat_template_kwargs",
    "add_generation_prompt",
    "continue_final_message",
    "reasoning_effort",
];

/// Roles that messages may have.
const ROLES: [&str; 6] = ["system", "developer", "user", "assistant", "tool", "function"];

impl Chat {
    /// # Errors
    /// The first field that is wrong.
    pub(crate) fn parse(fields: &mut Fields) -> Result<Self, ApiError> {
        refuse_other_templates(fields)?;
        let messages = messages(fields.take("messages"))?;
        let Tools { tools, offer, forced_calls } = Tools::parse(fields)?;
        let end = prompt_end(fields)?;
        let special_tokens = fields.flag("add_special_tokens")?;
        let variables = variables(fields)?;
        let conversation = Conversation { messages, tools, variables, end, special_tokens };
        Ok(Self { conversation, offer, forced_calls })
    }

    /// The tokens of its prompt.
    ///
    /// # Errors
    /// When the model's template cannot write it, or nobody knows how the model would call.
    pub(crate) fn encode(&self, model: &ServedModel) -> Result<Vec<Token>, ApiError> {
        let tokens = model.tokenizer.encode_chat(&model.chat, &self.conversation)?;
        let is_free = self.offer.as_ref().is_some_and(|offer| offer.forced.is_none());
        if is_free && model.tool_format.is_none() {
            let message = "the server does not know in which format this model writes tool calls: \
                           leave `tools` out, or start the server with --tool-format";
            return Err(ApiError::field("tools", message));
        }
        Ok(tokens)
    }
}

/// Refuses, in a request that is no chat, what only a conversation has.
pub(crate) fn refuse_chat_fields(fields: &mut Fields) -> Result<(), ApiError> {
    refuse_other_templates(fields)?;
    for name in CHAT_FIELDS {
        fields.refuse_unless(name, |value| match value {
            // Clients share what they send to both kinds of request.
            Value::Array(items) => items.is_empty() || name == "messages",
            Value::Object(items) => items.is_empty(),
            Value::Bool(flag) => match name {
                "parallel_tool_calls" => true,
                "continue_final_message" => !*flag,
                _ => false,
            },
            Value::String(text) => name == "tool_choice" && text == "none",
            Value::Null | Value::Number(_) => false,
        })?;
    }
    Ok(())
}

/// The template is the model's, and nobody else's text is put into the prompt.
fn refuse_other_templates(fields: &mut Fields) -> Result<(), ApiError> {
    fields.refuse_unless("documents", |value| value.as_array().is_some_and(Vec::is_empty))?;
    fields.refuse_unless("chat_template", |_| false)
}

fn prompt_end(fields: &mut Fields) -> Result<PromptEnd, ApiError> {
    let continues = fields.flag("continue_final_message")?;
    let answers = fields.flag_or("add_generation_prompt", !continues)?;
    match (continues, answers) {
        (true, true) => {
            let message = "`continue_final_message` continues the last message and \
                           `add_generation_prompt` starts a new one: set one of them to false";
            Err(ApiError::field("continue_final_message", message))
        }
        (true, false) => Ok(PromptEnd::Continued),
        (false, true) => Ok(PromptEnd::Answer),
        (false, false) => Ok(PromptEnd::LastMessage),
    }
}

/// What the template is told besides. What it is told anyway has fields of its own.
fn variables(fields: &mut Fields) -> Result<Map<String, Value>, ApiError> {
    const TOLD_ANYWAY: [&str; 8] = [
        "messages",
        "tools",
        "documents",
        "bos_token",
        "eos_token",
        "chat_template",
        "add_generation_prompt",
        "continue_final_message",
    ];
    let name = "chat_template_kwargs";
    let mut variables = match fields.take(name) {
        None => Map::new(),
        Some(Value::Object(variables)) => variables,
        Some(_) => return Err(ApiError::field(name, format!("`{name}` must be an object"))),
    };
    if let Some(known) = TOLD_ANYWAY.iter().find(|known| variables.contains_key(**known)) {
        let message =
            format!("`{name}` cannot set `{known}`: it is a field of the request, or fixed");
        return Err(ApiError::field(name, message));
    }
    if let Some(effort) = fields.text("reasoning_effort")? {
        variables.entry("reasoning_effort").or_insert(effort.into());
    }
    Ok(variables)
}

fn messages(value: Option<Value>) -> Result<Vec<Message>, ApiError> {
    let Some(Value::Array(items)) = value else {
        return Err(ApiError::field("messages", "`messages` must be a list of messages"));
    };
    if items.is_empty() {
        return Err(ApiError::field("messages", "`messages` is empty: add at least one message"));
    }
    items.into_iter().enumerate().map(|(place, item)| message(place, item)).collect()
}

fn message(place: usize, item: Value) -> Result<Message, ApiError> {
    let wrong = |part: &str, message: &str| {
        ApiError::field(format!("messages[{place}]{part}"), message.to_owned())
    };
    let Value::Object(mut item) = item else {
        return Err(wrong("", "a message must be an object with `role` and `content`"));
    };
    let Some(Value::String(role)) = item.shift_remove("role") else {
        return Err(wrong(".role", "a message must have a `role`, like \"user\""));
    };
    if !ROLES.contains(&role.as_str()) {
        let message = format!("unknown role {role:?}: use one of {}", ROLES.join(", "));
        return Err(wrong(".role", &message));
    }
    let tool_calls = tool_calls(place, item.shift_remove("tool_calls"))?;
    if !tool_calls.is_empty() && role != "assistant" {
        return Err(wrong(".tool_calls", "only messages of the assistant have `tool_calls`"));
    }
    let content = match item.shift_remove("content") {
        None | Some(Value::Null) if !tool_calls.is_empty() => String::new(),
        content => text(content).map_err(|message| wrong(".content", &message))?,
    };
    // Clients send back messages as they got them, with all that was not there.
    item.retain(|_, value| match value {
        Value::Null => false,
        Value::Array(items) => !items.is_empty(),
        Value::Bool(_) | Value::Number(_) | Value::String(_) | Value::Object(_) => true,
    });
    for name in ["name", "tool_call_id"] {
        if item.get(name).is_some_and(|value| !value.is_string()) {
            return Err(wrong(&format!(".{name}"), &format!("`{name}` must be a string")));
        }
    }
    if item.contains_key("function_call") {
        return Err(wrong(".function_call", "`function_call` is not supported: use `tool_calls`"));
    }
    for name in ["audio", "refusal"] {
        if item.contains_key(name) {
            let message = format!("`{name}` is not supported in messages: leave it out");
            return Err(wrong(&format!(".{name}"), &message));
        }
    }
    Ok(Message { role, content, tool_calls, more: item })
}

/// The text of a message.
///
/// # Errors
/// What is wrong with the content.
fn text(content: Option<Value>) -> Result<String, String> {
    let wrong = || {
        let shapes = "a string or a list of text parts; it may be null with `tool_calls`";
        format!("`content` must be {shapes}")
    };
    match content {
        Some(Value::String(text)) => Ok(text),
        Some(Value::Array(parts)) => {
            let text = |part: &Value| match (&part["type"], &part["text"]) {
                (Value::String(kind), Value::String(text)) if kind == "text" => Ok(text.clone()),
                (Value::String(kind), _) if kind != "text" => {
                    Err(format!("this model takes text only, and a part has the type {kind:?}"))
                }
                _ => Err(wrong()),
            };
            parts.iter().map(text).collect()
        }
        Some(_) | None => Err(wrong()),
    }
}

/// A call that the assistant has made.
#[derive(Deserialize)]
struct Call {
    id: Option<String>,
    #[serde(rename = "type")]
    _kind: Option<FunctionKind>,
    function: CalledFunction,
}

#[derive(Deserialize)]
struct CalledFunction {
    name: String,
    #[serde(default, deserialize_with = "arguments")]
    arguments: Map<String, Value>,
}

fn tool_calls(place: usize, value: Option<Value>) -> Result<Vec<ToolCall>, ApiError> {
    let Some(value) = value else { return Ok(Vec::new()) };
    let calls: Option<Vec<Call>> = typed(&format!("messages[{place}].tool_calls"), value)?;
    let call = |Call { id, function, .. }: Call| {
        let CalledFunction { name, arguments } = function;
        let function = FunctionCall { name, arguments: Value::Object(arguments) };
        ToolCall { id, kind: ToolKind::Function, function }
    };
    Ok(calls.into_iter().flatten().map(call).collect())
}

/// Clients send arguments as text, and templates want them as an object.
fn arguments<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Map<String, Value>, D::Error> {
    let wrong = || D::Error::custom("use an object, or its text");
    match Option::<Value>::deserialize(deserializer)? {
        None => Ok(Map::new()),
        Some(Value::Object(arguments)) => Ok(arguments),
        Some(Value::String(text)) if text.trim().is_empty() => Ok(Map::new()),
        Some(Value::String(text)) => serde_json::from_str(&text).map_err(|_| wrong()),
        Some(Value::Null | Value::Bool(_) | Value::Number(_) | Value::Array(_)) => Err(wrong()),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn parse(request: &Value) -> Result<Chat, ApiError> {
        Chat::parse(&mut Fields::parse(request.to_string().as_bytes()).unwrap())
    }

    fn with(name: &str, value: Value) -> Value {
        let mut request = json!({ "messages": [{ "role": "user", "content": "x" }] });
        request[name] = value;
        request
    }

    #[test]
    fn content_is_a_string_or_text_parts() {
        let said = |content: Value| {
            let request = json!({ "messages": [{ "role": "user", "content": content }] });
            parse(&request).map(|chat| chat.conversation.messages)
        };
        assert_eq!(said(json!("hi")).unwrap(), [Message::new("user", "hi")]);
        let parts = json!([{ "type": "text", "text": "h" }, { "type": "text", "text": "i" }]);
        assert_eq!(said(parts).unwrap(), [Message::new("user", "hi")]);
        let image = json!([{ "type": "image_url", "image_url": { "url": "x" } }]);
        let error = said(image).unwrap_err();
        assert_eq!(error.param(), Some("messages[0].content"));
        assert!(error.json().to_string().contains("text only"), "{error:?}");
        assert_eq!(said(json!(null)).unwrap_err().param(), Some("messages[0].content"));
        assert!(parse(&json!({ "messages": [] })).is_err());
        assert!(parse(&json!({ "prompt": "x" })).is_err());
    }

    #[test]
    fn an_unknown_role_is_refused() {
        let said = |role| {
            let request = json!({ "messages": [{ "role": role, "content": "x" }] });
            parse(&request).map(|chat| chat.conversation.messages[0].role.clone())
        };
        for role in ROLES {
            assert_eq!(said(role).unwrap(), role);
        }
        for role in ["User", "asistant", ""] {
            assert_eq!(said(role).unwrap_err().param(), Some("messages[0].role"));
        }
    }

    #[test]
    fn calls_may_come_without_content_and_their_arguments_become_objects() {
        let call = |arguments: Value| {
            json!({ "messages": [{ "role": "assistant", "content": null, "refusal": null,
                "tool_calls": [{ "id": "1", "type": "function",
                    "function": { "name": "f", "arguments": arguments } }] },
                { "role": "tool", "tool_call_id": "1", "name": "f", "content": "42" }] })
        };
        let chat = parse(&call(json!("{\"b\": 1, \"a\": [2]}"))).unwrap();
        let [calls, result] = &chat.conversation.messages[..] else { panic!("{chat:?}") };
        assert_eq!(calls.content, "");
        let arguments = &calls.tool_calls[0].function.arguments;
        assert_eq!(arguments.to_string(), r#"{"b":1,"a":[2]}"#, "in the order they came in");
        assert_eq!(result.more["tool_call_id"], "1");
        assert_eq!(result.more["name"], "f");
        assert!(parse(&call(json!(""))).is_ok());
        for wrong in [json!("[1]"), json!("{"), json!(7)] {
            let error = parse(&call(wrong)).unwrap_err();
            assert_eq!(error.param(), Some("messages[0].tool_calls[0].function.arguments"));
        }
    }

    #[test]
    fn what_a_message_has_besides_reaches_the_template_or_is_refused() {
        let message = |name: &str, value: Value| {
            let mut message = json!({ "role": "assistant", "content": "x" });
            message[name] = value;
            parse(&json!({ "messages": [message] })).map(|chat| chat.conversation.messages)
        };
        let thought = message("reasoning_content", json!("hm")).unwrap();
        assert_eq!(thought[0].more["reasoning_content"], "hm");
        assert!(message("annotations", json!([])).unwrap()[0].more.is_empty());
        assert!(message("audio", json!(null)).unwrap()[0].more.is_empty());
        for (name, value) in [
            ("function_call", json!({ "name": "f" })),
            ("refusal", json!("no")),
            ("audio", json!({ "id": "1" })),
            ("name", json!(1)),
            ("tool_calls", json!({})),
        ] {
            let error = message(name, value).unwrap_err();
            assert_eq!(error.param(), Some(format!("messages[0].{name}").as_str()));
        }
    }

    #[test]
    fn a_conversation_says_where_its_prompt_ends() {
        let end = |request: Value| parse(&request).map(|chat| chat.conversation.end);
        assert_eq!(end(with("add_generation_prompt", json!(null))).unwrap(), PromptEnd::Answer);
        let none = end(with("add_generation_prompt", json!(false)));
        assert_eq!(none.unwrap(), PromptEnd::LastMessage);
        let mut continued = with("continue_final_message", json!(true));
        assert_eq!(end(continued.clone()).unwrap(), PromptEnd::Continued);
        continued["add_generation_prompt"] = json!(true);
        assert_eq!(end(continued).unwrap_err().param(), Some("continue_final_message"));
    }

    #[test]
    fn a_template_is_told_more_but_not_otherwise() {
        let chat =
            parse(&with("chat_template_kwargs", json!({ "enable_thinking": false }))).unwrap();
        assert_eq!(chat.conversation.variables["enable_thinking"], false);
        let chat = parse(&with("reasoning_effort", json!("low"))).unwrap();
        assert_eq!(chat.conversation.variables["reasoning_effort"], "low");
        for (name, value) in [
            ("chat_template_kwargs", json!({ "tools": [] })),
            ("chat_template_kwargs", json!([])),
            ("chat_template", json!("{{ messages }}")),
            ("documents", json!([{ "text": "x" }])),
        ] {
            assert_eq!(parse(&with(name, value)).unwrap_err().param(), Some(name));
        }
    }
}
