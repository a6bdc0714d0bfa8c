//! Structured outputs: answers that follow a JSON schema, a regular expression, a list of choices or a
//! grammar.

#[cfg(not(feature = "structured-outputs"))]
mod absent;
#[cfg(feature = "structured-outputs")]
mod grammars;

use serde_json::{Map, Value, json};

#[cfg(not(feature = "structured-outputs"))]
pub(crate) use absent::{Compiled, Grammars};
#[cfg(feature = "structured-outputs")]
pub(crate) use grammars::{Compiled, Grammars};

use crate::error::ApiError;
use crate::fields::Fields;

/// Constraint on an answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Structure {
    /// The field that asked for it, for errors to name.
    field: String,
    rule: Rule,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Rule {
    /// JSON that a schema describes.
    Schema(Value),
    /// A text that a regular expression matches as a whole.
    Regex(String),
    /// One of these texts.
    Choice(Vec<String>),
    /// A text of the language of a grammar, in Lark's notation.
    Lark(String),
}

/// The choices of a request, at the most.
const CHOICES_MAX: usize = 1024;

impl Structure {
    /// # Errors
    /// The first field that is wrong, or the second of two that contradict each other.
    pub(crate) fn parse(fields: &mut Fields) -> Result<Option<Self>, ApiError> {
        let mut found = Vec::new();
        found.extend(response_format(fields.take("response_format"))?);
        for (field, kind) in [
            ("guided_json", "json"),
            ("guided_json_object", "json_object"),
            ("guided_regex", "regex"),
            ("guided_choice", "choice"),
            ("guided_grammar", "grammar"),
        ] {
            if let Some(value) = fields.take(field) {
                found.extend(Self::of(kind, field.to_owned(), value)?);
            }
        }
        match fields.take("structured_outputs") {
            None => {}
            Some(Value::Object(options)) => found.extend(structured_outputs(options)?),
            Some(_) => {
                let name = "structured_outputs";
                return Err(ApiError::field(name, format!("`{name}` must be an object")));
            }
        }
        match &found[..] {
            [first, second, ..] => Err(Self::conflict(first, second)),
            [_] | [] => Ok(found.pop()),
        }
    }

    /// Returns JSON of a schema as the constraint that a field asks for.
    pub(crate) fn schema(field: &str, schema: Value) -> Self {
        Self { field: field.to_owned(), rule: Rule::Schema(schema) }
    }

    /// Returns the one of two constraints that is there.
    ///
    /// # Errors
    /// If both are: an output can follow only one.
    pub(crate) fn only(
        first: Option<Self>,
        second: Option<Self>,
    ) -> Result<Option<Self>, ApiError> {
        match (first, second) {
            (Some(first), Some(second)) => Err(Self::conflict(&first, &second)),
            (first, second) => Ok(first.or(second)),
        }
    }

    /// Returns the same constraint, with errors that name another field.
    pub(crate) fn named(self, field: &str) -> Self {
        Self { field: field.to_owned(), ..self }
    }

    fn conflict(first: &Self, second: &Self) -> ApiError {
        let message = format!(
            "an output can have only one constraint: leave out `{}` or `{}`",
            first.field, second.field
        );
        ApiError::field(second.field.clone(), message)
    }

    /// Reads the constraint that a field of this kind asks for.
    fn of(kind: &str, field: String, value: Value) -> Result<Option<Self>, ApiError> {
        let wrong =
            |what: &str| ApiError::field(field.clone(), format!("`{field}` must be {what}"));
        let rule = match (kind, value) {
            ("json", Value::String(schema)) => {
                let schema = serde_json::from_str(&schema);
                Rule::Schema(schema.map_err(|error| wrong(&format!("a JSON schema: {error}")))?)
            }
            ("json", schema @ (Value::Object(_) | Value::Bool(_))) => Rule::Schema(schema),
            ("json", _) => return Err(wrong("a JSON schema")),
            ("json_object", Value::Bool(true)) => Rule::Schema(any_object()),
            ("json_object", Value::Bool(false)) => return Ok(None),
            ("json_object", _) => return Err(wrong("true or false")),
            ("regex", Value::String(regex)) => Rule::Regex(regex),
            ("regex", _) => return Err(wrong("a regular expression")),
            ("choice", Value::Array(items)) if (1..=CHOICES_MAX).contains(&items.len()) => {
                let choice = |item: Value| item.as_str().map(str::to_owned);
                let choices: Option<_> = items.into_iter().map(choice).collect();
                Rule::Choice(choices.ok_or_else(|| wrong("a list of strings"))?)
            }
            ("choice", _) => return Err(wrong(&format!("a list of 1 to {CHOICES_MAX} strings"))),
            ("grammar", Value::String(grammar)) => Rule::Lark(grammar),
            ("grammar", _) => return Err(wrong("a grammar in Lark notation")),
            (_, _) => return Err(ApiError::unsupported(&field)),
        };
        Ok(Some(Self { field, rule }))
    }

    /// An error that names the field which asked for the rule.
    fn wrong(&self, message: impl std::fmt::Display) -> ApiError {
        ApiError::field(
            self.field.clone(),
            format!("`{}` cannot be satisfied: {message}", self.field),
        )
    }
}

fn any_object() -> Value {
    json!({ "type": "object" })
}

fn response_format(value: Option<Value>) -> Result<Option<Structure>, ApiError> {
    const NAME: &str = "response_format";
    let Some(value) = value else { return Ok(None) };
    let found = |field: &str, schema| {
        Some(Structure { field: field.to_owned(), rule: Rule::Schema(schema) })
    };
    match value["type"].as_str() {
        Some("text") => Ok(None),
        Some("json_object") => Ok(found(NAME, any_object())),
        Some("json_schema") => match &value["json_schema"]["schema"] {
            schema @ (Value::Object(_) | Value::Bool(_)) => Ok(found(NAME, schema.clone())),
            Value::Null | Value::Number(_) | Value::String(_) | Value::Array(_) => {
                let message = "`response_format` of type \"json_schema\" needs a schema at \
                               `json_schema.schema`";
                Err(ApiError::field(NAME, message))
            }
        },
        Some(_) | None => {
            let message = "`response_format` must have the type \"text\", \"json_object\" or \
                           \"json_schema\"";
            Err(ApiError::field(NAME, message))
        }
    }
}

fn structured_outputs(options: Map<String, Value>) -> Result<Vec<Structure>, ApiError> {
    let mut found = Vec::new();
    for (kind, value) in options {
        let asks_for_nothing = value.is_null() || value == false;
        if !asks_for_nothing {
            found.extend(Structure::of(&kind, format!("structured_outputs.{kind}"), value)?);
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(fields: Value) -> Result<Option<Rule>, String> {
        let mut fields = Fields::parse(fields.to_string().as_bytes()).unwrap();
        let structure = Structure::parse(&mut fields);
        structure.map(|it| it.map(|it| it.rule)).map_err(|e| e.param().unwrap().to_owned())
    }

    #[test]
    fn every_way_to_ask_is_understood() {
        let schema = json!({ "type": "integer" });
        let is_schema = Ok(Some(Rule::Schema(schema.clone())));
        let format =
            json!({ "type": "json_schema", "json_schema": { "name": "x", "schema": schema } });
        assert_eq!(parse(json!({ "response_format": format })), is_schema);
        assert_eq!(parse(json!({ "guided_json": schema })), is_schema);
        assert_eq!(parse(json!({ "guided_json": schema.to_string() })), is_schema);
        assert_eq!(parse(json!({ "structured_outputs": { "json": schema } })), is_schema);
        let any = Ok(Some(Rule::Schema(any_object())));
        assert_eq!(parse(json!({ "response_format": { "type": "json_object" } })), any);
        assert_eq!(parse(json!({ "structured_outputs": { "json_object": true } })), any);
        let regex = Ok(Some(Rule::Regex("a+".to_owned())));
        assert_eq!(parse(json!({ "guided_regex": "a+" })), regex);
        assert_eq!(
            parse(json!({ "structured_outputs": { "regex": "a+", "choice": null } })),
            regex
        );
        let choice = Ok(Some(Rule::Choice(vec!["a".to_owned()])));
        assert_eq!(parse(json!({ "guided_choice": ["a"] })), choice);
        let lark = Ok(Some(Rule::Lark("start: \"a\"".to_owned())));
        assert_eq!(parse(json!({ "guided_grammar": "start: \"a\"" })), lark);
        assert_eq!(parse(json!({ "response_format": { "type": "text" } })), Ok(None));
        assert_eq!(parse(json!({ "structured_outputs": { "disable_fallback": false } })), Ok(None));
    }

    #[test]
    fn an_error_names_the_field_that_is_wrong() {
        let wrong = [
            (json!({ "response_format": { "type": "xml" } }), "response_format"),
            (json!({ "response_format": { "type": "json_schema" } }), "response_format"),
            (json!({ "response_format": "json" }), "response_format"),
            (json!({ "guided_json": "{" }), "guided_json"),
            (json!({ "guided_regex": 7 }), "guided_regex"),
            (json!({ "guided_choice": [] }), "guided_choice"),
            (json!({ "guided_choice": [1] }), "guided_choice"),
            (json!({ "guided_grammar": {} }), "guided_grammar"),
            (json!({ "structured_outputs": 7 }), "structured_outputs"),
            (
                json!({ "structured_outputs": { "structural_tag": "x" } }),
                "structured_outputs.structural_tag",
            ),
            (
                json!({ "guided_regex": "a", "structured_outputs": { "regex": "a" } }),
                "structured_outputs.regex",
            ),
        ];
        for (fields, name) in wrong {
            assert_eq!(parse(fields), Err(name.to_owned()));
        }
    }
}
