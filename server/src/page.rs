//! The page that shows what the server does, and its data.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::http::{HeaderValue, header};
use axum::response::sse::Event;
use axum::response::{IntoResponse, Response, Sse};
use axum::routing::get;
use futures_util::stream;
use tokio::time::MissedTickBehavior;

use crate::error::ApiError;
use crate::state::State;

/// How often viewers are told.
const PERIOD: Duration = Duration::from_millis(250);
/// Nodes of the cache's tree that are shown at the most.
const NODES_MAX: usize = 400;

/// The files of the page, by their paths.
macro_rules! files {
    ($($path:literal),* $(,)?) => {
        &[$(($path, include_str!(concat!("../web/", $path)))),*]
    };
}
const FILES: &[(&str, &str)] = files![
    "index.html",
    "icon.svg",
    "page.css",
    "page.js",
    "page/ask.js",
    "page/dom.js",
    "page/example.js",
    "page/figures.js",
    "page/format.js",
    "page/keys.js",
    "page/live.js",
    "page/rates.js",
    "page/requests.js",
    "page/runs.js",
    "page/sources.js",
    "page/stream.js",
    "page/tiers.js",
    "page/timeline.js",
    "page/tree.js",
    "page/tree_layout.js",
    "page/trouble.js",
];

/// The page and the files that it is made of, as routes.
pub(crate) fn routes<S: Clone + Send + Sync + 'static>() -> Router<S> {
    FILES.iter().fold(Router::new(), |router, &(path, text)| {
        let route = match path {
            "index.html" => "/".to_owned(),
            _ => format!("/{path}"),
        };
        router.route(&route, get(async move || file(content_type(path), text)))
    })
}

fn content_type(path: &str) -> &'static str {
    match path.rsplit_once('.') {
        Some((_, "js")) => "text/javascript; charset=utf-8",
        Some((_, "css")) => "text/css; charset=utf-8",
        Some((_, "svg")) => "image/svg+xml",
        Some(_) | None => "text/html; charset=utf-8",
    }
}

/// A file of the page. What prompts say is shown there, so no script but its own may run.
fn file(content_type: &'static str, text: &'static str) -> Response {
    const POLICY: &str = "default-src 'self'; img-src 'self' data:; frame-ancestors 'none'";
    let headers = [
        (header::CONTENT_TYPE, HeaderValue::from_static(content_type)),
        (header::CONTENT_SECURITY_POLICY, HeaderValue::from_static(POLICY)),
        (header::REFERRER_POLICY, HeaderValue::from_static("no-referrer")),
        (header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff")),
        (header::CACHE_CONTROL, HeaderValue::from_static("no-cache")),
    ];
    (headers, text).into_response()
}

/// Tells a viewer how things stand until it goes away or the engine ends.
///
/// # Errors
/// When there are viewers enough.
pub(crate) fn events(state: Arc<State>) -> Result<Response, ApiError> {
    let permit =
        state.viewers.clone().try_acquire_owned().map_err(|_| {
            ApiError::busy("too many are looking at the page: close it somewhere else")
        })?;
    let mut ticks = tokio::time::interval(PERIOD);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let views = stream::unfold((state, ticks, permit), |(state, mut ticks, permit)| async {
        ticks.tick().await;
        let salts = state.salts.lock().all();
        let view = state.engine.view(salts, NODES_MAX).await?;
        let json = serde_json::to_string(&view).ok()?;
        Some((Ok::<_, Infallible>(Event::default().data(json)), (state, ticks, permit)))
    });
    Ok(Sse::new(views).into_response())
}
