//! The web page of the server, and the data that it shows.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::http::{HeaderValue, header};
use axum::response::sse::Event;
use axum::response::{IntoResponse, Response, Sse};
use axum::routing::get;
use futures_util::stream;
use serde::Serialize;
use terrace_engine::View;
use tokio::time::MissedTickBehavior;

use crate::error::ApiError;
use crate::gpu::{GpuFigures, GpuWatch};
use crate::history::Columns;
use crate::metrics::LatestTimes;
use crate::state::State;

/// Time between two views.
const PERIOD: Duration = Duration::from_millis(250);
/// Number of nodes of the cache's tree in a view at most.
const NODES_MAX: usize = 400;

const HTML: &str = "text/html; charset=utf-8";
const SCRIPT: &str = "text/javascript; charset=utf-8";
const STYLE: &str = "text/css; charset=utf-8";
const PICTURE: &str = "image/svg+xml";

/// Path, content type and text of each file of the page.
const FILES: &[(&str, &str, &str)] = &[
    ("/", HTML, include_str!("../web/index.html")),
    ("/page.js", SCRIPT, include_str!("../web/page.js")),
    ("/page.css", STYLE, include_str!("../web/page.css")),
    ("/icon.svg", PICTURE, include_str!("../web/icon.svg")),
    ("/page/ask.js", SCRIPT, include_str!("../web/page/ask.js")),
    ("/page/book.js", SCRIPT, include_str!("../web/page/book.js")),
    ("/page/dom.js", SCRIPT, include_str!("../web/page/dom.js")),
    ("/page/figures.js", SCRIPT, include_str!("../web/page/figures.js")),
    ("/page/forget.js", SCRIPT, include_str!("../web/page/forget.js")),
    ("/page/format.js", SCRIPT, include_str!("../web/page/format.js")),
    ("/page/gpu.js", SCRIPT, include_str!("../web/page/gpu.js")),
    ("/page/guide.js", SCRIPT, include_str!("../web/page/guide.js")),
    ("/page/history.js", SCRIPT, include_str!("../web/page/history.js")),
    ("/page/kept.js", SCRIPT, include_str!("../web/page/kept.js")),
    ("/page/keys.js", SCRIPT, include_str!("../web/page/keys.js")),
    ("/page/live.js", SCRIPT, include_str!("../web/page/live.js")),
    ("/page/model_limits.js", SCRIPT, include_str!("../web/page/model_limits.js")),
    ("/page/planting.js", SCRIPT, include_str!("../web/page/planting.js")),
    ("/page/rates.js", SCRIPT, include_str!("../web/page/rates.js")),
    ("/page/requests.js", SCRIPT, include_str!("../web/page/requests.js")),
    ("/page/run_log.js", SCRIPT, include_str!("../web/page/run_log.js")),
    ("/page/runs.js", SCRIPT, include_str!("../web/page/runs.js")),
    ("/page/sources.js", SCRIPT, include_str!("../web/page/sources.js")),
    ("/page/steps.js", SCRIPT, include_str!("../web/page/steps.js")),
    ("/page/stream.js", SCRIPT, include_str!("../web/page/stream.js")),
    ("/page/tiers.js", SCRIPT, include_str!("../web/page/tiers.js")),
    ("/page/timeline.js", SCRIPT, include_str!("../web/page/timeline.js")),
    ("/page/tree.js", SCRIPT, include_str!("../web/page/tree.js")),
    ("/page/tree_layout.js", SCRIPT, include_str!("../web/page/tree_layout.js")),
    ("/page/trouble.js", SCRIPT, include_str!("../web/page/trouble.js")),
];

/// Adds routes for the files of the page.
pub(crate) fn add_files<S: Clone + Send + Sync + 'static>(router: Router<S>) -> Router<S> {
    FILES.iter().fold(router, |router, &(path, content_type, text)| {
        router.route(path, get(move || async move { file(content_type, text) }))
    })
}

/// A file of the page. The page shows texts of prompts, so only its own scripts may run.
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

/// A view as the page gets it.
#[derive(Serialize)]
struct Picture<'a> {
    #[serde(flatten)]
    view: View,
    /// Whether the tree is complete, not only its first nodes.
    tree_is_whole: bool,
    latency: LatestTimes,
    history: Columns,
    /// Differs after a restart of the server.
    instance: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    gpu: Option<GpuFigures>,
}

/// Sends views until the viewer disconnects or the engine ends.
///
/// # Errors
/// When there are too many viewers.
pub(crate) fn events(state: Arc<State>) -> Result<Response, ApiError> {
    let permit = state
        .viewers
        .clone()
        .try_acquire_owned()
        .map_err(|_| ApiError::busy("too many viewers of this page: close it elsewhere"))?;
    let mut ticks = tokio::time::interval(PERIOD);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let views = stream::unfold((state, ticks, permit), |(state, mut ticks, permit)| async {
        ticks.tick().await;
        let salts = state.salts.lock().all();
        let view = state.engine.view(salts, NODES_MAX).await?;
        let gpu = state.gpu.as_ref().and_then(GpuWatch::figures);
        let tree_is_whole = view.tree.len() < NODES_MAX;
        let latency = state.metrics.latency().latest();
        let history = state.history.columns();
        let instance = &state.instance;
        let picture = Picture { view, tree_is_whole, latency, history, instance, gpu };
        let json = serde_json::to_string(&picture).ok()?;
        Some((Ok::<_, Infallible>(Event::default().data(json)), (state, ticks, permit)))
    });
    Ok(Sse::new(views).into_response())
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    #[test]
    fn every_file_of_the_page_is_served() {
        let mut left = vec![Path::new(env!("CARGO_MANIFEST_DIR")).join("web")];
        let mut found = 0;
        while let Some(path) = left.pop() {
            if path.is_dir() {
                let entries = std::fs::read_dir(&path).unwrap();
                left.extend(entries.map(|entry| entry.unwrap().path()));
                continue;
            }
            let text = std::fs::read_to_string(&path).unwrap();
            let is_served = FILES.iter().any(|(_, _, served)| *served == text);
            assert!(is_served, "{} is not in the list of files", path.display());
            found += 1;
        }
        assert_eq!(found, FILES.len());
    }
}
