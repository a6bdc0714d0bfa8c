//! A router: sends requests to the worker that holds the most of their prompts and is not too busy.

mod forward;
mod prompt;
mod worker;

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::{Request, State as Shared};
use axum::http::{Method, StatusCode, header};
use axum::middleware;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use futures_util::future::join_all;
use parking_lot::Mutex;
use serde_json::json;
use terrace_model::LoadError;
use terrace_routing::Balance;
use tokio::net::TcpListener;
use tokio::sync::{Semaphore, watch};
use tokio::task::JoinSet;
use tokio::time::Instant;

pub(crate) use self::worker::Worker;

use self::forward::{Asked, Workers, client, forward};
use self::prompt::Prompting;
use crate::auth::{self, Gate};
use crate::body;
use crate::config::{ConfigError, Limits, RouteSettings};
use crate::connections;
use crate::error::{ApiError, json_response};
#[cfg(feature = "models")]
use crate::hub::{self, HubError, Needed};
use crate::kv_events::extra_key;
use crate::metrics::{self, RouteMetrics};
use crate::parameters::Kind;
use crate::request_id;
use crate::server::check_host;

/// A router that has its address.
#[derive(Debug)]
pub struct RouterServer {
    listener: TcpListener,
    address: SocketAddr,
    state: Arc<RouteState>,
    topic: String,
    health_interval: Duration,
    patience: Duration,
}

/// Reason why a router cannot start.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RouteError {
    /// The settings cannot work.
    #[error(transparent)]
    Settings(#[from] ConfigError),
    /// The tokenizer of the workers' model cannot be read.
    #[error("cannot read the model's tokenizer: {0}")]
    Model(#[from] LoadError),
    /// The model is no folder, and cannot be had from the hub.
    #[cfg(feature = "models")]
    #[error(transparent)]
    Hub(#[from] HubError),
    /// Everyone who reaches the address could use the workers.
    #[error(
        "{0} can be reached by other machines and the router has no API keys, so anyone who reaches it could use \
         the workers: set keys with --api-key NAME=KEY, listen on 127.0.0.1, or allow it with --allow-anonymous"
    )]
    Anonymous(SocketAddr),
    /// The address cannot be had.
    #[error("cannot listen on {listen}: {error}; choose another address with --listen")]
    Address {
        /// The address.
        listen: String,
        /// Error of the operating system.
        error: io::Error,
    },
}

/// State that all requests share.
#[derive(Debug)]
pub(crate) struct RouteState {
    workers: Arc<[Arc<Worker>]>,
    balance: Mutex<Balance>,
    prompting: Arc<Prompting>,
    gate: Gate,
    client: Workers,
    limits: Limits,
    bodies: Arc<Semaphore>,
    parsers: Semaphore,
    metrics: RouteMetrics,
    /// Whether requests must name this machine in `Host`.
    local_names_only: bool,
    is_closing: AtomicBool,
}

impl RouterServer {
    /// Takes the address, and looks which workers are there.
    ///
    /// # Errors
    /// When the address cannot be had, or the settings cannot work.
    pub async fn bind(settings: &RouteSettings) -> Result<Self, RouteError> {
        settings.check()?;
        let cannot = |error| RouteError::Address { listen: settings.listen.clone(), error };
        let is_open = settings.keys.is_empty();
        if is_open && !settings.allow_anonymous {
            auth::check_local(&settings.listen).await.map_err(RouteError::Anonymous)?;
        }
        let listener = TcpListener::bind(&settings.listen).await.map_err(cannot)?;
        let address = listener.local_addr().map_err(cannot)?;
        let worker = |place: &_| Arc::new(Worker::new(Clone::clone(place), settings.blocks_max));
        let workers: Arc<[_]> = settings.workers.iter().map(worker).collect();
        let limits = settings.limits();
        let is_local = address.ip().is_loopback();
        let state = Arc::new(RouteState {
            balance: Mutex::new(Balance::new(
                workers.len(),
                settings.load_weight,
                settings.decode_weight,
            )),
            prompting: Arc::new(prompting(settings)?),
            gate: Gate::new(&settings.keys, settings.operator_key.as_ref()),
            client: client(),
            bodies: Arc::new(Semaphore::new(limits.bodies_max.as_u64() as usize)),
            limits,
            parsers: Semaphore::new(4),
            metrics: RouteMetrics::new(workers.clone()),
            workers,
            local_names_only: is_open && is_local,
            is_closing: AtomicBool::new(false),
        });
        let (topic, health_interval) = (settings.topic.clone(), settings.health_interval);
        join_all(state.workers.iter().map(|worker| state.look_at(worker, health_interval))).await;
        let patience = settings.shutdown_patience;
        Ok(Self { listener, address, state, topic, health_interval, patience })
    }

    /// The address, with the port that the system chose if none was asked for.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Each worker's address, and whether it answers.
    #[must_use]
    pub fn workers(&self) -> Vec<(String, bool)> {
        let workers = self.state.workers.iter();
        workers.map(|worker| (worker.place.url.clone(), worker.is_up())).collect()
    }

    /// Routes requests until `stop` is ready, and lets answers under way finish as far as patience goes; how many were
    /// cut short.
    pub async fn run(self, stop: impl Future<Output = ()>) -> usize {
        let (state, mut tasks) = (self.state, JoinSet::new());
        for worker in state.workers.iter() {
            tasks.spawn(worker.clone().follow(self.topic.clone()));
            let (state, worker) = (state.clone(), worker.clone());
            let interval = self.health_interval;
            tasks.spawn(async move {
                loop {
                    tokio::time::sleep(interval).await;
                    state.look_at(&worker, interval).await;
                }
            });
        }
        let (close, closed) = watch::channel(false);
        let limits = state.limits.clone();
        let serving =
            tokio::spawn(connections::serve(self.listener, router(state.clone()), limits, closed));
        stop.await;
        state.is_closing.store(true, Relaxed);
        let until = Instant::now() + self.patience;
        while state.alive() > 0 && Instant::now() < until {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        let cut_short = state.alive() as usize;
        close.send_replace(true);
        let _ = serving.await;
        cut_short
    }
}

impl RouteState {
    /// Asks a worker whether it is well.
    async fn look_at(&self, worker: &Worker, patience: Duration) {
        let uri = format!("{}/health", worker.place.url).parse().unwrap_or_default();
        let asked =
            tokio::time::timeout(patience.max(Duration::from_secs(1)), self.client.get(uri));
        let is_well = matches!(asked.await, Ok(Ok(response)) if response.status().is_success());
        worker.found(is_well);
    }

    fn alive(&self) -> u64 {
        let balance = self.balance.lock();
        (0..self.workers.len()).map(|worker| balance.alive(worker)).sum()
    }

    fn check_open(&self) -> Result<(), ApiError> {
        match self.is_closing.load(Relaxed) {
            true => Err(ApiError::shutting_down()),
            false => Ok(()),
        }
    }
}

/// Loads the tokenizer and the chat template of the workers' model.
fn prompting(settings: &RouteSettings) -> Result<Prompting, RouteError> {
    let model = settings.model.as_deref();
    #[cfg(feature = "models")]
    let folder = model.map(|model| hub::find_folder(model, Needed::Tokenizer, &mut |_, _| {}));
    #[cfg(feature = "models")]
    let folder = folder.transpose()?.map(|folder| folder.path);
    #[cfg(feature = "models")]
    let model = folder.as_deref();
    Ok(Prompting::of(model)?)
}

type AppState = Shared<Arc<RouteState>>;

fn router(state: Arc<RouteState>) -> Router {
    Router::new()
        .route("/health", get(health))
        .route("/metrics", get(metrics_page))
        .route("/v1/completions", post(complete))
        .route("/v1/chat/completions", post(chat))
        .route("/v1/{*path}", get(by_load).post(by_load))
        .route("/tokenize", post(by_load))
        .route("/detokenize", post(by_load))
        .fallback(async |request: Request| ApiError::no_such_path(request.uri().path()))
        .layer(middleware::from_fn_with_state(state.local_names_only, check_host))
        .layer(middleware::from_fn(request_id::name))
        .with_state(state)
}

async fn complete(Shared(state): AppState, request: Request) -> Response {
    route(&state, request, Some(Kind::Completion)).await.unwrap_or_else(ApiError::into_response)
}

async fn chat(Shared(state): AppState, request: Request) -> Response {
    route(&state, request, Some(Kind::Chat)).await.unwrap_or_else(ApiError::into_response)
}

/// Routes a request that no cached prefix can help to the least loaded worker.
async fn by_load(Shared(state): AppState, request: Request) -> Response {
    route(&state, request, None).await.unwrap_or_else(ApiError::into_response)
}

async fn route(
    state: &Arc<RouteState>,
    request: Request<Body>,
    kind: Option<Kind>,
) -> Result<Response, ApiError> {
    state.check_open()?;
    let (parts, body) = request.into_parts();
    let caller = state.gate.client(&parts.headers)?;
    // What was read counts until the answer is on its way.
    let mut received = match parts.method == Method::GET {
        true => None,
        false => Some(body::receive(&parts.headers, body, &state.limits, &state.bodies).await?),
    };
    let body = received.as_mut().map(|received| Bytes::from(std::mem::take(&mut received.bytes)));
    let body = body.unwrap_or_default();
    let prompt = match kind {
        Some(kind) => {
            let (prompting, bytes) = (state.prompting.clone(), body.clone());
            body::apart(&state.parsers, body.len(), move || prompting.read(kind, &bytes)).await
        }
        None => None,
    };
    let prompt = prompt.flatten();
    let cache_salt = prompt.as_ref().map_or("", |prompt| &prompt.cache_salt);
    let salt = extra_key(&caller.salt(cache_salt)).unwrap_or_default();
    let (method, uri, headers) = (parts.method, parts.uri, parts.headers);
    Ok(forward(state, Asked { method, uri, headers, body, prompt, salt }).await)
}

async fn health(Shared(state): AppState) -> Result<Response, ApiError> {
    state.check_open()?;
    match state.workers.iter().any(|worker| worker.is_up()) {
        true => Ok(json_response(StatusCode::OK, &json!({ "status": "ok" }))),
        false => Err(ApiError::no_worker()),
    }
}

async fn metrics_page(Shared(state): AppState, request: Request) -> Result<Response, ApiError> {
    state.gate.operator(request.headers())?;
    let page = state.metrics.render();
    Ok(([(header::CONTENT_TYPE, metrics::CONTENT_TYPE)], page).into_response())
}
