//! The description of the API, in the OpenAPI format.

use serde_json::Value;

/// The document, without the version of the program.
const DOCUMENT: &str = include_str!("openapi.json");

/// Returns the description of the API.
pub(crate) fn document() -> Value {
    let mut document: Value = serde_json::from_str(DOCUMENT).expect("a test reads the document");
    document["info"]["version"] = env!("CARGO_PKG_VERSION").into();
    document
}
