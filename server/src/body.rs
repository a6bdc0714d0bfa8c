//! Reads the bodies of requests, within limits of size, time and memory.

use std::sync::Arc;

use axum::body::{Body, HttpBody};
use axum::http::{HeaderMap, header};
use futures_util::StreamExt;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::config::Limits;
use crate::error::ApiError;
use crate::state::State;

/// A body, and the memory that it takes until this is dropped.
#[derive(Debug)]
pub(crate) struct Received {
    pub(crate) bytes: Vec<u8>,
    _memory: Option<OwnedSemaphorePermit>,
}

/// Reads a body of JSON.
///
/// # Errors
/// When it is something else, too long, or too slow, or there is no memory for it.
pub(crate) async fn receive(
    headers: &HeaderMap,
    body: Body,
    limits: &Limits,
    memory: &Arc<Semaphore>,
) -> Result<Received, ApiError> {
    // Another site's page can send a browser here with any text, but not with this header.
    let content_type = headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok());
    let media_type = content_type.and_then(|value| value.split(';').next()).unwrap_or_default();
    if !media_type.trim().eq_ignore_ascii_case("application/json") {
        return Err(ApiError::not_json());
    }
    if body.size_hint().lower() > limits.body_max.as_u64() {
        return Err(ApiError::body_too_large(limits.body_max.as_u64()));
    }
    let reading = tokio::time::timeout(limits.body_timeout, read(body, limits, memory));
    reading.await.unwrap_or_else(|_| Err(ApiError::body_too_slow()))
}

/// Makes something of a body. Long ones take a while, and are kept away from the threads that serve
/// everybody else.
///
/// # Errors
/// What is wrong with it.
pub(crate) async fn understand<T: Send + 'static>(
    state: &Arc<State>,
    received: Received,
    make: impl FnOnce(&State, &[u8]) -> Result<T, ApiError> + Send + 'static,
) -> Result<T, ApiError> {
    let (bytes, shared) = (received.bytes.len(), state.clone());
    let made = apart(&state.parsers, bytes, move || make(&shared, &received.bytes)).await;
    made.unwrap_or_else(|| Err(ApiError::invalid("the request could not be parsed")))
}

/// Does what takes a while with so many bytes, and only few may do at a time; nothing if that panics.
pub(crate) async fn apart<T: Send + 'static>(
    few: &Semaphore,
    bytes: usize,
    work: impl FnOnce() -> T + Send + 'static,
) -> Option<T> {
    const QUICK_BYTES: usize = 16 << 10;
    if bytes <= QUICK_BYTES {
        return Some(work());
    }
    let permit = few.acquire().await;
    let done = tokio::task::spawn_blocking(work).await;
    drop(permit);
    done.ok()
}

async fn read(body: Body, limits: &Limits, memory: &Arc<Semaphore>) -> Result<Received, ApiError> {
    let body_max = limits.body_max.as_u64();
    let mut received = Received { bytes: Vec::new(), _memory: None };
    let mut body = body.into_data_stream();
    while let Some(data) = body.next().await {
        let data = data.map_err(|_| ApiError::invalid("the request body ended early"))?;
        if received.bytes.len() as u64 + data.len() as u64 > body_max {
            return Err(ApiError::body_too_large(body_max));
        }
        let room = memory.clone().try_acquire_many_owned(data.len() as u32);
        let room = room.map_err(|_| {
            ApiError::busy("too many large requests are being read: try again later")
        })?;
        match &mut received._memory {
            Some(memory) => memory.merge(room),
            None => received._memory = Some(room),
        }
        received.bytes.extend_from_slice(&data);
    }
    Ok(received)
}
