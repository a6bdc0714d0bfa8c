//! Names for requests, so that those who ask and those who read logs speak of the same one.

use std::time::Instant;

use axum::extract::Request;
use axum::http::{HeaderMap, HeaderName, HeaderValue};
use axum::middleware::Next;
use axum::response::Response;
use tracing::Instrument;

use crate::parameters::random;

const HEADER: HeaderName = HeaderName::from_static("x-request-id");
/// What those who log and those who search can bear.
const ID_BYTES_MAX: usize = 128;

/// Names a request: as it says itself if that is a name, else anew. The response and all that is
/// logged for the request have the name.
pub(crate) async fn name(request: Request, next: Next) -> Response {
    let began = Instant::now();
    let id = given(request.headers()).unwrap_or_else(made);
    // Whatever is logged at all is to have the name.
    let span = tracing::error_span!("request", id = id.to_str().unwrap_or_default());
    let (method, path) = (request.method().clone(), request.uri().path().to_owned());
    let mut response = next.run(request).instrument(span.clone()).await;
    let (status, took) = (response.status().as_u16(), began.elapsed());
    span.in_scope(|| tracing::info!("{method} {path}: {status} after {took:?}"));
    response.headers_mut().insert(HEADER, id);
    response
}

fn given(headers: &HeaderMap) -> Option<HeaderValue> {
    let value = headers.get(HEADER)?;
    let is_plain = |byte: &u8| byte.is_ascii_alphanumeric() || b"-_.:/+=@".contains(byte);
    let is_name =
        (1..=ID_BYTES_MAX).contains(&value.len()) && value.as_bytes().iter().all(is_plain);
    is_name.then(|| value.clone())
}

fn made() -> HeaderValue {
    let name = format!("req-{:016x}", random());
    HeaderValue::from_str(&name).unwrap_or(HeaderValue::from_static("req"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_plain_names_are_taken_over() {
        let taken = |value: &str| {
            let mut headers = HeaderMap::new();
            headers.insert(HEADER, HeaderValue::from_bytes(value.as_bytes()).unwrap());
            given(&headers).is_some()
        };
        assert!(taken("4f2c-A.b_c:1") && taken(&"x".repeat(128)));
        assert!(!taken("") && !taken("a b") && !taken("ä") && !taken(&"x".repeat(129)));
        assert!(!taken("a\"b") && !taken("a\tb"));
        assert_ne!(made(), made());
    }
}
