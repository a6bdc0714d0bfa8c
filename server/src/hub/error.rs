//! Why a model of the hub cannot be had.

use std::io;
use std::path::{Path, PathBuf};

/// Why a model of the hub cannot be had.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HubError {
    /// The name is neither a folder nor a model of the hub.
    #[error(
        "there is no folder {0:?}, and it does not name a model of the Hugging Face Hub either: give a folder that \
         exists, or a name like org/name or org/name@revision"
    )]
    Name(String),
    /// No environment variable says where the cache is.
    #[error("no folder for downloaded models: set HF_HUB_CACHE, HF_HOME, XDG_CACHE_HOME or HOME")]
    NoCacheFolder,
    /// The hub must not be asked, and the cache does not hold the model.
    #[error(
        "HF_HUB_OFFLINE is set and {model} is not in the cache at {}: unset it to download the model, or give a folder",
        cache.display()
    )]
    NotInCache {
        /// The model.
        model: String,
        /// The folder of the cache.
        cache: PathBuf,
    },
    /// The hub does not answer.
    #[error("{endpoint} cannot be reached: {error}; check the network and HF_ENDPOINT")]
    Unreachable {
        /// Address of the hub.
        endpoint: String,
        /// Why.
        error: String,
    },
    /// The model does not exist, or the token does not allow it.
    #[error(
        "{endpoint} has no model {model}, or it needs a token (status {status}): check the name and the revision, and \
         set HF_TOKEN for gated and private models"
    )]
    Refused {
        /// Address of the hub.
        endpoint: String,
        /// The model.
        model: String,
        /// The status of the response.
        status: u16,
    },
    /// The hub answers something unexpected.
    #[error("cannot download {file} of {model}: {problem}")]
    Download {
        /// The model.
        model: String,
        /// The file.
        file: String,
        /// What is wrong, and what to do.
        problem: String,
    },
    /// The model has no weights in a format that is supported.
    #[error(
        "{0} has no safetensors weights: use a model that has model.safetensors or model.safetensors.index.json"
    )]
    NoWeights(String),
    /// A file of the cache cannot be read or written.
    #[error("cannot use {}: {error}; check the folder, or set HF_HUB_CACHE to another", path.display())]
    Cache {
        /// The file.
        path: PathBuf,
        /// What the system says.
        error: String,
    },
}

impl HubError {
    pub(super) fn cache(path: &Path, error: &io::Error) -> Self {
        Self::Cache { path: path.to_owned(), error: error.to_string() }
    }
}
