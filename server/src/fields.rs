//! The fields of a request, read one by one, so that an error can name the one that is wrong.

use std::ops::RangeInclusive;

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
