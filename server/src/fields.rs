//! The fields of a request, read one by one, so that an error can name the one that is wrong.

use std::ops::RangeInclusive;

use serde::de::{Deserialize, Deserializer};
use serde_json::{Map, Value};

use crate::error::ApiError;

/// The fields of a JSON object. `null` is as good as absent.
#[derive(Clone, Debug)]
pub(crate) struct Fields {
    /// Fields that were not taken out.
    left: Map<String, Value>,
    /// Names of fields that were asked for, whether they were there or not.
    known: Vec<&'static str>,
}

impl From<Map<String, Value>> for Fields {
    fn from(left: Map<String, Value>) -> Self {
        Self { left, known: Vec::new() }
    }
}

impl Fields {
    /// # Errors
    /// When the text is no JSON, or JSON that is no object.
    pub(crate) fn parse(json: &[u8]) -> Result<Self, ApiError> {
        match serde_json::from_slice(json) {
            Ok(Value::Object(left)) => Ok(Self { left, known: Vec::new() }),
            Ok(_) => Err(ApiError::invalid("the request must be a JSON object")),
            Err(error) => Err(ApiError::invalid(format!("the request is not valid JSON: {error}"))),
        }
    }

    /// Takes a field out.
    pub(crate) fn take(&mut self, name: &'static str) -> Option<Value> {
        self.known.push(name);
        self.left.remove(name).filter(|value| !value.is_null())
    }

    /// Returns the names of the fields that were never asked for.
    ///
    /// # Errors
    /// If one of them looks like a misspelling of a field that was.
    pub(crate) fn unknown(self) -> Result<Vec<String>, ApiError> {
        let names = self.left.into_iter().filter(|(_, value)| !value.is_null());
        names
            .map(|(name, _)| match self.known.iter().find(|known| is_misspelling(&name, known)) {
                Some(known) => {
                    let message = format!("unknown field `{name}`: did you mean `{known}`?");
                    Err(ApiError::field(name, message))
                }
                None => Ok(name),
            })
            .collect()
    }

    pub(crate) fn text(&mut self, name: &'static str) -> Result<Option<String>, ApiError> {
        match self.take(name) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(_) => Err(ApiError::field(name, format!("`{name}` must be a string"))),
        }
    }

    /// A field that has parts, the default if it is absent.
    pub(crate) fn typed<T: for<'de> Deserialize<'de> + Default>(
        &mut self,
        name: &'static str,
    ) -> Result<T, ApiError> {
        self.take(name).map_or_else(|| Ok(T::default()), |value| typed(name, value))
    }

    pub(crate) fn flag(&mut self, name: &'static str) -> Result<bool, ApiError> {
        self.flag_or(name, false)
    }

    pub(crate) fn flag_or(&mut self, name: &'static str, default: bool) -> Result<bool, ApiError> {
        match self.take(name) {
            None => Ok(default),
            Some(Value::Bool(flag)) => Ok(flag),
            Some(_) => Err(ApiError::field(name, format!("`{name}` must be true or false"))),
        }
    }

    pub(crate) fn integer(
        &mut self,
        name: &'static str,
        range: RangeInclusive<i64>,
    ) -> Result<Option<i64>, ApiError> {
        let Some(value) = self.take(name) else { return Ok(None) };
        match value.as_i64() {
            Some(value) if range.contains(&value) => Ok(Some(value)),
            Some(_) | None => {
                let (least, most) = range.into_inner();
                let message = format!("`{name}` must be an integer from {least} to {most}");
                Err(ApiError::field(name, message))
            }
        }
    }

    pub(crate) fn number(
        &mut self,
        name: &'static str,
        range: RangeInclusive<f64>,
    ) -> Result<Option<f64>, ApiError> {
        let Some(value) = self.take(name) else { return Ok(None) };
        match value.as_f64() {
            Some(value) if range.contains(&value) => Ok(Some(value)),
            Some(_) | None => {
                let (least, most) = range.into_inner();
                let message = format!("`{name}` must be a number from {least} to {most}");
                Err(ApiError::field(name, message))
            }
        }
    }

    /// Refuses a field unless its value asks for nothing.
    pub(crate) fn refuse_unless(
        &mut self,
        name: &'static str,
        is_harmless: impl FnOnce(&Value) -> bool,
    ) -> Result<(), ApiError> {
        match self.take(name) {
            Some(value) if !is_harmless(&value) => Err(ApiError::unsupported(name)),
            Some(_) | None => Ok(()),
        }
    }
}

/// Whether a name differs from another by a typing error or two. Short names must be closer: fields of other servers are
/// often alike.
fn is_misspelling(name: &str, known: &str) -> bool {
    const LONG: usize = 8;
    let errors_max = if known.len() < LONG { 1 } else { 2 };
    name.len().abs_diff(known.len()) <= errors_max
        && strsim::osa_distance(name, known) <= errors_max
}

/// Reads what has parts. An error names the part that is wrong, as in `tools[1].function.name`.
pub(crate) fn typed<'de, T: Deserialize<'de>>(
    name: &str,
    value: impl Deserializer<'de, Error = serde_json::Error>,
) -> Result<T, ApiError> {
    serde_path_to_error::deserialize(value).map_err(|error| {
        let place = match error.path().to_string() {
            path if path == "." => name.to_owned(),
            path if path.starts_with('[') => format!("{name}{path}"),
            path => format!("{name}.{path}"),
        };
        let message = format!("`{place}` is not what it should be: {}", error.inner());
        ApiError::field(place, message)
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_misspelt_field_is_an_error_that_names_both() {
        let unknown = |fields: Value| {
            let mut fields = Fields::parse(fields.to_string().as_bytes()).unwrap();
            for name in ["temperature", "max_tokens", "top_p", "stop"] {
                fields.take(name);
            }
            fields.unknown().map_err(|error| error.json()["error"]["message"].to_string())
        };
        for (wrong, right) in [
            ("temprature", "temperature"),
            ("Temperature", "temperature"),
            ("max_token", "max_tokens"),
            ("maxtokens", "max_tokens"),
            ("top-p", "top_p"),
            ("stpo", "stop"),
        ] {
            let message = unknown(json!({ wrong: 1 })).unwrap_err();
            assert!(message.contains(wrong) && message.contains(right), "{message}");
        }
        let names = json!({ "store": true, "verbosity": "low", "temperature": 1, "stpo": null });
        assert_eq!(unknown(names).unwrap(), ["store", "verbosity"]);
    }

    #[test]
    fn an_error_names_the_part_that_is_wrong() {
        #[derive(Debug, serde::Deserialize)]
        struct Part {
            #[expect(dead_code, reason = "it is only read")]
            size: Option<u32>,
        }
        let place = |value: Value| {
            let error = typed::<Vec<Part>>("parts", value).unwrap_err();
            error.param().unwrap_or_default().to_owned()
        };
        assert_eq!(place(json!([{}, { "size": "large" }])), "parts[1].size");
        assert_eq!(place(json!([{}, 7])), "parts[1]");
        assert_eq!(place(json!({})), "parts");
        let flag = typed::<Part>("part", json!({ "size": true })).unwrap_err();
        assert_eq!(flag.param(), Some("part.size"));
    }
}
