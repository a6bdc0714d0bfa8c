//! Conversations: what is said, what may be called, and where the prompt of one ends.

use serde::Serialize;
use serde_json::{Map, Value};

/// A conversation that a prompt is made of.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Conversation {
    /// What was said, oldest first.
    pub messages: Vec<Message>,
    /// The functions that the model may call, as OpenAI's clients describe them.
    pub tools: Vec<Value>,
    /// Further variables of the template.
    pub variables: Map<String, Value>,
    /// Where the prompt ends.
    pub end: PromptEnd,
    /// Whether the tokens that a tokenizer puts around every text come on top of the template's.
    pub special_tokens: bool,
}

/// Where the prompt of a conversation ends.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PromptEnd {
    /// Where the assistant begins to answer.
    #[default]
    Answer,
    /// After the last message, before anybody's turn.
    LastMessage,
    /// Within the last message, which the answer continues.
    Continued,
}

/// One message of a conversation, as templates see it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Message {
    /// Who says it: `system`, `user`, `assistant` or `tool`, or whatever else a model's template knows.
    pub role: String,
    /// What is said; nothing for a message that only calls.
    pub content: String,
    /// The functions that it calls.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub tool_calls: Vec<ToolCall>,
    /// What else a template may look at, like `name` and `tool_call_id`.
    #[serde(flatten)]
    pub more: Map<String, Value>,
}

/// A call of a function.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ToolCall {
    /// What its result refers to.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub id: Option<String>,
    /// What is called.
    #[serde(rename = "type")]
    pub kind: ToolKind,
    /// The function and what it is given.
    pub function: FunctionCall,
}

/// What can be called.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ToolKind {
    /// A function.
    #[default]
    Function,
}

/// A function and what it is given.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct FunctionCall {
    /// Its name.
    pub name: String,
    /// What it is given: an object, which is what templates expect.
    pub arguments: Value,
}

impl Conversation {
    /// So much was said, and the assistant is to answer.
    #[must_use]
    pub fn new(messages: Vec<Message>) -> Self {
        Self { messages, ..Self::default() }
    }

    /// The functions in words, for the built-in model.
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
    /// Somebody says something.
    #[must_use]
    pub fn new(role: impl Into<String>, content: impl Into<String>) -> Self {
        let (role, content) = (role.into(), content.into());
        Self { role, content, tool_calls: Vec::new(), more: Map::new() }
    }

    /// What is said and called, in words, for the built-in model.
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
