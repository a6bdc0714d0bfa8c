//! The server: paths and who may have them, from its first connection to its end.

use std::future::Future;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::extract::rejection::{PathRejection, QueryRejection};
use axum::extract::{Path, Query, Request, State as Shared};
use axum::handler::Handler;
use axum::http::{HeaderMap, StatusCode, Uri, header};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::{MethodRouter, get, post};
use serde_json::json;
use terrace_engine::{Drained, Engine};
use tokio::net::TcpListener;
use tokio::sync::watch;
use tower_http::cors::CorsLayer;

use crate::auth;
use crate::cache_reset;
use crate::config::{Config, ConfigError};
use crate::connections;
use crate::error::{ApiError, json_response};
use crate::generate;
use crate::gpu::GpuWatch;
use crate::history;
use crate::kv_events::KvTeller;
use crate::metrics::{self, Moment};
use crate::openapi;
use crate::page;
use crate::parameters::Kind;
use crate::planting::{self, Planting};
use crate::request_id;
use crate::served_model::ServedModel;
use crate::state::State;
use crate::tokens;

/// A server that has its address.
#[derive(Debug)]
pub struct Server {
    listener: TcpListener,
    address: SocketAddr,
    state: State,
    kv_teller: Option<KvTeller>,
    patience: Duration,
    cors: Option<CorsLayer>,
}

/// A server that cannot have its address, or must not start.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BindError {
    /// The configuration cannot work.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// Everyone who reaches the address could use the server.
    #[error(
        "{0} can be reached by other machines and the server has no API keys, so anyone who reaches it could use \
         it: set keys with --api-key NAME=KEY, listen on 127.0.0.1, or allow it with --allow-anonymous"
    )]
    Anonymous(SocketAddr),
    /// The address is another server's.
    #[error("{listen} is in use by another program: stop it, or choose another port with --listen")]
    InUse {
        /// The address.
        listen: String,
    },
    /// Routers cannot be told what the cache holds.
    #[error(
        "cannot publish KV events at {0}; choose other addresses with --kv-events and \
         --kv-events-replay"
    )]
    KvEvents(io::Error),
    /// The address cannot be had.
    #[error(
        "cannot listen on {listen}: {error}; --listen needs an address of this machine and a port"
    )]
    Address {
        /// The address.
        listen: String,
        /// Error of the operating system.
        error: io::Error,
    },
}

impl Server {
    /// Takes the address. Clients can connect from now on, and are answered by [`Server::run`].
    ///
    /// # Errors
    /// When the address cannot be had or the configuration cannot work.
    pub async fn bind(
        config: &Config,
        engine: Engine,
        model: ServedModel,
    ) -> Result<Self, BindError> {
        config.check()?;
        let cannot = |error: io::Error| {
            let listen = config.listen.clone();
            match error.kind() {
                io::ErrorKind::AddrInUse => BindError::InUse { listen },
                _ => BindError::Address { listen, error },
            }
        };
        let is_open = config.keys.is_empty();
        if is_open && !config.allow_anonymous {
            auth::check_local(&config.listen).await.map_err(BindError::Anonymous)?;
        }
        let listener = TcpListener::bind(&config.listen).await.map_err(cannot)?;
        let address = listener.local_addr().map_err(cannot)?;
        let is_local = address.ip().is_loopback();
        if config.tenants_need_l3_secret() {
            tracing::warn!(
                "several keys share an L3 with other servers, and its page keys have no secret: give --l3-secret 32 \
                 random characters, the same on all servers that share the L3, or a tenant may compute prompts whose \
                 pages evict another's"
            );
        }
        let kv_teller = KvTeller::open(config).await.map_err(BindError::KvEvents)?;
        let mut state = State::new(config, engine, model, is_open && is_local);
        state.kv_events = kv_teller.as_ref().map(KvTeller::publisher);
        let cors = config.cors()?;
        let patience = config.shutdown_patience;
        Ok(Self { listener, address, state, kv_teller, patience, cors })
    }

    /// Tells of a GPU too, in metrics and on the page.
    #[must_use]
    pub fn with_gpu(mut self, gpu: Option<GpuWatch>) -> Self {
        self.state.gpu = gpu;
        self
    }

    /// Lets the operator plant wrong pages, if the engine's model does that.
    #[must_use]
    pub fn with_planting(mut self, planting: Option<Planting>) -> Self {
        self.state.planting = planting;
        self
    }

    /// The address, with the port that the system chose if none was asked for.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Returns the endpoints of KV events for display, if there are any.
    #[must_use]
    pub fn kv_events_place(&self) -> Option<String> {
        self.kv_teller.as_ref().map(KvTeller::place)
    }

    /// Answers requests until `stop` is ready, lets the answers under way finish as far as patience
    /// goes, and shuts the engine down. New requests are refused meanwhile. Ends before `stop` is ready
    /// only if the engine has died or its device has failed ([`Engine::failure`]).
    pub async fn run(self, stop: impl Future<Output = ()>) -> Drained {
        let (close, closed) = watch::channel(false);
        let state = Arc::new(self.state);
        let limits = state.limits.clone();
        let router = router(state.clone(), self.cors);
        let telling = self.kv_teller.map(|teller| tokio::spawn(teller.run(state.clone())));
        let serving = tokio::spawn(connections::serve(self.listener, router, limits, closed));
        tokio::select! {
            () = stop => {}
            () = state.engine.ended() => tracing::error!("the engine has stopped: no requests can \
                                                          be served"),
        }
        state.close();
        let drained = state.engine.shutdown(self.patience).await;
        // Routers hear the last of it only as long as the engine lives.
        telling.inspect(|telling| telling.abort());
        close.send_replace(true);
        if let Err(error) = serving.await {
            tracing::error!("serving connections failed: {error}");
        }
        drained
    }
}

fn router(state: Arc<State>, cors: Option<CorsLayer>) -> Router {
    let router = page::add_files(routes().router)
        .fallback(async |uri: Uri| ApiError::no_such_path(uri.path()))
        .method_not_allowed_fallback(async || ApiError::method_not_allowed())
        .layer(middleware::from_fn_with_state(state.local_names_only, check_host))
        .layer(middleware::from_fn_with_state(state.history.clone(), history::count))
        .layer(middleware::from_fn(request_id::name))
        .with_state(state);
    match cors {
        Some(cors) => router.layer(cors),
        None => router,
    }
}

/// The routes of the API. The files of the web page are not among them.
fn routes() -> Routes {
    Routes::default()
        .get("/ui/events", events)
        .get("/metrics", metrics_page)
        .get("/health", health)
        .get("/version", version)
        .get("/openapi.json", openapi_document)
        .get("/v1/models", models)
        .get("/v1/models/{*id}", model)
        .post("/v1/completions", complete)
        .post("/v1/chat/completions", chat)
        .post("/v1/responses", respond)
        .post("/tokenize", tokenize)
        .post("/detokenize", detokenize)
        .post("/reset_prefix_cache", reset_prefix_cache)
        .get("/plant_wrong_page", tell_planting)
        .post("/plant_wrong_page", plant_wrong_page)
}

/// Routes, and a list of them: a router does not tell what it has.
#[derive(Default)]
struct Routes {
    router: Router<Arc<State>>,
    /// Path and method of each.
    list: Vec<(&'static str, &'static str)>,
}

impl Routes {
    fn get<H: Handler<T, Arc<State>>, T: 'static>(self, path: &'static str, handler: H) -> Self {
        self.add("get", path, get(handler))
    }

    fn post<H: Handler<T, Arc<State>>, T: 'static>(self, path: &'static str, handler: H) -> Self {
        self.add("post", path, post(handler))
    }

    fn add(
        mut self,
        method: &'static str,
        path: &'static str,
        route: MethodRouter<Arc<State>>,
    ) -> Self {
        self.list.push((path, method));
        Self { router: self.router.route(path, route), ..self }
    }
}

type AppState = Shared<Arc<State>>;

async fn complete(Shared(state): AppState, headers: HeaderMap, body: Body) -> Response {
    generate::handle(Kind::Completion, state, headers, body).await.into_response()
}

async fn chat(Shared(state): AppState, headers: HeaderMap, body: Body) -> Response {
    generate::handle(Kind::Chat, state, headers, body).await.into_response()
}

async fn respond(Shared(state): AppState, headers: HeaderMap, body: Body) -> Response {
    generate::respond(state, headers, body).await.into_response()
}

async fn version() -> Response {
    json_response(StatusCode::OK, &json!({ "version": env!("CARGO_PKG_VERSION") }))
}

async fn openapi_document() -> Response {
    json_response(StatusCode::OK, &openapi::document())
}

async fn tokenize(Shared(state): AppState, headers: HeaderMap, body: Body) -> Response {
    tokens::tokenize(state, headers, body).await.into_response()
}

async fn detokenize(Shared(state): AppState, headers: HeaderMap, body: Body) -> Response {
    tokens::detokenize(state, headers, body).await.into_response()
}

async fn reset_prefix_cache(
    Shared(state): AppState,
    headers: HeaderMap,
    wish: Result<Query<cache_reset::Wish>, QueryRejection>,
) -> Result<Response, ApiError> {
    let Query(wish) = wish.map_err(|error| ApiError::invalid(error.body_text()))?;
    cache_reset::reset(state, &headers, wish).await
}

async fn tell_planting(Shared(state): AppState, headers: HeaderMap) -> Result<Response, ApiError> {
    planting::tell(&state, &headers)
}

async fn plant_wrong_page(
    Shared(state): AppState,
    headers: HeaderMap,
    wish: Result<Query<planting::Wish>, QueryRejection>,
) -> Result<Response, ApiError> {
    let Query(wish) = wish.map_err(|error| ApiError::invalid(error.body_text()))?;
    planting::plant(&state, &headers, wish)
}

async fn health(Shared(state): AppState) -> Result<Response, ApiError> {
    state.engine.check_device().await;
    state.check_open()?;
    Ok(json_response(StatusCode::OK, &json!({ "status": "ok" })))
}

async fn models(Shared(state): AppState, headers: HeaderMap) -> Result<Response, ApiError> {
    state.gate.client(&headers)?;
    let list = json!({ "object": "list", "data": [state.model.json()] });
    Ok(json_response(StatusCode::OK, &list))
}

async fn model(
    Shared(state): AppState,
    headers: HeaderMap,
    id: Result<Path<String>, PathRejection>,
) -> Result<Response, ApiError> {
    state.gate.client(&headers)?;
    let Path(id) = id.map_err(|error| ApiError::invalid(error.body_text()))?;
    state.model.check_name(&id)?;
    Ok(json_response(StatusCode::OK, &state.model.json()))
}

async fn metrics_page(Shared(state): AppState, headers: HeaderMap) -> Result<Response, ApiError> {
    state.gate.operator(&headers)?;
    let figures = state.engine.figures().await.ok_or_else(ApiError::shutting_down)?;
    let gpu = state.gpu.as_ref().and_then(GpuWatch::figures);
    let kv_events = state.kv_events.as_ref().map(|publisher| publisher.stats());
    let page = state.metrics.render(Moment { figures, gpu, kv_events });
    Ok(([(header::CONTENT_TYPE, metrics::CONTENT_TYPE)], page).into_response())
}

async fn events(Shared(state): AppState, headers: HeaderMap) -> Result<Response, ApiError> {
    state.gate.operator(&headers)?;
    state.check_open()?;
    page::events(state)
}

/// A page of another site can have its name lead to this machine and so have a browser ask here in its
/// name. A server without keys answers such names only where it is meant for more than this machine.
pub(crate) async fn check_host(
    Shared(local_names_only): Shared<bool>,
    request: Request,
    next: Next,
) -> Result<Response, ApiError> {
    match local_names_only && is_foreign(request.headers()) {
        true => Err(ApiError::foreign_host()),
        false => Ok(next.run(request).await),
    }
}

/// Returns whether the `Host` of a request is a name that another site may have pointed to this machine.
fn is_foreign(headers: &HeaderMap) -> bool {
    let host = headers.get(header::HOST);
    host.is_some_and(|host| !host.to_str().is_ok_and(is_local_name))
}

/// Whether a `Host` names this machine without asking anybody. An address does: names are what can
/// be led astray.
fn is_local_name(host: &str) -> bool {
    if host.parse::<SocketAddr>().is_ok() {
        return true;
    }
    let name = match host.rsplit_once(':') {
        Some((name, port)) if port.bytes().all(|digit| digit.is_ascii_digit()) => name,
        Some(_) | None => host,
    };
    let bare = name.trim_start_matches('[').trim_end_matches(']');
    name.eq_ignore_ascii_case("localhost") || bare.parse::<IpAddr>().is_ok()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use serde_json::Value;

    use super::*;

    #[test]
    fn the_document_describes_every_route_and_no_other() {
        let routes = routes().list.into_iter();
        let path = |path: &str| path.replace("{*", "{");
        let has: BTreeSet<_> = routes.map(|(at, method)| (path(at), method.to_owned())).collect();
        let document = openapi::document();
        assert_eq!(document["info"]["version"], env!("CARGO_PKG_VERSION"));
        let paths = document["paths"].as_object().unwrap();
        let methods = |(path, item): (&String, &Value)| -> Vec<_> {
            item.as_object().unwrap().keys().map(|method| (path.clone(), method.clone())).collect()
        };
        assert_eq!(paths.iter().flat_map(methods).collect::<BTreeSet<_>>(), has);
        let text = document.to_string();
        for reference in text.split("\"$ref\":\"#").skip(1) {
            let pointer = reference.split('"').next().unwrap();
            assert!(document.pointer(pointer).is_some(), "{pointer}");
        }
    }

    #[test]
    fn only_names_that_cannot_be_led_astray_are_local() {
        for host in
            ["localhost", "LocalHost:8000", "127.0.0.1:8000", "127.0.0.1", "[::1]:80", "[::1]"]
        {
            assert!(is_local_name(host), "{host}");
        }
        for host in ["example.com", "localhost.example.com:80", "127.0.0.1.example.com", ""] {
            assert!(!is_local_name(host), "{host}");
        }
    }
}
