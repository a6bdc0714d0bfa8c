//! Sends a request on to a worker, and its answer back as it comes.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::{Body, Bytes, HttpBody};
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode, Uri, header};
use axum::response::{IntoResponse, Response};
use hyper::Request;
use hyper::body::{Frame, Incoming, SizeHint};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::{TokioExecutor, TokioTimer};
use terrace_routing::{PromptBlocks, Route};

use super::RouteState;
use super::prompt::Prompt;
use crate::error::ApiError;

/// How long a worker may take to accept a connection.
const CONNECT_PATIENCE: Duration = Duration::from_secs(3);
/// Shorter than servers keep connections that nobody uses.
const IDLE_MAX: Duration = Duration::from_secs(30);

/// What goes to workers.
pub(super) type Workers = Client<HttpConnector, Body>;

pub(super) fn client() -> Workers {
    let mut connector = HttpConnector::new();
    connector.set_connect_timeout(Some(CONNECT_PATIENCE));
    connector.set_nodelay(true);
    Client::builder(TokioExecutor::new())
        .pool_timer(TokioTimer::new())
        .pool_idle_timeout(IDLE_MAX)
        .build(connector)
}

/// A request as it is sent on.
pub(super) struct Asked {
    pub(super) method: Method,
    pub(super) uri: Uri,
    pub(super) headers: HeaderMap,
    pub(super) body: Bytes,
    /// What it is about, if that is known, and whose it is.
    pub(super) prompt: Option<Prompt>,
    pub(super) salt: String,
}

/// Sends a request to the best worker, and to the next if that one gives no answer.
pub(super) async fn forward(state: &Arc<RouteState>, mut asked: Asked) -> Response {
    for name in NOT_FORWARDED {
        asked.headers.remove(name);
    }
    let tokens = asked.prompt.take().unwrap_or_default().tokens;
    // Of what is not known, its length says the most.
    let length = if tokens.is_empty() { asked.body.len() as u32 / 4 } else { tokens.len() as u32 };
    let mut prompt = PromptBlocks::new(&tokens, &asked.salt);
    let mut is_tried = vec![false; state.workers.len()];
    let mut refusal = None;
    while let Some((sent, cached)) = send(state, &mut prompt, length, &is_tried) {
        let place = sent.worker();
        is_tried[place] = true;
        let worker = &state.workers[place];
        let request = request(&worker.place.url, &asked);
        match state.client.request(request).await {
            Ok(response) if response.status() == StatusCode::SERVICE_UNAVAILABLE => {
                // It is ending, or has waited too long for room: another may do better.
                refusal = Some(back(response, sent, &worker.place.url, cached));
            }
            Ok(response) => return back(response, sent, &worker.place.url, cached),
            Err(error) => {
                worker.counts.failures.fetch_add(1, Relaxed);
                worker.found(false);
                tracing::debug!("worker {} does not answer: {error}", worker.place.url);
            }
        }
    }
    refusal.unwrap_or_else(|| ApiError::no_worker().into_response())
}

/// Chooses a worker among those that were not tried, and counts the request for it.
fn send(
    state: &Arc<RouteState>,
    prompt: &mut PromptBlocks<'_>,
    length: u32,
    is_tried: &[bool],
) -> Option<(Sent, u32)> {
    let known = state.workers.iter().zip(is_tried).map(|(worker, is_tried)| {
        (worker.is_up() && !is_tried).then(|| worker.cached_tokens(prompt))
    });
    let cached: Vec<_> = known.collect();
    let mut balance = state.balance.lock();
    let chosen = balance.choose(length, cached.iter().copied())?;
    let cached = cached[chosen].unwrap_or_default();
    let route = balance.send(chosen, length, cached);
    drop(balance);
    let counts = &state.workers[chosen].counts;
    counts.requests.fetch_add(1, Relaxed);
    counts.prompt_tokens.fetch_add(prompt.tokens().len() as u64, Relaxed);
    counts.cached_tokens.fetch_add(u64::from(cached), Relaxed);
    Some((Sent { state: state.clone(), route: Some(route) }, cached))
}

/// What belongs to one connection, or is said anew.
const NOT_FORWARDED: [HeaderName; 9] = [
    header::HOST,
    header::CONNECTION,
    header::CONTENT_LENGTH,
    header::TRANSFER_ENCODING,
    header::UPGRADE,
    header::TE,
    header::TRAILER,
    header::EXPECT,
    HeaderName::from_static("keep-alive"),
];

fn request(url: &str, asked: &Asked) -> Request<Body> {
    let path = asked.uri.path_and_query().map_or("/", |path| path.as_str());
    let mut request = Request::new(Body::from(asked.body.clone()));
    *request.method_mut() = asked.method.clone();
    *request.headers_mut() = asked.headers.clone();
    // Both parts were read as what they are.
    *request.uri_mut() = format!("{url}{path}").parse().unwrap_or_default();
    request
}

/// Says where an answer comes from, for whoever wonders.
fn back(response: Response<Incoming>, sent: Sent, url: &str, cached: u32) -> Response {
    let (mut parts, body) = response.into_parts();
    for name in NOT_FORWARDED {
        parts.headers.remove(name);
    }
    if let Ok(url) = HeaderValue::from_str(url) {
        parts.headers.insert("x-terrace-worker", url);
    }
    parts.headers.insert("x-terrace-cached-tokens", cached.into());
    Response::from_parts(parts, Body::new(Tracked { body, sent }))
}

/// A request that is under way at a worker until this is dropped.
#[derive(Debug)]
pub(super) struct Sent {
    state: Arc<RouteState>,
    route: Option<Route>,
}

impl Sent {
    fn worker(&self) -> usize {
        self.route.as_ref().map_or(0, Route::worker)
    }

    fn started(&mut self) {
        if let Some(route) = &mut self.route {
            self.state.balance.lock().started(route);
        }
    }
}

impl Drop for Sent {
    fn drop(&mut self) {
        if let Some(route) = self.route.take() {
            self.state.balance.lock().ended(route);
        }
    }
}

/// An answer on its way back: its first part is its first token, where it is streamed.
#[derive(Debug)]
struct Tracked {
    body: Incoming,
    sent: Sent,
}

impl HttpBody for Tracked {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        let frame = Pin::new(&mut self.body).poll_frame(context);
        if frame.is_ready() {
            self.sent.started();
        }
        frame
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
