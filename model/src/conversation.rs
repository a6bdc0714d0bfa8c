//! Conversations: messages, functions that may be called, and the end of the prompt.

use serde::Serialize;
use serde_json::{Map, Value};

/// A conversation that a prompt is made of.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Conversation {
    /// Messages, oldest first.
    pub messages: Vec<Message>,
    /// The functions that the model may call, as OpenAI's clients describe them.
    pub tools: Vec<Value>,
    /// Further variables of the template.
    pub variables: Map<String, Value>,
    /// The end of the prompt.
    pub end: PromptEnd,
    /// Adds the tokens that a tokenizer puts around every text to those of the template.
    pub special_tokens: bool,
}

/// The end of a conversation's prompt.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PromptEnd {
    /// At the beginning of the assistant's answer.
    #[default]
    Answer,
    /// After the last message, before the next turn.
    LastMessage,
    /// Within the last message, which the answer continues.
    Continued,
}

/// One message of a conversation, as templates see it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Message {
    /// Role of the sender: `system`, `user`, `assistant`, `tool`, or another that the model's template knows.
    pub role: String,
    /// Text of the message; empty for a message that only calls functions.
    pub content: String,
    /// The functions that it calls.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub tool_calls: Vec<ToolCall>,
    /// Further fields that a template may read, like `name` and `tool_call_id`.
    #[serde(flatten)]
    pub more: Map<String, Value>,
}

/// A call of a function.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ToolCall {
    /// Identifier that the result refers to.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub id: Option<String>,
    /// Kind of the callee.
    #[serde(rename = "type")]
    pub kind: ToolKind,
    /// The function and its arguments.
    pub function: FunctionCall,
}

/// Kinds of callees.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ToolKind {
    /// A function.
    #[default]
    Function,
}

/// A function and its arguments.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct FunctionCall {
    /// Its name.
    pub name: String,
    /// Arguments: an object, which templates expect.
    pub arguments: Value,
}

impl Conversation {
    /// Creates a conversation with these messages, which the assistant is to answer.
    #[must_use]
    pub fn new(messages: Vec<Message>) -> Self {
        Self { messages, ..Self::default() }
    }

    /// Describes the functions as text, for the built-in model.
    pub(crate) fn tools_in_words(&self) -> Option<String> {
        if self.tools.is_empty() {
            return None;
        }
        let mut text =
            "Functions that can be called by <tool_call>{\"name\": NAME, \"arguments\": \
                        {...}}</tool_call>:"
                .to_owned();
        for tool in &self.tools {
            text.push('\n');
            text.push_str(&tool.to_string());
        }
        Some(text)
    }
}

impl Message {
    /// Creates a message without calls and further fields.
    #[must_use]
    pub fn new(role: impl Into<String>, content: impl Into<String>) -> Self {
        let (role, content) = (role.into(), content.into());
        Self { role, content, tool_calls: Vec::new(), more: Map::new() }
    }

    /// The text and the calls of the message as one text, for the built-in model.
    pub(crate) fn in_words(&self) -> String {
        let mut text = match self.more.get("name") {
            Some(Value::String(name)) => format!("{name}: "),
            Some(_) | None => String::new(),
        };
        text.push_str(&self.content);
        for call in &self.tool_calls {
            let FunctionCall { name, arguments } = &call.function;
            let name = Value::from(name.as_str());
            text.push_str(&format!(
                "<tool_call>{{\"name\": {name}, \"arguments\": {arguments}}}</tool_call>"
            ));
        }
        text
    }
}
