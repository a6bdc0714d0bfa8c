//! Models of the Hugging Face Hub, downloaded from a server on this machine that speaks the hub's interface.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::time::Duration;

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::{Request, State};
use axum::http::{Method, StatusCode, header};
use axum::response::{IntoResponse, Response};
use futures_util::StreamExt;
use futures_util::stream;
use parking_lot::Mutex;
use serde_json::json;
use terrace_server::{Downloaded, Hub, HubError, HubModel, Needed};
use tokio::net::TcpListener;
use tokio::task::JoinHandle;

const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";
const TOKEN: &str = "hf_secret";

fn weights() -> Vec<u8> {
    (0..300_000_u32).map(|at| (at % 251) as u8).collect()
}

/// A hub with the model `org/tiny`.
struct FakeHub {
    address: SocketAddr,
    state: Arc<HubState>,
    serving: JoinHandle<()>,
}

#[derive(Default)]
struct HubState {
    files: BTreeMap<&'static str, Vec<u8>>,
    /// The hash of the weights, as the hub says it.
    etag: String,
    port: Mutex<u16>,
    /// Downloads of weights that are cut off after half of the bytes.
    cuts: AtomicUsize,
    requests: Mutex<Vec<String>>,
}

impl FakeHub {
    async fn new(more: &[(&'static str, &str)]) -> Self {
        let texts = [("config.json", "{}"), ("tokenizer.json", "{\"a\":1}"), ("README.md", "no")];
        let texts = texts.iter().chain(more).map(|(name, text)| (*name, text.as_bytes().to_vec()));
        let files =
            texts.chain([("model.safetensors", weights()), ("pytorch_model.bin", vec![7; 9])]);
        Self::with(files.collect(), &sha256(&weights())).await
    }

    async fn with(files: BTreeMap<&'static str, Vec<u8>>, etag: &str) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let state = HubState { files, etag: etag.to_owned(), ..HubState::default() };
        *state.port.lock() = address.port();
        let state = Arc::new(state);
        let router = Router::new().fallback(answer).with_state(state.clone());
        let serving = tokio::spawn(async { axum::serve(listener, router).await.unwrap() });
        Self { address, state, serving }
    }

    fn hub(&self, cache: &Path) -> Hub {
        Hub {
            endpoint: format!("http://{}", self.address),
            cache: cache.to_owned(),
            token: Some(TOKEN.to_owned()),
            is_offline: false,
        }
    }

    /// The requests since the last call, in order.
    fn requests(&self) -> Vec<String> {
        std::mem::take(&mut *self.state.requests.lock())
    }
}

/// Answers like the hub: descriptions and small files itself, and the bytes of weights from another host.
async fn answer(State(state): State<Arc<HubState>>, request: Request) -> Response {
    let path = request.uri().path().to_owned();
    let text =
        |name| request.headers().get(name).and_then(|value| value.to_str().ok()).unwrap_or("");
    let (range, key) = (text(header::RANGE), text(header::AUTHORIZATION));
    let entry = format!("{} {path} {range}", request.method());
    state.requests.lock().push(entry.trim_end().to_owned());
    if let Some(name) = path.strip_prefix("/other-host/") {
        assert_eq!(key, "", "the token is for the hub only");
        return bytes_of(&state, name, range);
    }
    if key != format!("Bearer {TOKEN}") {
        return StatusCode::UNAUTHORIZED.into_response();
    }
    if let Some(revision) = path.strip_prefix("/api/models/org/tiny/revision/") {
        if revision != "main" && revision != "v1" {
            return StatusCode::NOT_FOUND.into_response();
        }
        let siblings: Vec<_> =
            state.files.keys().map(|name| json!({ "rfilename": name })).collect();
        return json!({ "sha": COMMIT, "siblings": siblings }).to_string().into_response();
    }
    let Some(name) = path.strip_prefix(&format!("/org/tiny/resolve/{COMMIT}/")) else {
        return StatusCode::NOT_FOUND.into_response();
    };
    let Some(bytes) = state.files.get(name) else { return StatusCode::NOT_FOUND.into_response() };
    let commit = ("x-repo-commit", COMMIT.to_owned());
    if name.ends_with(".safetensors") {
        let location = format!("http://localhost:{}/other-host/{name}", *state.port.lock());
        let headers = [
            commit,
            ("location", location),
            ("x-linked-etag", format!("\"{}\"", state.etag)),
            ("x-linked-size", bytes.len().to_string()),
            ("etag", "\"of-the-redirect\"".to_owned()),
        ];
        return (StatusCode::FOUND, headers).into_response();
    }
    let headers = [commit, ("etag", format!("W/\"small-{}\"", name.replace(['.', '_'], "-")))];
    let body = if request.method() == Method::HEAD { Vec::new() } else { bytes.clone() };
    let length = [("content-length", bytes.len().to_string())];
    (headers, length, body).into_response()
}

fn bytes_of(state: &HubState, name: &str, range: &str) -> Response {
    let bytes = state.files[name].clone();
    let from = range.strip_prefix("bytes=").and_then(|range| range.strip_suffix('-'));
    let from: usize = from.map_or(0, |from| from.parse().unwrap());
    let status = if from > 0 { StatusCode::PARTIAL_CONTENT } else { StatusCode::OK };
    let rest = bytes[from..].to_vec();
    let length = [("content-length", rest.len().to_string())];
    let is_cut = state.cuts.fetch_update(SeqCst, SeqCst, |cuts| cuts.checked_sub(1)).is_ok();
    if !is_cut {
        return (status, length, rest).into_response();
    }
    let half = Bytes::from(rest[..rest.len() / 2].to_vec());
    let parts = stream::iter([Some(half), None]).then(|part| async {
        match part {
            Some(bytes) => Ok(bytes),
            None => {
                // What was sent before is on its way by then.
                tokio::time::sleep(Duration::from_millis(100)).await;
                Err(io::Error::other("cut off"))
            }
        }
    });
    (status, length, Body::from_stream(parts)).into_response()
}

fn sha256(bytes: &[u8]) -> String {
    use sha2::{Digest, Sha256};
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Downloads a model away from the threads that answer.
async fn download(
    hub: Hub,
    name: &str,
    needed: Needed,
) -> Result<(Vec<String>, Vec<Downloaded>), HubError> {
    let model: HubModel = name.parse()?;
    let work = move || {
        let mut told = Vec::new();
        let folder = hub.folder(&model, needed, &mut |downloaded| told.push(downloaded))?;
        let files = fs::read_dir(folder).unwrap().map(|file| file.unwrap());
        let mut names: Vec<_> = files
            .map(|file| {
                assert!(fs::metadata(file.path()).is_ok(), "{file:?} leads nowhere");
                file.file_name().into_string().unwrap()
            })
            .collect();
        names.sort();
        Ok((names, told))
    };
    tokio::task::spawn_blocking(work).await.unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_model_is_downloaded_once_into_the_cache_that_others_use() {
    let (server, cache) = (FakeHub::new(&[]).await, tempfile::tempdir().unwrap());
    let hub = server.hub(cache.path());
    let (names, told) = download(hub.clone(), "org/tiny", Needed::Model).await.unwrap();
    assert_eq!(names, ["config.json", "model.safetensors", "tokenizer.json"]);
    let last = told.last().unwrap();
    assert_eq!((last.bytes, last.total_bytes), (300_009, 300_009));
    assert!(told.is_sorted_by_key(|told| told.bytes), "{told:?}");
    let folder = cache.path().join("models--org--tiny");
    assert_eq!(fs::read_to_string(folder.join("refs/main")).unwrap(), COMMIT);
    let blob = fs::read(folder.join("blobs").join(sha256(&weights()))).unwrap();
    assert_eq!(blob, weights());
    let link = folder.join("snapshots").join(COMMIT).join("config.json");
    assert_eq!(fs::read_link(link).unwrap(), Path::new("../../blobs/small-config-json"));
    assert_eq!(fs::read_dir(folder.join("blobs")).unwrap().count(), 3);

    server.requests();
    assert_eq!(download(hub, "org/tiny", Needed::Model).await.unwrap().0, names);
    assert_eq!(server.requests(), ["GET /api/models/org/tiny/revision/main"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_tokenizer_is_had_without_weights() {
    let (server, cache) = (FakeHub::new(&[]).await, tempfile::tempdir().unwrap());
    let (names, _) =
        download(server.hub(cache.path()), "org/tiny@v1", Needed::Tokenizer).await.unwrap();
    assert_eq!(names, ["config.json", "tokenizer.json"]);
    assert!(cache.path().join("models--org--tiny/refs/v1").exists());
}

#[tokio::test(flavor = "multi_thread")]
async fn an_interrupted_download_continues() {
    let (server, cache) = (FakeHub::new(&[]).await, tempfile::tempdir().unwrap());
    server.state.cuts.store(2, SeqCst);
    download(server.hub(cache.path()), "org/tiny", Needed::Model).await.unwrap();
    let requests = server.requests();
    let parts: Vec<_> =
        requests.iter().filter(|request| request.contains("/other-host/")).collect();
    assert_eq!(parts.len(), 3, "{requests:?}");
    assert!(parts[1].contains("bytes=") && parts[2].contains("bytes="), "{parts:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn weights_in_shards_are_those_that_the_index_names() {
    let index =
        json!({ "weight_map": { "a": "one.safetensors", "b": "one.safetensors" } }).to_string();
    let files = BTreeMap::from([
        ("config.json", b"{}".to_vec()),
        ("model.safetensors.index.json", index.into_bytes()),
        ("one.safetensors", weights()),
        ("other.safetensors", vec![1]),
    ]);
    let (server, cache) =
        (FakeHub::with(files, &sha256(&weights())).await, tempfile::tempdir().unwrap());
    let (names, _) = download(server.hub(cache.path()), "org/tiny", Needed::Model).await.unwrap();
    assert_eq!(names, ["config.json", "model.safetensors.index.json", "one.safetensors"]);

    let index = json!({ "weight_map": { "a": "../../../x.safetensors" } }).to_string();
    let files = BTreeMap::from([("model.safetensors.index.json", index.into_bytes())]);
    let (server, cache) = (FakeHub::with(files, "").await, tempfile::tempdir().unwrap());
    let error = download(server.hub(cache.path()), "org/tiny", Needed::Model).await.unwrap_err();
    assert!(error.to_string().contains("outside of the model"), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_cache_serves_without_the_hub() {
    let (server, cache) = (FakeHub::new(&[]).await, tempfile::tempdir().unwrap());
    let hub = server.hub(cache.path());
    let offline = Hub { is_offline: true, ..hub.clone() };
    let error = download(offline.clone(), "org/tiny", Needed::Model).await.unwrap_err();
    assert!(error.to_string().contains("HF_HUB_OFFLINE"), "{error}");
    let (names, _) = download(hub.clone(), "org/tiny", Needed::Model).await.unwrap();
    server.requests();
    assert_eq!(download(offline, "org/tiny", Needed::Model).await.unwrap().0, names);
    assert_eq!(server.requests(), [""; 0]);
    server.serving.abort();
    let _ = server.serving.await;
    assert_eq!(download(hub.clone(), "org/tiny", Needed::Model).await.unwrap().0, names);
    let error = download(hub, "org/other", Needed::Model).await.unwrap_err();
    assert!(matches!(error, HubError::Unreachable { .. }), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_error_says_what_to_do() {
    let (server, cache) = (FakeHub::new(&[]).await, tempfile::tempdir().unwrap());
    let hub = server.hub(cache.path());
    let stranger = Hub { token: None, ..hub.clone() };
    let error = download(stranger, "org/tiny", Needed::Model).await.unwrap_err().to_string();
    assert!(error.contains("HF_TOKEN") && error.contains("401"), "{error}");
    for missing in ["org/none", "org/tiny@v2"] {
        let error = download(hub.clone(), missing, Needed::Model).await.unwrap_err().to_string();
        assert!(error.contains(missing) && error.contains("404"), "{error}");
    }
    let files = BTreeMap::from([("config.json", b"{}".to_vec()), ("pytorch_model.bin", vec![1])]);
    let server = FakeHub::with(files, "").await;
    let error = download(server.hub(cache.path()), "org/tiny", Needed::Model).await.unwrap_err();
    assert!(matches!(error, HubError::NoWeights(_)), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn bytes_with_another_hash_are_not_used() {
    let files = BTreeMap::from([("config.json", b"{}".to_vec()), ("model.safetensors", weights())]);
    let other = sha256(b"other");
    let (server, cache) = (FakeHub::with(files, &other).await, tempfile::tempdir().unwrap());
    let error = download(server.hub(cache.path()), "org/tiny", Needed::Model).await.unwrap_err();
    assert!(error.to_string().contains("hash"), "{error}");
    let blobs = fs::read_dir(cache.path().join("models--org--tiny/blobs")).unwrap();
    let blobs: Vec<_> = blobs.map(|blob| blob.unwrap().file_name()).collect();
    assert_eq!(blobs, ["small-config-json"]);
}
