//! Who may ask.

use std::collections::BTreeSet;
use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use super::ConfigError;

/// What somebody sends as `Authorization: Bearer`. It does not appear in logs.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Secret(pub(crate) String);

impl From<&str> for Secret {
    fn from(text: &str) -> Self {
        Self(text.to_owned())
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a secret")
    }
}

/// A client's key. Its name is a tenant's: tenants share no page of the cache.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Key {
    /// The tenant.
    pub name: String,
    /// What the client sends.
    pub key: Secret,
    /// Answers that the tenant may have under way; an equal share of limits.requests_max if not given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub requests_max: Option<u32>,
    /// The lowest priority that the tenant may ask for; any if not given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub priority_min: Option<i32>,
    /// The highest; 0, which is everybody's, if not given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub priority_max: Option<i32>,
}

impl FromStr for Key {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.split_once('=') {
            Some((name, key)) if !name.is_empty() && !key.is_empty() => Ok(Self {
                name: name.to_owned(),
                key: key.into(),
                requests_max: None,
                priority_min: None,
                priority_max: None,
            }),
            Some(_) | None => Err("write it as NAME=KEY".to_owned()),
        }
    }
}

/// Whether these keys tell everybody apart, and ask for nothing that cannot be.
pub(super) fn check(keys: &[Key], operator_key: Option<&Secret>) -> Result<(), ConfigError> {
    let mut names = BTreeSet::new();
    let mut secrets: BTreeSet<_> = operator_key.into_iter().collect();
    for Key { name, key, requests_max, priority_min, priority_max } in keys {
        if *requests_max == Some(0) {
            return Err(ConfigError::new("keys", name, "use at least 1 for its requests_max"));
        }
        if priority_min.unwrap_or(i32::MIN) > priority_max.unwrap_or(0) {
            let advice =
                "lower its priority_min, or raise its priority_max, which is 0 if not given";
            return Err(ConfigError::new("keys", name, advice));
        }
        if name.is_empty() || !names.insert(name) {
            return Err(ConfigError::new("keys", name, "give every key a name of its own"));
        }
        if !secrets.insert(key) {
            return Err(ConfigError::new("keys", name, "give everybody another key"));
        }
    }
    if operator_key.is_some_and(|secret| secret.0.is_empty()) {
        return Err(ConfigError::new("operator_key", "\"\"", "a key must not be empty"));
    }
    if let Some(Key { name, .. }) = keys.iter().find(|key| key.key.0.is_empty()) {
        return Err(ConfigError::new("keys", name, "a key must not be empty"));
    }
    Ok(())
}
