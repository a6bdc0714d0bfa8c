//! API keys, and the callers that they identify.

use std::net::SocketAddr;

use axum::http::{HeaderMap, header};
use blake3::Hash;

use crate::config::{Key, Secret};
use crate::error::ApiError;

/// Caller of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Caller {
    /// Anybody: there are no keys.
    Anyone,
    /// Whoever has this tenant's key.
    Tenant(String),
    /// Whoever has the operator's key.
    Operator,
}

impl Caller {
    /// The salt of this caller's requests. Salts of different callers are different, whatever the
    /// requests say: a tenant's begins with the length of its name, the operator's with a letter, and
    /// that of anyone, if it is not empty, with a colon.
    pub(crate) fn salt(&self, cache_salt: &str) -> String {
        match self {
            Self::Anyone if cache_salt.is_empty() => String::new(),
            Self::Anyone => format!(":{cache_salt}"),
            Self::Tenant(name) => format!("{}:{name}{cache_salt}", name.len()),
            Self::Operator => format!("operator:{cache_salt}"),
        }
    }
}

/// Knows the keys, as hashes.
#[derive(Debug)]
pub(crate) struct Gate {
    tenants: Vec<(String, Hash)>,
    operator: Option<Hash>,
}

impl Gate {
    pub(crate) fn new(keys: &[Key], operator_key: Option<&Secret>) -> Self {
        let hash = |key: &Secret| blake3::hash(key.0.as_bytes());
        Self {
            tenants: keys.iter().map(|key| (key.name.clone(), hash(&key.key))).collect(),
            operator: operator_key.map(hash),
        }
    }

    /// Identifies the caller of a request.
    ///
    /// # Errors
    /// When nobody may ask without a key, and this is none.
    pub(crate) fn client(&self, headers: &HeaderMap) -> Result<Caller, ApiError> {
        if self.tenants.is_empty() {
            // An operator without tenants has its own salt all the same, if it says who it is.
            let known = bearer(headers).and_then(|key| self.find(key));
            return Ok(known.unwrap_or(Caller::Anyone));
        }
        let key = bearer(headers).ok_or_else(ApiError::key_missing)?;
        self.find(key).ok_or_else(ApiError::key_wrong)
    }

    /// Whether this is somebody who may see what everybody does.
    ///
    /// # Errors
    /// When only the operator may, and this is somebody else.
    pub(crate) fn operator(&self, headers: &HeaderMap) -> Result<(), ApiError> {
        if self.tenants.is_empty() && self.operator.is_none() {
            return Ok(());
        }
        let key = bearer(headers).ok_or_else(ApiError::key_missing)?;
        match self.find(key) {
            Some(Caller::Operator) => Ok(()),
            Some(Caller::Tenant(_) | Caller::Anyone) => Err(ApiError::operator_only()),
            None => Err(ApiError::key_wrong()),
        }
    }

    /// Whose key it is. How long that takes does not depend on the key: hashes are compared in
    /// constant time, and always all of them.
    fn find(&self, key: &str) -> Option<Caller> {
        let hash = blake3::hash(key.as_bytes());
        let mut found = None;
        for (name, known) in &self.tenants {
            if *known == hash {
                found = Some(Caller::Tenant(name.clone()));
            }
        }
        if self.operator.is_some_and(|known| known == hash) {
            found = Some(Caller::Operator);
        }
        found
    }
}

/// Checks that only this machine can reach an address. An address that cannot be resolved passes: it cannot be
/// listened on either.
///
/// # Errors
/// The address that other machines can reach.
pub(crate) async fn check_local(listen: &str) -> Result<(), SocketAddr> {
    let mut addresses = tokio::net::lookup_host(listen).await.into_iter().flatten();
    addresses.find(|address| !address.ip().is_loopback()).map_or(Ok(()), Err)
}

fn bearer(headers: &HeaderMap) -> Option<&str> {
    let value = headers.get(header::AUTHORIZATION)?.to_str().ok()?;
    let (scheme, key) = value.split_once(' ')?;
    scheme.eq_ignore_ascii_case("bearer").then(|| key.trim())
}

#[cfg(test)]
mod tests {
    use axum::http::StatusCode;

    use super::*;

    fn gate(keys: &[&str], operator: Option<&str>) -> Gate {
        let keys: Vec<Key> = keys.iter().map(|key| key.parse().unwrap()).collect();
        Gate::new(&keys, operator.map(Secret::from).as_ref())
    }

    fn says(authorization: &str) -> HeaderMap {
        let mut headers = HeaderMap::new();
        if !authorization.is_empty() {
            headers.insert(header::AUTHORIZATION, authorization.parse().unwrap());
        }
        headers
    }

    #[test]
    fn a_key_names_its_tenant() {
        let gate = gate(&["alice=a-key", "bob=b-key"], Some("o-key"));
        let client = |text| gate.client(&says(text)).map_err(|error| error.status());
        assert_eq!(client("Bearer a-key"), Ok(Caller::Tenant("alice".to_owned())));
        assert_eq!(client("bearer b-key"), Ok(Caller::Tenant("bob".to_owned())));
        assert_eq!(client("Bearer o-key"), Ok(Caller::Operator));
        for wrong in ["", "Bearer", "Bearer a-ke", "Bearer a-key2", "Basic a-key", "a-key"] {
            assert_eq!(client(wrong), Err(StatusCode::UNAUTHORIZED), "{wrong}");
        }
    }

    #[test]
    fn only_the_operator_sees_everybody() {
        let gate = gate(&["alice=a-key"], Some("o-key"));
        let status = |text| gate.operator(&says(text)).map_err(|e| e.status());
        assert_eq!(status("Bearer o-key"), Ok(()));
        assert_eq!(status("Bearer a-key"), Err(StatusCode::FORBIDDEN));
        assert_eq!(status(""), Err(StatusCode::UNAUTHORIZED));
        assert_eq!(status("Bearer x"), Err(StatusCode::UNAUTHORIZED));
    }

    #[test]
    fn without_keys_everything_is_open() {
        let gate = gate(&[], None);
        assert_eq!(gate.client(&says("")).unwrap(), Caller::Anyone);
        assert_eq!(gate.client(&says("Bearer whatever")).unwrap(), Caller::Anyone);
        assert!(gate.operator(&says("")).is_ok());
    }

    #[test]
    fn no_two_callers_have_a_salt_in_common() {
        let tenant = |name: &str| Caller::Tenant(name.to_owned());
        assert_ne!(tenant("a").salt("bc"), tenant("ab").salt("c"));
        assert_ne!(tenant("1").salt(":x"), tenant("1:").salt("x"));
        assert_ne!(tenant("operator:").salt(""), Caller::Operator.salt(""));
        // KV outlives a server on disk, and the next one may have other keys.
        assert_ne!(Caller::Anyone.salt("operator:x"), Caller::Operator.salt("x"));
        assert_ne!(Caller::Anyone.salt("1:ax"), tenant("a").salt("x"));
        assert_ne!(Caller::Anyone.salt("x"), Caller::Anyone.salt(""));
    }
}
