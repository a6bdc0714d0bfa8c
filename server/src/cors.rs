//! Which pages of other sites may read responses.

use std::time::Duration;

use axum::http::{HeaderName, HeaderValue, Method};
use tower_http::cors::{AllowHeaders, AllowOrigin, Any, CorsLayer};

/// How long a browser may remember what is allowed.
const MAX_AGE: Duration = Duration::from_secs(600);

/// Returns the layer for a list of origins, or nothing if the list is empty.
///
/// # Errors
/// The first origin that is none.
pub(crate) fn layer(origins: &str) -> Result<Option<CorsLayer>, String> {
    let names: Vec<_> = names(origins).collect();
    let allowed = match &names[..] {
        [] => return Ok(None),
        ["*"] => AllowOrigin::from(Any),
        names => {
            let origins = names.iter().map(|name| origin(name));
            AllowOrigin::list(origins.collect::<Result<Vec<_>, _>>()?)
        }
    };
    let layer = CorsLayer::new()
        .allow_origin(allowed)
        .allow_methods([Method::GET, Method::POST])
        // Clients name more headers than anyone could list. Keys are in a header, never in a cookie.
        .allow_headers(AllowHeaders::mirror_request())
        .expose_headers([HeaderName::from_static("x-request-id")])
        .max_age(MAX_AGE);
    Ok(Some(layer))
}

fn names(origins: &str) -> impl Iterator<Item = &str> {
    origins.split(',').map(str::trim).filter(|origin| !origin.is_empty())
}

/// Reads an origin as browsers write it: a scheme, a host and perhaps a port.
fn origin(text: &str) -> Result<HeaderValue, String> {
    let host = text.strip_prefix("http://").or_else(|| text.strip_prefix("https://"));
    let is_host = |host: &str| {
        let is_part = |byte: u8| byte.is_ascii_alphanumeric() || b"-.:[]".contains(&byte);
        !host.is_empty() && host.bytes().all(is_part)
    };
    let value = HeaderValue::from_str(text).ok().filter(|_| host.is_some_and(is_host));
    value.ok_or_else(|| text.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn origins_have_a_scheme_and_a_host_and_nothing_else() {
        assert!(layer("").unwrap().is_none() && layer(" , ").unwrap().is_none());
        for right in ["*", "https://example.com", "http://localhost:3000, https://[::1]:80"] {
            assert!(layer(right).unwrap().is_some(), "{right}");
        }
        for wrong in
            ["example.com", "https://", "https://example.com/", "https://a b", "*,https://a"]
        {
            assert!(layer(wrong).is_err(), "{wrong}");
        }
    }
}
