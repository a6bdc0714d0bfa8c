//! The fields of a request, read one by one, so that an error can name the one that is wrong.

use std::ops::RangeInclusive;

use serde::de::{Deserialize, Deserializer};
use serde_json::{Map, Value};

use crate::error::ApiError;

/// The fields of a JSON object. `null` is as good as absent.
#[derive(Clone, Debug)]
pub(crate) struct Fields(Map<String, Value>);

impl Fields {
    /// # Errors
    /// When the text is no JSON, or JSON that is no object.
    pub(crate) fn parse(json: &[u8]) -> Result<Self, ApiError> {
        match serde_json::from_slice(json) {
            Ok(Value::Object(fields)) => Ok(Self(fields)),
            Ok(_) => Err(ApiError::invalid("the request must be a JSON object")),
            Err(error) => Err(ApiError::invalid(format!("the request is not valid JSON: {error}"))),
        }
    }

    /// Takes a field out.
    pub(crate) fn take(&mut self, name: &str) -> Option<Value> {
        self.0.remove(name).filter(|value| !value.is_null())
    }

    pub(crate) fn text(&mut self, name: &str) -> Result<Option<String>, ApiError> {
        match self.take(name) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(_) => Err(ApiError::field(name, format!("`{name}` must be a string"))),
        }
    }

    /// A field that has parts, the default if it is absent.
    pub(crate) fn typed<T: for<'de> Deserialize<'de> + Default>(
        &mut self,
        name: &str,
    ) -> Result<T, ApiError> {
        self.take(name).map_or_else(|| Ok(T::default()), |value| typed(name, value))
    }

    pub(crate) fn flag(&mut self, name: &str) -> Result<bool, ApiError> {
        self.flag_or(name, false)
    }

    pub(crate) fn flag_or(&mut self, name: &str, default: bool) -> Result<bool, ApiError> {
        match self.take(name) {
            None => Ok(default),
            Some(Value::Bool(flag)) => Ok(flag),
            Some(_) => Err(ApiError::field(name, format!("`{name}` must be true or false"))),
        }
    }

    pub(crate) fn integer(
        &mut self,
        name: &str,
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
        name: &str,
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
        name: &str,
        is_harmless: impl FnOnce(&Value) -> bool,
    ) -> Result<(), ApiError> {
        match self.take(name) {
            Some(value) if !is_harmless(&value) => Err(ApiError::unsupported(name)),
            Some(_) | None => Ok(()),
        }
    }
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
