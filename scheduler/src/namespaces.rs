//! Namespaces of requests.

use terrace_cache::{Namespace, PageKey};

use crate::config::Config;

/// Namespaces of a model, with and without adapter and salt.
#[derive(Debug)]
pub(crate) struct Namespaces {
    model: Namespace,
    /// Digest without adapter and salt.
    plain: PageKey,
}

impl Namespaces {
    pub(crate) fn new(config: &Config) -> Self {
        let model = config.namespace();
        Self { plain: model.digest(), model }
    }

    pub(crate) fn digest(&self, adapter: &str, salt: &str) -> PageKey {
        match (adapter, salt) {
            ("", "") => self.plain,
            (adapter, salt) => self.model.digest_with(adapter, salt),
        }
    }
}
