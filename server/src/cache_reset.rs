//! Cache reset for operators.

use std::sync::Arc;

use axum::http::{HeaderMap, StatusCode, header};
use axum::response::Response;
use serde::Deserialize;
use serde_json::json;

use crate::error::{ApiError, json_response};
use crate::state::State;

/// Parameters of a reset.
#[derive(Debug, Deserialize)]
pub(crate) struct Wish {
    /// Whether the host is cleared too.
    #[serde(default = "yes")]
    host: bool,
    /// Whether L3 is cleared too, which is refused.
    #[serde(default)]
    l3: bool,
}

fn yes() -> bool {
    true
}

/// Forgets unused pages on the device and, unless `host` is false, on the host. Running requests are not affected.
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
    let freed = match wish.host {
        true => state.engine.clear_cache().await,
        false => state.engine.clear_device().await,
    };
    let freed = freed.ok_or_else(ApiError::shutting_down)?;
    let (device_pages, host_pages) = (freed.device_pages, freed.host_pages);
    tracing::info!("cache reset: dropped {device_pages} pages on device and {host_pages} on host");
    let told = json!({ "device_pages": device_pages, "host_pages": host_pages, "l3": "kept" });
    Ok(json_response(StatusCode::OK, &told))
}

/// Refuses a request that the web page of another site made a browser send. A request without a body needs no
/// permission from the browser.
pub(crate) fn check_origin(headers: &HeaderMap) -> Result<(), ApiError> {
    let Some(origin) = headers.get(header::ORIGIN) else { return Ok(()) };
    let named = origin.to_str().ok().and_then(|origin| origin.split_once("://"));
    let host = headers.get(header::HOST).and_then(|host| host.to_str().ok());
    match (named, host) {
        (Some((_, named)), Some(host)) if named.eq_ignore_ascii_case(host) => Ok(()),
        (Some(_) | None, _) => Err(ApiError::foreign_origin()),
    }
}
