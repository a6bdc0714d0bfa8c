//! Forgetting what is cached, for operators.

use std::sync::Arc;

use axum::http::{HeaderMap, StatusCode, header};
use axum::response::Response;
use serde::Deserialize;
use serde_json::json;

use crate::error::{ApiError, json_response};
use crate::state::State;

/// What the address of a reset says.
#[derive(Debug, Deserialize)]
pub(crate) struct Wish {
    /// Whether L3 is to be emptied, too.
    #[serde(default)]
    l3: bool,
}

/// Forgets what device and host hold and nobody uses. Requests go on as they were.
pub(crate) async fn reset(
    state: Arc<State>,
    headers: &HeaderMap,
    wish: Wish,
) -> Result<Response, ApiError> {
    state.gate.operator(headers)?;
    state.check_open()?;
    check_origin(headers)?;
    if wish.l3 {
        let message = "this server does not clear L3, because other servers may share it: leave \
                       `l3` out, or start the server with another --l3";
        return Err(ApiError::field("l3", message));
    }
    let freed = state.engine.clear_cache().await.ok_or_else(ApiError::shutting_down)?;
    let (device_pages, host_pages) = (freed.device_pages, freed.host_pages);
    tracing::info!("cache reset: dropped {device_pages} pages on device and {host_pages} on host");
    let told = json!({ "device_pages": device_pages, "host_pages": host_pages, "l3": "kept" });
    Ok(json_response(StatusCode::OK, &told))
}

/// This request needs no body, so another site's page could have a browser send it.
pub(crate) fn check_origin(headers: &HeaderMap) -> Result<(), ApiError> {
    let Some(origin) = headers.get(header::ORIGIN) else { return Ok(()) };
    let named = origin.to_str().ok().and_then(|origin| origin.split_once("://"));
    let host = headers.get(header::HOST).and_then(|host| host.to_str().ok());
    match (named, host) {
        (Some((_, named)), Some(host)) if named.eq_ignore_ascii_case(host) => Ok(()),
        (Some(_) | None, _) => Err(ApiError::foreign_origin()),
    }
}
