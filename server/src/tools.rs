//! The functions that a request lets the model call.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::{Map, Value, json};

use crate::error::ApiError;
use crate::fields::{Fields, typed};
use crate::structured::Structure;

/// Functions of a request: their descriptions for the prompt, and the calls that are allowed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Tools {
    /// Descriptions for the chat template.
    pub(crate) tools: Vec<Value>,
    pub(crate) offer: Option<Offer>,
    /// The constraint by which the answer is a call, if it has to be one.
    pub(crate) forced_calls: Option<Structure>,
}

/// Functions that may be called.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Offer {
    /// The names of the functions.
    pub(crate) names: Arc<[String]>,
    /// Whether an answer may call more than once.
    pub(crate) parallel: bool,
    /// Form of the answer, if it must be a call.
    pub(crate) forced: Option<Forced>,
}

/// Form of an answer that must be a call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Forced {
    /// A list of calls, each with `name` and `parameters`.
    Calls,
    /// The arguments of the function with this name.
    Arguments(String),
}

/// The `tool_choice` of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Choice {
    Auto,
    None,
    Required,
    Named(String),
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
        let choice = choice(fields.take("tool_choice"), &names)?;
        let parallel = fields.flag_or("parallel_tool_calls", true)?;
        if names.is_empty() || choice == Choice::None {
            // A model does not call functions that it does not see.
            return Ok(Self::default());
        }
        let (forced, schema) = match choice {
            // The arguments of forced calls follow the schema. Those of others need not.
            Choice::Auto | Choice::None => {
                tools
                    .iter()
                    .enumerate()
                    .try_for_each(|(place, tool)| refuse_strict(place, tool))?;
                (None, None)
            }
            Choice::Required => (Some(Forced::Calls), Some(calls_schema(&tools, parallel)?)),
            Choice::Named(name) => {
                let tool = tools.iter().find(|tool| tool["function"]["name"] == *name);
                let schema = tool.map(arguments_schema);
                (Some(Forced::Arguments(name)), schema)
            }
        };
        let forced_calls = schema.map(|schema| Structure::schema("tool_choice", schema));
        Ok(Self { tools, offer: Some(Offer { names, parallel, forced }), forced_calls })
    }
}

/// Returns the schema of a function's arguments, which are always an object.
fn arguments_schema(tool: &Value) -> Value {
    let mut schema = match &tool["function"]["parameters"] {
        Value::Object(schema) => schema.clone(),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) | Value::Array(_) => {
            Map::new()
        }
    };
    if !schema.contains_key("$ref") {
        schema.entry("type").or_insert_with(|| "object".into());
    }
    schema.into()
}

/// Returns the schema of a list of calls. Definitions that the schemas of functions refer to move to the root, where
/// references look for them.
fn calls_schema(tools: &[Value], parallel: bool) -> Result<Value, ApiError> {
    let mut root = Map::new();
    let mut calls = Vec::new();
    for tool in tools {
        let mut arguments = arguments_schema(tool);
        for place in ["$defs", "definitions"] {
            let moved = arguments.as_object_mut().and_then(|schema| schema.remove(place));
            let Some(Value::Object(moved)) = moved else { continue };
            let all = root.entry(place).or_insert_with(|| Map::new().into());
            for (name, definition) in moved {
                match all.get(&name) {
                    Some(other) if *other != definition => {
                        let message = format!(
                            "two functions define `{name}` differently in `{place}`: rename one of the definitions"
                        );
                        return Err(ApiError::field("tools", message));
                    }
                    Some(_) | None => all[&name] = definition,
                }
            }
        }
        calls.push(json!({
            "type": "object",
            "properties": { "name": { "const": tool["function"]["name"] }, "parameters": arguments },
            "required": ["name", "parameters"],
            "additionalProperties": false,
        }));
    }
    root.insert("type".to_owned(), "array".into());
    root.insert("items".to_owned(), json!({ "anyOf": calls }));
    root.insert("minItems".to_owned(), 1.into());
    if !parallel {
        root.insert("maxItems".to_owned(), 1.into());
    }
    Ok(root.into())
}

/// Refuses `strict` where the arguments of calls cannot be constrained.
fn refuse_strict(place: usize, tool: &Value) -> Result<(), ApiError> {
    if tool["function"]["strict"] != true {
        return Ok(());
    }
    let message = "`strict` needs a forced call: set `tool_choice` to \"required\" or to a function, or leave `strict` out";
    Err(ApiError::field(format!("tools[{place}].function.strict"), message))
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
    #[serde(rename = "strict")]
    _strict: Option<bool>,
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
    if function.name.is_empty() {
        let message = "a function must have a name";
        return Err(ApiError::field(format!("{of_tool}.function.name"), message));
    }
    Ok(function.name)
}

/// Reads which functions may or must be called.
fn choice(value: Option<Value>, names: &[String]) -> Result<Choice, ApiError> {
    let refused = |message: String| Err(ApiError::field("tool_choice", message));
    match value {
        None => Ok(Choice::Auto),
        Some(Value::String(choice)) => match choice.as_str() {
            "auto" => Ok(Choice::Auto),
            "none" => Ok(Choice::None),
            "required" if names.is_empty() => {
                refused("`tool_choice` is \"required\", but there are no `tools`".to_owned())
            }
            "required" => Ok(Choice::Required),
            other => refused(format!(
                "`tool_choice` \"{other}\" is unknown: use \"auto\", \"none\", \"required\" or a function"
            )),
        },
        Some(choice) => match choice.pointer("/function/name").and_then(Value::as_str) {
            Some(name) if !names.iter().any(|known| known == name) => {
                refused(format!("`tool_choice` names `{name}`, which is not in `tools`"))
            }
            Some(name) => Ok(Choice::Named(name.to_owned())),
            None => refused(
                "`tool_choice` must be \"auto\", \"none\", \"required\" or an object with `function.name`"
                    .to_owned(),
            ),
        },
    }
}

#[cfg(test)]
mod tests {
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
            (json!({ "tools": [], "tool_choice": "required" }), "tool_choice"),
            (json!({ "tools": [tool("f")], "tool_choice": "any" }), "tool_choice"),
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

    #[test]
    fn a_forced_call_follows_the_schemas_of_the_functions() {
        let with = |definition: &str| {
            let mut tool = tool("f");
            tool["function"]["strict"] = true.into();
            tool["function"]["parameters"] = json!({
                "properties": { "x": { "$ref": "#/$defs/x" } }, "$defs": { "x": { "type": definition } },
            });
            tool
        };
        let other = json!({ "type": "function", "function": { "name": "g" } });
        let named = json!({ "tools": [with("string"), other], "tool_choice": { "type": "function", "function": { "name": "f" } } });
        let tools = parse(&named).unwrap();
        assert_eq!(tools.offer.unwrap().forced, Some(Forced::Arguments("f".to_owned())));
        let mut schema = with("string")["function"]["parameters"].clone();
        schema["type"] = "object".into();
        assert_eq!(tools.forced_calls, Some(Structure::schema("tool_choice", schema)));
        let any = json!({ "tools": [with("string"), other], "tool_choice": "required", "parallel_tool_calls": false });
        let tools = parse(&any).unwrap();
        assert_eq!(tools.offer.unwrap().forced, Some(Forced::Calls));
        let call = |name: &str, parameters: Value| {
            json!({
                "type": "object", "properties": { "name": { "const": name }, "parameters": parameters },
                "required": ["name", "parameters"], "additionalProperties": false,
            })
        };
        let f = json!({ "properties": { "x": { "$ref": "#/$defs/x" } }, "type": "object" });
        let expected = json!({
            "$defs": { "x": { "type": "string" } }, "type": "array", "minItems": 1, "maxItems": 1,
            "items": { "anyOf": [call("f", f), call("g", json!({ "type": "object" }))] },
        });
        assert_eq!(tools.forced_calls, Some(Structure::schema("tool_choice", expected)));
        let clash =
            json!({ "tools": [with("string"), with("integer")], "tool_choice": "required" });
        assert_eq!(parse(&clash).unwrap_err().param(), Some("tools"));
    }
}
