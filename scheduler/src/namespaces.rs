//! Where the keys of requests begin.

use terrace_cache::{Namespace, PageKey};

use crate::config::Config;

/// The namespace of a model, and of whoever asks it with an adapter or a salt.
#[derive(Debug)]
pub(crate) struct Namespaces {
    model: Namespace,
    /// The digest of most requests, which have neither.
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
