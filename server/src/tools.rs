//! The functions that a request lets the model call.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::Value;

use crate::error::ApiError;
use crate::fields::{Fields, typed};

/// What the model is told of functions, and what it may call.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Tools {
    /// As the template sees them.
    pub(crate) tools: Vec<Value>,
    pub(crate) offer: Option<Offer>,
}

/// What may be called.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Offer {
    /// The names of the functions.
    pub(crate) names: Arc<[String]>,
    /// Whether an answer may call more than once.
    pub(crate) parallel: bool,
}

impl Tools {
    /// # Errors
    /// The first field that is wrong, or that asks for what this server cannot do.
    pub(crate) fn parse(fields: &mut Fields) -> Result<Self, ApiError> {
        let tools: Vec<Value> = fields.typed("tools")?;
        let names: Arc<[String]> = tools
            .iter()
            .enumerate()
            .map(|(place, tool)| name(place, tool))
            .collect::<Result<_, _>>()?;
        let may_call = choice(fields.take("tool_choice"), &names)?;
        let parallel = fields.flag_or("parallel_tool_calls", true)?;
        if names.is_empty() || !may_call {
            // What the model is not told of it does not call.
            return Ok(Self::default());
        }
        Ok(Self { tools, offer: Some(Offer { names, parallel }) })
    }
}

/// A tool as it should be described. The template sees all that is said of it.
#[derive(Deserialize)]
struct Tool {
    #[serde(rename = "type")]
    _kind: FunctionKind,
    function: Function,
}

#[derive(Deserialize)]
struct Function {
    name: String,
    /// A JSON schema.
    #[serde(rename = "parameters")]
    _parameters: Option<BTreeMap<String, IgnoredAny>>,
    strict: Option<bool>,
}

/// The only kind of tools and calls that there is.
#[derive(Deserialize)]
pub(crate) enum FunctionKind {
    #[serde(rename = "function")]
    Function,
}

/// The name of a tool that is described as it should be.
fn name(place: usize, tool: &Value) -> Result<String, ApiError> {
    let of_tool = format!("tools[{place}]");
    let Tool { function, .. } = typed(&of_tool, tool)?;
    let wrong = |part: &str, message: &str| {
        Err(ApiError::field(format!("{of_tool}.function.{part}"), message.to_owned()))
    };
    if function.name.is_empty() {
        return wrong("name", "a function must have a name");
    }
    if function.strict == Some(true) {
        return wrong("strict", "`strict` is not supported by this server: leave it out");
    }
    Ok(function.name)
}

/// Whether functions may be called at all.
fn choice(value: Option<Value>, names: &[String]) -> Result<bool, ApiError> {
    let refused = |message: String| Err(ApiError::field("tool_choice", message));
    let not_forced = "this server cannot force a function call: use \"auto\" or \"none\"";
    match value {
        None => Ok(true),
        Some(Value::String(choice)) => match choice.as_str() {
            "auto" => Ok(true),
            "none" => Ok(false),
            "required" => refused(format!("`tool_choice` cannot be \"required\": {not_forced}")),
            other => {
                refused(format!("`tool_choice` \"{other}\" is unknown: use \"auto\" or \"none\""))
            }
        },
        Some(choice) => match choice.pointer("/function/name").and_then(Value::as_str) {
            Some(name) if !names.iter().any(|known| known == name) => {
                refused(format!("`tool_choice` names `{name}`, which is not in `tools`"))
            }
            Some(_) => refused(format!("`tool_choice` cannot name a function: {not_forced}")),
            None => refused("`tool_choice` must be \"auto\" or \"none\"".to_owned()),
        },
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn parse(request: &Value) -> Result<Tools, ApiError> {
        Tools::parse(&mut Fields::parse(request.to_string().as_bytes()).unwrap())
    }

    fn tool(name: &str) -> Value {
        json!({ "type": "function", "function": { "name": name, "parameters": {} } })
    }

    #[test]
    fn tools_are_offered_unless_they_are_not_to_be_called() {
        let request = json!({ "tools": [tool("f"), tool("g")], "parallel_tool_calls": false });
        let tools = parse(&request).unwrap();
        assert_eq!(tools.tools.len(), 2);
        let offer = tools.offer.unwrap();
        assert_eq!(
            (&offer.names[..], offer.parallel),
            (&["f".to_owned(), "g".to_owned()][..], false)
        );
        let none = parse(&json!({ "tools": [tool("f")], "tool_choice": "none" })).unwrap();
        assert_eq!(none, Tools::default());
        assert_eq!(
            parse(&json!({ "tool_choice": "auto", "tools": [] })).unwrap(),
            Tools::default()
        );
    }

    #[test]
    fn what_is_wrong_or_cannot_be_done_is_named() {
        let named = |name: &str| json!({ "type": "function", "function": { "name": name } });
        let cases = [
            (json!({ "tools": {} }), "tools"),
            (json!({ "tools": [{}] }), "tools[0]"),
            (json!({ "tools": [{ "type": "search" }] }), "tools[0].type"),
            (json!({ "tools": [{ "type": "function" }] }), "tools[0]"),
            (json!({ "tools": [tool("f"), named("f")["function"]] }), "tools[1]"),
            (json!({ "tools": [{ "type": "function", "function": {} }] }), "tools[0].function"),
            (json!({ "tools": [tool("f"), tool("")] }), "tools[1].function.name"),
            (json!({ "tools": [tool("f")], "tool_choice": "required" }), "tool_choice"),
            (json!({ "tools": [tool("f")], "tool_choice": named("f") }), "tool_choice"),
            (json!({ "tools": [tool("f")], "tool_choice": named("g") }), "tool_choice"),
            (json!({ "tools": [tool("f")], "tool_choice": 1 }), "tool_choice"),
            (json!({ "parallel_tool_calls": "yes" }), "parallel_tool_calls"),
        ];
        for (request, param) in cases {
            assert_eq!(parse(&request).unwrap_err().param(), Some(param), "{request}");
        }
        let mut strict = tool("f");
        strict["function"]["strict"] = true.into();
        let error = parse(&json!({ "tools": [strict] })).unwrap_err();
        assert_eq!(error.param(), Some("tools[0].function.strict"));
    }
}
